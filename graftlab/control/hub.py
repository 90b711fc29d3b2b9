"""The notebook's ear: one thread that reads what every rank sends, and hands it on.

A fault in the listener costs what it was told at that moment and no more: what follows is still read, from every rank.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import ParamSpec, Protocol

from graftlab.errors import MessageError
from graftlab.ranks.handle import RankHandle
from graftlab.ranks.messages import FromRank, unpack_from_rank

logger = logging.getLogger(__name__)

P = ParamSpec("P")

# After rows, so many milliseconds pass before the next look, unless a bell rings. Waking a thread that listens costs a
# rank many times what sending a row costs; while nobody listens, rows gather in the socket, which holds a few hundred.
_REST = 20
_SHORT_REST = 2
_MANY_ROWS = 16


class MessageSink(Protocol):
    """Called on the hub's thread; must not wait for anything."""

    def on_rows(self, lines: Sequence[bytes]) -> None:
        """Encoded rows, in the order in which their rank sent them."""

    def on_message(self, message: FromRank, rank: RankHandle) -> None: ...

    def on_gone(self, rank: RankHandle) -> None:
        """The rank's process has ended, or will at once."""


class Hub:
    """Reads until :meth:`stop`."""

    def __init__(self, ranks: Sequence[RankHandle], sink: MessageSink) -> None:
        self._ranks = {rank.channel.fileno(): rank for rank in ranks}
        self._sink = sink
        self._added: deque[RankHandle] = deque()
        self._stopping = False
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._listen, name="graftlab-hub", daemon=True)
        self._thread.start()

    def add(self, rank: RankHandle) -> None:
        """Read what this rank sends too; any thread may say so."""
        self._added.append(rank)
        os.write(self._wake_write, b"+")

    def stop(self) -> None:
        """Read what has come, and end the thread."""
        if self._thread.is_alive():
            self._stopping = True
            os.write(self._wake_write, b"x")
            self._thread.join(5.0)

    def _listen(self) -> None:
        poller, bells = select.poll(), _WakeSockets(self._wake_read)
        for each in self._ranks.values():
            poller.register(each.channel.fileno(), select.POLLIN)
            bells.add(each.wake_socket)
        poller.register(self._wake_read, select.POLLIN)
        stopping = False
        while not stopping:
            rows = 0
            ready = [descriptor for descriptor, _ in poller.poll()]
            if self._wake_read in ready:
                stopping = self._stopping
                os.read(self._wake_read, 4096)
                while self._added:
                    added = self._added.popleft()
                    self._ranks[added.channel.fileno()] = added
                    poller.register(added.channel.fileno(), select.POLLIN)
                    bells.add(added.wake_socket)
            for descriptor in list(self._ranks) if stopping else ready:
                rank = self._ranks.get(descriptor)
                if rank is None:
                    continue
                rows += self._read(rank)
                if rank.channel.closed:
                    poller.unregister(descriptor)
                    bells.remove(rank.wake_socket)
                    del self._ranks[descriptor]
                    rank.alive = False
                    rank.end_programs()
                    self._tell(rank, self._sink.on_gone, rank)
            if rows and not stopping:
                bells.wait(_REST if rows < _MANY_ROWS else _SHORT_REST)
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _read(self, rank: RankHandle) -> int:
        """Read what this rank has sent; returns how many rows there were."""
        came = 0
        rows: list[bytes] = []
        for frame in rank.channel.receive():
            try:
                message = unpack_from_rank(frame)
            except MessageError as error:
                # What is lost with it, or whether what follows means what it says, nobody can tell.
                logger.error("%s is dropped: %s", rank.label, error)
                rank.drop(str(error))
                break
            if isinstance(message, bytes):
                rows.append(message)
                came += 1
                continue
            # Order matters: a run is over only when its rows are in.
            if rows:
                self._tell(rank, self._sink.on_rows, rows)
                rows = []
            self._tell(rank, self._sink.on_message, message, rank)
        if rows:
            self._tell(rank, self._sink.on_rows, rows)
        return came

    def _tell(self, rank: RankHandle, listen: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            listen(*args, **kwargs)
        except Exception:
            logger.exception("graftlab could not handle what %s sent", rank.label)


class _WakeSockets:
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
            # A closed bell would ring forever; the rank's channel reports the rest.
            if bell is not None and not _rings(bell):
                self.remove(bell)


def _rings(bell: socket.socket) -> bool:
    try:
        return bool(bell.recv(4096))
    except OSError:
        return False
