"""The session server's view of an attached rank."""

from __future__ import annotations

import mmap
import os
import socket
from pathlib import Path

from graftlab.base.world import Place
from graftlab.exchange.arena import PAGE
from graftlab.exchange.channel import SocketChannel
from graftlab.exchange.status_page import RankStatus, StatusPage
from graftlab.ranks.devices import DeviceAssignment
from graftlab.ranks.handle import RankHandle
from graftlab.ranks.messages import LinkReport, StatusUpdate

_NOWHERE = DeviceAssignment("-", "-")


class AttachedRankHandle(RankHandle):
    """A rank whose process comes from a job. Its control connection is made earlier, and both ends wait here.

    A process of the same user is trusted like one that the notebook has started, since it can write that user's files
    and read that user's processes anyway.
    """

    takes_work = False

    def __init__(self, place: Place, folder: Path) -> None:
        channel, wake = self._new_connection()
        log = folder / "logs" / f"{place.side}-{place.rank}.log"
        super().__init__(place, _NOWHERE, channel, wake, None, log)
        self.alive = False
        # The segment of a world to which the rank has yet to move.
        self._next_segment: int | None = None
        self.has_joined = False
        self.links = ""
        # The rank's last status, if this process cannot read its status page.
        self._sent_status: RankStatus | None = None

    @property
    def is_expected(self) -> bool:  # type: ignore[override]
        return not self.has_joined

    def _new_connection(self) -> tuple[SocketChannel, socket.socket]:
        ours, self._their_end = socket.socketpair()
        wake, self._their_wake = socket.socketpair()
        return SocketChannel(ours), wake

    def assign_process(self, pid: int, assignment: DeviceAssignment) -> list[int]:
        """Return the descriptors of the rank's ends for its new process; see :meth:`close_rank_ends`."""
        self.pid, self.assignment, self.alive, self.has_joined, self._ended = pid, assignment, True, True, None
        return [self._their_end.fileno(), self._their_wake.fileno()]

    def take_ends(self) -> tuple[socket.socket, socket.socket]:
        """Return the rank's ends, for the proxy of a process on another machine."""
        ends = self._their_end.dup(), self._their_wake.dup()
        self.close_rank_ends()
        return ends

    def note_links(self, linked: LinkReport) -> None:
        everyone = [place.label for place in self.place.everyone()]
        kinds = (("shared memory", linked.memory), ("TCP", linked.tcp))
        self.links = "; ".join(
            kind if len(ranks) == len(everyone) - 1 else f"{kind} with {', '.join(everyone[rank] for rank in ranks)}"
            for kind, ranks in kinds
            if ranks
        )

    def note_status(self, update: StatusUpdate) -> None:
        self._sent_status = update.where.restore()

    def status(self) -> RankStatus:
        status = super().status() if self._sent_status is None else self._sent_status
        # Nothing has been written into the page yet.
        return RankStatus("idle" if self.alive else "starting") if status.state == "starting" else status

    def close_rank_ends(self) -> None:
        """Close the rank's ends, which its process has received. Open here they would hide its death."""
        self._their_end.close()
        self._their_wake.close()

    def renew(self) -> None:
        """Make a new connection for another process. Messages not read from the old one are lost."""
        self._forget_next_segment()
        old = (self.channel, self.wake_socket)
        self.close_rank_ends()
        self.channel, self.wake_socket = self._new_connection()
        old[0].close()
        old[1].close()
        self.alive = self.has_joined = False
        self.pid, self.assignment = None, _NOWHERE
        self.links, self._sent_status = "", None
        self._read_page_of(mmap.mmap(-1, PAGE))

    def adopt_segment(self, segment: int) -> None:
        """Read the rank's status page in this segment from now on, and close the descriptor."""
        self._read_page_of(mmap.mmap(segment, PAGE, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ))
        os.close(segment)

    def prepare_segment(self, segment: int) -> None:
        """Keep the segment of the newest world until :meth:`enter_world`."""
        self._forget_next_segment()
        self._next_segment = segment

    def enter_world(self) -> None:
        """Read the status page of the newest world from now on: the rank has moved there."""
        if self._next_segment is not None:
            self.adopt_segment(self._next_segment)
            self._next_segment = None

    def _read_page_of(self, page: mmap.mmap) -> None:
        old, self._map = self._map, page
        self._page = StatusPage(page)
        old.close()

    def _forget_next_segment(self) -> None:
        if self._next_segment is not None:
            os.close(self._next_segment)
            self._next_segment = None

    # ---- unlike a launched rank ---------------------------------------------------------------------------------

    def absence(self) -> str:
        if not self.has_joined:
            return "not joined yet"
        return f"gone: {self.how_it_ended()}; its job can be started again"

    def how_it_ended(self) -> str:
        if not self.has_joined:
            return "has not joined yet"
        return self._ended or self._ended_by_us or "left, or its process ended"

    def signal(self, number: int) -> None:
        """Do nothing: a job handles its own signals."""

    def join(self, timeout: float) -> bool:
        return True

    def kill(self) -> None:
        self.channel.close()

    def release(self) -> None:
        """Close the connection to the job, which continues."""
        if self._ended is None and self.alive:
            self._ended = "was released, and continues without this session"
        self._forget_next_segment()
        self.close_rank_ends()
        super().release()

    def release_in_child(self) -> None:
        self.close_rank_ends()
