"""Rows that come over TCP: what they cost the notebook, and the host of the ranks, with an agent and without."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.hearing import Hearing, framed_row
from benchmarks.lines import Line, Setup, Spread
from graftlab.config import Endpoint
from graftlab.exchange.keys import derive_keys, new_token
from graftlab.exchange.tcp import RouterSocket
from graftlab.jobs.distant_host import DistantHost
from graftlab.jobs.greeting import Join, Joined, pack
from graftlab.jobs.own_agent import ThroughAgent
from graftlab.jobs.relay import FarLine, Relay
from graftlab.jobs.trunk import HOST

_A_HOST = 8


def measure_afar(setup: Setup) -> list[Line]:
    ranks, rows = (64, 20_000) if setup.quick else (1024, 200_000)
    lines = []
    for a_host, how in ((0, "a connection each"), (_A_HOST, f"an agent for {_A_HOST}")):
        lines += _many_far_senders(setup, ranks, a_host, rows, how)
    for agent, how in ((False, "a connection each"), (True, "one agent")):
        lines += _one_host(setup, agent, 20_000 if setup.quick else 200_000, how)
    return lines


class _Doors:
    """A hub and a store, and the relay through which ranks come in: the number of a rank is its first word."""

    def __init__(self, setup: Setup, ranks: int, rows: int, number_of: Callable[[bytes], int], answer: bytes) -> None:
        self.hearing = Hearing(setup, ranks, rows)
        self.token = new_token()
        self._number_of, self._answer = number_of, answer
        self._post = RouterSocket(derive_keys(self.token), HOST, "127.0.0.1")
        self.port = self._post.port
        self._relay = Relay(self._post, self._greet)

    def _greet(self, far: FarLine, word: bytes) -> None:
        number = self._number_of(word)
        far.send(self._answer)
        self._relay.join(far, *self.hearing.take_line(number))

    def close(self) -> None:
        self._relay.close()
        self.hearing.close()


def _many_far_senders(setup: Setup, ranks: int, a_host: int, rows: int, how: str) -> list[Line]:
    """The notebook's part of a session with so many ranks on other machines, whose rows one other process sends."""
    rates, costs, sent, sockets = [], [], [], []
    each = rows // ranks
    for _ in range(setup.repeats(3, quick=1) + 1):
        doors = _Doors(setup, ranks, each * ranks, int, b"in")
        sender = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.far_sender", *map(str, (doors.port, ranks, a_host, each))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert sender.stdin is not None
        assert sender.stdout is not None
        sender.stdin.write(doors.token.encode() + b"\n")
        sender.stdin.flush()
        assert sender.stdout.readline() == b"ready\n"
        sockets.append(_connections(doors.port))
        began, worked = time.perf_counter(), time.process_time()
        sender.stdin.write(framed_row())
        sender.stdin.close()
        doors.hearing.wait()
        rates.append(each * ranks / (time.perf_counter() - began))
        costs.append((time.process_time() - worked) / (each * ranks))
        doors.close()
        sent.append(float(sender.stdout.readline()) / (each * ranks))
        sender.stdout.close()
        sender.wait()
    name = f"{ranks:,} ranks on other machines, {how}"
    return [
        Line("scale", f"rows of {name}, onto the disk", "rows/s", Spread.of(rates[1:])),
        Line("scale", f"the notebook's processor time for a row of {name}", "s", Spread.of(costs[1:])),
        Line("scale", f"the senders' encryption of a row of {name}", "s", Spread.of(sent[1:])),
        Line("scale", f"connections to the notebook of {name}", "", Spread.of(sockets[1:])),
    ]


def _connections(port: int) -> int:
    tables = "".join(Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6"))
    lines = [line.split() for line in tables.splitlines() if "local_address" not in line]
    return sum(int(each[1].rpartition(":")[2], 16) == port and each[3] == "01" for each in lines)


# ---- one host -------------------------------------------------------------------------------------------------------


def _one_host(setup: Setup, agent: bool, rows: int, how: str) -> list[Line]:
    """Eight ranks that say a row as soon as the one before is in their socket: what that costs their host."""
    costs, own = [], []
    joined = Joined(folder="", log="", tap_timeout=1.0, buffer_budget=0, keep_budget=0, descriptors=0)
    for _ in range(setup.repeats(3, quick=1) + 1):
        numbers = iter(range(_A_HOST))
        doors = _Doors(setup, _A_HOST, rows, lambda word, numbers=numbers: next(numbers), pack(joined))  # type: ignore[misc]
        order = tempfile.mkdtemp(dir=setup.folder), str(doors.port), doors.token, str(rows // _A_HOST), str(int(agent))
        ranks = subprocess.run([sys.executable, "-m", "benchmarks.afar", *order], capture_output=True, text=True)
        assert ranks.returncode == 0, ranks.stderr
        doors.hearing.wait()
        in_ranks, in_agent = map(float, ranks.stdout.split())
        own.append(in_ranks / rows)
        costs.append((in_ranks + in_agent) / rows)
        doors.close()
        shutil.rmtree(order[0])
    name = f"{_A_HOST} ranks of one host, {how}"
    return [
        Line("scale", f"that host's processor time to send a row, {name}", "s", Spread.of(costs[1:])),
        Line("scale", f"what of it the ranks' own processes spend, {name}", "s", Spread.of(own[1:])),
    ]


def _be_a_host(folder: str, port: str, token: str, rows: str, agent: str) -> None:
    """Prints what the ranks spent, and what their agent did."""
    read, write = os.pipe()
    for _ in range(_A_HOST):
        if not os.fork():
            spent = _be_a_rank(Path(folder), Endpoint("127.0.0.1", int(port)), token, int(rows), int(agent))
            os.write(write, (" ".join(map(str, spent)) + "\n").encode())
            os._exit(0)
    os.close(write)
    with open(read) as lines:
        told = [line.split() for line in lines]
    assert len(told) == _A_HOST, "a rank failed"
    # The agent is there for a moment yet.
    in_agent = _processor_time(int(told[0][0])) - min(float(before) for _, before, _ in told)
    print(sum(float(own) for _, _, own in told), in_agent)


def _be_a_rank(folder: Path, endpoint: Endpoint, token: str, rows: int, agent: int) -> tuple[int, float, float]:
    """The agent's process, what it had spent before, and what this one spends."""
    join: Any = Join("", "target", 0, 1, 1, os.getpid(), "cpu", "none", None, None)
    distant = ThroughAgent(endpoint, token, folder) if agent else DistantHost(endpoint, token)
    answer = distant.ask(join, 30.0)
    assert answer is not None
    channel, _, carrier = distant.open_line(answer[1])
    channel.make_room(4 << 20)
    pid = getattr(carrier, "pid", 0)
    row = framed_row()[8:]
    before, began = _processor_time(pid), time.process_time()
    for _ in range(rows):
        channel.send(row)
    channel.drain(60.0)
    channel.close()
    carrier.close(when_done=True, timeout=60.0)
    return pid, before, time.process_time() - began


def _processor_time(pid: int) -> float:
    if not pid:
        return 0.0
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    _be_a_host(*sys.argv[1:])
