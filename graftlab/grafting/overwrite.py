"""Overwrites a model's tensor with a received value, as if the op before the tap had produced it.

Under autograd the graph upstream stays connected: gradients pass as through ``h + (received - h).detach()``.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch


class _Transplant(torch.autograd.Function):
    """Forward: ``received``. Backward: identity to ``own``. Exact, where ``h + (received - h)`` would round."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
        # Copied here, because torch forbids in-place changes of an output that is a view of an input.
        return copy_like(own, received)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


def replacement_for(own: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
    """Return a new tensor with the received values, and with own's dtype, device, strides and autograd history."""
    if own.requires_grad and torch.is_grad_enabled():
        replaced: torch.Tensor = _Transplant.apply(own, received)  # type: ignore[no-untyped-call]
        return replaced
    return copy_like(own, received)


def copy_like(own: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
    """Return a new tensor with the received values, and with own's dtype, device and strides."""
    # Including strides, because later code may take a view that only these strides allow.
    return torch.empty_like(own, requires_grad=False).copy_(received)


def overwrite(own: torch.Tensor, received: torch.Tensor) -> tuple[torch.Tensor, str | None]:
    """Write the received values into ``own``; returns the tensor to continue with, and a note if it is a new tensor.

    The write bypasses autograd's version counter on purpose: an earlier op that saved ``own`` for its backward then
    sees the grafted value, as if it had produced it, instead of raising; a leaf that requires grad can be written too.
    Views write through to their base, as in any in-place op. In an expanded tensor, or one with overlapping windows,
    several elements share one number: if the received values differ among them, only the returned tensor has them.
    """
    place = own.data
    if place.is_contiguous() and not own.is_inference():
        # The usual case: no elements share memory.
        place.copy_(received)
        return own, None
    place, source = one_place_each(place, received)
    if source.shape != received.shape and not _all_equal(source, received):
        return replacement_for(own, received), _ONLY_RETURNED
    # An inference tensor may only be written in inference mode, whatever the caller's current mode.
    mode = torch.inference_mode() if own.is_inference() else contextlib.nullcontext()
    with mode:
        before = place.clone() if may_overlap(place) else None
        place.copy_(source)
        if before is not None and not _all_equal(place, source.to(place)):
            place.copy_(before)
            return replacement_for(own, received), _ONLY_RETURNED
    return own, None


def overwritten(value: Any, shown: Any, own: torch.Tensor, received: torch.Tensor, *, replace: bool) -> Any:
    """Give a tap the received values; returns what the tap returns.

    ``shown`` is the tap's ``value``, computed if that is a function, and ``own`` its tensor here. ``replace`` is as in
    :meth:`.Grafter.tap`.
    """
    # A DTensor can only be overwritten through its local shard, in place.
    if replace and not hasattr(shown, "to_local"):
        return replacement_for(shown, received)
    result, _ = overwrite(own, received)
    return result if result is not own and own is value else value


_ONLY_RETURNED = (
    "the tensor is expanded or overlaps itself (one number in several places), so only gl.tap's result carries "
    "the graft"
)


def one_place_each(place: torch.Tensor, received: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Narrow an expanded tensor and the received values to one element for each stride of 0."""
    for dim, (extent, stride) in enumerate(zip(place.shape, place.stride(), strict=True)):
        if stride == 0 and extent > 1:
            place, received = place.narrow(dim, 0, 1), received.narrow(dim, 0, 1)
    return place, received


def may_overlap(tensor: torch.Tensor) -> bool:
    """Whether elements may share memory: some dimension's stride is within the reach of smaller ones."""
    reach = 0
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if extent > 1 and stride <= reach:
            return True
        reach += (extent - 1) * stride
    return False


def _all_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    # A NaN in the same place counts as equal.
    return bool(((one == other) | ((one != one) & (other != other))).all())


class OverwrittenTensors:
    """Remembers tensors' values before they are overwritten, and restores them."""

    def __init__(self) -> None:
        self._before: dict[tuple[int, torch.Size, tuple[int, ...]], tuple[torch.Tensor, torch.Tensor]] = {}

    def remember(self, own: torch.Tensor) -> None:
        """Copy the tensor, unless it is remembered already."""
        place = own.data_ptr(), own.shape, own.stride()
        if place not in self._before:
            self._before[place] = own, own.data.clone()

    def restore(self) -> None:
        """Write the earlier values into the same memory, the last overwritten first."""
        for own, before in reversed(self._before.values()):
            overwrite(own, before)
        self._before.clear()
