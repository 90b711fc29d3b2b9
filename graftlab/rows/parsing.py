"""Lines of rows become typed columns in the compiled library (`diffs/c/lines.c`), without an object for each value.

It takes lines as :func:`.encoding.encode` writes them. What it does not take, and what is damaged, is left to
:func:`.encoding.decode_all`, which gives the same values or names the fault.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson

from graftlab.diffs import kernel
from graftlab.rows.encoding import decode_all, kinds_of
from graftlab.rows.schema import TABLE

# The kinds of columns by their numbers in lines.c.
_NUMBER, _INTEGER, _INTEGER_OR_NULL, _TEXT, _TAGS = range(5)
_STORED_AS_NUMBERS = {
    ("float", False): _NUMBER,
    ("float", True): _NUMBER,
    ("integer", False): _INTEGER,
    ("integer", True): _INTEGER_OR_NULL,
    ("tags", False): _TAGS,
}
_KINDS = np.array([_STORED_AS_NUMBERS.get((each.storage, each.is_nullable), _TEXT) for each in TABLE], np.uint8)
_NUMBERS = [column.name for column, kind in zip(TABLE, _KINDS, strict=True) if kind == _NUMBER]
_INTEGERS = [column.name for column, kind in zip(TABLE, _KINDS, strict=True) if kind in (_INTEGER, _INTEGER_OR_NULL)]
_TEXTS = [column for column, kind in zip(TABLE, _KINDS, strict=True) if kind in (_TEXT, _TAGS)]
NO_INTEGER = np.iinfo(np.int64).max
"""What an array of integers has for null."""

_NEWLINE = ord("\n")
_SMALLEST_POWER, _LARGEST_POWER = -342, 308
# More of them would wait for the one that puts together what they have read.
_MOST_THREADS = 4
# Where lines are read in pieces, offsets in them fit into 32 bits.
_LONGEST = 1 << 30

Array = npt.NDArray[Any]

# A NaN that no computation gives, because a row may also have a NaN that was measured.
_NULL_BITS = 0x7FFC000000000001
NULL = float(np.array(_NULL_BITS).view(np.float64))
"""What an array of floats has for null."""


class Repeated(NamedTuple):
    """Values of a column: ``values[places[row]]`` is that of a row."""

    values: list[Any]
    places: Array


@dataclass(frozen=True)
class Parsed:
    """Rows by column: floats with :data:`NULL` for null, integers with :data:`NO_INTEGER`, and what is no number.

    ``tag_steps`` are the steps in the rows' tags. Tags in ``others`` have None in their place, so that they repeat from
    step to step; those that have :data:`NO_INTEGER` here are complete.
    """

    numbers: dict[str, Array]
    others: dict[str, Repeated]
    tag_steps: Array

    def __len__(self) -> int:
        return len(self.tag_steps)

    def __getitem__(self, rows: slice) -> Parsed:
        return Parsed(
            {name: cells[rows] for name, cells in self.numbers.items()},
            {name: Repeated(values, places[rows]) for name, (values, places) in self.others.items()},
            self.tag_steps[rows],
        )

    def is_same(self, other: Parsed) -> bool:
        """Whether these are the very rows of the other, to the last bit."""
        return (
            self.tag_steps.tobytes() == other.tag_steps.tobytes()
            and self.numbers.keys() == other.numbers.keys()
            and self.others.keys() == other.others.keys()
            and all(cells.tobytes() == other.numbers[name].tobytes() for name, cells in self.numbers.items())
            and all(
                column.places.tobytes() == other.others[name].places.tobytes() for name, column in self.others.items()
            )
            # As text, because True equals 1.
            and all(repr(column.values) == repr(other.others[name].values) for name, column in self.others.items())
        )

    def values(self) -> list[list[Any]]:
        """Those of each row in the order of :data:`.schema.COLUMNS`, as :func:`.encoding.decode_all` gives them."""
        cells = []
        for column in TABLE:
            if column.storage == "tags":
                tags, places = self.others[column.name]
                steps = zip(places.tolist(), self.tag_steps.tolist(), strict=True)
                cells.append([tags[at] if step == NO_INTEGER else {**tags[at], "step": step} for at, step in steps])
            elif column.name in self.others:
                values, places = self.others[column.name]
                cells.append([values[at] for at in places.tolist()])
            else:
                numbers = self.numbers[column.name]
                is_null = numbers == NO_INTEGER if column.storage == "integer" else numbers.view(np.int64) == _NULL_BITS
                found = numbers.tolist()
                for at in np.flatnonzero(is_null).tolist():
                    found[at] = None
                cells.append(found)
        return list(map(list, zip(*cells, strict=True)))


Rows = Parsed | list[list[Any]]
"""By column, or the values of each row, as :func:`.encoding.decode_all` gives them."""


_ARRAYS = ("kinds", "numbers", "integers", "places", "spans", "distinct", "steps", "slots")


class _Lines(ctypes.Structure):
    """As in lines.c."""

    _fields_ = (
        ("text", ctypes.c_char_p),
        *((name, ctypes.c_int64) for name in ("length", "rows", "columns")),
        *((name, ctypes.c_void_p) for name in _ARRAYS),
        ("slot_count", ctypes.c_int64),
        ("powers", ctypes.c_void_p),
        ("spaced", ctypes.c_int64),
    )


def parse(lines: bytes, length: int | None = None) -> Parsed | None:
    """Whole lines, each a row with the values of :data:`.schema.COLUMNS`; None where `decode_all` has to read them.

    ``length``: only so many of these bytes, which end with a line.
    """
    library = kernel.load()
    length = len(lines) if length is None else length
    if library is None or not lines.startswith((b"[", b" [")) or length > _LONGEST:
        return None
    rows = int(np.count_nonzero(np.frombuffer(lines, np.uint8, length) == _NEWLINE))
    slot_count = 1 << (2 * rows).bit_length()
    numbers = np.empty((len(_NUMBERS), rows), np.float64)
    integers = np.empty((len(_INTEGERS), rows), np.int64)
    places = np.empty((len(_TEXTS), rows), np.int32)
    spans = np.empty((len(_TEXTS), rows, 4), np.int32)
    distinct = np.zeros(len(_TEXTS), np.int64)
    steps = np.empty(rows, np.int64)
    slots = np.zeros((len(_TEXTS), slot_count), np.int32)
    arrays = (_KINDS, numbers, integers, places, spans, distinct, steps, slots)
    addresses = [array.ctypes.data for array in arrays]
    asked = _Lines(lines, length, rows, len(TABLE), *addresses, slot_count, _powers_of_five().ctypes.data, 0)
    if library.read_lines(ctypes.addressof(asked)):
        return None
    others = {}
    for at, column in enumerate(_TEXTS):
        where = spans[at, : distinct[at]].tolist()
        if column.storage == "tags":
            found = [lines[a:b] + b"null" + lines[c:d] if c > b else lines[a:d] for a, d, b, c in where]
        else:
            found = [lines[begin:end] for begin, end, _, _ in where]
        values = _values(found, is_json=bool(asked.spaced))
        if values is None or not kinds_of(column).issuperset(map(type, values)):
            return None
        others[column.name] = Repeated(values, places[at])
    return Parsed(dict(zip([*_NUMBERS, *_INTEGERS], [*numbers, *integers], strict=True)), others, steps)


def rows_of(lines: bytes, length: int | None = None) -> Rows:
    """What :func:`parse` makes of these lines, or where it does not take them `decode_all`, which raises ValueError."""
    return parse(lines, length) or decode_all(lines[:length])[0]


def rows_of_pieces(pieces: Iterable[tuple[bytes, int]]) -> Iterator[tuple[Rows, int]]:
    """The rows of each of these pieces, and its length, in their order; of many pieces several are read at a time.

    Each is lines, and how many of their bytes count. Raises ValueError for what is damaged.
    """
    threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
    waiting: deque[tuple[Future[Rows], int]] = deque()
    with ThreadPoolExecutor(threads, "graftlab-parse") as pool:
        for lines, length in pieces:
            waiting.append((_begun(pool, lines, length), length))
            # One is always there for the one that puts them together.
            if len(waiting) > threads:
                rows, read = waiting.popleft()
                yield rows.result(), read
        for rows, read in waiting:
            yield rows.result(), read


def _begun(pool: ThreadPoolExecutor, lines: bytes, length: int) -> Future[Rows]:
    try:
        return pool.submit(rows_of, lines, length)
    except RuntimeError:
        # The interpreter is about to end, and begins nothing any more.
        made: Future[Rows] = Future()
        try:
            made.set_result(rows_of(lines, length))
        except ValueError as error:
            made.set_exception(error)
        return made


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
