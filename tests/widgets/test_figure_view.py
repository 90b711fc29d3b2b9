"""The canvas that a notebook shows for a figure: what it is made of, and what a page's messages make of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from kit.pages import Browser
from kit.support import wait_until
from matplotlib.figure import Figure

from graftlab.base import jupyter
from graftlab.errors import SessionError
from graftlab.plots.explorer import Canvas
from graftlab.plots.style import NotebookFigure
from graftlab.plots.verdict import explored
from graftlab.widgets.figure_view import FigureView, show_canvas
from graftlab.widgets.tap_explorer import TapExplorer


def tap(order: int, name: str, label: str, ratio: float, **more: Any) -> dict[str, Any]:
    measured = {"added": ratio * 1e-7, "floor": 1e-7, "ratio": ratio, "error": 1e-3, "error_ratio": 1e4, "alone": 2.0}
    return {"order": order, "name": name, "tags": {}, "step": 0, "rank": 0, "group": name, "label": label} | {
        **measured,
        **more,
    }


def test_each_culprit_is_noted_at_its_worst_tap_in_execution_order() -> None:
    frame = pd.DataFrame(
        [
            tap(1, "a", "clean", 0.1),
            tap(2, "layers.0.b", "culprit", 30.0, group="layers.*.b"),
            tap(3, "layers.1.b", "culprit", 900.0, group="layers.*.b"),
            tap(4, "c", "culprit", math.inf, added=math.nan),
        ]
    )
    state = explored(frame, 5.0, "two differ.")
    assert state["notes"] == [[2, "culprit: layers.*.b"], [3, "culprit: c"]]
    # Non-finite values on one side are no error of zero.
    assert state["nonfinite"] == [0, 0, 0, 1]
    assert state["value"][3] > 1e307
    many = explored(pd.DataFrame([tap(n, f"g{n}", "culprit", 9.0 + n) for n in range(6)]), 5.0, "")
    assert many["notes"][3] == [3, "culprit: g3 (and 2 more groups)"]


def test_calls_of_one_tap_have_labels_of_their_own() -> None:
    frame = pd.DataFrame([tap(order, "a", "clean", 0.1, step=step) for step in (0, 1) for order in (1, 2)])
    assert explored(frame, 5.0, "")["label"] == ["a step 0", "a step 0 call 2", "a step 1", "a step 1 call 2"]


def test_a_click_shows_the_pair_or_why_there_is_none_and_a_floor_is_checked(simulated: Browser) -> None:
    def pictures(at: int) -> Mapping[str, Figure]:
        if at == 1:
            raise SessionError("no pair of <b> is kept")
        return {"where the pair differs": NotebookFigure()}

    def with_floor(floor: float | None) -> Mapping[str, Any]:
        return {"label": ["a", "b"], "floor": floor}

    view = FigureView(Canvas({"label": ["a", "b"], "floor": 1e-5}, pictures, with_floor))
    pair = simulated.models[view._pair.comm.comm_id]

    def ask(what: str, value: Any) -> None:
        simulated.send(view.view.comm.comm_id, {"what": what, "value": value})
        simulated.kernel_works()

    ask("open", "a")
    wait_until(lambda: "<img" in pair["value"], "the picture")
    assert 'alt="a: where the pair differs.' in pair["value"]
    ask("chosen", "b")
    assert pair["value"] == ""
    ask("open", "b")
    wait_until(lambda: "no pair of &lt;b&gt; is kept" in pair["value"], "the reason")
    view._on_message(None, {"what": "open", "value": "another"}, [])
    ask("floor", 0.5)
    assert simulated.models[view.view.comm.comm_id]["figures"]["floor"] == 0.5
    ask("floor", None)
    for wrong in (math.nan, math.inf, -1.0, "1"):
        ask("floor", wrong)
        assert simulated.models[view.view.comm.comm_id]["figures"]["floor"] is None, wrong
    assert "no pair of &lt;b&gt; is kept" in pair["value"]


@pytest.mark.parametrize("error", [None, SessionError("the session is closed")])
def test_each_question_of_the_dashboards_page_is_answered_even_if_it_fails(error: Exception | None) -> None:
    """Until then the page says that it asks the kernel."""
    done: list[object] = []

    def take(what: str, value: object) -> None:
        done.append((what, value))
        if error is not None:
            raise error

    explorer: Any = SimpleNamespace(_take=take, view=SimpleNamespace(send=done.append))
    with pytest.raises(SessionError) if error is not None else nullcontext():
        TapExplorer._on_message(explorer, None, {"what": "keep", "value": "a"}, [])
    assert done == [("keep", "a"), {"what": "answered"}]


def test_without_a_notebook_the_picture_is_shown() -> None:
    canvas = Canvas({"label": []}, lambda at: {})
    with pytest.raises(NotImplementedError):
        show_canvas(NotebookFigure(), canvas)
    figure = NotebookFigure()
    with pytest.raises(NotImplementedError):
        figure._ipython_display_()
    shown = []
    figure.interactive = lambda: canvas
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jupyter, "show_canvas", lambda *given: shown.append(given))
        figure._ipython_display_()
    assert shown == [(figure, canvas)]
