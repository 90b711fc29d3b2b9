"""The run folders below ``~/.graftlab/runs``: their list, their sizes, and the removal of old ones."""

from __future__ import annotations

import logging
import math
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from graftlab.control.run_folder import description_of, home
from graftlab.errors import SessionError
from graftlab.rows.log import ROWS_FILE, lock

logger = logging.getLogger(__name__)

GIB_VARIABLE, DAYS_VARIABLE = "GRAFTLAB_RUNS_GIB", "GRAFTLAB_RUNS_DAYS"
_GIB, _DAYS = 10.0, 30.0
# In seconds. A younger folder may not have its lock yet.
_NEW = 600.0
# Seconds since the epoch, in the year 2242.
_LATEST = float(1 << 33)


@dataclass(frozen=True)
class PastRun:
    """One run folder. ``is_open`` means that a session of some process writes into it."""

    folder: Path
    started: float
    bytes: int
    row_bytes: int
    is_open: bool


def runs(folder: str | Path | None = None) -> pd.DataFrame:
    """The run folders of past and open sessions, oldest first, one per row.

    Columns are ``started``, ``bytes``, ``row_bytes``, ``open`` and ``folder``. ``folder`` is their parent, by default
    ``$GRAFTLAB_HOME/runs`` or ``~/.graftlab/runs``. :func:`load_run` reads the rows of a run. A launch removes folders
    older than 30 days (``$GRAFTLAB_RUNS_DAYS``), then the oldest until all together take at most 10 GiB
    (``$GRAFTLAB_RUNS_GIB``). It never removes an open one, nor one made elsewhere with ``folder=``.

    >>> session.folder in list(gl.runs()["folder"])
    True
    """
    found = find_runs(_folder_or_default(folder))
    return pd.DataFrame(
        {
            "started": pd.to_datetime([each.started for each in found], unit="s"),
            "bytes": [each.bytes for each in found],
            "row_bytes": [each.row_bytes for each in found],
            "open": [each.is_open for each in found],
            "folder": [each.folder for each in found],
        }
    )


# The run folders that launches of this process have found closed, with the time of their last row in ns. To look at one
# takes a third of a millisecond.
_closed: dict[Path, tuple[int | None, PastRun]] = {}


def find_runs(where: Path, known: dict[Path, tuple[int | None, PastRun]] | None = None) -> list[PastRun]:
    """The run folders in this folder, oldest first; other folders are left out.

    Those in ``known`` are as they were unless rows have been written since. Closed ones are added to it.
    """
    known = {} if known is None else known
    found = []
    for path in where.iterdir() if where.is_dir() else ():
        rows = path / ROWS_FILE
        written = _last_written(rows)
        if path in known and known[path][0] == written:
            found.append(known[path][1])
        elif path.is_dir() and not path.is_symlink() and rows.is_file() and (path / "logs").is_dir():
            try:
                sizes = [file.lstat().st_size for file in path.rglob("*")]
                of_rows = sum(file.stat().st_size for file in path.glob("rows[.-]*"))
                run = PastRun(path, _started(path), sum(sizes), of_rows, _is_open(rows))
            except FileNotFoundError:  # another launch removes it
                continue
            found.append(run)
            if not run.is_open:
                known[path] = written, run
    return sorted(found, key=lambda each: each.started)


def _last_written(rows: Path) -> int | None:
    try:
        return rows.stat().st_mtime_ns
    except OSError:
        return None


def prune(where: Path | None = None, gib: float | None = None, days: float | None = None) -> list[PastRun]:
    """Remove the oldest run folders until the rest fit into ``gib`` and are younger than ``days``; returns those.

    None stands for the environment's setting, or 10 GiB and 30 days. Raises :class:`SessionError` for a budget that is
    not a number.
    """
    limit = _budget(GIB_VARIABLE, gib, _GIB) * 2**30
    oldest = time.time() - _budget(DAYS_VARIABLE, days, _DAYS) * 86400
    found = find_runs(_folder_or_default(where), _closed)
    total = sum(each.bytes for each in found)
    removed = []
    for each in found:
        if (total > limit or each.started < oldest) and _remove(each):
            total -= each.bytes
            removed.append(each)
            _closed.pop(each.folder, None)
    return removed


def runs_text(found: Sequence[PastRun]) -> str:
    """The run folders as text: a line each, and the sum of their sizes."""
    lines = [
        f"{time.strftime('%Y-%m-%d %H:%M', time.localtime(each.started))}  {each.bytes / 2**20:10.1f} MiB  "
        f"{'open' if each.is_open else '    '}  {each.folder}"
        for each in found
    ]
    total = sum(each.bytes for each in found) / 2**20
    return "\n".join([*lines, f"{len(found)} run folders, {total:.1f} MiB"])


def _folder_or_default(folder: str | Path | None) -> Path:
    return home() / "runs" if folder is None else Path(folder).expanduser()


def _budget(variable: str, given: float | None, usual: float) -> float:
    value: object = os.environ.get(variable, usual) if given is None else given
    try:
        budget = float(str(value))
    except ValueError:
        budget = math.nan
    if not budget >= 0:
        raise SessionError(f"{variable}={value!r}: give a number of 0 or more; inf keeps everything")
    return budget


def _started(path: Path) -> float:
    try:
        started = float(description_of(path)["started"])
    except (ValueError, KeyError, TypeError, OverflowError):
        started = math.nan
    # The file may contain any number, and datetime raises for years past 9999.
    return started if 0 <= started < _LATEST else path.stat().st_mtime


def _is_open(rows: Path) -> bool:
    try:
        lock(rows).close()
    except BlockingIOError:
        return True
    return False


def _remove(run: PastRun) -> bool:
    rows = run.folder / ROWS_FILE
    try:
        if time.time() - rows.stat().st_mtime < _NEW:
            return False
        # Keep the lock until the folder is removed, so that no session can begin in it.
        with lock(rows):
            shutil.rmtree(run.folder)
    except OSError as error:
        if not isinstance(error, (BlockingIOError, FileNotFoundError)):
            logger.warning("the old run folder %s cannot be removed: %s", run.folder, error)
        return False
    return True
