"""Sides that are in different steps: found by the values that one shows later than the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch
from kit.in_process import a_row

from graftlab.diffs.measure import measure
from graftlab.rows.schema import Row
from graftlab.rows.store import to_frame
from graftlab.verdict.misaligned_steps import _CallSequence, _equal, find_misaligned_steps, may_be_misaligned

Value = Callable[[int], torch.Tensor]


def noise(step: int) -> torch.Tensor:
    return torch.randn(64, generator=torch.Generator().manual_seed(step))


def token(step: int) -> torch.Tensor:
    return torch.tensor([7 * step % 11, 3 * step % 5])


def rows(taps: Sequence[tuple[str, Value, Value]], steps: int = 6, calls: int = 1, **values: object) -> Iterator[Row]:
    """The rows of taps whose values on each side are functions of the number of the call."""
    for step in range(steps):
        for place, (name, ours, theirs) in enumerate(taps):
            for occurrence in range(calls):
                number = step * calls + occurrence
                x, y = ours(number), theirs(number)
                stats = measure(x, y)
                known = {field: getattr(stats, field) for field in stats.__dataclass_fields__}
                dtype = str(x.dtype).removeprefix("torch.")
                order = place * calls + occurrence
                tags = {"name": name, "step": step, "side": "target", "rank": 0}
                place_in = {"name": name, "tags": tags, "step": step, "order": order, "occurrence": occurrence}
                yield a_row(dtype=dtype, **{**place_in, **known, **values})


def ahead(function: Value, by: int, scale: float = 1.0) -> Value:
    return lambda number: function(number + by) * scale


@pytest.mark.parametrize(("by", "side"), [(2, "target"), (-1, "baseline")])
def test_the_side_that_is_ahead_is_found_with_its_steps(by: int, side: str) -> None:
    wrong = ("layers.0", lambda n: noise(n).sin(), lambda n: noise(n + by).cos())
    # A mask that is the same in all steps agrees at any shift, and so also without one.
    mask = ("mask", lambda n: noise(0), lambda n: noise(0))
    found = find_misaligned_steps(to_frame(list(rows([mask, ("x", noise, ahead(noise, by, 1 + 1e-7)), wrong]))))
    assert found is not None
    assert (found.ahead, found.by, found.unit, found.tap) == (side, abs(by), "step", "x")
    assert f"The {side} is ahead by {abs(by)} step" in found.sentence
    assert f"in {6 - abs(by)} pairs of steps" in found.sentence
    assert f"of gl.step() on the {side} before its first step" in found.sentence


def test_calls_within_a_step_are_counted_where_they_do_not_make_whole_steps() -> None:
    of_three = find_misaligned_steps(to_frame(list(rows([("x", noise, ahead(noise, 3))], 4, 3))))
    assert of_three is not None
    assert (of_three.by, of_three.unit) == (1, "step")
    of_a_part = find_misaligned_steps(to_frame(list(rows([("x", noise, ahead(noise, 2))], 4, 3))))
    assert of_a_part is not None
    assert (of_a_part.by, of_a_part.unit, of_a_part.pairs) == (2, "call", 10)
    of_one = find_misaligned_steps(to_frame(list(rows([("x", noise, ahead(noise, 1))], 1, 6))))
    assert of_one is not None
    assert (of_one.by, of_one.unit) == (1, "call")
    assert "the baseline makes 1 call first that the target does not" in of_one.sentence


@pytest.mark.parametrize(
    "taps",
    [
        [("x", noise, noise), ("late", noise, ahead(noise, 1))],
        [("x", noise, lambda n: noise(n).sin())],
        [("constant", lambda n: noise(0), lambda n: noise(0) * 2)],
        [("positions", lambda n: torch.tensor([n]), lambda n: torch.tensor([n + 1]))],
    ],
    ids=["an input agrees", "another function", "nothing changes", "a counter alone is off by one"],
)
def test_other_differences_are_not_a_shift(taps: list[tuple[str, Value, Value]]) -> None:
    assert find_misaligned_steps(to_frame(list(rows(taps)))) is None


def test_the_calls_of_a_tap_may_round_differently() -> None:
    measured = list(rows([("x", noise, ahead(noise, 2, 1 + 2e-3))]))
    assert find_misaligned_steps(to_frame(measured)) is None
    # Only the last ones are computed in bfloat16.
    coarse = [row._replace(dtype="bfloat16") if row.step > 3 else row for row in measured]
    found = find_misaligned_steps(to_frame(coarse))
    assert found is not None
    assert (found.ahead, found.by) == ("target", 2)


def test_steps_that_repeat_show_no_shift() -> None:
    def three(number: int) -> torch.Tensor:
        return noise(number % 3)

    def wrong_once(number: int) -> torch.Tensor:
        return three(number) * (2 if number == 1 else 1)

    assert find_misaligned_steps(to_frame(list(rows([("y", three, wrong_once)], 2, 3)))) is None


def test_a_value_that_comes_twice_does_not_hide_the_shift_by_which_it_returns() -> None:
    def again(number: int) -> torch.Tensor:
        return noise(0 if number == 2 else number)

    found = find_misaligned_steps(to_frame(list(rows([("x", again, ahead(again, 2))]))))
    assert found is not None
    assert (found.ahead, found.by) == ("target", 2)


def test_tokens_and_positions_together_show_a_shift() -> None:
    positions = ("positions", lambda n: torch.tensor([n]), lambda n: torch.tensor([n + 1]))
    found = find_misaligned_steps(to_frame(list(rows([("ids", token, ahead(token, 1)), positions]))))
    assert found is not None
    assert (found.ahead, found.by, found.tap, found.taps) == ("target", 1, "ids", 2)
    # Whole numbers do not round: tokens that differ by one differ.
    large = [("ids", lambda n: token(n) + 10**6, lambda n: token(n + 1) + 10**6 + 1), positions]
    other = find_misaligned_steps(to_frame(list(rows(large))))
    assert other is None or other.tap != "ids"


def test_only_values_that_are_far_apart_are_worth_further_steps() -> None:
    assert may_be_misaligned(to_frame(list(rows([("x", noise, ahead(noise, 2))], 1))))
    assert not may_be_misaligned(to_frame(list(rows([("x", noise, ahead(noise, 0, 1.01))], 1))))
    weights = list(rows([("w", noise, ahead(noise, 2))], 1, tags={"name": "w", "kind": "param"}))
    assert not may_be_misaligned(to_frame(weights))


@pytest.mark.parametrize(("steps", "calls"), [((0, 0, 1), None), ((0, 0, 0), None), ((0, 0, 1, 1), 2), ((0, 1, 2), 1)])
def test_steps_have_a_number_of_calls_only_if_all_have_the_same(steps: tuple[int, ...], calls: int | None) -> None:
    values = np.zeros((len(steps), 4))
    assert _CallSequence("x", values, values, steps, 0.0).calls_in_a_step == calls


def test_small_values_of_one_call_are_not_equal_beside_large_ones_of_another() -> None:
    one = np.array([[1.0, 2.0], [1e6, 2e6]])
    assert _equal(one, one * [[1.01], [1.0]], 1e-5) == [False, True]
    assert _equal(one, one + np.array([[0.0, 0.0], [1e-3, 0.0]]), 1e-5) == [True, True]


def test_gradients_and_rows_without_statistics_do_not_show_steps() -> None:
    later = [("x", noise, ahead(noise, 2))]
    assert find_misaligned_steps(to_frame(list(rows(later)))) is not None
    gradients = rows(later, tags={"name": "x", "kind": "grad"})
    assert find_misaligned_steps(to_frame(list(gradients))) is None
    assert find_misaligned_steps(to_frame(list(rows(later, mean_target=None)))) is None
