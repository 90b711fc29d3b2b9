"""Tensors out of a safetensors file, read into memory of their own, with their checksums.

The library ``safetensors`` maps a file into memory instead. Where another process truncates a mapped file, the next
look at it ends the process, long after the file was read; and a map costs a page fault for each few pages.
"""

from __future__ import annotations

import io
import math
import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import torch
from isal.isal_zlib import crc32, crc32_combine

from graftlab.base.tensor_bytes import dtype_named

# As in the library: a longer header is refused.
_LONGEST_HEADER = 100_000_000
# Read at once: it stays in the processor's cache until its checksum is computed.
_PIECE = 1 << 18
# Bytes that are worth a thread, and how many threads are enough to be bound by memory.
_PART = 4 << 20
_MOST_THREADS = 8
# A replay has the tensor before the one that it reads.
_MOST_UNUSED = 2
# A block is used again for no less than this share of it.
_LEAST_SHARE = 0.5
# What the format calls the dtypes of torch.
_DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip


class TensorPlace(msgspec.Struct, frozen=True):
    """A tensor in a safetensors file: its dtype as the format names it, its shape, and its first and last byte + 1."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]

    def torch_dtype(self) -> torch.dtype:
        """The dtype in torch. Raises ValueError if this torch has none for it."""
        return dtype_named(_DTYPES.get(self.dtype, self.dtype))


_header = msgspec.json.Decoder(dict[str, msgspec.Raw])
_place = msgspec.json.Decoder(TensorPlace)


def tensor_places(file: io.FileIO) -> dict[str, TensorPlace]:
    """The tensors of a file by their keys; their offsets count from the start of the file.

    Raises ValueError or OSError for a file that is not one of safetensors, or is cut short.
    """
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(_read(file, 0, min(size, 8)), "little")
    start = 8 + length
    if size < 8 or length > _LONGEST_HEADER or start > size:
        raise ValueError(f"it has {size:,} bytes, fewer than its first 8 state, so it is cut short or not safetensors")
    found = {}
    for key, text in _header.decode(_read(file, 8, length)).items():
        if key == "__metadata__":
            continue
        place = _place.decode(text)
        first, stop = (start + offset for offset in place.data_offsets)
        if not start <= first <= stop <= size:
            raise ValueError(f"its bytes {first:,} to {stop:,} are tensor {key!r:.80}, and it has {size:,}")
        found[key] = TensorPlace(place.dtype, place.shape, (first, stop))
    return found


class ReusedMemory:
    """Memory for large tensors, which is used again when no tensor is in it any more.

    Reading a file into new memory takes four times as long, because the system has to clear each page of it first.
    """

    def __init__(self) -> None:
        # By identity, and changed by single calls alone: a tensor may end on any thread, also within another call here.
        self._unused: dict[int, np.ndarray[Any, Any]] = {}

    def take(self, size: int) -> torch.Tensor:
        """A tensor of this many bytes, whose memory returns here with its last view."""
        if size < _PART:
            return torch.empty(size, dtype=torch.uint8, device="cpu")
        fitting = [each for each in list(self._unused.values()) if size <= len(each) <= size / _LEAST_SHARE]
        found = min(fitting, key=len, default=None)
        block = None if found is None else self._unused.pop(id(found), None)
        if block is None:
            block = np.empty(size, np.uint8)
        # The tensor's storage refers to this array, and nothing else does.
        used = block[:size]
        weakref.finalize(used, self._take_back, block).atexit = False
        return torch.from_numpy(used)

    def _take_back(self, block: np.ndarray[Any, Any]) -> None:
        self._unused[id(block)] = block
        for each in sorted(self._unused.values(), key=len)[:-_MOST_UNUSED]:
            self._unused.pop(id(each), None)


def read_tensor(
    file: io.FileIO,
    place: TensorPlace,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    reused: ReusedMemory | None = None,
) -> tuple[torch.Tensor, int]:
    """A tensor on the CPU from its bytes in a file, and their checksum (CRC-32). Its memory may be ``reused``.

    Raises ValueError or OSError if the file is now shorter, or has another number of bytes for it.
    """
    start, stop = place.data_offsets
    if stop - start != math.prod(shape) * dtype.itemsize or min(shape, default=0) < 0:
        raise ValueError(f"it has {stop - start:,} bytes for {dtype} of the shape {list(shape)}")
    flat = (reused or ReusedMemory()).take(stop - start)
    memory = flat.numpy().data
    threads = min(len(os.sched_getaffinity(0)), _MOST_THREADS, len(memory) // _PART)
    if threads < 2:
        check = _read_into(file, memory, start)
    else:
        # Whole pieces, the last of them shorter.
        part = -(-len(memory) // threads // _PIECE) * _PIECE
        firsts = range(0, len(memory), part)
        # Made anew, because threads do not survive a fork of their process.
        with ThreadPoolExecutor(len(firsts), "graftlab-recording-reader") as pool:
            parts = [memory[first : first + part] for first in firsts]
            checks = list(pool.map(_read_into, [file] * len(parts), parts, [start + first for first in firsts]))
        check = checks[0]
        for further, each in zip(checks[1:], parts[1:], strict=True):
            check = crc32_combine(check, further, len(each))
    # Memory without elements has no alignment that a view could rely on.
    return (flat.view(dtype) if len(flat) else flat.new_empty(0, dtype=dtype)).view(shape), check


def _read_into(file: io.FileIO, memory: memoryview, start: int) -> int:
    """Fill memory with the bytes from ``start`` on; returns their checksum."""
    check = at = 0
    while at < len(memory):
        count = os.preadv(file.fileno(), [memory[at : at + _PIECE]], start + at)
        if not count:
            raise ValueError(f"it was cut short to {start + at:,} bytes while it was read")
        check = crc32(memory[at : at + count], check)
        at += count
    return check


def _read(file: io.FileIO, start: int, count: int) -> bytearray:
    data = bytearray(count)
    _read_into(file, memoryview(data), start)
    return data
