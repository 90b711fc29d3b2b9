"""The time of ``gl.launch``, first (cold) and later (warm) in an interpreter, and of imports.

``python -m benchmarks.launch BASELINE TARGET FOLDER`` makes one cold launch, and prints its seconds.
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
# The budget of a cold launch in seconds, beyond one import of torch, for which it has to wait.
_BEYOND_TORCH = 0.5
# The budget of importing graftlab in seconds, beyond importing torch.
_IMPORT = 0.05
_TORCH = "import torch"
_GRAFTLAB = "import torch\nbegan = time.perf_counter()\nimport graftlab"
_EXTENSION = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
began = time.perf_counter()
shell.run_line_magic("load_ext", "graftlab")
"""


def measure(setup: Setup) -> list[Line]:
    repeats = setup.repeats(5, quick=1)
    torch_alone = Spread.of(_in_fresh_interpreter(_TORCH) for _ in range(repeats))
    beyond = Spread.of(_in_fresh_interpreter(_GRAFTLAB) for _ in range(repeats))
    extension = Spread.of(_in_fresh_interpreter(_EXTENSION) for _ in range(repeats))
    budget = Budget("figure", "at most", _IMPORT)
    lines = [
        Line("launch", "import torch", "s", torch_alone),
        Line("launch", "import graftlab, beyond torch's own", "s", beyond, budgets=(budget,), in_docs=True),
        Line("launch", "%load_ext graftlab, torch and IPython included", "s", extension),
    ]
    allowed = torch_alone.median + _BEYOND_TORCH
    for ranks in (1, 2):
        warm = [_launch(ranks, ranks, tempfile.mkdtemp(dir=setup.folder)) for _ in range(setup.repeats(10) + 1)][1:]
        cold = [_launch_in_fresh_interpreter(setup, ranks) for _ in range(setup.repeats(3, quick=1))]
        for kind, taken in (("cold", cold), ("warm", warm)):
            judged = Budget("figure", "at most", 0.5) if (ranks, kind) == (2, "warm") else None
            lines.append(
                Line(
                    "launch",
                    f"launch to ready, {2 * ranks} ranks, {kind}",
                    "s",
                    Spread.of(taken),
                    budgets=(judged,) if judged else (),
                    in_docs=judged is not None,
                )
            )
        if ranks == 1:
            lines.append(
                Line(
                    "launch",
                    f"launch to ready, 2 ranks, cold, beside an import of torch and {_BEYOND_TORCH} s",
                    "x",
                    Spread.of(each / allowed for each in cold),
                    budgets=(Budget("figure", "at most", 1.0),),
                    note=f"at most {allowed:.2f} s",
                    in_docs=True,
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


def _in_fresh_interpreter(code: str) -> float:
    """Return the seconds that this code takes, or takes after it has set ``began``."""
    timed = f"import time\nbegan = time.perf_counter()\n{code}\nprint(time.perf_counter() - began)"
    done = subprocess.run([sys.executable, "-c", timed], cwd=_ROOT, check=True, capture_output=True, text=True)
    return float(done.stdout.split()[-1])


if __name__ == "__main__":
    sys.stdout.write(f"{_launch(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])}\n")
