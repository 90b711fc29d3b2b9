"""Diff statistics alone, of tensors that lie in this process, on one thread."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks import reference
from benchmarks.lines import Budget, Line, Setup, Spread, quantity
from benchmarks.machine import one_thread, seconds
from graftlab.diffs import measure as diffs

# Bytes, and how often we and the reference measure tensors of that size.
_SIZES = ((4 << 10, 2000, 500), (4 << 20, 100, 15), (64 << 20, 20, 5))
_JUDGED = 64 << 20


def measure(setup: Setup) -> list[Line]:
    lines = []
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        for size, repeats, of_reference in _SIZES:
            exact = torch.randn(size // dtype.itemsize, generator=generator)
            noise = torch.randn(exact.shape, generator=generator)
            x, y = exact.to(dtype), (exact + 1e-3 * noise).to(dtype)
            del exact, noise
            with one_thread():
                ours = seconds(partial(diffs.measure, x, y), setup.repeats(repeats))
                theirs = seconds(partial(reference.diff_statistics, x, y), setup.repeats(of_reference))
            judged = size == _JUDGED
            lines.append(
                Line(
                    "diff_statistics",
                    f"diff statistics {quantity(size, 'B')} {str(dtype).removeprefix('torch.')}",
                    "s",
                    Spread.of(ours),
                    Spread.of(theirs),
                    # Both tensors have to be read once.
                    limit=2 * size / setup.read_bandwidth if size >= 4 << 20 else None,
                    budgets=(Budget("ratio", "at least", 25), Budget("share", "at least", 1 / 5)) if judged else (),
                    in_readme=judged,
                )
            )
    return lines
