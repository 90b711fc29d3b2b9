"""Taps that one side reaches more often than the other."""

from __future__ import annotations

from typing import Any

import pandas as pd

from graftlab.verdict.extra_calls import extra_calls


def rows(*given: tuple[str, str, str, dict[str, Any]]) -> pd.DataFrame:
    """A row for each status, side, name and tags."""
    lines = [
        {"status": status, "side": side, "name": name, "tags": tags, "step": 0, "rank": 0}
        for status, side, name, tags in given
    ]
    return pd.DataFrame(lines, columns=["status", "side", "name", "tags", "step", "rank"])


def test_a_call_that_one_side_makes_more_often_is_reported_with_both_counts() -> None:
    calls = [("grafted", "target", "gate", {})] * 3
    (said,) = extra_calls(rows(*calls, ("unmatched", "target", "gate", {})), ["gate"])
    assert said.startswith("The target reaches gate 4 times and the baseline 3 times. ")
    (said,) = extra_calls(rows(*calls, ("missing", "baseline", "gate", {})), ["gate"])
    assert said.startswith("The baseline reaches gate 4 times and the target 3 times. ")


def test_taps_of_one_side_of_other_tags_or_not_named_are_not_extra_calls() -> None:
    assert extra_calls(rows(("unmatched", "target", "gate", {}), ("grafted", "target", "up", {})), ["gate", "up"]) == []
    decode = rows(("grafted", "target", "gate", {"t": 1}), ("unmatched", "target", "gate", {"t": 2}))
    assert extra_calls(decode, ["gate"]) == []
    extra = rows(("grafted", "target", "gate", {}), ("unmatched", "target", "gate", {}))
    assert extra_calls(extra, ["up"]) == []
    recompute = {"recompute_status": "recompute"}
    assert extra_calls(rows(("grafted", "target", "g", {}), ("unmatched", "target", "g", recompute)), ["g"]) == []


def test_only_the_call_whose_tags_have_more_calls_is_reported() -> None:
    found = rows(
        ("grafted", "target", "gate", {"t": 1}),
        ("grafted", "target", "gate", {"t": 2}),
        ("unmatched", "target", "gate", {"t": 2}),
    )
    (said,) = extra_calls(found, ["gate"])
    assert said.startswith("The target reaches gate (t=2) 2 times and the baseline 1 time. ")
