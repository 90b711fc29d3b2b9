"""The sums over two tensors from which their diff statistics follow, taken in blocks that stay in the cache.

Within a block sums run in float32 (float64 for wider dtypes), which torch adds up pairwise; from there on in float64.
A block that this does not suit says so, and is measured in another way: one that holds non-finite values with zeros
in their place, one whose squares would leave float32's range in float64. If a sum has nothing left after cancellation
(a spread that is small beside the mean, norms far apart), one more pass takes the sum that has: around the mean, or of
the products. What is beyond float64 as well is left to `diff_exact`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from enum import Enum, auto
from fractions import Fraction
from typing import NamedTuple

import torch

Number = float | Fraction
Block = tuple[torch.Tensor, torch.Tensor]

_INF = math.inf
# Within these magnitudes sums of squares, and products of two such sums, keep clear of the ends of the dtype's range.
SAFE_RANGE = {torch.float32: (2.0**-47, 2.0**51), torch.float64: (2.0**-200, 2.0**200)}
# A mean this many times the spread, or a norm this many times the other, costs the first sums their last good digits.
_LARGEST_RATIO = 5
# Up to so many elements a copy costs less than the calls that it saves.
_FEW = 1 << 15
# So few squares can be added up naively without a trace in the sixth digit, even if all roundings point one way.
_ROW = 256


class Side(NamedTuple):
    """One of the two tensors, as far as its pairs are finite."""

    low: float
    high: float
    mean: float
    std: float
    squares: Number
    nonfinite: int


class Totals(NamedTuple):
    """``squares`` is ``sum((x - y)**2)``, ``product`` ``sum(x * y)``, ``place`` where ``|x - y|`` is largest."""

    pairs: int
    x: Side
    y: Side
    max_abs: float
    mean_abs: float
    squares: Number
    product: Number
    nonfinite_differ: int
    place: int


class _Sums(NamedTuple):
    """What is found of a block, or of all of them; ``place`` is None where nobody has looked for it yet."""

    high_x: float
    high_y: float
    max_abs: float
    low_x: float
    low_y: float
    total_x: float
    total_y: float
    total_abs: float
    squares_x: float
    squares_y: float
    squares: float
    pairs: int
    nonfinite_x: int
    nonfinite_y: int
    nonfinite_differ: int
    place: int | None


class _Unfit(Enum):
    """Why a block cannot be measured as tried."""

    NONFINITE = auto()
    RANGE = auto()


def add_up(blocks: Sequence[Block], dtype: torch.dtype) -> Totals | None:
    """Measure blocks of one size, but for the last; None if there are values for which not even float64 will do."""
    known = _measure_at_once(blocks, dtype) if _is_slow_to_answer(blocks[0][0]) else [None] * len(blocks)
    parts: list[_Sums] = []
    gaps, distances = False, None
    for (x, y), quick in zip(blocks, known, strict=True):
        if quick is not None:
            parts.append(quick)
            continue
        while True:  # what a block needs the next one likely needs too, so `dtype` and `gaps` stay as they are
            part, distances = _measure_with_gaps(x, y, dtype) if gaps else _measure(x, y, dtype)
            if isinstance(part, _Sums):
                break
            if part is _Unfit.NONFINITE and not gaps:
                gaps = True
            elif dtype == torch.float32:
                dtype, gaps = torch.float64, False
            else:
                return None
        parts.append(part)

    sums = parts[0] if len(parts) == 1 else _together(parts)
    farthest = 0 if len(parts) == 1 else max(range(len(parts)), key=lambda i: parts[i].max_abs)
    place = parts[farthest].place
    if place is None:
        if distances is None or farthest < len(parts) - 1:
            distances = _distances(*blocks[farthest], dtype, gaps)
        place = place_of_largest(distances)
    return _totals(sums, blocks, dtype, farthest * blocks[0][0].numel() + place)


def _is_slow_to_answer(tensor: torch.Tensor) -> bool:
    """Whether to wait for a result costs more than to compute in vain."""
    return not tensor.is_cpu


class _Memory(threading.local):
    def __init__(self) -> None:
        self.buffers: dict[torch.dtype, torch.Tensor] = {}


_memory = _Memory()


def _scratch(rows: int, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows to write to, as long as ``like``, good until the next call on this thread.

    The memory is kept: new memory costs page faults, which here can take longer than all else.
    """
    length = like.numel()
    if not like.is_cpu:  # those allocators keep memory themselves
        return torch.empty((rows, length), dtype=dtype, device=like.device)
    buffer = _memory.buffers.get(dtype)
    if buffer is None or buffer.numel() < rows * length:
        with torch.inference_mode(False):  # or it could not be written to outside of that mode
            buffer = _memory.buffers[dtype] = torch.empty(rows * length, dtype=dtype, device="cpu")
    return buffer[: rows * length].view(rows, length)


# -- one block --------------------------------------------------------------------------------------------------------


def _measure(x: torch.Tensor, y: torch.Tensor, dtype: torch.dtype) -> tuple[_Sums | _Unfit, torch.Tensor | None]:
    """Measure a block of finite, well-behaved values; also ``|x - y|``, or its square."""
    if x.numel() <= _FEW:
        if not x.dtype == dtype == y.dtype:
            x, y = x.to(dtype), y.to(dtype)
        distances = torch.sub(y, x).abs_()
        rows = torch.stack((x, y, distances))
    elif x.dtype == dtype == y.dtype:
        return _measure_in_place(x, y)
    else:
        rows = _scratch(3, x, dtype)
        distances = _fill(rows, x, y)
    highs, lows = rows.amax(1).tolist(), rows.amin(1).tolist()
    return _verdict(highs, lows, dtype) or _sums(rows, highs, lows, (x.numel(), 0, 0, 0)), distances


def _fill(rows: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    copy_x, copy_y, distances = rows.unbind()
    return torch.sub(copy_y.copy_(y), copy_x.copy_(x), out=distances).abs_()


def _sums(rows: torch.Tensor, highs: list[float], lows: list[float], counts: tuple[int, int, int, int]) -> _Sums:
    """The sums of x, y and ``|x - y|``, which are squared in place.

    No dot products: they add up naively, and the roundings of one repeated number all point the same way.
    """
    totals = rows.sum(1).tolist()
    return _Sums._make([*highs, *lows[:2], *totals, *rows.square_().sum(1).tolist(), *counts, None])


def _measure_in_place(x: torch.Tensor, y: torch.Tensor) -> tuple[_Sums | _Unfit, torch.Tensor | None]:
    """As `_measure`, for tensors of the dtype to work in, without copies of them."""
    scratch = _scratch(1, x, x.dtype)[0]
    sides = []
    for side in (x, y):
        # The range goes first: finding it is slow enough to hide the way of the values from memory to the cache.
        low, high = (end.item() for end in torch.aminmax(side))
        if unfit := _verdict((high,), (low,), x.dtype):
            return unfit, None
        sides.append((high, low, side.sum().item(), _squares(side, scratch)))
    max_abs = torch.sub(y, x, out=scratch).abs_().amax().item()
    if unfit := _verdict((max_abs,), (0.0,), x.dtype):
        return unfit, None
    (high_x, low_x, total_x, squares_x), (high_y, low_y, total_y, squares_y) = sides
    total_abs, squares = scratch.sum().item(), scratch.square_().sum().item()
    sums = (total_x, total_y, total_abs, squares_x, squares_y, squares)
    return _Sums(high_x, high_y, max_abs, low_x, low_y, *sums, x.numel(), 0, 0, 0, None), scratch


def _squares(x: torch.Tensor, scratch: torch.Tensor) -> float:
    """The sum of the squares: by the norms of short rows, which is faster, if there are such rows."""
    if x.numel() % _ROW:
        return torch.mul(x, x, out=scratch).sum().item()
    norms: torch.Tensor = torch.linalg.vector_norm(x.view(-1, _ROW), dim=1)
    return norms.square_().sum().item()


def _measure_with_gaps(
    x: torch.Tensor, y: torch.Tensor, dtype: torch.dtype
) -> tuple[_Sums | _Unfit, torch.Tensor | None]:
    """As `_measure`, for any values: a pair of which either is not finite is counted, and zero in all sums."""
    memory = _scratch(5, x, dtype)
    rows, (filled_x, filled_y, distances, kind_x, kind_y) = memory[:3], memory.unbind()
    for side, filled, kind in ((x, filled_x, kind_x), (y, filled_y, kind_y)):
        values = side if side.dtype == dtype else kind.copy_(side)
        torch.nan_to_num(values, 0.0, 0.0, 0.0, out=filled)
        # 0 where finite. Arithmetic tells nan and infinities apart many times faster than masks do.
        torch.sub(values, filled, out=kind).nan_to_num_(1.0, 2.0, 3.0)
    differ = int(torch.ne(kind_x, kind_y, out=distances).sum())
    gap = kind_x.clamp_(max=1.0)
    missing = nonfinite_x = nonfinite_y = int(gap.sum())
    if differ:
        nonfinite_y = int(kind_y.clamp_(max=1.0).sum())
        missing = int(torch.maximum(gap, kind_y, out=gap).sum())
        memory[:2].mul_(torch.neg(gap, out=kind_y).add_(1.0))
    counts = (x.numel() - missing, nonfinite_x, nonfinite_y, differ)
    if missing == x.numel():
        return _Sums._make([*[-_INF] * 3, *[_INF] * 2, *[0.0] * 6, *counts, None]), None

    torch.sub(filled_y, filled_x, out=distances).abs_()
    highs, lows = rows.amax(1).tolist(), rows.amin(1).tolist()
    if unfit := _verdict(highs, lows, dtype):
        return unfit, None
    if missing and (max(lows[:2]) >= 0 or min(highs[:2]) <= 0):
        # A zero in the place of a gap may have hidden the least or the greatest.
        away = torch.neg(gap, out=kind_y).add_(1.0).reciprocal_().sub_(1.0)  # inf at gaps, else 0
        for i, filled in enumerate((filled_x, filled_y)):
            lows[i] = torch.add(filled, away, out=gap).amin().item()
            highs[i] = torch.sub(filled, away, out=gap).amax().item()
    return _sums(rows, highs, lows, counts), distances if highs[2] > 0 else None


def _verdict(highs: Sequence[float], lows: Sequence[float], dtype: torch.dtype) -> _Unfit | None:
    smallest, largest = SAFE_RANGE[dtype]
    for high, low in zip(highs, lows, strict=True):
        magnitude = max(high, -low)
        if not smallest <= magnitude <= largest and magnitude != 0:
            return _Unfit.RANGE if math.isfinite(magnitude) else _Unfit.NONFINITE
    return None


def _measure_at_once(blocks: Sequence[Block], dtype: torch.dtype) -> list[_Sums | None]:
    """As `_measure` for all blocks, with one transfer of all results; None for blocks of other than good values."""
    memory = _scratch(3, blocks[0][0], dtype)
    results = []
    for x, y in blocks:
        rows = memory[:, : x.numel()]
        place = _fill(rows, x, y).argmax(0, keepdim=True).to(dtype)  # exact: no block has 2**24 elements
        results.append(torch.cat([rows.amax(1), rows.amin(1), rows.sum(1), rows.square_().sum(1), place]))
    found: list[_Sums | None] = []
    for (x, _), numbers in zip(blocks, torch.stack(results).tolist(), strict=True):
        sums = _Sums._make([*numbers[:5], *numbers[6:12], x.numel(), 0, 0, 0, int(numbers[12])])
        found.append(None if _verdict(numbers[:3], numbers[3:6], dtype) else sums)
    return found


def _distances(x: torch.Tensor, y: torch.Tensor, dtype: torch.dtype, gaps: bool) -> torch.Tensor:
    """``|x - y|``, and -1 where either is not finite."""
    if x.dtype == dtype == y.dtype:
        distances = torch.sub(y, x, out=_scratch(1, x, dtype)[0]).abs_()
    else:
        distances = _fill(_scratch(3, x, dtype), x, y)
    return distances.nan_to_num_(-1.0, -1.0, -1.0) if gaps else distances


def place_of_largest(values: torch.Tensor) -> int:
    """Where the first of the largest values is: as argmax, but by rows, because amax is many times faster."""
    width = 2048
    rows = values.numel() // width if values.is_cpu else 0
    if rows < 4:
        return int(values.argmax())
    largest = values[: rows * width].view(rows, width).amax(1)
    row = int(largest.argmax())
    rest = values[rows * width :]
    if rest.numel() and rest.amax() > largest[row]:
        row = rows
    return row * width + int(values[row * width : (row + 1) * width].argmax())


# -- all blocks -------------------------------------------------------------------------------------------------------


def _together(parts: Sequence[_Sums]) -> _Sums:
    columns = list(zip(*parts, strict=True))
    highs, lows, sums, counts = columns[:3], columns[3:5], columns[5:11], columns[11:15]
    return _Sums._make([*map(max, highs), *map(min, lows), *map(math.fsum, sums), *map(sum, counts), None])


def _totals(sums: _Sums, blocks: Sequence[Block], dtype: torch.dtype, place: int) -> Totals | None:
    pairs, squares_x, squares_y = sums.pairs, sums.squares_x, sums.squares_y
    moments_x = _moments(sums.low_x, sums.high_x, sums.total_x, squares_x, pairs)
    moments_y = _moments(sums.low_y, sums.high_y, sums.total_y, squares_y, pairs)
    # As exact as <x, y> itself while the norms are alike, and much finer where x and y are nearly the same.
    product = (squares_x + squares_y - sums.squares) / 2
    smaller, larger = (squares_x, squares_y) if squares_x < squares_y else (squares_y, squares_x)
    alike = smaller == 0 or larger <= _LARGEST_RATIO**2 * smaller
    if moments_x is None:
        moments_x = _around_mean(blocks, sums.total_x / pairs, pairs, dtype)
    if moments_y is None:
        moments_y = _around_mean([(y, x) for x, y in blocks], sums.total_y / pairs, pairs, dtype)
    if moments_x is None or moments_y is None:
        return None
    if not alike:
        product = _product(blocks, pairs, dtype)
    return Totals(
        pairs,
        Side(sums.low_x, sums.high_x, *moments_x, squares_x, sums.nonfinite_x),
        Side(sums.low_y, sums.high_y, *moments_y, squares_y, sums.nonfinite_y),
        sums.max_abs,
        sums.total_abs / pairs if pairs else 0.0,
        sums.squares,
        product,
        sums.nonfinite_differ,
        place,
    )


def _moments(low: float, high: float, total: float, squares: float, pairs: int) -> tuple[float, float] | None:
    """The mean and the standard deviation, unless the sums cannot tell a spread beside its mean."""
    if low == high or pairs == 0:
        return low, 0.0
    mean = total / pairs
    variance = squares / pairs - mean * mean
    return None if mean * mean > _LARGEST_RATIO**2 * variance else (mean, math.sqrt(variance))


def _around_mean(blocks: Sequence[Block], mean: float, pairs: int, dtype: torch.dtype) -> tuple[float, float] | None:
    """As `_moments` of the first of each pair of tensors, from sums around the mean as far as it is known."""
    gaps = _have_gaps(blocks, pairs)
    center = torch.tensor(mean, dtype=dtype, device="cpu").item()
    results = []
    for x, other in blocks:
        deviations, gap = _scratch(2, x, dtype)
        if x.dtype == dtype:
            torch.sub(x, center, out=deviations)
        else:
            deviations.copy_(x).sub_(center)
        if gaps:
            gap.copy_(other).sub_(deviations)  # not finite at gaps
            deviations.add_(gap.sub_(gap)).nan_to_num_(0.0, 0.0, 0.0)
        results += [deviations.sum(), deviations.square_().sum()]
    numbers = _numbers(results)
    rest = math.fsum(numbers[::2]) / pairs
    variance = math.fsum(numbers[1::2]) / pairs - rest * rest
    # The first sums may have missed the mean by more than a very small spread.
    return (center + rest, math.sqrt(variance)) if rest * rest <= _LARGEST_RATIO**2 * variance else None


def _product(blocks: Sequence[Block], pairs: int, dtype: torch.dtype) -> float:
    gaps = _have_gaps(blocks, pairs)
    results = []
    for x, y in blocks:
        products, copy_y = _scratch(2, x, dtype)
        if x.dtype == dtype == y.dtype:
            torch.mul(x, y, out=products)
        else:
            products.copy_(x).mul_(copy_y.copy_(y))
        results.append((products.nan_to_num_(0.0, 0.0, 0.0) if gaps else products).sum())
    return math.fsum(_numbers(results))


def _have_gaps(blocks: Sequence[Block], pairs: int) -> bool:
    return pairs < sum(x.numel() for x, _ in blocks)


def _numbers(results: Sequence[torch.Tensor]) -> list[float]:
    """All results at once, so that a device is waited for once."""
    return torch.stack(list(results)).tolist()
