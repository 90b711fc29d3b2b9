"""Logging in a job: graftlab logs to a file of the run folder, and passes only warnings to the job's own logging."""

from __future__ import annotations

import logging
from pathlib import Path

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
        _PACKAGE.addHandler(_LogFile(path, encoding="utf-8"))
    except OSError as error:
        _PACKAGE.warning("%s cannot be written: %s; only the rows show what each graft did", path, error)


class _LogFile(logging.FileHandler):
    def __init__(self, path: Path, encoding: str) -> None:
        super().__init__(path, encoding=encoding)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
