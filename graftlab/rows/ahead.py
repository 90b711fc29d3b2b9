"""Reading rows into columns while they arrive, so that a frame that somebody asks for has little left to read."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from graftlab.errors import SessionError

logger = logging.getLogger(__name__)

SOME = 4000
"""So many rows are worth waking a thread for."""
# A row takes half a kilobyte in columns, which is for nothing where nobody ever asks for a frame.
MOST = 1 << 20
"""So many rows are read before anybody asks for them."""


class ReadAhead:
    """A thread, from the time on when there is something to read. ``read`` reads some rows, and says whether there are
    as many again."""

    def __init__(self, read: Callable[[], bool]) -> None:
        self._read = read
        self._due, self._ending = threading.Event(), False
        self.idle = threading.Event()
        """For threads whose work is less urgent than that of this one."""
        self.idle.set()
        self._thread: threading.Thread | None = None

    def look(self) -> None:
        """To be called by one thread at a time, when there are :data:`SOME` rows; it returns at once."""
        if self._ending or self._due.is_set():
            return
        self._due.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="graftlab-read-ahead", daemon=True)
            self._thread.start()

    def finish(self) -> None:
        """Read no more. May be called again where it was interrupted."""
        self._ending = True
        self._due.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            self._due.wait()
            self._due.clear()
            self.idle.clear()
            try:
                while not self._ending and self._read():
                    pass
            except (SessionError, OSError, ValueError) as problem:
                # Whoever asks for a frame is told.
                logger.debug("rows are not read ahead any more: %s", problem)
                return
            finally:
                self.idle.set()
            if self._ending:
                return
