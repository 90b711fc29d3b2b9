"""Results whose rows are in different orders on the two sides, such as those of a packed batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from graftlab.base.tensor_bytes import real_parts
from graftlab.comparison.answers import is_beyond_rounding
from graftlab.diffs.results import compare_named, is_written
from graftlab.ranks.call_description import CallDescription
from graftlab.verdict.returned_values import nearest_rows

# The largest product of both sides' numbers of rows with which results are compared row by row.
_MOST_ROW_PAIRS = 1 << 24
# Rows further apart than this (rel_l2) are not the same to rounding; of fewer numbers they may be near by chance.
_NEAR = 0.1
_LEAST_WIDTH = 8


def have_equal_rows(baseline: Sequence[CallDescription], target: Sequence[CallDescription], threshold: float) -> bool:
    """Whether the results have equal rows on both sides, in any order; False if that is unknown.

    If one side has fewer rows, as without padding, the other must have all of them.
    """
    if len(baseline) != 1 or len(target) != 1:
        return False
    ours, theirs = _with_equal_names(*_without_state_of_one(baseline[0].plain, target[0].plain))
    if ours.keys() != theirs.keys() or not ours:
        return False
    for path, tensor in ours.items():
        one, other = _rows_of(tensor), _rows_of(theirs[path])
        if one.shape[1] != other.shape[1] or len(one) * len(other) > _MOST_ROW_PAIRS:
            return False
        if len(one) > len(other):
            one = one[nearest_rows(other, one)]
        elif len(other) > len(one):
            other = other[nearest_rows(one, other)]
        sorted_rows = {path: _in_one_order(one)}, {path: _in_one_order(other)}
        differences = compare_named(*sorted_rows).differences
        if not differences or any(is_beyond_rounding(each, threshold) for each in differences):
            return False
    return True


def have_no_near_rows(baseline: Sequence[CallDescription], target: Sequence[CallDescription]) -> bool:
    """Whether no row of the baseline's results is near any of the target's, in as many rows, on any of its ranks.

    Then they differ in whatever order the rows are.
    """
    if len(baseline) != 1 or not target:
        return False
    return all(_have_no_near_rows(baseline[0].returned, each.returned) for each in target)


def _have_no_near_rows(baseline: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> bool:
    ours, theirs = _with_equal_names(baseline, target)
    found = False
    for path, tensor in ours.items():
        other = theirs.get(path)
        if other is None or not tensor.is_floating_point():
            continue
        one, two = _rows_of(tensor).double(), _rows_of(other).double()
        is_wide = one.shape == two.shape and one.shape[1] >= _LEAST_WIDTH and len(one) > 0
        if not is_wide or len(one) ** 2 > _MOST_ROW_PAIRS or not bool(one.isfinite().all() and two.isfinite().all()):
            return False
        if bool((torch.cdist(one, two) <= _NEAR * one.norm(dim=1, keepdim=True)).any()):
            return False
        found = True
    return found


def _without_state_of_one(*sides: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Both results without the state that one side alone writes, or in another size, such as a paged cache."""
    one, other = sides
    alike = {path for path, each in one.items() if path in other and each.numel() == other[path].numel()}
    for values in sides:
        yield {path: each for path, each in values.items() if path in alike or not is_written(path)}


def _with_equal_names(
    baseline: Mapping[str, Tensor], target: Mapping[str, Tensor]
) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
    """Both results; of a bare tensor that the target returns, and the one value of the baseline with rows as wide."""
    returned = [path for path in target if not is_written(path)]
    if len(returned) != 1 or returned[0] in baseline:
        return baseline, target
    found = target[returned[0]]
    wide = {
        path: each
        for path, each in baseline.items()
        if not is_written(path) and each.dim() > 1 and each.shape[-1:] == found.shape[-1:]
    }
    return (wide, dict.fromkeys(wide, found)) if found.dim() > 1 and len(wide) == 1 else (baseline, target)


def _rows_of(tensor: Tensor) -> Tensor:
    tensor = tensor if tensor.layout == torch.strided else tensor.to_dense()
    rows = tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() > 1 else tensor.reshape(-1, 1)
    return real_parts(rows).flatten(1)


def _in_one_order(rows: Tensor) -> Tensor:
    """The rows, sorted by their sums under random weights, in their own dtype."""
    weights = torch.randn(rows.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64, device="cpu")
    return rows[(rows.double() @ weights).argsort()]
