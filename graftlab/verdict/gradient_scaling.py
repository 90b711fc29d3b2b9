"""Gradients that differ by one factor, because ranks share a batch, the loss is scaled, or gradients are clipped."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import pandas as pd

from graftlab.base.tap_groups import kind_of_group
from graftlab.base.text import first_of
from graftlab.verdict.added import measured_rows

# The relative error that a factor may have: bfloat16 rounds by less.
_TOLERANCE = 0.01
_SHOWN = 4


@dataclass(frozen=True)
class GradientScaling:
    """Groups of gradients that differ by one factor, and the verdict's sentence on them."""

    groups: tuple[str, ...] = ()
    text: str = ""
    left: Mapping[int, float] = field(default_factory=dict)
    """The remaining error of each row without the factor, by its place, if it is only rounding."""

    def taken_out_of(self, frame: pd.DataFrame) -> pd.DataFrame:
        """The frame with these remaining errors instead of the factor's."""
        added = [self.left.get(place, was) for place, was in enumerate(frame["added"])]
        ratios = [
            self.left[place] / floor if place in self.left else was
            for place, (was, floor) in enumerate(zip(frame["ratio"], frame["floor"], strict=True))
        ]
        return frame.assign(added=added, ratio=ratios)


def gradient_scaling(
    frame: pd.DataFrame, grafted: pd.DataFrame, named: Sequence[str], baseline: int, target: int, threshold: float
) -> GradientScaling:
    """The named groups of gradients that differ by a global factor, or by one that the gradients of weights undo.

    With twice the ranks, each takes the mean over half of the batch, so the gradients of its values are twice the
    baseline's. The weights' gradients are averaged over the ranks. Every tap is grafted, so they are computed from the
    baseline's gradients, and are one half of the baseline's. A loss that is scaled before the backward pass and
    unscaled after it shows the same with its own factor; then the weights' gradients must also agree without grafts.
    Both factors must appear on all ranks; one without the other is a fault. ``frame`` is :func:`added_frame` of the
    rows ``grafted``, ``baseline`` and ``target`` are the numbers of ranks. For a global factor see
    :func:`_global_factor`.
    """
    return _undone(frame, grafted, named, baseline, target, threshold) or _global_factor(
        frame, grafted, named, threshold
    )


def _undone(
    frame: pd.DataFrame, grafted: pd.DataFrame, named: Sequence[str], baseline: int, target: int, threshold: float
) -> GradientScaling | None:
    limits = threshold * frame["floor"]
    lines = list(zip(frame["group"], frame["ratio"], frame["error_ratio"], limits, measured_rows(grafted), strict=True))
    # Only those that arise at the loss, because all others are computed from the baseline's.
    of_values = [
        (row, limit) for of, ratio, _, limit, row in lines if kind_of_group(of) == "grad" and ratio > threshold
    ]
    if not of_values:
        return None
    of_ranks = target / baseline
    by_ranks = baseline != target and any(is_scaled(row, of_ranks, limit) for row, limit in of_values)
    factor = of_ranks if by_ranks else _times(of_values[0][0])
    if not factor > 0:
        return None
    explained = {"grad": factor, "param_grad": 1 / factor}
    found: dict[str, list[str]] = {kind: [] for kind in explained}
    for group in named:
        kind = kind_of_group(group)
        if kind not in explained:
            continue
        own = [line for line in lines if line[0] == group]
        rows = [(row, limit) for _, ratio, _, limit, row in own if ratio > threshold or kind == "param_grad"]
        agree = by_ranks or kind == "grad" or all(error <= threshold for _, _, error, _, _ in own)
        are_scaled = all(is_scaled(row, explained[kind], limit) for row, limit in rows)
        if agree and are_scaled and len({row["rank"] for row, _ in rows}) == target:
            found[kind].append(group)
    if not all(found.values()):
        return None
    groups = (*found["grad"], *found["param_grad"])
    return GradientScaling(groups, _of_ranks(groups, baseline, target) if by_ranks else _of_loss(groups, factor))


# A factor is global if at least this number of groups, and this part of all groups, have it.
_FEWEST_GROUPS = 4
_MOST_OF_ALL = 0.75


def _global_factor(
    frame: pd.DataFrame, grafted: pd.DataFrame, named: Sequence[str], threshold: float
) -> GradientScaling:
    """The named groups of weights' gradients that share one factor, if a few other groups differ in other ways.

    Clipping by the norm of all gradients changes each of them if one is wrong, and so does a scale of the loss. Each
    step has its own factor, the median over its rows. A row is explained if only rounding is left without it.
    The groups that it does not explain must be among the named: one factor for all gradients without an exception may
    be the fault itself.
    """
    numbers = list(
        zip(frame["group"], frame["step"], frame["floor"], frame["ratio"], measured_rows(grafted), strict=True)
    )
    lines = [
        (place, *line)
        for place, line in enumerate(numbers)
        if kind_of_group(line[0]) == "param_grad" and norms_of(line[-1]) != (0.0, 0.0)
    ]
    factors: dict[int, list[float]] = {}
    for _, _, step, _, _, row in lines:
        factors.setdefault(step, []).append(best_factor(row))
    own = {step: _median(each) for step, each in factors.items()}
    explained: dict[int, float] = {}
    others: dict[str, None] = {}
    for place, group, step, floor, over_floor, row in lines:
        left = left_over(row, own[step])
        if left <= threshold * floor:
            # A smaller error above its floor is in few elements, which one factor does not explain.
            if _is_off_in_few(row, own[step], threshold * floor):
                others[group] = None
            elif row["rel_l2"] > threshold * floor:
                explained[place] = left
            elif over_floor > threshold:
                others[group] = None
        else:
            others[group] = None
    groups = list(dict.fromkeys(line[1] for line in lines))
    alike = [group for group in groups if group not in others]
    gone = [group for group in alike if group in named]
    if len(gone) < _FEWEST_GROUPS or len(alike) < _MOST_OF_ALL * len(groups) or not {*others} & {*named}:
        return GradientScaling()
    return GradientScaling(
        tuple(gone), _of_all(len(alike), sorted(filter(math.isfinite, own.values())), list(others)), explained
    )


def best_factor(row: Mapping[str, Any]) -> float:
    """The factor that brings the baseline's tensor closest to the target's; NaN if unknown."""
    before, after = norms_of(row)
    if not before or not math.isfinite(after):
        return math.nan
    return float(((after / before) ** 2 + 1 - row["rel_l2"] ** 2) / 2)


def _median(numbers: Sequence[float]) -> float:
    known = [number for number in numbers if math.isfinite(number)]
    return statistics.median_low(known) if known else math.nan


def left_over(row: Mapping[str, Any], factor: float) -> float:
    """The difference between the target's tensor and the baseline's times ``factor``, relative to the latter."""
    before, after = norms_of(row)
    if not before or not math.isfinite(after) or not factor > 0:
        return math.nan
    times = after / before
    squared = (1 - factor) * (times**2 - factor) + factor * row["rel_l2"] ** 2
    return math.sqrt(max(squared, 0.0)) / factor


_PEAK = 3.0
"""How far rounding may move one element, as a multiple of its effect on a tensor's root mean square."""


def _is_off_in_few(row: Mapping[str, Any], factor: float, limit: float) -> bool:
    """Whether single elements differ by more than the factor and rounding, although the whole tensor does not."""
    before, _ = norms_of(row)
    low, high = row["min_baseline"], row["max_baseline"]
    peak = max(abs(low), abs(high))
    allowed = _PEAK * limit * max(before, peak)
    beyond = row["max_abs"] - abs(1 - factor) * peak
    ends = abs(row["max_target"] - factor * high), abs(row["min_target"] - factor * low)
    return bool(max(beyond, *ends) > allowed)


def _of_all(count: int, factors: Sequence[float], left: Sequence[str]) -> str:
    low, high = factors[0], factors[-1]
    times = f"{low:.6g}" if f"{low:.6g}" == f"{high:.6g}" else f"{low:.6g} to {high:.6g}"
    names = first_of([group.rpartition("@")[0] for group in left], _SHOWN)
    return (
        f"One common factor, {times}, explains the gradients of {count} groups of weights, as after gradient clipping "
        "or loss scaling. These groups are not named, and a mistake in single elements of them may not show. The "
        f"factor does not explain {names}. If the gradients are clipped, the factor may result from these."
    )


def _times(row: Mapping[str, Any]) -> float:
    """The factor between the two sides' tensors if they are parallel; NaN if it is unknown."""
    before, after = norms_of(row)
    return after / before if before and math.isfinite(after) else math.nan


def norms_of(row: Mapping[str, Any]) -> tuple[float, float]:
    """The root mean squares of a row's tensors, the baseline's first; NaN if not finite or unknown."""
    if row["nonfinite_differ"] or row["rel_l2"] is None:
        return math.nan, math.nan
    before, after = (math.hypot(row[f"mean_{side}"], row[f"std_{side}"]) for side in ("baseline", "target"))
    return before, after


def is_scaled(row: Mapping[str, Any], factor: float, limit: float) -> bool:
    """Whether the target's tensor is the baseline's times about this factor, and the rest is within ``limit``."""
    before, after = norms_of(row)
    if before == after == 0:
        return True  # as the gradients of weights that nothing depends on
    is_near = abs(after - factor * before) <= _TOLERANCE * factor * before
    cosine = row["cosine"] or 0.0
    # The same as left_over with the best factor, which rounding hides beside a factor as small as a scaler's.
    return is_near and cosine > 0 and math.sqrt(max((1 - cosine) * (1 + cosine), 0.0)) <= limit


def _of_ranks(groups: Sequence[str], baseline: int, target: int) -> str:
    each, made = Fraction(target, baseline), Fraction(baseline, target)
    return (
        f"On each of the target's {target} ranks, gradients are {each} times the baseline's; computed from the "
        f"baseline's, the gradients of weights are {made} times the baseline's. Ranks that share a batch and average "
        "their gradients show exactly this. The factors cancel out, so these are not named "
        f"({first_of(groups, _SHOWN)})."
    )


def _of_loss(groups: Sequence[str], factor: float) -> str:
    return (
        f"The target's gradients of values are {_as_factor(factor)} times the baseline's; computed from the "
        f"baseline's, the gradients of weights are {_as_factor(1 / factor)} times the baseline's. A loss "
        "that is scaled before the backward pass, with gradients that are unscaled after it, shows exactly this. The "
        f"factors cancel out, so these are not named ({first_of(groups, _SHOWN)})."
    )


def _as_factor(factor: float) -> str:
    return f"{factor:.6g}" if factor >= 1 else f"1/{1 / factor:.6g}"
