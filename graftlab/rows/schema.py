"""The row: what is recorded of one tap on one receiving rank. Everything people look at is a rendering of rows."""

from __future__ import annotations

from typing import Any

STATUSES = ("compared", "grafted", "failed", "missing", "timeout", "unmatched")

STATISTICS = (
    *("numel", "rel_l2", "rel_diff", "max_abs", "max_abs_index", "mean_abs", "cosine"),
    *("nonfinite_baseline", "nonfinite_target", "nonfinite_differ"),
    *("mean_baseline", "std_baseline", "min_baseline", "max_baseline"),
    *("mean_target", "std_target", "min_target", "max_target"),
)

COLUMNS = (
    *("run", "step", "order", "name", "tags", "direction", "side", "rank", "status", "senders", "shape", "dtype"),
    *STATISTICS,
    *("aligned_by", "rows_matched", "rows_unmatched", "cast", "note", "plan_version", "occurrence", "seconds", "error"),
)

Row = dict[str, Any]
