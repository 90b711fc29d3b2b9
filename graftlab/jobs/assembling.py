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
from graftlab.jobs.greeting import Joined, Share
from graftlab.jobs.job_line import JobLine
from graftlab.jobs.linking import Linker
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
    linker: Linker | None

    def close(self) -> None:
        self.exchange.close()
        self.let_go()

    def let_go(self) -> None:
        """Close all but the exchange."""
        if self.linker is not None:
            self.linker.close()
        if self.segment is not None:
            os.close(self.segment)


@dataclass(frozen=True)
class Means:
    """With what a rank connects: ``fetch`` gets its share of a world where the holder of the session has made that,
    ``make_linker`` begins to make connections where every rank makes its own."""

    place: Place
    joined: Joined
    line: JobLine
    fetch: Callable[[int], tuple[Share, list[int]]]
    make_linker: Callable[[], Linker] | None


class Assembly:
    """One time: it works on a thread of its own until :meth:`finish` or :meth:`give_up`.

    ``tell`` gets the world, or what went wrong, on that thread.
    """

    def __init__(self, means: Means, message: WorldRequest, tell: Callable[[World | Exception], None]) -> None:
        self._means = means
        self._message = message
        self._tell = tell
        self._contacts: queue.SimpleQueue[tuple[Contact, ...]] = queue.SimpleQueue()
        self._finishing = threading.Event()
        self._given_up = threading.Event()
        # Whoever waits for a share, which comes with nothing but patience, looks at these events alone.
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ended = threading.Lock()
        self._linker: Linker | None = None
        threading.Thread(target=self._work, name="graftlab-assembly", daemon=True).start()

    @property
    def world(self) -> int:
        return self._message.world

    def missing(self) -> list[str]:
        """With whom there is no connection yet, as far as this rank knows."""
        return [] if self._linker is None else self._linker.missing()

    def meet(self, message: Contacts) -> None:
        """These ranks can be reached so."""
        self._contacts.put(message.contacts)
        self._rouse()

    def finish(self) -> None:
        """All ranks are connected with all others."""
        self._finishing.set()
        self._rouse()

    def give_up(self) -> None:
        """The world will not be."""
        self._given_up.set()
        self._rouse()

    def _rouse(self) -> None:
        with self._ended:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    # ---- on its own thread --------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            world = self._linked() if self._means.make_linker is not None else self._shared()
        except Exception as error:
            if not self._given_up.is_set():
                self._tell(error)
        else:
            if world is not None:
                self._tell(world)
        finally:
            with self._ended:
                os.close(self._wake)
                self._wake = -1

    def _shared(self) -> World | None:
        """With what the holder of the session has made for all."""
        means = self._means
        share, descriptors = means.fetch(self.world)
        segment = os.dup(descriptors[means.place.world_rank])
        joined = means.joined
        exchange, page = make_exchange(
            means.place, descriptors, share.segment_size, budget=joined.buffer_budget, timeout=joined.tap_timeout
        )
        world = self._world(exchange, page, segment, None)
        others = tuple(other.world_rank for other in means.place.everyone() if other != means.place)
        means.line.send(LinkReport(self.world, others, ()))
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        while not self._finishing.is_set():
            poller.poll()
            os.eventfd_read(self._wake)
            if self._given_up.is_set():
                world.close()
                return None
        return world

    def _linked(self) -> World | None:
        """Each rank makes its own connections, as it can."""
        means = self._means
        assert means.make_linker is not None
        linker = self._linker = means.make_linker()
        complete = False
        try:
            means.line.send(linker.contact)
            complete = self._link(linker)
        finally:
            linker.seal()
            if not complete:
                linker.close()
        if not complete:
            return None
        joined = means.joined
        exchange: Exchange[PendingRow] = RankExchange(
            means.place,
            linker.arena,
            linker.links,
            budget=joined.buffer_budget,
            timeout=joined.tap_timeout,
        )
        return self._world(exchange, linker.arena.map, None, linker)

    def _link(self, linker: Linker) -> bool:
        """Whether all connections are there, and are to be used."""
        poller = select.poll()
        for descriptor in (self._wake, *linker.descriptors()):
            poller.register(descriptor, select.POLLIN)
        told: object = None
        while not self._given_up.is_set():
            while not self._contacts.empty():
                linker.meet(self._contacts.get())
                told = told if linker.complete else None
            linker.work()
            if linker.complete and told != linker.kinds():
                told = linker.kinds()
                self._means.line.send(linker.linked(self.world))
            if linker.complete and self._finishing.is_set():
                return True
            if any(descriptor == self._wake for descriptor, _ in poller.poll(_LOOK * 1000)):
                os.eventfd_read(self._wake)
        return False

    def _world(self, exchange: Exchange[PendingRow], page: mmap, segment: int | None, linker: Linker | None) -> World:
        message = self._message
        return World(message.world, message.info, from_wire(message.plan), exchange, page, segment, linker)
