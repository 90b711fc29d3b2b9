"""How a row is written as one line of JSON, and read back."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import msgspec
import orjson

from graftlab.base.tags import plain
from graftlab.rows.schema import COLUMNS, TABLE, Column, Row

_TAGS = COLUMNS.index("tags")
_INDICES = [COLUMNS.index(column.name) for column in TABLE if column.storage == "index"]
_floats_of = itemgetter(*(COLUMNS.index(column.name) for column in TABLE if column.storage == "float"))

# What msgspec writes as `json` would; of other values each says something else.
_USUAL = frozenset({str, int, float, bool, type(None)})
_quickly = msgspec.json.Encoder().encode
# Made once, because making one takes as long as a short row. A value that holds itself is found by the recursion limit.
_to_json = json.JSONEncoder(default=plain, ensure_ascii=False, check_circular=False, separators=(",", ":")).encode


def encode(row: Row) -> bytes:
    """One line of JSON without the newline: the row's values in the order of :data:`COLUMNS`.

    What JSON does not have is written as its repr. A line that orjson would read in another way than `json`, because it
    has NaN, infinities, or integers of more than 64 bits, begins with a space.
    """
    if _is_usual(row):
        try:
            return _quickly(row)
        except (TypeError, OverflowError, UnicodeEncodeError):
            pass  # half a character, or a name that is text of some class of the user's
    values = list(row)
    try:
        line = _to_json(values)
    except (TypeError, ValueError, RecursionError):
        # Only tags, being the caller's, have what cannot be written.
        values[_TAGS] = {name: _writable(value) for name, value in row.tags.items()}
        line = _to_json(values)
    return b" " + line.encode("utf-8", "replace")


def _is_usual(row: Row) -> bool:
    # What has no measurement has no floats; nor can a zero make a sum infinite.
    if not math.isfinite(sum(filter(None, _floats_of(row)))):
        return False
    for value in row.tags.values():
        kind = type(value)
        if kind not in _USUAL:
            return False
        # orjson reads a longer integer as a float.
        if (kind is float and not math.isfinite(value)) or (kind is int and value.bit_length() > 63):
            return False
    return True


def _writable(value: object) -> object:
    """The value itself, or its repr: of a dict whose keys are not text, say, or of a value that holds itself."""
    try:
        _to_json(value)
    except (TypeError, ValueError, RecursionError):
        return plain(value)
    return value


def decode(line: bytes) -> Row:
    """The inverse of :func:`encode`. Raises ValueError for a line that is not a row."""
    rows, _ = decode_all(line + b"\n")
    if not rows:
        raise ValueError("not a row")
    return record(rows[0])


def record(values: list[Any]) -> Row:
    """A row from its values, as :func:`decode_all` gives them. The list may be changed."""
    for at in _INDICES:
        if values[at] is not None:
            values[at] = tuple(values[at])
    return Row._make(values)


def decode_all(lines: bytes, columns: Sequence[str] = COLUMNS) -> tuple[list[list[Any]], Sequence[str]]:
    """The values of each row in the order of :data:`COLUMNS`, from whole lines; and the columns of lines that follow.

    ``columns`` are those of the first line; one like :func:`.loading.header` changes them. A line may also be an
    object with the columns' names, as earlier versions wrote it. Raises ValueError where a line is no row.
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


# What JSON makes of each kind of column; None stands for what a row, or an earlier version, does not have.
_KINDS: dict[str, frozenset[type]] = {
    "integer": frozenset({int, type(None)}),
    "float": frozenset({int, float, type(None)}),
    "text": frozenset({str, type(None)}),
    "list": frozenset({list, type(None)}),
    "index": frozenset({list, type(None)}),
    "tags": frozenset({dict}),
}
_INT64 = 1 << 63


def kinds_of(column: Column) -> frozenset[type]:
    """What JSON makes of the values that this column may have."""
    kinds = _KINDS[column.storage]
    return kinds - {type(None)} if column.name in ("name", "step", "status") else kinds


def wrong_value(rows: Sequence[Sequence[Any]]) -> tuple[int, str, Any] | None:
    """The first value that its column cannot have, with the index of its row and the column's name; None usually."""
    if not rows:
        return None
    for column, cells in zip(TABLE, zip(*rows, strict=True), strict=True):
        kinds = kinds_of(column)
        is_integer = column.storage == "integer"
        if not is_integer and kinds.issuperset(map(type, cells)):
            continue
        for index, cell in enumerate(cells):
            if type(cell) not in kinds or (is_integer and not -_INT64 <= (cell or 0) < _INT64):
                return index, column.name, cell
    return None
