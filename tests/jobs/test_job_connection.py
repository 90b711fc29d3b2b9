"""A job's connection to one session after another."""

from __future__ import annotations

import socket

from graftlab.exchange.channel import SocketChannel
from graftlab.jobs.job_connection import JobConnection
from graftlab.ranks.messages import TapSeen, unpack_from_rank


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
