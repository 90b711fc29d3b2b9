"""The receiving side of a rank: wait for the tensors that the other side publishes, open and release them."""

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

# Releases are sent in batches: after this number, these bytes, or this share of the budget, whichever comes first. Few
# bytes, so that a sender reuses memory that is still in its cache: copying 4 MiB into one place takes half as long as
# into eight places in turn.
_RELEASE_COUNT = 64
_RELEASE_BYTES = 2 << 20
_RELEASE_SHARE = 8
# How often, in seconds, a waiting rank checks whether the GPU has finished reading, so that it can release tensors.
_READ_POLL = 0.001
# Seconds until a waiting rank first checks whether a peer waits for it in turn, and the longest pause between checks.
_FIRST_CHECK, _LAST_CHECK = 0.01, 0.5
# Bounds the memory for taps that never repeat.
_SEEN_LIMIT = 100_000

ReceivedTensors = list[tuple[Peer, PublishFrame]]


class Receiver:
    """Receives tensors, and releases them in batches.

    Two ranks may wait for each other, each for a tap that the other reaches later. Then one of them yields, that is,
    ends its wait, and the other keeps waiting. The rank that waits for a tap that the other side has never reached
    yields; if that does not decide, the higher world rank. A peer's status page does not prove that its wait is futile,
    because this rank's answer may be in transit. So the peer is asked, and it replies only after it has read all
    earlier frames.
    """

    def __init__(self, peers: Peers, budget: int, gpu: Gpu, pinned: PinnedMemory) -> None:
        self._peers = peers
        self._gpu = gpu
        self._pinned = pinned
        self._large = min(_RELEASE_BYTES, budget // _RELEASE_SHARE)
        self._reader = DeviceReader(gpu)
        self._ended_step = -1
        # The taps that threads of this rank wait for, by number of the wait.
        self._awaited: dict[int, TapKey] = {}
        self._wait_number = 0
        # Names and tags of taps that the other side has reached, in any step.
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
                receipt.absent[rank] = f"{peer.label} sent this tap, but its tensor cannot be read here: {error}"
                self._release([(peer, published)])
                continue
            taken.append((peer, published))
            read_on_device |= type(published.location) is DeviceLocation
            try:
                extras = None if published.extras is None else pickle.loads(published.extras)
            except Exception as error:
                # Unpickling runs the user's code, and may not find their class here: show them the error.
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
            # The allocator reuses pinned memory only after the GPU has read it, so no wait is needed here.
            return window.to(near.device, non_blocking=pinned is not None and pinned.is_pinned())
        try:
            window = self._reader.window(peer.world_rank, location, nbytes, dtype, shape, alive=not peer.gone)
        except Exception as error:
            # This tensor is lost; the sender has to send later ones through the host's memory.
            self._reply(peer, str(error))
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
        # A tensor for a step that has ended here is released by the StepEndFrame that its sender will receive.
        if key.step > self._ended_step:
            peer.inbox[key.step][key] = published
            if published is not None and peer.attached:
                peer.carried[published.id] = peer.attached

    # ---- waiting ------------------------------------------------------------------------------------------------

    def _wait_for(self, key: TapKey) -> tuple[dict[int, str], bool]:
        """Wait until every sender has answered; return why some have not, by rank, and whether this rank has yielded.

        The wait ends early at the time limit, and at once when a sender that waits for a tap of this rank answers that
        this rank must yield.
        """
        peers = self._peers
        for peer in peers.others:
            self._send_releases(peer)
        pause = _FIRST_CHECK
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
                        pause = min(2 * pause, _LAST_CHECK)
            return {}, False
        finally:
            del self._awaited[number]
            for peer in peers.others:
                peer.yielded_waits.discard(number)

    def _query_mutual_waits(self, number: int, key: TapKey) -> None:
        # Another thread of this rank may be about to reach the tap that the peer waits for.
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
        """Whether the peer, which asks because it waits for this rank, has to end its wait."""
        if self._peers.waiters.several or len(self._awaited) != 1:
            return False
        [awaited] = self._awaited.values()
        if peer.has_answered(awaited):
            return False
        if asker_is_known != self._has_seen(awaited):
            return not asker_is_known
        return peer.world_rank > self._peers.place.world_rank

    def _has_seen(self, key: TapKey) -> bool:
        """Whether the other side has reached a tap of this name and tags in any step."""
        return (key.name, key.tags) in self._seen_taps

    def _why_unanswered(self, key: TapKey, has_yielded: bool) -> dict[int, str]:
        peers = self._peers
        waited = f"did not reach this tap within {peers.timeout:g} s"
        if has_yielded:
            me = peers.place.label
            waited = f"waits for a different tap of {me}, which {me} cannot reach while it waits for this one"
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
        """Release tensors, those on a GPU only when its streams have read them."""
        for peer, published in taken:
            if isinstance(published.location, DeviceLocation):
                self._reader.release(peer.world_rank, published.location, (peer, published))
            else:
                self._release([(peer, published)])
        self._release(self._reader.read(wait=False))

    def release_read(self, *, wait: bool) -> None:
        """Release the tensors that no GPU reads any longer; with ``wait``, all of them, once that is true."""
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
        self._reply(peer, self._reader.open(peer.world_rank, frame.chunk, frame.handle))

    def _reply(self, peer: Peer, failure: str | None) -> None:
        # CUDA's message may quote a path that is not valid Unicode.
        peer.send(ChunkReplyFrame(failure and failure.encode("utf-8", "replace").decode()))
