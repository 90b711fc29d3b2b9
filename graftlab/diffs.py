"""Diff statistics: how far a target tensor is from its baseline, measured in one pass over both.

The pass works in blocks that stay in the cache, and in float32 within a block (float64 for wider dtypes); what the
blocks give is added up in float64. That is fast, and right unless a block holds non-finite values, its squares leave
float32's range, or a sum has nothing left after cancellation (a spread that is small beside the mean, norms far
apart). Such blocks are measured again in float64, scaled and shifted, and added up as exact fractions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import torch

CPU_BLOCK = 1 << 17
"""Elements that are measured at once on the CPU: two inputs and their difference fit in a core's cache."""

DEVICE_BLOCK = 1 << 22
"""The same elsewhere, where each operation costs a kernel launch."""

_Number = float | Fraction
_Blocks = Sequence[tuple[torch.Tensor, torch.Tensor]]
_NAN = math.nan
# Beyond these magnitudes squares, and products of sums of squares, could leave the range of the working dtype.
_SAFE_RANGE = {torch.float32: (2.0**-47, 2.0**63), torch.float64: (2.0**-200, 2.0**200)}
# A mean this many times the spread, or a norm this many times the other, costs the quick sums their last good digits.
_LARGEST_RATIO = 5


@dataclass(frozen=True)
class DiffStats:
    """How far ``y`` (the target) is from ``x`` (the baseline).

    A pair of elements of which either is not finite is counted and left out of all else. Integers and booleans are
    measured as float64 (beyond 2**53 they are rounded), complex tensors as their real and imaginary parts: each
    part is an element of its own everywhere, except that ``numel`` and ``max_abs_index`` are the complex tensor's.

    * ``numel``: elements in each tensor;
    * ``rel_l2``: ``||x - y|| / ||x||``; 0 if nothing differs, inf if only the baseline is zero;
    * ``rel_diff``: ``sum((x - y)**2) / sum(x**2 + y**2)``, from 0 to 2, which is ``1 - 2<x, y> / (|x|**2 + |y|**2)``
      without its cancellation; 0 if both are zero;
    * ``max_abs``, ``max_abs_index``, ``mean_abs``: of ``|x - y|``, and where it is largest (None: nowhere);
    * ``cosine``: ``<x, y> / (||x|| ||y||)``; 1 if both are zero, 0 if one is;
    * ``nonfinite_baseline``, ``nonfinite_target``: how many are nan or infinite; ``nonfinite_differ``: pairs of which
      one is finite and the other not, or that differ in kind (nan, +inf, -inf);
    * ``mean_*``, ``std_*`` (of the population), ``min_*``, ``max_*``: of each tensor.

    Where no pair is finite all statistics are nan. For empty tensors ``cosine`` is 1, what measures a difference is 0,
    and the rest is nan.
    """

    numel: int
    rel_l2: float = _NAN
    rel_diff: float = _NAN
    max_abs: float = _NAN
    max_abs_index: tuple[int, ...] | None = None
    mean_abs: float = _NAN
    cosine: float = _NAN
    nonfinite_baseline: int = 0
    nonfinite_target: int = 0
    nonfinite_differ: int = 0
    mean_baseline: float = _NAN
    std_baseline: float = _NAN
    min_baseline: float = _NAN
    max_baseline: float = _NAN
    mean_target: float = _NAN
    std_target: float = _NAN
    min_target: float = _NAN
    max_target: float = _NAN


def measure(baseline: torch.Tensor, target: torch.Tensor) -> DiffStats:
    """Measure how far ``target`` is from ``baseline``: two tensors of one shape, on one device, of any dtypes.

    Neither is modified and no autograd graph is built; what is not contiguous is copied. Raises ValueError for tensors
    of different shapes or devices and for tensors that are not dense (sparse, quantized, meta); torch itself raises
    NotImplementedError for dtypes of less than a byte.
    """
    _check(baseline, target)
    numel = baseline.numel()
    if numel == 0:
        return DiffStats(0, rel_l2=0.0, rel_diff=0.0, max_abs=0.0, mean_abs=0.0, cosine=1.0)
    x, y = _real_elements(baseline), _real_elements(target)
    narrow = all(tensor.is_floating_point() and tensor.element_size() <= 4 for tensor in (x, y))
    dtype = torch.float32 if narrow else torch.float64
    size = CPU_BLOCK if x.device.type == "cpu" else DEVICE_BLOCK
    chunks = math.ceil(x.numel() / size)
    blocks = [(x, y)] if chunks == 1 else list(zip(x.chunk(chunks), y.chunk(chunks), strict=True))

    # Squares grow with what is squared, and strictly so in floats, so they show the place of the largest as well.
    parts, distance = _measure_quickly(blocks, dtype)
    redone = [not _is_good(part, _SAFE_RANGE[dtype]) for part in parts]
    if any(redone):
        parts = [_measure_exactly(*blocks[i]) if redone[i] else part for i, part in enumerate(parts)]
    total = _add_up(parts)
    if not all(redone) and _is_ill_conditioned(total):
        redone = [True] * len(blocks)
        parts = [_measure_exactly(*block) for block in blocks]
        total = _add_up(parts)
    if total.pairs == 0:
        counts = (total.x.nonfinite, total.y.nonfinite, total.nonfinite_differ)
        return DiffStats(numel, _NAN, _NAN, _NAN, None, _NAN, _NAN, *counts)

    farthest = max(range(len(parts)), key=lambda i: parts[i].max_abs)
    if distance is None or redone[farthest]:
        distance = _distance(*blocks[farthest], dtype, finite=not redone[farthest])
    position = farthest * blocks[0][0].numel() + _place_of_largest(distance)
    if baseline.is_complex():
        position //= 2
    return _statistics(total, numel, _index_in(baseline.shape, position))


def _check(baseline: torch.Tensor, target: torch.Tensor) -> None:
    if baseline.shape != target.shape:
        raise ValueError(
            f"the baseline has shape {list(baseline.shape)} and the target {list(target.shape)}; only tensors of one "
            "shape can be compared, so bring one into the other's shape first"
        )
    if baseline.device != target.device:
        raise ValueError(
            f"the baseline is on {baseline.device} and the target on {target.device}; move one with .to(device) first"
        )
    for side, tensor in (("baseline", baseline), ("target", target)):
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            kind = "quantized" if tensor.is_quantized else "meta" if tensor.is_meta else str(tensor.layout)
            raise ValueError(f"the {side} is {kind}; only dense tensors are measured (.to_dense(), .dequantize())")


def _real_elements(tensor: torch.Tensor) -> torch.Tensor:
    """All elements in one dimension, detached; a complex one becomes two. Copies only what is not contiguous."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj().resolve_neg())
    return tensor.reshape(-1)


# -- what is known of a block, and of all of them ---------------------------------------------------------------------


class _Moments(NamedTuple):
    """Of one side: what its mean, spread, norm and range follow from."""

    low: float
    high: float
    total: _Number
    squares: _Number
    nonfinite: int = 0


class _Part(NamedTuple):
    """The sums over one block, or over all of them. ``product`` is ``sum(x * y)``."""

    pairs: int
    x: _Moments
    y: _Moments
    max_abs: float
    total_abs: _Number
    squares: _Number
    product: _Number
    nonfinite_differ: int = 0


_RESULTS = 11  # of each block, in the order in which `_measure_quickly` finds them


def _measure_quickly(blocks: _Blocks, dtype: torch.dtype) -> tuple[list[_Part], torch.Tensor | None]:
    """Measure blocks of finite, well-behaved values; for an only block, ``(x - y)**2`` comes along."""
    size, device = blocks[0][0].numel(), blocks[0][0].device
    difference = torch.empty(size, dtype=dtype, device=device)
    copy_x, copy_y = (None if side.dtype == dtype else torch.empty_like(difference) for side in blocks[0])
    results: list[torch.Tensor] = []
    for x, y in blocks:
        length = x.numel()
        if copy_x is not None:
            x = copy_x[:length].copy_(x)
        if copy_y is not None:
            y = copy_y[:length].copy_(y)
        for side in (x, y):
            # The range goes first: finding it is slow enough to hide the way of the values from memory to the cache.
            results.extend(torch.aminmax(side))
            results.append(side.sum())
            results.append(torch.dot(side, side))
        distance = torch.sub(y, x, out=difference if length == size else difference[:length]).abs_()
        results.append(distance.amax())
        results.append(distance.sum())
        # No dot product, which adds up naively: |x - y| may well be a constant, whose roundings all point one way.
        results.append(distance.square_().sum())

    # All results of all blocks come over at once, so that a device is waited for once; the CPU needs no such care.
    numbers = [result.item() for result in results] if device.type == "cpu" else torch.stack(results).tolist()
    parts = []
    for i, block in enumerate(blocks):
        row = numbers[i * _RESULTS : (i + 1) * _RESULTS]
        squares_x, squares_y, squares = row[3], row[7], row[10]
        # As exact as <x, y> itself unless the norms are far apart, and much finer where x and y are nearly the same.
        product = (squares_x + squares_y - squares) / 2
        x_moments, y_moments = _Moments(*row[:4]), _Moments(*row[4:8])
        parts.append(_Part(block[0].numel(), x_moments, y_moments, row[8], row[9], squares, product))
    return parts, difference if len(blocks) == 1 else None


def _is_good(part: _Part, safe_range: tuple[float, float]) -> bool:
    if not math.isfinite(part.x.total + part.y.total + part.x.squares + part.y.squares + part.squares):
        return False
    magnitudes = (max(-part.x.low, part.x.high), max(-part.y.low, part.y.high), part.max_abs)
    return all(magnitude == 0 or safe_range[0] <= magnitude <= safe_range[1] for magnitude in magnitudes)


def _measure_exactly(x: torch.Tensor, y: torch.Tensor) -> _Part:
    """Measure a block of anything at all, in float64 and without over- or underflow."""
    x, y = x.to(torch.float64), y.to(torch.float64)
    # 0 where finite, nan elsewhere: arithmetic with nan leaves pairs out many times faster than masks do.
    gap_x, gap_y = x - x, y - y
    gap = gap_x + gap_y
    pairs, nonfinite_x, nonfinite_y, differ = x.numel(), 0, 0, 0
    if not math.isfinite(gap.sum()):
        nonfinite_x, nonfinite_y, missing = (int(_filled(each, 1.0).sum()) for each in (gap_x, gap_y, gap))
        alike = (x == y) | (x.isnan() & y.isnan())
        differ = int((gap.isnan() & ~alike).sum())
        pairs -= missing
        x, y = x + gap, y + gap

    if pairs == 0:
        nothing = _Moments(math.inf, -math.inf, Fraction(0), Fraction(0))
        x_moments, y_moments = nothing._replace(nonfinite=nonfinite_x), nothing._replace(nonfinite=nonfinite_y)
        return _Part(0, x_moments, y_moments, -math.inf, Fraction(0), Fraction(0), Fraction(0), differ)

    scaled_x, exponent_x, x_moments = _moments_exactly(x, pairs, nonfinite_x)
    scaled_y, exponent_y, y_moments = _moments_exactly(y, pairs, nonfinite_y)
    product = _exact(torch.dot(scaled_x, scaled_y)) * _power(exponent_x + exponent_y)

    for halved in (0, 1):  # the difference of two finite values can be out of range, that of their halves cannot
        distance = (_scaled(y, halved) - _scaled(x, halved)).abs_()
        distance = _filled(distance, 0.0) if pairs < distance.numel() else distance
        largest = distance.max()
        if math.isfinite(largest):
            break
    exponent = _exponent(largest.item())
    distance = _scaled(distance, exponent)
    total_abs = _exact(distance.sum()) * _power(exponent + halved)
    squares = _exact(torch.dot(distance, distance)) * _power(2 * (exponent + halved))
    max_abs = _as_float(_exact(largest) * _power(halved))
    return _Part(pairs, x_moments, y_moments, max_abs, total_abs, squares, product, differ)


def _moments_exactly(x: torch.Tensor, pairs: int, nonfinite: int) -> tuple[torch.Tensor, int, _Moments]:
    """The moments of float64 values of which all but ``pairs`` are nan; also these times a power of two, and which.

    The scaled values have zeros in the place of nan.
    """
    gaps = pairs < x.numel()
    low = (_filled(x, math.inf) if gaps else x).amin().item()
    high = (_filled(x, -math.inf) if gaps else x).amax().item()
    exponent = _exponent(max(-low, high))
    x = _scaled(x, exponent)
    scaled = _filled(x, 0.0) if gaps else x
    # Sums around the mean keep the spread; from there to sums around zero in fractions, which lose nothing.
    mean = scaled.sum().item() / pairs
    deviation = _filled(x - mean, 0.0) if gaps else x - mean
    center, rest = Fraction(mean), _exact(deviation.sum())
    total = pairs * center + rest
    squares = _exact(torch.dot(deviation, deviation)) + 2 * center * rest + pairs * center**2
    moments = _Moments(low, high, total * _power(exponent), squares * _power(2 * exponent), nonfinite)
    return scaled, exponent, moments


def _filled(x: torch.Tensor, value: float) -> torch.Tensor:
    return torch.nan_to_num(x, nan=value, posinf=math.inf, neginf=-math.inf)


def _exponent(magnitude: float) -> int:
    """The power of two by which to divide before squaring: 0 in the usual range, else one that brings it there."""
    low, high = _SAFE_RANGE[torch.float64]
    if magnitude == 0 or low <= magnitude <= high:
        return 0
    return max(-1000, min(1000, math.frexp(magnitude)[1]))  # 2**1000 is well within float64


def _scaled(x: torch.Tensor, exponent: int) -> torch.Tensor:
    return x * 2.0**-exponent if exponent else x


def _exact(number: torch.Tensor) -> Fraction:
    return Fraction(number.item())


def _power(exponent: int) -> Fraction:
    return Fraction(2) ** exponent


def _add_up(parts: Sequence[_Part]) -> _Part:
    if len(parts) == 1:
        return parts[0]
    x, y = (
        _Moments(
            min(side.low for side in sides),
            max(side.high for side in sides),
            _sum([side.total for side in sides]),
            _sum([side.squares for side in sides]),
            sum(side.nonfinite for side in sides),
        )
        for sides in ([part.x for part in parts], [part.y for part in parts])
    )
    return _Part(
        sum(part.pairs for part in parts),
        x,
        y,
        max(part.max_abs for part in parts),
        _sum([part.total_abs for part in parts]),
        _sum([part.squares for part in parts]),
        _sum([part.product for part in parts]),
        sum(part.nonfinite_differ for part in parts),
    )


def _sum(numbers: Sequence[_Number]) -> _Number:
    if all(isinstance(number, float) for number in numbers):
        return math.fsum(numbers)
    return sum((Fraction(number) for number in numbers), Fraction(0))


def _is_ill_conditioned(total: _Part) -> bool:
    """Whether the quick sums cannot tell a spread beside its mean, or an inner product beside the larger norm."""
    if total.pairs == 0:
        return False
    for side in (total.x, total.y):
        mean = side.total / total.pairs
        spread = side.squares / total.pairs - mean * mean
        if side.low < side.high and mean * mean > _LARGEST_RATIO**2 * spread:
            return True
    smaller, larger = sorted((total.x.squares, total.y.squares))
    return smaller > 0 and larger > _LARGEST_RATIO**2 * smaller


# -- from sums to statistics ------------------------------------------------------------------------------------------


def _statistics(total: _Part, numel: int, index: tuple[int, ...]) -> DiffStats:
    x, y, squares = total.x, total.y, total.squares
    if x.squares == 0:
        rel_l2, rel_diff, cosine = (0.0, 0.0, 1.0) if y.squares == 0 else (math.inf, 1.0, 0.0)
    elif y.squares == 0:
        rel_l2, rel_diff, cosine = 1.0, 1.0, 0.0
    else:
        rel_l2 = _root(squares / x.squares)
        rel_diff = min(float(squares / (x.squares + y.squares)), 2.0)
        cosine = min(_root(total.product * total.product / (x.squares * y.squares)), 1.0)
        cosine = -cosine if total.product < 0 else cosine
    return DiffStats(
        numel,
        rel_l2,
        rel_diff,
        total.max_abs,
        index,
        _as_float(total.total_abs / total.pairs),
        cosine,
        x.nonfinite,
        y.nonfinite,
        total.nonfinite_differ,
        *_mean_and_std(x, total.pairs),
        x.low,
        x.high,
        *_mean_and_std(y, total.pairs),
        y.low,
        y.high,
    )


def _mean_and_std(side: _Moments, count: int) -> tuple[float, float]:
    if side.low == side.high:
        return side.low, 0.0
    mean = side.total / count
    return float(mean), _root(max(side.squares / count - mean * mean, 0.0))


def _root(number: _Number) -> float:
    """The square root, also of a fraction beyond what floats can hold."""
    if isinstance(number, float) or number == 0:
        return math.sqrt(number)
    half = (number.numerator.bit_length() - number.denominator.bit_length()) // 2
    return _as_float(Fraction(math.sqrt(number / _power(2 * half))) * _power(half))


def _as_float(number: _Number) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.inf


def _distance(x: torch.Tensor, y: torch.Tensor, dtype: torch.dtype, *, finite: bool) -> torch.Tensor:
    """``|x - y|``, and -1 where either is not finite."""
    if finite:
        return torch.sub(y.to(dtype), x.to(dtype)).abs_()
    x, y = x.to(torch.float64), y.to(torch.float64)
    return _filled((y - x).abs_() + (x - x) + (y - y), -1.0)


def _place_of_largest(values: torch.Tensor) -> int:
    """Where the first of the largest values is: as argmax, but by halving, because amax is many times faster."""
    start = 0
    largest = values.amax() if values.numel() > 8192 else None
    while values.numel() > 8192:
        middle = values.numel() // 2
        if values[:middle].amax() == largest:
            values = values[:middle]
        else:
            values, start = values[middle:], start + middle
    return start + int(values.argmax())


def _index_in(shape: Sequence[int], position: int) -> tuple[int, ...]:
    index: list[int] = []
    for size in reversed(shape):
        position, place = divmod(position, size)
        index.append(place)
    return tuple(reversed(index))
