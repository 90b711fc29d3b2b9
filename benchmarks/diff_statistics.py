"""Diff statistics alone, of tensors in this process, on one thread."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks import reference
from benchmarks.lines import Budget, Line, Setup, Spread, quantity
from benchmarks.machine import one_thread, seconds
from graftlab.diffs import measure as diffs

# Bytes of a tensor, and the number of measurements by graftlab and by the reference.
_SIZES = ((4 << 10, 2000, 500), (4 << 20, 100, 15), (64 << 20, 20, 5))
# The budgets: seconds of one measurement of 4 KiB; for 64 MiB the ratio to the reference; from 4 MiB on the share
# of the machine's limit, which is the time for reading both tensors once.
_SMALL, _SECONDS = 4 << 10, 4e-6
# The number of measurements of 4 KiB that are timed together.
_TOGETHER = 20
_LARGE, _RATIO = 64 << 20, 90.0
_SHARES = {torch.float32: 0.8, torch.bfloat16: 0.6, torch.float16: 0.6, torch.int8: 0.6}
# The standard deviation of integers.
_SPREAD = 30.0


def measure(setup: Setup) -> list[Line]:
    lines = []
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int8):
        for size, repeats, of_reference in _SIZES:
            exact = torch.randn(size // dtype.itemsize, generator=generator)
            noise = torch.randn(exact.shape, generator=generator)
            if not dtype.is_floating_point:
                exact.mul_(_SPREAD).clamp_(-100, 100)
                noise.mul_(1e3)
            x, y = exact.to(dtype), (exact + 1e-3 * noise).to(dtype)
            del exact, noise
            with one_thread():
                together = _TOGETHER if size == _SMALL else 1
                ours = seconds(partial(diffs.measure, x, y), setup.repeats(repeats), together=together)
                theirs = seconds(
                    partial(reference.diff_statistics, x, y), setup.repeats(of_reference), together=together
                )
            lines.append(
                Line(
                    "diff_statistics",
                    f"diff statistics {quantity(size, 'B')} {str(dtype).removeprefix('torch.')}",
                    "s",
                    Spread.of(ours),
                    Spread.of(theirs),
                    # Both tensors are read once.
                    limit=2 * size / setup.read_bandwidth if size >= 4 << 20 else None,
                    budgets=_budgets(dtype, size),
                    in_docs=size in (_SMALL, _LARGE),
                )
            )
    return lines


def _budgets(dtype: torch.dtype, size: int) -> tuple[Budget, ...]:
    if size == _SMALL:
        return (Budget("figure", "at most", _SECONDS),) if dtype == torch.float32 else ()
    share = Budget("share", "at least", _SHARES[dtype])
    return (Budget("ratio", "at least", _RATIO), share) if size == _LARGE else (share,)
