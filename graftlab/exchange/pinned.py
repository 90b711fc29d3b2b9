"""Staging for other machines: what is on a GPU goes into pinned memory of this host, and is sent from there.

Of such memory a GPU copies at the speed of its bus; a copy out of or into any other is made twice. torch's own
allocator gives it, and takes it back when nothing uses it any more, no GPU and no socket either.
"""

from __future__ import annotations

import itertools

import torch

from graftlab.base.tensor_bytes import copyable
from graftlab.errors import warn
from graftlab.exchange.device import Gpu


class PinnedMemory:
    """Gives out pinned bytes where there are any, and others where there are not, which is said once."""

    def __init__(self, gpu: Gpu, label: str) -> None:
        self._gpu = gpu
        self._label = label
        self._has_failed = False

    def new(self, nbytes: int) -> torch.Tensor:
        """Flat bytes of the host's memory, with anything in them."""
        if not self._has_failed:
            try:
                return self._gpu.pinned(nbytes)
            except RuntimeError as error:
                # A limit of the system's, perhaps. It need not be the last word, but each try may be slow.
                self._has_failed = True
                warn(
                    f"gl.tap on {self._label}: tensors between a GPU and other machines go through memory that is not "
                    f"pinned, which is slower: {error}"
                )
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


class PinnedStaging:
    """Copies of tensors on a GPU, for receivers none of which shares memory with this rank; a location is a number."""

    def __init__(self, memory: PinnedMemory) -> None:
        self._memory = memory
        self._held: dict[int, torch.Tensor] = {}
        self._numbers = itertools.count()
        self.bytes_in_use = 0

    def put(self, tensor: torch.Tensor, nbytes: int, receivers: set[int]) -> int:
        number = next(self._numbers)
        self._held[number] = self.fetch(tensor, nbytes)
        self.bytes_in_use += nbytes
        return number

    def fetch(self, tensor: torch.Tensor, nbytes: int) -> torch.Tensor:
        """The tensor on the host. Waits for the GPU to come so far."""
        source = copyable(tensor)
        copy = self._memory.new(nbytes).view(source.dtype).view(source.shape)
        copy.copy_(source)
        return copy

    def view(self, location: int) -> memoryview:
        """The bytes at a location, row by row; they stay for as long as somebody holds this."""
        return self._held[location].view(-1).view(torch.uint8).numpy().data

    def release(self, location: int) -> None:
        self.bytes_in_use -= self._held.pop(location).nbytes
