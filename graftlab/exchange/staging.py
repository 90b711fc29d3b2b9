"""Where a sender's bytes lie until its receivers have done with them: here in the host's memory."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from graftlab.exchange.arena import Allocator, Arena


class Staging(Protocol):
    """Memory of a sender that its receivers can look at where it is: the host's, or a GPU's (:mod:`.device`)."""

    def put(self, tensor: torch.Tensor, nbytes: int, receivers: set[int]) -> Any:
        """Copy a tensor of ``nbytes`` (at least one) here and return its place, which receivers are told.

        None when these receivers (world ranks) cannot get it this way, or there is no room.
        """

    def give_back(self, place: Any) -> None:
        """No receiver looks at this place any more."""


class HostStaging:
    """A rank's own segment of shared memory; a place is an offset in bytes."""

    def __init__(self, arena: Arena, allocator: Allocator) -> None:
        self._arena = arena
        self._allocator = allocator
        self.give_back = allocator.give_back

    def put(self, tensor: torch.Tensor, nbytes: int, receivers: set[int]) -> int | None:
        place = self._allocator.take(nbytes)
        if place is not None:
            source = as_copyable(tensor)
            self._arena.window(place, nbytes, source.dtype, tuple(source.shape)).copy_(source)
        return place


def as_copyable(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes; torch copies no numbers of fewer than eight bits, but it does copy the bytes that hold them."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
