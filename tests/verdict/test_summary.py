"""What a summary says of a frame: where the two sides part first, and NaN is never zero."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import pytest
import torch
from kit.rows import row

import graftlab as gl
from graftlab.rows.store import to_frame
from graftlab.verdict.summary import differences, distances, unmatched_filters


def frame(*rows: dict[str, Any]) -> pd.DataFrame:
    usual = {"status": "compared", "rel_l2": 0.0, "nonfinite_differ": 0, "numel": 64, "side": "target", "rank": 0}
    usual["tags"] = {"name": "b", "step": 0, "side": "target", "rank": 0, "recompute_status": "original"}
    return pd.DataFrame([{**usual, **row} for row in rows])


FLOOR = "the floor 1e-05, assumed for float32"


def test_the_first_divergent_row_is_named_and_then_the_largest_difference() -> None:
    rows = frame(
        {"name": "a", "rel_l2": 1e-7},
        {"name": "b", "rel_l2": 2e-3, "rank": 1, "tags": {"name": "b", "rank": 1, "layer": 3}},
        {"name": "c", "rel_l2": 0.5},
    )
    assert differences(rows) == [
        f"first divergent: b layer=3 on target[1]: rel_l2 2.00e-03, 200 x {FLOOR}",
        "largest rel_l2 5.00e-01 at c on target[0]",
    ]


def test_the_compiled_tag_is_not_part_of_a_taps_name() -> None:
    rows = frame({"name": "b", "rel_l2": 0.5, "tags": {"name": "b", "layer": 3, "compiled": True}})
    assert [line.partition("b ")[2] for line in differences(rows)] == [
        "layer=3 on target[0]: rel_l2 5.00e-01, 50,000 x the floor 1e-05, assumed for float32",
        "layer=3 on target[0]",
    ]


def test_agreement_is_stated_with_the_last_row() -> None:
    rows = frame({"name": "a", "rel_l2": 3e-6}, {"name": "logits", "rel_l2": 1e-6})
    assert differences(rows) == [
        f"first divergent: none of 2 compared rows is above {FLOOR}; "
        "the last one, logits on target[0], agrees to 1.0e-06",
        "largest rel_l2 3.00e-06 at a on target[0]",
    ]


def test_the_floor_is_the_coarsest_dtypes_or_the_given_one() -> None:
    rows = frame({"name": "a", "rel_l2": 3e-3, "dtype": "bfloat16"}, {"name": "b", "rel_l2": 3e-3, "dtype": "float32"})
    assert "none of 2 compared rows is above the floor 0.02, assumed for bfloat16" in differences(rows)[0]
    assert differences(rows, 1e-3)[0] == "first divergent: a on target[0]: rel_l2 3.00e-03, 3.0 x the floor 0.001"
    # What the other side rounds to counts as well.
    rows = frame({"name": "a", "rel_l2": 3e-3, "dtype": "float32", "cast": "bfloat16 -> float32"})
    assert "is not above the floor 0.02, assumed for bfloat16" in differences(rows)[0]


def test_the_floor_of_float64_is_its_own_rounding() -> None:
    """A mistake of a millionth shows there, which the rounding of float32 would hide."""
    rows = frame({"name": "a", "rel_l2": 1e-15, "dtype": "float64"}, {"name": "b", "rel_l2": 1e-6, "dtype": "float64"})
    said = "first divergent: b on target[0]: rel_l2 1.00e-06, above the floor 2e-14, assumed for float64"
    assert differences(rows)[0] == said
    one = {"name": "c", "rel_l2": 1e-6, "dtype": "float64", "cast": "float32 -> float64"}
    assert "is not above the floor 1e-05, assumed for float32" in differences(frame(one))[0]


@pytest.mark.parametrize("cast", [None, "int64 -> int32", "cuda:0 -> cpu", "int64 -> int32, cuda:0 -> cpu"])
def test_whole_numbers_differ_even_by_the_smallest_amount(cast: str | None) -> None:
    """One chosen token among a thousand, say, whose ids are large."""
    token = {"name": "token", "rel_l2": 3e-7, "max_abs": 1.0, "dtype": "int32" if cast else "int64", "cast": cast}
    rows = frame({"name": "a", "rel_l2": 1e-6, "dtype": "float32"}, token)
    said = f"first divergent: token on target[0]: {token['dtype']} numbers differ, by up to 1, which rounding does not"
    assert differences(rows)[0].startswith(said)
    assert differences(rows, 0.5)[0].startswith(said)
    equal = {**token, "rel_l2": 0.0, "max_abs": 0.0}
    assert differences(frame({"name": "a", "dtype": "float32"}, equal))[0].startswith("first divergent: none of 2")


@pytest.mark.parametrize(("dtype", "cast"), [("int8", None), ("uint8", None), ("int32", "float32 -> int32")])
def test_whole_numbers_that_represent_fractions_may_round(dtype: str, cast: str | None) -> None:
    rows = frame({"name": "scaled", "rel_l2": 3e-7, "max_abs": 1.0, "dtype": dtype, "cast": cast})
    assert differences(rows)[0].startswith("first divergent: none; the only compared row, scaled")
    far = differences(rows.assign(rel_l2=0.5))[0]
    assert far.startswith("first divergent: scaled on target[0]: rel_l2 5.00e-01, 50,000 x the floor")


def test_the_step_is_named_if_a_run_has_several() -> None:
    rows = frame({"name": "a", "step": 4}, {"name": "a", "step": 5, "rel_l2": 1.0})
    assert differences(rows)[0].startswith("first divergent: a on target[0] in step 5: rel_l2 1.00e+00")
    # The only step needs no name.
    assert "in step" not in " ".join(differences(rows[rows["step"] == 5]))


def test_grafted_taps_are_not_divergent() -> None:
    rows = frame(
        {"name": "a", "rel_l2": 1e-7},
        {"name": "b", "rel_l2": 0.5, "status": "grafted"},
        {"name": "b", "rel_l2": 0.5, "status": "grafted", "rank": 1},
        {"name": "c", "rel_l2": 0.1},
    )
    assert differences(rows) == [
        f"grafted 1 tap; first divergent after it: c on target[0]: rel_l2 1.00e-01, 10,000 x {FLOOR}",
        "largest rel_l2 1.00e-01 at c on target[0]",
        "grafts replaced differences of up to rel_l2 5.00e-01 at b on target[0]",
    ]
    assert differences(rows[:3]) == [
        "grafted 1 tap; first divergent after it: none; the only compared row, a on target[0], agrees to 1.0e-07, "
        f"which is not above {FLOOR}",
        "largest rel_l2 1.00e-07 at a on target[0]",
        "grafts replaced differences of up to rel_l2 5.00e-01 at b on target[0]",
    ]
    two = frame({"name": "a", "status": "grafted"}, {"name": "b", "status": "grafted"}, {"name": "c"})
    assert differences(two)[0].startswith("grafted 2 taps; first divergent after them: none; the only compared row")
    before = frame({"name": "a", "rel_l2": 0.3}, {"name": "b", "rel_l2": 0.5, "status": "grafted"})
    assert differences(before)[0].startswith("grafted 1 tap; first divergent, before it: a on target[0]")
    assert differences(rows[1:2])[0] == "grafted 1 tap; nothing else was compared"


def test_a_nan_is_not_zero() -> None:
    rows = frame({"name": "a"}, {"name": "logits", "nonfinite_differ": 12})
    assert differences(rows) == [
        "first divergent: logits on target[0]: 12 of 64 elements are NaN or infinite on one side and not the "
        "same on the other",
        "all finite values are equal",
    ]


def test_values_that_a_graft_replaced_are_not_said_to_differ_in_numbers() -> None:
    grafted = {"name": "a", "rel_l2": 0.1, "status": "grafted", "nonfinite_differ": 3}
    assert differences(frame(grafted, {"name": "b"})) == [
        f"grafted 1 tap; first divergent after it: none; the only compared row, b on target[0], is equal, which is not "
        f"above {FLOOR}",
        "every compared row is equal",
        "grafts replaced differences of up to rel_l2 1.00e-01 at a on target[0]",
    ]


def test_values_without_a_finite_number_are_not_called_equal() -> None:
    said = differences(frame({"name": "a"}, {"name": "b", "rel_l2": math.nan}))
    assert "all finite values are equal" in said
    assert "every compared row is equal" not in said
    assert said[-1].startswith("not compared: 1 row without a finite value on either side")


def test_a_nan_after_the_first_divergent_row_is_reported() -> None:
    rows = frame({"name": "a", "rel_l2": 0.5}, {"name": "logits", "nonfinite_differ": 12})
    assert differences(rows)[1] == (
        "non-finite values differ in 1 row, first at logits on target[0]: 12 of 64 elements are NaN or infinite on one "
        "side and not the same on the other"
    )


def test_rows_without_a_finite_pair_are_reported() -> None:
    rows = frame(
        {"name": "a", "rel_l2": math.nan, "nonfinite_differ": 64},
        {"name": "b", "rel_l2": None, "nonfinite_differ": 64},
        {"name": "b", "rel_l2": None, "nonfinite_differ": 64, "rank": 1},
    )
    first, *more = differences(rows)
    assert first.startswith("first divergent: a on target[0]: 64 of 64")
    assert first.endswith("; so are elements of 2 more rows")
    assert more == []
    assert differences(rows[:2])[0].endswith("; so are elements of 1 more row")


def test_rows_of_equal_nans_are_reported_as_not_compared() -> None:
    rows = frame({"name": "mask", "rel_l2": math.nan}, {"name": "b", "rel_l2": 1e-7})
    assert differences(rows)[1:] == [
        "largest rel_l2 1.00e-07 at b on target[0]",
        "not compared: 1 row without a finite value on either side, first mask on target[0]",
    ]
    assert differences(rows[:1])[0] == "first divergent: none has a finite value"


@pytest.mark.parametrize("status", ["missing", "timeout", "unmatched"])
def test_unmeasured_rows_have_no_difference(status: str) -> None:
    assert differences(frame({"name": "a", "rel_l2": None, "nonfinite_differ": None, "status": status})) == []
    assert differences(pd.DataFrame(columns=["name", "status", "rel_l2", "nonfinite_differ"])) == []


def test_a_failed_transform_comes_first_with_its_error() -> None:
    failed = {"rel_l2": None, "nonfinite_differ": None, "status": "failed", "error": "ValueError: no such dim\n  File"}
    rows = frame({"name": "a", "rel_l2": 0.5}, {"name": "b", **failed}, {"name": "c", **failed})
    assert differences(rows)[0] == ("the transform failed in 2 rows, first at b on target[0]: ValueError: no such dim")
    assert "first at b on target[0] in step 4: ValueError" in differences(rows.assign(step=[3, 4, 5]))[0]


def test_an_infinite_difference_is_the_largest() -> None:
    rows = frame({"name": "a", "rel_l2": math.inf}, {"name": "b", "rel_l2": 3.0})
    assert differences(rows) == [
        f"first divergent: a on target[0]: rel_l2 inf, above {FLOOR}",
        "largest rel_l2 inf at a on target[0]",
    ]


def test_the_distance_of_a_row_with_differing_nans_is_infinite() -> None:
    rows = frame(
        {"name": "a", "rel_l2": 0.5},
        {"name": "b", "nonfinite_differ": 1},
        {"name": "c", "rel_l2": None, "nonfinite_differ": None, "status": "missing"},
    )
    found = distances(rows).tolist()
    assert found[:2] == [0.5, math.inf]
    assert math.isnan(found[2])


@pytest.mark.slow
def test_a_filter_that_matches_nothing_is_named_among_many_rows() -> None:
    rows = (row(f"tap{number % 7}", step=number) for number in range(120_000))
    plan = gl.GraftPlan(b2t="name == 'other'", t2b="step == 119_999", compare="name == 'tap3'", keep="step == True")
    assert unmatched_filters([plan], to_frame(rows)) == {"b2t": "name == 'other'"}


def test_a_filter_may_use_one_sides_own_name_of_a_tap() -> None:
    run = to_frame([row("paired", baseline_name="ours", target_name="theirs"), row("other")])
    plan = gl.GraftPlan(b2t="baseline_name == 'ours'", t2b="target_name == 'ours'")
    assert unmatched_filters([plan], run) == {"t2b": "target_name == 'ours'"}


def test_a_run_without_rows_lacks_all_that_its_first_plan_grafts_or_keeps() -> None:
    plans = [gl.GraftPlan(b2t="name == 'a'", keep="layer == 1"), gl.GraftPlan(b2t="name == 'b'").edit()]
    assert unmatched_filters(plans, to_frame([])) == {"b2t": "name == 'a'", "keep": "layer == 1"}
    assert unmatched_filters(plans, to_frame([row("b", plan_version=1)])) == {}


@pytest.mark.parametrize("value", [(1, 2), [1, 2], {1: 2}, {1, 2}, torch.float16])
def test_a_filter_of_a_tag_that_rows_have_only_in_words_may_have_matched(value: Any) -> None:
    run = to_frame([row("a", own={"head": value}), row("b", own={"head": "x"})])
    run["tags"] = [{**tags, "head": tags["head"] if tags["head"] == "x" else repr(value)} for tags in run["tags"]]
    assert unmatched_filters([gl.GraftPlan(b2t="head == 3")], run) == (
        {"b2t": "head == 3"} if value is torch.float16 else {}
    )
    assert unmatched_filters([gl.GraftPlan(b2t="head == 3")], run[run["name"] == "b"]) == {"b2t": "head == 3"}
