"""The noise floor: up to which difference rounding alone may be at work."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import torch

DEFAULT_NOISE_FLOOR = 1e-5
"""``rel_l2`` up to which float32 agrees with float32, unless told otherwise.

A correct target in the quickstart stays below 2e-6 at every tap; with its mistake it comes to 6e-2. About 2e-2 suits
bfloat16 against float32.
"""

# Of a dtype's unit in the last place; so many of them come together on the way through a model.
_ROUNDINGS = 2.5
_FLOAT32 = float(torch.finfo(torch.float32).eps)


def assumed_floor(dtypes: Iterable[object]) -> tuple[float, str]:
    """The ``rel_l2`` up to which tensors of these dtypes agree where nobody has measured, and the dtype it is for.

    The coarsest dtype counts for all: what is computed from its values inherits their rounding.
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
    """What rounding adds at the taps of one group: ``rel_l2``, and the largest difference over the root mean square."""

    rel_l2: float
    rel_max: float

    def at_least(self, roundoff: float) -> Floor:
        """This floor, but not below what one rounding of the value itself comes to.

        A difference's largest number lies a few times above its root mean square, however small the sample of it was.
        """
        rel_l2 = max(self.rel_l2, roundoff)
        return Floor(rel_l2, max(self.rel_max, 3 * rel_l2))

    def with_distance(self, other: Floor) -> Floor:
        """Both at work: their squares add up."""
        return Floor(math.hypot(self.rel_l2, other.rel_l2), math.hypot(self.rel_max, other.rel_max))


Key = TypeVar("Key", bound=Hashable)


def pool(rows: Iterable[tuple[Key, float, float, float]]) -> dict[Key, Floor]:
    """The floor of each group, or of what else is the key, from (key, rel_l2, rel_max, sum of squares) of its taps.

    Squares of differences and of values are added up over the group's taps, so that a tap at which rounding happened
    to do much, as where a router chose another expert, does not stand for itself alone.
    """
    sums: dict[Key, tuple[float, float, float]] = {}
    for group, rel_l2, rel_max, squares in rows:
        if not (math.isfinite(rel_l2) and math.isfinite(rel_max)):
            continue
        off, whole, top = sums.get(group, (0.0, 0.0, 0.0))
        sums[group] = (off + rel_l2**2 * squares, whole + squares, max(top, rel_max))
    return {group: Floor(math.sqrt(off / whole) if whole else 0.0, top) for group, (off, whole, top) in sums.items()}
