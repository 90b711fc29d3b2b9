"""What quantised weights explain of the difference of their modules' outputs."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from graftlab.rows.schema import Row
from graftlab.rows.store import to_frame
from graftlab.verdict.model_data import differing_data, weights_to_lend
from graftlab.verdict.quantised_modules import QuantisedModules, quantised_modules

FP8 = "bfloat16 -> float8_e4m3fn"


def row(name: str, rel_l2: float | None = None, *, kind: str | None = None, factor: float = 1.0, **more: Any) -> Row:
    """Values with a standard deviation of 1, and a target that is ``factor`` times them, beside noise."""
    given: dict[str, Any] = {
        **{
            "dtype": "bfloat16",
            "shape": [4096],
            "numel": 4096,
            "rel_l2": rel_l2,
            "max_abs": rel_l2,
            "mean_abs": rel_l2,
        },
        **{"mean_baseline": 0.0, "std_baseline": 1.0, "mean_target": 0.0, "std_target": factor, "cosine": 1.0},
        **{"min_baseline": -3.0, "max_baseline": 3.0, "nonfinite_baseline": 0, "nonfinite_differ": 0},
        **more,
    }
    tags = {"name": name, **({} if kind is None else {"kind": kind})}
    side = given.pop("side", "target")
    return Row(0, 0, 1, name, tags, "b2t", side, 0, given.pop("status", "compared"), [0], **given)


def weight(layer: int, rel_l2: float | None = 0.026, **more: Any) -> Row:
    given = {"cast": FP8, "aligned_by": "dequantised", "dtype": "float8_e4m3fn", **more}
    return row(f"layers.{layer}.up.weight", rel_l2, kind="param", **given)


def found(weights: list[Row], outputs: list[Row]) -> QuantisedModules:
    return quantised_modules(to_frame(weights), to_frame(outputs), 5.0)


def test_outputs_up_to_twice_their_median_are_not_named() -> None:
    outputs = [row(f"layers.{n}.up", 0.11 if n == 2 else 0.036, status="grafted") for n in range(4)]
    modules = found([weight(n) for n in range(4)], [*outputs, row("layers.0.norm", 0.5, status="grafted")])
    assert {name: floor.rel_l2 for name, floor in modules.floors.items()} == {
        f"layers.{n}.up": pytest.approx(2 * 0.036 / 5) for n in range(4)
    }
    assert modules.text[1].startswith("From equal inputs, 3 of 4 outputs of such modules differ by 0.036, most at ")
    apart = [row(f"layers.{n}.up", size, status="grafted") for n, size in enumerate((0.03, 0.04, 0.036, 0.032))]
    said = found([weight(n) for n in range(4)], apart).text[1]
    assert "4 of 4 outputs of such modules differ by 0.03 to 0.04, most at layers.1.up." in said


def test_outputs_that_are_equal_are_said_to_be() -> None:
    outputs = [row(f"layers.{n}.up", 0.2 * (n > 3), status="grafted") for n in range(6)]
    assert found([weight(n, 0.0) for n in range(6)], outputs).text[1] == (
        "From equal inputs, 4 of 6 outputs of such modules are equal."
    )


@pytest.mark.parametrize(
    ("given", "most"),
    [
        # The weight's own distance, and as much again for the activations.
        ({"rel_l2": 0.02}, 4 * (0.02**2 + (0.42 / 16) ** 2) ** 0.5),
        ({"rel_l2": 0.5}, 4 * (1 / 16**2 + (0.42 / 16) ** 2) ** 0.5),
        ({"rel_l2": 4e3, "aligned_by": None}, 4 * 2**0.5 * 0.42 / 16),
        ({"rel_l2": 0.005, "cast": "float32 -> int8"}, 4 * (0.005**2 + 0.02**2) ** 0.5),
    ],
)
def test_alike_mistakes_in_all_outputs_are_not_taken_for_quantising(given: dict[str, Any], most: float) -> None:
    outputs = [row(f"layers.{n}.up", 0.9, status="grafted") for n in range(4)]
    floors = found([weight(n, **given) for n in range(4)], outputs).floors
    assert floors["layers.0.up"].rel_l2 == pytest.approx(most / 5)


def test_an_output_that_differs_by_a_factor_is_named_in_words_and_allowed_nothing() -> None:
    outputs = [row(f"layers.{n}.up", 0.04, factor=1.02 if n == 1 else 1.005, status="grafted") for n in range(3)]
    modules = found([weight(n) for n in range(3)], outputs)
    assert list(modules.floors) == ["layers.0.up", "layers.2.up"]
    frame = pd.DataFrame({"name": ["layers.0.up", "layers.1.up"], "group": "layers.*.up", "added": [0.1, 0.0]})
    assert modules.factors(frame, ()) == [
        "From equal inputs, the target's layers.1.up is 1.02 times the baseline's, which quantising does not explain."
    ]
    assert modules.factors(frame, ["layers.*.up"]) == []
    assert modules.outputs(frame, ()) == ["layers.*.up"]
    assert modules.outputs(frame, ["layers.*.up"]) == modules.outputs(frame.assign(added=0.0), ()) == []
    less = [row(f"layers.{n}.up", 0.04, factor=0.98 if n == 1 else 0.995, status="grafted") for n in range(3)]
    assert found([weight(n) for n in range(3)], less).scaled == {
        "layers.1.up": "the target's layers.1.up is 0.98 times the baseline's"
    }
    # In few numbers, a factor may be chance.
    few = [row("layers.0.up", 0.04, factor=1.02, numel=16, status="grafted")]
    assert found([weight(0)], few).scaled == {}


@pytest.mark.parametrize(
    ("rel_l2", "factor", "is_named"),
    [
        # Rounding to 4 bits moves a weight by a tenth, in a direction.
        (0.1, 1.03, False),
        (0.12, 1.07, True),
        # Beside the factor, this one has 8 bits.
        (0.0316, 1.03, True),
    ],
)
def test_integers_of_fewer_bits_may_differ_by_a_larger_factor(rel_l2: float, factor: float, is_named: bool) -> None:
    codes = weight(0, rel_l2, factor=factor, cast="bfloat16 -> int8")
    modules = found([codes], [row("layers.0.up", rel_l2, factor=factor, status="grafted")])
    assert (list(modules.scaled) == ["layers.0.up"]) is is_named
    assert bool(differing_data(to_frame([codes]), 5.0)) is is_named


def test_nothing_is_quantised_where_both_sides_or_neither_have_8_bits() -> None:
    outputs = [row("layers.0.up", 0.04, status="grafted")]
    for cast in (None, "float32 -> bfloat16", "float8_e5m2 -> float8_e4m3fn"):
        assert found([weight(0, cast=cast)], outputs) == QuantisedModules()
    assert found([row("layers.0.up.weight", 0.1, cast=FP8)], outputs) == QuantisedModules()


def test_equal_outputs_of_equal_weights_need_no_words() -> None:
    modules = found([weight(0, 0.0)], [row("layers.0.up", 0.0, status="grafted")])
    assert (modules.floors, modules.text) == ({}, ())
    assert "layers.0.up.weight_scale" in modules.scales


def test_of_several_quantised_weights_the_farthest_is_stated() -> None:
    modules = found([weight(0, 0.02), weight(1, 0.026), weight(2, 0.01)], [])
    assert modules.text[0].endswith("they differ from the baseline's by at most 0.026 (rel_l2).")


def test_integers_beside_zeros_have_no_factor() -> None:
    codes = weight(0, 0.1, cast="bfloat16 -> int8", std_baseline=0.0, cosine=None)
    assert list(found([codes], [row("layers.0.up", 0.1, status="grafted")]).scaled) == []


def test_codes_without_a_scale_are_not_compared_and_said_to_be_so() -> None:
    weights = [weight(0, 4e3, aligned_by=None), weight(1)]
    modules = found(weights, [])
    assert (
        "; multiplied by their scales, they differ from the baseline's by at most 0.026 (rel_l2); " in modules.text[0]
    )
    assert modules.text[0].endswith("the values of 1 are not compared, because no scale was found.")
    assert "layers.0.up.scale" not in modules.scales
    assert differing_data(to_frame(weights), 5.0) == []


def test_a_wrong_scale_is_a_difference_of_weights_that_cannot_be_lent() -> None:
    weights = to_frame([weight(0, 0.36), weight(1, 0.033, factor=1.02), weight(2), weight(3, 0.03, nonfinite_differ=1)])
    (sentence,) = differing_data(weights, 5.0)
    assert sentence.startswith("The weights already differ: layers.*.up.weight in layers 0-1, 3 (")
    assert weights_to_lend(weights, 5.0) == []


# ---- weights that are packed ----------------------------------------------------------------------------------------


def lone(layer: int, leaf: str, side: str, dtype: str, *, status: str = "missing") -> Row:
    given: dict[str, Any] = {"side": side, "dtype": dtype, "status": status, "shape": [64, 64]}
    return row(f"layers.{layer}.up.{leaf}", kind="param", **given)


@pytest.mark.parametrize(
    ("rows", "is_packed"),
    [
        # As GPTQ names them, and as codes of other shapes or of a dtype that cannot be compared.
        ([("weight", "baseline", "bfloat16"), ("qweight", "target", "int32"), ("scales", "target", "float16")], True),
        ([("weight", "target", "uint8", "failed"), ("weight_scale", "target", "float32")], True),
        ([("weight", "target", "uint8", "failed")], True),
        ([("weight", "baseline", "bfloat16"), ("weight_scale", "target", "float32")], True),
        # Not of the other side, no scale, no floating-point weight, or another tensor without a partner.
        ([("weight", "baseline", "bfloat16"), ("weight_scale", "baseline", "float32")], False),
        ([("weight", "baseline", "bfloat16"), ("lora_A", "target", "float32")], False),
        ([("weight", "baseline", "int32"), ("weight_scale", "target", "float32")], False),
        ([("bias", "baseline", "bfloat16"), ("weight_scale", "target", "float32")], False),
        ([("weight", "target", "bfloat16", "failed"), ("weight_scale", "target", "float32")], False),
    ],
)
def test_a_module_with_codes_beside_a_full_weight_is_quantised(rows: list[tuple[str, ...]], is_packed: bool) -> None:
    weights = [
        lone(n, leaf, side, dtype, status=status[0] if status else "unmatched" if side == "baseline" else "missing")
        for n in range(3)
        for leaf, side, dtype, *status in rows
    ]
    outputs = [row(f"layers.{n}.up", 0.5 if n == 1 else 0.1, factor=1.04, status="grafted") for n in range(3)]
    modules = found(weights, outputs)
    assert bool(modules.floors) is is_packed
    if is_packed:
        assert modules.text[0] == (
            "The target's weights are quantised: layers.*.up.weight in layers 0-2; the values are not compared, "
            "because they are packed."
        )
        assert modules.text[1].startswith("From equal inputs, 2 of 3 outputs of such modules differ by 0.1,")
        # Methods for 4 bits may have a direction.
        assert modules.scaled == {}


def test_a_norms_weight_under_another_name_is_not_quantised() -> None:
    weights = [
        row(f"norm.{leaf}", kind="param", side=side, dtype="bfloat16", status=status)
        for leaf, side, status in (("weight", "baseline", "unmatched"), ("scale", "target", "missing"))
    ]
    assert found(weights, [row("norm", 0.1, status="grafted")]) == QuantisedModules()


def test_a_conversion_of_devices_is_none_of_dtypes() -> None:
    outputs = [row("layers.0.up", 0.04, status="grafted")]
    assert found([weight(0, cast="cuda:0 -> cpu")], outputs) == QuantisedModules()
    assert found([weight(0, cast=f"{FP8}, cuda:0 -> cpu")], outputs).floors


def test_a_weight_without_a_finite_pair_ends_no_verdict() -> None:
    outputs = [row("layers.0.up", 0.04, status="grafted")]
    for differ in (0, 5):
        weights = [weight(0, None, nonfinite_differ=differ), weight(1)]
        assert found(weights, outputs).text[0].endswith("by at most 0.026 (rel_l2).")
        assert bool(differing_data(to_frame(weights), 5.0)) is bool(differ)
    assert found([weight(0, None)], outputs).text[0].endswith("layers.*.up.weight in layer 0.")


def test_weights_that_each_side_quantises_elsewhere_are_of_either_side() -> None:
    weights = [weight(0), weight(1, cast="float8_e4m3fn -> bfloat16")]
    text = found(weights, [row("layers.0.up", 0.04, status="grafted")]).text[0]
    assert text.startswith("Weights of either side are quantised to float8_e4m3fn: ")
    assert "they differ from the other side's by" in text


def test_weights_are_those_of_the_first_step_however_many_follow() -> None:
    later = row("layers.0.up", 0.04)._replace(step=1)
    outputs = [row("layers.0.up", 0.036, status="grafted")]
    assert [*found([weight(0), later], outputs).floors] == ["layers.0.up"]


def test_the_weights_whose_values_are_not_compared_are_counted() -> None:
    codes = [weight(n, aligned_by="dequantised" if n < 2 else None) for n in range(5)]
    said, *_ = found(codes, []).text
    assert said.endswith(
        "multiplied by their scales, they differ from the baseline's by at most 0.026 (rel_l2); the values of 3 are "
        "not compared, because no scale was found."
    )
