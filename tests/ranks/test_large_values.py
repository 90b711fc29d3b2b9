"""A large last value of a cell stays on its rank, and the notebook gets a description."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import graftlab as gl
from graftlab.ranks.namespace import replace_large


class Holder:
    """Has a value in one attribute and itself in another."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.itself = self


MIB = 1 << 20
LARGE = {
    "tensor": torch.zeros(MIB),
    "array": np.zeros(MIB),
    "frame": pd.DataFrame({"x": np.zeros(MIB)}),
    "series": pd.Series(np.zeros(MIB)),
    "text": "x" * 2 * MIB,
    "model": torch.nn.Sequential(torch.nn.Linear(700, 700), torch.nn.Linear(700, 700)),
    "numbers": list(range(MIB)),
    "keys": dict.fromkeys(range(MIB // 8)),
    "nested": {"a": [torch.zeros(MIB // 4), (torch.zeros(MIB // 4), torch.zeros(MIB // 4))]},
    "object": Holder(torch.zeros(MIB)),
}


@pytest.mark.parametrize("kind", LARGE)
def test_a_large_last_value_stays_on_the_rank_and_is_described(kind: str) -> None:
    value = LARGE[kind]
    kept = replace_large(value, 2 * MIB - 1)
    assert kept is not value
    assert type(value).__qualname__ in repr(kept)
    assert "`%graft run -o run EXPR` fetches all of it" in repr(kept)
    assert replace_large(value, 1 << 40) is value


def test_a_large_tensor_is_described_with_shape_and_size() -> None:
    assert repr(replace_large(torch.zeros(4, MIB), 2 * MIB)).startswith(
        "<Tensor of shape [4, 1048576], torch.float32: 16 MiB, which stay on the rank."
    )


def test_the_size_of_a_large_container_is_said_to_be_at_least_what_was_counted() -> None:
    assert repr(replace_large(LARGE["numbers"], 2 * MIB)).startswith("<list: more than 2 MiB, which stay on the rank.")


@pytest.mark.parametrize("value", [None, 7, "text", [1, 2], {"a": 1}, torch.zeros(4), object(), int, np.float64(1)])
def test_a_small_last_value_is_sent(value: Any) -> None:
    assert replace_large(value) is value


class MakesUp:
    """Like ``ctypes.cdll``, which takes any attribute for a library."""

    def __getattr__(self, name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")


def test_a_value_whose_attributes_cannot_be_read_is_sent() -> None:
    assert replace_large(value := {"torch": torch, "it": MakesUp()}) is value


@pytest.mark.ranks
def test_a_large_last_value_of_a_cell_is_shown_as_one_line(session: gl.Session) -> None:
    cell = "x = torch.zeros(64, 1 << 20)\nx"
    [shown] = session.execute(cell, "target").target
    assert repr(shown).startswith("<Tensor of shape [64, 1048576], torch.float32: 256 MiB, which stay on the rank.")
    # It is still on the rank, and is sent on request.
    [found] = session.run(None, "x[:9]").target
    assert found.shape == (9, 1 << 20)
