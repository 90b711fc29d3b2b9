"""Rows as pandas: the store they stream into, the file they are appended to, and the frame they become."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from graftlab.errors import SessionError
from graftlab.rows import COLUMNS, Row, decode

ROWS_FILE = "rows.jsonl"

_INTEGERS = ("run", "step", "order", "rank", "numel", "plan_version", "occurrence")
_COUNTS = ("nonfinite_baseline", "nonfinite_target", "nonfinite_differ")
_FLOATS = (
    *("rel_l2", "rel_diff", "max_abs", "mean_abs", "cosine", "seconds"),
    *(f"{what}_{side}" for side in ("baseline", "target") for what in ("mean", "std", "min", "max")),
)


def to_frame(rows: Iterable[Row]) -> pd.DataFrame:
    """Rows as a frame: the columns of :data:`graftlab.rows.COLUMNS`, then one for each tag that callers used.

    A tag that is called like a column is found under ``tag_<name>``. Sorted by step and execution order.
    """
    rows = list(rows)
    columns: dict[str, list[Any]] = {name: [row.get(name) for row in rows] for name in COLUMNS}
    own = {"name", "step", "side", "rank"}
    tags = dict.fromkeys(tag for row in rows for tag in row.get("tags") or () if tag not in own)
    for tag in tags:
        column = tag
        while column in columns:
            column = f"tag_{column}"
        columns[column] = [(row.get("tags") or {}).get(tag) for row in rows]
    frame = pd.DataFrame(columns)
    for name in _FLOATS:
        frame[name] = pd.to_numeric(frame[name]).astype("float64")
    for name in (*_INTEGERS, *_COUNTS):
        # Nullable: rows without a measurement have no counts.
        frame[name] = frame[name].astype("Int64")
    if len(frame):
        frame = frame.sort_values(["step", "order", "side", "rank"], kind="stable", ignore_index=True)
    return frame


class RowStore:
    """All rows of a session: in memory as they came, and on disk before anybody looks at them. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._lock = threading.Lock()
        self._unread: list[bytes] = []
        self._rows: list[Row] = []
        # Unbuffered: what was appended is on its way to the disk even if this process is killed the next moment.
        self._file = open(folder / ROWS_FILE, "ab", buffering=0)  # noqa: SIM115 - open as long as the session

    def append(self, lines: Sequence[bytes]) -> None:
        with self._lock:
            if not self._file.closed:
                self._file.write(b"\n".join(lines) + b"\n")
            self._unread += lines

    def __len__(self) -> int:
        return len(self._rows) + len(self._unread)

    def rows(self, start: int = 0) -> list[Row]:
        """All rows from the one with this index on."""
        with self._lock:
            if self._unread:
                # One call of the parser for all is several times faster than one a row.
                self._rows += json.loads(b"[" + b",".join(self._unread) + b"]")
                self._unread = []
            return self._rows[start:]

    def window(self, start: int, stop: int) -> list[Row]:
        """The rows from index ``start`` up to ``stop``, without reading any other: for those who look live."""
        with self._lock:
            parsed = len(self._rows)
            fresh = self._unread[max(0, start - parsed) : max(0, stop - parsed)]
            read: list[Row] = json.loads(b"[" + b",".join(fresh) + b"]")
            return self._rows[start:stop] + read

    def close(self) -> None:
        with self._lock:
            self._file.close()


def load_run(folder: str | Path) -> pd.DataFrame:
    """The frame of a session's run folder, also of one that was killed: a last line that is cut short is left out.

    Raises :class:`SessionError` when there are no rows to read or a line in the middle is damaged.
    """
    path = Path(folder).expanduser() / ROWS_FILE
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise SessionError(
            f"no rows can be read from {path}: {error.strerror}; pass the run folder of a session (session.folder)"
        ) from error
    rows = []
    # Whole lines end with a newline, so the last piece is empty, or what was being written when the session died.
    for number, line in enumerate(lines[:-1], start=1):
        try:
            rows.append(decode(line))
        except ValueError as error:
            raise SessionError(f"{path}, line {number}: this is not a row of graftlab ({error})") from error
    return to_frame(rows)
