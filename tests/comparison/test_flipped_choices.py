"""A later call is not called different for a cache that rounding alone has moved in an earlier one."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from graftlab.comparison.flipped_choices import (
    doubts_after_flips,
    doubts_after_rounding,
    moved_by_flips,
    moved_by_rounding,
)
from graftlab.control.verdicts import Verdict
from graftlab.verdict.causes import Causes
from graftlab.verdict.origins import ErrorOrigins
from graftlab.verdict.wording import Findings


def rows(**parts: Any) -> dict[str, Any]:
    usual = {"tags": {}, "dtype": "bfloat16", "label": "clean", "ratio": 0.5, "error_ratio": 40.0}
    return {**usual, "group": parts["name"], "added": 0.003, "error": 0.2, **parts}


def verdict(*of_taps: dict[str, Any], **parts: Any) -> Verdict:
    return Verdict(Findings(pd.DataFrame([*of_taps]), 5.0, 1, **parts), 7)


def test_taps_that_are_off_but_agree_from_equal_inputs_were_moved_by_rounding() -> None:
    found = verdict(
        rows(name="k"),
        rows(name="k", error=0.3),
        rows(name="near", error_ratio=4.0),
        rows(name="wide", dtype="float32"),
        rows(name="k.grad", tags={"kind": "grad"}),
        rows(name="unmeasured", ratio=float("nan")),
    )
    assert moved_by_flips(found) == {"k": 0.3}
    # A call in which something is named proves nothing of rounding.
    assert moved_by_flips(verdict(rows(name="k"), rows(name="o", label="culprit", ratio=9.0))) == {}
    assert moved_by_flips(verdict(rows(name="k"), data=["The weights already differ."])) == {}
    # Unless the call agrees in float32.
    parts: dict[str, Any] = {"unexplained": ["k differs."], "only_without_grafts": True}
    assert moved_by_flips(verdict(rows(name="k"), **parts)) == {}
    assert moved_by_flips(verdict(rows(name="k"), **parts, in_float32=0.5)) == {"k": 0.2}


def named(name: str, **parts: Any) -> dict[str, Any]:
    return rows(**{"name": name, "label": "culprit", "ratio": 20.0, "added": 0.25, **parts})


NOT_COMPARED = ErrorOrigins(not_compared={"o": ()})


@pytest.mark.parametrize(
    ("taps", "parts", "is_excused"),
    [
        ([named("h.1.o", group="o")], {}, True),
        ([named("h.1.o", group="o"), rows(name="other")], {}, True),
        # In the first layer nothing had moved the cache.
        ([named("h.1.o", group="o"), named("h.0.o", group="o", added=0.07)], {}, False),
        ([named("h.1.o", group="o", added=2.1)], {}, False),
        ([named("h.1.o", group="o", dtype="float32")], {}, False),
        ([named("h.1.o", group="o")], {"origins": ErrorOrigins()}, False),
        ([named("h.1.o", group="o")], {"origins": None}, False),
        ([named("h.1.o", group="o")], {"data": ["The weights already differ."]}, False),
        ([named("h.1.o", group="o")], {"unexplained": ["The returned value differs."]}, False),
        ([rows(name="h.1.o", group="o")], {}, False),
    ],
)
def test_only_taps_that_add_as_little_as_rounding_had_moved_may_be_right(
    taps: list[dict[str, Any]], parts: dict[str, Any], is_excused: bool
) -> None:
    flipped = {"h.1.k": 0.2, "h.1.q": 0.1, "h.0": 0.4}
    doubts = doubts_after_flips(verdict(*taps, **{"origins": NOT_COMPARED, **parts}), flipped)
    assert bool(doubts) is is_excused
    if is_excused:
        assert doubts[0].startswith("In an earlier call rounding to bfloat16 alone had moved taps in h.1 by up to 0.2,")
        assert doubts[1] == "Not checked: what earlier calls wrote for o, such as a cache."
    assert doubts_after_flips(verdict(*taps, origins=NOT_COMPARED), {}) == []


def wide(name: str, **parts: Any) -> dict[str, Any]:
    return rows(
        **{"name": name, "group": "o", "label": "minor", "dtype": "float32", "ratio": 11.0, "added": 2e-6, **parts}
    )


ON_PAIRS = "The plan's pairs contradict their names or each other: k has the values of v."
UNCHANGED = {"output": Causes({"o": "minor"}, total=0.8)}


def test_modules_that_rounding_alone_moves_are_known_where_all_agrees() -> None:
    taps = [
        wide("h.1.k", label="clean", ratio=0.5, error=3e-7),
        wide("h.1.q", label="clean", ratio=0.5, error=2e-7),
        wide("h.0.k", label="clean", ratio=0.5, error=float("nan")),
        rows(name="h.2.k"),
        wide("h.3.k.grad", label="clean", tags={"kind": "grad"}, error=1e-7),
    ]
    assert moved_by_rounding(verdict(*taps)) == {"h.1": 3e-7}
    assert moved_by_rounding(verdict(*taps, data=[ON_PAIRS])) == {"h.1": 3e-7}
    assert moved_by_rounding(verdict(*taps, data=["The weights already differ."])) == {}
    assert moved_by_rounding(verdict(*taps, wide("h.1.o"))) == {}


@pytest.mark.parametrize(
    ("taps", "parts", "is_excused"),
    [
        ([wide("h.1.o")], {}, True),
        ([wide("h.1.o")], {"data": [ON_PAIRS]}, True),
        ([wide("h.1.o", added=4e-6)], {}, False),
        ([wide("h.2.o")], {}, False),
        ([wide("h.1.o", dtype="bfloat16")], {}, False),
        ([wide("h.1.o"), wide("h.1.p", group="p")], {}, False),
        ([wide("h.1.o")], {"causes": {}}, False),
        ([wide("h.1.o")], {"causes": {"output": Causes({"o": "culprit"}, total=9.0)}}, False),
        ([wide("h.1.o")], {"causes": {"output": Causes({"o": "culprit"}, cancelling=(frozenset("o"),))}}, False),
        ([wide("h.1.o")], {"origins": ErrorOrigins()}, False),
        ([wide("h.1.o")], {"data": ["The weights already differ."]}, False),
        ([wide("h.1.o")], {"unexplained": ["The returned value differs."]}, False),
    ],
)
def test_what_reads_a_state_moved_by_rounding_may_be_right_if_the_output_agrees(
    taps: list[dict[str, Any]], parts: dict[str, Any], is_excused: bool
) -> None:
    found = verdict(*taps, **{"origins": NOT_COMPARED, "causes": UNCHANGED, **parts})
    doubts = doubts_after_rounding(found, {"h.1": 3e-7})
    assert bool(doubts) is is_excused
    if is_excused:
        assert doubts[0].startswith("h.1.o adds 2e-06 here, and the output still agrees. In earlier calls rounding")
        assert doubts[1] == "Not checked: what earlier calls wrote for o, such as a state or a cache."
    assert doubts_after_rounding(found, {}) == []
