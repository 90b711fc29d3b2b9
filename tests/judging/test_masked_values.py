"""Values that both sides mask, such as scores of -1e9: which taps may have some, and what the others differ by."""

from __future__ import annotations

import pandas as pd
import pytest
import torch

from graftlab.judging.masked_values import _apart, _may_be_masked


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
