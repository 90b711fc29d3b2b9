"""The difference between two tensors that rounding explains, estimated from their dtypes."""

from __future__ import annotations

from collections.abc import Iterable

import torch

DEFAULT_NOISE_FLOOR = 1e-5
"""The default ``rel_l2`` up to which float32 agrees with float32.

A correct target in the quickstart stays below 2e-6 at every tap; with its mistake it reaches 6e-2. About 2e-2 suits
bfloat16 against float32.
"""

# In units in the last place of a coarse dtype, because rounding accumulates through a model.
_ROUNDINGS = 2.5
_FLOAT32 = float(torch.finfo(torch.float32).eps)


def assumed_floor(dtypes: Iterable[object]) -> tuple[float, str]:
    """Return the ``rel_l2`` up to which tensors of these dtypes agree without a measured floor, and that dtype.

    The coarsest dtype decides, because values computed from it inherit its rounding.
    """
    epses: dict[str, float] = {}
    for name in dtypes:
        dtype = getattr(torch, name, None) if isinstance(name, str) else None
        if isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype.is_complex):
            epses[str(name)] = float(torch.finfo(dtype).eps)
    coarsest = max(epses, key=epses.__getitem__, default="float32")
    eps = epses.get(coarsest, _FLOAT32)
    if eps > _FLOAT32:
        return float(f"{_ROUNDINGS * eps:.0e}"), coarsest
    if eps < _FLOAT32:
        return float(f"{DEFAULT_NOISE_FLOOR / _FLOAT32 * eps:.0e}"), coarsest
    return DEFAULT_NOISE_FLOOR, "float32"


def roundoff(dtype: str) -> float:
    """Return the unit roundoff of a dtype, given by name; 0 if it does not round."""
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype) or not (found.is_floating_point or found.is_complex):
        return 0.0
    return torch.finfo(found).eps / 2
