"""What a model was given is distinguished from what it computed."""

from __future__ import annotations

from typing import Any

import pandas as pd

from graftlab.rows.schema import Row
from graftlab.rows.store import to_frame
from graftlab.verdict.model_data import (
    computed_between_calls,
    data_of_run,
    differing_data,
    input_names,
    inputs_of_later_calls,
    misplaced_weights,
    nearly_equal_weights,
    unequal_weights,
    weights_to_lend,
)
from graftlab.verdict.optimizer_settings import SettingsDifference


def row(order: int, name: str, dtype: str, rel_l2: float = 0.0, status: str = "compared", **tags: Any) -> Row:
    made = Row(0, 0, order, name, {"name": name, **tags}, "b2t", "target", 0, status, [0], [2], dtype)
    return made._replace(numel=2, rel_l2=rel_l2, max_abs=rel_l2, nonfinite_differ=0)


def test_only_whole_numbers_before_all_computation_are_inputs() -> None:
    frame = to_frame(
        [
            row(1, "embed.weight", "float32", kind="param"),
            row(2, "tokens", "int64", 0.5),
            row(3, "mask", "bool"),
            row(4, "alone", "int64", status="missing"),
            row(5, "hidden", "float32", 0.5),
            row(6, "scale", "float32", kind="input"),
            row(7, "chosen", "int64", 0.5),
        ]
    )
    assert input_names(frame) == ["tokens", "mask", "scale"]
    (said,) = differing_data(frame, threshold=5.0)
    assert said.startswith("The inputs already differ: tokens (rel_l2 0.5)")


def test_one_sided_whole_numbers_are_not_inputs() -> None:
    """A cast to integers is computed, and may be the fault."""
    cast = row(1, "hidden", "int32", 0.5)._replace(cast="float32 -> int32")
    assert input_names(to_frame([cast, row(2, "chosen", "int64", 0.5)])) == []


def test_whole_numbers_alone_are_computed_and_no_inputs() -> None:
    """A function that returns a mask, or buckets of positions, has no input for it."""
    assert input_names(to_frame([row(1, "positions", "int64", kind="input"), row(2, "mask", "bool", 0.5)])) == [
        "positions"
    ]


def weight(dtype: str, rel_l2: float, max_abs: float = 0.0, cast: str | None = None) -> pd.DataFrame:
    made = row(1, "up.weight", dtype, rel_l2, kind="param")
    return to_frame([made._replace(max_abs=max_abs, min_baseline=-1.0, max_baseline=0.5, cast=cast)])


def test_a_weight_of_low_precision_may_be_rounded_once_and_not_more() -> None:
    one = 2.0**-8
    once = weight("bfloat16", 0.4 * one, 1.9 * one)
    assert differing_data(once, 5.0) == []
    (said,) = unequal_weights(once, ())
    assert said == "Weights that are not bit-equal, though within rounding: up.weight (rel_l2 0.0016)."
    for stale in (weight("bfloat16", 1.2 * one, 1.9 * one), weight("bfloat16", 0.1 * one, 0.05)):
        (said,) = differing_data(stale, 5.0)
        assert said.startswith("The weights already differ: up.weight")
        assert unequal_weights(stale, ("up.weight",)) == []
    # A conversion rounds, and so does merging in float32.
    assert unequal_weights(weight("bfloat16", 1.2 * one, cast="float32 -> bfloat16"), ()) == []
    assert differing_data(weight("bfloat16", 1.2 * one, cast="float32 -> bfloat16"), 5.0) == []
    assert differing_data(weight("float32", 2.0**-23), 5.0) == []


def test_later_inputs_differ_only_if_they_do_so_with_grafts() -> None:
    def step(number: int, rel_l2: float, status: str = "grafted") -> Row:
        return row(1, "x", "float32", rel_l2, status, kind="input")._replace(step=7 + number)

    compared = to_frame([step(0, 0.0, "compared"), step(1, 0.0, "compared"), step(2, 0.5, "compared")])
    given = to_frame([step(0, 0.0), step(1, 0.0), step(2, 0.5)])
    (said,) = differing_data(compared, 5.0, given)
    assert said.startswith("The inputs already differ: x in step 2 (rel_l2 0.5)")
    # A decode's tokens follow from what was computed before: with the baseline's values they are the same.
    assert differing_data(compared, 5.0, to_frame([step(0, 0.0), step(1, 0.0), step(2, 0.0)])) == []
    # From the first step on, it need not be said in which.
    (said,) = differing_data(to_frame([step(0, 0.5, "compared")]), 5.0, to_frame([step(0, 0.5), step(1, 0.5)]))
    assert said.startswith("The inputs already differ: x (rel_l2 0.5)")


def test_settings_that_differ_from_a_later_step_on_are_named() -> None:
    rows = [
        row(1, "optimizer.lr", "float64", kind="optimizer"),
        row(2, "0.weight", "float32", kind="param"),
        row(3, "0.weight", "float32", kind="param", updated=True),
        row(4, "optimizer.lr", "float64", 0.8, kind="optimizer")._replace(step=2),
        # Later weights were computed.
        row(5, "0.weight", "float32", 0.5, kind="param")._replace(step=2),
        row(6, "0.weight.exp_avg", "float32", 0.5, kind="optimizer", updated=True)._replace(step=2),
    ]
    (said,) = differing_data(to_frame(rows), threshold=5.0)
    assert said.startswith("The optimizer's settings already differ: optimizer.lr in step 2 (rel_l2 0.8).")
    known = SettingsDifference((), {"optimizer.lr": "0.1 and 0.02"})
    (said,) = differing_data(to_frame(rows), threshold=5.0, settings=known)
    assert said.startswith("The optimizer's settings already differ: optimizer.lr (0.1 and 0.02).")
    # One that differs only for weights which one side's optimizer lacks is no other difference.
    lacking = SettingsDifference(("The target's optimizer does not have 1 of 2 weights: b.",), {"optimizer.lr": ""})
    assert differing_data(to_frame(rows), threshold=5.0, settings=lacking) == [*lacking.lacking]


def test_a_weight_that_is_not_finite_on_one_side_differs_whatever_its_distance() -> None:
    lost = row(1, "w", "float32", kind="param")._replace(nonfinite_differ=1)
    (said,) = differing_data(to_frame([lost, row(2, "h", "float32")]), threshold=5.0)
    assert "w" in said
    assert differing_data(to_frame([lost._replace(nonfinite_differ=0), row(2, "h", "float32")]), threshold=5.0) == []


def test_the_most_different_weight_of_each_group_is_lent_unless_weights_change() -> None:
    weights = [
        row(1, "layers.0.up.weight", "float32", 0.1, kind="param"),
        row(2, "layers.1.up.weight", "float32", 0.3, kind="param"),
        row(3, "layers.2.up.weight", "float32", 0.2, kind="param"),
        row(4, "norm.weight", "float32", 0.0, kind="param"),
        row(5, "head.weight", "float32", 0.4, kind="param"),
        row(6, "head.weight", "float32", 0.0, kind="param")._replace(nonfinite_differ=1),
    ]
    chosen = [(each["name"], each["rel_l2"]) for each in weights_to_lend(to_frame(weights), 5.0)]
    assert chosen == [("layers.1.up.weight", 0.3), ("head.weight", 0.0)]
    later = row(7, "layers.0.up.weight", "float32", 0.1, kind="param")._replace(step=1)
    for changing in (
        row(7, "up.weight", "float32", 0.1, kind="param_grad"),
        row(7, "lr", "float32", 0.0, kind="optimizer"),
        row(7, "up.weight", "float32", 0.0, kind="param", updated=True),
        later._replace(tags={**later.tags, "step": 1}),
    ):
        assert weights_to_lend(to_frame([*weights, changing]), 5.0) == []


def loop(second: float, first: float = 0.0) -> pd.DataFrame:
    """Two calls of a model in one step, whose inputs differ this much."""
    return to_frame(
        [
            row(1, "input.x", "float32", first, kind="input"),
            row(2, "out", "float32", 0.5),
            row(3, "input.x", "float32", second, kind="input"),
            row(4, "out", "float32", 0.5),
        ]
    )


def test_inputs_of_a_later_call_that_inherit_a_difference_do_not_already_differ() -> None:
    assert differing_data(loop(0.5), 5.0, loop(0.0)) == []
    assert computed_between_calls(loop(0.5), loop(0.0), 5.0) == set()
    # Without a run that grafts, nothing shows what is inherited.
    (said,) = differing_data(loop(0.5), 5.0)
    assert said.startswith("The inputs already differ: input.x (rel_l2 0.5)")


def test_inputs_that_code_between_calls_computes_differently_are_computed() -> None:
    assert computed_between_calls(loop(0.5), loop(0.2), 5.0) == {"input.x"}
    # What differs at first was given differently.
    assert computed_between_calls(loop(0.5, 0.3), loop(0.2, 0.3), 5.0) == set()
    (said,) = differing_data(loop(0.5, 0.3), 5.0, loop(0.2, 0.3))
    assert said.startswith("The inputs already differ: input.x (rel_l2 0.3)")


def test_a_weight_that_differs_on_some_ranks_alone_is_reported_with_them() -> None:
    def on(rank: int, name: str, rel_l2: float) -> Row:
        return row(1, name, "float32", rel_l2, kind="param")._replace(rank=rank)

    # Of layer 1, rank 0 has nothing: so none agrees.
    rows = [on(0, "layers.0.n", 0.5), on(1, "layers.0.n", 0.0), on(2, "layers.0.n", 0.5), on(1, "layers.1.up.4", 0.5)]
    (said,) = differing_data(to_frame([*rows, on(0, "layers.0.up.4", 0.0)]), 5.0)
    assert said.startswith(
        "The weights already differ: layers.*.n in layer 0 on ranks 0, 2 alone (rel_l2 0.5), layers.*.up.* in layer 1 "
        "(rel_l2 0.5)."
    )


def test_a_weight_that_is_another_of_the_baseline_is_reported_with_its_place() -> None:
    def with_statistics(name: str, baseline: float, target: float, std: float = 1.0) -> Row:
        made = row(1, name, "float32", 0.0 if baseline == target else 1.0, kind="param")
        made = made._replace(mean_baseline=baseline, std_baseline=std, min_baseline=-2.0, max_baseline=2.0)
        # Sums of the same numbers in another order.
        return made._replace(mean_target=target * (1 + 1e-13), std_target=std, min_target=-2.0, max_target=2.0)

    swapped = [with_statistics("gate", 0.1, 0.2), with_statistics("up", 0.2, 0.1)]
    said = differing_data(to_frame([*swapped, with_statistics("down", 0.3, 0.3)]), 5.0)
    assert said[1:] == [
        "By their statistics, weights are in the wrong place: the target's gate is the baseline's up and the target's "
        "up is the baseline's gate."
    ]
    # Changed, or of one value, as fresh norms are.
    for other in ([with_statistics("gate", 0.1, 0.5)], [with_statistics("n1", 1.0, 0.0, 0.0), row(1, "n2", "float32")]):
        assert len(differing_data(to_frame([*other, with_statistics("up", 0.2, 0.2)]), 5.0)) == 1
    # Transposed, beside another weight of the same numbers.
    transposed = [with_statistics("index.0", 0.1, 0.1), with_statistics("index.1", 0.1, 0.1)._replace(rel_l2=0.8)]
    assert len(differing_data(to_frame(transposed), 5.0)) == 1
    constant = [with_statistics("n1", 1.0, 0.0, 0.0), with_statistics("bias", 0.0, 0.0, 0.0)]
    assert len(differing_data(to_frame(constant), 5.0)) == 1


def test_whole_numbers_that_a_model_returns_first_are_no_inputs() -> None:
    rows = [row(1, "tokens", "int64", 0.5), row(2, "output[0]", "int64", 0.5), row(3, "output[1]", "float32")]
    assert input_names(to_frame(rows)) == ["tokens"]
    rows = [row(1, "output_mask", "bool", 0.5), row(2, "output", "int64", 0.5), row(3, "output.scores", "float32")]
    assert input_names(to_frame(rows)) == ["output_mask"]


def test_only_a_computed_value_makes_later_inputs_those_of_another_call() -> None:
    rows = [
        row(1, "w", "float32", kind="param"),
        row(2, "a", "float32", kind="input"),
        row(3, "b", "float32", kind="input"),
        row(4, "lost", "float32", status="missing"),
        row(5, "mask", "bool"),
        row(6, "c", "float32", kind="input"),
        row(7, "y", "float32"),
        row(8, "d", "float32", kind="input"),
    ]
    assert inputs_of_later_calls(to_frame(rows)).tolist() == [False] * 7 + [True]


def test_the_data_of_a_run_are_those_before_weights_were_grafted() -> None:
    def step(number: int, status: str, *names: str) -> list[Row]:
        rows = row(1, "w", "float32", kind="param"), row(2, "x", "float32", kind="input"), row(3, "y", "float32")
        return [each._replace(step=number, status=status) for each in rows if each.name in names]

    compared, grafted = step(4, "compared", "w", "x", "y"), step(6, "grafted", "w", "x", "y")
    run = to_frame([*step(3, "compared", "w", "y"), *compared, *grafted, *step(7, "grafted", "w")])
    found = data_of_run(run, to_frame(compared), to_frame(grafted))
    assert found.grafted_from == 6
    assert found.rows[["name", "status", "step"]].values.tolist() == [
        ["w", "compared", 0],
        ["x", "compared", 0],
        ["y", "compared", 0],
    ]
    alone = data_of_run(to_frame([*compared, *step(6, "grafted", "x", "y")]), to_frame(compared), to_frame(grafted[1:]))
    assert (alone.grafted_from, alone.rows["name"].tolist()) == (None, ["w", "x", "y"])
    # Weights that are grafted after the judged steps do not count.
    later = to_frame([*step(3, "compared", "w"), *compared, *step(6, "grafted", "x", "y"), *step(7, "grafted", "w")])
    assert data_of_run(later, to_frame(compared), to_frame(grafted[1:])).grafted_from is None
    without = data_of_run(run, to_frame(compared)[:0], to_frame(grafted))
    assert without.rows["status"].tolist() == ["compared", "grafted", "grafted"]


def test_settings_with_each_others_values_are_no_misplaced_weights() -> None:
    def of(name: str, kind: str, ours: float, theirs: float) -> Row:
        values = {"mean_baseline": ours, "std_baseline": 1.0, "min_baseline": 0.0, "max_baseline": ours}
        values |= {"mean_target": theirs, "std_target": 1.0, "min_target": 0.0, "max_target": theirs}
        return row(1, name, "float32", 0.5, kind=kind)._replace(**values)

    swapped = to_frame([of("a", "param", 1.0, 2.0), of("b", "param", 2.0, 1.0)])
    assert misplaced_weights(swapped, 5.0) == [
        "By their statistics, weights are in the wrong place: the target's a is the baseline's b and the target's b is "
        "the baseline's a."
    ]
    # Of many the first are listed, and counted.
    many = [of(f"n{place}", "param", place + 1.0, 10.0 - place) for place in range(10)]
    assert misplaced_weights(to_frame(many), 5.0)[0].endswith("n2 is the baseline's n7 and 7 more.")
    assert misplaced_weights(to_frame([of("lr", "optimizer", 1.0, 2.0), of("eps", "optimizer", 2.0, 1.0)]), 5.0) == []


def test_a_table_that_differs_by_little_more_than_rounding_is_nearly_equal() -> None:
    said = nearly_equal_weights(weight("float32", 1.2e-6, 2e-5), 5.0)
    assert said is not None
    assert said.startswith("The weights already differ: up.weight (rel_l2 1.2e-06). That is little more than rounding")
    assert nearly_equal_weights(weight("float32", 1e-7), 5.0) is None
    # One number of many, a larger distance, a dtype of 16 bits, another dtype, a NaN.
    for differing in (
        weight("float32", 1.2e-6, 2e-4),
        weight("float32", 2e-5),
        weight("bfloat16", 0.5, 0.5),
        weight("float32", 8e-6, cast="float64 -> float32"),
        weight("float32", 1.2e-6).assign(nonfinite_differ=1),
        pd.concat([weight("float32", 1.2e-6), weight("float32", 0.1).assign(name="down.weight")]),
    ):
        assert nearly_equal_weights(differing, 5.0) is None


def test_the_largest_number_of_a_weight_sets_the_limit_for_each() -> None:
    # It is the least one here.
    assert nearly_equal_weights(weight("float32", 5e-6, 9e-5), 5.0) is not None
    assert nearly_equal_weights(weight("float32", 5e-6, 1.1e-4), 5.0) is None
