"""The file of compressed blocks in a run folder: the older rows, of which ``rows.jsonl`` has the newest.

A block is written whole before its lines go from ``rows.jsonl``. So a process may be killed at any moment: a block that
is cut short has its lines there still, and lines that are in a block and there too are told by their numbers.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from graftlab.errors import SessionError
from graftlab.rows.blocks import MOST_TEXT, inflated, pack, unpack
from graftlab.rows.encoding import decode_all, wrong_value
from graftlab.rows.parsing import Parsed, Rows
from graftlab.rows.schema import COLUMNS

BLOCKS_FILE = "rows.blocks"

_MAGIC = b"rows"
# The checksum of all that follows; the kind of block; how many rows and bytes it has.
_SUM = struct.Struct("<4sI")
_HEAD = struct.Struct("<BIQ")
_COLUMNS, _LINES = 1, 2


class Place(NamedTuple):
    """Where the file has a block, its head included, and how many rows are in it."""

    offset: int
    length: int
    row_count: int


class Archive:
    """The file, while a session adds to it. One thread adds; any may read."""

    def __init__(self, folder: Path) -> None:
        """What is there stays, except for a block that is cut short."""
        self.path = folder / BLOCKS_FILE
        self.places = tuple(places(self.path))
        self._size = sum(place.length for place in self.places)

    @property
    def row_count(self) -> int:
        return sum(place.row_count for place in self.places)

    def add(self, rows: Rows) -> None:
        """Write a block of these rows. Raises OSError."""
        data = pack(rows) if isinstance(rows, Parsed) else b""
        kind = _COLUMNS
        # Their lines go when they are here, so what is here is read before.
        if not (isinstance(rows, Parsed) and unpack(data).is_same(rows)):
            # The space says that `json` must read them.
            values = rows.values() if isinstance(rows, Parsed) else rows
            text = "".join(f" {json.dumps(each)}\n" for each in values)
            kind, data = _LINES, zlib.compress(text.encode("ascii"), 1)
        row_count = len(rows)
        rest = _HEAD.pack(kind, row_count, len(data)) + data
        block = memoryview(_SUM.pack(_MAGIC, zlib.crc32(rest)) + rest)
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # Half a block, of a disk that was full, is written over.
            os.ftruncate(file, self._size)
            written = 0
            while written < len(block):
                written += os.pwrite(file, block[written:], self._size + written)
        finally:
            os.close(file)
        self.places = (*self.places, Place(self._size, len(block), row_count))
        self._size += len(block)

    def read(self, place: Place, first: int) -> Rows:
        return read(self.path, place, first)


def places(path: Path) -> Iterator[Place]:
    """The whole blocks of a file; none if there is no file. What is cut short at its end is left out."""
    try:
        file = open(path, "rb", buffering=0)  # noqa: SIM115
    except FileNotFoundError:
        return
    with file:
        size, offset = os.fstat(file.fileno()).st_size, 0
        start = _SUM.size + _HEAD.size
        while offset + start <= size:
            head = os.pread(file.fileno(), start, offset)
            _, row_count, length = _HEAD.unpack_from(head, _SUM.size)
            if not head.startswith(_MAGIC) or offset + start + length > size:
                return
            yield Place(offset, start + length, row_count)
            offset += start + length


def read(path: Path, place: Place, first: int) -> Rows:
    """The rows of a block, of which the first is the folder's of that number.

    Raises :class:`SessionError` for a block that is not what was written.
    """
    with open(path, "rb", buffering=0) as file:
        block = os.pread(file.fileno(), place.length, place.offset)
    where = f"{path}: the block of rows {first} to {first + place.row_count - 1}"
    magic, total = _SUM.unpack_from(block) if len(block) == place.length else (b"", 0)
    if magic != _MAGIC or zlib.crc32(memoryview(block)[_SUM.size :]) != total:
        raise SessionError(f"{where} is not what was written, by its checksum; the file was changed or damaged since")
    kind, _, _ = _HEAD.unpack_from(block, _SUM.size)
    data = block[_SUM.size + _HEAD.size :]
    try:
        if kind == _COLUMNS:
            return unpack(data)
        if kind == _LINES:
            rows, _ = decode_all(inflated(data, MOST_TEXT, zlib.MAX_WBITS), COLUMNS)
            if (fault := wrong_value(rows)) is None:
                return rows
            raise ValueError(f"{fault[1]} is {fault[2]!r:.80}")
    except (ValueError, TypeError, LookupError, OverflowError, zlib.error) as error:
        raise SessionError(f"{where} is not one of graftlab's ({error})") from error
    raise SessionError(f"{where} is of a kind {kind} that this version does not know")
