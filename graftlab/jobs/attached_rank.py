"""One rank that a job of its own plays, as the holder of the session sees it."""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Sequence
from pathlib import Path

from graftlab.base.world import Place
from graftlab.exchange.arena import PAGE
from graftlab.exchange.channel import Channel
from graftlab.exchange.whereabouts import Whereabouts, WhereaboutsPage
from graftlab.ranks.devices import Seat
from graftlab.ranks.handle import RankHandle
from graftlab.ranks.messages import IsAt

_NOWHERE = Seat("-", "-")


class AttachedRank(RankHandle):
    """Its place in the session is there before a process has it, and its line too: the other ends wait here.

    A process of the same user's, as the system has told, is trusted as one that the notebook has started: it may write
    that user's files, and look into that user's processes, anyway.
    """

    takes_work = False

    def __init__(self, place: Place, segment: int, folder: Path) -> None:
        channel, bell = self._new_line()
        log = folder / "logs" / f"{place.side}-{place.rank}.log"
        super().__init__(place, _NOWHERE, channel, bell, segment, log)
        self.alive = False
        self.has_joined = False
        self.links = ""
        # What it has said last, where it is not this process that made its memory.
        self._told: Whereabouts | None = None

    def _new_line(self) -> tuple[Channel, socket.socket]:
        ours, self._their_line = socket.socketpair()
        bell, self._their_bell = socket.socketpair()
        return Channel(ours), bell

    def hand_over(self, pid: int, seat: Seat) -> list[int]:
        """The descriptors of the line, for the process that has the place from now on; see :meth:`handed_over`."""
        self.pid, self.seat, self.alive, self.has_joined, self._ended = pid, seat, True, True, None
        return [self._their_line.fileno(), self._their_bell.fileno()]

    def take_line(self) -> tuple[socket.socket, socket.socket]:
        """The other ends of the line, for whoever speaks for a process on another machine."""
        ends = self._their_line.dup(), self._their_bell.dup()
        self.handed_over()
        return ends

    def note_links(self, memory: Sequence[int], tcp: Sequence[int]) -> None:
        everyone = [place.label for place in self.place.everyone()]
        kinds = (("shared memory", memory), ("TCP", tcp))
        self.links = "; ".join(
            kind if len(ranks) == len(everyone) - 1 else f"{kind} with {', '.join(everyone[rank] for rank in ranks)}"
            for kind, ranks in kinds
            if ranks
        )

    def note_whereabouts(self, where: IsAt) -> None:
        self._told = where.where.look()

    def whereabouts(self) -> Whereabouts:
        return super().whereabouts() if self._told is None else self._told

    def handed_over(self) -> None:
        """The process has its line; were it kept here too, the process's death would go unnoticed."""
        self._their_line.close()
        self._their_bell.close()

    def renew(self) -> None:
        """Have a new line for another process. What was sent on the old one, and not read, is gone with it."""
        old = (self.channel, self.bell)
        self.handed_over()
        self.channel, self.bell = self._new_line()
        old[0].close()
        old[1].close()
        self.alive = self.has_joined = False
        self.pid, self.seat = None, _NOWHERE
        self.links, self._told = "", None

    def adopt_segment(self, segment: int) -> None:
        """Look where the rank is in the segment that it has brought along."""
        self._map.close()
        self._map = mmap.mmap(segment, PAGE, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        self._page = WhereaboutsPage(self._map)
        os.close(segment)

    # ---- what differs by who started it -------------------------------------------------------------------------

    def absence(self) -> str:
        return f"gone: {self.how_it_ended()}" if self.has_joined else "not joined yet"

    def how_it_ended(self) -> str:
        if not self.has_joined:
            return "has not joined yet"
        return self._ended or "left, or its process ended"

    def signal(self, number: int) -> None:
        """Does nothing: whatever a job does on a signal is its own affair."""

    def join(self, timeout: float) -> bool:
        return True

    def kill(self) -> None:
        self.channel.close()

    def release(self) -> None:
        """Let go of the job, which goes on."""
        if self._ended is None and self.alive:
            self._ended = "was let go, and goes on without this session"
        self.handed_over()
        super().release()

    def release_in_child(self) -> None:
        self.handed_over()
