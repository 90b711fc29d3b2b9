"""The dashboard's verdict: the button judges the expression, and says what it came to or why not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kit.support import reset, wait_until

import graftlab as gl
from graftlab.widgets.dashboard import Dashboard
from graftlab.widgets.verdict_view import VerdictView

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
def dashboard(session: gl.Session) -> Iterator[Dashboard]:
    made = Dashboard(reset(session))
    yield made
    made.close()


def view_of(dashboard: Dashboard) -> VerdictView:
    [found] = [child for child in dashboard.children if isinstance(child, VerdictView)]
    return found


def judge(dashboard: Dashboard, expression: str) -> str:
    view = view_of(dashboard)
    view._expression.value = expression
    button = view.children[0].children[1]
    button.click()
    wait_until(lambda: not dashboard.busy, "the end of the verdict")
    return str(view._result.value)


def test_the_button_judges_the_expression_and_shows_the_verdict(dashboard: Dashboard) -> None:
    shown = judge(dashboard, "f()")
    assert "x is computed differently" in shown
    assert dashboard.session.plan.compare == "True"


@pytest.mark.parametrize(
    ("expression", "why"), [("", "write the expression"), ("f(", "not Python"), ("g()", "NameError")]
)
def test_what_cannot_be_judged_is_said_in_the_panel(dashboard: Dashboard, expression: str, why: str) -> None:
    assert judge(dashboard, expression) == ""
    assert why in dashboard.message
    assert "x is computed differently" in judge(dashboard, "f()")
    assert dashboard.message == "", "what was wrong with the expression before"
