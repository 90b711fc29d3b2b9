"""The pairs of tensors that a plan's ``keep`` filter holds on a rank, newest last, within a memory budget."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KeptPair:
    """Both values of one tap before anything was overwritten, on the CPU. ``tags`` are those of the row."""

    tags: Mapping[str, object]
    baseline: torch.Tensor
    target: torch.Tensor

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.baseline, self.target))


class KeptPairs:
    """Holds pairs until ``budget`` bytes are full, then lets the oldest go. Any thread may ask."""

    def __init__(self, budget: int = 256 << 20) -> None:
        self._budget = budget
        self._bytes = 0
        self._pairs: deque[KeptPair] = deque()
        self._lock = threading.Lock()

    def add(self, tags: Mapping[str, object], baseline: torch.Tensor, target: torch.Tensor) -> str | None:
        """Keep copies of both; returns a note when the pair alone is over the budget and was not kept."""
        size = sum(tensor.numel() * tensor.element_size() for tensor in (baseline, target))
        if size > self._budget:
            return f"not kept: the pair has {size >> 20} MiB and the budget is {self._budget >> 20} MiB"
        pair = KeptPair(dict(tags), _copy(baseline), _copy(target))
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

    def names(self) -> list[str]:
        """Which taps have a pair here, without repeats, oldest first."""
        with self._lock:
            return list(dict.fromkeys(str(pair.tags.get("name")) for pair in self._pairs))


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(device="cpu", copy=True, memory_format=torch.contiguous_format)
