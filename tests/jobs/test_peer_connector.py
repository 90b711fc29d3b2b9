"""How ranks connect: by memory that is proved to be shared, otherwise by TCP."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from kit.mailboxes import DEADLINE, in_background
from kit.processes import descriptors
from kit.support import wait_until

from graftlab.base.world import Place
from graftlab.exchange.arena import PAGE
from graftlab.exchange.channel import SocketChannel
from graftlab.exchange.keys import new_token
from graftlab.exchange.tcp import TcpChannel
from graftlab.jobs import peer_connector
from graftlab.jobs.peer_connector import PeerConnector
from graftlab.ranks.messages import Contact


@dataclass
class Ranks:
    connectors: list[PeerConnector]

    def link(self, seen_by: Callable[[int, Contact], Contact] = lambda rank, contact: contact) -> None:
        """Tell each of all others, as ``seen_by`` says that it sees them, and have all work until each has its links.

        Each on a separate thread, as it is a separate process otherwise: two that share memory wait for each other.
        """
        at_work = [in_background(lambda rank=rank: self._work(rank, seen_by)) for rank in range(len(self.connectors))]  # type: ignore[misc]
        for each in at_work:
            each.result(2 * DEADLINE)

    def _work(self, rank: int, seen_by: Callable[[int, Contact], Contact]) -> None:
        mine = self.connectors[rank]
        mine.add([seen_by(rank, other.contact) for other in self.connectors if other is not mine])

        def complete() -> bool:
            mine.work()
            return all(connector.complete for connector in self.connectors)

        wait_until(complete, "all links")


@pytest.fixture
def ranks() -> Iterator[Callable[[int, int], Ranks]]:
    with contextlib.ExitStack() as closing:

        def make(baseline: int, target: int) -> Ranks:
            token = new_token()
            places = Place("baseline", 0, baseline, target).everyone()
            made = [PeerConnector(place, token, "127.0.0.1") for place in places]
            for connector in made:
                closing.callback(connector.close)
            return Ranks(made)

        yield make


def test_ranks_of_one_machine_share_memory(ranks: Callable[[int, int], Ranks]) -> None:
    world = ranks(1, 2)
    world.link()
    assert [connector.kinds() for connector in world.connectors] == [((1, 2), ()), ((0, 2), ()), ((0, 1), ())]
    world.connectors[0].arena.map[100:105] = b"hello"
    _, arena = world.connectors[2].links[0]
    assert arena is not None
    assert arena.map[100:105] == b"hello"


def test_ranks_that_share_memory_stop_listening_once_linked(ranks: Callable[[int, int], Ranks]) -> None:
    world = ranks(1, 1)
    world.link()
    for connector in world.connectors:
        connector.seal()
        assert connector._router.over.is_set()
    channel, _ = world.connectors[0].links[1]
    assert isinstance(channel, SocketChannel)
    channel.send(b"still here")
    other, _ = world.connectors[1].links[0]
    assert other.receive() == [b"still here"]


def no_socket(contact: Contact) -> Contact:
    return msgspec.structs.replace(contact, socket="/nowhere/socket")


def other_memory(contact: Contact) -> Contact:
    """As if another host had a socket of the same name, whose memory is its own."""
    return msgspec.structs.replace(contact, nonce=bytes(32))


@pytest.mark.parametrize("hidden", [no_socket, other_memory])
def test_memory_not_proved_to_be_shared_is_not_used(
    hidden: Callable[[Contact], Contact], ranks: Callable[[int, int], Ranks]
) -> None:
    world = ranks(1, 2)
    # To the last rank the baseline is on another machine; the two ranks of the target share one.
    world.link(lambda rank, contact: hidden(contact) if (rank, contact.world_rank) == (2, 0) else contact)
    assert [connector.kinds() for connector in world.connectors] == [((1,), (2,)), ((0, 2), ()), ((1,), (0,))]
    channel, arena = world.connectors[2].links[0]
    assert arena is None
    assert isinstance(channel, TcpChannel)


def test_memory_without_the_announced_nonce_is_used_by_neither_rank(
    ranks: Callable[[int, int], Ranks],
) -> None:
    world = ranks(1, 2)
    world.connectors[0].arena.map[PAGE - 32 : PAGE] = bytes(32)
    world.link()
    assert [connector.kinds() for connector in world.connectors] == [((), (1, 2)), ((2,), (0,)), ((1,), (0,))]


def test_a_process_that_expects_a_different_rank_shares_no_memory(
    ranks: Callable[[int, int], Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = ranks(1, 1)
    answers = world.connectors[0]
    hand_over = answers._hand_over
    monkeypatch.setattr(answers, "_hand_over", lambda to, contact: hand_over(to, other_memory(contact)))
    world.link()
    assert [connector.kinds() for connector in world.connectors] == [((), (1,)), ((), (0,))]


def test_memory_is_not_shared_with_a_process_of_another_user(
    ranks: Callable[[int, int], Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_connector, "peer_uid", lambda connection: os.getuid() + 1)
    world = ranks(1, 1)
    world.link()
    assert [connector.kinds() for connector in world.connectors] == [((), (1,)), ((), (0,))]


def test_a_rank_whose_process_is_replaced_is_linked_again(ranks: Callable[[int, int], Ranks]) -> None:
    world = ranks(1, 1)
    world.link()
    stays, goes = world.connectors
    before = stays.links[1]
    stays.remove(1)
    assert not stays.complete
    assert stays.missing() == ["target[0]"]
    goes.close()
    world.connectors[1] = ranks(1, 1).connectors[1]
    world.link()
    assert stays.links[1] is not before
    assert stays.kinds() == ((1,), ())
    assert before[0].closed


def test_an_unreachable_rank_is_named_with_its_address(ranks: Callable[[int, int], Ranks]) -> None:
    world = ranks(1, 1)
    contact = msgspec.structs.replace(no_socket(world.connectors[0].contact), port=1)
    world.connectors[1].add([contact])
    world.connectors[1].work()
    assert world.connectors[1].missing() == ["baseline[0] (at 127.0.0.1, port 1, which does not answer)"]
    # It is no longer tried once it is gone.
    channel, _ = world.connectors[1]._trying[0]
    assert not channel.closed
    world.connectors[1].remove(0)
    assert channel.closed
    assert world.connectors[1].missing() == ["baseline[0]"]


def test_ranks_are_reported_in_their_order_however_they_were_linked(ranks: Callable[[int, int], Ranks]) -> None:
    connector = ranks(1, 1).connectors[0]
    links: Any = {32: (None, None), 9: (None, object()), 1: (None, None), 8: (None, None), 3: (None, object())}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connector, "_links", links)
        assert connector.kinds() == ((3, 9), (1, 8, 32))
        report = connector.linked(5)
        assert (report.memory, report.tcp) == connector.kinds()


def test_no_descriptor_of_anothers_memory_stays_open(ranks: Callable[[int, int], Ranks]) -> None:
    world = ranks(1, 1)
    before = descriptors()
    world.link()
    # One socket of each side. The mapping keeps the memory.
    assert len(descriptors() - before) == 4


def test_links_are_closed_with_their_connector(ranks: Callable[[int, int], Ranks]) -> None:
    world = ranks(1, 2)
    world.link()
    mine, *others = world.connectors
    channels = [channel for channel, _ in mine.links.values()]
    assert len(channels) == 2
    assert not any(channel.closed for channel in channels)
    mine.close()
    assert all(channel.closed for channel in channels)
    assert not any(channel.closed for each in others for rank, (channel, _) in each.links.items() if rank != 0)
