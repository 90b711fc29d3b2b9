"""Sketches of tensors, by which partners are found."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from graftlab.diffs.sorting import sorted_values

Values = npt.NDArray[np.float64]
Elements = npt.NDArray[np.generic]
"""Numbers in a dtype of their own, in one dimension."""
Places = npt.NDArray[np.int64]

QUANTILES = 33
EXTREMES = 64

# With fewer distinct values than this, many arrangements look alike.
FEW = 8


@dataclass(frozen=True)
class Sketch:
    """A summary of one tensor: 33 quantiles from the smallest to the largest value, and the 64 most extreme values.

    ``extremes`` are the values of largest magnitude, largest first, with their ``places`` in the flattened tensor.
    ``rms`` is over the finite values; ``nonfinite`` counts the others, which are ignored elsewhere. ``distinct`` is a
    lower bound of the number of distinct values.
    """

    numel: int
    quantiles: Values = field(repr=False)
    extremes: Values = field(repr=False)
    places: Places = field(repr=False)
    rms: float
    nonfinite: int
    distinct: int

    @property
    def constant(self) -> bool:
        """Whether all values are equal, as in a bias of zeros, so that they cannot identify a partner."""
        return self.distinct <= 1

    @property
    def telling(self) -> bool:
        """Whether there are enough distinct values to locate elements."""
        return self.distinct >= FEW


def flat_values(tensor: Tensor) -> Values:
    """All elements in float64, in one dimension. A complex element is two numbers, its real and imaginary part."""
    return flat_elements(tensor).astype(np.float64)


def flat_elements(tensor: Tensor) -> Elements:
    """All elements in one dimension, in a numpy dtype that holds all their values; complex ones as two numbers each."""
    dense = tensor.detach()
    if dense.is_complex():
        dense = torch.view_as_real(dense.resolve_conj().resolve_neg())
    dense = dense.cpu().reshape(-1)
    narrow = dense.is_floating_point() and dense.element_size() < 4
    array: Elements = (dense.float() if narrow else dense).numpy()
    return array


def sketch_of(tensor: Tensor) -> Sketch:
    """The sketch of a tensor of any dtype. Making one takes about as long as a sort, and it has 1.3 KiB."""
    # Not in float64, which takes twice as long to sort.
    flat = flat_elements(tensor)
    flat = flat.astype(np.float32) if flat.dtype == np.bool_ else flat
    finite = np.isfinite(flat)
    everything = bool(finite.all())
    kept = flat if everything else flat[finite]
    if not len(kept):
        empty = np.empty(0)
        return Sketch(len(flat), empty, empty, np.empty(0, np.int64), math.nan, len(flat), 0)
    ordered = sorted_values(kept)
    quantiles = ordered[_places_of_quantiles(len(ordered))].astype(np.float64)
    count = min(EXTREMES, len(kept))
    # The largest magnitudes are at the two ends.
    ends = np.abs(np.concatenate((ordered[:count], ordered[-count:])).astype(np.float64))
    least = np.sort(ends)[::-1][:count][-1] if len(ordered) > 2 * count else np.sort(np.abs(ordered))[::-1][count - 1]
    places = np.flatnonzero((np.abs(flat) >= least) & finite)
    magnitude = np.abs(flat[places].astype(np.float64))
    places = places[np.lexsort((places, -magnitude))][:count]
    steps = np.diff(ordered[:: max(1, len(ordered) // 4096)])
    distinct = 1 + max(int((steps > 0).sum()), int(ordered[0] != ordered[-1]))
    squares = sum(_squares(kept[start : start + _BLOCK]) for start in range(0, len(kept), _BLOCK))
    return Sketch(
        len(flat),
        quantiles,
        flat[places].astype(np.float64),
        places,
        math.sqrt(squares / len(kept)),
        len(flat) - len(kept),
        distinct,
    )


@lru_cache(maxsize=64)
def _places_of_quantiles(size: int) -> Places:
    return np.linspace(0, size - 1, QUANTILES).round().astype(np.int64)


# Squares are summed in float64, in blocks of this many elements.
_BLOCK = 1 << 16


def _squares(block: Elements) -> float:
    wide = block.astype(np.float64)
    return float(np.einsum("i,i", wide, wide))


def limit_for(*dtypes: torch.dtype) -> float:
    """The largest relative L2 between two tensors that show the same quantity.

    Measured on public pairs of implementations: bfloat16 against float32 needs 3e-2, float32 1e-3.
    """
    half = any(dtype.is_floating_point and torch.finfo(dtype).eps > 1e-4 for dtype in dtypes)
    return 3e-2 if half else 1e-3


def alike(one: Sketch, other: Sketch, limit: float) -> bool:
    """Whether two tensors of one size may have the same values in some order."""
    if one.numel != other.numel or one.nonfinite != other.nonfinite or not len(one.quantiles):
        return False
    scale = np.maximum(np.abs(one.quantiles), max(one.rms, other.rms))
    return bool((np.abs(one.quantiles - other.quantiles) <= 2 * limit * scale).all())


def covers(whole: Sketch, part: Sketch, limit: float) -> bool:
    """Whether a whole may contain all of a part's values, by the range of both."""
    if not len(part.quantiles) or not len(whole.quantiles):
        return False
    room = 2 * limit * max(whole.rms, part.rms)
    low, high = whole.quantiles[0] - room, whole.quantiles[-1] + room
    return bool(low <= part.quantiles[0] and part.quantiles[-1] <= high)
