"""Distributions and sampled points of a pair of tensors, read block by block on the tensors' own device."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from graftlab.base.tensor_bytes import copyable
from graftlab.diffs.maps import Array, Index, blocks, check_pair, working_dtype


@dataclass(frozen=True)
class Distributions:
    """How the finite values of a pair are distributed, and how large their differences are.

    ``baseline`` and ``target`` count values in the shared bins between ``edges``. Of the ``pairs`` of two finite
    values, ``equal`` are equal; ``above`` and ``below`` count those with target > baseline and target < baseline
    in bins of log10 |target - baseline| between ``magnitude_edges`` (complex values: all in ``above``).
    ``mean`` and ``std`` are those of target - baseline.
    """

    edges: Array
    baseline: Array
    target: Array
    magnitude_edges: Array
    above: Array
    below: Array
    equal: int
    pairs: int
    mean: float
    std: float
    nonfinite_baseline: int
    nonfinite_target: int
    nonfinite_differ: int


@dataclass(frozen=True)
class Sample:
    """Finite points of a pair as float64 arrays. The last ``worst`` of them differ most, the worst of all first."""

    baseline: Array
    target: Array
    worst: int
    worst_index: Index | None
    numel: int
    nonfinite: int
    nonfinite_differ: int


def _magnitude(block: Tensor) -> Tensor:
    return block.abs() if block.is_complex() else block


def _nonfinite_differ(x: Tensor, y: Tensor) -> int:
    """The number of pairs with a non-finite value that are not equal; NaN equals NaN."""
    finite = torch.isfinite(x) & torch.isfinite(y)
    return int((~finite & (x != y) & ~(torch.isnan(x) & torch.isnan(y))).sum())


def _differences(x: Tensor, y: Tensor) -> Tensor:
    """y - x, or its magnitude for complex values, of the pairs of two finite values, in one dimension."""
    difference = (y - x).abs() if x.is_complex() else y - x
    low, high = torch.aminmax(difference)
    if bool(torch.isfinite(low) & torch.isfinite(high)):
        return difference.reshape(-1)
    limit = torch.finfo(difference.dtype).max  # two finite values can be further apart than their dtype reaches
    return difference[torch.isfinite(x) & torch.isfinite(y)].clamp(-limit, limit)


def _finite(values: Tensor) -> Tensor:
    flat = values.reshape(-1)
    low, high = torch.aminmax(flat)
    return flat if bool(torch.isfinite(low) & torch.isfinite(high)) else flat[torch.isfinite(flat)]


def _log_size(difference: Tensor) -> Tensor:
    """log10 of the size of every difference that is not 0."""
    return difference[difference != 0].abs().log10()


class _Range:
    """The smallest and the largest value seen."""

    def __init__(self) -> None:
        self.low, self.high = math.inf, -math.inf

    def add(self, values: Tensor) -> None:
        if values.numel():
            low, high = torch.aminmax(values)
            self.low, self.high = min(self.low, float(low)), max(self.high, float(high))

    def edges(self, bins: int) -> Array:
        low, high = (0.0, 0.0) if self.low > self.high else (self.low, self.high)
        if low == high:
            room = abs(low) / 2 or 0.5
            low, high = low - room, high + room
        return np.linspace(low, high, bins + 1)


def _count(values: Tensor, edges: Array) -> Array:
    # On the CPU, because histc on CUDA raises under torch.use_deterministic_algorithms.
    low, high = float(edges[0]), float(edges[-1])
    return torch.histc(values.cpu().clamp(low, high), len(edges) - 1, low, high).numpy().astype(np.int64)


@torch.no_grad()
def distributions(baseline: Tensor, target: Tensor, *, bins: int = 120) -> Distributions:
    """Histogram both tensors' finite values and the size of their differences, reading each block twice.

    Complex values count by magnitude, their difference by its own. Raises as `difference_map`.
    """
    check_pair(baseline, target)
    # A quarter of the range, so that neither the bins nor histc overflow; what is beyond lands in the last bin.
    limit = torch.finfo(working_dtype(baseline, target)).max / 4
    ranges = [_Range(), _Range()]
    bad = [0, 0]
    total = squares = 0.0
    differing = pairs = unequal = 0
    for x, y, _ in blocks(baseline, target):
        unequal += _nonfinite_differ(x, y)
        difference = _differences(x, y)
        kept = [_finite(_magnitude(block)) for block in (x, y)]
        bad = [count + x.numel() - values.numel() for count, values in zip(bad, kept, strict=True)]
        for values in kept:
            ranges[0].add(values.clamp(-limit, limit))
        ranges[1].add(_log_size(difference))
        total += float(difference.sum(dtype=torch.float64))
        squares += float(difference.to(torch.float64).square_().sum())
        differing += int(torch.count_nonzero(difference))
        pairs += difference.numel()
    edges, magnitude_edges = ranges[0].edges(bins), ranges[1].edges(bins // 2)
    counts = [np.zeros(size, dtype=np.int64) for size in (bins, bins, bins // 2, bins // 2)]
    for x, y, _ in blocks(baseline, target):
        difference = _differences(x, y)
        counts[0] += _count(_finite(_magnitude(x)), edges)
        counts[1] += _count(_finite(_magnitude(y)), edges)
        counts[2] += _count(_log_size(difference[difference > 0]), magnitude_edges)
        counts[3] += _count(_log_size(difference[difference < 0]), magnitude_edges)
    mean = total / pairs if pairs else math.nan
    return Distributions(
        edges=edges,
        baseline=counts[0],
        target=counts[1],
        magnitude_edges=magnitude_edges,
        above=counts[2],
        below=counts[3],
        equal=pairs - differing,
        pairs=pairs,
        mean=mean,
        std=math.sqrt(max(0.0, squares / pairs - mean * mean)) if pairs else math.nan,
        nonfinite_baseline=bad[0],
        nonfinite_target=bad[1],
        nonfinite_differ=unequal,
    )


@torch.no_grad()
def sample(baseline: Tensor, target: Tensor, *, points: int = 20_000) -> Sample:
    """At most ``points`` finite pairs: the worst tenth by ``|x - y|`` without exception, the others at random.

    A tensor of at most ``points`` elements is kept whole. The draw is the same every time and leaves the
    global generators alone. Raises as `difference_map`.
    """
    check_pair(baseline, target)
    numel, shape = baseline.numel(), tuple(baseline.shape) or (1,)
    keep = max(1, min(points, numel) // 10)
    worst, sizes = np.zeros(0, dtype=np.int64), np.zeros(0)
    threshold, nonfinite, unequal = 0.0, 0, 0
    for x, y, tile in blocks(baseline, target):
        usable = (torch.isfinite(x) & torch.isfinite(y)).reshape(-1)
        nonfinite += usable.numel() - int(usable.sum())
        unequal += _nonfinite_differ(x, y)
        diff = (x - y).abs().reshape(-1).masked_fill_(~usable, -1.0)
        if float(diff.amax()) <= threshold:
            continue
        top = torch.topk(diff, min(keep, diff.numel()))
        found = top.values.cpu().double().numpy()
        place = np.unravel_index(top.indices.cpu().numpy()[found > threshold], tuple(x.shape))
        flat = np.ravel_multi_index([part + cut.start for part, cut in zip(place, tile, strict=True)], shape)
        worst, sizes = np.concatenate([worst, flat]), np.concatenate([sizes, found[found > threshold]])
        best = np.argsort(-sizes, kind="stable")[:keep]
        worst, sizes = worst[best], sizes[best]
        threshold = float(sizes[-1]) if len(sizes) == keep else 0.0
    # Not strided: a stride that divides a row would show a few columns only.
    drawn = np.arange(numel) if numel <= points else np.random.default_rng(0).integers(numel, size=points - keep)
    index = np.concatenate([np.setdiff1d(drawn, worst), worst])
    xs, ys = (_gather(tensor, index, shape) for tensor in (baseline, target))
    finite = np.isfinite(xs) & np.isfinite(ys)
    at = np.unravel_index(int(worst[0]), shape)[: baseline.ndim] if len(worst) else None
    return Sample(
        baseline=xs[finite],
        target=ys[finite],
        worst=len(worst),
        worst_index=None if at is None else tuple(int(i) for i in at),
        numel=numel,
        nonfinite=nonfinite,
        nonfinite_differ=unequal,
    )


def _gather(tensor: Tensor, index: Array, shape: tuple[int, ...]) -> Array:
    places = torch.unravel_index(torch.from_numpy(index).to(tensor.device), shape)
    # Torch 2.6 cannot index float8.
    values = copyable(tensor.detach().reshape(shape))[places].view(tensor.dtype).cpu().to(working_dtype(tensor))
    return np.asarray(_magnitude(values).to(torch.float64).numpy())
