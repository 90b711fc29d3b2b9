"""How a row is written as one line of JSON, and read back."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import orjson

from graftlab.base.tags import plain
from graftlab.rows.schema import COLUMNS, Row

# The first line of a file of rows, so that it can be read by people and by later versions.
HEADER = json.dumps({"columns": COLUMNS}).encode()

_TAGS = COLUMNS.index("tags")

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
