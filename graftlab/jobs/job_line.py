"""A job's end of its line to whoever holds the session, which may be another one after a while."""

from __future__ import annotations

import socket
from collections import Counter
from typing import Any

from graftlab.exchange.channel import Channel
from graftlab.exchange.status_page import RankStatus, WireStatus
from graftlab.ranks.line import Line
from graftlab.ranks.messages import StatusUpdate, TapSeen, pack
from graftlab.rows.schema import Row


class JobLine(Line):
    """A line that may be without a notebook for a while. It knows what another would have to be told."""

    def __init__(self, channel: Channel, bell: socket.socket) -> None:
        super().__init__(channel, bell)
        self.lost_rows = 0
        # How often each side has been started; rows say it from the second time on.
        self.generations = (1, 1)
        # Which notebook it is that listens, by number.
        self.generation = 0
        # Every tap that was seen so far.
        self.taps: list[dict[str, Any]] = []
        # How many of its own rows there were of each status, and what the last one of it said.
        self.statuses: Counter[str] = Counter()
        self.last_errors: dict[str, str] = {}

    def reconnect(self, channel: Channel, bell: socket.socket) -> None:
        """Go on with another notebook, which is told of every tap that was seen so far before a row of one comes."""
        told = len(self.taps)
        for tags in self.taps[:told]:
            channel.send(pack(TapSeen(tags)))
        super().reconnect(channel, bell)
        self.generation += 1
        # Those that were seen meanwhile; to be told of one twice does no harm.
        for tags in self.taps[told:]:
            self.send(TapSeen(tags))

    def row(self, row: Row) -> None:
        if self.channel.closed:
            self.lost_rows += 1
        self.statuses[row.status] += 1
        if row.error:
            self.last_errors[row.status] = row.error
        if self.generations != (1, 1):
            row = row._replace(note="; ".join(filter(None, (row.note, which_generations(self.generations)))))
        super().row(row)

    def tell_where(self, look: RankStatus) -> None:
        """For whoever cannot look into this process's memory."""
        self.channel.send(pack(StatusUpdate(WireStatus.of(look))))

    def seen(self, tags: dict[str, Any]) -> None:
        self.taps.append(tags)
        super().seen(tags)


def which_generations(generations: tuple[int, int]) -> str:
    """In words, which side is another than it was at first: ``generation 2 of target``."""
    sides = zip(("baseline", "target"), generations, strict=True)
    return ", ".join(f"generation {number} of {side}" for side, number in sides if number > 1)
