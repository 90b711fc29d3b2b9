"""Putting a received value where the model's own was, as if the op before the tap had produced it.

Under autograd the graph upstream stays connected: gradients pass as through ``h + (received - h).detach()``.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch


class _Transplant(torch.autograd.Function):
    """``received`` forward, identity to ``own`` backward; exact, where ``h + (received - h)`` would round."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
        # Made here and not passed in: torch forbids changing an output in place when it is a view of an input.
        return copy_like(own, received)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


def replacement_for(own: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
    """A new tensor with the received values, own's dtype, device and strides, and own's place in the autograd graph."""
    if own.requires_grad and torch.is_grad_enabled():
        replaced: torch.Tensor = _Transplant.apply(own, received)  # type: ignore[no-untyped-call]
        return replaced
    return copy_like(own, received)


def copy_like(own: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
    """A new tensor with the received values, and own's dtype, device and strides."""
    # The strides too: code after the tap may take a view that only these strides allow.
    return torch.empty_like(own, requires_grad=False).copy_(received)


def overwrite(own: torch.Tensor, received: torch.Tensor) -> tuple[torch.Tensor, str | None]:
    """Write the received values into ``own`` itself; returns the tensor to go on with, and a note if that is another.

    The write bypasses autograd's version counter on purpose: an earlier op that saved ``own`` for its backward then
    sees the grafted value, as if it had produced it, instead of raising; a leaf that requires grad can be written too.
    Views write through to what they are views of, as any in-place op does. An expanded tensor, or overlapping windows,
    hold one number for several places: where the received values differ among those, only the returned tensor can carry
    them.
    """
    place = own.data
    if place.is_contiguous() and not own.is_inference():
        # The usual case: every number stands in one place.
        place.copy_(received)
        return own, None
    place, source = one_place_each(place, received)
    if source.shape != received.shape and not _all_equal(source, received):
        return replacement_for(own, received), _ONLY_RETURNED
    # An inference tensor may be written only in inference mode, whatever mode the caller is in by now.
    mode = torch.inference_mode() if own.is_inference() else contextlib.nullcontext()
    with mode:
        before = place.clone() if may_overlap(place) else None
        place.copy_(source)
        if before is not None and not _all_equal(place, source.to(place)):
            place.copy_(before)
            return replacement_for(own, received), _ONLY_RETURNED
    return own, None


_ONLY_RETURNED = (
    "the tensor is expanded or overlaps itself (one number in several places), so only what gl.tap returned carries "
    "the graft"
)


def one_place_each(place: torch.Tensor, received: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The parts of an expanded tensor, and of what it shall hold, in which no number is repeated by a stride of 0."""
    for dim, (extent, stride) in enumerate(zip(place.shape, place.stride(), strict=True)):
        if stride == 0 and extent > 1:
            place, received = place.narrow(dim, 0, 1), received.narrow(dim, 0, 1)
    return place, received


def may_overlap(tensor: torch.Tensor) -> bool:
    """Whether some number may stand in several places: some dimension does not step over all that lies before it."""
    reach = 0
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if extent > 1 and stride <= reach:
            return True
        reach += (extent - 1) * stride
    return False


def _all_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    # NaN is not equal to itself, yet a NaN in the same place counts as equal.
    return bool(((one == other) | ((one != one) & (other != other))).all())
