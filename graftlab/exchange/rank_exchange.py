"""The exchange between ranks: tensors through shared memory or TCP, their addresses through sockets.

Each rank owns one segment (:mod:`.arena`), which every rank of its machine maps. A sender copies a tensor into its
segment once and sends each receiver a small frame with the key and the offset (:mod:`.sender`). A receiver reads the
bytes in place (:mod:`.receiver`). It releases tensors in batches; at the end of the step also those that it did not
ask for.

Tensors on a GPU stay on the GPU if possible (:mod:`.device`). A rank on another machine gets a tensor's bytes with its
frame (:mod:`.tcp`), sent from the segment or, for a tensor on a GPU, from pinned memory (:mod:`.pinned`). They also
stay there until they are released, so the sender's budget bounds the memory of every receiver too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Generic

import torch

from graftlab.base import limits
from graftlab.base.tags import TapKey
from graftlab.base.world import Place, RunInfo
from graftlab.exchange.arena import Arena
from graftlab.exchange.contract import Memo, Receipt
from graftlab.exchange.device import Cuda, Gpu
from graftlab.exchange.frames import (
    AnnouncementFrame,
    ChunkFrame,
    ChunkReplyFrame,
    DeclineFrame,
    PublishFrame,
    ReleaseFrame,
    RunEndFrame,
    StatusFrame,
    StepEndFrame,
    YieldFrame,
    YieldQueryFrame,
)
from graftlab.exchange.heartbeat import Heartbeat
from graftlab.exchange.peers import Link, Peer, Peers
from graftlab.exchange.pinned import PinnedMemory
from graftlab.exchange.receiver import Receiver
from graftlab.exchange.sender import Sender
from graftlab.exchange.status_page import StatusPage


class RankExchange(Generic[Memo]):
    """Implements :class:`graftlab.exchange.contract.Exchange`; see there for the promises.

    ``arena`` is this rank's own segment. ``links`` has the connection to each other rank and that rank's segment, by
    world rank (None where the two share no memory). ``budget`` bounds the bytes that this rank has published and that
    receivers still hold; ``timeout``, in seconds, bounds every wait.
    """

    def __init__(
        self,
        place: Place,
        arena: Arena,
        links: Mapping[int, Link],
        *,
        budget: int = limits.BUFFER_BUDGET,
        timeout: float = limits.TIMEOUT,
        gpu: Gpu | None = None,
    ) -> None:
        gpu = gpu or Cuda()
        self._arena = arena
        self._peers = peers = Peers(place, links, timeout)
        self.timeout = timeout
        pinned = PinnedMemory(gpu, place.label)
        self._receiver = receiver = Receiver(peers, budget, gpu, pinned)
        self._sender: Sender[Memo] = Sender(
            peers, arena, budget, gpu, pinned, partial(receiver.release_read, wait=False)
        )
        peers.listen(
            {
                PublishFrame: receiver.on_publish,
                DeclineFrame: receiver.on_decline,
                ReleaseFrame: self._sender.on_release,
                StepEndFrame: self._sender.on_step_end,
                RunEndFrame: self._sender.on_run_end,
                AnnouncementFrame: _on_announcement,
                ChunkFrame: receiver.on_chunk,
                ChunkReplyFrame: self._sender.on_chunk_reply,
                YieldQueryFrame: receiver.on_yield_query,
                YieldFrame: receiver.on_yield,
                StatusFrame: peers.on_status,
            },
            on_gone=self._sender.on_gone,
        )
        if peers.has_remote:
            Heartbeat(StatusPage(arena.map), peers.send_status, peers.received_counts, lambda: peers.all_gone).start()

    # ---- runs and steps -----------------------------------------------------------------------------------------

    def begin_run(self, run: RunInfo) -> None:
        self._peers.waiters.begin_step()
        self._receiver.begin_run(run.first_step)
        for peer in self._peers.by_rank.values():
            peer.begin_run(run)

    def end_step(self, step: int) -> None:
        self._peers.waiters.begin_step()
        self._receiver.end_step(step)
        self._peers.pump(0)

    def end_run(self) -> None:
        self._receiver.end_run()
        for peer in self._peers.by_rank.values():
            if peer.in_run:
                peer.send(RunEndFrame())
        self._peers.pump(0)

    def settle(self, wake: int | None = None, timeout: float | None = None) -> bool:
        return self._peers.settle(wake, timeout)

    def close(self) -> None:
        self._peers.close()
        self._arena.close()

    # ---- taps ---------------------------------------------------------------------------------------------------

    def publish(self, key: TapKey, tensor: torch.Tensor, extras: object, memo: Memo | None = None) -> None:
        self._peers.waiters.note()
        self._sender.publish(key, tensor, extras, memo)

    def decline(self, key: TapKey) -> None:
        self._sender.decline(key)

    def receive(self, key: TapKey, near: torch.Tensor | None = None) -> Receipt:
        self._peers.waiters.note()
        return self._receiver.receive(key, near)

    def take_unmatched(self) -> list[Memo]:
        return self._sender.take_unmatched()

    @property
    def bytes_in_use(self) -> int:
        return self._sender.bytes_in_use

    # ---- waiting ------------------------------------------------------------------------------------------------

    @property
    def timeout(self) -> float:
        return self._peers.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._peers.timeout = seconds

    @property
    def on_wait(self) -> Callable[[Collection[int]], None]:
        return self._peers.on_wait

    @on_wait.setter
    def on_wait(self, function: Callable[[Collection[int]], None]) -> None:
        self._peers.on_wait = function

    def share(self, let_go: Callable[[], bool], take_back: Callable[[], None]) -> None:
        self._peers.waiters.let_go, self._peers.waiters.take_back = let_go, take_back

    def lost_peers(self) -> str:
        return self._peers.lost()

    def why_gone(self, rank: int) -> str:
        return self._peers.by_rank[rank].gone

    def where_peers_are(self) -> str:
        return self._peers.describe()

    # ---- the leader's announcements -----------------------------------------------------------------------------

    def announce(self, step: int, message: bytes) -> None:
        for peer in self._peers.by_rank.values():
            if peer.in_run:
                peer.send(AnnouncementFrame(step, message))

    def announcements(self, leader: int, step: int) -> list[bytes] | None:
        peer = self._peers.by_rank[leader]
        self._peers.pump(0)
        if not peer.has_announced(step) and not peer.gone:
            with self._peers.wait([leader]) as wait:
                while not peer.has_announced(step) and not peer.gone:
                    remaining = wait.remaining()
                    if remaining <= 0:
                        return None
                    self._peers.pump(remaining)
        if not peer.has_announced(step):
            return None
        return [peer.announced.pop(earlier) for earlier in sorted(peer.announced) if earlier <= step]

    def await_past(self, step: int) -> bool:
        # Ranks of one side do not send each other step ends, because waiting for the other side keeps them together
        # too.
        peers = self._peers.others
        self._peers.pump(0)
        if not all(peer.is_past(step) for peer in peers):
            with self._peers.wait([peer.world_rank for peer in peers if not peer.is_past(step)]) as wait:
                while not all(peer.is_past(step) for peer in peers):
                    remaining = wait.remaining()
                    if remaining <= 0:
                        return False
                    self._peers.pump(remaining)
        return True


def _on_announcement(peer: Peer, frame: AnnouncementFrame) -> None:
    peer.announced[frame.step] = frame.message
    peer.announced_step = frame.step
