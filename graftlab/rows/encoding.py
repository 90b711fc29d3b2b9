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

# Types that msgspec and `json` write alike.
_USUAL = frozenset({str, int, float, bool, type(None)})
_quickly = msgspec.json.Encoder().encode
# Made once, because making one takes as long as a short row. The recursion limit finds a value that contains itself.
_to_json = json.JSONEncoder(default=plain, ensure_ascii=False, check_circular=False, separators=(",", ":")).encode


def encode(row: Row) -> bytes:
    """One line of JSON without the newline: the row's values in the order of :data:`COLUMNS`.

    Values without a JSON form are written as their repr. A line begins with a space if orjson and `json` read it
    differently, because it has NaN, infinities, or integers of more than 64 bits.
    """
    if _is_usual(row):
        try:
            return _quickly(row)
        except (TypeError, OverflowError, UnicodeEncodeError):
            pass  # half a character, or a name whose class the user derived from str
    values = list(row)
    try:
        line = _to_json(values)
    except (TypeError, ValueError, RecursionError):
        # Only the caller's tags can have values that JSON cannot.
        values[_TAGS] = {name: _writable(value) for name, value in row.tags.items()}
        line = _to_json(values)
    return b" " + line.encode("utf-8", "replace")


def _is_usual(row: Row) -> bool:
    # Rows without a measurement have no floats, and zeros never make a sum infinite.
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
    """The value, or its repr if it has no JSON form: a dict whose keys are not text, a value that contains itself."""
    try:
        _to_json(value)
    except (TypeError, ValueError, RecursionError):
        return plain(value)
    return value


def json_of(value: object) -> bytes:
    """JSON text of what was read from JSON, with NaN and infinities as JavaScript has them."""
    return _to_json(value).encode("utf-8", "replace")


def decode(line: bytes) -> Row:
    """The inverse of :func:`encode`. Raises ValueError for a line that is not a row."""
    return record(values_of_line(line))


def record(values: list[Any]) -> Row:
    """A row from its values, as :func:`decode_lines` gives them. The list may be changed."""
    for at in _INDICES:
        if values[at] is not None:
            values[at] = tuple(values[at])
    return Row._make(values)


def decode_lines(lines: Sequence[bytes]) -> list[list[Any]]:
    """The values of each row in the order of :data:`COLUMNS`. Raises ValueError for a line that is not a row."""
    # One call of the parser for all is several times faster than one a row.
    if all(map(_is_plain, lines)):
        found = orjson.loads(b"[" + b",".join(lines) + b"]")
        if len(found) == len(lines) and all(type(row) is list and len(row) == len(COLUMNS) for row in found):
            return found  # type: ignore[no-any-return]
    return list(map(values_of_line, lines))


def values_of_line(line: bytes, names: Sequence[str] = COLUMNS) -> list[Any]:
    """The values of a row in the order of :data:`COLUMNS`, from a line that has those of the columns ``names``.

    What the line lacks is a row's default, or None. Raises ValueError for a line that is not a row.
    """
    found = orjson.loads(line) if _is_plain(line) else json.loads(line)
    if type(found) is not list or len(found) != len(names):
        raise ValueError(f"not a list of {len(names)} values")
    if tuple(names) == COLUMNS:
        return found
    row = dict(zip(names, found, strict=True))
    return [row.get(name, Row._field_defaults.get(name)) for name in COLUMNS]


def _is_plain(line: bytes) -> bool:
    return line.startswith(b"[")


# What JSON makes of each kind of column; None stands for what a row does not have.
_KINDS: dict[str, frozenset[type]] = {
    "integer": frozenset({int, type(None)}),
    "float": frozenset({int, float, type(None)}),
    "text": frozenset({str, type(None)}),
    "list": frozenset({list, type(None)}),
    "index": frozenset({list, type(None)}),
    "tags": frozenset({dict}),
}
_INT64 = 1 << 63


def _kinds_of(column: Column) -> frozenset[type]:
    """What JSON makes of the values that this column may have."""
    kinds = _KINDS[column.storage]
    return kinds if column.is_nullable else kinds - {type(None)}


def wrong_value(rows: Sequence[Sequence[Any]]) -> tuple[int, str, Any] | None:
    """The first value that its column cannot have, with the index of its row and the column's name; None usually."""
    if not rows:
        return None
    for column, cells in zip(TABLE, zip(*rows, strict=True), strict=True):
        kinds = _kinds_of(column)
        is_integer = column.storage == "integer"
        if not is_integer and kinds.issuperset(map(type, cells)):
            continue
        for index, cell in enumerate(cells):
            if type(cell) not in kinds or (is_integer and not -_INT64 <= (cell or 0) < _INT64):
                return index, column.name, cell
    return None
