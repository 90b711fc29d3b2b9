"""The notebook's handle of one rank: its connections, its log and its status."""

from __future__ import annotations

import mmap
import os
import re
import socket
from pathlib import Path

from graftlab.base.world import Place
from graftlab.exchange.arena import PAGE
from graftlab.exchange.channel import SocketChannel
from graftlab.exchange.status_page import RankStatus, StatusPage
from graftlab.ranks.devices import DeviceAssignment
from graftlab.ranks.messages import LinkReport, StatusUpdate

# The bytes at the end of a log that are read for its last lines: a log grows with each graft.
_END = 1 << 20
_OF_A_GRAFT = re.compile(r"\S+ \S+ INFO graftlab\.grafting\.receive_pipeline: ")


def _end_of(path: Path, size: int) -> str:
    """The last ``size`` bytes of a file of text, from the first whole line, if there is one."""
    with path.open("rb") as file:
        left_out = max(0, file.seek(0, os.SEEK_END) - size)
        file.seek(left_out)
        text = file.read().decode(errors="replace")
    return (text.partition("\n")[2] or text) if left_out else text


def last_lines(text: str, lines: int, with_grafts: bool = True) -> str:
    """The last lines of a rank's log, or of those that no graft wrote."""
    chosen = [line for line in text.splitlines() if with_grafts or not _OF_A_GRAFT.match(line)]
    return "\n".join(chosen[-lines:])


class RankHandle:
    """The base class of all rank handles. ``wake_socket`` is readable when the rank has sent something urgent.

    Only the status page of ``segment``, the rank's shared memory, gets mapped. Without a segment the status is empty.
    """

    trusted = True
    """Whether this process may unpickle the rank's messages, which can run any code. True of the user's processes."""

    is_expected = False
    """Whether no process has joined as this rank yet."""

    takes_work = True
    """Whether the rank runs code that the notebook sends, and can be interrupted."""

    can_restart = True
    """Whether the session can start its process again."""

    stacks_file: Path | None = None
    """The file to which the rank writes its threads' stacks on a signal; None if a signal would end it."""

    def __init__(
        self,
        place: Place,
        assignment: DeviceAssignment,
        channel: SocketChannel,
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
            self._map = mmap.mmap(segment, PAGE, prot=mmap.PROT_READ)
        self._page = StatusPage(self._map)
        self._last_status = RankStatus()
        self._ended: str | None = None
        self._ended_by_us: str | None = None

    generation = 1
    """How often the rank's side has been started: more than once if jobs were restarted."""

    links = "shared memory"
    """How the rank is connected to the others, in words; empty until known."""

    def note_links(self, linked: LinkReport) -> None:
        """Record how the rank is connected to the others."""

    def note_status(self, where: StatusUpdate) -> None:
        """Record the status that a rank without shared memory has sent."""

    @property
    def label(self) -> str:
        return self.place.label

    def status(self) -> RankStatus:
        """Return the rank's current status, or the last one before it was released."""
        try:
            return self._page.read()
        except ValueError:
            return self._last_status

    def drop(self, why: str) -> None:
        """Close the connection to a rank that broke its protocol."""
        self._ended = f"was dropped: {why}"
        self.channel.close()

    def release(self) -> None:
        """Release everything that this process holds of the rank."""
        self.alive = False
        self.channel.close()
        self.wake_socket.close()
        # A page that stays mapped would keep the rank's whole segment in memory.
        self._last_status = self.status()
        self._map.close()

    def log_tail(self, lines: int = 30, *, with_grafts: bool = True) -> str:
        """Return the last lines of the rank's log, which may also leave out the line that each graft writes."""
        try:
            end = _end_of(self.log, max(_END, lines << 10))
        except FileNotFoundError:
            return "(nothing: the process had not opened its log yet; see the notebook's own output)"
        except OSError as error:
            return f"(no log: {error})"
        return last_lines(end, lines, with_grafts) or "(nothing)"

    # ---- depends on how the rank was started --------------------------------------------------------------------

    def absence(self) -> str:
        """Describe why the rank is not alive, for a table."""
        return f"gone: {self.how_it_ended()}"

    def how_it_ended(self) -> str:
        """Describe how the process ended, such as ``"killed by SIGKILL"``."""
        raise NotImplementedError

    def signal(self, number: int) -> None:
        """Send a signal to the rank's process, if this process may."""
        raise NotImplementedError

    def join(self, timeout: float) -> bool:
        """Wait for the process to end; False if it has not ended within ``timeout`` seconds."""
        raise NotImplementedError

    def kill(self) -> None:
        """Kill the process, whatever it is doing."""
        raise NotImplementedError

    @property
    def was_ended(self) -> bool:
        """Whether :meth:`end`, and not a failure, ended the process."""
        return self._ended_by_us is not None

    def end(self, why: str) -> None:
        """End a stuck rank; ``why`` is then reported as how it ended."""
        self._ended_by_us = why
        self.kill()

    def end_programs(self) -> None:
        """End the programs that the rank has started, when it has ended or is about to."""

    def release_in_child(self) -> None:
        """Release the rank in a forked child of the notebook, which must not keep it alive."""
        raise NotImplementedError
