"""Limits on what reading a hostile file may cost: memory and processor time, enforced while a test reads it."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MIB = 1 << 20
# Allocators reserve far more addresses than they use. Beyond these, an allocation fails, before the machine is full.
_ADDRESSES = 4096 * MIB


@contextmanager
def limited(mib: int = 256, seconds: float = 10.0) -> Iterator[None]:
    """Fail where the body makes this process grow by more than ``mib``, or takes more processor time."""
    usual = resource.getrlimit(resource.RLIMIT_AS)
    # Linux then counts the peak from here.
    Path("/proc/self/clear_refs").write_text("5")
    before, began = _kib("VmHWM"), time.process_time()
    resource.setrlimit(resource.RLIMIT_AS, (_kib("VmSize") * 1024 + _ADDRESSES, usual[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, usual)
    spent, grown = time.process_time() - began, (_kib("VmHWM") - before) / 1024
    assert grown <= mib, f"reading it took {grown:,.0f} MiB, of {mib} that it may"
    assert spent <= seconds, f"reading it took {spent:.1f} s of processor time, of {seconds:g} that it may"


def _kib(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
