"""The notebook's handle of a rank on another machine."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable
from pathlib import Path

from graftlab.base.world import Place
from graftlab.jobs.attached_rank_handle import AttachedRankHandle
from graftlab.ranks.handle import last_lines
from graftlab.ranks.rank_process import describe_exit
from graftlab.remote.hosts import RemoteProcess

# Seconds to wait for the report of a process whose connection has ended.
_END_LIMIT = 1.0
# Seconds to wait for the log of a running process.
_LOG_LIMIT = 10.0
# Ranks that end further apart than this, in seconds, are waited for separately.
_BETWEEN = 5.0


class EndPatience:
    """Bounds how long the notebook waits for the reports of ranks that end at about the same time.

    If a machine vanishes, all of its ranks end together, and no report arrives.
    """

    _until = 0.0

    def remaining(self) -> float:
        """The seconds left for all of them together."""
        now = time.monotonic()
        if now > self._until + _BETWEEN:
            self._until = now + _END_LIMIT
        return max(0.0, self._until - now)


class RemoteRankHandle(AttachedRankHandle):
    """The handle of a rank that a session has launched elsewhere. ``on_release`` is called once, when it is released.

    While it runs, its log is on its own machine. The end of the log is fetched when it is read, and when the rank has
    ended.
    """

    takes_work = True

    def __init__(
        self,
        place: Place,
        folder: Path,
        process: RemoteProcess,
        patience: EndPatience,
        on_release: Callable[[RemoteRankHandle], None],
    ) -> None:
        super().__init__(place, folder)
        self._patience = patience
        self.process = process
        self._on_release = on_release
        self._tail = b""
        self._released = False

    @property
    def reported(self) -> str | None:
        """How its process ended, if its supervisor has reported that by now; otherwise None."""
        return self._look(0.0)

    def _look(self, timeout: float) -> str | None:
        if self._ended is None and (found := self.process.end(timeout)) is not None:
            if isinstance(found, str):
                self._ended = found
            else:
                self._ended = describe_exit(found.code)
                self._keep_log(found.tail)
        return self._ended

    # ---- its end ------------------------------------------------------------------------------------------------

    def absence(self) -> str:
        return f"gone: {self.how_it_ended()}" if self.has_joined else "not started yet"

    def how_it_ended(self) -> str:
        if self._ended_by_us is not None:
            return self._ended_by_us
        return self._look(self._patience.remaining()) or "closed its connection, or its machine is gone"

    def signal(self, number: int) -> None:
        if self.alive:
            self.process.signal(number)

    def join(self, timeout: float) -> bool:
        return self._look(timeout) is not None

    def kill(self) -> None:
        self.process.signal(signal.SIGKILL)

    def release(self) -> None:
        """Close this process's connections to it. The machine is given back once all ranks of a launch are released."""
        if not self._released:
            self._released = True
            self._look(0.0)
            self.alive = False
            super().release()
            self._on_release(self)

    def release_in_child(self) -> None:
        super().release_in_child()
        self.process.release_in_child()

    # ---- its log ------------------------------------------------------------------------------------------------

    def log_tail(self, lines: int = 30, *, with_grafts: bool = True) -> str:
        if self._look(0.0) is None:
            # A vanished machine does not answer, and meanwhile the session's other ranks would not be read.
            limit = self._patience.remaining() if self.has_joined and not self.alive else _LOG_LIMIT
            if limit and (tail := self.process.log_tail(limit)):
                self._keep_log(tail)
        text = self._tail.decode(errors="replace")
        return last_lines(text, lines, with_grafts) or "(nothing, or its machine cannot be reached)"

    def _keep_log(self, tail: bytes) -> None:
        self._tail = tail
        # If the folder's disk is full, the log is only shown.
        with contextlib.suppress(OSError):
            self.log.parent.mkdir(parents=True, exist_ok=True)
            self.log.write_bytes(tail)
            self.log.chmod(0o600)
