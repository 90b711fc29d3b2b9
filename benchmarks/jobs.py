"""Grafts between jobs that join a session against launched ranks, and a recording against a plain file.

``python -m benchmarks.jobs SIZE REPEATS`` is one job: for each line of its input it grafts, and writes the times.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import torch

import graftlab as gl
from benchmarks import worlds
from benchmarks.lines import Budget, Line, Setup, Spread, quantity
from benchmarks.loops import Times, graft_repeatedly

_SIZES = ((4 << 10, 1000), (4 << 20, 100))
_ROUNDS = 5
# Bytes of each tensor of a recording, and the number of tensors.
_TENSOR, _TENSORS = 16 << 20, 24


def measure(setup: Setup) -> list[Line]:
    lines = []
    for size, repeats in _SIZES:
        lines.append(_attached_against_launched(setup, size, setup.repeats(repeats)))
    return lines + _recording(setup, setup.repeats(_TENSORS))


# ---- attached and launched ------------------------------------------------------------------------------------------


def _attached_against_launched(setup: Setup, size: int, repeats: int) -> Line:
    ratios = []
    with worlds.session(setup, b2t="True") as launched, _attached(setup, size, repeats) as jobs:
        for _ in range(setup.repeats(_ROUNDS, quick=2)):
            run = launched.run(_graft, _graft, args=(size, repeats))
            ratios.append(min(_go(jobs)) / min(taken for times in run.target for taken in times.taps))
    return Line(
        "jobs",
        f"graft {quantity(size, 'B')} of attached jobs against launched ranks, receiver",
        "x",
        Spread.of(ratios),
        budgets=(Budget("figure", "at most", 1.1),),
        note="the shortest of each round, in turn",
        in_docs=True,
    )


def _graft(size: int, repeats: int) -> Times:
    here = gl.here()
    assert here is not None
    return graft_repeatedly(gl.tap, gl.step, here.side, here.rank, size, "float32", repeats)


@contextmanager
def _attached(setup: Setup, size: int, repeats: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Start two jobs without a notebook, the baseline first."""
    folder = tempfile.mkdtemp(dir=setup.folder)
    jobs = []
    for role in ("baseline", "target"):
        told = {"ROLE": role, "RUN_DIR": folder, "BASELINE_WORLD_SIZE": "1", "TARGET_WORLD_SIZE": "1"}
        more = {"ENABLE": "1", "B2T_FILTER": "True", "COMPARE_FILTER": "", "TIMEOUT": "240"}
        jobs.append(
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.jobs", str(size), str(repeats)],
                env={**os.environ, **{f"GRAFTLAB_{name}": value for name, value in {**told, **more}.items()}},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    try:
        yield jobs
    finally:
        # Close all inputs first, because a job that ends waits for the others.
        for job in jobs:
            _pipe(job.stdin).close()
        for job in jobs:
            job.wait()


def _go(jobs: list[subprocess.Popen[str]]) -> list[float]:
    """Run one round; return the receiver's seconds for each graft."""
    for job in jobs:
        _pipe(job.stdin).write("go\n")
        _pipe(job.stdin).flush()
    _, received = (json.loads(_pipe(job.stdout).readline()) for job in jobs)
    taken: list[float] = received
    return taken


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def _be_a_job(size: int, repeats: int) -> None:
    if not gl.attach():
        raise SystemExit("this job could not join")
    for _ in sys.stdin:
        sys.stdout.write(json.dumps(_graft(size, repeats).taps) + "\n")
        sys.stdout.flush()


# ---- a recording ----------------------------------------------------------------------------------------------------


def _recording(setup: Setup, tensors: int) -> list[Line]:
    values = [torch.randn(_TENSOR // 4) for _ in range(tensors)]
    total = _TENSOR * tensors
    folder = Path(tempfile.mkdtemp(dir=setup.folder))
    rates: dict[str, list[float]] = {"write": [], "record": [], "read": [], "read back": []}

    def timed(what: str, function: Callable[..., None], *arguments: object) -> None:
        began = time.perf_counter()
        function(*arguments)
        rates[what].append(total / (time.perf_counter() - began))

    # In turns, with new files each time, because the page cache costs more for a new file.
    for number in range(setup.repeats(_ROUNDS, quick=1)):
        plain, recorded = folder / f"plain-{number}", folder / f"recorded-{number}"
        timed("write", _write, plain, values)
        timed("read", _read, plain)
        plain.unlink()
        timed("record", _record, recorded, values)
        timed("read back", _read_recording, recorded)
        shutil.rmtree(recorded)
    note = "limit: as many bytes in one plain file, synced"
    limit = {what: Spread.of(found).median for what, found in rates.items()}
    return [
        Line(
            "jobs", f"record {quantity(total, 'B')}", "B/s", Spread.of(rates["record"]), limit=limit["write"], note=note
        ),
        Line(
            "jobs",
            f"read a recording of {quantity(total, 'B')}",
            "B/s",
            Spread.of(rates["read back"]),
            limit=limit["read"],
            note="limit: one plain file; both from the system's cache, and the recording's sums are checked",
        ),
    ]


def _record(folder: Path, values: list[torch.Tensor]) -> None:
    with gl.record(folder):
        for number, value in enumerate(values):
            gl.tap("x", value, number=number)
    _sync(folder)


def _read_recording(folder: Path) -> None:
    for _ in gl.Recording(folder).taps(0):
        continue


def _write(path: Path, values: list[torch.Tensor]) -> None:
    with open(path, "wb", buffering=0) as file:
        for value in values:
            file.write(value.numpy().data)
    _sync(path)


def _sync(path: Path) -> None:
    """Force these files to the disk."""
    for each in [path] if path.is_file() else path.rglob("*.*"):
        with open(each, "rb") as file:
            os.fsync(file.fileno())


def _read(path: Path) -> None:
    buffer = bytearray(_TENSOR)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            continue


if __name__ == "__main__":
    _be_a_job(*map(int, sys.argv[1:]))
