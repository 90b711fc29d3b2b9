"""A call of 16 bits that agrees is repeated in float32, where rounding hides less."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from kit.support import IS_2_6, has_compiler
from torch import nn
from torch.nn import functional as F

import graftlab as gl
from graftlab.__main__ import main
from graftlab.base.shipping import UnshippedValue
from graftlab.comparison.closer_look import CloserLook, in_more_bits, rounding_may_hide_mistakes
from graftlab.comparison.repeats import (
    JudgingChoice,
    NoCloserLookError,
    Repeats,
    _kept,
    _unequal_numbers,
    dtypes_to_round,
)
from graftlab.control.verdicts import Verdict
from graftlab.errors import GraftError
from graftlab.ranks import widening
from graftlab.ranks.float32_state import KnownState
from graftlab.ranks.held_call import WEIGHT, HeldCall, WatchChoice
from graftlab.verdict.findings import Findings

X = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(5))


class Block(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.norm, self.scale = way, nn.LayerNorm(32), torch.ones(32)
        self.qkv, self.out, self.up, self.down = (
            nn.Linear(32, 96),
            nn.Linear(32, 32),
            nn.Linear(32, 64),
            nn.Linear(64, 32),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.unflatten(-1, (4, 8)).transpose(1, 2) for each in self.qkv(self.norm(x)).chunk(3, -1))
        if self.way == "fused":
            y = F.scaled_dot_product_attention(q, k, v)
        else:
            y = (q @ k.mT / 8**0.5).float().softmax(-1).to(v.dtype) @ v
        x = x + self.out(y.transpose(1, 2).flatten(2))
        approximate = "tanh" if self.way == "tanh" else "none"
        return x + self.down(F.gelu(self.up(x), approximate=approximate)) * self.scale.to(x.dtype)


def model(way: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(way), Block(way)).to(dtype).eval()


def compared(way: str, dtype: torch.dtype) -> tuple[str, str]:
    comparison = gl.compare(partial(model, "", dtype), partial(model, way, dtype), X.to(dtype))
    with comparison.session:
        return comparison.answer, comparison.text


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.soak)])
def test_a_different_order_of_roundings_is_not_a_difference(dtype: torch.dtype) -> None:
    answer, text = compared("fused", dtype)
    assert answer == "agree"
    assert "differ:" not in text
    assert "in float32 for a closer look" not in text


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", [pytest.param(torch.bfloat16, marks=pytest.mark.soak), torch.float16])
def test_a_mistake_below_one_rounding_is_found_in_float32(dtype: torch.dtype) -> None:
    answer, text = compared("tanh", dtype)
    name = str(dtype).removeprefix("torch.")
    assert answer == "differ"
    assert text.startswith(f"In {name} the calls agree to rounding. In float32, from the same numbers, they differ:\n")
    assert "gelu(f32[2, 6, 64], approximate='tanh')" in text


def capped(net: nn.Module | None, cap: float | None, x: torch.Tensor) -> torch.Tensor:
    logits = (model("", torch.bfloat16) if net is None else net)(x)
    return logits if cap is None else torch.tanh(logits / cap) * cap


@pytest.mark.ranks
@pytest.mark.parametrize("way", ["", pytest.param("fused", marks=pytest.mark.soak)])
def test_a_mistake_after_the_last_tap_below_one_rounding_is_found_in_float32(way: str) -> None:
    nets = model("", torch.bfloat16), model(way, torch.bfloat16)
    comparison = gl.compare(partial(capped, nets[0], 30.0), partial(capped, nets[1], None), X.bfloat16())
    with comparison.session:
        assert comparison.answer == "differ"
        first, second = comparison.text.splitlines()[:2]
    assert first == "In bfloat16 the calls agree to rounding. In float32, from the same numbers, they differ:"
    assert second.startswith("Something after the last tap")


@pytest.mark.ranks
def test_a_mistake_below_one_rounding_is_found_where_the_function_makes_its_model() -> None:
    comparison = gl.compare(partial(capped, None, 30.0), partial(capped, None, None), X.bfloat16())
    with comparison.session:
        assert comparison.answer == "differ"
        first = comparison.text.splitlines()[0]
        imported = comparison.session.run(has_compiler, has_compiler)
    assert first == "In bfloat16 the calls agree to rounding. In float64, from the same numbers, they differ:"
    assert [*imported.baseline, *imported.target] == [IS_2_6, IS_2_6]


class Outer(nn.Module):
    """An MLP of a few layers, which are modules, or plain objects whose weights no run in float32 reaches."""

    def __init__(self, way: str, *, plain: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, layers = nn.Linear(32, 32), nn.LayerNorm(32), [nn.Linear(32, 32) for _ in range(4)]
        self.to(torch.bfloat16)
        if plain:
            self.hidden = [PlainLayer(each, way) for each in layers]
        else:
            self.layers = nn.ModuleList(layers).to(torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if hasattr(self, "hidden"):
            for layer in self.hidden:
                x = layer(x)
        else:
            for each in self.layers:
                x = x + F.gelu(each(x))
        return self.norm(x.to(self.norm.weight.dtype))


class PlainLayer:
    def __init__(self, layer: nn.Linear, way: str) -> None:
        self.weight, self.bias = layer.weight.detach().bfloat16(), layer.bias.detach().bfloat16()
        self.approximate = "tanh" if way == "tanh" else "none"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x.bfloat16()
        return x + F.gelu(x @ self.weight.T + self.bias, approximate=self.approximate)


@pytest.mark.ranks
@pytest.mark.parametrize(("way", "answer"), [("", "agree"), ("tanh", "differ")])
def test_weights_out_of_reach_are_no_mistake_and_hide_none(way: str, answer: str) -> None:
    comparison = gl.compare(partial(Outer, "", plain=False), partial(Outer, way, plain=True), X.bfloat16())
    with comparison.session:
        assert comparison.match is None
        assert comparison.answer == answer
        assert ("In float64, from the same numbers, they differ:" in comparison.text) is (answer == "differ")
        assert ("In float64 the sides agree, so only the rounding differs" in comparison.text) is (answer == "agree")


class Caching(nn.Module):
    def __init__(self, dtype: torch.dtype, way: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way, self.key, self.out = way, nn.Linear(32, 32), nn.Linear(32, 32)
        self.register_buffer("cache", torch.zeros(2, 6, 32, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache.copy_(self.key(x))
        read = self.cache.float()
        if self.way == "in 16 bits alone" and self.cache.dtype == torch.bfloat16:
            read = read.roll(1, 1)
        y: torch.Tensor = self.out(F.gelu(read, approximate="tanh" if self.way == "tanh" else "none"))
        return y


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("way", "answer", "says"),
    [
        ("", "inconclusive", "With these in float32, from the same numbers, the calls agree. So their rounding may"),
        ("tanh", "differ", "With these in float32, from the same numbers, they differ:"),
        ("in 16 bits alone", "differ", ""),
    ],
)
def test_state_that_one_side_alone_keeps_in_16_bits_is_judged_in_float32(way: str, answer: str, says: str) -> None:
    comparison = gl.compare(partial(Caching, torch.float32), partial(Caching, torch.bfloat16, way), X)
    with comparison.session:
        assert comparison.answer == answer
        text = comparison.text
    assert says in text
    assert ("One side alone has cache in bfloat16." in text) == bool(says)
    assert ("approximate='tanh'" in text) == (way == "tanh")


@pytest.mark.ranks
def test_equal_calls_are_not_repeated_in_float32() -> None:
    answer, text = compared("", torch.bfloat16)
    assert answer == "agree"
    assert text.startswith("Nothing above bfloat16 rounding (")
    assert "and all are bit-equal." in text


@pytest.mark.ranks
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("warm_scripts")
@pytest.mark.parametrize(
    ("ways", "code", "says"),
    [
        pytest.param("fused", 0, "4 calls of Model agree.", marks=pytest.mark.soak),
        ("fused wrong", 1, "1.01"),
        ("fused paged", 0, "4 calls of Model agree."),
        pytest.param("fused paged wrong", 1, "1.01", marks=pytest.mark.soak),
    ],
)
def test_caches_that_differ_by_rounding_are_equal_in_float32(
    ways: str, code: int, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = Path(__file__).with_name("scripts") / "cached.py"
    assert main(["compare", str(script), f"{script} {ways}", "--folder", str(tmp_path)]) == code
    printed = capsys.readouterr().out
    assert says in printed
    assert "@input" not in printed


@pytest.mark.ranks
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("warm_scripts")
@pytest.mark.parametrize(
    ("ways", "code", "says"),
    [
        pytest.param("fused", 0, "4 calls of Model agree.", marks=pytest.mark.soak),
        ("fused wrong", 1, "1.01"),
    ],
)
def test_tensor_parallel_calls_are_looked_at_in_float32(
    ways: str, code: int, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = Path(__file__).with_name("scripts") / "cached.py"
    launcher = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2"
    assert main(["compare", str(script), f"{launcher} {script} {ways}", "--folder", str(tmp_path)]) == code
    printed = capsys.readouterr().out
    assert says in printed
    if code:
        assert "In bfloat16 the calls agree to rounding. In float32, from the same numbers, they differ:" in printed


def rounded_weight() -> nn.Module:
    block = model("", torch.bfloat16)
    with torch.no_grad():
        weight = block.get_parameter("0.up.weight")
        weight.copy_(weight.float() * (1 + 2**-8.6))
    return block


@pytest.mark.ranks
def test_code_that_reads_weights_of_another_rounding_is_not_blamed_in_float32() -> None:
    comparison = gl.compare(partial(model, "", torch.bfloat16), rounded_weight, X.bfloat16(), backward=True)
    with comparison.session:
        assert comparison.answer == "agree"
        assert "Weights that are not bit-equal, though within rounding" in comparison.text


@pytest.mark.ranks
def test_a_failure_in_float32_keeps_the_verdict_and_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise gl.RunError("run 9 failed on target[0]")

    monkeypatch.setattr(Repeats, "in_float32", fails)
    answer, text = compared("tanh", torch.bfloat16)
    assert answer == "inconclusive"
    assert "A run in float32 shows only the mistake" in text
    assert "Not checked: the same call in float32, which failed: run 9 failed on target[0]" in text


def test_the_target_reads_the_baselines_numbers_in_float32() -> None:
    same, other = torch.ones(2), torch.zeros(2)
    assert _unequal_numbers({"x": same, "y": same}, {"x": same.clone(), "y": other}, False) == {"y": same}
    assert _unequal_numbers({"x": same}, {"renamed": same.clone()}, False) == {}
    assert _unequal_numbers({"x": same}, {"cache": other}, False) == (
        "the target reads cache, which earlier calls may have written, and the baseline has no such tensor"
    )
    assert _unequal_numbers({"x": same}, {"cache": other}, True) == {}
    assert isinstance(_unequal_numbers({"x": same}, {"x": other[:1]}, False), str)
    # An argument of another name, such as an encoder's result, that is the only one near.
    near = torch.tensor([1.0, 1.01])
    assert _unequal_numbers({"encoded": same, "x": other}, {"memory": near, "x": other}, False) == {"memory": same}
    assert isinstance(_unequal_numbers({"encoded": same, "mask": same}, {"memory": near}, False), str)
    assert _unequal_numbers({"encoded": same, "memory": same}, {"memory": same, "cache": near}, True) == {"cache": same}
    # A rank's own heads of a cache, which differ by rounding.
    whole = torch.arange(24.0).reshape(2, 4, 3)
    (part,) = _unequal_numbers({"x": whole}, {"x": whole[:, 2:] + 1e-3}, False).values()  # type: ignore[union-attr]
    assert torch.equal(part, whole[:, 2:])
    assert _unequal_numbers({"x": whole}, {"x": whole[:, 2:].clone()}, False) == {}
    for unlike in (whole[:, 2:] + 100, whole[:, 1:], whole[0], whole[:1, 2:], whole[:, :0]):
        assert isinstance(_unequal_numbers({"x": whole}, {"x": unlike}, False), str)
    # A cache of the other dtype is read as the baseline has it, in the target's.
    (read,) = _unequal_numbers({"x": other}, {"x": same.bfloat16()}, False).values()  # type: ignore[union-attr]
    assert torch.equal(read, other.bfloat16())
    assert read.dtype == torch.bfloat16
    assert isinstance(_unequal_numbers(None, {}, True), str)
    assert isinstance(_unequal_numbers({}, UnshippedValue("dict", "{...}", "a tensor of its own class"), True), str)
    x, y = torch.ones(2, dtype=torch.bfloat16), torch.ones(2)
    held = HeldCall(lambda: x + y, {}, {"x": x, "y": y}, WatchChoice())
    assert held.widen({"y": torch.full((2,), 3.0)}, {}) is None
    assert held()[""].tolist() == [4.0, 4.0]
    held.narrow()
    assert held()[""].tolist() == [2.0, 2.0]
    assert held.widen({"y": torch.full((2,), 1 + 2**-12)}, {"y": torch.bfloat16}) is None
    assert held()[""].tolist() == [2.0, 2.0]
    held.narrow()


def test_state_without_a_partner_is_kept_only_if_both_sides_know_all_of_theirs() -> None:
    def kept(ours: KnownState, *theirs: KnownState) -> tuple[set[str], set[str]]:
        read = SimpleNamespace(baseline=[{"x": X, "cache": X}], target=[{"x": X, "pages": X, "table": X}] * len(theirs))
        found = _kept(read, SimpleNamespace(baseline=[ours], target=[*theirs]))  # type: ignore[arg-type]
        return {*found[0]}, {*found[1]}

    ours, theirs = (
        KnownState(frozenset(same), frozenset(wide)) for same, wide in (((), ("cache",)), (("table",), ("pages", "x")))
    )
    assert kept(ours, theirs) == ({"cache"}, {"pages"})
    unknown = KnownState(frozenset({"table"}))
    for lacking in ((KnownState(), theirs), (ours, unknown), (ours, theirs, KnownState()), (ours, theirs, unknown)):
        assert kept(*lacking) == (set(), set())
    assert _unequal_numbers({"x": X}, {"pages": X + 1}, False, {"pages"}) == {}


def test_what_one_side_has_in_float32_is_rounded_as_on_the_other() -> None:
    half, full = torch.bfloat16, torch.float32
    wide = {"a@param": full, "n@param": full, ".freq": full, "args[0]": full}
    assert dtypes_to_round(wide, {"a@param": half, "n@param": full, ".freq": half, "args[0]": half}) == {
        "a@param": half,
        ".freq": half,
        "args[0]": half,
    }
    assert dtypes_to_round({"a@param": half}, wide) == {}
    # Under another name it has the dtype of all weights there, if they have one.
    assert dtypes_to_round({"a@param": full, "x": full}, {"fused@param": half}) == {"a@param": half}
    assert dtypes_to_round({"a@param": full}, {"fused@param": half, "n@param": full}) is None
    assert dtypes_to_round({"a@param": full}, {"b@param": full, "x": half}) == {}
    assert dtypes_to_round({"a@param": half}, {"fused@param": half, "n@param": full}) == {}


def test_what_one_side_has_in_float32_is_rounded_as_the_weight_it_is_paired_with() -> None:
    half, full = torch.bfloat16, torch.float32
    mixed, pairs = (
        {"router@param": half, "scale@param": full},
        {"gate@param": ["router@param"], "n@param": ["scale@param"]},
    )
    assert dtypes_to_round({"gate@param": full, "n@param": full}, mixed, pairs.__getitem__) == {"gate@param": half}
    assert dtypes_to_round({"gate@param": full}, mixed, lambda path: [*mixed]) is None


def test_a_call_in_float32_has_its_own_weights_again_after_they_were_rounded() -> None:
    block = Block("")
    before = {name: each.clone() for name, each in block.state_dict().items()}
    held = HeldCall(lambda: block(X), {"": block}, {"x": X}, WatchChoice())
    first = held()[""]
    dtypes = held.dtypes()
    assert {*dtypes.values()} == {torch.float32}
    assert {name + WEIGHT for name, _ in block.named_parameters()} < {*dtypes}
    assert held.widen({}, {path: torch.bfloat16 for path in dtypes if path.endswith(WEIGHT)}) is None
    assert all(torch.equal(each, before[name].bfloat16().float()) for name, each in block.named_parameters())
    assert 0 < (held()[""] - first).abs().max() < 0.1
    held.narrow()
    assert torch.equal(held()[""], first)
    assert all(torch.equal(each, before[name]) for name, each in block.state_dict().items())


class Casting(nn.Module):
    """A model that converts what it is given to the dtype of its weights, as ports in 16 bits do."""

    def __init__(self, way: str, dtype: torch.dtype, fused: bool = False) -> None:
        super().__init__()
        self.blocks = model(way, dtype)
        if fused:
            # The same weights under another name.
            self.stack, self.blocks = self.blocks, nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        blocks = self.stack if isinstance(self.blocks, nn.Identity) else self.blocks
        out: torch.Tensor = blocks(x.to(next(blocks.parameters()).dtype))
        return out


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("way", "fused", "answer"),
    [
        pytest.param("fused", False, "agree", marks=pytest.mark.soak),
        ("", True, "agree"),
        ("tanh", False, "differ"),
        pytest.param("tanh", True, "differ", marks=pytest.mark.soak),
    ],
)
def test_a_target_in_16_bits_of_a_float32_baseline_is_judged_in_float32(way: str, fused: bool, answer: str) -> None:
    comparison = gl.compare(
        partial(Casting, "", torch.float32), partial(Casting, way, torch.bfloat16, fused), X, match=fused
    )
    with comparison.session:
        assert comparison.answer == answer, comparison.text
        if answer == "agree":
            assert "nor above float32's in float32" in comparison.text
        else:
            assert comparison.text.startswith(
                "In bfloat16 the calls agree to rounding. In float32, from the same numbers, they differ:\n"
            )
            assert "gelu(f32[2, 6, 64], approximate='tanh')" in comparison.text
        assert "The weights already differ" not in comparison.text


def test_a_widened_call_has_its_own_numbers_again_afterwards() -> None:
    block, x = Block("").bfloat16(), X.bfloat16()
    before = {name: each.clone() for name, each in block.state_dict().items()}
    held = HeldCall(lambda: block(x), {"": block}, {"x": x}, WatchChoice())
    first = held()[""]
    assert held.widen({}, {}) is None
    assert held()[""].dtype == torch.float32
    assert 0 < (held()[""] - first.float()).abs().max() < 0.1
    held.narrow()
    assert torch.equal(held()[""], first)
    assert {x.dtype, *(each.dtype for each in block.state_dict().values())} == {torch.bfloat16}
    assert all(torch.equal(each, before[name]) for name, each in block.state_dict().items())


def test_a_call_that_cannot_run_in_float32_reports_why_and_stays_unchanged() -> None:
    weight = torch.ones(32, 4, dtype=torch.bfloat16)
    x = X.bfloat16()
    held = HeldCall(lambda: x @ weight, {}, {"x": x}, WatchChoice())
    assert "dtype" in str(held.widen({}, {}))
    assert held()[""].dtype == torch.bfloat16
    views = x.chunk(2)
    held = HeldCall(lambda: x, {}, {"x": views}, WatchChoice())
    assert held.widen({}, {}) == "some tensors share their memory"
    assert HeldCall(lambda: X, {}, {"x": X}, WatchChoice()).widen({}, {}) == "no tensor of 16 bits was found"


def test_a_call_runs_in_float32_only_if_each_rank_may_take_that_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    x = X.bfloat16()
    held = HeldCall(lambda: x * 2, {}, {"x": x}, WatchChoice())
    size = 4 * x.numel()
    monkeypatch.setattr(widening, "free_bytes", lambda device: 2 * 3 * size)
    assert held.widen({}, {}, sharing=3) is None
    held.narrow()
    reason = "in float32 its numbers take 0 MiB on cpu, and a rank may take 0 MiB of the free memory there"
    assert str(held.widen({}, {}, sharing=4)).startswith(reason)
    assert x.dtype == torch.bfloat16
    monkeypatch.setattr(widening, "free_bytes", lambda device: None)
    monkeypatch.setattr(widening, "_BUDGET", size - 1)
    assert str(held.widen({}, {})).startswith(reason)
    monkeypatch.setattr(widening, "_BUDGET", size)
    assert held.widen({}, {}) is None
    held.narrow()


# ---- what is looked at, without a run -------------------------------------------------------------------------------


def row(name: str = "h", **parts: Any) -> dict[str, Any]:
    usual = {"dtype": "bfloat16", "cast": None, "label": "clean", "ratio": 0.5, "added": 1e-3, "tags": {}, "order": 0}
    return {**usual, "name": name, "group": name, **parts}


def verdict(*rows: dict[str, Any], runs: int = 2, **parts: Any) -> Verdict:
    return Verdict(Findings(pd.DataFrame(list(rows)), 5.0, 1, **parts), runs)


class Widened:
    """Calls that give this verdict in float32, or raise, and have this state in 16 bits."""

    def __init__(self, wide: Verdict | Exception, state: dict[str, torch.dtype] | None = None) -> None:
        self.wide, self.state, self.asked = wide, state or {}, list[Any]()

    def in_float32(self, choice: JudgingChoice, **how: Any) -> Verdict:
        self.asked.append(how)
        if isinstance(self.wide, Exception):
            raise self.wide
        return self.wide

    def state_in_16_bits(self) -> dict[str, torch.dtype]:
        return self.state

    def constants_of_target_alone(self) -> list[str]:
        return []

    def note_equal(self) -> None:
        self.asked.append("equal")


OUTPUT = row("output", dtype="float32", added=0.0)


def looked(repeats: Widened, found: Verdict, unnamed: Sequence[str] = ()) -> CloserLook:
    return in_more_bits(repeats, found, JudgingChoice(), None, True, unnamed)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rows", "parts", "hides"),
    [
        ([row()], {}, True),
        ([row(added=0.0)], {}, False),
        ([row(dtype="float32")], {}, False),
        # Only the returned values differ, or taps in more bits whose computation rounds.
        ([row(added=0.0)], {"after_taps": 1e-3}, True),
        ([row(added=0.0, dtype="float32")], {"after_taps": 1e-3}, False),
        ([row(added=0.0, dtype="float32")], {"after_taps": 1e-3, "computed_in": "bfloat16"}, True),
        ([row(dtype="float32")], {"computed_in": "bfloat16"}, True),
        ([row(dtype="float32", added=0.0)], {"computed_in": "bfloat16"}, False),
        ([row(label="culprit")], {}, False),
        ([row()], {"unexplained": ["h differs."]}, True),
        ([row()], {"contradicting_pairs": ["k has the values of v."]}, True),
        ([row()], {"data": ["The weights already differ."]}, False),
    ],
)
def test_rounding_may_hide_a_mistake_only_where_16_bits_move_something(
    rows: list[dict[str, Any]], parts: dict[str, Any], hides: bool
) -> None:
    assert rounding_may_hide_mistakes(verdict(*rows, **parts)) == hides


def test_a_call_that_agrees_in_float32_too_has_its_largest_ratio_there() -> None:
    found, same = verdict(row(), OUTPUT), row(dtype="float32", added=1e-7, ratio=0.25)
    repeats = Widened(verdict(same, {**OUTPUT, "ratio": 0.75}, looked_in="float64", runs=3))
    look = looked(repeats, found)
    assert (look.verdict.runs, look.said, look.doubt, look.may_be_rounding) == (5, (), None, False)
    assert (look.verdict.findings.in_float32, look.verdict.findings.looked_in) == (0.75, "float64")
    assert repeats.asked == [{"is_first": True}]
    # What the taps show in more bits is computed in these now.
    repeats = Widened(verdict(same, OUTPUT, computed_in="bfloat16"))
    assert looked(repeats, found).verdict.findings.in_float32 == 0.5
    # A call that is bit-equal is not repeated.
    equal = verdict(row(added=0.0), OUTPUT)
    repeats = Widened(RuntimeError("not asked"))
    assert looked(repeats, equal) == CloserLook(equal)
    assert repeats.asked == ["equal"]


@pytest.mark.parametrize(
    ("wide", "why"),
    [
        ([row(dtype="float32"), row("g"), row("g")], "these compute in 16 bits even then: g"),
        # An input that both sides are given alike computes nothing.
        ([row("input.x@input"), row("input.y@input", added=0.0)], "these compute in 16 bits even then: input.x@input"),
        (
            [row("input.y@input", added=0.0, ratio=math.nan), row("h", dtype="float32", ratio=math.nan)],
            "it is inconclusive",
        ),
    ],
)
def test_a_look_in_float32_that_shows_nothing_is_said_not_to_be_made(wide: list[dict[str, Any]], why: str) -> None:
    found = verdict(row(), OUTPUT)
    look = looked(Widened(verdict(*wide)), found)
    assert (look.verdict, look.said) == (found, (f"Not checked: the same call in float32: {why}.",))


def test_what_differs_in_float32_alone_is_the_answer_unless_the_weights_do() -> None:
    found, wrong = verdict(row(), OUTPUT), row(dtype="float32", label="culprit", ratio=9.0)
    said = "In bfloat16 the calls agree to rounding. In float32, from the same numbers, they differ:"
    for parts in ({}, {"data": ["The weights already differ."], "weights_lent": True}):
        wide = verdict(wrong, OUTPUT, runs=3, **parts)
        look = looked(Widened(wide), found)
        assert (look.verdict.findings.named, look.verdict.runs, look.said) == (["h"], 5, (said,))
    look = looked(Widened(verdict(wrong, OUTPUT, data=["The weights already differ."])), found)
    why = "weights that are rounded differently differ in it"
    assert (look.verdict, look.said) == (found, (f"Not checked: the same call in float32: {why}.",))


def test_what_only_grafts_hide_is_rounding_where_float32_agrees() -> None:
    wide = verdict(row(dtype="float32"), {**OUTPUT, "ratio": 0.75})
    parts: dict[str, Any] = {"unexplained": ["h differs."]}
    unexplained = verdict(row(), OUTPUT, **parts)
    assert looked(Widened(wide), unexplained) == CloserLook(unexplained)
    look = looked(Widened(wide), verdict(row(), OUTPUT, **parts, only_without_grafts=True))
    assert look.verdict.findings.in_float32 == 0.75
    assert look.said[0].startswith("In float32, from the same numbers, the calls agree. In 16 bits they differ, though")


def test_rounding_that_adds_up_between_few_taps_is_a_doubt_if_the_look_fails() -> None:
    failed = Widened(NoCloserLookError("too large"))
    found = verdict(row("a"), row("a", order=1), row("b", ratio=float("nan")), OUTPUT)
    # Taps that have a partner in some calls, and those that are only given, are not counted.
    assert looked(failed, found, ["c", "d", "a"]).doubt is None
    look = looked(failed, found, ["c", "d", "e", "a"])
    assert look.said == ("Not checked: the same call in float32: too large.",)
    assert str(look.doubt).startswith(
        "2 taps of values were compared, and 3 of the baseline's have no partner. Between so few, rounding to bfloat16 "
        "adds up, and may hide a mistake."
    )
    assert looked(Widened(GraftError("it died\nlater")), found, "cdef").doubt is not None


NARROW_STATE = {"cache": torch.bfloat16}


def test_state_in_16_bits_on_one_side_may_explain_what_its_rounding_allows() -> None:
    def named(added: float, **parts: Any) -> Verdict:
        return verdict(row("h", dtype="float32", label="culprit", ratio=9.0, added=added), OUTPUT, **parts)

    agrees = verdict(row("h", dtype="float32", added=0.0), OUTPUT, runs=3)
    # Five roundings to bfloat16.
    for added, explains in ((0.019, True), (0.020, False)):
        look = looked(Widened(agrees, NARROW_STATE), named(added))
        assert look.may_be_rounding == explains
        if explains:
            assert look.verdict.runs == 5
            assert look.said[0].startswith("One side alone has cache in bfloat16. With these in float32, from the same")
    differs = verdict(row("g", dtype="float32", label="culprit", ratio=9.0), OUTPUT, runs=3)
    look = looked(Widened(differs, NARROW_STATE), named(0.01))
    assert (look.verdict.named, look.verdict.runs, look.may_be_rounding) == (["g"], 5, False)
    assert look.said == (
        "One side alone has cache in bfloat16. With these in float32, from the same numbers, they differ:",
    )
    for found in (
        named(0.01, data=["The weights already differ."]),
        named(0.01, unexplained=["h differs."]),
        verdict(*named(0.01).frame.to_dict("records"), row("k", label="culprit")),
        verdict(OUTPUT),
    ):
        assert not looked(Widened(agrees, NARROW_STATE), found).may_be_rounding
    assert not looked(Widened(agrees), named(0.01)).may_be_rounding
    assert not looked(Widened(GraftError("it died"), NARROW_STATE), named(0.01)).may_be_rounding
    # Where weights differ, whatever differs in float32 may follow from them.
    apart = verdict(row("g", dtype="float32", label="culprit", ratio=9.0), OUTPUT, data=["The weights already differ."])
    assert looked(Widened(apart, NARROW_STATE), found := named(0.01)) == CloserLook(found)
    # State that is an argument is an input.
    given = verdict(*named(0.01).frame.to_dict("records"), row("past@input"))
    assert looked(Widened(agrees, NARROW_STATE), given).may_be_rounding


class Dtypes:
    """A session whose calls read tensors of these dtypes."""

    def __init__(self, ours: dict[str, torch.dtype], theirs: dict[str, torch.dtype]) -> None:
        self.run = lambda *_: SimpleNamespace(baseline=[ours], target=[theirs])


def test_state_is_in_16_bits_on_one_side_alone_if_it_is_in_float32_on_the_other() -> None:
    half, full, brain = torch.float16, torch.float32, torch.bfloat16

    def found(ours: dict[str, torch.dtype], theirs: dict[str, torch.dtype]) -> dict[str, torch.dtype]:
        return Repeats(Dtypes(ours, theirs)).state_in_16_bits()  # type: ignore[arg-type]

    ours = {"a": full, "b": half, "c": full, "d": half, "e": full, "f": torch.int64}
    theirs = {"a": half, "b": full, "c": full, "d": brain, "g": half, "f": torch.int64}
    assert found(ours, theirs) == {"a": half, "b": half}
    # Weights explain more than state.
    assert found({**ours, f"w{WEIGHT}": full}, {**theirs, f"w{WEIGHT}": half}) == {}
    assert found({**ours, f"w{WEIGHT}": half}, {**theirs, f"w{WEIGHT}": half}) == {"a": half, "b": half}


def test_a_tensor_without_a_namesake_is_near_one_that_was_rounded_differently_alone() -> None:
    x = X[0].contiguous()
    moved = x * (1 + 1e-6)
    for ours, is_found in (({"y": moved}, True), ({"y": moved, "z": x * (1 - 1e-6)}, False), ({"y": x * 3}, False)):
        found = _unequal_numbers(ours, {"x": x}, False)
        assert isinstance(found, dict) == is_found
        if is_found:
            assert found["x"] is ours["y"]  # type: ignore[index]
    # An equal one is a partner, and no difference, whatever else is near.
    assert _unequal_numbers({"y": x, "z": moved, "w": moved}, {"x": x}, False) == {}
    assert _unequal_numbers({"y": x, "z": moved}, {"x": x}, False) == {}
