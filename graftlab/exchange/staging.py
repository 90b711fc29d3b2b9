"""Where a sender's bytes lie until its receivers have done with them: here in the host's memory."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from graftlab.exchange.arena import Allocator, Arena


class Staging(Protocol):
    """Memory of a sender that its receivers can look at where it is: the host's, or a GPU's (:mod:`.device`)."""

    def put(self, tensor: torch.Tensor, nbytes: int, receivers: set[int]) -> Any:
        """Copy a tensor of ``nbytes`` (at least one) here and return its location, which receivers are told.

        None when these receivers (world ranks) cannot get it this way, or there is no room.
        """

    def release(self, location: Any) -> None:
        """No receiver looks at this location any more."""


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
