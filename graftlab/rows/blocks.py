"""Some thousand rows as one compressed block, a tenth of their lines: column by column, and without loss.

What repeats is there once. Of numbers, the bytes of one significance lie next to each other, because the first ones
hardly differ from row to row; the last ones, which are noise, are left as they are.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from graftlab.rows.encoding import kinds_of
from graftlab.rows.parsing import NO_INTEGER, NULL, Array, Parsed, Repeated
from graftlab.rows.schema import TABLE

_TAG_STEPS = ".step"
_FLOAT, _INTEGER, _PLACE = np.dtype("<f8"), np.dtype("<i8"), np.dtype("<i4")
_ONE = int(np.array(1.0).view(np.int64))
_SMALLEST = float(np.finfo(np.float64).tiny)
# Many times what a block has, and so little that a file of somebody else fills no memory.
_MOST_ROWS, MOST_TEXT = 1 << 20, 1 << 28
_SAMPLE = 1024
# What a sample must save for the whole to be deflated.
_WORTHWHILE = 0.97


class _Block(msgspec.Struct, array_like=True):
    """A block as msgpack. A column of numbers is one of :data:`Numbers`."""

    row_count: int
    floats: dict[str, Any]
    integers: dict[str, Any]
    places: dict[str, Any]
    values: bytes
    """The distinct values of each column of ``places``, as deflated JSON."""


def pack(rows: Parsed) -> bytes:
    """The block of these rows."""
    floats = {name: cells for name, cells in rows.numbers.items() if cells.dtype.kind == "f"}
    integers = {name: cells for name, cells in rows.numbers.items() if cells.dtype.kind == "i"}
    integers[_TAG_STEPS] = rows.tag_steps
    values = json.dumps({name: column.values for name, column in rows.others.items()}, separators=(",", ":"))
    block = _Block(
        len(rows),
        {name: _packed(_bits(cells) - _expected(name, floats), zlib.Z_HUFFMAN_ONLY) for name, cells in floats.items()},
        {name: _packed_integers(cells.astype(_INTEGER, copy=False)) for name, cells in integers.items()},
        {name: _packed_integers(column.places.astype(_PLACE, copy=False)) for name, column in rows.others.items()},
        zlib.compress(values.encode("ascii"), 1),
    )
    return msgspec.msgpack.encode(block)


def unpack(data: bytes) -> Parsed:
    """The inverse of :func:`pack`. Columns of other versions are left out, and those that they lack are null.

    Raises ValueError, TypeError, LookupError, OverflowError or zlib.error for what no version packs, and takes no
    memory for it.
    """
    block = msgspec.msgpack.decode(data, type=_Block)
    count = block.row_count
    if not 0 < count <= _MOST_ROWS:
        raise ValueError(f"{count} rows")
    numbers: dict[str, Array] = {}
    # In the order in which they were packed, so that what is expected of a column is there before it.
    for name, packed in block.floats.items():
        numbers[name] = (_unpacked(packed, _INTEGER, count) + _expected(name, numbers)).view(np.float64)
    for name, packed in block.integers.items():
        numbers[name] = _unpacked_integers(packed, _INTEGER, count)
    values = json.loads(inflated(block.values, MOST_TEXT, zlib.MAX_WBITS))
    others = {
        name: Repeated(values[name], _unpacked_integers(packed, _PLACE, count)) for name, packed in block.places.items()
    }
    steps = numbers.pop(_TAG_STEPS)
    for column in TABLE:
        if (repeated := others.get(column.name)) is not None:
            kinds = set(map(type, repeated.values))
            if not kinds <= kinds_of(column) or not 0 <= repeated.places.min() <= repeated.places.max() < len(
                repeated.values
            ):
                raise ValueError(f"{column.name} has values of {kinds}, or too few")
        if column.storage not in ("integer", "float"):
            others.setdefault(column.name, Repeated([None], np.zeros(count, _PLACE)))
        elif column.name not in numbers:
            numbers[column.name] = np.full(count, NULL if column.storage == "float" else NO_INTEGER)
    return Parsed(
        {column.name: numbers[column.name] for column in TABLE if column.name in numbers},
        {column.name: others[column.name] for column in TABLE if column.name in others},
        steps,
    )


def _expected(name: str, floats: Mapping[str, Array]) -> Any:
    """About the bits of a column, from columns before it: what differs from it is mostly small."""
    if name == "cosine":
        return _ONE
    if name == "rel_diff":
        with np.errstate(all="ignore"):
            about = floats["rel_l2"] * floats["rel_l2"] * 0.5
        # Processes may be told to have zeros for the smallest numbers.
        return _bits(np.where(about < _SMALLEST, 0.0, about))
    if name.endswith("_target"):
        return _bits(floats[name.replace("_target", "_baseline")])
    return 0


def _bits(cells: Array) -> Array:
    return np.ascontiguousarray(cells, _FLOAT).view(_INTEGER)


# A column of numbers in a block: a number that all rows have, or the bytes of each significance, the least first. Of
# these again a byte that all have, or bytes as they are (True), or deflated (False).
def _packed(cells: Array, strategy: int) -> Any:
    if (cells[1:] == cells[0]).all():
        return int(cells[0])
    return _planes(cells, strategy)


def _planes(cells: Array, strategy: int = zlib.Z_DEFAULT_STRATEGY) -> list[Any]:
    planes = np.ascontiguousarray(cells.view(np.uint8).reshape(len(cells), -1).T)
    return [_packed_plane(plane, strategy) for plane in planes]


def _packed_integers(cells: Array) -> Any:
    """As differences, each to the one before; the first is the number itself."""
    if (cells[1:] == cells[0]).all():
        return int(cells[0])
    # Differences that are all the same stand for 1, 2, 3 and so on: not for one number.
    return _planes(np.diff(cells, prepend=cells.dtype.type(0)))


def _unpacked_integers(packed: Any, kind: np.dtype[Any], count: int) -> Array:
    cells = _unpacked(packed, kind, count)
    return cells if isinstance(packed, int) else np.cumsum(cells, dtype=kind)


def _packed_plane(plane: Array, strategy: int) -> Any:
    if (plane[1:] == plane[0]).all():
        return int(plane[0])
    data = plane.tobytes()
    if len(_deflated(data[:_SAMPLE], strategy)) < _WORTHWHILE * min(len(data), _SAMPLE):
        deflated = _deflated(data, strategy)
        if len(deflated) < len(data):
            return False, deflated
    return True, data


def _deflated(data: bytes, strategy: int) -> bytes:
    deflate = zlib.compressobj(1, wbits=-zlib.MAX_WBITS, strategy=strategy)
    return deflate.compress(data) + deflate.flush()


def inflated(data: bytes, most: int, window: int) -> bytes:
    inflate = zlib.decompressobj(window)
    made = inflate.decompress(data, most)
    if not inflate.eof:
        raise ValueError(f"more than {most} bytes")
    return made


def _unpacked(packed: Any, kind: np.dtype[Any], count: int) -> Array:
    if isinstance(packed, int):
        return np.full(count, packed, kind)
    planes = np.empty((count, kind.itemsize), np.uint8)
    for at, plane in enumerate(packed):
        if isinstance(plane, int):
            planes[:, at] = plane
        else:
            is_plain, data = plane
            planes[:, at] = np.frombuffer(data if is_plain else inflated(data, count, -zlib.MAX_WBITS), np.uint8)
    return planes.view(kind)[:, 0]
