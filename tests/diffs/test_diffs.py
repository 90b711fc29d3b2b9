"""What `measure` promises: the statistics that exact arithmetic gives, for any dtype, layout and range of values."""

from __future__ import annotations

import dataclasses
import decimal
import math
import pickle
import threading
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graftlab.diffs import measure as diffs
from graftlab.diffs import sums as diff_sums
from graftlab.diffs.measure import DiffStats, measure

NAN, INF = math.nan, math.inf
DIGITS = decimal.Context(prec=40)


# -- exact arithmetic as the judge ------------------------------------------------------------------------------------


def elements(tensor: torch.Tensor) -> list[float]:
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.to(torch.float64).reshape(-1).tolist()


def root(number: Fraction) -> float:
    return float((DIGITS.divide(number.numerator, number.denominator)).sqrt(DIGITS))


def near_float(number: Fraction) -> float:
    try:
        return float(number)
    except OverflowError:
        return INF


def kind(value: float) -> str:
    return "finite" if math.isfinite(value) else str(value)


def side_statistics(values: list[Fraction]) -> tuple[float, float, float, float]:
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / len(values)
    return near_float(mean), root(variance), near_float(min(values)), near_float(max(values))


def expected(baseline: torch.Tensor, target: torch.Tensor) -> DiffStats:
    """The statistics by their definitions, in exact fractions."""
    pairs = list(zip(elements(baseline), elements(target), strict=True))
    counts = {
        "nonfinite_baseline": sum(not math.isfinite(x) for x, _ in pairs),
        "nonfinite_target": sum(not math.isfinite(y) for _, y in pairs),
        "nonfinite_differ": sum(kind(x) != kind(y) for x, y in pairs),
    }
    finite = [(Fraction(x), Fraction(y)) for x, y in pairs if math.isfinite(x) and math.isfinite(y)]
    if not finite:
        zeros = {"rel_l2": 0.0, "rel_diff": 0.0, "max_abs": 0.0, "mean_abs": 0.0, "cosine": 1.0}
        return DiffStats(baseline.numel(), **counts, **({} if pairs else zeros))
    xs, ys = [x for x, _ in finite], [y for _, y in finite]
    xx, yy = sum(x * x for x in xs), sum(y * y for y in ys)
    xy = sum(x * y for x, y in finite)
    distances = [abs(x - y) for x, y in finite]
    dd = sum(distance * distance for distance in distances)
    cosine = math.copysign(root(xy * xy / (xx * yy)), 1 if xy > 0 else -1) if xx and yy else float(xx == yy)
    x_mean, x_std, x_min, x_max = side_statistics(xs)
    y_mean, y_std, y_min, y_max = side_statistics(ys)
    return DiffStats(
        numel=baseline.numel(),
        rel_l2=root(dd / xx) if xx else INF if dd else 0.0,
        rel_diff=near_float(dd / (xx + yy)) if xx or yy else 0.0,
        max_abs=near_float(max(distances)),
        max_abs_index=(),
        mean_abs=near_float(sum(distances) / len(distances)),
        cosine=cosine,
        mean_baseline=x_mean,
        std_baseline=x_std,
        min_baseline=x_min,
        max_baseline=x_max,
        mean_target=y_mean,
        std_target=y_std,
        min_target=y_min,
        max_target=y_max,
        **counts,
    )


def assert_right(baseline: torch.Tensor, target: torch.Tensor, tolerance: float | None = None) -> DiffStats:
    """Measure, and compare with exact arithmetic to what the working precision allows."""
    found, wanted = measure(baseline, target), expected(baseline, target)
    if tolerance is None:
        wide = any(not (t.is_floating_point() or t.is_complex()) or t.dtype in WIDE for t in (baseline, target))
        tolerance = 1e-13 if wide else 4e-6
    for field in dataclasses.fields(DiffStats):
        name, got, want = field.name, getattr(found, field.name), getattr(wanted, field.name)
        if name == "max_abs_index":
            assert (got is None) == (want is None)
        elif isinstance(want, int) or name.startswith(("min_", "max_baseline", "max_target")):
            assert got == pytest.approx(want, rel=0, abs=0, nan_ok=True), name
        elif name.startswith("mean_") and name != "mean_abs":
            side = name.removeprefix("mean_")
            largest = max(abs(getattr(wanted, f"min_{side}")), abs(getattr(wanted, f"max_{side}")))
            assert got == pytest.approx(want, rel=tolerance, abs=tolerance * largest, nan_ok=True), name
        else:
            absolute = tolerance if name == "cosine" else 1e-320
            assert got == pytest.approx(want, rel=tolerance, abs=absolute, nan_ok=True), name
    if found.max_abs_index is not None:
        assert len(found.max_abs_index) == baseline.dim()
        x, y = (elements(tensor[found.max_abs_index]) for tensor in (baseline, target))
        there = max(
            near_float(abs(Fraction(a) - Fraction(b))) if math.isfinite(a) and math.isfinite(b) else -1.0
            for a, b in zip(x, y, strict=True)
        )
        assert there == pytest.approx(wanted.max_abs, rel=tolerance)
    return found


WIDE = (torch.float64, torch.complex128)
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
FLOAT8S = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
COMPLEXES = [torch.complex128, torch.complex64, torch.complex32]
INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64]
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
DTYPES = [*FLOATS, *FLOAT8S, *COMPLEXES, *INTEGERS, torch.bool]


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_complex:
        parts = torch.randn(*shape, 2, generator=generator, dtype=torch.float64)
        return torch.view_as_complex(parts).to(dtype)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=generator).to(dtype)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks, measured as large ones are, and a shorter last one, measured as small ones are."""
    monkeypatch.setattr(diffs, "CPU_BLOCK", 64)
    monkeypatch.setattr(diff_sums, "_FEW", 20)
    monkeypatch.setattr(diff_sums, "_ROW", 32)


@pytest.mark.parametrize("size", [100, 3000])
@pytest.mark.parametrize("dtype", [*FLOATS, *FLOAT8S], ids=str)
def test_random_tensors_are_measured_to_six_digits(dtype: torch.dtype, size: int) -> None:
    # Not around zero, where a mean or a cosine may be as small as one pleases.
    x = random((size,), torch.float64, 0) + 0.7
    y = x + 0.3 * random((size,), torch.float64, 1)
    assert_right(x.to(dtype), y.to(dtype), tolerance=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (7, 3), (2, 3, 5, 7)], ids=str)
def test_every_dtype_is_measured_as_exact_arithmetic_does(
    dtype: torch.dtype, shape: tuple[int, ...], small_blocks: None
) -> None:
    assert_right(random(shape, dtype, 0), random(shape, dtype, 1))


@pytest.mark.parametrize("baseline", [*FLOATS, torch.float8_e5m2, torch.int32, torch.bool], ids=str)
@pytest.mark.parametrize("target", [*FLOATS, torch.complex64], ids=str)
def test_the_sides_may_differ_in_dtype(baseline: torch.dtype, target: torch.dtype, small_blocks: None) -> None:
    if target.is_complex:
        baseline = torch.complex128 if baseline == torch.float64 else torch.complex32
    assert_right(random((5, 31), baseline, 0), random((5, 31), target, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64], ids=str)
def test_identical_tensors_do_not_differ(dtype: torch.dtype, small_blocks: None) -> None:
    x = random((5, 40), dtype, 0)
    found = assert_right(x, x.clone())
    assert (found.rel_l2, found.rel_diff, found.max_abs, found.mean_abs, found.cosine) == (0, 0, 0, 0, 1)
    assert found.max_abs_index == (0, 0)


@pytest.mark.parametrize("size", [3 * diffs.CPU_BLOCK + 12345, diffs.CPU_BLOCK, diffs.CPU_BLOCK + 1])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_tensors_of_several_blocks(size: int, dtype: torch.dtype) -> None:
    x, y = (
        random((size,), dtype, 0),
        (random((size,), torch.float64, 0) + 1e-2 * random((size,), torch.float64, 1)).to(dtype),
    )
    y[size - 2] = 9
    found = measure(x, y)
    wide_x, wide_y = (t.to(torch.float64).numpy().astype(np.longdouble) for t in (x, y))
    difference = wide_y - wide_x
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    squares_x, squares_y, squares = (np.square(values).sum() for values in (wide_x, wide_y, difference))
    assert found.rel_l2 == pytest.approx(float(np.sqrt(squares / squares_x)), rel=tolerance)
    assert found.rel_diff == pytest.approx(float(squares / (squares_x + squares_y)), rel=tolerance)
    assert found.cosine == pytest.approx(float((wide_x * wide_y).sum() / np.sqrt(squares_x * squares_y)), rel=1e-8)
    assert found.mean_abs == pytest.approx(float(np.abs(difference).mean()), rel=tolerance)
    assert found.max_abs == pytest.approx(float(np.abs(difference).max()), rel=tolerance)
    assert found.max_abs_index == (size - 2,)
    assert found.mean_target == pytest.approx(float(wide_y.mean()), abs=1e-7)
    assert found.std_target == pytest.approx(float(wide_y.std()), rel=tolerance)
    assert (found.min_target, found.max_target) == (float(wide_y.min()), float(wide_y.max()))


def test_rel_diff_is_one_minus_the_normalised_inner_product() -> None:
    x, y = random((300, 7), torch.float32, 0), random((300, 7), torch.float32, 1)
    inner, norms = (x.double() * y.double()).sum(), (x.double() ** 2 + y.double() ** 2).sum()
    assert measure(x, y).rel_diff == pytest.approx(float(1 - 2 * inner / norms), rel=1e-6)


def test_a_difference_below_the_resolution_of_that_identity_is_still_measured() -> None:
    x = random((1000,), torch.float32, 0)
    y = x.clone()
    y[17] = torch.nextafter(y[17], torch.tensor(INF))
    found = assert_right(x, y)
    assert 0 < found.rel_diff < 1e-14
    assert 0 < 1 - found.cosine < 1e-14 or found.cosine == 1


LAYOUTS = {
    "transposed": lambda x: x.t(),
    "strided": lambda x: x[::3, 1::2],
    "expanded": lambda x: x[:1].expand(40, 24),
    "expanded from one element": lambda x: x[0, 0].expand(3, 50),
    "flipped": lambda x: x.flip(0)[2:],
    "view with an offset": lambda x: x[3:, 2:],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.complex64], ids=str)
def test_any_layout_is_measured_element_by_element(layout: str, dtype: torch.dtype, small_blocks: None) -> None:
    x, y = LAYOUTS[layout](random((30, 24), dtype, 0)), LAYOUTS[layout](random((30, 24), dtype, 1))
    assert measure(x, y.contiguous()) == measure(x, y) == measure(x.contiguous(), y)
    assert_right(x, y)


def test_conjugated_and_negated_views_are_resolved() -> None:
    x = random((9, 9), torch.complex64, 0)
    assert measure(x.conj(), x.conj().resolve_conj()).max_abs == 0
    assert measure(x.conj(), x).max_abs == pytest.approx(2 * x.imag.abs().max().item())
    assert measure(x.conj().imag, -x.imag).max_abs == 0


def test_a_complex_difference_is_found_at_the_complex_elements_index() -> None:
    x = random((4, 5), torch.complex64, 0)
    y = x.clone()
    y[2, 3] += 3j
    found = assert_right(x, y)
    assert found.max_abs_index == (2, 3)
    assert found.numel == 20


@pytest.mark.parametrize("shape", [(1,), (300,), (3, 100), (2, 2, 70), (20_000,), (70, 9000)], ids=str)
def test_the_index_is_that_of_the_largest_difference(shape: tuple[int, ...]) -> None:
    x = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    for place in (0, x.numel() // 2, x.numel() - 1):
        y = x.clone()
        y.view(-1)[place] += 2
        assert measure(x, y).max_abs_index == tuple(int(i) for i in np.unravel_index(place, shape))


def test_of_equal_differences_the_first_is_named(small_blocks: None) -> None:
    x = torch.zeros(40, 10)
    y = x.clone()
    y[9:30, 4] = 1
    assert measure(x, y).max_abs_index == (9, 4)


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.complex64, torch.bool], ids=str)
def test_empty_tensors_do_not_differ(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    found = assert_right(torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype))
    assert found.rel_l2 == found.rel_diff == found.max_abs == found.mean_abs == 0
    assert found.cosine == 1
    assert found.max_abs_index is None
    assert math.isnan(found.mean_baseline)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_zero_against_zero_and_against_something(dtype: torch.dtype) -> None:
    zero, something = torch.zeros(50, dtype=dtype), random((50,), dtype, 0)
    both, baseline, target = assert_right(zero, zero), assert_right(zero, something), assert_right(something, zero)
    assert (both.rel_l2, both.rel_diff, both.cosine) == (0, 0, 1)
    assert (baseline.rel_l2, baseline.rel_diff, baseline.cosine) == (INF, 1, 0)
    assert (target.rel_l2, target.rel_diff, target.cosine) == (1, 1, 0)


# -- values for which the quick sums are no good ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_combination_of_non_finite_values_is_counted_and_left_out(dtype: torch.dtype, small_blocks: None) -> None:
    values = torch.tensor([NAN, INF, -INF, 1.5, -2.0], dtype=dtype)
    x, y = torch.cartesian_prod(values, values).unbind(1)
    found = assert_right(x, y)
    assert (found.nonfinite_baseline, found.nonfinite_target, found.nonfinite_differ) == (15, 15, 18)
    assert found.max_abs == 3.5
    # The same among enough finite values that some blocks have no gaps, and some nothing else.
    x = torch.cat([x, random((200,), dtype, 0), torch.full((200,), NAN, dtype=dtype)])
    y = torch.cat([y, random((200,), dtype, 1), torch.full((200,), -INF, dtype=dtype)])
    found = assert_right(x, y)
    assert (found.nonfinite_baseline, found.nonfinite_target, found.nonfinite_differ) == (215, 215, 218)


@pytest.mark.parametrize(
    ("x", "y", "differ"), [(NAN, NAN, 0), (INF, INF, 0), (INF, -INF, 7), (NAN, 1.0, 7), (1.0, INF, 7)]
)
def test_without_a_finite_pair_there_is_nothing_to_say(x: float, y: float, differ: int) -> None:
    found = assert_right(torch.full((7,), x), torch.full((7,), y))
    assert found.nonfinite_differ == differ
    assert found.max_abs_index is None
    assert math.isnan(found.rel_l2)
    assert math.isnan(found.cosine)
    assert math.isnan(found.max_target)


def test_masked_attention_scores_are_compared_where_they_are_finite(small_blocks: None) -> None:
    hidden = torch.ones(4, 24, 24, dtype=torch.bool).triu(1)
    x, y = (random((4, 24, 24), torch.float32, seed).masked_fill(hidden, -INF) for seed in (0, 1))
    found = assert_right(x, y)
    assert found.nonfinite_baseline == found.nonfinite_target == int(hidden.sum())
    assert found.nonfinite_differ == 0
    assert not hidden[found.max_abs_index]


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_gap_is_no_zero(dtype: torch.dtype, sign: int, small_blocks: None) -> None:
    x, y = (sign * (random((300,), dtype, seed).abs() + 1) for seed in (0, 1))
    x[3:200:3], y[5:250:5] = NAN, INF
    found = assert_right(x, y)
    assert min(abs(found.min_baseline), abs(found.max_baseline)) >= 1
    # Without any difference the largest is at the first pair that is finite.
    x[:70] = -INF
    same = assert_right(x, x.clone())
    assert same.max_abs == 0
    assert same.max_abs_index == (70,)


def test_a_spread_and_a_product_are_measured_past_gaps(small_blocks: None) -> None:
    x, y = random((300,), torch.float32, 0) + 1e4, random((300,), torch.bfloat16, 1)
    x[::7], y[::5] = INF, NAN
    for baseline, target in ((x, y), (y, x)):
        assert_right(baseline, target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [1e-30, 1e-38, 1e-12, 1e12, 1e30, 3e37])
def test_magnitudes_whose_squares_leave_float32(dtype: torch.dtype, scale: float, small_blocks: None) -> None:
    x, y = (random((3, 50), torch.float64, seed).mul(scale).to(dtype) for seed in (0, 1))
    assert_right(x, y)
    assert_right(x, random((3, 50), dtype, 2))


@pytest.mark.parametrize("scale", [1e-320, 1e-300, 1e-160, 1e160, 1e300, 1e307])
def test_magnitudes_whose_squares_leave_float64(scale: float, small_blocks: None) -> None:
    x, y = (random((3, 50), torch.float64, seed).clamp(-10, 10).mul(scale) for seed in (0, 1))
    found = assert_right(x, y)
    assert 0.5 < found.rel_l2 < 3
    assert_right(x, random((3, 50), torch.float64, 2))


def test_one_huge_block_among_usual_ones(small_blocks: None) -> None:
    x, y = random((300,), torch.float64, 0), random((300,), torch.float64, 1)
    x[70:90] *= 1e200
    y[150:160] *= 1e250
    assert_right(x, y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_largest_floats_of_opposite_sign(dtype: torch.dtype) -> None:
    x = torch.full((10,), torch.finfo(dtype).max, dtype=dtype)
    found = assert_right(x, -x)
    assert found.rel_l2 == 2
    assert found.cosine == -1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("offset", [10.0, 1e3, 1e5, -1e6])
def test_the_spread_of_values_around_a_large_mean(dtype: torch.dtype, offset: float, small_blocks: None) -> None:
    x, y = random((500,), dtype, 0) + offset, random((500,), dtype, 1) + offset
    found = assert_right(x, y)
    assert 0.8 < found.std_baseline < 1.2


def test_the_spread_of_values_around_a_mean_far_beyond_it() -> None:
    x = random((500,), torch.float64, 0)
    assert measure(x + 1e12, x).std_baseline == pytest.approx((x + 1e12 - 1e12).std(correction=0).item(), rel=1e-12)


@pytest.mark.parametrize("value", [0.1, -3.7e-5, 1e30, 7e22])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_constant_has_no_spread(value: float, dtype: torch.dtype, small_blocks: None) -> None:
    x = torch.full((1000,), value, dtype=torch.float64).to(dtype)
    if not x.isfinite().all():
        pytest.skip("beyond the range of the dtype")
    found = assert_right(x, 3 * x)
    assert found.std_baseline == 0
    assert found.mean_baseline == x[0].item()


@pytest.mark.parametrize("size", [1000, diffs.CPU_BLOCK, 2 * diffs.CPU_BLOCK])
@pytest.mark.parametrize("shift", [0.1, 0.3, 1.1])
def test_a_constant_difference_is_not_lost_in_roundings_that_point_one_way(size: int, shift: float) -> None:
    x = random((size,), torch.float32, 0)
    y = x + shift
    exact = (y.double() - x.double()).norm() / x.double().norm()
    assert measure(x, y).rel_l2 == pytest.approx(exact.item(), rel=1e-6)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("size", [1000, 70_000, diffs.CPU_BLOCK])
def test_one_magnitude_all_over_is_not_lost_in_roundings_either(size: int, dtype: torch.dtype) -> None:
    signs = torch.randint(0, 2, (size,), generator=torch.Generator().manual_seed(0)) * 2 - 1
    x, y = (0.3 * signs).to(dtype), (1.1 * signs.flip(0)).to(dtype)
    wide_x, wide_y = x.double(), y.double()
    found = measure(x, y)
    assert found.rel_l2 == pytest.approx(((wide_x - wide_y).norm() / wide_x.norm()).item(), rel=1e-6)
    assert found.std_baseline == pytest.approx(wide_x.std(correction=0).item(), rel=1e-6)
    assert found.std_target == pytest.approx(wide_y.std(correction=0).item(), rel=1e-6)


@pytest.mark.parametrize("value", [1000.0, 1e-3, 3e-14])
def test_one_element_that_differs_in_its_last_bit_makes_a_spread(value: float, small_blocks: None) -> None:
    x = torch.full((300,), value)
    x[123] = torch.nextafter(x[123], torch.tensor(INF))
    found = assert_right(x, 2 * x)
    assert 0 < found.std_baseline < 1e-7 * value


@pytest.mark.parametrize("ratio", [1e-20, 1e-6, 1e-3, 0.2, 7.0, 1e3, 1e6, 1e15])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_cosine_of_norms_that_are_far_apart(ratio: float, dtype: torch.dtype, small_blocks: None) -> None:
    x, noise = random((300,), dtype, 0), random((300,), dtype, 1)
    for y in (ratio * x, -ratio * x, ratio * (x + noise), ratio * noise):
        assert_right(x, y)


# -- whatever the surroundings ----------------------------------------------------------------------------------------


def test_shapes_that_differ_are_refused_with_both_named() -> None:
    with pytest.raises(ValueError, match=r"\[2, 3\].*\[3, 2\]"):
        measure(torch.zeros(2, 3), torch.zeros(3, 2))
    with pytest.raises(ValueError, match=r"\[1\].*\[\]"):
        measure(torch.zeros(1), torch.tensor(0.0))


def test_devices_that_differ_are_refused_with_both_named() -> None:
    with pytest.raises(ValueError, match=r"cpu.*meta"):
        measure(torch.zeros(2), torch.zeros(2, device="meta"))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(2, 2).to_sparse(),
        lambda: torch.zeros(2, 2, device="meta"),
        lambda: torch.quantize_per_tensor(torch.zeros(2, 2), 1.0, 0, torch.qint8),
    ],
    ids=["sparse", "meta", "quantized"],
)
def test_a_tensor_that_is_not_dense_is_refused(make: Callable[[], torch.Tensor]) -> None:
    tensor = make()
    with pytest.raises(ValueError, match="dense"):
        measure(tensor, tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64], ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e30, NAN])
def test_the_tensors_stay_as_they_were(dtype: torch.dtype, scale: float, small_blocks: None) -> None:
    x, y = (random((100,), dtype, seed) * scale for seed in (0, 1))
    before = [tensor.clone() for tensor in (x, y)]
    measure(x, y)
    for tensor, copy in zip((x, y), before, strict=True):
        torch.testing.assert_close(tensor, copy, rtol=0, atol=0, equal_nan=True)
        assert tensor._version == 0


@pytest.mark.parametrize("scale", [1.0, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.complex64], ids=str)
def test_the_mode_of_autograd_does_not_matter(dtype: torch.dtype, scale: float, small_blocks: None) -> None:
    x, y = random((100,), torch.complex64, 0).real * scale, random((100,), torch.complex64, 1).real * scale
    x, y = x.to(dtype), y.to(dtype)
    wanted = pickle.dumps(measure(x, y))
    leaf = x.clone().requires_grad_()
    product = y.clone().requires_grad_() * 1
    with torch.inference_mode():
        inference = y.clone()
        assert pickle.dumps(measure(x, inference)) == wanted
        assert pickle.dumps(measure(leaf, product)) == wanted
    with torch.no_grad():
        assert pickle.dumps(measure(leaf, product)) == wanted
    assert pickle.dumps(measure(leaf, product)) == wanted
    assert pickle.dumps(measure(torch.nn.Parameter(x), inference)) == wanted
    assert leaf.grad is None
    product.abs().sum().backward()


def test_changed_defaults_and_autocast_do_not_matter(small_blocks: None) -> None:
    for scale in (1.0, 1e30):
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            x, y = (
                random((100,), dtype, seed) * scale if dtype != torch.int64 else random((100,), dtype, seed)
                for seed in (0, 1)
            )
            wanted = measure(x, y)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert measure(x, y) == wanted
            with torch.device("meta"):
                assert measure(x, y) == wanted
            torch.set_default_dtype(torch.float64)
            try:
                assert measure(x, y) == wanted
            finally:
                torch.set_default_dtype(torch.float32)


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


def test_memory_made_in_inference_mode_serves_outside_of_it() -> None:
    x, y = random((100_000,), torch.bfloat16, 0), random((100_000,), torch.bfloat16, 1)
    found = []

    def work() -> None:  # a new thread has no memory yet
        with torch.inference_mode():
            found.append(measure(x, y))
        found.append(measure(x, y))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [measure(x, y)] * 2


def test_statistics_are_values() -> None:
    found = measure(torch.zeros(3), torch.ones(3))
    assert pickle.loads(pickle.dumps(found)) == found
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.rel_l2 = 0.0  # type: ignore[misc]
    for field in dataclasses.fields(found):
        value = getattr(found, field.name)
        assert type(value) in (int, float, tuple), field.name


# -- anything at all --------------------------------------------------------------------------------------------------


@st.composite
def pairs_of_tensors(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = draw(st.sampled_from(FLOATS))
    anything = st.floats(width=64 if dtype == torch.float64 else 32)
    usual = st.floats(-100, 100, width=16)
    value = draw(st.sampled_from([usual, anything, usual | anything, usual | st.sampled_from([NAN, INF, -INF])]))
    pairs = draw(st.lists(st.tuples(value, value) | value.map(lambda x: (x, x)), max_size=30))
    x, y = (torch.tensor([pair[i] for pair in pairs], dtype=torch.float64).to(dtype) for i in (0, 1))
    return x, y


@given(pairs_of_tensors(), st.sampled_from([4, 1 << 17]))
def test_random_tensors_are_measured_as_exact_arithmetic_does(
    pair: tuple[torch.Tensor, torch.Tensor], block: int
) -> None:
    before, diffs.CPU_BLOCK = diffs.CPU_BLOCK, block
    try:
        assert_right(*pair)
    finally:
        diffs.CPU_BLOCK = before


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30, NAN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.int32], ids=str)
def test_what_a_gpu_does_is_right_on_the_cpu_too(
    dtype: torch.dtype, scale: float, small_blocks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = (random((7, 50), dtype, seed) * (scale if dtype != torch.int32 else 1) for seed in (0, 1))
    x.view(-1)[123:125] = 50
    wanted = measure(x, y)
    monkeypatch.setattr(diff_sums, "_is_slow_to_answer", lambda _: True)
    found = assert_right(x, y)
    assert found.max_abs_index == wanted.max_abs_index
    assert found.mean_abs == pytest.approx(wanted.mean_abs, rel=1e-6, nan_ok=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30, NAN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.int32], ids=str)
def test_a_gpu_measures_what_the_cpu_does(dtype: torch.dtype, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diffs, "DEVICE_BLOCK", 1000)
    x, y = (random((70, 50), dtype, seed) * (scale if dtype != torch.int32 else 1) for seed in (0, 1))
    x.view(-1)[1234:1236] = 50
    assert_right(x.cuda(), y.cuda())
