"""The floors of a verdict, pooled from the runs of the baseline's ranks against themselves."""

from __future__ import annotations

import math
from typing import Any

import pytest
from kit.rows import tap

from graftlab.grafting.self_graft import AddedRounding, SelfGraft
from graftlab.judging.measured_floors import MeasuredFloors
from graftlab.plan.pairs import PairRule
from graftlab.plan.plan import GraftPlan
from graftlab.rows.store import to_frame
from graftlab.verdict.unexplained import differing_taps


def added(name: str, rel_l2: float, squares: float = 1.0, **tags: Any) -> AddedRounding:
    return AddedRounding(name, tags, 0, rel_l2, 3 * rel_l2, squares, "float32")


def floors(*selves: SelfGraft) -> MeasuredFloors:
    return MeasuredFloors(selves, GraftPlan())


def test_floors_pool_the_taps_of_all_ranks_and_the_distance_to_higher_precision() -> None:
    one = SelfGraft([added("a", 3e-3)], exact=[added("a", 4e-3), added("b", 9e-3)])
    other = SelfGraft([added("a", 4e-3), added("a", 0.1, kind="grad")])
    found = floors(one, other)
    assert [each.rel_l2 for each in found.added] == [3e-3, 4e-3, 0.1]
    taps = found.of_taps()
    # What was not moved has no floor.
    assert set(taps) == {("a", None), ("a", "grad")}
    moved = math.hypot(3e-3, 4e-3) / math.sqrt(2)
    assert taps[("a", None)].rel_l2 == pytest.approx(math.hypot(moved, 4e-3))
    assert taps[("a", "grad")].rel_l2 == pytest.approx(0.1)
    assert set(found.of_groups()) == {"a", "a@grad"}
    assert found.of_groups()["a"] == taps[("a", None)]


def test_taps_that_share_a_tap_of_the_baseline_know_how_far_rounding_moves_the_whole() -> None:
    pairs = [PairRule("qk", name, f"part(dim=0, index={i}, of=[1, 1])") for i, name in enumerate("qk")]
    moved = [added("qk", 2e-3, 4.0, kind="param_grad"), added("qk", 1e-3, 4.0, kind="param_grad"), added("v", 0.1)]
    one = SelfGraft(moved, exact=[added("qk", math.inf, kind="param_grad")])
    names = [("q", "param_grad"), ("k", "param_grad")]
    own, wholes = MeasuredFloors([one], GraftPlan(pairs=tuple(pairs))), dict.fromkeys(names, pytest.approx(4e-3))
    assert (own.of_wholes(), own.accumulated(None).wholes) == (wholes, {})
    total = MeasuredFloors([SelfGraft(outputs=moved)], GraftPlan(pairs=tuple(pairs))).accumulated(None)
    rows = to_frame([tap(name, 0, 1.0, own={"kind": kind}, std_baseline=4e-6, max_abs=4e-6) for name, kind in names])
    assert (total.wholes, differing_taps(rows, total, 5.0)) == (wholes, [])


def test_what_rounding_adds_up_to_is_the_most_of_any_rank_in_each_returned_value() -> None:
    repeated = added("first", 0.1, recompute_status="recompute")
    one = SelfGraft(outputs=[added("a", 0.3), added("b", 0.5, kind="grad"), repeated], returned={"": 1e-3, "x": 5e-3})
    other = SelfGraft(exact_outputs=[added("a", 0.4)], returned={"": 4e-3, "x": 2e-3, "y": 1e-3})
    found = floors(one, other)
    total = found.accumulated(None)
    assert (total.returned, total.constant) == ({"": 4e-3, "x": 5e-3, "y": 1e-3}, None)
    assert total.taps[("a", None)].rel_l2 == pytest.approx(0.5)
    assert found.accumulated(0.1).constant == 0.1
    assert (found.of_output("a").rel_l2, found.of_output("c").rel_l2) == (pytest.approx(0.3), 0.0)
    # The last tap of the forward pass.
    assert found.last_tap() == "a"
    assert floors(other).last_tap() is None


def test_what_any_rank_reports_of_its_repetition_is_reported_once() -> None:
    one = SelfGraft(not_repeated=["a", "b"], returned_not_repeated=["x"], computed_in="float16")
    other = SelfGraft(not_repeated=["b", "c"], returned_not_repeated=["x"], computed_in="bfloat16")
    found = floors(one, other)
    assert (found.not_repeated, found.returned_not_repeated) == (["a", "b", "c"], ["x"])
    assert (found.computed_in, floors().computed_in) == ("bfloat16", "")


def test_the_dtype_of_taps_is_the_coarsest_of_16_bits_of_values() -> None:
    one = SelfGraft(
        [added("a", 0.1)._replace(dtype="float16"), added("b", 0.1, kind="param")._replace(dtype="bfloat16")]
    )
    assert floors(one).dtype_of_taps == "float16"
    assert floors(one, SelfGraft([added("c", 0.1)._replace(dtype="bfloat16")])).dtype_of_taps == "bfloat16"
    assert floors(SelfGraft([added("a", 0.1)])).dtype_of_taps == ""
