"""Lines of rows become typed columns in the compiled library (`diffs/c/lines.c`), without an object for each value.

It takes lines as :func:`.encoding.encode` writes them. What it does not take, and what is damaged, is left to
:func:`.encoding.decode_all`, which gives the same values or names the fault.
"""

from __future__ import annotations

import ctypes
import functools
import json
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson

from graftlab.diffs import kernel
from graftlab.rows.encoding import kinds_of
from graftlab.rows.schema import TABLE

# The kinds of columns by their numbers in lines.c.
_NUMBER, _INTEGER, _INTEGER_OR_NULL, _TEXT = range(4)
_STORED_AS_NUMBERS = {
    ("float", False): _NUMBER,
    ("float", True): _NUMBER,
    ("integer", False): _INTEGER,
    ("integer", True): _INTEGER_OR_NULL,
}
_KINDS = np.array([_STORED_AS_NUMBERS.get((each.storage, each.is_nullable), _TEXT) for each in TABLE], np.uint8)
_NUMBERS = [column.name for column, kind in zip(TABLE, _KINDS, strict=True) if kind == _NUMBER]
_INTEGERS = [column.name for column, kind in zip(TABLE, _KINDS, strict=True) if kind in (_INTEGER, _INTEGER_OR_NULL)]
_TEXTS = [column for column, kind in zip(TABLE, _KINDS, strict=True) if kind == _TEXT]

_NEWLINE = ord("\n")
_SMALLEST_POWER, _LARGEST_POWER = -342, 308
# Where lines are read in pieces, offsets in them fit into 32 bits.
_LONGEST = 1 << 30

Array = npt.NDArray[Any]


class Repeated(NamedTuple):
    """Values of a column: ``values[places[row]]`` is that of a row."""

    values: list[Any]
    places: Array


class Parsed(NamedTuple):
    """Rows by column: floats with NaN for null, integers with the largest of all for null, and what is no number."""

    row_count: int
    numbers: dict[str, Array]
    others: dict[str, Repeated]


class _Lines(ctypes.Structure):
    """As in lines.c."""

    _fields_ = (
        ("text", ctypes.c_char_p),
        *((name, ctypes.c_int64) for name in ("length", "rows", "columns")),
        *((name, ctypes.c_void_p) for name in ("kinds", "numbers", "integers", "places", "spans", "distinct", "slots")),
        ("slot_count", ctypes.c_int64),
        ("powers", ctypes.c_void_p),
        ("spaced", ctypes.c_int64),
    )


def parse(lines: bytes) -> Parsed | None:
    """Whole lines, each a row with the values of :data:`.schema.COLUMNS`; None where `decode_all` has to read them."""
    library = kernel.load()
    if library is None or not lines.startswith((b"[", b" [")) or len(lines) > _LONGEST:
        return None
    rows = int(np.count_nonzero(np.frombuffer(lines, np.uint8) == _NEWLINE))
    slot_count = 1 << (2 * rows).bit_length()
    numbers = np.empty((len(_NUMBERS), rows), np.float64)
    integers = np.empty((len(_INTEGERS), rows), np.int64)
    places = np.empty((len(_TEXTS), rows), np.int32)
    spans = np.empty((len(_TEXTS), rows, 2), np.int32)
    distinct = np.zeros(len(_TEXTS), np.int64)
    slots = np.zeros((len(_TEXTS), slot_count), np.int32)
    arrays = (_KINDS, numbers, integers, places, spans, distinct, slots)
    addresses = [array.ctypes.data for array in arrays]
    asked = _Lines(lines, len(lines), rows, len(TABLE), *addresses, slot_count, _powers_of_five().ctypes.data, 0)
    if library.read_lines(ctypes.addressof(asked)):
        return None
    others = {}
    for at, column in enumerate(_TEXTS):
        found = [lines[begin:end] for begin, end in spans[at, : distinct[at]].tolist()]
        values = _values(found, is_json=bool(asked.spaced))
        if values is None or not kinds_of(column).issuperset(map(type, values)):
            return None
        others[column.name] = Repeated(values, places[at])
    return Parsed(rows, dict(zip([*_NUMBERS, *_INTEGERS], [*numbers, *integers], strict=True)), others)


def _values(texts: list[bytes], *, is_json: bool) -> list[Any] | None:
    """What these texts say; None if one of them says nothing."""
    together = b"[" + b",".join(texts) + b"]"
    try:
        values: list[Any] = json.loads(together) if is_json else orjson.loads(together)
    except ValueError:
        return None
    return values if len(values) == len(texts) else None


@functools.cache
def _powers_of_five() -> npt.NDArray[np.uint64]:
    """The first 128 bits of each power of five; reciprocals are rounded up. High half, low half, and so on."""
    halves = []
    for exponent in range(_SMALLEST_POWER, _LARGEST_POWER + 1):
        power = 5 ** abs(exponent)
        if exponent < 0:
            # So many bits that none of the 128 is lost.
            bits = (power - 1).bit_length()
            power = (1 << (bits + 127 if exponent >= -27 else 2 * bits + 128)) // power + 1
        excess = power.bit_length() - 128
        power = power >> excess if excess > 0 else power << -excess
        halves += [power >> 64, power & (1 << 64) - 1]
    return np.array(halves, np.uint64)
