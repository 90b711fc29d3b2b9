"""The statistics compared with the published protocol's: equal where those are accurate, better elsewhere."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from benchmarks.reference import diff_statistics
from graftlab.diffs.measure import measure

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
STATISTICS = ("rel_diff", "max_abs", "mean_abs")


def statistics(baseline: torch.Tensor, target: torch.Tensor) -> dict[str, float]:
    found = measure(baseline, target)
    return {name: getattr(found, name) for name in STATISTICS}


def exactly(baseline: torch.Tensor, target: torch.Tensor) -> dict[str, float]:
    """By their definitions, in numpy's longest float, with sums that lose nothing (`math.fsum`)."""
    x, y = (tensor.to(torch.float64).reshape(-1).numpy().astype(np.longdouble) for tensor in (baseline, target))
    # A power of two changes no digit, and brings the squares into the range of float64.
    scale = math.ldexp(1.0, math.frexp(float(max(np.abs(x).max(), np.abs(y).max())))[1])
    x, y = x / scale, y / scale
    distance = np.abs(x - y)
    return {
        "rel_diff": float(total(distance * distance) / (total(x * x) + total(y * y))),
        "max_abs": float(distance.max()) * scale,
        "mean_abs": float(total(distance) / len(distance)) * scale,
    }


def total(values: np.ndarray) -> np.longdouble:
    """The sum, with what float64 leaves of a longer float summed as well."""
    high = values.astype(np.float64)
    low = (values - high).astype(np.float64)
    return np.longdouble(math.fsum(high)) + np.longdouble(math.fsum(low))


def errors(found: dict[str, float], exact: dict[str, float]) -> dict[str, float]:
    """Relative errors; what overflowed is infinitely wrong."""
    return {
        name: abs(found[name] - exact[name]) / exact[name] if math.isfinite(found[name]) else math.inf
        for name in STATISTICS
    }


@pytest.mark.parametrize("size", [1, 1000, 100_003])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_random_tensors_are_measured_as_the_reference_does(dtype: torch.dtype, size: int) -> None:
    # Independent tensors of like size, so that rel_diff is near 1 and the reference's 1 - 2<x, y> / (...) does not
    # cancel. float32, in which the reference takes differences, keeps all or at least six digits of the values.
    generator = torch.Generator().manual_seed(size)
    x, y = (torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    found, reference, exact = statistics(x, y), diff_statistics(x, y), exactly(x, y)
    for name in STATISTICS:
        assert found[name] == pytest.approx(exact[name], rel=1e-6, abs=0), name
        assert found[name] == pytest.approx(reference[name], rel=1e-6, abs=0), name


def ill_conditioned() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x, noise = (torch.randn(50_000, generator=generator) for _ in range(2))
    wide, wide_noise = (torch.randn(50_000, generator=generator, dtype=torch.float64) for _ in range(2))
    last_bit = x.clone()
    last_bit[17] = torch.nextafter(last_bit[17], torch.tensor(math.inf))
    return {
        "a large common offset, a tiny difference": (wide + 1e6, wide + 1e6 + 1e-6 * wide_noise),
        "a large common offset in float32": (x + 1e4, x + 1e4 + 1e-2 * noise),
        "a tiny difference": (wide, wide + 1e-12 * wide_noise),
        "one last bit": (x, last_bit),
        "squares beyond float32": (1e30 * x, 1e30 * (x + 1e-6 * noise)),
        "squares beyond float64": (1e200 * wide, 1e200 * (wide + 1e-9 * wide_noise)),
        "squares below float64": (1e-200 * wide, 1e-200 * (wide + 1e-9 * wide_noise)),
    }


@pytest.mark.parametrize("case", ill_conditioned())
def test_ill_conditioned_tensors_are_measured_better_than_by_the_reference(case: str) -> None:
    x, y = ill_conditioned()[case]
    exact = exactly(x, y)
    ours, theirs = errors(statistics(x, y), exact), errors(diff_statistics(x, y), exact)
    for name in STATISTICS:
        assert ours[name] <= 1e-6, name
        # Both may be right to the last digits of float32.
        assert ours[name] <= max(theirs[name], 1e-7), name
    assert theirs["rel_diff"] > max(1e-6, 10 * ours["rel_diff"])
