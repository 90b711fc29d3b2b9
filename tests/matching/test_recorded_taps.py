"""Recorded taps: how far apart their values are, and what they hold of them."""

from __future__ import annotations

import math
import weakref

import numpy as np
import pytest
import torch

from graftlab.matching.recorded_taps import RecordedTap, relative_l2


@pytest.mark.parametrize(
    ("expected", "found", "distance"),
    [
        ([3.0, 4.0], [3.0, 4.0], 0.0),
        ([3.0, 4.0], [3.0, 3.0], 0.2),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([0.0, 0.0], [0.0, 1.0], math.inf),
        # Of these only the finite pairs count, as long as the others are in the same places.
        ([3.0, 4.0, math.inf], [3.0, 3.0, math.nan], 0.2),
        ([math.nan, math.inf], [math.inf, math.nan], 0.0),
        ([3.0, 4.0, math.nan], [3.0, 4.0, 0.0], math.inf),
        ([3.0, math.nan, 4.0], [math.nan, 3.0, 4.0], math.inf),
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_distance_is_of_finite_pairs_and_infinite_where_only_one_number_is(
    expected: list[float], found: list[float], distance: float, dtype: type[np.generic]
) -> None:
    assert relative_l2(np.array(expected, dtype), np.array(found, dtype)) == pytest.approx(distance)


def test_a_tap_holds_the_values_of_a_parameter_and_no_graph() -> None:
    parameter = torch.nn.Parameter(torch.arange(4.0))
    for shown in (parameter, parameter * 2):
        tap = RecordedTap.of("h", shown)
        assert tap.value is not None
        assert (tap.value.requires_grad, tap.value.tolist()) == (False, shown.tolist())
        assert tap.elements is not None


def test_a_tap_that_forgets_holds_nothing_beside_its_values() -> None:
    # In float32, so that its elements and its numbers in float64 are copies.
    tap = RecordedTap.of("h", torch.arange(100.0, dtype=torch.bfloat16))
    assert tap.elements is not None
    assert tap.flat is not None
    held = [weakref.ref(each) for each in (tap.elements, tap.flat, tap.lookup)]
    tap.forget()
    assert [each() for each in held] == [None] * 3
    assert tap.value is not None
