"""Which operation of the other side is the partner of a lost one: the only one that may be it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from graftlab.lines import partners
from graftlab.lines.lost import LostOperation
from graftlab.lines.partners import _may_correspond, with_partners


def lost(index: int, name: str = "mm", **more: Any) -> LostOperation:
    return LostOperation(operation(index, name), **more)


def operation(index: int, name: str = "mm", only_arranges: bool = False) -> Any:
    return SimpleNamespace(index=index, name=name, only_arranges=only_arranges)


@pytest.mark.parametrize(
    ("own", "others", "more", "expected"),
    [
        ([lost(5)], [lost(2)], [], [2]),
        # Where two may be it, neither is.
        ([lost(5)], [lost(2), lost(3)], [], [None]),
        # As many on both sides are pairs in their order.
        ([lost(5), lost(6)], [lost(2), lost(3)], [], [2, 3]),
        # What differs only in its order, or depends on another lost operation, is no candidate.
        ([lost(5)], [lost(1, is_suspect=True), lost(2), lost(3, is_later=True)], [], [2]),
        ([lost(5)], [lost(1, is_suspect=True), lost(3, is_later=True)], [], [None]),
        # One of the same name comes first, lost or not, and an operation that only arranges is none.
        ([lost(5)], [lost(2, "addmm"), lost(3)], [], [3]),
        ([lost(5)], [lost(2, "addmm")], [operation(7)], [7]),
        ([lost(5)], [lost(2, "addmm")], [operation(7, only_arranges=True)], [2]),
        # What depends on a lost operation has no partner that is not lost.
        ([lost(5, is_later=True)], [lost(2, "addmm")], [operation(7)], [2]),
    ],
)
def test_a_lost_operation_has_the_only_partner_that_may_be_it(
    own: list[LostOperation],
    others: list[LostOperation],
    more: list[Any],
    expected: list[int | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # All read the same values and give one shape.
    monkeypatch.setattr(partners, "_may_correspond", lambda *_: True)
    monkeypatch.setattr(partners, "_reads_the_same", lambda *_: True)
    by_index = {each.index: each for each in [*(found.operation for found in others), *more]}
    flow = SimpleNamespace(trace=SimpleNamespace(operations=more), by_index=by_index)
    side: Any = SimpleNamespace(flow=flow)
    found = with_partners(own, others, side, side, 1e-5)
    assert [each.partner for each in found] == expected
    assert [each.counterpart for each in found] == [by_index.get(index) for index in expected]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shapes", "ranks", "collectives", "expected"),
    [
        (((4, 6), (4, 6)), (1, 1), (False, False), True),
        (((4, 6), (4, 6)), (2, 1), (False, False), True),
        # A rank's part, of a whole or of a larger part.
        (((4, 3), (4, 6)), (2, 1), (False, False), True),
        (((4, 6), (4, 3)), (2, 4), (False, False), True),
        # Not on as many ranks, nor along two dimensions, nor the whole beside a part of it.
        (((4, 3), (4, 6)), (2, 2), (False, False), False),
        (((2, 3), (4, 6)), (2, 1), (False, False), False),
        (((4, 6), (4, 3)), (2, 1), (False, False), False),
        (((6,), (4, 6)), (2, 1), (False, False), False),
        # Grafts into the result of a collective would be overwritten.
        (((4, 6), (4, 6)), (2, 2), (True, True), False),
        (((4, 6), (4, 6)), (2, 2), (True, False), False),
        (((4, 6), (4, 6)), (2, 2), (False, True), False),
    ],
)
def test_partners_have_results_of_one_shape_or_one_has_a_ranks_part_of_the_others(
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    ranks: tuple[int, int],
    collectives: tuple[bool, bool],
    expected: bool,
) -> None:
    operations: list[Any] = [SimpleNamespace(is_collective=each) for each in collectives]
    sides: list[Any] = [
        SimpleNamespace(ranks=count, shape_of=lambda _, shape=shape: shape)
        for shape, count in zip(shapes, ranks, strict=True)
    ]
    assert _may_correspond(*operations, *sides) is expected
