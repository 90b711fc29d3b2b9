"""What every exchange promises, and the values that pass through one.

A tensor travels under its address: the :class:`TapKey` of the tap that showed it. Whoever implements
:class:`Exchange` keeps these promises:

1. A receiver never gets a tensor of another tap, step or occurrence.
2. A sender does not wait for its receivers while its buffer budget lasts.
3. Nobody waits forever: a peer that ends the step, or dies, frees the waiters at once; otherwise the time limit does.
4. Tensors arrive bit-exact.
5. A receiver sees one contribution for each sending rank that published, in rank order.
6. When a process dies, the others are free within two seconds and nothing stays behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from graftlab.base.tags import TapKey
from graftlab.base.world import RunInfo


@dataclass(frozen=True)
class Contribution:
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

    ``unreadable`` says whose extras cannot be loaded on this rank, and why; their place holds None.
    """

    contributions: list[Contribution]
    absent: dict[int, str] = field(default_factory=dict)
    timed_out: bool = False
    unreadable: dict[int, str] = field(default_factory=dict)
    _release: Callable[[], None] | None = None

    def release(self) -> None:
        """Give the senders their memory back. The contributions' tensors must not be used afterwards.

        What the GPU's current stream was told to do with them before still counts as use; nobody waits for it here.
        """
        if self._release is not None:
            self._release()
            self._release = None
        self.contributions = []


class Exchange(Protocol):
    """Carries tensors under their keys between the ranks of two sides. One owner thread at a time."""

    def begin_run(self, run: RunInfo) -> None:
        """Take part in a run."""

    def publish(self, key: TapKey, tensor: torch.Tensor, extras: object, memo: object = None) -> None:
        """Offer a tensor to every receiver. ``memo`` comes back from :meth:`take_unmatched` if nobody asks for it.

        Raises :class:`BufferFullError` when no room came free within the time limit.
        """

    def decline(self, key: TapKey) -> None:
        """Say that this rank will publish nothing under the key, so that nobody waits for it."""

    def receive(self, key: TapKey, near: torch.Tensor | None = None) -> Receipt:
        """Wait until every sender has published, declined, ended the step or died, or the time limit is over.

        Where a sender waits for this very rank, one of the two gives up its wait at once.

        The contributions come to the device of ``near``, the receiver's own tensor; without it, wherever they are.
        """

    def end_step(self, step: int) -> None:
        """Say that this rank will neither publish nor ask for anything of this step any more."""

    def end_run(self) -> None:
        """Say that this rank has ended all its steps of the run."""

    def settled(self) -> bool:
        """Whether every other participant has ended the run too, so that nothing of it is on its way any more."""

    def take_unmatched(self) -> Sequence[object]:
        """The memos of what was published, and is now known to have been asked for by nobody."""
