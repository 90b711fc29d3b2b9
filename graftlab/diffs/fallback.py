"""Measure tensors by torch operations, if the compiled kernel is missing or does not support them.

On CUDA `triton_kernel` measures instead, where possible, and this module combines its partial results.

Everything is computed in float64, block by block. The results of all blocks are fetched at once, so that a device is
synchronized only once; values whose squares exceed float64 take a second pass, scaled by a power of two.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import math
import os
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import torch

from graftlab.diffs.statistics import DiffStats

logger = logging.getLogger(__name__)

CPU_BLOCK = 1 << 17
"""Elements measured at once on the CPU: the intermediate results fit into a large cache."""

DEVICE_BLOCK = 1 << 24
"""The same on other devices, where each operation costs a kernel launch."""

# Within these magnitudes squares, and products of two sums of squares, stay within float64's range.
_SMALLEST, _LARGEST = 2.0**-200, 2.0**200

Block = tuple[torch.Tensor, torch.Tensor]


class _Scale(NamedTuple):
    """The powers of two by which both tensors and their difference are divided before they are squared."""

    x: int = 0
    y: int = 0
    difference: int = 0


class _TensorMoments(NamedTuple):
    """Statistics of one of the tensors, over the finite pairs."""

    low: float
    high: float
    mean: float
    std: float
    squares: float


class _Total(NamedTuple):
    """``squares`` is that of the difference, ``place`` the position of the largest; all but low and high are scaled."""

    x: _TensorMoments
    y: _TensorMoments
    max_abs: float
    mean_abs: float
    squares: float
    product: float
    place: int


def measure(x: torch.Tensor, y: torch.Tensor) -> DiffStats:
    """Measure two tensors of one dimension, of the same length, at least one, on one device."""
    size = CPU_BLOCK if x.is_cpu else DEVICE_BLOCK
    x, y = x.detach(), y.detach()
    blocks = [(x[at : at + size], y[at : at + size]) for at in range(0, x.numel(), size)]
    parts, scale = _parts(x, y, blocks, _Scale()), _Scale()
    nonfinite = _nonfinite(parts)
    if not any(part["pairs"] for part in parts):
        return DiffStats(numel=x.numel(), **nonfinite)  # type: ignore[arg-type]
    total = _total(parts)
    ends = [max(abs(side.low), abs(side.high)) for side in (total.x, total.y)]
    needed = _Scale(*(_exponent(magnitude) for magnitude in (*ends, total.max_abs)))
    if needed != scale:
        total, scale = _total(_parts(x, y, blocks, needed)), needed
    return _statistics(total, scale, x.numel(), nonfinite)


def _parts(x: torch.Tensor, y: torch.Tensor, blocks: Sequence[Block], scale: _Scale) -> list[dict[str, float]]:
    """Measure each part of both tensors. ``place`` counts from the tensors' first element."""
    fused = _fused_kernel(x.device.type)
    if fused is not None and not _failed and fused.takes(x, y):
        try:
            found: list[dict[str, float]] = fused.measure(x, y, _factors(scale))
            return found
        except Exception as error:  # it is compiled at the first call, which may lack requirements
            _failed.append(error)
            logger.warning(
                "tensors on %s are measured by several torch operations from now on, slower, because the Triton "
                "kernel failed: %s: %s",
                x.device,
                type(error).__name__,
                error,
            )
    return _measure_blocks(blocks, scale)


_failed: list[Exception] = []


@functools.cache
def _fused_kernel(device: str) -> ModuleType | None:
    """Return the fused Triton kernel, if Triton is installed, as with torch's CUDA builds."""
    if device != "cuda" and os.environ.get("TRITON_INTERPRET", "0") != "1":
        return None
    if importlib.util.find_spec("triton") is None:
        logger.warning(
            "tensors on %s are measured by several torch operations, because triton is not installed", device
        )
        return None
    return importlib.import_module("graftlab.diffs.triton_kernel")


def _factors(scale: _Scale) -> list[float] | None:
    if scale == _Scale():
        return None
    before, after = (scale.difference, 0) if scale.difference > 0 else (0, scale.difference)
    return [2.0**-exponent for exponent in (scale.x, scale.y, before, after)]


def _measure_blocks(blocks: Sequence[Block], scale: _Scale) -> list[dict[str, float]]:
    found = [_measure_block(*block, scale) for block in blocks]
    names = list(found[0])
    numbers = torch.stack([torch.stack(list(each.values())) for each in found]).tolist()
    starts = [0]
    for block, _ in blocks:
        starts.append(starts[-1] + block.numel())
    parts = [dict(zip(names, row, strict=True)) for row in numbers]
    return [part | {"place": part["place"] + start} for part, start in zip(parts, starts, strict=False)]


def _nonfinite(parts: Sequence[dict[str, float]]) -> dict[str, int]:
    names = ("nonfinite_baseline", "nonfinite_target", "nonfinite_differ")
    return {name: int(sum(part[name] for part in parts)) for name in names}


def _total(parts: Sequence[dict[str, float]]) -> _Total:
    parts = [part for part in parts if part["pairs"]]
    pairs = int(sum(part["pairs"] for part in parts))
    farthest = max(parts, key=lambda part: part["max_abs"])  # the first of several
    return _Total(
        _side(parts, "x", pairs),
        _side(parts, "y", pairs),
        farthest["max_abs"],
        _sum(part["distances"] for part in parts) / pairs,
        _sum(part["squares"] for part in parts),
        _sum(part["product"] for part in parts),
        int(farthest["place"]),
    )


def _measure_block(x: torch.Tensor, y: torch.Tensor, scale: _Scale) -> dict[str, torch.Tensor]:
    """Measure a block; each result is a 0-d float64 tensor on its device."""
    x, y = x.to(torch.float64), y.to(torch.float64)
    kind_x, kind_y = _kinds(x), _kinds(y)
    gaps = kind_x.bool() | kind_y.bool()
    pairs = x.numel() - gaps.sum(dtype=torch.float64)
    # Large values are scaled before the subtraction, small differences after it.
    before, after = (scale.difference, 0) if scale.difference > 0 else (0, scale.difference)
    differences = _scaled(_scaled(y, before) - _scaled(x, before), after).masked_fill_(gaps, 0.0)
    distances = differences.abs()
    place = distances.masked_fill(gaps, -1.0).argmax()
    found = {
        "pairs": pairs,
        "nonfinite_baseline": kind_x.count_nonzero(),
        "nonfinite_target": kind_y.count_nonzero(),
        "nonfinite_differ": (kind_x != kind_y).sum(),
        "place": place,
        "max_abs": distances[place],
        "distances": distances.sum(),
        "squares": differences.square().sum(),
    }
    filled = {}
    for name, side, exponent in (("x", x, scale.x), ("y", y, scale.y)):
        found[f"low_{name}"] = side.masked_fill(gaps, math.inf).amin()
        found[f"high_{name}"] = side.masked_fill(gaps, -math.inf).amax()
        filled[name] = values = _scaled(side, exponent).masked_fill(gaps, 0.0)
        center = values.sum() / pairs.clamp(min=1)
        # Sums of deviations from the mean stay precise if the spread is small compared with the mean.
        deviations = (values - center).masked_fill_(gaps, 0.0)
        found[f"center_{name}"], found[f"rest_{name}"] = center, deviations.sum()
        found[f"spread_{name}"], found[f"squares_{name}"] = deviations.square().sum(), values.square().sum()
    found["product"] = (filled["x"] * filled["y"]).sum()
    return {name: number.to(torch.float64) for name, number in found.items()}


def _kinds(x: torch.Tensor) -> torch.Tensor:
    """Return 0 for finite elements, and different numbers for NaN and the two infinities."""
    return x.isnan().to(torch.int8) + x.isposinf().to(torch.int8) * 2 + x.isneginf().to(torch.int8) * 3


def _side(parts: Sequence[dict[str, float]], name: str, pairs: int) -> _TensorMoments:
    low, high = min(part[f"low_{name}"] for part in parts), max(part[f"high_{name}"] for part in parts)
    # Means are relative to the first one, so that they stay precise far from zero.
    origin = parts[0][f"center_{name}"]
    means = [part[f"center_{name}"] - origin + part[f"rest_{name}"] / part["pairs"] for part in parts]
    mean = _sum(part["pairs"] * each for part, each in zip(parts, means, strict=True)) / pairs
    spread = _sum(
        part[f"spread_{name}"] - part[f"rest_{name}"] ** 2 / part["pairs"] + part["pairs"] * (each - mean) ** 2
        for part, each in zip(parts, means, strict=True)
    )
    constant = low == high
    return _TensorMoments(
        low,
        high,
        origin + mean,
        0.0 if constant else math.sqrt(max(spread, 0.0) / pairs),
        _sum(part[f"squares_{name}"] for part in parts),
    )


def _statistics(total: _Total, scale: _Scale, numel: int, nonfinite: dict[str, int]) -> DiffStats:
    x, y = total.x, total.y
    if x.squares == 0 or y.squares == 0:
        rel_l2 = 1.0 if x.squares else math.inf if y.squares else 0.0
        rel_diff, cosine = (0.0, 1.0) if x.squares == y.squares else (1.0, 0.0)
    else:
        rel_l2 = _times_two_to(math.sqrt(total.squares / x.squares), scale.difference - scale.x)
        rel_diff = min(_ratio((total.squares, scale.difference), (x.squares, scale.x), (y.squares, scale.y)), 2.0)
        cosine = math.sqrt((total.product / x.squares) * (total.product / y.squares))
        cosine = math.copysign(min(cosine, 1.0), total.product)
    return DiffStats(
        numel=numel,
        rel_l2=rel_l2,
        rel_diff=rel_diff,
        max_abs=_times_two_to(total.max_abs, scale.difference),
        max_abs_index=(total.place,),
        mean_abs=_times_two_to(total.mean_abs, scale.difference),
        cosine=cosine,
        mean_baseline=_times_two_to(x.mean, scale.x) if x.low < x.high else x.low,
        std_baseline=_times_two_to(x.std, scale.x),
        min_baseline=x.low,
        max_baseline=x.high,
        mean_target=_times_two_to(y.mean, scale.y) if y.low < y.high else y.low,
        std_target=_times_two_to(y.std, scale.y),
        min_target=y.low,
        max_target=y.high,
        **nonfinite,
    )


def _ratio(squares: tuple[float, int], one: tuple[float, int], other: tuple[float, int]) -> float:
    """Return ``squares / (one + other)``; each comes with the exponent by which its roots were divided."""
    (top, of_top), *below = (
        (fraction, more + 2 * exponent)
        for (fraction, more), exponent in ((math.frexp(number), exponent) for number, exponent in (squares, one, other))
    )
    most = max(exponent for _, exponent in below)
    return _times_two_to(top / sum(_times_two_to(number, exponent - most) for number, exponent in below), of_top - most)


def _exponent(magnitude: float) -> int:
    """Return the power of two by which to divide before squaring; 0 if squaring is safe."""
    if magnitude == 0 or _SMALLEST <= magnitude <= _LARGEST:
        return 0
    return max(-1000, min(1000, math.frexp(magnitude)[1])) if math.isfinite(magnitude) else 1000


def _scaled(x: torch.Tensor, exponent: int) -> torch.Tensor:
    return x * 2.0**-exponent if exponent else x


def _times_two_to(number: float, exponent: int) -> float:
    try:
        return math.ldexp(number, exponent)
    except OverflowError:
        return math.copysign(math.inf, number)


def _sum(numbers: Sequence[float] | object) -> float:
    """Like math.fsum, but infinite if numbers are too large, which a scaled pass corrects."""
    try:
        return math.fsum(numbers)  # type: ignore[arg-type]
    except (OverflowError, ValueError):
        return math.inf
