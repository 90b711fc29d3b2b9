"""Costs by number of ranks: real sessions of up to 32 ranks, and a notebook that receives from a thousand."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import graftlab as gl
from benchmarks.hosts import measure_hosts
from benchmarks.lines import Line, Setup, Spread
from benchmarks.remote import measure_remote
from benchmarks.row_sink import RowSink, framed_row

_TAPS = 200


def measure(setup: Setup) -> list[Line]:
    lines = []
    for ranks in (2, 8) if setup.quick else (2, 8, 32):
        lines += _real_ranks(setup, ranks)
    for ranks in (2, 64) if setup.quick else (2, 32, 1024):
        lines += _many_senders(setup, ranks, rows=20_000 if setup.quick else 200_000)
    return lines + measure_remote(setup) + measure_hosts(setup)


# ---- real ranks -----------------------------------------------------------------------------------------------------


def _real_ranks(setup: Setup, ranks: int) -> list[Line]:
    """Measure a session with all ranks on this machine's cores: the cost of one more rank, not its speed."""
    rounds = setup.repeats(5, quick=2)
    folder = tempfile.mkdtemp(dir=setup.folder)
    gl.launch(1, 1, device="cpu", folder=tempfile.mkdtemp(dir=setup.folder)).close()
    began = time.perf_counter()
    with gl.launch(ranks // 2, ranks // 2, device="cpu", timeout=240.0, folder=folder) as session:
        launched = time.perf_counter() - began
        taken = []
        for _ in range(rounds + 1):
            began = time.perf_counter()
            run = session.run(_compare, _compare)
            taken.append((time.perf_counter() - began) / _TAPS / (ranks // 2))
            assert len(run.frame) == _TAPS * (ranks // 2), f"{len(run.frame)} rows of {_TAPS * (ranks // 2)}"
        own = sum(_private_bytes(each.pid) for each in session.ranks if each.pid is not None) / ranks
    return [
        Line("scale", f"warm launch of {ranks} ranks, a rank", "s", Spread.of([launched / ranks])),
        Line("scale", f"a row of {ranks} ranks on shared cores", "s", Spread.of(taken[1:])),
        Line("scale", f"private memory of one of {ranks} ranks", "B", Spread.of([own])),
    ]


def _compare() -> None:
    torch.set_num_threads(1)
    value = torch.ones(1024)
    for index in range(_TAPS):
        gl.tap("x", value, layer=index)


def _private_bytes(pid: int) -> int:
    """Return the bytes of memory that the process shares with no other process."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_"))


# ---- the notebook and a thousand ranks ------------------------------------------------------------------------------


def _many_senders(setup: Setup, ranks: int, rows: int) -> list[Line]:
    """Measure the hub and the store of a session with many ranks, whose rows one other process sends."""
    rates, costs = [], []
    each = rows // ranks
    for _ in range(setup.repeats(3, quick=1) + 1):
        sink = RowSink(setup, ranks, each * ranks)
        # Keep the wake sockets open: a closed one is always readable.
        ends = [sink.connection_of(number) for number in range(ranks)]
        descriptors = [line.fileno() for line, _ in ends]
        sender = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.sender", str(each), *map(str, descriptors)],
            pass_fds=descriptors,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert sender.stdin is not None
        assert sender.stdout is not None
        assert sender.stdout.readline() == b"ready\n"
        began, worked = time.perf_counter(), time.process_time()
        sender.stdin.write(framed_row())
        sender.stdin.close()
        sink.wait()
        rates.append(each * ranks / (time.perf_counter() - began))
        costs.append((time.process_time() - worked) / (each * ranks))
        for end in ends:
            for each_end in end:
                each_end.close()
        sender.wait()
        sender.stdout.close()
        sink.close()
    return [
        Line("scale", f"rows of {ranks:,} ranks onto the disk", "rows/s", Spread.of(rates[1:])),
        Line("scale", f"the notebook's processor time for one of them, {ranks:,} ranks", "s", Spread.of(costs[1:])),
    ]
