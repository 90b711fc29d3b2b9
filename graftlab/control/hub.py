"""The notebook's ear: one thread that reads what every rank sends, and hands it on."""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
from collections.abc import Sequence
from typing import Protocol

from graftlab.ranks.launcher import RankProcess
from graftlab.ranks.messages import unpack

logger = logging.getLogger(__name__)

# After rows, so many milliseconds pass before the next look, unless a bell rings. To wake a thread that listens costs a
# rank many times what sending a row costs; while nobody listens, rows gather in the socket, which holds a few hundred.
_REST = 20
_SHORT_REST = 2
_MANY_ROWS = 16


class Listener(Protocol):
    """Called on the hub's thread; must not wait for anything."""

    def on_rows(self, lines: Sequence[bytes]) -> None:
        """Encoded rows, in the order in which their rank sent them."""

    def on_message(self, rank: RankProcess, message: object) -> None: ...

    def on_gone(self, rank: RankProcess) -> None:
        """The rank's process has ended, or will at once."""


class Hub:
    """Reads until :meth:`stop`."""

    def __init__(self, ranks: Sequence[RankProcess], listener: Listener) -> None:
        self._ranks = {rank.channel.fileno(): rank for rank in ranks}
        self._listener = listener
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._listen, name="graftlab-hub", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Read what has come, and end the thread."""
        if self._thread.is_alive():
            os.write(self._wake_write, b"x")
            self._thread.join(5.0)

    def _listen(self) -> None:
        poller, bells = select.poll(), _Bells(self._wake_read)
        for each in self._ranks.values():
            poller.register(each.channel.fileno(), select.POLLIN)
            bells.add(each.bell)
        poller.register(self._wake_read, select.POLLIN)
        stopping = False
        while not stopping:
            rows = 0
            ready = [descriptor for descriptor, _ in poller.poll()]
            stopping = self._wake_read in ready
            for descriptor in list(self._ranks) if stopping else ready:
                rank = self._ranks.get(descriptor)
                if rank is None:
                    continue
                try:
                    rows += self._read(rank)
                except Exception:
                    # A fault in one listener must not make the notebook deaf for all ranks.
                    logger.exception("graftlab could not handle what %s sent", rank.label)
                if rank.channel.closed:
                    poller.unregister(descriptor)
                    bells.remove(rank.bell)
                    del self._ranks[descriptor]
                    rank.alive = False
                    self._listener.on_gone(rank)
            if rows:
                bells.wait(_REST if rows < _MANY_ROWS else _SHORT_REST)
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _read(self, rank: RankProcess) -> int:
        """How many rows were among what came."""
        came = 0
        rows: list[bytes] = []
        for frame in rank.channel.receive():
            message = unpack(frame)
            if isinstance(message, bytes):
                rows.append(message)
                came += 1
                continue
            # Order matters: a run is over only when its rows are in.
            if rows:
                self._listener.on_rows(rows)
                rows = []
            self._listener.on_message(rank, message)
        if rows:
            self._listener.on_rows(rows)
        return came


class _Bells:
    """What ends a rest: a rank that sent more than rows, has more rows than its socket holds, or is gone."""

    def __init__(self, wake: int) -> None:
        self._poller = select.poll()
        self._poller.register(wake, select.POLLIN)
        self._bells: dict[int, socket.socket] = {}

    def add(self, bell: socket.socket) -> None:
        bell.setblocking(False)
        self._bells[bell.fileno()] = bell
        self._poller.register(bell, select.POLLIN)

    def remove(self, bell: socket.socket) -> None:
        if self._bells.pop(bell.fileno(), None) is not None:
            self._poller.unregister(bell)

    def wait(self, milliseconds: int) -> None:
        for descriptor, _ in self._poller.poll(milliseconds):
            bell = self._bells.get(descriptor)
            # At its end it would ring for ever; the rank's channel tells the rest.
            if bell is not None and not _rings(bell):
                self.remove(bell)


def _rings(bell: socket.socket) -> bool:
    try:
        return bool(bell.recv(4096))
    except OSError:
        return False
