"""The lines of one tap: which tap is meant, and when no line is sought."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from kit.refusals import exactly

from graftlab.errors import SessionError
from graftlab.judging import tap_lines
from graftlab.judging.tap_lines import TapLines, lines_of_tap
from graftlab.session import Session


class Search:
    """Finds one line of each tap that it is asked for."""

    traced: list[Any]

    def __init__(self, runs: Any, frame: pd.DataFrame, threshold: float, one_sided: str | None) -> None:
        self.remarks = ["a remark"]
        self.lines: list[str] = []
        runs.searches.append(self)
        self.frame, self.threshold, self.steps = frame, threshold, []

    def trace(self, groups: Sequence[str]) -> None:
        self.steps.append(("trace", list(groups)))
        self.lines = ["a line"]

    def confirm(self) -> None:
        self.steps.append(("confirm", []))


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    made = SimpleNamespace(recorded=False, searches=[], asked=[])
    made.both = lambda why, wanted: made.asked.append((wanted.compare, wanted.b2t)) or pd.DataFrame()
    made.to_be_grafted = lambda rows: rows
    made.frame = pd.DataFrame(
        {
            "name": ["h.0", "h.1", "h.1", "out"],
            "group": ["h.*", "h.*", "h.*", "out"],
            "ratio": [2.0, 7.0, 9.0, 1.0],
            "added": [0.2, 0.7, 0.9, 0.1],
            "floor": [0.1, 0.1, 0.1, 0.1],
        }
    )
    monkeypatch.setattr(tap_lines, "runs_of", lambda session, request: contextlib.nullcontext(made))
    monkeypatch.setattr(tap_lines, "one_sided_filter", lambda rows: None)
    monkeypatch.setattr(tap_lines, "added_frame", lambda rows, floors: made.frame.copy())
    monkeypatch.setattr(tap_lines, "LineSearch", Search)
    monkeypatch.setattr(tap_lines, "replace", lambda line, group: (line, group))
    return made


def lines(tap: str) -> TapLines:
    return lines_of_tap(SimpleNamespace(), tap, SimpleNamespace(threshold=5.0))  # type: ignore[arg-type]


def test_a_tap_is_meant_by_its_name_and_a_group_by_its_pattern(runs: SimpleNamespace) -> None:
    found = lines("h.1")
    assert (found.tap, found.added, found.floor, found.found, found.remarks) == (
        *("h.1", 0.9, 0.1),
        *([("a line", "h.1")], ["a remark"]),
    )
    (search,) = runs.searches
    assert search.steps == [("trace", ["h.1"]), ("confirm", [])]
    assert list(search.frame["group"]) == ["h.*", "h.1", "h.1", "out"]
    assert search.threshold == 5.0
    assert runs.asked == [("True", None), (None, "True")]
    assert lines("h.*").added == 0.9
    assert list(runs.searches[1].frame["group"]) == ["h.*", "h.*", "h.*", "out"]


def test_no_line_is_sought_for_a_tap_that_adds_rounding_alone(runs: SimpleNamespace) -> None:
    for tap in ("out", "h.0"):
        found = lines(tap)
        assert (found.added, found.floor, tuple(found.found)) == (0.0, 0.0, ())
    assert runs.searches == []


def test_numbers_that_are_finite_on_one_side_alone_add_more_than_any_rounding(runs: SimpleNamespace) -> None:
    for added in (0.0, math.nan):
        runs.frame.loc[1, ["ratio", "added"]] = math.inf, added
        assert lines("h.1").added == math.inf
    # Whole numbers have no floor, and how far they are apart is known.
    runs.frame.loc[1, ["added", "floor"]] = 0.4, 0.0
    assert (lines("h.1").added, lines("h.1").floor) == (0.4, 0.0)


def test_names_and_remarks_are_text_in_a_notebook() -> None:
    shown = TapLines("<b>", 1e-3, 1e-6, (), ("x < y",))._repr_mimebundle_()["text/html"]
    assert "&lt;b&gt;" in shown
    assert "<p>x &lt; y</p>" in shown


def test_a_tap_that_was_not_measured_is_refused_with_those_that_were(runs: SimpleNamespace) -> None:
    with pytest.raises(
        SessionError,
        match=exactly("lines: no tap 'h.2' was measured on both sides in this call; did you mean 'h.1', 'h.0', 'h.*'?"),
    ):
        lines("h.2")
    with pytest.raises(
        SessionError,
        match=exactly("lines: no tap 'xyz' was measured on both sides in this call; measured: h.0, h.1, out, h.*"),
    ):
        lines("xyz")
    runs.frame.loc[1, "ratio"] = float("nan")
    with pytest.raises(
        SessionError,
        match=exactly(
            "lines: 'h.1' has no pair of finite numbers in some call, so how far it differs is unknown; "
            "session.lines of the first tap with a number that is not finite may tell why"
        ),
    ):
        lines("h.1")
    runs.recorded = True
    with pytest.raises(
        SessionError,
        match=exactly(
            "lines: the baseline is a recording, which has no operations to compare with; "
            "session.verdict() names the tap"
        ),
    ):
        lines("h.1")


def test_a_session_looks_for_lines_as_it_is_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(tap_lines, "lines_of_tap", lambda *given: asked.append(given))
    session: Any = object()
    Session.lines(session, "h", "f", "g", args=(1,), kwargs={"scale": 2}, threshold=7.0)
    ((owner, tap, request),) = asked
    assert (owner, tap) == (session, "h")
    assert (request.baseline, request.target, request.threshold) == ("f", "g", 7.0)
    assert (request.args, request.kwargs) == ((1,), {"scale": 2})


@pytest.mark.parametrize(
    ("given", "begins"),
    [
        ((0.0, 1e-6, [], ()), "'x' adds no more than rounding"),
        ((0.5, 0.0, [], ()), "'x' adds 0.5, and numbers of its dtype are not rounded. No operation was found"),
        ((math.inf, 1e-6, [], ()), "'x' adds a difference above any rounding: numbers are finite, or not 0, on one"),
        ((1e-3, 1e-6, [], ()), "'x' adds 0.001, 1e+03 x the rounding of its dtype. No operation was found that causes"),
        ((1e-3, 1e-6, [], ("why",)), "'x' adds 0.001, 1e+03 x the rounding of its dtype.\nwhy"),
    ],
)
def test_the_headline_states_whether_an_operation_was_found(given: Any, begins: str) -> None:
    added, floor, found, remarks = given
    assert TapLines("x", added=added, floor=floor, found=found, remarks=remarks).text.startswith(begins)
