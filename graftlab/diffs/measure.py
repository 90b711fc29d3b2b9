"""Diff statistics: how far a target tensor is from its baseline.

`diff_sums` goes over both tensors once and gives the sums; here they become statistics.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from graftlab.diffs.exact import add_up_exactly, root
from graftlab.diffs.sums import Totals, add_up

CPU_BLOCK = 1 << 19
"""Elements of four bytes that are measured at once on the CPU: two inputs and their difference fit in the L3 cache."""

DEVICE_BLOCK = 1 << 22
"""The same elsewhere, where each operation costs a kernel launch. Below 2**24, so that float32 can hold any place."""

_NAN = math.nan


@dataclass(frozen=True)
class DiffStats:
    """How far ``y`` (the target) is from ``x`` (the baseline).

    A pair of elements of which either is not finite is counted and left out of all else. Integers and booleans are
    measured as float64 (beyond 2**53 they are rounded), complex tensors as their real and imaginary parts: each
    part is an element of its own everywhere, except that ``numel`` and ``max_abs_index`` are the complex tensor's.

    * ``numel``: elements in each tensor;
    * ``rel_l2``: ``||x - y|| / ||x||``; 0 if nothing differs, inf if only the baseline is zero;
    * ``rel_diff``: ``sum((x - y)**2) / sum(x**2 + y**2)``, from 0 to 2, which is ``1 - 2<x, y> / (|x|**2 + |y|**2)``
      without its cancellation; 0 if both are zero;
    * ``max_abs``, ``max_abs_index``, ``mean_abs``: of ``|x - y|``, and where it is largest (None: nowhere);
    * ``cosine``: ``<x, y> / (||x|| ||y||)``; 1 if both are zero, 0 if one is;
    * ``nonfinite_baseline``, ``nonfinite_target``: how many are nan or infinite; ``nonfinite_differ``: pairs of which
      one is finite and the other not, or that differ in kind (nan, +inf, -inf);
    * ``mean_*``, ``std_*`` (of the population), ``min_*``, ``max_*``: of each tensor.

    Where no pair is finite all statistics are nan. For empty tensors ``cosine`` is 1, what measures a difference is 0,
    and the rest is nan.
    """

    numel: int
    rel_l2: float = _NAN
    rel_diff: float = _NAN
    max_abs: float = _NAN
    max_abs_index: tuple[int, ...] | None = None
    mean_abs: float = _NAN
    cosine: float = _NAN
    nonfinite_baseline: int = 0
    nonfinite_target: int = 0
    nonfinite_differ: int = 0
    mean_baseline: float = _NAN
    std_baseline: float = _NAN
    min_baseline: float = _NAN
    max_baseline: float = _NAN
    mean_target: float = _NAN
    std_target: float = _NAN
    min_target: float = _NAN
    max_target: float = _NAN


def measure(baseline: torch.Tensor, target: torch.Tensor) -> DiffStats:
    """Measure how far ``target`` is from ``baseline``: two tensors of one shape, on one device, of any dtypes.

    Neither is modified and no autograd graph is built; what is not contiguous is copied. Raises ValueError for tensors
    of different shapes or devices and for tensors that are not dense (sparse, quantized, meta); torch itself raises
    NotImplementedError for dtypes of less than a byte.
    """
    _check(baseline, target)
    numel = baseline.numel()
    if numel == 0:
        return DiffStats(0, rel_l2=0.0, rel_diff=0.0, max_abs=0.0, mean_abs=0.0, cosine=1.0)
    x, y = _real_elements(baseline), _real_elements(target)
    dtype = torch.float32 if _is_narrow(x) and _is_narrow(y) else torch.float64
    size = (CPU_BLOCK if x.is_cpu else DEVICE_BLOCK) // (1 if dtype == torch.float32 else 2)
    blocks = [(x[i : i + size], y[i : i + size]) for i in range(0, x.numel(), size)] if size < x.numel() else [(x, y)]
    total = add_up(blocks, dtype) or add_up_exactly(blocks)
    if total.pairs == 0:
        counts = (total.x.nonfinite, total.y.nonfinite, total.nonfinite_differ)
        return DiffStats(numel, _NAN, _NAN, _NAN, None, _NAN, _NAN, *counts)
    place = total.place // 2 if baseline.is_complex() else total.place
    return _statistics(total, numel, _index_in(baseline.shape, place))


def _check(baseline: torch.Tensor, target: torch.Tensor) -> None:
    if baseline.shape != target.shape:
        raise ValueError(
            f"the baseline has shape {list(baseline.shape)} and the target {list(target.shape)}; only tensors of one "
            "shape can be compared, so bring one into the other's shape first"
        )
    if baseline.device != target.device:
        raise ValueError(
            f"the baseline is on {baseline.device} and the target on {target.device}; move one with .to(device) first"
        )
    for side, tensor in (("baseline", baseline), ("target", target)):
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            kind = "quantized" if tensor.is_quantized else "meta" if tensor.is_meta else str(tensor.layout)
            raise ValueError(f"the {side} is {kind}; only dense tensors are measured (.to_dense(), .dequantize())")


def _real_elements(tensor: torch.Tensor) -> torch.Tensor:
    """All elements in one dimension, detached; a complex one becomes two. Copies only what is not contiguous."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj().resolve_neg())
    return tensor.reshape(-1)


def _is_narrow(tensor: torch.Tensor) -> bool:
    """Whether float32 holds all values."""
    return tensor.is_floating_point() and tensor.element_size() <= 4


def _statistics(total: Totals, numel: int, index: tuple[int, ...]) -> DiffStats:
    x, y, squares = total.x, total.y, total.squares
    if x.squares == 0:
        rel_l2, rel_diff, cosine = (0.0, 0.0, 1.0) if y.squares == 0 else (math.inf, 1.0, 0.0)
    elif y.squares == 0:
        rel_l2, rel_diff, cosine = 1.0, 1.0, 0.0
    else:
        rel_l2 = root(squares / x.squares)
        rel_diff = min(float(squares / (x.squares + y.squares)), 2.0)
        cosine = min(root(total.product * total.product / (x.squares * y.squares)), 1.0)
        cosine = -cosine if total.product < 0 else cosine
    return DiffStats(
        numel,
        rel_l2,
        rel_diff,
        total.max_abs,
        index,
        total.mean_abs,
        cosine,
        x.nonfinite,
        y.nonfinite,
        total.nonfinite_differ,
        x.mean,
        x.std,
        x.low,
        x.high,
        y.mean,
        y.std,
        y.low,
        y.high,
    )


def _index_in(shape: Sequence[int], position: int) -> tuple[int, ...]:
    index: list[int] = []
    for size in reversed(shape):
        position, place = divmod(position, size)
        index.append(place)
    return tuple(reversed(index))
