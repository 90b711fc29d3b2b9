"""The dashboard's verdict: the button judges the expression, and says what it came to or why not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kit.deadline import DEADLINE
from kit.pages import Browser, Screen
from kit.support import reset, wait_until

import graftlab as gl
from graftlab.control.core import internals_of
from graftlab.verdict.conclusion import newest_run
from graftlab.widgets.dashboard import Dashboard

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def session() -> Iterator[gl.Session]:
    with gl.launch(1, 1) as launched:
        launched.execute(
            "import torch, graftlab as gl\n"
            "def f(): gl.tap('x', torch.ones(4) * (2 if gl.here().side == 'target' else 1))\n"
            "def endless():\n"
            "    while True: gl.step()"
        )
        yield launched


@pytest.fixture
def screen(session: gl.Session, monkeypatch: pytest.MonkeyPatch) -> Iterator[Screen]:
    browser = Browser(in_a_thread=False)
    monkeypatch.setattr("ipywidgets.comm.create_comm", browser.create_comm)
    made = Screen(browser, Dashboard(reset(session)))
    yield made
    made.panel.close()


def judge(screen: Screen, expression: str) -> str:
    screen.enter("verdict-expression", expression)
    screen.click("judge")
    screen.settle()
    return screen.shown("verdict-text")


def test_the_button_judges_the_expression_and_shows_the_verdict(screen: Screen) -> None:
    assert "x is computed differently" in judge(screen, "f()")
    assert screen.panel.session.plan.compare == "True"
    screen.panel.refresh()
    # There is nothing more to stop.
    assert screen.find("stop").disabled


def test_the_verdict_uses_the_expression_on_the_screen_at_the_click(screen: Screen) -> None:
    # The browser holds the second one back until the kernel has taken the first; the click comes at once.
    screen.enter("verdict-expression", "earlier()")
    assert "x is computed differently" in judge(screen, "f()")
    assert screen.message == ""


@pytest.mark.parametrize(
    ("expression", "why"), [("", "enter the expression"), ("f(", "not valid Python"), ("g()", "NameError")]
)
def test_an_expression_that_cannot_be_judged_is_reported_in_the_panel(
    screen: Screen, expression: str, why: str
) -> None:
    assert judge(screen, expression) == ""
    assert why in screen.message
    assert "x is computed differently" in judge(screen, "f()")
    assert screen.message == "", "what was wrong with the expression before"


def test_a_verdict_of_the_panel_is_kept_in_the_saved_notebook_and_the_session(screen: Screen) -> None:
    session, before = screen.panel.session, len(screen.panel.session.verdicts)
    judge(screen, "f()")
    assert "x is computed differently" in screen.panel.static_html()
    [verdict] = session.verdicts[before:]
    assert verdict.named == ["x"]
    assert "x is computed differently" in session.report(session.folder / "report.html").read_text()


def test_after_a_verdict_the_figure_and_the_frame_show_its_plain_run(screen: Screen) -> None:
    judge(screen, "f()")
    screen.panel.refresh()
    session = screen.panel.session
    assert session.runs[-1].number > min(internals_of(session).set_aside)
    shown = newest_run(session.frame, internals_of(session).set_aside)
    assert set(shown["status"]) == {"compared"}
    assert "grafted" not in screen.shown("verdict")
    assert "first divergent: x" in screen.shown("verdict")


def test_the_stop_button_ends_a_verdict_and_restores_the_plan(screen: Screen) -> None:
    session = screen.panel.session
    runs, before = len(session.runs), session.plan
    # The page's messages are read once nothing is busy, so the view is called directly.
    screen.panel._judged._judge("endless()")
    wait_until(lambda: len(session.runs) > runs and session.runs[-1].steps > 0, "its first run")
    assert "judging" not in screen.panel.static_html(), "a saved notebook would say so for good"
    screen.click("stop")
    screen.settle()
    assert screen.message.startswith("the verdict was stopped in its run 1; its code on the ranks was interrupted, and")
    assert session.runs[-1].wait_steps(10**9, timeout=DEADLINE).done
    assert (session.plan.b2t, session.plan.compare) == (before.b2t, before.compare)
    assert "x is computed differently" in judge(screen, "f()")
