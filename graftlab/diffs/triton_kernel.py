"""The statistics of CUDA tensors by one fused Triton kernel; torch's CUDA builds include Triton.

This takes one pass over both tensors, and one transfer of all programs' results. `fallback` combines these as it does
for torch operations, and imports this module if Triton is installed. With ``TRITON_INTERPRET=1`` Triton's interpreter
runs the kernel, also on CPU tensors.
"""

from __future__ import annotations

import contextlib
import os

import torch
import triton
import triton.language as tl

# The results of a program, in the order in which the kernel writes them; those without a side are of the difference.
NAMES = (
    *("pairs", "nonfinite_baseline", "nonfinite_target", "nonfinite_differ", "place", "max_abs", "distances"),
    *("squares", "product"),
    *(f"{name}_{side}" for side in "xy" for name in ("low", "high", "center", "rest", "spread", "squares")),
)
DTYPES = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16}
    | {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool}
)
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"

BLOCK = 512
"""Elements that a program processes at once: four for each of its threads."""

PROGRAMS = 2048
"""More than a GPU runs at once, and few enough to combine on the CPU."""

_PLAIN = (torch.Tensor, torch.nn.Parameter)


@triton.jit  # type: ignore[untyped-decorator]
def _measure(x_at, y_at, factors, out, numel, tiles, BLOCK: tl.constexpr, SCALED: tl.constexpr, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    first = tl.program_id(0).to(tl.int64) * tiles * BLOCK
    lanes = tl.arange(0, BLOCK)
    zero = tl.zeros([BLOCK], tl.float64)
    pairs, gaps_x, gaps_y, differ = zero, zero, zero, zero
    distances, squares, product = zero, zero, zero
    rest_x, spread_x, squares_x, rest_y, spread_y, squares_y = zero, zero, zero, zero, zero, zero
    low_x, low_y = zero + float("inf"), zero + float("inf")
    high_x, high_y = zero - float("inf"), zero - float("inf")
    farthest, place = zero - 1, zero
    center_x, center_y = tl.sum(zero, 0), tl.sum(zero, 0)
    for tile in range(tiles):
        at = first + tile * BLOCK + lanes
        inside = at < numel
        x = tl.load(x_at + at, mask=inside, other=0).to(tl.float64)
        y = tl.load(y_at + at, mask=inside, other=0).to(tl.float64)
        # 0 for finite elements, and different numbers for NaN and the two infinities.
        kind_x = tl.where(x != x, 1, tl.where(x == float("inf"), 2, tl.where(x == -float("inf"), 3, 0)))
        kind_y = tl.where(y != y, 1, tl.where(y == float("inf"), 2, tl.where(y == -float("inf"), 3, 0)))
        is_pair = inside & (kind_x == 0) & (kind_y == 0)
        pairs += is_pair.to(tl.float64)
        gaps_x += (kind_x != 0).to(tl.float64)
        gaps_y += (kind_y != 0).to(tl.float64)
        differ += (kind_x != kind_y).to(tl.float64)
        low_x, high_x = tl.where(is_pair & (x < low_x), x, low_x), tl.where(is_pair & (x > high_x), x, high_x)
        low_y, high_y = tl.where(is_pair & (y < low_y), y, low_y), tl.where(is_pair & (y > high_y), y, high_y)
        x, y = tl.where(is_pair, x, 0.0), tl.where(is_pair, y, 0.0)
        if SCALED:
            # Large values are scaled before the subtraction, small differences after it.
            before, after = tl.load(factors + 2), tl.load(factors + 3)
            difference = (y * before - x * before) * after
            x, y = x * tl.load(factors), y * tl.load(factors + 1)
        else:
            difference = y - x
        distance = tl.abs(difference)
        is_farther = is_pair & (distance > farthest)
        farthest, place = tl.where(is_farther, distance, farthest), tl.where(is_farther, at.to(tl.float64), place)
        distances += distance
        squares += difference * difference
        product += x * y
        squares_x += x * x
        squares_y += y * y
        if tile == 0:
            # Sums of deviations from the first block's mean stay precise if the spread is small in comparison.
            count = tl.maximum(tl.sum(is_pair.to(tl.float64), 0), 1.0)
            center_x, center_y = tl.sum(x, 0) / count, tl.sum(y, 0) / count
        from_x, from_y = tl.where(is_pair, x - center_x, 0.0), tl.where(is_pair, y - center_y, 0.0)
        rest_x += from_x
        rest_y += from_y
        spread_x += from_x * from_x
        spread_y += from_y * from_y
    out += tl.program_id(0) * COUNT
    most = tl.max(farthest, 0)
    tl.store(out, tl.sum(pairs, 0))
    tl.store(out + 1, tl.sum(gaps_x, 0))
    tl.store(out + 2, tl.sum(gaps_y, 0))
    tl.store(out + 3, tl.sum(differ, 0))
    tl.store(out + 4, tl.min(tl.where(farthest == most, place, float("inf")), 0))
    tl.store(out + 5, most)
    tl.store(out + 6, tl.sum(distances, 0))
    tl.store(out + 7, tl.sum(squares, 0))
    tl.store(out + 8, tl.sum(product, 0))
    tl.store(out + 9, tl.min(low_x, 0))
    tl.store(out + 10, tl.max(high_x, 0))
    tl.store(out + 11, center_x)
    tl.store(out + 12, tl.sum(rest_x, 0))
    tl.store(out + 13, tl.sum(spread_x, 0))
    tl.store(out + 14, tl.sum(squares_x, 0))
    tl.store(out + 15, tl.min(low_y, 0))
    tl.store(out + 16, tl.max(high_y, 0))
    tl.store(out + 17, center_y)
    tl.store(out + 18, tl.sum(rest_y, 0))
    tl.store(out + 19, tl.sum(spread_y, 0))
    tl.store(out + 20, tl.sum(squares_y, 0))


def takes(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether the kernel supports these tensors."""
    return all(type(t) in _PLAIN and t.dtype in DTYPES and (t.is_cuda or INTERPRETED) for t in (x, y))


def measure(x: torch.Tensor, y: torch.Tensor, factors: list[float] | None) -> list[dict[str, float]]:
    """Return each program's results for its share of two 1-d tensors; places count from the first element.

    ``factors`` are powers of two by which to multiply x and y before squaring, and their difference before and after
    the subtraction.
    """
    x, y = x.resolve_neg().contiguous(), y.resolve_neg().contiguous()
    numel = x.numel()
    tiles = triton.cdiv(triton.cdiv(numel, BLOCK), PROGRAMS)
    programs = triton.cdiv(numel, BLOCK * tiles)
    with torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext():
        out = torch.empty(programs, len(NAMES), dtype=torch.float64, device=x.device)
        scales = out if factors is None else torch.tensor(factors, dtype=torch.float64, device=x.device)
        _measure[(programs,)](
            x, y, scales, out, numel, tiles, BLOCK=BLOCK, SCALED=factors is not None, COUNT=len(NAMES)
        )
    return [dict(zip(NAMES, row, strict=True)) for row in out.tolist()]
