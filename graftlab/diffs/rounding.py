"""The difference between two tensors that rounding explains, estimated from their dtypes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

import torch

DTYPES_OF_16_BITS = ("bfloat16", "float16")
DEFAULT_NOISE_FLOOR = 1e-5
"""The default ``rel_l2`` up to which float32 agrees with float32.

A correct target in the quickstart stays below 2e-6 at every tap; with its mistake it reaches 6e-2. About 2e-2 suits
bfloat16 against float32.
"""

# In units in the last place of a coarse dtype, because rounding accumulates through a model.
_ROUNDINGS = 2.5
_PACKED = "float4_e2m1fn_x2"
_FLOAT32 = float(torch.finfo(torch.float32).eps)


def assumed_floor(dtypes: Iterable[object], casts: Iterable[object] = ()) -> tuple[float, str]:
    """Return the ``rel_l2`` up to which tensors of these dtypes agree without a measured floor, and that dtype.

    The coarsest dtype decides, because values computed from it inherit its rounding. Numbers of 8 bits count by
    :func:`quantised_roundoff`, unless ``casts``, conversions such as ``"bfloat16 -> float8_e4m3fn"``, show that one
    side alone has them.
    """
    names = [str(name) for name in dtypes]
    converted = {name for cast in casts for pair in cast_dtypes(cast) for name in pair}
    epses = {name: 2 * roundoff(name) for name in (*names, *converted) if roundoff(name)}
    quantised = {name for name in epses if is_quantised(name) and name not in converted}
    for name in quantised:
        epses[name] = 2 * quantised_roundoff(name, epses)
    coarsest = max(epses, key=epses.__getitem__, default="float32")
    if coarsest in quantised:
        return float(f"{epses[coarsest]:.0e}"), coarsest
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
    if dtype == _PACKED:
        # torch does not know it.
        return 0.25
    return torch.finfo(found).eps / 2


def is_quantised(dtype: str) -> bool:
    """Whether numbers of a dtype, given by name, have at most 8 bits: values are stored in it, not computed."""
    found = getattr(torch, dtype, None)
    return isinstance(found, torch.dtype) and found.is_floating_point and found.itemsize == 1


def quantised_roundoff(dtype: str, dtypes: Iterable[str]) -> float:
    """Return the ``rel_l2`` by which rounding moves a tensor that both sides quantise to ``dtype``.

    ``dtypes`` are those of the other values, in which the model computes; bfloat16 if there is none. A number becomes
    another number of 8 bits only where rounding moves it across the middle between two of them. With unit roundoffs
    u of the model's dtype and q of ``dtype``, that is a share u / q of the numbers, and each moves by about q.
    """
    computed = [roundoff(name) for name in dtypes if not is_quantised(name)]
    return math.sqrt(roundoff(dtype) * (max(computed, default=0.0) or roundoff("bfloat16")))


def cast_dtypes(casts: object) -> list[tuple[str, str]]:
    """Return the dtypes before and after each conversion of a row's ``cast``, without conversions of devices."""
    pairs = re.findall(r"(\w+) -> (\w+)", str(casts or ""))
    return [pair for pair in pairs if all(isinstance(getattr(torch, name, None), torch.dtype) for name in pair)]
