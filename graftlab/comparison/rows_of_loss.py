"""Which rows of a model's result a loss reads, such as tokens, and with which weights, from the gradients it gives."""

from __future__ import annotations

import math

import torch

from graftlab.base.text import spans
from graftlab.diffs.rounding import assumed_floor
from graftlab.ranks.held_update import TensorSample

# The share of a row's gradient that its own factor may leave unexplained.
_UNEXPLAINED = 1e-3
# How many times less that must be than what one factor for all rows leaves.
_BETTER = 10.0
# A row with less than this part of the usual gradient may be zero on the other side by rounding.
_OF_USUAL = 1e-3


def rows_of_loss(place: str, baseline: TensorSample, target: TensorSample) -> str:
    """A sentence on the rows (last dim) that one side's loss alone reads, or weights by factors of their own.

    ``place`` is that of the result. Both samples are of gradients of one shape. Blank if the rows are too many for a
    sample to show each, or if neither is the case.
    """
    norms = _norms_of_rows(baseline, target)
    if norms is None:
        return ""
    ours, theirs = norms
    lone = [_read_alone(ours, theirs), _read_alone(theirs, ours)]
    if any(bool(each.any()) for each in lone):
        return _in_words(place, [*baseline.shape[:-1]], ours != 0, theirs != 0, [int(each.sum()) for each in lone])
    return _of_factors(place, baseline, target, baseline.places // baseline.shape[-1], len(ours))


def reads_other_rows(baseline: TensorSample, target: TensorSample) -> bool:
    """Whether one side's loss alone reads some rows (last dim), by samples of gradients of one shape; False too if the
    rows are too many for a sample to show each.
    """
    norms = _norms_of_rows(baseline, target)
    return norms is not None and any(bool(_read_alone(*each).any()) for each in (norms, norms[::-1]))


def _norms_of_rows(baseline: TensorSample, target: TensorSample) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Both sides' norms of each row; None if the samples do not show each."""
    *extents, width = baseline.shape or (0,)
    count = math.prod(extents)
    if not extents or count < 2 or any("complex" in each.dtype for each in (baseline, target)):
        return None
    rows = baseline.places // width
    if len({*rows.tolist()}) < count:
        return None
    ours, theirs = (_sums(each.values.square(), rows, count).sqrt() for each in (baseline, target))
    return ours, theirs


def _sums(values: torch.Tensor, rows: torch.Tensor, count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.float64, device="cpu").index_add_(0, rows, values)


def _read_alone(norms: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """The rows with a gradient of usual size here, and none on the other side."""
    read = norms[norms != 0]
    return (
        (others == 0) & (norms > _OF_USUAL * read.median()) if len(read) else torch.zeros_like(norms, dtype=torch.bool)
    )


def _in_words(place: str, extents: list[int], ours: torch.Tensor, theirs: torch.Tensor, lone: list[int]) -> str:
    for dim in range(len(extents)):
        others = [each for each in range(len(extents)) if each != dim]
        mine, other = (
            read.reshape(extents).movedim(dim, 0).flatten(1).any(1) if others else read for read in (ours, theirs)
        )
        if not torch.equal(mine, other):
            where = [spans(each.nonzero().flatten().tolist()) or "none" for each in (mine, other)]
            return (
                f"Along dim {dim} of {place} the baseline's loss reads {where[0]}, and the target's {where[1]}: its "
                "positions or its mask differ."
            )
    return (
        f"Of {len(ours)} rows (last dim) of {place} the loss reads {lone[0]} on the baseline alone, and {lone[1]} on "
        "the target alone: its mask differs, or the labels that it ignores."
    )


def _of_factors(place: str, baseline: TensorSample, target: TensorSample, rows: torch.Tensor, count: int) -> str:
    squares = _sums(baseline.values.square(), rows, count)
    products = _sums(baseline.values * target.values, rows, count)
    read = squares > 0
    factors = torch.where(read, products / squares.clamp_min(1e-300), torch.zeros_like(squares))
    left = float((target.values - factors[rows] * baseline.values).norm())
    square = float(squares.sum())
    # What one factor for all rows leaves.
    apart = float((target.values - float(products.sum()) / square * baseline.values).norm()) if square else 0.0
    limit = max(_UNEXPLAINED, assumed_floor([baseline.dtype, target.dtype])[0]) * float(target.values.norm())
    if not (left <= limit < apart and left <= apart / _BETTER):
        return ""
    low, high = (float(each) for each in (factors[read].min(), factors[read].max()))
    return (
        f"Each row (last dim) of {place} has its own factor there ({low:.4g} to {high:.4g} times the baseline's): the "
        "loss weights rows, such as tokens, differently."
    )
