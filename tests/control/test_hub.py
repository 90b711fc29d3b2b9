"""The hub hands on what each rank sends, in order and all of it, whatever one of them, or the sink, does wrong."""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from kit.deadline import DEADLINE
from kit.in_process import TalkingRank, a_row, talking_ranks

from graftlab.control import hub as hub_module
from graftlab.control.hub import Hub
from graftlab.ranks.messages import Hello, Output, PlanAdopted, RunSettled
from graftlab.ranks.rank_process import RankProcess
from graftlab.rows.encoding import encode


class RecordingSink:
    """Records what it receives, as ``(label, what)``; raises if ``fails(what)``."""

    def __init__(self, fails: Callable[[Any], bool] = lambda what: False) -> None:
        self.told: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._fails = fails

    def on_rows(self, lines: Sequence[bytes]) -> None:
        for line in lines:
            self._note("row", line)

    def on_message(self, message: Any, rank: RankProcess) -> None:
        self._note(rank.label, message)

    def on_gone(self, rank: RankProcess) -> None:
        self._note(rank.label, "gone")

    def _note(self, whose: str, what: Any) -> None:
        if self._fails(what):
            raise RuntimeError(f"planted at {what}")
        self.told.put((whose, what))

    def next(self, count: int) -> list[Any]:
        return [self.told.get(timeout=DEADLINE) for _ in range(count)]

    def all(self) -> list[Any]:
        """What was told by now; for a hub that has stopped."""
        return self.next(self.told.qsize())


def row(order: int) -> tuple[str, bytes]:
    """What the sink notes of :func:`a_row` with this order."""
    return "row", encode(a_row(order=order))


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[TalkingRank]]:
    with talking_ranks(tmp_path, 1, 2) as made:
        yield made


@contextmanager
def hearing(ranks: list[TalkingRank], sink: RecordingSink) -> Iterator[Hub]:
    hub = Hub([each.rank for each in ranks], sink)
    try:
        yield hub
    finally:
        hub.stop()


@pytest.fixture
def endless_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """After rows the hub looks again only when a bell rings."""
    monkeypatch.setattr(hub_module, "_REST", 10_000_000)
    monkeypatch.setattr(hub_module, "_SHORT_REST", 10_000_000)


def test_rows_and_messages_of_a_rank_arrive_in_the_order_in_which_it_sent_them(ranks: list[TalkingRank]) -> None:
    sink = RecordingSink()
    expected: list[Any] = []
    with hearing(ranks, sink):
        for order in range(500):
            ranks[1].line.row(a_row(order=order))
            expected.append(row(order))
            if order % 7 == 0:
                ranks[1].line.send(Output(str(order)))
                expected.append(("target[0]", Output(str(order))))
        assert sink.next(len(expected)) == expected


def test_a_stopped_hub_has_closed_its_descriptor(ranks: list[TalkingRank], monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []
    close = os.close

    def note(descriptor: int) -> None:
        # Another thread may be given the number again.
        if threading.current_thread() is hub._thread:
            closed.append(descriptor)
        close(descriptor)

    monkeypatch.setattr(os, "close", note)
    with hearing(ranks, RecordingSink()) as hub:
        pass
    hub._thread.join(DEADLINE)
    assert closed == [hub._wake]


def test_messages_of_many_ranks_arrive_completely_and_in_order(ranks: list[TalkingRank]) -> None:
    sink = RecordingSink()
    with hearing(ranks, sink):
        for number in range(100):
            for each in ranks:
                each.line.send(PlanAdopted(number, number))
        told = sink.next(300)
    for each in ranks:
        assert [what.version for whose, what in told if whose == each.rank.label] == list(range(100))


def test_all_ranks_that_are_added_while_the_hub_is_busy_are_read(ranks: list[TalkingRank]) -> None:
    busy, may_continue = threading.Event(), threading.Event()

    def hold(what: Any) -> bool:
        busy.set()
        return not may_continue.wait(DEADLINE)

    sink = RecordingSink(hold)
    with hearing(ranks[:1], sink) as hub:
        ranks[0].line.send(Output("first"))
        assert busy.wait(DEADLINE)
        for each in ranks[1:]:
            hub.add(each.rank)
            each.line.send(Output("joined"))
        may_continue.set()
        assert {whose for whose, _ in sink.next(3)} == {each.rank.label for each in ranks}


@pytest.mark.usefixtures("endless_rests")
def test_rows_gather_until_the_wake_socket_is_written(ranks: list[TalkingRank]) -> None:
    sink = RecordingSink()
    with hearing(ranks, sink):
        ranks[1].line.row(a_row(order=1))
        assert sink.next(1) == [row(1)]
        ranks[1].line.row(a_row(order=2))
        ranks[2].line.send(Output("something that a call may wait for"))
        told = sink.next(2)
        assert sorted(whose for whose, _ in told) == ["row", "target[1]"]


@pytest.mark.usefixtures("endless_rests")
def test_a_full_socket_wakes_the_hub(ranks: list[TalkingRank]) -> None:
    sink = RecordingSink()
    with hearing(ranks, sink):
        ranks[1].line.row(a_row(order=0))
        assert sink.next(1) == [row(0)]
        sent = 0
        while not ranks[1].channel.backed_up:
            sent += 1
            ranks[1].line.row(a_row(order=sent))
        assert sink.next(1) == [row(1)]


@pytest.mark.usefixtures("endless_rests")
def test_the_end_of_a_rank_ends_a_rest_and_its_programs(
    ranks: list[TalkingRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, ended = RecordingSink(), list[str]()
    for each in ranks:
        monkeypatch.setattr(each.rank, "end_programs", lambda label=each.rank.label: ended.append(label))
    with hearing(ranks, sink):
        ranks[1].line.row(a_row(order=1))
        assert sink.next(1) == [row(1)]
        ranks[2].die()
        assert sink.next(1) == [("target[1]", "gone")]
        assert ended == ["target[1]"]
    assert not ranks[2].rank.alive
    assert ranks[1].rank.alive


def test_messages_before_a_ranks_end_arrive_before_its_end(ranks: list[TalkingRank]) -> None:
    sink = RecordingSink()
    with hearing(ranks, sink):
        for order in range(100):
            ranks[2].line.row(a_row(order=order))
        ranks[2].line.send(Output("the end"))
        ranks[2].die()
        expected = [*(row(order) for order in range(100)), ("target[1]", Output("the end")), ("target[1]", "gone")]
        assert sink.next(102) == expected


@pytest.mark.usefixtures("endless_rests")
def test_stopping_reads_all_arrived_messages(ranks: list[TalkingRank]) -> None:
    sink, others = RecordingSink(), set(threading.enumerate())
    with hearing(ranks, sink) as hub:
        ranks[1].line.row(a_row(order=1))
        assert sink.next(1) == [row(1)]
        for each in ranks:
            each.line.row(a_row(order=each.rank.place.world_rank + 10))
        hub.stop()
        new = [thread.name for thread in set(threading.enumerate()) - others]
        assert "graftlab-hub" not in new, "it no longer rests"
        assert sorted(sink.all()) == sorted([row(10), row(11), row(12)])
        hub.stop()


def test_a_sink_that_raises_loses_only_that_message(ranks: list[TalkingRank], caplog: pytest.LogCaptureFixture) -> None:
    sink = RecordingSink(fails=lambda what: what in (row(3)[1], Output("bad")))
    settled = RunSettled(0, 1)
    with caplog.at_level(logging.ERROR, "graftlab"), hearing(ranks, sink):
        # In one piece, so that all of it is read at once.
        ranks[1].line.row(a_row(order=3))
        ranks[1].line.send(Output("bad"))
        ranks[1].line.send(settled)
        ranks[2].line.send(Output("good"))
        assert sorted(sink.next(2), key=str) == [("target[0]", settled), ("target[1]", Output("good"))]
    assert ranks[1].rank.alive
    assert "could not handle what target[0] sent" in caplog.text
    assert "planted at b" in caplog.text


def test_a_sink_that_raises_at_a_ranks_end_still_gets_other_messages(ranks: list[TalkingRank]) -> None:
    sink = RecordingSink(fails=lambda what: what == "gone")
    with hearing(ranks, sink):
        ranks[1].die()
        ranks[2].line.send(Output("still heard"))
        assert sink.next(1) == [("target[1]", Output("still heard"))]


@pytest.mark.parametrize("frame", [b"", b"garbage", b"m", b"m\x81\xa4type\xa7Nothing"], ids=repr)
def test_a_rank_that_sends_an_invalid_message_is_dropped_with_the_reason(
    frame: bytes, ranks: list[TalkingRank], caplog: pytest.LogCaptureFixture
) -> None:
    sink = RecordingSink()
    with caplog.at_level(logging.ERROR, "graftlab"), hearing(ranks, sink):
        ranks[1].line.row(a_row(order=1))
        ranks[1].channel.send(frame)
        ranks[1].line.send(Output("whatever this means now"))
        assert sink.next(2) == [row(1), ("target[0]", "gone")]
        ranks[2].line.send(Hello(7))
        assert sink.next(1) == [("target[1]", Hello(7))]
    assert not ranks[1].rank.alive
    assert ranks[1].rank.how_it_ended().startswith("was dropped: ")
    assert "target[0] is dropped" in caplog.text
    if b"Nothing" in frame:
        assert "'Nothing'" in ranks[1].rank.how_it_ended()


def test_a_socket_whose_other_end_is_closed_wakes_once() -> None:
    read, write = os.pipe()
    mine, theirs = socket.socketpair()
    with mine:
        sockets = hub_module._WakeSockets(read)
        sockets.add(mine)
        theirs.send(b"!")
        sockets.wait(0)
        assert sockets._poller.poll(0) == []
        theirs.close()
        assert sockets._poller.poll(0) != []
        sockets.wait(0)
        assert sockets._poller.poll(0) == []
    for descriptor in (read, write):
        os.close(descriptor)
