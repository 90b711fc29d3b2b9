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
        return received.view_as(received)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


def replacement_for(own: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
    """A new tensor with the received values (own's dtype and device) and own's place in the autograd graph."""
    value = received.to(device=own.device, dtype=own.dtype, copy=True)
    if own.requires_grad and torch.is_grad_enabled():
        replaced: torch.Tensor = _Transplant.apply(own, value)  # type: ignore[no-untyped-call]
        return replaced
    return value


def overwrite(own: torch.Tensor, received: torch.Tensor) -> tuple[torch.Tensor, str | None]:
    """Write the received values into ``own`` itself; returns the tensor to go on with, and a note if that is another.

    The write bypasses autograd's version counter on purpose: an earlier op that saved ``own`` for its backward then
    sees the grafted value, as if it had produced it, instead of raising; a leaf that requires grad can be written too.
    Views write through to what they are views of, as any in-place op does. An expanded tensor holds one number for
    several places: where the received values differ among those, only the returned tensor can carry them.
    """
    place = own.data
    source = received
    for dim, (extent, stride) in enumerate(zip(own.shape, own.stride(), strict=True)):
        if stride == 0 and extent > 1:
            place = place.narrow(dim, 0, 1)
            source = source.narrow(dim, 0, 1)
    if source.shape != received.shape and not _constant_along_expansion(source, received):
        return replacement_for(own, received), (
            "the tensor is expanded (one number in several places), so only what gl.tap returned carries the graft"
        )
    # An inference tensor may be written only in inference mode, whatever mode the caller is in by now.
    mode = torch.inference_mode() if own.is_inference() else contextlib.nullcontext()
    with mode:
        place.copy_(source)
    return own, None


def _constant_along_expansion(source: torch.Tensor, received: torch.Tensor) -> bool:
    same = source == received
    # NaN equals nothing, itself included, yet a NaN in every place is constant.
    return bool((same | ((source != source) & (received != received))).all())
