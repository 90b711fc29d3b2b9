"""The stop button at the worst moments, and a verdict beside other work: the plan and the ranks are as before."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from kit.deadline import DEADLINE
from kit.mailboxes import in_background
from kit.support import reset, wait_until

import graftlab as gl
from graftlab.control.core import lend_plan, restore_plan
from graftlab.control.plans import Plans
from graftlab.control.run import Run
from graftlab.errors import WaitInterrupted
from graftlab.exchange.channel import SocketChannel

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def launched() -> Iterator[gl.Session]:
    with gl.launch(1, 1) as session:
        yield session


@pytest.fixture
def session(launched: gl.Session) -> gl.Session:
    return reset(launched)


def forward() -> None:
    gl.tap("x", torch.ones(2))


def serve() -> None:
    while True:
        gl.step()


def pressed_in(call: Callable[..., Any], number: int = 1) -> Callable[..., Any]:
    """This call, with the stop button pressed at the beginning of its ``number``-th call."""
    calls = 0

    def pressed(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            os.kill(os.getpid(), signal.SIGINT)
        return call(*args, **kwargs)

    return pressed


def test_a_second_press_does_not_leave_the_plan_of_a_verdict_in_force(
    session: gl.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(run: Run, *_: object, **__: object) -> None:
        run.wait_steps(1)
        raise KeyboardInterrupt

    session.edit(b2t="name == 'mine'")
    with monkeypatch.context() as patch:
        patch.setattr(Run, "wait", stopped)
        patch.setattr(Plans, "restore", pressed_in(Plans.restore))
        with pytest.raises(WaitInterrupted, match=r"until the plan from before is in force again; that continues"):
            session.verdict(serve, serve)
    wait_until(lambda: session.plan.b2t == "name == 'mine'", "the plan from before")
    assert session.runs[-1].wait_steps(10**9, timeout=DEADLINE).done, "its code was interrupted"


def test_a_press_while_a_run_begins_leaves_no_run_that_some_ranks_never_got(
    session: gl.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        # Between the two ranks.
        patch.setattr(SocketChannel, "send", pressed_in(SocketChannel.send, 2))
        with pytest.raises(WaitInterrupted, match="until the run has begun; that continues"):
            session.run(forward, forward)
    wait_until(lambda: session.runs[-1].done, "the run, on both ranks")
    assert session.runs[-1].frame["status"].tolist() == ["compared"]
    assert session.run(forward, forward).frame["status"].tolist() == ["compared"]


def test_a_press_while_a_plan_is_published_leaves_both_sides_with_it(
    session: gl.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(SocketChannel, "send", pressed_in(SocketChannel.send, 2))
        with pytest.raises(WaitInterrupted, match="until the plan is published; that continues"):
            session.edit(b2t="name == 'x'")
    wait_until(lambda: session.plan.b2t == "name == 'x'", "the plan")
    assert session.run(forward, forward).frame["status"].tolist() == ["grafted"]
    assert session.undo().text == "b2t: name == 'x' -> nothing"


def test_an_edit_during_a_verdict_takes_over_none_of_its_filters(session: gl.Session) -> None:
    session.edit(t2b="name == 'mine'")
    lend_plan(session, b2t="True", t2b=None, compare=None, keep="True")
    edited = session.edit(compare="name == 'x'")
    restore_plan(session)
    assert session.plan is edited
    assert (edited.b2t, edited.t2b, edited.compare, edited.keep) == (None, "name == 'mine'", "name == 'x'", None)
    assert session.undo().text == "compare: name == 'x' -> True"


def test_other_threads_make_no_run_under_the_plan_of_a_verdict(session: gl.Session) -> None:
    ready, go_on = threading.Event(), threading.Event()

    def verdict() -> None:
        lend_plan(session, b2t="True")
        ready.set()
        go_on.wait(DEADLINE)
        session.run(forward, forward)
        restore_plan(session)

    judging = in_background(verdict)
    assert ready.wait(DEADLINE)
    for other in (
        lambda: session.run(forward, forward),
        lambda: session.verdict(forward, forward),
        lambda: lend_plan(session, b2t=None),
    ):
        with pytest.raises(gl.SessionBusyError, match="is between two of its runs, and its plan is in force"):
            other()
    go_on.set()
    judging.result(DEADLINE)
    assert session.run(forward, forward).frame["status"].tolist() == ["compared"]
