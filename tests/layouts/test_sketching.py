"""Sketches show how far two tensors are apart, and are refused where they cannot."""

from __future__ import annotations

import pytest
import torch
from kit.refusals import exactly

import graftlab as gl
from graftlab.layouts import Layout, RankLayout, SignedSums, parse_layout
from graftlab.layouts.sketching import signed_sums
from graftlab.transforms import compare, run_transform

SHAPE = (40, 50)


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    first, second = (SignedSums(256, SHAPE).get(each, None).double() for each in (one, other))  # type: ignore[arg-type]
    return float((first - second).norm() / first.norm())


@pytest.mark.parametrize("where", ["everywhere", "one row", "one value"])
def test_two_sketches_are_as_far_apart_as_their_tensors(where: str) -> None:
    generator = torch.Generator().manual_seed(0)
    one = torch.randn(SHAPE, generator=generator)
    other = one.clone()
    place = {"everywhere": (slice(None),), "one row": (3,), "one value": (3, 4)}[where]
    other[place] += 0.05 * torch.randn(other[place].shape, generator=generator)
    exact = float((one - other).norm() / one.norm())
    assert 0.7 * exact < distance(one, other) < 1.4 * exact
    assert distance(one, one + 0.0) == 0.0
    # Rounding stays rounding.
    assert distance(one, (one.double() * 3 / 3 * (1 + 6e-8)).float()) < 1e-6


def test_the_signs_of_a_sketch_are_one_and_minus_one_and_the_same_each_time() -> None:
    signs = signed_sums(torch.ones(64), 64)
    assert sorted(set(signs.tolist())) == [-1.0, 1.0]
    assert torch.equal(signed_sums(torch.arange(64.0), 8), (signs * torch.arange(64.0)).reshape(8, 8).sum(0))


def test_a_sketch_is_compared_where_the_plan_grafts_and_never_grafted() -> None:
    value = torch.randn(SHAPE)
    sketch = SignedSums(64, SHAPE)
    layout = Layout((sketch,))
    given = gl.GraftTransformInput(
        {"name": "x"}, [layout.local(value)], [None], target=value * 1.5, received_layouts=[RankLayout(layout)]
    )
    outcome = run_transform(None, given)
    assert outcome.compare_only
    assert torch.equal(outcome.value, given.target)
    assert compare(outcome, given).rel_l2 == pytest.approx(0.5)
    assert parse_layout(sketch.text) == layout


def test_a_tensor_of_another_shape_is_not_compared_with_a_sketch() -> None:
    layout = Layout((SignedSums(64, SHAPE),))
    sent = layout.local(torch.ones(SHAPE))
    layouts: list[RankLayout | None] = [RankLayout(layout)]
    given = gl.GraftTransformInput({"name": "x"}, [sent], [None], target=torch.ones(64), received_layouts=layouts)
    with pytest.raises(
        gl.TransformError,
        match=exactly("the recording has a sketch of a tensor of shape [40, 50], and this one is [64]"),
    ):
        run_transform(None, given)
