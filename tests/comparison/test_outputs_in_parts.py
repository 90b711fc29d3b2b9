"""Results with different numbers of values: two in one tensor are compared as a whole, and others by their values."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import graftlab as gl

X = torch.randn(3, 6, 16, generator=torch.Generator().manual_seed(5))


class Heads(nn.Module):
    """Boxes and scores of each place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.boxes, self.scores = nn.Linear(16, 16), nn.Linear(16, 4), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.stem(x).tanh()
        return self.boxes(x).exp(), self.scores(x).sigmoid()


class Together(nn.Module):
    """The same under other names, in one tensor."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        heads = Heads()
        self.first, self.a, self.b, self.factor = heads.stem, heads.boxes, heads.scores, factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()
        return torch.cat((self.a(x).exp() * self.factor, self.b(x).sigmoid()), -1)


@pytest.mark.ranks
def test_outputs_that_one_side_returns_together_are_compared_in_parts() -> None:
    comparison = gl.compare(Heads, partial(Together, 1.0), X)
    with comparison.session:
        assert comparison.answer == "agree", comparison.text
        assert "only the" not in comparison.text


@pytest.mark.ranks
def test_a_part_whose_values_have_no_partner_is_the_one_that_differs() -> None:
    comparison = gl.compare(Heads, partial(Together, 1.01), X)
    with comparison.session:
        assert comparison.answer == "differ", comparison.text
        first = comparison.text.splitlines()[0]
        assert "output[0]" in first or "the last tap" in first, comparison.text
        assert "compared only in part" not in comparison.text


class Encoder(nn.Module):
    """A latent, its mean and its variance, or the last two alone."""

    def __init__(self, first: int, factor: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.mean, self.variance = nn.Linear(16, 16), nn.Linear(16, 4), nn.Linear(16, 4)
        self.first, self.factor = first, factor

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = self.stem(x).tanh()
        mean, variance = self.mean(x), self.variance(x)
        return (mean + variance.exp(), mean, variance * self.factor)[self.first :]


@pytest.mark.ranks
def test_a_result_without_the_first_value_is_not_compared_place_by_place() -> None:
    comparison = gl.compare(partial(Encoder, 0), partial(Encoder, 1), X)
    with comparison.session:
        assert comparison.answer == "inconclusive", comparison.text
        assert "returns the baseline's output[1] as the returned value [0]" in comparison.text


@pytest.mark.ranks
def test_a_mistake_in_a_result_without_the_first_value_is_found() -> None:
    comparison = gl.compare(partial(Encoder, 0), partial(Encoder, 1, 1.5), X)
    with comparison.session:
        assert comparison.answer == "differ", comparison.text
        assert "the returned value [1]" in comparison.text.splitlines()[0]
