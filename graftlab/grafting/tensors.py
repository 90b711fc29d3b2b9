"""The parts of a tap's value that a rank sends: a plain tensor, and beside the extras its layout and name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from graftlab.base.world import Place
from graftlab.errors import LayoutError
from graftlab.grafting.batch_rows import RowsOfTaps
from graftlab.layouts import Partial, RankLayout, rank_layout
from graftlab.taps.extras import ExtrasWithLayout

# These have no placements, and never wrap another tensor; looking up a missing attribute of a tensor is slow.
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)

# torch neither converts nor computes with these dtypes, in which several numbers share a byte.
_NOT_NUMBERS = frozenset(
    value
    for name, value in vars(torch).items()
    if isinstance(value, torch.dtype) and re.match(r"u?int[1-7]$|float4|bits", name)
)


def plain_tensor(shown: Any) -> torch.Tensor | str:
    """Return the plain tensor behind a tap's value, which shares its memory; or the reason why there is none."""
    if type(shown) in _PLAIN_TENSORS and shown.layout == torch.strided and not shown.is_meta:
        own: torch.Tensor = shown
        return _fault(own) or own
    if not isinstance(shown, torch.Tensor):
        return f"its value is {type(shown).__name__}, not a tensor; the tap is skipped"
    local: Any = shown.to_local() if hasattr(shown, "to_local") else shown
    if hasattr(local, "trigger_wait"):
        # The result of a collective that may not be finished; the plain tensor shares its memory.
        local = local.wait()
    if not isinstance(local, torch.Tensor) or local.layout != torch.strided or local.device.type == "meta":
        return f"a {shown.layout} tensor on {shown.device} cannot travel; the tap is skipped"
    if type(local).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        # The class of such a tensor defines the meaning of its elements.
        return f"a {type(shown).__name__} is not a plain tensor; the tap is skipped (tap the tensors that it contains)"
    return _fault(local) or local


def _fault(tensor: torch.Tensor) -> str:
    """Return the reason why a strided tensor cannot be sent or measured; empty if it can."""
    if tensor.is_quantized or tensor.is_nested or tensor.dtype in _NOT_NUMBERS:
        kind = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else str(tensor.dtype)
        return f"a {kind} tensor cannot be compared; the tap is skipped (tap its values, for example as float32)"
    try:
        tensor.data_ptr()
    except RuntimeError:
        # The wrapper tensors that torch.func passes to a transformed function.
        return "inside torch.func or torch.vmap a tensor has no plain values; the tap is skipped"
    return ""


@dataclass(frozen=True)
class SentExtras:
    """Extras with the tensor's layout, the tap's own name and its batch's rows, sent instead if one is needed."""

    extras: Any
    layout: RankLayout | None = None
    name: str | None = None
    rows: RowsOfTaps | None = None


def sent_beside(shown: Any, extras: Any, name: str | None, place: Place) -> SentExtras | LayoutError | None:
    """Return the layout and the tap's own name to send beside the extras, if any; or the error in the layout."""
    has_layout = type(extras) is ExtrasWithLayout or (
        type(shown) not in _PLAIN_TENSORS and hasattr(shown, "placements")
    )
    if not has_layout and name is None:
        return None
    try:
        given = extras.layout if isinstance(extras, ExtrasWithLayout) else None
        layout = rank_layout(shown, given, place.world_size, place.rank) if has_layout else None
        return SentExtras(None, layout, name)
    except LayoutError as error:
        return error


def reduced_partial(
    shown: Any, own: torch.Tensor, layout: RankLayout, world_size: int, rank_dependent: bool
) -> torch.Tensor | str:
    """Return the receiver's tensor with its partial sums added up; or the reason why that is impossible."""
    if rank_dependent:
        return (
            f"{layout.layout}: adding up the partial sums takes all ranks, but the plan's filters may select "
            "this tap on some of them only; leave rank and tags that end in _rank out of the filters"
        )
    try:
        return summed_partial(shown, own, layout, world_size)
    except LayoutError as error:
        return str(error)


def summed_partial(shown: Any, own: torch.Tensor, layout: RankLayout, world_size: int) -> torch.Tensor:
    """Add up partial sums, by a collective in which every rank of the mesh takes part.

    Raises :class:`LayoutError` if the layout does not determine the process group.
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
            f"{layout.layout}: the partial sums cannot be added up on the receiving side, because the layout does not "
            "determine the process group; make the tensor a DTensor, or compare it t2b, so that it is sent"
        )
    total = own.detach().clone()
    torch.distributed.all_reduce(total)
    return total
