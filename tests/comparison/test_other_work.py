"""Calls that do different work, such as a whole prefill and a chunk of one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graftlab.comparison.other_work import given_other_tokens, other_batch, other_tokens
from graftlab.ranks.call_description import CallDescription


def given(*tokens: int, rows: int = 1, **more: Any) -> CallDescription:
    numbers = {"['input_ids']": torch.tensor(tokens).reshape(rows, -1)}
    return CallDescription("Net", 1, False, ("a",), {}, {}, whole_numbers=numbers | more.pop("numbers", {}), **more)


def test_a_decoding_step_beside_a_chunk_of_a_prefill_does_different_work() -> None:
    step, chunk = given(41, 52, 63, rows=3), given(41, 7, 8, 9, 10, 11)
    (said,) = other_tokens([step], [chunk])
    assert said.startswith("The calls are given different tokens, 3 on the baseline and 6 on the target")
    assert given_other_tokens([chunk], [step])
    # Equally many tokens may be wrong ones, which is a difference.
    assert other_tokens([step], [given(41, 52, 64)]) == []
    assert given_other_tokens([step], [given(41, 52, 64)])


@pytest.mark.parametrize(
    ("baseline", "target"),
    [
        (given(0, 0, 5, 6, 7, 8, rows=2), given(5, 6, 7, 8)),
        (given(5, 6, 7, 8), given(5, 6, 7, 8, 0, 0, 0, 0)),
        (given(1, 2, 3, 4, 5, 6), given(3, 6)),
        (given(8, 7, 6), given(6, 7, 8)),
    ],
    ids=["padded batch", "padded engine", "no cache", "other order"],
)
def test_padding_earlier_tokens_and_other_orders_are_the_same_work(
    baseline: CallDescription, target: CallDescription
) -> None:
    assert not given_other_tokens([baseline], [target])
    assert not given_other_tokens([target], [baseline])


def test_masks_positions_and_numbers_of_other_ranks_show_no_tokens() -> None:
    step, chunk = given(41, 52, 63), given(7, 8, 9, 10, 11)
    alike = {"['mask']": torch.ones(3, dtype=torch.int64), "['position_ids']": torch.arange(3)}
    assert given_other_tokens([given(41, 52, 63, numbers=alike)], [given(7, 8, 9, 10, 11, numbers=alike)])
    assert not given_other_tokens([step], [chunk, chunk])
    # A number of an engine's metadata is not what the model reads as tokens.
    hidden = given(41, 52, 63, untapped_numbers=("['input_ids']",))
    assert not given_other_tokens([hidden], [chunk])


def test_batches_of_other_sizes_are_recognised_by_logits_of_another_name() -> None:
    def returning(**values: torch.Tensor) -> CallDescription:
        plain = {("" if name == "bare" else f"['{name}']"): each for name, each in values.items()}
        return CallDescription("Net", 1, False, ("a",), plain, plain)

    cache = {"keys": torch.ones(3, 2, 5, 4), "values": torch.ones(3, 2, 5, 4)}
    whole, chunk = returning(logits=torch.ones(3, 1, 9), **cache), returning(bare=torch.ones(2, 9))
    assert other_batch([whole], [chunk])[0].startswith(
        "The calls have batches of different sizes, 3 on the baseline and 2"
    )
    assert other_batch([chunk], [whole])[0].startswith(
        "The calls have batches of different sizes, 2 on the baseline and 3"
    )
    # A single score is of any batch.
    assert other_batch([returning(bare=torch.ones(1, 1))], [returning(score=torch.ones(5, 1), **cache)]) == []
    assert other_batch([returning(score=torch.ones(1, 1), **cache)], [returning(bare=torch.ones(5, 1))]) == []
    # Equal sizes, another width, and a packed prefill beside a padded one.
    for other in (torch.ones(3, 9), torch.ones(2, 8), torch.ones(9)):
        assert other_batch([whole], [returning(bare=other)]) == []
    assert other_batch([returning(logits=torch.ones(3, 7, 9), **cache)], [returning(bare=torch.ones(16, 9))]) == []


def test_tokens_that_are_given_more_often_are_others() -> None:
    assert given_other_tokens([given(5, 5, 6, 7)], [given(5, 6, 7, 8, 9)])
    assert given_other_tokens([given(5, 6, 7, 8, 9)], [given(5, 5, 6, 7)])
    assert not given_other_tokens([given(5, 5, 6, 7)], [given(5, 6, 5, 7, 9)])
