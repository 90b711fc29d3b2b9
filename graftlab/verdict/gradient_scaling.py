"""Gradients that differ by a factor which is undone later: of ranks that share a batch, and of a scaled loss."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pandas as pd

from graftlab.base.tap_groups import kind_of_group
from graftlab.verdict.added import measured_rows

# The relative error that a factor may have: bfloat16 rounds by less.
_TOLERANCE = 0.01
# The least cosine of two gradients that differ only by a factor.
_PARALLEL = 0.999
_SHOWN = 4


@dataclass(frozen=True)
class GradientScaling:
    """Groups of gradients that differ by a factor which is undone later, and the verdict's sentence on them."""

    groups: tuple[str, ...] = ()
    text: str = ""


def gradient_scaling(
    frame: pd.DataFrame, grafted: pd.DataFrame, named: Sequence[str], baseline: int, target: int, threshold: float
) -> GradientScaling:
    """The named groups of gradients that differ by a factor which the gradients of weights undo.

    With twice the ranks, each takes the mean over half of the batch, so the gradients of its values are twice the
    baseline's. The weights' gradients are averaged over the ranks, so computed from the baseline's gradients, with
    which every tap is grafted, they are one half. A loss that is scaled before the backward pass and unscaled after it
    shows the same with its own factor; then the weights' gradients must also agree without grafts. Both factors must
    appear on all ranks; one without the other is a fault. ``frame`` is :func:`added_frame` of the rows ``grafted``,
    ``baseline`` and ``target`` are the numbers of ranks.
    """
    lines = list(zip(frame["group"], frame["ratio"], frame["error_ratio"], measured_rows(grafted), strict=True))
    # Only those that arise at the loss: other gradients are computed from the baseline's.
    of_values = [row for group, ratio, _, row in lines if kind_of_group(group) == "grad" and ratio > threshold]
    if not of_values:
        return GradientScaling()
    of_ranks = target / baseline
    by_ranks = baseline != target and any(_is_scaled(row, of_ranks) for row in of_values)
    factor = of_ranks if by_ranks else _times(of_values[0])
    if not factor > 0:
        return GradientScaling()
    explained = {"grad": factor, "param_grad": 1 / factor}
    found: dict[str, list[str]] = {kind: [] for kind in explained}
    for group in named:
        kind = kind_of_group(group)
        if kind not in explained:
            continue
        own = [(ratio, error, row) for of, ratio, error, row in lines if of == group]
        rows = [row for ratio, _, row in own if ratio > threshold or kind == "param_grad"]
        agree = by_ranks or kind == "grad" or all(error <= threshold for _, error, _ in own)
        if agree and len({row["rank"] for row in rows}) == target and all(_is_scaled(r, explained[kind]) for r in rows):
            found[kind].append(group)
    if not all(found.values()):
        return GradientScaling()
    groups = (*found["grad"], *found["param_grad"])
    return GradientScaling(groups, _of_ranks(groups, baseline, target) if by_ranks else _of_loss(groups, factor))


def _times(row: Mapping[str, Any]) -> float:
    """The factor between the two sides' tensors if they are parallel; NaN if it is unknown."""
    before, after = _norms(row)
    return after / before if before and math.isfinite(after) else math.nan


def _norms(row: Mapping[str, Any]) -> tuple[float, float]:
    if row["nonfinite_differ"] or row["rel_l2"] is None:
        return math.nan, math.nan
    before, after = (math.hypot(row[f"mean_{side}"], row[f"std_{side}"]) for side in ("baseline", "target"))
    return before, after


def _is_scaled(row: Mapping[str, Any], factor: float) -> bool:
    """Whether the target's tensor is the baseline's times this factor, but for rounding."""
    before, after = _norms(row)
    if before == after == 0:
        return True  # as the gradients of weights that nothing depends on
    is_parallel = row["cosine"] is not None and row["cosine"] > _PARALLEL
    return is_parallel and abs(after - factor * before) <= _TOLERANCE * factor * before


def _of_ranks(groups: Sequence[str], baseline: int, target: int) -> str:
    each, made = Fraction(target, baseline), Fraction(baseline, target)
    return (
        f"On each of the target's {target} ranks, gradients are {each} times the baseline's; computed from the "
        f"baseline's, the gradients of weights are {made} times the baseline's. Ranks that share a batch and average "
        f"their gradients show exactly this. The factors cancel out, so these are not named ({_listed(groups)})."
    )


def _of_loss(groups: Sequence[str], factor: float) -> str:
    return (
        f"The target's gradients of values are {_as_factor(factor)} times the baseline's; computed from the "
        f"baseline's, the gradients of weights are {_as_factor(1 / factor)} times the baseline's. A loss "
        "that is scaled before the backward pass, with gradients that are unscaled after it, shows exactly this. The "
        f"factors cancel out, so these are not named ({_listed(groups)})."
    )


def _as_factor(factor: float) -> str:
    return f"{factor:.6g}" if factor >= 1 else f"1/{1 / factor:.6g}"


def _listed(groups: Sequence[str]) -> str:
    return ", ".join(groups[:_SHOWN]) + (f" and {len(groups) - _SHOWN} more" if len(groups) > _SHOWN else "")
