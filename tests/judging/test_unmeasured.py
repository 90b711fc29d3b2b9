"""What the runs of a verdict did not measure is said, with names, counts and the remedy."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import pytest
from kit.rows import row

from graftlab.grafting.self_graft import AddedRounding, SelfGraft
from graftlab.judging.unmeasured import judged_until_sketch, not_grafted, not_in_twin, unseen_taps
from graftlab.rows.schema import Row
from graftlab.rows.store import to_frame
from graftlab.transforms.by_layout import SKETCHED
from graftlab.transforms.default import DOES_NOT_FIT


def frame_of(*rows: Row) -> pd.DataFrame:
    return to_frame(list(rows))


def added(*names: str) -> list[AddedRounding]:
    return [AddedRounding(name, {"name": name}, 0, 0.0, 0.0, 1.0, "float32") for name in names]


NONE = frame_of(row("x"))


def test_taps_that_only_the_run_without_grafts_measured_are_named() -> None:
    plain = frame_of(*(row(name, at) for at, name in enumerate("uvwxyz")), row("gone", 9, status="timeout"))
    grafted = frame_of(row("x"), row("y", 2, status="failed", error="too bad"))
    said = unseen_taps(NONE, plain, grafted, [])
    assert said[-1] == "u, v, w, y were measured without grafts, but not with them."
    assert said[0] == "1 tap (y) could not be compared (the transform failed): too bad."
    assert unseen_taps(NONE, frame_of(row("u")), NONE, [])[-1] == "u was measured without grafts, but not with them."
    assert unseen_taps(NONE, NONE, NONE, [SelfGraft()]) == []


def test_data_that_was_not_compared_is_named() -> None:
    compared = frame_of(row("w", 1, status="timeout", own={"kind": "param"}), row("h", 2, status="timeout"))
    assert unseen_taps(compared, NONE, NONE, []) == ["1 tap (w) did not arrive in time."]


def test_taps_without_a_floor_are_named_once_and_counted_over_all_ranks() -> None:
    selves = [SelfGraft(skipped=["a", "b"], not_recorded=2), SelfGraft(skipped=["b", "c", "d", "e"], not_recorded=3)]
    shown, floors = unseen_taps(NONE, NONE, NONE, selves)
    assert shown == "a, b, c, d and 1 more show no comparable tensor on the baseline."
    assert floors.startswith("the floor of 5 taps, which did not fit the ranks' keep_budget; the largest floor")
    (floor,) = unseen_taps(NONE, NONE, NONE, [SelfGraft(not_recorded=1), SelfGraft()])
    assert floor.startswith("the floor of 1 tap, which did not fit")


def test_taps_that_the_request_of_higher_precision_does_not_reach_are_named() -> None:
    selves = [SelfGraft(added=added("a", "b"), exact=added("b")), SelfGraft(added=added("a", "c"), exact=added("c"))]
    assert not_in_twin(selves, True) == [
        "a with exact=, which does not reach them; their floor is the same as without it."
    ]
    assert not_in_twin(selves, False) == []
    assert not_in_twin([SelfGraft(added=added("a"), exact=added("a"))], True) == []
    assert not_in_twin([SelfGraft(added=added("a"))], True) == [
        "exact=, which reaches none of the baseline's taps: the floor is the same as without it."
    ]


def test_a_tap_that_could_not_be_grafted_before_a_named_one_is_a_remark() -> None:
    judged = pd.DataFrame({"step": 0, "order": [3, 5], "ratio": [20.0, 9.5]})
    rows = [row("fine", 1), row("after", 6, status="failed", error="x")]
    rows += [row(f"h.{n}.a", 4, status="failed", error="bad") for n in range(2)]
    assert not_grafted(frame_of(*rows), judged, 10.0) == []
    assert not_grafted(frame_of(*rows), judged, 9.0) == [
        "Not checked: h.*.a, where nothing could be grafted: later taps may have inherited their named error from "
        "there."
    ]
    assert not_grafted(frame_of(*rows[:2]), judged, 9.0) == []


def test_a_tap_of_an_earlier_step_is_before_a_named_one_whatever_its_place() -> None:
    rows = frame_of(row("first", 1, 7), row("a", 9, 7, status="failed", error="bad"), row("named", 2, 8))
    later = pd.DataFrame({"step": [1], "order": [2], "ratio": [20.0]})
    assert not_grafted(rows, later, 9.0) != []
    # A named tap of an earlier step inherits nothing from it.
    assert not_grafted(frame_of(row("named", 2, 7), row("a", 1, 8, status="failed")), later.assign(step=0), 9.0) == []


def test_shapes_that_do_not_fit_are_named_where_nothing_could_be_grafted() -> None:
    judged = pd.DataFrame({"step": [0], "order": [5], "ratio": [20.0]})
    unfit = f"{DOES_NOT_FIT} of shape [2, 3] (rank 0) from [2, 4] (senders 0)"
    rows = [row("a", 1, status="failed", error=unfit), row("b", 2, status="failed", error="bad")]
    start = "a has the shape [2, 4] on the baseline and [2, 3] on the target. Nothing could be grafted there"
    assert not_grafted(frame_of(rows[0]), judged, 9.0)[0].startswith(f"{start}, so later taps may have inherited")
    assert not_grafted(frame_of(*rows), judged, 9.0)[0].startswith(f"{start}, and at b, so later taps may have")
    given = row("input.kv[0]", 1, status="failed", error=unfit, own={"kind": "input"})
    assert not_grafted(frame_of(given), judged, 9.0)[0].startswith("The input input.kv[0] has the shape [2, 4] on the")


def judged(**changes: Any) -> pd.DataFrame:
    usual = {
        "name": ["a", "sketch", "b", "c", "b"],
        "step": [0, 0, 0, 1, 1],
        "order": [1, 2, 3, 1, 2],
        "added": [0.1, 0.2, 0.3, 0.4, 0.5],
        "ratio": [1.0, 11.0, 12.0, 13.0, 14.0],
        "label": ["clean", "over", "over", "over", "over"],
    }
    return pd.DataFrame({**usual, **changes})


def test_what_follows_a_sketch_that_differs_is_unmeasured() -> None:
    grafted = frame_of(row("a", 1), row("sketch", 2, note=f"{SKETCHED} (x)"), row("b", 3))
    given = judged()
    found, said = judged_until_sketch(given, grafted, 10.0)
    assert [*found["label"]] == ["clean", "over", *["unmeasured"] * 3]
    assert [math.isnan(each) for each in found["ratio"]] == [False, False, True, True, True]
    assert [math.isnan(each) for each in found["added"]] == [False, False, True, True, True]
    assert said is not None
    assert said.startswith("the 2 taps after sketch: the recording has only a sketch of sketch, which cannot be")
    # The caller's frame has all of it.
    assert [*given["label"]] == [*judged()["label"]]


@pytest.mark.parametrize("threshold", [11.0, 20.0])
def test_a_sketch_that_agrees_passes_nothing_on(threshold: float) -> None:
    grafted = frame_of(row("sketch", 2, note=SKETCHED))
    found, said = judged_until_sketch(judged(), grafted, threshold)
    assert said is None
    assert found.equals(judged())
    assert judged_until_sketch(judged(), frame_of(row("a", 1)), 10.0)[1] is None


def test_a_sketch_at_the_end_has_nothing_behind_it() -> None:
    grafted = frame_of(row("b", 3, note=SKETCHED))
    assert judged_until_sketch(judged().iloc[:3], grafted, 10.0)[1] is None
    # The first of several counts.
    both = frame_of(row("b", 3, note=SKETCHED), row("sketch", 2, note=SKETCHED))
    _, said = judged_until_sketch(judged(), both, 10.0)
    assert said is not None
    assert "after sketch" in said
