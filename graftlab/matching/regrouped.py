"""Finds by value how the ranks' parts of a fused dimension lie in the whole, as where each rank has its q, k and v."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from graftlab.errors import LayoutError
from graftlab.layouts.regroup import Regroup
from graftlab.layouts.steps import StepContext

# More blocks than these are no fused parts.
_MOST_BLOCKS = 8
# Rows of fewer numbers may be equal by chance.
_LEAST = 4


def regrouped(whole: Tensor, held: Sequence[Tensor], limit: float) -> Regroup | None:
    """The step that puts a whole tensor into the order in which these ranks have it; None if there is none.

    ``limit`` is how far equal rows may be apart (rel_l2). Parts that follow one another need no such step.
    """
    dim = _cut_dim(whole.shape, [each.shape for each in held])
    if dim is None:
        return None
    rows, *parts = (_rows(each, dim) for each in (whole, *held))
    if rows.shape[1] < _LEAST:
        return None
    lengths, starts = _blocks(rows, parts[0], limit)
    if len(lengths) < 2:
        return None
    firsts = [starts]
    for part in parts[1:]:
        found = _starts(rows, part, lengths, limit)
        if found is None:
            return None
        firsts.append(found)
    # Ranks that have the same part of a block are neighbours.
    replicas = [sum(each[place] == starts[place] for each in firsts) for place in range(len(lengths))]
    extents = [length * len(held) // count for length, count in zip(lengths, replicas, strict=True)]
    unit = math.gcd(*extents)
    if sum(extents) != len(rows):
        return None
    try:
        step = Regroup(dim, len(held), tuple(each // unit for each in extents), tuple(replicas))
        made = step.get(whole, StepContext())
    except LayoutError:
        return None
    return step if _near(_rows(made, dim), torch.cat(parts), limit) else None


def with_dim(step: Regroup, shape: Sequence[int], held: Sequence[int]) -> Regroup | None:
    """The same step for tensors of these shapes, the whole's and a rank's; None if they are not cut so."""
    dim = _cut_dim(shape, [held] * step.ranks)
    return None if dim is None else Regroup(dim, step.ranks, step.blocks, step.replicas)


def _cut_dim(whole: Sequence[int], held: Sequence[Sequence[int]]) -> int | None:
    """The only dimension in which these shapes differ, if the ranks together have at least the whole."""
    if len(held) < 2 or any(tuple(each) != tuple(held[0]) or len(each) != len(whole) for each in held):
        return None
    dims = [dim for dim, (one, other) in enumerate(zip(whole, held[0], strict=True)) if one != other]
    if len(dims) != 1 or not held[0][dims[0]] < whole[dims[0]] <= held[0][dims[0]] * len(held):
        return None
    return dims[0]


def _rows(tensor: Tensor, dim: int) -> Tensor:
    return tensor.movedim(dim, 0).flatten(1).double() if tensor.dim() > 1 else tensor.double()[:, None]


def _blocks(rows: Tensor, part: Tensor, limit: float) -> tuple[list[int], list[int]]:
    """The lengths of the runs of rows of the whole that follow one another in a rank's part, and their first rows."""
    lengths: list[int] = []
    starts: list[int] = []
    place = 0
    while place < len(part):
        start = _place_of(rows, part[place], limit)
        if start is None or len(lengths) == _MOST_BLOCKS:
            return [], []
        count = min(len(rows) - start, len(part) - place)
        equal = _are_near(rows[start : start + count], part[place : place + count], limit)
        length = count if bool(equal.all()) else int((~equal).nonzero()[0])
        lengths.append(length)
        starts.append(start)
        place += length
    return lengths, starts


def _starts(rows: Tensor, part: Tensor, lengths: Sequence[int], limit: float) -> list[int] | None:
    """The first rows, in the whole, of the runs of these lengths in another rank's part."""
    starts: list[int] = []
    place = 0
    for length in lengths:
        start = _place_of(rows, part[place], limit)
        if start is None:
            return None
        starts.append(start)
        place += length
    return starts


def _place_of(rows: Tensor, row: Tensor, limit: float) -> int | None:
    """The first row of the whole that is equal to this one; None if none is, or if it is all zeros."""
    equal = _are_near(rows, row.expand_as(rows), limit)
    return int(equal.nonzero()[0]) if bool(row.any()) and bool(equal.any()) else None


def _are_near(one: Tensor, other: Tensor, limit: float) -> Tensor:
    near: Tensor = (one - other).norm(dim=1) <= limit * other.norm(dim=1)
    return near


def _near(one: Tensor, other: Tensor, limit: float) -> bool:
    return one.shape == other.shape and bool((one - other).norm() <= limit * other.norm())
