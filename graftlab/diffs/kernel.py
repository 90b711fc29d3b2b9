"""Find, check and call the compiled kernel (`c/`).

It is built with the package (`hatch_build.py`). If the build failed, if the library was made for a different kind of
processor, or if the sources have changed since, :func:`load` logs that once, and `fallback` measures tensors, slower.
``GRAFTLAB_KERNEL=fallback`` requests that, and ``GRAFTLAB_KERNEL=v3`` requests a lower level of instructions than the
processor's highest.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import platform
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, make_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from graftlab.diffs.sources import fingerprint, kernel_sources
from graftlab.diffs.statistics import DiffStats, index_in

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "c"
LIBRARY = SOURCES / "kernel.so"
CHOICE = "GRAFTLAB_KERNEL"
FALLBACK = "fallback"

# The instruction sets that each level adds for the loops, with their names in /proc/cpuinfo; the highest level first.
X86_LEVELS = {
    "v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "v3": {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma"},
    "v2": {"sse4_2", "ssse3", "popcnt"},
}

_C_TYPES = {
    torch.float32: "F32",
    torch.float64: "F64",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "E4M3FN",
    torch.float8_e5m2: "E5M2",
    torch.float8_e4m3fnuz: "E4M3FNUZ",
    torch.float8_e5m2fnuz: "E5M2FNUZ",
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
}

# From this number of elements on, a call takes at least 20 us, so it releases the GIL for other threads.
LETS_GO_FROM = 1 << 16
# Below this number of elements, waking other threads takes longer than it saves.
THREADS_FROM = 1 << 18


# Two addresses, the numbers of elements, of the type pair and of threads, and which tensor is copied over the other.
# Passed as one argument, which is fastest.
_REQUEST = struct.Struct("=QQqqqq")
# An address, the numbers of elements and of the type, the addresses of factors and of blocks' factors, a block's size.
_MOMENTS_REQUEST = struct.Struct("=QqqQQq")
# An address, the numbers of elements and of the type, the addresses of the result and of places, and their number.
_SORT_REQUEST = struct.Struct("=QqqQQq")
_MOMENTS = 11
"""The lowest and highest value, five sums of powers, and four sums with factors."""
_MOST_PLACES = 65
NEITHER, X_OVER_Y, Y_OVER_X = range(3)
"""The tensor that :meth:`Kernel.measure` copies over the other after measuring."""
# Values whose squares may exceed float64 need a second pass, for which both tensors must still exist.
_WIDE = frozenset({torch.float64, torch.int32, torch.int64, torch.uint32, torch.uint64})
_pack = _REQUEST.pack_into


class KernelError(Exception):
    """The library cannot be used; the message gives the reason."""


class _MomentsMemory(threading.local):
    """The request and the result of each thread that asks for moments."""

    def __init__(self) -> None:
        begin = _MOMENTS_REQUEST.size // 8
        self.buffer = np.zeros(begin + _MOMENTS)
        self.address = self.buffer.ctypes.data
        self.request = self.buffer.data.cast("B")
        self.found = self.buffer[begin:]


class _SortMemory(threading.local):
    """The request and the quantiles of each thread that sorts."""

    def __init__(self) -> None:
        begin = _SORT_REQUEST.size // 8
        self.buffer = np.zeros(begin + 2 * _MOST_PLACES)
        self.address = self.buffer.ctypes.data
        self.request = self.buffer.data.cast("B")
        self.found = self.buffer[begin:]


class _Memory(threading.local):
    """The result buffer of each thread that calls the library."""

    def __init__(self, size: int) -> None:
        self.buffer = ctypes.create_string_buffer(size)
        self.address = ctypes.addressof(self.buffer)


NAMES = tuple(field.name for field in fields(DiffStats))
# DiffStats under construction: filling a frozen dataclass takes ten times as long.
_Draft: Any = make_dataclass("_Draft", NAMES, slots=True)


@dataclass(frozen=True)
class Kernel:
    """The library at one instruction level. ``types`` maps each supported pair of dtypes to its number."""

    level: str
    types: dict[tuple[torch.dtype, torch.dtype], int]
    results: struct.Struct
    memory: _Memory
    call: Callable[[int], int]
    call_without_gil: Callable[[int], int]
    single_types: dict[torch.dtype, int]
    moments_memory: _MomentsMemory
    moments_call: Callable[[int], int]
    moments_call_without_gil: Callable[[int], int]
    sort_memory: _SortMemory
    sort_call: Callable[[int], int]
    sort_call_without_gil: Callable[[int], int]

    def measure(self, x: int, y: int, numel: int, types: int, shape: Sequence[int], copied: int = NEITHER) -> DiffStats:
        """Measure ``numel`` elements, at least one, at each of two addresses.

        ``copied`` also copies one over the other, each block while it is in the cache; only where :func:`may_copy`
        allows it.
        """
        memory = self.memory
        if numel < LETS_GO_FROM:
            _pack(memory.buffer, 0, x, y, numel, types, 1, copied)
            failed = self.call(memory.address)
        else:
            threads = torch.get_num_threads() if numel >= THREADS_FROM else 1
            _pack(memory.buffer, 0, x, y, numel, types, threads, copied)
            failed = self.call_without_gil(memory.address)
        if failed:
            raise RuntimeError(
                f"two tensors of {numel:,} elements were not measured: their largest difference was not found again. "
                "Another thread may have written to them meanwhile; otherwise this is a bug in graftlab"
            )
        stats = _Draft(*self.results.unpack_from(memory.buffer, _REQUEST.size))
        stats.max_abs_index = index_in(shape, stats.max_abs_index)
        stats.__class__ = DiffStats
        return stats  # type: ignore[no-any-return]

    def moments(
        self, x: int, numel: int, dtype: torch.dtype, factors: int, of_blocks: int, block: int
    ) -> npt.NDArray[np.float64]:
        """Sum ``numel`` elements, at least one, at an address, which must have no NaN for the extremes to be right.

        Returns the lowest and the highest value; the sums of the values, their magnitudes, squares, third powers and
        the roots of their magnitudes; and four sums with factors. ``factors`` is the address of ``[4, block]`` doubles,
        which the elements of each block share, ``of_blocks`` that of four for each block.
        """
        memory = self.moments_memory
        _MOMENTS_REQUEST.pack_into(memory.request, 0, x, numel, self.single_types[dtype], factors, of_blocks, block)
        (self.moments_call if numel < LETS_GO_FROM else self.moments_call_without_gil)(memory.address)
        return memory.found.copy()

    def sort(
        self,
        x: int,
        numel: int,
        dtype: torch.dtype,
        places: npt.NDArray[np.int64],
        result: npt.NDArray[Any] | None = None,
    ) -> npt.NDArray[np.float64]:
        """Sort ``numel`` elements, at least one, at an address.

        Returns the values at these ascending places of the sorted ones, then the magnitudes at these places of the
        sorted magnitudes, which are right only without NaN. ``result`` receives the sorted values, NaN last: in
        float64, or in float32 if that holds all values of the dtype.
        """
        memory, count = self.sort_memory, len(places)
        if count > _MOST_PLACES:
            raise ValueError(f"there are {count} places; at most {_MOST_PLACES} can be looked up")
        to = 0 if result is None else result.ctypes.data
        _SORT_REQUEST.pack_into(memory.request, 0, x, numel, self.single_types[dtype], to, places.ctypes.data, count)
        if (self.sort_call if numel < LETS_GO_FROM else self.sort_call_without_gil)(memory.address):
            raise MemoryError(f"there is no memory to sort {numel:,} elements")
        return memory.found[: 2 * count].copy()


def may_copy(dtype: torch.dtype) -> bool:
    """Whether :meth:`Kernel.measure` can copy tensors of this dtype."""
    return dtype in _C_TYPES and dtype not in _WIDE


@functools.cache
def load() -> Kernel | None:
    """Return the kernel at this processor's level; None, with one log message, if it cannot be used."""
    try:
        return open_library(LIBRARY, os.environ.get(CHOICE, ""))
    except KernelError as error:
        logger.warning(
            "tensors are measured by torch operations, several times slower than by graftlab's own kernel: %s",
            error,
        )
        return None


@functools.cache
def description() -> str:
    """Describe in one line how tensors on the CPU are measured: by which kernel, or why without one."""
    try:
        return f"compiled kernel, level {open_library(LIBRARY, os.environ.get(CHOICE, '')).level}"
    except KernelError as error:
        return f"torch operations (slower): {error}"


def open_library(path: Path, choice: str = "") -> Kernel:
    """Open the library, at the level that ``choice`` names or the processor's highest. Raises KernelError."""
    if choice == FALLBACK:
        raise KernelError(f"{CHOICE}={FALLBACK} requests it")
    rebuild = "reinstall graftlab, or run python hatch_build.py in its sources"
    if not path.exists():
        raise KernelError(f"the kernel was not built when graftlab was installed, for lack of a C compiler; {rebuild}")
    try:
        keeping, letting_go = ctypes.PyDLL(str(path)), ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelError(f"{path} cannot be loaded ({error}); {rebuild}") from None
    if f"made from {fingerprint(kernel_sources(SOURCES))} for" not in _text(keeping, "graftlab_made"):
        raise KernelError(f"{path} was not built from the sources in {SOURCES}; {rebuild}")
    level = choice or processor_level()
    try:
        calls = [
            library[f"graftlab_{what}_{level}"]
            for what in ("measure", "moments", "sort")
            for library in (keeping, letting_go)
        ]
    except AttributeError:
        known = "neon" if platform.machine() == "aarch64" else ", ".join(X86_LEVELS)
        raise KernelError(f"there is no level {level!r} in {path}; {CHOICE} can be {known} or {FALLBACK}") from None
    for call in calls:
        call.argtypes = (ctypes.c_void_p,)
    numbers = {name: number for number, name in enumerate(_text(keeping, "graftlab_types").split())}
    types = {
        (one, other): numbers[_C_TYPES[one]] * len(numbers) + numbers[_C_TYPES[other]]
        for one in _C_TYPES
        for other in _C_TYPES
    }
    codes, names = zip(*(line.split() for line in _text(keeping, "graftlab_results").splitlines()), strict=True)
    if names != NAMES:
        raise KernelError(f"{path} returns {', '.join(names)}, but DiffStats has {', '.join(NAMES)}")
    results = struct.Struct("=" + "".join(codes))
    return Kernel(
        level,
        types,
        results,
        _Memory(_REQUEST.size + results.size),
        calls[0],
        calls[1],
        {dtype: numbers[name] for dtype, name in _C_TYPES.items()},
        _MomentsMemory(),
        calls[2],
        calls[3],
        _SortMemory(),
        calls[4],
        calls[5],
    )


def processor_level(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the highest level that this processor and the operating system support. Raises KernelError."""
    machine = platform.machine()
    if machine in ("aarch64", "arm64"):
        return "neon"
    if machine not in ("x86_64", "AMD64"):
        raise KernelError(f"there is no kernel for {machine} processors")
    flags: set[str] = set()
    with contextlib.suppress(OSError), open(cpuinfo) as lines:  # no such file: not Linux
        flags = set(next((line for line in lines if line.startswith("flags")), "").split())
    highest = None
    for level, needed in reversed(X86_LEVELS.items()):
        if not needed <= flags:
            break
        highest = level
    if highest:
        return highest
    raise KernelError("this processor has no SSE 4.2")


def _text(library: ctypes.CDLL, function: str) -> str:
    call = library[function]
    call.restype = ctypes.c_char_p
    text: bytes = call()
    return text.decode()
