"""Pairs that were matched by value, but whose values no longer match, perhaps because the code has changed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import pandas as pd
import torch

from graftlab.base.tags import own_tags
from graftlab.base.tap_groups import kind_of
from graftlab.base.text import counted
from graftlab.matching.contradictions import other_roles
from graftlab.matching.names import similarity
from graftlab.matching.pair import BY_VALUE, Pair
from graftlab.matching.sketch import limit_for
from graftlab.plan.plan import GraftPlan
from graftlab.verdict.added import records


@dataclass(frozen=True)
class OutdatedPair:
    """A pair of the plan, with the relative L2 of its tensors at the match, and now, from equal inputs."""

    baseline: str
    target: str
    layout: str
    matched: float
    now: float
    present: str = ""
    """The baseline's tap, or the layout, that the target's tap matches now, if different, in words."""
    is_mended: bool = False
    """Whether the names show that the present values are the right ones."""


def outdated_pairs(grafted: pd.DataFrame, plan: GraftPlan, given: Collection[str]) -> list[OutdatedPair]:
    """The pairs by value that differ in rows of a run in which every tap was grafted, in their order.

    A match pairs by value taps that no mistake precedes, or with earlier taps grafted. So a difference larger than a
    match allows is new. ``given`` are the names of taps of the model's inputs, which no code explains.
    """
    found: dict[str, OutdatedPair] = {}
    for row in records(grafted):
        if row["matched_by"] not in BY_VALUE or row["name"] in given or pd.isna(row["match_rel"]):
            continue
        if own_tags(row["tags"]).get("updated") or kind_of(row["tags"]) in ("grad", "param_grad"):
            # An optimizer's step has changed the weight since the match, which has compared no gradients.
            continue
        dtype = getattr(torch, row["dtype"], torch.float32)
        # Without a pair of finite numbers nothing is known of the values.
        if row["rel_l2"] is None or not row["rel_l2"] > max(limit_for(dtype), 10 * row["match_rel"]):
            continue
        for pairing in plan.pairings("target", row["target_name"], own_tags(row["tags"])):
            if pairing.rule is not None and pairing.name == row["name"]:
                baseline, _, target = pairing.key.partition(" = ")
                own = (baseline, target, pairing.rule.layout, row["match_rel"], row["rel_l2"])
                found.setdefault(pairing.key, OutdatedPair(*own))
    return list(found.values())


def with_present_partners(
    outdated: Sequence[OutdatedPair], planned: Sequence[Pair], present: Sequence[Pair]
) -> list[OutdatedPair]:
    """The outdated pairs, with the tap and the layout that each target's tap matches now.

    ``planned`` are all pairs of the plan, ``present`` those that match by value now.
    """
    other_before, other_now = ({each.tap for each in other_roles(pairs)} for pairs in (planned, present))
    found = []
    for pair in outdated:
        now = [each for each in present if each.target == pair.target.removesuffix("#0")]
        old = pair.baseline.removesuffix("#0"), pair.layout
        if now and not any((each.baseline, each.layout.text) == old for each in now):
            same = now[0].baseline == old[0]
            values = (
                f"takes it in the layout {now[0].layout.text!r}" if same else f"has the values of {now[0].baseline}"
            )
            # A tap with another tap's values by mistake keeps its name, and after the fix has its own values again.
            fits = similarity(now[0].baseline, pair.target) > similarity(pair.baseline, pair.target) or (
                pair.target in other_before and pair.target not in other_now
            )
            pair = replace(pair, present=values, is_mended=fits)
        found.append(pair)
    return found


def learned_from_other_code(outdated: Sequence[OutdatedPair]) -> str:
    """A sentence on pairs whose target now has the values that fit its name; blank if there are none."""
    mended = [pair for pair in outdated if pair.is_mended]
    if not mended:
        return ""
    pair = mended[0]
    more = f" ({counted(len(mended) - 1, 'more pair')} like it)" if len(mended) > 1 else ""
    return (
        f"The plan's pairs are outdated: {pair.target} was paired with {pair.baseline}, and now "
        f"{pair.present}{more}. Match again: session.edit(pairs=session.match(...)), or %graft match. Nothing is "
        "judged until then, because a graft by such a pair is a mistake itself."
    )


def no_longer_equal(outdated: Sequence[OutdatedPair]) -> str:
    """A remark on outdated pairs, whose reason is either a mistake or a fixed target."""
    pair = next((pair for pair in outdated if pair.present), outdated[0])
    more = f" and {len(outdated) - 1} more" if len(outdated) > 1 else ""
    now = f"now {pair.present}" if pair.present else f"differs by {pair.now:.2g} now"
    return (
        f"{pair.target}{more} matched {pair.baseline} by value to {pair.matched:.1g} when the pairs were made, and "
        f"{now}. If the target's code has changed since, match again."
    )
