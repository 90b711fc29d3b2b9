"""Stores tensors in a temporary file instead of memory: the record of a whole run, read one tensor at a time."""

from __future__ import annotations

import os
import tempfile
import weakref
from dataclasses import dataclass

import torch

from graftlab.base.tensor_bytes import buffer_of, from_bytes


class SpillFile:
    """A temporary file, which has no name and disappears with the last of its tensors, however the process ends."""

    def __init__(self) -> None:
        self.descriptor, path = tempfile.mkstemp(prefix="graftlab-")
        os.unlink(path)
        weakref.finalize(self, os.close, self.descriptor)
        self._end = 0

    def store(self, tensor: torch.Tensor) -> SpilledTensor:
        """Write a strided tensor of any device. Raises OSError if the disk is full."""
        plain = tensor.detach().resolve_conj().resolve_neg()
        # A clone of a dense tensor keeps its arrangement. With a different one a kernel may round differently.
        strides = torch.empty_like(plain, device="meta").stride()
        order = tuple(sorted(range(plain.dim()), key=lambda dim: -strides[dim]))
        arranged = plain.permute(order)
        left, begin = buffer_of(arranged).data, self._end
        while left:
            written = os.pwrite(self.descriptor, left, self._end)
            self._end += written
            left = left[written:]
        return SpilledTensor(self, begin, self._end - begin, plain.dtype, tuple(arranged.shape), order, plain.device)


@dataclass(frozen=True)
class SpilledTensor:
    """One tensor of a :class:`SpillFile`: ``shape`` has its dimensions in the order of their strides, ``order``."""

    file: SpillFile
    begin: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    order: tuple[int, ...]
    device: torch.device

    def read(self) -> torch.Tensor:
        """Return the tensor in new memory, on its device. Raises OSError if the file cannot be read."""
        data = bytearray(self.nbytes)
        left, place = memoryview(data), self.begin
        while left:
            read = os.preadv(self.file.descriptor, [left], place)
            if not read:
                raise OSError("a temporary file with the record of a run is shorter than what was written to it")
            place += read
            left = left[read:]
        arranged = from_bytes(data, self.dtype, self.shape).to(self.device)
        return arranged.permute([self.order.index(dim) for dim in range(len(self.order))])
