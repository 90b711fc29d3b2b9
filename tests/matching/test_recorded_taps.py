"""Recorded taps: how far apart their values are."""

from __future__ import annotations

import math

import numpy as np
import pytest

from graftlab.matching.recorded_taps import relative_l2


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
