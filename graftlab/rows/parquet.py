"""The Parquet files of a run folder, which have its older rows; the log has the newest.

A file is written under another name, forced to the disk and renamed before its lines leave the log. So a process may be
killed at any moment: a file that is cut short has no name that counts, and lines that are in a file and in the log are
known by their numbers. The name of a file has the number of its first row, how many it has, and the checksum of all its
bytes, because Parquet's own checksums leave out what says how its pages are to be read.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from isal.isal_zlib import crc32

from graftlab.base.files import open_regular
from graftlab.errors import SessionError
from graftlab.rows.log import VERSION
from graftlab.rows.schema import TABLE, Row
from graftlab.rows.tables import SCHEMA, TEXT

_NAME = re.compile(r"rows-(\d{10})-(\d+)-([0-9a-f]{8})\.parquet")
MOST_ROWS = 1 << 17
"""How many rows a file has at the most."""
_GROUP = 1 << 14
_VERSION_KEY = b"graftlab.rows"

# Files that declare more are refused before anything is allocated for them; these are many times the usual sizes.
_MOST_BYTES = 1 << 28
_MOST_UNPACKED = 1 << 30
_MOST_COLUMNS = 1000
# Bytes of a row in a frame, approximately.
_ROW_IN_MEMORY = 500

_FLOATS = [column.name for column in TABLE if column.storage == "float"]
_TEXTS = [field.name for field in SCHEMA if field.type == TEXT]
_INTEGERS = [column.name for column in TABLE if column.storage == "integer"]


@dataclass(frozen=True)
class RowFile:
    """A Parquet file of rows, by its name."""

    path: Path
    first: int
    """The number that its first row has in the folder."""
    count: int
    checksum: int

    @property
    def stop(self) -> int:
        """The number of the row behind its last one."""
        return self.first + self.count


def row_files(folder: Path) -> tuple[RowFile, ...]:
    """The Parquet files of a folder in the order of their rows.

    Raises :class:`SessionError` where some are missing, or where their rows would fill the machine's memory.
    """
    found = []
    for path in folder.glob("rows-*.parquet"):
        if (match := _NAME.fullmatch(path.name)) is not None:
            found.append(RowFile(path, int(match[1]), int(match[2]), int(match[3], 16)))
    found.sort(key=lambda file: file.first)
    count = 0
    for file in found:
        if file.first > count:
            raise SessionError(f"{folder}: rows {count} to {file.first - 1} are missing; a Parquet file was removed")
        if file.first < count or not file.count:
            raise SessionError(
                f"{file.path} has rows that another file has too; one of the two does not belong to this folder"
            )
        count = file.stop
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if count * _ROW_IN_MEMORY > memory:
        raise SessionError(
            f"{folder} has {count:,} rows, which take about {count * _ROW_IN_MEMORY >> 30} GiB as a frame; this "
            f"machine has {memory >> 30} GiB. Read its Parquet files in parts, with DuckDB or polars"
        )
    return tuple(found)


def write(folder: Path, first: int, table: pa.Table) -> RowFile:
    """Write these rows as a file; ``first`` is the number of the first one in the folder. Raises OSError."""
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(
        sink,
        SCHEMA,
        compression="zstd",
        use_dictionary=_TEXTS,
        use_byte_stream_split=_FLOATS,
        column_encoding=dict.fromkeys(_INTEGERS, "DELTA_BINARY_PACKED"),
        write_page_checksum=True,
        store_schema=False,
    ) as writer:
        writer.add_key_value_metadata({_VERSION_KEY: str(VERSION)})
        writer.write_table(table.unify_dictionaries(), row_group_size=_GROUP)
    data = memoryview(sink.getvalue())
    checksum = crc32(data)
    path = folder / f"rows-{first:010d}-{len(table)}-{checksum:08x}.parquet"
    partial = path.with_suffix(".partial")
    try:
        descriptor = open_regular(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            written = 0
            while written < len(data):
                written += os.write(descriptor, data[written:])
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(partial, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise
    # The rename itself; where a file system has no such thing, the rows are in the log as long.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return RowFile(path, first, len(table), checksum)


def remove_partial(folder: Path) -> None:
    """Remove what a process that was killed was writing."""
    for path in folder.glob("rows*.partial"):
        with contextlib.suppress(OSError):
            path.unlink()


def read(file: RowFile, start: int = 0, stop: int | None = None) -> pa.Table:
    """The rows ``start`` to ``stop - 1`` of a file, counted in it, with the columns of :data:`.tables.SCHEMA`.

    Columns that are no longer known are left out; those that the file lacks have a row's defaults. Raises
    :class:`SessionError` for a file that is not what was written, or is not one of graftlab's.
    """
    stop = file.count if stop is None else min(stop, file.count)
    where = f"{file.path}: these rows, {file.first} to {file.stop - 1},"
    try:
        with open(file.path, "rb", opener=open_regular) as opened:
            size = os.fstat(opened.fileno()).st_size
            if size > _MOST_BYTES:
                raise SessionError(f"{where} take {size >> 20} MiB, more than graftlab writes into a file")
            data = opened.read()
    except OSError as error:
        raise SessionError(f"{where} cannot be read: {error.strerror}") from error
    if crc32(data) != file.checksum:
        raise SessionError(
            f"{where} are not what was written, by the checksum in the file's name; it was changed or damaged since"
        )
    try:
        metadata = pq.read_metadata(pa.BufferReader(data))
        _refuse_excess(metadata, file, where)
        parquet = pq.ParquetFile(
            pa.BufferReader(data),
            metadata=metadata,
            read_dictionary=[name for name in _TEXTS if name in metadata.schema.names],
            page_checksum_verification=True,
        )
        table = _conformed(_rows_of(parquet, start, stop), where)
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError, LookupError, OverflowError, MemoryError) as error:
        raise SessionError(f"{where} cannot be read as Parquet ({error!s:.200})") from error
    return table


def read_many(parts: Iterable[tuple[RowFile, int, int]]) -> Iterator[pa.Table]:
    """The rows of parts of files, one after the other; each part is a file, its first row and the row behind its last.

    A thread reads the next file while the caller uses the rows of one. Raises as :func:`read`.
    """
    parts = list(parts)
    if len(parts) < 2:
        for part in parts:
            yield read(*part)
        return
    with ThreadPoolExecutor(1, "graftlab-row-reader") as reader:
        ahead = reader.submit(read, *parts[0])
        for part in parts[1:]:
            table, ahead = ahead.result(), reader.submit(read, *part)
            yield table
        yield ahead.result()


def _refuse_excess(found: pq.FileMetaData, file: RowFile, where: str) -> None:
    version = (found.metadata or {}).get(_VERSION_KEY, b"")
    if version != b"%d" % VERSION:
        raise SessionError(
            f"{where} are in format {version.decode(errors='replace')!r:.20}, and this version of graftlab reads "
            f"format {VERSION}; read them with the version that wrote them, or a later one"
        )
    if found.num_rows != file.count or file.count > MOST_ROWS or found.num_columns > _MOST_COLUMNS:
        raise SessionError(
            f"{where} claim to be {found.num_rows:,} rows of {found.num_columns:,} columns; graftlab writes at most "
            f"{MOST_ROWS:,} rows into a file, and their number into its name"
        )
    groups = [found.row_group(at) for at in range(found.num_row_groups)]
    # Not the columns' own sizes: pyarrow ends the process where a made-up file has no such column.
    size = sum(group.total_byte_size for group in groups)
    if size > _MOST_UNPACKED or sum(group.num_rows for group in groups) != file.count:
        raise SessionError(f"{where} claim to take {size >> 20} MiB, more than graftlab writes into a file")


def _rows_of(parquet: pq.ParquetFile, start: int, stop: int) -> pa.Table:
    """The rows from ``start`` on up to ``stop``, from the row groups that have them."""
    groups, first, before = [], 0, 0
    for at in range(parquet.num_row_groups):
        count = parquet.metadata.row_group(at).num_rows
        if first + count <= start:
            before = first + count
        elif first < stop:
            groups.append(at)
        first += count
    known = set(parquet.schema_arrow.names)
    columns = [name for name in SCHEMA.names if name in known]
    return parquet.read_row_groups(groups, columns).slice(start - before, max(0, stop - start))


def _conformed(table: pa.Table, where: str) -> pa.Table:
    """The table with all columns of this version of graftlab, and no others."""
    arrays: list[pa.ChunkedArray | pa.Array] = []
    for field in SCHEMA:
        if field.name in table.column_names:
            column = table.column(field.name)
            if column.type != field.type:
                raise SessionError(f"{where} have {column.type} as their {field.name}, and not {field.type}")
            if column.null_count and not field.nullable:
                raise SessionError(f"{where} have a {field.name} that is null")
        else:
            default = Row._field_defaults.get(field.name)
            if default is None and not field.nullable:
                raise SessionError(f"{where} have no column {field.name}; so they are not rows of graftlab")
            column = (
                pa.repeat(pa.scalar(default, field.type), len(table))
                if default is not None
                else pa.nulls(len(table), field.type)
            )
        arrays.append(column)
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def missing_rows(folder: Path, first: int, stop: int) -> SessionError:
    """The error for rows that are neither in Parquet files nor in the log."""
    return SessionError(f"{folder}: rows {first} to {stop - 1} are missing; a Parquet file was removed")


def slices(files: Sequence[RowFile], start: int, stop: int) -> list[tuple[RowFile, int, int]]:
    """Which files have the rows ``start`` to ``stop - 1``, and which of their rows these are."""
    return [
        (file, max(start - file.first, 0), min(stop - file.first, file.count))
        for file in files
        if start < file.stop and file.first < stop
    ]
