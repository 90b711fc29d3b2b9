"""The noise floor: the largest difference that rounding alone explains."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import TypeVar


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
