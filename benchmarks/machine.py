"""The machine of the figures: its description, and the rates at which one core reads and copies memory."""

from __future__ import annotations

import datetime
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.lines import Spread

_BYTES = 256 << 20


def facts() -> dict[str, Any]:
    """Describe the machine, its software, and its load."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": _cpu_model(),
        "cores": usable,
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "load_average_before": load,
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


@contextmanager
def one_thread() -> Iterator[None]:
    """Make torch compute with one thread, as each rank does."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def seconds(function: Callable[[], object], repeats: int, warm_up: int = 1, together: int = 1) -> list[float]:
    """Measure the seconds of ``repeats`` calls, after ``warm_up`` calls.

    For calls that take microseconds, ``together`` calls are timed at once, because reading the clock takes time too.
    """
    for _ in range(warm_up):
        function()
    taken = []
    for _ in range(max(1, repeats // together)):
        began = time.perf_counter()
        for _ in range(together):
            function()
        taken.append((time.perf_counter() - began) / together)
    return taken


def bandwidths(repeats: int) -> tuple[Spread, Spread]:
    """Bytes a second that one core reads (``torch.dot`` of two large vectors) and copies (``copy_`` of one)."""
    one, other = (torch.full((_BYTES // 4,), value) for value in (1.0, 2.0))
    with one_thread():
        read = Spread.of(2 * _BYTES / taken for taken in seconds(lambda: torch.dot(one, other), repeats))
        copied = Spread.of(_BYTES / taken for taken in seconds(lambda: one.copy_(other), repeats))
    return read, copied
