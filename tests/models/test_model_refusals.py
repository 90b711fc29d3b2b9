"""What a model's configuration and inputs refuse: all of what is said, with the numbers that were given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from kit.refusals import ids, refusal
from kit.support import SMALL_MODEL

from graftlab.models.cross_attention import CrossAttentionTransformer
from graftlab.models.transformer import ModelConfig, Transformer


def config(**more: Any) -> ModelConfig:
    return replace(SMALL_MODEL, **more)


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: config(num_layers=0),
        "ModelConfig: num_layers must be an int of at least 1, got 0",
    ),
    (
        lambda: config(num_layers=True),
        "ModelConfig: num_layers must be an int of at least 1, got True",
    ),
    (
        lambda: config(sliding_window=0),
        "ModelConfig: sliding_window must be an int of at least 1 or None for no window, got 0",
    ),
    (
        lambda: config(norm_eps=0.0),
        "ModelConfig: norm_eps must be a finite number above 0, got 0.0",
    ),
    (
        lambda: config(rope_base=float("inf")),
        "ModelConfig: rope_base must be a finite number above 0, got inf",
    ),
    (
        lambda: config(hidden_size=10, num_heads=4, num_kv_heads=2),
        "ModelConfig: hidden_size=10 over num_heads=4 leaves no even head_dim, which rotary "
        "positions need; make hidden_size a multiple of 2 * num_heads",
    ),
    (
        lambda: config(num_heads=4, num_kv_heads=3),
        "ModelConfig: num_heads=4 must be a multiple of num_kv_heads=3, so that the query heads share them evenly",
    ),
    (
        lambda: Transformer(config(max_positions=4))(torch.zeros(1, 5, dtype=torch.long)),
        "input_ids has 5 tokens a row, more than max_positions=4",
    ),
    (
        lambda: Transformer(config())(torch.zeros(5, dtype=torch.long)),
        "input_ids must be [batch, tokens], got shape [5]",
    ),
]


@pytest.mark.parametrize(("call", "said"), REFUSED, ids=ids(REFUSED))
def test_a_number_that_a_model_cannot_have_is_named_with_its_field(call: Callable[[], Any], said: str) -> None:
    assert refusal(call) == said


def test_the_source_of_a_prompt_is_what_stands_before_its_first_separator() -> None:
    model = CrossAttentionTransformer(config(), separator=5)
    assert [model.source_len(prompt) for prompt in ([1, 2, 5, 3, 5], [5, 1], [1, 2], [])] == [2, 0, 0, 0]
