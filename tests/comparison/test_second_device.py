"""Comparisons of models that are on a device beside the CPU, as on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import second_device
from torch import nn
from torch.utils.checkpoint import checkpoint

import graftlab as gl
from graftlab.__main__ import main

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(
        second_device.compiler() is None or torch.__version__ < "2.13", reason="needs a C++ compiler and torch 2.13"
    ),
]

TOKENS = torch.randint(0, 40, (2, 7), generator=torch.Generator().manual_seed(3))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.scale = 4.0**-0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.unflatten(-1, (4, 4)).transpose(1, 2) for each in self.qkv(self.norm(x)).chunk(3, -1))
        y = (q @ k.mT * self.scale).softmax(-1) @ v
        return x + self.out(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = nn.Embedding(40, 16), nn.Sequential(Block(), Block()), nn.Linear(16, 40)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(tokens.to(self.embed.weight.device))))


def model(dtype: torch.dtype = torch.float32, scale: float = 1.0, device: str | None = None) -> nn.Module:
    torch.manual_seed(0)
    made = Model().eval().to(device or second_device.load(), dtype)
    made.blocks[1].scale *= scale
    return made


def compared(
    baseline: Callable[[], nn.Module], target: Callable[[], nn.Module], backward: bool = False
) -> tuple[str, str]:
    comparison = gl.compare(baseline, target, TOKENS, backward=backward)
    with comparison.session:
        return comparison.answer, comparison.text


@pytest.mark.parametrize("baseline", [pytest.param("second", marks=pytest.mark.soak), "cpu"])
def test_models_on_a_second_device_agree(baseline: str) -> None:
    answer, text = compared(partial(model, device=None if baseline == "second" else "cpu"), partial(model))
    assert answer == "agree", text
    assert "No tap adds more than rounding" in text


def on_default_device(scale: float = 1.0) -> nn.Module:
    torch.set_default_device("cpu")
    made = model(scale=scale)
    torch.set_default_device(second_device.load())
    return made


def test_code_that_sets_the_default_device_is_compared() -> None:
    answer, text = compared(on_default_device, on_default_device)
    assert answer == "agree", text
    assert "failed" not in text
    answer, text = compared(on_default_device, partial(on_default_device, 1.05))
    assert answer == "differ", text
    assert "q @ k.mT * self.scale" in text


def test_a_line_is_named_on_a_second_device() -> None:
    answer, text = compared(partial(model), partial(model, scale=1.05))
    assert answer == "differ"
    assert "q @ k.mT * self.scale" in text
    assert "the output agrees" in text


def test_16_bits_are_judged_in_float32_on_a_second_device() -> None:
    half = partial(model, torch.bfloat16)
    assert compared(half, half)[0] == "agree"
    answer, text = compared(half, partial(model, torch.bfloat16, 1.02))
    assert answer == "differ", text
    assert "q @ k.mT * self.scale" in text


class HalvedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / 2


def with_halved_gradient() -> nn.Module:
    made = model()
    forward = made.blocks[1].out.forward
    made.blocks[1].out.forward = lambda x: HalvedGradient.apply(forward(x))
    return made


def test_gradients_are_compared_on_a_second_device() -> None:
    assert compared(partial(model), partial(model), backward=True)[0] == "agree"
    answer, text = compared(partial(model), with_halved_gradient, backward=True)
    assert answer == "differ"
    assert "gradient / 2" in text


class Checkpointed(nn.Module):
    """Computes each block again in the backward pass, which runs on a thread of the device."""

    def __init__(self) -> None:
        super().__init__()
        self.model = model()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.model.embed(tokens.to(self.model.embed.weight.device))
        for block in self.model.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.model.head(x)


def test_taps_of_recomputed_code_belong_to_the_run_that_calls_backward() -> None:
    comparison = gl.compare(Checkpointed, Checkpointed, TOKENS, backward=True)
    with comparison.session as session:
        assert comparison.answer == "agree", comparison.text
        statuses = {status for run in session.runs for status in run.frame.get("status", [])}
    # Runs of one side alone handle their taps by themselves, and make no rows.
    assert statuses <= {"compared", "grafted"}


TRAINING = """
import sys
sys.path[:0] = [{tests!r}, {folder!r}]
import torch
from comparison.test_second_device import TOKENS, model
from torch.nn import functional as F

trained = model().train()
optimizer = torch.optim.AdamW(trained.parameters(), weight_decay={decay})
for _ in range(3):
    optimizer.zero_grad()
    logits = trained(TOKENS)
    F.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten().to(logits.device)).backward()
    optimizer.step()
"""


@pytest.mark.usefixtures("warm_scripts")
@pytest.mark.parametrize(("decay", "exit_code"), [pytest.param(0.01, 0, marks=pytest.mark.soak), (0.1, 1)])
def test_scripts_that_train_are_compared_on_a_second_device(
    decay: float, exit_code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tests = str(Path(__file__).resolve().parents[1])
    one, other = tmp_path / "one.py", tmp_path / "other.py"
    one.write_text(TRAINING.format(tests=tests, folder=str(tmp_path), decay=0.01))
    other.write_text(TRAINING.format(tests=tests, folder=str(tmp_path), decay=decay))
    assert main(["compare", str(one), str(other)]) == exit_code
    assert ("weight_decay" in capsys.readouterr().out) == bool(exit_code)


def backward_twice() -> None:
    device, here = second_device.load(), gl.here()
    assert here is not None
    weight = nn.Parameter(torch.full((3, 3), 0.5, device=device))
    loss = gl.tap("out", torch.ones(2, 3, device=device) @ weight).square().mean()
    if here.side == "target":
        loss.backward(retain_graph=True)
    loss.backward()
    gl.tap("weight", weight.grad, kind="param_grad")


def test_a_line_of_the_backward_pass_is_named_though_it_runs_on_another_thread() -> None:
    with gl.launch(baseline=1, target=1) as session:
        verdict = session.verdict(backward_twice, backward_twice)
    assert verdict.lines["source"].tolist() == ["loss.backward()"], verdict.text


class Rounded(nn.Module):
    """A linear layer of int8 weights with a scale for each row."""

    def __init__(self, linear: nn.Linear, factor: float) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("weight_scale", scale * factor)
        self.register_buffer("bias", linear.bias.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.weight_scale, self.bias)


def quantised(factor: float) -> nn.Module:
    made = model(device="cpu")
    for number, block in enumerate(made.blocks):
        block.qkv = Rounded(block.qkv, factor if number else 1.0)
    return made.to(second_device.load())


@pytest.mark.parametrize(("baseline", "factor"), [("cpu", 1.0), ("second", 1.05)])
def test_a_quantised_target_on_a_second_device_is_compared_by_its_numbers(baseline: str, factor: float) -> None:
    answer, text = compared(partial(model, device=None if baseline == "second" else "cpu"), partial(quantised, factor))
    assert answer == ("inconclusive" if factor == 1 else "differ"), text
    assert "The target's weights are quantised to int8: blocks.*.qkv.weight" in text
    assert ("blocks.1.qkv is 1.05 times the baseline's" in text or "blocks.*.qkv is computed differently" in text) is (
        factor != 1
    ), text
