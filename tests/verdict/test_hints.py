"""Hints: each mechanism is recognised from the pair it made, with its fit, and none in noise."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from graftlab.verdict import hints
from graftlab.verdict.hints import hint_of

X = torch.randn(2, 12, 4, 8, generator=torch.Generator().manual_seed(0))


def changed(index: tuple[object, ...], change: Callable[[Tensor], Tensor]) -> Tensor:
    y = X.clone()
    y[index] = change(y[index])  # type: ignore[index]
    return y


def noise(x: Tensor) -> Tensor:
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(2))


def at_the_edge(x: Tensor, rows: slice) -> Tensor:
    y = x.clone()
    y[:, rows] = noise(y[:, rows])
    return y


def interleaved(x: Tensor) -> Tensor:
    return torch.stack([x[..., :4], x[..., 4:]], -1).flatten(-2)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (-X, "the sign is flipped"),
        (torch.zeros_like(X), "the target's values are all zero"),
        (torch.full_like(X, 1.5), "the target's values are all 1.5"),
        (2 * X, "2 times the baseline's"),
        (X * 1.2345, "1.2345 times the baseline's"),
        (X / math.sqrt(8), "0.3536 = 1/sqrt(8) times the baseline's"),
        (X / 3, "1/3 times the baseline's"),
        (X * -2 / 3, "-2/3 times the baseline's"),
        (X + 0.25, "the baseline's + 0.25"),
        (X + torch.arange(8.0), "one vector over the last dim is added everywhere"),
        (X + torch.randn(4, 8, generator=torch.Generator().manual_seed(1)), "one vector over the last two dims"),
        (X.bfloat16().float(), "rounded to bfloat16"),
        (X.half().float(), "rounded to float16"),
        (X.clamp(-1, 1), "clamped to [-1, 1]"),
        (X.roll(1, 1), "shifted along dim 1 by one place, to later indices"),
        (X.roll(-1, 1), "shifted along dim 1 by one place, to earlier indices"),
        (X.roll(2, 1), "shifted along dim 1 by 2 places, to later indices"),
        (X.roll(-3, 1), "shifted along dim 1 by 3 places, to earlier indices"),
        (X.roll(4, 3), "the halves of dim 3 are swapped"),
        (interleaved(X), "dim 3 interleaves its halves"),
        (X.flip(1), "dim 1 is reversed"),
        (X.transpose(1, 2).reshape(X.shape), "dims 1 and 2 are transposed"),
        (X[:, :, [2, 0, 1, 3]], "dim 2 is permuted (the target has the baseline's 2, 0, 1, 3)"),
        (X * torch.linspace(0.5, 2, 8), "each place of the last dim has its own factor"),
        (X * torch.rand(2, 12, 4, 1).add(0.5), "each row (last dim) has its own factor"),
        (changed((slice(None), -1), torch.neg), "only at index 11 of dim 1 (the last), the sign is flipped"),
        (
            changed((slice(None), slice(None), 2), lambda x: x * 3),
            "only at index 2 of dim 2, the target's values are 3 times",
        ),
        (
            changed((slice(None), slice(2, None)), lambda x: x + noise(x)),
            "the sides differ only at indices 2-11 of dim 1 (to the end)",
        ),
        (
            changed((slice(None), slice(0, 9)), lambda x: x * 3),
            "only at indices 0-8 of dim 1 (the first 9), the target's values are 3 times",
        ),
        (
            changed((..., slice(6, 8)), lambda x: x + noise(x)),
            "the sides differ only at indices 6-7 of dim 3 (equal part 3 of 0-3)",
        ),
        (
            changed((..., slice(5, None)), lambda x: x + noise(x)),
            "the sides differ only at indices 5-7 of dim 3 (to the end)",
        ),
        (
            changed((..., slice(1, None, 2)), lambda x: x + noise(x)),
            "the sides differ only at every second index of dim 3, from 1",
        ),
        # What both sides have there or one side alone, a difference from zero is one.
        (
            changed((slice(None), slice(2, None)), torch.zeros_like),
            "only at indices 2-11 of dim 1 (to the end), the target's values are all zero",
        ),
        # Rounding everywhere is nothing beside it.
        (
            changed((slice(None), -1), torch.neg) * (1 + 1e-7 * noise(X)),
            "only at index 11 of dim 1 (the last), the sign is flipped",
        ),
        # What moves in from outside the baseline's values may be anything.
        (at_the_edge(X.roll(-3, 1), slice(-3, None)), "shifted along dim 1 by 3 places, to earlier indices"),
        (at_the_edge(X.roll(3, 1), slice(0, 3)), "shifted along dim 1 by 3 places, to later indices"),
        (changed((0, 3), lambda x: x + torch.rand_like(x)), "only at index 0 of dim 0 and index 3 of dim 1"),
        (changed((0, 3), lambda x: x * math.nan), "32 of 768 numbers are not finite on the target only"),
    ],
)
def test_a_mechanism_is_named(target: Tensor, said: str) -> None:
    hint = hint_of(X, target)
    assert hint is not None
    assert said in str(hint)
    assert hint.fit >= 0.99


@pytest.mark.parametrize(("step", "which"), [(3, "third"), (4, "fourth"), (5, "5th")])
def test_indices_at_equal_distances_are_named_by_it(step: int, which: str) -> None:
    own = torch.randn(8, 60, generator=torch.Generator().manual_seed(0))
    other = own.clone()
    other[:, 2::step] += noise(other[:, 2::step])
    assert f"only at every {which} index of dim 1, from 2" in str(hint_of(own, other))
    # The first of such indices, and the last, are no exceptions.
    for chosen in (slice(step, None, step), slice(2, 60 - step, step)):
        other = own.clone()
        other[:, chosen] += noise(other[:, chosen])
        assert "every" not in str(hint_of(own, other))


def test_a_constant_that_differs_by_a_factor_has_that_as_its_hint() -> None:
    assert "the target's values are 2 times the baseline's" in str(hint_of(torch.ones(4, 8), torch.full((4, 8), 2.0)))


def test_one_number_everywhere_is_called_no_clamp() -> None:
    assert "clamped" not in str(hint_of(torch.zeros(8), torch.full((8,), 0.1)))


def test_a_mechanism_is_found_through_rounding_and_states_its_fit() -> None:
    noisy = 2 * X + 1e-3 * torch.randn_like(X)
    hint = hint_of(X, noisy)
    assert hint is not None
    assert 0.99 < hint.fit < 1.0
    assert "(explains 99." in str(hint)


@pytest.mark.parametrize("seed", range(1, 6))
def test_an_unexplained_difference_has_no_hint(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    other = torch.randn(X.shape, generator=generator)
    assert hint_of(X, other) is None
    assert hint_of(X, X + 0.1 * other) is None


@pytest.mark.parametrize(
    "pair",
    [
        *((X, X), (X, X[0]), (X.long(), X.long() + 1), (X, X.long()), (X.long(), X), (X[:0], X[:0])),
        *((torch.ones(4, 8), torch.full((4, 8), 2)), (torch.full((4, 8), 2), torch.ones(4, 8))),
    ],
)
def test_equal_or_unsuitable_tensors_have_no_hint(pair: tuple[Tensor, Tensor]) -> None:
    assert hint_of(*pair) is None


@pytest.mark.parametrize("shape", [(), (1,), (6,), (2, 0, 3), (2, 1, 3, 2)], ids=str)
def test_tensors_of_any_shape_are_accepted(shape: tuple[int, ...]) -> None:
    values = torch.linspace(-1, 2, max(1, math.prod(shape)))[: math.prod(shape)].reshape(shape)
    for other in (values.cos(), values.flip(0) if shape else values * 2):
        hint_of(values, other)


def test_few_rows_in_low_precision_may_be_a_routers_choice() -> None:
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(3)).bfloat16()
    y = (x.float() * (1 + 2e-3 * noise(x))).bfloat16()
    assert "rows" not in str(hint_of(x, y))
    y[[5, 17, 40]] = y[[6, 18, 41]]
    assert "only 3 of 64 rows (last dim) differ by more than rounding: if a router" in str(hint_of(x, y))
    # In float32 there are no such coincidences.
    z = x.float() * (1 + 1e-6 * noise(x))
    z[[5, 17, 40]] = z[[6, 18, 41]]
    assert "router" not in str(hint_of(x.float(), z))


def test_a_vector_that_is_added_to_few_rows_may_be_anything() -> None:
    x, vector = torch.randn(3, 64, generator=torch.Generator().manual_seed(4)), torch.linspace(-2, 3, 64).sin()
    assert "one vector" not in str(hint_of(x, x + vector))
    assert "one vector over the last dim is added everywhere" in str(
        hint_of(x.repeat(2, 1) + 1, x.repeat(2, 1) + 1 + vector)
    )


def test_of_a_long_permutation_the_beginning_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(9, 32, generator=torch.Generator().manual_seed(5))
    order = [3, 1, 4, 0, 5, 8, 2, 6, 7]
    assert "dim 0 is permuted (the target has the baseline's 3, 1, 4, 0, 5, 8, 2, 6, ...)" in str(hint_of(x, x[order]))
    # Each row is compared with all others.
    monkeypatch.setattr(hints, "_LONGEST_PERMUTED", 8)
    assert "permuted" not in str(hint_of(x, x[order]))
    assert "permuted (the target has the baseline's 3, 1, 4, 0, 5, 2, 6, 7)" in str(
        hint_of(x[:8], x[[each for each in order if each < 8]])
    )


def test_a_span_is_described_by_its_end_its_beginning_or_its_part() -> None:
    def said(first: int, last: int, dim: int = 1) -> str:
        index = (*[slice(None)] * dim, slice(first, last + 1))
        return str(hint_of(X, changed(index, lambda x: x + noise(x)))).partition(" (explains")[0]

    begin = "the sides differ only at indices"
    assert said(3, 4) == f"{begin} 3-4 of dim 1"
    assert said(0, 1) == f"{begin} 0-1 of dim 1 (the first 2)"
    assert said(2, 3) == f"{begin} 2-3 of dim 1 (equal part 1 of 0-5)"
    assert said(10, 11) == f"{begin} 10-11 of dim 1 (to the end)"
    assert said(0, 1, 3) == f"{begin} 0-1 of dim 3 (equal part 0 of 0-3)"
    assert said(0, 2, 3) == f"{begin} 0-2 of dim 3 (the first 3)"


def test_nothing_is_a_multiple_of_zeros() -> None:
    assert "times" not in str(hint_of(torch.zeros(8), X.flatten()[:8]))
