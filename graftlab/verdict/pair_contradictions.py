"""Pairs of the plan that contradict each other or the taps' names, and so may be the mistake."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import torch

from graftlab.base.tags import own_tags
from graftlab.errors import LayoutError
from graftlab.layouts import Layout
from graftlab.matching.contradictions import odd_layouts, other_parts, other_roles
from graftlab.matching.proposal import Pair
from graftlab.plan.plan import GraftPlan
from graftlab.verdict.added import records

_MOST_SAID = 4


def contradicting_pairs(rows: pd.DataFrame, plan: GraftPlan) -> list[str]:
    """A sentence on contradictions among the plan's pairs that appear in these rows, or none.

    If a target swaps k and v in one layer, a match by value pairs its k with the baseline's v. Every graft is then
    right, and the code that reads the two is named instead of them.
    """
    pairs: dict[tuple[str, str], Pair] = {}
    rearranged: dict[str, dict[str, str]] = {}
    alone = set(rows.loc[(rows["side"] == "baseline") & (rows["status"] == "unmatched"), "name"]) if len(rows) else ()
    for row in records(rows):
        own = row["target_name"]
        if own is None or row["matched_by"] is None:
            continue
        for pairing in plan.pairings("target", own, own_tags(row["tags"])):
            if pairing.rule is not None and pairing.baseline_name and pairing.target_name:
                pair = Pair(pairing.baseline_name, pairing.target_name, pairing.rule.parsed, pairing.rule.whole)
                pairs[pair.baseline, pair.target] = pair
                if pair.layout.steps and _keeps_shape(pair.layout, row["shape"]):
                    rearranged.setdefault(pair.layout.text, {})[own] = pair.baseline
    roles = other_roles(list(pairs.values()))
    names = {name for name, _ in roles}
    said = [text for _, text in roles]
    said += [text for text in odd_layouts(list(pairs.values()), alone) if text.partition(" ")[0] not in names]
    said += other_parts(list(pairs.values()))
    said += [
        f"{own} is compared in the layout {text!r}, though both shapes are equal and no other tap needs one"
        for text, taps in rearranged.items()
        for own in list(taps)[:1]
        # An order that several taps have, such as tokens before the batch, is a convention. Two names of one quantity
        # count once.
        if len(set(taps.values())) == 1 and own not in names
    ]
    if not said:
        return []
    left = len(said) - _MOST_SAID
    more = f"; and {left} more" if left > 0 else ""
    return [
        f"The plan's pairs contradict their names or each other: {'; '.join(said[:_MOST_SAID])}{more}. They are "
        "compared as the plan says. If the target mixes them up, the code that reads them is named below instead."
    ]


def _keeps_shape(layout: Layout, shape: Sequence[int] | None) -> bool:
    """Whether a layout keeps a tensor's shape and only reorders its elements."""
    if shape is None or layout.leaves_out:
        return False
    try:
        return tuple(layout.local(torch.empty(tuple(shape), device="meta")).shape) == tuple(shape)
    except LayoutError:
        return False
