"""Logging in a job: graftlab logs to a file of the run folder, and passes only warnings to the job's own logging."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

from graftlab.base.files import open_regular

_PACKAGE = logging.getLogger(__name__.partition(".")[0])


class _WarningForwarder(logging.Handler):
    """Passes warnings and errors to the job's own handlers, as if this package had no others."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            logging.getLogger().handle(record)


def log_to(path: Path) -> None:
    """Write graftlab's log, from INFO on, to this file: one line for each graft."""
    for old in [handler for handler in _PACKAGE.handlers if isinstance(handler, (_WarningForwarder, _LogFile))]:
        _PACKAGE.removeHandler(old)
    _PACKAGE.addHandler(_WarningForwarder())
    _PACKAGE.setLevel(logging.INFO)
    _PACKAGE.propagate = False
    try:
        _PACKAGE.addHandler(_LogFile(path))
    except OSError as error:
        _PACKAGE.warning("%s cannot be written: %s; only the rows show what each graft did", path, error)


class _LogFile(logging.FileHandler):
    """The log's file. A disk that does not take a line costs it, and one warning until it takes lines again."""

    _is_full = False

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8")
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))

    def _open(self) -> Any:
        return open(self.baseFilename, "a", encoding="utf-8", opener=open_regular)

    def flush(self) -> None:
        super().flush()
        self._is_full = False

    def handleError(self, record: logging.LogRecord) -> None:
        if not self._is_full:
            self._is_full = True
            why = sys.exc_info()[1]
            _PACKAGE.warning(
                "%s cannot be written: %s; only the rows show what each graft does", self.baseFilename, why
            )
