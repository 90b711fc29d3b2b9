"""Grafts into copies, which nothing of the model reads, are recognised by what comes after them."""

from __future__ import annotations

import math

import pandas as pd
import pytest

from graftlab.base.tap_groups import group_of
from graftlab.verdict.added import names_one_tap, unread_grafts, unread_grafts_text


def frame(*taps: tuple[str, float, float], rank: int = 0) -> pd.DataFrame:
    """Taps in execution order: a name, its error without grafts, and what is left of it when all others are grafted."""
    lines = [
        {"name": name, "group": group_of(name), "step": 0, "order": order, "rank": rank, "tags": {}}
        | {"error": error, "added": added, "error_ratio": error * 1e6, "ratio": added * 1e6}
        for order, (name, error, added) in enumerate(taps)
    ]
    return pd.DataFrame(lines)


@pytest.mark.parametrize(
    ("taps", "groups"),
    [
        # The fault is at l.0; the graft of a copy leaves the next taps as they were.
        ([("x", 0, 0), ("l.0", 0.1, 0.1), ("l.1", 0.2, 0.2), ("out", 0.3, 0.3)], ["l.*"]),
        # The graft is taken: what comes after has no error any more, or a different one.
        ([("x", 0, 0), ("l.0", 0.1, 0.1), ("l.1", 0.2, 0), ("out", 0.3, 0)], []),
        ([("l.0", 0.1, 0.1), ("l.1", 0.2, 0.15), ("out", 0.3, 0.3)], []),
        # Two branches: what the first is read by comes later.
        ([("q", 0.1, 0.1), ("k", 0.2, 0.2), ("attn", 0.3, 0)], []),
        # Nothing reads a result, so its parts are as they were in any case.
        ([("l.0", 0, 0), ("output[0]", 0.1, 0.1), ("output[1]", 0.3, 0.3)], []),
        ([("output[0]", 0.1, 0.1), ("l.1", 0.2, 0.2)], ["output[0]"]),
        # Nothing after it is named, so nothing can be inherited.
        ([("l.0", 0.1, 0.1), ("aside", 0, 0)], []),
        # What cannot be measured tells nothing.
        ([("l.0", 0.1, 0.1), ("l.1", math.nan, math.nan), ("out", 0.3, 0.3)], []),
        ([], []),
    ],
)
def test_a_graft_that_changes_no_later_error_did_not_reach_the_model(
    taps: list[tuple[str, float, float]], groups: list[str]
) -> None:
    made = frame(*taps) if taps else frame(("x", 0, 0)).iloc[:0]
    assert unread_grafts(made, 5.0) == groups
    if taps:
        assert unread_grafts(pd.concat([made, frame(*taps, rank=1)]), 5.0) == groups


def test_a_graft_after_which_all_numbers_are_finite_reached_the_model() -> None:
    # Numbers that are finite on one side alone are in no error, and above any floor.
    made = frame(("l.0.o", 0, 0), ("l.0.up", 0, 0), ("l.1.o", 0, 0), ("out", 0, 0))
    made["error_ratio"] = math.inf
    made["ratio"] = [math.inf, 0.0, math.inf, 0.0]
    assert unread_grafts(made, 5.0) == []
    made["ratio"] = math.inf
    assert unread_grafts(made, 5.0) == ["l.*.o", "l.*.up"]


def test_gradients_are_left_out_of_unread_grafts() -> None:
    made = frame(("l.0", 0.1, 0.1), ("l.1", 0.2, 0.2))
    made["group"] += "@grad"
    assert unread_grafts(made, 5.0) == []


def test_the_sentence_names_the_first_groups_and_the_remedy() -> None:
    assert unread_grafts_text([]) == []
    (said,) = unread_grafts_text(["a", "b", "c", "d"])
    assert said.startswith("Not checked: the effect of a, b, c and 1 more: grafting it changed no later tap.")
    assert said.endswith("Write h = gl.tap(name, h).")


def test_calls_of_one_tap_are_not_taken_for_layers() -> None:
    made = frame(("x", 0, 0), ("logits", 0.1, 0.1), ("logits", 0.2, 0.2), ("token", 0, 0))
    assert names_one_tap(made, 5.0)
    assert not names_one_tap(frame(("l.0", 0.1, 0.1), ("l.1", 0.2, 0.2)), 5.0)
    made["tags"] = [{"layer": place} for place in range(4)]
    assert not names_one_tap(made, 5.0)
