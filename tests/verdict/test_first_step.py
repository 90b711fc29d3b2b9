"""The first step in which jobs differ, from rows, and whether it is the optimizer's update."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import pandas as pd
import pytest
import torch
from kit.in_process import a_row

from graftlab.diffs.measure import measure
from graftlab.rows.schema import Row
from graftlab.rows.store import to_frame
from graftlab.verdict.first_step import (
    FirstDifference,
    _steps_without_grafts,
    explained_by_weights,
    first_difference,
)
from graftlab.verdict.returned_values import AccumulatedFloors

Taps = tuple[tuple[str, Mapping[str, object]], ...]
WEIGHT = ("w", {"kind": "param"})
VALUE = ("y", {})
GRADIENT = ("w", {"kind": "param_grad"})
UPDATED = ("w", {"kind": "param", "updated": True})
SETTING = ("optimizer.lr", {"kind": "optimizer"})
ALL = (WEIGHT, VALUE, GRADIENT, SETTING, UPDATED)


def rows(differences: Mapping[int, Mapping[int, float]], taps: Taps) -> Iterator[Row]:
    """Rows of steps, with the relative difference at some places of ``taps`` in each; elsewhere one of rounding."""
    x = torch.linspace(1, 2, 64)
    for step, found in differences.items():
        for place, (name, tags) in enumerate(taps):
            stats = measure(x, x * (1 + found.get(place, 1e-7)))
            known = {field: getattr(stats, field) for field in stats.__dataclass_fields__}
            yield a_row(name=name, step=step, order=place, tags={"name": name, **tags}, dtype="float32", **known)


def found(differences: Mapping[int, Mapping[int, float]], taps: Taps = ALL) -> FirstDifference | None:
    return first_difference(to_frame(list(rows(differences, taps))), AccumulatedFloors({}, {}, 1e-5), 5.0)


def test_an_update_is_found_where_values_and_gradients_of_its_step_agree() -> None:
    first = found({0: {4: 0.01}, 1: {0: 0.01, 1: 0.02, 2: 0.02, 4: 0.02}})
    assert first is not None
    assert (first.step, first.is_update) == (0, True)
    assert first.sentence == (
        "In step 0, the first in which the jobs differ, values and gradients agree, and the results of the optimizer's "
        "update do not, first w (by 0.01): the update itself differs."
    )


def test_a_setting_that_differs_is_named_as_the_updates_reason() -> None:
    first = found({0: {3: 0.5, 4: 0.01}})
    assert first is not None
    assert first.sentence.endswith("first w (by 0.01): the update itself differs (its setting optimizer.lr differs).")
    # By itself it is no difference yet.
    later = found({0: {3: 0.5}, 1: {3: 0.5, 4: 0.01}})
    assert later is not None
    assert later.step == 1


@pytest.mark.parametrize(
    ("taps", "cause"),
    [((WEIGHT, VALUE, GRADIENT), "the update"), ((WEIGHT, VALUE), "the update, or gradients that no tap shows")],
)
def test_weights_that_part_after_a_step_that_agrees_show_the_update(taps: Taps, cause: str) -> None:
    first = found({4: {}, 5: {}, 6: {0: 0.1, 1: 0.2}, 7: {0: 0.2, 1: 0.3}}, taps)
    assert first is not None
    assert first.is_update
    assert first.sentence.startswith("The jobs agree in steps 4-5 (values")
    assert (
        f"and diverge after one update: step 6 begins with a different w (by 0.1). The cause is {cause}."
        in first.sentence
    )


def test_a_value_that_differs_before_the_weights_is_not_an_update() -> None:
    first = found({0: {}, 1: {1: 0.2, 2: 0.3, 4: 0.1}, 2: {0: 0.1, 1: 0.3}})
    assert first is not None
    assert not first.is_update
    assert first.sentence == "The jobs agree in step 0, and differ from step 1 on, first at y (by 0.2)."


def test_the_first_tap_that_differs_is_named_where_the_weights_still_agree() -> None:
    first = found({3: {1: 0.2, 2: 0.3, 4: 0.1}})
    assert first is not None
    assert not first.is_update
    assert first.sentence == (
        "In step 3, the first that was compared, the weights agree, and the first tap that differs is y (by 0.2)."
    )
    assert found({3: {0: 0.2}}, (VALUE, GRADIENT)) is None


def test_nothing_is_said_where_the_first_rows_are_late_or_rounding_grows() -> None:
    assert found({50: {0: 0.1, 1: 0.2}}) is None
    assert found({step: {0: 1e-5 * (step + 1), 1: 1e-5 * (step + 1)} for step in range(12)}) is None
    assert found({0: {}, 1: {}}) is None
    # Which update of the steps between moved the weights apart is not known.
    assert found({0: {}, 2: {0: 0.1, 1: 0.2}}) is None
    assert found({0: {}, 2: {0: 0.1}}) is None
    # Different weights have different updates.
    assert found({3: {0: 0.1, 4: 0.1}}) is None


def test_steps_after_a_graft_prove_nothing() -> None:
    every = list(rows({0: {}, 1: {1: 0.2}, 2: {1: 0.2}}, ALL))
    frame = to_frame([row._replace(status="grafted") if row.step == 1 else row for row in every])
    assert first_difference(frame, AccumulatedFloors({}, {}, 1e-5), 5.0) is None
    one = to_frame([row._replace(status="grafted") if (row.step, row.name) == (1, "y") else row for row in every])
    assert first_difference(one, AccumulatedFloors({}, {}, 1e-5), 5.0) is None


def test_gradients_of_a_part_of_the_batch_are_larger_by_the_number_of_ranks() -> None:
    taps = (WEIGHT, VALUE, ("y", {"kind": "grad"}), GRADIENT)
    frame, wrong = (to_frame(list(rows({0: at}, taps))) for at in ({2: 1.0}, {2: 1.0, 3: 0.5}))
    floors = AccumulatedFloors({}, {}, 1e-5)
    alone = first_difference(frame, floors, 5.0)
    assert alone is not None
    assert alone.sentence.endswith("the first tap that differs is the gradient of y (by 1).")
    assert first_difference(frame, floors, 5.0, ranks=(1, 2)) is None
    assert first_difference(frame, floors, 5.0, ranks=(1, 4)) is not None
    # As many ranks on both sides have equal parts, so that a gradient that is a little larger is wrong.
    larger = to_frame(list(rows({0: {2: 0.001}}, taps)))
    assert first_difference(larger, floors, 5.0, ranks=(2, 2)) is not None
    averaged = first_difference(wrong, floors, 5.0, ranks=(1, 2))
    assert averaged is not None
    assert averaged.sentence.endswith("the first tap that differs is the gradient of the weight w (by 0.5).")


def test_modules_whose_weights_have_diverged_explain_what_they_add() -> None:
    added = {"fc": 0.09, "block": 0.09, "norm": 0.09, "act": 0.09, "output": 0.09, "nan": 0.09, "fc@grad": 0.09}
    lines = [(group, group.partition("@")[0], by, 9e3) for group, by in added.items()]
    frame = pd.DataFrame(lines, columns=["group", "name", "added", "ratio"])
    weights = [
        {"name": name, "rel_l2": rel_l2, "nonfinite_differ": name == "nan.weight"}
        for name, rel_l2 in (
            *(("fc.weight", 1e-3), ("fc.bias", 0.01), ("norm.weight", 1e-3), ("nan.weight", 0.0)),
            # Their modules have no taps.
            *(("block.proj.weight", 0.01), ("scale", 0.01)),
        )
    ]
    named = list(added)
    assert explained_by_weights(frame, named, weights, 5.0) == ["fc", "block", "output", "nan"]
    assert explained_by_weights(frame, ["fc"], weights, 5.0) == ["fc"]
    assert explained_by_weights(frame, named, [], 5.0) == []
    # Below the threshold nothing needs an explanation, and one row that is beyond it is enough.
    assert explained_by_weights(frame.assign(ratio=1.0), named, weights, 5.0) == []
    more = pd.concat([frame, frame[:1].assign(added=0.2)])
    assert "fc" not in explained_by_weights(more, named, weights, 5.0)


def test_of_several_weights_the_first_in_the_order_of_the_rows_is_named() -> None:
    taps = (WEIGHT, ("v", {"kind": "param"}), VALUE, GRADIENT)
    first = found({4: {}, 5: {0: 0.1, 1: 0.4, 2: 0.2}}, taps)
    assert first is not None
    assert "step 5 begins with a different w (by 0.1)" in first.sentence
    # Of rows of equal order, as those of several ranks are, the first; sorting many of them must keep their order.
    shown = [(rank, each) for rank in range(40) for each in rows({0: {1: 0.1 * (rank + 1)}}, (WEIGHT, VALUE))]
    ranks = [each._replace(rank=rank) for rank, each in shown]
    ((step, ordered),) = _steps_without_grafts(to_frame(ranks))
    assert (step, [each["rank"] for each in ordered]) == (0, [*range(40), *range(40)])
    alike = first_difference(to_frame(ranks), AccumulatedFloors({}, {}, 1e-5), 5.0)
    assert alike is not None
    assert "(by 0.1)" in alike.sentence


def test_a_step_with_settings_alone_says_nothing_of_the_next() -> None:
    rows_of_settings = rows({0: {}}, (SETTING,))
    later = rows({1: {4: 0.01}}, ALL)
    frame = to_frame([*rows_of_settings, *later])
    first = first_difference(frame, AccumulatedFloors({}, {}, 1e-5), 5.0)
    assert first is not None
    assert (first.step, first.is_update) == (1, True)


def test_the_optimizers_state_after_an_update_is_a_result_of_it_and_no_setting() -> None:
    state = ("optimizer.momentum", {"kind": "optimizer", "updated": True})
    first = found({0: {3: 0.1}}, (WEIGHT, VALUE, GRADIENT, state))
    assert first is not None
    assert first.is_update
    assert "do not, first optimizer.momentum (by 0.1): the update itself differs." in first.sentence


def test_only_weights_before_their_update_show_that_a_step_began_with_equal_ones() -> None:
    first = found({0: {1: 0.5}}, (WEIGHT, VALUE, UPDATED))
    assert first is not None
    assert "the weights agree, and the first tap that differs is y (by 0.5)." in first.sentence
    assert found({0: {0: 0.5}}, (VALUE, UPDATED)) is None


def test_a_value_that_is_not_finite_on_one_side_is_said_to_be_so() -> None:
    first = found({0: {}, 1: {1: math.nan}})
    assert first is not None
    assert first.sentence.endswith("differ from step 1 on, first at y (not finite on one side).")


def test_a_tap_without_numbers_does_not_hide_that_a_later_one_differs() -> None:
    empty = a_row(name="empty", step=1, order=-1, tags={"name": "empty"}, dtype="float32", numel=0, rel_l2=None)
    frame = to_frame([*rows({0: {}, 1: {1: 0.5}}, ALL), empty])
    first = first_difference(frame, AccumulatedFloors({}, {}, 1e-5), 5.0)
    assert first is not None
    assert first.step == 1
