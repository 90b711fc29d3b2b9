"""The thread that writes a recording, and its bounded queue."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import safetensors.torch
import torch
from isal.isal_zlib import crc32

from graftlab.base.tensor_bytes import DTYPE_NAMES, as_bytes
from graftlab.recordings.file_format import (
    INDEX_FILE,
    RANK_FILE,
    ChecksumChain,
    IndexEnd,
    RankHeader,
    StoredLayout,
    StoredTensor,
    TapEntry,
)

logger = logging.getLogger(__name__)

# Bytes that may wait to be written; a tap that would exceed them waits for the disk.
_WAITING = 256 << 20
# Bytes after which a file is written.
_SHARD = 64 << 20
# Files that may wait for fdatasync: enough to keep the disk busy, and few enough to notice a full disk soon.
_UNSYNCED = 2
# What ends a recording, and not the job.
_FAILURES = (OSError, RuntimeError, ValueError, TypeError)
# The dtypes that every reader of safetensors knows.
_COMMON = frozenset(
    {
        torch.float64, torch.float32, torch.float16, torch.bfloat16,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    }
)  # fmt: skip


@dataclass(frozen=True)
class PendingTap:
    """A tap to be written, with its own copies of the tensors on the CPU."""

    step: int
    name: str
    tags: dict[str, Any]
    tensor: torch.Tensor
    extras: Any = None
    extra_tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    lost_extras: str = ""
    layout: StoredLayout | None = None

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes + sum(tensor.nbytes for tensor in self.extra_tensors.values())


class RecordingWriter:
    """Writes one rank's taps. Any thread may call :meth:`put`; ``error`` has the reason if it ended early."""

    def __init__(self, folder: Path, header: RankHeader, shares: bool = False) -> None:
        """With ``shares`` equal tensors are stored once, which takes a hash of each.

        Raises OSError when the folder cannot be made, and FileExistsError when it has a recording.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        first = msgspec.json.encode(header)
        with open(folder / RANK_FILE, "xb") as file:
            try:
                file.write(first)
                file.flush()
            except OSError:
                # Half a header would be a recording in the way of the next one.
                os.unlink(folder / RANK_FILE)
                raise
        self._chain = ChecksumChain(first)
        self._index = open(folder / INDEX_FILE, "xb", buffering=0)  # noqa: SIM115
        self.error: str | None = None
        self._queue: deque[PendingTap | None] = deque()
        self._waiting = 0
        self._changed = threading.Condition()
        self._shard: dict[str, torch.Tensor] = {}
        self._lines: list[TapEntry] = []
        self._bytes = self._shards = self._taps = 0
        self._stored: dict[bytes, StoredTensor] | None = {} if shares else None
        self._disk = _DiskSync()
        self._thread = threading.Thread(target=self._write_all, name="graftlab-recording", daemon=True)
        self._thread.start()

    def put(self, tap: PendingTap) -> None:
        """Queue a tap; wait while too many bytes are queued. After an error the tap is dropped."""
        with self._changed:
            # A tap larger than the bound is queued when the queue is empty.
            self._changed.wait_for(
                lambda: self.error is not None or not self._waiting or self._waiting + tap.nbytes <= _WAITING
            )
            if self.error is None:
                self._queue.append(tap)
                self._waiting += tap.nbytes
                self._changed.notify_all()

    def close(self, steps: int, left_out: list[str]) -> None:
        """Write the rest and the end of the index; after an error neither, so that the index shows where it ends.

        Returns when the data are on the disk, because some file systems report only then that they are full.
        """
        with self._changed:
            self._queue.append(None)
            self._changed.notify_all()
        self._thread.join()
        if self.error is None:
            try:
                self._flush()
                self._disk.wait(0)
                self._append(self._chain.sealed(IndexEnd(self._taps, steps, left_out)))
            except _FAILURES as error:
                self._fail(error)
        self._disk.close()
        self._index.close()

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._queue))
                tap = self._queue.popleft()
            if tap is None:
                return
            if self.error is None:
                try:
                    self._add(tap)
                except _FAILURES as error:
                    self._fail(error)
            with self._changed:
                self._waiting -= tap.nbytes
                self._changed.notify_all()

    def _fail(self, error: Exception) -> None:
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        with self._changed:
            self.error = f"{self._folder} cannot be written ({reason}); it has the first {self._taps} taps"
            self._changed.notify_all()
        logger.error("the recording ended: %s", self.error)

    def _add(self, tap: PendingTap) -> None:
        tensor = self._store(tap.tensor)
        extras = {name: self._store(extra) for name, extra in tap.extra_tensors.items()}
        self._lines.append(
            TapEntry(tap.step, tap.name, tap.tags, tensor, tap.extras, extras, tap.lost_extras, tap.layout)
        )
        if self._bytes >= _SHARD:
            self._flush()

    def _store(self, tensor: torch.Tensor) -> StoredTensor:
        data = as_bytes(tensor)
        digest = b"" if self._stored is None else tensor_digest(tensor)
        if self._stored is not None and digest in self._stored:
            return self._stored[digest]
        raw = tensor.dtype not in _COMMON
        key = str(len(self._shard))
        self._shard[key] = data if raw else tensor.contiguous()
        self._bytes += tensor.nbytes
        stored = StoredTensor(
            shard=f"{self._shards:06d}.safetensors",
            key=key,
            dtype=DTYPE_NAMES[tensor.dtype],
            shape=tuple(tensor.shape),
            crc32=crc32(data.numpy().data),
            raw=raw,
        )
        if self._stored is not None:
            self._stored[digest] = stored
        return stored

    def _flush(self) -> None:
        """Write the tensors, and then their index lines, so that every line's tensor exists."""
        if not self._lines:
            return
        path = self._folder / f"{self._shards:06d}.safetensors"
        if self._shard:
            try:
                # A new file, because the library would follow an existing link.
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
                safetensors.torch.save_file(self._shard, path)
            except safetensors.SafetensorError as error:
                raise OSError(str(error)) from error
            self._disk.add(path)
            self._disk.wait(_UNSYNCED)
        self._append(b"".join(map(self._chain.sealed, self._lines)))
        self._taps += len(self._lines)
        self._shards += 1
        self._bytes = 0
        self._shard, self._lines = {}, []

    def _append(self, data: bytes) -> None:
        while data:
            data = data[self._index.write(data) :]


def tensor_digest(tensor: torch.Tensor) -> bytes:
    """Return a hash of a tensor's bytes, dtype and shape."""
    found = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
    found.update(as_bytes(tensor).numpy().data)
    return found.digest()


class _DiskSync:
    """A thread that forces files to the disk.

    It starts at the beginning, because a recording may end with the interpreter, which by then cannot start threads and
    has ended those of executors.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._paths: deque[Path | None] = deque()
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._work, name="graftlab-recording-disk", daemon=True)
        self._thread.start()

    def add(self, path: Path) -> None:
        """Queue a file."""
        self._put(path)

    def wait(self, most: int) -> None:
        """Wait until at most ``most`` files are queued. Raises the first OSError of any file."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._paths) <= most or self._error is not None)
            if self._error is not None:
                raise self._error

    def close(self) -> None:
        self._put(None)
        self._thread.join()

    def _put(self, path: Path | None) -> None:
        with self._changed:
            self._paths.append(path)
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._paths))
                path = self._paths[0]
            if path is None:
                return
            error = None
            try:
                _sync(path)
            except OSError as problem:
                error = problem
            with self._changed:
                self._paths.popleft()
                self._error = self._error or error
                self._changed.notify_all()


def _sync(path: Path) -> None:
    with open(path, "rb") as file:
        try:
            os.fdatasync(file.fileno())
        except OSError as error:
            # Some file systems do not support it.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
