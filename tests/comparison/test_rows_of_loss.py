"""A loss that reads other tokens, or weights them differently, is described by the gradients that it gives."""

from __future__ import annotations

import pytest
import torch

from graftlab.comparison.rows_of_loss import rows_of_loss
from graftlab.ranks.held_update import TensorSample


def said(baseline: torch.Tensor, target: torch.Tensor) -> str:
    return rows_of_loss("call 1", TensorSample.of(baseline), TensorSample.of(target))


def gradients(*extents: int) -> torch.Tensor:
    return torch.randn(*extents, generator=torch.Generator().manual_seed(0))


# The second one is larger than a sample.
@pytest.mark.parametrize("width", [8, 3000])
def test_positions_that_one_loss_alone_reads_are_listed(width: int) -> None:
    given = gradients(3, 7, width)
    ours, theirs = given.clone(), given.clone()
    ours[:, 6:], theirs[:, :1] = 0, 0
    assert said(ours, theirs) == (
        "Along dim 1 of call 1 the baseline's loss reads 0-5, and the target's 1-6: its positions or its mask differ."
    )
    assert said(ours, torch.zeros_like(ours)) == (
        "Along dim 0 of call 1 the baseline's loss reads 0-2, and the target's none: its positions or its mask differ."
    )


def test_rows_that_a_mask_leaves_out_on_one_side_are_counted() -> None:
    ours, theirs = gradients(2, 4, 8), gradients(2, 4, 8)
    ours[0, 2:], ours[1, :1] = 0, 0
    assert said(ours, theirs) == (
        "Of 8 rows (last dim) of call 1 the loss reads 0 on the baseline alone, and 3 on the target alone: its mask "
        "differs, or the labels that it ignores."
    )


def test_factors_of_rows_are_stated_if_they_explain_the_difference() -> None:
    given = gradients(4, 8)
    factors = torch.tensor([1.0, -0.5, 2.0, 1.0])[:, None]
    assert said(given, factors * given) == (
        "Each row (last dim) of call 1 has its own factor there (-0.5 to 2 times the baseline's): the loss weights "
        "rows, such as tokens, differently."
    )
    assert said(given, factors * given + 0.01 * gradients(8, 4).T) == ""
    # Rows that neither loss reads have no factor.
    factors[0] = given[0] = 0
    assert "has its own factor there (-0.5 to 2 times" in said(given, factors * given)
    given[1] = 0
    assert "has its own factor there (1 to 2 times" in said(given, factors * given)
    # A factor of each row leaves less of any noise, here just enough of it, and only a little less than one of all.
    square = gradients(8, 8)
    assert said(square, square + 1.04e-3 * square.T) == ""


@pytest.mark.parametrize("factor", [-1.0, 2.0])
def test_one_factor_of_all_rows_or_none_at_all_is_no_factor_of_each(factor: float) -> None:
    given = gradients(2, 4, 8)
    assert said(given, factor * given) == ""
    # Rows of eight numbers have factors by chance, which explain little.
    assert said(given, given + 1.05e-3 * gradients(4, 2, 8).reshape(2, 4, 8).flip(0)) == ""
    assert said(torch.zeros(2, 4), torch.zeros(2, 4)) == said(given, given) == said(given.round(), given.round()) == ""


def test_nothing_is_said_of_rows_that_may_round_to_zero_or_that_no_sample_shows() -> None:
    ours, theirs = gradients(4, 8), gradients(4, 8) + 0.1 * gradients(8, 4).T
    ours[0], theirs[0] = 1e-5 * ours[0], 0
    assert said(ours, theirs) == ""
    many = gradients(5000, 2)
    half = many.clone()
    half[:2500] = 0
    assert said(many, 2 * many) == said(many, half) == said(half, many) == ""
    assert said(many[0], many[1]) == said(torch.tensor(1.0), torch.tensor(2.0)) == ""
    waves = torch.complex(ours, theirs)
    assert said(waves, waves.flip(0)) == ""
