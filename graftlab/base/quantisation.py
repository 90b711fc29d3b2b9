"""Numbers of 8 bits or less that stand for others, and how to compute those."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

SCALE = "quantisation_scale"
"""The key of a tap's extras under which the scale of its numbers of 8 bits travels."""
CODES = "quantised_to"
"""The key of a tap's extras for the dtype of the codes, if the tap shows the numbers that they stand for."""

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


def weight_tap(name: str, tensors: Mapping[str, torch.Tensor]) -> tuple[Any, dict[str, Any] | None]:
    """Return what the tap of a weight shows, and its extras.

    A weight whose class stores codes shows its numbers, computed only if they are wanted, and names the dtype of the
    codes. One of 8 bits shows these with their scale.
    """
    weight = tensors[name]
    codes = stored_codes(weight)
    if codes is not None:
        return partial(dequantised, weight), {CODES: str(codes).removeprefix("torch.")}
    return weight, _scale_extras(name, tensors)


def _scale_extras(name: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
    scale = scale_of(name, tensors)
    # In float32, because pickle cannot load tensors of 8-bit floats.
    return None if scale is None else {SCALE: scale.detach().float()}


def numbers_of(name: str, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the numbers of a weight: those that its codes stand for, or its own."""
    weight = tensors[name]
    return by_extras(weight, _scale_extras(name, tensors)) if stored_codes(weight) is None else dequantised(weight)


def stored_codes(weight: torch.Tensor) -> torch.dtype | None:
    """Return the dtype of the codes that a tensor's class stores instead of its numbers; None if it stores numbers.

    Such are the classes of torchao, optimum-quanto and bitsandbytes (4 bits), and torch's quantized dtypes.
    """
    if weight.is_quantized:
        return torch.uint8 if weight.dtype == torch.quint8 else torch.int8
    if getattr(weight, "quant_state", None) is not None:
        return weight.dtype
    if type(weight).dequantize is torch.Tensor.dequantize or not hasattr(weight, "__tensor_flatten__"):
        return None
    parts: list[str] = weight.__tensor_flatten__()[0]
    stored = [getattr(weight, part).dtype for part in parts]
    # Integers may be packed, in any dtype.
    return next((dtype for dtype in stored if dtype.is_floating_point and is_quantised(dtype)), torch.int8)


def dequantised(weight: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a tensor whose class stores codes; see :func:`stored_codes`."""
    state = getattr(weight, "quant_state", None)
    if state is None:
        return weight.detach().dequantize()
    # Loaded, because a tensor has its class.
    numbers: torch.Tensor = sys.modules["bitsandbytes"].functional.dequantize_4bit(weight.data, state)
    return numbers


def codes_of(shown: torch.Tensor, extras: Any) -> str | None:
    """Return the name of the dtype of a tap's codes; None if its numbers are not quantised."""
    if is_quantised(shown.dtype):
        return str(shown.dtype).removeprefix("torch.")
    return stored_as(extras)


def stored_as(extras: Any) -> str | None:
    """Return the name of the dtype of the codes in whose place a tap shows their numbers; None for any other tap."""
    return extras.get(CODES) if type(extras) is dict else None


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
