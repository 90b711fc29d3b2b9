"""A run folder read back into a frame: its compressed blocks, then the lines that are not in one yet."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd

from graftlab.errors import SessionError
from graftlab.rows import archive
from graftlab.rows.archive import BLOCKS_FILE
from graftlab.rows.checksums import Sums
from graftlab.rows.columns import Block, Columns
from graftlab.rows.encoding import decode_all, wrong_value
from graftlab.rows.parsing import Rows, parse
from graftlab.rows.schema import COLUMNS

ROWS_FILE = "rows.jsonl"

# Bytes that are parsed at a time: so many that what a piece costs beside its rows does not count, and so few that no other
# thread of the kernel waits long for its turn.
_PIECE = 4 << 20
# How often a folder is read again because its session put lines into blocks meanwhile.
_TRIES = 100


def header(first: int = 0) -> bytes:
    """The first line of a file of rows, for people and for later versions. ``first``: so many rows are in blocks."""
    return json.dumps({"columns": COLUMNS, **({"first": first} if first else {})}).encode()


def read_header(line: bytes) -> tuple[Sequence[str], int] | None:
    """The columns, and how many rows are in blocks; None for what is no first line, as in files of earlier versions."""
    if not line.startswith(b'{"columns"'):
        return None
    try:
        values = json.loads(line)
        return tuple(map(str, values["columns"])), int(values.get("first", 0))
    except (ValueError, KeyError, TypeError):
        return None


def load_run(folder: str | Path) -> pd.DataFrame:
    """The frame of a run folder, also of one that was killed: a last line that is cut short is left out.

    Raises :class:`SessionError` when there are no rows to read, a line in the middle is damaged, or a line or a block
    is not the one that was written, by its checksum.
    """
    path = Path(folder).expanduser()
    for _ in range(_TRIES):
        # When the file of lines begins anew, its first line is another one.
        before = _first_line(path / ROWS_FILE)
        try:
            columns, loaded = _load(path)
        except SessionError:
            if _first_line(path / ROWS_FILE) == before:
                raise
            continue
        if _first_line(path / ROWS_FILE) == before:
            return columns.frame(columns.merge(columns.block([]), loaded))
    raise SessionError(f"the rows in {path} change faster than they can be read; try again, or use session.frame")


def _first_line(path: Path) -> bytes:
    for lines, _ in pieces(path, 0):
        return lines[: lines.index(b"\n")]
    return b""


def _load(folder: Path) -> tuple[Columns, list[Block]]:
    columns = Columns()
    return columns, [columns.block(rows) for rows in batches(folder)]


def batches(folder: Path) -> Iterator[Rows]:
    """All rows of a run folder that no session writes to, many at a time, in the order in which they came.

    Raises as :func:`load_run`.
    """
    path, count = folder / ROWS_FILE, 0
    for place in archive.places(folder / BLOCKS_FILE):
        yield archive.read(folder / BLOCKS_FILE, place, count)
        count += place.row_count
    for row, rows in read_lines(path):
        if row > count:
            raise SessionError(
                f"{folder / BLOCKS_FILE}: rows {count} to {row - 1} are missing; the file was cut off or damaged"
            )
        fresh = row + len(rows) - count
        if fresh > 0:
            # The others are in a block already: their session ended before it could take them away here.
            yield rows[-fresh:]
            count += fresh


def read_lines(path: Path) -> Iterator[tuple[int, Rows]]:
    """The rows in a file of lines, many at a time, each with the number in the folder that the first of them has.

    Raises :class:`SessionError` for what is damaged, by its line.
    """
    names: Sequence[str] = COLUMNS
    sums, number, row = Sums(path.parent), 0, 0
    for lines, length in pieces(path, 0):
        refuse_changed(path, sums, number, lines, length)
        begin = 0
        if not number:
            begin = lines.index(b"\n") + 1
            known = read_header(lines[:begin])
            if known is None:
                begin = 0
            else:
                names, row = known
                yield row, []
        rows: Rows | None = None
        if names == COLUMNS and begin < length:
            rows = parse(lines[begin:length] if begin else lines, length - begin)
        if rows is None:
            try:
                rows, names = decode_all(lines[:length], names)
            except ValueError:
                raise _damage(path, lines[:length], names, number) from None
            if (fault := wrong_value(rows)) is not None:
                index, column, value = fault
                raise SessionError(f"{path}: row {index + row} has {value!r:.80} as its {column}, which no row has")
        yield row, rows
        row += len(rows)
        number += lines.count(b"\n", 0, length)


def refuse_changed(path: Path, sums: Sums, number: int, lines: bytes, length: int) -> None:
    """Raises :class:`SessionError` if one of these lines is not the one that was written; ``number`` come before."""
    if (wrong := sums.wrong(number, lines, length)) is not None:
        raise SessionError(
            f"{path}, line {wrong}: this is not what was written, by its checksum in {sums.path.name}; the file "
            f"was changed or damaged since. Without {sums.path.name} it is read as it is"
        )


def _damage(path: Path, lines: bytes, names: Sequence[str], number: int) -> SessionError:
    """What is wrong with which of these lines, of which the first comes after so many others."""
    for line in lines[:-1].split(b"\n"):
        number += 1
        try:
            _, names = decode_all(line + b"\n", names)
        except ValueError as error:
            return SessionError(f"{path}, line {number}: this is not a row of graftlab ({error})")
    raise AssertionError("lines that can be decoded one by one can be decoded at once")


def pieces(path: Path, start: int, stop: float = math.inf) -> Iterator[tuple[bytes, int]]:
    """The whole lines between two places in a file, many at a time: the first so many of these bytes."""
    try:
        with open(path, "rb", buffering=0) as file:
            size = _PIECE
            while start < stop and (data := os.pread(file.fileno(), int(min(size, stop - start)), start)):
                length = data.rfind(b"\n") + 1
                if length:
                    yield data, length
                    start += length
                    size = _PIECE
                elif len(data) < size:
                    return  # half a line
                else:
                    size *= 2
    except OSError as error:
        raise SessionError(
            f"no rows can be read from {path}: {error.strerror}; it must lie in the run folder of a session "
            f"(session.folder)"
        ) from error
