"""Rows as pandas: the store they stream into, the file they are appended to, and the frame they become."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import os
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from graftlab.errors import SessionError
from graftlab.rows.checksums import Sums, SumsWriter, sums_of
from graftlab.rows.columns import Block, Columns
from graftlab.rows.encoding import HEADER, decode_all, record, wrong_value
from graftlab.rows.parsing import parse
from graftlab.rows.schema import COLUMNS, Row

logger = logging.getLogger(__name__)

ROWS_FILE = "rows.jsonl"

# Bytes that are parsed at a time: so many that what a piece costs beside its rows does not count, and so few that no
# other thread of the kernel waits long for its turn.
_PIECE = 1 << 20
# The place of every so many rows in the file is remembered.
_STRIDE = 256
# From 3.0 on pandas itself copies what two frames share, when one of them is changed.
_COPY_ON_WRITE = int(pd.__version__.partition(".")[0]) >= 3


def to_frame(rows: Iterable[Row]) -> pd.DataFrame:
    """Rows as a frame: the columns of :data:`graftlab.rows.schema.COLUMNS`, then one for each tag that callers used.

    A tag that is called like a column is found under ``tag_<name>``. ``max_abs_index`` holds tuples, which index a
    tensor as they are. Sorted by step and execution order.
    """
    columns = Columns()
    block = columns.block(list(rows))
    return columns.frame(columns.merge(columns.block([]), [block]))


class RowStore:
    """All rows of a session: on disk before anybody looks at them, and in columns as far as frames needed them so far.

    Thread-safe. Rows that come in wait for no reader: what readers share with them is how far the file is written. What
    the disk does not take stays in memory, where readers find it as if it lay at the file's end, and is written as soon
    as there is room.
    """

    def __init__(self, folder: Path, *, append: bool = False) -> None:
        """Raises :class:`SessionError` for a folder that an open session uses; without ``append`` for one with rows."""
        self._path = folder / ROWS_FILE
        # Unbuffered: what was appended is on its way to the disk even if this process is killed the next moment.
        self._file = open(self._path, "ab", buffering=0, opener=_open_for_the_user_alone)  # noqa: SIM115
        try:
            self.first_run, self.first_step = self._claim(append)
            self._sums = SumsWriter(folder, self._sums_so_far())
        except BaseException:
            self._file.close()
            raise
        self._writing = threading.Lock()
        self._end = self._written = self._file.seek(0, os.SEEK_END)
        # What the disk does not take, and why: what lies in this "file" between ``_written`` and ``_end``.
        self._unwritten = bytearray()
        self._problem: OSError | None = None
        self._first_unwritten = 0
        self._count = 0
        # Called with the lines of each batch, in the order in which they come; they must not wait for this store.
        self.followers: list[Callable[[Sequence[bytes]], None]] = []
        self._write([HEADER])
        # The first row at each of some places in the file, in ascending order.
        self._marked_rows, self._marked_places = [0], [self._end]
        self._reading = threading.Lock()
        self._columns = Columns()
        self._shown: pd.DataFrame | None = None
        # Blocks with the place in the file where each ends: the first in order, the others as they came. A list that
        # only grows by whole pairs or is replaced, because the stop button may interrupt a reader anywhere.
        self._blocks: list[tuple[Block, int]] = [(self._columns.block([]), self._end)]

    def _claim(self, append: bool) -> tuple[int, int]:
        """Make the file this session's own; returns the numbers of the first run and step that it does not have."""
        folder = self._path.parent
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SessionError(
                f"the run folder {folder} is in use by an open session, of this notebook or of another; close that "
                f"one, or pass another folder="
            ) from None
        # A launch that failed leaves no more than the first line.
        if self._file.seek(0, os.SEEK_END) <= len(HEADER) + 1:
            return 0, 0
        if not append:
            raise SessionError(
                f"the run folder {folder} has the rows of an earlier session; pass append=True to go on after them, or "
                f"another folder="
            )
        frame = load_run(folder)
        return (int(frame["run"].max()) + 1, int(frame["step"].max()) + 1) if len(frame) else (0, 0)

    def _sums_so_far(self) -> bytes:
        """Of the whole lines that the file has. Half a line, which a kill left, would spoil the next one: it goes."""
        sums, size = [], 0
        for lines in _pieces(self._path, 0):
            sums.append(sums_of(lines[:-1].split(b"\n")))
            size += len(lines)
        os.truncate(self._path, size)
        return b"".join(sums)

    def append(self, lines: Sequence[bytes]) -> None:
        """Rows as :func:`graftlab.rows.encoding.encode` makes them. Those that cannot be written stay in memory."""
        with self._writing:
            if self._count - self._marked_rows[-1] >= _STRIDE:
                self._marked_rows.append(self._count)
                self._marked_places.append(self._end)
            if self._file.closed:
                # What was still on its way when the session ended.
                with open(self._path, "ab", buffering=0) as self._file:
                    self._write(lines)
            else:
                self._write(lines)
            self._count += len(lines)
            for follow in self.followers:
                follow(lines)

    def __len__(self) -> int:
        return self._count

    def rows(self, start: int = 0, stop: int | None = None) -> list[Row]:
        """The rows from index ``start`` up to ``stop`` in the order in which they came, without parsing any other."""
        with self._writing:
            stop = self._count if stop is None else min(stop, self._count)
            first = bisect_right(self._marked_rows, start) - 1
            last = bisect_left(self._marked_rows, stop)
            begin, skipped = self._marked_places[first], start - self._marked_rows[first]
            end = self._marked_places[last] if last < len(self._marked_places) else self._end
        lines = b"".join(self._pieces(begin, end)).split(b"\n")[skipped : skipped + max(0, stop - start)]
        return [
            record(values)
            for at in range(0, len(lines), _STRIDE)
            for values in decode_all(b"\n".join(lines[at : at + _STRIDE]) + b"\n")[0]
        ]

    def frame(self, run: int | None = None) -> pd.DataFrame:
        """All rows, or those of one run, as :func:`to_frame` makes it of them. Only what is new is parsed.

        The frame is the caller's, but the lists and dicts in its cells belong to every frame, and to all rows that have
        the same: replace them, rather than change them. Raises :class:`SessionError` when the file is gone.
        """
        with self._reading:
            self._read_on()
            block = self._blocks[0][0]
            if run is not None:
                chosen = np.flatnonzero(block["run"] == run)
                return self._columns.frame({name: column[chosen] for name, column in block.items()})
            if self._shown is None:
                self._shown = self._columns.frame(block)
            return self._shown.copy(deep=not _COPY_ON_WRITE)

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
        lost = self.unwritten()
        with self._writing:
            self._file.close()
            self._sums.close()
        if lost:
            raise SessionError(lost)

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
                os.truncate(self._path, self._written)
            return
        self._written += len(data)
        self._unwritten.clear()
        self._problem = None

    def _pieces(self, start: int, stop: int) -> Iterator[bytes]:
        """As the function of that name, with what is not on disk yet."""
        with self._writing:
            written = self._written
            rest = bytes(self._unwritten[max(0, start - written) : max(0, stop - written)])
        yield from _pieces(self._path, start, min(stop, written))
        if rest:
            yield rest

    def _read_on(self) -> None:
        """Bring the first block up to the end of the file, as it is now."""
        place = self._blocks[-1][1]
        with self._writing:
            end = self._end
        for lines in self._pieces(place, end):
            place += len(lines)
            parsed = parse(lines)
            block = self._columns.block(decode_all(lines)[0] if parsed is None else parsed)
            self._blocks.append((block, place))
        if len(self._blocks) > 1:
            self._shown = None
            ordered, *more = (block for block, _ in self._blocks)
            self._blocks = [(self._columns.merge(ordered, more), self._blocks[-1][1])]


def _open_for_the_user_alone(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def load_run(folder: str | Path) -> pd.DataFrame:
    """The frame of a session's run folder, also of one that was killed: a last line that is cut short is left out.

    Raises :class:`SessionError` when there are no rows to read, a line in the middle is damaged, or a line is not the
    one that was written, by its checksum in the file beside.

    >>> len(gl.load_run(session.folder)) == len(session.frame)
    True
    """
    path = Path(folder).expanduser() / ROWS_FILE
    names: Sequence[str] = COLUMNS
    columns, blocks, number, count = Columns(), [], 0, 0
    sums = Sums(path.parent)
    for lines in _pieces(path, 0):
        header = len(HEADER) + 1 if lines.startswith(HEADER + b"\n") else 0
        if (header or names == COLUMNS) and (parsed := parse(lines[header:])) is not None:
            names = COLUMNS
            _refuse_changed(path, sums, number, lines)
            blocks.append(columns.block(parsed))
            count += parsed.row_count
            number += parsed.row_count + (header > 0)
            continue
        try:
            rows, names = decode_all(lines, names)
        except ValueError:
            raise _damage(path, lines, names, number) from None
        _refuse_changed(path, sums, number, lines)
        if (fault := wrong_value(rows)) is not None:
            index, column, value = fault
            raise SessionError(f"{path}: row {index + count} has {value!r:.80} as its {column}, which no row has")
        count += len(rows)
        blocks.append(columns.block(rows))
        number += lines.count(b"\n")
    return columns.frame(columns.merge(columns.block([]), blocks))


def _refuse_changed(path: Path, sums: Sums, number: int, lines: bytes) -> None:
    if (wrong := sums.wrong(number, lines)) is not None:
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


def _pieces(path: Path, start: int, stop: float = math.inf) -> Iterator[bytes]:
    """The whole lines between two places in a file, many at a time."""
    try:
        with open(path, "rb", buffering=0) as file:
            file.seek(start)
            rest = b""
            while data := file.read(int(min(_PIECE, stop - start))):
                start += len(data)
                data = rest + data
                length = data.rfind(b"\n") + 1
                if length:
                    yield data[:length]
                rest = data[length:]
    except OSError as error:
        raise SessionError(
            f"no rows can be read from {path}: {error.strerror}; it must lie in the run folder of a session "
            f"(session.folder)"
        ) from error
