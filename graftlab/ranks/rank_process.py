"""One rank whose process the notebook has started."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from multiprocessing.process import BaseProcess
from pathlib import Path

from graftlab.base.world import Place
from graftlab.exchange.channel import Channel
from graftlab.ranks.devices import DeviceAssignment
from graftlab.ranks.handle import RankHandle
from graftlab.ranks.process_setup import end_programs_of

# What multiprocessing says of a process whose forkserver has died before it.
_UNKNOWN = 255


class RankProcess(RankHandle):
    """A process that this one started. It lives as long as this process holds its ``death_pipe``."""

    def __init__(
        self,
        place: Place,
        assignment: DeviceAssignment,
        process: BaseProcess,
        channel: Channel,
        wake_socket: socket.socket,
        death_pipe: socket.socket,
        segment: int,
        log: Path,
        stacks: Path,
    ) -> None:
        super().__init__(place, assignment, channel, wake_socket, segment, log)
        self.stacks_file = stacks
        self._process = process
        self._ended_by_us: str | None = None
        self._has_ended_programs = False
        self._death_pipe = death_pipe

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

    def end_programs(self) -> None:
        """Called when the process has ended, or is to: its programs end with it."""
        if self.pid is not None and not self._has_ended_programs:
            # Once: when the group is gone, another may get its number.
            self._has_ended_programs = True
            end_programs_of(self.pid)

    def release(self) -> None:
        """Close what ties the process to the notebook; a rank that is still there ends now."""
        self._death_pipe.close()
        self.end_programs()
        super().release()
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
        """Called in a child forked off the notebook: its copy of the death_pipe would keep the rank alive."""
        self._death_pipe.close()

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
