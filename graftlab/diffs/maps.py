"""The data of a figure of a pair of tensors, reduced block by block on the tensors' own device.

This module does not use matplotlib: a rank can reduce its tensors and send the small result to the
notebook. A tensor of 64M elements is read in blocks of about a million, so no full-sized copy is made
whatever its dtype or strides.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, np.dtype[Any]]
Index = tuple[int, ...]
Extent = tuple[float, float, float, float]

BLOCK = 2**20  # elements: a few MiB, which a CPU's cache holds
# float32 cannot hold every difference of these.
_WIDE = {torch.float64, torch.complex128, torch.int32, torch.int64, torch.uint32, torch.uint64}


@dataclass(frozen=True)
class DifferenceMap:
    """``|baseline - target|`` over two axes of a pair, small enough to send and draw.

    ``grid`` is the 2-d array of the largest difference in each cell, NaN where a non-finite value differs;
    ``extent`` places it in element indices (left, right, bottom, top). ``worst`` is the largest finite
    difference, found at ``worst_index`` (full index, None when no finite pair exists) with ``worst_values``
    (baseline, target). ``nonfinite_differ`` counts pairs where at least one value is not finite and the two
    are not the same; ``nonfinite_equal`` counts those where both are NaN, or both the same infinity. ``profiles`` has
    for each dimension of the tensors the largest difference at each index, in at most ``limit`` bins of equal size;
    an entry is NaN where a non-finite value differs.
    """

    grid: Array
    extent: Extent
    dims: tuple[int, ...]
    shape: tuple[int, ...]
    dtypes: tuple[str, str]
    worst: float
    worst_index: Index | None
    worst_values: tuple[Any, Any] | None
    nonfinite_differ: int
    nonfinite_equal: int
    nonfinite_index: Index | None
    nonfinite_values: tuple[Any, Any] | None
    profiles: tuple[Array, ...] = ()


def check_pair(baseline: Tensor, target: Tensor) -> None:
    """Raise TypeError or ValueError unless both are tensors of one shape."""
    for role, tensor in (("baseline", baseline), ("target", target)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{role} must be a torch.Tensor, got {type(tensor).__name__}")
    if baseline.shape != target.shape:
        raise ValueError(
            f"baseline has shape {list(baseline.shape)} and target {list(target.shape)}: align them first, for "
            "instance by concatenating the shards or by taking the matching slice"
        )


def resolve_dims(ndim: int, dims: Sequence[int] | None) -> tuple[int, ...]:
    """The axes to show, (rows, columns), as non-negative numbers; by default the last two (or the only one).

    Raises ValueError for an axis the tensor does not have, a repeated one, or more than two.
    """
    if dims is None:
        return tuple(range(max(0, ndim - 2), ndim))
    chosen = tuple(int(dim) for dim in dims)
    for dim in chosen:
        if not -ndim <= dim < ndim:
            raise ValueError(f"dims={chosen} names dim {dim}, but the tensor has {ndim} dimensions")
    resolved = tuple(dim % ndim for dim in chosen)
    if len(set(resolved)) != len(resolved) or len(resolved) > 2 or (ndim and not resolved):
        raise ValueError(f"dims={chosen} must name one or two different dimensions")
    return resolved


def working_dtype(*tensors: Tensor) -> torch.dtype:
    wide = any(t.dtype in _WIDE for t in tensors) and all(t.device.type != "mps" for t in tensors)
    if any(t.dtype.is_complex for t in tensors):
        return torch.complex128 if wide else torch.complex64
    return torch.float64 if wide else torch.float32


def _tiles(shape: Sequence[int], units: Sequence[int]) -> Iterator[tuple[slice, ...]]:
    """Slices that cover ``shape`` in row-major order, of about ``BLOCK`` elements where ``units`` allow.

    A cut along a dimension falls on a multiple of its unit, so that no bin of a downsampled axis is split.
    """
    step = [max(1, size) for size in shape]
    for dim, unit in enumerate(units):  # outer dimensions first: the tiles of a contiguous tensor stay contiguous
        rest = math.prod(step) // step[dim]
        if rest * step[dim] <= BLOCK:
            break
        step[dim] = min(step[dim], max(1, BLOCK // rest // unit) * unit)
    ranges = (range(0, size, by) for size, by in zip(shape, step, strict=True))
    for starts in itertools.product(*ranges):
        yield tuple(slice(a, min(a + by, size)) for a, by, size in zip(starts, step, shape, strict=True))


def _global_index(local: int, tile_shape: Sequence[int], tile: Sequence[slice]) -> Index:
    place = np.unravel_index(local, tuple(tile_shape))
    return tuple(int(p) + s.start for p, s in zip(place, tile, strict=True))


class _Grid:
    """Cells over two axes that each keep the largest value seen in them; NaN wins over every number."""

    def __init__(self, like: Tensor, dims: tuple[int, int], limit: int, dtype: torch.dtype) -> None:
        self.dims = dims
        self.sizes = (like.shape[dims[0]], like.shape[dims[1]])
        self.units = (max(1, math.ceil(self.sizes[0] / limit)), max(1, math.ceil(self.sizes[1] / limit)))
        shape = tuple(math.ceil(size / unit) for size, unit in zip(self.sizes, self.units, strict=True))
        self.cells = torch.full(shape, -math.inf, dtype=dtype, device=like.device)

    def tiles(self, shape: Sequence[int]) -> Iterator[tuple[slice, ...]]:
        units = [1] * len(shape)
        units[self.dims[0]], units[self.dims[1]] = self.units
        return _tiles(shape, units)

    def add(self, block: Tensor, tile: Sequence[slice]) -> None:
        others = [dim for dim in range(block.ndim) if dim not in self.dims]
        flat = block.amax(dim=others) if others else block
        if self.dims[0] > self.dims[1]:
            flat = flat.transpose(0, 1)
        missing = [-size % unit for size, unit in zip(flat.shape, self.units, strict=True)]
        if any(missing):  # the last bin of an axis may be cut short
            flat = torch.nn.functional.pad(flat, (0, missing[1], 0, missing[0]), value=-math.inf)
        down, across = self.units
        # Rows before columns: one reduction over both is several times slower on the CPU.
        flat = flat.reshape(-1, down, flat.shape[1]).amax(dim=1)
        flat = flat.reshape(flat.shape[0], -1, across).amax(dim=2)
        top, left = tile[self.dims[0]].start // down, tile[self.dims[1]].start // across
        place = self.cells[top : top + flat.shape[0], left : left + flat.shape[1]]
        torch.maximum(place, flat, out=place)

    def result(self) -> tuple[Array, Extent]:
        rows, columns = (count * unit for count, unit in zip(self.cells.shape, self.units, strict=True))
        return self.cells.cpu().numpy(), (-0.5, columns - 0.5, rows - 0.5, -0.5)


def _lift(tensor: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, tuple[int, int], int]:
    """A view with ``added`` leading axes of size 1, so that there are always two to show: (view, dims, added)."""
    added = 2 - len(dims)
    view = tensor.detach()[(None,) * added]
    rows, columns = (*range(added), *(dim + added for dim in dims))
    return view, (rows, columns), added


def _checked_limit(limit: int) -> int:
    if limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}")
    return limit


@torch.no_grad()
def max_downsample(diff: Tensor, dims: Sequence[int] | None = None, limit: int = 512) -> tuple[Array, Extent]:
    """The largest value of ``diff`` in each cell of a grid of at most ``limit x limit`` over two of its axes.

    ``diff`` may have any shape, dtype (complex counts by magnitude) and device; ``dims`` are the axes
    (rows, columns), the last two by default, and every other axis is reduced by maximum. A cell that holds
    a NaN is NaN. A maximum cannot lose the one bad element that an average or a stride would.

    Returns the 2-d array (float64 for 64-bit and 32-bit integer dtypes, else float32) and the extent (left,
    right, bottom, top) in element indices, as ``imshow`` takes it: every cell but the last of an axis
    covers the same number of elements, so the extent may end past the tensor. A tensor without elements
    gives a (0, 0) array.

    Raises ValueError for axes that do not exist and for ``limit < 1``.

    >>> grid, extent = gl.plots.max_downsample(torch.eye(1000), limit=10)
    >>> grid.shape, float(grid.max())
    ((10, 10), 1.0)
    """
    view, pair, _ = _lift(diff, resolve_dims(diff.ndim, dims))
    limit = _checked_limit(limit)
    if not view.numel():
        return np.zeros((0, 0), dtype=np.float32), (-0.5, -0.5, -0.5, -0.5)
    real = torch.float64 if working_dtype(diff) in (torch.float64, torch.complex128) else torch.float32
    grid = _Grid(view, pair, limit, real)
    for tile in grid.tiles(view.shape):
        block = view[tile].to(working_dtype(diff))
        grid.add(block.abs() if block.is_complex() else block, tile)
    return grid.result()


def _difference(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor | None, int]:
    """|x - y| of two blocks; 0 where both hold the same non-finite value, NaN where a non-finite value differs.

    Returned with a mask of the latter (None when there are none) and the number of the former.
    """
    diff = (x - y).abs()
    if bool(torch.isfinite(diff.amax())):  # a NaN or an infinity anywhere would show in the maximum
        return diff, None, 0
    special = ~(torch.isfinite(x) & torch.isfinite(y))
    same = special & ((x == y) | (torch.isnan(x) & torch.isnan(y)))
    differ = special & ~same
    # Two finite values may still overflow the subtraction; they stay finite and by far the worst.
    diff = diff.clamp_(max=torch.finfo(diff.dtype).max).masked_fill_(same, 0.0).masked_fill_(differ, math.nan)
    return diff, differ if bool(differ.any()) else None, int(same.sum())


def _item(tensor: Tensor, index: Index) -> Any:
    return tensor[index].item() if tensor.ndim else tensor.item()


@torch.no_grad()
def difference_map(
    baseline: Tensor, target: Tensor, *, dims: Sequence[int] | None = None, limit: int = 512
) -> DifferenceMap:
    """Reduce ``|baseline - target|`` to at most ``limit x limit`` cells by maximum, and find the worst element.

    Both tensors have one shape, of any dtype; the work is done on the device of ``baseline``, a block at a
    time, and only the small result leaves it. Differences are taken in float32, or float64 where an operand
    needs it.

    Raises TypeError or ValueError when the two cannot be compared or ``dims`` does not fit.

    >>> found = gl.plots.difference_map(torch.zeros(4, 6), torch.eye(4, 6) * 0.5)
    >>> found.worst, found.worst_index, found.grid.shape
    (0.5, (0, 0), (4, 6))
    """
    check_pair(baseline, target)
    chosen = resolve_dims(baseline.ndim, dims)
    limit = _checked_limit(limit)
    x, pair, added = _lift(baseline, chosen)
    y, _, _ = _lift(target, chosen)
    work = working_dtype(baseline, target)
    worst, worst_index, first, differs, equals = -1.0, None, None, 0, 0
    hidden = {dim: torch.full((x.shape[dim],), -math.inf, device=x.device) for dim in range(x.ndim) if dim not in pair}
    if x.numel():
        grid = _Grid(x, pair, limit, torch.float64 if work in (torch.float64, torch.complex128) else torch.float32)
        for tile in grid.tiles(x.shape):
            diff, bad, same = _difference(x[tile].to(work), y[tile].to(x.device, work))
            equals += same
            grid.add(diff, tile)
            for dim, largest in hidden.items():
                place = largest[tile[dim]]
                torch.maximum(place, diff.amax([each for each in range(diff.ndim) if each != dim]).to(place), out=place)
            if bad is not None:
                differs += int(bad.sum())
                found = _global_index(int(bad.reshape(-1).to(torch.uint8).argmax()), bad.shape, tile)
                first = found if first is None else min(first, found)
                diff = diff.nan_to_num(nan=-1.0)
            peak = float(diff.amax())
            if peak > worst:
                worst, worst_index = peak, _global_index(int(diff.argmax()), diff.shape, tile)
        cells, extent = grid.result()
    else:
        cells, extent = np.zeros((0, 0), dtype=np.float32), (-0.5, -0.5, -0.5, -0.5)
    at = None if worst_index is None else worst_index[added:]
    bad_at = None if first is None else first[added:]
    return DifferenceMap(
        grid=cells,
        extent=extent,
        dims=chosen,
        shape=tuple(baseline.shape),
        dtypes=(str(baseline.dtype).removeprefix("torch."), str(target.dtype).removeprefix("torch.")),
        worst=worst if at is not None else math.nan,
        worst_index=at,
        worst_values=None if at is None else (_item(baseline, at), _item(target, at)),
        nonfinite_differ=differs,
        nonfinite_equal=equals,
        nonfinite_index=bad_at,
        nonfinite_values=None if bad_at is None else (_item(baseline, bad_at), _item(target, bad_at)),
        profiles=_profiles(cells, pair, hidden, limit)[added:] if cells.size else (),
    )


def _profiles(cells: Array, pair: tuple[int, int], hidden: Mapping[int, Tensor], limit: int) -> tuple[Array, ...]:
    """The largest difference at each index of each dimension, of those that ``cells`` shows and of the others."""
    found = {pair[0]: cells.max(axis=1), pair[1]: cells.max(axis=0)}
    for dim, largest in hidden.items():
        values = largest.cpu().numpy()
        unit = max(1, math.ceil(len(values) / limit))
        padded = np.pad(values, (0, -len(values) % unit), constant_values=-math.inf)
        found[dim] = padded.reshape(-1, unit).max(axis=1)
    return tuple(found[dim] for dim in sorted(found))


def blocks(baseline: Tensor, target: Tensor) -> Iterator[tuple[Tensor, Tensor, tuple[slice, ...]]]:
    """Yield matching blocks of both tensors in working precision, with their positions."""
    work = working_dtype(baseline, target)
    x, y = (t.detach() if t.ndim else t.detach().reshape(1) for t in (baseline, target))
    if x.numel():
        for tile in _tiles(x.shape, [1] * x.ndim):
            yield x[tile].to(work), y[tile].to(x.device, work), tile
