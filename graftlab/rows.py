"""The row: what is recorded of one tap on one receiving rank. Everything people look at is a rendering of rows."""

from __future__ import annotations

import json
import numbers
import re
from typing import Any

STATUSES = ("compared", "grafted", "failed", "missing", "timeout", "unmatched")

# Tags that graftlab sets itself; a caller's tag cannot have these names.
RESERVED_TAGS = frozenset({"name", "step", "side", "rank", "recompute_status"})

STATISTICS = (
    *("numel", "rel_l2", "rel_diff", "max_abs", "max_abs_index", "mean_abs", "cosine"),
    *("nonfinite_baseline", "nonfinite_target", "nonfinite_differ"),
    *("mean_baseline", "std_baseline", "min_baseline", "max_baseline"),
    *("mean_target", "std_target", "min_target", "max_target"),
)

COLUMNS = (
    *("run", "step", "order", "name", "tags", "direction", "side", "rank", "status", "senders", "shape", "dtype"),
    *STATISTICS,
    *("aligned_by", "cast", "note", "plan_version", "occurrence", "seconds", "error"),
)

Row = dict[str, Any]

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def plain(value: object) -> str | int | float | bool | None:
    """A tag's value as it travels in keys and rows, which must not need its class: text, a number, or its repr."""
    if value is None or type(value) in (str, int, float, bool):
        return value  # type: ignore[return-value]
    if isinstance(value, str):
        return str.__str__(value)  # str() of an enum is its name
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    # Where an object lies in memory would keep taps of two processes apart, and says nothing in a row.
    return _ADDRESS.sub("", repr(value))


def encode(row: Row) -> bytes:
    """One line of JSON without the newline. What JSON does not have is written as its repr."""
    try:
        return _line(row)
    except (TypeError, ValueError, RecursionError):
        # A dict whose keys are not text, or a value that holds itself. Only tags, being the caller's, have such.
        return _line({**row, "tags": {name: plain(value) for name, value in row["tags"].items()}})


def _line(row: Row) -> bytes:
    return json.dumps(row, default=plain, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def decode(line: bytes) -> Row:
    """The inverse of :func:`encode`. Raises ValueError for a line that is not a row."""
    row = json.loads(line)
    if not isinstance(row, dict) or "name" not in row:
        raise ValueError("not a row")
    return row
