"""What a notebook shows for a run: it never reads as success what is none."""

from __future__ import annotations

import html
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import graftlab as gl
from graftlab.control.run import failing_in
from graftlab.plots import explorer
from graftlab.verdict.conclusion import conclude

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def session() -> Iterator[gl.Session]:
    with gl.launch(1, 1) as session:
        yield session


def model(nan: bool) -> None:
    for layer in range(3):
        gl.tap("hidden", torch.ones(8), layer=layer)
    logits = torch.ones(64)
    if nan:
        logits[:12] = torch.nan
    gl.tap("logits", logits)


def shown(run: gl.Run) -> str:
    return html.unescape(re.sub("<[^>]*>", " ", run._repr_mimebundle_()["text/html"]))


def test_the_summary_begins_with_nans_on_one_side(session: gl.Session) -> None:
    run = session.run(lambda: model(False), lambda: model(True))
    text = shown(run)
    assert "4 compared" in text
    told = text.index("first divergent: logits on target[0]: 12 of 64 elements are NaN or infinite")
    assert told < text.index("all finite values are equal")


def test_the_summary_reports_that_all_rows_are_equal(session: gl.Session) -> None:
    text = shown(session.run(lambda: model(False), lambda: model(False)))
    assert "first divergent: none of 4 compared rows is above the floor 1e-05" in text
    assert "every compared row is equal" in text


def test_the_summary_reports_taps_without_a_counterpart(session: gl.Session) -> None:
    run = session.run(
        lambda: gl.tap("a", torch.ones(3)), lambda: (gl.tap("a", torch.ones(3)), gl.tap("b", torch.ones(3)))
    )
    assert run.summary[0] == "not compared: 1 missing; the frame's column error says why"
    assert "none; the only compared row" in run.summary[1]
    assert "not compared: 1 missing" in run._repr_mimebundle_()["text/plain"]
    assert "without this tap" in run.frame.set_index("name")["error"]["b"]
    run = session.run(lambda: gl.tap("a", torch.ones(3)), lambda: None)
    assert run.summary[0] == "not compared: 1 unmatched; no rank of the other side requested it"


def test_a_filter_that_matched_no_tap_of_the_run_is_named(session: gl.Session) -> None:
    session.edit(b2t="name == 'hiden'", keep="name == 'hidden'")
    try:
        run = session.run(lambda: model(False), lambda: model(False))
        assert run.unmatched == {"b2t": "name == 'hiden'"}
        assert "b2t matched no tap in this run: name == 'hiden'" in shown(run)
        assert "keep matched" not in shown(run)
        session.edit(b2t="layer == 1")
        assert session.run(lambda: model(False), lambda: model(False)).unmatched == {}
        assert run.unmatched == {"b2t": "name == 'hiden'"}, "later plans are not this run's"
        session.edit(compare=None, b2t="name == 'hiden'", keep=None)
        run = session.run(lambda: model(False), lambda: model(False))
        assert run.unmatched == {"b2t": "name == 'hiden'"}
        assert "no taps" in shown(run)
        session.edit(compare="layr < 2", b2t=None)
        run = session.run(lambda: model(False), lambda: model(False))
        assert run.summary == ["compare matched no tap in this run: layr < 2"]
    finally:
        session.edit(b2t=None, keep=None, compare="True")


def test_a_filter_on_a_tag_stored_as_repr_is_not_called_unmatched(session: gl.Session) -> None:
    def shaped() -> None:
        gl.tap("h", torch.ones(2), shape_of_it=(1, 2))

    session.edit(b2t="shape_of_it == (1, 2)")
    try:
        assert session.run(shaped, shaped).unmatched == {}
    finally:
        session.edit(b2t=None)


def test_an_overlap_on_taps_already_seen_is_refused_before_a_run(session: gl.Session) -> None:
    session.run(lambda: model(False), lambda: model(False))
    before = session.plan
    with pytest.raises(gl.GraftOverlapError, match="match hidden layer=1; a tap is grafted one way"):
        session.edit(b2t="layer == 1", t2b="name == 'hidden' and layer > 0 and layer < 2")
    assert session.plan is before


def test_summary_plots_report_and_dashboard_name_the_same_first_divergent_tap(
    session: gl.Session, tmp_path: Path
) -> None:
    run = session.run(lambda: model(False), lambda: model(True))
    said = next(line for line in run.summary if line.startswith("first divergent"))
    assert said.startswith("first divergent: logits on target[0]: 12 of 64")
    assert said in shown(run)
    report = session.report(tmp_path / "report.html").read_text(encoding="utf-8")
    loaded = gl.load_run(session.folder).report(tmp_path / "loaded.html").read_text(encoding="utf-8")
    assert html.escape(said) in report
    assert html.escape(said) in loaded
    assert "first divergent: logits" in session.plot.over_steps().axes[0].get_title(loc="left")
    board = session.dashboard()
    assert html.escape(said) in board.static_html()
    board.close()


def test_rows_of_different_runs_do_not_mix(session: gl.Session) -> None:
    first = session.run(lambda: model(False), lambda: model(True))
    session.run(lambda: model(False), lambda: model(False))
    assert "4 rows" in repr(first)
    assert any("logits" in line for line in first.summary)


def test_the_first_line_on_a_run_in_which_a_rank_died_begins_with_that(tmp_path: Path) -> None:
    def dies() -> None:
        me = gl.here()
        assert me is not None
        gl.tap("h", torch.ones(4))
        gl.step()
        if me.side == "target":
            os._exit(3)

    with gl.launch(1, 1, folder=tmp_path / "run") as session:
        run = session.start(dies, dies)
        with pytest.raises(gl.RunError):
            run.wait()
        found = conclude(run.frame, session.taps)
        said = explorer.headline(found, failing_in(session.runs, found))
        assert re.match(r"Run 0 failed on target\[0\] \(ended with exit code 3 \(pid [^)]*\)\), step", said), said
        assert said.split("</b>")[0] in html.unescape(session.report(tmp_path / "report.html").read_text())
