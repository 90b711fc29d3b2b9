"""A plan that would graft a seen tap in both directions is refused."""

from __future__ import annotations

import pytest
from kit.refusals import exactly

from graftlab.errors import GraftOverlapError
from graftlab.plan.overlap import refuse_overlap
from graftlab.plan.plan import GraftPlan

TAPS = [{"name": "h", "step": 0, "side": "baseline", "rank": 0, "layer": layer} for layer in range(8)]


def test_the_taps_are_named() -> None:
    with pytest.raises(
        GraftOverlapError,
        match=exactly(
            "both b2t ('layer < 4') and t2b ('layer == 3') match h layer=3; a tap is grafted one way, so "
            "narrow one of the two filters. The plan in force stays"
        ),
    ):
        refuse_overlap(GraftPlan(b2t="layer < 4", t2b="layer == 3"), TAPS)


def test_of_many_taps_some_are_named() -> None:
    with pytest.raises(
        GraftOverlapError,
        match=exactly(
            "both b2t ('True') and t2b ('True') match h layer=0, h layer=1, h layer=2, h layer=3, h "
            "layer=4 and 3 others; a tap is grafted one way, so narrow one of the two filters. The plan in "
            "force stays"
        ),
    ):
        refuse_overlap(GraftPlan(b2t="True", t2b="True"), TAPS)


@pytest.mark.parametrize(
    ("b2t", "t2b"), [("layer < 4", "layer >= 4"), ("True", None), (None, "True"), ("True", " "), ("step > 2", "True")]
)
def test_plan_without_overlap_is_accepted(b2t: str | None, t2b: str | None) -> None:
    refuse_overlap(GraftPlan(b2t=b2t, t2b=t2b), TAPS)
    refuse_overlap(GraftPlan(b2t="layer < 4", t2b="True"), [])


def test_as_many_taps_as_are_named_are_all_of_them() -> None:
    with pytest.raises(
        GraftOverlapError,
        match=exactly(
            "both b2t ('True') and t2b ('True') match h layer=0, h layer=1, h layer=2, h layer=3, h "
            "layer=4; a tap is grafted one way, so narrow one of the two filters. The plan in force stays"
        ),
    ):
        refuse_overlap(GraftPlan(b2t="True", t2b="True"), TAPS[:5])


def test_two_filters_that_match_every_tap_are_refused_before_one_was_seen() -> None:
    with pytest.raises(
        GraftOverlapError,
        match=exactly(
            "both b2t ('True') and t2b ('1 < 2') match every tap; a tap is grafted one way, so narrow one "
            "of the two filters. The plan in force stays"
        ),
    ):
        refuse_overlap(GraftPlan(b2t="True", t2b="1 < 2"), [])
    # A filter that matches a tap without tags may match no other.
    refuse_overlap(GraftPlan(b2t="layer is None", t2b="True"), [])
    refuse_overlap(GraftPlan(b2t="True", t2b="layer is None"), [])
