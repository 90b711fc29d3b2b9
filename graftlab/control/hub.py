"""The hub: one thread of the notebook that reads what every rank sends, and passes it to the parts of the session.

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

from graftlab.control.plans import Plans
from graftlab.control.queries import Queries
from graftlab.control.runs import Runs
from graftlab.control.tap_catalog import TapCatalog
from graftlab.errors import MessageError
from graftlab.ranks.handle import RankHandle
from graftlab.ranks.messages import (
    AskWaitReason,
    Contact,
    Dispatch,
    DisplayData,
    FromRank,
    Hello,
    LinkReport,
    LiveOutput,
    Output,
    PlanAdopted,
    Reply,
    RunDone,
    RunSettled,
    StatusUpdate,
    TapSeen,
    WorldSwitch,
    unpack_from_rank,
)
from graftlab.rows.store import RowStore

logger = logging.getLogger(__name__)

P = ParamSpec("P")

# Milliseconds of rest after reading rows, unless a wake socket ends it. For a rank, waking a polling thread costs far
# more than sending a row. During the rest, rows gather in the socket, which holds a few hundred.
_REST = 20
_SHORT_REST = 2
_MANY_ROWS = 16


class MessageSink(Protocol):
    """Receives what the hub reads. Its methods run on the hub's thread, and must not wait for anything."""

    def on_rows(self, lines: Sequence[bytes]) -> None:
        """Handle encoded rows, in the order in which their rank sent them."""

    def on_message(self, message: FromRank, rank: RankHandle) -> None: ...

    def on_gone(self, rank: RankHandle) -> None:
        """Handle the end of the rank's process, which has happened or is about to."""


class Hub:
    """Reads from ranks until :meth:`stop`, and passes messages to the ``sink``."""

    def __init__(self, ranks: Sequence[RankHandle], sink: MessageSink) -> None:
        self._ranks = {rank.channel.fileno(): rank for rank in ranks}
        self._sink = sink
        self._added: deque[RankHandle] = deque()
        self._stopping = False
        self._wake = os.eventfd(0)
        self._thread = threading.Thread(target=self._run, name="graftlab-hub", daemon=True)
        self._thread.start()

    def add(self, rank: RankHandle) -> None:
        """Start reading from this rank too; any thread may call this."""
        self._added.append(rank)
        os.eventfd_write(self._wake, 1)

    def stop(self) -> None:
        """Read what has arrived, and end the thread."""
        if self._thread.is_alive():
            self._stopping = True
            os.eventfd_write(self._wake, 1)
            self._thread.join(5.0)

    def _run(self) -> None:
        poller, wake_sockets = select.poll(), _WakeSockets(self._wake)
        for each in self._ranks.values():
            poller.register(each.channel.fileno(), select.POLLIN)
            wake_sockets.add(each.wake_socket)
        poller.register(self._wake, select.POLLIN)
        stopping = False
        while not stopping:
            rows = 0
            ready = [descriptor for descriptor, _ in poller.poll()]
            if self._wake in ready:
                stopping = self._stopping
                os.eventfd_read(self._wake)
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
        os.close(self._wake)

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
    """Sockets that end a rest: readable when a rank has sent more than rows, has filled its socket, or is gone."""

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


class MessageRouter:
    """Passes what the hub receives to the parts of the session. A new message to the notebook needs one line here."""

    def __init__(self, rows: RowStore, runs: Runs, plans: Plans, taps: TapCatalog, queries: Queries) -> None:
        self._rows = rows
        self._runs = runs
        self._queries = queries
        self._handle = Dispatch[[RankHandle], None]()
        self._handle.on(Output, runs.note_output)
        self._handle.on(LiveOutput, runs.note_output)
        self._handle.on(DisplayData, runs.note_output)
        self._handle.on(RunDone, runs.note_done)
        self._handle.on(RunSettled, runs.note_settled)
        self._handle.on(TapSeen, taps.note)
        self._handle.on(PlanAdopted, plans.note_adopted)
        self._handle.on(Reply, lambda reply, rank: queries.on_reply(reply))
        self._handle.on(Hello, lambda hello, rank: self.on_joined(rank))
        self._handle.on(Contact, lambda contact, rank: self.on_contact(rank, contact))
        self._handle.on(LinkReport, lambda linked, rank: self.on_linked(rank, linked))
        self._handle.on(WorldSwitch, lambda moved, rank: self.on_moved(rank, moved))
        self._handle.on(AskWaitReason, lambda ask, rank: self.on_ask_missing(rank))
        self._handle.on(StatusUpdate, lambda where, rank: rank.note_status(where))
        # Set by the session server, where jobs join.
        self.on_contact: Callable[[RankHandle, Contact], None] = lambda rank, contact: None
        self.on_joined: Callable[[RankHandle], None] = lambda rank: None
        self.on_linked: Callable[[RankHandle, LinkReport], None] = lambda rank, linked: None
        self.on_moved: Callable[[RankHandle, WorldSwitch], None] = lambda rank, moved: None
        self.on_ask_missing: Callable[[RankHandle], None] = lambda rank: None
        self.on_left: Callable[[RankHandle], None] = lambda rank: None

    def on_rows(self, lines: Sequence[bytes]) -> None:
        self._rows.append(lines)

    def on_message(self, message: FromRank, rank: RankHandle) -> None:
        self._handle(message, rank)

    def on_gone(self, rank: RankHandle) -> None:
        self._runs.note_death(rank)
        self._queries.note_gone(rank)
        self.on_left(rank)
