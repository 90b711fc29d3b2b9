"""How the numbers of a tensor lie in memory, asked in words that a tracer follows.

It must neither sort nor guard on a size that only the data gives: what a graph cannot know counts as false.
"""

from __future__ import annotations

import torch


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether one number stands in several places: the tensor is expanded, or made of windows that overlap."""
    steps = _steps(tensor)
    for place, (extent, stride) in enumerate(steps):
        if _is_true(stride == 0):
            return True
        for other, (_, wider) in enumerate(steps):
            if other != place and _is_true(stride <= wider) and _is_true(wider <= (extent - 1) * stride):
                return True
    return False


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether there is no gap between the numbers of a tensor that does not overlap itself."""
    reach = 1
    for extent, stride in _steps(tensor):
        reach = reach + (extent - 1) * stride
    return _is_true(reach == tensor.numel())


def _steps(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Extent and stride of each dimension that has more than one place."""
    return [(n, stride) for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if not _is_true(n <= 1)]


def _is_true(condition: bool) -> bool:
    # Not above, as it loads sympy, which whoever traces has loaded.
    from torch.fx.experimental import symbolic_shapes

    # A tracer follows hasattr, and no ImportError.
    if hasattr(symbolic_shapes, "guard_or_false"):
        return symbolic_shapes.guard_or_false(condition)
    # Torch 2.6, whose tracer follows an `if` where a size is not known, and no bool().
    if condition:  # noqa: SIM103
        return True
    return False
