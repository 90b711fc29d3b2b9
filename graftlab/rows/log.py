"""The log: the file of lines that rows are appended to as they arrive, until they move into Parquet files.

Its first line has the columns and the number of the first row, so that a reader knows which rows of the log are in
Parquet files too. The log is only ever appended to, or replaced as a whole by one that begins with a later row.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import logging
import os
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import pyarrow as pa

from graftlab.base.files import open_regular
from graftlab.errors import SessionError
from graftlab.rows.checksums import Sums, SumsWriter
from graftlab.rows.schema import COLUMNS
from graftlab.rows.tables import RowError, table_of_lines

logger = logging.getLogger(__name__)

ROWS_FILE = "rows.jsonl"
VERSION = 1
"""The version of the files of rows. One with other columns is not another version: files name their columns."""

# Bytes that are read at a time: enough that the fixed cost of a piece is small, and few enough that other threads of
# the kernel do not wait long for the interpreter.
_PIECE = 1 << 20
_LONGEST_LINE = 64 << 20
_SUM_KEY = b', "crc32": '
# The place of one row in this many is remembered.
_STRIDE = 256


class Header(NamedTuple):
    """What the first line of a log says."""

    columns: tuple[str, ...]
    first: int
    """The number of the log's first row; all rows before it are in Parquet files."""


def header_line(first: int = 0) -> bytes:
    """The first line of a log, without its newline. It ends with the checksum of what it says."""
    content = json.dumps({"columns": COLUMNS, "version": VERSION, "first": first}).encode()[:-1]
    return b"%s%s%d}" % (content, _SUM_KEY, crc32(content))


def read_header(line: bytes, path: Path) -> Header:
    """What the first line of a log says. Raises :class:`SessionError` for what is not the first line of a log."""
    try:
        values = json.loads(line)
        columns, version, first = tuple(map(str, values["columns"])), values.get("version"), values.get("first", 0)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise SessionError(f"{path}, line 1: this does not name the columns of rows; it is not a log of rows") from None
    content, key, checksum = line.rpartition(_SUM_KEY)
    # First, because a version that a flipped bit made is none.
    if (key or version == VERSION) and checksum != b"%d}" % crc32(content):
        raise SessionError(f"{path}, line 1: this does not match its checksum; the file was damaged")
    if version not in (None, VERSION):
        raise SessionError(
            f"{path} has rows in format {version!r:.20}, and this version of graftlab reads format {VERSION}; read it "
            f"with the version that wrote it, or a later one"
        )
    if type(first) is not int or first < 0:
        raise SessionError(f"{path}, line 1: {first!r:.40} is not the number of a row")
    return Header(columns, first)


def lock(path: Path, mode: str = "rb") -> Any:
    """Open the log and lock it, as the session that writes it does. Raises BlockingIOError where one has it."""
    while True:
        file: Any = open(path, mode, buffering=0, opener=open_regular)  # noqa: SIM115
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Its session may have replaced the file between the two calls.
            if _is_at(file, path):
                return file
        except BaseException:
            file.close()
            raise
        file.close()


def _is_at(file: io.FileIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


# ---- reading --------------------------------------------------------------------------------------------------------


class LogReader:
    """A log as it is at one moment, even if its session replaces it meanwhile.

    Raises :class:`SessionError` where there is none, and for what is not a log of rows.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / ROWS_FILE
        try:
            self._file = open(self.path, "rb", buffering=0, opener=open_regular)  # noqa: SIM115
        except OSError as error:
            raise not_readable(self.path, error) from error
        try:
            found = next(_pieces(self._file, self.path, 0), None)
            line = found[0][: found[0].index(b"\n")] if found else None
            # A log that is empty, or has half a line, is that of a process that was killed when it had just begun it.
            self.header = Header(COLUMNS, 0) if line is None else read_header(line, self.path)
            self._begin = 0 if line is None else len(line) + 1
            self._sums = Sums(folder, self.header.first)
            if line is not None:
                self._refuse_changed(0, [line])
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> LogReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def tables(self) -> Iterator[tuple[int, pa.Table]]:
        """Its rows, many at a time, each table with the number of its first row.

        Raises :class:`SessionError` for a line that is damaged, by its number.
        """
        row, number = self.header.first, 1
        for lines, _ in _pieces(self._file, self.path, self._begin):
            self._refuse_changed(number, lines[:-1].split(b"\n"))
            try:
                table = table_of_lines(lines, self.header.columns)
            except RowError as error:
                raise SessionError(f"{self.path}, line {number + error.index + 1}: {error}") from None
            yield row, table
            row += len(table)
            number += len(table)

    def _refuse_changed(self, number: int, lines: Sequence[bytes]) -> None:
        refuse_changed(self.path, self._sums, number, lines)


def refuse_changed(path: Path, sums: Sums, number: int, lines: Sequence[bytes]) -> None:
    """Raises :class:`SessionError` if one of these lines is not the one that was written; ``number`` come before."""
    if (wrong := sums.wrong(number, lines)) is not None:
        raise SessionError(
            f"{path}, line {wrong}: this is not what was written, by its checksum in {sums.path.name}; the file "
            f"was changed or damaged since. Without {sums.path.name} it is read as it is"
        )


def not_readable(path: Path, error: OSError) -> SessionError:
    """The error for a log that cannot be opened."""
    return SessionError(
        f"no rows can be read from {path}: {error.strerror}; it must be in the run folder of a session (session.folder)"
    )


def _pieces(file: io.FileIO, path: Path, start: int) -> Iterator[tuple[bytes, int]]:
    """The whole lines from a place in a file on, many at a time, and the place behind them."""
    size = _PIECE
    while data := os.pread(file.fileno(), size, start):
        length = data.rfind(b"\n") + 1
        if length:
            start += length
            yield data[:length], start
            size = _PIECE
        elif len(data) < size:
            return  # half a line
        elif size >= _LONGEST_LINE:
            raise SessionError(f"{path}: the line at byte {start} is longer than {size >> 20} MiB, longer than any row")
        else:
            size *= 2


# ---- writing --------------------------------------------------------------------------------------------------------


class RowLog:
    """The log of a session, which has it locked until :meth:`close`. Thread-safe.

    Rows have the numbers that they have in the folder. Places in the log are bytes from where the session began it;
    they stay the same when the log is replaced. What the disk does not take stays in memory, where readers find it as
    if it were at the end of the file, and is written as soon as there is room.
    """

    def __init__(self, folder: Path) -> None:
        """Raises :class:`SessionError` where another session has the log."""
        self.path = folder / ROWS_FILE
        try:
            self._file = lock(self.path, "ab")
        except BlockingIOError:
            raise SessionError(
                f"the run folder {folder} is in use by an open session, of this notebook or of another; close that "
                f"one, or pass another folder="
            ) from None
        self._sums = SumsWriter(folder)
        self._lock = threading.Lock()
        self._unwritten = bytearray()
        self._first_unwritten = 0
        self._problem: OSError | None = None
        self.first = self.count = 0
        self._shift = self._end = self._written = 0
        # The places of some rows, in ascending order.
        self._rows, self._places = [0], [0]

    def start(self, first: int) -> None:
        """Replace the log by an empty one, whose first row will be ``first``. Raises OSError."""
        self._replace(first, self._end, keeps=False)
        self.count = first
        self._rows, self._places = [first], [self._end]

    def append(self, lines: Sequence[bytes]) -> None:
        """Append lines. Those that cannot be written stay in memory."""
        with self._lock:
            if self.count - self._rows[-1] >= _STRIDE:
                self._rows.append(self.count)
                self._places.append(self._end)
            if self._file.closed:
                # What was still on its way when the session ended.
                with open(self.path, "ab", buffering=0, opener=open_regular) as self._file:
                    self._write(lines)
            else:
                self._write(lines)
            self.count += len(lines)

    @property
    def size(self) -> int:
        """How many bytes of lines the log has."""
        return self._end - self._places[0]

    @property
    def begin(self) -> tuple[int, int]:
        """The number of the first row, and its place."""
        with self._lock:
            return self.first, self._places[0]

    @property
    def end(self) -> tuple[int, int]:
        """How many rows there are, and the place behind the last one."""
        with self._lock:
            return self.count, self._end

    def lines_from(self, place: int) -> bytes:
        """Some whole lines from this place on; none when the log now begins after it. Raises :class:`SessionError`."""
        with self._lock:
            if place < self._places[0]:
                return b""
            shift, written = self._shift, self._written
            rest = bytes(self._unwritten[max(0, place - written) :])
        found = b""
        if place < written:
            try:
                with open(self.path, "rb", buffering=0, opener=open_regular) as file:
                    found = next(_pieces(file, self.path, place - shift), (b"", 0))[0]
            except OSError as error:
                raise not_readable(self.path, error) from error
        # Rows may have come between the two.
        return found if place + len(found) < written else found[: written - place] + rest

    def lines(self, start: int, stop: int) -> tuple[int, list[bytes]]:
        """Those lines of rows ``start`` to ``stop - 1`` that are in the log, and the number of the first.

        Raises :class:`SessionError` when the file is gone.
        """
        while True:
            with self._lock:
                first, end = self.first, self._end
                start = max(start, first)
                at = bisect_right(self._rows, start) - 1
                row, place = self._rows[at], self._places[at]
            found: list[bytes] = []
            while row + len(found) < stop and place < end:
                lines = self.lines_from(place)
                if not lines:
                    break
                place += len(lines)
                found += lines[:-1].split(b"\n")
            # Otherwise rows moved into a file meanwhile, and places may have been those of other lines.
            if self.first == first:
                return start, found[start - row : max(start, stop) - row]

    def drop(self, row: int, place: int) -> bool:
        """Replace the log by one that begins with this row, which is at this place; whether it has done so.

        Raises OSError.
        """
        return self._replace(row, place, keeps=True)

    def _replace(self, row: int, place: int, *, keeps: bool) -> bool:
        header = header_line(row)
        partial = self.path.with_name(f"{self.path.name}.partial")
        file = open(partial, "ab", buffering=0, opener=open_regular)  # noqa: SIM115
        try:
            file.truncate(0)
            begin = file.write(header + b"\n")
            # All but the last lines are copied while rows come in.
            copied = self._copy(file, place) if keeps else place
            os.fsync(file.fileno())
            with self._lock:
                if self._unwritten or self._file.closed:
                    file.close()
                    os.unlink(partial)
                    return False
                copied = self._copy(file, copied) if keeps else copied
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # In this order: until the log is replaced, the checksums are those of no log, and nothing is checked.
                self._sums.begin(row, header, row - self.first + 1 if keeps else None)
                os.replace(partial, self.path)
                self._file.close()
                self._file = file
                self._written = self._end = copied
                self._shift = place - begin
                self.first = row
                at = bisect_right(self._rows, row) - 1
                self._rows, self._places = [row, *self._rows[at + 1 :]], [place, *self._places[at + 1 :]]
        except BaseException:
            file.close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(partial)
            raise
        return True

    def _copy(self, file: io.FileIO, place: int) -> int:
        """Copy the written lines from this place on; returns the place behind them."""
        with open(self.path, "rb", buffering=0, opener=open_regular) as old:
            while data := os.pread(old.fileno(), min(_PIECE, self._written - place), place - self._shift):
                if file.write(data) != len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                place += len(data)
        return place

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
                self._first_unwritten = self.count
            if self._problem is None:
                logger.error("%s cannot be written (%s); its rows stay in memory", self.path, problem.strerror)
            self._problem = problem
            # Half a line in the middle would make everything after it unreadable.
            with contextlib.suppress(OSError):
                os.truncate(self.path, self._written - self._shift)
            return
        self._written += len(data)
        self._unwritten.clear()
        self._problem = None

    def unwritten(self, since: int) -> tuple[int, int, str] | None:
        """The first and the last of the rows from ``since`` on that are not on disk, and why, after another try."""
        with self._lock:
            if self._unwritten and not self._file.closed:
                self._write(())
            first = max(since, self._first_unwritten)
            if self._problem is None or first >= self.count:
                return None
            return first, self.count - 1, str(self._problem.strerror)

    def refuse_changed(self, row: int, place: int, stop: int) -> None:
        """Raises :class:`SessionError` if a line from this place to ``stop`` is not what was written, by its checksum.

        The first of them is that of ``row``.
        """
        sums, number = Sums(self.path.parent, self.first), row - self.first + 1
        while place < stop:
            lines = self.lines_from(place)[: stop - place]
            if not lines:
                return
            each = lines[:-1].split(b"\n")
            refuse_changed(self.path, sums, number, each)
            number += len(each)
            place += len(lines)

    def close(self) -> None:
        """Unlock the log. Rows that come later are appended all the same."""
        with self._lock:
            self._file.close()
            self._sums.close()
