"""Rows as pandas: the store they stream into, the files that it keeps them in, and the frame they become."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from graftlab.errors import SessionError
from graftlab.rows import ahead, compacting
from graftlab.rows.ahead import ReadAhead
from graftlab.rows.archive import Archive
from graftlab.rows.checksums import Sums, SumsWriter
from graftlab.rows.columns import Block, Columns
from graftlab.rows.compacting import Compactor
from graftlab.rows.encoding import decode_all, record
from graftlab.rows.growing import GrowingFrame
from graftlab.rows.loading import ROWS_FILE, header, load_run, pieces, read_lines, refuse_changed
from graftlab.rows.parsing import Parsed, rows_of, rows_of_pieces
from graftlab.rows.schema import Row

logger = logging.getLogger(__name__)

# Bytes of lines in a block, and so few that those who write rows can wait until they are in one.
_BLOCK = 4 << 20
_LAST_LINES = 128 << 10
# Seconds for which a block waits for rows that are being read ahead.
_PATIENCE = 1.0
# Rows that several threads are worth.
_MANY = 20_000
# The place of every so many rows in the file is remembered.
_STRIDE = 256


def to_frame(rows: Iterable[Row]) -> pd.DataFrame:
    """Rows as a frame: the columns of :data:`graftlab.rows.schema.COLUMNS`, then one for each tag that callers used.

    A tag that is called like a column is found under ``tag_<name>``. ``max_abs_index`` holds tuples, which index a
    tensor as they are. Sorted by step and execution order.
    """
    columns = Columns()
    block = columns.block(list(rows))
    return columns.frame(columns.merge(columns.block([]), [block]))


class _Lines(NamedTuple):
    """What the file of lines has. Places in it count on where it begins anew, which is at ``shift``."""

    shift: int
    first: int
    """The number of its first row; those before it are in blocks."""
    rows: list[int]
    places: list[int]
    """Where the row of that number in ``rows`` begins, for some rows in ascending order."""


class _Compacted(NamedTuple):
    """How far lines are in blocks: up to a place, before which there are so many lines."""

    known: _Lines
    place: int
    number: int


class _Read(NamedTuple):
    """Rows that were read, up to that number, and where the next one is in the file of lines, if it is there."""

    block: Block
    upto: int
    known: _Lines
    place: int


class RowStore:
    """All rows of a session: on disk before anybody looks at them, and in columns as far as frames needed them so far.

    Where many rows come, a thread reads them into columns meanwhile, up to :data:`.ahead.MOST` that no frame has shown.

    Thread-safe. Rows that come in wait for no reader: what readers share with them is how far the file is written. What
    the disk does not take stays in memory, where readers find it as if it lay at the file's end, and is written as soon
    as there is room.

    Rows are appended as lines. From time to time lines become compressed blocks in another file (:mod:`.compacting`),
    and the file of lines begins anew. Rows are numbered from 0 on in their session.
    """

    def __init__(self, folder: Path, *, append: bool = False) -> None:
        """Raises :class:`SessionError` for a folder that an open session uses; without ``append`` for one with rows."""
        self._path = folder / ROWS_FILE
        # Unbuffered: what was appended is on its way to the disk even if this process is killed the next moment.
        self._file = open(self._path, "ab", buffering=0, opener=_open_for_the_user_alone)  # noqa: SIM115
        try:
            self._archive = Archive(folder)
            self.first_run, self.first_step = self._claim(append)
            self._sums = SumsWriter(folder)
        except BaseException:
            self._file.close()
            raise
        # Rows of earlier sessions in this folder.
        self._earlier = self._archive.row_count
        self._writing = threading.Lock()
        self._end = self._written = 0
        # What the disk does not take, and why: what lies in this "file" between ``_written`` and ``_end``.
        self._unwritten = bytearray()
        self._problem: OSError | None = None
        self._first_unwritten = 0
        self._count = 0
        self._begin_lines()
        self._compactor = Compactor(self._compact, lambda: self._written - self._lines.shift)
        # Held while somebody waits for a frame, and while rows are read, for that or ahead of it.
        self._framing, self._reading = threading.Lock(), threading.Lock()
        self._shown = 0
        self._ahead = ReadAhead(self._read_ahead)
        self._columns = Columns(grows=True)
        self._frame = GrowingFrame(self._columns)
        # What was read: the first block is in order, the others are as they came. A list that only grows by whole
        # items or is replaced, because the stop button may interrupt a reader anywhere.
        self._read = [_Read(self._columns.block([]), 0, self._lines, self._lines.places[0])]

    def _claim(self, append: bool) -> tuple[int, int]:
        """Make the files this session's own; returns the numbers of the first run and step that they do not have."""
        folder = self._path.parent
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SessionError(
                f"the run folder {folder} is in use by an open session, of this notebook or of another; close that "
                f"one, or pass another folder="
            ) from None
        # A launch that failed leaves no more than the first line.
        if not self._archive.row_count and self._file.seek(0, os.SEEK_END) <= len(header()) + 1:
            return 0, 0
        if not append:
            raise SessionError(
                f"the run folder {folder} has the rows of an earlier session; pass append=True to go on after them, or "
                f"another folder="
            )
        frame = load_run(folder)
        for first, rows in read_lines(self._path):
            fresh = first + len(rows) - self._archive.row_count
            if fresh > 0:
                self._archive.add(rows[-fresh:])
        return (int(frame["run"].max()) + 1, int(frame["step"].max()) + 1) if len(frame) else (0, 0)

    def append(self, lines: Sequence[bytes]) -> None:
        """Rows as :func:`graftlab.rows.encoding.encode` makes them. Those that cannot be written stay in memory."""
        with self._writing:
            known = self._lines
            if self._count - known.rows[-1] >= _STRIDE:
                known.rows.append(self._count)
                known.places.append(self._end)
            if self._file.closed:
                # What was still on its way when the session ended.
                with open(self._path, "ab", buffering=0) as self._file:
                    self._write(lines)
            else:
                self._write(lines)
            self._count += len(lines)
            if self._written - known.shift >= compacting.SOME:
                self._compactor.look()
            if self._is_worth_reading():
                self._ahead.look()

    def __len__(self) -> int:
        return self._count

    def rows(self, start: int = 0, stop: int | None = None) -> list[Row]:
        """The rows from index ``start`` up to ``stop`` in the order in which they came, without parsing many others."""
        while True:
            with self._writing:
                known = self._lines
                stop = self._count if stop is None else min(stop, self._count)
                from_line = max(start, known.first)
                first = bisect_right(known.rows, from_line) - 1
                last = bisect_left(known.rows, stop)
                begin, skipped = known.places[first], from_line - known.rows[first]
                end = known.places[last] if last < len(known.places) else self._end
            values = self._in_blocks(start, min(stop, known.first))
            lines = b"".join(data[:length] for data, length in self._pieces(known, begin, end)).split(b"\n")
            if self._lines is known:
                break
        lines = lines[skipped : skipped + max(0, stop - from_line)]
        for at in range(0, len(lines), _STRIDE):
            values += decode_all(b"\n".join(lines[at : at + _STRIDE]) + b"\n")[0]
        return [record(each) for each in values]

    def frame(self, run: int | None = None) -> pd.DataFrame:
        """All rows, or those of one run, as :func:`to_frame` makes it of them. Only what is new is parsed.

        The frame is the caller's, but the lists and dicts in its cells belong to every frame, and to all rows that have
        the same: replace them, rather than change them. Raises :class:`SessionError` when the file is gone.
        """
        with self._framing, self._reading:
            self._read_on(self._count)
            self._put_together()
            block = self._read[0].block
            self._shown = len(block["step"])
            if run is not None:
                chosen: Any = np.flatnonzero(block["run"] == run)
                if len(chosen) and chosen[-1] - chosen[0] == len(chosen) - 1:
                    # Usually, because steps count on over runs.
                    chosen = slice(chosen[0], chosen[-1] + 1)
                    return self._columns.frame({name: column[chosen].copy() for name, column in block.items()})
                return self._columns.frame({name: column[chosen] for name, column in block.items()})
            return self._frame.of(block)

    def let_readers_go_first(self) -> None:
        """Return when no frame is being made: for threads whose work is less urgent than what somebody waits for."""
        with self._framing:
            pass

    def unwritten(self, since: int = 0) -> str | None:
        """In words, which rows from index ``since`` on are not on disk and why, after another try; None if all are."""
        with self._writing:
            if self._unwritten and not self._file.closed:
                self._write(())
            first = max(since, self._first_unwritten)
            if self._problem is None or first >= self._count:
                return None
            return (
                f"rows {first} to {self._count - 1} are not on disk, because {self._path} cannot be written: "
                f"{self._problem.strerror}. They are in memory and in session.frame until the session ends; make room, "
                f"and the next row, run or close() writes them"
            )

    def close(self) -> None:
        """Raises :class:`SessionError` when rows are lost with this process, because the disk does not take them."""
        self._ahead.finish()
        self._compactor.finish()
        lost = self.unwritten()
        with self._writing:
            self._file.close()
            self._sums.close()
        if lost:
            raise SessionError(lost)

    # ---- lines ------------------------------------------------------------------------------------------------------

    def _begin_lines(self) -> None:
        """Begin the file of lines anew, with no row in it."""
        self._sums.restart()
        # In this order readers notice.
        self._lines = _Lines(self._end, self._count, [self._count], [self._end])
        self._file.truncate(0)
        self._write([header(self._earlier + self._count)])
        self._lines.places[0] = self._end
        self._compacted = _Compacted(self._lines, self._end, 1)

    def _write(self, lines: Sequence[bytes]) -> None:
        data = b"\n".join(lines) + b"\n" if lines else b""
        self._put(data)
        # Afterwards: a checksum without its row is one for another row that comes there.
        self._sums.write(lines)

    def _put(self, data: bytes) -> None:
        self._end += len(data)
        if self._unwritten:
            self._unwritten += data
            data = bytes(self._unwritten)
        written = 0
        try:
            while written < len(data):
                written += self._file.write(data[written:])
        except OSError as problem:
            if not self._unwritten:
                self._unwritten += data
                self._first_unwritten = self._count
            if self._problem is None:
                logger.error("%s cannot be written (%s); its rows stay in memory", self._path, problem.strerror)
            self._problem = problem
            # Half a line in the middle would make everything after it unreadable.
            with contextlib.suppress(OSError):
                os.truncate(self._path, self._written - self._lines.shift)
            return
        self._written += len(data)
        self._unwritten.clear()
        self._problem = None

    def _pieces(self, known: _Lines, start: int, stop: int) -> Iterator[tuple[bytes, int]]:
        """As the function of that name, with what is not on disk yet. They are not these lines unless ``known`` is
        what ``_lines`` is afterwards, as it is replaced before the file begins anew."""
        with self._writing:
            written = self._written
            rest = bytes(self._unwritten[max(0, start - written) : max(0, stop - written)])
        if start < min(stop, written):
            yield from pieces(self._path, start - known.shift, min(stop, written) - known.shift)
        if rest:
            yield rest, len(rest)

    # ---- blocks -----------------------------------------------------------------------------------------------------

    def _compact(self) -> bool:
        """Put the next lines into a block, or, if they are few, the last ones, and begin the file of lines anew.

        On the compactor's thread alone. Returns whether there is more to do. Raises OSError when the disk does not take
        it, and :class:`SessionError` when lines are not what was written.
        """
        self.let_readers_go_first()
        self._ahead.idle.wait(_PATIENCE)
        known, place, number = self._compacted
        lines = self._next_lines(place, _BLOCK)
        if len(lines) > _LAST_LINES:
            self._add_block(lines, number)
            self._compacted = _Compacted(known, place + len(lines), number + lines.count(b"\n"))
            return True
        with self._writing:
            if self._unwritten or self._file.closed or self._written - place > 2 * _LAST_LINES:
                return not self._unwritten and not self._file.closed
            if lines := self._next_lines(place, 2 * _LAST_LINES):
                self._add_block(lines, number)
            self._begin_lines()
        return False

    def _next_lines(self, place: int, size: int) -> bytes:
        with open(self._path, "rb", buffering=0) as file:
            lines = os.pread(file.fileno(), size, place - self._lines.shift)
        return lines[: lines.rfind(b"\n") + 1]

    def _add_block(self, lines: bytes, number: int) -> None:
        """``number`` of lines come before these in their file."""
        refuse_changed(self._path, Sums(self._path.parent), number, lines, len(lines))
        self._archive.add(rows_of(lines))

    def _in_blocks(self, start: int, stop: int) -> list[list[Any]]:
        """The values of these rows, which are not in lines any more."""
        values: list[list[Any]] = []
        first = -self._earlier
        for place in self._archive.places if start < stop else ():
            begin, end = max(start - first, 0), min(stop - first, place.row_count)
            if begin < end:
                rows = self._archive.read(place, first + self._earlier)[begin:end]
                values += rows.values() if isinstance(rows, Parsed) else rows
            first += place.row_count
        return values

    # ---- the frame --------------------------------------------------------------------------------------------------

    def _is_worth_reading(self) -> bool:
        upto = self._read[-1].upto
        return self._count - upto >= ahead.SOME and upto - self._shown < ahead.MOST

    def _read_ahead(self) -> bool:
        """Read some rows that nobody has asked for yet; returns whether there are more. On that thread alone."""
        self.let_readers_go_first()
        with self._reading:
            if self._is_worth_reading():
                self._read_on(self._read[-1].upto + 1)
                # The stop button interrupts the notebook's thread, and not this one.
                self._put_together(self._shown)
        return self._is_worth_reading()

    def _read_on(self, wanted: int) -> None:
        """Read on until so many rows are read, and what was read with them."""
        while self._read[-1].upto < wanted:
            with self._writing:
                known, end = self._lines, self._end
            last = self._read[-1]
            if last.upto < known.first:
                self._read_block(last.upto)
                continue
            place = last.place if last.known is known else known.places[0]
            found = self._pieces(known, place, end)
            # To begin threads for what is read at once would take longer.
            many = wanted - last.upto > _MANY
            for rows, length in rows_of_pieces(found) if many else ((rows_of(*piece), piece[1]) for piece in found):
                if self._lines is not known:
                    break
                place += length
                block = self._columns.block(rows)
                self._read.append(_Read(block, self._read[-1].upto + len(block["step"]), known, place))
                if self._read[-1].upto >= wanted:
                    break
            if self._read[-1] is last and self._lines is known:
                raise SessionError(f"{self._path} was cut off by somebody else after row {last.upto - 1}")

    def _put_together(self, shown: int | None = None) -> None:
        """Bring all rows that were read into the first block. ``shown``: see :meth:`Columns.merge`."""
        if len(self._read) > 1:
            ordered, *more = (read.block for read in self._read)
            self._read = [self._read[-1]._replace(block=self._columns.merge(ordered, more, shown))]

    def _read_block(self, row: int) -> None:
        """Read on from this row, which is not in lines any more, to the end of its block."""
        first = -self._earlier
        for place in self._archive.places:
            if first <= row < first + place.row_count:
                block = self._columns.block(self._archive.read(place, first + self._earlier))
                rest = {name: column[row - first :] for name, column in block.items()}
                self._read.append(self._read[-1]._replace(block=rest, upto=first + place.row_count))
                return
            first += place.row_count


def _open_for_the_user_alone(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
