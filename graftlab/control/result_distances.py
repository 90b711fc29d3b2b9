"""How far what two sides return is apart, and how far rounding alone takes it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graftlab.errors import SessionError

Results = list[list[torch.Tensor]]
"""The tensors of a result, for each rank."""


@dataclass(frozen=True)
class ResultFloor:
    """What rounding alone does to the eager result, each as rel_l2 on the ranks where it is farthest."""

    moved: float
    """With each tap moved by one unit in its last place."""
    exact: float
    """From the same in float64; NaN where that could not be had, infinite where only one of them is finite."""
    unit: float
    """The unit in the last place of the results' own dtype."""
    in_float64: Results
    error: str | None
    """Why the function does not run in float64."""

    @property
    def rel_l2(self) -> float:
        parts = [each for each in (self.moved, self.exact) if math.isfinite(each)]
        return max(math.hypot(*parts), self.unit)


def tensors_of(result: Any) -> list[torch.Tensor]:
    """The tensors and numbers of a result, in its order."""
    return list(_tensors(result))


def _tensors(result: Any) -> Iterable[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, (int, float)):
        yield torch.tensor(result, dtype=torch.float64)
    elif isinstance(result, Mapping):
        for each in result.values():
            yield from _tensors(each)
    elif isinstance(result, (list, tuple)):
        for each in result:
            yield from _tensors(each)


def distance(expected: Results, found: Results) -> float:
    """The largest rel_l2 between a baseline's results and those of another run.

    NaN where there are none, or not one number of any is finite in both.

    Raises :class:`SessionError` where it is not known whose belong together.
    """
    if not any(expected) and not any(found):
        return math.nan
    if len(expected) != len(found) and len(expected) > 1:
        raise SessionError(
            f"compare_compiled: {len(expected)} baseline ranks return results and {len(found)} target ranks, "
            f"so whose belong together is not known; launch as many on both sides, or one as the baseline"
        )
    pairs = zip(expected if len(expected) > 1 else expected * len(found), found, strict=True)
    return _largest(_farthest(one, other) for one, other in pairs)


def unit_of(*results: Results) -> float:
    """The coarsest unit in the last place that these results have."""
    return max((_unit(tensor) for ranks in results for tensors in ranks for tensor in tensors), default=0.0)


def _farthest(expected: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> float:
    if len(expected) != len(found):
        return math.inf
    return _largest(_rel_l2(one, other) for one, other in zip(expected, found, strict=True))


def _largest(distances: Iterable[float]) -> float:
    """The largest that was measured; NaN where none was, and 0 where there was nothing to measure."""
    known = list(distances)
    return max((each for each in known if not math.isnan(each)), default=math.nan if known else 0.0)


def _unit(tensor: torch.Tensor) -> float:
    return torch.finfo(tensor.dtype).eps if tensor.dtype.is_floating_point else 0.0


def _rel_l2(expected: torch.Tensor, found: torch.Tensor) -> float:
    if expected.shape != found.shape:
        return math.inf
    one, other = expected.double(), found.double()
    finite = one.isfinite()
    if not torch.equal(finite, other.isfinite()) or not torch.allclose(one[~finite], other[~finite], equal_nan=True):
        return math.inf
    if finite.numel() and not finite.any():
        return math.nan
    one, other = one.nan_to_num(0, 0, 0), other.nan_to_num(0, 0, 0)
    difference, size = float((one - other).norm()), float(one.norm())
    return difference / size if size else (0.0 if difference == 0 else math.inf)
