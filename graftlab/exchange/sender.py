"""The sending side of a rank: publish tensors, and keep them until every receiver has released them."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol

import torch

from graftlab.base.tags import TapKey
from graftlab.base.tensor_bytes import DTYPE_NAMES
from graftlab.errors import BufferFullError, ShippingError
from graftlab.exchange.arena import Allocator, Arena
from graftlab.exchange.contract import Memo
from graftlab.exchange.device import DeviceStaging, Gpu
from graftlab.exchange.frames import (
    ChunkFrame,
    ChunkReplyFrame,
    DeclineFrame,
    Location,
    PublishFrame,
    ReleaseFrame,
    RunEndFrame,
    StepEndFrame,
    encode,
)
from graftlab.exchange.peers import Peer, Peers, Wait
from graftlab.exchange.pinned import PinnedMemory, PinnedStaging
from graftlab.exchange.tcp import TcpChannel

logger = logging.getLogger(__name__)

# With more tensors in transit, or more bytes sent since the last check, the sender checks for releases: released memory
# is still in the processor's cache.
_CHECK_COUNT = 256
_CHECK_BYTES = 1 << 20
# How often, in seconds, a sender without room checks whether a receiver waits for it.
_ROOM_POLL = 0.02
# Bounds the memory for taps that never repeat.
_REPORTED_LIMIT = 100_000


class Staging(Protocol):
    """Memory in which a sender keeps tensors for its receivers: the host's, or a GPU's (:mod:`.device`)."""

    def put(self, tensor: torch.Tensor, nbytes: int, receivers: set[int]) -> Any:
        """Copy a tensor of ``nbytes`` (at least one) here and return its location, which the sender sends to receivers.

        None when these receivers (world ranks) cannot read it here, or there is no room.
        """

    def release(self, location: Any) -> None:
        """Free this location: no receiver reads it any longer."""


class HostStaging:
    """A rank's own segment of shared memory; a location is an offset in bytes."""

    def __init__(self, arena: Arena, allocator: Allocator) -> None:
        self._arena = arena
        self._allocator = allocator

    def put(self, tensor: torch.Tensor, nbytes: int, receivers: set[int]) -> int | None:
        offset = self._allocator.take(nbytes)
        if offset is not None:
            self._arena.store(offset, nbytes, tensor)
        return offset

    def release(self, location: int) -> None:
        self._allocator.release(location)


@dataclass(slots=True)
class _OutgoingTensor(Generic[Memo]):
    """A published tensor: the receivers that may still read it, and whether any has asked for it."""

    step: int
    staging: Staging
    location: Location
    pending: set[int]
    memo: Memo | None
    used: bool = False


class Sender(Generic[Memo]):
    """Publishes and declines, and frees tensors that the receivers have released.

    ``release_read`` releases tensors that this rank has received. It is called while this rank waits for room, because
    other senders may be waiting for theirs.
    """

    def __init__(
        self,
        peers: Peers,
        arena: Arena,
        budget: int,
        gpu: Gpu,
        pinned: PinnedMemory,
        release_read: Callable[[], None],
    ) -> None:
        self._peers = peers
        self._label = peers.place.label
        self._budget = budget
        self._release_read = release_read
        self._arena = arena
        self._allocator = Allocator(len(arena.map))
        self._host = HostStaging(arena, self._allocator)
        self._device = DeviceStaging(gpu, self._label, budget, self._share_chunk)
        self._gpu = gpu
        self._pinned = PinnedStaging(pinned)
        self._outgoing: dict[int, _OutgoingTensor[Memo]] = {}
        self._last_id = 0
        self._sent_since_check = 0
        self._unmatched: list[Memo] = []
        self._has_warned = False
        # Names and tags of taps that were reported to receivers that had ended the step.
        self._reported_taps: set[tuple[object, ...]] = set()

    @property
    def bytes_in_use(self) -> int:
        return self._allocator.bytes_in_use + self._device.bytes_in_use + self._pinned.bytes_in_use

    def take_unmatched(self) -> list[Memo]:
        taken, self._unmatched = self._unmatched, []
        return taken

    # ---- a tap --------------------------------------------------------------------------------------------------

    def publish(self, key: TapKey, tensor: torch.Tensor, extras: object, memo: Memo | None) -> None:
        packed = None if extras is None else self._pack_extras(key, extras)
        on_host = tensor.is_cpu
        nbytes = tensor.nbytes
        self._sent_since_check += nbytes
        if (
            self._sent_since_check > _CHECK_BYTES
            or len(self._outgoing) > _CHECK_COUNT
            or (not on_host and self._device.awaits_replies)
        ):
            self._sent_since_check = 0
            self._peers.pump(0)
        if nbytes and self._is_full_for(nbytes):
            self._make_room(key, nbytes)
        others = self._peers.others
        # Not earlier: a receiver may have ended the step, or died, while this rank waited for room.
        receivers = [peer for peer in others if not peer.is_past(key.step)]
        if len(receivers) < len(others):
            self._report_tap(key)
        if not receivers:
            if memo is not None:
                self._unmatched.append(memo)
            return
        ranks = {peer.world_rank for peer in receivers}
        remote = [peer for peer in receivers if peer.remote] if self._peers.has_remote else []
        staging: Staging = self._host
        location: Location = None
        if nbytes:
            staging, location = self._stage(key, tensor, nbytes, ranks, len(remote))
        self._last_id += 1
        self._outgoing[self._last_id] = _OutgoingTensor(key.step, staging, location, ranks, memo)
        dtype = DTYPE_NAMES[tensor.dtype]
        frame = encode(PublishFrame(key, self._last_id, dtype, tuple(tensor.shape), nbytes, location, packed))
        if not remote:
            for peer in receivers:
                peer.channel.send(frame)
        else:
            self._send_attached(receivers, frame, staging, location, nbytes)

    def _stage(
        self, key: TapKey, tensor: torch.Tensor, nbytes: int, receivers: set[int], remote: int
    ) -> tuple[Staging, Location]:
        """Copy the tensor to memory that all these receivers can read; ``remote`` of them share none with this rank.

        Raises :class:`BufferFullError`.
        """
        if not tensor.is_cpu:
            if not remote:
                if (placed := self._device.put(tensor, nbytes, receivers)) is not None:
                    return self._device, placed
            elif self._gpu.takes(tensor):
                if remote == len(receivers):
                    return self._pinned, self._pinned.put(tensor, nbytes, receivers)
                # Receivers on this machine read it in the segment, to which the GPU would copy more slowly.
                tensor = self._pinned.fetch(tensor, nbytes)
        location = self._host.put(tensor, nbytes, receivers)
        if location is None:
            raise BufferFullError(
                f"{self._label} could not publish tap {key.name!r} of step {key.step}: its segment has no room for "
                f"{nbytes} bytes"
            )
        return self._host, location

    def _send_attached(
        self, receivers: list[Peer], frame: bytes, staging: Staging, location: Location, nbytes: int
    ) -> None:
        """Send the frame; to receivers that share no memory with this rank together with the bytes, without a copy.

        A receiver that ends the step while they are in transit does not read them, so they may be overwritten then.
        """
        attached = None
        if isinstance(location, int):
            attached = self._pinned.view(location) if staging is self._pinned else self._arena.view(location, nbytes)
        for peer in receivers:
            if isinstance(peer.channel, TcpChannel):
                peer.sent += 1
                peer.channel.send(frame, attached)
            else:
                peer.channel.send(frame)

    def _pack_extras(self, key: TapKey, extras: object) -> bytes:
        try:
            return pickle.dumps(extras, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            raise ShippingError(
                f"gl.tap({key.name!r}) on {self._label}: the extras cannot be pickled ({error}); "
                f"pass tensors, numbers, strings, or containers of them"
            ) from error

    def decline(self, key: TapKey) -> None:
        for peer in self._peers.others:
            if not peer.is_past(key.step):
                peer.send(DeclineFrame(key))

    def _report_tap(self, key: TapKey) -> None:
        """Report once, to receivers that have ended the step, that this rank reaches such a tap.

        That decides which of two ranks that wait for each other yields; see :class:`.receiver.Receiver`.
        """
        if (key.name, key.tags) not in self._reported_taps and len(self._reported_taps) < _REPORTED_LIMIT:
            self._reported_taps.add((key.name, key.tags))
            for peer in self._peers.others:
                if peer.ended_step >= key.step and not peer.has_settled():
                    peer.send(DeclineFrame(key))

    # ---- room ---------------------------------------------------------------------------------------------------

    def _is_full_for(self, nbytes: int) -> bool:
        # A tensor larger than the whole budget is published when the buffer is empty.
        in_use = self.bytes_in_use
        return in_use > 0 and in_use + nbytes > self._budget

    def _make_room(self, key: TapKey, nbytes: int) -> None:
        self._peers.pump(0)
        if self._is_full_for(nbytes):
            awaits = {rank for outgoing in self._outgoing.values() for rank in outgoing.pending}
            with self._peers.wait(sorted(awaits)) as wait:
                self._wait_for_room(key, nbytes, wait)

    def _wait_for_room(self, key: TapKey, nbytes: int, wait: Wait) -> None:
        while self._is_full_for(nbytes):
            remaining = wait.remaining()
            if remaining <= 0:
                raise BufferFullError(
                    f"{self._label} could not publish tap {key.name!r} of step {key.step}: its buffer of "
                    f"{self._budget >> 20} MiB stayed full for {self._peers.timeout:g} s; "
                    f"{self._peers.describe()}"
                )
            self._release_read()
            before = self._peers.ranks_waiting_for_me()
            quiet = not self._peers.look(min(remaining, _ROOM_POLL))
            if quiet and before & self._peers.ranks_waiting_for_me():
                # A receiver waits for a later tap of this rank, and takes nothing from the buffer before that: both
                # would wait for each other.
                self._warn_once()
                return

    def _warn_once(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s exceeds its buffer budget of %d MiB: a receiver waits for a later tap and has not received what "
                "is in the buffer; filters that match only taps of both sides avoid this",
                self._label,
                self._budget >> 20,
            )

    # ---- frames from receivers ----------------------------------------------------------------------------------

    def on_release(self, peer: Peer, frame: ReleaseFrame) -> None:
        for outgoing_id in frame.ids:
            self._release(outgoing_id, peer, used=True)

    def on_step_end(self, peer: Peer, frame: StepEndFrame) -> None:
        peer.ended_step = max(peer.ended_step, frame.step)
        self._release_all(peer, frame.step)

    def on_run_end(self, peer: Peer, frame: RunEndFrame) -> None:
        peer.run_ended = True
        self._release_all(peer, None)

    def on_gone(self, peer: Peer) -> None:
        self._release_all(peer, None)

    def _release(self, outgoing_id: int, peer: Peer, *, used: bool) -> None:
        outgoing = self._outgoing.get(outgoing_id)
        if outgoing is None:
            return
        outgoing.used |= used
        outgoing.pending.discard(peer.world_rank)
        if not outgoing.pending:
            del self._outgoing[outgoing_id]
            if outgoing.location is not None:
                outgoing.staging.release(outgoing.location)
            if not outgoing.used and outgoing.memo is not None:
                self._unmatched.append(outgoing.memo)

    def _release_all(self, peer: Peer, step: int | None) -> None:
        """Release what the peer still holds of this step and earlier ones (None: of all steps)."""
        rank = peer.world_rank
        for outgoing_id, outgoing in list(self._outgoing.items()):
            if rank in outgoing.pending and (step is None or outgoing.step <= step):
                self._release(outgoing_id, peer, used=False)

    # ---- memory of a GPU ----------------------------------------------------------------------------------------

    def _share_chunk(self, world_rank: int, chunk: int, handle: bytes) -> None:
        self._peers.by_rank[world_rank].send(ChunkFrame(chunk, handle))

    def on_chunk_reply(self, peer: Peer, frame: ChunkReplyFrame) -> None:
        self._device.note_reply(peer.world_rank, frame.failure)
