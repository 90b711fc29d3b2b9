"""From ``gl.launch`` to ranks that are ready: the first launch of a fresh interpreter, and later ones.

``python -m benchmarks.launch BASELINE TARGET FOLDER`` is that fresh interpreter; it prints the seconds.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import graftlab as gl
from benchmarks.lines import Budget, Line, Setup, Spread

_ROOT = Path(__file__).resolve().parent.parent
_JUDGED = (4, "warm")


def measure(setup: Setup) -> list[Line]:
    lines = []
    for ranks in (1, 2):
        warm = [_launch(ranks, ranks, tempfile.mkdtemp(dir=setup.folder)) for _ in range(setup.repeats(10) + 1)][1:]
        cold = [_launch_in_fresh_interpreter(setup, ranks) for _ in range(setup.repeats(3, quick=1))]
        for kind, taken in (("cold", cold), ("warm", warm)):
            judged = (2 * ranks, kind) == _JUDGED
            lines.append(
                Line(
                    "launch",
                    f"launch to ready, {2 * ranks} ranks, {kind}",
                    "s",
                    Spread.of(taken),
                    budgets=(Budget("figure", "at most", 0.5),) if judged else (),
                    in_readme=judged,
                )
            )
    return lines


def _launch(baseline: int, target: int, folder: str) -> float:
    began = time.perf_counter()
    with gl.launch(baseline, target, device="cpu", folder=folder):
        return time.perf_counter() - began


def _launch_in_fresh_interpreter(setup: Setup, ranks: int) -> float:
    folder = tempfile.mkdtemp(dir=setup.folder)
    command = [sys.executable, "-m", "benchmarks.launch", str(ranks), str(ranks), folder]
    done = subprocess.run(command, cwd=_ROOT, check=True, capture_output=True, text=True)
    return float(done.stdout)


if __name__ == "__main__":
    sys.stdout.write(f"{_launch(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])}\n")
