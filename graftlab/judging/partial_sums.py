"""Partial sums that no layout declares: each rank of the target has a summand of the value, as before an all-reduce.

Compared as copies they look wrong. A graft would put the whole on each rank, and then the code that adds them up looks
wrong too. A verdict leaves such taps out.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

import pandas as pd
import torch

from graftlab.base.tags import own_tags
from graftlab.base.tap_groups import filter_of, group_of, kind_of
from graftlab.base.tensor_bytes import real_parts
from graftlab.base.text import first_of
from graftlab.diffs.rounding import assumed_floor, roundoff
from graftlab.errors import SessionError
from graftlab.grafting.kept import OCCURRENCE
from graftlab.judging.verdict_runs import RunFilters, VerdictRuns
from graftlab.verdict.added import coarser_dtype, measured_rows

# Means may add up by chance, so in this many calls of a group the tensors themselves are added too.
_CALLS = 3
# The difference of means, as a multiple of the one expected of independent values. Right sums are far below it.
_OF_CHANCE = 0.05


GRADIENTS = ("grad", "param_grad")


def partial_sums(
    runs: VerdictRuns, grafted: pd.DataFrame, kinds: Collection[str | None] = (None,)
) -> dict[str, list[str]]:
    """The names of taps of these kinds, by group, at which the target's ranks have summands of the baseline's value.

    ``grafted`` are the rows of the run in which every tap was grafted. Makes a run if there may be such taps.
    """
    options = runs.session.options
    if options.baseline != 1 or options.target < 2:
        return {}
    calls = _calls(grafted, options.target, kinds)
    likely = {group: found for group, found in calls.items() if all(_means_add_up(call) for call in found)}
    keep = filter_of((call[0]["name"], kind_of(call[0]["tags"])) for found in likely.values() for call in found)
    if keep is None:
        return {}
    runs.both("whether ranks have partial sums", RunFilters(b2t="True", keep=keep))
    return {
        group: list(dict.fromkeys(call[0]["name"] for call in found))
        for group, found in likely.items()
        if all(_add_up(runs, call) for call in found[:_CALLS])
    }


Call = dict[int, Mapping[str, Any]]
"""The rows of one call of a tap, by rank."""


def _calls(grafted: pd.DataFrame, ranks: int, kinds: Collection[str | None]) -> dict[str, list[Call]]:
    """The calls of taps of these kinds that differ on all ranks of the target in one shape, by group."""
    found: dict[tuple[Any, ...], Call] = defaultdict(dict)
    for row in measured_rows(grafted):
        if kind_of(row["tags"]) in kinds and row["side"] == "target":
            tags = json.dumps(own_tags(row["tags"]), sort_keys=True, default=str)
            found[row["in_run"], row["name"], tags, row["occurrence"]][row["rank"]] = row
    groups: dict[str, list[Call]] = defaultdict(list)
    for call in found.values():
        groups[group_of(call[min(call)]["name"], call[min(call)]["tags"])].append(call)
    return {
        group: calls
        for group, calls in groups.items()
        if all(sorted(call) == [*range(ranks)] and all(map(_may_be_summand, call.values())) for call in calls)
    }


def _may_be_summand(row: Mapping[str, Any]) -> bool:
    dtype = coarser_dtype(row)
    differs = row["rel_l2"] is not None and row["rel_l2"] > 10 * assumed_floor([dtype])[0]
    return differs and roundoff(dtype) > 0 and row["aligned_by"] is None and not row["nonfinite_differ"]


def _means_add_up(call: Call) -> bool:
    first = call[0]
    rms = math.hypot(first["mean_baseline"], first["std_baseline"])
    whole = sum(row["mean_target"] for row in call.values())
    by_chance = rms / math.sqrt(first["numel"])
    rounding = (
        2 * len(call) * roundoff(coarser_dtype(first)) * max(rms, *(abs(r["mean_target"]) for r in call.values()))
    )
    return bool(abs(whole - first["mean_baseline"]) <= max(_OF_CHANCE * by_chance, rounding))


def _add_up(runs: VerdictRuns, call: Call) -> bool:
    pairs = []
    for rank, row in sorted(call.items()):
        tags = {tag: value for tag, value in own_tags(row["tags"]).items() if value is not None}
        try:
            pairs.append(runs.pair(row["name"], rank, row["in_run"], {OCCURRENCE: row["occurrence"], **tags}))
        except SessionError:
            # A pair that did not fit the budget proves nothing.
            return False
    if all(torch.equal(own, pairs[0][1]) for _, own in pairs):
        # Copies that are wrong by this factor, as if a sum had been divided by the number of ranks.
        return False
    expected = real_parts(pairs[0][0]).double()
    found = torch.stack([real_parts(own).double() for _, own in pairs]).sum(0)
    limit = assumed_floor([coarser_dtype(row) for row in call.values()])[0]
    return bool((found - expected).norm() <= limit * expected.norm())


def gradients_not_compared(parts: Mapping[str, list[str]]) -> list[str]:
    """A sentence on the gradients that were left out."""
    if not parts:
        return []
    names = first_of([f"{'the weight ' * g.endswith('@param_grad')}{g.partition('@')[0]}" for g in parts], 4)
    return [
        f"the gradients of {names}: each rank of the target has a summand, and together they add up to the baseline's. "
        "Whether the script adds them up shows in its next update."
    ]


def not_compared(sums: Mapping[str, list[str]]) -> list[str]:
    """A sentence on the taps that were left out."""
    if not sums:
        return []
    several = len(sums) > 1
    return [
        f"{', '.join(sums)}: each rank of the target has a summand of {'these values' if several else 'this value'}, "
        "and together they add up to the baseline's. What follows is judged without "
        f"{'them' if several else 'it'}; gl.tap(..., layout=...) declares partial sums, and compares their sum."
    ]
