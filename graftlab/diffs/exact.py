"""Diff statistics of values whose squares leave even float64's range: scaled, shifted, added up as exact fractions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import torch

from graftlab.diffs.sums import SAFE_RANGE, Block, Number, Side, Totals, place_of_largest


class _Moments(NamedTuple):
    """Of one side of a block: what its mean, spread, norm and range follow from."""

    low: float
    high: float
    total: Fraction
    squares: Fraction
    nonfinite: int


class _Part(NamedTuple):
    """The sums over one block."""

    pairs: int
    x: _Moments
    y: _Moments
    max_abs: float
    total_abs: Fraction
    squares: Fraction
    product: Fraction
    nonfinite_differ: int


def add_up_exactly(blocks: Sequence[Block]) -> Totals:
    """As `diff_sums.add_up`, for anything at all, and slowly."""
    parts = [_measure(*block) for block in blocks]
    pairs = sum(part.pairs for part in parts)
    farthest = max(range(len(parts)), key=lambda i: parts[i].max_abs)
    return Totals(
        pairs,
        _side([part.x for part in parts], pairs),
        _side([part.y for part in parts], pairs),
        parts[farthest].max_abs,
        _as_float(sum((part.total_abs for part in parts), Fraction(0)) / max(pairs, 1)),
        sum((part.squares for part in parts), Fraction(0)),
        sum((part.product for part in parts), Fraction(0)),
        sum(part.nonfinite_differ for part in parts),
        farthest * blocks[0][0].numel() + place_of_largest(_distances(*blocks[farthest])),
    )


def _side(parts: Sequence[_Moments], pairs: int) -> Side:
    low, high = min(part.low for part in parts), max(part.high for part in parts)
    squares = sum((part.squares for part in parts), Fraction(0))
    mean = sum((part.total for part in parts), Fraction(0)) / max(pairs, 1)
    std = root(squares / max(pairs, 1) - mean * mean) if low < high else 0.0
    return Side(low, high, float(mean), std, squares, sum(part.nonfinite for part in parts))


def _measure(x: torch.Tensor, y: torch.Tensor) -> _Part:
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
        nothing = _Moments(math.inf, -math.inf, Fraction(0), Fraction(0), 0)
        x_moments, y_moments = nothing._replace(nonfinite=nonfinite_x), nothing._replace(nonfinite=nonfinite_y)
        return _Part(0, x_moments, y_moments, -math.inf, Fraction(0), Fraction(0), Fraction(0), differ)

    scaled_x, exponent_x, x_moments = _moments(x, pairs, nonfinite_x)
    scaled_y, exponent_y, y_moments = _moments(y, pairs, nonfinite_y)
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


def _moments(x: torch.Tensor, pairs: int, nonfinite: int) -> tuple[torch.Tensor, int, _Moments]:
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


def _distances(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """``|x - y|``, and -1 where either is not finite."""
    x, y = x.to(torch.float64), y.to(torch.float64)
    return _filled((y - x).abs_() + (x - x) + (y - y), -1.0)


def _filled(x: torch.Tensor, value: float) -> torch.Tensor:
    return torch.nan_to_num(x, nan=value, posinf=math.inf, neginf=-math.inf)


def _exponent(magnitude: float) -> int:
    """The power of two by which to divide before squaring: 0 in the usual range, else one that brings it there."""
    low, high = SAFE_RANGE[torch.float64]
    if magnitude == 0 or low <= magnitude <= high:
        return 0
    return max(-1000, min(1000, math.frexp(magnitude)[1]))  # 2**1000 is well within float64


def _scaled(x: torch.Tensor, exponent: int) -> torch.Tensor:
    return x * 2.0**-exponent if exponent else x


def _exact(number: torch.Tensor) -> Fraction:
    return Fraction(number.item())


def _power(exponent: int) -> Fraction:
    return Fraction(2) ** exponent


def root(number: Number) -> float:
    """The square root, also of a fraction beyond what floats can hold."""
    if isinstance(number, float) or number == 0:
        return math.sqrt(number)
    half = (number.numerator.bit_length() - number.denominator.bit_length()) // 2
    return _as_float(Fraction(math.sqrt(number / _power(2 * half))) * _power(half))


def _as_float(number: Fraction) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.inf
