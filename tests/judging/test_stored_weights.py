"""How a weight in another form is made from the baseline's."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from kit.rows import row

from graftlab.diffs.rounding import roundoff
from graftlab.judging.stored_weights import _form, stored_otherwise
from graftlab.rows.store import to_frame

LIMIT = 2 * roundoff("float32")
WEIGHT = torch.randn(256, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (WEIGHT - 1, "minus 1"),
        (WEIGHT * -1, "times -1"),
        (WEIGHT * 96**-0.5, "times 0.102062"),
        (WEIGHT, None),
        (torch.zeros(256), None),
        (WEIGHT.flip(0), None),
        (WEIGHT.roll(100), "rolled by 100 along dim 0"),
        (WEIGHT.roll(100) * 2, None),
    ],
)
def test_a_form_has_one_factor_and_one_constant(made: torch.Tensor, words: str | None) -> None:
    assert _form(WEIGHT, made, LIMIT) == (words and f"the baseline's {words}")


def test_a_large_number_does_not_hide_a_wrong_one() -> None:
    ours = WEIGHT.clone()
    ours[0] = 1e6
    assert _form(ours, ours * 2, LIMIT) == "the baseline's times 2"
    wrong = ours * 2
    wrong[1] += 0.1
    assert _form(ours, wrong, LIMIT) is None


def test_a_roll_is_found_along_each_dim_and_in_16_bits_but_not_among_equal_rows() -> None:
    ours = WEIGHT.view(4, 8, 8).bfloat16()
    for dim in range(3):
        assert _form(ours, ours.roll(3, dim), 2 * roundoff("bfloat16")) == f"the baseline's rolled by 3 along dim {dim}"
    assert _form(ours, ours * 2, 2 * roundoff("bfloat16")) is None
    ours = torch.eye(4)
    ours[2] = ours[0]
    assert _form(ours, ours.roll(1, 0), LIMIT) is None


def test_a_weight_in_8_bits_is_compared_with_one_of_another_dtype() -> None:
    weight = WEIGHT.view(16, 16)
    codes = weight.to(torch.float8_e4m3fn)
    assert _form(weight, codes, LIMIT) is None
    assert _form(codes.float().roll(5, 0), codes, LIMIT) == "the baseline's rolled by 11 along dim 0"


@pytest.mark.parametrize(
    ("with_own", "is_right"),
    [({}, True), ({"rel_l2": 0.004}, True), *((each, False) for each in ({"rel_l2": 0.006}, {"nonfinite_differ": 1}))],
)
def test_a_weight_is_of_another_form_only_if_its_module_nearly_agrees_with_it(
    with_own: dict[str, Any], is_right: bool
) -> None:
    modules = ["layers.0.up", "layers.1.up"]
    rows = [row(f"{each}.weight", rel_l2=0.5, own={"kind": "param"})._asdict() for each in modules]
    with_baselines = [row(each, rel_l2=0.5) for each in modules]
    runs = Mock(pair=Mock(return_value=(WEIGHT, 2 * WEIGHT)))
    runs.both.side_effect = map(to_frame, [with_baselines, [row(modules[0]), row(modules[1], **with_own)]])
    expected = {each["name"]: "the baseline's times 2" for each in rows} if is_right else {}
    assert stored_otherwise(runs, rows, 5.0, agrees=False) == expected


@pytest.mark.parametrize("beyond", [{"rel_l2": 60.0}, {"nonfinite_differ": 1}])
@pytest.mark.parametrize("wrong", [{"rel_l2": 0.5}, {"nonfinite_differ": 1}])
def test_a_baselines_weight_that_is_far_too_large_does_not_excuse_a_wrong_module(
    beyond: dict[str, Any], wrong: dict[str, Any]
) -> None:
    rows = [row("up.weight", rel_l2=0.5, own={"kind": "param"})._asdict()]
    runs = Mock(pair=Mock(return_value=(WEIGHT, 2 * WEIGHT)))
    runs.both.side_effect = [to_frame([row("up", **each)]) for each in (beyond, wrong)]
    assert stored_otherwise(runs, rows, 5.0, agrees=False) == {}
