"""What a call writes, what it returns besides tensors, and whole numbers: none of it is cleared unseen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import graftlab as gl
from graftlab.diffs.results import is_written, written_path
from graftlab.ranks.held_call import HeldCall, WatchChoice

X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Writer(nn.Module):
    """Returns the same whatever it writes."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.factor = nn.Linear(4, 4), factor
        self.register_buffer("seen", torch.zeros(3, 4))
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, out: torch.Tensor, cache: dict[str, Any]) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        self.write(y * self.factor, out, cache)
        return y

    def write(self, y: torch.Tensor, out: torch.Tensor, cache: dict[str, Any]) -> None:
        raise NotImplementedError


class OfArgument(Writer):
    def write(self, y: torch.Tensor, out: torch.Tensor, cache: dict[str, Any]) -> None:
        out.copy_(y)


class OfCache(Writer):
    def write(self, y: torch.Tensor, out: torch.Tensor, cache: dict[str, Any]) -> None:
        cache["k"] = y


class OfBuffer(Writer):
    def write(self, y: torch.Tensor, out: torch.Tensor, cache: dict[str, Any]) -> None:
        self.seen[1:].copy_(y[1:])


class OfAttribute(Writer):
    def write(self, y: torch.Tensor, out: torch.Tensor, cache: dict[str, Any]) -> None:
        self.last = y


def inputs() -> tuple[Any, ...]:
    return X, torch.zeros(3, 4), {}


def compared(baseline: Callable[..., Any], target: Callable[..., Any], given: Any = inputs) -> tuple[str, str]:
    comparison = gl.compare(baseline, target, given)
    with comparison.session:
        return comparison.answer, comparison.text


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("kind", "where"),
    [(OfArgument, "args[1]"), (OfCache, "args[2]['k']"), (OfBuffer, "seen"), (OfAttribute, "last")],
)
def test_state_that_a_call_writes_wrongly_is_not_cleared(kind: type[Writer], where: str) -> None:
    answer, text = compared(partial(kind, 1.0), partial(kind, 1.01))
    assert answer == "differ"
    assert text.startswith(f"What the call writes to {where} differs by 0.01")
    assert compared(partial(kind, 1.0), partial(kind, 1.0))[0] == "agree"


def test_values_that_a_call_has_not_written_are_not_its_state() -> None:
    model, cache = OfBuffer(1.0), torch.full((2, 4), 7.0)
    model.seen.fill_(5.0)
    held = HeldCall(lambda: model(X, cache, {}), {"": model}, {"cache": cache}, WatchChoice())
    written = {path: tensor for path, tensor in held().items() if is_written(path)}
    assert list(written) == [written_path("seen")]
    # What was reserved and never written may differ between two processes.
    assert written[written_path("seen")][0].tolist() == [0.0] * 4
    assert written[written_path("seen")][1:].count_nonzero() == 8
    held.end()
    assert model.seen.tolist() == [[5.0] * 4] * 3


def test_state_that_is_not_repeated_is_left_out_and_reported() -> None:
    model, drawn = OfAttribute(1.0), iter(range(100))

    def call() -> torch.Tensor:
        model.last = torch.full((2,), float(next(drawn)))
        return torch.ones(1)

    described = HeldCall(call, {"": model}, {}, WatchChoice()).describe()
    assert described.not_repeated == ()
    assert list(described.plain) == [""]
    assert described.not_compared == ("what the call writes to last",)


class Answering(nn.Module):
    """Returns what is no tensor."""

    def __init__(self, form: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.form = nn.Linear(4, 4), form

    def forward(self, x: torch.Tensor) -> Any:
        return self.form(self.linear(x))


class Scores:
    def __init__(self, values: torch.Tensor) -> None:
        self.values = values


def in_letters(y: torch.Tensor) -> str:
    return "".join("ab"[int(value > 0)] for value in y.flatten())


FORMS: Mapping[str, tuple[Callable[[torch.Tensor], Any], Callable[[torch.Tensor], Any]]] = {
    "array": (lambda y: y.numpy(), lambda y: y.numpy() * np.float32(1.01)),
    "text": (in_letters, lambda y: in_letters(y[1:])),
    "object": (Scores, lambda y: Scores(y * 1.01)),
    "tokens": (lambda y: y.argmax(-1).tolist(), lambda y: y.argmin(-1).tolist()),
}


@pytest.mark.ranks
@pytest.mark.parametrize("form", FORMS)
def test_results_that_are_not_tensors_are_judged(form: str) -> None:
    right, wrong = FORMS[form]
    answer, text = compared(partial(Answering, right), partial(Answering, wrong), X)
    assert answer == "differ"
    assert text.startswith("Something after the last tap, linear, is computed differently")
    assert compared(partial(Answering, right), partial(Answering, right), X)[0] == "agree"


def left_edge(x: torch.Tensor) -> torch.Tensor:
    return torch.bucketize(x, torch.linspace(-2, 2, 9))


def right_edge(x: torch.Tensor) -> torch.Tensor:
    return torch.bucketize(x, torch.linspace(-2, 2, 9), right=True)


@pytest.mark.ranks
def test_whole_numbers_that_rounding_may_turn_are_not_cleared() -> None:
    answer, text = compared(left_edge, right_edge, torch.linspace(-2, 2, 33))
    assert answer == "inconclusive"
    assert text.startswith("The returned value differs in whole numbers, by 0.11. Rounding alone would change some")


def causal(size: int) -> torch.Tensor:
    return torch.ones(size, size, dtype=torch.bool).tril()


def strictly_causal(size: int) -> torch.Tensor:
    return torch.ones(size, size, dtype=torch.bool).tril(-1)


@pytest.mark.ranks
def test_a_mask_that_a_function_computes_is_not_an_input() -> None:
    answer, text = compared(causal, strictly_causal, (7,))
    assert answer == "differ"
    # The function is given no tensor that could be compared.
    assert text.startswith("output or its input is computed differently")
    assert "tril(" in text


def summed(x: torch.Tensor) -> torch.Tensor:
    return x.sum(0)


def summed_and_kept(x: torch.Tensor) -> torch.Tensor:
    return x.sum(0, keepdim=True)


class Lengths(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.rows = nn.Linear(4, 4), rows

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.linear(x), "lengths": torch.ones(self.rows)}


class Trimmed(Lengths):
    def forward(self, x: torch.Tensor) -> Any:
        return self.linear(x)[: self.rows]


def first_rows(count: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def f(x: torch.Tensor) -> torch.Tensor:
        return (x @ torch.eye(4) * 2)[:count]

    return f


@pytest.mark.ranks
def test_a_result_of_another_size_is_reported_first_and_not_cleared() -> None:
    answer, text = compared(partial(Lengths, 3), partial(Lengths, 2), X)
    assert answer == "differ"
    assert text.startswith("The returned value ['lengths'] has the shape [3] on the baseline and [2] on the target.")
    # Both were given the same batch.
    answer, text = compared(partial(Trimmed, 3), partial(Trimmed, 2), X)
    assert answer == "differ"
    assert text.startswith("The returned value has the shape [3, 4] on the baseline and [2, 4] on the target.")
    # Also where no other tap shows that both have the same rows.
    answer, text = compared(first_rows(3), first_rows(2), X)
    assert answer == "inconclusive"
    assert text.startswith("The returned value has the shape [3, 4] on the baseline and [2, 4] on the target.")
    # The same values in another layout are paired by value.
    assert compared(summed, summed_and_kept, X)[0] == "agree"
