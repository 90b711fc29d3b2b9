"""Staging for other machines: tensors on a GPU are copied to pinned memory of this host, and sent from there.

A GPU copies to and from pinned memory at the speed of its bus; with other memory the driver makes an extra copy.
torch's allocator provides it, and reuses it when no GPU and no socket uses it any longer.
"""

from __future__ import annotations

import itertools

import torch

from graftlab.base.tensor_bytes import copyable
from graftlab.errors import warn
from graftlab.exchange.device import Gpu


class PinnedMemory:
    """Allocates pinned memory, or ordinary memory where pinning fails, with one warning."""

    def __init__(self, gpu: Gpu, label: str) -> None:
        self._gpu = gpu
        self._label = label
        self._has_failed = False

    def new(self, nbytes: int) -> torch.Tensor:
        """Return uninitialized bytes in the host's memory, as a flat tensor."""
        if not self._has_failed:
            try:
                return self._gpu.pinned(nbytes)
            except RuntimeError as error:
                # Perhaps a limit of the system. A later try might succeed, but each try may be slow.
                self._has_failed = True
                warn(
                    f"gl.tap on {self._label}: tensors between a GPU and other machines go through unpinned memory, "
                    f"which is slower: {error}"
                )
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


class PinnedStaging:
    """Copies of GPU tensors, for receivers that share no memory with this rank; a location is a number."""

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
        """Copy the tensor to the host, and wait until the GPU has made the copy."""
        source = copyable(tensor)
        copy = self._memory.new(nbytes).view(source.dtype).view(source.shape)
        copy.copy_(source)
        return copy

    def view(self, location: int) -> memoryview:
        """Return the bytes at a location in row-major order; the memory stays allocated while the result exists."""
        return self._held[location].view(-1).view(torch.uint8).numpy().data

    def release(self, location: int) -> None:
        self.bytes_in_use -= self._held.pop(location).nbytes
