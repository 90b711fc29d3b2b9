"""Recorded taps: how far apart their values are, and what they hold of them."""

from __future__ import annotations

import math
import weakref

import numpy as np
import pytest
import torch

from graftlab.base.quantisation import SCALE
from graftlab.matching.digests import Digest
from graftlab.matching.recorded_taps import RecordedTap, SketchRecorder, relative_l2
from graftlab.taps.ambient_tags import ambient


@pytest.mark.parametrize(
    ("expected", "found", "distance"),
    [
        ([3.0, 4.0], [3.0, 4.0], 0.0),
        ([3.0, 4.0], [3.0, 3.0], 0.2),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([0.0, 0.0], [0.0, 1.0], math.inf),
        # Of these only the finite pairs count, as long as the others are in the same places.
        ([3.0, 4.0, math.inf], [3.0, 3.0, math.nan], 0.2),
        ([math.nan, math.inf], [math.inf, math.nan], 0.0),
        ([3.0, 4.0, math.nan], [3.0, 4.0, 0.0], math.inf),
        ([3.0, math.nan, 4.0], [math.nan, 3.0, 4.0], math.inf),
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_distance_is_of_finite_pairs_and_infinite_where_only_one_number_is(
    expected: list[float], found: list[float], distance: float, dtype: type[np.generic]
) -> None:
    assert relative_l2(np.array(expected, dtype), np.array(found, dtype)) == pytest.approx(distance)


def test_a_tap_holds_the_values_of_a_parameter_and_no_graph() -> None:
    parameter = torch.nn.Parameter(torch.arange(4.0))
    for shown in (parameter, parameter * 2):
        tap = RecordedTap.of("h", shown)
        assert tap.value is not None
        assert (tap.value.requires_grad, tap.value.tolist()) == (False, shown.tolist())
        assert tap.elements is not None


def test_a_tap_that_forgets_holds_nothing_beside_its_values() -> None:
    # In float32, so that its elements and its numbers in float64 are copies.
    tap = RecordedTap.of("h", torch.arange(100.0, dtype=torch.bfloat16))
    assert tap.elements is not None
    assert tap.flat is not None
    held = [weakref.ref(each) for each in (tap.elements, tap.flat, tap.lookup)]
    tap.forget()
    assert [each() for each in held] == [None] * 3
    assert tap.value is not None


def test_what_is_computed_from_a_taps_values_counts_as_memory() -> None:
    tap = RecordedTap.of("h", torch.arange(100.0))
    assert tap.in_memory == 400
    # Numbers in float64 and, sorted, once more; then their places.
    assert (tap.elements is not None, tap.flat is not None) == (True, True)
    assert tap.in_memory == 400 + 400 + 800
    assert len(tap.lookup.ordered) == 100
    assert tap.in_memory == 400 + 400 + 800 + 800
    assert len(tap.lookup.places) == 100
    assert tap.in_memory == 400 + 400 + 800 + 800 + 800
    assert RecordedTap.of("h", torch.arange(100.0), keep=False).in_memory == 0


def test_calls_of_one_name_are_counted_and_a_taps_tags_replace_those_around_it() -> None:
    recorder = SketchRecorder()
    around = ambient.set((("layer", 1), ("step", 2)))
    try:
        recorder.tap("a", torch.ones(2), None, {"layer": 3})
    finally:
        ambient.reset(around)
    for _ in range(3):
        recorder.tap("b", torch.ones(2), None, {})
    assert recorder.taps[0].tags == {"layer": 3, "step": 2}
    assert [tap.name for tap in recorder.taps[1:]] == ["b", "b#1", "b#2"]
    assert [tap.order for tap in recorder.taps] == [0, 1, 2, 3]
    assert (recorder.count, recorder.newest.name) == (4, "b#2")


def test_weights_beyond_what_is_copied_stay_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graftlab.matching.recorded_taps.COPIED_WEIGHTS", 32)
    recorder = SketchRecorder(budget=0)
    weights = [torch.arange(8.0) + n for n in range(3)]
    for n, weight in enumerate(weights):
        recorder.tap(f"w.{n}", weight, None, {"kind": "param"})
    values = [tap.value for tap in recorder.taps if tap.value is not None]
    assert [value.tolist() for value in values] == [weight.tolist() for weight in weights]
    known = [Digest.of(weight.clone()).whole for weight in weights]
    assert [tap.digest and tap.digest.whole for tap in recorder.taps] == known
    shared = [value.data_ptr() == weight.data_ptr() for value, weight in zip(values, weights, strict=True)]
    assert shared == [False, True, True]
    # As FSDP does, which torch refuses if numpy has seen the memory.
    for weight in weights:
        weight.untyped_storage().resize_(0)


def test_numbers_that_a_tap_computes_from_codes_are_part_of_the_budget() -> None:
    codes, scale = torch.tensor([-4, 0, 2, 100], dtype=torch.int8), {SCALE: torch.tensor(0.5)}
    for budget, kept in ((16, [-2.0, 0.0, 1.0, 50.0]), (15, None)):
        recorder = SketchRecorder(budget=budget)
        recorder.tap("w", codes, scale, {"kind": "param"})
        recorder.tap("v", codes, scale, {"kind": "param"})
        assert [tap.value.tolist() if tap.value is not None else None for tap in recorder.taps] == [kept, None]
        assert {tuple(tap.sketch.extremes) for tap in recorder.taps} == {(50.0, -2.0, 1.0, 0.0)}
