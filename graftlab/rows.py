"""The row: what is recorded of one tap on one receiving rank. Everything people look at is a rendering of rows."""

from __future__ import annotations

import json
import math
import numbers
import re
from collections.abc import Sequence
from typing import Any

import orjson

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
    *("aligned_by", "rows_matched", "rows_unmatched", "cast", "note", "plan_version", "occurrence", "seconds", "error"),
)

Row = dict[str, Any]

# The first line of a file of rows, so that it can be read by people and by later versions.
HEADER = json.dumps({"columns": COLUMNS}).encode()

_TAGS = COLUMNS.index("tags")

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


# What orjson writes as `json` would; of other values each says something else.
_USUAL = frozenset({str, int, float, bool, type(None)})
_FLOATS = tuple(
    COLUMNS.index(name)
    for name in (
        *("rel_l2", "rel_diff", "max_abs", "mean_abs", "cosine", "seconds"),
        *(f"{what}_{side}" for side in ("baseline", "target") for what in ("mean", "std", "min", "max")),
    )
)
# Made once, for that takes as long as a short row. A value that holds itself is found by the recursion limit.
_to_json = json.JSONEncoder(default=plain, ensure_ascii=False, check_circular=False, separators=(",", ":")).encode


def encode(row: Row) -> bytes:
    """One line of JSON without the newline: the row's values in the order of :data:`COLUMNS`.

    What JSON does not have is written as its repr. A line that orjson would read in another way than `json`, because it
    has NaN, infinities, or integers of more than 64 bits, begins with a space.
    """
    values = list(map(row.get, COLUMNS))
    if _is_usual(values):
        try:
            return orjson.dumps(values)
        except TypeError:
            pass  # half a character, or a very large integer
    try:
        line = _to_json(values)
    except (TypeError, ValueError, RecursionError):
        # A dict whose keys are not text, or a value that holds itself. Only tags, being the caller's, have such.
        values[_TAGS] = {name: plain(value) for name, value in row["tags"].items()}
        line = _to_json(values)
    return b" " + line.encode("utf-8", "replace")


def _is_usual(values: list[Any]) -> bool:
    if not math.isfinite(sum([value for at in _FLOATS if (value := values[at]) is not None])):
        return False
    for value in (values[_TAGS] or {}).values():
        if type(value) not in _USUAL or (type(value) is float and not math.isfinite(value)):
            return False
    return True


def decode(line: bytes) -> Row:
    """The inverse of :func:`encode`. Raises ValueError for a line that is not a row."""
    rows, _ = decode_all(line + b"\n")
    if not rows:
        raise ValueError("not a row")
    return dict(zip(COLUMNS, rows[0], strict=True))


def decode_all(lines: bytes, columns: Sequence[str] = COLUMNS) -> tuple[list[list[Any]], Sequence[str]]:
    """The values of each row in the order of :data:`COLUMNS`, from whole lines; and the columns of lines that follow.

    ``columns`` are those of the first line; a line like :data:`HEADER` changes them. A line may also be an object with
    the columns' names, as earlier versions wrote it. Raises ValueError where there is a line that is no row.
    """
    # One call of the parser for all is several times faster than one a row.
    everything = b"[" + lines[:-1].replace(b"\n", b",") + b"]"
    quickly = lines.startswith(b"[") and b"\n " not in lines and b"\n{" not in lines
    found = orjson.loads(everything) if quickly else json.loads(everything)
    if len(found) != lines.count(b"\n"):
        raise ValueError("not one row a line")
    if columns == COLUMNS and set(map(type, found)) == {list} and set(map(len, found)) == {len(COLUMNS)}:
        return found, columns
    rows = []
    for row in found:
        if isinstance(row, list):
            row = dict(zip(columns, row, strict=True))
        if not isinstance(row, dict) or row.keys().isdisjoint(("name", "columns")):
            raise ValueError("not a row")
        if "name" in row:
            rows.append(list(map(row.get, COLUMNS)))
        else:
            columns = tuple(row["columns"])
    return rows, columns
