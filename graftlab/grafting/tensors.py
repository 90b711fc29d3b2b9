"""What a rank sends of a tap's value: the plain tensor behind it, and beside the extras its layout and name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from graftlab.errors import LayoutError
from graftlab.layouts import Partial, RankLayout

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


@dataclass(frozen=True)
class SentExtras:
    """Travels in place of the extras where there is more to say than those."""

    extras: Any
    layout: RankLayout | None = None
    name: str | None = None


def summed_partial(shown: Any, own: torch.Tensor, layout: RankLayout, world_size: int) -> torch.Tensor:
    """What a rank holds once the partial sums are taken, by a collective in which every rank of the mesh takes part.

    Raises :class:`LayoutError` where it is not clear in which group they are to be taken.
    """
    if hasattr(shown, "placements"):
        from torch.distributed.tensor import Replicate as Whole

        placements = [Whole() if type(p).__name__ == "Partial" else p for p in shown.placements]
        with torch.no_grad():
            local: Any = shown.detach().redistribute(placements=placements).to_local()
        whole: torch.Tensor = local.wait() if hasattr(local, "trigger_wait") else local
        return whole
    wide = [name for name, size in layout.layout.mesh.sizes if size > 1]
    partial = [step for step in layout.layout.steps if isinstance(step, Partial) and step.mesh in wide]
    if len(wide) != 1 or layout.layout.mesh.size != world_size or partial[0].op != "sum":
        raise LayoutError(
            f"{layout.layout}: the sums cannot be taken on the receiving side, because the layout does not say in "
            "which process group; make the tensor a DTensor, or compare it t2b, where it is sent"
        )
    total = own.detach().clone()
    torch.distributed.all_reduce(total)
    return total
