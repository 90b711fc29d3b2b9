"""Gradients that are other by the number of ranks alone, and even out, are no fault; anything else about them is."""

from __future__ import annotations

import pandas as pd
import pytest

from graftlab.verdict.shared_batch import evened_out, told

NAMED = ["act", "out@grad", "up.weight@param_grad"]


def frame(grad: list[float], weights: list[float]) -> pd.DataFrame:
    """A verdict's frame on two ranks: what the gradient of ``out`` adds on each, and that of a weight."""
    lines = [("act", rank, 0.3) for rank in range(2)]
    lines += [("out@grad", rank, added) for rank, added in enumerate(grad)]
    lines += [("up.weight@param_grad", rank, added) for rank, added in enumerate(weights)]
    made = pd.DataFrame(lines, columns=["group", "rank", "added"])
    return made.assign(ratio=made["added"] * 1e5)


@pytest.mark.parametrize(
    ("grad", "weights", "sizes"),
    [([1.0, 1.0], [0.5, 0.5], (1, 2)), ([1.004, 0.996], [0.501, 0.5], (1, 2)), ([0.5, 0.5], [1.0, 1.0], (4, 2))],
)
def test_the_factor_that_the_numbers_of_ranks_explain_evens_out(
    grad: list[float], weights: list[float], sizes: tuple[int, int]
) -> None:
    assert evened_out(frame(grad, weights), NAMED, *sizes, 5.0) == NAMED[1:]


@pytest.mark.parametrize(
    ("grad", "weights", "sizes"),
    [
        # As many ranks on both sides.
        ([1.0, 1.0], [0.5, 0.5], (2, 2)),
        # Nobody averages; averaged twice; another scale; on one rank alone.
        ([1.0, 1.0], [0.0, 0.0], (1, 2)),
        ([1.0, 1.0], [0.75, 0.75], (1, 2)),
        ([2.0, 2.0], [0.5, 0.5], (1, 2)),
        ([1.0, 0.0], [0.5, 0.5], (1, 2)),
        ([1.0, 1.0], [0.5, 0.0], (1, 2)),
        ([0.0, 0.0], [0.5, 0.5], (1, 2)),
    ],
)
def test_any_other_difference_stays_named(grad: list[float], weights: list[float], sizes: tuple[int, int]) -> None:
    made = frame(grad, weights)
    named = [group for group in NAMED if (made.loc[made["group"] == group, "ratio"] > 5).any()]
    assert evened_out(made, named, *sizes, 5.0) == []


def test_it_is_told_with_the_factors() -> None:
    said = told(["out@grad", "up.weight@param_grad"], 4, 2)
    assert (
        "2 ranks gradients are 1/2 times the baseline's; made from the baseline's, the gradients of weights are 2 times"
        in said
    )
    assert said.endswith("is not named (out@grad, up.weight@param_grad).")
