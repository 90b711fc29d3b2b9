"""The rows of values: they show which values of a packed batch are a part of those of a padded one.

A row is what the last dimension of a tensor holds. One side may compute it for each position of a padded batch, and the
other for the real tokens alone, or request by request. Then no value of one side has the size of the other's, but each
of its rows is among the other's rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

RowSums: TypeAlias = npt.NDArray[np.float32]
"""For each row its magnitude, norm, sum and sum of third powers, and a sum with factors by place.

Zeros do not count in the first four, so a row of attention weights is equal whatever padding is beside it.
"""

LEAST_WIDTH = 2
"""Single numbers agree by chance."""
MOST_ROWS = 1 << 12
ROW_BUDGET = 1 << 18
"""The most rows that one recording keeps, of 20 bytes each."""
_WIDE = 4
"""Rows with fewer numbers agree by chance, unless both sides have as many."""
_MOST_ALIKE = 256
_MASKED = 1e4
"""The value that hides a position has at least this magnitude."""
ROW_SUMS = 5
_MAGNITUDE, _NORM, _TOTAL, _CUBES, _BY_PLACE = range(ROW_SUMS)


def row_sums(tensor: torch.Tensor) -> RowSums | None:
    """The sums of a tensor's rows; None for one that has no rows, or numbers that are not finite floats."""
    if tensor.dim() < 2 or not tensor.is_floating_point() or tensor.dtype.itemsize < 2 or tensor.is_nested:
        return None
    width = tensor.shape[-1]
    if width < LEAST_WIDTH or not 0 < tensor.numel() <= MOST_ROWS * width:
        return None
    rows = tensor.detach().to("cpu", torch.float64).reshape(-1, width).numpy()
    # What hides a position of scores is as good as no position.
    rows = np.where(rows <= -_MASKED, 0.0, rows)
    with np.errstate(over="ignore", invalid="ignore"):
        squares = rows * rows
        sums = np.stack(
            [
                np.abs(rows).sum(1),
                np.sqrt(squares.sum(1)),
                rows.sum(1),
                (squares * rows).sum(1),
                rows @ np.cos(2.2360679775 * np.arange(1, width + 1)),
            ],
            axis=1,
        ).astype(np.float32)
    return sums if np.isfinite(sums).all() else None


class KnownRows:
    """Finds rows among those of the other side. ``share`` is the part of a value's rows that must be among them."""

    def __init__(self, values: Iterable[tuple[int, RowSums]], tolerance: float, share: float) -> None:
        self._limit = 4 * max(tolerance, float(np.finfo(np.float32).eps))
        self._share = share
        every = [(np.full(len(sums), width), sums) for width, sums in values]
        widths = np.concatenate([each for each, _ in every]) if every else np.zeros(0, int)
        sums = np.concatenate([each for _, each in every]).astype(np.float64) if every else np.zeros((0, ROW_SUMS))
        order = np.argsort(sums[:, _MAGNITUDE], kind="stable")
        self._widths, self._sums = widths[order], sums[order]

    def has(self, width: int, sums: RowSums) -> bool:
        """Return whether the other side has enough of these rows, of those that have not just a single number."""
        wanted = sums.astype(np.float64)
        # Zeros may be of a slot that was never written to.
        telling = (wanted[:, _MAGNITUDE] > wanted[:, _NORM] * (1 + 1e-3)) | (wanted[:, _NORM] == 0)
        wanted = np.unique(wanted[telling], axis=0)
        if not len(wanted):
            return False
        return int(self._found(width, wanted).sum()) >= max(1, math.ceil(self._share * len(wanted)))

    def _found(self, width: int, wanted: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
        magnitudes, norms = wanted[:, _MAGNITUDE], wanted[:, _NORM]
        found = np.zeros(len(wanted), bool)
        place = np.searchsorted(self._sums[:, _MAGNITUDE], magnitudes * (1 - self._limit))
        end = np.searchsorted(self._sums[:, _MAGNITUDE], magnitudes * (1 + self._limit), side="right")
        # The rows of one place have nearly equal magnitudes only by chance, or are copies.
        for _ in range(_MOST_ALIKE):
            left = np.flatnonzero(~found & (place < end))
            if not len(left):
                break
            other = self._sums[place[left]]
            are_near = np.abs(wanted[left] - other) <= self._limit * _sizes(magnitudes[left], norms[left])
            # Beside other numbers zeros may be padding, but a row of zeros is one only of its own width.
            widths = self._widths[place[left]]
            may_be_padded = (norms[left] > 0) & (np.minimum(widths, width) >= _WIDE)
            are_near[:, _BY_PLACE] = np.where(widths == width, are_near[:, _BY_PLACE], may_be_padded)
            found[left] = are_near.all(axis=1)
            place[left] += 1
        return found


def _sizes(magnitudes: npt.NDArray[np.float64], norms: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The size of the terms of each sum."""
    return np.stack([magnitudes, norms, magnitudes, norms**3, magnitudes], axis=1)
