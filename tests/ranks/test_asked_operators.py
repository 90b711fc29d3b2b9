"""What a call asks of its operators shows whether it does the same work in another dtype."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from graftlab.ranks import widening
from graftlab.ranks.asked_operators import AskedOperators
from graftlab.ranks.held_call import HeldCall, WatchChoice

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


class Scaled(nn.Module):
    """A scale of 1 MiB, and a call that may depend on its dtype."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.scale, self.call = nn.Parameter(torch.ones(1 << 18)), call

    def forward(self, x: torch.Tensor) -> object:
        return self.call(x * self.scale[:12])


def held(call: Call) -> HeldCall:
    model, x = Scaled(call), torch.linspace(0.1, 1, 12)
    return HeldCall(lambda: model(x), {"": model}, {"x": x}, WatchChoice())


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda x: x.exp(), None),
        (lambda x: x + x.half(), "it computes in 16 bits"),
        (lambda x: F.rms_norm(x, (12,)), "it asks its operators for something else in float64"),
        (lambda x: x.numpy(), "RuntimeError: Can't call numpy() on Tensor that requires grad. Use tensor.detach()"),
    ],
)
def test_a_call_is_repeated_in_float64_if_it_does_the_same_there(call: Call, reason: str | None) -> None:
    repeated = held(call)
    failure = repeated.widen_operators(stored=True)
    assert failure == reason or (failure is not None and reason is not None and failure.startswith(reason))
    if reason is None or "numpy" not in reason:
        (result,) = repeated().values()
        assert result.dtype == (torch.float64 if reason is None else torch.float32)
    repeated.narrow()
    assert set(repeated.dtypes().values()) == {torch.float32}


@pytest.mark.parametrize(("free", "fits"), [(8, True), (7, False)])
def test_copies_in_float64_take_a_quarter_of_the_memory_at_most(
    free: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    repeated = held(torch.exp)
    # A few numbers beside the scale.
    monkeypatch.setattr(widening, "free_bytes", lambda device: (free << 20) + 1024)
    failure = repeated.widen_operators(stored=True)
    assert (failure is None) == fits
    assert fits or str(failure).startswith("in float64 its numbers take 2 MiB on cpu, and a rank may take 1 MiB")
    repeated.narrow()
