"""Connects a job's process to all other ranks, and again whenever a new process replaces one of them.

Each time makes a *world* with its own memory and connections, so nothing sent in one world arrives in another.
"""

from __future__ import annotations

import os
import queue
import select
import threading
from collections.abc import Callable
from dataclasses import dataclass
from mmap import mmap

from graftlab.base.world import Place, RunInfo
from graftlab.exchange.contract import Exchange
from graftlab.exchange.rank_exchange import RankExchange
from graftlab.grafting.tap_rows import PendingRow
from graftlab.jobs.handshake import JoinAccepted, WorldShare
from graftlab.jobs.job_connection import JobConnection
from graftlab.jobs.peer_connector import PeerConnector
from graftlab.plan.plan import GraftPlan
from graftlab.plan.wire import from_wire
from graftlab.ranks.descriptors import make_exchange
from graftlab.ranks.messages import Contact, Contacts, LinkReport, WorldRequest

# Seconds between two checks of connections that have not been made yet.
_CHECK_INTERVAL = 0.5


@dataclass(frozen=True)
class World:
    """The connections of this rank to all others, and the run that begins with them.

    ``segment`` is a descriptor of this rank's memory, if the session server made it.
    """

    number: int
    run: RunInfo
    plan: GraftPlan
    exchange: Exchange[PendingRow]
    page: mmap
    segment: int | None
    connector: PeerConnector | None

    def close(self) -> None:
        self.exchange.close()
        self.close_connections()

    def close_connections(self) -> None:
        """Close everything but the exchange."""
        if self.connector is not None:
            self.connector.close()
        if self.segment is not None:
            os.close(self.segment)


@dataclass(frozen=True)
class SetupContext:
    """What a rank needs to connect to the others.

    ``fetch_share`` fetches its share of a world that the session server has made. ``make_connector`` is given instead
    if ranks make their own connections.
    """

    place: Place
    joined: JoinAccepted
    connection: JobConnection
    fetch_share: Callable[[int], tuple[WorldShare, list[int]]]
    make_connector: Callable[[], PeerConnector] | None


class WorldSetup:
    """Sets up one world, on its own thread, until :meth:`finish` or :meth:`abandon`.

    ``report`` is called with the world, or the error, on that thread.
    """

    def __init__(
        self, context: SetupContext, message: WorldRequest, report: Callable[[World | Exception], None]
    ) -> None:
        self._context = context
        self._message = message
        self._report = report
        self._contacts: queue.SimpleQueue[tuple[Contact, ...]] = queue.SimpleQueue()
        self._finished = threading.Event()
        self._abandoned = threading.Event()
        # Wakes the thread after a change of one of these.
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ended = threading.Lock()
        self._connector: PeerConnector | None = None
        threading.Thread(target=self._set_up, name="graftlab-world-setup", daemon=True).start()

    @property
    def world(self) -> int:
        return self._message.world

    def missing(self) -> list[str]:
        """Describe the ranks to which this one has no connection yet."""
        return [] if self._connector is None else self._connector.missing()

    def add_contacts(self, message: Contacts) -> None:
        """Add the addresses of other ranks."""
        self._contacts.put(message.contacts)
        self._wake_up()

    def finish(self) -> None:
        """Report the world, because all ranks are connected to all others."""
        self._finished.set()
        self._wake_up()

    def abandon(self) -> None:
        """Stop setting up the world."""
        self._abandoned.set()
        self._wake_up()

    def _wake_up(self) -> None:
        with self._ended:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    # ---- on its own thread --------------------------------------------------------------------------------------

    def _set_up(self) -> None:
        try:
            world = self._connect() if self._context.make_connector is not None else self._fetch()
        except Exception as error:
            if not self._abandoned.is_set():
                self._report(error)
        else:
            if world is not None:
                self._report(world)
        finally:
            with self._ended:
                os.close(self._wake)
                self._wake = -1

    def _fetch(self) -> World | None:
        """Connect with the descriptors that the session server has made. Returns None if abandoned."""
        context = self._context
        share, descriptors = context.fetch_share(self.world)
        segment = os.dup(descriptors[context.place.world_rank])
        joined = context.joined
        exchange, page = make_exchange(
            context.place, descriptors, share.segment_size, budget=joined.buffer_budget, timeout=joined.tap_timeout
        )
        world = self._world(exchange, page, segment, None)
        others = tuple(other.world_rank for other in context.place.everyone() if other != context.place)
        context.connection.send(LinkReport(self.world, others, ()))
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        while not self._finished.is_set():
            poller.poll()
            os.eventfd_read(self._wake)
            if self._abandoned.is_set():
                world.close()
                return None
        return world

    def _connect(self) -> World | None:
        """Connect to each rank, by shared memory or TCP. Returns None if abandoned."""
        context = self._context
        assert context.make_connector is not None
        connector = self._connector = context.make_connector()
        complete = False
        try:
            context.connection.send(connector.contact)
            complete = self._make_connections(connector)
        finally:
            connector.seal()
            if not complete:
                connector.close()
        if not complete:
            return None
        joined = context.joined
        exchange: Exchange[PendingRow] = RankExchange(
            context.place,
            connector.arena,
            connector.links,
            budget=joined.buffer_budget,
            timeout=joined.tap_timeout,
        )
        return self._world(exchange, connector.arena.map, None, connector)

    def _make_connections(self, connector: PeerConnector) -> bool:
        """Make the connections; returns False if abandoned."""
        poller = select.poll()
        for descriptor in (self._wake, *connector.descriptors()):
            poller.register(descriptor, select.POLLIN)
        reported: object = None
        while not self._abandoned.is_set():
            while not self._contacts.empty():
                connector.add(self._contacts.get())
                reported = reported if connector.complete else None
            connector.work()
            if connector.complete and reported != connector.kinds():
                reported = connector.kinds()
                self._context.connection.send(connector.linked(self.world))
            if connector.complete and self._finished.is_set():
                return True
            if any(descriptor == self._wake for descriptor, _ in poller.poll(_CHECK_INTERVAL * 1000)):
                os.eventfd_read(self._wake)
        return False

    def _world(
        self, exchange: Exchange[PendingRow], page: mmap, segment: int | None, connector: PeerConnector | None
    ) -> World:
        message = self._message
        return World(message.world, message.info, from_wire(message.plan), exchange, page, segment, connector)
