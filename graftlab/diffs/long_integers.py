"""Whole numbers too large for float64: equal there, and perhaps not equal."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from graftlab.diffs.statistics import DiffStats, index_in

LONG = frozenset({torch.int64, torch.uint64})

# From here on float64 has not every whole number.
_LARGEST = 2.0**53


def unrounded(stats: DiffStats, baseline: torch.Tensor, target: torch.Tensor) -> DiffStats:
    """The statistics of two tensors of a dtype of :data:`LONG` that seem to be equal.

    Where they are not, what tells of the difference is measured anew, exactly but for its last rounding.
    """
    if not max(abs(stats.min_baseline), abs(stats.max_baseline), abs(stats.max_target)) >= _LARGEST:
        return stats
    x, y = (tensor.detach().reshape(-1).view(torch.int64) for tensor in (baseline, target))
    places = (x != y).nonzero().reshape(-1)
    if not len(places):
        return stats
    x, y = x[places], y[places]
    high = _high(y, target.dtype) - _high(x, baseline.dtype)
    low = (y & 0xFFFFFFFF).double() - (x & 0xFFFFFFFF).double()
    difference = (high * 2.0**32 + low).abs()
    squares = float(difference.square().sum())
    farthest = int(difference.argmax())
    xx = stats.numel * (stats.mean_baseline**2 + stats.std_baseline**2)
    yy = stats.numel * (stats.mean_target**2 + stats.std_target**2)
    return replace(
        stats,
        rel_l2=math.sqrt(squares / xx) if xx else math.inf,
        rel_diff=squares / (xx + yy) if xx + yy else 0.0,
        max_abs=float(difference[farthest]),
        max_abs_index=index_in(baseline.shape, int(places[farthest])),
        mean_abs=float(difference.sum()) / stats.numel,
    )


def _high(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What 64 bits hold above the lower 32, as float64."""
    high = values >> 32
    return (high & 0xFFFFFFFF if dtype == torch.uint64 else high).double()
