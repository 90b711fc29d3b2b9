"""The rows of a session: the store they stream into, and the frame they become."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa

from graftlab.errors import SessionError
from graftlab.rows import parquet
from graftlab.rows.columns import Block, Columns
from graftlab.rows.encoding import decode_lines, encode, record
from graftlab.rows.frames import GrowingFrame, frame_of
from graftlab.rows.loading import tables
from graftlab.rows.log import RowLog, header_line
from graftlab.rows.moving import RowMover
from graftlab.rows.schema import Row
from graftlab.rows.tables import RowError, table_of_lines, values_of_rows


def to_frame(rows: Iterable[Row]) -> pd.DataFrame:
    """Rows as a frame: the columns of :data:`graftlab.rows.schema.COLUMNS`, then one for each tag that callers used.

    A tag that is called like a column is found under ``tag_<name>``. ``max_abs_index`` holds tuples, which index a
    tensor as they are. Sorted by step and execution order.
    """
    columns = Columns()
    table = table_of_lines(b"".join(encode(row) + b"\n" for row in rows))
    return frame_of(columns, columns.merge(columns.empty(), [columns.block(table)], len(table)))


class _DecodedPiece(NamedTuple):
    """Rows of the log as a table. Numbers and places are those of :class:`RowLog`."""

    first: int
    table: pa.Table
    stop: int
    end: int


class _DecodedTail(NamedTuple):
    """Decoded rows that are in no Parquet file yet; decoding continues at ``row``, which is at ``place``."""

    pieces: tuple[_DecodedPiece, ...]
    row: int
    place: int


class _FrameBlock(NamedTuple):
    """Rows as a block in order, up to that number."""

    block: Block
    upto: int


class RowStore:
    """All rows of a session: on disk before anything reads them, and in columns up to the last frame.

    Rows are appended to the log. A thread decodes them while they arrive, and moves them into Parquet files when they
    are many (:mod:`.moving`); a frame reads those files, and then what was decoded since.

    Thread-safe. Rows that arrive wait for no reader: they share with readers only how far the log is written. Rows have
    numbers from 0 on in their session.
    """

    def __init__(self, folder: Path, *, append: bool = False, keep_rows: int | None = None) -> None:
        """Raises :class:`SessionError` for a folder that an open session uses; without ``append`` for one with rows.

        The rows that a frame has read stay in memory for the next one, unless they are more than ``keep_rows``.
        """
        self._folder, self._keep_rows = folder, keep_rows
        self._log = RowLog(folder)
        try:
            self.first_run, self.first_step = self._move_earlier_rows(append)
            # The Parquet files, in the order of their rows. It is only ever replaced by one with a file more.
            self.files = parquet.row_files(folder)
            self._earlier = self.files[-1].stop if self.files else 0
            self._log.start(self._earlier)
        except OSError as error:
            self._log.close()
            raise SessionError(f"the run folder {folder} cannot be written: {error.strerror}") from error
        except BaseException:
            self._log.close()
            raise
        self.set_aside: set[int] = set()
        """The numbers of runs that displays of the newest run leave out, such as those that a verdict makes."""
        self._appending = threading.Lock()
        # Held while a thread waits for a frame, and while rows are decoded, for that or ahead of it.
        self._framing, self._reading = threading.Lock(), threading.Lock()
        self._tail = _DecodedTail((), *self._log.end)
        self._forget_frames()
        self._mover = RowMover(self._decode_ahead, self._move, self._undecoded, lambda: self._log.size)

    def _move_earlier_rows(self, append: bool) -> tuple[int, int]:
        """Move what an earlier session left in the log; returns the first run and step that are new to the folder."""
        folder = self._folder
        files = parquet.row_files(folder)
        if not files and self._log.path.stat().st_size <= len(header_line()) + 1:
            # A launch that failed leaves only the first line.
            return 0, 0
        if not append:
            raise SessionError(
                f"the run folder {folder} has the rows of an earlier session; pass append=True to continue after them, "
                f"or another folder="
            )
        runs, steps, left, count = [-1], [-1], [], 0
        first = files[-1].stop if files else 0
        for table in tables(folder):
            runs.append(int(table.column("run").to_numpy().max(initial=-1)))
            steps.append(int(table.column("step").to_numpy().max(initial=-1)))
            if count >= first:
                left.append(table)
            count += len(table)
        parquet.remove_partial(folder)
        for start in range(0, count - first, parquet.MOST_ROWS):
            rows = pa.concat_tables(left).slice(start, parquet.MOST_ROWS)
            parquet.write(folder, first + start, rows)
        return max(runs) + 1, max(steps) + 1

    def append(self, lines: Sequence[bytes]) -> None:
        """Rows as :func:`graftlab.rows.encoding.encode` makes them. Those that cannot be written stay in memory."""
        with self._appending:
            self._log.append(lines)
            self._mover.look()

    def __len__(self) -> int:
        return self._log.count - self._earlier

    def rows(self, start: int = 0, stop: int | None = None) -> list[Row]:
        """The rows from index ``start`` up to ``stop`` in the order in which they came, without parsing many others."""
        count = self._log.count
        start += self._earlier
        stop = count if stop is None else min(stop + self._earlier, count)
        first, lines = self._log.lines(start, stop)
        # Afterwards: rows that are no longer in the log are in a file.
        values: list[list[Any]] = []
        for table in parquet.read_many(parquet.slices(self.files, start, min(first, stop))):
            values += values_of_rows(table)
        values += decode_lines(lines)
        return [record(each) for each in values]

    def frame(self, run: int | None = None) -> pd.DataFrame:
        """All rows, or those of one run, as :func:`to_frame` makes it of them. Only what is new is read.

        The frame is the caller's, but the lists in its cells belong to every frame, and to all rows that have the same;
        the dicts of tags are made anew when they are read. Replace both, rather than change them. Raises
        :class:`SessionError` when the log is gone.
        """
        with self._framing, self._reading:
            self._read_until(self._log.count)
            frame = self._frame_of(self._framed.block, run)
            if self._keep_rows is not None and self._framed.upto - self._earlier > self._keep_rows:
                self._forget_frames()
            return frame

    def _frame_of(self, block: Block, run: int | None) -> pd.DataFrame:
        if run is None:
            return self._frame.of(block)
        chosen: Any = np.flatnonzero(block["run"] == run)
        if len(chosen) and chosen[-1] - chosen[0] == len(chosen) - 1:
            # Usually, because steps count on over runs.
            chosen = slice(chosen[0], chosen[-1] + 1)
            return frame_of(self._columns, {name: column[chosen].copy() for name, column in block.items()})
        return frame_of(self._columns, {name: column[chosen] for name, column in block.items()})

    def _forget_frames(self) -> None:
        self._columns = Columns(grows=True)
        self._frame = GrowingFrame(self._columns)
        self._framed = _FrameBlock(self._columns.empty(), self._earlier)

    def _let_readers_go_first(self) -> None:
        """Return when no frame is being made: for threads whose work is less urgent."""
        with self._framing:
            pass

    def unwritten(self, since: int = 0) -> str | None:
        """In words, which rows from index ``since`` on are not on disk and why, after another try; None if all are."""
        found = self._log.unwritten(since + self._earlier)
        if found is None:
            return None
        first, last, why = found
        return (
            f"rows {first - self._earlier} to {last - self._earlier} are not on disk, because {self._log.path} cannot "
            f"be written: {why}. They are in memory and in session.frame until the session ends; make room, and the "
            f"next row, run or close() writes them"
        )

    def close(self) -> None:
        """Raises :class:`SessionError` when rows are lost with this process, because the disk does not take them."""
        self._mover.finish()
        lost = self.unwritten()
        self._log.close()
        if lost:
            raise SessionError(lost)

    # ---- decoding ---------------------------------------------------------------------------------------------------

    def _read_until(self, wanted: int) -> None:
        """Add all rows up to this number to the frame's block, with what is read with them."""
        block, upto = self._framed
        if upto >= wanted:
            return

        def blocks() -> Iterator[Block]:
            nonlocal upto
            while upto < wanted:
                for table, stop in self._tables_from(upto):
                    upto = stop
                    yield self._columns.block(table)
                if upto < wanted and not self._decode_more():
                    raise SessionError(f"{self._log.path} was truncated by another process after row {upto - 1}")

        block = self._columns.merge(block, blocks(), wanted - upto)
        # At once, because the stop button may interrupt this anywhere.
        self._framed = _FrameBlock(block, upto)

    def _tables_from(self, row: int) -> Iterator[tuple[pa.Table, int]]:
        """What is in files, or decoded, from this row on, each table with the number of the row behind it."""
        first = self._tail.pieces[0].first if self._tail.pieces else self._tail.row
        for table in parquet.read_many(parquet.slices(self.files, row, first)):
            row += len(table)
            yield table, row
        for piece in self._tail.pieces:
            if row < piece.stop:
                yield piece.table.slice(max(0, row - piece.first)), piece.stop

    def _decode_more(self) -> bool:
        """Decode the next lines of the log; whether there were any."""
        pieces, row, place = self._tail
        lines = self._log.lines_from(place)
        if not lines:
            return False
        try:
            table = table_of_lines(lines)
        except RowError as error:
            raise SessionError(f"{self._log.path}: row {row + error.index} is damaged: {error}") from None
        piece = _DecodedPiece(row, table, row + len(table), place + len(lines))
        self._tail = _DecodedTail((*pieces, piece), piece.stop, piece.end)
        return True

    # ---- on the thread that moves rows ------------------------------------------------------------------------------

    def _undecoded(self) -> int:
        return self._log.count - self._tail.row

    def _decode_ahead(self) -> bool:
        """Decode some rows before a frame needs them; whether there were any."""
        self._let_readers_go_first()
        with self._reading:
            return self._decode_more()

    def _move(self, size: int) -> bool:
        """Move up to ``size`` bytes of decoded lines into a Parquet file; whether there were any.

        Raises OSError when the disk does not take them, and :class:`SessionError` when lines are not what was written.
        """
        self._let_readers_go_first()
        pieces = self._tail.pieces
        if not pieces:
            return False
        first, place = self._log.begin
        if self.files and self.files[-1].stop > first:
            # They were written before, and the log could not be replaced.
            count = next(at for at, piece in enumerate(pieces, 1) if piece.stop == self.files[-1].stop)
        else:
            count = sum(piece.end - place <= size and piece.stop - first <= parquet.MOST_ROWS for piece in pieces) or 1
            self._log.refuse_changed(first, place, pieces[count - 1].end)
            rows = pa.concat_tables([piece.table for piece in pieces[:count]])
            self.files = (*self.files, parquet.write(self._folder, first, rows))
        with self._reading:
            if not self._log.drop(pieces[count - 1].stop, pieces[count - 1].end):
                return False
            self._tail = self._tail._replace(pieces=self._tail.pieces[count:])
        return True
