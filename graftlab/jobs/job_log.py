"""Logging in a job: to a file of the run folder, and warnings also to the job's own log."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from graftlab.base.files import open_regular
from graftlab.base.tags import PLACE_TAGS
from graftlab.base.text import first_of
from graftlab.config import PREFIX, GraftConfig
from graftlab.filters.check import FilterCheck, check_summary
from graftlab.plan.plan import FILTERS, GraftPlan
from graftlab.rows.schema import MEASURED

_PACKAGE = logging.getLogger(__name__.partition(".")[0])


class _WarningForwarder(logging.Handler):
    """Passes warnings and errors to the job's handlers, as if this package had none."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            logging.getLogger().handle(record)


def log_to(path: Path) -> None:
    """Write graftlab's log to this file, from INFO on, which includes a line for each graft."""
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
    """The log's file. A line that cannot be written is lost; one warning reports it, until writing succeeds again."""

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


_IN_VAIN = ("failed", "missing", "timeout")


def nothing_measured(
    taps: Sequence[Mapping[str, object]], statuses: Mapping[str, int], errors: Mapping[str, str], folder: Path
) -> str:
    """Return a sentence if a rank reached no tap, or measured nothing that it was to receive; otherwise ``""``.

    ``statuses`` counts its rows by status; ``errors`` has the last error of each status.
    """
    if not taps:
        return (
            "no tap was reached here, so nothing was compared: put gl.tap or gl.watch into the code, or set "
            "GRAFTLAB_WATCH=True"
        )
    received = {status: count for status, count in statuses.items() if status in _IN_VAIN}
    if not received or any(statuses.get(status) for status in MEASURED):
        return ""
    found = "; ".join(
        f"{count:,} {status}" + (f" ({errors[status].splitlines()[0]})" if errors.get(status) else "")
        for status, count in received.items()
    )
    names = list(dict.fromkeys(str(tags["name"]) for tags in taps))
    shown = first_of(names)
    hint = (
        ""
        if "failed" in received
        else " A tap pairs with one of the same name and tags in the same step of the other job."
    )
    return (
        f"nothing was compared here: this job's taps ({shown}) received nothing to compare: {found}.{hint} "
        f"gl.load_run({str(folder)!r}) has the rows of both sides"
    )


def unmatched_filters(config: GraftConfig, plan: GraftPlan, taps: Sequence[Mapping[str, object]]) -> list[str]:
    """Return a sentence for each filter of the environment that is in force and matches none of these taps.

    A filter that names a step, a side or a rank is left out, because ``taps`` has only the first call of each tap on
    one rank.
    """
    sentences = []
    for name in FILTERS:
        field = f"{name}_filter"
        text = getattr(config, field)
        if not taps or not (text or "").strip() or text != getattr(plan, name):
            continue
        check = FilterCheck(text)
        check.catch_up(taps)
        if check.filter is not None and not check.hits and not check.filter.names & PLACE_TAGS:
            sentences.append(
                f"{field} ({PREFIX}{field.upper()}) is {text!r} and matched no tap here: {check_summary(check, taps)}"
            )
    return sentences
