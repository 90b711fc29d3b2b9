"""The Triton kernel in Triton's interpreter: run by test_triton_kernel.py, in a separate process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kit.exact_diffs import INF, NAN, assert_right, random
from test_diffs_reference import errors, exactly, ill_conditioned, statistics

from graftlab.diffs import fallback, kernel, triton_kernel
from graftlab.diffs.measure import measure


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Few programs of few elements, so that small tensors have several of both; the kernel must have been asked."""
    assert triton_kernel.INTERPRETED
    asked = []
    original = triton_kernel.measure

    def counted(x: torch.Tensor, y: torch.Tensor, factors: list[float] | None) -> Any:
        asked.append(factors)
        return original(x, y, factors)

    monkeypatch.setattr(triton_kernel, "measure", counted)
    monkeypatch.setattr(triton_kernel, "BLOCK", 16)
    monkeypatch.setattr(triton_kernel, "PROGRAMS", 3)
    monkeypatch.setattr(kernel, "load", lambda: None)
    yield asked
    assert asked
    assert not fallback._failed


# Elements are converted when they are read; from there on, the length means the same to each dtype.
DTYPES = sorted(triton_kernel.DTYPES, key=str)
LENGTHS = [(dtype, size) for size in (1, 15, 16, 17, 48, 250) for dtype in (torch.bfloat16, torch.float64)]


@pytest.mark.parametrize(("dtype", "size"), [*((dtype, 49) for dtype in DTYPES), *LENGTHS], ids=str)
def test_every_dtype_and_length(dtype: torch.dtype, size: int) -> None:
    assert_right(random((size,), dtype, 0), random((size,), dtype, 1))


@pytest.mark.parametrize("scale", [1e-320, 1e-300, 1.0, 1e300])
def test_values_whose_squares_leave_float64_take_a_second_pass(scale: float, launches: list[Any]) -> None:
    x, y = (random((100,), torch.float64, seed) * scale for seed in (0, 1))
    assert_right(x, y)
    assert len(launches) == (1 if scale == 1 else 2)


values = st.sampled_from([0.0, -0.0, 1.0, -2.5, 1e-310, 1e300, -1e300, NAN, INF, -INF]) | st.floats()
pairs = st.lists(st.tuples(values, values), min_size=1, max_size=70)


@given(pairs)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_values(pairs: list[tuple[float, float]]) -> None:
    x, y = torch.tensor(pairs, dtype=torch.float64).t().contiguous()
    assert_right(x, y)


@pytest.mark.parametrize("case", ill_conditioned())
def test_ill_conditioned_tensors(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernel, "BLOCK", 2048)
    x, y = ill_conditioned()[case]
    assert max(errors(statistics(x, y), exactly(x, y)).values()) <= 1e-6


def test_other_dtypes_beside_each_other_and_the_first_of_several_largest() -> None:
    x = torch.ones(90, dtype=torch.bfloat16)
    y = x.to(torch.float32)
    # Of one thread of the first program, and of another program.
    y[[4, 20, 70]] += 4
    assert measure(x, y).max_abs_index == (4,)
    assert_right(x, y)
