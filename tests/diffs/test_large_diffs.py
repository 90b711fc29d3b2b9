"""Tensors of several blocks, and of sizes at the ends of blocks and of threads' shares."""

from __future__ import annotations

import functools
import threading

import numpy as np
import pytest
import torch
from kit.exact_diffs import FLOATS, INF, NAN, assert_nearly_right, random

from graftlab.diffs.measure import DiffStats, measure

# What is converted at once, what is looked at together, and what one thread takes at once.
PIECE, BLOCK, STRIPE = 1 << 10, 1 << 14, 1 << 16
MOST = 10 * STRIPE
FALLBACK_BLOCK = 1 << 14
pytestmark = pytest.mark.usefixtures("way")


SIZES = [n + more for n in (PIECE, BLOCK, STRIPE) for more in (-1, 0, 1)]


@functools.cache
def noise_of(seed: int) -> torch.Tensor:
    return random((MOST,), torch.float64, seed)


def noisy(size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Values around 0.5 and others near them, which the test may change."""
    x, noise = (noise_of(seed)[:size] for seed in (0, 1))
    scale = 1 if dtype.is_floating_point else 20
    return (scale * (x + 0.5)).to(dtype), (scale * (x + 0.5 + 0.1 * noise)).to(dtype)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8, torch.int64], ids=str)
def test_tensors_of_several_blocks(dtype: torch.dtype) -> None:
    for size in (*SIZES, 3 * STRIPE + 12345):
        x, y = noisy(size, dtype)
        y[size - 2] = 99
        found = assert_nearly_right(x, y)
        assert found.max_abs_index == (size - 2,)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.bool], ids=str)
def test_sums_of_bytes_are_exact_to_the_ends_of_their_range(dtype: torch.dtype) -> None:
    low, high = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    size = 2 * STRIPE + BLOCK + 2049
    x, y = (torch.randint(low, high + 1, (size,), generator=torch.Generator().manual_seed(seed)) for seed in (3, 4))
    # Whole blocks of the largest sums, in both directions, and a block in which all is equal.
    for block, (one, other) in enumerate(((low, high), (high, low), (low, low), (high, high))):
        x[block * BLOCK : (block + 1) * BLOCK], y[block * BLOCK : (block + 1) * BLOCK] = one, other
    found, d = measure(x.to(dtype), y.to(dtype)), y - x
    right = [int(total.sum()) / size for total in (x, y, d.abs())]
    assert [found.mean_baseline, found.mean_target, found.mean_abs] == pytest.approx(right, rel=1e-13)
    assert found.max_abs == high - low
    assert (found.min_baseline, found.max_baseline, found.min_target, found.max_target) == (low, high, low, high)
    assert found.rel_l2 == pytest.approx((int((d * d).sum()) / int((x * x).sum())) ** 0.5, rel=1e-15)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.uint8], ids=str)
def test_remainder_of_the_last_step_is_measured_too(dtype: torch.dtype) -> None:
    x, y = noisy(1000, dtype)
    for size in (*range(1, 70), 999, 1000):
        one, other = x[:size].clone(), y[:size].clone()
        one[size - 1], other[size - 1] = 50, 2
        assert_nearly_right(one, other)


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float64),
        (torch.float8_e4m3fn, torch.bfloat16),
        (torch.int8, torch.float16),
        (torch.int64, torch.uint8),
        (torch.float64, torch.bool),
    ],
    ids=str,
)
def test_large_tensors_may_differ_in_dtype(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    x, y = (noisy(STRIPE + BLOCK + 77, dtype)[side] for side, dtype in enumerate(dtypes))
    assert_nearly_right(x, y)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_few_values_that_are_not_finite_spoil_no_other_block(dtype: torch.dtype) -> None:
    x, y = noisy(2 * STRIPE + 999, dtype)
    x[5], x[STRIPE + 7], y[STRIPE + 7], y[2 * STRIPE] = NAN, INF, -INF, NAN
    x[3 * BLOCK : 4 * BLOCK] = -INF  # nothing else in a whole block
    y[3 * BLOCK : 4 * BLOCK - 1] = -INF
    y[BLOCK + 1] = 99
    found = assert_nearly_right(x, y)
    assert (found.nonfinite_baseline, found.nonfinite_target, found.nonfinite_differ) == (BLOCK + 2, BLOCK + 1, 4)


def test_a_large_causal_mask_is_left_out() -> None:
    hidden = torch.ones(2, 300, 300, dtype=torch.bool).triu(1)
    x, y = (tensor.view(2, 300, 300).masked_fill(hidden, -INF) for tensor in noisy(2 * 300 * 300, torch.float32))
    assert assert_nearly_right(x, y).nonfinite_baseline == int(hidden.sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("offset", [3.0, 1e2, -1e4])
def test_the_spread_around_a_large_mean_of_several_blocks(dtype: torch.dtype, offset: float) -> None:
    x, y = noisy(STRIPE + 3 * BLOCK + 5, dtype)
    x, y = x + offset, y + offset
    assert 0.9 < assert_nearly_right(x, y).std_baseline < 1.1
    # Blocks of another kind beside them: constant ones, one around another mean, one of tiny values.
    x[:BLOCK], y[BLOCK : 2 * BLOCK] = 7.0, -7.0
    x[STRIPE : STRIPE + BLOCK] *= 1e-3
    y[STRIPE : STRIPE + BLOCK] -= 2 * offset
    assert_nearly_right(x, y)


def test_a_spread_of_a_few_last_places() -> None:
    places = torch.randint(0, 4, (2 * STRIPE,), generator=torch.Generator().manual_seed(0))
    x = 1e6 + places.double() * 2**-33
    found = measure(x, x + 2**-33)
    assert found.std_baseline == pytest.approx(places.double().std(correction=0).item() * 2**-33, rel=1e-12)
    assert found.std_target == pytest.approx(found.std_baseline, rel=1e-12)
    assert found.mean_abs == found.max_abs == 2**-33


@pytest.mark.parametrize("ratio", [1e-9, 1e-2, 1e4])
def test_the_cosine_of_norms_that_differ_in_some_blocks(ratio: float) -> None:
    x, y = noisy(STRIPE + BLOCK, torch.float32)
    y[BLOCK : 2 * BLOCK] *= ratio
    x[3 * BLOCK :] = 0
    assert_nearly_right(x, y)


def test_of_equal_differences_in_several_blocks_the_first_is_named() -> None:
    x = torch.zeros(3 * STRIPE)
    y = x.clone()
    y[[BLOCK + 33, BLOCK + 34, 2 * BLOCK, 2 * STRIPE + 1]] = torch.tensor([1.0, -1.0, 1.0, -1.0])
    assert measure(x, y).max_abs_index == (BLOCK + 33,)
    assert measure(x, x).max_abs_index == (0,)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_the_result_is_the_same_on_every_run_and_any_number_of_threads(dtype: torch.dtype) -> None:
    x, y = noisy(9 * STRIPE + 12345, dtype)
    x[::1001], y[3 * STRIPE : 4 * STRIPE] = NAN, INF
    if dtype == torch.float64:
        y[8 * STRIPE] = 1e250
    found = set()
    for threads in (1, 2, 3, 5, 16, 2, 1):
        torch.set_num_threads(threads)
        found.add(measure(x, y))
    assert len(found) == 1


@pytest.mark.parametrize("shape", [(1,), (300,), (3, 100), (2, 2, 70), (20_000,), (70, 9000)], ids=str)
def test_the_index_is_that_of_the_largest_difference(shape: tuple[int, ...]) -> None:
    x = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    for place in (0, x.numel() // 2, x.numel() - 1):
        y = x.clone()
        y.view(-1)[place] += 2
        assert measure(x, y).max_abs_index == tuple(int(i) for i in np.unravel_index(place, shape))


@pytest.mark.parametrize("size", [1000, STRIPE, 2 * STRIPE])
def test_a_constant_difference_is_not_lost_in_roundings_that_point_one_way(size: int) -> None:
    x = random((size,), torch.float32, 0)
    for shift in (0.1, 0.3, 1.1):
        y = x + shift
        exact = (y.double() - x.double()).norm() / x.double().norm()
        assert measure(x, y).rel_l2 == pytest.approx(exact.item(), rel=1e-6)


@pytest.mark.parametrize("size", [1000, 70_000, STRIPE])
def test_one_magnitude_all_over_is_not_lost_in_roundings_either(size: int) -> None:
    signs = torch.randint(0, 2, (size,), generator=torch.Generator().manual_seed(0)) * 2 - 1
    for dtype in FLOATS:
        x, y = (0.3 * signs).to(dtype), (1.1 * signs.flip(0)).to(dtype)
        wide_x, wide_y = x.double(), y.double()
        found = measure(x, y)
        assert found.rel_l2 == pytest.approx(((wide_x - wide_y).norm() / wide_x.norm()).item(), rel=1e-6)
        assert found.std_baseline == pytest.approx(wide_x.std(correction=0).item(), rel=1e-6)
        assert found.std_target == pytest.approx(wide_y.std(correction=0).item(), rel=1e-6)


@pytest.mark.slow
def test_threads_measure_without_disturbing_each_other() -> None:
    pairs = [[random((100_003,), dtype, seed) for seed in (0, 1)] for dtype in (torch.float32, torch.bfloat16) * 2]
    pairs[1][0][::5] = NAN
    wanted = [measure(*pair) for pair in pairs]
    found: list[list[DiffStats]] = [[] for _ in pairs]

    def work(i: int) -> None:
        found[i] = [measure(*pairs[i]) for _ in range(20)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(pairs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [set(map(repr, each)) for each in found] == [{repr(each)} for each in wanted]
