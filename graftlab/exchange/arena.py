"""A sender's shared memory: one anonymous segment that every receiver maps once.

The segment has no name, so the kernel frees it when the last process that maps it ends. It is as large as the machine's
memory, but only written pages take memory, and first fit reuses the low ones.
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

# Up to this size the copy keeps the GIL, because releasing it costs more than the copy.
_SMALL = 1 << 16
_copy_small, _copy_large = ctypes.PyDLL(None).memmove, ctypes.CDLL(None).memmove
for _copy in (_copy_small, _copy_large):
    _copy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    _copy.restype = None


def create_segment() -> tuple[int, int]:
    """Create an anonymous segment; return its file descriptor and its size in bytes. Raises OSError."""
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
    """A mapping of a segment: its owner's status page (:mod:`.status_page`) first, then tensors."""

    def __init__(self, descriptor: int, size: int, *, writable: bool) -> None:
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self.map = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED, prot=access)
        # Receivers map the segment read-only, and no code writes through such a mapping. catch_warnings would not do:
        # it may restore a filter that another thread has only set temporarily.
        warnings.filterwarnings("ignore", message=".*not writable", module=__name__)
        # Not of the map itself: torch would keep that object, but not its memory, which close() would unmap.
        self._bytes = torch.frombuffer(memoryview(self.map), dtype=torch.uint8)
        self._views: dict[torch.dtype, torch.Tensor] = {}
        self._address = self._bytes.data_ptr()

    def store(self, offset: int, nbytes: int, tensor: torch.Tensor) -> None:
        """Copy the tensor's elements to ``offset`` in row-major order, from the CPU or a GPU."""
        if tensor.is_cpu and type(tensor) is torch.Tensor and _is_plain_and_contiguous(tensor):
            # torch's own copy needs a view of the segment, and takes twice as long for a hundred KiB.
            copy = _copy_small if nbytes <= _SMALL else _copy_large
            copy(self._address + offset, tensor.data_ptr(), nbytes)
            return
        source = copyable(tensor)
        self.window(offset, nbytes, source.dtype, tuple(source.shape)).copy_(source)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return the bytes at ``offset``, without a copy."""
        return memoryview(self.map)[offset : offset + nbytes]

    def window(self, offset: int, nbytes: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the bytes at ``offset`` as a contiguous tensor, without a copy."""
        if nbytes == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        try:
            segment = self._views[dtype]
        except KeyError:
            # A tensor made in inference mode cannot be written outside it, and this view outlives the tap.
            with torch.inference_mode(False):
                segment = self._views[dtype] = self._bytes.view(dtype)
        # Offsets are multiples of ALIGNMENT, and so of any dtype's size. One call, because each torch call takes as
        # long as the copy of a small tensor.
        strides, numel = _contiguous(shape)
        if numel * dtype.itemsize != nbytes:
            raise ValueError(f"{nbytes} bytes do not make a {dtype} tensor of shape {list(shape)}")
        return torch.as_strided(segment, shape, strides, offset // dtype.itemsize)

    def close(self) -> None:
        """Release the mapping. It stays mapped while a tensor that :meth:`window` returned exists."""
        self._views.clear()
        del self._bytes
        with contextlib.suppress(BufferError):
            self.map.close()


def _is_plain_and_contiguous(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements are contiguous in memory, without a pending negation or conjugation."""
    return tensor.is_contiguous() and not (tensor.is_neg() or tensor.is_conj())


@functools.lru_cache(maxsize=4096)
def _contiguous(shape: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """The strides and the number of elements of a contiguous tensor of this shape, which has no extent of 0."""
    strides, numel = [], 1
    for extent in reversed(shape):
        strides.append(numel)
        numel *= extent
    return tuple(reversed(strides)), numel


class Allocator:
    """First fit over the data part of a segment, which begins at ``start``; merges adjacent holes on release.

    The first page of a segment in the host's memory is the status page.
    """

    def __init__(self, size: int, start: int = PAGE) -> None:
        self._holes = [(start, size - start)]
        self._taken: dict[int, int] = {}
        self.bytes_in_use = 0

    def take(self, nbytes: int) -> int | None:
        """Reserve ``nbytes`` and return their offset, or None when no hole is large enough."""
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
