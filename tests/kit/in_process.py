"""Ranks without a process: what the notebook holds of a rank is real, and the test speaks in the rank's stead."""

from __future__ import annotations

import mmap
import os
import select
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from graftlab.base.world import Place
from graftlab.exchange.arena import PAGE
from graftlab.exchange.channel import SocketChannel
from graftlab.exchange.status_page import StatusPage
from graftlab.ranks.connection import ControlConnection
from graftlab.ranks.devices import DeviceAssignment
from graftlab.ranks.messages import ToRank, unpack_to_rank
from graftlab.ranks.rank_process import RankProcess
from graftlab.rows.schema import Row
from kit.deadline import DEADLINE


class _Process:
    """As much of a process as a rank's has: it ends on request."""

    def __init__(self) -> None:
        self.exitcode: int | None = None

    def join(self, timeout: float) -> None:
        pass

    def kill(self) -> None:
        self.exitcode = -9

    def close(self) -> None:
        pass


class TalkingRank:
    """``rank`` is what the notebook holds; ``line`` is the rank's own end, for the test to speak through."""

    __test__ = False

    def __init__(self, place: Place, folder: Path) -> None:
        segment = os.memfd_create("graftlab-test")
        os.ftruncate(segment, PAGE)
        self._map = mmap.mmap(segment, PAGE)
        ours, theirs = socket.socketpair()
        wake, their_wake = socket.socketpair()
        death_pipe, self.death_pipe = socket.socketpair()
        log = folder / f"{place.side}-{place.rank}.log"
        log.write_text(f"the last words of {place.label}\n")
        self.process = _Process()
        self.rank = RankProcess(
            place,
            DeviceAssignment("cpu", "gloo"),
            self.process,
            SocketChannel(ours),
            wake,
            death_pipe,
            segment,
            log,
            log,
        )
        os.close(segment)
        self.rank.pid = os.getpid()
        self.channel = SocketChannel(theirs)
        self.wake = their_wake
        self.line = ControlConnection(self.channel, their_wake)
        self.signals: list[int] = []
        self.rank.end_programs = lambda: None  # type: ignore[method-assign]
        self.rank.signal = self.signals.append  # type: ignore[method-assign]
        self._unread: list[ToRank] = []

    def is_at(self, state: str, step: int = 0) -> None:
        """Let the notebook see the rank in this state."""
        StatusPage(self._map).write(state, step=step, plan_version=0, taps=0)

    def hear(self) -> ToRank:
        """The next message of the notebook."""
        poller = select.poll()
        poller.register(self.channel.fileno(), select.POLLIN)
        while not self._unread:
            assert poller.poll(DEADLINE * 1000), f"the notebook says nothing to {self.rank.label}"
            self._unread += map(unpack_to_rank, self.channel.receive())
            assert self._unread or not self.channel.closed, "the notebook has hung up"
        return self._unread.pop(0)

    def hear_a(self, kind: type[Any]) -> Any:
        """The next message of this type; what comes before it is passed over."""
        while not isinstance(message := self.hear(), kind):
            pass
        return message

    def die(self, code: int = -9) -> None:
        """To the notebook this looks like the end of the process."""
        self.process.exitcode = code
        self.channel.close()
        self.wake.close()


@contextmanager
def talking_ranks(folder: Path, baseline: int = 1, target: int = 1) -> Iterator[list[TalkingRank]]:
    ranks = [TalkingRank(place, folder) for place in Place("baseline", 0, baseline, target).everyone()]
    try:
        yield ranks
    finally:
        for each in ranks:
            each.rank.release()
            each.die()
            each.death_pipe.close()


def a_row(**values: Any) -> Row:
    """A row that was compared and says nothing else, but for what is given."""
    usual: dict[str, Any] = {
        **{"run": 0, "step": 0, "order": 0, "name": "x", "tags": {"name": "x"}, "direction": "b2t"},
        **{"side": "target", "rank": 0, "status": "compared", "senders": [0]},
    }
    return Row(**{**usual, **values})
