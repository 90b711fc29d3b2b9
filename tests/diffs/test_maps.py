"""Difference maps compared with loops in numpy: cells, their positions, and the worst element."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from kit.refusals import exactly
from torch import Tensor

from graftlab.diffs.maps import difference_map, max_downsample, resolve_dims, working_dtype

INF, NAN = math.inf, math.nan


def random(shape: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def cells_of(diff: Tensor, dims: tuple[int, ...], limit: int) -> tuple[np.ndarray[Any, Any], tuple[float, ...]]:
    """By plain loops."""
    values = diff.numpy()
    if len(dims) == 1:
        values, dims = values[None], (0, dims[0] + 1)
    rows, columns = (values.shape[dim] for dim in dims)
    down, across = math.ceil(rows / limit), math.ceil(columns / limit)
    cells = np.full((math.ceil(rows / down), math.ceil(columns / across)), -np.inf)
    for index in itertools.product(*map(range, values.shape)):
        cell = index[dims[0]] // down, index[dims[1]] // across
        cells[cell] = max(cells[cell], values[index])
    return cells, (-0.5, cells.shape[1] * across - 0.5, cells.shape[0] * down - 0.5, -0.5)


@pytest.mark.parametrize("block", [1, 6, 7, 14, 40, 10_000])
@pytest.mark.parametrize(
    ("shape", "dims"),
    [((5, 7), (0, 1)), ((5, 7), (1, 0)), ((3, 4, 5), (0, 2)), ((3, 4, 5), (2, 0)), ((3, 4, 5), (1,)), ((9,), (0,))],
)
def test_each_cell_has_the_largest_of_its_elements_and_its_place(
    shape: tuple[int, ...], dims: tuple[int, ...], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graftlab.diffs.maps.BLOCK", block)
    diff = random(shape, seed=block)
    for limit in (1, 2, 3, 512):
        cells, extent = max_downsample(diff, dims, limit)
        expected, place = cells_of(diff, dims, limit)
        np.testing.assert_array_equal(cells, expected)
        assert extent == place


@pytest.mark.parametrize("block", [1, 5, 10_000])
@pytest.mark.parametrize("dims", [None, (2, 0), (1,)])
def test_the_worst_of_all_and_the_first_that_is_not_finite_are_found_where_they_are(
    dims: tuple[int, ...] | None, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graftlab.diffs.maps.BLOCK", block)
    x = random((3, 4, 5))
    y = x + 0.01 * random((3, 4, 5), seed=1)
    y[1, 2, 3] += 2
    x[0, 0, 1] = y[0, 0, 1] = NAN
    x[0, 1, 0], y[0, 1, 0] = INF, INF
    x[2, 3, 4], x[1, 0, 0], y[0, 3, 2] = NAN, -INF, INF
    found = difference_map(x, y, dims=dims)
    assert found.worst_index == (1, 2, 3)
    assert found.worst == float((x - y).abs()[1, 2, 3])
    assert found.worst_values == (x[1, 2, 3].item(), y[1, 2, 3].item())
    assert (found.nonfinite_differ, found.nonfinite_equal, found.nonfinite_index) == (3, 2, (0, 3, 2))
    assert found.nonfinite_values == (x[0, 3, 2].item(), INF)
    assert found.dims == resolve_dims(3, dims)
    assert (found.shape, found.dtypes) == ((3, 4, 5), ("float32", "float32"))
    clean = (x - y).abs()
    clean[0, 0, 1] = clean[0, 1, 0] = 0
    np.testing.assert_array_equal(found.grid, max_downsample(clean.where(clean.isfinite(), NAN), dims)[0])
    assert np.isnan(found.grid).any()


def test_pairs_without_elements_or_without_a_finite_one_have_no_worst() -> None:
    empty = difference_map(torch.ones(0, 3), torch.ones(0, 3))
    assert (empty.grid.shape, empty.extent) == ((0, 0), (-0.5, -0.5, -0.5, -0.5))
    assert (empty.worst_index, empty.worst_values, empty.nonfinite_differ) == (None, None, 0)
    assert math.isnan(empty.worst)
    nan = difference_map(torch.tensor([NAN]), torch.tensor([1.0]))
    assert (nan.worst_index, nan.nonfinite_index, nan.nonfinite_differ, nan.nonfinite_equal) == (None, (0,), 1, 0)
    same = difference_map(torch.tensor([INF, 2.0]), torch.tensor([INF, 2.0]))
    assert (same.worst, same.worst_index, same.grid.tolist()) == (0.0, (0,), [[0.0, 0.0]])
    alone = difference_map(torch.tensor(3.0), torch.tensor(1.0))
    assert (alone.worst, alone.worst_index, alone.worst_values, alone.grid.tolist()) == (2.0, (), (3.0, 1.0), [[2.0]])


def test_a_difference_that_overflows_stays_finite_and_the_worst() -> None:
    x = torch.tensor([3e38, 0.0])
    assert difference_map(x, -x).worst == torch.finfo(torch.float32).max
    assert difference_map(x, -x).worst_index == (0,)


@pytest.mark.parametrize(
    ("one", "other", "work"),
    [
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.bool, torch.int8, torch.float32),
        (torch.float64, torch.float32, torch.float64),
        (torch.float32, torch.int32, torch.float64),
        (torch.int64, torch.int64, torch.float64),
        (torch.complex64, torch.float32, torch.complex64),
        (torch.complex64, torch.float64, torch.complex128),
    ],
)
def test_differences_are_taken_as_wide_as_an_operand_needs(
    one: torch.dtype, other: torch.dtype, work: torch.dtype
) -> None:
    assert working_dtype(torch.ones(1, dtype=one), torch.ones(1, dtype=other)) == work
    assert working_dtype(torch.ones(1, dtype=other), torch.ones(1, dtype=one)) == work
    found = difference_map(torch.ones(1, 2, dtype=one), torch.zeros(1, 2, dtype=other))
    assert found.dtypes == (str(one).removeprefix("torch."), str(other).removeprefix("torch."))
    assert found.grid.tolist() == [[1.0, 1.0]]
    assert found.grid.dtype == (np.float64 if work in (torch.float64, torch.complex128) else np.float32)
    for dtype in (one, other, torch.complex128):
        grid, _ = max_downsample(torch.ones(1, 2, dtype=dtype))
        is_wide = working_dtype(torch.ones(1, dtype=dtype)) in (torch.float64, torch.complex128)
        assert grid.dtype == (np.float64 if is_wide else np.float32)


def test_which_axes_are_shown() -> None:
    assert [resolve_dims(ndim, None) for ndim in range(5)] == [(), (0,), (0, 1), (1, 2), (2, 3)]
    assert resolve_dims(3, (-1, 0)) == (2, 0)
    assert resolve_dims(3, [1]) == (1,)
    for ndim, dims in ((2, (2,)), (2, (-3,)), (0, (0,))):
        with pytest.raises(ValueError, match=f"names dim {dims[0]}, but the tensor has {ndim} dimensions"):
            resolve_dims(ndim, dims)
    for dims in ((0, 0), (0, -3), (0, 1, 2), ()):
        with pytest.raises(ValueError, match="must name one or two different dimensions"):
            resolve_dims(3, dims)
    for limit in (0, -1):
        with pytest.raises(ValueError, match=f"limit must be at least 1, got {limit}"):
            max_downsample(torch.ones(2), limit=limit)


def test_incomparable_pairs_are_refused_with_the_reason() -> None:
    with pytest.raises(TypeError, match=r"target must be a torch\.Tensor, got list"):
        difference_map(torch.ones(1), [1.0])  # type: ignore[arg-type]
    with pytest.raises(
        ValueError,
        match=exactly(
            "baseline has shape [1] and target [2]: align them first, for instance by concatenating the "
            "shards or by taking the matching slice"
        ),
    ):
        difference_map(torch.ones(1), torch.ones(2))
