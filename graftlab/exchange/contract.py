"""What every exchange promises, and the values that pass through one.

A tensor travels under its address: the :class:`TapKey` of the tap that showed it. Whoever implements
:class:`Exchange` keeps these promises:

1. A receiver never gets a tensor of another tap, step or occurrence.
2. A sender does not wait for its receivers while its buffer budget lasts.
3. Nobody waits forever: a peer that ends the step, or dies, frees the waiters at once; otherwise the time limit does.
4. Tensors arrive bit-exact.
5. A receiver sees one contribution for each sending rank that published, in rank order.
6. When a process dies, the others are free within two seconds and nothing stays behind.
7. Nothing that was sent in one exchange is ever received in another.

And one to the code that interrupts a rank: an exception raised where :func:`.interrupts.is_interruptible_at` allows it
ends the call and harms nothing else. So an exchange waits only in functions that are marked with
:func:`.interrupts.interruptible`.

``tests/exchange/test_contract*.py`` hold every implementation to all of this.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

import torch

from graftlab.base.tags import TapKey
from graftlab.base.world import RunInfo

Memo = TypeVar("Memo")
"""A sender's own note on what it publishes. It never leaves the rank."""


class Contribution(NamedTuple):
    """What one sending rank published under a key.

    ``tensor`` may be a read-only window into the exchange's memory: it is valid until :meth:`Receipt.release`, and
    writing to it is not allowed. On a GPU it may be used on the stream that was current at :meth:`Exchange.receive`.
    """

    rank: int
    tensor: torch.Tensor
    extras: object


@dataclass
class Receipt:
    """What :meth:`Exchange.receive` brought: contributions in rank order, and why the other senders have none.

    ``unreadable`` says whose extras cannot be loaded on this rank, and why; their place holds None. ``on_release`` is
    the exchange's part of :meth:`release`.
    """

    contributions: list[Contribution]
    absent: dict[int, str] = field(default_factory=dict)
    timed_out: bool = False
    unreadable: dict[int, str] = field(default_factory=dict)
    on_release: Callable[[], None] | None = field(default=None, repr=False)

    def release(self) -> None:
        """Give the senders their memory back. The contributions' tensors must not be used afterwards.

        What the GPU's current stream was told to do with them before still counts as use; this call does not wait
        for it.
        """
        if self.on_release is not None:
            self.on_release()
            self.on_release = None
        self.contributions = []


class Exchange(Protocol[Memo]):
    """Carries tensors under their keys between the ranks of two sides. One owner thread at a time; see :meth:`share`.

    Calls come in this order: :meth:`begin_run`; then :meth:`publish`, :meth:`decline` and :meth:`receive` at will, and
    :meth:`end_step` after each step; then :meth:`end_run` and :meth:`settle`. Steps are numbered upwards across runs.
    """

    timeout: float
    """Seconds after which every wait ends, but that of :meth:`settle`. May be changed at any time."""

    on_wait: Callable[[Collection[int]], None]
    """Called with the world ranks that this rank begins to wait for, and with none when it waits no longer.

    For its owner to set, who knows the tap, and makes it known where the rank is (:class:`.StatusPage`): peers
    that look there find out that two wait for each other.
    """

    @property
    def bytes_in_use(self) -> int:
        """What this rank has published and not got back yet; the buffer budget bounds it."""

    def begin_run(self, run: RunInfo) -> None:
        """Take part in a run. Nothing of an earlier run is seen in it."""

    def publish(self, key: TapKey, tensor: torch.Tensor, extras: object, memo: Memo | None = None) -> None:
        """Offer a copy of a tensor to every receiver; the tensor itself may change as soon as this returns.

        Extras travel by pickle, each receiver gets its own. ``memo`` comes back from :meth:`take_unmatched` if nobody
        asks for the tensor.

        Raises :class:`BufferFullError` when no room came free within the time limit, and :class:`ShippingError` for
        extras that cannot be pickled. Then nothing is published, and receivers go on waiting until :meth:`decline`.
        """

    def decline(self, key: TapKey) -> None:
        """Say that this rank will publish nothing under the key, so that nobody waits for it."""

    def receive(self, key: TapKey, near: torch.Tensor | None = None) -> Receipt:
        """Wait until every sender has published, declined, ended the step or died, or the time limit is over.

        Where a sender waits for this very rank, one of the two gives up its wait at once.

        The contributions come to the device of ``near``, the receiver's own tensor; without it, wherever they are.
        Each key is received once; the receipt must be released before the step ends.
        """

    def end_step(self, step: int) -> None:
        """Say that this rank will neither publish nor ask for anything of this step any more."""

    def end_run(self) -> None:
        """Say that this rank has ended all its steps of the run."""

    def settle(self, wake: int) -> bool:
        """Serve the peers until every participant has ended the run or died; nothing of it is on its way then.

        False as soon as the descriptor ``wake`` is readable before that, which calls it off. Has no other time limit.
        """

    def take_unmatched(self) -> Sequence[Memo]:
        """The memos of what was published and is now known to have been asked for by nobody. Each comes back once."""

    def share(self, let_go: Callable[[], bool], take_back: Callable[[], None]) -> None:
        """Let other threads own the exchange while it waits in :meth:`publish` or :meth:`receive`.

        ``let_go`` is called before such a wait and gives the ownership up, unless it returns False; then ``take_back``
        is called after it, and waits for the ownership. So a thread that waits for one tap keeps no other thread from
        its own.
        """

    def announce(self, step: int, message: bytes) -> None:
        """Send every participant of the run the leader's message about a step, before the step begins. Does not wait.

        The exchange does not look into the message. It reaches the ranks of both sides.
        """

    def announcements(self, leader: int, step: int) -> list[bytes] | None:
        """Return the leader's messages up to this step that were not returned before, oldest first.

        ``leader`` is a world rank. None when no message for this step arrived within the time limit; a later call then
        returns the missed ones. A leader that has ended its run, or died, announces nothing more, so the wait ends.
        """

    def await_past(self, step: int) -> bool:
        """Wait until every rank of the other side is past this step; False when one is not within the time limit.

        A rank that only sends waits for no other rank, and may be as many steps ahead as its buffer holds.
        """

    def where_peers_are(self) -> str:
        """One line on every rank of the other side, for messages."""

    def close(self) -> None:
        """Be there no more for any peer, and let go of all memory; nothing else may be called afterwards.

        What was on its way, in either direction, is gone. So a rank that goes on with new peers makes another exchange,
        in which nothing of the old ones can turn up.
        """

    def lost_peers(self) -> str:
        """Which ranks of the other side are gone, and how; blank while all are there."""
