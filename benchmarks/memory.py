"""Peak memory of a receiver while many grafts pass: it must not grow with their number."""

from __future__ import annotations

from pathlib import Path

import torch

import graftlab as gl
from benchmarks import worlds
from benchmarks.lines import Budget, Line, Setup, Spread

_SIZE = 16 << 20
_STATUS = Path("/proc/self/status")


def measure(setup: Setup) -> list[Line]:
    if not _STATUS.exists():
        return [Line("memory", "memory of a receiver", note=f"skipped, there is no {_STATUS} here")]
    early, late = (20, 60) if setup.quick else (100, 1000)
    with worlds.session(setup, b2t="name == 'hidden'") as session:
        at_early, at_late = session.run(_graft, _graft, args=(early, late)).target[0]
    return [
        Line("memory", f"peak memory of a receiver, {late} grafts of 16 MiB", "B", Spread.of([at_late])),
        Line(
            "memory",
            f"its growth from the {early}th to the {late}th graft",
            "B",
            Spread.of([at_late - at_early]),
            # Less than one more tensor: what is left over is rows, logs and the allocator's own.
            budgets=(Budget("figure", "at most", _SIZE / 2),),
            in_docs=True,
        ),
    ]


def _graft(early: int, late: int) -> tuple[int, int]:
    torch.set_num_threads(1)
    value = torch.randn(_SIZE // 4)
    peak = 0
    for count in range(1, late + 1):
        gl.tap("hidden", value)
        if count == early:
            peak = _peak_bytes()
        if count % 10 == 0:
            gl.step()
    return peak, _peak_bytes()


def _peak_bytes() -> int:
    """The most memory that was ever resident in this process, what it shares with others included."""
    (line,) = (line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) << 10
