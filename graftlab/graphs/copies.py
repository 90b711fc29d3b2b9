"""Copies of many tensors at once, and which dtypes may be copied into which."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# One kernel for many copies. The name is private to torch and may disappear in any release: it is looked up here
# alone, and what takes its place below gives the same result.
foreach_copy: Callable[..., object] | None = getattr(torch, "_foreach_copy_", None)


def copy_all(destinations: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its destination of the same shape.

    All sources share device and dtype, and all destinations do; no source overlaps another's destination.
    """
    # From pageable memory the driver has copied everything when the call returns, so no wait for the device is needed.
    # Pinned memory is read later, when the host may have written the next batch to it; and a copy to the host has to be
    # complete before the host reads it.
    non_blocking = (
        destinations[0].device.type == "cuda"
        and sources[0].device.type == "cpu"
        and not any(source.is_pinned() for source in sources)
    )
    if foreach_copy is not None:
        foreach_copy(destinations, sources, non_blocking)
        return
    for destination, source in zip(destinations, sources, strict=True):
        destination.copy_(source, non_blocking)


@functools.cache
def is_lossless(source: torch.dtype, destination: torch.dtype) -> bool:
    """Whether every number that `source` can hold is the same number in `destination`.

    The dtypes alone decide: whether the numbers of one batch happen to fit cannot be known without waiting for the
    device. So int32 goes into int64, and bfloat16 into float32, but int64 into neither int32 nor float32.
    """
    if source == destination:
        return True
    if destination == torch.bool or (source.is_complex and not destination.is_complex):
        return False
    if destination.itemsize == 1 and destination.is_floating_point:
        # What torch reports for some of these is wrong, such as the eps of float8_e5m2fnuz.
        return False
    try:
        (lowest, highest), (into_lowest, into_highest) = _range(source), _range(destination)
    except (NotImplementedError, TypeError):
        # Bits without a meaning, or quantized: torch does not know how far they reach either.
        return False
    if lowest < into_lowest or highest > into_highest:
        return False
    if _is_integer(source):
        # A significand of p bits holds every integer up to 2**p; eps is 2**(1 - p).
        return _is_integer(destination) or max(-lowest, highest) <= 2 / torch.finfo(destination).eps
    if _is_integer(destination):
        return False
    return torch.finfo(destination).eps <= torch.finfo(source).eps


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex)


def _range(dtype: torch.dtype) -> tuple[float, float]:
    if dtype == torch.bool:
        return 0, 1
    limits = torch.iinfo(dtype) if _is_integer(dtype) else torch.finfo(dtype)
    return limits.min, limits.max
