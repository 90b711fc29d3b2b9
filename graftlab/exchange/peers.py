"""The other ranks as one rank knows them: what each has said so far, and the sockets on which it says more.

A peer's death is the end of its socket's stream, which the kernel of the machine reports at once, whatever killed it.
"""

from __future__ import annotations

import logging
import select
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from graftlab.base.tags import TapKey
from graftlab.base.world import Place, RunInfo
from graftlab.exchange.arena import Arena
from graftlab.exchange.channel import Channel
from graftlab.exchange.frames import Frame, Published, decode, encode
from graftlab.exchange.interrupts import merely_waits
from graftlab.exchange.whereabouts import WhereaboutsPage

logger = logging.getLogger(__name__)


@dataclass
class Peer:
    """Another rank of the graft world, as seen from here."""

    place: Place
    channel: Channel
    arena: Arena
    page: WhereaboutsPage
    in_run: bool = False
    # Why nothing will ever come from it again; empty while something may.
    gone: str = ""
    ended_step: int = -1
    run_ended: bool = False
    # What it has published, or declined (None). By step, because a sender may be a thousand taps ahead, and the end of
    # a step forgets only that step's.
    inbox: defaultdict[int, dict[TapKey, Published | None]] = field(default_factory=lambda: defaultdict(dict))
    announced: dict[int, bytes] = field(default_factory=dict)
    # The ids of its tensors that are done with here, and how many bytes they are; told in batches.
    to_release: list[int] = field(default_factory=list)
    bytes_to_release: int = 0
    # The number of our own wait that it said we must give up.
    told_to_yield: int = 0

    def __post_init__(self) -> None:
        self.label = self.place.label
        self.world_rank = self.place.world_rank

    def send(self, frame: Frame) -> None:
        self.channel.send(encode(frame))

    def begin_run(self, run: RunInfo) -> None:
        self.in_run = self.world_rank in run.participants
        self.run_ended = False
        self.ended_step = run.first_step - 1
        self.inbox.clear()
        self.announced.clear()

    def has_answered(self, key: TapKey) -> bool:
        return key in self.inbox[key.step] or self.is_past(key.step)

    def is_past(self, step: int) -> bool:
        """Whether it neither publishes nor asks for anything of this step any more."""
        return self.ended_step >= step or self.run_ended or not self.in_run or self.gone != ""

    def has_announced(self, step: int) -> bool:
        return step in self.announced or self.run_ended or self.gone != ""

    def has_settled(self) -> bool:
        return self.run_ended or not self.in_run or self.gone != ""

    def why_absent(self) -> str:
        if self.gone:
            return f"{self.label} {self.gone}"
        if not self.in_run:
            return f"{self.label} takes no part in this run"
        return f"{self.label} ended the {'run' if self.run_ended else 'step'} without this tap"

    def whereabouts(self) -> str:
        return f"{self.label}: {self.gone or self.page.read()}"


class Wait:
    """A wait for other ranks, which everybody can know of while it lasts, and what is left of its time limit."""

    __slots__ = ("_awaits", "_deadline", "_on_wait")

    def __init__(self, awaits: Collection[int], timeout: float, on_wait: Callable[[Collection[int]], None]) -> None:
        self._awaits = awaits
        self._deadline = time.monotonic() + timeout
        self._on_wait = on_wait

    def __enter__(self) -> Wait:
        self._on_wait(self._awaits)
        return self

    def __exit__(self, *error: object) -> None:
        self._on_wait([])

    def remaining(self) -> float:
        return self._deadline - time.monotonic()


class Peers:
    """All other ranks of the graft world; reads what they send, and waits for it.

    ``others`` are those of the other side, in rank order. What comes goes to the handler of its class, which
    :meth:`listen` is told.
    """

    def __init__(self, place: Place, links: Mapping[int, tuple[Channel, Arena]], timeout: float) -> None:
        everyone = place.everyone()
        self.place = place
        self.timeout = timeout
        self.on_wait: Callable[[Collection[int]], None] = lambda awaits: None
        self.by_rank = {
            rank: Peer(everyone[rank], channel, arena, WhereaboutsPage(arena.map))
            for rank, (channel, arena) in sorted(links.items())
        }
        self.others = [peer for peer in self.by_rank.values() if peer.place.side != place.side]
        self._handlers: Mapping[type[Frame], Callable[[Peer, Any], None]] = {}
        self._on_gone: Callable[[Peer], None] = lambda peer: None
        self._by_descriptor = {peer.channel.fileno(): peer for peer in self.by_rank.values()}
        self._poller = select.poll()
        for descriptor in self._by_descriptor:
            self._poller.register(descriptor, select.POLLIN)

    def listen(
        self, handlers: Mapping[type[Frame], Callable[[Peer, Any], None]], on_gone: Callable[[Peer], None]
    ) -> None:
        """Say who handles which frames, and who wants to know that nothing comes from a peer any more."""
        self._handlers = handlers
        self._on_gone = on_gone

    def wait(self, awaits: Collection[int]) -> Wait:
        return Wait(awaits, self.timeout, self.on_wait)

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
            peer = self._by_descriptor.get(descriptor)
            if peer is not None:
                self._read(peer, descriptor)
        return ready

    @merely_waits
    def _poll(self, timeout: float | None) -> list[tuple[int, int]]:
        return self._poller.poll(None if timeout is None else max(0.0, timeout) * 1000)

    def _read(self, peer: Peer, descriptor: int) -> None:
        for data in peer.channel.receive():
            try:
                frame = decode(data)
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
            self._lose(peer, descriptor, "died")

    def _lose(self, peer: Peer, descriptor: int, why: str) -> None:
        peer.gone = why
        self._poller.unregister(descriptor)
        del self._by_descriptor[descriptor]
        self._on_gone(peer)

    def who_waits_for_me(self) -> set[tuple[int, float]]:
        """Ranks of the other side that wait for this one, each with the moment its wait began."""
        me = self.place.world_rank
        looks = ((peer, peer.page.read()) for peer in self.others if peer.in_run and not peer.gone)
        return {(peer.world_rank, look.since) for peer, look in looks if me in look.awaits}

    def where_they_are(self) -> str:
        return "; ".join(peer.whereabouts() for peer in self.others)
