"""A job's connection to one session after another."""

from __future__ import annotations

import contextlib
import socket

import pytest
from kit.in_process import a_row

from graftlab.exchange.channel import SocketChannel
from graftlab.jobs.job_connection import JobConnection
from graftlab.ranks.connection import ControlConnection
from graftlab.ranks.messages import PlanAdopted, TapSeen, unpack_from_rank


def test_the_next_session_gets_every_tap_before_a_row_of_it() -> None:
    ends = [socket.socketpair() for _ in range(4)]
    line = JobConnection(SocketChannel(ends[0][0]), ends[1][0])
    for name in ("hidden", "out"):
        line.seen({"name": name})
    # Other threads send rows as soon as the connection continues.
    line.reconnect(SocketChannel(ends[2][0]), ends[3][0])
    told = [unpack_from_rank(frame) for frame in SocketChannel(ends[2][1]).receive()]
    assert told == [TapSeen({"name": "hidden"}), TapSeen({"name": "out"})]
    assert line.generation == 1
    line.seen({"name": "logits"})
    told = [unpack_from_rank(frame) for frame in SocketChannel(ends[2][1]).receive()]
    assert told == [TapSeen({"name": "logits"})]
    # The end of the former session's wake socket shows that nothing comes from it any more.
    assert ends[1][1].recv(1) == b""


def test_a_session_that_wakes_slowly_or_is_gone_ends_no_message() -> None:
    ours, theirs = socket.socketpair()
    wake, reader = socket.socketpair()
    line = JobConnection(SocketChannel(ours), wake)
    with contextlib.suppress(BlockingIOError):
        while wake.send(bytes(4096)):
            pass
    line.adopted(1, 4)
    reader.close()
    line.adopted(2, 8)
    told = [unpack_from_rank(frame) for frame in SocketChannel(theirs).receive()]
    assert told == [PlanAdopted(1, 4), PlanAdopted(2, 8)]


def test_taps_that_are_seen_while_the_next_session_gets_the_others_reach_it_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends = [socket.socketpair() for _ in range(4)]
    line, channel = JobConnection(SocketChannel(ends[0][0]), ends[1][0]), SocketChannel(ends[2][0])
    line.seen({"name": "hidden"})
    send = channel.send

    def send_beside_another_thread(frame: bytes) -> None:
        if len(line.taps) == 1:
            # To the former session.
            line.seen({"name": "out"})
        send(frame)

    monkeypatch.setattr(channel, "send", send_beside_another_thread)
    line.reconnect(channel, ends[3][0])
    told = [unpack_from_rank(frame) for frame in SocketChannel(ends[2][1]).receive()]
    assert told == [TapSeen({"name": "hidden"}), TapSeen({"name": "out"})]


def test_rows_name_the_generations_of_jobs_and_lost_ones_are_counted() -> None:
    ends = [socket.socketpair() for _ in range(2)]
    line = JobConnection(SocketChannel(ends[0][0]), ends[1][0])
    sent: list[str | None] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ControlConnection, "row", lambda self, row: sent.append(row.note))
        line.row(a_row())
        line.generations = (1, 2)
        line.row(a_row(note="cut", status="failed", error="first"))
        line.row(a_row(status="failed", error="last"))
        line.channel.close()
        line.row(a_row())
    assert sent == [None, "cut; generation 2 of target", "generation 2 of target", "generation 2 of target"]
    assert line.statuses == {"compared": 2, "failed": 2}
    assert line.last_errors == {"failed": "last"}
    assert line.lost_rows == 1


def test_only_urgent_messages_and_many_rows_wake_the_session() -> None:
    (ours, theirs), (wake, reader) = socket.socketpair(), socket.socketpair()
    reader.setblocking(False)
    channel = SocketChannel(ours)
    line = ControlConnection(channel, wake)
    line.row(a_row())
    with pytest.raises(BlockingIOError):
        reader.recv(8)
    line.send(PlanAdopted(1, 2))
    assert reader.recv(8) == b"!"
    while not channel.backed_up:
        line.seen({"name": "x" * 100_000})
    line.row(a_row())
    # Once, however many wait.
    assert reader.recv(8) == b"!"
    for each in (theirs, reader, wake):
        each.close()
    channel.close()
