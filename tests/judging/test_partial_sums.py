"""Tensor parallel code without layouts: taps before an all-reduce are summands, and nothing is blamed for that."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.rows import tap
from torch import nn
from torch.nn import functional as F

import graftlab as gl
from graftlab.errors import SessionError
from graftlab.judging.partial_sums import partial_sums
from graftlab.judging.verdict_runs import RunFilters
from graftlab.rows.store import to_frame

RANKS = 1, 2


class Block(nn.Module):
    """A column-parallel and a row-parallel layer, as they are written by hand; the sum is taken in the parent."""

    def __init__(self, part: slice) -> None:
        super().__init__()
        up, down = torch.randn(16, 8) * 0.3, torch.randn(8, 16) * 0.3
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)
        self.up.weight = nn.Parameter(up[part].clone(), requires_grad=False)
        self.down.weight = nn.Parameter(down[:, part].clone(), requires_grad=False)
        # Of a summand it makes another one.
        self.drop = nn.Dropout(0.0)


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
            h = layer.drop(layer.down(F.silu(layer.up(layer.norm(x)))))
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


@pytest.mark.ranks
def test_a_right_target_whose_taps_are_summands_is_cleared(session: gl.Session) -> None:
    verdict = session.verdict(forward, forward, args=("",))
    assert verdict.named == []
    assert verdict.text.startswith("Nothing that was checked adds more than rounding")
    left = "\nNot checked: layers.*.down, layers.*.drop: each rank of the target has a summand of these values"
    assert left in verdict.text


@pytest.mark.ranks
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


@pytest.mark.ranks
def test_copies_that_are_wrong_by_the_number_of_ranks_are_not_summands(session: gl.Session) -> None:
    assert session.verdict(halved, halved).named == ["sum"]


# ---- which taps hold summands, from given tensors -------------------------------------------------------------------


class Runs:
    """The runs of a verdict on one baseline rank and two of the target; ``parts`` are the target's tensors."""

    def __init__(self, whole: torch.Tensor, *parts: torch.Tensor, kept: bool = True) -> None:
        self.session: Any = SimpleNamespace(options=SimpleNamespace(baseline=1, target=2))
        self.whole, self.parts, self.kept = whole, parts, kept
        self.asked: list[RunFilters] = []

    def both(self, why: str, wanted: RunFilters) -> None:
        self.asked.append(wanted)

    def pair(self, name: str, rank: int, step: int, tags: object) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.kept:
            raise SessionError("no pair was kept")
        return self.whole, self.parts[rank]

    def found(self, **fields: Any) -> list[str]:
        """The taps with summands, where a row of each rank has these ``fields``."""

        def measured(rank: int, part: torch.Tensor) -> Any:
            sides = {"baseline": self.whole, "target": part}
            of_both = {f"mean_{side}": float(each.mean()) for side, each in sides.items()}
            of_both |= {f"std_{side}": float(each.std(correction=0)) for side, each in sides.items()}
            apart = float((part - self.whole).norm() / self.whole.norm())
            return tap("sum", 1, rank=rank, **{"rel_l2": apart, "numel": part.numel(), **of_both, **fields})

        rows = to_frame([measured(rank, part) for rank, part in enumerate(self.parts)])
        return [name for names in partial_sums(self, rows).values() for name in names]  # type: ignore[arg-type]


def drawn(seed: int) -> torch.Tensor:
    return torch.randn(64, generator=torch.Generator().manual_seed(seed))


def test_only_tensors_that_add_up_are_summands() -> None:
    one, other = drawn(0), drawn(1)
    runs = Runs(one + other, one, other)
    assert runs.found() == ["sum"]
    (wanted,) = runs.asked
    assert wanted.b2t == "True"
    assert "sum" in str(wanted.keep)
    # Their means add up, by chance.
    assert Runs(one + other, one, other.flip(0)).found() == []
    # They add up but for more than rounding.
    assert Runs(one + other, one, other + 1e-4 * drawn(2)).found() == []
    # Copies that are wrong by the number of ranks.
    assert Runs(2 * one, one, one).found() == []
    assert Runs(one + other, one, other, kept=False).found() == []


@pytest.mark.parametrize(
    "fields",
    [
        {"aligned_by": "gather(dim=0)"},
        {"nonfinite_differ": 1},
        {"dtype": "int64"},
        {"rel_l2": 1e-7},
        {"own": {"kind": "grad"}},
        {"side": "baseline"},
        {"status": "failed"},
    ],
)
def test_a_tap_that_a_layout_aligned_or_that_agrees_needs_no_run_to_be_no_summand(fields: dict[str, Any]) -> None:
    one, other = drawn(0), drawn(1)
    runs = Runs(one + other, one, other)
    assert runs.found(**fields) == []
    assert runs.asked == []
