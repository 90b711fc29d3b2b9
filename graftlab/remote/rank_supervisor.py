"""Runs a rank as a child process on its machine, keeps the end of its output, and ends it.

The rank has its own process, so that its main thread is free for the model, as on the notebook's machine. It reads its
specification, the session's token included, from standard input, where no other user can read it. This module does not
import torch, for which a supervisor would need hundreds of MiB.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from subprocess import PIPE

from graftlab.base.wire import WIRE_VERSION, graftlab_release
from graftlab.ranks.process_end import end_programs_of

_KEPT = 1 << 20
_PIECE = 1 << 16
# Seconds for the rest of the output, once the process has ended: programs with their own session may still write.
_REST_LIMIT = 2.0
# The rank gets this process's import path, which a scheduler may have composed.
_BEGIN = (
    "import sys, json; sys.path[:] = json.loads(sys.stdin.buffer.readline()); "
    "from graftlab.remote.remote_rank import main; main()"
)


@dataclass(frozen=True)
class HostFacts:
    """Facts of a rank's machine that the notebook needs: its name, and its versions of graftlab and Python."""

    wire_version: int
    release: str
    python: str
    node: str


@dataclass(frozen=True)
class RankEnd:
    """How a rank's process ended, as a :attr:`subprocess.Popen.returncode`, and the end of its output."""

    code: int
    tail: bytes


class RankSupervisor:
    """Supervises one rank, which also ends with this process, however that ends."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._tail = bytearray()
        self._lock = threading.Lock()

    def facts(self) -> HostFacts:
        """Describe this machine."""
        return HostFacts(WIRE_VERSION, graftlab_release(), platform.python_version(), platform.node())

    def run(self, spec: bytes) -> RankEnd:
        """Run the rank with this packed :class:`graftlab.remote.remote_rank.RemoteRankSpec` to its end.

        The programs that it has started end with it, except those with their own session.
        """
        self._start(spec)
        process = self._started()
        code = process.wait()
        end_programs_of(process.pid)
        self._reader.join(_REST_LIMIT)
        self._death_pipe.close()
        return RankEnd(code, self.log_tail())

    def _start(self, spec: bytes) -> None:
        self._death_pipe, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BEGIN, str(theirs.fileno())],
                stdin=PIPE,
                stdout=PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._read_output, args=(self._process,), daemon=True)
        self._reader.start()
        assert self._process.stdin is not None
        try:
            with self._process.stdin as stdin:
                stdin.write(json.dumps(sys.path).encode() + b"\n" + spec)
        except BrokenPipeError:
            # The process has ended, and its output shows why.
            return

    def signal(self, number: int) -> None:
        """Send the rank's process a signal."""
        self._started().send_signal(number)

    def log_tail(self) -> bytes:
        """Return the end of the rank's output, at most a MiB."""
        with self._lock:
            return bytes(self._tail[-_KEPT:])

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("this rank has not been started")
        return self._process

    def _read_output(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        while data := os.read(process.stdout.fileno(), _PIECE):
            with self._lock:
                self._tail += data
                # Only seldom, because it copies a MiB each time.
                if len(self._tail) > 2 * _KEPT:
                    del self._tail[:-_KEPT]
