"""Compares weights of 8 bits by what they stand for, if the other side has them in full."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from graftlab.base.quantisation import SCALE, dequantised, is_quantised
from graftlab.transforms.inputs import GraftTransformInput, Outcome

DEQUANTISED = "dequantised"
"""How a row says that numbers of 8 bits were compared times their scale."""


def by_scale(outcome: Outcome, graft_input: GraftTransformInput) -> Outcome:
    """Compare codes times their scale, if one side alone has codes and its extras have the scale.

    Such a tensor is not grafted: codes without the other side's scale would be other numbers.
    """
    mine, theirs = graft_input.target, outcome.value
    if is_quantised(mine.dtype) == is_quantised(theirs.dtype) or mine.shape != theirs.shape:
        return outcome
    if outcome.measured is not None or outcome.rows is not None or outcome.known is not None:
        return outcome
    own = is_quantised(mine.dtype)
    scale = _scale([graft_input.target_extras] if own else graft_input.received_extras_list)
    if scale is None:
        return outcome
    found = dequantised(mine, scale, theirs) if own else dequantised(theirs, scale, mine)
    if found is None:
        return outcome
    pair = (theirs.to(found.device).float(), found) if own else (found.to(mine.device), mine.float())
    return replace(outcome, measured=pair, aligned_by=DEQUANTISED, compare_only=True)


def _scale(extras: list[Any]) -> torch.Tensor | None:
    """The scale, if one rank alone has the tensor."""
    found = extras[0].get(SCALE) if len(extras) == 1 and isinstance(extras[0], Mapping) else None
    return found if isinstance(found, torch.Tensor) else None
