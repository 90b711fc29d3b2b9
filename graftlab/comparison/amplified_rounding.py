"""Recognises gradients in which a loss may have amplified the rounding of the model's results."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from graftlab.comparison.rows_of_loss import reads_other_rows
from graftlab.diffs.rounding import assumed_floor, roundoff
from graftlab.ranks.held_update import TensorSample

# Gradients of a loss that are further apart than this, or than so many unit roundoffs, are not taken for rounding.
_MOST, _ROUNDINGS = 1e-3, 2.0**14
# A factor explains a distance if it leaves less than this part of it. Few numbers may dominate, and rounding move them.
_LEFT = 0.1


def distance(expected: torch.Tensor, found: torch.Tensor) -> float:
    """The norm of the difference over that of ``expected``; infinite if only that is zero."""
    norm = float(expected.norm())
    apart = float((found - expected).norm())
    return apart / norm if norm else (0.0 if apart == 0 else math.inf)


def distance_of_amplified(pairs: Sequence[tuple[TensorSample, TensorSample]], dtypes: Iterable[str]) -> float:
    """How far apart the loss's gradients of both sides' results are, if rounding may explain that; otherwise 0.

    The logarithm of a magnitude near zero, for example, has gradients that move by far more than one rounding if the
    magnitude does by one. A factor is no rounding, nor are rows that one side's loss alone reads. ``dtypes`` are those
    of the weights.
    """
    most = 0.0
    for one, other in pairs:
        apart = distance(one.values, other.values)
        if apart > assumed_floor([one.dtype, other.dtype])[0] and _is_scaled(one, other, apart):
            return 0.0
        if reads_other_rows(one, other):
            return 0.0
        most = max(most, apart)
    unit = max(map(roundoff, (*dtypes, *(each.dtype for pair in pairs for each in pair))), default=0.0)
    return most if most <= min(_MOST, _ROUNDINGS * unit) else 0.0


def _is_scaled(one: TensorSample, other: TensorSample, apart: float) -> bool:
    """Whether a factor explains this distance."""
    square = float(one.values @ one.values)
    factor = float(one.values @ other.values) / square if square else math.nan
    return not distance(one.values, other.values / factor) >= _LEFT * apart
