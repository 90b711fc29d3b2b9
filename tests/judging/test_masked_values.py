"""Values that both sides mask, such as scores of -1e9: which taps may have some, and what the others differ by."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import pytest
import torch

from graftlab.errors import SessionError
from graftlab.judging.masked_values import (
    _apart,
    _may_be_masked,
    _places_masked_by_infinity,
    with_equal_masks,
    without_masked_values,
)
from graftlab.judging.verdict_runs import RunFilters


def tap(name: str, least: float, most: float, *, apart: float = 0.1, status: str = "compared") -> dict[str, object]:
    return {"name": name, "status": status, "min_baseline": least, "max_baseline": most, "max_abs": apart}


def test_only_values_far_below_all_others_are_taken_for_masked_ones() -> None:
    rows = [
        tap("masked", -1e9, 3.0),
        tap("also masked", -1e9, -2.0),
        tap("usual", -1.0, 3.0),
        # Not low enough to vanish in a softmax.
        tap("low", -9e3, 1e-3),
        tap("large both ways", -1e9, 1e9),
        tap("high", 2e9, 3e9),
        tap("equal", -1e9, 3.0, apart=0.0),
        tap("missing", -1e9, 3.0, status="missing"),
        tap("masked", -1e9, 3.0),
    ]
    assert _may_be_masked(pd.DataFrame(rows)) == ["masked", "also masked"]


def test_only_values_masked_on_both_sides_are_left_out_of_the_difference() -> None:
    x, y = torch.tensor([3.0, 4.0, -1e9, -2e4]), torch.tensor([3.0, 4.5, -5e8, -3e4])
    assert _apart(x, y) == pytest.approx(0.1)
    # Masked on one side alone, it is a difference.
    found = _apart(x, torch.tensor([3.0, 4.0, 0.0, -2e4]))
    assert found == pytest.approx(1e9 / (1e18 + 25) ** 0.5)
    assert _apart(x[:2], y[:2]) is None
    assert _apart(x[2:], y[2:]) is None
    assert _apart(x, y[:3]) is None
    assert _apart(x.long(), y.long()) is None
    # Numbers whose difference is infinite have no known distance.
    huge = torch.tensor([1.7e308, -1e9], dtype=torch.float64)
    assert _apart(huge, torch.tensor([-1.7e308, -1e9], dtype=torch.float64)) is None


class Runs:
    """Keeps the pairs of values of a run; the second call of each tap did not fit the budget."""

    def __init__(self) -> None:
        self.asked: list[RunFilters] = []

    def both(self, why: str, wanted: RunFilters) -> None:
        self.asked.append(wanted)

    def pair(self, name: str, rank: int, step: int, tags: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        assert (name, rank, step, tags.get("kind")) == ("masked", 0, 0, None)
        if tags["occurrence"]:
            raise SessionError("no pair was kept")
        return torch.tensor([3.0, 4.0, -1e9]), torch.tensor([3.0, 4.5, -1e9])


def test_values_that_are_not_masked_are_judged_by_the_largest_floor() -> None:
    """Gradients of a masked tap, and pairs that were not kept, stay as they are."""
    calls: list[dict[str, Any]] = [
        {"name": "masked", "tags": {}, "occurrence": 0},
        {"name": "masked", "tags": {}, "occurrence": 1},
        {"name": "masked", "tags": {"kind": "grad"}, "occurrence": 0},
        {"name": "usual", "tags": {}, "occurrence": 0},
    ]
    usual = {"rank": 0, "step": 0, "dtype": "float32", "added": 1e-9, "ratio": 0.5}
    frame = pd.DataFrame([{**usual, **each, "floor": 10.0 ** -(3 + place)} for place, each in enumerate(calls)])
    runs: Any = Runs()
    found, names = without_masked_values(runs, pd.DataFrame([tap("masked", -1e9, 3.0)]), frame, "name == 'alone'")
    assert names == ["masked"]
    assert found["added"].tolist() == [pytest.approx(0.1), 1e-9, 1e-9, 1e-9]
    assert found["ratio"].tolist() == [pytest.approx(100.0), 0.5, 0.5, 0.5]
    # A measured floor of 0 counts as one rounding.
    again: Any = Runs()
    masked = pd.DataFrame([tap("masked", -1e9, 3.0)])
    unmoved, _ = without_masked_values(again, masked, frame.assign(floor=0.0), None)
    assert unmoved["ratio"].tolist()[0] == pytest.approx(0.1 * 2.0**24)
    (wanted,) = runs.asked
    assert (wanted.b2t, wanted.leaving) == ("True", "name == 'alone'")
    assert "masked" in str(wanted.keep)
    unmasked = pd.DataFrame([tap("usual", -1.0, 3.0)])
    assert without_masked_values(runs, unmasked, frame, None) == (frame, [])
    assert len(runs.asked) == 1


# ---- minus infinity on one side -------------------------------------------------------------------------------------

NO, NAN = -math.inf, math.nan


@pytest.mark.parametrize(
    ("baseline", "target", "places"),
    [
        ([3.0, NO, NO], [3.0, -1e9, -2e4], (2, 0)),
        ([3.0, -1e9, NO, NO], [3.5, NO, -1e9, NO], (1, 1)),
        ([0.0, NO], [0.0, -1e9], (1, 0)),
        ([NAN, math.inf, NO, 1.0], [NAN, math.inf, -1e9, 1.0], (1, 0)),
        # A difference beside the masks is measured, and one that is not finite is none of theirs.
        ([3.0, NO, NO], [3.0, -1e9, 1.0], None),
        ([3.0, NO, NO], [3.0, -1e9, math.inf], None),
        ([3.0, NO, 1.0], [3.0, -1e9, NAN], None),
        # Not low enough to vanish in a softmax, or no lower than what stands beside it.
        ([3.0, NO], [3.0, -9e3], None),
        ([3e5, NO], [3e5, -1e6], None),
        ([-3e5, NO], [-3e5, -1e6], None),
    ],
)
def test_only_numbers_far_below_all_others_are_equal_masks(
    baseline: list[float], target: list[float], places: tuple[int, int] | None
) -> None:
    assert _places_masked_by_infinity(torch.tensor(baseline), torch.tensor(target)) == places


def test_values_that_cannot_be_compared_have_no_masks() -> None:
    x, y = torch.tensor([3.0, NO]), torch.tensor([3.0, -1e9])
    assert _places_masked_by_infinity(x, y[:1]) is None
    assert _places_masked_by_infinity(x, torch.tensor([3, -(10**9)])) is None


def rows_of(*taps: dict[str, Any]) -> pd.DataFrame:
    common = {"status": "compared", "rank": 0, "step": 4, "occurrence": 0, "tags": {}, "rel_l2": 0.0}
    numbers = {"nonfinite_baseline": 0, "nonfinite_target": 0, "nonfinite_differ": 0}
    return pd.DataFrame([{**common, **numbers, **each} for each in taps])


class Kept:
    """Keeps the same pair of values for each tap of these names."""

    def __init__(self, pairs: dict[str, tuple[list[float], list[float]]]) -> None:
        self.pairs, self.asked = pairs, list[RunFilters]()

    def both(self, why: str, wanted: RunFilters) -> None:
        self.asked.append(wanted)

    def pair(self, name: str, rank: int, step: int, tags: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        assert (rank, step, tags["occurrence"]) == (0, 0, 0)
        if name not in self.pairs:
            raise SessionError("no pair was kept")
        one, other = self.pairs[name]
        return torch.tensor(one), torch.tensor(other)


def test_rows_with_equal_masks_differ_no_longer_and_all_others_stay() -> None:
    masked = {"nonfinite_baseline": 2, "nonfinite_target": 1, "nonfinite_differ": 1}
    compared = rows_of(
        {"name": "scores", **masked},
        {"name": "wrong", **masked},
        {"name": "not kept", **masked},
        {"name": "more", "nonfinite_baseline": 1, "nonfinite_target": 2, "nonfinite_differ": 1},
        {"name": "both ways", "nonfinite_baseline": 1, "nonfinite_target": 1, "nonfinite_differ": 2},
        {"name": "scores", "tags": {"kind": "grad"}, **masked},
        {"name": "finite"},
    )
    runs: Any = Kept({"scores": ([NO, NO, 1.0], [-1e9, NO, 1.0]), "wrong": ([NO, NO, 1.0], [2.0, NO, 1.0])})
    runs.pairs["more"] = ([-1e9, NO, 1.0], [NO, NO, 1.0])
    changed, grafted, names = with_equal_masks(runs, compared, rows_of({"name": "finite"}))
    assert names == ["scores", "more"]
    assert changed["nonfinite_differ"].tolist() == [0, 1, 1, 0, 2, 1, 0]
    assert changed["nonfinite_baseline"].tolist() == [1, 2, 2, 1, 1, 2, 0]
    assert grafted["nonfinite_differ"].tolist() == [0]
    # The run whose rows have no such place is not made again.
    assert [(each.compare, each.b2t) for each in runs.asked] == [("True", None)]
    assert compared["nonfinite_differ"].tolist() == [1, 1, 1, 1, 2, 1, 0]
    runs = Kept({"scores": ([NO, NO, 1.0], [-1e9, NO, 1.0])})
    changed, grafted, names = with_equal_masks(runs, compared[:1], compared[:1])
    assert (grafted["nonfinite_differ"].tolist(), len(runs.asked)) == ([0], 2)
    assert all("scores" in str(each.keep) for each in runs.asked)


def test_without_such_places_no_run_is_made() -> None:
    runs: Any = Kept({})
    compared = rows_of({"name": "finite"})
    assert with_equal_masks(runs, compared, compared[:0])[2] == []
    assert runs.asked == []
