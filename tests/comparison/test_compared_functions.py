"""Two functions on ranks: models, or what needs none, judged, matched and compared to the line.

The ranks import this module, so it imports little.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import graftlab as gl
from graftlab.__main__ import main
from graftlab.comparison import functions
from graftlab.errors import WaitInterrupted

pytestmark = pytest.mark.ranks


def reference() -> nn.Module:
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()


def port() -> nn.Module:
    class Port(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steps = nn.ModuleList(reference().layers)
            self.steps[1].norm2.eps = 0.05

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            for step in self.steps:
                batch = step(batch)
            return batch

    return Port()


def test_models_without_a_name_in_common_are_matched_and_judged() -> None:
    comparison = gl.compare(reference, port, torch.randn(2, 5, 16))
    with comparison.session:
        assert comparison.answer == "differ"
        assert comparison.match is not None
        assert "in layer 1 of 0-2" in comparison.text
        assert len(comparison.named) == 1


def gated(x: torch.Tensor, gate: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"mixed": torch.tanh(x) * gate.sigmoid()}


def ungated(x: torch.Tensor, gate: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"mixed": torch.tanh(x) * gate.tanh()}


def test_functions_without_a_model_are_compared_to_the_line() -> None:
    inputs = {"x": torch.randn(4, 8), "gate": torch.randn(8)}
    comparison = gl.compare(gated, ungated, inputs)
    with comparison.session:
        assert (comparison.answer, comparison.named) == ("differ", ["output.mixed"])
        lines = comparison.lines.set_index("side")["source"]
        assert lines["target"] == 'return {"mixed": torch.tanh(x) * gate.tanh()}'
        assert gl.compare(gated, gated, inputs, folder=None).answer == "agree"
    with pytest.raises(gl.errors.RunError, match="compare: gated needs x, gate; give inputs"):
        gl.compare(gated, gated)


def scored(x: torch.Tensor, fault: str = "", steps: int = 1) -> torch.Tensor:
    """The log-probabilities of a model in bfloat16 that each call makes anew, whole or in steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 32)).bfloat16()
    with torch.no_grad():
        if fault == "hidden":
            # Its effect is below one rounding.
            model[2].eps = 3e-4  # type: ignore[union-attr]
        first = model[0].weight.T.chunk(steps)  # type: ignore[union-attr, operator]
        # With several steps each sum is rounded more often.
        hidden = sum(part @ weight for part, weight in zip(x.bfloat16().chunk(steps, 1), first, strict=True))
        logits = model[1:](hidden)
        logits = logits if fault == "narrow" else logits.float()
        result: torch.Tensor = (logits / 0.7).log_softmax(-1)
        return result


@pytest.mark.parametrize(
    ("fault", "answer", "said"),
    [
        ("", "agree", "Nothing above bfloat16 rounding, in which the baseline computes these values"),
        ("hidden", "differ", "In bfloat16 the calls agree to rounding. In float64, from the same numbers, they"),
        ("narrow", "inconclusive", "Both sides compute in bfloat16, and only the baseline has the returned value in"),
    ],
)
def test_results_that_are_computed_in_bfloat16_are_looked_at_in_float64(fault: str, answer: str, said: str) -> None:
    comparison = gl.compare(scored, partial(scored, fault=fault, steps=4), (torch.randn(64, 16),))
    with comparison.session:
        assert comparison.answer == answer, comparison.text
        assert said in comparison.text


def normalised(deviation: float) -> Callable[[torch.Tensor], torch.Tensor]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def run(image: torch.Tensor) -> torch.Tensor:
        centred = image - 0.5
        scaled = centred / deviation
        return model(scaled)

    return run


def test_an_input_that_a_function_computes_for_its_model_has_its_line() -> None:
    comparison = gl.compare(lambda: normalised(0.5), lambda: normalised(0.25), torch.rand(3, 8))
    with comparison.session:
        assert comparison.answer == "differ"
        first, second, target, baseline = comparison.text.splitlines()[:4]
        assert first.startswith("The inputs already differ: input.input")
        assert second == "The values first differ here; with the baseline's value there, the tap agrees:"
        assert target.endswith("scaled = centred / deviation  [div(f32[3, 8], 0.25)]")
        assert baseline.endswith("scaled = centred / deviation  [div(f32[3, 8], 0.5)]")


class Stops(nn.Module):
    """Calls its parts in turn, and then raises."""

    def __init__(self, stops: bool, scale: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second, self.stops, self.scale = nn.Linear(4, 8), nn.Linear(8, 2), stops, scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.scale * self.first(x)
        out = self.second(hidden)
        if self.stops:
            raise ValueError("no kernel")
        return out.tanh()


def twice(stops: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that calls a model and raises before its second call."""
    model = Stops(False)

    def run(x: torch.Tensor) -> torch.Tensor:
        first = model(x)
        if stops:
            raise ValueError("no second call")
        return model(first.repeat(1, 2))

    return run


def test_a_call_that_raises_on_one_side_is_judged_up_to_its_exception() -> None:
    x = torch.randn(3, 4)
    for baseline, target, answer, said in (
        (lambda: Stops(False), lambda: Stops(True, 1.1), "differ", "Before that, values already differ:"),
        (lambda: Stops(False), lambda: Stops(True), "inconclusive", "agree to rounding, up to second, the last"),
        (lambda: twice(False), lambda: twice(True), "inconclusive", "agree to rounding, up to output, the last"),
    ):
        comparison = gl.compare(baseline, target, x)
        with comparison.session:
            assert comparison.answer == answer
            first = comparison.text.partition("\n")[0]
            assert first.startswith("The target raises ValueError: no ")
            assert said in first
            assert len(comparison.named) == (answer == "differ")
    with pytest.raises(gl.RunError, match=r"failed on baseline\[0\], target\[0\]"):
        gl.compare(lambda: Stops(True), lambda: Stops(True), x)


def test_a_function_is_compared_with_its_compiled_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "compiled_in_test.py"
    path.write_text(
        "import torch\nx = torch.ones(2, 4)\n"
        "def load():\n    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.GELU())\n"
        "def wrong(x):\n    return x * (2.0 if torch.compiler.is_compiling() else 1.0)\n"
        "print('a model that prints')\n"
    )
    answers = []
    for name in ("load", "wrong"):
        words = [f"{path}:{name}", "--compiled", "--backend", "eager", "--inputs", f"{path}:x"]
        code = main(["compare", *words, "--json", "--folder", str(tmp_path / name)])
        printed = capsys.readouterr()
        assert "a model that prints" in printed.err
        answers.append((code, json.loads(printed.out)))
    (right, found), (differs, other) = answers
    assert (right, found["answer"]) == (0, "agree")
    assert "Compiled, its result is equal to the eager one" in found["text"]
    assert (differs, other["answer"]) == (1, "differ")


def fused() -> nn.Module:
    """A model whose mistake is in a path that is taken only while no module has a hook."""

    class Fused(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x)
            return out if self[0]._forward_hooks else 1.5 * out

    torch.manual_seed(1)
    return Fused(nn.Linear(4, 4), nn.ReLU())


def plain() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU())


class WrongGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.relu()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * (ctx.saved_tensors[0] > 0.2)


class Gated(nn.Module):
    def __init__(self, is_right: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 16), nn.Linear(16, 2)
        self.gate = torch.relu if is_right else WrongGate.apply

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.gate(self.first(x)))


def test_a_mistake_of_the_backward_pass_is_named() -> None:
    right, wrong = lambda: Gated(True), lambda: Gated(False)
    comparison = gl.compare(right, wrong, torch.randn(8, 4), backward=True)
    with comparison.session:
        assert comparison.named == ["first@grad"]
        assert comparison.answer == "differ"
        assert "Not checked: the loss and the optimizer's step" in comparison.text


class Detached(nn.Module):
    def __init__(self, detached: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text, self.detached = nn.Linear(4, 3), nn.Linear(4, 3), detached

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        text = self.text(x)
        return self.image(x) @ (text.detach() if self.detached else text).mT


def test_weights_without_a_gradient_on_one_side_are_not_cleared() -> None:
    for first, second, side, other in ((False, True, "baseline", "target"), (True, False, "target", "baseline")):
        found = gl.compare(lambda: Detached(first), lambda: Detached(second), torch.ones(2, 4), backward=True)  # noqa: B023
        with found.session:
            assert found.answer == "differ"
            assert found.text.startswith(
                f"text.bias, text.weight have gradients on the {side} only: the {other}'s result does not depend on "
            )
    same = gl.compare(lambda: Detached(True), lambda: Detached(True), torch.ones(2, 4), backward=True)
    with same.session:
        assert same.answer == "agree"


def test_a_mistake_that_taps_switch_off_is_not_cleared() -> None:
    comparison = gl.compare(plain, fused, torch.randn(3, 4))
    with comparison.session:
        assert comparison.named == []
        assert comparison.answer == "differ"
        assert (
            "Without taps the results differ by 0.5, and with taps by 0: the difference arises in code"
            in comparison.text
        )


def decoder(late: bool) -> nn.Module:
    """Reads its tokens one by one, or each one call late."""

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.out = nn.Embedding(64, 16), nn.Linear(16, 8)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            tokens = torch.roll(tokens, 1) if late else tokens
            return torch.cat([self.out(self.embed(tokens[t : t + 1])) for t in range(10)])

    return Decoder().eval()


def test_sides_in_different_calls_of_one_model_do_not_agree() -> None:
    comparison = gl.compare(lambda: decoder(late=False), lambda: decoder(late=True), torch.arange(10) * 3)
    with comparison.session:
        assert "no computation is judged" in comparison.text
        assert comparison.answer == "differ"
        assert "The results of the two calls differ by 1" in comparison.text


def running_mean(hidden: torch.Tensor, before: tuple[Any, int]) -> tuple[torch.Tensor, tuple[Any, int]]:
    total = hidden.cumsum(1) + before[0]
    count = torch.arange(1, hidden.shape[1] + 1)[:, None] + before[1]
    return total / count, (total[:, -1:], before[1] + hidden.shape[1])


def in_one_pass() -> nn.Module:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.enter, self.leave = nn.Linear(5, 8), nn.Linear(8, 3)
            self.mixers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.enter(x)
            for mixer in self.mixers:
                x = x + mixer(running_mean(x, (0, 0))[0]).tanh()
            return self.leave(x)

    return Whole()


def in_chunks(forgets: bool) -> nn.Module:
    class Chunked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            whole = in_one_pass()
            self.up, self.blocks, self.down = whole.enter, whole.mixers, whole.leave

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            states: list[tuple[Any, int]] = [(0, 0)] * 3
            found = []
            for chunk in x.split(4, 1):
                for n, block in enumerate(self.blocks):
                    chunk = self.up(chunk) if n == 0 else chunk
                    mean, state = running_mean(chunk, states[n])
                    states[n] = (0, 0) if forgets else state
                    chunk = chunk + block(mean).tanh()
                found.append(self.down(chunk))
            return torch.cat(found, 1)

    return Chunked()


@pytest.mark.parametrize(("forgets", "answer"), [(False, "agree"), (True, "differ")])
def test_a_mistake_in_a_later_chunk_differs_where_the_chunks_are_put_together(forgets: bool, answer: str) -> None:
    comparison = gl.compare(in_one_pass, lambda: in_chunks(forgets), torch.randn(2, 12, 5))
    with comparison.session:
        assert comparison.answer == answer, comparison.text
        assert comparison.named == (["output"] if forgets else [])
        assert "rows in a different order" not in comparison.text


def test_a_comparison_that_is_stopped_states_what_it_had_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*given: object) -> None:
        raise KeyboardInterrupt("The first call agrees.")

    monkeypatch.setattr(functions, "judge_held_calls", stopped)
    monkeypatch.setattr(functions, "described", lambda run: ([], []))
    session: Any = SimpleNamespace(runs=[], run=lambda *given: None)
    with pytest.raises(WaitInterrupted, match=r"its code on the ranks was interrupted\. The first call agrees\."):
        functions.compare_expression(session, "model(x)")
