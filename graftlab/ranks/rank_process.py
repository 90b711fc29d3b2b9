"""One rank whose process the notebook has started."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from multiprocessing.process import BaseProcess
from pathlib import Path

from graftlab.base.world import Place
from graftlab.exchange.channel import SocketChannel
from graftlab.ranks.devices import DeviceAssignment
from graftlab.ranks.handle import RankHandle
from graftlab.ranks.process_end import end_programs_of

# The exit code that multiprocessing reports for a process whose forkserver died first.
_UNKNOWN = 255


class RankProcess(RankHandle):
    """The handle of a process that this one started, which ends when ``death_pipe`` is closed."""

    def __init__(
        self,
        place: Place,
        assignment: DeviceAssignment,
        process: BaseProcess,
        channel: SocketChannel,
        wake_socket: socket.socket,
        death_pipe: socket.socket,
        segment: int,
        log: Path,
        stacks: Path,
    ) -> None:
        super().__init__(place, assignment, channel, wake_socket, segment, log)
        self.stacks_file = stacks
        self._process = process
        self._has_ended_programs = False
        self._death_pipe = death_pipe

    def signal(self, number: int) -> None:
        if self.alive and self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def join(self, timeout: float) -> bool:
        """Wait for the process to end; False when it has not ended within ``timeout`` seconds."""
        if self._ended is not None:
            return True
        self._process.join(timeout)
        return self._process.exitcode is not None

    def kill(self) -> None:
        self._process.kill()

    def end_programs(self) -> None:
        """End the programs that the rank has started, when it has ended or is about to."""
        if self.pid is not None and not self._has_ended_programs:
            # Only once: another process group may get its number later.
            self._has_ended_programs = True
            end_programs_of(self.pid)

    def release(self) -> None:
        """Close the connections to the process. A rank that is still running ends then."""
        self._death_pipe.close()
        self.end_programs()
        super().release()
        if self._ended is None:
            self._ended = self.how_it_ended()
            if self.pid is not None:
                # torch counts the users of shared CUDA memory in files of these names. Only a clean exit removes them.
                for left in Path("/dev/shm").glob(f"torch_{self.pid}_*"):
                    left.unlink(missing_ok=True)
            # Release its descriptor now, not at some garbage collection; a process that cannot be killed keeps it.
            with contextlib.suppress(ValueError):
                self._process.close()

    def release_in_child(self) -> None:
        """Close the copy of the death pipe in a forked child of the notebook, which would keep the rank alive."""
        self._death_pipe.close()

    def how_it_ended(self) -> str:
        """Describe how the process ended, such as ``"killed by SIGKILL"``."""
        if self._ended is not None:
            return self._ended
        self._process.join(1.0)
        code = self._process.exitcode
        if self._ended_by_us is not None:
            return self._ended_by_us
        if code is None:
            return "closed its connection"
        if code == _UNKNOWN:
            return f"ended, by a signal or with exit code {code}: the forkserver, which had the exact status, is gone"
        return describe_exit(code)


def describe_exit(code: int) -> str:
    """Describe how a process with this return code ended; a negative code is a signal."""
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"
