"""What a direct way between the GPUs of two hosts has to be able to do; :mod:`.nccl` can, and stand-ins of the tests.

All but :meth:`WireGpu.takes`, :meth:`WireGpu.copy` and :meth:`WireGpu.hand_over` is called on one thread of the rank.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Copy(Protocol):
    """A tensor's bytes, copied on its own device."""

    @property
    def bytes(self) -> torch.Tensor:
        """Flat, of dtype uint8."""

    def is_made(self) -> bool:
        """Whether the GPU has come past the copy. Raises where it has failed."""


class Transfer(Protocol):
    """Bytes on their way to the other end of a communicator, or from there."""

    @property
    def bytes(self) -> torch.Tensor:
        """Where they lie, or come to; flat, of dtype uint8."""

    def is_done(self) -> bool:
        """Whether the device is past it. Raises where it has failed, or the communicator has."""


class Communicator(Protocol):
    """One end of what joins two GPUs. It carries one transfer after the other; no call waits for the other end.

    The other end must be told of the same transfers in the same order: a receive waits for its send, on the device, and
    a send for its receive. They wait forever if need be, so whoever issues them keeps the time.
    """

    def is_ready(self) -> bool:
        """Whether both ends have come together, and what was issued last is with the device. Raises where it failed."""

    def send(self, source: torch.Tensor) -> Transfer:
        """Issue a send of these bytes, which must stay as they are until it is done."""

    def receive(self, nbytes: int) -> Transfer:
        """Issue a receive into memory of its own."""

    def abort(self) -> None:
        """End it with all that is under way. When this returns the device touches the memory of no transfer any more.

        It may take its time, on a thread of its own; no other method is called from then on.
        """


class WireGpu(Protocol):
    """A rank's GPU, with what joins it to others."""

    name: str
    """What both ends must be the same of, such as ``"nccl 2.28.9"``."""

    def begin_thread(self) -> None:
        """The calling thread is the one that all but the taps' own calls come from."""

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is on this GPU and can be copied now."""

    def copy(self, tensor: torch.Tensor, nbytes: int) -> Copy:
        """Issue a copy of the tensor on the calling thread's current stream."""

    def hand_over(self, received: torch.Tensor) -> None:
        """What was received is used from now on, on the calling thread's current stream."""

    def new_id(self) -> bytes:
        """What two ends need to find each other."""

    def join(self, end: int, unique_id: bytes) -> Communicator:
        """Begin to join the two ends, 0 and 1, that know this."""
