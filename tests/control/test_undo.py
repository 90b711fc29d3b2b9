"""Edits of a session's plan are undone and redone, of whichever part and wherever they were made."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import graftlab as gl
from graftlab.control.core import lend_plan, restore_plan
from graftlab.plan.changes import parts_of

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def shared() -> Iterator[gl.Session]:
    with gl.launch() as session:
        yield session


@pytest.fixture
def session(shared: gl.Session) -> gl.Session:
    """The session, with nothing left to undo or redo."""
    shared.edit(b2t=None, t2b=None, compare="True", keep=None, transform=None, rename=None, pairs=None)
    plans = shared._plans
    plans._done.clear()
    plans._undone.clear()
    return shared


def layers(offset: float = 0.0) -> None:
    x = torch.ones(4)
    for layer in range(3):
        x = gl.tap("h", x * 2 + offset * (layer == 1), layer=layer)


def test_edits_of_every_part_are_undone_and_redone_in_order(session: gl.Session) -> None:
    stages = [parts_of(session.plan)]
    for change in (
        {"b2t": "layer == 1"},
        {"transform": ("True", "operator.neg")},
        {"pairs": [("h", "k")]},
        {"rename": {"target": {"^model": ""}}, "keep": "True"},
    ):
        stages.append(parts_of(session.edit(**change)))
    texts = [
        "keep: True -> nothing; rename: 1 rule (target ^model -> ) -> none",
        "pairs: 1 pair (h = k) -> none",
        "transform: operator.neg where True -> default",
        "b2t: layer == 1 -> nothing",
    ]
    versions = [session.plan.version]
    for text, before in zip(texts, reversed(stages[:-1]), strict=True):
        change = session.undo()
        assert change.text == text
        assert change.plan is session.plan
        assert parts_of(session.plan) == before
        versions.append(session.plan.version)
    with pytest.raises(gl.SessionError, match="no edit of the plan to undo"):
        session.undo()
    assert versions == [*range(versions[0], versions[0] + 5)], "each is a new version"
    for stage in stages[1:]:
        session.redo()
        assert parts_of(session.plan) == stage
    with pytest.raises(gl.SessionError, match="no edit of the plan to redo"):
        session.redo()


def test_an_edit_after_an_undo_ends_the_chance_to_redo(session: gl.Session) -> None:
    session.edit(b2t="layer == 1")
    session.undo()
    session.edit(keep="True")
    with pytest.raises(gl.SessionError, match="to redo"):
        session.redo()
    assert session.undo().text == "keep: True -> nothing"


def test_an_edit_without_a_change_is_not_a_step_of_undo(session: gl.Session) -> None:
    session.edit(b2t="layer == 1")
    session.edit(b2t=" layer == 1 ")
    assert session.undo().parts == ("b2t",)
    assert session.plan.b2t is None


def test_the_runs_of_a_verdict_are_not_steps_of_undo(session: gl.Session) -> None:
    session.edit(keep="layer == 1")
    verdict = session.verdict(layers, layers, kwargs={"offset": 0.0})
    assert verdict.named == []
    assert session.plan.keep == "layer == 1"
    assert session.undo().text == "keep: layer == 1 -> nothing"


def test_a_borrowed_plan_is_not_undone_and_restoring_it_allows_it_again(session: gl.Session) -> None:
    session.edit(keep="layer == 1")
    lend_plan(session, b2t="True", keep=None)
    with pytest.raises(gl.SessionError, match="is that of a verdict, a match or a comparison"):
        session.undo()
    restore_plan(session)
    assert session.plan.b2t is None
    assert session.undo().parts == ("keep",)


def test_restoring_a_borrowed_plan_keeps_a_newer_edit_of_the_user(session: gl.Session) -> None:
    lend_plan(session, t2b="layer == 0")
    # The edit is one of the plan from before.
    session.edit(keep="layer == 2")
    assert (session.plan.t2b, session.plan.keep) == (None, "layer == 2")
    lend_plan(session, b2t="True", keep=None)
    restore_plan(session)
    assert (session.plan.b2t, session.plan.keep) == (None, "layer == 2")
    version = session.plan.version
    restore_plan(session)
    assert session.plan.version == version


def test_an_undone_edit_takes_effect_from_the_next_run_on(session: gl.Session) -> None:
    def run() -> list[str]:
        return list(session.run(layers, lambda: layers(1.0)).frame["status"])

    session.edit(b2t="layer == 1")
    assert run() == ["compared", "grafted", "compared"]
    session.undo()
    assert run() == ["compared"] * 3
    session.redo()
    assert run() == ["compared", "grafted", "compared"]
