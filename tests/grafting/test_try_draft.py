"""The results of trying a draft, in this process; test_trial.py checks that a trial has no side effects."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import pytest
import torch
from kit.values import assert_values

from graftlab.grafting.kept import KeptPair
from graftlab.grafting.self_graft import RoundedResults
from graftlab.grafting.tensors import SentExtras
from graftlab.grafting.trial import PRINTED_LIMIT, Trial, try_draft
from graftlab.plan.plan import GraftPlan
from graftlab.transforms import GraftTransformInput, TransformSpec

LONGEST = PRINTED_LIMIT


def kept_pair(direction: Any = "b2t", value: float | None = 10.0, **tags: Any) -> KeptPair:
    """A tap that received 10, where the transform in force made ``value`` of it, and its own 20."""
    made = None if value is None else torch.full((2, 3), value)
    given = GraftTransformInput(
        {"name": "x", "layer": 4, **tags}, [torch.full((2, 3), 10.0)], [None], torch.full((2, 3), 20.0), direction
    )
    return KeptPair(given, made)


def source(*lines: str) -> str:
    return "\n".join(["def transform(graft_input):", *(f"    {line}" for line in lines)])


def spec(text: str, where: str | None = None) -> TransformSpec:
    return dataclasses.replace(TransformSpec("source", text), where=where)


def tried(*lines: str, pair: KeptPair | None = None, **options: Any) -> Trial:
    return try_draft(spec(source(*lines)), pair or kept_pair(), "cpu", **options)


def test_good_draft_reports_shapes_and_the_difference_before_and_after() -> None:
    trial = tried("print('seen', graft_input.tags['layer'])", "return 2 * graft_input.received_list[0]")
    assert (trial.ok, trial.error, trial.error_line, trial.note, trial.cast) == (True, None, None, None, None)
    assert (trial.received, trial.target, trial.result) == (["float32[2, 3]"], "float32[2, 3]", "float32[2, 3]")
    assert trial.tags == {"name": "x", "layer": 4}
    assert trial.before is not None
    assert trial.after is not None
    assert (trial.before.max_abs, trial.after.max_abs) == (10.0, 0.0)
    assert (trial.before.mean_baseline, trial.before.mean_target) == (10.0, 20.0)
    assert (trial.after.mean_baseline, trial.after.mean_target) == (20.0, 20.0)
    assert trial.seconds is not None
    assert 0 <= trial.seconds < 1000
    assert trial.printed == "seen 4\n"


def test_a_draft_that_goes_the_other_way_is_measured_in_the_same_order() -> None:
    trial = tried("return graft_input.received_list[0] + 1", pair=kept_pair("t2b"))
    assert trial.before is not None
    assert trial.after is not None
    assert (trial.before.mean_baseline, trial.before.mean_target) == (20.0, 10.0)
    assert (trial.after.mean_baseline, trial.after.mean_target) == (20.0, 11.0)


def test_trial_has_no_difference_before_if_the_plans_transform_failed() -> None:
    trial = tried("return graft_input.received_list[0]", pair=kept_pair(value=None))
    assert (trial.ok, trial.before, trial.target) == (True, None, "float32[2, 3]")
    assert trial.after is not None


def test_conversion_is_noted_in_the_trial() -> None:
    trial = tried("return graft_input.received_list[0].double()")
    assert (trial.ok, trial.result, trial.cast) == (True, "float64[2, 3]", "float64 -> float32")


def test_without_a_pair_drafts_are_loaded_and_the_first_error_is_reported() -> None:
    good, bad = spec(source("raise ValueError('not called')")), spec("x = 1")
    trial = try_draft(good, None, "cpu")
    assert (trial.ok, trial.received, trial.target, trial.after, trial.seconds) == (True, [], None, None, None)
    assert try_draft((good, good), None, "cpu").ok
    assert not try_draft((good, bad, good), None, "cpu").ok


def test_trial_notes_where_the_draft_would_not_be_applied() -> None:
    doubles = source("return 2 * graft_input.received_list[0]")
    pair = kept_pair()
    grafts, compares = GraftPlan(b2t="layer == 4"), GraftPlan()
    assert try_draft(spec(doubles), pair, "cpu", grafts).note is None
    assert try_draft(spec(doubles), pair, "cpu").note is None
    trial = try_draft(spec(doubles), pair, "cpu", compares)
    assert trial.ok
    assert str(trial.note).startswith("the plan does not graft this tap, so it would not be applied here;")
    for plan in (grafts, compares):
        assert try_draft(spec(doubles, "layer == 4"), pair, "cpu", plan).note is None
        trial = try_draft(spec(doubles, "layer == 5"), pair, "cpu", plan)
        assert trial.after is not None
        assert trial.note == "its filter does not match this tap, so it would not be applied here"


def test_of_several_drafts_the_first_for_the_tap_is_tried() -> None:
    fails, doubles = source("return 1 / 0"), source("return 2 * graft_input.received_list[0]")
    several = (spec(fails, "layer == 5"), spec(doubles, "layer == 4"), spec(fails, "layer == 4"))
    trial = try_draft(several, kept_pair(), "cpu")
    assert trial.after is not None
    assert (trial.after.mean_baseline, trial.note) == (20.0, None)
    others = (spec(fails, "layer == 5"), spec(fails, "layer == 6"))
    trial = try_draft(others, kept_pair(), "cpu")
    described = "; ".join(each.described for each in others)
    assert trial.error == f"none of these transforms matches this tap: {described}"
    assert (trial.target, trial.after, trial.ok) == ("float32[2, 3]", None, False)


@pytest.mark.parametrize(
    ("lines", "line", "message"),
    [
        (("x = 1", "return x +"), 3, "does not compile, line 3: invalid syntax"),
        (("x = 1", "", "return graft_input.received_list[7]"), 4, "IndexError: list index out of range"),
        (("def inner():", "    return 1 / 0", "return inner()"), 3, "ZeroDivisionError"),
        (("x = 1", "return eval(compile('1 / 0', '~elsewhere', 'eval'))"), 3, "ZeroDivisionError"),
        (("x = 1", "return eval(compile('1 / 0', ' elsewhere', 'eval'))"), 3, "ZeroDivisionError"),
        (("return torch.zeros(2)",), 2, "returned shape [2]"),
        (("return 3",), 2, "returned int; it must return a tensor of shape"),
        (("raise SystemExit(3)",), 2, "the draft called exit(3)\n"),
    ],
)
def test_error_is_reported_with_its_line(lines: tuple[str, ...], line: int, message: str) -> None:
    trial = tried(*lines)
    assert (trial.ok, trial.error_line, trial.after) == (False, line, None)
    assert message in str(trial.error)
    assert trial.target == "float32[2, 3]"


def test_error_while_loading_the_draft_is_reported_with_its_line() -> None:
    trial = try_draft(spec("import torch\nnumber = 1 / 0\n" + source("return 1")), kept_pair(), "cpu")
    assert trial.error_line == 2
    assert "number = 1 / 0" in str(trial.error)
    # A module's own lines are not the draft's.
    trial = try_draft(TransformSpec("path", "no_such_module.f"), kept_pair(), "cpu")
    assert trial.error_line is None
    assert "module 'no_such_module' cannot be imported" in str(trial.error)


@pytest.mark.parametrize("more", [-1, 0, 1, 2**20])
def test_output_is_cut_at_the_limit_and_the_rest_counted(more: int) -> None:
    stdout = sys.stdout
    trial = tried(
        "import sys",
        f"sys.stderr.write('é' * {LONGEST - 5}); print('x' * {4 + more})",
        "return graft_input.received_list[0]",
    )
    assert trial.ok, trial.error
    whole = "é" * (LONGEST - 5) + "x" * (4 + more) + "\n"
    cut = f"\n... and {more} more characters" if more > 0 else ""
    assert trial.printed == whole[:LONGEST] + cut
    assert sys.stdout is stdout


def test_long_error_is_cut_in_its_middle() -> None:
    def error_of(length: str) -> str:
        # The line itself is in the error, so its own length must not change.
        return str(tried(f"raise ValueError('begin' + 'x' * {length:>5} + 'end')").error)

    around = len(error_of("100")) - 100
    exactly = LONGEST - around
    assert len(error_of(f"{exactly}")) == LONGEST
    for length, dropped in ((f"{exactly + 1}", 1), ("10**6", around + 10**6 - LONGEST)):
        begin, said, end = error_of(length).split("\n... ")[0], *error_of(length).split("\n... ")[1].split(" ...\n")
        assert (len(begin), len(end)) == (LONGEST // 2, LONGEST // 2)
        assert said == f"{dropped} more characters"
        assert end.endswith("xend")
        assert "raise ValueError" in begin


def test_values_of_the_room_cannot_be_changed() -> None:
    assert_values(Trial, KeptPair, SentExtras, RoundedResults)
