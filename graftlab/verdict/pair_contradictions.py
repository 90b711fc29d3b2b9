"""Pairs of the plan that contradict each other or the taps' names, and so may be the mistake."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import torch

from graftlab.base.tags import own_tags
from graftlab.base.tap_groups import is_data, kind_of
from graftlab.base.text import counted
from graftlab.diffs.rounding import roundoff
from graftlab.errors import LayoutError
from graftlab.layouts import Layout
from graftlab.matching.contradictions import in_groups, in_part, odd_layouts, other_parts, other_roles
from graftlab.matching.names import layers_of, module_of
from graftlab.matching.pair import Pair
from graftlab.plan.plan import GraftPlan
from graftlab.verdict.added import records

_MOST_SHOWN = 4
# The standard deviation of equal numbers, beside their mean.
_SPREAD = 1e-6


def contradicting_pairs(rows: pd.DataFrame, plan: GraftPlan) -> list[str]:
    """A list with a sentence on contradictions among the plan's pairs that appear in these rows, or an empty one.

    If a target swaps k and v in one layer, a match by value pairs its k with the baseline's v. Then every graft agrees,
    and the difference is named in the code that reads the two.
    """
    pairs = pairs_of(rows, plan)
    if not pairs:
        return []
    shapes = _shapes(rows)
    rearranged: dict[str, dict[str, str]] = {}
    for pair in pairs:
        if pair.layout.steps and _keeps_shape(pair.layout, shapes.get(pair.target)):
            rearranged.setdefault(pair.layout.text, {})[pair.target] = pair.baseline
    alone = set(rows.loc[(rows["side"] == "baseline") & (rows["status"] == "unmatched"), "name"]) if len(rows) else ()
    # A module that computes the baseline's values reads its weights, and what it computes before, in the right order,
    # unless it reads equal numbers, whose order shows nothing.
    in_order = {pair.target for pair in pairs if pair.layout.on_leading_dims() is not None}
    ordered = set() if _has_constants(rows) else in_order
    roles = other_roles(pairs)
    names = {each.tap for each in roles}
    # Weights that are all ones or zeros, as a new norm's are, never match by value, and no part is read before them.
    by_name = records(rows, "target_name", "matched_by", "tags")
    by_rule = {row["target_name"] for row in by_name if row["matched_by"] == "rule" and not is_data(row["tags"])}
    found = [
        *roles,
        *(each for each in odd_layouts(pairs, alone) if each.tap not in names),
        *other_parts(pairs),
        *in_groups(pairs, by_rule - {None}),
    ]
    contradictions = list(dict.fromkeys(each.text for each in found))
    contradictions += [
        f"{own} is compared in the layout {text!r}, though both shapes are equal and no other tap needs one"
        for text, taps in rearranged.items()
        for own in list(taps)[:1]
        # An order that several taps share, such as tokens before the batch, is a convention. Two names of one quantity
        # count once.
        if len(set(taps.values())) == 1 and own not in names and module_of(own) not in ordered - by_rule
    ]
    if not contradictions:
        return []
    left = len(contradictions) - _MOST_SHOWN
    more = f"; and {left} more" if left > 0 else ""
    return [
        f"The plan's pairs contradict their names or each other: {'; '.join(contradictions[:_MOST_SHOWN])}{more}. "
        "They are compared as the plan says. If the target mixes them up, a difference is named in the code that "
        "reads them."
    ]


def compared_in_part(rows: pd.DataFrame, plan: GraftPlan) -> list[str]:
    """Sentences on the target's taps that the plan pairs, and so compares, only in part; one for all layers."""
    groups: dict[str, list[str]] = {}
    for each in in_part(pairs_of(rows, plan), _shapes(rows)):
        groups.setdefault(layers_of(each.tap), []).append(each.text)
    return [
        texts[0] + (f", and so in {counted(len(texts) - 1, 'other layer')}" if len(texts) > 1 else "") + "."
        for texts in groups.values()
    ]


def pairs_of(rows: pd.DataFrame, plan: GraftPlan) -> list[Pair]:
    """The plan's pairs that appear in these rows, without those made just by name."""
    pairs: dict[tuple[str, str, str], Pair] = {}
    for row in records(rows, "target_name", "matched_by", "tags"):
        own = row["target_name"]
        if own is None or row["matched_by"] is None:
            continue
        for pairing in plan.pairings("target", own, own_tags(row["tags"])):
            rule = pairing.rule
            if rule is not None and pairing.baseline_name and pairing.target_name:
                pair = Pair(pairing.baseline_name, pairing.target_name, rule.parsed, rule.whole)
                pairs[pair.baseline, pair.target, rule.layout] = pair
    return list(pairs.values())


def _has_constants(rows: pd.DataFrame) -> bool:
    """Whether a value or an input of the baseline has nothing but equal numbers, such as ``torch.ones``."""
    equal = rows[(rows["numel"] > 1) & (rows["std_baseline"] <= _SPREAD * rows["mean_baseline"].abs())]
    # Whole numbers and masks are often equal.
    return any(
        roundoff(str(dtype)) > 0 and kind_of(tags) in (None, "input")
        for dtype, tags in zip(equal["dtype"], equal["tags"], strict=True)
    )


def _shapes(rows: pd.DataFrame) -> dict[str, Sequence[int]]:
    """The shapes of the target's taps, by their own names."""
    return {
        row["target_name"]: row["shape"]
        for row in records(rows, "target_name", "shape", "side")
        if row["target_name"] is not None and row["shape"] is not None and row["side"] == "target"
    }


def _keeps_shape(layout: Layout, shape: Sequence[int] | None) -> bool:
    """Whether a layout keeps a tensor's shape and only reorders its elements."""
    if shape is None or layout.leaves_out:
        return False
    try:
        return tuple(layout.local(torch.empty(tuple(shape), device="meta")).shape) == tuple(shape)
    except LayoutError:
        return False
