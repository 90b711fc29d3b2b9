"""Differences that no named group explains: what is measured, against which floor, and the sentence that leads."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import pytest
import torch
from kit.rows import row

from graftlab.diffs.results import ResultDifference, written_path
from graftlab.plan.pairs import PairRule
from graftlab.rows.schema import Row
from graftlab.rows.store import to_frame
from graftlab.transforms.align import MOVED
from graftlab.verdict.floor import Floor
from graftlab.verdict.returned_values import (
    AccumulatedFloors,
    ReturnedValues,
    ValueDifference,
    compare_returned,
    extents_by_request,
)
from graftlab.verdict.unexplained import UnexplainedDifferences, cut_graphs, differing_taps, on_unseen_choices

FLOORS = AccumulatedFloors({("x", None): Floor(1e-5, 1e-4), ("y", None): Floor(1e-6, 1e-5)}, {"": 1e-5})
PAIR = ("float32", "float32")


def tap(name: str, order: int, rel_l2: float | None = 0.0, **more: Any) -> Row:
    size = rel_l2 or 0.0
    usual = {"mean_baseline": 0.0, "std_baseline": 1.0, "max_abs": size, "mean_abs": 0.8 * size}
    return row(name, order, **{"rel_l2": rel_l2, **usual, **more})


def frame_of(*rows: Row) -> pd.DataFrame:
    return to_frame(list(rows))


def returned(*differences: tuple[str, float, tuple[str, str]], left: tuple[str, ...] = ()) -> ReturnedValues:
    return ReturnedValues(tuple(ResultDifference(*each) for each in differences), left)


def unexplained(*rows: Row, **more: Any) -> UnexplainedDifferences:
    frame = frame_of(*rows)
    given = {"returned": None, "returned_grafted": None, "floors": FLOORS, "threshold": 10.0, **more}
    taps = differing_taps(frame, given["floors"], given["threshold"], given.get("names_left", ()))
    return UnexplainedDifferences(frame, taps, **given)


def test_a_returned_value_that_is_a_multiple_has_its_factor_in_the_sentence() -> None:
    values = ReturnedValues((ResultDifference("", 7.0, ("float32", "float32"), 8.0),))
    (sentence,) = unexplained(tap("h", 1), returned_grafted=values, returned=values).after_last_tap()
    assert sentence.endswith("x what rounding adds up to; it is 8 times the baseline's).")


# ---- floors ---------------------------------------------------------------------------------------------------------


def test_a_tap_without_a_record_takes_the_largest_floor() -> None:
    assert FLOORS.of_tap("y", None, "float32").rel_l2 == 1e-6
    assert FLOORS.of_tap("unknown", None, "float32") == Floor(1e-5, 1e-4)
    assert FLOORS.of_tap("y", "grad", "float32") == Floor(1e-5, 1e-4)
    assert FLOORS.of_tap("y", None, "bfloat16").rel_l2 == 2.0**-8
    assert FLOORS.of_returned("", PAIR) == 1e-5
    assert FLOORS.of_returned("[1]", ("float32", "bfloat16")) == 2.0**-8
    assert FLOORS.of_returned("[1]", ("int64", "int64")) == 0.0


def test_a_constant_floor_replaces_all() -> None:
    floors = AccumulatedFloors(FLOORS.taps, FLOORS.returned, constant=1e-2)
    assert floors.of_tap("x", None, "float32") == Floor(1e-2, pytest.approx(3e-2))
    assert floors.of_returned("", ("bfloat16", "bfloat16")) == 1e-2


# ---- what the functions returned ------------------------------------------------------------------------------------


def test_the_largest_distance_leaves_out_what_is_not_repeated_and_what_has_none() -> None:
    found = returned(("['a']", 0.1, PAIR), ("['b']", math.nan, PAIR), ("['c']", 0.3, PAIR))
    assert found.most() == 0.3
    assert found.most(["the returned value ['c']"]) == 0.1
    assert returned().most() == 0.0


def test_each_rank_is_compared_with_its_own_or_with_the_only_one_of_the_baseline() -> None:
    one, two = torch.ones(2), torch.full((2,), 2.0)
    assert [each.rel_l2 for each in compare_returned([one, two], [one, two]).differences] == [0.0, 0.0]
    assert [each.rel_l2 for each in compare_returned([one], [one, two]).differences] == [0.0, 1.0]
    assert compare_returned([], [one]) == compare_returned([one], []) == ReturnedValues()


def test_results_that_are_near_have_their_rows_in_one_order() -> None:
    """A function joins the rows of its chunks, although the output of each call has other rows."""
    rows = PairRule("output", "output", "rows(of='a', into='b')")
    whole = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    (near,) = compare_returned([whole], [whole * 1.01], [rows]).differences
    assert near.rel_l2 == pytest.approx(0.01, rel=1e-4)
    # Other rows, and results that lack some or have other shapes, are not compared.
    other: tuple[tuple[object, object], ...] = (
        (whole, whole.flip(0)),
        ({"x": whole, "y": whole}, {"x": whole}),
        ({"x": whole, "y": whole}, {"x": whole, "y": whole[:3]}),
        (whole, whole * math.nan),
    )
    for one, two in other:
        assert compare_returned([one], [two], [rows]).differences == ()


def test_a_stage_that_returns_nothing_loses_nothing_that_another_returns() -> None:
    found = compare_returned([{"logits": torch.ones(2)}], [None, 2 * torch.ones(2)])
    assert [each.rel_l2 for each in found.differences] == [1.0]
    assert (found.left, found.lost) == (("target rank 0 returns nothing",), ())
    # A value that no rank returns, or not the rank that the baseline has it on, is lost.
    assert compare_returned([torch.ones(2)], [None, None]).lost
    assert compare_returned([torch.ones(2), torch.ones(2)], [torch.ones(2), None]).lost


def test_a_result_of_another_shape_clears_nothing_unless_it_may_be_a_part() -> None:
    whole, part = torch.ones(2, 4), torch.ones(2, 3)
    said = "the result has the shape [2, 4] on the baseline and [2, 3] on the target"
    found = compare_returned([whole], [part])
    assert (found.left, found.lost) == ((), (said,))
    (sentence,) = UnexplainedDifferences(frame_of(tap("x", 1)), [], found, None, FLOORS, 5.0).lost()
    assert sentence == (
        f"T{said[1:]}, which was therefore not compared. If this is intended, name the tap that counts (output=, or "
        "--output), such as x."
    )
    two = ReturnedValues(lost=(said, "only the baseline returns the result's [1]"))
    (sentence,) = UnexplainedDifferences(frame_of(tap("x", 1)), [], two, None, FLOORS, 5.0).lost()
    assert f"T{said[1:]}; only the baseline returns the result's [1]. These were therefore not compared." in sentence
    # A shard of one of two ranks, or a tensor that pairs assemble.
    for each in (compare_returned([whole], [part, part]), compare_returned([whole], [part], [PairRule("x", "y", "")])):
        assert (each.left, each.lost) == ((said,), ())


def test_values_of_ranks_that_cannot_be_paired_are_reported_as_not_compared() -> None:
    found = compare_returned([1.0, 1.0], [1.0, 1.0, 1.0])
    assert (found.differences, found.compared) == ((), False)
    assert unexplained(returned=found).not_compared(with_lost=True) == [
        "2 baseline ranks and 3 target ranks return values, which cannot be paired."
    ]
    moved = compare_returned([1.0], [2.0], [PairRule("x", "y", "rows(of='a', into='b')")])
    assert moved.left == ("the returned values have their rows in a different order on each side",)


def test_the_farthest_rank_of_a_returned_value_is_named() -> None:
    values = returned(("", 2e-4, PAIR), ("", 5e-4, PAIR), ("", 3e-4, PAIR), ("[1]", math.nan, PAIR))
    (found,) = values.beyond(FLOORS, 10.0)
    assert (found.what, found.rel_l2, found.times) == ("the returned value", 5e-4, pytest.approx(50))
    assert values.beyond(FLOORS, 100.0) == []
    assert values.beyond(FLOORS, 10.0, ["the returned value"]) == []


def test_only_returned_numbers_that_were_measured_count_as_compared() -> None:
    assert returned(("", 0.0, PAIR)).compared
    assert not returned(("", math.nan, PAIR)).compared
    assert not returned((written_path("cache"), 0.0, PAIR)).compared


def test_rows_of_requests_are_compared_in_any_order_where_wide_rows_show_it() -> None:
    hidden, scores = torch.randn(5, 8, generator=torch.Generator().manual_seed(0)), torch.arange(5.0)
    order = [3, 0, 4, 1, 2]
    loss = torch.tensor(2.5)
    ours = {"hidden": hidden, "scores": scores, "tokens": [4, 5, 6, 7, 8], "other": scores[:4], "loss": loss}

    def theirs(factor: float = 1.0, tokens: list[int] | None = None) -> dict[str, object]:
        given = tokens or [ours["tokens"][place] for place in order]  # type: ignore[index]
        moved = {"hidden": factor * hidden[order], "scores": scores[order], "tokens": given}
        return {**moved, "other": scores[:4], "loss": loss}

    found = compare_returned([ours], [theirs()], by_request=(5, 8))
    assert [each.rel_l2 for each in found.differences] == [0.0] * 5
    assert found.left[0] == "the order of the rows of the returned value ['hidden']"
    assert compare_returned([ours], [theirs(1.1)], by_request=(5, 8)).differences[0].rel_l2 == pytest.approx(0.1)
    # What is chosen for a request moves with its row, and not by itself.
    wrong = compare_returned([ours], [theirs(tokens=[4, 5, 6, 7, 8])], by_request=(5, 8)).differences
    assert [each.path for each in wrong if each.rel_l2] == ["['tokens']"]
    # Of equal rows each has its own partner, so that none is left out.
    equal, changed = hidden[[0, 0, 1, 2, 3]], hidden[[3, 0, 0, 1, 2]]
    changed[2] *= 1.05
    assert compare_returned([equal], [changed], by_request=(5, 8)).differences[0].rel_l2 > 0
    tokens = [{"tokens": [4, 5, 6]}], [{"tokens": [5, 4, 6]}]
    assert compare_returned(*tokens, by_request=(3, 8)).differences[0].rel_l2 > 0
    # Without requests, or with as many rows as no output has, places count.
    for extents in ((), (4, 8)):
        assert compare_returned([ours], [theirs()], by_request=extents).differences[0].rel_l2 > 1


def test_the_last_tap_of_the_forward_pass_shows_whether_requests_moved() -> None:
    by_request = {"aligned_by": "request", "shape": [5, 8], "note": f"a note; {MOVED}"}
    assert extents_by_request(frame_of(tap("x", 0), tap("y", 1, **by_request))) == (5, 8)
    assert extents_by_request(frame_of(tap("x", 0, **by_request), tap("y", 1))) == ()
    in_place = {**by_request, "note": None}
    assert extents_by_request(frame_of(tap("x", 0), tap("y", 1, **in_place))) == ()
    assert extents_by_request(frame_of(tap("x", 0))) == extents_by_request(frame_of()) == ()
    gradient = tap("y", 1, own={"kind": "grad"}, **by_request)
    assert extents_by_request(frame_of(gradient)) == ()


# ---- taps -----------------------------------------------------------------------------------------------------------


def test_taps_that_differ_are_in_execution_order_over_all_steps_without_data() -> None:
    rows = [
        tap("late", 1, 1e-2, step=1),
        tap("y", 5, 1e-3),
        tap("x", 2, 1e-3),
        tap("below", 3, 5e-5),
        tap("left", 1, 1.0),
        tap("w", 0, 1.0, own={"kind": "param"}),
        tap("alone", 1, None, status="missing"),
    ]
    assert [each.what for each in differing_taps(frame_of(*rows), FLOORS, 10.0, ["left"])] == ["x", "y", "late"]


def test_one_rounding_of_a_taps_largest_number_is_no_difference() -> None:
    # One unit in the last place of 163.5, among numbers of about 2.5.
    peak = {"std_baseline": 2.5, "min_baseline": -3.0, "max_baseline": 163.5, "max_abs": 2**-16}
    floors = AccumulatedFloors({("x", None): Floor(1.4e-7, 1.1e-6)}, {})
    assert differing_taps(frame_of(tap("x", 1, 1.3e-7, **peak)), floors, 5.0) == []
    for more in ({"max_baseline": 3.0}, {"max_abs": 2**-13}):
        assert len(differing_taps(frame_of(tap("x", 1, 1.3e-7, **{**peak, **more})), floors, 5.0)) == 1
    # A usual row does not hide behind the rounding of a number that is far larger, or of 16 bits.
    for more in ({"max_baseline": 1e6, "max_abs": 1e-3}, {"dtype": "bfloat16", "rel_l2": 1e-3, "max_abs": 1.0}):
        assert len(differing_taps(frame_of(tap("x", 1, **{"rel_l2": 1.3e-7, **peak, **more})), floors, 5.0)) == 1
    # A floor that was asked for holds.
    asked = AccumulatedFloors({}, {}, 3e-7)
    assert len(differing_taps(frame_of(tap("x", 1, 1.3e-7, **peak)), asked, 5.0)) == 1


def test_a_tap_that_is_not_finite_on_one_side_differs_without_bound() -> None:
    rows = [tap("x", 1, 1e-3), tap("x", 2, 1e-6, nonfinite_differ=2), tap("x", 3, 2e-3)]
    (found,) = differing_taps(frame_of(*rows), FLOORS, 10.0)
    assert (found.rel_l2, found.times) == (math.inf, math.inf)
    assert found.size == "in which numbers are finite"


def test_a_difference_without_a_floor_is_beyond_rounding() -> None:
    assert ValueDifference("x", 0.5, math.inf).size == "by 0.5 (beyond rounding)"
    assert ValueDifference("x", 0.5, 12.0).size == "by 0.5 (12 x what rounding adds up to)"


# ---- sentences ------------------------------------------------------------------------------------------------------


def test_a_difference_after_the_last_tap_is_named_with_it() -> None:
    found = unexplained(
        tap("x", 1), tap("y", 2), tap("x", 3, own={"kind": "grad"}), returned_grafted=returned(("", 0.5, PAIR))
    )
    assert found.after_last_tap() == [
        "Something after the last tap, y, is computed differently: with the baseline's value at every tap, the "
        "returned value still differs by 0.5 (5e+04 x what rounding adds up to)."
    ]
    assert unexplained(tap("y", 2), returned_grafted=returned(("", 5e-5, PAIR))).after_last_tap() == []
    assert unexplained(returned_grafted=returned(("", 0.5, PAIR))).after_last_tap() == [
        "The returned value differs by 0.5 (5e+04 x what rounding adds up to), and no tap was measured on both sides."
    ]


def test_a_cache_beside_the_tapped_results_is_not_called_later_than_them() -> None:
    cache = returned(("['cache'].keys", 0.5, PAIR))
    (said,) = unexplained(tap("y", 1), tap("output.logits", 2), returned_grafted=cache).after_last_tap()
    assert said.startswith(
        "Something that no tap shows is computed differently: with the baseline's value at every tap"
    )


def test_a_difference_beside_an_ungrafted_tap_is_not_blamed_on_later_code() -> None:
    found = unexplained(tap("y", 1), returned_grafted=returned(("", 0.5, PAIR)))
    (said,) = found.after_last_tap(all_grafted=False)
    assert said.startswith("With the baseline's value at every tap that could be grafted, the returned value differs")


def test_a_difference_beside_calls_of_one_side_is_not_blamed_on_later_code() -> None:
    again = tap("y", 2, None, status="unmatched", side="baseline")
    found = unexplained(tap("y", 1), again, returned_grafted=returned(("", 0.5, PAIR)))
    assert found.after_last_tap() == [
        "With the baseline's value at every tap that has a partner, the returned value differs by 0.5 (5e+04 x what "
        "rounding adds up to). Further calls of y, which the baseline alone makes, may explain it."
    ]
    # A tap that one side alone has is no further call, and neither is a recomputation; a weight has none.
    recomputed = {"recompute_status": "recompute"}
    for lone in (
        tap("z", 2, None, status="unmatched"),
        tap("y", 2, None, status="missing", own={"kind": "grad"}),
        tap("y", 2, None, status="unmatched", side="baseline", own=recomputed),
    ):
        (said,) = unexplained(tap("y", 1), lone, returned_grafted=returned(("", 0.5, PAIR))).after_last_tap()
        assert said.startswith("Something after the last tap, y,")


def test_a_graph_that_one_side_cuts_is_named_before_the_gradients_that_follow() -> None:
    grad = {"own": {"kind": "grad"}}
    lost = tap("norm", 5, None, status="unmatched", side="baseline", **grad)
    both = [tap("x", 1), tap("norm", 2), tap("x", 6, 0.5, **grad)]
    (said,) = cut_graphs(frame_of(*both, lost), ["x@grad"])
    assert said.startswith(
        "norm has a gradient on the baseline only: the target's graph is cut where its code reads it (detach, no_grad)"
    )
    assert cut_graphs(frame_of(*both, lost), ["x"]) == []
    # A tap that the target does not have has no gradient there either, and one call of several proves nothing.
    assert cut_graphs(frame_of(*both[::2], lost), ["x@grad"]) == []
    assert cut_graphs(frame_of(*both, lost, tap("norm", 4, **grad)), ["x@grad"]) == []


def test_whole_numbers_that_agree_alone_prove_little() -> None:
    whole, number = ("int64", "int64"), ("", 0.0, PAIR)
    (said,) = unexplained(returned=returned(("", 0.0, whole))).whole_numbers_alone()
    assert said.startswith("Nothing but whole numbers was compared, such as tokens.")
    assert unexplained(returned=returned(("[0]", 0.0, whole), number)).whole_numbers_alone() == []
    assert unexplained(tap("y", 1), returned=returned(("", 0.0, whole))).whole_numbers_alone() == []
    assert unexplained().whole_numbers_alone() == unexplained(returned=returned()).whole_numbers_alone() == []


@pytest.mark.parametrize(
    ("paths", "has_some"), [("", False), ("f", False), ("i", True), ("fi", True), ("if", True), ("ff", False)]
)
def test_one_result_of_whole_numbers_is_enough_to_have_some(paths: str, has_some: bool) -> None:
    kinds = {"i": ("int64", "int64"), "f": ("float32", "bfloat16")}
    found = returned(*((f"[{place}]", 0.0, kinds[kind]) for place, kind in enumerate(paths)))
    assert found.has_whole_numbers is has_some


def test_whole_numbers_that_are_chosen_from_untapped_numbers_prove_little() -> None:
    tokens = tap("output", 2, dtype="int64")
    ids = tap("input", 1, own={"kind": "input"}, dtype="int64")
    logits = tap("input", 1, own={"kind": "input"})
    whole = returned(("", 0.0, ("int64", "int64")))
    (said,) = unexplained(logits, tokens, returned=whole).whole_numbers_alone()
    assert said.endswith("return those too, or tap them (gl.tap).")
    assert unexplained(tap("w", 0, own={"kind": "param"}), ids, tokens, returned=whole).whole_numbers_alone()
    # Nothing shows that the tokens come from numbers that round, or else these were compared.
    assert unexplained(ids, tokens, returned=whole).whole_numbers_alone() == []
    assert unexplained(logits, tap("p", 1), tokens, returned=whole).whole_numbers_alone() == []


def test_grafts_that_change_nothing_beside_a_wrong_last_tap_show_no_later_mistake() -> None:
    wrong, same = returned(("", 0.5, PAIR)), returned(("", 0.5, PAIR))
    assert unexplained(tap("y", 2, 0.5), returned=wrong, returned_grafted=same).after_last_tap() == []
    other = returned(("", 0.4, PAIR))
    assert unexplained(tap("y", 2, 0.5), returned=wrong, returned_grafted=other).after_last_tap()
    assert unexplained(tap("y", 2), returned=wrong, returned_grafted=same).after_last_tap()


def test_state_that_a_call_writes_is_not_a_returned_value() -> None:
    path = written_path("cache")
    found = unexplained(tap("y", 2), returned_grafted=returned((path, 0.5, PAIR)), returned=returned((path, 0.7, PAIR)))
    assert found.after_last_tap() == found.no_tap_explains() == []
    assert found.written() == [
        "What the call writes to cache differs by 0.5 (8.4e+06 x what rounding adds up to), with the baseline's value "
        "at every tap."
    ]
    several = [(written_path(name), size, PAIR) for name, size in (("a", 0.2), ("b", 0.9), ("c", 0.5))]
    (said,) = unexplained(tap("y", 2), returned=returned(*several)).written()
    assert said.startswith("What the call writes to b (and 2 more) differs by 0.9")
    assert unexplained(tap("y", 2), returned=returned(("", 0.7, PAIR))).written() == []
    # A graft may put another tensor in the place of the one that the model writes into.
    (said,) = unexplained(tap("y", 2), returned=returned((path, 0.7, PAIR))).written()
    assert "baseline's value" not in said
    assert (
        unexplained(returned=returned((path, 0.7, PAIR)), returned_grafted=returned((path, 0.0, PAIR))).written() == []
    )


def test_a_part_of_the_result_that_differs_is_not_beside_an_output_that_agrees() -> None:
    (said,) = unexplained(tap("output[0]", 1, 0.5), tap("output[1]", 2)).no_tap_explains()
    assert said.endswith("and no tapped value explains it.")


def test_whole_numbers_that_rounding_turns_are_named() -> None:
    floors = AccumulatedFloors({}, {"": 0.2})
    (said,) = unexplained(returned=returned(("", 0.3, ("int64", "int64"))), floors=floors).turned()
    assert said.startswith("The returned value differs in whole numbers, by 0.3. Rounding alone would change some")
    whole = returned(("", 0.3, ("int64", "int64")))
    assert unexplained(returned=whole, floors=floors, values_left=["the returned value"]).turned() == []
    for value in (("", 3.0, ("int64", "int64")), ("", 0.3, PAIR), ("", 0.0, ("int64", "int64"))):
        assert unexplained(returned=returned(value), floors=floors).turned() == []


def test_the_returned_value_leads_without_a_named_group() -> None:
    rows = tap("x", 1, 1e-3), tap("z", 2, 2e-3), tap("y", 3)
    (said,) = unexplained(*rows, returned=returned(("", 0.5, PAIR))).no_tap_explains()
    assert said.startswith("The returned value differs by 0.5 ")
    assert "The first tap that differs is x by" in said
    (said,) = unexplained(*rows[:2], tap("y", 3, 0.5)).no_tap_explains()
    assert said.startswith("The output y differs by 0.5 ")
    assert "The first tap that differs is x by" in said
    assert " and what each tap adds to it is not known" in unexplained(*rows).no_tap_explains(is_grafted=False)[0]
    (said,) = unexplained(*rows).no_tap_explains()
    assert said.startswith("x (and 1 more) differs by 0.001 ")
    assert said.endswith("; the output agrees.")
    assert unexplained(tap("x", 1), tap("y", 3)).no_tap_explains() == []


def test_an_inner_tap_with_few_wrong_rows_is_not_reported_if_the_output_agrees() -> None:
    assert unexplained(tap("x", 1, 1e-2, mean_abs=1e-4), tap("y", 3)).no_tap_explains() == []


def test_a_target_that_differs_in_another_run_at_other_taps_does_not_repeat_itself() -> None:
    found = unexplained(tap("x", 1, 1e-2), tap("y", 3))
    assert found.only_sometimes(frame_of(tap("x", 1, 2e-2), tap("y", 3)), None, 4) == []
    # What a call writes was not looked at in the first run.
    written = returned((written_path("cache"), 0.7, PAIR))
    assert found.only_sometimes(frame_of(tap("x", 1, 2e-2), tap("y", 3)), written, 4) == []
    (said,) = found.only_sometimes(frame_of(tap("x", 1), tap("y", 3)), None, 4)
    assert said.startswith("The target does not repeat itself: it differed in the first run and agrees in run 4.")
    (said,) = found.only_sometimes(frame_of(tap("x", 1, 1e-2), tap("y", 3, 1e-2)), None, 4)
    assert said.startswith("The target does not repeat itself: run 4 differs at other taps than the first.")


def test_an_output_without_a_partner_is_reported_as_not_compared() -> None:
    rows = tap("x", 1), tap("out", 2, None, status="unmatched")
    (said,) = unexplained(*rows).without_partner("logits")
    assert said.startswith(
        "The output was not compared: the baseline's last tap, logits, and the target's last tap, out, have no partner."
        " The last tap that was compared is x."
    )
    assert unexplained(*rows, returned=returned(("", 0.0, PAIR))).without_partner("logits") == []
    assert unexplained(*rows, returned=returned(("", math.nan, PAIR))).without_partner("x") != []
    assert unexplained(tap("x", 1)).without_partner("x") == []
    # The user has named another tap as the output.
    assert unexplained(*rows).without_partner("logits", "x") == []
    # A later tap of the target has a partner.
    assert unexplained(tap("out", 1, None, status="missing"), tap("x", 2)).without_partner("x") == []


@pytest.mark.parametrize(
    ("fewer", "more", "status"), [("target", "baseline", "unmatched"), ("baseline", "target", "missing")]
)
def test_a_last_call_of_one_side_alone_clears_nothing(fewer: str, more: str, status: str) -> None:
    alone = tap("out", 3, None, status=status, side=more, occurrence=2)
    measured = (tap("out", 1), tap("out", 2, occurrence=1))
    (said,) = unexplained(*measured, alone).without_partner(None)
    assert said.startswith(f"The {fewer} makes fewer calls: 1 of the {more}'s 3 calls of out lacks a partner, the last")
    assert unexplained(*measured, alone, alone._replace(rank=1)).without_partner(None) == [said]
    assert len(unexplained(tap("out", 1), tap("y", 2), alone).without_partner("y", "out")) == 1
    # The gradient of the first call comes last, and is no call.
    grads = [each._replace(tags={**each.tags, "kind": "grad"}) for each in (alone._replace(order=4), tap("out", 5))]
    assert unexplained(*measured, alone, *grads).without_partner(None) == [said]
    assert unexplained(*measured, grads[0]).without_partner(None) == []
    # An earlier call without a partner is not the output.
    assert unexplained(tap("out", 1), tap("out", 4), alone).without_partner("out") == []


def test_the_last_tap_of_the_target_is_that_of_its_last_step() -> None:
    alone = tap("out", 1, None, step=1, status="unmatched")
    assert unexplained(alone, tap("x", 2), tap("x", 9)).without_partner("x")
    assert unexplained(tap("out", 1, None, status="unmatched"), tap("x", 2)).without_partner("x") == []
    # One of the baseline, which has the number of a later tap, is none of the target's.
    baseline = tap("b", 5, None, step=2, status="missing", side="baseline")
    (said,) = unexplained(alone, tap("x", 2), baseline).without_partner("x")
    assert "the target's last tap, out, has no partner" in said
    # Activation checkpointing repeats earlier taps after the last one.
    repeated = tap("x", 9, own={"recompute_status": "recompute"})
    assert unexplained(tap("x", 1), tap("out", 2, None, status="unmatched"), repeated).without_partner("x")


def test_returned_values_are_near_only_if_all_were_compared_and_are() -> None:
    near = ("", 1e-3, PAIR)
    assert returned(near).are_near
    assert not returned().are_near
    assert not returned(near, ("[1]", 0.9, PAIR)).are_near
    assert not ReturnedValues(returned(near).differences, (), ("[1] is lost",)).are_near


def test_written_state_does_not_tell_whether_returned_values_are_whole_numbers() -> None:
    whole = ("", 0.0, ("int64", "int64"))
    assert returned(whole, (written_path("cache"), 0.0, PAIR)).are_whole_numbers
    assert not returned(whole, ("[1]", 0.0, PAIR)).are_whole_numbers
    assert not returned((written_path("ids"), 0.0, ("int64", "int64"))).are_whole_numbers
    assert not returned((written_path("ids"), 0.0, ("int64", "int64")), ("", 0.0, PAIR)).has_whole_numbers


def test_the_farthest_returned_value_leads_and_the_output_is_no_inner_tap() -> None:
    values = returned(("['a']", 0.1, PAIR), ("['b']", 0.5, PAIR))
    (said,) = unexplained(tap("x", 1), returned=values).no_tap_explains()
    assert said.startswith("The returned value ['b'] differs by 0.5 ")
    assert said.endswith("and no tapped value explains it.")
    (said,) = unexplained(tap("x", 1), tap("y", 3, 0.5)).no_tap_explains()
    assert said.endswith("and no tapped value explains it.")


def test_a_named_output_that_no_tap_has_lacks_no_call() -> None:
    assert unexplained(tap("x", 1)).without_partner(None, "other") == []


@pytest.mark.parametrize(
    ("distance", "first", "last"),
    [
        (None, "", ""),
        (1e-6, "", ""),
        (math.nan, "agree is not known: neither a tap", ""),
        (1e-3, "from which they were chosen differ by 0.001, and neither a tap", ""),
        (0.5, "", "from which they were chosen differ by 0.5, and neither a tap"),
    ],
)
def test_values_behind_whole_numbers_are_reported_by_their_distance(
    distance: float | None, first: str, last: str
) -> None:
    found = on_unseen_choices(distance, frame_of(tap("x", 1, dtype="float32")), 5.0)
    assert [len(found[0]), len(found[1])] == [int(bool(first)), int(bool(last))]
    assert first in "".join(found[0])
    assert last in "".join(found[1])
    # One rounding of the taps' dtype is no difference.
    assert on_unseen_choices(1e-3, frame_of(tap("x", 1, dtype="bfloat16")), 5.0) == ([], [])
