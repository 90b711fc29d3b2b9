"""One rank as the notebook sees it: its connections, its log, and where it is at this moment."""

from __future__ import annotations

import mmap
import socket
from pathlib import Path

from graftlab.base.world import Place
from graftlab.exchange.arena import PAGE
from graftlab.exchange.channel import Channel
from graftlab.exchange.status_page import RankStatus, StatusPage
from graftlab.ranks.devices import DeviceAssignment
from graftlab.ranks.messages import LinkReport, StatusUpdate


class RankHandle:
    """The root of all ranks. ``wake_socket`` rings when the rank has sent what should not wait.

    Of ``segment``, the rank's shared memory, only the page that says where it is gets mapped. One without a segment is
    nowhere yet.
    """

    trusted = True
    """Whether what it sends pickled may be opened here, which runs what it says: true of this user's own processes."""

    takes_work = True
    """Whether it runs what the notebook sends it, and can be interrupted in that."""

    stacks_file: Path | None = None
    """Where a signal makes it write its threads' stacks, whatever they do; None where a signal would end it."""

    def __init__(
        self,
        place: Place,
        assignment: DeviceAssignment,
        channel: Channel,
        wake_socket: socket.socket,
        segment: int | None,
        log: Path,
    ) -> None:
        self.place = place
        self.assignment = assignment
        self.channel = channel
        self.wake_socket = wake_socket
        self.log = log
        self.pid: int | None = None
        self.alive = True
        self._map = mmap.mmap(-1, PAGE)
        if segment is not None:
            self._map = mmap.mmap(segment, PAGE, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        self._page = StatusPage(self._map)
        self._last_status = RankStatus()
        self._ended: str | None = None

    generation = 1
    """How often its side has been started: more than once where jobs were started again."""

    links = "shared memory"
    """What joins it with the other ranks, in words; blank where that is not known yet."""

    def note_links(self, linked: LinkReport) -> None:
        """It says what joins it with the other ranks."""

    def note_status(self, where: StatusUpdate) -> None:
        """It says where it is, for its memory cannot be looked at."""

    @property
    def label(self) -> str:
        return self.place.label

    def status(self) -> RankStatus:
        """Where the rank is at this moment, or was when it was released."""
        try:
            return self._page.read()
        except ValueError:
            return self._last_status

    def drop(self, why: str) -> None:
        """Hear no more of a rank that broke the rules of its line."""
        self._ended = f"was dropped: {why}"
        self.channel.close()

    def release(self) -> None:
        """Close what ties the rank to this process."""
        self.alive = False
        self.channel.close()
        self.wake_socket.close()
        # One mapped page would keep everything that the rank has published in memory.
        self._last_status = self.status()
        self._map.close()

    def log_tail(self, lines: int = 30) -> str:
        """The last lines that the rank wrote to its log."""
        try:
            text = self.log.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return "(nothing: the process had not come as far as its log; see what the notebook itself printed)"
        except OSError as error:
            return f"(no log: {error})"
        return "\n".join(text.splitlines()[-lines:]) or "(nothing)"

    # ---- what differs by who started it -------------------------------------------------------------------------

    def absence(self) -> str:
        """Why it is not alive, as tables say it."""
        return f"gone: {self.how_it_ended()}"

    def how_it_ended(self) -> str:
        """In words, such as ``"killed by SIGKILL"``."""
        raise NotImplementedError

    def signal(self, number: int) -> None:
        """Send its process a signal, where it has one that it takes them from."""
        raise NotImplementedError

    def join(self, timeout: float) -> bool:
        """Wait for it to be gone; False when it is not within ``timeout`` seconds."""
        raise NotImplementedError

    def kill(self) -> None:
        """End it, whatever it does."""
        raise NotImplementedError

    @property
    def was_ended(self) -> bool:
        """Whether :meth:`end` ended it, rather than a fault of its own."""
        return False

    def end(self, why: str) -> None:
        """End a rank that nothing else would end; its end is told in these words."""
        self.kill()

    def end_programs(self) -> None:
        """Called when the process has ended, or is to: programs of a rank end with it."""

    def release_in_child(self) -> None:
        """Called in a child forked off the notebook, which must not keep the rank alive."""
        raise NotImplementedError
