"""The contract of an exchange, and the values that pass through one.

A tensor travels under its address: the :class:`TapKey` of its tap. Every implementation of :class:`Exchange` keeps
these promises:

1. A receiver never gets a tensor of another tap, step or occurrence.
2. A sender does not wait for its receivers while its buffer budget lasts.
3. No rank waits forever: a peer that ends the step, or dies, ends the waits for it at once; the time limit ends others.
4. Tensors arrive bit-exact.
5. A receiver sees one contribution for each sending rank that published, in rank order.
6. When a process dies, waits for it end within two seconds, and none of its memory or files remain.
7. A tensor sent in one exchange is never received in another.

They also promise the code that interrupts a rank: an exception raised where :func:`.interrupts.is_interruptible_at`
allows it ends the call and has no other effect. So an exchange waits only in functions marked with
:func:`.interrupts.interruptible`.

``tests/exchange/test_contract*.py`` check every implementation against all of this.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

import torch

from graftlab.base.tags import TapKey
from graftlab.base.world import RunInfo

Memo = TypeVar("Memo")
"""A sender's note on a tensor that it publishes. It never leaves the rank."""


class Contribution(NamedTuple):
    """The tensor and extras that one sending rank published under a key.

    ``tensor`` may be a read-only view of the exchange's memory: valid until :meth:`Receipt.release`, and not to be
    written to. On a GPU it may be used on the stream that was current at :meth:`Exchange.receive`.
    """

    rank: int
    tensor: torch.Tensor
    extras: object


@dataclass
class Receipt:
    """The result of :meth:`Exchange.receive`: contributions in rank order; ``absent`` has a reason for other senders.

    ``unreadable`` names the senders whose extras cannot be loaded on this rank, with the reason; such extras are None.
    ``on_release`` is the exchange's part of :meth:`release`.
    """

    contributions: list[Contribution]
    absent: dict[int, str] = field(default_factory=dict)
    timed_out: bool = False
    unreadable: dict[int, str] = field(default_factory=dict)
    on_release: Callable[[], None] | None = field(default=None, repr=False)

    def release(self) -> None:
        """Return the memory to the senders. The contributions' tensors must not be used afterwards.

        Work already issued on the GPU's current stream may still read them; this call does not wait for it.
        """
        if self.on_release is not None:
            self.on_release()
            self.on_release = None
        self.contributions = []


class Exchange(Protocol[Memo]):
    """Carries tensors under their keys between the ranks of two sides. One thread owns it at a time; see :meth:`share`.

    Calls come in this order: :meth:`begin_run`; then :meth:`publish`, :meth:`decline` and :meth:`receive` in any
    order, with :meth:`end_step` after each step; then :meth:`end_run` and :meth:`settle`. Step numbers grow across
    runs.
    """

    timeout: float
    """Seconds after which every wait but that of :meth:`settle` ends. May change at any time."""

    on_wait: Callable[[Collection[int]], None]
    """Called with the world ranks that this rank begins to wait for, and with none when the wait is over.

    The grafter sets it, and writes the tap and the wait to the rank's :class:`.StatusPage`. Peers read that page to
    detect that two ranks wait for each other.
    """

    @property
    def bytes_in_use(self) -> int:
        """Bytes that this rank has published and that receivers still hold; the buffer budget bounds them."""

    def begin_run(self, run: RunInfo) -> None:
        """Take part in a run. It receives nothing that an earlier run sent."""

    def publish(self, key: TapKey, tensor: torch.Tensor, extras: object, memo: Memo | None = None) -> None:
        """Offer a copy of a tensor to every receiver; the tensor itself may change as soon as this returns.

        Extras are pickled, and each receiver gets its own copy. :meth:`take_unmatched` returns ``memo`` if no receiver
        asks for the tensor.

        Raises :class:`BufferFullError` when no memory became free within the time limit, and :class:`ShippingError` for
        extras that cannot be pickled. Then nothing is published, and receivers keep waiting until :meth:`decline`.
        """

    def decline(self, key: TapKey) -> None:
        """Announce that this rank will publish nothing under the key, so that no receiver waits for it."""

    def receive(self, key: TapKey, near: torch.Tensor | None = None) -> Receipt:
        """Wait until every sender has published, declined, ended the step or died, or the time limit is over.

        If a sender is waiting for this rank, one of the two ends its wait at once.

        The contributions' tensors are moved to the device of ``near``, the receiver's own tensor; without it they stay
        on their device. Each key is received once, and its receipt released before the step ends.
        """

    def end_step(self, step: int) -> None:
        """Announce that this rank will neither publish nor receive anything more of this step."""

    def end_run(self) -> None:
        """Announce that this rank has ended all its steps of the run."""

    def settle(self, wake: int | None = None, timeout: float | None = None) -> bool:
        """Serve the peers until every participant has ended the run or died; then no frame of the run is in transit.

        Returns False as soon as the descriptor ``wake`` becomes readable before that, or after ``timeout`` seconds.
        """

    def take_unmatched(self) -> Sequence[Memo]:
        """Return the memos of tensors that no receiver asked for, now that their step is over; each memo once."""

    def share(self, let_go: Callable[[], bool], take_back: Callable[[], None]) -> None:
        """Let other threads own the exchange while one waits in :meth:`publish` or :meth:`receive`.

        ``let_go`` is called before such a wait, and releases the ownership unless it returns False. After the wait
        ``take_back`` is called, which waits for the ownership. So a thread that waits for one tap does not block other
        threads' taps.
        """

    def announce(self, step: int, message: bytes) -> None:
        """Send every participant of the run the leader's message about a step, before the step begins. Does not wait.

        The exchange does not read the message. It reaches the ranks of both sides.
        """

    def announcements(self, leader: int, step: int) -> list[bytes] | None:
        """Return the leader's messages up to this step that were not returned before, oldest first.

        ``leader`` is a world rank. None when no message for this step arrived within the time limit, or the leader is
        gone; a later call then returns the missed ones. A leader that has ended its run announces nothing more, and
        then the list may be empty.
        """

    def await_past(self, step: int) -> bool:
        """Wait until every rank of the other side is past this step; False when one is not within the time limit.

        A rank that only sends waits for no other rank, and may be as many steps ahead as its buffer holds.
        """

    def where_peers_are(self) -> str:
        """Return one line that describes where each rank of the other side is, for messages."""

    def close(self) -> None:
        """End all connections and release all memory; no other method may be called afterwards.

        Frames in transit are lost, in both directions. So a rank that gets new peers makes a new exchange, and nothing
        of the old one can arrive there.
        """

    def lost_peers(self) -> str:
        """Name the ranks of the other side that are gone, with the reason; blank while all are present."""

    def why_gone(self, rank: int) -> str:
        """Return why this world rank will send nothing more, such as ``"died"``; blank while it is connected."""
