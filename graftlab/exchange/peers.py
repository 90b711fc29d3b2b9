"""The other ranks as one rank knows them: what each has said so far, and the sockets on which it says more.

A peer's death is the end of its socket's stream, which the kernel of the machine reports at once, whatever killed it.
Where the machine itself is gone, or the network, the end comes after a silence (:mod:`.tcp`).
"""

from __future__ import annotations

import logging
import select
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from graftlab.base.tags import TapKey
from graftlab.base.world import Place, RunInfo
from graftlab.exchange.arena import Arena
from graftlab.exchange.channel import Channel
from graftlab.exchange.frames import ChunkFrame, DeviceLocation, Frame, PublishFrame, StatusFrame, decode, encode
from graftlab.exchange.interrupts import interruptible
from graftlab.exchange.status_page import RankStatus, StatusPage, WireStatus
from graftlab.exchange.tcp import FrameWithPayload, RemoteChannel
from graftlab.exchange.waiter_threads import WaiterThreads

logger = logging.getLogger(__name__)

Link = tuple[Channel, Arena] | tuple[RemoteChannel, None]
"""What joins two ranks: a socket and the other's segment, or a connection alone where they share no memory."""


class RemoteStatusPage:
    """Where a rank is whose memory cannot be looked at: what it has said last."""

    def __init__(self) -> None:
        self.latest = RankStatus()

    def read(self) -> RankStatus:
        return self.latest


@dataclass
class Peer:
    """Another rank of the graft world, as seen from here."""

    place: Place
    channel: Channel | RemoteChannel
    # None where it shares no memory with this rank.
    arena: Arena | None
    page: StatusPage | RemoteStatusPage
    in_run: bool = False
    # Why nothing will ever come from it again; empty while something may.
    gone: str = ""
    ended_step: int = -1
    run_ended: bool = False
    # What it has published, or declined (None). By step, because a sender may be a thousand taps ahead, and the end of
    # a step forgets only that step's.
    inbox: defaultdict[int, dict[TapKey, PublishFrame | None]] = field(default_factory=lambda: defaultdict(dict))
    announced: dict[int, bytes] = field(default_factory=dict)
    # The last step of which it has said something. It may begin later than this rank, and say nothing of those before.
    announced_step: int = -1
    # The ids of its tensors that are done with here, and how many bytes they are; told in batches.
    to_release: list[int] = field(default_factory=list)
    bytes_to_release: int = 0
    # The numbers of our own waits that it said we must give up.
    yielded_waits: set[int] = field(default_factory=set)
    # Of one that shares no memory: what came along with the frame that is handled now, and with those in the inbox, by
    # id; how many tensors have come from it, have gone to it, and had come to it when it last said where it is.
    attached: Sequence[memoryview] = ()
    carried: dict[int, Sequence[memoryview]] = field(default_factory=dict)
    received: int = 0
    sent: int = 0
    confirmed: int = 0

    def __post_init__(self) -> None:
        self.label = self.place.label
        self.world_rank = self.place.world_rank
        self.remote = self.arena is None

    def send(self, frame: Frame) -> None:
        self.channel.send(encode(frame))

    def begin_run(self, run: RunInfo) -> None:
        self.in_run = self.world_rank in run.participants
        self.run_ended = False
        self.ended_step = run.first_step - 1
        self.inbox.clear()
        self.carried.clear()
        self.announced.clear()
        self.announced_step = -1

    def has_answered(self, key: TapKey) -> bool:
        return key in self.inbox[key.step] or self.is_past(key.step)

    def is_past(self, step: int) -> bool:
        """Whether it neither publishes nor asks for anything of this step any more."""
        return self.ended_step >= step or self.run_ended or not self.in_run or self.gone != ""

    def has_announced(self, step: int) -> bool:
        return self.announced_step >= step or self.run_ended or self.gone != ""

    def has_settled(self) -> bool:
        return self.run_ended or not self.in_run or self.gone != ""

    def why_absent(self) -> str:
        if self.gone and not self.run_ended:
            return f"{self.label} {self.gone}"
        if not self.in_run:
            return f"{self.label} takes no part in this run"
        return f"{self.label} ended the {'run' if self.run_ended else 'step'} without this tap"

    def describe(self) -> str:
        return f"{self.label}: {self.gone or self.page.read()}"


class Wait:
    """A wait for other ranks, which everybody can know of while it lasts, and what is left of its time limit."""

    __slots__ = ("_deadline", "_peers", "awaits")

    def __init__(self, peers: Peers, awaits: Collection[int]) -> None:
        self.awaits = awaits
        self._deadline = time.monotonic() + peers.timeout
        self._peers = peers

    def __enter__(self) -> Wait:
        self._peers.waits.append(self)
        self._peers.report_waits()
        return self

    def __exit__(self, *error: object) -> None:
        self._peers.waits.remove(self)
        self._peers.report_waits()

    def remaining(self) -> float:
        return self._deadline - time.monotonic()


class Peers:
    """All other ranks of the graft world; reads what they send, and waits for it.

    ``others`` are those of the other side, in rank order. What comes goes to the handler of its class, which
    :meth:`listen` is told.
    """

    def __init__(self, place: Place, links: Mapping[int, Link], timeout: float) -> None:
        everyone = place.everyone()
        self.place = place
        self.timeout = timeout
        self.on_wait: Callable[[Collection[int]], None] = lambda awaits: None
        self.by_rank = {
            rank: Peer(everyone[rank], channel, arena, RemoteStatusPage() if arena is None else StatusPage(arena.map))
            for rank, (channel, arena) in sorted(links.items())
        }
        self.others = [peer for peer in self.by_rank.values() if peer.place.side != place.side]
        self.has_remote = any(peer.remote for peer in self.others)
        self._handlers: Mapping[type[Frame], Callable[[Peer, Any], None]] = {}
        self._on_gone: Callable[[Peer], None] = lambda peer: None
        # Those on other machines have one socket in common.
        self._by_descriptor: dict[int, list[Peer]] = {}
        for peer in self.by_rank.values():
            self._by_descriptor.setdefault(peer.channel.fileno(), []).append(peer)
        self._poller = select.poll()
        for descriptor in self._by_descriptor:
            self._poller.register(descriptor, select.POLLIN)
        self.waiters = WaiterThreads(self._by_descriptor)
        self.waits: list[Wait] = []

    def listen(
        self, handlers: Mapping[type[Frame], Callable[[Peer, Any], None]], on_gone: Callable[[Peer], None]
    ) -> None:
        """Say who handles which frames, and who wants to know that nothing comes from a peer any more."""
        self._handlers = handlers
        self._on_gone = on_gone

    def wait(self, awaits: Collection[int]) -> Wait:
        return Wait(self, awaits)

    def report_waits(self) -> None:
        if len(self.waits) == 1:
            self.on_wait(self.waits[0].awaits)
        else:
            self.on_wait(sorted({rank for wait in self.waits for rank in wait.awaits}))

    def settle(self, wake: int) -> bool:
        """Read until the run is over everywhere, or ``wake`` (a descriptor) becomes readable first: then False."""
        self._poller.register(wake, select.POLLIN)
        try:
            while not all(peer.has_settled() for peer in self.by_rank.values()):
                if wake in self.pump(None):
                    return False
            return True
        finally:
            self._poller.unregister(wake)

    def pump(self, timeout: float | None) -> list[int]:
        """Read whatever has come, waiting up to ``timeout`` seconds for the first of it (None: for ever).

        Returns the descriptors that had something.
        """
        ready = [descriptor for descriptor, _ in self._poll(timeout)]
        for descriptor in ready:
            for peer in list(self._by_descriptor.get(descriptor, ())):
                self._read(peer, descriptor)
        if ready:
            self.waiters.wake()
        return ready

    def look(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds for something to come, and read it; whether anything came.

        Other threads of this rank may use the exchange meanwhile, and read it first.
        """
        return self.waiters.wait(timeout) or bool(self.pump(0))

    @interruptible
    def _poll(self, timeout: float | None) -> list[tuple[int, int]]:
        return self._poller.poll(None if timeout is None else max(0.0, timeout) * 1000)

    def _read(self, peer: Peer, descriptor: int) -> None:
        for data in peer.channel.receive():
            try:
                frame = decode(data)
                if peer.remote:
                    self._note_remote(peer, frame, data)
            except ValueError as error:
                # After what one cannot read nothing else that comes can be trusted to mean what it says.
                me = self.place.label
                why = f"was cut off, for it sent what {me} cannot read ({error}): do all ranks run the same graftlab?"
                self._lose(peer, descriptor, why)
                logger.error("%s %s", peer.label, peer.gone)
                peer.channel.close()
                return
            self._handlers[type(frame)](peer, frame)
        if peer.channel.closed:
            # The end of a connection to another machine may be anybody's, unless the other end has said goodbye.
            unsure = isinstance(peer.channel, RemoteChannel) and not peer.channel.said_goodbye
            self._lose(peer, descriptor, "died, or the network between us failed" if unsure else "died")

    def _note_remote(self, peer: Peer, frame: Frame, data: bytes) -> None:
        """Note a frame of a rank that shares no memory. Raises ValueError for one that it has no right to send."""
        peer.attached = ()
        if type(frame) is PublishFrame:
            if isinstance(frame.location, DeviceLocation):
                raise ValueError("a place in the memory of another machine's GPU")
            peer.received += 1
            peer.attached = data.payload if isinstance(data, FrameWithPayload) else ()
            if isinstance(peer.page, RemoteStatusPage):
                peer.page.latest = RankStatus("running", frame.key.step, since=time.monotonic(), tap=frame.key.name)
        elif type(frame) is ChunkFrame:
            raise ValueError("a handle of GPU memory from another machine")

    def _lose(self, peer: Peer, descriptor: int, why: str) -> None:
        peer.gone = why
        listeners = self._by_descriptor[descriptor]
        listeners.remove(peer)
        if not listeners:
            self._poller.unregister(descriptor)
            self.waiters.forget(descriptor)
            del self._by_descriptor[descriptor]
        self._on_gone(peer)

    def close(self) -> None:
        """End all connections, and let go of the others' memory."""
        for peer in self.by_rank.values():
            peer.channel.close()
            if peer.arena is not None:
                peer.arena.close()

    def ranks_waiting_for_me(self) -> set[tuple[int, float]]:
        """Ranks of the other side that wait for this one, each with the moment its wait began."""
        me = self.place.world_rank
        looks = ((peer, peer.page.read()) for peer in self.others if peer.in_run and not peer.gone)
        return {
            (peer.world_rank, look.since)
            for peer, look in looks
            # One that could not have known yet of what is on its way may have got what it waits for.
            if me in look.awaits and (not peer.remote or peer.confirmed == peer.sent)
        }

    # ---- ranks that share no memory -----------------------------------------------------------------------------

    def send_status(self, look: RankStatus) -> None:
        """Let the ranks of the other side that cannot see it know where this one is. Any thread may say so."""
        where = WireStatus.of(look)
        for peer in self.others:
            if peer.remote and peer.in_run and not peer.gone:
                peer.send(StatusFrame(where, peer.received))

    @property
    def all_gone(self) -> bool:
        """Whether nobody is left to tell."""
        return all(peer.gone or peer.channel.closed for peer in self.others if peer.remote)

    def received_counts(self) -> list[int]:
        """How many tensors have come from each of them."""
        return [peer.received for peer in self.others if peer.remote]

    def on_status(self, peer: Peer, frame: StatusFrame) -> None:
        peer.confirmed = frame.received
        page = peer.page
        if isinstance(page, RemoteStatusPage):
            old, new = page.latest, frame.status.restore()
            if (old.state, old.step, old.taps, old.awaits) == (new.state, new.step, new.taps, new.awaits):
                # The same wait: what tells of it is on its way now longer, now shorter.
                new = replace(new, since=old.since)
            page.latest = new

    def lost(self) -> str:
        return "; ".join(f"{peer.label} {peer.gone}" for peer in self.others if peer.gone)

    def describe(self) -> str:
        return "; ".join(peer.describe() for peer in self.others)
