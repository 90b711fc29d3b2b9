"""Graft worlds made of exchanges alone: all ranks in this process, or one real process a rank."""

from __future__ import annotations

import multiprocessing.reduction
import os
import socket
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.multiprocessing

from graftlab.base.tags import TapKey
from graftlab.base.world import Place, RunInfo, Side
from graftlab.exchange.arena import Arena, create_segment
from graftlab.exchange.channel import Channel, SocketChannel
from graftlab.exchange.contract import Exchange, Receipt
from graftlab.exchange.device import Gpu
from graftlab.exchange.keys import derive_keys, new_token
from graftlab.exchange.rank_exchange import RankExchange
from graftlab.exchange.status_page import StatusPage
from graftlab.exchange.tcp import RouterSocket, TcpChannel
from graftlab.ranks import forkserver
from kit.deadline import DEADLINE
from kit.support import wait_until

T = TypeVar("T")
Put = Callable[[torch.Tensor], torch.Tensor]

MIB = 1 << 20


def key(name: str = "x", step: int = 0, occurrence: int = 0, status: str = "original", **tags: object) -> TapKey:
    return TapKey(step, name, tuple(sorted(tags.items())), status, occurrence)


def in_background(function: Callable[[], T]) -> Future[T]:
    """Call ``function`` on a thread that cannot keep the tests from ending."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


@contextmanager
def eager_threads() -> Iterator[None]:
    """Threads take turns as often as they can, so that a missing lock shows."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(usual)


def as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class Mailbox:
    """One rank's exchange, with what the grafter would do around it: the status page is kept up to date.

    ``put`` brings a tensor to where this kind of exchange has its tensors; ``gpu`` is the stand-in for its GPU.
    """

    def __init__(
        self,
        place: Place,
        exchange: Exchange[Any],
        page: StatusPage,
        channels: Sequence[Channel],
        put: Put = as_it_is,
        gpu: Any = None,
    ) -> None:
        self.place = place
        self.exchange = exchange
        self.put = put
        self.gpu = gpu
        self.channels = channels
        self.tap = ""
        self.step = 0
        self.waits_so_far = 0
        self._page = page
        self._changed = threading.Condition()
        self._waiting = False
        exchange.on_wait = self._on_wait

    def note(self, state: str, awaits: Collection[int] = ()) -> None:
        """Write into the page where this rank is."""
        self._page.write(state, step=self.step, plan_version=0, taps=0, tap=self.tap, awaits=awaits)

    def _on_wait(self, awaits: Collection[int]) -> None:
        self.note("waiting" if awaits else "running", awaits)
        with self._changed:
            self._waiting = bool(awaits)
            self.waits_so_far += self._waiting
            self._changed.notify_all()

    def until_it_waits(self) -> None:
        """Return when this rank waits for another rank."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._waiting, DEADLINE), f"{self.place.label} never waits"

    def publish(self, to: TapKey, value: torch.Tensor | float, extras: object = None, memo: object = None) -> None:
        self.tap = to.name
        self.exchange.publish(to, self.put(torch.as_tensor(value)), extras, memo)

    def receive(self, of: TapKey) -> Receipt:
        self.tap = of.name
        return self.exchange.receive(of)

    def take(self, of: TapKey) -> list[Any]:
        """What was received, as Python values in the order of contributions; the memory is released."""
        receipt = self.receive(of)
        values = [contribution.tensor.tolist() for contribution in receipt.contributions]
        receipt.release()
        return values

    def bytes_in_use(self) -> int:
        return self.exchange.bytes_in_use

    def die(self) -> None:
        """To its peers this looks like a death: the streams end."""
        for channel in self.channels:
            channel.close()
        for channel in self.channels:
            if isinstance(channel, TcpChannel):
                channel._router.close()


class World:
    """Every rank of a graft world, in this process.

    ``gpu`` makes the GPU of each rank; without it, all is on the host. With ``tcp`` no rank looks into the memory of
    another; ``far`` world ranks are on a machine of their own each.
    """

    def __init__(
        self,
        baseline: int,
        target: int,
        *,
        budget: int = 16 * MIB,
        timeout: float = DEADLINE,
        gpu: Callable[[int], Gpu] | None = None,
        put: Put = as_it_is,
        tcp: bool = False,
        far: Collection[int] = (),
    ) -> None:
        self.shares_memory = not tcp
        count = baseline + target
        shared = make_descriptors(count)
        self.mailboxes: list[Mailbox] = []
        far = range(count) if tcp else far
        remote = connect_all(make_posts(count)) if far else {}
        for me in Place("baseline", 0, baseline, target).everyone():
            links: dict[int, Any] = {
                other: remote[rank][other] if rank in far or other in far else link
                for (rank, other), link in shared.links.items()
                if rank == me.world_rank
            }
            mine = make_mailbox(me, shared.segments, shared.size, links, gpu, put, budget=budget, timeout=timeout)
            self.mailboxes.append(mine)
        for descriptor in shared.segments:
            os.close(descriptor)
        for (rank, other), link in shared.links.items():
            if rank in far or other in far:
                link.close()

    def side(self, side: Side) -> list[Mailbox]:
        return [mailbox for mailbox in self.mailboxes if mailbox.place.side == side]

    @property
    def baseline(self) -> Mailbox:
        return self.side("baseline")[0]

    @property
    def target(self) -> Mailbox:
        return self.side("target")[0]

    def begin(self, run: int = 0, first_step: int = 0, participants: Collection[int] | None = None) -> World:
        chosen = tuple(range(len(self.mailboxes)) if participants is None else participants)
        for mailbox in self.mailboxes:
            if mailbox.place.world_rank in chosen:
                mailbox.exchange.begin_run(RunInfo(run, first_step, chosen))
        return self

    def deliver(self) -> None:
        """Return when everything that was sent has come to where it was sent, read or not."""
        if not self.shares_memory:
            for mailbox in self.mailboxes:
                for channel in mailbox.channels:
                    channel.send(_MARK)
            for mailbox in self.mailboxes:
                for channel in mailbox.channels:
                    wait_until(lambda channel=channel: _take_mark(channel), "the delivery")  # type: ignore[misc]

    def end(self, step: int) -> None:
        """Every rank ends the step and the run, and hears of the others' end."""
        for mailbox in self.mailboxes:
            mailbox.exchange.end_step(step)
            mailbox.exchange.end_run()
        for mailbox in self.mailboxes:
            assert settles(mailbox)

    def close(self) -> None:
        for mailbox in self.mailboxes:
            mailbox.die()


def settles(mailbox: Mailbox) -> bool:
    """Wait until the run is over everywhere."""
    read, write = os.pipe()
    try:
        return mailbox.exchange.settle(read)
    finally:
        os.close(read)
        os.close(write)


def knows_where(mailbox: Mailbox, where: str) -> bool:
    """Whether this rank knows that a peer is at ``where``; remote peers send their status from time to time."""
    mailbox.exchange.end_step(-1)  # reads what has come
    return where in mailbox.exchange.where_peers_are()


def has_settled(mailbox: Mailbox) -> bool:
    """Whether this rank knows that the run is over everywhere."""
    read, write = os.pipe()
    try:
        os.write(write, b"x")
        return mailbox.exchange.settle(read)
    finally:
        os.close(read)
        os.close(write)


@contextmanager
def a_world(baseline: int, target: int, **options: Any) -> Iterator[World]:
    world = World(baseline, target, **options)
    try:
        yield world
    finally:
        world.close()


def make_mailbox(
    place: Place,
    segments: list[int],
    size: int,
    links: Mapping[int, socket.socket | TcpChannel],
    gpu: Callable[[int], Gpu] | None,
    put: Put,
    **options: Any,
) -> Mailbox:
    """One rank's exchange over what :func:`make_descriptors` made; its GPU is called with the world rank."""
    channels = {rank: SocketChannel(link) if isinstance(link, socket.socket) else link for rank, link in links.items()}
    arenas = {
        rank: Arena(descriptor, size, writable=rank == place.world_rank)
        for rank, descriptor in enumerate(segments)
        if not isinstance(channels.get(rank), TcpChannel)
    }
    own = arenas[place.world_rank]
    peers: dict[int, Any] = {rank: (channel, arenas.get(rank)) for rank, channel in channels.items()}
    made = gpu(place.world_rank) if gpu else None
    exchange: RankExchange[Any] = RankExchange(place, own, peers, gpu=made, **options)
    return Mailbox(place, exchange, StatusPage(own.map), list(channels.values()), put, made)


class WorldDescriptors:
    """What the ranks of a world share, as descriptors: memory, and a pair of sockets between any two."""

    def __init__(self, segments: list[int], size: int, links: dict[tuple[int, int], socket.socket]) -> None:
        self.segments = segments
        self.size = size
        self.links = links


def make_descriptors(count: int) -> WorldDescriptors:
    made = [create_segment() for _ in range(count)]
    links: dict[tuple[int, int], socket.socket] = {}
    for one in range(count):
        for other in range(one):
            links[one, other], links[other, one] = socket.socketpair()
    return WorldDescriptors([descriptor for descriptor, _ in made], made[0][1], links)


# ---- over TCP -------------------------------------------------------------------------------------------------------

TOKEN = new_token()
_MARK = b"all before this has been delivered"


def _take_mark(channel: TcpChannel) -> bool:
    """Whether all that the other end had sent is here, or it has ended."""
    channel._router.pump()
    channel._router.wake()
    # Not always the last: threads of the other end send, too.
    if _MARK not in channel.arrived:
        return channel.ended or channel.closed
    channel.arrived.remove(_MARK)
    return True


def make_post(rank: int, token: str = TOKEN) -> RouterSocket:
    return RouterSocket(derive_keys(token), f"rank {rank}".encode(), "127.0.0.1")


def make_posts(count: int) -> list[RouterSocket]:
    return [make_post(rank) for rank in range(count)]


Remote = dict[int, TcpChannel]


def connect_all(posts: list[RouterSocket]) -> dict[int, Remote]:
    """Connect each to all before it; the channels of each rank to each other."""
    ports = [post.port for post in posts]
    made = [connect_to_lower(post, rank, ports) for rank, post in enumerate(posts)]
    return {rank: wait_for_links(post, made[rank], len(posts)) for rank, post in enumerate(posts)}


def connect_to_lower(post: RouterSocket, rank: int, ports: list[int]) -> Remote:
    return {lower: post.connect(f"rank {lower}".encode(), "127.0.0.1", ports[lower]) for lower in range(rank)}


def wait_for_links(post: RouterSocket, made: Remote, count: int) -> Remote:
    """All channels of a rank, those it has made and those of the others, once each has its other end."""
    links = dict(made)

    def complete() -> bool:
        post.pump()
        for other in range(len(made) + 1, count):
            channel = post.channel_from(f"rank {other}".encode())
            if channel is not None:
                links[other] = channel
        return len(links) == count - 1 and all(channel.linked for channel in links.values())

    wait_until(complete, "the connections")
    post.wake()
    return dict(sorted(links.items()))


def link_over_tcp(rank: int, line: Any) -> Remote:
    """In a rank's process: listen, get the others' ports from the test, and connect."""
    token, count = line.recv()
    post = make_post(rank, token)
    line.send(post.port)
    return wait_for_links(post, connect_to_lower(post, rank, line.recv()), count)


# ---- one process a rank ---------------------------------------------------------------------------------------------


class Descriptors:
    """Open descriptors that are still the same files when they arrive in a new process."""

    def __init__(self, descriptors: list[int]) -> None:
        self.descriptors = descriptors

    def __reduce__(self) -> Any:
        return _arrived, ([multiprocessing.reduction.DupFd(descriptor) for descriptor in self.descriptors],)


def _arrived(duplicates: list[Any]) -> Descriptors:
    return Descriptors([duplicate.detach() for duplicate in duplicates])


Script = Callable[[Mailbox, Any], None]


def _become_a_rank(
    place: Place,
    segments: Descriptors,
    size: int,
    links: Mapping[int, Any],
    script: Script,
    line: Any,
    gpu: Callable[[int], Gpu] | None,
    put: Put,
    proves_ipc: bool,
    tcp: bool,
    options: Any,
) -> None:
    torch.set_num_threads(1)
    links = link_over_tcp(place.world_rank, line) if tcp else links
    mailbox = make_mailbox(place, segments.descriptors, size, links, gpu, put, **options)
    for descriptor in segments.descriptors:
        os.close(descriptor)
    everyone = tuple(other.world_rank for other in place.everyone())
    mailbox.exchange.begin_run(RunInfo(0, -1, everyone))
    if proves_ipc:
        # A rank that has published the second tensor has replied to the first.
        for name in ("first", "second"):
            mailbox.publish(key(name, step=-1), 1.0)
            mailbox.take(key(name, step=-1))
    mailbox.exchange.end_step(-1)
    script(mailbox, line)


class Processes:
    """Every rank of a graft world, each a real process that runs ``script(mailbox, line)`` and then ends.

    ``lines`` holds this end of each rank's pipe to the test, ``processes`` the processes; both in world-rank order.
    ``gpu`` and ``put`` are as in :class:`World`. With ``proves_ipc`` the scripts begin when every rank has proved
    that it can read the memory of the others' GPUs.
    """

    def __init__(
        self,
        baseline: Script,
        target: Script,
        counts: tuple[int, int] = (1, 1),
        *,
        gpu: Callable[[int], Gpu] | None = None,
        put: Put = as_it_is,
        proves_ipc: bool = False,
        tcp: bool = False,
        **options: Any,
    ) -> None:
        self.shares_memory = not tcp
        places = Place("baseline", 0, *counts).everyone()
        shared = make_descriptors(len(places))
        forkserver.prepare()
        context = torch.multiprocessing.get_context("forkserver")
        options = {"budget": 16 * MIB, "timeout": DEADLINE, **options}
        self.lines, self.processes = [], []
        self._inodes = {os.fstat(descriptor).st_ino for descriptor in shared.segments}
        for place in places:
            mine = {other: link for (me, other), link in shared.links.items() if me == place.world_rank}
            links = {} if tcp else mine
            script = baseline if place.side == "baseline" else target
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_become_a_rank,
                args=(
                    *(place, Descriptors(shared.segments), shared.size, links, script, theirs),
                    *(gpu, put, proves_ipc, tcp, options),
                ),
            )
            # Else each rank would import pytest, whose main module this is.
            with forkserver.hidden_main():
                process.start()
            theirs.close()
            self.lines.append(ours)
            self.processes.append(process)
        for descriptor in shared.segments:
            os.close(descriptor)
        for link in shared.links.values():
            link.close()
        if tcp:
            for line in self.lines:
                line.send((TOKEN, len(places)))
            ports = [self.hear(rank) for rank in range(len(places))]
            for line in self.lines:
                line.send(ports)

    def hear(self, rank: int) -> Any:
        """The next thing that the rank says."""
        assert self.lines[rank].poll(DEADLINE), f"rank {rank} says nothing"
        return self.lines[rank].recv()

    def who_holds_memory(self) -> list[str]:
        """The processes, this one included, that hold a piece of the memory that these ranks share; one entry each."""
        found = []
        for maps in Path("/proc").glob("[0-9]*/maps"):
            try:
                lines = [line.split(maxsplit=5) for line in maps.read_text().splitlines() if "graftlab" in line]
            except OSError:
                continue  # it has ended meanwhile
            found += [maps.parent.name for _, _, _, _, inode, *_ in lines if int(inode) in self._inodes]
        return found

    def join(self) -> list[int | None]:
        """Wait until all have ended; their exit codes."""
        for process in self.processes:
            process.join(DEADLINE)
        return [process.exitcode for process in self.processes]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        for line in self.lines:
            line.close()


@contextmanager
def processes(*arguments: Any, **options: Any) -> Iterator[Processes]:
    made = Processes(*arguments, **options)
    try:
        yield made
    finally:
        made.close()
