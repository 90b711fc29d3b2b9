"""What each tap adds, over its group's floor; and what was not looked at."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import pytest

from graftlab.filters.expressions import compile_filter
from graftlab.rows.schema import Row
from graftlab.rows.store import to_frame
from graftlab.verdict.added import (
    _first_error,
    _taps,
    added_frame,
    coarser_dtype,
    is_spread,
    labelled,
    named_groups,
    one_sided_filter,
    records,
    rows_where,
    unseen_of,
)
from graftlab.verdict.causes import Causes
from graftlab.verdict.floor import Floor, pool

EPS = 2.0**-24


def row(name: str, rel_l2: float | None = 0.0, **more: Any) -> Row:
    given: dict[str, Any] = {
        **{"dtype": "float32", "shape": [4], "numel": 4, "rel_l2": rel_l2, "max_abs": rel_l2, "status": "grafted"},
        **{"mean_baseline": 0.0, "std_baseline": 1.0, "nonfinite_baseline": 0, "nonfinite_differ": 0, "rank": 0},
        **more,
    }
    order = given.pop("order", 1)
    tags = {"name": name, **given.pop("tags", {})}
    side = given.pop("side", "target")
    return Row(0, 0, order, name, tags, "b2t", side, given.pop("rank"), given.pop("status"), [0], **given)


ZEROS = {f"{statistic}_{side}": 0.0 for statistic in ("mean", "std") for side in ("baseline", "target")}


def frame_of(*rows: Row) -> pd.DataFrame:
    return to_frame(list(rows))


def test_a_floor_is_pooled_over_a_groups_taps_by_the_root_of_summed_squares() -> None:
    floors = pool([("q", 3e-6, 1e-5, 1.0, None), ("q", 4e-6, 2e-5, 1.0, None), ("k", 1e-7, 1e-7, 9.0, None)])
    assert floors["q"].rel_l2 == pytest.approx(5e-6 / math.sqrt(2))
    assert floors["q"].rel_max == 2e-5
    assert floors["k"] == Floor(pytest.approx(1e-7), 1e-7)


def test_a_difference_in_most_rows_is_not_excused_by_choices_in_few() -> None:
    """Rounding turned a router's choice at one of two taps, whose other rows are as close as those of the other."""
    floor = pool([("mlp", 0.2, 4.0, 1.0, 0.003), ("mlp", 0.003, 0.01, 1.0, None)])["mlp"]
    assert floor.typical == pytest.approx(0.003)
    known = {"dtype": "bfloat16", "numel": 4096, "mean_baseline": 0.0, "std_baseline": 1.0, "max_abs": 0.8}
    spread = added_frame(frame_of(row("mlp", 0.25, mean_abs=0.2, **known)), {"mlp": floor})
    assert spread["ratio"].item() > 50
    in_few_rows = added_frame(frame_of(row("mlp", 0.25, mean_abs=0.03, **known)), {"mlp": floor})
    assert in_few_rows["ratio"].item() < 5
    # The difference is relative to the whole tensor, far from zero as it may be.
    far = {**known, "mean_baseline": 10.0, "max_abs": 8.0}
    assert added_frame(frame_of(row("mlp", 0.25, mean_abs=0.3, **far)), {"mlp": floor})["ratio"].item() < 5
    # What is not finite is in no sum.
    finite = {**known, "rel_l2": 0.25, "mean_abs": 0.2, "nonfinite_differ": 0}
    assert is_spread(finite)
    assert not is_spread({**finite, "nonfinite_differ": 1})


FP8 = "float8_e4m3fn"


def test_a_tap_that_both_sides_quantise_may_differ_in_few_numbers() -> None:
    rows = row("x", 0.0), row("q", 0.04, dtype=FP8), row("cast", 0.04, dtype="float32", cast=f"float32 -> {FP8}")
    frame = added_frame(frame_of(*rows), {}).set_index("name")
    assert frame["floor"]["q"] == pytest.approx(2.0**-14)
    # A single number may still move by a whole unit.
    assert frame["floor_max"]["q"] == frame["floor_max"]["cast"] == pytest.approx(3 * 2.0**-4)
    assert frame["floor"]["cast"] == 2.0**-4


def test_without_a_measured_floor_a_large_number_rounds_in_proportion_to_its_size() -> None:
    """Nothing before the tap could be moved, for example because its input has 8 bits."""
    ten = {"min_baseline": -10.0, "max_baseline": 3.0}
    frame = added_frame(frame_of(row("x", 2e-8, **ten)), {"x": Floor(0.0, 0.0)})
    assert frame["floor_max"].item() == pytest.approx(10 * EPS)
    measured = added_frame(frame_of(row("x", 2e-8, **ten)), {"x": Floor(1e-8, 1e-8)})
    assert measured["floor_max"].item() == pytest.approx(3 * EPS)


def test_a_non_finite_tap_does_not_affect_a_floor() -> None:
    assert (
        pool([("q", 1e-6, 1e-6, 1.0, None), ("q", math.nan, math.nan, 1.0, None), ("q", math.inf, 1.0, 1.0, None)])[
            "q"
        ].rel_l2
        == 1e-6
    )


def test_a_group_is_named_if_a_tap_adds_more_than_the_threshold() -> None:
    rows = frame_of(row("l.0.q", 4e-6), row("l.1.q", 6e-6), row("l.0.k", 4.9e-6))
    frame = added_frame(rows, {"l.*.q": Floor(1e-6, 3e-6), "l.*.k": Floor(1e-6, 3e-6)})
    assert frame["ratio"].tolist() == pytest.approx([4.0, 6.0, 4.9])
    assert named_groups(frame, 5) == ["l.*.q"]
    assert named_groups(frame, 3) == ["l.*.q", "l.*.k"]


def test_one_large_element_counts_where_the_norm_hides_it() -> None:
    frame = added_frame(frame_of(row("q", 1e-6, max_abs=1e-3)), {"q": Floor(1e-6, 3e-6)})
    assert frame["ratio"].item() == pytest.approx(1e-3 / 3e-6)


def test_a_floor_is_never_below_the_roundoff_of_the_coarser_dtype() -> None:
    rows = frame_of(row("a", 1e-3), row("b", 1e-3, cast="bfloat16 -> float32"), row("c", 1e-3, dtype="bfloat16"))
    frame = added_frame(rows, dict.fromkeys("abc", Floor(0.0, 0.0)))
    assert frame["dtype"].tolist() == ["float32", "bfloat16", "bfloat16"]
    assert frame["floor"].tolist() == [EPS, 2.0**-8, 2.0**-8]
    assert named_groups(frame, 5) == ["a"]


def test_the_coarser_dtype_is_that_of_either_side() -> None:
    assert coarser_dtype({"dtype": "float16", "cast": "float32 -> float16"}) == "float16"
    assert coarser_dtype({"dtype": "float32", "cast": "float16 -> float32, cpu -> cuda:0"}) == "float16"


def test_a_given_floor_replaces_every_other_even_if_it_is_zero() -> None:
    for constant in (0.0, 0.25):
        (found,) = added_frame(frame_of(row("x", 0.5)), {"x": Floor(0.1, 0.1)}, constant=constant).to_dict("records")
        assert (found["floor"], found["floor_max"]) == (constant, 3 * constant)


def test_a_group_without_a_floor_takes_the_largest() -> None:
    frame = added_frame(frame_of(row("new", 1e-4)), {"a": Floor(1e-6, 3e-6), "b": Floor(1e-4, 3e-4)})
    assert frame["ratio"].item() == pytest.approx(1.0)
    in_one = added_frame(frame_of(row("new", 1e-4, max_abs=0.01)), {"a": Floor(1e-6, 0.01), "b": Floor(1e-4, 3e-4)})
    assert in_one["ratio"].item() == pytest.approx(1.0)


def test_a_least_floor_of_values_does_not_excuse_gradients_of_that_name() -> None:
    rows = frame_of(row("q", 1e-3), row("q", 1e-3, order=2, tags={"kind": "grad"}))
    frame = added_frame(rows, {}, allowed={"q": Floor(1e-2, 1e-2)})
    assert named_groups(frame, 5) == ["q@grad"]
    # Of the two floors the larger counts, and for a single number too.
    frame = added_frame(rows, {"q": Floor(2e-3, 6e-3)}, allowed={"q": Floor(1e-4, 0.5)})
    assert frame[["floor", "floor_max"]].to_numpy().tolist()[0] == [2e-3, 0.5]


def test_a_tap_that_is_judged_by_its_own_floor_is_judged_by_its_usual_rows() -> None:
    known = {"numel": 4096, "max_abs": 0.01, "mean_abs": 1e-3}
    floors = {"m.*": Floor(0.3, 4.0)}

    def floor(own: Floor) -> float:
        found = added_frame(frame_of(row("m.1", 1e-3, **known)), floors, own={("m.1", None): own})
        return float(found["floor"].item())

    assert floor(Floor(0.02, 0.5, 0.001)) == 0.001
    # A group whose floor is at most ten times the tap's own pools taps that are alike.
    assert floor(Floor(0.03, 0.5, 0.001)) == 0.3


def test_a_part_of_a_weights_gradient_that_cancels_has_the_rounding_of_the_whole() -> None:
    floors, wholes = {"k@param_grad": Floor(1e-6, 3e-6)}, {("k", "param_grad"): 2e-6, ("k", None): 2e-6}

    def is_named(size: float, kind: str = "param_grad", apart: float = 0.5) -> bool:
        cancels = {"std_baseline": size, "max_abs": apart * size, "tags": {"kind": kind} if kind else {}}
        return bool(named_groups(added_frame(frame_of(row("k", apart, **cancels)), floors, wholes=wholes), 5))

    assert not is_named(4e-6)
    # One of a usual size has its own floor, and so have one that is just small, and a value.
    assert is_named(1e-2, apart=1e-4)
    assert is_named(3e-5, apart=1e-2)
    assert is_named(4e-6, kind="")
    assert is_named(0.0)
    unknown = row("k", None, mean_baseline=None, tags={"kind": "param_grad"})
    assert added_frame(frame_of(unknown), floors, wholes=wholes)["label"].tolist() == ["unmeasured"]


def test_a_baseline_of_zeros_has_the_floor_of_one_rounding() -> None:
    zeros = {"std_baseline": 0.0, "min_baseline": 0.0, "max_baseline": 0.0}
    frame = added_frame(frame_of(row("z", **zeros), row("y", math.inf, max_abs=1.0, **zeros)), {})
    assert frame["ratio"].tolist() == [0.0, math.inf]
    assert frame["floor"].tolist() == [EPS, EPS]


def test_a_pair_with_one_non_finite_side_is_above_every_floor() -> None:
    frame = added_frame(frame_of(row("q", 0.0, nonfinite_differ=1)), {"q": Floor(1.0, 1.0)})
    assert named_groups(frame, 5) == ["q"]


def test_exact_equality_is_never_named_whatever_the_floor() -> None:
    frame = added_frame(frame_of(row("ids", 0.0, dtype="int64")), {"ids": Floor(0.0, 0.0)})
    assert frame["ratio"].item() == 0.0


def test_integers_that_differ_are_named_where_the_baseline_repeats_them() -> None:
    frame = added_frame(frame_of(row("ids", 0.1, dtype="int64")), {"ids": Floor(0.0, 0.0)})
    assert named_groups(frame, 5) == ["ids"]


def test_the_error_without_grafts_is_beside_the_added_error() -> None:
    grafted, compared = row("q", 1e-6, tags={"layer": 3}), row("q", 0.5, tags={"layer": 3}, status="compared")
    other = row("q", 0.7, tags={"layer": 4}, status="compared")
    later = row("q", 0.9, tags={"layer": 3}, status="compared", occurrence=1)
    frame = added_frame(frame_of(grafted), {"q": Floor(1e-6, 3e-6)}, compared=frame_of(other, compared, later))
    assert frame[["added", "error"]].values.tolist() == [[1e-6, 0.5]]


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (row("q", None, status="missing"), "1 tap (q) is on the target only."),
        (row("q", None, status="unmatched", side="baseline"), "1 tap (q) is on the baseline only."),
        (row("q", None, status="timeout", error="late\nmore"), "1 tap (q) did not arrive in time: late."),
        (
            row("q", None, status="unmatched", side="baseline", tags={"kind": "grad"}),
            "1 tap (q) has a gradient on the baseline only. If the target has the tap but computes no gradient for",
        ),
        (row("q", None, status="failed", error="E: no"), "could not be compared (the transform failed): E: no."),
        (row("q", None), "1 tap (q) has no pair of finite numbers."),
        (row("q", 0.0, numel=0, std_baseline=0.0), "1 tap (q) is empty."),
        (row("q", 0.0, **ZEROS), "1 tap (q) is all zeros on both sides, which may hide earlier mistakes."),
        (
            row("q", 0.0, nonfinite_baseline=2),
            "1 tap (q) has numbers that are not finite, in the same places on both sides; these",
        ),
        (row("q", 0.0, rows_unmatched=2), "1 tap (q) has rows without a partner on the other side"),
        (row("q", 0.0, note="the senders are not replicas (...)"), "1 tap (q) was compared with one of several ranks"),
        (
            row("q", None, status="missing", tags={"kind": "grad"}),
            "1 tap (q) has a gradient on the target only. If the baseline has the tap but computes no gradient for",
        ),
        (
            row("q", 0.0, note="rank 1 did not send"),
            "1 tap (q) arrived from only some of the sending ranks: rank 1 did",
        ),
        (row("q", 0.0, note="rank 1 takes no part"), "1 tap (q) arrived from only some of the sending ranks: rank 1"),
    ],
)
def test_unmeasured_taps_are_reported(bad: Row, said: str) -> None:
    (line,) = unseen_of(frame_of(row("fine"), bad))
    assert said in line
    assert unseen_of(frame_of(row("fine"))) == unseen_of(frame_of()) == []


def test_zeros_beside_a_number_that_is_not_finite_on_one_side_are_not_all_zeros() -> None:
    assert unseen_of(frame_of(row("fine"), row("q", 0.0, nonfinite_differ=1, **ZEROS))) == []


def test_of_several_reasons_for_taps_that_were_not_measured_the_first_is_given() -> None:
    notes = [row("p", 0.0, note="rank 1 ended"), row("q", 0.0, order=2, note="rank 2 ended")]
    assert unseen_of(frame_of(*notes)) == ["2 taps (p, q) arrived from only some of the sending ranks: rank 1 ended."]
    errors = ["  ", None, "the target ended its step without this tap", "first:\n  more", "second"]
    rows = frame_of(*(row("q", None, status="failed", order=n, error=each) for n, each in enumerate(errors)))
    assert _first_error(rows) == ": first:"
    assert _first_error(rows[:3]) == ""


def test_named_groups_have_their_labels_and_what_follows_them_is_inherited() -> None:
    names = {"before": (1.0, 9.0), "a": (9.0, 9.0), "b": (9.0, 9.0), "c@grad": (9.0, 9.0), "after": (1.0, 9.0)}
    names |= {"clean": (1.0, 1.0), "d": (9.0, 9.0)}
    frame = pd.DataFrame(
        [{"group": g, "ratio": r, "error_ratio": e, "label": "clean", "alone": math.nan} for g, (r, e) in names.items()]
    )
    # Another tap of a named group, which adds rounding alone.
    frame.loc[len(frame)] = {**frame.iloc[1], "ratio": 1.0, "error_ratio": 1.0}
    causes = {"y": Causes({"a": "culprit", "b": "minor"}, {"a": 40.0})}
    every = labelled(frame, ["a", "b", "d"], ["c@grad"], causes, 5.0, even=["d"])
    assert every.iloc[-1][["label", "alone"]].dropna().to_dict() == {"label": "clean"}
    found = every.iloc[:-1].set_index("group")
    assert found["label"].to_dict() == {
        **{"before": "clean", "a": "culprit", "b": "minor", "c@grad": "inherited", "after": "inherited"},
        **{"clean": "clean", "d": "clean"},
    }
    assert found["alone"].dropna().to_dict() == {"a": 40.0}


@pytest.mark.parametrize(
    "usual",
    [
        {"dtype": "int64"},
        {"dtype": "bool"},
        {"tags": {"kind": "grad"}},
        {"tags": {"kind": "param"}},
        {"mean_target": 1e-3},
        {"std_target": 1e-3},
        {"nonfinite_baseline": 2, "nonfinite_differ": 2},
    ],
)
def test_other_zeros_hide_nothing(usual: dict[str, Any]) -> None:
    assert unseen_of(frame_of(row("q", 0.0, **{**ZEROS, **usual}))) == []


def test_an_empty_tap_is_not_measured() -> None:
    frame = added_frame(frame_of(row("q", 0.0, numel=0), row("k", 0.0)), {})
    assert frame["label"].tolist() == ["unmeasured", "clean"]
    assert math.isnan(frame["ratio"].iloc[0])


def test_one_sided_taps_are_reported_for_each_side() -> None:
    one_sided = [row(name, None, status="missing") for name in "ab"]
    assert unseen_of(frame_of(*one_sided, row("c", None, status="unmatched", side="baseline"))) == [
        "2 taps (a, b) are on the target only.",
        "1 tap (c) is on the baseline only.",
    ]


def test_a_weight_and_its_gradient_on_one_side_are_reported_once() -> None:
    weight = row("w", None, status="unmatched", tags={"kind": "param"})
    gradient = row("w", None, status="missing", tags={"kind": "param_grad"})
    assert unseen_of(frame_of(weight, gradient)) == ["1 tap (w) is on the target only."]


def test_further_calls_of_a_tap_are_counted_and_not_called_a_tap_of_one_side() -> None:
    paired = [row(name, order=order) for order, name in enumerate("abab")]
    more = [row(name, None, status="unmatched", side="baseline", order=4) for name in "ab"]
    assert unseen_of(frame_of(*paired, *more)) == ["2 taps (a, b): 1 of 3 calls is on the baseline only."]
    lone = row("c", None, status="missing", order=5)
    assert unseen_of(frame_of(*paired, row("a", None, status="missing"), row("a", None, status="missing"), lone)) == [
        "1 tap (a): 2 of 4 calls are on the target only.",
        "1 tap (c) is on the target only.",
    ]


def test_values_are_named_before_gradients() -> None:
    rows = frame_of(row("b", 1.0, order=1, tags={"kind": "grad"}), row("z", 1.0, order=2), row("a", 1.0, order=3))
    frame = added_frame(rows, {"z": Floor(1e-6, 3e-6)})
    assert named_groups(frame, 5) == ["z", "a", "b@grad"]


def test_one_sided_taps_have_their_own_filter() -> None:
    one_sided = {"status": "unmatched", "rel_l2": None}
    rows = frame_of(
        row("layers.0.a"), row("layers.0.b", **one_sided), row("layers.1.b", **one_sided), row("c", **one_sided)
    )
    text = one_sided_filter(rows)
    assert text is not None
    matches = compile_filter(text).matches
    assert [name for name in ("layers.0.a", "layers.0.b", "layers.7.b", "c", "d") if matches({"name": name})] == [
        *("layers.0.b", "layers.7.b", "c")
    ]
    # A value and its gradient of one name are two groups.
    both = frame_of(row("c", **one_sided), row("c", order=2, tags={"kind": "grad"}, **one_sided))
    matches = compile_filter(one_sided_filter(both)).matches
    assert matches({"name": "c", "kind": "grad"})
    assert matches({"name": "c"})
    # One of the group was measured, so the sides do have it.
    assert one_sided_filter(frame_of(row("layers.0.b"), row("layers.1.b", **one_sided))) is None


def test_rows_as_dicts_have_plain_numbers_and_none_for_missing_values() -> None:
    frame = pd.DataFrame(
        {
            "name": pd.array(["a", None], dtype="string"),
            "tags": [{"layer": 1}, {}],
            "step": [3, 4],
            "rel_l2": [0.5, math.nan],
            "numel": pd.array([7, None], dtype="Int64"),
            "cast": [None, "float16 -> float32"],
        },
        index=[8, 9],
    )
    first, last = records(frame)
    assert first == {"name": "a", "tags": {"layer": 1}, "step": 3, "rel_l2": 0.5, "numel": 7, "cast": None}
    assert last == {"name": None, "tags": {}, "step": 4, "rel_l2": None, "numel": None, "cast": "float16 -> float32"}
    assert [type(value) for value in first.values()] == [str, dict, int, float, int, type(None)]
    assert records(frame[:0]) == []
    assert records(frame, "rel_l2", "numel") == [{"rel_l2": 0.5, "numel": 7}, {"rel_l2": None, "numel": None}]
    assert records(frame[:0], "step") == []


def test_all_rows_are_chosen_without_a_copy_and_some_or_none_keep_their_index() -> None:
    frame = pd.DataFrame({"name": ["a", "b", "c"]}, index=[4, 5, 7])
    assert rows_where(frame, frame["name"] != "d") is frame
    some, none = rows_where(frame, frame["name"] != "b"), rows_where(frame, frame["name"] == "d")
    assert some["name"].to_dict() == {4: "a", 7: "c"}
    assert (len(none), list(none.columns)) == (0, ["name"])


def test_of_many_taps_the_first_four_are_named_and_all_are_counted() -> None:
    assert _taps(["a", "b", "a", "c", "d"]) == "4 taps (a, b, c, d)"
    assert _taps("abcdef") == "6 taps (a, b, c, d, ...)"
    assert _taps(["a", "a"]) == "1 tap (a)"


def test_a_recomputation_by_one_side_is_a_separate_remark() -> None:
    again = {"name": "x", "recompute_status": "recompute"}
    rows = [row("x", status=status, tags=again) for status in ("missing", "unmatched", "recomputed")]
    (said,) = unseen_of(to_frame([*rows, row("y")]))
    assert said.startswith("the recomputation of 1 tap (x) in the backward pass (activation checkpointing), which only")
    # One that both sides have is compared as any other.
    (said,) = unseen_of(to_frame([row("x", status="failed", tags=again, error="bad")]))
    assert said == "1 tap (x) could not be compared (the transform failed): bad."


@pytest.mark.parametrize(("of_group", "floor"), [(5e-6, 5e-6), (2e-5, 1e-6)])
def test_a_tap_has_its_own_floor_only_where_its_group_has_many_times_that(of_group: float, floor: float) -> None:
    rows = frame_of(row("h", 1e-5, numel=100, mean_abs=8e-6))
    found = added_frame(rows, {"h": Floor(of_group, 1e-3)}, own={("h", None): Floor(1e-6, 1e-3)})
    assert found["floor"].item() == floor


def test_values_without_a_finite_number_are_reported_once() -> None:
    (said,) = unseen_of(frame_of(row("x", None, nonfinite_baseline=4)))
    assert said == "1 tap (x) has no pair of finite numbers."


def test_calls_without_a_partner_are_counted_on_one_rank() -> None:
    of_ranks = [row("h", rank=rank, order=order) for rank in (0, 1) for order in (1, 2)]
    alone = [row("h", None, rank=rank, order=3, status="missing", side="target") for rank in (0, 1)]
    assert unseen_of(frame_of(*of_ranks, *alone)) == ["1 tap (h): 1 of 3 calls is on the target only."]


def test_calls_that_one_rank_lacks_are_counted() -> None:
    of_ranks = [row("h", rank=rank, order=order) for rank, calls in ((0, 3), (1, 2)) for order in range(calls)]
    assert unseen_of(frame_of(*of_ranks)) == ["1 tap (h): 2 calls on target[1], and 3 on target[0]."]
    # The stages of a pipeline have different layers, under one name or several.
    stages = [row("h", rank=rank, tags={"layer": layer}) for rank, layer in ((0, 0), (0, 1), (1, 2))]
    assert unseen_of(frame_of(*stages, row("embed", rank=0))) == []
    # A recomputation in the backward pass is no call.
    again = row("h", rank=0, order=9, status="recomputed")
    assert not [each for each in unseen_of(frame_of(*(row("h", rank=rank) for rank in (0, 1)), again)) if "and" in each]
