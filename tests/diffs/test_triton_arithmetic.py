"""The arithmetic of the fused CUDA kernel without Triton: its own lines, run by torch operations."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st
from kit.exact_diffs import INF, NAN, assert_right, random
from kit.examples import examples
from kit.triton_words import modules

from graftlab.diffs import fallback, kernel
from graftlab.diffs.measure import measure

NAME = "graftlab.diffs.triton_kernel"


@functools.cache
def triton_kernel() -> ModuleType:
    """The module, as it is where Triton interprets."""
    spec = importlib.util.spec_from_file_location(NAME, Path(fallback.__file__).with_name("triton_kernel.py"))
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        for name, module in modules().items():
            patch.setitem(sys.modules, name, module)
        spec.loader.exec_module(found)
    return found


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Few programs of few elements, so that small tensors have several of both; the kernel must have been asked."""
    asked = []
    fused = triton_kernel()

    def counted(x: torch.Tensor, y: torch.Tensor, factors: list[float] | None) -> Any:
        asked.append(factors)
        return fused.measure(x, y, factors)

    monkeypatch.setattr(fused, "BLOCK", 16)
    monkeypatch.setattr(fused, "PROGRAMS", 3)
    counting = SimpleNamespace(takes=fused.takes, measure=counted)
    monkeypatch.setattr(fallback, "_fused_kernel", lambda device: counting)
    monkeypatch.setattr(kernel, "load", lambda: None)
    yield asked
    assert asked
    assert not fallback._failed


@pytest.mark.parametrize("size", [1, 16, 17, 48, 49, 250])
@pytest.mark.usefixtures("launches")
def test_every_length(size: int) -> None:
    assert_right(random((size,), torch.float32, 0), random((size,), torch.float32, 1))


@pytest.mark.parametrize("scale", [1e-320, 1e-300, 1.0, 1e300])
def test_values_whose_squares_leave_float64_take_a_second_pass(scale: float, launches: list[Any]) -> None:
    x, y = (random((100,), torch.float64, seed) * scale for seed in (0, 1))
    assert_right(x, y)
    assert len(launches) == (1 if scale == 1 else 2)


values = st.sampled_from([0.0, -0.0, 1.0, -2.5, 1e-310, 1e300, -1e300, NAN, INF, -INF]) | st.floats()


@example([(NAN, INF), (INF, -INF), (-INF, NAN), (1.0, 2.0), (INF, INF), (NAN, NAN), (-INF, -INF)])
@example([(1e160 + 1e150 * i, 2.0) for i in range(20)])
@given(st.lists(st.tuples(values, values), min_size=1, max_size=70))
@examples(20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.usefixtures("launches")
def test_any_values(pairs: list[tuple[float, float]]) -> None:
    x, y = torch.tensor(pairs, dtype=torch.float64).t().contiguous()
    assert_right(x, y)


@pytest.mark.usefixtures("launches")
def test_a_spread_that_is_small_beside_the_mean_keeps_its_digits() -> None:
    x, y = (1e8 + random((200,), torch.float64, seed) for seed in (0, 1))
    found = measure(x, y)
    assert found.std_baseline == pytest.approx(x.std(correction=0).item(), rel=1e-12)
    assert found.std_target == pytest.approx(y.std(correction=0).item(), rel=1e-12)


@pytest.mark.usefixtures("launches")
def test_the_place_is_that_of_the_first_of_several_largest() -> None:
    x = torch.ones(90, dtype=torch.bfloat16)
    y = x.to(torch.float32)
    # Of one thread of the first program, and of another program.
    y[[4, 20, 70]] += 4
    assert measure(x, y).max_abs_index == (4,)
    y[83] -= 5
    assert measure(x, y).max_abs_index == (83,)


def test_it_takes_plain_tensors_of_its_dtypes() -> None:
    takes, x = triton_kernel().takes, torch.ones(4)
    assert takes(x, torch.nn.Parameter(x.half()))
    assert takes(torch.ones(4, dtype=torch.bool), torch.ones(4, dtype=torch.int64))
    assert not takes(x, x.to(torch.complex64))
    assert not takes(x.to(torch.float8_e5m2), x)
    assert not takes(x, x.as_subclass(type("Other", (torch.Tensor,), {})))


def test_negated_view_is_measured_by_its_values(launches: list[Any]) -> None:
    x = random((40,), torch.complex64, 0)
    assert_right(x.conj().imag, x.imag)
    assert launches


# ---- when it is asked -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "interprets", "has_triton", "is_asked"),
    [("cuda", "0", True, True), ("cpu", "1", True, True), ("cpu", "0", True, False), ("cuda", "0", False, False)],
)
def test_cuda_tensors_are_measured_by_triton_if_installed(
    device: str,
    interprets: str,
    has_triton: bool,
    is_asked: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", interprets)
    monkeypatch.setitem(sys.modules, "triton", modules()["triton"] if has_triton else None)
    monkeypatch.setitem(sys.modules, NAME, triton_kernel())
    found = fallback._fused_kernel.__wrapped__(device)
    assert found is (triton_kernel() if is_asked else None)
    assert ("because triton is not installed" in caplog.text) == (not has_triton)
