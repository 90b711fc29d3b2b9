"""Peak memory of a receiver over many grafts, which must not grow with their number."""

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
        return [Line("memory", "memory of a receiver", note=f"skipped, {_STATUS} does not exist")]
    early, late = (20, 60) if setup.quick else (100, 1000)
    with worlds.session(setup, b2t="name == 'hidden'") as session:
        at_early, at_late, peak = session.run(_graft, _graft, args=(early, late)).target[0]
    return [
        Line(
            "memory",
            f"peak memory of a receiver, {late} grafts of 16 MiB",
            "B",
            Spread.of([peak]),
            note="includes the sender's memory that it has mapped, at most the sender's budget of 256 MiB",
        ),
        Line(
            "memory",
            f"growth of a receiver's private memory from the {early}th to the {late}th graft",
            "B",
            Spread.of([at_late - at_early]),
            # Less than one tensor: rows, logs and the allocator may grow.
            budgets=(Budget("figure", "at most", _SIZE / 2),),
            in_docs=True,
        ),
    ]


def _graft(early: int, late: int) -> tuple[int, int, int]:
    torch.set_num_threads(1)
    value = torch.randn(_SIZE // 4)
    own = 0
    for count in range(1, late + 1):
        gl.tap("hidden", value)
        if count == early:
            own = _bytes("RssAnon")
        if count % 10 == 0:
            gl.step()
    return own, _bytes("RssAnon"), _bytes("VmHWM")


def _bytes(what: str) -> int:
    """Read a figure of this process's memory: RssAnon is its anonymous memory, VmHWM its peak."""
    (line,) = (line for line in _STATUS.read_text().splitlines() if line.startswith(f"{what}:"))
    return int(line.split()[1]) << 10
