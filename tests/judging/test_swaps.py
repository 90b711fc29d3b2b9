"""Swaps of code between the sides: which taps each run grafts in which direction, and what it measures."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from kit.refusals import exactly

from graftlab.errors import SessionError
from graftlab.filters.expressions import compile_filter
from graftlab.grafting.self_graft import AddedRounding, SelfGraft
from graftlab.judging.measured_floors import MeasuredFloors
from graftlab.judging.swaps import OutputTap, Swaps, by_size, earlier_steps, first_over
from graftlab.judging.verdict_runs import RunFilters
from graftlab.plan.plan import GraftPlan
from graftlab.transforms.default import NO_REPLICAS
from graftlab.verdict.causes import MOST_SWAPS
from graftlab.verdict.floor import Floor
from graftlab.verdict.returned_values import AccumulatedFloors

NAMES = ("a", "b", "c", "out")
OUTPUT = OutputTap("out", "out", "float32", {"name": "out"}, (0, 3))


def frame_of(*taps: tuple[str, str], error: str = "") -> pd.DataFrame:
    found = [
        {"name": name, "tags": {"name": name}, "rank": 0, "step": 5, "order": order, "status": status, "error": error}
        for order, (name, status) in enumerate(taps)
    ]
    return pd.DataFrame(found, columns=["name", "tags", "rank", "step", "order", "status", "error"])


class Runs:
    """Makes no run: each has the values that are set, and its filters are kept."""

    def __init__(self) -> None:
        self.before = GraftPlan()
        self.filters: list[RunFilters] = []
        self.titles: list[str] = []
        self.frame = frame_of()
        self.kept: Callable[[str], tuple[Any, Any]] = lambda name: (torch.ones(2), torch.ones(2))

    def both(self, why: str, filters: RunFilters) -> pd.DataFrame:
        self.titles.append(why)
        self.filters.append(filters)
        return self.frame

    def pair(self, name: str, rank: int, step: int, tags: dict[str, Any]) -> tuple[Any, Any]:
        assert (rank, step, tags) == (0, 0, {})
        return self.kept(name)


@pytest.fixture
def runs() -> Runs:
    return Runs()


def swaps_of(runs: Runs, names: tuple[str, ...] = NAMES, target: tuple[str, ...] | None = None) -> Swaps:
    added = [AddedRounding(name, {"name": name}, 0, 1e-6, 1e-6, 1.0, "float32") for name in names]
    selves = [SelfGraft(added, outputs=added, last={"out": torch.ones(2)})]
    rows = frame_of(*((name, "grafted") for name in target or names))
    made: Any = runs
    return Swaps(made, rows, selves, MeasuredFloors(selves, GraftPlan()), "name == 'alone'")


def sides(filters: RunFilters, *names: str) -> dict[str, str]:
    """For each tap, the directions in which a run grafts it."""
    b2t, t2b = (compile_filter(str(text)).matches for text in (filters.b2t, filters.t2b))
    return {name: "b2t" * b2t({"name": name}) + "t2b" * t2b({"name": name}) for name in names}


def test_groups_have_the_code_of_their_side_and_the_output_is_kept(runs: Runs) -> None:
    measure = swaps_of(runs)._distances(["a", "b"], ["c"], [OUTPUT])
    for kept in ((), ("a",), ("a", "b")):
        measure(frozenset(kept))
    baselines = [{name for name, way in sides(each, *NAMES).items() if way == "b2t"} for each in runs.filters]
    assert baselines == [{"a", "b", "c"}, {"b", "c"}, {"c"}]
    for filters in runs.filters:
        assert sides(filters, "other", "out") == {"other": "t2b", "out": "t2b"}
        assert filters.leaving == "name == 'alone'"
        kept_at = compile_filter(str(filters.keep)).matches
        assert [kept_at({"name": name}) for name in NAMES] == [False, False, False, True]
        # What follows the output is for the next step, which begins from the baseline's state.
        after = compile_filter(str(filters.b2t)).matches
        assert after({"name": "w", "kind": "param"})
    assert runs.titles[0] == "with the target's code at none of them"
    assert runs.titles[2] == "with the target's a, b"


def test_a_distance_is_that_of_the_side_whose_code_made_the_output(runs: Runs) -> None:
    runs.kept = lambda name: (torch.full((2,), 3.0), torch.full((2,), 2.0))
    swaps = swaps_of(runs)
    assert swaps.with_and_without(["a"], OUTPUT) == (1.0, 1.0)
    # With the baseline's code at the output itself, the pair's value of the baseline counts.
    assert swaps.with_and_without(["out"], OUTPUT) == (2.0, 1.0)
    assert swaps._left == MOST_SWAPS - 4
    # Its pair is kept where the baseline receives the target's.
    assert [sides(each, "out")["out"] for each in runs.filters] == ["t2b"] * 4


@pytest.mark.parametrize("status", ["missing", "timeout"])
def test_a_run_in_which_the_sides_waited_for_each_other_shows_nothing(runs: Runs, status: str) -> None:
    swaps = swaps_of(runs)
    runs.frame = frame_of(("b", status), ("unknown", status))
    assert math.isnan(swaps.with_and_without(["a"], OUTPUT)[0])
    assert [*swaps.not_swapped] == ["b"]
    # A tap that only one side has waits in every run.
    runs.frame = frame_of(("unknown", status))
    assert swaps.with_and_without(["a"], OUTPUT) == (0.0, 0.0)


def test_an_output_that_the_ranks_have_in_different_values_is_named(runs: Runs) -> None:
    swaps = swaps_of(runs)
    for name, status, error in (
        *(("out", "failed", "another failure"), ("a", "failed", NO_REPLICAS)),
        ("out", "compared", NO_REPLICAS),
    ):
        runs.frame = frame_of((name, status), error=error)
        assert swaps.with_and_without(["a"], OUTPUT) == (0.0, 0.0)
    assert not swaps.unlike_ranks
    runs.frame = frame_of(("out", "failed"), error=f"x: {NO_REPLICAS}")
    assert math.isnan(swaps.with_and_without(["a"], OUTPUT)[0])
    assert [*swaps.unlike_ranks] == ["out"]
    assert not swaps.not_swapped


def test_taps_at_which_the_sides_would_wait_for_each_other_are_left_alone(runs: Runs) -> None:
    swaps = swaps_of(runs, target=("b", "a", "c", "out"))
    measure = swaps._distances(["a", "b"], [], [OUTPUT])
    measure(frozenset("a"))
    crossed = sides(runs.filters[0], *NAMES)
    assert sorted((crossed["a"], crossed["b"])) in (["", "b2t"], ["", "t2b"], ["", ""])
    assert crossed["out"] == "t2b"


def test_the_effect_of_a_group_is_the_largest_at_any_measured_part(runs: Runs) -> None:
    part = OutputTap("part", "part", "float32", {"name": "part"}, (0, 4))
    unknown = OutputTap("lost", "lost", "float32", {"name": "lost"}, (0, 4))
    names = (*NAMES, "part")
    swaps = swaps_of(runs, names)
    swaps._selves[0].last["part"] = torch.ones(2)
    runs.kept = lambda name: (torch.ones(2),) * 2 if name == "out" else (torch.full((2,), 1.5),) * 2
    output = OutputTap("out", "out", "float32", {"name": "out"}, (0, 3), "", (part, unknown))
    # It differs at the part with and without the group, so that nothing is explained by it.
    assert not swaps.causes(["a"], [], output, 5.0).agrees
    assert swaps_of(runs, names).causes(["a"], [], OUTPUT, 5.0).agrees
    # One rounding of a coarse output is none.
    runs.kept = lambda name: (torch.full((2,), 1 + 2**-8),) * 2
    assert not swaps_of(runs).causes(["a"], [], OUTPUT, 5.0).agrees
    assert swaps_of(runs).causes(["a"], [], replace(OUTPUT, dtype="bfloat16"), 5.0).agrees


def test_a_part_with_earlier_calls_among_the_groups_is_not_measured(runs: Runs) -> None:
    part = OutputTap("part", "part", "float32", {}, (0, 4))
    for calls, agrees in ((("part",), False), (("part", "part"), True)):
        swaps = swaps_of(runs, (*NAMES, *calls))
        swaps._selves[0].last["part"] = torch.ones(2)
        runs.kept = lambda name: (torch.ones(2),) * 2 if name == "out" else (torch.full((2,), 1.5),) * 2
        assert swaps.causes(["a", "part"], [], replace(OUTPUT, parts=(part,)), 5.0).agrees is agrees


def test_taps_with_other_names_on_each_side_count_as_calls_of_their_own_group(runs: Runs) -> None:
    # Paired names are compared by their group, which the other taps are not of.
    runs.before = GraftPlan(rename={"target": {"x": "y"}})
    assert swaps_of(runs, NAMES).can_measure(["a", "out"], OUTPUT)
    assert not swaps_of(runs, (*NAMES, "out")).can_measure(["a", "out"], OUTPUT)


def test_one_wrong_element_of_an_output_is_judged_by_the_floor_of_an_element(runs: Runs) -> None:
    """The least floor of an element is three times that of the whole."""
    for off, agrees in ((1e-5, True), (1e-4, False)):
        value = torch.ones(64)
        value[0] += off
        swaps = swaps_of(runs)
        swaps._selves[0].last["out"] = torch.ones(64)
        runs.kept = lambda name, value=value: (value, value)
        assert swaps.causes(["a"], [], OUTPUT, 5.0).agrees is agrees


def test_the_output_is_shown_even_where_the_sides_would_wait_for_each_other(runs: Runs) -> None:
    swaps_of(runs, ("b", "out", "a"), ("a", "b", "out"))._distances(["a"], [], [OUTPUT])(frozenset())
    (filters,) = runs.filters
    assert sides(filters, "a", "b", "out") == {"a": "b2t", "b": "", "out": "t2b"}


def test_the_part_that_rounds_most_limits_how_far_the_output_may_be_off(runs: Runs) -> None:
    part = OutputTap("part", "part", "float32", {"name": "part"}, (0, 4))
    swaps = swaps_of(runs, (*NAMES, "part"))
    (own,) = swaps._selves
    own.last["part"] = torch.ones(2)
    own.outputs = [row._replace(rel_l2=0.1, rel_max=0.1) if row.name == "out" else row for row in own.outputs]
    found = swaps.causes(["a"], [], replace(OUTPUT, dtype="bfloat16", parts=(part,)), 5.0)
    # In low precision rounding adds up to more than a mistake may, so less than the threshold agrees.
    assert found.limit == pytest.approx(5 * 2.0**-8 / 0.1)


def test_taps_are_in_the_order_in_which_a_rank_first_reaches_them(runs: Runs) -> None:
    (ours,), (theirs,) = swaps_of(runs, ("a", "b", "a"), ("b", "a", "b"))._orders()
    assert ours == {("a", None): 0, ("b", None): 1}
    assert theirs == {("b", None): 0, ("a", None): 1}


def test_groups_are_ordered_by_what_they_add_and_begin_where_they_do() -> None:
    frame = pd.DataFrame(
        {"group": group, "ratio": ratio, "step": step, "order": order}
        for group, ratio, step, order in (
            *(("a", 1.0, 0, 1), ("a", 9.0, 2, 7), ("a", 9.0, 2, 5), ("a", 7.0, 3, 1)),
            *(("b", 20.0, 1, 1), ("c", 3.0, 0, 0)),
        )
    )
    assert first_over(frame, "a", 5.0) == (2, 5)
    # At the threshold a tap agrees.
    assert first_over(frame, "a", 7.0) == (2, 5)
    assert first_over(frame, "a", 8.0) == first_over(frame[frame["step"] < 3], "a", 1.0) == (2, 5)
    assert by_size(frame, ["c", "a", "b"]) == ["b", "a", "c"]


def test_earlier_steps_are_those_in_which_the_output_of_its_layer_differs() -> None:
    output = OutputTap("out", "out", "float32", {"layer": 1}, (3, 9))
    frame = pd.DataFrame(
        {"name": name, "tags": {"name": name, "layer": layer}, "error": error, "step": step, "order": 9}
        | {"error_ratio": error / 1e-5}
        for name, layer, error, step in (
            *(("out", 1, 1e-3, 0), ("out", 1, 1e-7, 1), ("out", 2, 1e-3, 2), ("other", 1, 1e-3, 2)),
            ("out", 1, 1e-3, 3),
        )
    )
    floors = AccumulatedFloors({("out", None): Floor(1e-5, 1e-4)}, {})
    assert earlier_steps(frame, output, floors, 5.0) == [0]
    assert earlier_steps(frame, output, floors, 1e6) == []
    # Numbers that are finite on one side alone are left out of the error.
    frame.loc[1, "error_ratio"] = math.inf
    assert earlier_steps(frame, output, floors, 5.0) == [0, 1]
    # So does an earlier call in the last step.
    frame.loc[4, "order"] = 5
    assert earlier_steps(frame, output, floors, 5.0) == [0, 1, 3]


def test_an_output_without_a_record_on_a_rank_is_refused(runs: Runs) -> None:
    runs.session = SimpleNamespace(options=SimpleNamespace(keep_budget=1 << 20))  # type: ignore[attr-defined]
    with pytest.raises(
        SessionError,
        match=exactly(
            "verdict: the baseline's values of gone were not recorded, because not all taps fit into 1 MiB "
            "on each rank; launch with a larger keep_budget="
        ),
    ):
        swaps_of(runs).with_and_without(["a"], OutputTap("gone", "gone", "float32", {}, (0, 0)))


def test_what_an_output_is_off_by_is_unknown_if_it_is_at_one_part(runs: Runs) -> None:
    part = OutputTap("part", "part", "float32", {"name": "part"}, (0, 4))
    swaps = swaps_of(runs, (*NAMES, "part"))
    swaps._selves[0].last["part"] = torch.ones(2)
    # The record has another shape, or the value no finite number.
    runs.kept = lambda name: (torch.ones(2),) * 2 if name == "out" else (torch.ones(3),) * 2
    found = swaps.causes(["a"], [], replace(OUTPUT, parts=(part,)), 5.0)
    assert math.isnan(found.total)
    assert math.isnan(found.restored)
    assert not found.agrees


def test_a_part_that_one_rank_did_not_record_is_not_measured(runs: Runs) -> None:
    part = OutputTap("part", "part", "float32", {"name": "part"}, (0, 4))
    swaps = swaps_of(runs, (*NAMES, "part"))
    first = swaps._selves[0]
    lacking = replace(first, last={"out": torch.ones(2)})
    first.last["part"] = torch.ones(2)
    assert swaps._is_recorded(part)
    swaps._selves = [first, lacking]
    assert not swaps._is_recorded(part)


def test_the_groups_that_add_the_most_are_swapped_first(runs: Runs) -> None:
    swaps = swaps_of(runs)
    swaps.causes(["a", "b"], [], OUTPUT, 5.0, by_size=["b", "a"])
    assert runs.titles[2:] == ["with the target's b", "with the target's a"]
