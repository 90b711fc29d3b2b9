"""What of a whole its parts cover: a fused projection's q, k and v."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from graftlab.layouts import Layout, join_parts


def uncovered(layouts: Iterable[Layout], shape: Sequence[int]) -> Tensor | None:
    """A mask of the elements of a whole of this shape that none of these layouts takes; None where all are taken."""
    ones = torch.ones(tuple(shape), dtype=torch.bool)
    known = join_parts([(layout, [layout.local(ones)]) for layout in layouts], shape).known
    return None if known is None else ~known


def fills(layout: Layout, gap: Tensor) -> bool:
    """Whether a part lies in what others leave uncovered, all of it."""
    return bool(layout.local(gap).all())
