"""Launch a session's ranks on other machines, from the notebook.

A cluster finds the machines and starts a supervised process for each rank. The ranks connect to the notebook and to
each other like those of jobs. Then they are ranks like any other: they run the code that the notebook sends.
"""

from __future__ import annotations

import logging
import os
import platform
import select
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from graftlab.base.wire import WIRE_VERSION, graftlab_release
from graftlab.base.world import Place, Side
from graftlab.config import Endpoint
from graftlab.errors import LaunchError, MessageError
from graftlab.exchange.keys import new_token
from graftlab.exchange.tcp import TcpChannel
from graftlab.jobs.handshake import (
    JoinAccepted,
    JoinRequest,
    RequestRefused,
    pack_handshake,
    unpack_handshake,
)
from graftlab.jobs.membership import introduce
from graftlab.jobs.proxy import Ends, TcpListener
from graftlab.plan.plan import GraftPlan
from graftlab.plan.wire import to_wire
from graftlab.ranks.devices import DeviceAssignment
from graftlab.ranks.handle import RankHandle
from graftlab.ranks.launcher import end_ranks
from graftlab.ranks.messages import (
    Contact,
    Dispatch,
    Hello,
    LinkReport,
    LiveOutput,
    Output,
    StatusUpdate,
    StoreAddress,
    WorldStart,
    pack,
    unpack_from_rank,
)
from graftlab.ranks.options import LaunchOptions
from graftlab.remote.hosts import Cluster, RankHosts
from graftlab.remote.rank_supervisor import HostFacts
from graftlab.remote.remote_rank import WORLD, RemoteRankSpec, pack_spec
from graftlab.remote.remote_rank_handle import EndPatience, RemoteRankHandle

logger = logging.getLogger(__name__)

# Seconds between two looks at processes that may have ended before they connected.
_LOOK = 0.5


def launch_remote_ranks(
    options: LaunchOptions, folder: Path, plan: GraftPlan, cluster: Cluster
) -> Sequence[RankHandle]:
    """Start every rank under this plan on the machine that the cluster chooses, and wait until each is ready.

    Raises :class:`LaunchError`, with the end of the log if a rank died; then nothing is left of the launch.
    """
    hosts = cluster.reserve(options, folder)
    try:
        launch = _RemoteLaunch(options, folder, plan, hosts)
    except BaseException:
        hosts.release()
        raise
    try:
        launch.run()
    except BaseException:
        launch.abandon()
        raise
    return launch.ranks


class _RemoteLaunch:
    """One launch. Its connections are closed when its last rank is released."""

    def __init__(self, options: LaunchOptions, folder: Path, plan: GraftPlan, hosts: RankHosts) -> None:
        """Raises :class:`LaunchError` if a machine is unsuitable, or the notebook cannot listen."""
        self._options, self._plan, self._hosts = options, plan, hosts
        places = Place("baseline", 0, options.baseline, options.target).everyone()
        facts = hosts.facts()
        _require_fit(places, facts)
        self._specs = _Assignments(options, places, facts, hosts.gpus)
        self._token = new_token()
        try:
            self._listener = TcpListener(Endpoint(hosts.host, hosts.port), self._token)
        except OSError as error:
            raise LaunchError(
                f"the notebook cannot listen at {hosts.host}, port {hosts.port}, where its ranks would reach it: "
                f"{error}; gl.Ray(listen='tcp://HOST:PORT') gives another address"
            ) from error
        patience = EndPatience()
        self.ranks = [
            RemoteRankHandle(place, folder, hosts.process(place), patience, self._on_release) for place in places
        ]
        self._held = set(self.ranks)
        self._contacts: dict[int, Contact] = {}
        self._linked: set[int] = set()
        self._waiting = {rank.channel.fileno(): rank for rank in self.ranks}

    def run(self) -> None:
        """Start every rank, introduce them to each other, and wait until all are ready. Raises :class:`LaunchError`."""
        self._listener.open(self._admit)
        for rank in self.ranks:
            rank.process.start(pack_spec(self._spec_of(rank.place)))
        poller = select.poll()
        for descriptor in self._waiting:
            poller.register(descriptor, select.POLLIN)
        handle = Dispatch[[RemoteRankHandle], None]()
        handle.on(Contact, lambda contact, rank: introduce(rank, contact, self._contacts, self.ranks))
        handle.on(LinkReport, self._on_linked)
        handle.on(StoreAddress, self._on_store)
        handle.on(StatusUpdate, lambda update, rank: rank.note_status(update))
        handle.on(Output, lambda output, rank: logger.info("%s: %s", rank.label, output.text.rstrip()))
        handle.on(LiveOutput, lambda output, rank: None)
        deadline = time.monotonic() + self._options.timeout
        next_look = 0.0
        while self._waiting:
            now = time.monotonic()
            if now >= deadline:
                raise LaunchError(self._describe_late())
            if now >= next_look:
                self._require_alive()
                next_look = time.monotonic() + _LOOK
            for descriptor, _ in poller.poll(max(0.0, min(deadline, next_look) - time.monotonic()) * 1000):
                rank = self._waiting[descriptor]
                for frame in rank.channel.receive():
                    message = unpack_from_rank(frame)
                    if isinstance(message, Hello):
                        # The session's hub reads all later messages.
                        poller.unregister(descriptor)
                        del self._waiting[descriptor]
                    elif not isinstance(message, bytes):
                        handle(message, rank)
                if rank.channel.closed:
                    raise LaunchError(_describe_death(rank))

    def abandon(self) -> None:
        """End all processes that have been started."""
        end_ranks(self.ranks, patience=0)
        for rank in self.ranks:
            rank.release()

    def _on_release(self, rank: RemoteRankHandle) -> None:
        self._held.discard(rank)
        if not self._held:
            self._listener.close()
            self._hosts.release()

    def _spec_of(self, place: Place) -> RemoteRankSpec:
        options, assigned = self._options, self._specs
        return RemoteRankSpec(
            place=place,
            host=self._hosts.host,
            port=self._listener.endpoint.port,
            token=self._token,
            device=assigned.devices[place.world_rank].device,
            backend=assigned.devices[place.world_rank].backend,
            local_rank=assigned.local[place.world_rank][0],
            local_world_size=assigned.local[place.world_rank][1],
            timeout=options.timeout,
            tap_timeout=options.tap_limit,
            buffer_budget=options.buffer_budget,
            keep_budget=options.keep_budget,
            threads=self._hosts.threads,
            plan=to_wire(self._plan),
            search_path=tuple(os.path.abspath(path) for path in sys.path),
            folder=os.getcwd() if self._hosts.uses_folder else "",
        )

    # ---- on the proxy's thread ----------------------------------------------------------------------------------

    def _admit(self, far: TcpChannel, frame: bytes) -> Ends | None:
        """Connect a process that has proved that it knows the token with its rank's handle."""
        request = unpack_handshake(frame)
        if not isinstance(request, JoinRequest):
            raise MessageError(f"it sent {type(request).__name__} instead of a request to join")
        place = Place(request.side, request.rank, request.world_size, request.other_world_size)
        rank = next((each for each in self.ranks if each.place == place), None)
        if rank is None or rank.has_joined:
            far.send(
                pack_handshake(
                    RequestRefused(f"{place.label} has joined already, or is not one of its ranks", settings=False)
                )
            )
            return None
        notes = self._specs.devices[place.world_rank].notes
        rank.assign_process(request.pid, DeviceAssignment(request.device, request.backend, notes))
        far.send(pack_handshake(JoinAccepted("", "", 0.0, 0, 0, 0)))
        return rank.take_ends()

    # ---- the ranks' messages ------------------------------------------------------------------------------------

    def _on_linked(self, report: LinkReport, rank: RemoteRankHandle) -> None:
        rank.note_links(report)
        self._linked.add(rank.place.world_rank)
        if len(self._linked) == len(self.ranks):
            for each in self.ranks:
                each.channel.send(pack(WorldStart(WORLD)))

    def _on_store(self, address: StoreAddress, rank: RemoteRankHandle) -> None:
        for other in self.ranks:
            if other.place.side == rank.place.side and other is not rank:
                other.channel.send(pack(address))

    # ---- what can go wrong --------------------------------------------------------------------------------------

    def _require_alive(self) -> None:
        for rank in self.ranks:
            if rank.reported is not None:
                raise LaunchError(_describe_death(rank))

    def _describe_late(self) -> str:
        late = list(self._waiting.values())
        absent = [rank.label for rank in late if not rank.has_joined]
        why = f"; {', '.join(absent)} had not connected to the notebook at {self._listener.endpoint}" if absent else ""
        return (
            f"{', '.join(rank.label for rank in late)} did not become ready within {self._options.timeout:g} s{why}; "
            f"pass a larger timeout if that is too short. The log of {late[0].label} ends:\n{late[0].log_tail()}"
        )


def _describe_death(rank: RemoteRankHandle) -> str:
    return f"{rank.label} died while starting ({rank.how_it_ended()}). Its log ends:\n{rank.log_tail()}"


def _require_fit(places: Sequence[Place], facts: Sequence[HostFacts]) -> None:
    """Refuse machines that could not read functions and messages of this notebook."""
    for place, fact in zip(places, facts, strict=True):
        if fact.wire_version != WIRE_VERSION:
            raise LaunchError(
                f"{place.label}: {fact.node} has graftlab {fact.release}, of wire version {fact.wire_version}, and the "
                f"notebook {graftlab_release()}, of {WIRE_VERSION}; install the notebook's release there"
            )
        # Functions are sent as byte code, which differs between minor versions of Python.
        if fact.python.split(".")[:2] != platform.python_version().split(".")[:2]:
            raise LaunchError(
                f"{place.label}: {fact.node} has Python {fact.python}, and the notebook {platform.python_version()}; "
                f"start the notebook with the machine's Python, or the cluster with the notebook's"
            )


class _Assignments:
    """The device and backend of each rank, and its number among its side's ranks on its machine."""

    def __init__(
        self, options: LaunchOptions, places: Sequence[Place], facts: Sequence[HostFacts], gpus: float
    ) -> None:
        """Raises :class:`LaunchError` for a device that some rank does not have."""
        self.devices = [_device(options, place, gpus) for place in places]
        nodes: dict[tuple[Side, str], list[int]] = {}
        for place, fact in zip(places, facts, strict=True):
            nodes.setdefault((place.side, fact.node), []).append(place.world_rank)
        self.local = []
        for place, fact in zip(places, facts, strict=True):
            here = nodes[place.side, fact.node]
            # A rank that sees only its own GPUs counts them from 0, and so must programs that choose by LOCAL_RANK.
            self.local.append((0, 1) if gpus else (here.index(place.world_rank), len(here)))


def _device(options: LaunchOptions, place: Place, gpus: float) -> DeviceAssignment:
    kind, _, index = (options.device or ("cuda" if gpus else "cpu")).partition(":")
    if kind == "cpu":
        return DeviceAssignment("cpu", options.backend or "gloo")
    number = int(index or 0) if (index or "0").isdigit() else -1
    if kind != "cuda" or not 0 <= number < gpus:
        raise LaunchError(
            f"device={options.device!r}: each rank has {gpus:g} GPUs; ranks run on 'cpu', or on 'cuda' or 'cuda:N' of "
            f"the GPUs that they ask for (gl.Ray(resources={{'GPU': 1}}))"
        )
    if gpus >= 1 or place.world_size == 1 or options.backend == "gloo":
        return DeviceAssignment(f"cuda:{number}", options.backend or "nccl")
    note = f"the {place.side}'s ranks may share a GPU, which nccl refuses: their group uses gloo"
    return DeviceAssignment(f"cuda:{number}", "gloo", (note,))
