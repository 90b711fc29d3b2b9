"""The loop of taps in which every grafter is timed: graftlab, the reference, and the published package."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_TAPS_A_STEP = 16
# A sender taps several tensors in turn; otherwise all grafts but the first would find equal tensors.
_VALUES = 3


@dataclass(frozen=True)
class Times:
    """Seconds of each tap on one rank, and of the whole loop divided by its taps."""

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
    """Tap tensors of ``size`` bytes on one rank in a loop, with a step every 16 taps; the baseline sends.

    Before that, half as many taps warm up the buffers and the decisions.
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
    """Wait until a GPU has finished its work; does nothing for the CPU."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
