"""Where a job's part of graftlab logs: a file of the run folder. The job's own logging gets warnings alone."""

from __future__ import annotations

import logging
from pathlib import Path

_PACKAGE = logging.getLogger(__name__.partition(".")[0])


class _Forwarding(logging.Handler):
    """Hands warnings and errors on to the job's own handlers, as if this package had no others."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            logging.getLogger().handle(record)


def log_to(path: Path) -> None:
    """Write what graftlab logs, from INFO on, to this file too: a line a graft."""
    for old in [handler for handler in _PACKAGE.handlers if isinstance(handler, (_Forwarding, _File))]:
        _PACKAGE.removeHandler(old)
    _PACKAGE.addHandler(_Forwarding())
    _PACKAGE.setLevel(logging.INFO)
    _PACKAGE.propagate = False
    try:
        _PACKAGE.addHandler(_File(path, encoding="utf-8"))
    except OSError as error:
        _PACKAGE.warning("%s cannot be written: %s; what each graft did is in the rows alone", path, error)


class _File(logging.FileHandler):
    def __init__(self, path: Path, encoding: str) -> None:
        super().__init__(path, encoding=encoding)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
