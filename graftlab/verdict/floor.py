"""The noise floor: up to which difference rounding alone may be at work."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import TypeVar


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
