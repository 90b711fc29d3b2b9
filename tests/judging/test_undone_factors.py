"""An embedding that one side scales in its module and the other behind it is no mistake, and hides none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit.rows import tap
from torch import nn
from torch.nn import functional as F

import graftlab as gl
from graftlab.comparison.answers import answer_of
from graftlab.errors import SessionError
from graftlab.judging.undone_factors import factors_not_compared, is_undone, scaled_taps
from graftlab.rows.store import to_frame

SCALE = 8.0


class Embedding(nn.Embedding):
    def __init__(self, scale: float) -> None:
        super().__init__(32, 8)
        self.scale = scale

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * self.scale


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor, sharp: float) -> torch.Tensor:
        out: torch.Tensor = x + self.down(F.silu(sharp * self.up(self.norm(x))))
        return out


class Model(nn.Module):
    """The target's embedding has the values of its table, and its model multiplies them by ``behind``."""

    def __init__(self, behind: float, sharp: float) -> None:
        super().__init__()
        me = gl.here()
        assert me is not None
        torch.manual_seed(0)
        is_target = me.side == "target"
        self.behind, self.sharp = (behind, sharp) if is_target else (1.0, 1.0)
        self.embed = Embedding(1.0 if is_target else SCALE)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.RMSNorm(8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) * self.behind
        for layer in self.layers:
            x = layer(x, self.sharp)
        normed: torch.Tensor = self.norm(x)
        return normed


def forward(behind: float, sharp: float, first: int = 0) -> torch.Tensor:
    """From tokens that begin with ``first`` in the target."""
    model = Model(behind, sharp)
    me = gl.here()
    assert me is not None
    begin = first if me.side == "target" else 0
    with gl.watch(model, inputs=True), torch.no_grad():
        result: torch.Tensor = model(torch.arange(begin, begin + 6).reshape(1, 6))
        return result


@pytest.mark.ranks
def test_a_right_target_that_scales_behind_its_embedding_is_cleared(session: gl.Session) -> None:
    verdict = session.verdict(forward, forward, args=(SCALE, 1.0))
    assert verdict.named == []
    assert "\nNot checked: embed (0.125 times): the target's value is a multiple of the baseline's" in verdict.text
    assert answer_of(verdict.findings, True, True) == "agree"


@pytest.mark.ranks
def test_a_target_that_scales_behind_its_embedding_is_cleared_from_other_tokens(session: gl.Session) -> None:
    verdict = session.verdict(forward, forward, args=(SCALE, 1.0, 2))
    assert verdict.named == ["input.ids@input"]
    assert "\nNot checked: embed (0.125 times): the target's value is a multiple of the baseline's" in verdict.text


@pytest.mark.ranks
@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("behind", [1.0, 7.0])
def test_a_factor_that_is_missing_or_wrong_is_not_left_out(session: gl.Session, behind: float, first: int) -> None:
    verdict = session.verdict(forward, forward, args=(behind, 1.0, first))
    assert "embed" in verdict.named
    assert "is a multiple of the baseline's" not in verdict.text
    assert answer_of(verdict.findings, True, True) == "differ"


@pytest.mark.ranks
def test_a_mistake_beside_an_undone_factor_is_named_alone(session: gl.Session) -> None:
    verdict = session.verdict(forward, forward, args=(SCALE, 1.1))
    assert verdict.named == ["layers.*.down"]
    assert any("F.silu(sharp" in source for source in verdict.lines["source"])


def scaled(found: Any, **fields: Any) -> dict[str, Any]:
    expected = torch.linspace(1, 2, 8)
    usual = {"std_target": 0.25, "rank": 0, "status": "compared", "nonfinite_differ": 0} | fields
    rows = [tap("a", 0, 0.75, **usual), tap("b", 1, 0.1, **{"rank": 0, "status": "compared"})]
    rows += [tap("a", 0, 0.75, **usual | {"rank": 1})]

    def pair(name: str, rank: int, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if found is None:
            raise SessionError("the pair was not kept")
        return expected, found if rank == 0 else expected / 4

    runs: Any = SimpleNamespace(recorded=False, both=lambda why, filters: None, pair=pair)
    evidence: Any = SimpleNamespace(compared=to_frame(rows))
    return {group: dict(factors) for group, factors in scaled_taps(runs, evidence, ["a", "b"]).items()}


def test_only_exact_multiples_count_as_scaled() -> None:
    right = torch.linspace(1, 2, 8) / 4
    assert scaled(right) == {"a": {"a": pytest.approx(0.25)}}
    assert scaled(right + 1e-3 * torch.tensor([1.0, -1.0] * 4)) == {}
    assert scaled(None) == {}
    assert scaled(right, std_target=0.5) == {}


def test_a_factor_is_undone_if_fewer_groups_are_named_without_it_and_no_others() -> None:
    assert is_undone(["embed", "norm", "up"], ["up"], "embed")
    assert not is_undone(["embed", "norm"], ["norm"], "embed")
    assert not is_undone(["embed", "norm"], ["down"], "embed")
    assert not is_undone(["embed"], [], "embed")
    assert factors_not_compared({}) == []
