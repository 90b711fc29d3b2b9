"""Tensor parallel code without layouts: taps before an all-reduce are summands, and nothing is blamed for that."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import graftlab as gl

RANKS = 1, 2

pytestmark = pytest.mark.ranks


class Block(nn.Module):
    """A column-parallel and a row-parallel layer, as they are written by hand; the sum is taken in the parent."""

    def __init__(self, part: slice) -> None:
        super().__init__()
        up, down = torch.randn(16, 8) * 0.3, torch.randn(8, 16) * 0.3
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)
        self.up.weight = nn.Parameter(up[part].clone(), requires_grad=False)
        self.down.weight = nn.Parameter(down[:, part].clone(), requires_grad=False)


class Split(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        me = gl.here()
        assert me is not None
        torch.manual_seed(0)
        self.is_split, self.fault = me.side == "target", fault if me.side == "target" else ""
        part = slice(8 * me.rank, 8 * me.rank + 8) if self.is_split else slice(None)
        self.layers = nn.ModuleList(Block(part) for _ in range(3))
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            h = layer.down(F.silu(layer.up(layer.norm(x))))
            if self.is_split and not (self.fault == "missing" and number == 1):
                dist.all_reduce(h)
            if self.fault == "mean" and number == 1:
                h = h / 2
            x = x + h
        normed: torch.Tensor = self.norm(x)
        return normed


def forward(fault: str) -> torch.Tensor:
    model = Split(fault)
    with gl.watch(model), torch.no_grad():
        result: torch.Tensor = model(torch.linspace(-2, 2, 48).sin().reshape(6, 8))
        return result


def test_a_right_target_whose_taps_are_summands_is_cleared(session: gl.Session) -> None:
    verdict = session.verdict(forward, forward, args=("",))
    assert verdict.named == []
    assert verdict.text.startswith("Nothing that was checked adds more than rounding")
    assert "\nNot checked: layers.*.down: each rank of the target has a summand of this value" in verdict.text


@pytest.mark.parametrize(("fault", "line"), [("missing", None), ("mean", "h = h / 2")])
def test_a_mistake_beside_summands_is_named_after_them(session: gl.Session, fault: str, line: str | None) -> None:
    verdict = session.verdict(forward, forward, args=(fault,))
    # The residual stream has no tap; all that read it after the second layer see the mistake, and nothing before.
    assert verdict.named == ["layers.*.norm", "norm"]
    assert verdict.text.startswith(
        "The model is computed differently in layer 2 of 0-2 on all ranks, between layers.*.up and layers.*.norm"
    )
    if line is not None:
        assert line in set(verdict.lines["source"])


def halved() -> torch.Tensor:
    x = gl.tap("x", torch.linspace(-1, 1, 24).reshape(4, 6))
    factor = 0.5 if gl.here().side == "target" else 1.0  # type: ignore[union-attr]
    return gl.tap("out", gl.tap("sum", x * factor) * 2)


def test_copies_that_are_wrong_by_the_number_of_ranks_are_not_summands(session: gl.Session) -> None:
    assert session.verdict(halved, halved).named == ["sum"]
