"""The state that a script's calls would have left had they run in float32, such as a cache of 16 bits."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from graftlab.base.tensor_bytes import to_bytes

_MOST = 64 << 20
"""The most bytes that are read to recognise state, or kept of it in float32."""
_MOST_VERSIONS = 4


@dataclass(frozen=True)
class KnownState:
    """What is known of a call's state, by path: the tensors that are as before any call, and those whose values in
    float32 are known.
    """

    unchanged: frozenset[str] = frozenset()
    in_float32: frozenset[str] = frozenset()


class Float32State:
    """The state of a script's models and arguments as its calls would have left it in float32.

    A call that was repeated in float32 is noted, and confirmed by the script's own call. So are the first calls if both
    sides' are bit-equal, so that their state is, too. What anything else has written since is not known.
    """

    def __init__(self) -> None:
        self._first: dict[tuple[str, str], bytes] = {}
        self._models: set[str] = set()
        self._noted: dict[str, torch.Tensor] = {}
        self._calls = self._equal_calls = 0
        # By path, what calls have left, and its values in float32, the newest first.
        self._known: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def see(self, model: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Count a call, and remember the state with which this model is first called.

        That of arguments may be given in the first call of all, before which nothing was rounded.
        """
        self._calls += 1
        if model not in self._models and _size(tensors) <= _MOST:
            self._first |= {(model, path): _bits(tensor) for path, tensor in tensors.items()}
        self._models.add(model)

    @property
    def has_calls(self) -> bool:
        """Whether a call was counted."""
        return self._calls > 0

    def note(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Note the floating-point state that a call in float32 has left."""
        wide = {path: t for path, t in tensors.items() if t.dtype in (torch.float32, torch.float64)}
        self._noted = {path: t.detach().clone() for path, t in wide.items()} if _size(wide) <= _MOST else {}

    def note_equal(self) -> None:
        """Note that the newest call is bit-equal to the other side's."""
        self._equal_calls += 1

    def confirm(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Remember what was noted, as the values in float32 of the state that the script's own call has left."""
        if self._equal_calls == self._calls and _size(tensors) <= _MOST:
            self._noted = {
                path: t.detach().to(torch.promote_types(t.dtype, torch.float32)) for path, t in tensors.items()
            }
        for path, wide in self._noted.items():
            own = tensors.get(path)
            if own is not None and own.shape == wide.shape:
                # The script may keep several caches, and give them to its calls in turn.
                versions = [(own.detach().clone(), wide), *self._known.get(path, ())]
                self._known[path] = versions[:_MOST_VERSIONS]
        self._noted = {}

    def known(self, model: str, tensors: Mapping[str, torch.Tensor]) -> KnownState:
        """What is known of this state, with which the model is called."""
        unchanged = (path for path, each in tensors.items() if self._first.get((model, path)) == _bits(each))
        return KnownState(frozenset(unchanged), frozenset(self.values(tensors)))

    def values(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The values in float32 of those tensors for which they are known."""
        found = {path: self._value(path, tensor.detach()) for path, tensor in tensors.items()}
        return {path: wide for path, wide in found.items() if wide is not None}

    def _value(self, path: str, tensor: torch.Tensor) -> torch.Tensor | None:
        for own, wide in self._known.get(path, ()):
            if tensor.dtype != own.dtype or tensor.dim() != own.dim():
                continue
            # A script cuts tokens off a cache, such as a draft's that are rejected.
            kept = tuple(slice(length) for length in tensor.shape)
            if tensor.device == own.device and torch.equal(own[kept], tensor):
                return wide[kept].clone()
        return None


def _size(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(each.nbytes for each in tensors.values())


def _bits(tensor: torch.Tensor) -> bytes:
    """A digest of a tensor's shape, dtype and elements."""
    digest = hashlib.blake2b(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
    digest.update(to_bytes(tensor.detach()))
    return digest.digest()
