"""Gradients of ranks that share a batch: each takes the mean over its own part, and averaging evens that out."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import pandas as pd

from graftlab.verdict.groups import kind_of_group

# How far a factor may be off: bfloat16 rounds by less.
_TOLERANCE = 0.01


def evened_out(frame: pd.DataFrame, named: Sequence[str], baseline: int, target: int, threshold: float) -> list[str]:
    """The named groups of gradients that are other by a factor which the number of ranks explains, and evens out.

    With twice the ranks, each has the mean over half of the batch, so the gradients of its values are twice the
    baseline's. The weights' gradients are averaged over the ranks, so of the baseline's gradients, which every tap is
    grafted with, they become one half. Both have to be there, on all ranks. One alone is a fault. ``frame`` is that of
    a verdict, ``baseline`` and ``target`` are how many ranks there are.
    """
    if baseline == target:
        return []
    added = {"grad": abs(target / baseline - 1), "param_grad": abs(baseline / target - 1)}
    found: dict[str, list[str]] = {kind: [] for kind in added}
    for group in named:
        kind = kind_of_group(group)
        if kind not in added:
            continue
        rows = frame[(frame["group"] == group) & ((frame["ratio"] > threshold) | (kind == "param_grad"))]
        off = (rows["added"] - added[kind]).abs()
        if bool((off <= _TOLERANCE * added[kind]).all()) and rows["rank"].nunique() == target:
            found[kind].append(group)
    return [*found["grad"], *found["param_grad"]] if all(found.values()) else []


def told(groups: Sequence[str], baseline: int, target: int) -> str:
    """What a verdict says of them."""
    each, made = Fraction(target, baseline), Fraction(baseline, target)
    return (
        f"On each of the target's {target} ranks gradients are {each} times the baseline's; made from the baseline's, "
        f"the gradients of weights are {made} times the baseline's. Ranks that each take the mean over a part of the "
        f"batch, and average, show just that. It evens out, and is not named ({', '.join(groups)})."
    )
