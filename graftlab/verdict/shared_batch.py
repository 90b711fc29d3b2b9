"""Gradients of ranks that share a batch: each takes the mean over its own part, and averaging evens that out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import pandas as pd

from graftlab.verdict.added import measured_rows
from graftlab.verdict.groups import kind_of_group

# How far a factor may be off: bfloat16 rounds by less.
_TOLERANCE = 0.01
# How parallel two gradients are that differ by a factor alone.
_PARALLEL = 0.999


def evened_out(
    frame: pd.DataFrame, grafted: pd.DataFrame, named: Sequence[str], baseline: int, target: int, threshold: float
) -> list[str]:
    """The named groups of gradients that differ by a factor which the number of ranks explains, and evens out.

    With twice the ranks, each has the mean over half of the batch, so the gradients of its values are twice the
    baseline's. The weights' gradients are averaged over the ranks, so of the baseline's gradients, which every tap is
    grafted with, they become one half. Both have to be there, on all ranks. One alone is a fault. ``frame`` is what
    :func:`added_frame` makes of the rows ``grafted``, ``baseline`` and ``target`` are how many ranks there are.
    """
    explained = {"grad": target / baseline, "param_grad": baseline / target}
    if baseline == target or not any(kind_of_group(group) in explained for group in named):
        return []
    found: dict[str, list[str]] = {kind: [] for kind in explained}
    lines = list(zip(frame["group"], frame["ratio"], measured_rows(grafted), strict=True))
    for group in named:
        kind = kind_of_group(group)
        if kind not in explained:
            continue
        # Of gradients of values those alone that arise at the loss; the others are computed from the baseline's.
        rows = [row for own, ratio, row in lines if own == group and (ratio > threshold or kind == "param_grad")]
        if len({row["rank"] for row in rows}) == target and all(_is_scaled(row, explained[kind]) for row in rows):
            found[kind].append(group)
    return [*found["grad"], *found["param_grad"]] if all(found.values()) else []


def _is_scaled(row: Mapping[str, Any], factor: float) -> bool:
    """Whether the target's tensor is the baseline's times this factor, but for rounding."""
    if row["nonfinite_differ"] or row["rel_l2"] is None:
        return False
    before, after = (math.hypot(row[f"mean_{side}"], row[f"std_{side}"]) for side in ("baseline", "target"))
    if before == after == 0:
        return True  # as the gradients of weights that nothing depends on
    is_parallel = row["cosine"] is not None and row["cosine"] > _PARALLEL
    return is_parallel and abs(after - factor * before) <= _TOLERANCE * factor * before


def told(groups: Sequence[str], baseline: int, target: int) -> str:
    """What a verdict says of them."""
    each, made = Fraction(target, baseline), Fraction(baseline, target)
    return (
        f"On each of the target's {target} ranks gradients are {each} times the baseline's; made from the baseline's, "
        f"the gradients of weights are {made} times the baseline's. Ranks that each take the mean over a part of the "
        f"batch, and average, show just that. It evens out, and is not named ({', '.join(groups)})."
    )
