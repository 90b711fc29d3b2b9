"""Rows by which a tensor is known that another process has in another form, such as fused weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from graftlab.ranks.stored_numbers import is_made_of, samples_of, stored_in_16_bits


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


Q, K, BIAS, TABLE = drawn(1, 6, 8), drawn(2, 4, 8), drawn(3, 6), drawn(4, 10, 8)


@pytest.mark.parametrize(
    ("stored", "is_own"),
    [
        (torch.cat((Q, K)), True),
        (torch.cat((Q, K)).T.contiguous(), True),
        (torch.stack((Q, Q)), True),
        (torch.cat((BIAS, BIAS + 1)), True),
        (TABLE, False),
        # One row that no weight has is enough.
        (torch.cat((Q[:1], TABLE, Q[1:])), False),
        (BIAS + 1, False),
        (Q[:, :3].contiguous(), True),
        # A single number, as a factor of embeddings, is a constant, and so is an empty table.
        (torch.tensor(2.0), False),
        (torch.empty(0), False),
        (torch.empty(0, 8), False),
    ],
)
def test_fused_and_transposed_weights_are_known_and_a_table_is_not(stored: Tensor, is_own: bool) -> None:
    own = [Q, K, BIAS, torch.tensor(2.0), torch.arange(8)]
    assert is_made_of(samples_of(stored.bfloat16()), own) is is_own


def test_constants_are_not_made_of_sparse_tensors_or_those_of_other_classes() -> None:
    class Own(torch.Tensor):
        pass

    assert not is_made_of(samples_of(Q.bfloat16()), [Q.to_sparse(), Q.as_subclass(Own), Q.to(torch.complex64)])


def test_what_a_call_computes_itself_or_from_what_is_known_is_not_stored() -> None:
    known, held = TABLE.bfloat16(), Q.bfloat16()
    names = ["a bfloat16[6, 8] of no module or argument", "a bfloat16[6, 8] of no module or argument (2)"]
    found = stored_in_16_bits(lambda: (known + 1) * (held[:1] + known.view(10, 8)) * held[0], [known])
    assert [*found] == names[:1]
    assert found[names[0]] is held
    other = K.bfloat16().repeat(2, 1)[:6].clone()
    assert [*stored_in_16_bits(lambda: held + other, [])] == names
    assert stored_in_16_bits(lambda: TABLE.bfloat16() * 2, []) == {}


def test_what_operators_of_other_libraries_write_to_is_not_stored() -> None:
    @torch.library.custom_op("graftlab_tests::put", mutates_args=("cache",))
    def put(cache: Tensor, x: Tensor) -> None:
        cache[:] = x

    cache, held, x = (torch.ones(4, 2).bfloat16() for _ in range(3))

    def call() -> Tensor:
        put(cache, x * 3)
        return cache * held

    (found,) = stored_in_16_bits(call, [x]).values()
    assert found is held
