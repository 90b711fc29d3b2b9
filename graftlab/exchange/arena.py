"""A sender's shared memory: one anonymous segment that every receiver maps once.

The segment has no name, so nothing can stay behind: the kernel frees it with the last process that holds it. It is
as large as the machine's memory but only written pages take memory, and first fit reuses the low ones.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import functools
import mmap
import os
import tempfile
import warnings

import torch

from graftlab.base.tensor_bytes import copyable

ALIGNMENT = 64
PAGE = 4096

# Up to here the GIL is kept: letting it go costs more than the copy.
_SMALL = 1 << 16
_copy_small, _copy_large = ctypes.PyDLL(None).memmove, ctypes.CDLL(None).memmove
for _copy in (_copy_small, _copy_large):
    _copy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    _copy.restype = None


def create_segment() -> tuple[int, int]:
    """A new anonymous segment: its file descriptor and its size in bytes. Raises OSError when there can be none."""
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("graftlab", os.MFD_CLOEXEC)
    else:
        descriptor, path = tempfile.mkstemp(prefix="graftlab-")
        os.unlink(path)
    try:
        os.ftruncate(descriptor, size)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor, size


class Arena:
    """A mapping of a segment. The first page tells where its owner is (:mod:`.status_page`); the rest holds tensors."""

    def __init__(self, descriptor: int, size: int, *, writable: bool) -> None:
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self.map = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED, prot=access)
        # Receivers map read-only on purpose, and nothing here ever writes through such a window. Not catch_warnings:
        # what it puts back may be what another thread has set for a while only.
        warnings.filterwarnings("ignore", message=".*not writable", module=__name__)
        self._bytes = torch.frombuffer(self.map, dtype=torch.uint8)
        self._views: dict[torch.dtype, torch.Tensor] = {}
        self._address = self._bytes.data_ptr()

    def store(self, offset: int, nbytes: int, tensor: torch.Tensor) -> None:
        """Copy the tensor's bytes to ``offset``, row by row; from a GPU too."""
        if tensor.is_cpu and type(tensor) is torch.Tensor and _is_plain_and_contiguous(tensor):
            # Torch's own copy needs a window, and takes twice as long for a hundred KiB.
            copy = _copy_small if nbytes <= _SMALL else _copy_large
            copy(self._address + offset, tensor.data_ptr(), nbytes)
            return
        source = copyable(tensor)
        self.window(offset, nbytes, source.dtype, tuple(source.shape)).copy_(source)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """The bytes at ``offset`` as they lie there."""
        return memoryview(self.map)[offset : offset + nbytes]

    def window(self, offset: int, nbytes: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """The bytes at ``offset`` seen as a contiguous tensor, without a copy."""
        if nbytes == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        try:
            segment = self._views[dtype]
        except KeyError:
            # A tensor made in inference mode could not be written outside of it, and this one outlives the tap.
            with torch.inference_mode(False):
                segment = self._views[dtype] = self._bytes.view(dtype)
        # Offsets are multiples of ALIGNMENT, so of any dtype's size too. One call: each one of torch's takes as long as
        # the copy of a small tensor.
        strides, numel = _contiguous(shape)
        if numel * dtype.itemsize != nbytes:
            raise ValueError(f"{nbytes} bytes are no {dtype} tensor of shape {list(shape)}")
        return torch.as_strided(segment, shape, strides, offset // dtype.itemsize)

    def close(self) -> None:
        """Let go of the memory. Windows that somebody still holds keep it for as long."""
        self._views.clear()
        del self._bytes
        with contextlib.suppress(BufferError):
            self.map.close()


def _is_plain_and_contiguous(tensor: torch.Tensor) -> bool:
    """Whether its numbers stand in memory one after the other, with no bit that says to read them otherwise."""
    return tensor.is_contiguous() and not (tensor.is_neg() or tensor.is_conj())


@functools.lru_cache(maxsize=4096)
def _contiguous(shape: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """The strides of a contiguous tensor of this shape, which has no extent of 0, and how many elements it has."""
    strides, numel = [], 1
    for extent in reversed(shape):
        strides.append(numel)
        numel *= extent
    return tuple(reversed(strides)), numel


class Allocator:
    """First fit over the data part of a segment; neighbouring holes are joined when memory is released.

    The data begin at ``start``; the first page of the host's segments is taken.
    """

    def __init__(self, size: int, start: int = PAGE) -> None:
        self._holes = [(start, size - start)]
        self._taken: dict[int, int] = {}
        self.bytes_in_use = 0

    def take(self, nbytes: int) -> int | None:
        """The offset of a free stretch, or None when no hole is large enough."""
        need = -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
        for index, (offset, size) in enumerate(self._holes):
            if size < need:
                continue
            if size == need:
                del self._holes[index]
            else:
                self._holes[index] = (offset + need, size - need)
            self._taken[offset] = need
            self.bytes_in_use += need
            return offset
        return None

    def release(self, offset: int) -> None:
        size = self._taken.pop(offset)
        self.bytes_in_use -= size
        index = bisect.bisect(self._holes, (offset, 0))
        if index < len(self._holes) and self._holes[index][0] == offset + size:
            size += self._holes.pop(index)[1]
        if index and sum(self._holes[index - 1]) == offset:
            offset, before = self._holes[index - 1]
            self._holes[index - 1] = (offset, before + size)
        else:
            self._holes.insert(index, (offset, size))
