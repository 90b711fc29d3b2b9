"""Results are compared where one side returns together what the other returns in parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graftlab.diffs.results import NamedTensors
from graftlab.plan.pairs import PairRule
from graftlab.verdict.returned_values import ReturnedValues, compare_returned

BOXES, SCORES = torch.randn(2, 6, 4), torch.rand(2, 6, 5)
WHOLE = torch.cat((BOXES, SCORES), -1)
FIRST, SECOND = "part(index=0, of=[4, 5], dim=2)", "part(index=1, of=[4, 5], dim=2)"
OF_TARGET = PairRule("output[0]", "output", FIRST, "target"), PairRule("output[1]", "output", SECOND, "target")
OF_BASELINE = PairRule("output", "output[0]", FIRST), PairRule("output", "output[1]", SECOND)


def far(returned: ReturnedValues) -> dict[str, float]:
    return {each.path: round(each.rel_l2, 3) for each in returned.differences}


def test_each_part_is_compared_with_its_place_in_the_targets_whole() -> None:
    found = compare_returned([(BOXES, SCORES)], [WHOLE], OF_TARGET)
    assert (far(found), found.left, found.lost) == ({"[0]": 0.0, "[1]": 0.0}, (), ())
    wrong = torch.cat((BOXES * 1.01, SCORES), -1)
    assert far(compare_returned([(BOXES, SCORES)], [wrong], OF_TARGET)) == {"[0]": 0.01, "[1]": 0.0}
    # On each rank of a target that returns the whole.
    assert far(compare_returned([(BOXES, SCORES)], [WHOLE, wrong], OF_TARGET)) == {"[0]": 0.01, "[1]": 0.0}


def test_the_targets_parts_are_compared_as_the_baselines_whole() -> None:
    found = compare_returned([WHOLE], [(BOXES, SCORES)], OF_BASELINE)
    assert (far(found), found.left, found.lost) == ({"": 0.0}, (), ())
    found = compare_returned([torch.ones(2, 6, 9)], [(torch.ones(2, 6, 4), torch.full((2, 6, 5), 1.3))], OF_BASELINE)
    assert far(found) == {"": round(0.3 * (5 / 9) ** 0.5, 3)}


def test_fields_of_results_are_those_that_their_taps_are_named_after() -> None:
    pairs = (
        PairRule("Net.output.boxes", "Other.output.all", FIRST, "target"),
        PairRule("Net.output.scores", "Other.output.all", SECOND, "target"),
    )
    found = compare_returned([{"boxes": BOXES, "scores": SCORES}], [{"all": WHOLE}], pairs)
    assert far(found) == {"['boxes']": 0.0, "['scores']": 0.0}


def test_a_part_that_has_no_partner_is_still_said_to_be_missing() -> None:
    found = compare_returned([(BOXES, SCORES)], [WHOLE], OF_TARGET[1:])
    assert (far(found), found.lost) == ({"[1]": 0.0}, ("only the baseline returns the result's [0]",))
    found = compare_returned([WHOLE], [(BOXES, SCORES)], OF_BASELINE[1:])
    assert (far(found), found.lost) == ({}, ("only the baseline returns the result",))


@pytest.mark.parametrize(
    "pairs",
    [
        (),
        (PairRule("output[0]", "head", FIRST, "target"),),
        (PairRule("hidden[0]", "output", FIRST, "target"),),
        (PairRule("output[0]#1", "output", FIRST, "target"),),
        (PairRule("output[0]", "output[call=1]", FIRST, "target"),),
        (PairRule("output[{n}]", "output.{n}", FIRST, "target"),),
        # They do not fit the result.
        (PairRule("output[0]", "output", "part(index=0, of=[5, 4], dim=2)", "target"),),
        (PairRule("output[0]", "output", "part(index=0, of=[4, 4], dim=2)", "target"),),
        (PairRule("output[2]", "output", FIRST, "target"),),
    ],
)
def test_other_pairs_leave_results_as_they_are(pairs: tuple[Any, ...]) -> None:
    found = compare_returned([(BOXES, SCORES)], [WHOLE], pairs)
    assert far(found) == {}
    assert found.lost == ("only the baseline returns the result's [0], the result's [1]",)


def test_a_value_that_both_return_is_compared_as_it_is() -> None:
    both = {"output": WHOLE, "boxes": BOXES}
    pairs = (PairRule("output.boxes", "output.output", FIRST, "target"),)
    assert far(compare_returned([both], [{**both, "boxes": BOXES * 1.01}], pairs)) == {
        "['output']": 0.0,
        "['boxes']": 0.01,
    }


ONES = torch.ones(2, 8)
MEANS, VALUES = torch.randn(8, 3), torch.randn(8, 1)
OF_POLICY = {"[0]": torch.randn(8), "[1]": torch.randn(8), "[2]": VALUES}
OTHERWISE = PairRule("actor", "output[0]"), PairRule("output[2]", "output[1]")


def test_results_with_other_parts_are_compared_as_pairs_say_not_by_place() -> None:
    ours = OF_POLICY["[0]"], OF_POLICY["[1]"], OF_POLICY["[2]"]
    found = compare_returned([ours], [(MEANS, VALUES[:, 0])], OTHERWISE)
    assert (far(found), found.left) == ({"[2]": 0.0}, ())
    assert found.lost == (
        "the target returns the baseline's actor as the returned value [0]",
        "only the baseline returns the result's [0], the result's [1]",
    )
    # A value that is wrong is still compared, in the place that its pair gives.
    assert far(compare_returned([ours], [(MEANS, 1.01 * VALUES[:, 0])], OTHERWISE)) == {"[2]": 0.01}
    unpaired = compare_returned([ours], [(MEANS, VALUES[:, 0])], [PairRule("actor", "output[0]")])
    assert [*far(unpaired)] == ["[1]"]
    # So are those of one shape, as where a port returns a mean and a variance without a sample.
    alike = PairRule("output[1]", "output[0]"), PairRule("output[2]", "output[1]")
    found = compare_returned([(ONES, 2 * ONES, 3 * ONES)], [(2 * ONES, 3 * ONES)], alike)
    assert far(found) == {"[2]": 0.0}
    # What the target returns elsewhere is not listed as missing.
    assert found.lost == (
        "the target returns the baseline's output[1] as the returned value [0]",
        "only the baseline returns the result's [0]",
    )
    # A value without a partner differs, though another has moved out of its place.
    wrong = compare_returned([(ONES, 2 * ONES, 3 * ONES)], [(2 * ONES, 5 * ONES)], alike[:1])
    assert far(wrong) == {"[1]": 1.5}


def test_a_target_that_lacks_the_last_operation_differs_whatever_else_it_returns() -> None:
    logits, keys = torch.randn(2, 8), [torch.randn(2, 3), torch.randn(2, 3)]
    for name, tap in (("[0]", "output[0]"), ("['logits']", "output.logits"), (".logits", "output.logits")):
        ours = NamedTensors({name: logits.tanh(), "['past'][0]": keys[0], "['past'][1]": keys[1]})
        theirs = NamedTensors({name: logits, "['cache']": torch.stack(keys)})
        assert [*far(compare_returned([ours], [theirs], [PairRule("head", tap)]))] == [name]


def test_values_of_one_name_are_compared_whatever_else_the_target_equals() -> None:
    ours = NamedTensors({"['loss']": ONES, "['mean']": 2 * ONES, "['last']": ONES})
    theirs = NamedTensors({"['loss']": 2 * ONES, "['last']": ONES})
    assert far(compare_returned([ours], [theirs], [PairRule("output.mean", "output.loss")])) == {
        "['loss']": 1.0,
        "['last']": 0.0,
    }


def test_what_a_model_inside_a_function_returns_is_not_the_functions_result() -> None:
    ours, theirs = (ONES, ONES, ONES), (torch.ones(2, 3), ONES)
    found = compare_returned([ours], [theirs], [PairRule("layer", "Encoder.output[0]")])
    assert found.lost == ("only the baseline returns the result's [2]",)


def test_results_of_one_form_whose_parts_have_changed_places_differ() -> None:
    swapped = PairRule("output[0]", "output[1]"), PairRule("output[1]", "output[0]")
    ours = torch.ones(8), torch.full((8,), 2.0)
    assert far(compare_returned([ours], [ours[::-1]], swapped)) == {"[0]": 1.0, "[1]": 0.5}
    # So do those of different shapes.
    mixed = compare_returned([(MEANS, VALUES)], [(VALUES, MEANS)], swapped)
    assert (far(mixed), len(mixed.left)) == ({}, 2)
    # Of one value alone it is the whole result that is another.
    hidden = compare_returned([torch.ones(8, 3)], [torch.ones(8, 2)], [PairRule("hidden", "output")])
    assert hidden.left == ("the result has the shape [8, 3] on the baseline and [8, 2] on the target",)
