"""Fingerprints of tensors: they show whether two tensors are equal, even in different layouts, and keep neither."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from graftlab.base.tensor_bytes import DTYPE_NAMES
from graftlab.diffs.kernel import Kernel, load
from graftlab.lines.rows import ROW_SUMS, RowSums, row_sums

Level = Literal[0, 1, 2, 3]
"""How well two tensors agree: not at all, in their magnitudes, in their values in any order, or in order."""
DIFFERENT: Level = 0
MAGNITUDES: Level = 1
ANY_ORDER: Level = 2
IN_ORDER: Level = 3

QUANTILES = 65
COUNTS = frozenset({"int64", "int32", "bool"})
"""The dtypes of indices, positions and masks, which have few distinct numbers."""
# Frequencies without a common period: any reordering changes the projection of each.
_FREQUENCIES = np.array([0.7390851332, 2.2360679775, 5.1961524227, 9.4247779608])
# The value that hides a position in an additive mask has at least this magnitude.
_MASKED = 1e4
_MOMENTS = 5
_SUMS = _MOMENTS + len(_FREQUENCIES)
"""The number of a fingerprint's moments and projections."""
_AFTER_MOMENTS = 2 + _MOMENTS
_PLAIN = (torch.Tensor, torch.nn.Parameter)
"""The classes of tensors that are what their memory holds."""
_FEW_LARGE = 10
"""If the root mean square is this many times the median, few large values dominate it."""
FEWEST_NUMBERS = 3
"""Tensors with fewer numbers than this agree by chance."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Fingerprint:
    """A summary of a tensor's values.

    ``moments`` are sums over the elements, in float64: of the values, their magnitudes, their squares, their third
    powers and the roots of their magnitudes. ``projections`` are sums with fixed factors, by the elements' order. Added
    over ranks, the moments of shards and the projections of summands give those of the whole. ``magnitudes`` and
    ``values`` are quantiles, None where a budget left them out. ``mask`` means that the tensor has just two values, in
    effect booleans, which count as 1 and -1. Expanded dimensions count once. ``rows`` are the sums of its rows, where
    they were wanted.
    """

    shape: tuple[int, ...]
    dtype: str
    numel: int
    nonfinite: int
    moments: Floats
    projections: Floats
    magnitudes: Floats | None
    values: Floats | None
    mask: bool
    constant: bool
    rows: RowSums | None = None

    @property
    def says_nothing(self) -> bool:
        """Whether unrelated tensors often have this fingerprint, because it has few numbers, or equal ones."""
        return self.numel < FEWEST_NUMBERS or self.constant

    @cached_property
    def norm(self) -> float:
        """The root of the sum of squares."""
        return math.sqrt(max(float(self.moments[2]), 0.0))

    def __reduce__(self) -> tuple[Any, ...]:
        # A trace has thousands, and pickling four arrays would take as long as computing their sums.
        quantiles = [] if self.magnitudes is None or self.values is None else [self.magnitudes, self.values]
        numbers = b"".join([each.tobytes() for each in (self.moments, self.projections, *quantiles)])
        plain = self.shape, self.dtype, self.numel, self.nonfinite, self.mask, self.constant
        return _unpickled, (*plain, bool(quantiles), numbers, None if self.rows is None else self.rows.tobytes())


def _unpickled(
    shape: tuple[int, ...],
    dtype: str,
    numel: int,
    nonfinite: int,
    mask: bool,
    constant: bool,
    has_quantiles: bool,
    packed: bytes,
    packed_rows: bytes | None,
) -> Fingerprint:
    numbers: Floats = np.frombuffer(packed)
    moments, projections, rest = numbers[:_MOMENTS], numbers[_MOMENTS:_SUMS], numbers[_SUMS:]
    half = rest.size // 2
    magnitudes, values = (rest[:half], rest[half:]) if has_quantiles else (None, None)
    rows = None if packed_rows is None else np.frombuffer(packed_rows, np.float32).reshape(-1, ROW_SUMS)
    return Fingerprint(shape, dtype, numel, nonfinite, moments, projections, magnitudes, values, mask, constant, rows)


def with_rows(own: Fingerprint, tensor: torch.Tensor) -> Fingerprint:
    """Return a tensor's fingerprint with the sums of its rows."""
    return replace(own, rows=row_sums(getattr(tensor, "_local_tensor", tensor)))


def fingerprint(tensor: torch.Tensor, *, sorts: bool = True) -> Fingerprint:
    """Return the fingerprint of a tensor; without ``sorts`` it has no quantiles, which cost the most."""
    plain = getattr(tensor, "_local_tensor", tensor)
    shape, dtype = tuple(plain.shape), DTYPE_NAMES[plain.dtype]
    if plain.is_quantized:
        plain = plain.dequantize()
    if 0 in (strides := plain.stride()):
        plain = plain.detach()
        for dim, (extent, stride) in enumerate(zip(shape, strides, strict=True)):
            if stride == 0 and extent > 1:
                plain = plain.narrow(dim, 0, 1)
    memory = _readable(plain)
    if memory is not None:
        kernel, own = memory
        sums = _sums_at(kernel, own.data_ptr(), own.numel(), own.dtype)
        if math.isfinite(sums.magnitudes) and not sums.lowest <= -_MASKED:
            quantiles = _quantiles_at(kernel, own.data_ptr(), own.numel(), own.dtype) if sorts else _NO_QUANTILES
            return _made(shape, dtype, own.numel(), 0, sums, quantiles, False, sums.lowest == sums.highest)
    plain = plain.detach()
    if plain.is_complex():
        plain = torch.view_as_real(plain.resolve_conj().resolve_neg())
    # numpy's calls take a tenth of torch's time on small arrays.
    wide: Floats = plain.to("cpu", torch.float64).reshape(-1).numpy()
    if not wide.size:
        nothing = np.zeros(0)
        sums = _Sums(math.nan, math.nan, np.zeros(_MOMENTS), np.zeros(len(_FREQUENCIES)))
        return _made(shape, dtype, 0, 0, sums, (nothing, nothing), False, True)
    lowest, highest = float(np.minimum.reduce(wide)), float(np.maximum.reduce(wide))
    given = wide
    # A non-finite number is the lowest or the highest, or makes both nan.
    is_finite = math.isfinite(lowest) and math.isfinite(highest)
    finite = None if is_finite else np.isfinite(wide)
    nonfinite = 0 if finite is None else int(wide.size - np.count_nonzero(finite))
    mask = plain.dtype == torch.bool
    if not mask and plain.is_floating_point() and highest == 0 and lowest <= -_MASKED:
        visible = wide == 0
        mask = bool((visible | (wide <= -_MASKED)).all())
        if mask:
            wide, nonfinite = visible.astype(np.float64), 0
    # If some numbers are not finite, the lowest may be nan, so look at the finite ones.
    may_hide = plain.is_floating_point() and not mask and not lowest > -_MASKED
    hidden = _hidden(wide) if may_hide else None
    if hidden is not None:
        # Otherwise the visible scores would vanish beside the value that stands for infinity.
        nonfinite = int(np.count_nonzero(hidden if finite is None else hidden | ~finite))
        wide = np.where(hidden, 0.0, wide)
    if mask:
        # So the opposite mask is the negation.
        wide = 2 * wide - 1
    if nonfinite and finite is not None:
        wide = np.where(finite, wide, 0.0)
    sums = _sums(wide)
    quantiles = _quantiles(wide) if sorts else _NO_QUANTILES
    constant = not nonfinite and (lowest == highest if wide is given else sums.lowest == sums.highest)
    return _made(shape, dtype, wide.size, nonfinite, sums, quantiles, mask, constant)


class _Sums(NamedTuple):
    """The extremes of some numbers, and their sums."""

    lowest: float
    highest: float
    moments: Floats
    projections: Floats

    @property
    def magnitudes(self) -> float:
        """The sum of magnitudes."""
        return float(self.moments[1])


_Quantiles = tuple[Floats | None, Floats | None]
_NO_QUANTILES: _Quantiles = (None, None)


def _made(
    shape: tuple[int, ...],
    dtype: str,
    numel: int,
    nonfinite: int,
    sums: _Sums,
    quantiles: _Quantiles,
    mask: bool,
    constant: bool,
) -> Fingerprint:
    found = Fingerprint.__new__(Fingerprint)
    # A trace makes thousands, and filling a frozen dataclass takes ten times as long.
    found.__dict__.update(
        shape=shape,
        dtype=dtype,
        numel=numel,
        nonfinite=nonfinite,
        moments=sums.moments,
        projections=sums.projections,
        magnitudes=quantiles[0],
        values=quantiles[1],
        mask=mask,
        constant=constant,
        rows=None,
    )
    return found


def _readable(plain: torch.Tensor) -> tuple[Kernel, torch.Tensor] | None:
    """The kernel and a tensor in memory that it reads; None for one that must be converted first."""
    kernel = load()
    if kernel is None or type(plain) not in _PLAIN or plain.dtype not in kernel.single_types:
        return None
    if plain.dtype == torch.bool or plain.device.type != "cpu" or not plain.numel() or plain.is_neg():
        return None
    return kernel, plain if plain.is_contiguous() else plain.detach().contiguous()


def _sums(wide: Floats) -> _Sums:
    kernel = load()
    if kernel is not None:
        wide = np.ascontiguousarray(wide)
        return _sums_at(kernel, wide.ctypes.data, wide.size, torch.float64)
    return _Sums(float(np.minimum.reduce(wide)), float(np.maximum.reduce(wide)), _moments(wide), _projections(wide))


def _sums_at(kernel: Kernel, address: int, numel: int, dtype: torch.dtype) -> _Sums:
    """The sums of an array. Without finite numbers the extremes are wrong."""
    blocks = -(-numel // _BLOCK)
    factors, of_blocks, _ = _addresses(1 << (blocks - 1).bit_length())
    found = kernel.moments(address, numel, dtype, factors, of_blocks, _BLOCK)
    return _Sums(float(found[0]), float(found[1]), found[2:_AFTER_MOMENTS], found[_AFTER_MOMENTS:])


@cache
def _addresses(blocks: int) -> tuple[int, int, Floats]:
    """The addresses of the factors of a block's elements, and of this many blocks' own, which the array holds.

    Numbers of blocks are powers of two, so there are few.
    """
    of_blocks = np.stack([_factors_of_block(each) for each in range(blocks)])
    return _factors().ctypes.data, of_blocks.ctypes.data, of_blocks


def _quantiles(wide: Floats) -> _Quantiles:
    """The quantiles of the magnitudes, and of the values."""
    kernel = load()
    if kernel is not None:
        wide = np.ascontiguousarray(wide)
        return _quantiles_at(kernel, wide.ctypes.data, wide.size, torch.float64)
    at = _places(wide.size)
    values = np.sort(wide)
    return np.sort(np.abs(values))[at], values[at]


def _quantiles_at(kernel: Kernel, address: int, numel: int, dtype: torch.dtype) -> _Quantiles:
    found = kernel.sort(address, numel, dtype, _places(numel))
    return found[QUANTILES:], found[:QUANTILES]


@lru_cache(maxsize=64)
def _places(size: int) -> npt.NDArray[np.int64]:
    """The places of the quantiles among ``numel`` sorted values."""
    return np.linspace(0, size - 1, QUANTILES).astype(np.int64)


def _hidden(wide: Floats) -> npt.NDArray[np.bool_] | None:
    """Where a large negative number was added to hide scores; None if nowhere."""
    hidden = wide <= -_MASKED
    if not hidden.any():
        return None
    rest = wide[~hidden & np.isfinite(wide)]
    return hidden if not rest.size or np.abs(rest).max() * 10 < _MASKED else None


_BLOCK = 1 << 12


def _moments(wide: Floats) -> Floats:
    """Sums of the values, their magnitudes, squares, third powers and the roots of their magnitudes."""
    whole = np.zeros(_MOMENTS)
    # In blocks that stay in the processor's cache, and without vector products, for which numpy starts threads.
    for begin in range(0, wide.size, _BLOCK):
        part = wide[begin : begin + _BLOCK]
        powers = np.empty((_MOMENTS, part.size))
        powers[0] = part
        np.abs(part, out=powers[1])
        np.multiply(part, part, out=powers[2])
        np.multiply(powers[2], part, out=powers[3])
        np.sqrt(powers[1], out=powers[4])
        whole += np.add.reduce(powers, axis=1)
    return whole


def _projections(wide: Floats) -> Floats:
    """Sums over the elements, each with a factor that depends on its place."""
    whole = np.zeros(len(_FREQUENCIES))
    for block, begin in enumerate(range(0, wide.size, _BLOCK)):
        part = wide[begin : begin + _BLOCK]
        # All blocks share their factors, so each block's sum gets another factor by the block's place.
        whole += (_factors()[:, : part.size] @ part) * _factors_of_block(block)
    return whole


@lru_cache(maxsize=256)
def _factors_of_block(block: int) -> Floats:
    factors: Floats = 1 + np.cos(block * _FREQUENCIES[::-1]) / 2
    return factors


@lru_cache(maxsize=1)
def _factors() -> Floats:
    """``[projection, element]`` of a block."""
    factors: Floats = np.cos(np.outer(_FREQUENCIES, np.arange(_BLOCK)))
    return factors


def agreement(one: Fingerprint, other: Fingerprint, tolerance: float) -> Level:
    """Return how well two tensors agree; ``tolerance`` is relative to the size of their values."""
    if one.numel != other.numel or one.nonfinite != other.nonfinite or one.mask != other.mask:
        return DIFFERENT
    if one.mask:
        return _of_masks(one, other)
    if COUNTS.issuperset((one.dtype, other.dtype)):
        # Unrelated indices and positions often have the same numbers in different orders.
        return IN_ORDER if _in_same_order(one, other, tolerance) else DIFFERENT
    in_order = _in_same_order(one, other, tolerance)
    rms = _scale(one, other)
    if one.magnitudes is not None and other.magnitudes is not None and one.values is not None:
        assert other.values is not None
        if not _close(one.magnitudes, other.magnitudes, tolerance, rms):
            return DIFFERENT
        same_values = _close(one.values, other.values, tolerance, rms)
    else:
        ours, theirs = (each.moments[[1, 2, 4]] for each in (one, other))
        if not (np.abs(ours - theirs) <= tolerance * np.maximum(ours, theirs)).all():
            return DIFFERENT
        signed = np.abs(one.moments[[0, 3]] - other.moments[[0, 3]])
        sizes = np.array([one.moments[1], max(one.norm, other.norm) ** 3 / math.sqrt(max(one.numel, 1))])
        same_values = bool((signed <= 4 * tolerance * sizes).all())
    if not same_values:
        return MAGNITUDES
    return IN_ORDER if in_order else ANY_ORDER


def agree_in_order(one: Fingerprint, other: Fingerprint, tolerance: float) -> bool:
    """Whether two tensors agree :data:`IN_ORDER`. Projections rule out most that do not."""
    if not one.mask and one.numel == other.numel and not _in_same_order(one, other, tolerance):
        return False
    return agreement(one, other, tolerance) == IN_ORDER


def _in_same_order(one: Fingerprint, other: Fingerprint, tolerance: float) -> bool:
    limit = tolerance * max(one.norm, other.norm)
    # Most pairs differ in the first already, which takes a tenth of the time of comparing arrays.
    if not abs(one.projections.item(0) - other.projections.item(0)) <= 4 * limit:
        return False
    # A sum with random factors of size one is about as large as the norm of its terms.
    return bool((np.abs(one.projections - other.projections) <= 4 * limit).all())


def _scale(one: Fingerprint, other: Fingerprint) -> float:
    """The size of most values, because a few large ones must not hide differences in the others."""
    rms = max(one.norm, other.norm) / math.sqrt(max(one.numel, 1))
    if one.magnitudes is None or other.magnitudes is None or not one.magnitudes.size:
        return rms
    median = max(
        float(each.magnitudes[len(each.magnitudes) // 2]) for each in (one, other) if each.magnitudes is not None
    )
    return min(rms, _FEW_LARGE * median) if median else rms


def _close(one: Floats, other: Floats, tolerance: float, rms: float) -> bool:
    limit = tolerance * np.maximum(np.maximum(np.abs(one), np.abs(other)), rms)
    return bool((np.abs(one - other) <= limit).all())


def _of_masks(one: Fingerprint, other: Fingerprint) -> Level:
    """Compare masks, even if one is true where the other is false."""
    near = 1e-6 * max(one.numel, 1)
    if np.allclose(one.projections, other.projections, rtol=0, atol=near):
        return IN_ORDER
    if np.allclose(one.projections, -other.projections, rtol=0, atol=near):
        return MAGNITUDES
    # Equally many true values in different places are a different mask.
    return DIFFERENT


def joined(parts: list[Fingerprint]) -> Fingerprint:
    """Return the fingerprint of a tensor from those of its shards, without projections and quantiles."""
    first = parts[0]
    return Fingerprint(
        first.shape,
        first.dtype,
        sum(each.numel for each in parts),
        sum(each.nonfinite for each in parts),
        np.sum([each.moments for each in parts], axis=0),
        np.full(len(_FREQUENCIES), np.nan),
        None,
        None,
        first.mask,
        all(each.constant and (each.moments[0] * first.numel == first.moments[0] * each.numel) for each in parts),
    )
