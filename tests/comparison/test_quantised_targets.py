"""A target whose weights have 8 bits, beside a baseline in bfloat16."""

from __future__ import annotations

from functools import partial
from typing import Literal

import pytest
import torch
from kit.int8_tensor import Int8Tensor
from torch import nn

import graftlab as gl

IDS = torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(1))
BLOCK = 32


class Quantised(nn.Module):
    """A linear layer of float8 weights in blocks, with a scale for each token's groups, or of int8 weights alone."""

    def __init__(self, linear: nn.Linear, wrong: str) -> None:
        super().__init__()
        w, self.wrong = linear.weight.detach().float(), wrong
        blocks = w.view(w.shape[0] // BLOCK, BLOCK, w.shape[1] // BLOCK, BLOCK)
        scale = blocks.abs().amax((1, 3), keepdim=True) / 448
        self.register_buffer("weight", (blocks / scale).view_as(w).to(torch.float8_e4m3fn))
        scale = scale.flatten(0, 1).flatten(1) * (2 if wrong == "stored scale" else 1)
        self.register_buffer("weight_scale_inv", scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, columns = self.weight_scale_inv.shape
        factors = {"factor": 1.02, "scale": 1.5, "stored scale": 0.5}.get(self.wrong, 1.0)
        scale = self.weight_scale_inv * torch.where(torch.arange(rows, device=x.device)[:, None] < 1, factors, 1.0)
        if self.wrong in ("factor", "stored scale"):
            scale = self.weight_scale_inv * (factors if self.wrong == "factor" else 1.0)
        groups = x.float().unflatten(-1, (columns, BLOCK))
        largest = groups.abs().amax(-1, keepdim=True) / 448
        x8 = ((groups / largest).to(torch.float8_e4m3fn).float() * largest).flatten(-2)
        w = self.weight.float() * scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        return (x8 @ w.T).to(x.dtype)


class Rounded(nn.Module):
    """A linear layer of int8 weights. Their scale is a power of two, so that bfloat16 holds the products."""

    def __init__(self, linear: nn.Linear, wrong: str) -> None:
        super().__init__()
        self.register_buffer("weight_scale", torch.tensor(2.0**-9))
        self.register_buffer("weight", (linear.weight.detach().float() * 2**9).round().to(torch.int8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.weight_scale.to(x.dtype))


class Packed(nn.Module):
    """A linear layer of integers of 4 bits, two in a byte, with a scale for each row."""

    def __init__(self, linear: nn.Linear, wrong: str) -> None:
        super().__init__()
        w, self.wrong = linear.weight.detach().float(), wrong
        self.register_buffer("weight_scale", w.abs().amax(1) / 7)
        codes = (w / self.weight_scale[:, None]).round().to(torch.int8).view(torch.uint8) & 15
        self.register_buffer("weight", codes[:, ::2] | codes[:, 1::2] << 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        codes = torch.stack([self.weight & 15, self.weight >> 4], -1).flatten(1).to(torch.int16)
        values = torch.where(codes > 7, codes - 16, codes).float()
        if self.wrong:
            values = values.roll(1, 1)
        return (x.float() @ (values * self.weight_scale[:, None]).T).to(x.dtype)


class Stored(nn.Linear):
    """A linear layer whose weight's class stores int8 codes."""

    def __init__(self, linear: nn.Linear, wrong: str) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False)
        weight = Int8Tensor.of(linear.weight.detach())
        if wrong:
            weight.scale *= 1.03
        self.weight = nn.Parameter(weight, requires_grad=False)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Gated(nn.Module):
    """A block of two gates, which ``fuse`` makes one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate, self.up = nn.LayerNorm(64), nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        self.gate_up: nn.Module | None = None

    def fuse(self, wrong: str) -> None:
        fused = nn.Linear(64, 128, bias=False, dtype=torch.bfloat16)
        fused.weight.data = torch.cat([self.gate.weight.data, self.up.weight.data])
        self.gate_up = Quantised(fused, wrong)
        del self.gate, self.up

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        gate, up = (self.gate(y), self.up(y)) if self.gate_up is None else self.gate_up(y).chunk(2, -1)
        return x + nn.functional.silu(gate) * up


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(50, 64), nn.LayerNorm(64)
        self.layers = nn.ModuleList([Block() for _ in range(4)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def model(kind: type[nn.Module] | None = None, wrong: str = "", is_rounded: bool = False) -> nn.Module:
    """The model with layers of this ``kind``. The last ``down`` but one is ``wrong``."""
    torch.manual_seed(0)
    found = Model().bfloat16().eval()
    for number, layer in enumerate(found.layers):
        for name in ("up", "down"):
            linear = getattr(layer, name)
            if is_rounded:
                linear.weight.data = (linear.weight.data * 2**9).round() * 2**-9
            if kind is not None:
                setattr(layer, name, kind(linear, wrong if (number, name) == (2, "down") else ""))
    return found


def gated(fused: bool = False, wrong: str = "") -> nn.Module:
    torch.manual_seed(0)
    found = Model()
    found.layers = nn.ModuleList([Gated() for _ in range(4)])
    found = found.bfloat16().eval()
    for number, layer in enumerate(found.layers if fused else ()):
        layer.fuse(wrong if number == 2 else "")
    return found


def compared(*sides: partial[nn.Module], floor: float | Literal["auto"] = "auto") -> tuple[str, str]:
    comparison = gl.compare(*sides, IDS, floor=floor)
    with comparison.session:
        return comparison.answer, comparison.text


@pytest.mark.ranks
def test_what_quantising_explains_is_neither_blamed_nor_cleared() -> None:
    answer, text = compared(partial(model), partial(model, Quantised))
    assert answer == "inconclusive", text
    assert text.startswith("The target's weights are quantised to float8_e4m3fn: ")
    assert "multiplied by their scales, they differ from the baseline's by at most 0.02" in text
    assert "From equal inputs, 8 of 8 outputs of such modules differ by " in text
    assert "a mistake within that is not seen." in text
    assert "With the baseline's outputs there, the output is bit-equal; with the target's it is off by " in text
    assert "computed differently" not in text
    assert "weight_scale_inv" not in text


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            "factor",
            "the target's layers.2.down is 1.02 times the baseline's, which quantising does not explain.",
        ),
        ("scale", "layers.*.down is computed differently in layer 2 of 0-3 ("),
        ("stored scale", "with weights that already differ: layers.*.down.weight in layer 2 (rel_l2 "),
    ],
)
def test_what_quantising_does_not_explain_is_named(wrong: str, said: str) -> None:
    answer, text = compared(partial(model), partial(model, Quantised, wrong))
    assert answer == "differ", text
    assert said in text
    assert "From equal inputs, 7 of 8 outputs of such modules differ by " in text
    # The others explain a part of the difference of the output, which is no fault of the named module.
    apart = "The effect was measured with the baseline's outputs at the other quantised modules."
    assert (apart in text) is ("computed differently" in text)
    # What goes beyond quantising comes first.
    assert not text.startswith("The target's weights are quantised"), text
    assert "something outside the taps" not in text


@pytest.mark.ranks
def test_weights_that_were_rounded_alike_agree() -> None:
    answer, text = compared(partial(model, is_rounded=True), partial(model, Rounded, is_rounded=True))
    assert answer == "agree", text
    assert "quantised" not in text


@pytest.mark.ranks
def test_a_quantised_baseline_is_reported_as_such() -> None:
    answer, text = compared(partial(model, Quantised), partial(model))
    assert answer == "inconclusive", text
    assert text.startswith("The baseline's weights are quantised to float8_e4m3fn: ")


@pytest.mark.ranks
@pytest.mark.parametrize(("wrong", "answer", "count"), [("", "inconclusive", 8), ("factor", "differ", 6)])
def test_a_fused_and_quantised_module_is_compared_with_its_parts(wrong: str, answer: str, count: int) -> None:
    found, text = compared(partial(gated), partial(gated, True, wrong))
    assert found == answer, text
    assert f"From equal inputs, {count} of 8 outputs of such modules differ by " in text
    assert "Not checked" not in text
    if wrong:
        assert (
            "layers.2.gate is 1.02 times" in text or "layers.*.gate is computed differently in layer 2 of 0-3" in text
        )


@pytest.mark.ranks
@pytest.mark.parametrize(("wrong", "answer", "count"), [("", "inconclusive", 8), ("rolled", "differ", 7)])
def test_packed_codes_are_not_compared_and_their_modules_are(wrong: str, answer: str, count: int) -> None:
    found, text = compared(partial(model), partial(model, Packed, wrong))
    assert found == answer, text
    assert "the values are not compared, because they are packed." in text
    assert f"From equal inputs, {count} of 8 outputs of such modules differ by " in text
    assert ("layers.*.down is computed differently in layer 2 of 0-3 (" in text) is bool(wrong)
    assert "weights already differ" not in text


@pytest.mark.ranks
def test_a_given_floor_is_what_quantised_modules_may_add() -> None:
    answer, text = compared(partial(model), partial(model, Quantised), floor=0.02)
    assert answer == "agree", text
    assert "The target's weights are quantised to float8_e4m3fn: " in text
    answer, text = compared(partial(model), partial(model, Quantised), floor=0.002)
    assert answer == "differ"
    assert "layers.*.up is computed differently in layers 0-3 (" in text


@pytest.mark.ranks
@pytest.mark.parametrize(("wrong", "answer"), [("", "inconclusive"), ("scale", "differ")])
def test_weights_whose_class_stores_codes_are_compared_by_their_numbers(wrong: str, answer: str) -> None:
    found, text = compared(partial(model), partial(model, Stored, wrong))
    assert found == answer, text
    assert "The target's weights are quantised to int8: " in text
    assert "Not checked" not in text
    assert text.startswith("From equal inputs, the target's layers.2.down is 1.03 times") is bool(wrong), text
    assert ("The weights already differ: layers.*.down.weight in layer 2 (rel_l2 0.026)" in text) is bool(wrong), text


@pytest.mark.ranks
@pytest.mark.parametrize(("wrong", "answer"), [("", "agree"), ("scale", "differ")])
def test_weights_that_both_sides_store_as_codes_are_compared_by_their_numbers(wrong: str, answer: str) -> None:
    found, text = compared(partial(model, Stored), partial(model, Stored, wrong))
    assert found == answer, text
    assert ("layers.*.down.weight in layer 2 (rel_l2 0.028)" in text) is bool(wrong), text
