"""Values that both sides mask, such as scores of -1e9: which taps may have some, and what the others differ by."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
import torch

from graftlab.errors import SessionError
from graftlab.judging.masked_values import _apart, _may_be_masked, without_masked_values
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
    (wanted,) = runs.asked
    assert (wanted.b2t, wanted.leaving) == ("True", "name == 'alone'")
    assert "masked" in str(wanted.keep)
    unmasked = pd.DataFrame([tap("usual", -1.0, 3.0)])
    assert without_masked_values(runs, unmasked, frame, None) == (frame, [])
    assert len(runs.asked) == 1
