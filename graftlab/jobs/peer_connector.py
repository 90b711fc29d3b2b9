"""Connects a rank to all others, which may be on several machines.

Two ranks share memory if one can send the other a descriptor of its segment over a Unix socket, and the other finds the
announced nonce in it. This is tried first, because names and addresses prove nothing: containers of one machine may
share no memory, and two machines may have the same name. Otherwise they use TCP.

Of two ranks the one with the higher world rank connects to the other.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from graftlab.base import wire
from graftlab.base.world import Place
from graftlab.errors import GraftError, MessageError, SessionError
from graftlab.exchange.arena import PAGE, Arena, create_segment
from graftlab.exchange.channel import SocketChannel
from graftlab.exchange.keys import derive_keys
from graftlab.exchange.peers import Link
from graftlab.exchange.tcp import RouterSocket, TcpChannel
from graftlab.jobs.handshake import receive_exactly
from graftlab.jobs.refusals import RefusalLog
from graftlab.jobs.rendezvous import peer_uid
from graftlab.ranks.descriptors import receive_descriptors, send_descriptors
from graftlab.ranks.messages import Contact, LinkReport

logger = logging.getLogger(__name__)

_NONCE = 32
# The nonce's place in a segment's first page, behind the rank's status.
_NONCE_AT = slice(PAGE - _NONCE, PAGE)
# Seconds for two processes of one machine to exchange their descriptors.
_SHARE_LIMIT = 10.0
# Seconds after which a connection that has not been made is tried again.
_RETRY = 15.0


class _PeerHello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first message over a Unix socket, and its answer: the sender's rank, and the nonce that it expects."""

    world_rank: int
    nonce: bytes
    yours: bytes


_decoder = wire.Decoder(_PeerHello)


class PeerConnector:
    """Makes one rank's links. The caller adds the other ranks, and calls :meth:`work` when a descriptor is readable."""

    def __init__(self, place: Place, token: str, address: str, ports: Sequence[int] = (0,)) -> None:
        """Other machines reach this one at ``address``. Raises :class:`SessionError`."""
        self._place = place
        self._known: dict[int, Contact] = {}
        self._links: dict[int, Link] = {}
        # Nonces of the ranks that share memory with this one.
        self._nonces: dict[int, bytes] = {}
        self._trying: dict[int, tuple[TcpChannel, float]] = {}
        self._refusals = RefusalLog()
        nonce = secrets.token_bytes(_NONCE)
        name = f"{place.label} {secrets.token_hex(8)}".encode()
        # What may refuse comes before all that would have to be closed then.
        folder = _own_folder()
        try:
            self._router = RouterSocket(derive_keys(token), name, address, ports)
        except OSError as error:
            raise SessionError(f"{place.label} cannot be reached by ranks on other machines: {error}") from error
        self._segment, self._size = create_segment()
        self.arena = Arena(self._segment, self._size, writable=True)
        self.arena.map[_NONCE_AT] = nonce
        self._folder = Path(tempfile.mkdtemp(prefix="link-", dir=folder))
        path = self._folder / "socket"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(1024)
        self._listener.setblocking(False)
        self.contact = Contact(place.world_rank, str(path), nonce, name, address, self._router.port)

    # ---- other ranks --------------------------------------------------------------------------------------------

    def add(self, contacts: Sequence[Contact]) -> None:
        """Add ranks that have joined."""
        for contact in contacts:
            if self._nonces.get(contact.world_rank) == contact.nonce:
                # The rank has connected before its contact arrived.
                self._known[contact.world_rank] = contact
                continue
            self.remove(contact.world_rank)
            self._known[contact.world_rank] = contact
            if contact.world_rank < self._place.world_rank:
                self._connect(contact)

    def remove(self, world_rank: int) -> None:
        """Remove a rank that is gone."""
        self._known.pop(world_rank, None)
        self._nonces.pop(world_rank, None)
        trying, link = self._trying.pop(world_rank, None), self._links.pop(world_rank, None)
        for channel in (trying and trying[0], link and link[0]):
            if channel:
                channel.close()

    def missing(self) -> list[str]:
        """Describe the ranks that have not joined or cannot be reached."""
        everyone = self._place.everyone()
        absent = []
        for other in everyone:
            if other == self._place or other.world_rank in self._links:
                continue
            contact = self._known.get(other.world_rank)
            why = "" if contact is None else f" (at {contact.address}, port {contact.port}, which does not answer)"
            absent.append(other.label + why)
        return absent

    @property
    def complete(self) -> bool:
        return len(self._links) == len(self._place.everyone()) - 1

    @property
    def links(self) -> Mapping[int, Link]:
        return self._links

    def kinds(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the world ranks that share memory with this one, and those connected by TCP."""
        memory = tuple(sorted(rank for rank, (_, arena) in self._links.items() if arena is not None))
        return memory, tuple(sorted(self._links.keys() - memory))

    def linked(self, world: int) -> LinkReport:
        """Return :meth:`kinds` as a report to the session server."""
        return LinkReport(world, *self.kinds())

    # ---- connecting ---------------------------------------------------------------------------------------------

    def descriptors(self) -> tuple[int, int]:
        """The descriptors that are readable when :meth:`work` has something to do."""
        return self._listener.fileno(), self._router.fileno()

    def work(self) -> None:
        """Accept and continue connections, without waiting for other machines."""
        while self._accept():
            pass
        self._router.pump()
        for world_rank, contact in self._known.items():
            trying = self._trying.get(world_rank)
            channel = self._router.channel_from(contact.name) if trying is None else trying[0]
            link = self._links.get(world_rank)
            if channel is None or not channel.linked or channel.ended or (link is not None and link[0] is channel):
                continue
            self._trying.pop(world_rank, None)
            if link is not None:
                # The other rank has this rank's descriptor, but could not verify it.
                link[0].close()
                self._nonces.pop(world_rank, None)
            self._links[world_rank] = (channel, None)
            logger.info("%s and %s are connected by TCP", self._place.label, self._label(world_rank))
        for world_rank, (channel, since) in list(self._trying.items()):
            if time.monotonic() - since > _RETRY or channel.ended:
                self._router.forget(channel)
                self._connect_over_tcp(self._known[world_rank])

    def _connect(self, contact: Contact) -> None:
        try:
            self._keep(contact, self._share_memory_with(contact))
        except (OSError, EOFError, ValueError, GraftError) as error:
            logger.info("%s shares no memory with %s: %s", self._place.label, self._label(contact.world_rank), error)
            self._connect_over_tcp(contact)

    def _keep(self, contact: Contact, link: Link) -> None:
        if (old := self._links.get(contact.world_rank)) is not None:
            # The rank has connected again, perhaps from another process.
            old[0].close()
        self._links[contact.world_rank] = link
        self._nonces[contact.world_rank] = contact.nonce

    def _connect_over_tcp(self, contact: Contact) -> None:
        channel = self._router.connect(contact.name, contact.address, contact.port)
        self._trying[contact.world_rank] = (channel, time.monotonic())

    def _share_memory_with(self, contact: Contact) -> Link:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(_SHARE_LIMIT)
            connection.connect(contact.socket)
            self._require_own_user(connection)
            self._hand_over(connection, contact)
            return self._take_over(connection, contact)
        except BaseException:
            connection.close()
            raise

    def _accept(self) -> bool:
        """Accept one process that wants to share memory; False if none is waiting."""
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return False
        try:
            connection.settimeout(_SHARE_LIMIT)
            self._require_own_user(connection)
            hello = self._receive_hello(connection)
            contact = self._known.get(hello.world_rank)
            if contact is None:
                # Its contact has not arrived here yet. It must still prove who it is.
                contact = Contact(hello.world_rank, "", hello.nonce, b"", "", 0)
            if hello.yours != self.contact.nonce or hello.nonce != contact.nonce:
                raise MessageError("it expects a different nonce, or does not have the announced one")
            if hello.world_rank <= self._place.world_rank or hello.world_rank >= len(self._place.everyone()):
                raise MessageError(f"it claims to be rank {hello.world_rank}, which does not connect to this one")
            arena = self._their_arena(connection, contact)
            self._hand_over(connection, contact)
            self._keep(contact, (SocketChannel(connection), arena))
        except (OSError, EOFError, ValueError, GraftError) as error:
            connection.close()
            self._refusals.warn(f"{self._place.label}: a process that wanted to share memory was refused: {error}")
        return True

    def _hand_over(self, connection: socket.socket, contact: Contact) -> None:
        hello = wire.encode(_PeerHello(self._place.world_rank, self.contact.nonce, contact.nonce))
        connection.sendall(len(hello).to_bytes(2, "little") + hello)
        send_descriptors(connection, [self._segment])

    def _take_over(self, connection: socket.socket, contact: Contact) -> Link:
        hello = self._receive_hello(connection)
        if (hello.world_rank, hello.nonce, hello.yours) != (contact.world_rank, contact.nonce, self.contact.nonce):
            raise MessageError("another process answers at that socket")
        return SocketChannel(connection), self._their_arena(connection, contact)

    def _receive_hello(self, connection: socket.socket) -> _PeerHello:
        length = int.from_bytes(receive_exactly(connection, 2), "little")
        hello: _PeerHello = _decoder.decode(receive_exactly(connection, length))
        return hello

    def _their_arena(self, connection: socket.socket, contact: Contact) -> Arena:
        """Receive and map the other's memory, after checking the nonce in it."""
        descriptor = receive_descriptors(connection, 1)[0]
        try:
            size = os.fstat(descriptor).st_size
            with mmap.mmap(descriptor, PAGE, prot=mmap.PROT_READ) as page:
                if page[_NONCE_AT] != contact.nonce:
                    raise MessageError("its memory does not have the announced nonce")
            return Arena(descriptor, size, writable=False)
        finally:
            os.close(descriptor)

    def _require_own_user(self, connection: socket.socket) -> None:
        if (uid := peer_uid(connection)) != os.getuid():
            raise SessionError(f"it belongs to user {uid}")

    def _label(self, world_rank: int) -> str:
        return self._place.everyone()[world_rank].label

    # ---- the end ------------------------------------------------------------------------------------------------

    def seal(self) -> None:
        """Stop accepting, because all links are made."""
        self._stop_accepting()
        if self.kinds()[1]:
            self._router.wake()
        else:
            # No rank needs the port.
            self._router.close()

    def close(self) -> None:
        """End all links, and leave nothing behind, whether or not all were made."""
        self._stop_accepting()
        for channel, _ in self._links.values():
            channel.close()
        self._router.close()
        self._refusals.close()

    def _stop_accepting(self) -> None:
        if self._listener.fileno() < 0:
            return
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._segment)


def _own_folder() -> Path:
    """A folder that only this user can enter, with a short name, because a socket's path has at most 107 bytes."""
    folder = Path("/tmp") / f"graftlab-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise SessionError(f"{folder} must be a folder of this user with mode 0700; remove it")
    return folder


def address_towards(host: str, port: int) -> str:
    """This machine's address in packets to that host. Raises OSError."""
    kind, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(kind, socket.SOCK_DGRAM) as probe:
        # Sends nothing: the system only looks up the route.
        probe.connect(where)
        address: str = probe.getsockname()[0]
        return address


def is_own_address(host: str) -> bool:
    """Whether the address is this machine's."""
    for kind, *_, where in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
        with socket.socket(kind, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
            probe.bind((where[0], 0))
            return True
    return False
