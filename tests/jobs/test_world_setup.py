"""How a job's process sets up a world beside its model: it connects, reports, waits for the others, or gives up."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest
from kit import processes
from kit.mailboxes import DEADLINE
from kit.support import wait_until

from graftlab.base.world import Place, RunInfo
from graftlab.errors import SessionError
from graftlab.exchange.keys import new_token
from graftlab.jobs.handshake import JoinAccepted, WorldShare
from graftlab.jobs.peer_connector import PeerConnector
from graftlab.jobs.world_setup import SetupContext, World, WorldSetup
from graftlab.plan.plan import GraftPlan
from graftlab.plan.wire import to_wire
from graftlab.ranks.descriptors import SharedDescriptors
from graftlab.ranks.messages import Contact, Contacts, LinkReport, WorldRequest

RUN, PLAN = RunInfo(3, 2, (0, 1)), GraftPlan(t2b="True", version=4)
REQUEST = WorldRequest(2, RUN, to_wire(PLAN))
PLACES = Place("baseline", 0, 1, 1).everyone()


class Rank:
    """A rank that sets up a world: the messages that it sends, and what it reports in the end."""

    def __init__(self, place: Place, *, fetch: Any = None, token: str | None = None) -> None:
        self.sent: list[Any] = []
        self.reports: queue.SimpleQueue[World | Exception] = queue.SimpleQueue()
        self.connectors: list[PeerConnector] = []

        def make_connector() -> PeerConnector:
            assert token is not None
            self.connectors.append(PeerConnector(place, token, "127.0.0.1"))
            return self.connectors[-1]

        connection: Any = Mock(send=self.sent.append)
        joined = JoinAccepted("/runs/one", "log", 7.0, 1 << 20, 0, 0)
        context = SetupContext(place, joined, connection, fetch, None if token is None else make_connector)
        self.setup = WorldSetup(context, REQUEST, self.reports.put)

    def world(self) -> World:
        found = self.reports.get(timeout=DEADLINE)
        assert isinstance(found, World), found
        return found

    def contact(self) -> Contact:
        wait_until(lambda: self.sent, "the rank's address")
        assert isinstance(self.sent[0], Contact)
        return self.sent[0]

    def await_end(self) -> None:
        wait_until(lambda: self.setup._wake < 0, "the end of the setup")


@pytest.fixture
def descriptors() -> Iterator[Callable[[Place], Any]]:
    """Gives a place its own copies of the descriptors that the session server has made."""
    shared = SharedDescriptors(PLACES)
    shared.make()

    def fetch(place: Place) -> Any:
        own = [os.dup(descriptor) for descriptor in shared.of(place)]
        return lambda world: (WorldShare(shared.segment_size, len(own)), own if world == REQUEST.world else [])

    yield fetch
    shared.release()


def exchange_a_message(worlds: list[World]) -> None:
    for world in worlds:
        assert (world.number, world.run, world.plan) == (2, RUN, PLAN)
        assert world.exchange.timeout == 7.0
        world.exchange.begin_run(RUN)
    worlds[0].exchange.announce(2, b"a plan")
    worlds[0].page[100:105] = b"hello"


def test_a_world_that_the_server_made_is_reported_once_it_is_finished(descriptors: Callable[[Place], Any]) -> None:
    ranks = [Rank(place, fetch=descriptors(place)) for place in PLACES]
    for number, rank in enumerate(ranks):
        wait_until(lambda rank=rank: rank.sent, "the connections")  # type: ignore[misc]
        assert rank.sent == [LinkReport(2, (1 - number,), ())]
        assert (rank.setup.world, rank.setup.missing(), rank.reports.empty()) == (2, [], True)
        rank.setup.finish()
    worlds = [rank.world() for rank in ranks]
    exchange_a_message(worlds)
    for world in worlds:
        # The server reads the rank's status there after the connection was cut.
        assert world.segment is not None
        assert os.pread(world.segment, 5, 100) == bytes(world.page[100:105])
    for world in worlds:
        world.close()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(world.segment or -1)


def test_a_world_that_is_abandoned_is_closed_and_not_reported(descriptors: Callable[[Place], Any]) -> None:
    before = processes.descriptors()
    rank = Rank(PLACES[0], fetch=descriptors(PLACES[0]))
    wait_until(lambda: rank.sent, "the connections")
    rank.setup.abandon()
    rank.await_end()
    assert rank.reports.empty()
    assert processes.descriptors() <= before
    # The thread has ended, and its descriptor may be another's.
    rank.setup.finish()


def test_an_error_is_reported_unless_the_world_was_abandoned() -> None:
    rank = Rank(PLACES[0], fetch=Mock(side_effect=SessionError("this world was abandoned")))
    with pytest.raises(SessionError, match="this world was abandoned"):
        raise rank.reports.get(timeout=DEADLINE)
    rank.await_end()
    setups: queue.SimpleQueue[WorldSetup] = queue.SimpleQueue()

    def fetch(world: int) -> Any:
        setups.get(timeout=DEADLINE).abandon()
        raise SessionError("the connection was closed")

    rank = Rank(PLACES[0], fetch=fetch)
    setups.put(rank.setup)
    rank.await_end()
    assert rank.reports.empty()


def test_ranks_that_connect_themselves_wait_for_contacts_and_for_the_others() -> None:
    token = new_token()
    ranks = [Rank(place, token=token) for place in PLACES]
    contacts = [rank.contact() for rank in ranks]
    assert ranks[0].setup.missing() == ["target[0]"]
    # What has arrived before all are connected is no reason to end.
    ranks[0].setup.finish()
    for rank, contact in zip(ranks, reversed(contacts), strict=True):
        rank.setup.add_contacts(Contacts((contact,)))
    wait_until(lambda: len(ranks[1].sent) > 1, "the connections")
    assert ranks[1].reports.empty()
    ranks[1].setup.finish()
    worlds = [rank.world() for rank in ranks]
    assert [rank.sent[1:] for rank in ranks] == [[LinkReport(2, (1,), ())], [LinkReport(2, (0,), ())]]
    exchange_a_message(worlds)
    for rank, world, contact in zip(ranks, worlds, contacts, strict=True):
        assert (world.connector, world.segment) == (rank.connectors[0], None)
        # It listens no longer.
        assert not os.path.exists(contact.socket)
        world.close()


def test_a_connecting_rank_that_gives_up_leaves_nothing_open() -> None:
    rank = Rank(PLACES[1], token=new_token())
    contact = rank.contact()
    rank.setup.abandon()
    rank.await_end()
    assert rank.reports.empty()
    assert not os.path.exists(contact.socket)
    assert rank.connectors[0]._router.over.is_set()


def test_a_rank_that_gives_up_after_it_was_connected_closes_its_links() -> None:
    def sockets() -> set[tuple[str, str]]:
        return {each for each in processes.descriptors() if each[1].startswith("socket:")}

    before = sockets()
    token = new_token()
    ranks = [Rank(place, token=token) for place in PLACES]
    for rank, contact in zip(ranks, [rank.contact() for rank in reversed(ranks)], strict=True):
        rank.setup.add_contacts(Contacts((contact,)))
    for rank in ranks:
        wait_until(lambda rank=rank: len(rank.sent) > 1, "the connections")  # type: ignore[misc]
    for rank in ranks:
        rank.setup.abandon()
        rank.await_end()
    assert sockets() <= before


@pytest.mark.parametrize("has_links", [True, False])
def test_a_world_that_ends_closes_its_exchange_its_links_and_its_memory(has_links: bool) -> None:
    exchange, connector, segment = Mock(), Mock(), os.memfd_create("segment")
    page: Any = None
    World(1, RUN, PLAN, exchange, page, *((segment, connector) if has_links else (None, None))).close()
    exchange.close.assert_called_once_with()
    assert connector.close.called is has_links
    if not has_links:
        os.close(segment)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(segment)
