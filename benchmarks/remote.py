"""Rows over TCP: their cost for the notebook, and for the machine that sends them."""

from __future__ import annotations

import subprocess
import sys
import time

from benchmarks.lines import Line, Setup, Spread
from benchmarks.row_sink import RowSink, framed_row
from graftlab.exchange.keys import derive_keys, new_token
from graftlab.exchange.tcp import RouterSocket, TcpChannel
from graftlab.jobs.proxy import SERVER_NAME, Ends, Proxy


def measure_remote(setup: Setup) -> list[Line]:
    """Measure the notebook's part of a session with many remote ranks, whose rows one other process sends."""
    ranks, rows = (64, 20_000) if setup.quick else (1024, 200_000)
    rates, costs, sent = [], [], []
    each = rows // ranks
    for _ in range(setup.repeats(3, quick=1) + 1):
        server = _Server(setup, ranks, each * ranks)
        sender = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.remote_sender", *map(str, (server.port, ranks, each))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert sender.stdin is not None
        assert sender.stdout is not None
        sender.stdin.write(server.token.encode() + b"\n")
        sender.stdin.flush()
        assert sender.stdout.readline() == b"ready\n"
        began, worked = time.perf_counter(), time.process_time()
        sender.stdin.write(framed_row())
        sender.stdin.close()
        server.sink.wait()
        rates.append(each * ranks / (time.perf_counter() - began))
        costs.append((time.process_time() - worked) / (each * ranks))
        server.close()
        sent.append(float(sender.stdout.readline()) / (each * ranks))
        sender.stdout.close()
        sender.wait()
    name = f"{ranks:,} ranks on other machines"
    return [
        Line("scale", f"rows of {name}, onto the disk", "rows/s", Spread.of(rates[1:])),
        Line("scale", f"the notebook's processor time for a row of {name}", "s", Spread.of(costs[1:])),
        Line("scale", f"the senders' encryption of a row of {name}", "s", Spread.of(sent[1:])),
    ]


class _Server:
    """A hub and a store, with the proxy to which ranks connect; each rank first sends its number."""

    def __init__(self, setup: Setup, ranks: int, rows: int) -> None:
        self.sink = RowSink(setup, ranks, rows)
        self.token = new_token()
        router = RouterSocket(derive_keys(self.token), SERVER_NAME, "127.0.0.1")
        self.port = router.port
        self._proxy = Proxy(router, self._accept)

    def _accept(self, far: TcpChannel, number: bytes) -> Ends:
        far.send(b"in")
        return self.sink.connection_of(int(number))

    def close(self) -> None:
        self._proxy.close()
        self.sink.close()
