"""The other ranks as one rank knows them: their connections, and their state by the frames that they have sent.

A peer's death ends its socket's stream, which the operating system reports at once, whatever killed it. When a whole
machine or the network fails, the connection ends after a time without an answer (:mod:`.tcp`).
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
from graftlab.exchange.channel import Channel, Received
from graftlab.exchange.frames import ChunkFrame, DeviceLocation, Frame, PublishFrame, StatusFrame, decode, encode
from graftlab.exchange.interrupts import interruptible
from graftlab.exchange.status_page import RankStatus, StatusPage, WireStatus
from graftlab.exchange.tcp import FrameWithPayload, TcpChannel
from graftlab.exchange.waiter_threads import WaiterThreads

logger = logging.getLogger(__name__)

Link = tuple[Channel, Arena | None]
"""The link to another rank: a channel and that rank's segment, or a channel alone where they share no memory."""


class RemoteStatusPage:
    """The last status that a rank has sent whose memory this process cannot read."""

    def __init__(self) -> None:
        self.latest = RankStatus()

    def read(self) -> RankStatus:
        return self.latest


@dataclass
class Peer:
    """Another rank of the graft world, as this rank knows it."""

    place: Place
    channel: Channel
    # None for a rank that shares no memory with this one.
    arena: Arena | None
    page: StatusPage | RemoteStatusPage
    in_run: bool = False
    # Why no frame will arrive from it any longer; empty while it is connected.
    gone: str = ""
    ended_step: int = -1
    run_ended: bool = False
    # Its publications by step and key; None for a declined one. By step, because a sender may be a thousand taps ahead,
    # and the end of a step drops only the step's own.
    inbox: defaultdict[int, dict[TapKey, PublishFrame | None]] = field(default_factory=lambda: defaultdict(dict))
    announced: dict[int, bytes] = field(default_factory=dict)
    # The last step that it has announced. A leader that begins later than this rank skips the earlier steps.
    announced_step: int = -1
    # The ids and total bytes of its tensors that this rank has finished with; sent in batches.
    to_release: list[int] = field(default_factory=list)
    bytes_to_release: int = 0
    # The numbers of this rank's waits that it has answered with a YieldFrame.
    yielded_waits: set[int] = field(default_factory=set)
    # For a peer that shares no memory: the payload of the frame being handled, and of those in the inbox, by id. Then
    # the numbers of tensors received from it, sent to it, and received by it when it last sent its status.
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
        """Whether it will neither publish nor receive anything more of this step."""
        return self.ended_step >= step or self.run_ended or not self.in_run or self.gone != ""

    def has_announced(self, step: int) -> bool:
        return self.announced_step >= step or self.run_ended

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
    """A wait for other ranks, shown on the status page while it lasts, with its deadline."""

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
    """All other ranks of the graft world: reads their frames, and waits for them.

    ``others`` are the ranks of the other side, in rank order. Each frame goes to the handler of its class that
    :meth:`listen` has registered.
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
        # All peers on other machines share one socket.
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
        """Register the handler of each class of frames, and the one that is called when a peer is gone."""
        self._handlers = handlers
        self._on_gone = on_gone

    def wait(self, awaits: Collection[int]) -> Wait:
        return Wait(self, awaits)

    def report_waits(self) -> None:
        if len(self.waits) == 1:
            self.on_wait(self.waits[0].awaits)
        else:
            self.on_wait(sorted({rank for wait in self.waits for rank in wait.awaits}))

    def settle(self, wake: int | None, timeout: float | None) -> bool:
        """Read frames until every peer has ended the run; False if the descriptor ``wake`` becomes readable before, or
        after ``timeout`` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        if wake is not None:
            self._poller.register(wake, select.POLLIN)
        try:
            while not all(peer.has_settled() for peer in self.by_rank.values()):
                remaining = None if deadline is None else deadline - time.monotonic()
                if (remaining is not None and remaining <= 0) or wake in self.pump(remaining):
                    return False
            return True
        finally:
            if wake is not None:
                self._poller.unregister(wake)

    def pump(self, timeout: float | None) -> list[int]:
        """Wait up to ``timeout`` seconds (None: without a limit) for frames, and read all that have arrived.

        Returns the descriptors that were readable.
        """
        ready = [descriptor for descriptor, _ in self._poll(timeout)]
        for descriptor in ready:
            for peer in list(self._by_descriptor.get(descriptor, ())):
                self._read(peer, descriptor)
        if ready:
            self.waiters.wake()
        return ready

    def look(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds for frames and read them; return whether any arrived.

        Other threads of this rank may use the exchange meanwhile, and read the frames first.
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
                # After an unreadable frame no later one of this peer can be trusted.
                why = (
                    f"was disconnected: it sent a frame that {self.place.label} cannot read ({error}); do all ranks "
                    f"run the same release of graftlab?"
                )
                self._lose(peer, descriptor, why)
                logger.error("%s %s", peer.label, peer.gone)
                peer.channel.close()
                return
            self._handlers[type(frame)](peer, frame)
        if peer.channel.closed:
            # Without a goodbye, a connection to another machine may have ended by the network's failure too.
            unsure = isinstance(peer.channel, TcpChannel) and not peer.channel.said_goodbye
            self._lose(peer, descriptor, "died, or the network connection to it failed" if unsure else "died")

    def _note_remote(self, peer: Peer, frame: Frame, data: Received) -> None:
        """Record a frame of a rank that shares no memory. Raises ValueError for one that needs shared memory."""
        peer.attached = ()
        if type(frame) is PublishFrame:
            if isinstance(frame.location, DeviceLocation):
                raise ValueError("its tensor is in the memory of another machine's GPU")
            peer.received += 1
            peer.attached = data.payload if isinstance(data, FrameWithPayload) else ()
            if isinstance(peer.page, RemoteStatusPage):
                peer.page.latest = RankStatus("running", frame.key.step, since=time.monotonic(), tap=frame.key.name)
        elif type(frame) is ChunkFrame:
            raise ValueError("it is a handle of another machine's GPU memory")

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
        """End all connections, and release the other ranks' memory."""
        for peer in self.by_rank.values():
            peer.channel.close()
            if peer.arena is not None:
                peer.arena.close()

    def ranks_waiting_for_me(self) -> set[tuple[int, float]]:
        """Return the ranks of the other side that wait for this one, each with the time when its wait began."""
        me = self.place.world_rank
        statuses = ((peer, peer.page.read()) for peer in self.others if peer.in_run and not peer.gone)
        return {
            (peer.world_rank, status.since)
            for peer, status in statuses
            # A remote status older than the last tensor sent proves nothing: the tensor may have ended the wait.
            if me in status.awaits and (not peer.remote or peer.confirmed == peer.sent)
        }

    # ---- ranks that share no memory -----------------------------------------------------------------------------

    def send_status(self, status: RankStatus) -> None:
        """Send this rank's status to the other side's ranks that cannot read its memory. Any thread may call it."""
        sent = WireStatus.of(status)
        for peer in self.others:
            if peer.remote and peer.in_run and not peer.gone:
                peer.send(StatusFrame(sent, peer.received))

    @property
    def all_gone(self) -> bool:
        """Whether no remote rank of the other side is connected any longer."""
        return all(peer.gone or peer.channel.closed for peer in self.others if peer.remote)

    def received_counts(self) -> list[int]:
        """Return the number of tensors received from each remote rank of the other side."""
        return [peer.received for peer in self.others if peer.remote]

    def on_status(self, peer: Peer, frame: StatusFrame) -> None:
        peer.confirmed = frame.received
        page = peer.page
        if isinstance(page, RemoteStatusPage):
            old, new = page.latest, frame.status.restore()
            if (old.state, old.step, old.taps, old.awaits) == (new.state, new.step, new.taps, new.awaits):
                # The state is the same as before; the reports only took different times to arrive.
                new = replace(new, since=old.since)
            page.latest = new

    def lost(self) -> str:
        return "; ".join(f"{peer.label} {peer.gone}" for peer in self.others if peer.gone)

    def describe(self) -> str:
        return "; ".join(peer.describe() for peer in self.others)
