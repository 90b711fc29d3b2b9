"""Where ranks run different operations for one value, the lines shown are those of the rank at fault."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from graftlab.lines import rank_at_fault
from graftlab.lines.rank_at_fault import lost_where_ranks_differ, ranks_that_run


def operation(name: str, arguments: str = "", *frames: str, is_collective: bool = False) -> Any:
    return SimpleNamespace(name=name, arguments=arguments, frames=frames, is_collective=is_collective)


def lost(*operations: Any, is_later: bool = False, is_suspect: bool = False) -> Any:
    made = [SimpleNamespace(operation=each, is_later=False, is_suspect=False) for each in operations]
    if made:
        made[0].is_later, made[0].is_suspect = is_later, is_suspect
    return SimpleNamespace(target=made)


def traces(*of_ranks: list[Any]) -> Any:
    return [SimpleNamespace(operations=operations) for operations in of_ranks]


SUM = operation("all_reduce", is_collective=True)
SHARED, ALONE = operation("linear", "w"), operation("roll", "3")


@pytest.mark.parametrize(
    ("mine", "theirs", "at_fault"),
    [
        # A sum over the ranks has the wrong value of another.
        (lost(SUM), lost(ALONE), 2),
        (lost(SHARED), lost(ALONE), 2),
        (lost(ALONE), lost(ALONE), 0),
        (lost(SUM), lost(SUM), 0),
        (lost(SUM), lost(SHARED), 0),
        (lost(SUM), lost(), 0),
        (lost(), lost(ALONE), 0),
        (lost(ALONE, SUM, is_later=True), lost(ALONE), 2),
        (lost(ALONE, SUM, is_suspect=True), lost(ALONE), 2),
        (lost(SUM), lost(ALONE, SUM, is_suspect=True), 0),
    ],
)
def test_another_rank_is_at_fault_only_if_ones_own_first_operation_may_be_right(
    mine: Any, theirs: Any, at_fault: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    baseline, target = traces([SHARED]), traces([SHARED], [SUM], [ALONE])
    found = {1: lost(SUM), 2: theirs}

    def first_lost(*given: Any) -> Any:
        assert (given[:2], given[3]) == ((baseline, target), 0.25)
        return found[given[2]]

    monkeypatch.setattr(rank_at_fault, "first_lost", first_lost)
    expected = mine if at_fault == 0 else theirs
    assert lost_where_ranks_differ(mine, baseline, target, 0, 0.25) == (expected, at_fault)


def test_an_operation_that_all_ranks_make_is_at_fault_where_it_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_at_fault, "first_lost", lambda *_: lost(ALONE))
    mine, target = lost(SHARED), traces([SHARED], [operation("linear", "of other weights")])
    assert lost_where_ranks_differ(mine, traces([SHARED]), target, 0) == (mine, 0)
    # The baseline gives it other arguments.
    mine = lost(operation("linear", "v"))
    assert lost_where_ranks_differ(mine, traces([SHARED]), traces([SHARED], []), 0) == (mine, 0)


def test_ranks_run_an_operation_at_its_line_or_below() -> None:
    at = operation("linear", "", "line 3", "line 9")
    others = [
        operation("linear", "", "line 2", "line 3"),
        operation("linear", "", "line 9"),
        operation("mm", "", "line 3"),
    ]
    assert ranks_that_run(at, traces([at], *([each] for each in others), [others[1], others[0]])) == (0, 1, 4)
    assert ranks_that_run(operation("linear"), traces([at], [], [others[1]])) == (0, 2)
