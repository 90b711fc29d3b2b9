"""The renames in the filter editor: what a rule would rewrite is shown first, and each can be dropped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from kit.pages import Browser, Screen
from kit.support import reset

import graftlab as gl
from graftlab.widgets.refresher import refresher_of

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def session() -> Iterator[gl.Session]:
    def model(prefix: str) -> None:
        for layer in range(5):
            gl.tap(f"{prefix}layers.{layer}.mlp", torch.ones(3))

    with gl.launch(1, 1) as session:
        session.run(lambda: model(""), lambda: model("model."))
        yield session


@pytest.fixture
def screen(session: gl.Session, simulated: Browser, monkeypatch: pytest.MonkeyPatch) -> Iterator[Screen]:
    monkeypatch.setattr(refresher_of(session), "interval", 1000)
    made = reset(session).filter_editor()
    yield Screen(simulated, made)
    made.close()


def write(screen: Screen, side: str, pattern: str, new: str = "") -> None:
    renames = screen.panel._renames  # type: ignore[attr-defined]
    renames._side.value, renames._pattern.value, renames._new.value = side, pattern, new


def test_a_new_rule_is_previewed_with_the_names_it_rewrites_and_pairs(session: gl.Session, screen: Screen) -> None:
    write(screen, "target", r"^model\.")
    assert screen.shown("rule-preview").startswith(
        "5 names seen match; 5 of the new names exist on the baseline. model.layers.0.mlp → layers.0.mlp"
    )
    assert "and 2 more" in screen.shown("rule-preview")
    assert session.plan.rename == ()
    # Only the side changes.
    write(screen, "baseline", r"^model\.")
    assert screen.shown("rule-preview").startswith("0 names seen match; 0 of the new names")
    write(screen, "target", "(")
    assert "unterminated" in screen.shown("rule-preview")
    write(screen, "target", "x", r"\\9")
    assert "<b>" not in screen.markup("rule-preview")


def test_a_pattern_that_backtracks_forever_is_reported_while_typing(screen: Screen) -> None:
    write(screen, "target", r"(?:(.)|(\w)|(.))+[A-Z]$")
    assert "takes more than" in screen.shown("rule-preview")


def test_the_preview_counts_what_earlier_rules_leave_to_a_new_one(session: gl.Session, screen: Screen) -> None:
    session.edit(rename={"target": {"layers.3": "blocks.3"}})
    write(screen, "target", r"^model\.")
    shown = screen.shown("rule-preview")
    assert shown.startswith("5 names seen match; 4 of the new names exist on the baseline; an earlier rule rewrites 1")


def test_rules_are_added_listed_and_removed(session: gl.Session, screen: Screen) -> None:
    write(screen, "target", r"^model\.")
    screen.click("add-rule")
    screen.browser.kernel_works()
    assert session.plan.rename == (("target", r"^model\.", ""),)
    assert f"Published version {session.plan.version}" in screen.message
    renames = screen.panel._renames  # type: ignore[attr-defined]
    # The fields are ready for another rule, and a rule that is typed is taken as a whole.
    assert (renames._pattern.value, renames._new.value, screen.shown("rule-preview")) == ("", "", "")
    assert not (renames._pattern.continuous_update)
    assert not (renames._new.continuous_update)
    # What is shown already is left as it is.
    buttons = renames._buttons
    screen.panel.refresh()
    assert renames._buttons is buttons
    write(screen, "baseline", "mlp", "ffn")
    screen.click("add-rule")
    screen.browser.kernel_works()
    assert len(session.plan.rename) == 2
    assert (renames._pattern.value, renames._new.value) == ("", "")
    assert screen.panel._renames.title == "Renames (2)"  # type: ignore[attr-defined]
    screen.panel._renames._buttons[0].click()  # type: ignore[attr-defined]
    screen.panel.refresh()
    assert [rule[0] for rule in session.plan.rename] == ["baseline"]
    version = session.plan.version
    for pattern, new, said in (
        ("(", "", "is invalid"),
        ("", "x", "enter the regular"),
        ("mlp", "ffn", "Nothing to"),
    ):
        write(screen, "target" if pattern == "(" else "baseline", pattern, new)
        screen.click("add-rule")
        screen.browser.kernel_works()
        assert said in screen.message
    assert session.plan.version == version, "what changes nothing made a plan"
    session.edit(rename=None)
    screen.panel.refresh()
    assert screen.panel._renames.title == "Renames (0)"  # type: ignore[attr-defined]
