"""The words of a verdict: which layers, modules and steps, and what several groups have in common."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd
import pytest

from graftlab.base.tap_groups import group_of
from graftlab.verdict.added import COLUMNS
from graftlab.verdict.wording import Findings, text_of


def tap(
    name: str, ratio: float, *, kind: str | None = None, step: int = 0, target: str | None = None
) -> dict[str, Any]:
    tags = {"kind": kind} if kind else {}
    return {
        **dict.fromkeys(COLUMNS),
        **{"name": name, "tags": tags, "rank": 0, "step": step, "group": group_of(name, tags)},
        **{"target_name": target or name, "dtype": "float32", "added": ratio * 1e-6, "floor": 1e-6, "ratio": ratio},
        "label": "culprit" if ratio > 5 else "clean",
    }


def said(*taps: dict[str, Any], hints: Mapping[str, str] | None = None) -> str:
    return text_of(Findings(pd.DataFrame(list(taps), columns=list(COLUMNS)), 5.0, 1, hints=hints or {}))


def test_a_module_named_by_a_number_is_distinguished_from_its_neighbours() -> None:
    taps = [tap(f"h.{layer}.mlp.{n}", 900.0 if n == 2 else 1.0) for layer in range(3) for n in range(3)]
    assert "h.*.mlp.* is computed differently in layers 0-2 (mlp.2 alone, added " in said(*taps)
    every = [tap(f"h.{layer}.mlp.{n}", 900.0) for layer in range(3) for n in range(3)]
    assert "alone" not in said(*every)


def test_the_steps_are_named_unless_all_differ() -> None:
    taps = [tap(f"l.{n}.act", 900.0 if (n, s) == (1, 2) else 1.0, step=s) for s in range(3) for n in range(2)]
    assert said(*taps).startswith("l.*.act is computed differently in layer 1 of 0-1 and step 2 of 0-2 (")
    assert said(*(tap("act", 900.0 if s else 1.0, step=s) for s in range(4))).startswith(
        "act is computed differently in steps 1-3 of 0-3 ("
    )
    assert "step" not in said(tap("act", 900.0), tap("act", 900.0, step=1))


def test_a_pair_has_the_targets_name_beside_it() -> None:
    one = tap("h.0.out", 9.0, target="blocks.1.mixed")
    assert "float32, at the target's blocks.1.mixed)" in said(one)
    assert "float32, most at the target's blocks.2.mixed)" in said(one, tap("h.1.out", 90.0, target="blocks.2.mixed"))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            "param_grad",
            "The gradients of weights are computed differently: a.w, b.w, l.*.w in layer 1 of 0-1 and 1 more",
        ),
        ("param", "The updates of weights are computed differently: a.w, b.w, l.*.w in layer 1 of 0-1 and 1 more"),
    ],
)
def test_many_weights_share_a_sentence(kind: str, words: str) -> None:
    ratios = {"a.w": 10.0, "b.w": 20.0, "l.0.w": 1.0, "l.1.w": 30.0, "c.w": 15.0}
    lines = said(*(tap(name, ratio, kind=kind) for name, ratio in ratios.items())).splitlines()
    assert lines[0] == f"{words} (added up to 3e-05, 30 x the floor, float32)."
    few = said(*(tap(name, 10.0, kind=kind) for name in ("a.w", "b.w", "c.w")))
    assert len(few.splitlines()) == 3


def test_without_a_finite_number_on_both_sides_nothing_is_clean() -> None:
    lost = [{**tap(name, math.nan), "label": "unmeasured"} for name in ("a", "b")]
    assert said(*lost) == "Nothing was compared: no tap has a number that is finite on both sides."
    # What was not measured is not counted among what was.
    assert said(*lost, tap("c", 2.0)) == (
        "No tap adds more than rounding (1 group of taps, at most 2 x the floor, threshold 5)."
    )


def test_equal_hints_share_a_line() -> None:
    hints = {"a": "at a, the target's are 2 times the baseline's (explains 100 % of the difference)"}
    hints["b"] = "at b, the target's are 2 times the baseline's (explains 99.99 % of the difference)"
    hints["c"] = "at c, the target's are 3 times the baseline's (explains 100 % of the difference)"
    lines = [line for line in said(*(tap(name, 9.0) for name in "abc"), hints=hints).splitlines() if "Hint" in line]
    assert lines == [f"Hint (a, b): {hints['a']}.", f"Hint (c): {hints['c']}."]


def test_a_cause_that_neighbouring_values_may_share_is_mentioned() -> None:
    words = "If l.*.q and l.*.k read a tensor that no tap shows, such as a residual stream or positions, one mistake"
    assert words in said(tap("l.0.q", 9.0), tap("l.0.k", 9.0), tap("l.1.q", 1.0), tap("l.1.v", 9.0))
    # In other layers, in other steps, or of which one alone is a value.
    assert "read a tensor" not in said(tap("l.0.q", 9.0), tap("l.1.k", 9.0))
    assert "read a tensor" not in said(tap("q", 9.0), tap("k", 9.0, step=1))
    assert "read a tensor" not in said(tap("q", 9.0), tap("q", 9.0, kind="grad"))
