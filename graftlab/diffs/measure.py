"""Measure a pair of tensors with the compiled kernel, or with torch operations if the kernel cannot."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from graftlab.diffs import fallback, kernel
from graftlab.diffs.statistics import DiffStats, index_in

__all__ = ["DiffStats", "measure", "measure_and_overwrite"]

# A subclass may keep its elements elsewhere than at its address.
_PLAIN = (torch.Tensor, torch.nn.Parameter)

_LONG = frozenset({torch.int64, torch.uint64})

# Above this, float64 cannot represent every integer.
_LARGEST = 2.0**53


def measure(baseline: torch.Tensor, target: torch.Tensor) -> DiffStats:
    """Measure how far ``target`` is from ``baseline``: two tensors of one shape, on one device, of any dtypes.

    Neither is modified and no autograd graph is built; a non-contiguous tensor is copied. Raises ValueError for tensors
    of different shapes or devices and for tensors that are not dense (sparse, quantized, meta, nested); torch itself
    raises NotImplementedError for dtypes of less than a byte.
    """
    compiled = kernel.load()
    if compiled is not None:
        # The common case first, because its time is added to each tap.
        types = compiled.types.get((baseline.dtype, target.dtype))
        try:
            shape = baseline.shape
        except RuntimeError:
            # A nested tensor has none.
            _refuse_nested(baseline, target)
            raise
        if (
            types is not None
            and not target.is_nested
            and shape == target.shape
            and baseline.is_cpu
            and target.is_cpu
            and type(baseline) in _PLAIN
            and type(target) in _PLAIN
            and baseline.is_contiguous()
            and target.is_contiguous()
            and not (baseline.is_neg() or target.is_neg())
            and (numel := baseline.numel())
        ):
            stats = compiled.measure(baseline.data_ptr(), target.data_ptr(), numel, types, shape)
            return stats if stats.max_abs or baseline.dtype not in _LONG else _unrounded(stats, baseline, target)
    return _unrounded(_measure_any(baseline, target, compiled), baseline, target)


def _unrounded(stats: DiffStats, baseline: torch.Tensor, target: torch.Tensor) -> DiffStats:
    """Measure exactly if the tensors seem equal, but are integers that float64 may not distinguish."""
    if stats.max_abs == 0 and stats.numel and {baseline.dtype, target.dtype} <= _LONG:
        return _exact(stats, baseline, target)
    return stats


def measure_and_overwrite(baseline: torch.Tensor, target: torch.Tensor, *, own: torch.Tensor) -> DiffStats | None:
    """Measure as :func:`measure` does, and overwrite ``own``, one of the two, with the other's elements.

    Both happen in one pass over memory, past autograd's version counter. Returns None, without any effect, if that is
    not possible: both tensors must be plain, contiguous and of one dtype whose squares fit float64.
    """
    compiled = kernel.load()
    dtype = baseline.dtype
    if (
        compiled is None
        or dtype != target.dtype
        or not kernel.may_copy(dtype)
        or baseline.is_nested
        or target.is_nested
        or baseline.shape != target.shape
        or not (baseline.is_cpu and target.is_cpu)
        or type(baseline) not in _PLAIN
        or type(target) not in _PLAIN
        or not (baseline.is_contiguous() and target.is_contiguous())
        or baseline.is_neg()
        or target.is_neg()
        or not (numel := baseline.numel())
    ):
        return None
    copied = kernel.X_OVER_Y if own is target else kernel.Y_OVER_X
    x, y, types = baseline.data_ptr(), target.data_ptr(), compiled.types[dtype, dtype]
    return compiled.measure(x, y, numel, types, baseline.shape, copied)


def _measure_any(baseline: torch.Tensor, target: torch.Tensor, compiled: kernel.Kernel | None) -> DiffStats:
    _check(baseline, target)
    numel, shape = baseline.numel(), baseline.shape
    if numel == 0:
        return DiffStats(0, rel_l2=0.0, rel_diff=0.0, max_abs=0.0, mean_abs=0.0, cosine=1.0)
    x, y = _real_elements(baseline), _real_elements(target)
    types = compiled.types.get((x.dtype, y.dtype)) if compiled is not None else None
    if compiled is not None and types is not None and all(type(t) in _PLAIN and t.is_cpu for t in (x, y)):
        x, y = x.resolve_neg().contiguous(), y.resolve_neg().contiguous()
        stats = compiled.measure(x.data_ptr(), y.data_ptr(), x.numel(), types, x.shape)
    else:
        stats = fallback.measure(x, y)
    place = -1 if stats.max_abs_index is None else stats.max_abs_index[0]
    return replace(stats, numel=numel, max_abs_index=index_in(shape, place // (x.numel() // numel)))


def _check(baseline: torch.Tensor, target: torch.Tensor) -> None:
    _refuse_nested(baseline, target)
    if baseline.shape != target.shape:
        raise ValueError(
            f"the baseline has shape {list(baseline.shape)} and the target {list(target.shape)}; only tensors of one "
            "shape can be compared, so convert one to the other's shape first"
        )
    if baseline.device != target.device:
        raise ValueError(
            f"the baseline is on {baseline.device} and the target on {target.device}; move one with .to(device) first"
        )
    for side, tensor in (("baseline", baseline), ("target", target)):
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            kind = "quantized" if tensor.is_quantized else "meta" if tensor.is_meta else str(tensor.layout)
            raise ValueError(f"the {side} is {kind}; only dense tensors are measured (.to_dense(), .dequantize())")


def _refuse_nested(baseline: torch.Tensor, target: torch.Tensor) -> None:
    for side, tensor in (("baseline", baseline), ("target", target)):
        if tensor.is_nested:
            raise ValueError(f"the {side} is nested; only dense tensors are measured (.to_padded_tensor(0.0))")


def _real_elements(tensor: torch.Tensor) -> torch.Tensor:
    """Return all elements, detached, in one dimension; complex ones as two each. Copies only non-contiguous tensors."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj().resolve_neg())
    return tensor.reshape(-1)


# ---- integers too large for float64 ----------------------------------------------------------------------------


def _exact(stats: DiffStats, baseline: torch.Tensor, target: torch.Tensor) -> DiffStats:
    """Correct the statistics of two seemingly equal tensors of dtypes in :data:`_LONG`.

    If they differ, the statistics of the difference are measured again, exactly up to the last rounding.
    """
    if not max(abs(stats.min_baseline), abs(stats.max_baseline), abs(stats.max_target)) >= _LARGEST:
        return stats
    x, y = (tensor.detach().reshape(-1).view(torch.int64) for tensor in (baseline, target))
    places = (x != y).nonzero().reshape(-1)
    if not len(places):
        return stats
    x, y = x[places], y[places]
    high = _high(y, target.dtype) - _high(x, baseline.dtype)
    low = (y & 0xFFFFFFFF).double() - (x & 0xFFFFFFFF).double()
    difference = (high * 2.0**32 + low).abs()
    squares = float(difference.square().sum())
    farthest = int(difference.argmax())
    xx = stats.numel * (stats.mean_baseline**2 + stats.std_baseline**2)
    yy = stats.numel * (stats.mean_target**2 + stats.std_target**2)
    return replace(
        stats,
        rel_l2=math.sqrt(squares / xx) if xx else math.inf,
        rel_diff=squares / (xx + yy) if xx + yy else 0.0,
        max_abs=float(difference[farthest]),
        max_abs_index=index_in(baseline.shape, int(places[farthest])),
        mean_abs=float(difference.sum()) / stats.numel,
    )


def _high(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the upper 32 of 64 bits, as float64."""
    high = values >> 32
    return (high & 0xFFFFFFFF if dtype == torch.uint64 else high).double()
