"""The statistics of a pair of tensors: how far a target is from its baseline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_NAN = math.nan


@dataclass(frozen=True, slots=True)
class DiffStats:
    """How far ``y`` (the target) is from ``x`` (the baseline).

    Pairs with a non-finite element are counted and excluded from everything else. Integers and booleans are measured as
    float64 (beyond 2**53 they are rounded, and those that then seem equal are compared exactly), complex tensors as
    their real and imaginary parts: each part counts as a separate element, except that ``numel`` and ``max_abs_index``
    are those of the complex tensor.

    * ``numel``: elements in each tensor;
    * ``rel_l2``: ``||x - y|| / ||x||``; 0 if nothing differs, inf if only the baseline is zero;
    * ``rel_diff``: ``sum((x - y)**2) / sum(x**2 + y**2)``, from 0 to 2, which is ``1 - 2<x, y> / (|x|**2 + |y|**2)``
      without its cancellation; 0 if both are zero;
    * ``max_abs``, ``max_abs_index``, ``mean_abs``: of ``|x - y|``, with the index of the largest (None: no pair);
    * ``cosine``: ``<x, y> / (||x|| ||y||)``; 1 if both are zero, 0 if one is;
    * ``nonfinite_baseline``, ``nonfinite_target``: how many are nan or infinite; ``nonfinite_differ``: pairs with one
      finite element, or with different kinds (nan, +inf, -inf);
    * ``mean_*``, ``std_*`` (of the population), ``min_*``, ``max_*``: of each tensor.

    If no pair is finite, all statistics are nan. For empty tensors ``cosine`` is 1, the measures of difference are 0,
    and the rest is nan.
    """

    numel: int
    rel_l2: float = _NAN
    rel_diff: float = _NAN
    max_abs: float = _NAN
    max_abs_index: tuple[int, ...] | None = None
    mean_abs: float = _NAN
    cosine: float = _NAN
    nonfinite_baseline: int = 0
    nonfinite_target: int = 0
    nonfinite_differ: int = 0
    mean_baseline: float = _NAN
    std_baseline: float = _NAN
    min_baseline: float = _NAN
    max_baseline: float = _NAN
    mean_target: float = _NAN
    std_target: float = _NAN
    min_target: float = _NAN
    max_target: float = _NAN


def index_in(shape: Sequence[int], place: int) -> tuple[int, ...] | None:
    """Convert a flat position to an index; None for a negative position."""
    if place < 0:
        return None
    index: list[int] = []
    for size in reversed(shape):
        place, at = divmod(place, size)
        index.append(at)
    return tuple(reversed(index))
