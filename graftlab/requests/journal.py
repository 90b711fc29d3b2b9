"""The journal: each request that a dumper accepts is on disk before ``add`` returns, until a whole file has it.

A journal is a series of segments, files that only grow. Each begins with the header of a whole file, then has a frame
for each request, and one for each whole file that has some of them, written just before that file appears: a request
counts as written if that file exists. So a death at any moment leaves each request in one place.

Frames are written by one plain ``write`` each and not forced to the disk. They outlive the process, whatever ends it;
a power cut may take the last ones.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from graftlab.errors import DumpError
from graftlab.requests.pickling import Pickler, pickle_in_steps

SUFFIX = ".journal"
MAGIC = b"\x93GLJ\r\n\x1a\n"
_HEAD, _REQUEST, _WRITTEN = b"H", b"R", b"W"
# Magic, kind, number of the request, length of what follows, and the checksum of what follows and of the rest.
_FRAME = struct.Struct("<8scQII")
# A segment is removed once all of its requests are in whole files, so none should be long.
_LONGEST_BYTES, _LONGEST_SECONDS, _LONGEST_COUNT = 64 << 20, 60.0, 10_000


class _Segment:
    """One file of the journal, open for appending. ``last`` is the number of its newest request."""

    def __init__(self, path: Path, head: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.last = 0
        self.count = 0
        self.bytes = 0
        self.began = time.monotonic()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o600)
        try:
            self.write(_HEAD, 0, head)
        except OSError:
            # Or a disk that stays full would cost a descriptor and an empty file for each request.
            self.remove()
            raise

    def write(self, kind: bytes, number: int, payload: bytes) -> None:
        """Append a frame in one write. Raises OSError; readers skip the incomplete frame that this may leave."""
        frame = _FRAME.pack(MAGIC, kind, number, len(payload), _checksum(kind, number, payload)) + payload
        written = os.write(self._descriptor, frame)
        while written < len(frame):
            # A full disk is reported only now.
            written += os.write(self._descriptor, frame[written:])
        self.bytes += len(frame)

    def add(self, number: int, payload: bytes) -> None:
        self.write(_REQUEST, number, payload)
        self.last, self.count = number, self.count + 1

    @property
    def is_gone(self) -> bool:
        """Whether the file was removed, so that writes to it are lost."""
        return os.fstat(self._descriptor).st_nlink == 0

    @property
    def is_long(self) -> bool:
        age = time.monotonic() - self.began
        return self.bytes >= _LONGEST_BYTES or self.count >= _LONGEST_COUNT or age >= _LONGEST_SECONDS

    def remove(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        self.close()

    def close(self) -> None:
        os.close(self._descriptor)


class Journal:
    """The segments of one process. Any thread may :meth:`accept`; only the writer's thread calls the rest.

    That thread must never wait for the lock, which the main thread may hold while a signal handler waits for the
    writer. ``token`` goes into the names of segments, ``about`` into each of them.
    """

    def __init__(self, token: str, about: Callable[[], dict[str, Any]]) -> None:
        self._token = token
        self._about = about
        self._head: bytes | None = None
        self._lock = threading.RLock()
        self._segment: _Segment | None = None
        self._past: deque[_Segment] = deque()
        self._segments = 0
        self._number = 0

    def accept(self, folder: Path, payload: bytes, put: Callable[[int], object]) -> tuple[bool, OSError | None]:
        """Write a request into the journal and ``put`` its number into the writer's inbox, in one step.

        Returns whether earlier requests have to be written again because their segment has vanished, and the error if
        this one could not be written. It is put in either case.
        """
        with self._lock:
            self._number += 1
            is_gone, error = False, None
            try:
                is_gone = self._segment is not None and self._segment.is_gone
                self._opened(folder, anew=is_gone).add(self._number, payload)
            except OSError as raised:
                error = raised
            put(self._number)
            return is_gone, error

    def repeat(self, number: int, payload: bytes) -> None:
        """Write an earlier request again; do nothing if no segment is open. Raises OSError."""
        segment = self._segment
        if segment is not None:
            # Not `add`: whether the segment can go is decided by its newest request.
            segment.write(_REQUEST, number, payload)

    def mark(self, path: Path, numbers: Sequence[int]) -> None:
        """Record that these requests are about to appear in a whole file. If that fails, they may appear twice."""
        payload = pickle.dumps((str(path), list(numbers)))
        for segment in [*self._past, *([self._segment] if self._segment is not None else [])]:
            with contextlib.suppress(OSError):
                segment.write(_WRITTEN, 0, payload)

    def tidy(self, lowest: Callable[[], int | None], force: bool = False, patience: float = 0.0) -> None:
        """Begin a new segment if this one is long, or with ``force``; remove those below the ``lowest`` number in use.

        ``lowest()`` is None where nothing is in memory alone. With ``patience`` this waits at most that many seconds
        for a running ``accept``; otherwise the next call does the work.
        """
        segment = self._segment
        wanted = segment is not None and segment.count > 0 and (force or segment.is_long)
        if wanted and self._lock.acquire(timeout=patience):
            try:
                if self._segment is not None:
                    self._past.append(self._segment)
                    self._segment = None
            finally:
                self._lock.release()
        low = lowest()
        for past in [each for each in self._past if low is None or each.last < low]:
            self._past.remove(past)
            past.remove()

    def abandon(self) -> None:
        """Close what is open and leave it alone: for a forked process, whose parent continues to use it."""
        for segment in [*self._past, *([self._segment] if self._segment is not None else [])]:
            segment.close()

    @property
    def paths(self) -> list[Path]:
        """The files of the current segments."""
        return [each.path for each in [*self._past, *([self._segment] if self._segment is not None else [])]]

    def _opened(self, folder: Path, anew: bool) -> _Segment:
        segment = self._segment
        if segment is not None and not anew:
            return segment
        if segment is not None:
            # Closed by the writer, which may be about to write into it.
            self._past.append(segment)
            self._segment = None
        if self._head is None:
            self._head = packed(self._about())
        self._segments += 1
        name = f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{self._token}_{self._segments:06d}{SUFFIX}"
        self._segment = _Segment(folder / name, self._head)
        return self._segment


def packed(content: dict[str, Any]) -> bytes:
    """Encode the content of a whole file. Objects may raise anything; an interrupt that is not theirs is passed on."""
    try:
        return _plainly(content)
    except BaseException as error:
        try:
            data = _plainly(content)
        except BaseException:
            file = io.BytesIO()
            pickle_in_steps(content, file)
            return file.getvalue()
        # The second try succeeded, so a signal's handler raised, not an object.
        if not isinstance(error, Exception):
            raise
        return data


def _plainly(content: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    Pickler(file, pickle.HIGHEST_PROTOCOL).dump(content)
    return file.getvalue()


def is_journal(path: Path, data: bytes) -> bool:
    """Whether a file is a segment; one may have ended before it had a whole frame."""
    return data.startswith(MAGIC) or (path.suffix == SUFFIX and MAGIC.startswith(data))


def read_journal(path: Path, data: bytes, load: Callable[[bytes], Any]) -> dict[str, Any]:
    """Return the requests of a segment that no whole file has, in the form of a whole file; ``load`` unpickles.

    Raises :class:`DumpError` for frames with other content; errors of ``load`` are passed on.
    """
    try:
        return _read(path, data, load)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise DumpError(f"{path} begins as a journal of requests but continues as something else: {error!r}") from error


def _read(path: Path, data: bytes, load: Callable[[bytes], Any]) -> dict[str, Any]:
    head: dict[str, Any] = {}
    requests: dict[int, dict[str, Any]] = {}
    written: dict[str, list[int]] = {}
    dropped: list[dict[str, str]] = []
    at = 0
    while at < len(data):
        frame = _frame_at(data, at)
        if frame is None:
            following = data.find(MAGIC, at + 1)
            end = len(data) if following < 0 else following
            dropped.append({"where": f"bytes {at} to {end}", "reason": "a frame that was not written to its end"})
            at = end
            continue
        kind, number, payload, at = frame
        if kind == _HEAD:
            head = cast(dict[str, Any], load(payload))
        elif kind == _REQUEST:
            requests[number] = load(payload)
        elif kind == _WRITTEN:
            file, numbers = load(payload)
            written[file] = numbers
    files = [file for file in written if _exists(file, path)]
    gone = {number for file in files for number in written[file]}
    kept = [requests[number] for number in sorted(requests.keys() - gone)]
    for index, content in enumerate(kept):
        for item in content["dropped"]:
            dropped.append({**item, "where": item["where"].replace("requests[0]", f"requests[{index}]", 1)})
    return {
        **head,
        "requests": [content["requests"][0] for content in kept],
        "dropped": [*head.get("dropped", []), *dropped],
        "crash": {
            "reason": "a journal: its process has not written these requests into a file",
            "files": files,
            "marks": [None] * len(kept),
        },
    }


def _frame_at(data: bytes, at: int) -> tuple[bytes, int, bytes, int] | None:
    """Return kind, number, payload and end of the frame that begins here; None if there is no complete frame."""
    start = at + _FRAME.size
    if start > len(data):
        return None
    magic, kind, number, length, checksum = _FRAME.unpack_from(data, at)
    payload = data[start : start + length]
    if magic != MAGIC or len(payload) != length or _checksum(kind, number, payload) != checksum:
        return None
    return kind, number, payload, start + length


def _checksum(kind: bytes, number: int, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(b"%c%d" % (kind, number)))


def _exists(file: str, journal: Path) -> bool:
    # Folders are moved and copied; the file is then usually next to the journal.
    return Path(file).exists() or (journal.parent / Path(file).name).exists()
