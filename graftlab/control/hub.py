"""The hub: one thread of the notebook that reads what every rank sends, and passes it on.

If handling a message raises, only that message is lost: the thread continues to read from every rank.
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

# Milliseconds of rest after reading rows, unless a wake socket ends it. Waking a polling thread costs a rank many times
# what sending a row costs; without a poll, rows gather in the socket, which holds a few hundred.
_REST = 20
_SHORT_REST = 2
_MANY_ROWS = 16


class MessageSink(Protocol):
    """Called on the hub's thread; must not wait for anything."""

    def on_rows(self, lines: Sequence[bytes]) -> None:
        """Encoded rows, in the order in which their rank sent them."""

    def on_message(self, message: FromRank, rank: RankHandle) -> None: ...

    def on_gone(self, rank: RankHandle) -> None:
        """The rank's process has ended, or is about to."""


class Hub:
    """Reads from ranks until :meth:`stop`, and passes messages to the ``sink``."""

    def __init__(self, ranks: Sequence[RankHandle], sink: MessageSink) -> None:
        self._ranks = {rank.channel.fileno(): rank for rank in ranks}
        self._sink = sink
        self._added: deque[RankHandle] = deque()
        self._stopping = False
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._run, name="graftlab-hub", daemon=True)
        self._thread.start()

    def add(self, rank: RankHandle) -> None:
        """Start reading from this rank too; any thread may call this."""
        self._added.append(rank)
        os.write(self._wake_write, b"+")

    def stop(self) -> None:
        """Read what has arrived, and end the thread."""
        if self._thread.is_alive():
            self._stopping = True
            os.write(self._wake_write, b"x")
            self._thread.join(5.0)

    def _run(self) -> None:
        poller, wake_sockets = select.poll(), _WakeSockets(self._wake_read)
        for each in self._ranks.values():
            poller.register(each.channel.fileno(), select.POLLIN)
            wake_sockets.add(each.wake_socket)
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
                    wake_sockets.add(added.wake_socket)
            for descriptor in list(self._ranks) if stopping else ready:
                rank = self._ranks.get(descriptor)
                if rank is None:
                    continue
                rows += self._read(rank)
                if rank.channel.closed:
                    poller.unregister(descriptor)
                    wake_sockets.remove(rank.wake_socket)
                    del self._ranks[descriptor]
                    rank.alive = False
                    rank.end_programs()
                    self._call(rank, self._sink.on_gone, rank)
            if rows and not stopping:
                wake_sockets.wait(_REST if rows < _MANY_ROWS else _SHORT_REST)
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _read(self, rank: RankHandle) -> int:
        """Read what this rank has sent; returns the number of rows."""
        count = 0
        rows: list[bytes] = []
        for frame in rank.channel.receive():
            try:
                message = unpack_from_rank(frame)
            except MessageError as error:
                # The messages after it may be misread.
                logger.error("%s is dropped: %s", rank.label, error)
                rank.drop(str(error))
                break
            if isinstance(message, bytes):
                rows.append(message)
                count += 1
                continue
            # In order, because a run is over only when its rows have arrived.
            if rows:
                self._call(rank, self._sink.on_rows, rows)
                rows = []
            self._call(rank, self._sink.on_message, message, rank)
        if rows:
            self._call(rank, self._sink.on_rows, rows)
        return count

    def _call(self, rank: RankHandle, handle: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            handle(*args, **kwargs)
        except Exception:
            logger.exception("graftlab could not handle what %s sent", rank.label)


class _WakeSockets:
    """The sockets that end a rest: of a rank that sent more than rows, has filled its socket, or is gone."""

    def __init__(self, wake: int) -> None:
        self._poller = select.poll()
        self._poller.register(wake, select.POLLIN)
        self._sockets: dict[int, socket.socket] = {}

    def add(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sockets[sock.fileno()] = sock
        self._poller.register(sock, select.POLLIN)

    def remove(self, sock: socket.socket) -> None:
        if self._sockets.pop(sock.fileno(), None) is not None:
            self._poller.unregister(sock)

    def wait(self, milliseconds: int) -> None:
        for descriptor, _ in self._poller.poll(milliseconds):
            sock = self._sockets.get(descriptor)
            # A closed socket would stay readable; the rank's channel reports its end.
            if sock is not None and not _drain(sock):
                self.remove(sock)


def _drain(sock: socket.socket) -> bool:
    """Read what was written; False at the end of the stream."""
    try:
        return bool(sock.recv(4096))
    except OSError:
        return False
