"""A rank on any machine: the same loop as on the notebook's machine, but it makes its own connections.

It reaches the notebook over TCP, under the keys of the session's token, and the other ranks by shared memory or TCP.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import select
import signal
import socket
import struct
import sys
import time
from datetime import timedelta
from typing import Any

import msgspec
import torch
from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined]

from graftlab.base import wire
from graftlab.base.world import Place
from graftlab.config import Endpoint
from graftlab.errors import MessageError, SessionError
from graftlab.exchange.contract import Exchange
from graftlab.exchange.heartbeat import Heartbeat
from graftlab.exchange.rank_exchange import RankExchange
from graftlab.exchange.status_page import StatusPage
from graftlab.grafting.kept import KeptPairs
from graftlab.grafting.tap_rows import PendingRow
from graftlab.jobs.handshake import JoinAccepted, JoinRequest, RequestRefused
from graftlab.jobs.peer_connector import PeerConnector, address_towards
from graftlab.jobs.proxy import Proxy, TcpSessionClient
from graftlab.plan.wire import WirePlan, from_wire
from graftlab.ranks.connection import ControlConnection
from graftlab.ranks.messages import Contacts, StoreAddress, WorldStart, unpack_to_rank
from graftlab.ranks.namespace import Namespace
from graftlab.ranks.process_end import die_with_notebook
from graftlab.ranks.process_setup import join_process_group, log_to_stderr
from graftlab.ranks.streams import refuse_input
from graftlab.ranks.worker import Rank, end_cleanly

# Seconds between two checks of connections that have not been made yet.
_CHECK_INTERVAL = 0.5
# Seconds between two statuses.
_STATUS_INTERVAL = 0.25
_SIOCGIFADDR = 0x8915
# The world of a launched session: its ranks are connected once.
WORLD = 1


class RemoteRankSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that a rank on any machine receives when it starts.

    ``search_path`` and ``folder`` are the notebook's import path and folder, used where they exist. ``local_rank`` and
    ``local_world_size`` are for ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE``. Times are in seconds, budgets in bytes.
    """

    place: Place
    host: str
    port: int
    token: str
    device: str
    backend: str
    local_rank: int
    local_world_size: int
    timeout: float
    tap_timeout: float
    buffer_budget: int
    keep_budget: int
    threads: int
    plan: WirePlan
    search_path: tuple[str, ...]
    folder: str


_decoder = wire.Decoder(RemoteRankSpec)


def pack_spec(spec: RemoteRankSpec) -> bytes:
    return wire.encode(spec)


def main() -> None:
    """Run a rank to its end. Its specification is the rest of standard input, its death pipe the first argument."""
    faulthandler.enable()
    die_with_notebook(int(sys.argv[1]))
    sys.argv[:] = [""]
    spec: RemoteRankSpec = _decoder.decode(sys.stdin.buffer.read())
    refuse_input()
    # Line by line, not with a file's buffer, so that the last lines are known if the process is killed.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    log_to_stderr()
    _find_modules(spec)
    rank = _connected(spec)
    rank.redirect_output()
    signal.signal(signal.SIGINT, rank.on_interrupt)
    # A Ray actor's thread blocks this signal, and its child processes inherit that.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    rank.serve()
    end_cleanly(rank)


def _find_modules(spec: RemoteRankSpec) -> None:
    """Use the notebook's folder and import path, where they exist here, after this machine's own."""
    if spec.folder and os.path.isdir(spec.folder):
        os.chdir(spec.folder)
    sys.path += [path for path in spec.search_path if path not in sys.path and os.path.exists(path)]


class _RemoteRank(Rank):
    """A rank whose connections go through a proxy, which sends all remaining frames when the rank ends."""

    proxy: Proxy

    def drain(self, seconds: float) -> None:
        super().drain(seconds)
        self._line.channel.close()
        self.proxy.close(when_done=True, timeout=seconds)


def _connected(spec: RemoteRankSpec) -> _RemoteRank:
    line, proxy = _joined(spec)
    setup = _LaunchSetup(spec, line)
    exchange, connector = setup.connect()
    join_process_group(
        spec.place,
        torch.device(spec.device),
        spec.backend,
        setup.store(),
        timeout=spec.timeout,
        threads=spec.threads,
        local=(spec.local_rank, spec.local_world_size),
    )
    own = connector.arena.map
    plan, kept = from_wire(spec.plan), KeptPairs(spec.keep_budget)
    rank = _RemoteRank(spec.place, torch.device(spec.device), plan, exchange, own, kept, line, Namespace())
    rank.proxy = proxy
    # The notebook cannot read this rank's memory.
    Heartbeat(StatusPage(own), line.send_status, lambda: 0, lambda: False, rest=_STATUS_INTERVAL).start()
    return rank


def _joined(spec: RemoteRankSpec) -> tuple[ControlConnection, Proxy]:
    """Connect to the notebook. Raises :class:`SessionError`."""
    place, endpoint = spec.place, Endpoint(spec.host, spec.port)
    client = TcpSessionClient(endpoint, spec.token)
    request = JoinRequest(
        side=place.side,
        rank=place.rank,
        world_size=place.world_size,
        other_world_size=place.other_world_size,
        pid=os.getpid(),
        device=spec.device,
        backend=spec.backend,
        plan=None,
        rejoin=None,
    )
    reply = client.ask(request, spec.timeout)
    if reply is None:
        raise SessionError(
            f"{place.label} could not reach the notebook at {endpoint} within {spec.timeout:g} s: is TCP "
            f"allowed through the firewall, and is that an address at which this machine reaches the notebook's? "
            f"gl.Ray(listen=) gives another"
        )
    answer, early = reply
    if not isinstance(answer, JoinAccepted):
        client.close()
        refused = isinstance(answer, RequestRefused)
        did = f"refused {place.label}: {answer.error}" if refused else f"answered {type(answer).__name__}"
        raise SessionError(f"the notebook at {endpoint} {did}")
    channel, wake, proxy = client.open_connection(early)
    return ControlConnection(channel, wake), proxy


class _LaunchSetup:
    """A rank's setup before its first run: it connects to the others, and finds its side's store."""

    def __init__(self, spec: RemoteRankSpec, line: ControlConnection) -> None:
        self._spec = spec
        self._line = line
        self._deadline = time.monotonic() + spec.timeout
        self._store_address: StoreAddress | None = None
        self._started = False
        self._address = address_towards(spec.host, spec.port)
        # gloo would look up this machine's name, which may belong to the loopback interface.
        if (interface := _interface_of(self._address)) is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)

    def connect(self) -> tuple[Exchange[PendingRow], PeerConnector]:
        """Connect to every other rank, by shared memory or TCP. Raises :class:`SessionError`."""
        spec = self._spec
        connector = PeerConnector(spec.place, spec.token, self._address)
        try:
            self._make_links(connector)
        except BaseException:
            connector.close()
            raise
        connector.seal()
        exchange: Exchange[PendingRow] = RankExchange(
            spec.place, connector.arena, connector.links, budget=spec.buffer_budget, timeout=spec.tap_timeout
        )
        return exchange, connector

    def _make_links(self, connector: PeerConnector) -> None:
        spec, line = self._spec, self._line
        line.send(connector.contact)
        poller = select.poll()
        for descriptor in (line.channel.fileno(), *connector.descriptors()):
            poller.register(descriptor, select.POLLIN)
        reported: object = None
        while not (connector.complete and self._started):
            for message in self._receive():
                if isinstance(message, Contacts):
                    connector.add(message.contacts)
            connector.work()
            if connector.complete and reported != connector.kinds():
                reported = connector.kinds()
                line.send(connector.linked(WORLD))
            if self._remaining() <= 0:
                missing = ", ".join(connector.missing()) or "the notebook's start signal"
                raise SessionError(f"{spec.place.label} waited {spec.timeout:g} s for {missing}")
            if not (connector.complete and self._started):
                poller.poll(min(_CHECK_INTERVAL, self._remaining()) * 1000)

    def store(self) -> Store:
        """The rendezvous store of the side's process group, at its rank 0. Raises :class:`SessionError`."""
        place, limit = self._spec.place, timedelta(seconds=self._spec.timeout)
        if place.world_size == 1:
            # No other process needs to reach it.
            return HashStore()
        if place.rank == 0:
            store = TCPStore(self._address, 0, place.world_size, True, limit, wait_for_workers=False)
            self._line.send(StoreAddress(self._address, store.port))
            return store
        poller = select.poll()
        poller.register(self._line.channel.fileno(), select.POLLIN)
        while self._store_address is None:
            if self._remaining() <= 0:
                raise SessionError(
                    f"{place.label} waited {self._spec.timeout:g} s for the address of its side's rank 0"
                )
            poller.poll(self._remaining() * 1000)
            self._receive()
        found = self._store_address
        return TCPStore(found.host, found.port, place.world_size, False, limit)

    def _remaining(self) -> float:
        return self._deadline - time.monotonic()

    def _receive(self) -> list[Any]:
        """Receive the notebook's messages, and note those of the start."""
        channel = self._line.channel
        messages = [unpack_to_rank(frame) for frame in channel.receive()]
        if channel.closed:
            raise SessionError("the notebook has ended, or gave up this launch")
        for message in messages:
            if isinstance(message, WorldStart):
                self._started = True
            elif isinstance(message, StoreAddress):
                self._store_address = message
            elif not isinstance(message, Contacts):
                raise MessageError(f"the notebook sent {type(message).__name__} before the start")
        return messages


def _interface_of(address: str) -> str | None:
    """The name of the network interface with this IPv4 address; None if none has it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # it has no IPv4 address
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return None
