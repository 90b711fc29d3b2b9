"""When lines of rows become compressed blocks: once they are some thousand and no more come, or they are very many.

Not at once, so that a burst of rows has the processor for itself.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from graftlab.errors import SessionError

logger = logging.getLogger(__name__)

# Bytes of lines.
SOME = 4 << 20
MUCH = 32 << 20
AT_THE_END = 1 << 20
# Without a new row for so many seconds, none is expected.
_QUIET = 0.5


class Compactor:
    """A thread, from the time on when there is something to do."""

    def __init__(self, compact: Callable[[], bool], size: Callable[[], int]) -> None:
        """``compact`` makes one block and says whether there is more to do; ``size`` is that of the lines."""
        self._compact, self._size = compact, size
        self._due, self._ending = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def look(self) -> None:
        """To be called when there are :data:`SOME` lines; it returns at once."""
        if not self._due.is_set() and not self._ending.is_set():
            self._due.set()
            self._begin()

    def finish(self) -> None:
        """Do what is left and end. May be called again where it was interrupted."""
        if not self._ending.is_set():
            self._ending.set()
            if self._size() >= AT_THE_END:
                self._begin()
        self._due.set()
        if self._thread is not None:
            self._thread.join()

    def _begin(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="graftlab-compactor", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            self._due.wait()
            size = 0
            while size != (size := self._size()) and size < MUCH and not self._ending.wait(_QUIET):
                pass
            self._due.clear()
            try:
                while self._compact():
                    pass
            except OSError as problem:
                logger.warning("rows stay as lines, ten times as large as compressed: %s", problem)
            except SessionError as problem:
                logger.error("rows are not compressed any more: %s", problem)
                return
            if self._ending.is_set():
                return
