"""Digests of weights: equal ones, and rows of larger ones."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graftlab.matching.digests import Digest, Wholes

SEED = torch.Generator().manual_seed(0)
X = torch.randn(24, 6, generator=SEED)


def of(part: torch.Tensor, **wholes: torch.Tensor) -> dict[str, torch.Tensor]:
    """The parts that the digests show, taken out of the wholes."""
    found = Wholes({name: Digest.of(whole) for name, whole in wholes.items()}).of(Digest.of(part))
    return {
        name: torch.from_numpy(strides.taken(wholes[name].reshape(-1).numpy()).copy()).view(part.shape)
        for name, strides in found
    }


def test_equal_numbers_have_equal_digests_also_in_16_bits_and_in_other_strides() -> None:
    whole = Digest.of(X).whole
    assert Digest.of(X.T.contiguous().T).whole == whole
    assert Digest.of(X.view(24, 2, 3)).whole == whole
    assert Digest.of(X.bfloat16()).whole == Digest.of(X.bfloat16().float()).whole != whole
    assert len({Digest.of(each).whole for each in (X, X.T, X[:23], X.double(), X.view(-1), X + 1e-7)}) == 6


@pytest.mark.parametrize("view", [X[:, 1], X[0, :1].expand(8), X[:, ::2], X[::5]])
def test_a_view_with_strides_has_the_digest_of_its_numbers(view: torch.Tensor) -> None:
    assert not view.is_contiguous()
    assert Digest.of(view).whole == Digest.of(view.contiguous()).whole


@pytest.mark.parametrize("tensor", [X.view(-1), X.to(torch.complex64), torch.tensor(3.0)])
def test_vectors_and_complex_numbers_have_no_digests_of_rows(tensor: torch.Tensor) -> None:
    digest = Digest.of(tensor)
    assert digest.rows is None
    assert list(Wholes({"x": Digest.of(X)}).of(digest)) == []
    assert list(Wholes({"x": digest}).of(Digest.of(X[:2]))) == []


@given(st.integers(0, 23), st.integers(1, 4), st.integers(1, 24), st.booleans())
def test_rows_of_a_weight_are_found_with_their_places(start: int, step: int, count: int, wide: bool) -> None:
    part = X[start::step][:count]
    found = of(part.double() if wide else part, other=X + 1, whole=X)
    assert {name: taken.tolist() for name, taken in found.items()} == (
        {} if wide or len(part) == 24 else {"whole": part.tolist()}
    )


def test_rows_in_reverse_have_no_places_that_a_layout_could_take() -> None:
    assert of(X[:5].flip(0), whole=X) == {}
    assert of(X[::2].flip(0), whole=X) == {}


def test_groups_of_heads_are_found_in_a_fused_weight() -> None:
    heads = X.view(4, 6, 6)
    parts = heads[:, :4].reshape(16, 6), heads[:, 4:5].reshape(4, 6), heads[:, 5:].reshape(4, 6)
    for part in parts:
        assert torch.equal(of(part, fused=X)["fused"], part)


def test_a_part_with_one_wrong_row_or_rows_in_no_order_is_not_found() -> None:
    wrong = X[:8].clone()
    wrong[5, 3] += 1e-6
    assert of(wrong, whole=X) == {}
    shuffled = X[torch.tensor([3, 1, 4, 15, 9, 2, 6, 5])]
    assert of(shuffled, whole=X) == {}


def test_equal_rows_do_not_show_which_part_they_are() -> None:
    rows = X[:3].repeat(2, 1)
    assert of(rows, whole=torch.cat([rows, X])) == {}
    assert set(of(X[:2], one=X, other=X.clone())) == {"one", "other"}


def test_a_tensor_with_too_many_rows_has_only_a_digest_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graftlab.matching.digests.MOST_ROWS", 23)
    assert Digest.of(X).rows is None
    assert Digest.of(X[:23]).rows is not None


def test_the_same_bits_in_another_dtype_are_not_the_same_numbers() -> None:
    for tensor in (X, X.view(-1)):
        assert Digest.of(tensor).whole != Digest.of(tensor.view(torch.int32)).whole
    assert list(Wholes({"x": Digest.of(X.view(torch.int32))}).of(Digest.of(X[:2]))) == []
