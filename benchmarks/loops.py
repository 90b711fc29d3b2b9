"""The loop of taps that every grafter is timed in: graftlab, the reference, and the published package."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_TAPS_A_STEP = 16
# A sender shows several tensors in turn, or all grafts but the first would find nothing that differs.
_VALUES = 3


@dataclass(frozen=True)
class Times:
    """Seconds that each tap took on one rank, and that the whole loop took a tap."""

    taps: list[float]
    wall: float


def graft_repeatedly(
    tap: Callable[..., Any],
    step: Callable[[], None],
    side: str,
    rank: int,
    size: int,
    dtype: str,
    repeats: int,
    device: str = "cpu",
) -> Times:
    """Tap tensors of ``size`` bytes on one rank, back to back, with a step now and then; the baseline sends.

    Half as many again come first and are not counted: buffers are paged in, and decisions made.
    """
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(2 * rank + (side == "target"))
    kind: torch.dtype = getattr(torch, dtype)
    count = _VALUES if side == "baseline" else 1
    values = [torch.randn(size // kind.itemsize, generator=generator).to(device, kind) for _ in range(count)]
    taken: list[float] = []
    whole = 0.0
    warm_up = (repeats + 1) // 2
    for index in range(warm_up + repeats):
        if index == warm_up:
            whole = time.perf_counter()
        began = time.perf_counter()
        tap("hidden", values[index % count], layer=3)
        finish_work_on(device)
        taken.append(time.perf_counter() - began)
        if index % _TAPS_A_STEP == _TAPS_A_STEP - 1:
            step()
    return Times(taken[warm_up:], (time.perf_counter() - whole) / repeats)


def finish_work_on(device: str | torch.device) -> None:
    """Wait for what a GPU still has to do; the CPU has done it."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
