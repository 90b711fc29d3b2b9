"""`measure` gives the statistics of exact arithmetic for any dtype, layout and range of values."""

from __future__ import annotations

import dataclasses
import itertools
import math
import pickle
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kit.exact_diffs import COMPLEXES, DTYPES, FLOAT8S, FLOATS, INF, NAN, assert_right, random
from kit.refusals import exactly

from graftlab.diffs.measure import measure, measure_and_overwrite

FALLBACK_BLOCK = 64
pytestmark = [
    pytest.mark.usefixtures("way"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]


@pytest.mark.slow
@pytest.mark.parametrize("size", [100, 1100])
@pytest.mark.parametrize("dtype", [*FLOATS, *FLOAT8S], ids=str)
def test_random_tensors_are_measured_to_six_digits(dtype: torch.dtype, size: int) -> None:
    # Not around zero, where a mean or a cosine may be as small as one pleases.
    x = random((size,), torch.float64, 0) + 0.7
    y = x + 0.3 * random((size,), torch.float64, 1)
    assert_right(x.to(dtype), y.to(dtype), tolerance=1e-6)


def test_every_dtype_is_measured_as_exact_arithmetic_does() -> None:
    for dtype, shape in itertools.product(DTYPES, ((), (1,), (7, 3), (2, 3, 5, 7))):
        assert_right(random(shape, dtype, 0), random(shape, dtype, 1))


def test_the_sides_may_differ_in_dtype() -> None:
    baselines = [dtype for dtype in DTYPES if not dtype.is_complex]
    targets = (*FLOATS, torch.float8_e5m2, torch.int8, torch.int32, torch.uint64, torch.bool)
    for baseline, target in itertools.product(baselines, targets):
        assert_right(random((5, 31), baseline, 0), random((5, 31), target, 1))


@pytest.mark.parametrize("baseline", COMPLEXES, ids=str)
def test_complex_sides_may_differ_in_dtype(baseline: torch.dtype) -> None:
    for target in COMPLEXES:
        assert_right(random((5, 31), baseline, 0), random((5, 31), target, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64], ids=str)
def test_identical_tensors_do_not_differ(dtype: torch.dtype) -> None:
    x = random((5, 40), dtype, 0)
    found = assert_right(x, x.clone())
    assert (found.rel_l2, found.rel_diff, found.max_abs, found.mean_abs, found.cosine) == (0, 0, 0, 0, 1)
    assert found.max_abs_index == (0, 0)


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
def test_any_layout_is_measured_element_by_element(layout: str, dtype: torch.dtype) -> None:
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


def test_of_equal_differences_the_first_is_named() -> None:
    x = torch.zeros(40, 10)
    y = x.clone()
    y[9:30, 4] = 1
    assert measure(x, y).max_abs_index == (9, 4)


@pytest.mark.parametrize(
    ("places", "first"),
    [((5, 8_999), 5), ((8_999, 8_191), 8_191), ((8_192, 8_999), 8_192), ((4_095, 4_096, 8_998), 4_095)],
)
def test_of_equal_differences_the_first_is_named_whichever_block_it_is_in(places: tuple[int, ...], first: int) -> None:
    x = torch.zeros(9_000)
    y = x.clone()
    y[list(places)] = -1.0
    assert measure(x, y).max_abs_index == (first,)


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
def test_every_combination_of_non_finite_values_is_counted_and_left_out(dtype: torch.dtype) -> None:
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


def test_masked_attention_scores_are_compared_where_they_are_finite() -> None:
    hidden = torch.ones(4, 24, 24, dtype=torch.bool).triu(1)
    x, y = (random((4, 24, 24), torch.float32, seed).masked_fill(hidden, -INF) for seed in (0, 1))
    found = assert_right(x, y)
    assert found.nonfinite_baseline == found.nonfinite_target == int(hidden.sum())
    assert found.nonfinite_differ == 0
    assert not hidden[found.max_abs_index]


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_nonfinite_elements_do_not_count_as_zero(dtype: torch.dtype, sign: int) -> None:
    x, y = (sign * (random((300,), dtype, seed).abs() + 1) for seed in (0, 1))
    x[3:200:3], y[5:250:5] = NAN, INF
    found = assert_right(x, y)
    assert min(abs(found.min_baseline), abs(found.max_baseline)) >= 1
    # Without any difference the largest is at the first pair that is finite.
    x[:70] = -INF
    same = assert_right(x, x.clone())
    assert same.max_abs == 0
    assert same.max_abs_index == (70,)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("values", [[3.0], [-3.0], [-3.0, 3.0], [-0.0, 3.0], [0.0, -3.0], [0.0, -0.0], [6e-8, -6e-8]])
def test_extremes_of_small_floats_are_found_whatever_their_signs(dtype: torch.dtype, values: list[float]) -> None:
    x = torch.tensor(values, dtype=dtype).repeat(700)
    y = x * torch.linspace(0.5, 2.0, x.numel()).to(dtype)
    for baseline, target in ((x, y), (y, x), (x, x[:1].expand(x.shape).contiguous())):
        assert_right(baseline, target)


def test_a_bool_counts_as_one_whatever_its_byte() -> None:
    x = torch.arange(1000).remainder(7).to(torch.uint8).view(torch.bool)
    found = measure(x, torch.zeros_like(x))
    assert (found.max_baseline, found.max_abs, found.max_abs_index) == (1, 1, (1,))
    assert found.mean_abs == found.mean_baseline == pytest.approx(float((torch.arange(1000) % 7 > 0).double().mean()))


def test_a_spread_and_a_product_are_measured_past_gaps() -> None:
    x, y = random((300,), torch.float32, 0) + 1e4, random((300,), torch.bfloat16, 1)
    x[::7], y[::5] = INF, NAN
    for baseline, target in ((x, y), (y, x)):
        assert_right(baseline, target)


@pytest.mark.parametrize("scale", [1e-30, 1e-38, 1e-12, 1e12, 1e30, 3e37])
def test_magnitudes_whose_squares_leave_float32(scale: float) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x, y = (random((3, 50), torch.float64, seed).mul(scale).to(dtype) for seed in (0, 1))
        assert_right(x, y)
        assert_right(x, random((3, 50), dtype, 2))


@pytest.mark.parametrize("scale", [1e-320, 1e-300, 1e-160, 1e160, 1e300, 1e307])
def test_magnitudes_whose_squares_leave_float64(scale: float) -> None:
    x, y = (random((3, 50), torch.float64, seed).clamp(-10, 10).mul(scale) for seed in (0, 1))
    found = assert_right(x, y)
    assert 0.5 < found.rel_l2 < 3
    assert_right(x, random((3, 50), torch.float64, 2))


def test_one_huge_block_among_usual_ones() -> None:
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
def test_the_spread_of_values_around_a_large_mean(dtype: torch.dtype, offset: float) -> None:
    x, y = random((500,), dtype, 0) + offset, random((500,), dtype, 1) + offset
    found = assert_right(x, y)
    assert 0.8 < found.std_baseline < 1.2


def test_the_spread_of_values_around_a_mean_far_beyond_it() -> None:
    x = random((500,), torch.float64, 0)
    assert measure(x + 1e12, x).std_baseline == pytest.approx((x + 1e12 - 1e12).std(correction=0).item(), rel=1e-12)


@pytest.mark.parametrize("value", [0.1, -3.7e-5, 1e30, 7e22])
def test_a_constant_has_no_spread(value: float) -> None:
    tried = [torch.full((1000,), value, dtype=torch.float64).to(dtype) for dtype in FLOATS]
    # Some are beyond the range of their dtype.
    for x in (each for each in tried if each.isfinite().all()):
        found = assert_right(x, 3 * x)
        assert found.std_baseline == 0
        assert found.mean_baseline == x[0].item()


@pytest.mark.parametrize("value", [1000.0, 1e-3, 3e-14])
def test_one_element_that_differs_in_its_last_bit_makes_a_spread(value: float) -> None:
    x = torch.full((300,), value)
    x[123] = torch.nextafter(x[123], torch.tensor(INF))
    found = assert_right(x, 2 * x)
    assert 0 < found.std_baseline < 1e-7 * value


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_cosine_of_norms_that_are_far_apart(dtype: torch.dtype) -> None:
    x, noise = random((300,), dtype, 0), random((300,), dtype, 1)
    for ratio in (1e-20, 1e-6, 1e-3, 0.2, 7.0, 1e3, 1e6, 1e15):
        for y in (ratio * x, -ratio * x, ratio * (x + noise), ratio * noise):
            assert_right(x, y)


# -- whatever the surroundings ----------------------------------------------------------------------------------------


def test_shapes_that_differ_are_refused_with_both_named() -> None:
    with pytest.raises(
        ValueError,
        match=exactly(
            "the baseline has shape [2, 3] and the target [3, 2]; only tensors of one shape can be "
            "compared, so convert one to the other's shape first"
        ),
    ):
        measure(torch.zeros(2, 3), torch.zeros(3, 2))
    with pytest.raises(
        ValueError,
        match=exactly(
            "the baseline has shape [1] and the target []; only tensors of one shape can be compared, so "
            "convert one to the other's shape first"
        ),
    ):
        measure(torch.zeros(1), torch.tensor(0.0))


def test_devices_that_differ_are_refused_with_both_named() -> None:
    with pytest.raises(
        ValueError, match=exactly("the baseline is on cpu and the target on meta; move one with .to(device) first")
    ):
        measure(torch.zeros(2), torch.zeros(2, device="meta"))


def nested(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=layout)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("sparse", lambda: torch.zeros(2, 2).to_sparse()),
        ("meta", lambda: torch.zeros(2, 2, device="meta")),
        ("quantized", lambda: torch.quantize_per_tensor(torch.zeros(2, 2), 1.0, 0, torch.qint8)),
        ("nested", lambda: nested(torch.strided)),
        ("nested", lambda: nested(torch.jagged)),
    ],
)
def test_a_tensor_that_is_not_dense_is_refused_by_its_kind(kind: str, make: Callable[[], torch.Tensor]) -> None:
    tensor = make()
    with pytest.raises(ValueError, match=f"the baseline is .*{kind}.*; only dense"):
        measure(tensor, tensor)
    if kind == "nested":
        with pytest.raises(
            ValueError, match=exactly("the target is nested; only dense tensors are measured (.to_padded_tensor(0.0))")
        ):
            measure(torch.zeros(2), tensor)
        assert measure_and_overwrite(torch.zeros(2), tensor, own=tensor) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64], ids=str)
@pytest.mark.parametrize("scale", [1.0, NAN])
def test_the_tensors_stay_as_they_were(dtype: torch.dtype, scale: float) -> None:
    x, y = (random((100,), dtype, seed) * scale for seed in (0, 1))
    before = [tensor.clone() for tensor in (x, y)]
    measure(x, y)
    for tensor, copy in zip((x, y), before, strict=True):
        torch.testing.assert_close(tensor, copy, rtol=0, atol=0, equal_nan=True)
        assert tensor._version == 0


@pytest.mark.parametrize("scale", [1.0, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.complex64], ids=str)
def test_the_mode_of_autograd_does_not_matter(dtype: torch.dtype, scale: float) -> None:
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


def test_changed_defaults_and_autocast_do_not_matter() -> None:
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


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # one way for all examples
@given(pairs_of_tensors())
def test_random_tensors_are_measured_as_exact_arithmetic_does(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert_right(*pair)
