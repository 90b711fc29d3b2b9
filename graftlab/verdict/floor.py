"""The noise floor: the largest difference that rounding alone explains."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import TypeVar


@dataclass(frozen=True)
class Floor:
    """The difference that rounding adds at a group's taps: ``rel_l2``, and the largest over the root mean square.

    ``typical`` is the ``rel_l2`` without the few rows in which rounding flipped a choice, such as a router's.
    """

    rel_l2: float
    rel_max: float
    typical: float | None = None

    def ratio(self, rel_l2: float, rel_max: float) -> float:
        """The larger of both distances, as multiples of their floors. A single wrong row shows in the second."""
        return max(times(rel_l2, self.rel_l2), times(rel_max, self.rel_max))

    def at_least(self, roundoff: float, of_element: float = 0.0) -> Floor:
        """This floor, raised to at least one rounding of the value itself; ``of_element`` is the least ``rel_max``.

        The largest element of a difference is a few times its root mean square, however small the sample.
        """
        rel_l2 = max(self.rel_l2, roundoff)
        return Floor(rel_l2, max(self.rel_max, 3 * rel_l2, of_element))

    def with_distance(self, other: Floor) -> Floor:
        """Both floors combined: their squares add up."""
        typical = None if self.typical is None else math.hypot(self.typical, other.rel_l2)
        return Floor(math.hypot(self.rel_l2, other.rel_l2), math.hypot(self.rel_max, other.rel_max), typical)

    def of_spread(self) -> Floor:
        """The floor of a difference in most rows, which choices in a few rows do not explain."""
        return self if self.typical is None else Floor(min(self.typical, self.rel_l2), self.rel_max)


def times(distance: float, floor: float) -> float:
    """A distance as a multiple of its floor; infinite over a floor of 0, which whole numbers have."""
    if floor or math.isnan(distance):
        return distance / (floor or 1.0)
    return math.inf if distance else 0.0


Key = TypeVar("Key", bound=Hashable)


def pool(rows: Iterable[tuple[Key, float, float, float, float | None]]) -> dict[Key, Floor]:
    """The floor of each key, such as a group, from (key, rel_l2, rel_max, sum of squares, typical) of its taps.

    Squares of differences and of values are summed over the taps, so that a single tap at which rounding had a large
    effect, for example where a router chose a different expert, does not set a floor by itself. ``typical`` is a tap's
    ``rel_l2`` without such rows, None if it is the same.
    """
    sums: dict[Key, tuple[float, float, float, float]] = {}
    with_typical: set[Key] = set()
    for group, rel_l2, rel_max, squares, typical in rows:
        if not (math.isfinite(rel_l2) and math.isfinite(rel_max)):
            continue
        if typical is not None:
            with_typical.add(group)
        off, usual, whole, top = sums.get(group, (0.0, 0.0, 0.0, 0.0))
        usual += (rel_l2 if typical is None else typical) ** 2 * squares
        sums[group] = (off + rel_l2**2 * squares, usual, whole + squares, max(top, rel_max))
    return {
        group: Floor(
            math.sqrt(off / whole) if whole else 0.0,
            top,
            math.sqrt(usual / whole) if whole and group in with_typical else None,
        )
        for group, (off, usual, whole, top) in sums.items()
    }
