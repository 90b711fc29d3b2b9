"""What a tap shows, as a tensor that can travel."""

from __future__ import annotations

import re
from typing import Any

import torch

# These are known to wrap no other tensor; asking a tensor for an attribute that it lacks is slow.
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)

# Torch neither converts these nor computes with them: several numbers share a byte.
_NOT_NUMBERS = frozenset(
    value
    for name, value in vars(torch).items()
    if isinstance(value, torch.dtype) and re.match(r"u?int[1-7]$|float4|bits", name)
)


def plain_tensor(shown: Any) -> torch.Tensor | str:
    """The plain tensor behind a tap's value, which shares its memory; or, in words, why there is none."""
    if type(shown) in _PLAIN_TENSORS and shown.layout == torch.strided and not shown.is_meta:
        own: torch.Tensor = shown
        return _lacks(own) or own
    if not isinstance(shown, torch.Tensor):
        return f"its value is {type(shown).__name__}, not a tensor; the tap is skipped"
    local: Any = shown.to_local() if hasattr(shown, "to_local") else shown
    if hasattr(local, "trigger_wait"):
        # The result of a collective that may still be on its way; the plain tensor shares its memory.
        local = local.wait()
    if not isinstance(local, torch.Tensor) or local.layout != torch.strided or local.device.type == "meta":
        return f"a {shown.layout} tensor on {shown.device} cannot travel; the tap is skipped"
    if type(local).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        # Its elements are whatever its class makes of them.
        return f"a {type(shown).__name__} is no plain tensor; the tap is skipped (tap the tensors that it is made of)"
    return _lacks(local) or local


def _lacks(tensor: torch.Tensor) -> str:
    """In words, why a strided tensor cannot be carried or measured; empty where it can."""
    if tensor.is_quantized or tensor.is_nested or tensor.dtype in _NOT_NUMBERS:
        kind = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else str(tensor.dtype)
        return f"a {kind} tensor cannot be compared; the tap is skipped (tap what it stands for, say as float32)"
    try:
        tensor.data_ptr()
    except RuntimeError:
        # What torch.func's transforms hand to the function that they transform.
        return "inside torch.func or torch.vmap a tensor has no values of its own; the tap is skipped"
    return ""
