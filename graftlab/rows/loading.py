"""A run folder read back into a frame: its Parquet files, then the rows of the log that are in none yet."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pyarrow as pa

from graftlab.errors import SessionError
from graftlab.rows import parquet
from graftlab.rows.columns import Block, Columns
from graftlab.rows.frames import frame_of
from graftlab.rows.log import LogReader


def load_run(folder: str | Path) -> pd.DataFrame:
    """The frame of a run folder, also of one that was killed: a last line that is cut short is left out.

    Raises :class:`SessionError` when there are no rows to read, or a line or a Parquet file is damaged.
    """
    columns = Columns()
    path = Path(folder).expanduser()
    count = sum(file.count for file in parquet.row_files(path))
    return frame_of(columns, columns.merge(columns.empty(), _blocks(columns, path), count))


def _blocks(columns: Columns, folder: Path) -> Iterator[Block]:
    for table in tables(folder):
        try:
            block = columns.block(table)
        except ValueError as error:
            raise SessionError(f"{folder} has rows that are not graftlab's ({error})") from error
        yield block


def tables(folder: Path) -> Iterator[pa.Table]:
    """All rows of a run folder, many at a time, in the order in which they arrived. Raises as :func:`load_run`.

    A session may write to it meanwhile: then these are all rows that it had at one moment or later.
    """
    # First the log: rows that leave it from now on are in files that are listed afterwards.
    with LogReader(folder) as log:
        count = 0
        files = parquet.row_files(folder)
        yield from parquet.read_many((file, 0, file.count) for file in files)
        count = files[-1].stop if files else 0
        if log.header.first > count:
            raise parquet.missing_rows(folder, count, log.header.first)
        for first, table in log.tables():
            # The others are in a file already: their session ended before they left the log.
            if (fresh := first + len(table) - count) > 0:
                yield table.slice(len(table) - fresh)
                count += fresh
