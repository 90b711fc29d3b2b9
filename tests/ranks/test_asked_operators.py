"""What a call asks of its operators shows whether it does the same work in another dtype."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from graftlab.ranks.asked_operators import AskedOperators

Call = Callable[[torch.Tensor], object]


def asked(call: Call, dtype: torch.dtype) -> AskedOperators:
    mode = AskedOperators()
    x = torch.linspace(0.1, 1, 12).to(dtype).view(3, 4)
    with mode:
        call(x)
    return mode


def asks_the_same(call: Call) -> bool:
    narrow, wide = (asked(call, dtype) for dtype in (torch.float32, torch.float64))
    assert narrow.asks_the_same(wide) == wide.asks_the_same(narrow)
    return narrow.asks_the_same(wide)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.rms_norm(x, (4,), eps=1e-6),
        lambda x: F.layer_norm(x, (4,)),
        # Conversions are left out, and what a mask has for minus infinity is as good as another.
        lambda x: (x.float().double() @ x.double().T).to(x.dtype).softmax(-1),
        lambda x: x.masked_fill(x > 0.5, torch.finfo(x.dtype).min).softmax(-1),
        # A number that is computed is rounded.
        lambda x: x * float(x.sum()),
        lambda x: x * float("nan"),
    ],
)
def test_code_that_knows_no_dtype_asks_for_the_same(call: Call) -> None:
    assert asks_the_same(call)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.rms_norm(x, (4,)),
        lambda x: x / (x.norm() + torch.finfo(x.dtype).eps),
        lambda x: x + torch.tensor(torch.finfo(x.dtype).eps),
        lambda x: x.exp() if x.dtype == torch.float32 else x.exp().log().exp(),
        lambda x: x.sin() if x.dtype == torch.float32 else x.cos(),
    ],
)
def test_code_that_depends_on_its_dtype_does_not(call: Call) -> None:
    assert not asks_the_same(call)


def test_what_reads_or_returns_16_bits_is_noted() -> None:
    assert not asked(lambda x: x.double().float(), torch.float32).in_16_bits
    assert asked(lambda x: x + x.half().float(), torch.float32).in_16_bits
    assert asked(lambda x: torch.ones(2, dtype=torch.bfloat16), torch.float32).in_16_bits
    assert asked(lambda x: x[0], torch.bfloat16).in_16_bits
