"""Hints at caches: rows of a tensor that were not computed in this call, or are in a wrong place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from graftlab.base.text import spans
from graftlab.verdict.hints import Hint

_SAME = 1e-5
_COARSE_SAME = 1e-2
# A row that was only rounded, as in an 8-bit cache, was computed in this call.
_ANOTHER = 0.25
_PROBES = 4
_MOST_ROWS = 16_384


def stale_rows(baseline: Tensor, target: Tensor, before: Mapping[str, Tensor]) -> Hint | None:
    """A hint if differing rows are another call's, found from the values of earlier taps that agree; otherwise None.

    A tensor is taken for a cache if some of its rows, along any dimension, are those of an earlier tap, which feeds it,
    and others are not. Then differing rows come from an earlier call, or are this call's in a wrong place.
    """
    if baseline.shape != target.shape or not (baseline.is_floating_point() and target.is_floating_point()):
        return None
    for name, source in before.items():
        for dim in range(baseline.dim() - 1):
            if (text := _in_rows(baseline, target, name, source, dim)) is not None:
                return Hint(text, 1.0)
    return None


def _in_rows(baseline: Tensor, target: Tensor, name: str, source: Tensor, dim: int) -> str | None:
    ours, theirs = (_rows(each, dim) for each in (baseline, target))
    same = _SAME if baseline.dtype in (torch.float32, torch.float64) else _COARSE_SAME
    sizes = ours.norm(dim=1)
    off = (theirs - ours).norm(dim=1)
    wrong = (off > same * sizes).nonzero().flatten()
    if not 1 < len(ours) <= _MOST_ROWS or not len(wrong) or len(wrong) == len(ours):
        return None
    if bool((off[wrong] <= _ANOTHER * sizes[wrong]).any()):
        return None
    for fed in _rows_of_size(source, ours.shape[1]):
        computed = _places(ours, fed, same)
        if not 0 < int((computed >= 0).sum()) < len(ours):
            continue
        held = _places(theirs[wrong], ours, same)
        fresh = _places(theirs[wrong], fed, same) >= 0
        rows = f"{'indices' if len(wrong) > 1 else 'index'} {spans(wrong.tolist())} of dim {dim}"
        moved = ", ".join(
            f"index {place} holds what the baseline has at {other}"
            for place, other in zip(wrong.tolist(), held.tolist(), strict=True)
            if other >= 0
        )
        if bool(fresh.all()):
            if not moved:
                # The baseline has them nowhere, so they may be in their place and computed differently.
                continue
            return f"{rows} holds a row of this call in a wrong place ({moved}), a wrongly indexed cache: {name} agrees"
        if not bool(fresh.any()):
            found = f" ({moved})" if moved else ""
            return (
                f"{rows} {'were' if len(wrong) > 1 else 'was'} not computed in this call{found}, a stale or wrongly "
                f"indexed cache: {name}, which feeds it, agrees"
            )
    return None


def _rows(tensor: Tensor, dim: int) -> Tensor:
    return tensor.detach().double().movedim(dim, 0).flatten(1)


def _rows_of_size(source: Tensor, size: int) -> Iterator[Tensor]:
    """The rows of a tensor along each dimension that gives rows of this size."""
    for dim in range(source.dim()):
        if source.shape[dim] <= _MOST_ROWS and source.numel() == source.shape[dim] * size:
            yield _rows(source, dim)


def _places(rows: Tensor, others: Tensor, same: float) -> Tensor:
    """For each row the place of an equal one among ``others``, or -1."""
    probes = torch.randn(
        rows.shape[1], _PROBES, generator=torch.Generator().manual_seed(0), dtype=torch.float64, device="cpu"
    )
    finite = rows.nan_to_num(), others.nan_to_num()
    nearest = torch.cdist(finite[0] @ probes, finite[1] @ probes).argmin(dim=1)
    equal = (rows - others[nearest]).norm(dim=1) <= same * others[nearest].norm(dim=1)
    # Rows of zeros are places that are not filled yet.
    return torch.where(equal & (rows.norm(dim=1) > 0), nearest, -1)
