"""Tensor parallel code without layouts: taps before an all-reduce are summands, and nothing is blamed for that."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.rows import tap
from torch import nn
from torch.nn import functional as F

import graftlab as gl
from graftlab.comparison.answers import answer_of
from graftlab.errors import SessionError
from graftlab.judging.partial_sums import (
    Summands,
    _are_far,
    _means_add_up,
    _sum_apart,
    averages_of_parts,
    next_taps,
    not_compared,
    partial_sums,
)
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
        # Its result is a summand too.
        self.drop = nn.Dropout(0.0)


class Rounded(nn.Module):
    """A linear layer of int8 weights with a scale for each row."""

    def __init__(self, linear: nn.Module, factor: float) -> None:
        super().__init__()
        weight = linear.weight.detach()
        scale = weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (weight / scale).round().to(torch.int8))
        self.register_buffer("weight_scale", scale)
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.weight * self.weight_scale * self.factor).T


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

        for number, layer in enumerate(self.layers if "quantised" in self.fault else ()):
            layer.up = Rounded(layer.up, 1.0)
            layer.down = Rounded(layer.down, 1.3 if "wrong" in self.fault and (number, me.rank) == (1, 1) else 1.0)
        if self.fault == "one rank" and me.rank == 1:
            self.layers[1].down.weight *= 1.05

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            sharp = 1.01 if self.fault in ("activation", "diluted") else 1.0
            h = layer.drop(layer.down(F.silu(sharp * layer.up(layer.norm(x)))))
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
        scale = 1e5 if fault == "diluted" else 1.0
        result: torch.Tensor = model(scale * torch.linspace(-2, 2, 48).sin().reshape(6, 8))
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


@pytest.mark.ranks
def test_wrong_summands_in_one_layer_are_named_there_alone(session: gl.Session) -> None:
    verdict = session.verdict(forward, forward, args=("one rank",))
    assert verdict.named == ["layers.*.norm", "norm"]
    assert "they add up to the baseline's, but not at layers.1.down, layers.1.drop. What follows is" in verdict.text


@pytest.mark.ranks
def test_a_mistake_before_the_summands_of_all_layers_is_named_at_its_line(session: gl.Session) -> None:
    verdict = session.verdict(forward, forward, args=("activation",))
    assert "layers.*.down" not in verdict.named
    assert "layers.*.norm" in verdict.named
    assert any("F.silu(sharp" in source for source in verdict.lines["source"])
    assert "has a summand of these values, and together they differ from the baseline's by 0.01" in verdict.text


@pytest.mark.ranks
def test_summands_that_do_not_add_up_are_not_cleared_where_nothing_later_shows_it(session: gl.Session) -> None:
    verdict = session.verdict(forward, forward, args=("diluted",))
    assert verdict.named == []
    assert verdict.text.startswith(
        "At layers.0.down, layers.1.down, layers.2.down, layers.0.drop and 2 more the sum over the target's ranks "
        "differs from the baseline's value, although what follows agrees to rounding"
    )
    assert answer_of(verdict.findings, True, True) == "inconclusive"


def forward_with_weights(fault: str) -> torch.Tensor:
    model = Split(fault)
    with gl.watch(model, params=True), torch.no_grad():
        result: torch.Tensor = model(torch.linspace(-2, 2, 48).sin().reshape(6, 8))
        return result


@pytest.mark.ranks
@pytest.mark.parametrize("fault", ["quantised", "quantised and wrong"])
def test_quantised_summands_are_none_of_what_is_named(session: gl.Session, fault: str) -> None:
    """What follows them shows the rounding of their weights."""
    verdict = session.verdict(forward_with_weights, forward_with_weights, args=(fault,))
    assert "The target's weights are quantised to int8: layers.*.up.weight" in verdict.text
    assert "\nNot checked: layers.*.down, layers.*.drop: each rank of the target has a summand of these" in verdict.text
    if "wrong" in fault:
        assert {"layers.*.norm"} <= set(verdict.named) <= {"layers.*.norm", "norm"}
        assert "in layer 2 of 0-2" in verdict.text
        assert ", but not at layers.1.down, layers.1.drop. What follows is" in verdict.text
    else:
        assert verdict.named == []


def halved() -> torch.Tensor:
    x = gl.tap("x", torch.linspace(-1, 1, 24).reshape(4, 6))
    factor = 0.5 if gl.here().side == "target" else 1.0  # type: ignore[union-attr]
    return gl.tap("out", gl.tap("sum", x * factor) * 2)


@pytest.mark.ranks
def test_copies_that_are_wrong_by_the_number_of_ranks_are_not_summands(session: gl.Session) -> None:
    assert session.verdict(halved, halved).named == ["sum"]


def averaged(fault: bool) -> None:
    me = gl.here()
    assert me is not None
    x = torch.linspace(-2, 3, 48).reshape(6, 8).chunk(me.world_size)[me.rank]
    hidden = gl.tap("hidden", x * 2)
    wrong = fault and me.side == "target"
    gl.tap("loss", hidden.square().mean() * (1.01 if wrong else 1.0))


@pytest.mark.ranks
def test_a_loss_that_each_rank_has_of_its_part_of_the_batch_is_not_named(session: gl.Session) -> None:
    verdict = session.verdict(averaged, averaged, args=(False,))
    assert verdict.named == []
    assert "\nNot checked: loss on each rank of the target: only the average over the ranks is the base" in verdict.text
    assert session.verdict(averaged, averaged, args=(True,)).named == ["loss"]


def losses(*values: float, aligned_by: str | None = "slice dim=0", **fields: Any) -> list[str]:
    """The averages among a sliced tap and a loss of 3.0 on the baseline and of these values on the target's ranks."""
    of_loss = {"numel": 1, "mean_baseline": 3.0, "std_target": 0.0, **fields}
    rows = [
        tap("loss", 2, abs(value - 3) / 3, rank=rank, **{"mean_target": value, **of_loss})
        for rank, value in enumerate(values)
    ]
    hidden = [tap("hidden", 1, rank=rank, aligned_by=aligned_by) for rank in range(len(values))]
    finite = {"nonfinite_baseline": 0, "nonfinite_target": 0}
    frame = to_frame([row._replace(**finite) for row in (*hidden, *rows)])
    # Ranks of two baselines each have a part themselves.
    assert averages_of_parts(frame, 2, len(values)) == []
    return averages_of_parts(frame, 1, len(values))


def test_an_average_over_ranks_is_one_number_of_ranks_that_share_a_batch() -> None:
    assert losses(2.0, 4.0) == losses(2.0, 4.0, 3.0) == ["loss"]
    assert losses(2.0, 4.1) == losses(2.0, 4.0, aligned_by=None) == losses(2.0, 4.0, numel=2) == []
    assert losses(3.0, 3.0) == losses(3.0) == losses(2.0, 4.0, dtype="int64") == []


# ---- which taps hold summands, from given tensors -------------------------------------------------------------------


def fields_of(whole: torch.Tensor, part: torch.Tensor) -> dict[str, Any]:
    """What a row says of both tensors."""
    sides = {"baseline": whole, "target": part}
    of_both = {f"mean_{side}": float(each.mean()) for side, each in sides.items()}
    of_both |= {f"std_{side}": float(each.std(correction=0)) for side, each in sides.items()}
    return {"rel_l2": float((part - whole).norm() / whole.norm()), "numel": part.numel(), **of_both}


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

    def found(self, limits: dict[str, float] | None = None, **fields: Any) -> list[str]:
        """The taps with summands, where a row of each rank has these ``fields``."""

        return [name for each in self.sums(limits, **fields).values() for name in each.names]

    def sums(self, limits: dict[str, float] | None = None, **fields: Any) -> dict[str, Summands]:
        def measured(rank: int, part: torch.Tensor) -> Any:
            return tap("sum", 1, rank=rank, **{**fields_of(self.whole, part), **fields})

        rows = to_frame([measured(rank, part) for rank, part in enumerate(self.parts)])
        return partial_sums(self, rows, limits or {})  # type: ignore[arg-type]


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
    # With a mistake in all layers the sums are near the value, and no further.
    near = Runs(one + other, one, other + 1e-2 * drawn(2)).sums()["sum"]
    assert near.wrong == ["sum"]
    assert 1e-3 < near.off < 1e-1
    assert Runs(one + other, one, other + 0.3 * drawn(2)).found() == []
    # A copy that is near is no summand.
    assert Runs(one, one, 1e-2 * drawn(2)).found() == []
    # Copies that are wrong by the number of ranks.
    assert Runs(2 * one, one, one).found() == []
    assert Runs(one + other, one, other, kept=False).found() == []
    # A rank that does not reach the tap has no summand of it, so those of the others are no sum.
    lacking = Runs(one + other, one, other)
    lacking.session.options.target = 3
    assert lacking.found() == lacking.asked == []


def test_summands_of_quantised_weights_add_up_to_what_quantising_explains() -> None:
    one, other = drawn(0), drawn(1)
    assert Runs(one + other, one, other + 0.01 * drawn(2)).found({"sum": 0.03}) == ["sum"]
    assert Runs(one + other, one, other + 0.01 * drawn(2)).sums({"sum": 0.03})["sum"].wrong == []
    assert Runs(one + other, one, other + 0.01 * drawn(2)).sums({"another": 0.03})["sum"].wrong == ["sum"]
    assert Runs(one + other, one, other + 0.2 * drawn(2)).found({"sum": 0.03}) == []


def test_most_calls_of_a_group_must_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = drawn(0), drawn(1)
    runs = Runs(one + other, one, other)

    def found(*offsets: float) -> dict[str, Summands]:
        rows = [
            tap(f"layers.{layer}.down", 1, rank=rank, **fields_of(one + other, part + rank * offset))
            for layer, offset in enumerate(offsets)
            for rank, part in enumerate((one, other))
        ]
        tensors.update({f"layers.{layer}.down": (one, other + offset) for layer, offset in enumerate(offsets)})
        return partial_sums(runs, to_frame(rows))  # type: ignore[arg-type]

    tensors: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    monkeypatch.setattr(runs, "pair", lambda name, rank, *_: (one + other, tensors[name][rank]))
    names = [f"layers.{layer}.down" for layer in range(3)]
    assert found(0, 0.5, 0) == {"layers.*.down": Summands(names, ["layers.1.down"])}
    assert found(0, 0.5, 0.5) == {}
    assert found(0, 0.5) == {}
    # Not more than three calls are added up, and those show that the group has summands.
    assert found(0, 0, 0, 0, 0) == {"layers.*.down": Summands([f"layers.{n}.down" for n in range(5)], [])}
    # The first three calls of the group are mostly wrong, and those that seem right decide.
    five = [f"layers.{layer}.down" for layer in range(5)]
    assert found(0.5, 0.5, 0, 0, 0) == {"layers.*.down": Summands(five, five[:2])}
    # The mean of this one is right.
    turned = other - 0.01 * (other - other.mean())
    wrong: dict[str, tuple[torch.Tensor, torch.Tensor]] = {names[1]: (one, turned)}
    monkeypatch.setattr(runs, "pair", lambda name, rank, *_: (one + other, {**tensors, **wrong}[name][rank]))
    assert found(0, 0, 0) == {"layers.*.down": Summands(names, ["layers.1.down"])}
    wrong[names[2]] = one, turned
    sums = found(0, 0, 0)["layers.*.down"]
    assert sums.wrong == names
    assert 0 < sums.off < 0.01


def test_the_taps_after_summands_are_those_that_the_ranks_show_next() -> None:
    rows = [
        tap(name, order, rank=rank, rel_l2=0.1)
        for rank in range(2)
        for order, name in enumerate(["up", "down", "dropped", "norm", "down", "out"], 1)
    ]
    assert next_taps(to_frame(rows), {"down", "dropped"}) == {"norm": "dropped", "out": "down"}
    assert next_taps(to_frame(rows), {"other"}) == {}
    # Between them, neither a gradient nor a value of the baseline is one that the target's ranks show.
    between = [tap("grad", 3, rank=0, rel_l2=0.1, own={"kind": "grad"}), tap("lone", 3, rank=0, side="baseline")]
    rows[2:2] = between
    assert next_taps(to_frame(rows), {"down", "dropped"}) == {"norm": "dropped", "out": "down"}
    # What another rank shows meanwhile does not follow.
    ways = [["up", "down", "norm"], ["first", "second", "third"]]
    rows = [tap(name, n, rank=rank, rel_l2=0.1) for rank, names in enumerate(ways) for n, name in enumerate(names, 1)]
    assert next_taps(to_frame(rows), {"down"}) == {"norm": "down"}


@pytest.mark.parametrize("sizes", [(2, 2), (1, 1), (2, 4)])
def test_only_ranks_beside_a_single_one_may_have_its_summands(sizes: tuple[int, int]) -> None:
    one, other = drawn(0), drawn(1)
    runs = Runs(one + other, one, other)
    runs.session.options = SimpleNamespace(baseline=sizes[0], target=sizes[1])
    assert runs.sums() == {}
    assert runs.asked == []


def test_means_add_up_whatever_their_signs() -> None:
    def call(whole: float, *parts: float) -> Any:
        usual = {
            "name": "x",
            "mean_baseline": whole,
            "std_baseline": 1.0,
            "numel": 10_000,
            "dtype": "float32",
            "cast": None,
        }
        return {rank: {**usual, "mean_target": part} for rank, part in enumerate(parts)}

    assert _means_add_up(call(-3.0, -1.0, -2.0), {})
    assert not _means_add_up(call(3.0, -1.0, -2.0), {})
    assert not _means_add_up(call(3.0, 1.0, 1.0), {})
    assert not _means_add_up(call(3.0, 2.0, 2.0), {})
    # Large means of opposite signs round more than their sum.
    assert _means_add_up({**call(0.001, -1e6, 1e6)}, {})
    assert [_are_far({0: {"rel_l2": 1.0}, 1: {"rel_l2": each}}) for each in (1.0, 1e-3)] == [True, False]


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


def test_what_a_whole_of_zeros_and_its_parts_have_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros, one = torch.zeros(64), drawn(0)
    call: Any = {rank: tap("sum", 1, rank=rank)._asdict() | {"in_run": 0} for rank in range(2)}
    # Summands that cancel are a sum, and others are as far from it as can be.
    assert _sum_apart(Runs(zeros, one, -one), call) == 0.0  # type: ignore[arg-type]
    assert _sum_apart(Runs(zeros, one, one + 1), call) == math.inf  # type: ignore[arg-type]


def test_a_limit_is_that_of_the_module_whose_part_a_tap_shows() -> None:
    one, other = drawn(0), drawn(1)
    near = other + 0.01 * drawn(2)
    runs = Runs(one + other, one, near)
    rows = [tap("m[0]", 1, rank=rank, **fields_of(one + other, part)) for rank, part in enumerate((one, near))]
    assert partial_sums(runs, to_frame(rows), {"m": 0.03})["m[0]"].wrong == []  # type: ignore[arg-type]
    assert partial_sums(runs, to_frame(rows), {"m[0]": 0.03})["m[0]"].wrong == ["m[0]"]  # type: ignore[arg-type]


def test_the_taps_after_summands_are_found_step_by_step() -> None:
    # In the second step the ranks reach fewer taps before the sum.
    steps = {0: ["up", "mid", "down", "norm"], 1: ["down", "out", "norm"]}
    rows = [tap(name, order, 0.1, step=step) for step, names in steps.items() for order, name in enumerate(names, 1)]
    assert next_taps(to_frame(rows), {"down"}) == {"norm": "down", "out": "down"}


def test_sums_that_add_up_and_those_that_are_near_have_a_sentence_each() -> None:
    assert not_compared({}) == []
    right, near = not_compared(
        {
            "a": Summands(["a.0", "a.1"], ["a.1"]),
            "b": Summands(["b"], ["b"], 0.012),
            "c": Summands(["c"], ["c"], 0.034),
        }
    )
    ending = "gl.tap(..., layout=...) declares partial sums, and compares their sum."
    assert right == (
        "a: each rank of the target has a summand of this value, and together they add up to the baseline's, but not "
        f"at a.1. What follows is judged without it; {ending}"
    )
    assert near == (
        "b, c: each rank of the target has a summand of these values, and together they differ from the baseline's by "
        f"0.034. What follows is judged without them; {ending}"
    )
