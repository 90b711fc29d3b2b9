"""The receiving side of a rank: waiting for what the other side publishes, looking at it, and releasing it."""

from __future__ import annotations

import pickle

import torch

from graftlab.base.tags import TapKey
from graftlab.base.tensor_bytes import assembled, dtype_named
from graftlab.exchange.contract import Contribution, Receipt
from graftlab.exchange.device import DeviceReader, Gpu
from graftlab.exchange.frames import (
    ChunkFrame,
    ChunkReplyFrame,
    DeclineFrame,
    DeviceLocation,
    PublishFrame,
    ReleaseFrame,
    StepEndFrame,
    YieldFrame,
    YieldQueryFrame,
)
from graftlab.exchange.peers import Peer, Peers
from graftlab.exchange.pinned import PinnedMemory

# Releases travel together: this many, or so many bytes, or this share of the budget, whichever comes first. So few
# bytes, because a sender writes there again while the cache holds it: to copy 4 MiB into one place takes it half as
# long as into eight in turn.
_RELEASE_COUNT = 64
_RELEASE_BYTES = 2 << 20
_RELEASE_SHARE = 8
# How often a rank that waits looks whether the GPU has done with what was received, so that it can be released.
_READ_POLL = 0.001
# How soon a rank that waits looks whether a peer waits for it in turn, and how often in the end.
_FIRST_LOOK, _LAST_LOOK = 0.01, 0.5
# Taps that never repeat must not fill the memory.
_SEEN_LIMIT = 100_000

ReceivedTensors = list[tuple[Peer, PublishFrame]]


class Receiver:
    """Receives, and releases in batches what was received.

    Two ranks may come to wait for each other, each for a tap that the other reaches later. One of them yields, that is,
    gives up its wait, and the other goes on waiting: who waits for what the other side has never reached, and the
    higher world rank if that tells nothing. A sender's page alone is no proof that it waits in vain, as our answer may
    be on its way to it; so it is asked, and its answer comes after it has read all that we had sent before.
    """

    def __init__(self, peers: Peers, budget: int, gpu: Gpu, pinned: PinnedMemory) -> None:
        self._peers = peers
        self._gpu = gpu
        self._pinned = pinned
        self._large = min(_RELEASE_BYTES, budget // _RELEASE_SHARE)
        self._reader = DeviceReader(gpu)
        self._ended_step = -1
        # The taps that threads of this rank wait for, by the number of the wait.
        self._awaited: dict[int, TapKey] = {}
        self._wait_number = 0
        # Names and tags that the other side has ever reached.
        self._seen_taps: set[tuple[object, ...]] = set()

    # ---- runs and steps -----------------------------------------------------------------------------------------

    def begin_run(self, first_step: int) -> None:
        self._ended_step = first_step - 1

    def end_step(self, step: int) -> None:
        self.release_read(wait=True)
        self._ended_step = step
        for peer in self._peers.others:
            self._send_releases(peer)
            if peer.in_run:
                peer.send(StepEndFrame(step))
            for ended in [known for known in peer.inbox if known <= step]:
                for published in peer.inbox.pop(ended).values():
                    if published is not None:
                        peer.carried.pop(published.id, None)

    def end_run(self) -> None:
        self.release_read(wait=True)
        for peer in self._peers.others:
            self._send_releases(peer)
            peer.inbox.clear()
            peer.carried.clear()

    # ---- a tap --------------------------------------------------------------------------------------------------

    def receive(self, key: TapKey, near: torch.Tensor | None) -> Receipt:
        if not self._all_answered(key):
            self._peers.pump(0)
        unanswered, has_yielded = ({}, False) if self._all_answered(key) else self._wait_for(key)
        receipt = Receipt([], timed_out=bool(unanswered) and not has_yielded)
        taken: ReceivedTensors = []
        read_on_device = False
        for peer in self._peers.others:
            rank = peer.place.rank
            inbox = peer.inbox[key.step]
            if key not in inbox:
                receipt.absent[rank] = peer.why_absent() if peer.is_past(key.step) else unanswered[rank]
                continue
            published = inbox.pop(key)
            if published is None:
                receipt.absent[rank] = f"{peer.label} did not send this tap"
                continue
            try:
                tensor = self._open(peer, published, near)
            except Exception as error:
                receipt.absent[rank] = f"{peer.label} sent this tap, but its tensor cannot be brought here: {error}"
                self._release([(peer, published)])
                continue
            taken.append((peer, published))
            read_on_device |= type(published.location) is DeviceLocation
            try:
                extras = None if published.extras is None else pickle.loads(published.extras)
            except Exception as error:
                # Unpickling runs the user's own code, or does not find their class here; the error is theirs to see.
                extras = None
                receipt.unreadable[rank] = (
                    f"the extras of {peer.label} cannot be loaded here: {type(error).__name__}: {error}"
                )
            receipt.contributions.append(Contribution(rank, tensor, extras))
        release = self._release_when_read if read_on_device else self._release
        receipt.on_release = lambda: release(taken)
        return receipt

    def _open(self, peer: Peer, published: PublishFrame, near: torch.Tensor | None) -> torch.Tensor:
        """Return a published tensor, without a copy where it is on the device of ``near``."""
        location, nbytes = published.location, published.nbytes
        dtype, shape = dtype_named(published.dtype), published.shape
        if not isinstance(location, DeviceLocation):
            pinned = None
            if peer.arena is None:
                if nbytes and near is not None and self._gpu.takes(near):
                    pinned = self._pinned.new(nbytes)
                window = assembled(peer.carried.pop(published.id, ()), nbytes, dtype, shape, pinned)
            else:
                window = peer.arena.window(location or 0, nbytes, dtype, shape)
            if near is None or near.is_cpu:
                return window
            # Pinned bytes are not given out again before the GPU has read them: nobody has to wait for that.
            return window.to(near.device, non_blocking=pinned is not None and pinned.is_pinned())
        try:
            window = self._reader.window(peer.world_rank, location, nbytes, dtype, shape, alive=not peer.gone)
        except Exception as error:
            # This one is lost; those that follow must take the other way.
            self._answer(peer, str(error))
            raise
        return window if near is None else window.to(near.device)

    def _all_answered(self, key: TapKey) -> bool:
        for peer in self._peers.others:  # noqa: SIM110 - a generator costs more than the question, at each tap
            if not peer.has_answered(key):
                return False
        return True

    def on_publish(self, peer: Peer, frame: PublishFrame) -> None:
        self._note_answer(peer, frame.key, frame)

    def on_decline(self, peer: Peer, frame: DeclineFrame) -> None:
        self._note_answer(peer, frame.key, None)

    def _note_answer(self, peer: Peer, key: TapKey, published: PublishFrame | None) -> None:
        if len(self._seen_taps) < _SEEN_LIMIT:
            self._seen_taps.add((key.name, key.tags))
        # What comes for a step that has ended here is released by the end-of-step frame that is on its way back.
        if key.step > self._ended_step:
            peer.inbox[key.step][key] = published
            if published is not None and peer.attached:
                peer.carried[published.id] = peer.attached

    # ---- waiting ------------------------------------------------------------------------------------------------

    def _wait_for(self, key: TapKey) -> tuple[dict[int, str], bool]:
        """Wait until every sender has answered; why some have not, by rank, where the wait is given up.

        It is given up at the time limit, and at once where a sender waits for a tap of this very rank and says so: then
        the second is True.
        """
        peers = self._peers
        for peer in peers.others:
            self._send_releases(peer)
        pause = _FIRST_LOOK
        self._wait_number += 1
        number = self._wait_number
        self._awaited[number] = key
        try:
            with peers.wait([peer.world_rank for peer in peers.others if not peer.has_answered(key)]) as wait:
                while not self._all_answered(key):
                    remaining = wait.remaining()
                    has_yielded = any(number in peer.yielded_waits for peer in peers.others)
                    if remaining <= 0 or has_yielded:
                        return self._why_unanswered(key, has_yielded), has_yielded
                    self.release_read(wait=False)
                    look = min(remaining, pause)
                    if not peers.look(min(look, _READ_POLL) if self._reader.reading else look):
                        self._query_mutual_waits(number, key)
                        pause = min(2 * pause, _LAST_LOOK)
            return {}, False
        finally:
            del self._awaited[number]
            for peer in peers.others:
                peer.yielded_waits.discard(number)

    def _query_mutual_waits(self, number: int, key: TapKey) -> None:
        # Another thread of this rank may be about to reach what the peer waits for.
        if self._peers.waiters.several:
            return
        me, is_known = self._peers.place.world_rank, self._has_seen(key)
        for peer in self._peers.others:
            if not peer.has_answered(key) and me in peer.page.read().awaits:
                peer.send(YieldQueryFrame(number, is_known))

    def on_yield_query(self, peer: Peer, frame: YieldQueryFrame) -> None:
        if self._must_yield(peer, frame.is_known):
            peer.send(YieldFrame(frame.wait))

    def on_yield(self, peer: Peer, frame: YieldFrame) -> None:
        if frame.wait in self._awaited:
            peer.yielded_waits.add(frame.wait)

    def _must_yield(self, peer: Peer, asker_is_known: bool) -> bool:
        """What this rank says when asked by a peer that waits for it."""
        if self._peers.waiters.several or len(self._awaited) != 1:
            return False
        [awaited] = self._awaited.values()
        if peer.has_answered(awaited):
            return False
        if asker_is_known != self._has_seen(awaited):
            return not asker_is_known
        return peer.world_rank > self._peers.place.world_rank

    def _has_seen(self, key: TapKey) -> bool:
        """Whether the other side has ever reached such a tap."""
        return (key.name, key.tags) in self._seen_taps

    def _why_unanswered(self, key: TapKey, has_yielded: bool) -> dict[int, str]:
        peers = self._peers
        waited = f"did not reach this tap within {peers.timeout:g} s"
        if has_yielded:
            waited = f"waits for another tap of {peers.place.label}, which cannot come while this one is waited for"
        late = [peer for peer in peers.others if not peer.has_answered(key)]
        return {peer.place.rank: f"{peer.label} {waited}: {peer.page.read()}" for peer in late}

    # ---- releasing ----------------------------------------------------------------------------------------------

    def _release(self, taken: ReceivedTensors) -> None:
        for peer, published in taken:
            peer.to_release.append(published.id)
            peer.bytes_to_release += published.nbytes
            if peer.bytes_to_release >= self._large or len(peer.to_release) >= _RELEASE_COUNT:
                self._send_releases(peer)

    def _release_when_read(self, taken: ReceivedTensors) -> None:
        """The same for tensors some of which are on a GPU, whose streams may have them still to read."""
        for peer, published in taken:
            if isinstance(published.location, DeviceLocation):
                self._reader.release(peer.world_rank, published.location, (peer, published))
            else:
                self._release([(peer, published)])
        self._release(self._reader.read(wait=False))

    def release_read(self, *, wait: bool) -> None:
        """Tell the senders of everything that no GPU reads any more; with ``wait``, of everything that was released."""
        if self._reader.reading:
            self._release(self._reader.read(wait=wait))
            for peer in self._peers.others:
                self._send_releases(peer)

    def _send_releases(self, peer: Peer) -> None:
        if peer.to_release:
            peer.send(ReleaseFrame(peer.to_release))
            peer.to_release = []
            peer.bytes_to_release = 0

    # ---- memory of the senders' GPUs ----------------------------------------------------------------------------

    def on_chunk(self, peer: Peer, frame: ChunkFrame) -> None:
        self._answer(peer, self._reader.open(peer.world_rank, frame.chunk, frame.handle))

    def _answer(self, peer: Peer, failure: str | None) -> None:
        # A message of CUDA's may quote a path, which need not be Unicode.
        peer.send(ChunkReplyFrame(failure and failure.encode("utf-8", "replace").decode()))
