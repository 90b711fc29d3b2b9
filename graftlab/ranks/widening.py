"""Repeats a call in float32 instead of 16 bits, to show mistakes that rounding hides."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from graftlab.errors import SessionError

NARROW = (torch.bfloat16, torch.float16)
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_BUDGET = 1 << 30
"""The most bytes of the wide copies."""


class WideTensors:
    """The 16-bit tensors among these, widened in place to float32 until :meth:`narrow`.

    ``numbers`` are values that replace those of a tensor, by its id; they may be of tensors with more bits.

    Raises :class:`SessionError`, and changes nothing, if the results might differ or it takes too much memory.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], numbers: Mapping[int, torch.Tensor] | None = None) -> None:
        numbers = numbers or {}
        chosen = {id(each): each for each in tensors if each.dtype in NARROW or id(each) in numbers}
        self._narrow: list[tuple[torch.Tensor, torch.Tensor]] = []
        if not chosen:
            raise SessionError("no tensor of 16 bits was found")
        for each in chosen.values():
            # A write into one of two views must reach the other.
            if type(each) not in _PLAIN or each.layout != torch.strided or each._base is not None:
                raise SessionError("some tensors are sharded, sparse or views of others")
        storages = {each.untyped_storage().data_ptr() for each in chosen.values() if each.numel()}
        if len(storages) < sum(1 for each in chosen.values() if each.numel()):
            raise SessionError("some tensors share their memory")
        if 2 * sum(each.nbytes for each in chosen.values()) > _BUDGET:
            raise SessionError(f"float32 would take more than {_BUDGET >> 20:,} MiB")
        try:
            for each in chosen.values():
                own = numbers[id(each)].to(each.device) if id(each) in numbers else each.data
                self._put(each, own.float() if each.dtype in NARROW else own, each.data)
        except RuntimeError as error:
            # Tensors of torch.inference_mode may refuse it.
            self.narrow()
            raise SessionError(str(error).partition("\n")[0]) from error

    def _put(self, tensor: torch.Tensor, wide: torch.Tensor, narrow: torch.Tensor) -> None:
        # A gradient must have its tensor's dtype. A snapshot restores the gradient.
        tensor.grad = None
        tensor.data = wide
        self._narrow.append((tensor, narrow))

    def narrow(self) -> None:
        """Restore the 16-bit tensors."""
        for tensor, data in self._narrow:
            tensor.grad = None
            tensor.data = data
        self._narrow = []
