"""Groups: the taps of one computation form one group, and its filter matches exactly those."""

from __future__ import annotations

import pytest

from graftlab.base.tap_groups import filter_of, group_of, is_output, numbers_in
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
