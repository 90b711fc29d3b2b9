"""The compiled kernel (`c/`): finding, checking and calling it.

It is built with the package (`hatch_build.py`). Where that failed, where the processor is of another kind than the
library was made for, or where the sources have changed since, :func:`load` says so once in the log, and tensors are
measured by `fallback`, slower. ``GRAFTLAB_KERNEL=fallback`` asks for that, and ``GRAFTLAB_KERNEL=v3`` for another level
of the processor's instructions than the highest that it has.
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

import torch

from graftlab.diffs.sources import fingerprint, kernel_sources
from graftlab.diffs.statistics import DiffStats, index_in

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "c"
LIBRARY = SOURCES / "kernel.so"
CHOICE = "GRAFTLAB_KERNEL"
FALLBACK = "fallback"

# What each level adds for the loops to use, under the names of /proc/cpuinfo; the highest first.
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

# While a call that lets the GIL go takes 20 us and more, another Python thread may as well run.
LETS_GO_FROM = 1 << 16
# Below so many elements other threads are not worth waking.
THREADS_FROM = 1 << 18


# Two addresses, the number of elements, of the types, and of threads, and which is copied over the other. In one
# argument, which costs least.
_REQUEST = struct.Struct("=QQqqqq")
NEITHER, X_OVER_Y, Y_OVER_X = range(3)
"""What :meth:`Kernel.measure` copies over what, when it has been measured."""
# Values whose squares may leave float64 are measured a second time, for which both tensors have to be there still.
_WIDE = frozenset({torch.float64, torch.int32, torch.int64, torch.uint32, torch.uint64})
_pack = _REQUEST.pack_into


class KernelError(Exception):
    """The library cannot be used; the message says why."""


class _Memory(threading.local):
    """Where the library writes its results, for each thread that calls it."""

    def __init__(self, size: int) -> None:
        self.buffer = ctypes.create_string_buffer(size)
        self.address = ctypes.addressof(self.buffer)


NAMES = tuple(field.name for field in fields(DiffStats))
# DiffStats while it is being made: a frozen dataclass takes ten times as long to fill.
_Draft: Any = make_dataclass("_Draft", NAMES, slots=True)


@dataclass(frozen=True)
class Kernel:
    """The library, at one level. ``types`` has the number of each pair of dtypes that it takes."""

    level: str
    types: dict[tuple[torch.dtype, torch.dtype], int]
    results: struct.Struct
    memory: _Memory
    call: Callable[[int], int]
    call_without_gil: Callable[[int], int]
    read_lines: Callable[[int], int]
    """Reads lines of rows, without the GIL: see `rows/parsing.py`."""
    sum_lines: Callable[[bytes, int, int, int], int]
    """The checksums of lines, without the GIL: see `rows/checksums.py`."""

    def measure(self, x: int, y: int, numel: int, types: int, shape: Sequence[int], copied: int = NEITHER) -> DiffStats:
        """Measure ``numel`` elements, at least one, at each of two addresses.

        ``copied``: then one of them is given the other one's, each block while it is in the cache. Only where
        :func:`may_copy`.
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
            raise RuntimeError("the kernel did not find the largest difference again; this is a fault of graftlab's")
        stats = _Draft(*self.results.unpack_from(memory.buffer, _REQUEST.size))
        stats.max_abs_index = index_in(shape, stats.max_abs_index)
        stats.__class__ = DiffStats
        return stats  # type: ignore[no-any-return]


def may_copy(dtype: torch.dtype) -> bool:
    """Whether :meth:`Kernel.measure` can copy one tensor of this dtype over the other."""
    return dtype in _C_TYPES and dtype not in _WIDE


@functools.cache
def load() -> Kernel | None:
    """The kernel, at the level that this processor has; None where there is none, which the log says once."""
    try:
        return open_library(LIBRARY, os.environ.get(CHOICE, ""))
    except KernelError as error:
        logger.warning(
            "tensors are measured by torch operations, and rows read by Python, several times slower than by "
            "graftlab's own kernel: %s",
            error,
        )
        return None


@functools.cache
def description() -> str:
    """How tensors on the CPU are measured here, in one line: by which kernel, or why by none."""
    try:
        return f"compiled kernel, level {open_library(LIBRARY, os.environ.get(CHOICE, '')).level}"
    except KernelError as error:
        return f"torch operations (slower): {error}"


def open_library(path: Path, choice: str = "") -> Kernel:
    """Open the library, at the level that ``choice`` names or the processor's highest. Raises KernelError."""
    if choice == FALLBACK:
        raise KernelError(f"{CHOICE}={FALLBACK} asks for it")
    rebuild = "reinstall graftlab, or run python hatch_build.py in its sources"
    if not path.exists():
        raise KernelError(f"the kernel was not built when graftlab was installed, for want of a C compiler; {rebuild}")
    try:
        keeping, letting_go = ctypes.PyDLL(str(path)), ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelError(f"{path} cannot be loaded ({error}); {rebuild}") from None
    if f"made from {fingerprint(kernel_sources(SOURCES))} for" not in _text(keeping, "graftlab_made"):
        raise KernelError(f"{path} was made from other sources than those in {SOURCES}; {rebuild}")
    level = choice or processor_level()
    try:
        calls = [library[f"graftlab_measure_{level}"] for library in (keeping, letting_go)]
    except AttributeError:
        known = "neon" if platform.machine() == "aarch64" else ", ".join(X86_LEVELS)
        raise KernelError(f"there is no level {level!r} in {path}; {CHOICE} can be {known} or {FALLBACK}") from None
    read_lines = letting_go["graftlab_read_lines"]
    for call in (*calls, read_lines):
        call.argtypes = (ctypes.c_void_p,)
    sum_lines = letting_go["graftlab_sum_lines"]
    sum_lines.argtypes = (ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
    sum_lines.restype = ctypes.c_int64
    numbers = {name: number for number, name in enumerate(_text(keeping, "graftlab_types").split())}
    types = {
        (one, other): numbers[_C_TYPES[one]] * len(numbers) + numbers[_C_TYPES[other]]
        for one in _C_TYPES
        for other in _C_TYPES
    }
    codes, names = zip(*(line.split() for line in _text(keeping, "graftlab_results").splitlines()), strict=True)
    if names != NAMES:
        raise KernelError(f"{path} gives {', '.join(names)}, where DiffStats has {', '.join(NAMES)}")
    results = struct.Struct("=" + "".join(codes))
    return Kernel(
        level, types, results, _Memory(_REQUEST.size + results.size), calls[0], calls[1], read_lines, sum_lines
    )


def processor_level(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The highest level that this processor has, and the operating system allows. Raises KernelError."""
    machine = platform.machine()
    if machine in ("aarch64", "arm64"):
        return "neon"
    if machine not in ("x86_64", "AMD64"):
        raise KernelError(f"there is none for {machine} processors")
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
