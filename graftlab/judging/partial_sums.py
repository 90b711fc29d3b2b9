"""Partial sums that no layout declares: each rank of the target has a summand of the value, as before an all-reduce.

Compared as copies they look wrong. A graft would put the whole on each rank, and then the code that adds them up looks
wrong too. A verdict leaves such taps out, and a loss that each rank averages over its part of the batch.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pandas as pd
import torch

from graftlab.base.tags import own_tags
from graftlab.base.tap_groups import filter_of, group_of, kind_of
from graftlab.base.tensor_bytes import real_parts
from graftlab.base.text import first_of
from graftlab.diffs.rounding import assumed_floor, roundoff
from graftlab.errors import SessionError
from graftlab.judging.verdict_runs import RunFilters, VerdictRuns, kept_pair
from graftlab.verdict.added import coarser_dtype, measured_rows

# Means may add up by chance, so in this many calls of a group the tensors themselves are added too.
_CALLS = 3
# The difference of means, as a multiple of the one expected of independent values. Right sums are far below it.
_OF_CHANCE = 0.05
# A mistake in all layers leaves sums this near the value, from summands that are far from it (rel_l2).
_NEAR, _FAR = 0.1, 0.3
_MOST_SHOWN = 4

GRADIENTS = ("grad", "param_grad")


@dataclass(frozen=True)
class Summands:
    """The taps of a group at which the target's ranks have summands of the baseline's value.

    In ``wrong`` ones the summands do not add up to it. If these are not a minority, ``off`` is how far their sums are
    from it (rel_l2), which is near.
    """

    names: list[str]
    wrong: list[str]
    off: float = 0.0


def partial_sums(
    runs: VerdictRuns,
    grafted: pd.DataFrame,
    limits: Mapping[str, float] = MappingProxyType({}),
    kinds: Collection[str | None] = (None,),
) -> dict[str, Summands]:
    """The taps of these kinds, by group, at which the target's ranks have summands of the baseline's value.

    ``grafted`` are the rows of the run in which every tap was grafted. ``limits`` are how far the sums of some taps may
    be from the value (rel_l2), because they come from quantised weights. Makes a run if there may be such taps.
    """
    options = runs.session.options
    if options.baseline != 1 or options.target < 2:
        return {}
    calls = _calls(grafted, options.target, kinds)
    # Not all, because one of several layers may be wrong. What follows its summands then differs.
    right = {group: [call for call in found if _means_add_up(call, limits)] for group, found in calls.items()}
    likely = {group: found for group, found in right.items() if 2 * len(found) > len(calls[group])}
    likely |= {group: found for group, found in calls.items() if group not in likely and all(map(_are_far, found))}
    keep = filter_of((call[0]["name"], kind_of(call[0]["tags"])) for found in likely.values() for call in found)
    if keep is None:
        return {}
    runs.both("whether ranks have partial sums", RunFilters(b2t="True", keep=keep))
    sums = {}
    for group, found in likely.items():
        apart = [_sum_apart(runs, call) for call in found[:_CALLS]]
        wrong = [call for call, off in zip(found, apart, strict=False) if off > _floor(call, limits)]
        if 2 * len(wrong) < len(apart):
            wrong += [call for call in calls[group] if call not in found]
            sums[group] = Summands(_names(calls[group]), _names(wrong))
        elif max(apart) < _NEAR and all(map(_are_far, calls[group])):
            sums[group] = Summands(_names(calls[group]), _names(calls[group]), max(apart))
    return sums


def averages_of_parts(grafted: pd.DataFrame, baseline: int, target: int) -> list[str]:
    """The names of values of one number whose average over the target's ranks is the baseline's, such as a loss.

    Each rank computes it from its part of the batch, so another tap must be a slice of the baseline's. ``baseline`` and
    ``target`` are the numbers of ranks.
    """
    if baseline != 1 or target < 2 or not grafted["aligned_by"].astype(str).str.contains("slice").any():
        return []
    calls = _calls(grafted, target, (None,), _may_be_average)
    found = [group for group in calls.values() if all(map(_averages, group)) and not all(map(_are_equal, group))]
    return [name for group in found for name in _names(group)]


def _may_be_average(row: Mapping[str, Any]) -> bool:
    is_finite = row["nonfinite_baseline"] == row["nonfinite_target"] == 0
    return row["numel"] == 1 and is_finite and roundoff(coarser_dtype(row)) > 0 and row["aligned_by"] is None


def _averages(call: Call) -> bool:
    values, expected = [row["mean_target"] for row in call.values()], call[0]["mean_baseline"]
    largest = max(map(abs, (*values, expected)))
    return bool(abs(sum(values) / len(values) - expected) <= _floor(call, {}) * largest)


def _are_equal(call: Call) -> bool:
    return all(row["rel_l2"] <= _floor(call, {}) for row in call.values())


def _names(calls: Iterable[Call]) -> list[str]:
    return list(dict.fromkeys(call[0]["name"] for call in calls))


def next_taps(grafted: pd.DataFrame, names: Collection[str]) -> dict[str, str]:
    """The values that the target's ranks show next after a tap of these names, with that tap's name."""
    found: dict[str, str] = {}
    before: dict[tuple[int, int], str] = {}
    rows = [row for row in measured_rows(grafted) if kind_of(row["tags"]) is None and row["side"] == "target"]
    for row in sorted(rows, key=lambda row: (row["in_run"], row["order"])):
        place = row["in_run"], row["rank"]
        if row["name"] not in names and before.get(place) in names:
            found[row["name"]] = before[place]
        before[place] = row["name"]
    return found


Call = dict[int, Mapping[str, Any]]
"""The rows of one call of a tap, by rank."""


def _may_be_summand(row: Mapping[str, Any]) -> bool:
    dtype = coarser_dtype(row)
    differs = row["rel_l2"] is not None and row["rel_l2"] > 10 * assumed_floor([dtype])[0]
    return differs and roundoff(dtype) > 0 and row["aligned_by"] is None and not row["nonfinite_differ"]


def _calls(
    grafted: pd.DataFrame,
    ranks: int,
    kinds: Collection[str | None],
    fits: Callable[[Mapping[str, Any]], bool] = _may_be_summand,
) -> dict[str, list[Call]]:
    """The calls of taps of these kinds, by group, if each fits on all ranks of the target."""
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
        if all(sorted(call) == [*range(ranks)] and all(map(fits, call.values())) for call in calls)
    }


def _limit(call: Call, limits: Mapping[str, float]) -> float:
    return limits.get(call[0]["name"].partition("[")[0], 0.0)


def _means_add_up(call: Call, limits: Mapping[str, float]) -> bool:
    first = call[0]
    rms = math.hypot(first["mean_baseline"], first["std_baseline"])
    whole = sum(row["mean_target"] for row in call.values())
    by_chance = rms / math.sqrt(first["numel"])
    rounding = (
        2 * len(call) * roundoff(coarser_dtype(first)) * max(rms, *(abs(r["mean_target"]) for r in call.values()))
    )
    of_chance = max(_OF_CHANCE, 4 * _limit(call, limits))
    return bool(abs(whole - first["mean_baseline"]) <= max(of_chance * by_chance, rounding))


def _are_far(call: Call) -> bool:
    return all(row["rel_l2"] > _FAR for row in call.values())


def _floor(call: Call, limits: Mapping[str, float]) -> float:
    return max(assumed_floor([coarser_dtype(row) for row in call.values()])[0], _limit(call, limits))


def _sum_apart(runs: VerdictRuns, call: Call) -> float:
    """How far the sum of a call's tensors is from the baseline's (rel_l2); infinite if they are no summands."""
    pairs = []
    for _, row in sorted(call.items()):
        try:
            pairs.append(kept_pair(runs, row, row["in_run"]))
        except SessionError:
            # A pair that did not fit the budget proves nothing.
            return math.inf
    if all(torch.equal(own, pairs[0][1]) for _, own in pairs):
        # Copies that are wrong by this factor, as if a sum had been divided by the number of ranks.
        return math.inf
    expected = real_parts(pairs[0][0]).double()
    found = torch.stack([real_parts(own).double() for _, own in pairs]).sum(0)
    off, size = float((found - expected).norm()), float(expected.norm())
    return off / size if size else math.inf if off else 0.0


def gradients_not_compared(parts: Mapping[str, list[str]]) -> list[str]:
    """A sentence on the gradients that were left out."""
    if not parts:
        return []
    names = first_of([f"{'the weight ' * g.endswith('@param_grad')}{g.partition('@')[0]}" for g in parts], _MOST_SHOWN)
    return [
        f"the gradients of {names}: each rank of the target has a summand, and together they add up to the baseline's. "
        "Whether the script adds them up shows in its next update."
    ]


def averages_not_named(names: Collection[str]) -> list[str]:
    """A sentence on values that were left out because their average over the ranks is the baseline's."""
    if not names:
        return []
    return [
        f"{first_of(list(names), _MOST_SHOWN)} on each rank of the target: only the average over the ranks is the "
        "baseline's, as where each rank has the loss of its part of the batch."
    ]


def not_adding_up(sums: Mapping[str, Summands]) -> list[str]:
    """A sentence on summands that do not add up, for a verdict that names nothing."""
    wrong = first_of([name for each in sums.values() for name in each.wrong], _MOST_SHOWN)
    if not wrong:
        return []
    return [
        f"At {wrong} the sum over the target's ranks differs from the baseline's value, although what follows agrees "
        "to rounding: the code before them may be wrong."
    ]


def not_compared(sums: Mapping[str, Summands]) -> list[str]:
    """A sentence on the taps that were left out."""
    if not sums:
        return []
    sentences = []
    for add_up in (True, False):
        groups = {group: each for group, each in sums.items() if (each.off == 0) is add_up}
        if not groups:
            continue
        several = len(groups) > 1
        wrong = [name for each in groups.values() for name in each.wrong]
        but = f", but not at {first_of(wrong, _MOST_SHOWN)}" if wrong else ""
        off = max(each.off for each in groups.values())
        together = f"add up to the baseline's{but}" if add_up else f"differ from the baseline's by {off:.2g}"
        sentences.append(
            f"{', '.join(groups)}: each rank of the target has a summand of "
            f"{'these values' if several else 'this value'}, and together they {together}. What follows is judged "
            f"without {'them' if several else 'it'}; gl.tap(..., layout=...) declares partial sums, and compares their "
            "sum."
        )
    return sentences
