"""The notebook's hub and row store, for benchmarks whose ranks are simulated."""

from __future__ import annotations

import os
import resource
import socket
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from benchmarks.lines import Setup
from benchmarks.rows import a_row
from graftlab.base.world import Place
from graftlab.control.hub import Hub
from graftlab.exchange.arena import PAGE
from graftlab.exchange.channel import SocketChannel
from graftlab.ranks.devices import DeviceAssignment
from graftlab.ranks.handle import RankHandle
from graftlab.ranks.messages import FromRank, pack_row
from graftlab.rows.store import RowStore


def framed_row() -> bytes:
    """Return a row as a frame of a rank's connection."""
    row = pack_row(a_row())
    return len(row).to_bytes(8, "little") + row


class _RowCounter:
    """Stores rows as a session does, and signals the last one."""

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
        raise AssertionError(f"{rank.label} sent {message}, but only rows were expected")

    def on_gone(self, rank: RankHandle) -> None:
        """A rank disconnects when it has sent its rows."""


class RowSink:
    """Receives from ``ranks`` ranks until ``rows`` rows have arrived."""

    def __init__(self, setup: Setup, ranks: int, rows: int) -> None:
        _allow_descriptors(6 * ranks + 256)
        folder = Path(tempfile.mkdtemp(dir=setup.folder))
        self._segment = os.memfd_create("graftlab-benchmark")
        os.ftruncate(self._segment, PAGE)
        self._handles: list[RankHandle] = []
        self._ends: list[tuple[socket.socket, socket.socket]] = []
        for number in range(ranks):
            (here, there), (wake, far_wake) = socket.socketpair(), socket.socketpair()
            place = Place("target", number, 1, ranks)
            handle = RankHandle(
                place, DeviceAssignment("cpu", "gloo"), SocketChannel(here), wake, self._segment, folder / "no.log"
            )
            self._handles.append(handle)
            self._ends.append((there, far_wake))
        self._store = RowStore(folder)
        self._listener = _RowCounter(self._store, rows)
        self._hub = Hub(self._handles, self._listener)

    def connection_of(self, number: int) -> tuple[socket.socket, socket.socket]:
        """Return the other ends of a rank's connection and wake socket, which the caller closes."""
        return self._ends[number]

    def wait(self) -> None:
        """Wait until the last row is written."""
        assert self._listener.done.wait(300.0), "rows are missing"

    def close(self) -> None:
        self._hub.stop()
        for handle in self._handles:
            handle.release()
        self._store.close()
        os.close(self._segment)


def _allow_descriptors(wanted: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))
