"""The floors of one verdict: how far rounding moves the baseline, at each group of taps, at each tap, and in total."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import TypeVar

from graftlab.base.tags import own_tags
from graftlab.base.tap_groups import group_of, is_value, kind_of
from graftlab.diffs.rounding import DTYPES_OF_16_BITS, roundoff
from graftlab.grafting.self_graft import AddedRounding, SelfGraft
from graftlab.plan.plan import GraftPlan
from graftlab.verdict.floor import Floor, pool
from graftlab.verdict.returned_values import AccumulatedFloors

TapName = tuple[str, str | None]
"""A tap's name, as filters know it, and its kind."""
Key = TypeVar("Key", str, TapName)


class MeasuredFloors:
    """The runs of the baseline's ranks against themselves, under the names that ``plan`` gives their taps."""

    def __init__(self, selves: Sequence[SelfGraft], plan: GraftPlan) -> None:
        self._selves = selves
        self._plan = plan

    def paired(self, added: AddedRounding) -> list[str]:
        """The names of a tap in filters: one for each of its pairs."""
        return self._plan.paired_names("baseline", added.name, own_tags(added.tags))

    @property
    def added(self) -> list[AddedRounding]:
        """What rounding added at every tap of every rank."""
        return list(chain.from_iterable(each.added for each in self._selves))

    @property
    def not_repeated(self) -> list[str]:
        """The taps at which the baseline differs from itself."""
        return list(dict.fromkeys(tap for each in self._selves for tap in each.not_repeated))

    @property
    def returned_not_repeated(self) -> list[str]:
        """The returned values that differ from one run of the baseline to the next, in words."""
        return list(dict.fromkeys(value for each in self._selves for value in each.returned_not_repeated))

    @property
    def computed_in(self) -> str:
        """The coarsest dtype of 16 bits in which the baseline computes what its taps do not show; blank if none."""
        return max((each.computed_in for each in self._selves), key=roundoff, default="")

    @property
    def dtype_of_taps(self) -> str:
        """The coarsest dtype of 16 bits of the baseline's taps of values, paired or not; blank if none."""
        dtypes = {each.dtype for each in self.added if is_value(each.tags)} & {*DTYPES_OF_16_BITS}
        return max(dtypes, key=roundoff, default="")

    def of_groups(self) -> dict[str, Floor]:
        """The floor of each group: what rounding adds at its taps."""
        return self._pooled(
            self.added,
            chain.from_iterable(each.exact for each in self._selves),
            lambda name, added: group_of(name, added.tags),
        )

    def of_taps(self) -> dict[TapName, Floor]:
        """The floor of each tap: what rounding adds there."""
        return self._pooled(self.added, chain.from_iterable(each.exact for each in self._selves), _tap_name)

    def of_wholes(self) -> dict[TapName, float]:
        """By the name and kind of each tap that has a part of one of the baseline's: how far rounding moves the whole.

        That is the norm of the difference, which no part of it exceeds.
        """
        return self._wholes(chain(self.added, *(each.exact for each in self._selves)))

    def accumulated(self, constant: float | None) -> AccumulatedFloors:
        """What rounding adds up to at each tap and in each returned value; ``constant`` replaces them all."""
        returned: dict[str, float] = {}
        for each in self._selves:
            for path, rel_l2 in each.returned.items():
                returned[path] = max(returned.get(path, 0.0), rel_l2)
        outputs = chain.from_iterable(each.outputs for each in self._selves)
        distances = chain.from_iterable(each.exact_outputs for each in self._selves)
        wholes = self._wholes(chain.from_iterable((*each.outputs, *each.exact_outputs) for each in self._selves))
        return AccumulatedFloors(self._pooled(outputs, distances, _tap_name), returned, constant, wholes)

    def of_output(self, group: str) -> Floor:
        """What rounding adds up to at a group of taps that is an output."""
        rows = (row for each in self._selves for row in each.outputs if group in self.groups(row))
        return self._pooled(rows, (), lambda name, added: group_of(name, added.tags)).get(group, Floor(0.0, 0.0))

    def groups(self, added: AddedRounding) -> list[str]:
        return [group_of(name, added.tags) for name in self.paired(added)]

    def last_tap(self) -> str | None:
        """The last tap of the baseline's forward pass, as filters know it; None where no tap was recorded."""
        values = [added for each in self._selves[:1] for added in each.outputs if is_value(added.tags)]
        return self.paired(values[-1])[0] if values else None

    def _wholes(self, rows: Iterable[AddedRounding]) -> dict[TapName, float]:
        found: dict[TapName, float] = {}
        for each in rows:
            names = self.paired(each)
            moved = each.rel_l2 * math.sqrt(each.squares)
            if len(names) > 1 and math.isfinite(moved):
                found |= {key: max(found.get(key, 0.0), moved) for key in (_tap_name(name, each) for name in names)}
        return found

    def _pooled(
        self,
        moved: Iterable[AddedRounding],
        exact: Iterable[AddedRounding],
        key: Callable[[str, AddedRounding], Key],
    ) -> dict[Key, Floor]:
        """Floors by key. ``exact`` are the distances from the baseline in higher precision, which add to them."""
        floors, distances = (
            pool(
                (key(name, each), each.rel_l2, each.rel_max, each.squares, each.typical)
                for each in rows
                for name in self.paired(each)
            )
            for rows in (moved, exact)
        )
        return {each: f.with_distance(distances[each]) if each in distances else f for each, f in floors.items()}


def _tap_name(name: str, added: AddedRounding) -> TapName:
    return name, kind_of(added.tags)
