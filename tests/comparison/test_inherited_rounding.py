"""A later call is not called different for a cache that rounding alone has moved in an earlier one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd
import pytest

from graftlab.comparison.inherited_rounding import InheritedRounding
from graftlab.control.verdicts import Verdict
from graftlab.verdict.causes import Causes
from graftlab.verdict.findings import Findings
from graftlab.verdict.origins import ErrorOrigin, ErrorOrigins
from graftlab.verdict.rounds_differently import LABEL as ROUNDS_DIFFERENTLY
from graftlab.verdict.rounds_differently import RoundingGroups


def rows(**parts: Any) -> dict[str, Any]:
    usual = {"tags": {}, "dtype": "bfloat16", "label": "clean", "ratio": 0.5, "error_ratio": 40.0}
    return {**usual, "group": parts["name"], "added": 0.003, "error": 0.2, **parts}


def after(*calls: Verdict) -> InheritedRounding:
    inherited = InheritedRounding()
    for each in calls:
        inherited.add(each)
    return inherited


def moved_by(*calls: Verdict) -> dict[str, float]:
    return {module: moved for (module, _), moved in after(*calls)._moved.items()}


def verdict(*of_taps: dict[str, Any], **parts: Any) -> Verdict:
    return Verdict(Findings(pd.DataFrame([*of_taps]), 5.0, 1, **parts), 7)


ON_PAIRS = "The plan's pairs contradict their names or each other: k has the values of v."
NOT_COMPARED = ErrorOrigins(not_compared={"o": ()})
RIGHT = ErrorOrigin("o", "h.1.o", 0, 0, 0, False, {}, ("h.1.o",))


def test_taps_that_are_off_but_agree_from_equal_inputs_were_moved_by_rounding() -> None:
    taps = [
        rows(name="h.1.k"),
        rows(name="h.1.k", error=0.3),
        rows(name="h.2.near", error_ratio=4.0),
        rows(name="h.3.k.grad", tags={"kind": "grad"}),
        rows(name="h.4.unmeasured", ratio=float("nan")),
    ]
    assert moved_by(verdict(*taps)) == {"h.1": 0.3}
    # The largest of all calls counts.
    assert moved_by(verdict(*taps), verdict(rows(name="h.1.k"))) == {"h.1": 0.3}
    # A call in which something is named proves nothing of rounding.
    assert moved_by(verdict(*taps, rows(name="o", label="culprit", ratio=9.0))) == {}
    assert moved_by(verdict(*taps, data=["The weights already differ."])) == {}
    # What only rounds differently is named, and no mistake.
    rounds = rows(name="o", label=ROUNDS_DIFFERENTLY, ratio=9.0)
    assert moved_by(verdict(*taps, rounds, rounding=RoundingGroups(("o",)))) == {"h.1": 0.3}
    assert moved_by(verdict(*taps, rounds, rows(name="p", label="culprit"), rounding=RoundingGroups(("o",)))) == {}
    assert moved_by(verdict(*taps, contradicting_pairs=[ON_PAIRS])) == {}
    assert moved_by(verdict(*taps, unexplained=["The returned value differs."])) == {}
    # Unless the call agrees in float32.
    parts: dict[str, Any] = {"unexplained": ["k differs."], "only_without_grafts": True}
    assert moved_by(verdict(*taps, **parts)) == {}
    assert moved_by(verdict(*taps, **parts, in_float32=0.5)) == {"h.1": 0.3}
    # What a flipped choice moves in more bits is not the rounding of those.
    assert moved_by(verdict(wide("h.1.k", label="clean", ratio=0.5, error=0.1), **parts, in_float32=0.5)) == {}


def named(name: str, **parts: Any) -> dict[str, Any]:
    return rows(**{"name": name, "label": "culprit", "ratio": 20.0, "added": 0.25, **parts})


@pytest.mark.parametrize(
    ("taps", "parts", "is_excused"),
    [
        ([named("h.1.o", group="o")], {}, True),
        ([named("h.1.o", group="o"), rows(name="other")], {}, True),
        # In the first layer nothing had moved the cache.
        ([named("h.1.o", group="o"), named("h.0.o", group="o", added=0.07)], {}, False),
        ([named("h.1.o", group="o", added=2.1)], {}, False),
        # Rounding makes no number infinite or NaN on one side alone.
        ([named("h.1.o", group="o", added=0.0, ratio=float("inf"), floor=1e-3)], {}, False),
        ([named("h.1.o", group="o", added=float("nan"), ratio=float("inf"), floor=1e-3)], {}, False),
        # Beside a floor of zero any difference is infinitely many times as large.
        ([named("h.1.o", group="o", ratio=float("inf"), floor=0.0)], {}, True),
        ([named("h.1.o", group="o", dtype="float32")], {}, False),
        # Rounding to 16 bits of either kind moves taps of both.
        ([named("h.1.o", group="o", dtype="float16")], {}, True),
        ([named("h.1.o", group="o")], {"origins": ErrorOrigins()}, False),
        ([named("h.1.o", group="o")], {"origins": None}, False),
        # The code before a module that is right reads the cache; a module that differs from equal inputs does not.
        ([named("h.1.o", group="o")], {"origins": ErrorOrigins((RIGHT,))}, True),
        ([named("h.1.o", group="o")], {"origins": ErrorOrigins((RIGHT, replace(RIGHT, is_itself=True)))}, False),
        ([named("h.1.o", group="o")], {"data": ["The weights already differ."]}, False),
        ([named("h.1.o", group="o")], {"contradicting_pairs": [ON_PAIRS]}, False),
        ([named("h.1.o", group="o")], {"unexplained": ["The returned value differs."]}, False),
        ([rows(name="h.1.o", group="o")], {}, False),
    ],
)
def test_only_taps_that_add_as_little_as_rounding_had_moved_may_be_right(
    taps: list[dict[str, Any]], parts: dict[str, Any], is_excused: bool
) -> None:
    earlier = verdict(rows(name="h.1.k"), rows(name="h.1.q", error=0.1), rows(name="h.0", error=0.4))
    found = verdict(*taps, **{"origins": NOT_COMPARED, **parts})
    doubts = after(earlier).doubts(found)
    assert bool(doubts) is is_excused
    if is_excused:
        dtype = taps[0]["dtype"]
        assert doubts[0].startswith(f"In an earlier call rounding to {dtype} alone had moved taps in h.1 by up to 0.2,")
        assert doubts[1] == "Not checked: what earlier calls wrote for o, such as a cache."
    assert after().doubts(found) == []


def wide(name: str, **parts: Any) -> dict[str, Any]:
    return rows(
        **{"name": name, "group": "o", "label": "minor", "dtype": "float32", "ratio": 11.0, "added": 2e-6, **parts}
    )


UNCHANGED = {"output": Causes({"o": "minor"}, total=0.8)}


def test_modules_that_rounding_alone_moves_are_known_where_all_agrees() -> None:
    taps = [
        wide("h.1.k", label="clean", ratio=0.5, error=3e-7),
        wide("h.1.q", label="clean", ratio=0.5, error=2e-7),
        wide("h.0.k", label="clean", ratio=0.5, error=float("nan")),
        wide("h.3.k.grad", label="clean", tags={"kind": "grad"}, error=1e-7),
    ]
    assert moved_by(verdict(*taps)) == {"h.1": 3e-7}
    assert moved_by(verdict(*taps, contradicting_pairs=[ON_PAIRS])) == {"h.1": 3e-7}
    assert moved_by(verdict(*taps, data=["The weights already differ."])) == {}
    assert moved_by(verdict(*taps, wide("h.1.o"))) == {}


@pytest.mark.parametrize(
    ("taps", "parts", "is_excused"),
    [
        ([wide("h.1.o")], {}, True),
        ([wide("h.1.o")], {"contradicting_pairs": [ON_PAIRS]}, True),
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
    doubts = after(verdict(wide("h.1.k", label="clean", ratio=0.5, error=3e-7))).doubts(found)
    assert bool(doubts) is is_excused
    if is_excused:
        assert doubts[0].startswith("h.1.o adds 2e-06 here, and the output still agrees. In earlier calls rounding")
        assert doubts[1] == "Not checked: what earlier calls wrote for o, such as a state or a cache."
    assert after().doubts(found) == []


def given(name: str = "input.x", **parts: Any) -> dict[str, Any]:
    return wide(name, **{"label": "culprit", "tags": {"kind": "input"}, "added": 6e-6, "error": 6e-6, **parts})


INPUTS_DIFFER = {
    "data": ["The inputs already differ: input.x (rel_l2 6e-06). The code that uses them is judged below."]
}


@pytest.mark.parametrize(
    ("taps", "parts", "is_excused"),
    [
        ([given()], {}, True),
        ([given(), wide("h.1.o", label="clean")], INPUTS_DIFFER, True),
        ([given(added=8e-6)], INPUTS_DIFFER, False),
        ([given(added=float("nan"))], INPUTS_DIFFER, False),
        ([given(ratio=float("inf"), floor=1e-7)], INPUTS_DIFFER, False),
        ([given(), wide("h.1.o")], INPUTS_DIFFER, False),
        # Tokens do not round.
        ([given(dtype="int64")], INPUTS_DIFFER, False),
        ([given()], {"data": [*INPUTS_DIFFER["data"], "The weights already differ."]}, False),
        ([given()], {"unexplained": ["The returned value differs."]}, False),
        ([wide("h.1.o", label="clean")], INPUTS_DIFFER, False),
    ],
)
def test_inputs_that_differ_by_little_more_than_earlier_results_may_be_rounding(
    taps: list[dict[str, Any]], parts: dict[str, Any], is_excused: bool
) -> None:
    earlier = verdict(wide("output", label="clean", ratio=0.5, error=7e-7), wide("h.1", label="clean", error=1e-3))
    doubts = after(earlier).doubts(verdict(*taps, **parts))
    assert bool(doubts) is is_excused
    if is_excused:
        assert doubts[0].startswith("input.x differs by 6e-06, and nothing else does. In earlier calls rounding had ")
        assert doubts[1].startswith("Not checked: the scripts' own code between the calls")
    # Nothing had moved the results of the first call.
    assert after().doubts(verdict(*taps, **parts)) == []


def test_an_input_that_is_off_exactly_as_an_earlier_result_is_that_result() -> None:
    results = [wide("output.memory", label="clean", error=6e-6), wide("output.scores", label="clean", error=7e-6)]
    earlier = after(verdict(*results))
    wrong = wide("h.1.o", added=0.3)
    shown = verdict(given(group="input.x"), wrong, inputs=["input.x"], **INPUTS_DIFFER).findings
    found = earlier.without_earlier_results(shown)
    assert list(shown.frame["label"]) == ["culprit", "minor"]
    assert (found.named, list(found.data), found.inputs) == (["o"], [], [])
    assert list(found.frame["label"]) == ["inherited", "minor"]
    # Code that computes an input from a result rounds, and so do inputs beside one that is a result.
    for taps in ([given(error=6.1e-6)], [given(), given("input.y", error=6.1e-6)], [given(dtype="int64")]):
        computed = verdict(*taps, **INPUTS_DIFFER).findings
        assert earlier.without_earlier_results(computed) is computed
    # What another call has moved proves nothing of this one's weights.
    weights = verdict(given(), data=[*INPUTS_DIFFER["data"], "The weights already differ."]).findings
    assert earlier.without_earlier_results(weights) is weights


@pytest.mark.parametrize(
    ("tap", "is_excused"),
    [
        ({}, True),
        # The input alone explains that the output moves; what moves it by itself is a difference.
        ({"label": "culprit"}, False),
        ({"added": 0.02}, False),
    ],
)
def test_beside_rounded_inputs_what_leaves_the_output_as_it_is_may_be_right(
    tap: dict[str, Any], is_excused: bool
) -> None:
    earlier = verdict(
        *(wide(name, label="clean", ratio=0.5, error=error) for name, error in (("output", 7e-7), ("h.1.k", 1e-3)))
    )
    moves = {"output": Causes({"x": "culprit", "o": "minor"}, total=14.0)}
    taps = given(group="x"), wide("h.1.o", **tap)
    found = verdict(*taps, origins=NOT_COMPARED, causes=moves, **INPUTS_DIFFER)
    doubts = after(earlier).doubts(found)
    assert bool(doubts) is is_excused
    if is_excused:
        assert doubts[0].startswith("input.x differs by 6e-06. In earlier calls rounding had moved the results")
        assert doubts[2].startswith("h.1.o adds 2e-06 here, and the output still agrees.")


def test_results_show_rounding_only_in_calls_from_equal_inputs() -> None:
    first = verdict(wide("output", label="clean", ratio=0.5, error=7e-7))
    # Otherwise what is excused would grow from call to call.
    second = verdict(given(), wide("output", label="inherited", error=9e-6), **INPUTS_DIFFER)
    assert after(first).doubts(second)
    assert after(first, second)._most == 7e-7
    # Rounding of zeros has no size to compare with.
    zeros = verdict(*(wide(name, label="clean", ratio=0.5, error=float("inf")) for name in ("output", "h.1.k")))
    assert after(first, zeros)._most == 7e-7
    assert after(zeros)._moved == {}
