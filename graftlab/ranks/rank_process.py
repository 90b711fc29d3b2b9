"""One rank as the notebook sees it: its process, its connections, its log, and where it is at this moment."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import socket
from multiprocessing.process import BaseProcess
from pathlib import Path

from graftlab.base.world import Place
from graftlab.exchange.arena import PAGE
from graftlab.exchange.channel import Channel
from graftlab.exchange.whereabouts import Whereabouts, WhereaboutsPage
from graftlab.ranks.devices import Seat
from graftlab.ranks.lifeline import end_what_it_started

# What multiprocessing says of a process whose forkserver has died before it.
_UNKNOWN = 255


class RankProcess:
    """A process that this one started. ``bell`` rings when the rank has sent what should not wait.

    The rank lives as long as this process holds its ``lifeline``. Of ``segment``, the rank's shared memory, only the
    page that says where it is gets mapped.
    """

    trusted = True
    """Whether what it sends pickled may be opened here, which runs what it says: true of one's own processes."""

    def __init__(
        self,
        place: Place,
        seat: Seat,
        process: BaseProcess,
        channel: Channel,
        bell: socket.socket,
        lifeline: socket.socket,
        segment: int,
        log: Path,
        stacks: Path,
    ) -> None:
        self.place = place
        self.seat = seat
        self.channel = channel
        self.bell = bell
        self.log = log
        self.stacks_file = stacks
        self.pid: int | None = None
        self.alive = True
        self._process = process
        self._ended: str | None = None
        self._ended_by_us: str | None = None
        self._has_ended_programs = False
        self._lifeline = lifeline
        self._map = mmap.mmap(segment, PAGE, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        self._page = WhereaboutsPage(self._map)
        self._last_look = Whereabouts()

    @property
    def label(self) -> str:
        return self.place.label

    def whereabouts(self) -> Whereabouts:
        """Where the rank is at this moment, or was when it was released."""
        try:
            return self._page.read()
        except ValueError:
            return self._last_look

    def signal(self, number: int) -> None:
        if self.alive and self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def join(self, timeout: float) -> bool:
        """Wait for the process to end; False when it has not within ``timeout`` seconds."""
        if self._ended is not None:
            return True
        self._process.join(timeout)
        return self._process.exitcode is not None

    def kill(self) -> None:
        self._process.kill()

    def end(self, why: str) -> None:
        """Kill a rank that nothing else would end; its end is told in these words."""
        self._ended_by_us = why
        self.kill()

    @property
    def was_ended(self) -> bool:
        """Whether :meth:`end` ended it, rather than a fault of its own."""
        return self._ended_by_us is not None

    def end_what_it_started(self) -> None:
        """Called when the process has ended, or is to: its programs end with it."""
        if self.pid is not None and not self._has_ended_programs:
            # Once: when the group is gone, another may get its number.
            self._has_ended_programs = True
            end_what_it_started(self.pid)

    def drop(self, why: str) -> None:
        """Hear no more of a rank that broke the rules of its line; it ends when it notices."""
        self._ended = f"was dropped: {why}"
        self.channel.close()

    def release(self) -> None:
        """Close what ties the process to the notebook; a rank that is still there ends now."""
        self.alive = False
        self.channel.close()
        self.bell.close()
        self._lifeline.close()
        self.end_what_it_started()
        # One mapped page would keep everything that the rank has published in memory.
        self._last_look = self.whereabouts()
        self._map.close()
        if self._ended is None:
            self._ended = self.how_it_ended()
            if self.pid is not None:
                # torch counts who uses shared CUDA memory in files of such names, which only a clean exit removes.
                for left in Path("/dev/shm").glob(f"torch_{self.pid}_*"):
                    left.unlink(missing_ok=True)
            # A process that cannot be killed keeps its descriptor; any other releases it now, not at some collection.
            with contextlib.suppress(ValueError):
                self._process.close()

    def release_in_child(self) -> None:
        """Called in a child forked off the notebook: its copy of the lifeline would keep the rank alive."""
        self._lifeline.close()

    def how_it_ended(self) -> str:
        """In words, such as ``"killed by SIGKILL"``."""
        if self._ended is not None:
            return self._ended
        self._process.join(1.0)
        code = self._process.exitcode
        if self._ended_by_us is not None:
            return self._ended_by_us
        if code is None:
            return "closed its connection"
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"killed by {signal.Signals(-code).name}"
        if code == _UNKNOWN:
            return f"ended, by a signal or with exit code {code}: the forkserver, which would know, is gone"
        return f"ended with exit code {code}"

    def log_tail(self, lines: int = 30) -> str:
        """The last lines that the rank wrote to its log."""
        try:
            text = self.log.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return "(nothing: the process had not come as far as its log; see what the notebook itself printed)"
        except OSError as error:
            return f"(no log: {error})"
        return "\n".join(text.splitlines()[-lines:]) or "(nothing)"
