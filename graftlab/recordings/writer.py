"""The thread that writes a recording, and the bounded queue before it."""

from __future__ import annotations

import errno
import logging
import os
import threading
import zlib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import safetensors.torch
import torch

from graftlab.base.tensor_bytes import DTYPE_NAMES, as_bytes
from graftlab.recordings.layout import INDEX_FILE, RANK_FILE, Chain, End, Entry, RankHeader, StoredLayout, StoredTensor

logger = logging.getLogger(__name__)

# What waits to be written, in bytes; past that a tap waits for the disk.
_WAITING = 256 << 20
# A file is written when it is so large, and at the end.
_SHARD = 64 << 20
# So many files may be on their way from the system's cache to the disk: the disk is never idle, and never far behind.
_ON_THEIR_WAY = 2
# Those that every reader of the format knows.
_COMMON = frozenset(
    {
        torch.float64, torch.float32, torch.float16, torch.bfloat16,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    }
)  # fmt: skip


@dataclass(frozen=True)
class Taken:
    """What one tap showed, on the CPU and nobody else's."""

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


class Writer:
    """Writes one rank's taps. Any thread may :meth:`put`; ``error`` says in words why it ended early."""

    def __init__(self, folder: Path, header: RankHeader) -> None:
        """Raises OSError where the folder cannot be made, and FileExistsError for one that has a recording."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        first = msgspec.json.encode(header)
        with open(folder / RANK_FILE, "xb") as file:
            file.write(first)
        self._chain = Chain(first)
        self._index = open(folder / INDEX_FILE, "xb", buffering=0)  # noqa: SIM115
        self.error: str | None = None
        self._queue: deque[Taken | None] = deque()
        self._waiting = 0
        self._changed = threading.Condition()
        self._shard: dict[str, torch.Tensor] = {}
        self._lines: list[Entry] = []
        self._bytes = self._shards = self._taps = 0
        self._disk = _Disk()
        self._thread = threading.Thread(target=self._write_all, name="graftlab-recording", daemon=True)
        self._thread.start()

    def put(self, taken: Taken) -> None:
        """Have this written; waits while too much is waiting. After an error it is dropped."""
        with self._changed:
            # One that is larger than all that may wait goes alone.
            self._changed.wait_for(
                lambda: self.error is not None or not self._waiting or self._waiting + taken.nbytes <= _WAITING
            )
            if self.error is None:
                self._queue.append(taken)
                self._waiting += taken.nbytes
                self._changed.notify_all()

    def close(self, steps: int, left_out: list[str]) -> None:
        """Write what is left, and that it is all. Not after an error: then the index says where it broke off.

        Returns when the disk has it: some file systems say only then that they are full.
        """
        with self._changed:
            self._queue.append(None)
            self._changed.notify_all()
        self._thread.join()
        if self.error is None:
            try:
                self._flush()
                self._disk.wait(0)
                self._append(self._chain.sealed(End(self._taps, steps, left_out)))
            except OSError as error:
                self._fail(error)
        self._disk.close()
        self._index.close()

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._queue))
                taken = self._queue.popleft()
            if taken is None:
                return
            if self.error is None:
                try:
                    self._add(taken)
                except (OSError, RuntimeError, ValueError, TypeError) as error:
                    self._fail(error)
            with self._changed:
                self._waiting -= taken.nbytes
                self._changed.notify_all()

    def _fail(self, error: Exception) -> None:
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        with self._changed:
            self.error = f"{self._folder} cannot be written ({reason}); what came before is there, {self._taps} taps"
            self._changed.notify_all()
        logger.error("the recording ended: %s", self.error)

    def _add(self, taken: Taken) -> None:
        tensor = self._store(taken.tensor)
        extras = {name: self._store(extra) for name, extra in taken.extra_tensors.items()}
        self._lines.append(
            Entry(taken.step, taken.name, taken.tags, tensor, taken.extras, extras, taken.lost_extras, taken.layout)
        )
        if self._bytes >= _SHARD:
            self._flush()

    def _store(self, tensor: torch.Tensor) -> StoredTensor:
        data = as_bytes(tensor)
        raw = tensor.dtype not in _COMMON
        key = str(len(self._shard))
        self._shard[key] = data if raw else tensor.contiguous()
        self._bytes += tensor.nbytes
        return StoredTensor(
            shard=f"{self._shards:06d}.safetensors",
            key=key,
            dtype=DTYPE_NAMES[tensor.dtype],
            shape=tuple(tensor.shape),
            crc32=zlib.crc32(data.numpy().data),
            raw=raw,
        )

    def _flush(self) -> None:
        """The tensors first: a line of the index stands for what is there."""
        if not self._lines:
            return
        path = self._folder / f"{self._shards:06d}.safetensors"
        try:
            safetensors.torch.save_file(self._shard, path)
        except safetensors.SafetensorError as error:
            raise OSError(str(error)) from error
        self._disk.take(path)
        self._disk.wait(_ON_THEIR_WAY)
        self._append(b"".join(map(self._chain.sealed, self._lines)))
        self._taps += len(self._lines)
        self._shards += 1
        self._bytes = 0
        self._shard, self._lines = {}, []

    def _append(self, data: bytes) -> None:
        while data:
            data = data[self._index.write(data) :]


class _Disk:
    """Brings files from the system's cache to the disk. With a thread of its own that is there from the beginning on:
    a recording may end when the interpreter does, which starts none any more and ends those of executors first.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._paths: deque[Path | None] = deque()
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._work, name="graftlab-recording-disk", daemon=True)
        self._thread.start()

    def take(self, path: Path) -> None:
        """Have this file there, some time."""
        self._put(path)

    def wait(self, most: int) -> None:
        """Wait until no more than so many files are on their way. Raises what the disk has said of any."""
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
            # Some file systems have nothing to wait for.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
