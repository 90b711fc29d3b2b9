"""Sketches, which are compared instead of tensors, and the replicas in a layout."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from kit.grafters import GrafterWorld

import graftlab as gl
from graftlab.grafting.sketches import sketch_taps, sketched
from graftlab.layouts import Mesh, parse_layout
from graftlab.layouts.replicas import SKETCH, replicas_of
from graftlab.taps import calls


def numbers(tensor: torch.Tensor) -> np.ndarray:
    return np.frombuffer(sketched(tensor)[0])


@pytest.mark.parametrize("count", [0, 1, SKETCH - 1, SKETCH, SKETCH + 1, 3 * SKETCH])
def test_a_sketch_is_of_one_size_and_linear_in_the_tensor(count: int) -> None:
    x, y = torch.randn(count, dtype=torch.float64), torch.randn(count, dtype=torch.float64)
    assert len(numbers(x)) == SKETCH
    np.testing.assert_allclose(numbers(x + 2 * y), numbers(x) + 2 * numbers(y), atol=1e-12)
    assert np.array_equal(numbers(x), numbers(x.clone()))
    # Each number counts once, as it is or negated.
    assert np.abs(numbers(torch.ones(min(count, SKETCH)))).sum() == min(count, SKETCH)
    for at in range(count):
        one = torch.zeros(count)
        one[at] = 3.0
        found = numbers(one)
        assert (np.abs(found[at % SKETCH]), np.count_nonzero(found)) == (3.0, 1)


def test_random_signs_keep_a_uniform_shift_visible() -> None:
    found = numbers(torch.ones(SKETCH))
    assert set(found.tolist()) == {-1.0, 1.0}


def test_sketch_has_the_norm_and_the_number_of_nonfinite_elements() -> None:
    sketch, norm, nonfinite = sketched(torch.tensor([[3.0, math.nan], [-math.inf, 4.0]]))
    assert (norm, nonfinite) == (5.0, 2)
    assert np.abs(np.frombuffer(sketch)).sum() == 7.0
    assert sketched(torch.tensor([3 + 4j]).conj())[1:] == (5.0, 0)


def test_ranks_that_hold_the_same_are_those_of_one_place_on_the_meshes_that_cut() -> None:
    mesh = Mesh((("dp", 2), ("tp", 2)), (4, 5, 6, 7))
    for text, groups in (
        ("shard(dim=0, mesh='tp')", ((4, 6), (5, 7))),
        ("shard(dim=0, mesh='dp')", ((4, 5), (6, 7))),
        ("shard(dim=0, mesh='dp') | shard(dim=1, mesh='tp')", ((4,), (5,), (6,), (7,))),
        ("shard(dim=0, mesh='tp') | replicate(mesh='dp')", ((4, 6), (5, 7))),
        ("same", ((4, 5, 6, 7),)),
    ):
        layout = parse_layout(text).on(mesh)
        found = replicas_of(layout)
        assert (found.layout, found.groups) == (layout.text, groups), text


def test_sketches_are_in_order_and_taps_without_a_tensor_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    grafter = GrafterWorld(1, 1).baseline.grafter
    for name in ("_grafter", "_handler"):
        monkeypatch.setattr(calls, name, grafter)

    def code() -> None:
        gl.tap("a", torch.ones(2, 3, dtype=torch.bfloat16), layer=3)
        gl.tap("words", "text")
        gl.tap("b", lambda: torch.zeros(4))
        gl.tap("a", torch.ones(2, 3), layer=3)

    shown, skipped = sketch_taps(code)
    assert [(each.name, each.shape, each.dtype) for each in shown] == [
        ("a", (2, 3), "bfloat16"),
        ("b", (4,), "float32"),
        ("a", (2, 3), "float32"),
    ]
    assert skipped == ["words"]
    assert [each.place[3] for each in shown] == [0, 0, 1]
    assert shown[0].tags["layer"] == 3
    assert shown[0].norm == pytest.approx(math.sqrt(6))
