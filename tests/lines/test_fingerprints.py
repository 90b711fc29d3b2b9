"""How tensors are compared by their fingerprints: the same whichever comes first, and what is taken for a mask."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

from graftlab.lines.fingerprints import (
    _MASKED,
    ANY_ORDER,
    DIFFERENT,
    IN_ORDER,
    MAGNITUDES,
    Fingerprint,
    agreement,
    fingerprint,
    joined,
    with_rows,
)
from graftlab.lines.first_lost import _differ
from graftlab.lines.known_values import is_sum

X = torch.randn(64, generator=torch.Generator().manual_seed(0)).abs() + 0.5


@pytest.mark.parametrize("sorts", [True, False])
def test_a_negation_and_another_order_are_seen_whichever_tensor_comes_first(sorts: bool) -> None:
    one, negated = fingerprint(X, sorts=sorts), fingerprint(-X, sorts=sorts)
    assert agreement(one, negated, 1e-5) == agreement(negated, one, 1e-5) == MAGNITUDES
    for moved in (1e3, -1e3):
        other = replace(one, projections=one.projections + moved)
        assert agreement(one, other, 1e-5) != IN_ORDER
    # A single factor tells two orders apart.
    at = one.projections.copy()
    at[-1] -= 1e3
    assert agreement(one, replace(one, projections=at), 1e-5) != IN_ORDER
    smaller = fingerprint(0.9 * X, sorts=sorts)
    assert agreement(one, smaller, 1e-5) == agreement(smaller, one, 1e-5) == DIFFERENT


def test_a_distributed_tensor_has_the_fingerprint_of_the_part_on_its_rank() -> None:
    whole, part = torch.zeros(8, 4), torch.arange(12.0).view(3, 4)
    whole._local_tensor = part  # type: ignore[attr-defined]
    own = fingerprint(part)
    for sorts in (True, False):
        assert repr(fingerprint(whole, sorts=sorts)) == repr(fingerprint(part, sorts=sorts))
    assert repr(with_rows(own, whole)) == repr(with_rows(own, part))


def test_a_number_near_zero_is_compared_by_the_size_of_the_others() -> None:
    made = [fingerprint(torch.cat([X[:-1], torch.tensor([near])])) for near in (1e-8, 3e-8)]
    assert agreement(*made, 1e-5) == IN_ORDER


def test_only_zeros_beside_numbers_that_hide_are_a_mask() -> None:
    assert fingerprint(torch.tensor([0.0, -2 * _MASKED, 0.0])).mask
    assert not fingerprint(torch.tensor([0.0, -5.0, -2 * _MASKED])).mask
    assert not fingerprint(torch.zeros(4)).mask
    assert not fingerprint(torch.tensor([0.0, -5.0])).mask


def test_numbers_are_hidden_only_far_below_all_others() -> None:
    assert fingerprint(torch.tensor([1.0, 2.0, -2 * _MASKED])).nonfinite == 1
    for large in (_MASKED / 2, -_MASKED / 2):
        assert fingerprint(torch.tensor([1.0, large, -2 * _MASKED])).nonfinite == 0
    assert fingerprint(torch.tensor([1.0, float("inf"), -2 * _MASKED])).nonfinite == 2


def test_shards_are_constant_together_if_they_have_one_value() -> None:
    def constant(*values: float) -> bool:
        return joined([fingerprint(torch.full((3 + n,), each)) for n, each in enumerate(values)]).constant

    assert constant(2.0, 2.0, 2.0)
    assert not constant(2.0, 2.0, 3.0)
    assert not joined([fingerprint(X), fingerprint(X)]).constant


def test_ranks_differ_as_soon_as_one_of_them_does() -> None:
    one, other = fingerprint(X), fingerprint(X + 1)
    assert not _differ([one, one, one])
    assert _differ([one, one, other])
    assert _differ([one, other, one])
    assert not _differ([one])


@pytest.mark.parametrize("sign", [1, -1])
def test_a_sum_of_ranks_is_missed_by_too_much_in_either_direction(sign: int) -> None:
    parts = [fingerprint(sign * X), fingerprint(sign * 2 * X)]
    assert is_sum(parts, fingerprint(sign * 3 * X), 1e-5)
    for factor in (2.9, 3.1):
        assert not is_sum(parts, fingerprint(sign * factor * X), 1e-5)
    whole = fingerprint(3 * X)
    for moved in (1e3, -1e3):
        assert not is_sum(
            [fingerprint(X), fingerprint(2 * X)], replace(whole, projections=whole.projections + moved), 1e-5
        )


@pytest.mark.parametrize("compiled", [True, False])
def test_numbers_in_double_precision_are_not_rounded(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr("graftlab.lines.fingerprints.load", lambda: None)
    x = torch.linspace(-1, 2, 40, dtype=torch.float64) + 1e-12
    found = fingerprint(x)
    assert found.values is not None
    assert found.magnitudes is not None
    assert [found.values[0], found.values[-1]] == [float(x.min()), float(x.max())]
    assert [found.magnitudes[0], found.magnitudes[-1]] == [float(x.abs().min()), float(x.abs().max())]


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_a_quantised_tensor_has_the_fingerprint_of_its_numbers() -> None:
    plain = torch.linspace(-3, 3, 24).reshape(4, 6)
    one, other = (torch.quantize_per_tensor(plain, 0.1, zero, torch.qint8) for zero in (0, 5))
    made = fingerprint(one)
    assert made.numel == 24
    assert agreement(made, fingerprint(one.dequantize()), 1e-6) == IN_ORDER
    assert agreement(made, fingerprint(one.int_repr().float() * 0.1), 1e-6) == IN_ORDER
    assert agreement(made, fingerprint(other.int_repr().float() * 0.1), 1e-6) < IN_ORDER


def with_number(at: int, number: float) -> torch.Tensor:
    changed = X.clone()
    changed[at] = number
    return changed


HALF = torch.arange(64) < 32
NAMES = ("one", "other", "level")


@pytest.mark.parametrize("sorts", [True, False])
@pytest.mark.parametrize(
    NAMES,
    [
        (X, X.clone(), IN_ORDER),
        (X, X.reshape(8, 8), IN_ORDER),
        (X, X.double(), IN_ORDER),
        (X, X.flip(0), ANY_ORDER),
        (X, -X, MAGNITUDES),
        (X, with_number(3, -float(X[3])), MAGNITUDES),
        (X, X * 1.001, DIFFERENT),
        (X, with_number(3, 9.0), DIFFERENT),
        (X, X[:63], DIFFERENT),
        (X, with_number(3, math.nan), DIFFERENT),
        (with_number(3, math.inf), with_number(3, math.nan), IN_ORDER),
        # Bare counts in another order are other counts.
        (torch.arange(64), torch.arange(64).flip(0), DIFFERENT),
        (torch.arange(64), torch.arange(64).int(), IN_ORDER),
        (HALF, HALF.clone(), IN_ORDER),
        (HALF, ~HALF, MAGNITUDES),
        (HALF, HALF.flip(0).roll(3), DIFFERENT),
        (HALF, torch.where(HALF, 0.0, -math.inf), IN_ORDER),
        (HALF, HALF.float(), DIFFERENT),
        # The numbers that hide scores do not matter, and which are hidden does.
        (with_number(3, -math.inf), with_number(3, -1e9), IN_ORDER),
        (with_number(3, -math.inf), with_number(4, -math.inf), DIFFERENT),
        (torch.zeros(0), torch.zeros(0, 3), IN_ORDER),
        # An expanded tensor has the numbers that it expands.
        (X.reshape(64, 1).expand(64, 3), X, IN_ORDER),
    ],
)
def test_tensors_agree_in_order_in_any_order_or_up_to_signs(
    one: torch.Tensor, other: torch.Tensor, level: object, sorts: bool
) -> None:
    first, second = fingerprint(one, sorts=sorts), fingerprint(other, sorts=sorts)
    assert agreement(first, second, 1e-5) == agreement(second, first, 1e-5) == level


@pytest.mark.parametrize("sorts", [True, False])
def test_a_fingerprint_arrives_as_it_was_sent(sorts: bool) -> None:
    for tensor in (X, HALF, torch.zeros(0), torch.ones(3), with_number(0, math.nan)):
        sent = fingerprint(tensor, sorts=sorts)
        arrived: Fingerprint = pickle.loads(pickle.dumps(sent))
        plain = ("shape", "dtype", "numel", "nonfinite", "mask", "constant", "says_nothing")
        assert all(getattr(arrived, name) == getattr(sent, name) for name in plain)
        for name in ("moments", "projections", "magnitudes", "values"):
            assert np.array_equal(getattr(arrived, name), getattr(sent, name)), name


def test_a_tensor_of_one_value_says_nothing_unless_some_are_not_finite() -> None:
    assert fingerprint(torch.full((64,), 3.0)).says_nothing
    assert fingerprint(torch.ones(4, 1).expand(4, 16)).constant
    assert fingerprint(X[:1]).says_nothing
    assert not fingerprint(X).says_nothing
    lost = torch.full((64,), 3.0)
    lost[5] = math.nan
    assert not fingerprint(lost).constant
