"""When rows move from the log into Parquet files: a thousand rows once the stream pauses, or very many at any time.

Not at once, because one file of many rows is smaller and is read faster than many small files.
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
# All of them, so that other programs find all rows of a session that has ended in Parquet files.
AT_THE_END = 1
DECODED_AT_ONCE = 2000
"""This many rows are worth waking the thread to decode them."""
# After this many seconds without a new row, none is expected.
_QUIET = 0.5
_RETRY = 5.0
# At most this many pieces are decoded before rows move; a faster stream would otherwise be decoded without end.
_PIECES = 32


class RowMover:
    """A thread that decodes rows of the log while they arrive and moves them into files; it starts when needed."""

    def __init__(
        self,
        decode: Callable[[], bool],
        move: Callable[[int], bool],
        undecoded: Callable[[], int],
        log_size: Callable[[], int],
    ) -> None:
        """``decode`` decodes some rows, ``move`` moves up to the given number of bytes; False means none were left.

        ``undecoded`` counts rows, ``log_size`` bytes.
        """
        self._decode, self._move, self._undecoded, self._log_size = decode, move, undecoded, log_size
        self._due, self._ending = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._awaits_pause = False

    def look(self) -> None:
        """Wake the thread if there is something to do; returns at once. One thread at a time may call it."""
        if self._due.is_set() or self._ending.is_set():
            return
        # While the thread awaits a pause of the stream, it looks at the size by itself.
        if self._undecoded() >= DECODED_AT_ONCE or (not self._awaits_pause and self._log_size() >= SOME):
            self._due.set()
            self._start()

    def finish(self) -> None:
        """Move what is left and end. May be called again where it was interrupted."""
        if not self._ending.is_set():
            self._ending.set()
            if self._log_size() >= AT_THE_END:
                self._start()
        self._due.set()
        if self._thread is not None:
            self._thread.join()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="graftlab-row-mover", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            self._due.wait()
            self._due.clear()
            try:
                self._work()
            except OSError as problem:
                logger.warning("rows stay in the log, ten times as large as in Parquet files: %s", problem)
                self._ending.wait(_RETRY)
            except SessionError as problem:
                # Frames report it too.
                logger.error("rows stay in the log, and are no longer moved into Parquet files: %s", problem)
                return
            if self._ending.is_set():
                return

    def _work(self) -> None:
        """Decode the rows that have arrived, and move them when the stream pauses or the log is large."""
        before = -1
        while True:
            for _ in range(_PIECES):
                if self._undecoded() < DECODED_AT_ONCE or not self._decode():
                    break
            size, is_ending = self._log_size(), self._ending.is_set()
            if size < (AT_THE_END if is_ending else SOME):
                return
            if size >= MUCH or size == before or is_ending:
                # In a stream of rows, which may resume after a pause, this might not end; there the last ones may stay.
                while (is_ending or self._log_size() < MUCH) and self._decode():
                    pass
                if not self._move(MUCH):
                    return
                before = -1
            else:
                before = size
                self._awaits_pause = True
                self._due.wait(_QUIET)
                self._awaits_pause = False
                self._due.clear()
