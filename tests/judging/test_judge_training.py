"""Verdicts on training: differing inputs are reported first, and the update of a weight is blamed last."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from kit.support import reset
from torch import nn

import graftlab as gl

pytestmark = pytest.mark.ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return out


class Net(nn.Module):
    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 16)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.checkpointed = checkpointed

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        out: torch.Tensor = x @ self.embed.weight.T
        return out


def train(fault: str = "") -> None:
    """Two steps; on the target with a fault."""
    me = gl.here()
    assert me is not None
    wrong = fault if me.side == "target" else ""
    model = Net(checkpointed=wrong == "checkpointed")
    tokens = torch.arange(20).reshape(2, 10) % 11
    if wrong == "weight":
        model.layers[1].up.weight.data *= 1.01
    if wrong == "tokens":
        tokens = (tokens + 1) % 11
    if wrong == "tanh":
        model.layers[1].up.register_forward_hook(lambda module, args, out: out * 1.01)
    decayed = [p for n, p in model.named_parameters() if "norm" not in n or wrong == "decays the norm"]
    rest = [p for n, p in model.named_parameters() if "norm" in n and wrong != "decays the norm"]
    options = {"betas": (0.9, 0.98 if wrong == "beta" else 0.999)}
    groups = [{"params": decayed, "weight_decay": 0.1}, *([{"params": rest, "weight_decay": 0.0}] if rest else [])]
    optimizer = torch.optim.AdamW(groups, lr=0.01, **options)  # type: ignore[arg-type]
    if wrong == "forgets a moment":
        optimizer.register_step_post_hook(lambda o, a, k: [s["exp_avg"].zero_() for s in o.state.values()])
    with gl.watch(model, grads=True, params=True, inputs=True), gl.watch_training(model, optimizer):
        for _ in range(2):
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            (loss * (2 if wrong == "scaled loss" else 1)).backward()
            if wrong == "clips":
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
            gl.step()


@pytest.fixture(scope="module")
def verdict_on(launched: gl.Session) -> Callable[[str], Any]:
    """Returns the verdict on a fault, computed once for the tests that read it."""
    return cache(lambda fault: reset(launched).verdict(train, train, args=(fault,)))


def first_line(verdict: Any) -> str:
    return str(verdict.text.split("\n")[0])


def test_training_that_agrees_is_reported_to_agree(verdict_on: Callable[[str], Any]) -> None:
    verdict = verdict_on("")
    assert verdict.named == []
    assert first_line(verdict).startswith("No tap adds more than rounding (")


@pytest.mark.parametrize(
    ("fault", "first", "named"),
    [
        (
            "weight",
            "layers.*.up is computed differently in layer 1 of 0-2 ",
            ["layers.*.up", "layers.*.up.weight@param"],
        ),
        ("tokens", "The inputs already differ: input.tokens (rel_l2 ", ["input.tokens@input", "output@grad"]),
        (
            "beta",
            "The optimizer's settings already differ: optimizer.betas[1] (0.999 on the baseline, 0.98 on ",
            None,
        ),
        (
            "decays the norm",
            "The optimizer's settings already differ: optimizer.weight_decay (0 on the baseline, 0.1 on ",
            None,
        ),
    ],
)
def test_differing_inputs_are_reported_first(
    verdict_on: Callable[[str], Any], fault: str, first: str, named: list[str] | None
) -> None:
    verdict = verdict_on(fault)
    assert first_line(verdict).startswith(first), verdict.text
    if named is not None:
        assert verdict.named == named, verdict.text
        assert "@input" not in verdict.text
    if fault == "weight":
        # One sentence has the weight and the module that reads it.
        assert "), with weights that already differ: layers.*.up.weight in layer 1 (rel_l2 0.01)." in verdict.text
        assert "The weights already differ" not in verdict.text


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("tanh", ["layers.*.up"]),
        ("scaled loss", ["output@grad"]),
        ("clips", [f"{name}@param_grad" for name in ("embed.weight",)]),
        ("beta", ["layers.*.up.weight.exp_avg_sq@optimizer"]),
        ("decays the norm", ["layers.*.norm.bias@param", "layers.*.norm.weight@param"]),
    ],
)
def test_blame_goes_to_the_value_computed_first(verdict_on: Callable[[str], Any], fault: str, named: list[str]) -> None:
    verdict = verdict_on(fault)
    assert set(named) <= set(verdict.named), verdict.text
    kinds = {each.rpartition("@")[2] if "@" in each else "" for each in verdict.named}
    wanted = {each.rpartition("@")[2] if "@" in each else "" for each in named}
    assert kinds <= wanted | {"param"}, verdict.text
    assert all(verdict.labels[each] == "culprit" for each in named)


def test_the_backward_of_differing_code_is_not_a_second_culprit(verdict_on: Callable[[str], Any]) -> None:
    verdict = verdict_on("tanh")
    assert verdict.named == ["layers.*.up"]
    assert verdict.labels["layers.*.norm@grad"] == "inherited"
    assert "The backward pass therefore differs too: the gradient of layers.*.norm, the gradient of" in verdict.text
    assert "With the baseline's layers.*.up the output agrees (" in verdict.text


def test_a_recomputed_forward_is_reported_and_names_no_group(verdict_on: Callable[[str], Any]) -> None:
    verdict = verdict_on("checkpointed")
    assert verdict.named == [], verdict.text
    assert "the recomputation of " in verdict.text
