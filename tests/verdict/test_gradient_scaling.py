"""Gradients that differ by the number of ranks alone, and even out, are no fault; anything else about them is."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import pytest
import torch

from graftlab.diffs.measure import measure
from graftlab.rows.schema import STATISTICS, Row, statistics_of
from graftlab.verdict.added import added_frame, named_groups
from graftlab.verdict.gradient_scaling import GradientScaling, _times, gradient_scaling, is_scaled, left_over

NAMED = ["out@grad", "up.weight@param_grad"]
BASELINES = torch.randn(64, generator=torch.Generator().manual_seed(0))


def rows_of(grad: list[float], weights: list[float]) -> pd.DataFrame:
    """Two ranks on which the gradients of ``out`` and of a weight are this many times the baseline's; values differ."""
    made = []
    for name, tags, factors in (
        ("act", {}, [1.3, 1.3]),
        ("out", {"kind": "grad"}, grad),
        ("up.weight", {"kind": "param_grad"}, weights),
    ):
        for rank, factor in enumerate(factors):
            statistics = measure(BASELINES, BASELINES * factor)
            row = Row(
                run=1,
                step=0,
                order=len(made) // 2,
                name=name,
                tags=tags,
                direction="b2t",
                side="target",
                rank=rank,
                status="grafted",
                senders=[0],
                dtype="float32",
            )
            held = dict(zip(STATISTICS, statistics_of(statistics), strict=True))
            made.append({**row._asdict(), **held})
    return pd.DataFrame(made)


def evens_out(
    grad: list[float], weights: list[float], baseline: int, target: int, ungrafted: tuple[float, float] = (1.0, 1.0)
) -> GradientScaling:
    """``ungrafted`` is how many times the baseline's the weight's gradients are where nothing is grafted."""
    grafted = rows_of(grad, weights)
    frame = added_frame(grafted, {}, compared=rows_of(grad, list(ungrafted)), constant=1e-5)
    return gradient_scaling(frame, grafted, named_groups(frame, 5.0), baseline, target, 5.0)


@pytest.mark.parametrize(
    ("grad", "weights", "sizes"),
    [([2.0, 2.0], [0.5, 0.5], (1, 2)), ([2.004, 1.996], [0.501, 0.5], (1, 2)), ([0.5, 0.5], [2.0, 2.0], (4, 2))],
)
def test_the_factor_of_the_numbers_of_ranks_cancels_out(
    grad: list[float], weights: list[float], sizes: tuple[int, int]
) -> None:
    assert list(evens_out(grad, weights, *sizes).groups) == NAMED


def test_a_factor_between_equally_many_ranks_is_one_of_the_loss() -> None:
    near = evens_out([1.004] * 2, [1 / 1.004] * 2, 2, 2)
    assert list(near.groups) == NAMED
    assert near.text.startswith("The target's gradients of values are 1.004 times the baseline's; computed from the")


@pytest.mark.parametrize(
    ("grad", "weights", "sizes"),
    [
        # No side averages; averaged twice; another scale; on one rank alone.
        ([2.0, 2.0], [1.0, 1.0], (1, 2)),
        ([2.0, 2.0], [0.25, 0.25], (1, 2)),
        ([3.0, 3.0], [0.5, 0.5], (1, 2)),
        ([2.0, 1.0], [0.5, 0.5], (1, 2)),
        ([2.0, 2.0], [0.5, 1.0], (1, 2)),
        ([1.0, 1.0], [0.5, 0.5], (1, 2)),
        # As far from the baseline's, and not by that factor.
        ([0.0, 0.0], [0.5, 0.5], (1, 2)),
        ([2.0, 2.0], [1.5, 1.5], (1, 2)),
        ([-2.0, -2.0], [0.5, 0.5], (1, 2)),
        ([2.0, 2.0], [float("nan"), 0.5], (1, 2)),
    ],
)
def test_any_other_difference_stays_named(grad: list[float], weights: list[float], sizes: tuple[int, int]) -> None:
    assert evens_out(grad, weights, *sizes).groups == ()


def test_a_gradient_off_by_more_than_rounding_beside_the_factor_stays_named() -> None:
    # With a cosine of 0.9995.
    off = BASELINES + 0.03 * torch.randn(64, generator=torch.Generator().manual_seed(1))
    row = statistics_of(measure(BASELINES, 2.0 * off))
    held: dict[str, Any] = dict(zip(STATISTICS, row, strict=True))
    assert held["cosine"] > 0.999
    assert not is_scaled(held, 2.0, 1e-5)
    assert is_scaled(held, 2.0, 0.1)


def test_a_large_factor_of_a_scaler_is_recognised() -> None:
    # Of some numbers the rest without the factor cannot be computed to seven digits from their norms.
    for seed in range(8):
        drawn = torch.randn(4096, generator=torch.Generator().manual_seed(seed))
        for factor in (2.0**16, 2.0**-16):
            held: dict[str, Any] = dict(zip(STATISTICS, statistics_of(measure(drawn, drawn * factor)), strict=True))
            assert is_scaled(held, factor, 3e-7)


def test_the_factor_of_the_ranks_holds_whatever_is_inherited_and_beside_other_errors() -> None:
    assert list(evens_out([2.0, 2.0], [0.5, 0.5], 1, 2, (1.5, 1.5)).groups) == NAMED
    grafted = rows_of([2.0, 2.0], [0.5, 0.5])
    other = rows_of([3.0, 3.0], [0.5, 0.5]).replace({"name": {"out": "other"}}).query("name == 'other'")
    grafted = pd.concat([grafted, other], ignore_index=True)
    frame = added_frame(grafted, {}, compared=grafted, constant=1e-5)
    evened = gradient_scaling(frame, grafted, named_groups(frame, 5.0), 1, 2, 5.0)
    assert list(evened.groups) == NAMED
    assert "Ranks that share a batch and average" in evened.text


def test_weights_gradients_must_have_the_factor_in_each_step() -> None:
    steps = [rows_of([2.0, 2.0], [factor, factor]).assign(step=step) for step, factor in enumerate((0.5, 1.0))]
    grafted = pd.concat(steps, ignore_index=True)
    frame = added_frame(grafted, {}, compared=grafted, constant=1e-5)
    assert gradient_scaling(frame, grafted, named_groups(frame, 5.0), 1, 2, 5.0).groups == ()


def test_a_gradient_of_zeros_has_any_factor_and_shows_none() -> None:
    zeros = dict.fromkeys(("mean_baseline", "std_baseline", "mean_target", "std_target"), 0.0)
    row = {"nonfinite_differ": 0, "rel_l2": 0.0, "cosine": None, **zeros}
    assert is_scaled(row, 2.0, 1e-5)
    assert math.isnan(_times(row))
    row |= {"rel_l2": math.inf, "std_target": 1.0}
    assert not is_scaled(row, 2.0, 1e-5)
    assert math.isnan(_times(row))


def test_a_scaled_loss_cancels_out_if_the_weights_gradients_agree() -> None:
    evened = evens_out([1024.0, 1024.0], [1 / 1024, 1 / 1024], 2, 2)
    assert list(evened.groups) == NAMED
    assert "values are 1024 times the baseline's; computed from the baseline's" in evened.text
    # One per cent is within what the factors may be off, and not within rounding.
    for others in ((1.005, 1.005), (1.0, 1.005), (float("nan"), 1.0)):
        assert evens_out([1024.0, 1024.0], [1.005 / 1024, 1.005 / 1024], 2, 2, others).groups == ()


def test_the_sentence_states_both_factors() -> None:
    said = evens_out([0.5, 0.5], [2.0, 2.0], 4, 2).text
    assert (
        "2 ranks, gradients are 1/2 times the baseline's; computed from the baseline's, the gradients of weights are 2"
        in said
    )
    assert said.endswith("not named (out@grad, up.weight@param_grad).")
    # A factor of the loss is a number above one, or one over such a number.
    even = evens_out([1.5, 1.5], [1 / 1.5, 1 / 1.5], 2, 2).text
    assert " 1.5 " in even
    assert "1/0." not in even


def weights_rows(
    factors: dict[str, float], wrong: dict[str, float], one_element: str = "", baselines: torch.Tensor = BASELINES
) -> pd.DataFrame:
    """A weight's gradient each, that many times the baseline's; those of ``wrong`` differ in another way too.

    That of ``one_element`` is large, and only one element of it differs.
    """
    made = []
    noise = torch.randn(64, generator=torch.Generator().manual_seed(1))
    large = torch.randn(65536, generator=torch.Generator().manual_seed(2))
    for name, factor in factors.items():
        statistics = measure(baselines, factor * (baselines + wrong.get(name, 0.0) * noise))
        if name == one_element:
            changed = large * factor
            changed[7] += 1e-3
            statistics = measure(large, changed)
        row = Row(
            run=1,
            step=0,
            order=len(made),
            name=name,
            tags={"kind": "param_grad"},
            direction="b2t",
            side="target",
            rank=0,
            status="grafted",
            senders=[0],
            dtype="float32",
        )
        made.append({**row._asdict(), **dict(zip(STATISTICS, statistics_of(statistics), strict=True))})
    return pd.DataFrame(made)


WEIGHTS = [*(f"w{n}" for n in range(10)), "blocks.0.router.w", "blocks.1.router.w"]


def taken_out(
    factors: dict[str, float], wrong: dict[str, float], one_element: str = "", baselines: torch.Tensor = BASELINES
) -> tuple[GradientScaling, pd.DataFrame]:
    grafted = weights_rows(factors, wrong, one_element, baselines)
    frame = added_frame(grafted, {}, constant=1e-6)
    found = gradient_scaling(frame, grafted, named_groups(frame, 5.0), 1, 1, 5.0)
    return found, found.taken_out_of(frame)


@pytest.mark.parametrize("baselines", [BASELINES, BASELINES.abs(), -BASELINES.abs()], ids=["both", "above", "below"])
@pytest.mark.parametrize("factor", [1 - 1e-4, 0.37, 1024.0])
def test_a_global_factor_is_taken_out_and_remaining_differences_are_named(
    factor: float, baselines: torch.Tensor
) -> None:
    found, frame = taken_out(dict.fromkeys(WEIGHTS, factor), {"blocks.1.router.w": 0.1}, baselines=baselines)
    assert found.groups == tuple(f"w{n}@param_grad" for n in range(10))
    assert f"One common factor, {factor:.6g}, explains the gradients of 10 groups" in found.text
    assert "The factor does not explain blocks.*.router.w." in found.text
    # Nor is the right layer of the wrong group named.
    assert frame.loc[frame["ratio"] > 5, "name"].tolist() == ["blocks.1.router.w"]
    # What was added is what the factor leaves over.
    assert frame.loc[frame["added"] > 1e-3, "name"].tolist() == ["blocks.1.router.w"]


def test_a_gradient_with_the_factor_and_rounding_within_the_threshold_is_explained() -> None:
    found, _ = taken_out(dict.fromkeys(WEIGHTS, 0.5), {"w0": 3e-6, "w1": 9e-6, "blocks.1.router.w": 0.1})
    assert "w0@param_grad" in found.groups
    assert "w1@param_grad" not in found.groups
    assert "The factor does not explain w1, blocks.*.router.w." in found.text


def test_a_global_factor_does_not_hide_a_mistake_in_one_element() -> None:
    found, frame = taken_out(dict.fromkeys(WEIGHTS, 1 - 1e-4), {"blocks.1.router.w": 0.1}, one_element="w3")
    assert "w3@param_grad" not in found.groups
    assert "The factor does not explain w3, blocks.*.router.w." in found.text
    assert frame.loc[frame["ratio"] > 5, "name"].tolist() == ["w3", "blocks.1.router.w"]


def test_what_a_factor_leaves_over_is_relative_to_the_scaled_baseline() -> None:
    noise = torch.randn(64, generator=torch.Generator().manual_seed(1))
    (row,) = weights_rows({"w": 0.5}, {"w": 0.1}).to_dict("records")
    assert left_over(row, 0.5) == pytest.approx(0.1 * float(noise.norm() / BASELINES.norm()), rel=1e-3)


def test_a_global_factor_without_an_exception_is_itself_named() -> None:
    assert taken_out(dict.fromkeys(WEIGHTS, 0.5), {})[0] == GradientScaling()


def test_a_factor_that_too_few_gradients_share_is_not_taken_out() -> None:
    factors = {name: 0.5 if n < 6 else 0.7 + n / 100 for n, name in enumerate(WEIGHTS)}
    assert taken_out(factors, {"w0": 0.1})[0] == GradientScaling()
    assert taken_out(dict.fromkeys(WEIGHTS, 1.0), {"w0": 0.1, "w1": 0.2})[0] == GradientScaling()


def test_a_gradient_without_the_global_factor_is_mentioned() -> None:
    factors = {**dict.fromkeys(WEIGHTS, 0.5), "w3": 1.0}
    found, _ = taken_out(factors, {"blocks.1.router.w": 0.1})
    assert "w3@param_grad" not in found.groups
    assert "The factor does not explain w3, blocks.*.router.w." in found.text
