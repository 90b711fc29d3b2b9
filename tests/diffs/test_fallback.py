"""Measuring by torch operations: other devices, unsupported tensors, and everything without the kernel."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit.exact_diffs import INF, NAN, assert_right, random

from graftlab.diffs import fallback, kernel
from graftlab.diffs.measure import measure


class Dressed(torch.Tensor):
    """A tensor whose class computes in its own way: its elements are half of what its memory holds."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.to:
            return super().__torch_function__(func, types, args, kwargs or {}).as_subclass(torch.Tensor) / 2
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.fixture
def fallback_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of what the torch operations have measured."""
    calls: list[int] = []

    def counted(x: torch.Tensor, y: torch.Tensor) -> Any:
        calls.append(x.numel())
        return original(x, y)

    original = fallback.measure
    monkeypatch.setattr(fallback, "measure", counted)
    return calls


def test_tensor_subclass_is_measured_by_its_own_operations(fallback_calls: list[int]) -> None:
    x = random((8,), torch.float32, 0)
    assert measure(x.as_subclass(Dressed), x).rel_l2 == pytest.approx(1.0)
    assert fallback_calls == [8]


def test_plain_tensors_and_parameters_are_left_to_the_kernel(fallback_calls: list[int]) -> None:
    if kernel.load() is None:
        pytest.skip(kernel.description())
    x = random((8, 3), torch.float32, 0)
    assert measure(torch.nn.Parameter(x), x.t().contiguous().t()).max_abs == 0
    assert measure(x.to(torch.complex64), x.to(torch.complex64)).max_abs == 0
    assert fallback_calls == []


@pytest.mark.parametrize("scale", [1.0, 1e-300, 1e300])
def test_kernel_and_fallback_agree_on_everything(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = random((3000,), torch.float64, 0) * scale, random((3000,), torch.float64, 1) * scale
    x[7], y[9], y[11] = INF, NAN, -INF
    found = measure(x, y)
    monkeypatch.setattr(kernel, "load", lambda: None)
    monkeypatch.setattr(fallback, "CPU_BLOCK", 700)
    for field in dataclasses.fields(found):
        name, other = field.name, getattr(measure(x, y), field.name)
        assert getattr(found, name) == (other if isinstance(other, tuple) else pytest.approx(other, rel=1e-12)), name


@pytest.mark.parametrize(
    ("x", "y"),
    [
        # Whole blocks without a finite pair, at either end and between others.
        ([NAN, INF, 1.0, 2.0], [1.0, 2.0, 1.0, 3.0]),
        ([1.0, 2.0, NAN, 1.0, 3.0], [2.0, 2.0, 1.0, -INF, 3.0]),
        ([1.0, 2.0, INF, NAN], [1.5, 2.0, INF, NAN]),
        # Nothing differs, and what is no pair comes first.
        ([NAN, 1.0], [NAN, 1.0]),
        ([INF, 0.0, 3.0], [-INF, 0.0, 3.0]),
        ([INF, -INF, NAN, INF], [-INF, INF, INF, INF]),
        ([0.0, 0.0, 0.0], [0.0, 1.0, 1.0]),
        ([0.0, 2.0, 0.0], [0.0, 0.0, 0.0]),
        ([-3.0, -3.0, -3.0], [3.0, 3.0, 3.0]),
        ([1e16, 1e16, 1e16], [1e16, 1e16, 1e16]),
        ([-1e200, 1e-3, 5.0], [1e-200, 1e-3, 5.0]),
        ([-1.7e308, 1.0], [1.7e308, 1.0]),
    ],
)
def test_blocks_are_combined_whatever_is_no_pair_in_them(
    x: list[float], y: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "load", lambda: None)
    monkeypatch.setattr(fallback, "CPU_BLOCK", 2)
    assert_right(*(torch.tensor(each, dtype=torch.float64) for each in (x, y)))


def test_failed_fused_kernel_falls_back_to_torch_and_logs_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*given: Any) -> Any:
        raise RuntimeError("no driver")

    broken = SimpleNamespace(takes=lambda x, y: True, measure=fails)
    monkeypatch.setattr(fallback, "_fused_kernel", lambda device: broken)
    monkeypatch.setattr(fallback, "_failed", [])
    monkeypatch.setattr(kernel, "load", lambda: None)
    for seed in (1, 2):
        assert_right(random((9,), torch.float32, 0), random((9,), torch.float32, seed))
    (warning,) = (record.getMessage() for record in caplog.records)
    assert "the Triton kernel failed: RuntimeError: no driver" in warning


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30, NAN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.int32], ids=str)
def test_gpu_and_cpu_measure_the_same(dtype: torch.dtype, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fallback, "DEVICE_BLOCK", 1000)
    x, y = (random((70, 50), dtype, seed) * (scale if dtype != torch.int32 else 1) for seed in (0, 1))
    x.view(-1)[1234:1236] = 50
    assert_right(x.cuda(), y.cuda())


def test_a_difference_whose_square_is_below_float64_is_measured_beside_large_values() -> None:
    x = torch.tensor([1.0, 0.0], dtype=torch.float64)
    y = torch.tensor([1.0, 1e-200], dtype=torch.float64)
    for stats in (fallback.measure(x, y), measure(x, y)):
        assert stats.rel_l2 == pytest.approx(1e-200, rel=1e-12, abs=0)
        assert stats.max_abs == 1e-200


@pytest.mark.parametrize("sign", [1, -1])
def test_values_whose_squares_overflow_are_measured_whatever_their_sign(sign: int) -> None:
    x = torch.tensor([sign * 1e200, 1e-3], dtype=torch.float64)
    y = torch.tensor([sign * 1.5e200, 1e-3], dtype=torch.float64)
    stats = fallback.measure(x, y)
    assert stats.rel_l2 == pytest.approx(0.5, rel=1e-12)
    assert stats.cosine == pytest.approx(1.0, rel=1e-12)
