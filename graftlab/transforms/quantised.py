"""Compares weights of 8 bits by what they stand for, if the other side has them in full."""

from __future__ import annotations

from dataclasses import replace

from graftlab.base.quantisation import by_extras, codes_of, is_quantised, stored_as
from graftlab.transforms.by_layout import by_layout
from graftlab.transforms.inputs import GraftTransformInput, Outcome, dtype_name

DEQUANTISED = "dequantised"
"""How a row says that numbers of 8 bits were multiplied by their scale before they were compared."""


def by_values(graft_input: GraftTransformInput) -> Outcome:
    """Make the receiver's tensor by the known layouts, from the numbers that codes stand for.

    They are used if one side alone has codes with a scale, or if a weight's class stores codes. Such a tensor is not
    grafted: codes without the other side's scale would be other numbers.
    """
    shown = [graft_input.target, *graft_input.received_list]
    extras = [graft_input.target_extras, *graft_input.received_extras_list]
    codes = [codes_of(tensor, each) for tensor, each in zip(shown, extras, strict=True)]
    is_stored = any(stored_as(each) for each in extras)
    if not is_stored and len({each is None for each in codes}) < 2:
        return by_layout(graft_input)
    own, *theirs = (by_extras(tensor, each) for tensor, each in zip(shown, extras, strict=True))
    if any(is_quantised(tensor.dtype) for tensor in (own, *theirs)):
        return by_layout(graft_input)
    found = by_layout(replace(graft_input, target=own.float(), received_list=[tensor.float() for tensor in theirs]))
    measured = (found.value.to(own.device), own.float()) if found.measured is None else found.measured
    names = [each or dtype_name(tensor.dtype) for each, tensor in zip(codes, shown, strict=True)]
    return replace(
        found,
        value=graft_input.target,
        measured=measured,
        aligned_by=DEQUANTISED if found.aligned_by is None else f"{found.aligned_by}, {DEQUANTISED}",
        cast=f"{names[1]} -> {names[0]}" if names[0] != names[1] else None,
        compare_only=True,
    )
