"""What the functions of both sides return, compared, and the rounding that adds up in it."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import pandas as pd
import torch

from graftlab.base.tap_groups import is_output, is_value
from graftlab.base.world import SIDES, Side
from graftlab.diffs.results import (
    NamedTensors,
    ResultDifference,
    compare_results,
    is_written,
    named_tensors,
    value_in_words,
    with_tensors,
)
from graftlab.diffs.rounding import roundoff
from graftlab.errors import LayoutError
from graftlab.layouts import Layout, join_parts
from graftlab.plan.pairs import PairRule, TapCallName, outputs_move_rows
from graftlab.transforms.align import MOVED
from graftlab.verdict.added import measured_rows
from graftlab.verdict.floor import Floor, times


@dataclass(frozen=True)
class ValueDifference:
    """A value that differs, in words, with the difference, and that as a multiple of accumulated rounding."""

    what: str
    rel_l2: float
    times: float
    is_written: bool = False
    """Whether it is state that a call has written, perhaps before the last tap."""
    is_spread: bool = True
    """Whether the difference is in most of the tensor, not in a few rows whose choice (a router's) rounding flips."""
    factor: float | None = None
    """The target's values are nearly this multiple of the baseline's; None if no factor explains the difference."""

    @property
    def size(self) -> str:
        if math.isinf(self.rel_l2):
            return "in which numbers are finite"
        times = "beyond rounding" if math.isinf(self.times) else f"{self.times:.2g} x what rounding adds up to"
        factor = "" if self.factor is None else f"; it is {self.factor:.4g} times the baseline's"
        return f"by {self.rel_l2:.2g} ({times}{factor})"


_NEAR = 0.1
"""Rows in different orders are further apart than this (rel_l2)."""
_MOST_ROWS = 4_096
"""More rows than this stay in their order, since each is compared with every other."""
_LEAST_WIDTH = 8
"""A row of fewer numbers may be near another one by chance."""


# A tap's name and the place in a result have the same ones: ``output.logits`` and ``['logits']``.
_WORD = re.compile(r"\w+")
# A place in a tuple or list, which has no name.
BY_PLACE = re.compile(r"\[\d+\]$")

_LARGEST, _OF_FLOAT32 = 100.0, roundoff("float32")


@dataclass(frozen=True)
class AccumulatedFloors:
    """Accumulated rounding of a whole run of the baseline, with each tap moved by one unit in its last place.

    ``taps`` has floors by a tap's name and kind, ``returned`` a rel_l2 by the place in the function's result.
    ``constant``, if given, replaces all of them. ``wholes`` has, by the name and kind of a tap that is a part of one of
    the baseline's, how far rounding moves the whole.
    """

    taps: Mapping[tuple[str, str | None], Floor]
    returned: Mapping[str, float]
    constant: float | None = None
    wholes: Mapping[tuple[str, str | None], float] = field(default_factory=dict)

    def of_tap(self, name: str, kind: str | None, dtype: str, largest: float = 1.0) -> Floor:
        """The floor of a tap; the largest one for a tap that the baseline did not record.

        In float32, it allows one rounding of the tap's largest number, which is ``largest`` times its root mean square:
        where the baseline's own runs happen not to move that number, another order of a sum may.
        """
        if self.constant is not None:
            return Floor(self.constant, 3 * self.constant)
        found = self.taps.get((name, kind)) or Floor(
            max((each.rel_l2 for each in self.taps.values()), default=0.0),
            max((each.rel_max for each in self.taps.values()), default=0.0),
        )
        one = roundoff(dtype)
        # A row of usual size must not hide behind the rounding of a far larger one.
        return found.at_least(one, one * min(largest, _LARGEST) if one <= _OF_FLOAT32 else 0.0)

    def of_returned(self, path: str, dtypes: Sequence[str]) -> float:
        """The rel_l2 of a returned value that rounding explains; at least one rounding of its coarser dtype."""
        if self.constant is not None:
            return self.constant
        return max(self.returned.get(path, 0.0), *map(roundoff, dtypes))


@dataclass(frozen=True)
class ReturnedValues:
    """The results of both functions in one run: the differences of each target rank, and what was not compared.

    ``lost`` says which values only one side returns, or in which shapes, if the others then do not stand for the whole.
    """

    differences: tuple[ResultDifference, ...] = ()
    left: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()

    def beyond(self, floors: AccumulatedFloors, threshold: float, leave: Collection[str] = ()) -> list[ValueDifference]:
        """The values that differ by more than ``threshold`` times their floor, the largest difference of each place.

        Those that ``leave`` describes are left out.
        """
        found: dict[str, ValueDifference] = {}
        for path, rel_l2, dtypes, factor in self.differences:
            if math.isnan(rel_l2):
                continue
            over = times(rel_l2, floors.of_returned(path, dtypes))
            what = value_in_words(path)
            if over > threshold and what not in leave and (path not in found or over > found[path].times):
                found[path] = ValueDifference(what, rel_l2, over, is_written(path), factor=factor)
        return list(found.values())

    def most(self, leave: Collection[str] = ()) -> float:
        """The largest rel_l2 of a value, 0 without one. Those that ``leave`` describes are left out."""
        distances = [each.rel_l2 for each in self.differences if value_in_words(each.path) not in leave]
        return max((each for each in distances if not math.isnan(each)), default=0.0)

    @property
    def _own(self) -> list[ResultDifference]:
        """The values that the functions return, without state that they write."""
        return [each for each in self.differences if not is_written(each.path)]

    @property
    def are_whole_numbers(self) -> bool:
        """Whether all returned values that were compared are whole numbers, such as tokens."""
        return bool(self._own) and not any(roundoff(dtype) for each in self._own for dtype in each.dtypes)

    @property
    def has_whole_numbers(self) -> bool:
        """Whether any returned value that was compared has no numbers that round."""
        return any(not roundoff(dtype) for each in self._own for dtype in each.dtypes)

    @property
    def are_near(self) -> bool:
        """Whether everything that is returned was compared and is nearly equal, so that its rows are in one order."""
        return bool(self._own) and not self.lost and all(each.rel_l2 < _NEAR for each in self._own)

    @property
    def compared(self) -> bool:
        """Whether any returned value was measured on both sides."""
        return any(not math.isnan(each.rel_l2) for each in self._own)


def compare_returned(
    baseline: Sequence[object],
    target: Sequence[object],
    pairs: Sequence[PairRule] = (),
    *,
    by_request: Collection[int] = (),
) -> ReturnedValues:
    """Compare each rank's result with that of the baseline's same rank, or of its only rank.

    Nothing is compared if both sides have several ranks, but different numbers, or if ``pairs`` show that the outputs'
    rows are in different orders, unless the results are near in their own, as where a function joins its chunks.
    Where pairs show that one side returns together what the other returns in parts, these are compared.
    ``by_request`` is the shape of an output whose requests are in different rows: results with a row for each of its
    rows may have them so too, and each row is compared with the nearest one.
    """
    if not baseline or not target:
        return ReturnedValues()
    if len(baseline) != len(target) and len(baseline) > 1:
        return ReturnedValues(
            left=(
                f"{len(baseline)} baseline ranks and {len(target)} target ranks return values, which cannot be paired",
            )
        )
    differences: list[ResultDifference] = []
    left: dict[str, None] = {}
    lost: dict[str, None] = {}
    reshaped: list[str] = []
    # The first stage of a pipeline returns nothing, and the last one the result.
    empty = {rank for rank, found in enumerate(target) if all(map(is_written, named_tensors(found)))}
    empty = empty if len(empty) < len(target) and len(baseline) == 1 else set()
    for rank, found in enumerate(target):
        expected = baseline[rank if len(baseline) > 1 else 0]
        if by_request:
            found, moved = _in_rows_of(named_tensors(expected), named_tensors(found), by_request)
            left.update(dict.fromkeys(f"the order of the rows of {value_in_words(path)}" for path in moved))
        compared = compare_results(*_in_parts(expected, found, pairs), matched=bool(pairs))
        others = of_other_taps(expected, found, pairs)
        if others:
            # Results with other parts on each side have different values at one place.
            ours, theirs = named_tensors(expected), named_tensors(found)
            elsewhere = {path: place for path, tap in others.items() if (place := _path_of(tap, ours)) is not None}
            placed = {place: theirs[path] for path, place in elsewhere.items() if place not in theirs}
            found = with_tensors(theirs, {**without_places(theirs, others), **placed})
            unmoved = {path: tap for path, tap in others.items() if elsewhere.get(path) not in placed}
            # The target does return these; a place that it fills with a value without a partner is compared.
            returned_elsewhere = {elsewhere[path] for path in unmoved if path in elsewhere} - {*found}
            expected = without_places(ours, returned_elsewhere)
            compared = compare_results(*_in_parts(expected, found, pairs), matched=True)
            # What has another place is at least said, where nothing else is.
            said = unmoved if unmoved or compared.lost else others
            lost.update(
                (f"the target returns the baseline's {tap} as {value_in_words(path)}", None)
                for path, tap in said.items()
            )
        differences += compared.differences
        reshaped += compared.reshaped
        # One of several ranks may return its shard, and pairs may have layouts.
        may_be_part = bool(pairs) or len(baseline) != len(target)
        if rank in empty:
            left[f"target rank {rank} returns nothing"] = None
            continue
        left.update(dict.fromkeys([*(compared.reshaped if may_be_part else ()), *compared.left]))
        lost.update(dict.fromkeys([*compared.lost, *(() if may_be_part else compared.reshaped)]))
    returned = ReturnedValues(tuple(differences), tuple(left), tuple(lost))
    if outputs_move_rows(pairs) and (reshaped or not returned.are_near):
        return ReturnedValues(left=("the returned values have their rows in a different order on each side",))
    return returned


def _in_parts(expected: object, found: object, pairs: Sequence[PairRule]) -> tuple[object, object]:
    """Both results, the target's divided or joined as the baseline's are, where pairs of outputs say how."""
    rules = [rule for rule in pairs if rule.is_part and not rule.moves_rows and not rule.is_pattern]
    rules = [rule for rule in rules if all(is_output(TapCallName.of(rule.name(side)).name) for side in SIDES)]
    if not rules:
        return expected, found
    ours, theirs = named_tensors(expected), named_tensors(found)
    of_whole: dict[tuple[Side, str], dict[str, Layout]] = defaultdict(dict)
    for rule in rules:
        one, other = _path_of(rule.baseline, ours), _path_of(rule.target, theirs)
        # What both return under one name is compared as it is.
        if one is not None and other is not None and one not in theirs and other not in ours:
            whole, part = (one, other) if rule.whole == "baseline" else (other, one)
            of_whole[rule.whole, whole][part] = rule.parsed
    for (side, path), parts in of_whole.items():
        changed: dict[str, torch.Tensor] = {}
        with suppress(LayoutError):
            if side == "target":
                changed = {part: layout.local(theirs[path]) for part, layout in parts.items()}
                if any(each.shape != ours[part].shape for part, each in changed.items()):
                    continue
            else:
                joined = join_parts([(layout, [theirs[part]]) for part, layout in parts.items()], ours[path].shape)
                # What the target lacks stays so.
                changed = {path: joined.whole} if joined.known is None else {}
        if changed:
            gone = {path} if side == "target" else parts.keys()
            theirs = with_tensors(theirs, {**{name: theirs[name] for name in theirs if name not in gone}, **changed})
    return ours, theirs


def of_other_taps(expected: object, found: object, pairs: Sequence[PairRule]) -> dict[str, str]:
    """The baseline's tap that the target returns, by its place in the target's result, where pairs show that the
    baseline returns another value there; nothing if both return as many values, or a side a single one.

    Values of one name are meant to be the same. So are those of one place and shape, unless the baseline returns the
    target's value in another place: a target that lacks the last operation returns that one's input.
    """
    ours, theirs = named_tensors(expected), named_tensors(found)
    counts = [sum(not is_written(path) for path in each) for each in (ours, theirs)]
    if min(counts) < 2 or counts[0] == counts[1]:
        # Values that have changed places are a mistake.
        return {}
    taps: dict[str, set[str]] = defaultdict(set)
    for rule in pairs:
        # What a model inside a function returns has that model's name before it.
        is_own = rule.target.startswith("output") and is_output(TapCallName.of(rule.target).name)
        path = _path_of(rule.target, theirs) if is_own else None
        if path is not None and path in ours and BY_PLACE.search(path) is not None:
            taps[path].add(rule.baseline)
    others = {}
    for path, names in taps.items():
        returned = {_path_of(name, ours) for name in names if is_output(TapCallName.of(name).name)} - {None}
        if path not in returned and (returned or not _may_be_equal(ours[path], theirs[path])):
            others[path] = min(names)
    return others


def _may_be_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two values have one shape, without dims of length 1."""
    return [each for each in one.shape if each != 1] == [each for each in other.shape if each != 1]


def without_places(result: Mapping[str, torch.Tensor], places: Collection[str]) -> NamedTensors:
    """A result without the tensors at these places."""
    return with_tensors(result, {path: each for path, each in result.items() if path not in places})


def _path_of(tap: str, result: NamedTensors) -> str | None:
    """The place in a result of what this tap of an output shows; None if there is none, or several."""
    call = TapCallName.of(tap)
    words = _WORD.findall(call.name.partition("output")[2])
    paths = [path for path in result if not is_written(path) and _WORD.findall(path) == words]
    return paths[0] if len(paths) == 1 and not call.occurrence and not call.tags else None


def extents_by_request(rows: pd.DataFrame) -> tuple[int, ...]:
    """The shape of the last measured tap of the forward pass if its requests are in different rows; otherwise empty."""
    if not len(rows) or not rows["note"].astype(str).str.contains(MOVED, regex=False).any():
        return ()
    values = [row for row in measured_rows(rows) if is_value(row["tags"])]
    last = max(values, key=lambda row: (row["in_run"], row["order"]), default=None)
    return tuple(last["shape"]) if last is not None and MOVED in str(last["note"]) else ()


def _in_rows_of(
    expected: NamedTensors, found: NamedTensors, extents: Collection[int]
) -> tuple[NamedTensors, dict[str, None]]:
    """The tensors of ``found`` with their rows in the order of the nearest ones expected, and the paths of those moved.

    Numbers of a row are too few to recognise it by, unless a wide row of another tensor shows the order. Tensors whose
    length is none of ``extents`` stay, such as the tokens of one request.
    """
    paths = [
        path
        for path, tensor in found.items()
        if not is_written(path) and tensor.dim() and len(tensor) in extents and path in expected
        if expected[path].shape == tensor.shape and 1 < len(tensor) <= _MOST_ROWS
    ]
    orders: dict[int, list[int]] = {}
    for path in paths:
        if found[path].is_floating_point() and found[path][0].numel() >= _LEAST_WIDTH:
            orders.setdefault(len(found[path]), nearest_rows(expected[path], found[path]))
    result = NamedTensors(found)
    moved: dict[str, None] = {}
    for path in paths:
        order = orders.get(len(found[path]), [])
        if order != sorted(order):
            result[path] = found[path][order]
            moved[path] = None
    return result, moved


def nearest_rows(expected: torch.Tensor, found: torch.Tensor) -> list[int]:
    """For each expected row the nearest one found, each once: equal rows must have different partners."""
    ours, theirs = (each.detach().cpu().double().flatten(1) for each in (expected, found))
    apart = torch.cdist(ours, theirs)
    order: list[int] = []
    for row in apart:
        order.append(int(row.argmin()))
        apart[:, order[-1]] = math.inf
    return order
