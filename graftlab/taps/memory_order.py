"""How a tensor's elements lie in memory, computed in a way that a tracer can follow.

This must neither sort nor guard on data-dependent sizes: a condition that a graph cannot know counts as false.
"""

from __future__ import annotations

import torch


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether several elements share one number in memory: the tensor is expanded, or has overlapping windows."""
    steps = _steps(tensor)
    for place, (extent, stride) in enumerate(steps):
        if _is_true(stride == 0):
            return True
        for other, (_, wider) in enumerate(steps):
            if other != place and _is_true(stride <= wider) and _is_true(wider <= (extent - 1) * stride):
                return True
    return False


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor that does not overlap itself has no gaps in memory."""
    reach = 1
    for extent, stride in _steps(tensor):
        reach = reach + (extent - 1) * stride
    return _is_true(reach == tensor.numel())


def _steps(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Return extent and stride of each dimension with more than one element."""
    return [(n, stride) for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if not _is_true(n <= 1)]


def _is_true(condition: bool) -> bool:
    # Imported here because it loads sympy, which is already loaded when code is traced.
    from torch.fx.experimental import symbolic_shapes

    # A tracer can follow hasattr, but not an ImportError.
    if hasattr(symbolic_shapes, "guard_or_false"):
        return symbolic_shapes.guard_or_false(condition)
    # The tracer of torch 2.6 can follow an `if` on an unknown size, but not bool().
    if condition:  # noqa: SIM103
        return True
    return False
