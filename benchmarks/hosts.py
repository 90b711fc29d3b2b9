"""A session of up to 512 ranks on 64 hosts: the notebook's part is real, the ranks are simulated.

The session, its hub, its store and its encrypted TCP connections are those of a launch on a cluster. Eight hosts of
eight ranks are one process, whose ranks speak the wire and compute nothing. The exchange is measured apart: one real
sender and all its receivers, or one real receiver and all its senders, connected as the ranks of one machine.
"""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

import graftlab as gl
from benchmarks.lines import Line, Setup, Spread
from benchmarks.row_sink import framed_row
from graftlab.base import wire
from graftlab.base.tags import TapKey
from graftlab.base.world import Place, RunInfo
from graftlab.exchange.arena import Arena, create_segment
from graftlab.exchange.channel import SocketChannel
from graftlab.exchange.rank_exchange import RankExchange
from graftlab.plan.plan import GraftPlan
from graftlab.ranks.handle import RankHandle
from graftlab.ranks.options import LaunchOptions
from graftlab.remote.launcher import launch_remote_ranks
from graftlab.remote.rank_supervisor import HostFacts, RankEnd, RankSupervisor
from graftlab.remote.remote_rank import RemoteRankSpec

# Seconds in which a process of simulated ranks ends after its session.
_END_LIMIT = 30.0
_RANKS_OF_A_PROCESS = 64
_ROWS = 100_000
_TENSORS = 200
_LOOK = 0.0005


def measure_hosts(setup: Setup) -> list[Line]:
    lines = []
    for ranks in (8, 64) if setup.quick else (8, 64, 256, 512):
        lines += _notebook(setup, ranks) + _exchange(setup, ranks // 2)
    return lines


# ---- the notebook ---------------------------------------------------------------------------------------------------


def _notebook(setup: Setup, ranks: int) -> list[Line]:
    """Measure a session of this many simulated ranks, half of them on each side."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    folder = tempfile.mkdtemp(dir=setup.folder)
    each = _ROWS // ranks
    repeats = setup.repeats(9, quick=2)
    memory, files, worked, began = _memory(), _files(), time.process_time(), time.perf_counter()
    with gl.launch(ranks // 2, ranks // 2, timeout=300.0, folder=folder, on=_SimulatedHosts()) as session:
        launch = time.perf_counter() - began, time.process_time() - worked
        memory, files = _memory() - memory, _files() - files
        edits = [_edit(session, layer) for layer in range(repeats + 1)][1:]
        empty = [_run(session, "0") for _ in range(repeats + 1)][1:]
        full = [_run(session, str(each)) for _ in range(setup.repeats(3, quick=1) + 1)][1:]
        assert session.row_count == each * ranks * (len(full) + 1), session.row_count
    name = f"{ranks} simulated ranks"
    return [
        Line("scale", f"launch of {name}, a rank", "s", Spread.of([launch[0] / ranks])),
        Line("scale", f"the notebook's processor time for it, {name}", "s", Spread.of([launch[1] / ranks])),
        Line("scale", f"the notebook's memory, a rank of {name}", "B", Spread.of([memory / ranks])),
        Line("scale", f"the notebook's descriptors, a rank of {name}", "", Spread.of([files / ranks])),
        Line("scale", f"plan edit until adopted, {name}", "s", Spread.of([wall for wall, _ in edits])),
        Line("scale", f"its processor time in the notebook, {name}", "s", Spread.of([own for _, own in edits])),
        Line("scale", f"an empty run, as a verdict makes, {name}", "s", Spread.of([wall for wall, _ in empty])),
        Line("scale", f"its processor time, {name}", "s", Spread.of([own for _, own in empty])),
        Line("scale", f"rows of {name}", "rows/s", Spread.of([each * ranks / wall for wall, _ in full])),
        Line("scale", f"processor time of a row, {name}", "s", Spread.of([own / each / ranks for _, own in full])),
    ]


def _edit(session: gl.Session, layer: int) -> tuple[float, float]:
    """Return the seconds until every rank has a new plan, and the notebook's processor time."""
    began, worked = time.perf_counter(), time.process_time()
    version = session.edit(compare=f"layer < {layer}").version
    while len(session.adopted(version)) < len(session.ranks):
        time.sleep(_LOOK)
    return time.perf_counter() - began, time.process_time() - worked


def _run(session: gl.Session, rows: str) -> tuple[float, float]:
    """Return the seconds of a run in which each rank evaluates ``rows``, and the notebook's processor time."""
    began, worked = time.perf_counter(), time.process_time()
    session.run(rows, rows)
    return time.perf_counter() - began, time.process_time() - worked


def _memory() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _files() -> int:
    return len(os.listdir("/proc/self/fd"))


class _SimulatedHosts:
    """``on=`` for a session whose ranks are simulated."""

    host, port, uses_folder, threads, gpus = "127.0.0.1", 0, False, 1, 0.0

    def start_ranks(self, options: LaunchOptions, folder: Path, plan: GraftPlan) -> Sequence[RankHandle]:
        return launch_remote_ranks(options, folder, plan, self)

    def reserve(self, options: LaunchOptions, folder: Path) -> _SimulatedHosts:
        self._count = options.baseline + options.target
        self._processes: list[subprocess.Popen[bytes]] = []
        return self

    def facts(self) -> list[HostFacts]:
        return [RankSupervisor().facts()] * self._count

    def process(self, place: Place) -> _SimulatedProcess:
        return _SimulatedProcess(self, place)

    def start(self, spec: RemoteRankSpec) -> None:
        """Start a process for every 64th rank and those after it."""
        first, place = spec.place.world_rank, spec.place
        if first % _RANKS_OF_A_PROCESS:
            return
        sides = (place.world_size, place.other_world_size)
        last = min(first + _RANKS_OF_A_PROCESS, self._count)
        numbers = (spec.port, first, last, *(sides if place.side == "baseline" else sides[::-1]))
        command = [sys.executable, "-m", "benchmarks.simulated_ranks", spec.host, *map(str, numbers)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE)
        assert process.stdin is not None
        with process.stdin as stdin:
            stdin.write(spec.token.encode() + b"\n" + framed_row())
        self._processes.append(process)

    def release(self) -> None:
        for process in self._processes:
            try:
                process.wait(_END_LIMIT)
            except subprocess.TimeoutExpired:
                # A process whose ranks never all began, because another process had ended, waits for them.
                process.kill()
                process.wait()


class _SimulatedProcess:
    def __init__(self, hosts: _SimulatedHosts, place: Place) -> None:
        self._hosts, self._ended = hosts, False

    def start(self, spec: bytes) -> None:
        self._hosts.start(wire.Decoder(RemoteRankSpec).decode(spec))

    def end(self, timeout: float) -> RankEnd | str | None:
        return RankEnd(0, b"") if self._ended else None

    def log_tail(self, timeout: float) -> bytes:
        return b""

    def signal(self, number: int) -> None:
        self._ended = True

    def release_in_child(self) -> None:
        """Nothing of it is held here."""


# ---- the exchange ---------------------------------------------------------------------------------------------------


def _exchange(setup: Setup, others: int) -> list[Line]:
    """Measure a tensor of 4 KiB that goes to this many receivers, and one tap that comes from this many senders."""
    repeats = setup.repeats(_TENSORS, quick=10)
    [sender], receivers = _linked(1, others)
    sending, _ = _transfers([sender], receivers, repeats)
    senders, [receiver] = _linked(others, 1)
    _, receiving = _transfers(senders, [receiver], repeats)
    return [
        Line("scale", f"sending a tensor to {others} receivers", "s", Spread.of(sending)),
        Line("scale", f"receiving a tap from {others} senders", "s", Spread.of(receiving)),
    ]


def _linked(baseline: int, target: int) -> tuple[list[RankExchange[None]], list[RankExchange[None]]]:
    """The exchanges of both sides' ranks, each rank connected to all of the other side."""
    places = Place("baseline", 0, baseline, target).everyone()
    segments = [create_segment() for _ in places]
    links: list[dict[int, tuple[SocketChannel, Arena]]] = [{} for _ in places]
    for here in range(baseline):
        for there in range(baseline, len(places)):
            ends = socket.socketpair()
            links[here][there] = SocketChannel(ends[0]), Arena(*segments[there], writable=False)
            links[there][here] = SocketChannel(ends[1]), Arena(*segments[here], writable=False)
    own = [Arena(*segment, writable=True) for segment in segments]
    for descriptor, _ in segments:
        os.close(descriptor)
    made = [RankExchange[None](*each, timeout=60.0) for each in zip(places, own, links, strict=True)]
    for exchange in made:
        exchange.begin_run(RunInfo(0, 0, tuple(range(len(places)))))
    return made[:baseline], made[baseline:]


def _transfers(
    senders: Sequence[RankExchange[None]], receivers: Sequence[RankExchange[None]], repeats: int
) -> tuple[list[float], list[float]]:
    """Return the seconds of processor time that one sender and one receiver need for a tensor."""
    tensor, sent, received = torch.ones(1024), [], []
    for number in range(repeats):
        key = TapKey(0, "x", (), "original", number)
        began = time.process_time()
        for sender in senders:
            sender.publish(key, tensor, None)
        sent.append((time.process_time() - began) / len(senders))
        began = time.process_time()
        for receiver in receivers:
            receiver.receive(key).release()
        received.append((time.process_time() - began) / len(receivers))
    for exchange in (*senders, *receivers):
        exchange.close()
    return sent, received
