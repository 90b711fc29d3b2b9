"""A tensor class that stores codes of 8 bits in place of its numbers, as quantisation libraries have them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

_KEEPS_CLASS = (torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten.alias.default)


class Int8Tensor(torch.Tensor):
    """Codes times a scale for each row. Every operation but a copy computes with the numbers."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Int8Tensor:
        made: Int8Tensor = torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, dtype=scale.dtype, device=codes.device, strides=codes.stride()
        )
        made.codes, made.scale = codes, scale
        return made

    @classmethod
    def of(cls, values: torch.Tensor) -> Int8Tensor:
        scale = values.float().abs().amax(1, keepdim=True) / 127
        return cls((values.float() / scale).round().to(torch.int8), scale.to(values.dtype))

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    def dequantize(self) -> torch.Tensor:
        return (self.codes.float() * self.scale.float()).to(self.scale.dtype)

    @classmethod
    def __torch_dispatch__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function in _KEEPS_CLASS:
            return cls(function(args[0].codes), function(args[0].scale))
        plain = torch.utils._pytree.tree_map_only(cls, cls.dequantize, args)
        return function(*plain, **(kwargs or {}))
