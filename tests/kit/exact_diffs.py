"""Exact arithmetic as the judge of diff statistics: what they should be, in fractions, by their definitions."""

from __future__ import annotations

import dataclasses
import decimal
import hashlib
import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import torch

from graftlab.diffs.measure import DiffStats, measure

NAN, INF = math.nan, math.inf
DIGITS = decimal.Context(prec=40)

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
FLOAT8S = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
COMPLEXES = [torch.complex128, torch.complex64, torch.complex32]
INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64]
DTYPES = [*FLOATS, *FLOAT8S, *COMPLEXES, *INTEGERS, torch.bool]


def real_elements(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.to(torch.float64).reshape(-1)


def elements(tensor: torch.Tensor) -> list[float]:
    return real_elements(tensor).tolist()


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


_known: dict[tuple[object, ...], DiffStats] = {}


def once(judge: Callable[[torch.Tensor, torch.Tensor], DiffStats], x: torch.Tensor, y: torch.Tensor) -> DiffStats:
    """What the judge says, who is slow, and is asked about the same tensors by the tests of every way to measure."""
    contents = (real_elements(tensor).numpy().tobytes() for tensor in (x, y))
    key = (judge, x.shape, *(hashlib.sha256(each).digest() for each in contents))
    if key not in _known:
        _known[key] = judge(x, y)
    return _known[key]


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


def nearly_exact(baseline: torch.Tensor, target: torch.Tensor) -> DiffStats:
    """The same for large tensors of moderate values: in numpy's longest float, which is three digits more exact."""
    x, y = (real_elements(tensor).numpy().astype(np.longdouble) for tensor in (baseline, target))
    finite = np.isfinite(x) & np.isfinite(y)
    kinds = [np.where(np.isfinite(side), 0, np.where(np.isnan(side), 2, np.sign(side))) for side in (x, y)]
    counts = {
        "nonfinite_baseline": int((kinds[0] != 0).sum()),
        "nonfinite_target": int((kinds[1] != 0).sum()),
        "nonfinite_differ": int((kinds[0] != kinds[1]).sum()),
    }
    places = np.flatnonzero(finite)
    x, y = x[finite], y[finite]
    d = y - x
    xx, yy, dd = (np.square(values).sum() for values in (x, y, d))
    return DiffStats(
        numel=baseline.numel(),
        rel_l2=float(np.sqrt(dd / xx)),
        rel_diff=float(dd / (xx + yy)),
        max_abs=float(np.abs(d).max()),
        max_abs_index=tuple(int(i) for i in np.unravel_index(places[np.abs(d).argmax()], baseline.shape)),
        mean_abs=float(np.abs(d).mean()),
        cosine=float((x * y).sum() / np.sqrt(xx * yy)),
        mean_baseline=float(x.mean()),
        std_baseline=float(np.sqrt(np.square(x - x.mean()).mean())),
        min_baseline=float(x.min()),
        max_baseline=float(x.max()),
        mean_target=float(y.mean()),
        std_target=float(np.sqrt(np.square(y - y.mean()).mean())),
        min_target=float(y.min()),
        max_target=float(y.max()),
        **counts,
    )


def close(got: float, want: float, relative: float, absolute: float = 0.0) -> bool:
    """As ``pytest.approx`` compares, which takes a hundred times as long."""
    if got == want or (math.isnan(got) and math.isnan(want)):
        return True
    return math.isfinite(want) and abs(got - want) <= max(relative * abs(want), absolute)


def assert_nearly_right(baseline: torch.Tensor, target: torch.Tensor, tolerance: float = 1e-13) -> DiffStats:
    """As `assert_right`, for large tensors."""
    found, wanted = measure(baseline, target), once(nearly_exact, baseline, target)
    sizes = {
        "baseline": math.hypot(wanted.mean_baseline, wanted.std_baseline),
        "target": math.hypot(wanted.mean_target, wanted.std_target),
    }
    for field in dataclasses.fields(DiffStats):
        name, got, want = field.name, getattr(found, field.name), getattr(wanted, field.name)
        if name == "max_abs_index" or isinstance(want, int):
            assert got == want, name
        else:
            absolute = tolerance if name == "cosine" else tolerance * sizes.get(name.removeprefix("mean_"), 0.0)
            assert close(got, want, tolerance, absolute), (name, got, want)
    return found


def assert_right(baseline: torch.Tensor, target: torch.Tensor, tolerance: float = 1e-13) -> DiffStats:
    """Measure, and compare with exact arithmetic to what sums in float64 allow."""
    found, wanted = measure(baseline, target), once(expected, baseline, target)
    for field in dataclasses.fields(DiffStats):
        name, got, want = field.name, getattr(found, field.name), getattr(wanted, field.name)
        if name == "max_abs_index":
            assert (got is None) == (want is None)
        elif isinstance(want, int) or name.startswith(("min_", "max_baseline", "max_target")):
            assert close(got, want, 0.0), (name, got, want)
        elif name.startswith("mean_") and name != "mean_abs":
            side = name.removeprefix("mean_")
            largest = max(abs(getattr(wanted, f"min_{side}")), abs(getattr(wanted, f"max_{side}")))
            assert close(got, want, tolerance, tolerance * largest), (name, got, want)
        else:
            absolute = tolerance if name == "cosine" else 1e-320
            assert close(got, want, tolerance, absolute), (name, got, want)
    if found.max_abs_index is not None:
        assert len(found.max_abs_index) == baseline.dim()
        x, y = (elements(tensor[found.max_abs_index]) for tensor in (baseline, target))
        there = max(
            near_float(abs(Fraction(a) - Fraction(b))) if math.isfinite(a) and math.isfinite(b) else -1.0
            for a, b in zip(x, y, strict=True)
        )
        assert close(there, wanted.max_abs, tolerance)
    return found


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_complex:
        parts = torch.randn(*shape, 2, generator=generator, dtype=torch.float64)
        return torch.view_as_complex(parts).to(dtype)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=generator).to(dtype)
