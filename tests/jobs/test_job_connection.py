"""A job's connection to one session after another, and the step that it reports at its end."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from graftlab.base.world import Place, RunInfo
from graftlab.exchange.channel import SocketChannel
from graftlab.jobs.attached_rank import AttachedRank
from graftlab.jobs.job_connection import JobConnection
from graftlab.plan.plan import GraftPlan
from graftlab.ranks.messages import RunDone, RunSettled, TapSeen, unpack_from_rank


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


def attached(**parts: Any) -> AttachedRank:
    """A rank in run 3 whose next step is 7, with nothing but what a test needs."""
    rank = AttachedRank.__new__(AttachedRank)
    nothing: Callable[[], None] = lambda: None  # noqa: E731
    grafter = SimpleNamespace(end_run=nothing, close_run=nothing, next_step=7, newest_plan=GraftPlan())
    place = Place("target", 1, 2, 1)
    for name, part in {"_grafter": grafter, "_run": RunInfo(3, 2, (0, 1, 2)), "place": place, **parts}.items():
        setattr(rank, name, part)
    return rank


def test_a_job_that_ends_reports_its_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(AttachedRank, "_settle", lambda self: True)
    connection = SimpleNamespace(send=sent.append, channel=SimpleNamespace(drain=lambda seconds: None))
    attached(_connection=connection)._end_run()
    assert [type(message) for message in sent] == [RunDone, RunSettled]
    assert sent[1] == RunSettled(3, 7)


def test_a_job_that_joins_again_begins_with_its_next_step() -> None:
    asked: list[Any] = []
    client = SimpleNamespace(rejoin=lambda state, segment: asked.append(state))
    rank = attached(
        _client=client,
        _connection=SimpleNamespace(lost_rows=0),
        _join=SimpleNamespace(answer=SimpleNamespace(session="a")),
        _proxy=None,
        _setup_lock=threading.Lock(),
        _world=SimpleNamespace(connector=None, segment=None),
    )
    assert not rank._rejoin()
    assert (asked[0].run.run, asked[0].run.first_step) == (3, 7)
