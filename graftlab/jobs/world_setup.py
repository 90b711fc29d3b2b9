"""How a job's process comes together with all others, each time that a rank of either side is another process.

Every time it gets memory and connections of its own for that: a *world*. So nothing that was sent in one world can be
received in another.
"""

from __future__ import annotations

import logging
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
from graftlab.grafting.receive_pipeline import PendingRow
from graftlab.jobs.handshake import JoinAccepted, WorldShare
from graftlab.jobs.job_connection import JobConnection
from graftlab.jobs.peer_connector import PeerConnector
from graftlab.plan.plan import GraftPlan
from graftlab.plan.wire import from_wire
from graftlab.ranks.descriptors import make_exchange
from graftlab.ranks.messages import Contact, Contacts, LinkReport, WorldRequest

logger = logging.getLogger(__name__)

# Seconds between two looks at connections that have not come about.
_LOOK = 0.5


@dataclass(frozen=True)
class World:
    """What joins this rank with all others, and the run that begins in it.

    ``segment`` is a descriptor of this rank's memory, where the holder of the session has made that.
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
        self.close_but_exchange()

    def close_but_exchange(self) -> None:
        """Close all but the exchange."""
        if self.connector is not None:
            self.connector.close()
        if self.segment is not None:
            os.close(self.segment)


@dataclass(frozen=True)
class SetupContext:
    """What a rank needs to connect to the others.

    ``fetch_share`` gets its share of a world that the session server has made; ``make_connector`` is given where every
    rank makes its own connections instead.
    """

    place: Place
    joined: JoinAccepted
    connection: JobConnection
    fetch_share: Callable[[int], tuple[WorldShare, list[int]]]
    make_connector: Callable[[], PeerConnector] | None


class WorldSetup:
    """One time: it works on a thread of its own until :meth:`finish` or :meth:`abandon`.

    ``report`` gets the world, or what went wrong, on that thread.
    """

    def __init__(
        self, context: SetupContext, message: WorldRequest, report: Callable[[World | Exception], None]
    ) -> None:
        self._context = context
        self._message = message
        self._report = report
        self._contacts: queue.SimpleQueue[tuple[Contact, ...]] = queue.SimpleQueue()
        self._finishing = threading.Event()
        self._abandoned = threading.Event()
        # Whoever waits for a share, which comes with nothing but patience, looks at these events alone.
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ended = threading.Lock()
        self._connector: PeerConnector | None = None
        threading.Thread(target=self._work, name="graftlab-world-setup", daemon=True).start()

    @property
    def world(self) -> int:
        return self._message.world

    def missing(self) -> list[str]:
        """With whom there is no connection yet, as far as this rank knows."""
        return [] if self._connector is None else self._connector.missing()

    def add_contacts(self, message: Contacts) -> None:
        """These ranks can be reached so."""
        self._contacts.put(message.contacts)
        self._rouse()

    def finish(self) -> None:
        """All ranks are connected with all others."""
        self._finishing.set()
        self._rouse()

    def abandon(self) -> None:
        """The world will not be."""
        self._abandoned.set()
        self._rouse()

    def _rouse(self) -> None:
        with self._ended:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    # ---- on its own thread --------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            world = self._linked() if self._context.make_connector is not None else self._shared()
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

    def _shared(self) -> World | None:
        """With what the holder of the session has made for all."""
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
        while not self._finishing.is_set():
            poller.poll()
            os.eventfd_read(self._wake)
            if self._abandoned.is_set():
                world.close()
                return None
        return world

    def _linked(self) -> World | None:
        """Each rank makes its own connections, as it can."""
        context = self._context
        assert context.make_connector is not None
        connector = self._connector = context.make_connector()
        complete = False
        try:
            context.connection.send(connector.contact)
            complete = self._link(connector)
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

    def _link(self, connector: PeerConnector) -> bool:
        """Whether all connections are there, and are to be used."""
        poller = select.poll()
        for descriptor in (self._wake, *connector.descriptors()):
            poller.register(descriptor, select.POLLIN)
        told: object = None
        while not self._abandoned.is_set():
            while not self._contacts.empty():
                connector.add(self._contacts.get())
                told = told if connector.complete else None
            connector.work()
            if connector.complete and told != connector.kinds():
                told = connector.kinds()
                self._context.connection.send(connector.linked(self.world))
            if connector.complete and self._finishing.is_set():
                return True
            if any(descriptor == self._wake for descriptor, _ in poller.poll(_LOOK * 1000)):
                os.eventfd_read(self._wake)
        return False

    def _world(
        self, exchange: Exchange[PendingRow], page: mmap, segment: int | None, connector: PeerConnector | None
    ) -> World:
        message = self._message
        return World(message.world, message.info, from_wire(message.plan), exchange, page, segment, connector)
