"""A checksum a line of the log, in a file beside it: a line that the disk has changed is not a row.

One for each line, so that an error can name the damaged line; in a separate file, so that ``rows.jsonl`` has only rows.
The file begins with the number of the log's first row: the log is rewritten when rows move into Parquet files, and
checksums of another log say nothing about this one.
"""

from __future__ import annotations

import io
import os
import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from zlib import crc32

import numpy as np

from graftlab.base.files import open_regular, read_all
from graftlab.errors import SessionError

SUMS_FILE = "rows.crc32"
_KIND = np.dtype("<u4")
_FIRST = struct.Struct("<Q")


def sums_of(lines: Iterable[bytes]) -> bytes:
    """Four bytes for each of these lines, which come without their newlines."""
    sums = array("I", map(crc32, lines))
    if sys.byteorder == "big":
        sums.byteswap()
    return sums.tobytes()


class Sums:
    """The checksums of the log whose first row has the number ``first``, while it is read from its first line on.

    Lines without a checksum are accepted as they are: the last ones of a process that was killed between the rows and
    their checksums.
    """

    def __init__(self, folder: Path, first: int) -> None:
        self.path = folder / SUMS_FILE
        try:
            with open(self.path, "rb", opener=open_regular) as file:
                known = file.read()
        except FileNotFoundError:
            known = b""
        except OSError as error:
            raise SessionError(f"the checksums in {self.path} cannot be read: {error.strerror}") from error
        if known[: _FIRST.size] != _FIRST.pack(first):
            known = b""
        known = known[_FIRST.size :]
        self._known = np.frombuffer(known[: len(known) // 4 * 4], _KIND)

    def wrong(self, number: int, lines: Sequence[bytes]) -> int | None:
        """The number of the first of these lines that is not what was written; ``number`` lines come before them."""
        known = self._known[number : number + len(lines)]
        if not len(known):
            return None
        found = np.frombuffer(sums_of(lines[: len(known)]), _KIND)
        differing = np.flatnonzero(found != known)
        return number + int(differing[0]) + 1 if len(differing) else None


class SumsWriter:
    """Appends checksums. What the disk does not take waits for the next call, and stops nothing."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / SUMS_FILE
        self._unwritten = bytearray()
        self._file: io.FileIO | None = None

    def write(self, lines: Iterable[bytes]) -> None:
        """Append the checksums of these lines."""
        self._unwritten += sums_of(lines)
        try:
            if self._file is None:
                with self._opened(os.O_APPEND) as file:
                    self._flush(file)
            else:
                self._flush(self._file)
        except OSError:
            # Where the rows are not written either, the log reports it; rows without a checksum are rows all the same.
            return

    def begin(self, first: int, header: bytes, dropped: int | None = None) -> None:
        """Begin the checksums of another log, whose first row is ``first``, with that of its first line.

        Those of the log before it are kept, but for the first ``dropped`` lines; without that number all go. The file
        is replaced as a whole. Raises OSError.
        """
        kept = b""
        if dropped is not None:
            kept = read_all(self._path.parent, self._path.name)[_FIRST.size + 4 * dropped :] + self._unwritten
        partial = self._path.with_name(f"{SUMS_FILE}.partial")
        file = self._opened(os.O_TRUNC | os.O_APPEND, partial)
        try:
            data = _FIRST.pack(first) + sums_of([header]) + kept
            if file.write(data) != len(data):
                raise OSError(28, os.strerror(28))
            os.replace(partial, self._path)
        except BaseException:
            file.close()
            raise
        self.close()
        self._unwritten.clear()
        self._file = file

    def _opened(self, flags: int, path: Path | None = None) -> io.FileIO:
        descriptor = open_regular(path or self._path, os.O_WRONLY | os.O_CREAT | flags)
        return open(descriptor, "wb", buffering=0)

    def _flush(self, file: io.FileIO) -> None:
        del self._unwritten[: file.write(self._unwritten) or 0]

    def close(self) -> None:
        """Write what waits. Checksums that are written later open the file again."""
        if self._file is not None:
            self.write(())
            self._file.close()
            self._file = None
