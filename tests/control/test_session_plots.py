"""``session.plot``: help shows the options that each figure takes."""

from __future__ import annotations

import inspect
import math
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from kit.refusals import exactly
from kit.rows import row

import graftlab as gl
from graftlab import plots
from graftlab.control import session_plots
from graftlab.control.core import SessionCore
from graftlab.control.session_plots import SessionPlots
from graftlab.plots.style import NotebookFigure
from graftlab.rows.store import to_frame
from graftlab.session import Session


@pytest.mark.parametrize(
    ("name", "own"), [("divergence", ["step"]), ("over_steps", ["steps"]), ("history", ["name"]), ("ranks", ["name"])]
)
def test_the_options_are_those_of_the_function_of_that_name(name: str, own: list[str]) -> None:
    session = SessionCore.__new__(Session)
    method = getattr(session.plot, name)
    shown = inspect.signature(method).parameters
    of_function = [
        each for each in inspect.signature(getattr(plots, name)).parameters if each not in ("frame", "frames")
    ]
    assert list(shown) == [*own, *(each for each in of_function if each not in own)]
    assert shown["value"].default == "rel_l2"
    assert inspect.getdoc(getattr(plots, name)).splitlines()[0] in inspect.getdoc(method)


def steps(off_at: int, off: float) -> None:
    for step in range(4):
        gl.tap("a", torch.ones(4))
        gl.tap("b", torch.ones(4) + (off if step == off_at else 0.0))
        if step < 3:
            gl.step()


@pytest.mark.ranks
def test_divergence_draws_the_last_step_with_the_assumed_floor() -> None:
    with gl.launch(1, 1) as session:
        run = session.run(lambda: steps(1, 0.0), lambda: steps(1, 1.0))
        [ax] = session.plot.divergence().axes
        first = run.first_step
        assert ax.get_xlabel().endswith(f"run 0, step {first + 3} (the first divergent tap is in step {first + 1})")
        assert [text.get_text() for text in ax.get_xticklabels()] == ["a", "b"]
        assert [line.get_ydata()[0] for line in ax.lines if line.get_gid() == "noise floor"] == [1e-5]
        canvas = session.plot.divergence().interactive()
        assert f"step {first + 3}, plan 0, 2 taps: first divergent: none" in canvas.state["headline"]
        assert f"First divergent in this run: b on target[0] in step {first + 1}" in canvas.state["headline"]
        assert canvas.state["notes"] == []
        again = session.plot.divergence(step=first + 1).interactive()
        assert again.state["notes"] == [[1, "first divergent: b"]]
        assert again.with_floor(2.0)["notes"] == []
        with pytest.raises(gl.SessionError, match="no pair of tensors is kept for 'b'"):
            again.open(1)
        # Where the figure shows something else, the canvas would not fit.
        assert session.plot.divergence(value="max_abs").interactive is None
        [ax] = session.plot.divergence(step=first + 1).axes
        assert ax.get_xlabel().endswith(f"run 0, step {first + 1}")
        with pytest.raises(gl.SessionError, match=f"no rows of step 99; it has rows of steps {first} to {first + 3}"):
            session.plot.divergence(step=99)
        with pytest.raises(gl.SessionError, match=f"no rows of step 99 to 120; it has rows of steps {first} to"):
            session.plot.over_steps(steps=range(99, 121))
        assert (
            session.plot.over_steps()
            .axes[0]
            .get_title(loc="left")
            .startswith(f"first divergent: b in step {first + 1}")
        )
        assert session.plot.over_steps(steps=range(first + 2, 99)).axes[0].get_title(loc="left") == (
            "no tap is above the floor 1e-05, assumed for float32 in 2 steps"
        )


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the functions that draw were given."""
    calls: list[Any] = []
    for name in ("history", "ranks", "histogram", "scatter", "draw_difference_map", "over_steps"):
        monkeypatch.setattr(plots, name, lambda *args, _name=name, **given: calls.append((_name, args, given)))
    monkeypatch.setattr(
        session_plots,
        "internals_of",
        lambda session: SimpleNamespace(set_aside=frozenset(), verdicts=session.verdicts, pairs=session.pairs),
    )
    return calls


def plots_of(**given: Any) -> SessionPlots:
    rows = [row(name, order=order, step=step) for step in range(3) for order, name in enumerate("ab")]
    pairs = SimpleNamespace(newest=lambda name, rank, tags: {"name": name, "layer": 3, "step": 1, "side": "target"})
    usual = {"frame": to_frame(rows), "runs": [], "verdicts": [], "pairs": pairs}
    usual["tensors"] = lambda name, **tags: ("one", "other")
    session: Any = SimpleNamespace(**{**usual, **given})
    return SessionPlots(session)


def test_each_figure_of_a_pair_has_its_tap_and_tags_in_its_title(drawn: list[Any]) -> None:
    figures = plots_of(difference_map=lambda name, **given: (name, given))
    figures.histogram("h", layer=3)
    figures.scatter("h", layer=3, head=1)
    figures.heatmap("h", dims=(0,))
    chosen = {"dims": (0,), "step": 1}
    assert [args for _, args, _ in drawn] == [("one", "other"), ("one", "other"), (("h", chosen),)]
    titles = ["h, layer=3, step=1", "h, layer=3, head=1, step=1", "h, layer=3, step=1"]
    assert [given["title"] for _, _, given in drawn] == titles


def test_one_taps_figures_leave_out_a_verdicts_own_runs(monkeypatch: pytest.MonkeyPatch, drawn: list[Any]) -> None:
    monkeypatch.setattr(session_plots, "internals_of", lambda session: SimpleNamespace(set_aside={8}))
    frame = to_frame([row("a", run=7, step=1), row("a", run=8, step=2), row("a", run=9, step=3)])
    figures = plots_of(frame=frame)
    figures.history("a")
    figures.ranks("a")
    assert [args[0]["step"].tolist() for _, args, _ in drawn] == [[1, 3]] * 2
    drawn.clear()
    monkeypatch.setattr(session_plots, "internals_of", lambda session: SimpleNamespace(set_aside={9}))
    figures.over_steps()
    assert [args[0]["step"].tolist() for _, args, _ in drawn] == [[2]]
    with pytest.raises(gl.SessionError, match=r"run 8 has no rows of step 3; it has rows of step 2"):
        figures.divergence(step=3)


@pytest.mark.ranks
def test_a_figure_names_the_newest_run_if_its_pair_is_not_of_it() -> None:
    def forward(off: float) -> None:
        for call in range(2):
            gl.tap("h", torch.ones(4) + off * call)

    with gl.launch(1, 1) as session:
        session.edit(keep="name == 'h'")
        kept = session.run(forward, forward, args=(0.0,)).first_step

        def draw(**tags: Any) -> str:
            return str(session.plot.heatmap("h", **tags).axes[0].get_title(loc="left")).partition("  [")[0]

        assert draw() == f"h, occurrence=1, step={kept}"
        assert draw(occurrence=0) == f"h, occurrence=0, step={kept}"
        session.execute("1 + 1")
        assert draw() == f"h, occurrence=1, step={kept}"
        session.edit(keep=None)
        run = session.run(lambda: forward(0.0), lambda: forward(1.0))
        assert draw() == f"h, occurrence=1, step={kept}, not of run {run.number}"
        with pytest.raises(gl.SessionError, match=rf"kept for 'h', step=99; this tap has pairs of step {kept}$"):
            session.plot.heatmap("h", step=99)


def test_only_a_pair_older_than_the_newest_rows_is_said_to_be_of_another_run(drawn: list[Any]) -> None:
    def title(*first_steps: int, rows: list[Any]) -> str:
        runs = [SimpleNamespace(first_step=step, done=True) for step in first_steps]
        plots_of(runs=runs, frame=to_frame(rows)).histogram("h")
        return str(drawn.pop()[2]["title"])

    # The pair is of step 1.
    assert title(0, 2, rows=[row("a", step=2, run=7)]) == "h, layer=3, step=1, not of run 7"
    assert title(0, rows=[row("a", step=2, run=7)]) == "h, layer=3, step=1"
    assert title(0, 2, rows=[row("a", step=1, run=7)]) == title(0, 2, rows=[]) == "h, layer=3, step=1"


def test_the_figure_of_a_step_says_what_other_steps_have(monkeypatch: pytest.MonkeyPatch, drawn: list[Any]) -> None:
    said: list[str] = []
    given: list[Any] = []
    ax = SimpleNamespace(get_xlabel=lambda: "taps", set_xlabel=said.append)

    def divergence(frame: Any, **options: Any) -> Any:
        given.append((frame, options))
        return SimpleNamespace(axes=[ax])

    monkeypatch.setattr(plots, "divergence", divergence)
    rows = [row("a", order=0, step=0, rel_l2=0.5, run=4)]
    rows += [row("b", order=1, step=1, status="missing", run=4), row("c", order=0, step=2, status="missing", run=4)]
    figures = plots_of(frame=to_frame(rows))
    figures.divergence()
    figures.divergence(step=0)
    assert said == [
        "taps; run 4, step 2 (the first divergent tap is in step 0); 1 row of other steps not compared",
        "taps; run 4, step 0; 2 rows of other steps not compared",
    ]
    assert [frame["name"].tolist() for frame, _ in given] == [["c"], ["a"]]
    assert given[0][0].index.tolist() == [0]
    assert given[0][1] == {"noise_floor": 1e-5}
    # Axes of the caller keep their label.
    figures.divergence(ax=ax, noise_floor=None)
    assert len(said) == 2
    assert given[2][1] == {"ax": ax, "noise_floor": None}
    with pytest.raises(gl.SessionError, match="run 4 has no rows of step 9; it has rows of steps 0 to 2"):
        figures.divergence(step=9)
    # During a run the last step may still lack taps.
    plots_of(frame=to_frame(rows), runs=[SimpleNamespace(done=False)]).divergence()
    assert given[-1][0]["name"].tolist() == ["b"]


def test_a_row_leads_to_the_pair_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, dict[str, Any]]] = []
    for name in ("heatmap", "histogram"):
        monkeypatch.setattr(SessionPlots, name, lambda self, name, **tags: asked.append((name, tags)))
    of_second = row("h", side="baseline", rank=1, step=4, own={"layer": 3, "scale": math.nan, "dims": "s d"})
    session_plots.figures_of_pair(Mock(), of_second, step=4)
    assert asked == [("h", {"layer": 3, "side": "baseline", "rank": 1, "step": 4})] * 2


def test_a_figure_has_a_canvas_only_where_that_shows_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def divergence(frame: Any, **options: Any) -> NotebookFigure:
        figure = NotebookFigure()
        figure.add_subplot()
        return figure

    monkeypatch.setattr(plots, "divergence", divergence)
    frame = to_frame([row("h", rel_l2=0.5)])
    for options, has_canvas in (({}, True), ({"noise_floor": None}, False), ({"value": "max_abs"}, False)):
        figure = session_plots._divergence_of_step(Mock(), frame, 0, dict(options))
        assert isinstance(figure, NotebookFigure)
        assert (figure.interactive is not None) == has_canvas


def test_a_tap_of_the_canvas_leads_to_the_pair_of_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    for name in ("heatmap", "histogram"):
        monkeypatch.setattr(SessionPlots, name, lambda self, name, **tags: asked.append(tags["step"]))
    session: Any = SimpleNamespace(taps=[])
    frame = to_frame([row("h", step=step, rel_l2=0.5) for step in range(3)])
    canvas = session_plots._canvas(session, frame, 1, 1e-5)
    canvas.open(0)
    assert asked == [1, 1]
    assert canvas.state["headline"].startswith("Run 0, step 1")
    figure = NotebookFigure()
    figure.interactive = lambda: canvas
    monkeypatch.setattr(session_plots, "_divergence_of_step", lambda *_: figure)
    session.frame_of = lambda number: frame
    # Below the summary of a run, which has the conclusion in words.
    assert session_plots.divergence_of_run(session, 0).interactive().state["headline"] == ""


def test_steps_are_chosen_by_their_range_and_one_without_rows_is_refused(drawn: list[Any]) -> None:
    figures = plots_of()
    figures.over_steps(steps=range(1, 3), noise_floor=0.5)
    ((name, (frame,), given),) = drawn
    assert (name, sorted(set(frame["step"])), given) == ("over_steps", [1, 2], {"noise_floor": 0.5})
    assert list(frame.index) == list(range(4))
    for chosen, found in ((range(1, 2), [1]), (range(0, 9, 2), [0, 2]), (range(2, -1, -2), [0, 2])):
        figures.over_steps(steps=chosen)
        assert sorted(set(drawn.pop()[1][0]["step"])) == found
    with pytest.raises(
        gl.SessionError, match=exactly("run 0 has no rows of step 5 or later; it has rows of steps 0 to 2")
    ):
        figures.over_steps(steps=range(5, sys.maxsize))
    with pytest.raises(gl.SessionError, match=exactly("run 0 has no rows of step 5 to 7; it has rows of steps 0 to 2")):
        figures.over_steps(steps=range(5, 8))
    figures.over_steps()
    assert len(drawn[1][1][0]) == 6


@pytest.mark.parametrize(("done", "last"), [(None, 2), (True, 2), (False, 1)])
def test_during_a_run_the_last_step_may_still_lack_taps(done: bool | None, last: int) -> None:
    figures = plots_of(runs=[] if done is None else [SimpleNamespace(done=not done), SimpleNamespace(done=done)])
    assert figures._last_ended(np.array([2, 0, 1])) == last
    assert figures._last_ended(np.array([2])) == 2


def test_a_figure_of_a_verdict_is_that_of_the_newest(drawn: list[Any]) -> None:
    with pytest.raises(
        gl.SessionError,
        match=exactly("session.plot.verdict: nothing was judged yet; session.verdict(f, g) judges two functions"),
    ):
        plots_of().verdict()
    old, new = (SimpleNamespace(plot=lambda tap, n=n, **given: (n, tap, given)) for n in (1, 2))
    assert plots_of(verdicts=[old, new]).verdict("h", dims=(0,)) == (2, "h", {"dims": (0,)})
