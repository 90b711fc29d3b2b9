"""What a summary says of a frame: values that are not finite are told before the largest difference."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import pytest

from graftlab.verdict.summary import differences, distances


def frame(*rows: dict[str, Any]) -> pd.DataFrame:
    usual = {"status": "compared", "rel_l2": 0.0, "nonfinite_differ": 0, "numel": 64, "side": "target", "rank": 0}
    usual["tags"] = {"name": "b", "step": 0, "side": "target", "rank": 0, "recompute_status": "original"}
    return pd.DataFrame([{**usual, **row} for row in rows])


def test_the_largest_difference_is_named() -> None:
    rows = frame(
        {"name": "a", "rel_l2": 1e-7},
        {"name": "b", "rel_l2": 2e-3, "rank": 1, "tags": {"name": "b", "rank": 1, "layer": 3}},
        {"name": "c"},
    )
    assert differences(rows) == ["largest rel_l2 2.00e-03 at b layer=3 on target[1]"]


def test_a_nan_is_not_zero() -> None:
    rows = frame({"name": "a"}, {"name": "logits", "nonfinite_differ": 12})
    assert differences(rows) == [
        "non-finite values differ in 1 row, first at logits on target[0]: 12 of 64 elements are NaN or infinite on one "
        "side alone, or in another way",
        "largest rel_l2 of what is finite 0.00e+00 at a on target[0]",
    ]


def test_rows_without_any_finite_pair_are_told_too() -> None:
    rows = frame(
        {"name": "a", "rel_l2": math.nan, "nonfinite_differ": 64},
        {"name": "b", "rel_l2": None, "nonfinite_differ": 64},
        {"name": "b", "rel_l2": None, "nonfinite_differ": 64, "rank": 1},
    )
    first, *more = differences(rows)
    assert first.startswith("non-finite values differ in 3 rows, first at a on target[0]: 64 of 64")
    assert more == []


def test_where_both_sides_have_the_same_nans_and_nothing_else_that_is_said() -> None:
    rows = frame({"name": "mask", "rel_l2": math.nan}, {"name": "b", "rel_l2": 1e-7})
    assert differences(rows) == [
        "largest rel_l2 1.00e-07 at b on target[0]",
        "not compared: 1 row without a finite value on either side, first mask on target[0]",
    ]


@pytest.mark.parametrize("status", ["missing", "timeout", "failed", "unmatched"])
def test_what_was_not_measured_has_no_difference(status: str) -> None:
    assert differences(frame({"name": "a", "rel_l2": None, "nonfinite_differ": None, "status": status})) == []
    assert differences(pd.DataFrame(columns=["name", "status", "rel_l2", "nonfinite_differ"])) == []


def test_an_infinite_difference_is_the_largest() -> None:
    rows = frame({"name": "a", "rel_l2": math.inf}, {"name": "b", "rel_l2": 3.0})
    assert differences(rows) == ["largest rel_l2 inf at a on target[0]"]


def test_of_distances_that_of_a_row_with_other_nans_is_infinite() -> None:
    rows = frame(
        {"name": "a", "rel_l2": 0.5},
        {"name": "b", "nonfinite_differ": 1},
        {"name": "c", "rel_l2": None, "nonfinite_differ": None, "status": "missing"},
    )
    found = distances(rows).tolist()
    assert found[:2] == [0.5, math.inf]
    assert math.isnan(found[2])
