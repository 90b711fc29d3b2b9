"""Warnings about refused processes: a few lines, however many processes come."""

from __future__ import annotations

import logging
import threading
import time

logger = logging.getLogger(__name__)

_LINES = 5
_SECONDS = 10.0


class RefusalLog:
    """Logs a few refusals in any ten seconds, and of all others one line with their number. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._began = -_SECONDS
        self._lines = self._held = 0
        self._last = ""

    def warn(self, message: str) -> None:
        """Log this refusal, or count it."""
        with self._lock:
            now = time.monotonic()
            if now - self._began >= _SECONDS:
                self._log_held()
                self._began, self._lines = now, 0
            if self._lines < _LINES:
                self._lines += 1
                logger.warning("%s", message)
            else:
                self._held += 1
                self._last = message

    def close(self) -> None:
        """Log the number of refusals that were only counted."""
        with self._lock:
            self._log_held()

    def _log_held(self) -> None:
        if self._held:
            logger.warning("%s more processes were refused; the last: %s", f"{self._held:,}", self._last)
            self._held = 0
