"""How ranks connect: by memory that is proved to be shared, otherwise by TCP."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from kit.mailboxes import DEADLINE, in_background
from kit.processes import descriptors
from kit.support import wait_until

from graftlab.base import wire
from graftlab.base.world import Place
from graftlab.errors import SessionError
from graftlab.exchange.arena import PAGE
from graftlab.exchange.channel import SocketChannel
from graftlab.exchange.keys import new_token
from graftlab.exchange.tcp import TcpChannel
from graftlab.jobs import peer_connector
from graftlab.jobs.peer_connector import PeerConnector, _PeerHello
from graftlab.ranks.descriptors import send_descriptors
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


@pytest.mark.parametrize("suspicious", ["the one that connects", "the one that accepts"])
def test_memory_is_not_shared_with_a_process_of_another_user(
    suspicious: str, ranks: Callable[[int, int], Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only the end that accepts has the socket's path as its own name.
    accepts = suspicious == "the one that accepts"
    monkeypatch.setattr(peer_connector, "peer_uid", lambda end: os.getuid() + (bool(end.getsockname()) == accepts))
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


def linked_early(world: Ranks) -> tuple[PeerConnector, PeerConnector]:
    """The two ranks, after the second has connected before its contact has arrived at the first."""
    stays, early = world.connectors
    joining = in_background(lambda: early.add([stays.contact]))

    def accepted() -> bool:
        stays.work()
        return stays.complete

    wait_until(accepted, "the link")
    joining.result(DEADLINE)
    return stays, early


def test_a_rank_that_connects_before_its_contact_arrives_keeps_its_link(ranks: Callable[[int, int], Ranks]) -> None:
    stays, early = linked_early(ranks(1, 1))
    before = stays.links[1]
    stays.add([early.contact])
    assert stays.links[1] is before
    assert stays.kinds() == ((1,), ())
    before[0].send(b"hello")
    assert early.links[0][0].receive() == [b"hello"]
    # The other rank may find only now that it cannot verify the memory, and ask by TCP.
    early._connect_over_tcp(stays.contact)

    def replaced() -> bool:
        early.work()
        stays.work()
        return stays.kinds() == ((), (1,))

    wait_until(replaced, "a link by TCP")
    assert before[0].closed


def test_a_removed_rank_that_is_added_again_connects_again(ranks: Callable[[int, int], Ranks]) -> None:
    stays, early = linked_early(ranks(1, 1))
    before = stays.links[1]
    early.remove(0)
    joining = in_background(lambda: early.add([stays.contact]))

    def accepted() -> bool:
        stays.work()
        return stays.links[1] is not before

    wait_until(accepted, "another link")
    joining.result(DEADLINE)
    assert before[0].closed
    assert early.kinds() == ((0,), ())
    # Without its contact, nothing is known of it but its link.
    stays.add([early.contact])
    stays.remove(1)
    assert stays.missing() == ["target[0]"]


def test_a_process_that_takes_a_ranks_place_replaces_its_link(ranks: Callable[[int, int], Ranks]) -> None:
    stays, early = linked_early(ranks(1, 1))
    channel, _ = stays.links[1]
    new = msgspec.structs.replace(early.contact, nonce=bytes(32), port=5)
    stays.add([new])
    assert channel.closed
    assert not stays.complete
    assert stays.missing() == ["target[0] (at 127.0.0.1, port 5, which does not answer)"]


def test_only_ranks_without_a_link_are_missing(ranks: Callable[[int, int], Ranks]) -> None:
    first, _, last = ranks(1, 2).connectors
    joining = in_background(lambda: last.add([first.contact]))

    def accepted() -> bool:
        first.work()
        return 2 in first.links

    wait_until(accepted, "the link")
    joining.result(DEADLINE)
    assert first.missing() == ["target[0]"]
    assert not first.complete


def link_by_tcp(world: Ranks) -> None:
    world.link(lambda rank, contact: no_socket(contact))


def test_a_link_by_tcp_stays_however_long_the_ranks_work(
    ranks: Callable[[int, int], Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_connector, "_RETRY", -1)
    world = ranks(1, 1)
    link_by_tcp(world)
    links = [dict(connector.links) for connector in world.connectors]
    for _ in range(2):
        for connector in world.connectors:
            connector.work()
    assert [connector.links for connector in world.connectors] == links
    assert not any(channel.closed or channel.ended for each in links for channel, _ in each.values())  # type: ignore[union-attr]


def test_memory_that_only_one_rank_could_verify_is_replaced_by_tcp(
    ranks: Callable[[int, int], Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = ranks(1, 1)
    accepts = world.connectors[0]
    accepts.arena.map[PAGE - 32 : PAGE] = bytes(32)
    kept: list[Any] = []
    keep = accepts._keep
    monkeypatch.setattr(accepts, "_keep", lambda contact, link: (kept.append(link), keep(contact, link)))
    world.link()
    [(channel, _)] = kept
    assert channel.closed
    assert accepts.kinds() == ((), (1,))


def test_a_connection_that_has_ended_is_no_link(ranks: Callable[[int, int], Ranks]) -> None:
    stays, goes = ranks(1, 1).connectors
    goes.add([no_socket(stays.contact)])

    def opened() -> bool:
        stays._router.pump()
        goes._router.pump()
        return goes._trying[0][0].linked

    wait_until(opened, "the connection")
    goes.close()
    channel: Any = stays._router.channel_from(goes.contact.name)

    def ended() -> bool:
        stays._router.pump()
        return bool(channel.ended)

    wait_until(ended, "its end")
    stays.add([goes.contact])
    stays.work()
    assert not stays.complete


def test_a_rank_that_does_not_answer_is_tried_again_after_fifteen_seconds(
    ranks: Callable[[int, int], Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(peer_connector, "time", SimpleNamespace(monotonic=lambda: now))
    connector = ranks(1, 1).connectors[1]
    with socket.create_server(("127.0.0.1", 0)) as silent:
        contact = msgspec.structs.replace(no_socket(connector.contact), world_rank=0, port=silent.getsockname()[1])
        connector.add([contact])
        first, _ = connector._trying[0]
        now += 15
        connector.work()
        assert connector._trying[0][0] is first
        now += 0.1
        connector.work()
        second, since = connector._trying[0]
        assert second is not first
        assert first.name not in connector._router._channels
        assert since == now
        assert not connector.complete
    # One that refuses is tried again at once.

    def refused() -> bool:
        connector._router.pump()
        return connector._trying[0][0].ended

    wait_until(refused, "the refusal")
    connector.work()
    assert connector._trying[0][0] is not second
    wait_until(refused, "the next refusal")


def knock(connector: PeerConnector, hello: _PeerHello) -> socket.socket:
    """Ask to share memory as another process of this machine may; its memory has the nonce that it gives."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(DEADLINE)
    connection.connect(connector.contact.socket)
    said = wire.encode(hello)
    connection.sendall(len(said).to_bytes(2, "little") + said)
    memory = os.memfd_create("memory")
    os.pwrite(memory, bytes(PAGE - 32) + hello.nonce, 0)
    send_descriptors(connection, [memory])
    os.close(memory)
    return connection


@pytest.mark.parametrize(
    ("claims", "nonce", "expects"),
    [
        (2, b"n" * 32, "another process"),
        (2, b"x" * 32, "this one"),
        (0, b"n" * 32, "this one"),
        (1, b"n" * 32, "this one"),
        (3, b"n" * 32, "this one"),
    ],
)
def test_a_process_that_is_no_rank_of_this_world_shares_no_memory(
    claims: int, nonce: bytes, expects: str, ranks: Callable[[int, int], Ranks], caplog: pytest.LogCaptureFixture
) -> None:
    connector = ranks(1, 2).connectors[1]
    connector.add([Contact(2, "", b"n" * 32, b"", "", 0)])
    yours = connector.contact.nonce if expects == "this one" else bytes(32)
    with knock(connector, _PeerHello(claims, nonce, yours)) as connection:
        connector.work()
        assert connector.links == {}
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""
    assert "target[0]: a process that wanted to share memory was refused" in caplog.text
    with knock(connector, _PeerHello(2, b"n" * 32, connector.contact.nonce)):
        connector.work()
        assert connector.kinds() == ((2,), ())


def test_silent_processes_are_given_up_and_their_number_is_logged(
    ranks: Callable[[int, int], Ranks], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(peer_connector, "_SHARE_LIMIT", 0.01)
    connector = ranks(1, 1).connectors[1]
    ends = []
    for _ in range(7):
        ends.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        ends[-1].connect(connector.contact.socket)
    before = descriptors()
    in_background(connector.work).result(DEADLINE)
    # One that accepts and does not answer is not on this machine.
    silent = Path(connector.contact.socket).with_name("silent")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(str(silent))
        listening.listen()
        contact = msgspec.structs.replace(connector.contact, world_rank=0, socket=str(silent), port=1)
        in_background(lambda: connector.add([contact])).result(DEADLINE)
    assert not any("silent" in of for _, of in descriptors())
    assert 0 in connector._trying
    assert len(descriptors() - before) <= 1
    for end in ends:
        end.settimeout(DEADLINE)
        assert end.recv(1) == b""
        end.close()
    connector.close()
    assert "2 more processes were refused" in caplog.text


def test_sealed_ranks_leave_nothing_behind_and_keep_what_they_use(ranks: Callable[[int, int], Ranks]) -> None:
    world = ranks(1, 1)
    link_by_tcp(world)
    before = descriptors()
    sends, receives = world.connectors
    sends.links[1][0].send(b"hello")
    channel: Any = receives.links[0][0]

    def arrived() -> bool:
        receives._router.pump()
        return bool(channel.arrived)

    wait_until(arrived, "a frame")
    # Where files in /tmp are cleaned up, it may be gone already.
    shutil.rmtree(Path(sends.contact.socket).parent)
    for connector in world.connectors:
        connector.seal()
        assert not Path(connector.contact.socket).parent.exists()
    # The listening socket and the memory of each; what is mapped stays.
    assert len(before - descriptors()) == 4
    # The frame was read before its reader looks, which only sees that there is something to read.
    assert select.select([channel], [], [], DEADLINE)[0]
    assert channel.receive() == [b"hello"]
    for connector in world.connectors:
        connector.close()
        assert connector._router.over.is_set()


def test_ranks_that_give_up_before_they_are_sealed_leave_nothing_behind() -> None:
    before = descriptors()
    connector = PeerConnector(Place("target", 0, 1, 1), new_token(), "127.0.0.1")
    folder = Path(connector.contact.socket).parent
    assert folder.exists()
    memory = connector.arena.map
    connector.close()
    connector.close()
    assert not folder.exists()
    del connector, memory
    assert not {of for _, of in descriptors() - before if "socket" in of or "memfd" in of or "shm" in of}


def test_ranks_meet_in_a_folder_that_only_their_user_can_enter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_connector, "Path", lambda where: tmp_path if where == "/tmp" else Path(where))
    folder = peer_connector._own_folder()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert peer_connector._own_folder() == folder == tmp_path / f"graftlab-{os.getuid()}"
    folder.chmod(0o711)
    with pytest.raises(SessionError, match="must be a folder of this user with mode 0700; remove it"):
        peer_connector._own_folder()
    folder.chmod(0o700)
    another = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: another)
    folder.rename(tmp_path / f"graftlab-{another}")
    before = descriptors()
    with pytest.raises(SessionError, match="must be a folder of this user"):
        PeerConnector(Place("target", 0, 1, 1), new_token(), "127.0.0.1")
    # It was refused before anything was open.
    assert descriptors() <= before


def test_a_rank_has_a_socket_wherever_temporary_files_are(
    ranks: Callable[[int, int], Ranks], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    long = tmp_path / ("long" * 30)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    connector = ranks(1, 1).connectors[0]
    assert Path(connector.contact.socket).is_socket()
    assert Path(connector.contact.socket).parents[1] == peer_connector._own_folder()


def test_addresses_of_this_machine_are_known() -> None:
    assert peer_connector.address_towards("127.0.0.1", 1) == "127.0.0.1"
    assert peer_connector.is_own_address("127.0.0.1")
    # Reserved for documentation, so no machine has it.
    assert not peer_connector.is_own_address("192.0.2.1")
