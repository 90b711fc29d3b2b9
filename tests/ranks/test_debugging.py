"""The frames of the last failure: inspected with pdb, never resumed, and released at the next run."""

from __future__ import annotations

import gc
import re
import threading
import weakref
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
from kit.deadline import DEADLINE
from kit.refusals import exactly

import graftlab as gl
from graftlab.base.world import RunInfo
from graftlab.plan.plan import GraftPlan
from graftlab.plan.wire import to_wire
from graftlab.ranks import debugging
from graftlab.ranks.debugging import LastFailure, stacks_of_other_threads
from graftlab.ranks.messages import Evaluate, Execute, JobCode, RunRequest
from graftlab.ranks.namespace import Namespace
from graftlab.ranks.worker import Rank


class Held:
    value = 41


def outer(held: Held) -> None:
    scale = 3
    inner(held, scale)


def inner(held: Held, factor: int) -> None:
    raise ValueError(f"no such factor: {factor}")


@pytest.fixture
def last() -> LastFailure:
    made = LastFailure()
    try:
        outer(Held())
    except ValueError as error:
        made.keep(error)
    return made


def test_post_mortem_shows_exception_frames_source_and_values(last: LastFailure) -> None:
    said = last.ask("")
    assert said.startswith("ValueError: no such factor: 3\n")
    assert "outer()" in said
    assert "inner()" in said
    assert last.ask("p factor, held.value") == "(3, 41)"
    assert "raise ValueError" in last.ask("l")
    assert "outer()" in last.ask("u")
    assert last.ask("p scale * 2") == "6"
    assert last.ask("scale + 1") == "4"
    assert "NameError" in last.ask("p factor")
    last.ask("d")
    assert last.ask("p factor") == "3"


@pytest.mark.parametrize(
    "work",
    [Execute("count = 0\n1 / count", "<cell>"), Evaluate("1 / 0", "<cell>")],
)
def test_frames_begin_with_the_users_own(work: Execute | Evaluate) -> None:
    last = LastFailure()
    with pytest.raises(ZeroDivisionError) as caught:
        Namespace(ModuleType("cells")).run(work)
    assert caught.value.__traceback__ is not None
    # Without the frame of this test, as on a rank.
    last.keep(caught.value.with_traceback(caught.value.__traceback__.tb_next))
    assert re.findall(r"^[> ] (\S.*)\(\d+\)", last.ask("w"), re.MULTILINE) == ["<cell>"]
    assert "Oldest frame" in last.ask("u")


def test_a_failure_outside_the_users_code_has_all_its_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debugging, "_ABOVE_USER_CODE", frozenset({__file__}))
    last = LastFailure()
    try:
        outer(Held())
    except ValueError as error:
        last.keep(error)
    frames = last.ask("w")
    assert "outer()" in frames
    assert "inner()" in frames


@pytest.mark.parametrize("command", ["c", "n", "step", "jump 3", "interact", "q", "b 3"])
def test_failed_code_cannot_be_resumed(last: LastFailure, command: str) -> None:
    with pytest.raises(gl.SessionError, match="cannot be resumed"):
        last.ask(command)
    assert last.ask("p factor") == "3"


@pytest.mark.slow
def test_frames_are_released_at_the_next_run() -> None:
    last, held = LastFailure(), Held()
    seen = weakref.ref(held)
    try:
        outer(held)
    except ValueError as error:
        last.keep(error)
    del held
    gc.collect()
    assert seen() is not None
    last.ask("w")
    last.forget()
    gc.collect()
    assert seen() is None
    with pytest.raises(gl.SessionError, match="no failure is kept"):
        last.ask("w")


def test_long_answers_are_cut_and_an_endless_command_does_not_block_others(
    last: LastFailure, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = last.ask("print('x' * 100_000)")
    assert len(said) < 25_000
    assert said.endswith("more characters]")
    monkeypatch.setattr(debugging, "_PATIENCE", 0.05)
    begun, go = threading.Event(), threading.Event()
    monkeypatch.setattr(Held, "wait", lambda self: (begun.set(), go.wait(DEADLINE)), raising=False)
    waiting = threading.Thread(target=last.ask, args=("held.wait()",))
    waiting.start()
    try:
        assert begun.wait(DEADLINE)
        with pytest.raises(
            gl.SessionError, match=exactly("the previous command is still running here; session.restart() ends it")
        ):
            last.ask("p factor")
    finally:
        go.set()
        waiting.join(DEADLINE)
    assert last.ask("p factor") == "3"


def test_a_thread_below_no_code_of_a_rank_has_all_its_frames() -> None:
    go = threading.Event()
    waiting = threading.Thread(target=lambda: go.wait(DEADLINE), name="waits here")
    waiting.start()
    try:
        (own,) = (each for each in stacks_of_other_threads().split("\n\n") if "waits here" in each)
    finally:
        go.set()
        waiting.join(DEADLINE)
    assert re.findall(r", in (\w+)$", own, re.MULTILINE)[:2] == ["_bootstrap", "_bootstrap_inner"]


def test_a_run_that_succeeds_leaves_no_failure_of_the_one_before() -> None:
    rank: Any = object.__new__(Rank)
    work = Mock(side_effect=[ValueError("planted"), 3])
    parts = {name: MagicMock() for name in ("_grafter", "_line", "_exchange", "_control", "_edited_modules")}
    given = {"_namespace": SimpleNamespace(run=work), "_streams": [], "_last_failure": LastFailure()}
    vars(rank).update(parts, _interrupted_run=-1, **given)
    request = RunRequest(RunInfo(0, 0, (0, 1)), to_wire(GraftPlan()), JobCode())
    rank._run(request)
    assert rank._last_failure.ask("").startswith("ValueError: planted")
    rank._run(request)
    with pytest.raises(
        gl.SessionError, match=exactly("no failure is kept: nothing failed on this rank in the newest run")
    ):
        rank._last_failure.ask("")
