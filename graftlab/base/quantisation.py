"""Numbers of 8 bits that stand for others, and the scales that say which."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

SCALE = "quantisation_scale"
"""The key of a tap's extras under which the scale of its numbers of 8 bits travels."""

_BLOCKS = (16, 32, 64, 128, 256, 512)
"""The usual sizes of blocks. The last block of a dimension may be smaller."""


def is_quantised(dtype: torch.dtype) -> bool:
    """Whether numbers of a dtype are codes of 8 bits: floats, or integers."""
    return dtype in (torch.int8, torch.uint8) or (dtype.is_floating_point and dtype.itemsize == 1)


def scale_of(name: str, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """Return the scale of a weight of 8 bits among its module's tensors, by the usual names; None without one.

    Weights with a zero point are left out.
    """
    if not is_quantised(tensors[name].dtype):
        return None
    if any(each in tensors for each in _beside(name, "{}_zero_point", "zero_point", "zeros", "qzeros")):
        return None
    return next((tensors[each] for each in scale_names(name) if each in tensors), None)


def scale_names(name: str) -> list[str]:
    """Return the names that the scale of a weight of this name may have."""
    return _beside(name, "{}_scale_inv", "{}_scale", "{}_scales", "scale_{}", "scale", "scales")


def _beside(name: str, *others: str) -> list[str]:
    """Names in the module of a weight; ``{}`` stands for the weight's own."""
    owner, dot, leaf = name.rpartition(".")
    return [f"{owner}{dot}{each.format(leaf)}" for each in others]


def by_extras(shown: torch.Tensor, extras: Any) -> torch.Tensor:
    """Return what a tensor of codes stands for, in float32, if its tap's extras have a scale that fits; or the tensor.

    A scale is one number, one for each index of the first dimension, or one for each block. Some publishers store the
    factor of the conversion instead of that of its reversal. Weights are smaller than their codes, so a scale above 1
    divides.
    """
    scale = extras.get(SCALE) if isinstance(extras, Mapping) else None
    if not isinstance(scale, torch.Tensor) or not is_quantised(shown.dtype):
        return shown
    factors = _expanded(scale.detach().to(shown.device), shown.shape)
    if factors is None:
        return shown
    is_of_conversion = bool(factors.abs().mean() > 1)
    return shown.detach().float() / factors if is_of_conversion else shown.detach().float() * factors


def weight_extras(name: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
    """Return the extras of the tap of a weight: the scale of one of 8 bits."""
    scale = scale_of(name, tensors)
    # In float32, because pickle cannot load tensors of 8-bit floats.
    return None if scale is None else {SCALE: scale.detach().float()}


def _expanded(scale: torch.Tensor, shape: torch.Size) -> torch.Tensor | None:
    """A scale with one number for each element of a tensor of this shape, or for all."""
    scale = scale.float()
    if scale.numel() == 1:
        return scale.reshape(())
    if scale.dim() == 1 and len(shape) > 1 and len(scale) == shape[0]:
        scale = scale.view(-1, *[1] * (len(shape) - 1))
    if scale.dim() != len(shape):
        return None
    for dim, (size, count) in enumerate(zip(shape, scale.shape, strict=True)):
        block = _block(size, count)
        if block is None:
            return None
        scale = scale.repeat_interleave(block, dim).narrow(dim, 0, size)
    return scale


def _block(size: int, count: int) -> int | None:
    """The size of blocks, if ``count`` of them divide ``size``."""
    if count in (1, size):
        return size // count
    usual = next((block for block in _BLOCKS if -(-size // block) == count), None)
    return size // count if usual is None and count and size % count == 0 else usual
