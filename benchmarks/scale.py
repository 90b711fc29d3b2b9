"""How costs grow with ranks: of real sessions up to 32 ranks, and of the notebook that hears a thousand."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch

import graftlab as gl
from benchmarks.lines import Line, Setup, Spread
from benchmarks.rows import a_row
from graftlab.base.world import Place
from graftlab.control.hub import Hub
from graftlab.exchange.arena import PAGE
from graftlab.exchange.channel import Channel
from graftlab.ranks.devices import Seat
from graftlab.ranks.handle import RankHandle
from graftlab.ranks.messages import FromRank, pack_row
from graftlab.rows.store import RowStore

_TAPS = 200


def measure(setup: Setup) -> list[Line]:
    lines = []
    for ranks in (2, 8) if setup.quick else (2, 8, 32):
        lines += _real_ranks(setup, ranks)
    for ranks in (2, 64) if setup.quick else (2, 32, 1024):
        lines += _many_senders(setup, ranks, rows=20_000 if setup.quick else 200_000)
    return lines


# ---- real ranks -----------------------------------------------------------------------------------------------------


def _real_ranks(setup: Setup, ranks: int) -> list[Line]:
    """Half of them on each side, all on this machine's cores: what one more rank costs, not how fast it is."""
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
        Line("scale", f"memory of its own, one of {ranks} ranks", "B", Spread.of([own])),
    ]


def _compare() -> None:
    torch.set_num_threads(1)
    value = torch.ones(1024)
    for index in range(_TAPS):
        gl.tap("x", value, layer=index)


def _private_bytes(pid: int) -> int:
    """What of a process's memory no other process shares."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_"))


# ---- the notebook and a thousand ranks ------------------------------------------------------------------------------


class _Counting:
    """The session's part: rows go to the file, and somebody waits for the last."""

    def __init__(self, store: RowStore, wanted: int) -> None:
        self._store = store
        self._left = wanted
        self.done = threading.Event()

    def on_rows(self, lines: Sequence[bytes]) -> None:
        self._store.append(lines)
        self._left -= len(lines)
        if not self._left:
            self.done.set()

    def on_message(self, message: FromRank, rank: RankHandle) -> None:
        raise AssertionError(f"{rank.label} sent {message}, where rows alone were to come")

    def on_gone(self, rank: RankHandle) -> None:
        """Each is gone when it has sent its rows."""


def _many_senders(setup: Setup, ranks: int, rows: int) -> list[Line]:
    """The hub and the store of a session with so many ranks, whose rows one other process sends."""
    _allow_descriptors(4 * ranks + 256)
    rates, costs = [], []
    each = rows // ranks
    row = pack_row(a_row())
    framed = len(row).to_bytes(8, "little") + row
    for _ in range(setup.repeats(3, quick=1) + 1):
        folder = Path(tempfile.mkdtemp(dir=setup.folder))
        segment = os.memfd_create("graftlab-benchmark")
        os.ftruncate(segment, PAGE)
        handles, far, bells = [], [], []
        for number in range(ranks):
            (here, there), (bell, far_bell) = socket.socketpair(), socket.socketpair()
            place = Place("target", number, 1, ranks)
            handles.append(RankHandle(place, Seat("cpu", "gloo"), Channel(here), bell, segment, folder / "no.log"))
            far.append(there)
            bells.append(far_bell)
        store = RowStore(folder)
        listener = _Counting(store, each * ranks)
        hub = Hub(handles, listener)
        descriptors = [end.fileno() for end in far]
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
        sender.stdin.write(framed)
        sender.stdin.close()
        assert listener.done.wait(300.0), "rows are missing"
        rates.append(each * ranks / (time.perf_counter() - began))
        costs.append((time.process_time() - worked) / (each * ranks))
        for end in (*far, *bells):
            end.close()
        sender.wait()
        sender.stdout.close()
        hub.stop()
        for handle in handles:
            handle.release()
        store.close()
        os.close(segment)
    return [
        Line("scale", f"rows of {ranks:,} ranks onto the disk", "rows/s", Spread.of(rates[1:])),
        Line("scale", f"the notebook's processor time for one of them, {ranks:,} ranks", "s", Spread.of(costs[1:])),
    ]


def _allow_descriptors(wanted: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))
