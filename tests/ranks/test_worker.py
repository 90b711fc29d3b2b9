"""What a rank does in a run, in which order, and when an interrupt reaches the user's code."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest

from graftlab.base import shipping
from graftlab.base.world import RunInfo
from graftlab.plan.plan import GraftPlan
from graftlab.plan.wire import to_wire
from graftlab.ranks import worker
from graftlab.ranks.debugging import LastFailure
from graftlab.ranks.messages import Evaluate, RunDone, RunRequest, RunSettled
from graftlab.ranks.namespace import Namespace
from graftlab.ranks.worker import Rank

PLAN = GraftPlan(b2t="name == 'a'")


def request(run: int, source: str = "fire()") -> RunRequest:
    return RunRequest(RunInfo(run, 4, (0, 1)), to_wire(PLAN), Evaluate(source, "<cell>"))


def made(fire: Callable[[], object] = lambda: 3) -> tuple[Any, Mock]:
    """A rank without a notebook that runs cells, in which ``fire`` is a function; and what it has done."""
    rank: Any = object.__new__(Rank)
    done = Mock()
    done.grafter.next_step, done.exchange.settle.return_value, done.control.stop = 9, True, 7
    parts = {f"_{name}": getattr(done, name) for name in ("grafter", "line", "exchange", "control", "edited_modules")}
    namespace = Namespace(module := ModuleType("cells"))
    module.__dict__.update(fire=fire)
    vars(rank).update(parts, _streams=[done.out, done.err], _last_failure=LastFailure(), _namespace=namespace)
    vars(rank).update(_run_number=-1, _interrupted_run=-1, _import_may_take=0.0)
    return rank, done


@pytest.mark.parametrize("is_settled", [True, False])
def test_a_run_begins_and_ends_in_order_and_is_settled_once_all_have_ended_it(is_settled: bool) -> None:
    seen: list[object] = []

    def fire() -> int:
        seen.extend((rank._run_number, rank._grafter.interrupt_due))
        done.user_code()
        return 3

    rank, done = made(fire)
    # Left by the run before, which had ended before its interrupt was tried again.
    rank._grafter.interrupt_due, rank._import_may_take = True, 5.0
    done.exchange.settle.return_value = is_settled
    rank._run(request(2))
    sent = [each.args[0] for each in done.line.send.call_args_list]
    assert done.mock_calls == [
        call.grafter.begin_run(RunInfo(2, 4, (0, 1)), PLAN),
        call.edited_modules.warn_of_edits(),
        call.user_code(),
        call.edited_modules.note(),
        call.out.flush_lines(),
        call.err.flush_lines(),
        call.grafter.end_run(),
        call.line.send(sent[0]),
        call.exchange.settle(7),
        *([call.grafter.close_run(), call.line.send(RunSettled(2, 9))] if is_settled else []),
    ]
    assert isinstance(sent[0], RunDone)
    assert (sent[0].run, shipping.unpack_result(bytes(sent[0].result or b"")), sent[0].failure) == (2, 3, None)
    assert seen == [2, False]
    assert (rank._run_number, rank._import_may_take) == (-1, 0.0)


def test_a_run_that_was_interrupted_before_it_began_runs_no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    killed = Mock()
    monkeypatch.setattr(signal, "pthread_kill", killed)
    ran: list[int] = []
    rank, done = made(lambda: ran.append(rank._run_number))
    rank._interrupt(2)
    rank._run(request(2))
    assert done.line.send.call_args_list[0].args[0].failure.kind == "KeyboardInterrupt"
    # It was that run alone.
    rank._run(request(3))
    assert ran == [3]
    killed.assert_not_called()


def test_an_interrupt_is_a_signal_to_the_main_thread_while_its_run_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    killed = Mock()
    monkeypatch.setattr(signal, "pthread_kill", killed)

    def fire() -> None:
        for run in (1, 3, 2):
            rank._interrupt(run)
            done.interrupted(run, killed.called)

    rank, done = made(fire)
    rank._run(request(2))
    assert done.interrupted.call_args_list == [call(1, False), call(3, False), call(2, True)]
    killed.assert_called_once_with(threading.main_thread().ident, signal.SIGINT)


class Timers:
    """Timers that do not run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[Any, ...]] = []
        self.now = 100.0
        threads = SimpleNamespace(Timer=self._timer, main_thread=threading.main_thread)
        monkeypatch.setattr(worker, "threading", threads)
        monkeypatch.setattr(worker, "time", SimpleNamespace(monotonic=lambda: self.now))

    def _timer(self, *args: Any) -> Any:
        timer = Mock(daemon=False)
        timer.start.side_effect = lambda: self.made.append((*args, timer.daemon))
        return timer


def test_an_interrupt_is_raised_in_the_users_code_and_tried_again_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    timers = Timers(monkeypatch)

    def fire() -> None:
        rank._grafter.interrupt_due = True
        rank.on_interrupt(signal.SIGINT, sys._getframe())

    rank, done = made(fire)
    # Between runs there is nothing to interrupt.
    rank._grafter.interrupt_due = False
    rank.on_interrupt(signal.SIGINT, sys._getframe())
    assert (timers.made, rank._grafter.interrupt_due) == ([], False)
    # A run has begun, and its code not yet.
    rank._run_number = 2
    rank.on_interrupt(signal.SIGINT, sys._getframe())
    assert timers.made == [(0.01, rank._interrupt_again, (2, signal.SIGINT), True)]
    assert rank._grafter.interrupt_due
    rank._run(request(2))
    assert done.line.send.call_args_list[0].args[0].failure.kind == "KeyboardInterrupt"
    assert (len(timers.made), rank._grafter.interrupt_due) == (1, False)


@pytest.mark.parametrize(("run", "is_due", "is_sent"), [(2, True, True), (2, False, False), (1, True, False)])
def test_an_interrupt_is_tried_again_while_it_is_due_and_its_run_lasts(
    run: int, is_due: bool, is_sent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = Mock()
    monkeypatch.setattr(os, "kill", killed)
    rank, _ = made()
    rank._run_number, rank._grafter.interrupt_due = 2, is_due
    rank._interrupt_again(run, signal.SIGINT)
    assert killed.call_args_list == ([call(os.getpid(), signal.SIGINT)] if is_sent else [])


def test_an_interrupt_spares_an_import_for_two_seconds_in_each_run(monkeypatch: pytest.MonkeyPatch) -> None:
    timers = Timers(monkeypatch)
    importing = compile("interrupt()", worker._IMPORTER, "exec")
    waited: list[float] = []

    def interrupt() -> None:
        rank.on_interrupt(signal.SIGINT, sys._getframe())
        waited.append(timers.now)

    def fire() -> None:
        for _ in range(9):
            exec(importing, {"interrupt": interrupt})
            timers.now += 0.5

    rank, done = made(fire)
    for run in (2, 3):
        waited.clear()
        begins = timers.now
        rank._run(request(run))
        # It has lasted too long then, since the first interrupt.
        assert waited == [begins + each for each in (0.0, 0.5, 1.0, 1.5)]
    sent = [each.args[0] for each in done.line.send.call_args_list]
    assert [each.failure.kind for each in sent if isinstance(each, RunDone)] == ["KeyboardInterrupt"] * 2
