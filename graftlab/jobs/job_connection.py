"""A job's end of its control connection, which outlives the session at the other end."""

from __future__ import annotations

import socket
from collections import Counter
from typing import Any

from graftlab.exchange.channel import SocketChannel
from graftlab.ranks.connection import ControlConnection
from graftlab.ranks.messages import TapSeen, pack
from graftlab.rows.schema import Row


class JobConnection(ControlConnection):
    """A control connection that may have no session for a while, and keeps facts that the next session needs."""

    def __init__(self, channel: SocketChannel, wake: socket.socket) -> None:
        super().__init__(channel, wake)
        self.lost_rows = 0
        # How often each side has been started. From the second start on, rows name that number.
        self.generations = (1, 1)
        # The number of sessions after the first.
        self.generation = 0
        # Every tap seen so far.
        self.taps: list[dict[str, Any]] = []
        # Of this job's rows: the number and the last error of each status.
        self.statuses: Counter[str] = Counter()
        self.last_errors: dict[str, str] = {}

    def reconnect(self, channel: SocketChannel, wake: socket.socket) -> None:
        """Continue with another session, which receives all taps seen so far before their rows."""
        sent = len(self.taps)
        for tags in self.taps[:sent]:
            channel.send(pack(TapSeen(tags)))
        self._wake_socket.close()
        self._set_ends(channel, wake)
        self.generation += 1
        # Taps that other threads have seen meanwhile. Sending a tap twice does no harm.
        for tags in self.taps[sent:]:
            self.send(TapSeen(tags))

    def row(self, row: Row) -> None:
        if self.channel.closed:
            self.lost_rows += 1
        self.statuses[row.status] += 1
        if row.error:
            self.last_errors[row.status] = row.error
        if self.generations != (1, 1):
            row = row._replace(note="; ".join(filter(None, (row.note, _describe_generations(self.generations)))))
        super().row(row)

    def seen(self, tags: dict[str, Any]) -> None:
        self.taps.append(tags)
        super().seen(tags)


def _describe_generations(generations: tuple[int, int]) -> str:
    """Name each side that was started again: ``generation 2 of target``."""
    sides = zip(("baseline", "target"), generations, strict=True)
    return ", ".join(f"generation {number} of {side}" for side, number in sides if number > 1)
