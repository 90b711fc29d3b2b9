"""Integers that float64 cannot distinguish are not reported as equal."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graftlab.diffs.measure import measure

NEAR = st.integers(-200, 200)
LARGE = st.one_of(st.integers(2**53, 2**62), st.integers(-(2**62), -(2**53)))


@given(st.lists(st.tuples(LARGE, NEAR), min_size=1, max_size=20))
def test_the_difference_of_large_whole_numbers_is_that_of_the_numbers(pairs: list[tuple[int, int]]) -> None:
    one = [number for number, _ in pairs]
    other = [number + apart for number, apart in pairs]
    stats = measure(torch.tensor(one), torch.tensor(other))
    apart = [abs(each) for _, each in pairs]
    if any(float(x) != float(y) for x, y in zip(one, other, strict=True)):
        # Measured in float64, in which each number is rounded to at most 512.
        assert stats.max_abs <= max(apart) + 1024
        return
    assert stats.max_abs == max(apart)
    assert stats.mean_abs == pytest.approx(sum(apart) / len(pairs))
    expected = math.sqrt(sum(each**2 for each in apart)) / math.sqrt(sum(float(each) ** 2 for each in one))
    assert stats.rel_l2 == pytest.approx(expected, rel=1e-9)
    assert (stats.rel_l2 > 0) == any(apart)
    if any(apart):
        assert stats.max_abs_index is not None
        assert apart[stats.max_abs_index[0]] == max(apart)


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64])
def test_one_unit_is_seen_wherever_it_is(dtype: torch.dtype, contiguous: bool) -> None:
    ids = torch.full((3, 4), 2**62, dtype=torch.int64)
    other = ids.clone()
    other[1, 2] += 1
    one, two = ids.view(dtype), other.view(dtype)
    stats = measure(one, two) if contiguous else measure(one.t(), two.t())
    assert (stats.max_abs, stats.mean_abs) == (1, 1 / 12)
    assert stats.max_abs_index == ((1, 2) if contiguous else (2, 1))
    assert 0 < stats.rel_l2 < 1e-18
    assert measure(one, one.clone()).rel_l2 == 0


def test_the_largest_of_64_bits_without_a_sign() -> None:
    ids = torch.tensor([-1, -2], dtype=torch.int64)
    assert measure(ids.view(torch.uint64), torch.tensor([-1, -1]).view(torch.uint64)).max_abs == 1
    # Their upper halves differ by one, and in a signed number by nearly all that there is.
    around = torch.tensor([2**63 - 1]), torch.tensor([-(2**63)])
    assert measure(*(each.view(torch.uint64) for each in around)).max_abs == 1


def test_one_unit_is_seen_beside_negative_numbers_alone() -> None:
    stats = measure(torch.tensor([-(2**60), 0]), torch.tensor([-(2**60) + 1, 0]))
    assert (stats.max_abs, stats.max_abs_index) == (1.0, (0,))
