"""What a plan's ``keep`` filter holds on a rank: both values of a tap and what they were made from, newest last."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from graftlab.transforms import GraftTransformInput


@dataclass(frozen=True)
class KeptPair:
    """Both values of one tap before anything was overwritten, and the input of the transform; all on the CPU."""

    graft_input: GraftTransformInput
    value: torch.Tensor

    @property
    def tags(self) -> dict[str, Any]:
        return self.graft_input.tags

    @property
    def baseline(self) -> torch.Tensor:
        return self.value if self.graft_input.direction == "b2t" else self.graft_input.target

    @property
    def target(self) -> torch.Tensor:
        return self.graft_input.target if self.graft_input.direction == "b2t" else self.value

    @property
    def nbytes(self) -> int:
        """Bytes held; what two of the tensors share counts once."""
        tensors = [self.value, self.graft_input.target, *self.graft_input.received_list]
        return sum({id(tensor): _nbytes(tensor) for tensor in tensors}.values())


class KeptPairs:
    """Holds pairs until ``budget`` bytes are full, then lets the oldest go. Any thread may ask."""

    def __init__(self, budget: int = 256 << 20) -> None:
        self._budget = budget
        self._bytes = 0
        self._pairs: deque[KeptPair] = deque()
        self._lock = threading.Lock()

    def add(self, graft_input: GraftTransformInput, value: torch.Tensor) -> str | None:
        """Keep copies of the input and of the value that the transform made of it.

        Returns a note when the pair alone is over the budget and was not kept.
        """
        size = sum(_nbytes(tensor) for tensor in (graft_input.target, *graft_input.received_list))
        if size > self._budget:
            return f"not kept: the tensors have {size >> 20} MiB and the budget is {self._budget >> 20} MiB"
        received = [_copy(tensor) for tensor in graft_input.received_list]
        # Mostly the value is one of the received tensors as it came, and need not be held twice.
        same = (
            copy
            for tensor, copy in zip(graft_input.received_list, received, strict=True)
            if tensor.shape == value.shape and tensor.dtype == value.dtype and tensor.data_ptr() == value.data_ptr()
        )
        own = replace(
            graft_input, tags=dict(graft_input.tags), received_list=received, target=_copy(graft_input.target)
        )
        kept_value = next(same, None)
        pair = KeptPair(own, _copy(value) if kept_value is None else kept_value)
        with self._lock:
            self._pairs.append(pair)
            self._bytes += pair.nbytes
            while self._bytes > self._budget:
                self._bytes -= self._pairs.popleft().nbytes
        return None

    def find(self, name: str, tags: Mapping[str, object]) -> KeptPair | None:
        """The newest pair of this tap whose tags have these values."""
        with self._lock:
            for pair in reversed(self._pairs):
                if pair.tags.get("name") == name and all(pair.tags.get(k) == v for k, v in tags.items()):
                    return pair
        return None

    def tags(self) -> list[dict[str, Any]]:
        """The tags of every pair here, oldest first."""
        with self._lock:
            return [dict(pair.tags) for pair in self._pairs]


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(device="cpu", copy=True, memory_format=torch.contiguous_format)


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
