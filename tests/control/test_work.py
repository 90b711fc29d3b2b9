"""Work requests: what is refused before any rank begins, and what ranks and readers get of a function."""

from __future__ import annotations

import functools
import linecache
from types import SimpleNamespace
from typing import Any

import pytest
from kit.refusals import exactly

from graftlab.control.work import (
    WorkFactory,
    arguments,
    code_of,
    pack_callees,
    refuse_invalid_expressions,
    source_of,
    warn_of_grafts_into_recordings,
)
from graftlab.errors import GraftWarning, SessionError
from graftlab.ranks.messages import Evaluate
from graftlab.recordings.recorded_side import RecordedSide


def doubled(x: int, more: int = 0) -> int:
    return 2 * x + more


def test_arguments_are_a_tuple_and_a_dict_of_their_own() -> None:
    given: dict[str, Any] = {"more": 1}
    args, kwargs = arguments("run", [3], given)
    given["more"] = 2
    assert (args, kwargs) == ((3,), {"more": 1})
    assert arguments("run", (), None) == ((), {})
    with pytest.raises(
        SessionError,
        match=exactly(
            "run: args= must be a tuple of all positional arguments, not str; for a single one write args=(x,)"
        ),
    ):
        arguments("run", "x", None)
    for wrong in ([], ["more"], {1: 2}):
        with pytest.raises(SessionError, match="run: kwargs= must be a dict of all arguments by name"):
            arguments("run", (), wrong)


class Recording(RecordedSide):
    def _read_index(self, rank: int) -> Any:
        raise AssertionError("it is not read before it is replayed")

    _load: Any = _read_index


class Unhashable:
    __hash__ = None  # type: ignore[assignment]

    def __call__(self) -> int:
        return 7


def test_an_expression_of_both_sides_is_one_request_and_functions_are_two() -> None:
    works = WorkFactory()
    made = works.of_sides({"baseline": " f()", "target": " f()"}, (), {})
    assert made["baseline"] is made["target"]
    assert isinstance(made["target"], Evaluate)
    other = works.of_sides({"baseline": None, "target": "g()"}, (), {})
    assert list(other) == ["target"]
    assert other["target"] != made["target"]
    number: Any = 5
    with pytest.raises(SessionError, match="target= must be a function or an expression, not int"):
        works.of("target", number, (), {})
    functions = works.of_sides({"baseline": Unhashable(), "target": Unhashable()}, (), {})
    assert functions["baseline"] is not functions["target"]


def test_a_cell_has_its_lines_in_tracebacks_and_must_be_python() -> None:
    work = WorkFactory().of_cell("first = 1\nsecond = 2\n")
    assert linecache.getline(work.filename, 2) == "second = 2\n"
    for wrong in ("first = ", " first = 1", "a\0b"):
        with pytest.raises(SessionError, match="the cell is not valid Python, so nothing was run"):
            WorkFactory().of_cell(wrong)
    with pytest.raises(SessionError, match=exactly("a cell is a text, not int; session.run takes functions")):
        WorkFactory().of_cell(3)  # type: ignore[arg-type]


def test_callees_are_bound_to_their_arguments_and_expressions_are_not() -> None:
    recorded = Recording()
    packed = pack_callees({"baseline": recorded, "first": doubled, "target": doubled}, (3,), {"more": 1})
    assert isinstance(packed, list)
    assert packed[0] is recorded
    assert [work() for work in packed[1:]] == [7, 7]  # type: ignore[operator]
    assert pack_callees({"baseline": "f()", "target": "g()"}, (), {}) == ["f()", "g()"]
    for args, kwargs in (((3,), {}), ((), {"more": 1})):
        for refuses in (
            lambda a, k: pack_callees({"target": "f()"}, a, k),
            lambda a, k: WorkFactory().of("target", "f()", a, k),
        ):
            with pytest.raises(
                SessionError, match=exactly("target='f()' is an expression, which takes no args; write them into it")
            ):
                refuses(args, kwargs)


def test_texts_that_are_no_expressions_are_refused_and_functions_are_not() -> None:
    refuse_invalid_expressions(None, doubled, " f()\n")
    with pytest.raises(SessionError, match="the expression is not valid Python"):
        refuse_invalid_expressions("f()", "x = 1")


@pytest.mark.parametrize(
    ("recorded", "b2t", "t2b", "warned"),
    [
        ("both", "True", "x", ["t2b grafts into the baseline", "b2t grafts into the target"]),
        ("target", "True", "x", ["b2t grafts into the target"]),
        ("both", None, " ", []),
        ("none", "True", "x", []),
    ],
)
def test_a_graft_into_a_recording_warns_that_nothing_follows_it(
    recorded: str, b2t: str | None, t2b: str | None, warned: list[str]
) -> None:
    side = Recording()
    callees: Any = {each: side if recorded in (each, "both") else doubled for each in ("baseline", "target")}
    plan: Any = SimpleNamespace(b2t=b2t, t2b=t2b)
    if not warned:
        assert warn_of_grafts_into_recordings(callees, plan) == []
        return
    with pytest.warns(GraftWarning) as caught:
        found = warn_of_grafts_into_recordings(callees, plan)
    assert [each.partition(", which is a recording")[0] for each in found] == warned
    assert [str(each.message) for each in caught] == found


def test_a_report_has_the_source_of_a_callee_or_its_name() -> None:
    assert source_of(code_of("f()")) == "f()"
    assert source_of(code_of(doubled)).startswith("def doubled(")
    assert source_of(code_of(functools.wraps(doubled)(lambda: None))).startswith("def doubled(")
    assert source_of(code_of(Unhashable())) == "# Unhashable"
    unknown: dict[str, Any] = {}
    exec(compile("def made(): pass", "<not in any file>", "exec"), unknown)
    assert source_of(code_of(unknown["made"])) == "# made: its source is not known"
