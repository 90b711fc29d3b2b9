"""The row: what is recorded of one tap on one receiving rank. Everything people look at is a rendering of rows."""

from __future__ import annotations

import json
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


def encode(row: Row) -> bytes:
    """One line of JSON without the newline. What JSON does not have is written as its repr."""
    return json.dumps(row, default=repr, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def decode(line: bytes) -> Row:
    """The inverse of :func:`encode`. Raises ValueError for a line that is not a row."""
    row = json.loads(line)
    if not isinstance(row, dict) or "name" not in row:
        raise ValueError("not a row")
    return row
