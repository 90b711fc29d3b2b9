"""The noise floor: the largest difference that rounding alone explains."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import torch

DEFAULT_NOISE_FLOOR = 1e-5
"""The default ``rel_l2`` up to which float32 agrees with float32.

A correct target in the quickstart stays below 2e-6 at every tap; its mistake causes 6e-2. About 2e-2 suits bfloat16
against float32.
"""

# The number of units in the last place that accumulate on the way through a model.
_ROUNDINGS = 2.5
_FLOAT32 = float(torch.finfo(torch.float32).eps)


def assumed_floor(dtypes: Iterable[object]) -> tuple[float, str]:
    """The ``rel_l2`` up to which tensors of these dtypes are assumed to agree, and the dtype that sets it.

    The coarsest dtype counts for all, because values computed from it inherit its rounding.
    """
    epses: dict[str, float] = {}
    for name in dtypes:
        dtype = getattr(torch, name, None) if isinstance(name, str) else None
        if isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype.is_complex):
            epses[str(name)] = float(torch.finfo(dtype).eps)
    coarsest = max(epses, key=epses.__getitem__, default="float32")
    eps = epses.get(coarsest, _FLOAT32)
    if eps > _FLOAT32:
        return float(f"{_ROUNDINGS * eps:.0e}"), coarsest
    if eps < _FLOAT32:
        return float(f"{DEFAULT_NOISE_FLOOR / _FLOAT32 * eps:.0e}"), coarsest
    return DEFAULT_NOISE_FLOOR, "float32"


@dataclass(frozen=True)
class Floor:
    """The difference that rounding adds at a group's taps: ``rel_l2``, and the largest over the root mean square."""

    rel_l2: float
    rel_max: float

    def at_least(self, roundoff: float) -> Floor:
        """This floor, but at least one rounding of the value itself.

        The largest element of a difference is a few times its root mean square, however small the sample.
        """
        rel_l2 = max(self.rel_l2, roundoff)
        return Floor(rel_l2, max(self.rel_max, 3 * rel_l2))

    def with_distance(self, other: Floor) -> Floor:
        """Both floors combined: their squares add up."""
        return Floor(math.hypot(self.rel_l2, other.rel_l2), math.hypot(self.rel_max, other.rel_max))


Key = TypeVar("Key", bound=Hashable)


def pool(rows: Iterable[tuple[Key, float, float, float]]) -> dict[Key, Floor]:
    """The floor of each key, such as a group, from (key, rel_l2, rel_max, sum of squares) of its taps.

    Squares of differences and of values are summed over the taps, so that a single tap at which rounding had a large
    effect, for example where a router chose a different expert, does not set a floor by itself.
    """
    sums: dict[Key, tuple[float, float, float]] = {}
    for group, rel_l2, rel_max, squares in rows:
        if not (math.isfinite(rel_l2) and math.isfinite(rel_max)):
            continue
        off, whole, top = sums.get(group, (0.0, 0.0, 0.0))
        sums[group] = (off + rel_l2**2 * squares, whole + squares, max(top, rel_max))
    return {group: Floor(math.sqrt(off / whole) if whole else 0.0, top) for group, (off, whole, top) in sums.items()}
