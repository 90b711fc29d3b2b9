"""The control thread receives plans and tasks, answers questions during a run, and reports a lost notebook."""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from kit.deadline import DEADLINE

from graftlab.base import shipping
from graftlab.base.world import RunInfo
from graftlab.errors import SessionError
from graftlab.exchange.channel import SocketChannel
from graftlab.grafting.kept import KeptPair, KeptPairs
from graftlab.plan.plan import GraftPlan
from graftlab.plan.wire import to_wire
from graftlab.ranks.connection import ControlConnection
from graftlab.ranks.control_thread import ControlThread
from graftlab.ranks.messages import (
    AskKeptInput,
    AskKeptMap,
    AskKeptPair,
    AskKeptTags,
    AskPostMortem,
    AskStacks,
    Evaluate,
    Interrupt,
    KeptTags,
    KeptValue,
    PlanUpdate,
    Query,
    Refusal,
    Reply,
    RunRequest,
    Shutdown,
    Stacks,
    pack,
    unpack_from_rank,
)
from graftlab.transforms import GraftTransformInput

PLAN = GraftPlan().edit(b2t="layer < 3")
BASELINE, TARGET = torch.arange(12.0).view(3, 4), torch.zeros(3, 4)


class Notebook:
    """The other end of the connection, and a record of the calls that the control thread made."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        wake, self.wake = socket.socketpair()
        self.channel = SocketChannel(ours)
        self.offered: list[GraftPlan] = []
        self.waiting_at_offers: list[int] = []
        self.interrupted: list[int] = []
        self.ended = threading.Event()
        self.kept = KeptPairs()
        self.numbers = 0
        grafter: Any = SimpleNamespace(offer_plan=self._offer)
        line = ControlConnection(SocketChannel(theirs), wake)
        self.control = ControlThread(line, grafter, self.kept, self.interrupted.append, self.ended.set)
        self.control.open()

    def _offer(self, plan: GraftPlan) -> None:
        self.offered.append(plan)
        self.waiting_at_offers.append(self.control.tasks.qsize())

    def send(self, message: Any) -> None:
        self.channel.send(pack(message))

    def ask(self, question: Any) -> Any:
        """Return the answer; all earlier messages have been handled then."""
        self.numbers += 1
        self.send(Query(self.numbers, question))
        poller = select.poll()
        poller.register(self.channel.fileno(), select.POLLIN)
        frames: list[bytes] = []
        while not frames:
            assert poller.poll(DEADLINE * 1000), f"no answer to {question}"
            frames = self.channel.receive()
        (reply,) = map(unpack_from_rank, frames)
        assert isinstance(reply, Reply)
        assert reply.number == self.numbers
        return reply.answer

    def keep(self, name: str, value: torch.Tensor | None = BASELINE, **tags: Any) -> None:
        graft_input = GraftTransformInput({"name": name, **tags}, [BASELINE], [None], TARGET)
        assert self.kept.add(graft_input, value) is None


@pytest.fixture
def notebook() -> Iterator[Notebook]:
    made = Notebook()
    yield made
    made.channel.close()
    assert made.ended.wait(DEADLINE)


def test_plans_are_offered_and_tasks_wait_in_order_for_the_main_thread(notebook: Notebook) -> None:
    request = RunRequest(RunInfo(0, 0, (0, 1)), to_wire(PLAN), Evaluate("1", "<graft cell 1>"))
    notebook.send(PlanUpdate(to_wire(PLAN)))
    notebook.send(request)
    assert notebook.ask(AskKeptTags(False)) == KeptTags([])
    # The main thread finds the plan once it takes the task.
    assert (notebook.offered, notebook.waiting_at_offers) == ([PLAN], [0])
    tasks = [notebook.control.tasks.get_nowait() for _ in range(2)]
    assert tasks == [PlanUpdate(to_wire(PLAN)), request]


def test_an_interrupt_is_handled_at_once_and_not_queued(notebook: Notebook) -> None:
    notebook.send(Interrupt(7))
    notebook.ask(AskKeptTags(False))
    assert notebook.interrupted == [7]
    assert notebook.control.tasks.empty()


def test_a_shutdown_wakes_waits_for_tasks_and_for_other_ranks(notebook: Notebook) -> None:
    poller = select.poll()
    poller.register(notebook.control.stop, select.POLLIN)
    assert not poller.poll(0)
    notebook.send(Shutdown())
    assert notebook.control.tasks.get(timeout=DEADLINE) == Shutdown()
    assert notebook.control.stopping
    assert poller.poll(0)


def test_stacks_begin_at_the_users_code(notebook: Notebook) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def a_users_function() -> None:
        begun.set()
        go_on.wait(DEADLINE)

    thread = threading.Thread(target=a_users_function, name="the users thread")
    thread.start()
    begun.wait(DEADLINE)
    answer = notebook.ask(AskStacks())
    go_on.set()
    thread.join(DEADLINE)
    assert isinstance(answer, Stacks)
    assert "thread the users thread\n" in answer.text
    assert "a_users_function" in answer.text
    assert "graftlab-control" not in answer.text


def test_kept_pairs_are_listed_by_their_plain_tags(notebook: Notebook) -> None:
    notebook.keep("x", step=0, layer=1 << 70, dtype=torch.bfloat16)
    notebook.keep("y", None, step=1)
    assert notebook.ask(AskKeptTags(False)).tags == [
        {"name": "x", "step": 0, "layer": 1 << 70, "dtype": "torch.bfloat16"}
    ]
    assert [tags["name"] for tags in notebook.ask(AskKeptTags(True)).tags] == ["x", "y"]


def test_a_kept_pair_is_sent_whole_or_reduced_if_its_tags_match(notebook: Notebook) -> None:
    notebook.keep("x", layer=3)
    notebook.keep("failed", None)
    baseline, target = shipping.unpack_result(notebook.ask(AskKeptPair("x", {"layer": 3})).packed)
    assert torch.equal(baseline, BASELINE)
    assert torch.equal(target, TARGET)
    drawn = shipping.unpack_result(notebook.ask(AskKeptMap("x", {}, (1, 0))).packed)
    assert (drawn.worst, tuple(drawn.worst_index)) == (11.0, (2, 3))
    for question in (AskKeptPair("x", {"layer": 4}), AskKeptMap("z", {}, None)):
        assert notebook.ask(question) == KeptValue(None)
    assert "its transform failed" in notebook.ask(AskKeptPair("failed", {})).error
    kept = shipping.unpack_result(notebook.ask(AskKeptInput("failed", {})).packed)
    assert isinstance(kept, KeptPair)
    assert kept.value is None


def test_an_unanswerable_question_is_refused_and_the_next_one_answered(notebook: Notebook) -> None:
    notebook.keep("x")
    refused = notebook.ask(AskKeptMap("x", {}, (0, 7)))
    assert isinstance(refused, Refusal)
    assert "dim" in refused.error
    assert notebook.ask(AskKeptTags(False)).tags == [{"name": "x"}]


def test_a_job_refuses_to_debug_a_failure_and_says_where_to(notebook: Notebook) -> None:
    refused = notebook.ask(AskPostMortem("p x"))
    assert isinstance(refused, Refusal)
    assert refused.error.startswith("this rank is a job, which keeps no failures")


@pytest.mark.parametrize(
    ("error", "said"), [(SessionError("x is no longer kept"), "x is no longer kept"), (KeyError("x"), "KeyError: 'x'")]
)
def test_a_refusal_has_graftlabs_own_words_or_the_kind_of_the_error(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    monkeypatch.setattr(KeptPairs, "find", Mock(side_effect=error))
    refused = notebook.ask(AskKeptPair("x", {}))
    assert isinstance(refused, Refusal)
    assert refused.error == said


def test_the_end_of_the_notebook_is_reported_once(notebook: Notebook) -> None:
    notebook.channel.close()
    assert notebook.ended.wait(DEADLINE)


def test_an_unexpected_error_is_given_to_its_handler_or_ends_the_rank(caplog: pytest.LogCaptureFixture) -> None:
    error = KeyError("x")
    for fails, expected in (([], []), (None, ["ended"])):
        ours, theirs = socket.socketpair()
        ended: list[str] = []
        control = ControlThread(
            ControlConnection(SocketChannel(theirs), theirs),
            Mock(),
            KeptPairs(),
            Mock(),
            partial(ended.append, "ended"),
            fail=None if fails is None else fails.append,
        )
        control.on(Shutdown, Mock(side_effect=error))
        with caplog.at_level(logging.CRITICAL, "graftlab"), ours, theirs:
            caplog.clear()
            SocketChannel(ours).send(pack(Shutdown()))
            control._serve_or_fail()
        assert ended == expected
        assert fails in (None, [error])
        assert ("the control thread failed" in caplog.text) == (fails is None)
        os.close(control.stop)


@pytest.mark.parametrize(
    "frame",
    [b"garbage", pack(PlanUpdate(to_wire(PLAN)))[:-1], pack(Reply(1, KeptValue(None)))],
    ids=["garbage", "cut short", "for the notebook"],
)
def test_an_unreadable_message_ends_the_rank_with_the_reason_in_its_log(
    frame: bytes, notebook: Notebook, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.CRITICAL, "graftlab"):
        notebook.channel.send(frame)
        assert notebook.ended.wait(DEADLINE)
    assert "cannot read a message from the notebook" in caplog.text
    assert "MessageError" in caplog.text
    assert notebook.offered == []
