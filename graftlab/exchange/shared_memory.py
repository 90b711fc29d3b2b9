"""The exchange between ranks of one host: tensors through shared memory, their addresses through sockets.

Each rank owns one segment (:mod:`.arena`) that every rank maps. A sender copies a tensor into its own segment once and
sends each receiver a small frame with the key and the place; a receiver looks at the bytes where they are. What was
received is given back in batches; what nobody asked for is free when the receivers end the step. A peer's death is
the end of its socket's stream, which the kernel of the machine reports at once, whatever it died of.

Tensors on a GPU stay there where they can (:mod:`.device`); all else about them is the same.
"""

from __future__ import annotations

import logging
import pickle
import select
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from graftlab.base import limits
from graftlab.base.tags import TapKey
from graftlab.base.world import Place, RunInfo
from graftlab.errors import BufferFullError, ShippingError
from graftlab.exchange.arena import Allocator, Arena
from graftlab.exchange.channel import Channel
from graftlab.exchange.contract import Contribution, Receipt
from graftlab.exchange.device import Cuda, DeviceReader, DeviceStaging, Gpu
from graftlab.exchange.staging import HostStaging, Staging
from graftlab.exchange.whereabouts import WhereaboutsPage

logger = logging.getLogger(__name__)

# First item of each frame between two ranks.
_ENTRY, _DECLINE, _RELEASE, _STEP_END, _RUN_END, _ANNOUNCE, _CHUNK, _CHUNK_ANSWER, _ASK, _YIELD = range(10)

# Releases travel together: this many, or this share of the budget, whichever comes first.
_RELEASE_COUNT = 64
_RELEASE_SHARE = 8
# How often a sender without room looks whether the receiver waits for it (see _wait_for_room).
_ROOM_POLL = 0.02
# How often a rank that waits looks whether the GPU has done with what was received, so that it can be given back.
_READ_POLL = 0.001
# How soon a rank that waits looks whether a peer waits for it in turn, and how often in the end.
_FIRST_LOOK, _LAST_LOOK = 0.01, 0.5
# Taps that never repeat must not fill the memory.
_HEARD_LIMIT = 100_000


class _Entry(NamedTuple):
    """A published tensor as the receiver knows it. ``place`` means what the sender's staging says."""

    id: int
    place: Any
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    extras: bytes | None
    on_device: bool


@dataclass
class _Outgoing:
    """A published tensor as its sender knows it: which receivers have not let go of it yet, and did any use it."""

    step: int
    staging: Staging
    place: Any
    pending: set[int]
    memo: object
    used: bool = False


@dataclass
class _Peer:
    """Another rank of the graft world, as seen from here."""

    place: Place
    channel: Channel
    arena: Arena
    page: WhereaboutsPage
    in_run: bool = False
    dead: bool = False
    ended_step: int = -1
    run_ended: bool = False
    # By step, because a sender may be a thousand taps ahead, and the end of a step forgets only that step's.
    inbox: defaultdict[int, dict[TapKey, _Entry | None]] = field(default_factory=lambda: defaultdict(dict))
    to_release: list[int] = field(default_factory=list)
    bytes_to_release: int = 0
    announced: dict[int, bytes] = field(default_factory=dict)
    # The wait of ours, by its number, that this peer said we must end (see _wait_for).
    told_to_yield: int = 0

    def __post_init__(self) -> None:
        self.label = self.place.label

    def has_answered(self, key: TapKey) -> bool:
        return key in self.inbox[key.step] or self.is_past(key.step)

    def is_past(self, step: int) -> bool:
        return self.dead or not self.in_run or self.run_ended or self.ended_step >= step

    def has_announced(self, step: int) -> bool:
        return step in self.announced or self.dead or self.run_ended

    def why_absent(self) -> str:
        label = self.label
        if self.dead:
            return f"{label} died"
        if not self.in_run:
            return f"{label} takes no part in this run"
        return f"{label} ended the {'run' if self.run_ended else 'step'} without this tap"


class SharedMemoryExchange:
    """Implements :class:`graftlab.exchange.contract.Exchange`; see there for the promises.

    ``budget`` is in bytes and bounds what this rank has published and not been given back; ``timeout``, in seconds,
    bounds every wait.
    """

    def __init__(
        self,
        place: Place,
        arena: Arena,
        peers: Mapping[int, tuple[Channel, Arena]],
        *,
        budget: int = limits.BUFFER_BUDGET,
        timeout: float = limits.TIMEOUT,
        gpu: Gpu | None = None,
    ) -> None:
        everyone = place.everyone()
        self._place = place
        self._budget = budget
        self.timeout = timeout
        self._allocator = Allocator(len(arena.map))
        self._host = HostStaging(arena, self._allocator)
        gpu = gpu or Cuda()
        self._device = DeviceStaging(gpu, place.label, budget, self._tell_of_chunk)
        self._reader = DeviceReader(gpu)
        self._peers = {
            rank: _Peer(everyone[rank], channel, their_arena, WhereaboutsPage(their_arena.map))
            for rank, (channel, their_arena) in peers.items()
        }
        self._others = [peer for _, peer in sorted(self._peers.items()) if peer.place.side != place.side]
        self._outgoing: dict[int, _Outgoing] = {}
        self._next_id = 0
        self._unmatched: list[object] = []
        self._warned_full = False
        self._poller = select.poll()
        self._by_descriptor: dict[int, _Peer] = {}
        for peer in self._peers.values():
            self._by_descriptor[peer.channel.fileno()] = peer
            self._poller.register(peer.channel.fileno(), select.POLLIN)
        # The grafter sets this to write the whereabouts page: it alone knows the tap.
        self.on_wait: Callable[[Collection[int]], None] = lambda awaits: None
        self._ended_step = -1
        # The tap that this rank waits for, and which of its waits that is.
        self._awaited: TapKey | None = None
        self._wait = 0
        # Names and tags that the other side has ever reached, and of which it was told though it had ended the step.
        self._heard: set[tuple[object, ...]] = set()
        self._told: set[tuple[object, ...]] = set()

    # ---- what runs do -------------------------------------------------------------------------------------------

    def begin_run(self, run: RunInfo) -> None:
        self._ended_step = run.first_step - 1
        for rank, peer in self._peers.items():
            peer.in_run = rank in run.participants
            peer.run_ended = False
            peer.ended_step = run.first_step - 1
            peer.inbox.clear()
            peer.announced.clear()

    def end_step(self, step: int) -> None:
        self._give_back_read(wait=True)
        self._ended_step = step
        for peer in self._others:
            self._send_releases(peer)
            if peer.in_run:
                self._send(peer, (_STEP_END, step))
            for ended in [known for known in peer.inbox if known <= step]:
                del peer.inbox[ended]
        self._pump(0)

    def end_run(self) -> None:
        self._give_back_read(wait=True)
        for peer in self._others:
            self._send_releases(peer)
        for peer in self._peers.values():
            if peer.in_run:
                self._send(peer, (_RUN_END,))
            peer.inbox.clear()
        self._pump(0)

    def settled(self) -> bool:
        return all(peer.run_ended or peer.dead for peer in self._peers.values() if peer.in_run)

    def settle(self, wake: int) -> bool:
        """Read what the peers send until the run is over everywhere, or ``wake`` (a descriptor) becomes readable."""
        self._poller.register(wake, select.POLLIN)
        try:
            while not self.settled():
                if wake in self._pump(None):
                    return False
            return True
        finally:
            self._poller.unregister(wake)

    def take_unmatched(self) -> list[object]:
        taken, self._unmatched = self._unmatched, []
        return taken

    # ---- sending ------------------------------------------------------------------------------------------------

    def publish(self, key: TapKey, tensor: torch.Tensor, extras: object, memo: object = None) -> None:
        packed = self._pack_extras(key, extras)
        on_host = tensor.is_cpu
        if len(self._outgoing) > 4 * _RELEASE_COUNT or (not on_host and self._device.awaits_answers):
            self._pump(0)
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes and self._is_full_for(nbytes):
            self._make_room(key, nbytes)
        # Only now: a receiver may have ended the step, or died, while this rank waited for room.
        receivers = [peer for peer in self._others if not peer.is_past(key.step)]
        if len(receivers) < len(self._others):
            self._tell_of(key)
        if not receivers:
            self._unmatched.append(memo)
            return
        ranks = {peer.place.world_rank for peer in receivers}
        staging: Staging = self._host
        place: Any = None
        if nbytes:
            if not on_host and (place := self._device.put(tensor, nbytes, ranks)) is not None:
                staging = self._device
            elif (place := self._host.put(tensor, nbytes, ranks)) is None:
                raise BufferFullError(
                    f"{self._place.label} could not publish tap {key.name!r} of step {key.step}: {nbytes} bytes do "
                    f"not fit into what its segment has left"
                )
        self._next_id += 1
        self._outgoing[self._next_id] = _Outgoing(key.step, staging, place, ranks, memo)
        on_device = staging is self._device
        entry = (self._next_id, place or 0, nbytes, tensor.dtype, tuple(tensor.shape), packed, on_device)
        frame = pickle.dumps((_ENTRY, tuple(key), entry), protocol=pickle.HIGHEST_PROTOCOL)
        for peer in receivers:
            peer.channel.send(frame)

    def _pack_extras(self, key: TapKey, extras: object) -> bytes | None:
        if extras is None:
            return None
        try:
            return pickle.dumps(extras, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            raise ShippingError(
                f"gl.tap({key.name!r}) on {self._place.label}: the extras cannot be pickled ({error}); "
                f"pass tensors, numbers, strings, or containers of them"
            ) from error

    def decline(self, key: TapKey) -> None:
        for peer in self._others:
            if not peer.is_past(key.step):
                self._send(peer, (_DECLINE, tuple(key)))

    def _tell_of(self, key: TapKey) -> None:
        """Let those that have ended the step know, once, that this rank reaches such a tap: see _wait_for."""
        if (key.name, key.tags) not in self._told and len(self._told) < _HEARD_LIMIT:
            self._told.add((key.name, key.tags))
            for peer in self._others:
                if peer.ended_step >= key.step and peer.in_run and not (peer.dead or peer.run_ended):
                    self._send(peer, (_DECLINE, tuple(key)))

    def _make_room(self, key: TapKey, nbytes: int) -> None:
        self._pump(0)
        if self._is_full_for(nbytes):
            self._wait_for_room(key, nbytes)

    def _is_full_for(self, nbytes: int) -> bool:
        # A tensor larger than the whole budget goes when nothing else is in the buffer.
        in_use = self._allocator.bytes_in_use + self._device.bytes_in_use
        return in_use > 0 and in_use + nbytes > self._budget

    def _wait_for_room(self, key: TapKey, nbytes: int) -> None:
        deadline = time.monotonic() + self.timeout
        self.on_wait(sorted({rank for outgoing in self._outgoing.values() for rank in outgoing.pending}))
        try:
            while self._is_full_for(nbytes):
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise BufferFullError(
                        f"{self._place.label} could not publish tap {key.name!r} of step {key.step}: its buffer of "
                        f"{self._budget >> 20} MiB stayed full for {self.timeout:g} s; {self.where_peers_are()}"
                    )
                self._give_back_read(wait=False)
                before = self._who_waits_for_me()
                quiet = not self._pump(min(remaining, _ROOM_POLL))
                if quiet and before & self._who_waits_for_me():
                    # A receiver waits for a later tap of this rank and will not ask for what is in the buffer before
                    # it has got it: waiting for room would be waiting for each other.
                    if not self._warned_full:
                        self._warned_full = True
                        logger.warning(
                            "%s exceeds its buffer budget of %d MiB: a receiver waits for a later tap and has not "
                            "asked for what is in the buffer; filters that match only taps of both sides avoid this",
                            self._place.label,
                            self._budget >> 20,
                        )
                    return
        finally:
            self.on_wait([])

    def _who_waits_for_me(self) -> set[tuple[int, float]]:
        """Receivers that wait for this rank, each with the moment its wait began."""
        me = self._place.world_rank
        looks = ((peer, peer.page.read()) for peer in self._others if peer.in_run and not peer.dead)
        return {(peer.place.world_rank, look.since) for peer, look in looks if me in look.awaits}

    # ---- receiving ----------------------------------------------------------------------------------------------

    def receive(self, key: TapKey, near: torch.Tensor | None = None) -> Receipt:
        if not self._all_answered(key):
            self._pump(0)
        unanswered = {} if self._all_answered(key) else self._wait_for(key)
        contributions: list[Contribution] = []
        absent: dict[int, str] = {}
        unreadable: dict[int, str] = {}
        taken: list[tuple[_Peer, _Entry]] = []
        on_host = near is None or near.is_cpu
        read_on_device = False
        for peer in self._others:
            rank, label = peer.place.rank, peer.label
            inbox = peer.inbox[key.step]
            if key not in inbox:
                absent[rank] = peer.why_absent() if peer.is_past(key.step) else unanswered[rank]
                continue
            entry = inbox.pop(key)
            if entry is None:
                absent[rank] = f"{label} did not send this tap"
                continue
            taken.append((peer, entry))
            if on_host and not entry.on_device:
                window = peer.arena.window(entry.place, entry.nbytes, entry.dtype, entry.shape)
            else:
                try:
                    window = self._bring(peer, entry, near)
                except Exception as error:
                    absent[rank] = f"{label} sent this tap, but its tensor cannot be brought here: {error}"
                    self._give_back([taken.pop()])
                    continue
                read_on_device |= entry.on_device
            try:
                extras = None if entry.extras is None else pickle.loads(entry.extras)
            except Exception as error:
                # Loading runs what the sender's class says, or finds no such class here: the user's affair, not ours.
                extras = None
                unreadable[rank] = f"the extras of {label} cannot be loaded here: {type(error).__name__}: {error}"
            contributions.append(Contribution(rank, window, extras))
        give_back = self._give_back_when_read if read_on_device else self._give_back
        timed_out = bool(unanswered) and not self._has_yielded()
        return Receipt(contributions, absent, timed_out, unreadable, lambda: give_back(taken))

    def _bring(self, peer: _Peer, entry: _Entry, near: torch.Tensor | None) -> torch.Tensor:
        """A tensor that is on a GPU, or is wanted on one, as it is to be used here."""
        where = (entry.place, entry.nbytes, entry.dtype, entry.shape)
        if entry.on_device:
            try:
                window = self._reader.window(peer.place.world_rank, *where, alive=not peer.dead)
            except Exception as error:
                # This one is lost; those that follow must take the other way.
                self._send(peer, (_CHUNK_ANSWER, str(error)))
                raise
        else:
            window = peer.arena.window(*where)
        return window if near is None else window.to(near.device)

    def _all_answered(self, key: TapKey) -> bool:
        for peer in self._others:  # noqa: SIM110 - a generator costs more than the question, at each tap
            if not peer.has_answered(key):
                return False
        return True

    def _give_back(self, taken: list[tuple[_Peer, _Entry]]) -> None:
        for peer, entry in taken:
            peer.to_release.append(entry.id)
            peer.bytes_to_release += entry.nbytes
            large = peer.bytes_to_release * _RELEASE_SHARE >= self._budget
            if large or len(peer.to_release) >= _RELEASE_COUNT:
                self._send_releases(peer)

    def _give_back_when_read(self, taken: list[tuple[_Peer, _Entry]]) -> None:
        """The same for tensors some of which are on a GPU, whose streams may have them still to read."""
        for peer, entry in taken:
            if entry.on_device:
                self._reader.let_go(peer.place.world_rank, entry.place, (peer, entry))
            else:
                self._give_back([(peer, entry)])
        self._give_back(self._reader.read(wait=False))

    def _give_back_read(self, *, wait: bool) -> None:
        """Tell the senders of everything that no GPU reads any more; with ``wait``, of everything that was let go."""
        if self._reader.reading:
            self._give_back(self._reader.read(wait=wait))
            for peer in self._others:
                self._send_releases(peer)

    def _wait_for(self, key: TapKey) -> dict[int, str]:
        """Wait until every sender has answered; why some have not, by rank, where the wait is given up.

        It is given up at the time limit, and at once where a sender waits for a tap of this very rank: each would wait
        for the other. One of them yields, and the other goes on waiting: who waits for what the other side has never
        reached, and the higher world rank if that tells nothing. A sender's page alone is no proof, as our answer may
        be on its way to it; so it is asked, and its answer comes after it has read all that we had sent before.
        """
        for peer in self._others:
            self._send_releases(peer)
        deadline = time.monotonic() + self.timeout
        pause = _FIRST_LOOK
        self._awaited = key
        self._wait += 1
        self.on_wait([peer.place.world_rank for peer in self._others if not peer.has_answered(key)])
        try:
            while not self._all_answered(key):
                remaining = deadline - time.monotonic()
                if remaining <= 0 or self._has_yielded():
                    return self._why_unanswered(key)
                self._give_back_read(wait=False)
                look = min(remaining, pause)
                if not self._pump(min(look, _READ_POLL) if self._reader.reading else look):
                    self._ask_who_waits_for_us(key)
                    pause = min(2 * pause, _LAST_LOOK)
            return {}
        finally:
            self._awaited = None
            self.on_wait([])

    def _ask_who_waits_for_us(self, key: TapKey) -> None:
        me, is_known = self._place.world_rank, self._knows(key)
        for peer in self._others:
            if not peer.has_answered(key) and me in peer.page.read().awaits:
                self._send(peer, (_ASK, self._wait, is_known))

    def _has_to_yield_to_us(self, peer: _Peer, asker_is_known: bool) -> bool:
        """What this rank says when asked by a peer that waits for it."""
        awaited = self._awaited
        if awaited is None or peer.has_answered(awaited):
            return False
        if asker_is_known != self._knows(awaited):
            return not asker_is_known
        return peer.place.world_rank > self._place.world_rank

    def _knows(self, key: TapKey) -> bool:
        """Whether the other side has ever reached such a tap."""
        return (key.name, key.tags) in self._heard

    def _has_yielded(self) -> bool:
        return any(peer.told_to_yield == self._wait for peer in self._others)

    def _why_unanswered(self, key: TapKey) -> dict[int, str]:
        waited = f"did not reach this tap within {self.timeout:g} s"
        if self._has_yielded():
            waited = f"waits for another tap of {self._place.label}, which cannot come while this one is waited for"
        late = [peer for peer in self._others if not peer.has_answered(key)]
        return {peer.place.rank: f"{peer.label} {waited}: {peer.page.read()}" for peer in late}

    def where_peers_are(self) -> str:
        """One line on every rank of the other side, for messages."""
        return "; ".join(f"{peer.place.label}: {'died' if peer.dead else peer.page.read()}" for peer in self._others)

    # ---- what the leader says, and what followers hear ----------------------------------------------------------

    def announce(self, step: int, message: bytes) -> None:
        """Tell every participant something about a step before it begins."""
        for peer in self._peers.values():
            if peer.in_run:
                self._send(peer, (_ANNOUNCE, step, message))

    def announcements(self, leader: int, step: int) -> list[bytes] | None:
        """What the leader announced up to this step and nobody has asked for yet, oldest first.

        None when nothing for this step came within the time limit; what was missed comes with a later step's then. A
        leader that has ended its run, or died, announces no more, and nobody waits for it.
        """
        peer = self._peers[leader]
        deadline = time.monotonic() + self.timeout
        self._pump(0)
        if not peer.has_announced(step):
            self.on_wait([leader])
            try:
                while not peer.has_announced(step):
                    remaining = deadline - time.monotonic()
                    if remaining <= 0:
                        return None
                    self._pump(remaining)
            finally:
                self.on_wait([])
        return [peer.announced.pop(heard) for heard in sorted(peer.announced) if heard <= step]

    # ---- the wire -----------------------------------------------------------------------------------------------

    def _send(self, peer: _Peer, message: tuple[object, ...]) -> None:
        peer.channel.send(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))

    def _tell_of_chunk(self, world_rank: int, chunk: int, shared: bytes) -> None:
        self._send(self._peers[world_rank], (_CHUNK, chunk, shared))

    def _send_releases(self, peer: _Peer) -> None:
        if peer.to_release:
            self._send(peer, (_RELEASE, peer.to_release))
            peer.to_release = []
            peer.bytes_to_release = 0

    def _pump(self, timeout: float | None) -> set[int]:
        """Read whatever has come, waiting up to ``timeout`` seconds for the first of it (None: for ever).

        Returns the descriptors that had something.
        """
        ready = {fd for fd, _ in self.poll(timeout)}
        for descriptor in ready:
            peer = self._by_descriptor.get(descriptor)
            if peer is None:
                continue
            for frame in peer.channel.receive():
                self._handle(peer, pickle.loads(frame))
            if peer.channel.closed:
                peer.dead = True
                self._poller.unregister(descriptor)
                del self._by_descriptor[descriptor]
                self._let_go_all(peer, None)
        return ready

    def poll(self, timeout: float | None) -> list[tuple[int, int]]:
        """Wait until there is something to read. Apart because an exception raised in here loses nothing."""
        return self._poller.poll(None if timeout is None else max(0.0, timeout) * 1000)

    def _handle(self, peer: _Peer, message: tuple[Any, ...]) -> None:
        kind = message[0]
        if kind in (_ENTRY, _DECLINE):
            key = TapKey(*message[1])
            if len(self._heard) < _HEARD_LIMIT:
                self._heard.add((key.name, key.tags))
            # What comes for a step that has ended here is freed by the end-of-step frame that is on its way back.
            if key.step > self._ended_step:
                peer.inbox[key.step][key] = _Entry._make(message[2]) if kind == _ENTRY else None
        elif kind == _RELEASE:
            for outgoing_id in message[1]:
                self._let_go(outgoing_id, peer, used=True)
        elif kind == _STEP_END:
            peer.ended_step = max(peer.ended_step, message[1])
            self._let_go_all(peer, message[1])
        elif kind == _RUN_END:
            peer.run_ended = True
            self._let_go_all(peer, None)
        elif kind == _CHUNK:
            failure = self._reader.open(peer.place.world_rank, message[1], message[2])
            self._send(peer, (_CHUNK_ANSWER, failure))
        elif kind == _CHUNK_ANSWER:
            self._device.answered(peer.place.world_rank, message[1])
        elif kind == _ASK:
            if self._has_to_yield_to_us(peer, message[2]):
                self._send(peer, (_YIELD, message[1]))
        elif kind == _YIELD:
            peer.told_to_yield = message[1]
        else:
            peer.announced[message[1]] = message[2]

    def _let_go(self, outgoing_id: int, peer: _Peer, *, used: bool) -> None:
        outgoing = self._outgoing.get(outgoing_id)
        if outgoing is None:
            return
        outgoing.used |= used
        outgoing.pending.discard(peer.place.world_rank)
        if not outgoing.pending:
            del self._outgoing[outgoing_id]
            if outgoing.place is not None:
                outgoing.staging.give_back(outgoing.place)
            if not outgoing.used:
                self._unmatched.append(outgoing.memo)

    def _let_go_all(self, peer: _Peer, step: int | None) -> None:
        """The peer asks for nothing more of this step and earlier ones (None: of any)."""
        rank = peer.place.world_rank
        for outgoing_id, outgoing in list(self._outgoing.items()):
            if rank in outgoing.pending and (step is None or outgoing.step <= step):
                self._let_go(outgoing_id, peer, used=False)
