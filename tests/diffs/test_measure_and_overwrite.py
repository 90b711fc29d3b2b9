"""Measuring and overwriting in one pass: statistics of the original tensors, and an exact copy."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kit.exact_diffs import DTYPES

from graftlab.diffs import kernel
from graftlab.diffs.measure import measure, measure_and_overwrite

FALLBACK_BLOCK = 64
IN_ONE_PASS = [dtype for dtype in DTYPES if kernel.may_copy(dtype)]
# Equal ones, so that the largest difference stands in several places; and what is not finite.
NUMBERS = st.sampled_from([0.0, 1.0, 2.0, 3.0, 5.0, 100.0, math.inf, math.nan])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # one way for all examples
@given(
    st.sampled_from(IN_ONE_PASS),
    st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=7),
    st.integers(1, 300),
    st.sampled_from(["baseline", "target"]),
)
def test_a_tensor_is_measured_as_it_was_and_then_is_the_other_one(
    way: str, dtype: torch.dtype, pairs: list[tuple[float, float]], count: int, own: str
) -> None:
    columns = [torch.tensor(each, dtype=torch.float64) for each in zip(*(pairs * count)[:count], strict=True)]
    if not dtype.is_floating_point:
        columns = [each.nan_to_num(7, 7) for each in columns]
    baseline, target = (each.to(dtype) for each in columns)
    bytes_of_baseline, bytes_of_target = (each.view(torch.uint8).clone() for each in (baseline, target))
    wanted = measure(baseline, target)
    found = measure_and_overwrite(baseline, target, own=baseline if own == "baseline" else target)
    if way == "fallback":
        assert found is None
        assert torch.equal(baseline.view(torch.uint8), bytes_of_baseline)
        assert torch.equal(target.view(torch.uint8), bytes_of_target)
        return
    # As text, because NaN is not equal to itself.
    assert repr(found) == repr(wanted)
    other = bytes_of_target if own == "baseline" else bytes_of_baseline
    assert torch.equal(baseline.view(torch.uint8), other)
    assert torch.equal(target.view(torch.uint8), other)


@pytest.mark.parametrize(
    ("baseline", "target"),
    [
        (torch.ones(8, dtype=torch.float64), torch.zeros(8, dtype=torch.float64)),
        (torch.ones(8), torch.zeros(8, dtype=torch.bfloat16)),
        (torch.ones(8), torch.zeros(4)),
        (torch.ones(8), torch.zeros(16)[::2]),
        (torch.ones(8, dtype=torch.complex64).imag, torch.zeros(8)),
        (torch.ones(0), torch.zeros(0)),
        (torch.ones(2, 4), torch.zeros(4, 2)),
        (torch.ones(8), torch._neg_view(torch.zeros(8))),
        (torch.ones(8), torch.zeros(8).as_subclass(type("Other", (torch.Tensor,), {}))),
        (torch.ones(8), torch.zeros(8, device="meta")),
    ],
    ids=[
        *("squares beyond float64", "two dtypes", "two shapes", "with gaps", "with gaps too", "empty"),
        *("two shapes of one size", "negated", "another class", "another device"),
    ],
)
def test_dtypes_that_need_two_passes_are_not_overwritten(baseline: torch.Tensor, target: torch.Tensor) -> None:
    for one, other in ((baseline, target), (target, baseline)):
        before = one.clone(), other.clone()
        for own in (one, other):
            assert measure_and_overwrite(one, other, own=own) is None
        for each, was in zip((one, other), before, strict=True):
            assert each.is_meta or torch.equal(each, was)


@pytest.mark.parametrize("size", [8, kernel.LETS_GO_FROM])
def test_statistics_that_the_kernel_did_not_find_are_not_returned(size: int) -> None:
    compiled = kernel.load()
    if compiled is None:
        pytest.skip(kernel.description())
    x, y = torch.zeros(size, dtype=torch.float64), torch.ones(size, dtype=torch.float64)
    types = compiled.types[x.dtype, y.dtype]
    # It refuses to copy them. The statistics of the measurement before are still in its memory.
    assert compiled.measure(x.data_ptr(), y.data_ptr(), size, types, x.shape).max_abs == 1
    with pytest.raises(RuntimeError, match=f"two tensors of {size:,} elements were not measured"):
        compiled.measure(x.data_ptr(), y.data_ptr(), size, types, x.shape, kernel.X_OVER_Y)


def test_a_leaf_that_requires_a_gradient_is_written_and_keeps_its_version() -> None:
    if kernel.load() is None:
        pytest.skip(kernel.description())
    own = torch.zeros(5000, requires_grad=True)
    version = own._version
    assert measure_and_overwrite(torch.ones(5000), own, own=own) is not None
    assert torch.equal(own.detach(), torch.ones(5000))
    assert own._version == version
