"""Digests of weights: which of them are equal, and which consist of rows of another, without their values."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from torch import Tensor

from graftlab.matching.sketch import flat_elements
from graftlab.matching.strides import Strides, fit_places

RowDigests = npt.NDArray[np.uint64]

# A digest of a short row takes a microsecond, however short it is.
MOST_ROWS = 1 << 19


@dataclass(frozen=True, eq=False)
class Digest:
    """``whole`` is equal only for equal numbers in the same order; it may differ if the shapes do.

    Numbers of 16 bits count as the same numbers in float32. ``rows`` has a digest of each row, a slice of the first
    dimension with ``width`` elements; it is None for fewer than two dimensions, complex numbers, and too many rows.
    """

    whole: bytes
    dtype: str
    rows: RowDigests | None = field(repr=False)
    width: int

    @classmethod
    def of(cls, tensor: Tensor) -> Digest:
        """The digest of a dense tensor with elements."""
        # A column or an expanded weight is a view with strides, and only consecutive bytes have a digest.
        flat = np.ascontiguousarray(flat_elements(tensor))
        dtype = flat.dtype.str
        if tensor.dim() < 2 or tensor.shape[0] > MOST_ROWS or tensor.is_complex():
            return cls(hashlib.sha256(flat.data).digest() + dtype.encode(), dtype, None, flat.size)
        rows = flat.reshape(tensor.shape[0], -1)
        each = [hashlib.sha256(row.data).digest() for row in rows]
        short = np.frombuffer(b"".join(digest[:8] for digest in each), np.uint64)
        return cls(hashlib.sha256(b"".join(each)).digest() + dtype.encode(), dtype, short, rows.shape[1])

    def is_like(self, other: Digest) -> bool:
        """Whether rows of both may be equal."""
        return (self.width, self.dtype) == (other.width, other.dtype)


class Wholes:
    """Weights by the digests of their rows, to find those that contain another weight."""

    def __init__(self, digests: Mapping[str, Digest]) -> None:
        self._digests = {name: digest for name, digest in digests.items() if digest.rows is not None}
        self._names = list(self._digests)
        rows = [digest.rows for digest in self._digests.values() if digest.rows is not None]
        every = np.concatenate(rows) if rows else np.empty(0, np.uint64)
        owners = np.repeat(np.arange(len(rows)), [len(each) for each in rows])
        order = np.argsort(every, kind="stable")
        self._ordered, self._owners = every[order], owners[order]

    def of(self, part: Digest) -> Iterator[tuple[str, Strides]]:
        """The names of larger weights that contain all rows of a part, with the places of its elements in them."""
        if part.rows is None:
            return
        first, last = (int(np.searchsorted(self._ordered, part.rows[0], side)) for side in ("left", "right"))
        for owner in dict.fromkeys(self._owners[first:last].tolist()):
            name = self._names[owner]
            whole = self._digests[name]
            strides = _strides(whole, part) if whole.is_like(part) else None
            if strides is not None:
                yield name, strides


def _strides(whole: Digest, part: Digest) -> Strides | None:
    assert whole.rows is not None
    assert part.rows is not None
    if len(part.rows) >= len(whole.rows) or len(np.unique(part.rows)) < len(part.rows):
        # Equal rows do not show which is which.
        return None
    order = np.argsort(whole.rows, kind="stable")
    found = order[np.minimum(np.searchsorted(whole.rows[order], part.rows), len(order) - 1)]
    if not np.array_equal(whole.rows[found], part.rows):
        return None
    rows = fit_places(found.astype(np.int64), (len(found),))
    if rows is None or min(rows.strides) < 0:
        # A layout cannot take rows in reverse.
        return None
    width = part.width
    return Strides(rows.offset * width, (*rows.radices, width), (*(each * width for each in rows.strides), 1))
