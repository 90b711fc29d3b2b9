"""A checksum a line of a file of rows, in a file beside it: a value that the disk has changed is no row.

Line by line, so that what is damaged can be named; in a file of its own, so that ``rows.jsonl`` has rows alone.
"""

from __future__ import annotations

import io
import os
import sys
from array import array
from collections.abc import Iterable
from pathlib import Path
from zlib import crc32

import numpy as np
import numpy.typing as npt

from graftlab.diffs import kernel
from graftlab.errors import SessionError

SUMS_FILE = "rows.crc32"
_KIND = np.dtype("<u4")


def sums_of(lines: Iterable[bytes]) -> bytes:
    """Four bytes for each of these lines, which come without their newlines."""
    sums = array("I", map(crc32, lines))
    if sys.byteorder == "big":
        sums.byteswap()
    return sums.tobytes()


def sums_in(lines: bytes, length: int, most: int) -> npt.NDArray[np.uint32]:
    """The checksums of up to so many of the whole lines in the first ``length`` bytes."""
    library = kernel.load()
    if library is None:
        return np.frombuffer(sums_of(lines[: length - 1].split(b"\n")[:most]), _KIND)
    sums = np.empty(most, np.uint32)
    return sums[: library.sum_lines(lines, length, most, sums.ctypes.data)]


class Sums:
    """The checksums of a file of rows, while it is read from its first line on.

    Lines that have none are taken as they are: those of earlier versions, and the last ones of a process that was
    killed between the rows and their checksums.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / SUMS_FILE
        try:
            known = self.path.read_bytes()
        except FileNotFoundError:
            known = b""
        except OSError as error:
            raise SessionError(f"the checksums in {self.path} cannot be read: {error.strerror}") from error
        self._known = np.frombuffer(known[: len(known) // 4 * 4], _KIND)

    def wrong(self, number: int, lines: bytes, length: int) -> int | None:
        """The first of the whole lines in so many bytes that is not what was written; ``number`` come before them."""
        known = self._known[number : number + length]
        if not len(known):
            return None
        found = sums_in(lines, length, len(known))
        differing = np.flatnonzero(found != known[: len(found)])
        return number + int(differing[0]) + 1 if len(differing) else None


class SumsWriter:
    """Appends checksums. What the disk does not take waits for the next call, and is no reason to stop anything."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / SUMS_FILE
        self._unwritten = bytearray()
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        self._file = open(descriptor, "ab", buffering=0)  # noqa: SIM115

    def write(self, lines: Iterable[bytes]) -> None:
        self._unwritten += sums_of(lines)
        try:
            if self._file.closed:
                with open(self._path, "ab", buffering=0) as file:
                    self._flush(file)
            else:
                self._flush(self._file)
        except OSError:
            # Where the rows are not written either, the store says so; rows without a checksum are rows all the same.
            return

    def restart(self) -> None:
        """The file of rows is to begin anew."""
        self._unwritten.clear()
        # Opened for appending, so what follows comes to its beginning.
        self._file.truncate(0)

    def _flush(self, file: io.RawIOBase) -> None:
        del self._unwritten[: file.write(self._unwritten) or 0]

    def close(self) -> None:
        self.write(())
        self._file.close()
