"""The dashboard's verdict: the button judges the expression, and says what it came to or why not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kit.pages import Browser, Screen
from kit.support import reset

import graftlab as gl
from graftlab.widgets.dashboard import Dashboard

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def session() -> Iterator[gl.Session]:
    with gl.launch(1, 1) as launched:
        launched.execute(
            "import torch, graftlab as gl\n"
            "def f(): gl.tap('x', torch.ones(4) * (2 if gl.here().side == 'target' else 1))"
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
