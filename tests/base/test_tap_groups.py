"""Groups: the taps of one computation form one group, and its filter matches exactly those."""

from __future__ import annotations

from typing import Any

import pytest

from graftlab.base.tap_groups import (
    DATA,
    described,
    filter_of,
    group_of,
    in_layers,
    is_data,
    is_output,
    is_value,
    kind_of_group,
    numbers_in,
    place_in_blame,
)
from graftlab.filters.expressions import compile_filter


def test_a_path_part_that_is_a_number_becomes_a_star() -> None:
    assert group_of("layers.3.experts.11.up") == "layers.*.experts.*.up"
    assert numbers_in("layers.3.experts.11.up") == (3, 11)


@pytest.mark.parametrize("name", ["n1", "layers.n2", "q[0]", "2d", "conv2d.x"])
def test_digits_within_a_part_stay(name: str) -> None:
    assert group_of(name) == name


def test_gradient_and_value_are_in_different_groups() -> None:
    assert group_of("layers.3.q", {"kind": "grad"}) == "layers.*.q@grad"
    assert group_of("layers.3.q", {"kind": "value"}) == "layers.*.q"


def test_filter_of_a_group_matches_only_its_taps() -> None:
    text = filter_of([("layers.3.q", None), ("norm", None), ("a+b", None)])
    assert text is not None
    matches = compile_filter(text).matches
    assert all(matches({"name": name}) for name in ("layers.0.q", "layers.17.q", "norm", "a+b"))
    assert not any(matches({"name": name}) for name in ("layers.0.q2", "layersX0Xq", "x.norm", "norm.1", "aab"))
    assert not matches({"name": "norm", "kind": "grad"})


def test_a_filter_of_single_taps_leaves_out_the_other_layers() -> None:
    text = filter_of([("layers.3.q", None)], whole_groups=False)
    assert text is not None
    chosen = compile_filter(text).matches
    assert [chosen({"name": name}) for name in ("layers.3.q", "layers.4.q", "layers.33.q")] == [True, False, False]


def test_filter_of_a_gradient_group_does_not_match_values() -> None:
    text = filter_of([("norm", "grad")])
    assert text is not None
    assert compile_filter(text).matches({"name": "norm", "kind": "grad"})
    assert not compile_filter(text).matches({"name": "norm"})


def test_no_names_give_no_filter() -> None:
    assert filter_of([]) is None


def test_the_output_of_a_model_is_distinguished_from_modules_of_that_name() -> None:
    assert all(map(is_output, ("output", "output[0]", "output.logits", "Encoder.output", "Encoder[1].output[0].x")))
    assert not any(map(is_output, ("layer.0.output", "layer.0.output.dense", "output_mask", "an_output", "outputs.0")))


@pytest.mark.parametrize(
    ("group", "kind", "place", "said"),
    [
        ("layers.*.q", None, 1, "layers.*.q"),
        ("input", None, 1, "input"),
        ("a@b", None, 1, "a@b"),
        ("x@input", "input", 0, "the input x"),
        ("layers.*.q@grad", "grad", 2, "the gradient of layers.*.q"),
        ("q.weight@param_grad", "param_grad", 3, "the gradient of the weight q.weight"),
        ("q.exp_avg@optimizer", "optimizer", 4, "the optimizer's q.exp_avg"),
        ("q.weight@param", "param", 5, "the update of the weight q.weight"),
        ("*@grad", "grad", 2, "the gradient of the model's members"),
        ("*", None, 1, "*"),
    ],
)
def test_a_group_is_named_and_blamed_by_its_kind(group: str, kind: str | None, place: int, said: str) -> None:
    assert (kind_of_group(group), place_in_blame(group), described(group)) == (kind, place, said)


@pytest.mark.parametrize(
    ("tags", "data", "value"),
    [
        ({}, False, True),
        ({"kind": "param"}, True, False),
        ({"kind": "param", "updated": True}, False, False),
        ({"kind": "optimizer"}, True, False),
        ({"kind": "optimizer", "updated": True}, False, False),
        ({"kind": "input"}, False, False),
        ({"kind": "grad"}, False, False),
        ({"kind": "other"}, False, True),
        ({"recompute_status": "recompute"}, False, False),
        ({"recompute_status": "original"}, False, True),
    ],
    ids=str,
)
def test_weights_and_settings_before_a_step_are_data_of_the_computation(
    tags: dict[str, Any], data: bool, value: bool
) -> None:
    assert (is_data(tags), compile_filter(DATA).matches(tags), is_value(tags)) == (data, data, value)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ([], ""),
        (["norm", "head.q1"], ""),
        (["layers.3.q"], " in layer 3"),
        (["layers.3.experts.7.q", "layers.1.experts.0.q", "norm", "layers.2.q"], " in layers 1-3"),
    ],
)
def test_taps_are_in_the_layers_that_their_first_numbers_count(names: list[str], said: str) -> None:
    assert in_layers(names) == said


def test_a_filter_of_single_taps_takes_their_names_literally() -> None:
    text = filter_of([("a+b.3.q", None), ("a+b.3.q", "grad"), ("w", "param"), ("v", "param")], whole_groups=False)
    assert text == (
        r"(fullmatch('a\\+b\\.3\\.q', name) and kind not in ('input', 'grad', 'param_grad', 'optimizer', 'param')) or "
        r"(fullmatch('a\\+b\\.3\\.q', name) and kind == 'grad') or (fullmatch('w|v', name) and kind == 'param')"
    )
