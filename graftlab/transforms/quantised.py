"""Compares weights of 8 bits by what they stand for, if the other side has them in full."""

from __future__ import annotations

from dataclasses import replace

from graftlab.base.quantisation import by_extras, is_quantised
from graftlab.transforms.by_layout import by_layout
from graftlab.transforms.inputs import GraftTransformInput, Outcome, dtype_name

DEQUANTISED = "dequantised"
"""How a row says that numbers of 8 bits were compared times their scale."""


def by_values(graft_input: GraftTransformInput) -> Outcome:
    """Make the receiver's tensor by the known layouts, from values where one side alone has codes with a scale.

    Such a tensor is not grafted: codes without the other side's scale would be other numbers.
    """
    target, received = graft_input.target, graft_input.received_list
    if len({is_quantised(tensor.dtype) for tensor in (target, *received)}) < 2:
        return by_layout(graft_input)
    own = by_extras(target, graft_input.target_extras)
    theirs = [
        by_extras(tensor, extras) for tensor, extras in zip(received, graft_input.received_extras_list, strict=True)
    ]
    if own is target and all(one is other for one, other in zip(theirs, received, strict=True)):
        return by_layout(graft_input)
    if any(is_quantised(tensor.dtype) for tensor in (own, *theirs)):
        return by_layout(graft_input)
    found = by_layout(replace(graft_input, target=own.float(), received_list=[tensor.float() for tensor in theirs]))
    measured = (found.value.to(own.device), own.float()) if found.measured is None else found.measured
    return replace(
        found,
        value=target,
        measured=measured,
        aligned_by=DEQUANTISED if found.aligned_by is None else f"{found.aligned_by}, {DEQUANTISED}",
        cast=f"{dtype_name(received[0].dtype)} -> {dtype_name(target.dtype)}",
        compare_only=True,
    )
