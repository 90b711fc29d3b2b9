"""Which call of a function is held: of the model that it loads, of the models that it calls, or of the function."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.grafters import become_rank
from kit.refusals import exactly
from torch import nn

import graftlab as gl
from graftlab.errors import SessionError
from graftlab.ranks import held_functions, holding
from graftlab.ranks.call_description import CallDescription
from graftlab.ranks.held_call import HeldCall, WatchChoice
from graftlab.ranks.held_functions import FunctionInFile, define_call, hold_callee, load_and_hold
from graftlab.ranks.held_update import HeldUpdate
from graftlab.ranks.holding import drop_call
from graftlab.taps import calls

X = torch.ones(1, 2)


@pytest.fixture(autouse=True)
def namespace(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The variables of the rank."""
    become_rank(monkeypatch, "target")
    monkeypatch.setattr(holding, "_held", None)
    here = calls.here()
    assert here is not None
    return here.vars


def held(load: Any, inputs: Any = X, backward: bool = False, choice: WatchChoice | None = None) -> CallDescription:
    return load_and_hold(load, inputs, choice or WatchChoice(), backward)


def named(found: CallDescription) -> set[str]:
    """The first parts of the taps' names."""
    return {tap.partition(".")[0] for tap in found.taps}


def test_a_loaded_model_is_called_with_the_inputs_and_gradients_on_request() -> None:
    model = nn.Linear(2, 1)
    found = held(lambda: model)
    assert torch.equal(found.plain[""], model(X))
    assert not found.needs_backward
    assert held(lambda: model, backward=True).needs_backward
    assert held(lambda: model, {"input": X}).plain.keys() == {""}


def test_both_sides_draw_the_same_numbers_for_weights_and_for_inputs() -> None:
    drawn: list[Any] = []

    def load() -> nn.Module:
        drawn.append((torch.rand(1).item(), random.random(), float(np.random.rand())))
        return nn.Linear(2, 1)

    def inputs() -> torch.Tensor:
        return torch.rand(1, 2)

    first = held(load, inputs).plain[""]
    torch.rand(5), random.random(), np.random.rand()
    assert torch.equal(held(load, inputs).plain[""], first)
    assert drawn[0] == drawn[1]
    # However many numbers a side draws for its weights.
    given: list[Any] = []
    for count in (1, 5):
        held(lambda count=count: torch.rand(count) is None or given.append, inputs)
    assert torch.equal(given[0], given[-1])


def test_a_function_of_the_inputs_is_held_with_the_models_that_it_calls() -> None:
    encoder, decoder = nn.Linear(2, 2), nn.Linear(2, 1)

    def translate(x: torch.Tensor) -> Any:
        return decoder(encoder(encoder(x)))

    assert named(held(translate)) == {"Linear[0]", "Linear[1]"}
    holding.held_call().end()
    assert not named(held(lambda: lambda x: nn.functional.relu(nn.Linear(2, 2)(x)))) & {"Linear", "Linear[0]"}
    first, then = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))
    assert named(held(lambda x: then(first(x)))) == {"Linear", "Sequential"}
    with pytest.raises(SessionError, match=r"translate needs x; give inputs"):
        held(translate, None)


def test_a_function_without_models_has_taps_at_its_inputs_and_its_result() -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    found = held(double)
    assert found.taps
    assert found.model == "double"
    assert torch.equal(found.plain[""], 2 * X)


def test_a_model_that_each_call_makes_anew_leaves_taps_at_inputs_and_result() -> None:
    # The next call does not call the models that were seen.
    def anew(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        result: torch.Tensor = nn.Linear(2, 2)(x)
        return result

    for found, name in ((held(anew), "anew"), (held(lambda: anew), "anew")):
        assert found.model == name
        assert set(found.taps) == {"input.[0]", "output"}


def test_a_function_that_taps_by_itself_is_held_as_it_is() -> None:
    def tapped(x: torch.Tensor) -> torch.Tensor:
        return gl.tap("mine", x * 2)

    assert held(tapped).taps == ("mine",)
    assert hold_callee(tapped, (X,), {}, WatchChoice()).taps == ("mine",)


def test_what_cannot_be_called_is_refused_with_its_class() -> None:
    with pytest.raises(
        SessionError,
        match=exactly(
            "compare: the function that loads a model returned Tensor, which cannot be called; return a "
            "torch.nn.Module or a function of the inputs, or take the inputs as arguments"
        ),
    ):
        held(lambda: X)


def test_looking_for_models_leaves_them_and_the_inputs_as_they_were() -> None:
    norm, x = nn.BatchNorm1d(2), torch.randn(4, 2)
    before = x.clone()

    def call(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = norm(x)
        x.zero_()
        return result

    held(call, x)
    holding.held_call().end()
    assert int(norm.num_batches_tracked) == 0
    assert torch.equal(x, before)


def test_an_expression_of_the_notebook_is_held_with_its_models(namespace: dict[str, Any]) -> None:
    namespace.update(model=nn.Linear(2, 1), x=X)
    found = hold_callee("model(x)", (), {}, WatchChoice())
    assert torch.equal(found.plain[""], namespace["model"](X))
    plain = hold_callee(lambda x: x + 1, (X,), {}, WatchChoice())
    assert plain.taps
    assert isinstance(holding._held, HeldCall)


def test_a_call_is_defined_for_the_notebook_and_its_models_are_tapped(
    namespace: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    watched: list[Any] = []
    monkeypatch.setattr(
        held_functions, "watch", lambda model, prefix, include: watched.append((model, prefix, include))
    )
    model = nn.Linear(2, 1)

    class File:
        def __init__(self, found: Any) -> None:
            self.found = found

        def find(self) -> Any:
            return self.found

    def make() -> nn.Module:
        return model

    def call(x: torch.Tensor, y: int = 2) -> Any:
        return model(x) * y

    def number() -> int:
        return 3

    drawn: list[float] = []

    def draw() -> nn.Module:
        drawn.append(float(torch.rand(3).sum()))
        return model

    given = []
    for found in (model, draw):
        define_call(File(found), lambda: torch.rand(1, 2), None)  # type: ignore[arg-type]
        given.append(namespace["graftlab_args"][0])
    torch.rand(5)
    define_call(File(draw), X, None)  # type: ignore[arg-type]
    assert drawn[0] == drawn[1]
    assert torch.equal(*given), "inputs do not depend on what a side draws for its weights"
    for found, expected in ((model, model), (make, model), (call, call)):
        watched.clear()
        define_call(File(found), {"x": X} if found is call else X, "name == 'x'")  # type: ignore[arg-type]
        assert watched == [(model, "", "name == 'x'")]
        assert namespace["graftlab_call"] is expected
    other = nn.Linear(2, 1)
    watched.clear()
    define_call(File(lambda x: other(x) + model(x)), X, None)  # type: ignore[arg-type]
    assert watched == [(other, "Linear[0].", None), (model, "Linear[1].", None)]
    define_call(File(call), {"x": X}, None)  # type: ignore[arg-type]
    assert (namespace["graftlab_args"], list(namespace["graftlab_kwargs"])) == ((), ["x"])
    define_call(File(number), None, None)  # type: ignore[arg-type]
    assert namespace["graftlab_call"] is number
    assert eval(held_functions.CALL, namespace) == 3


class Counts(nn.Module):
    """Counts its calls in a buffer; ``stops`` interrupts the call, as the stop button does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.stops = False
        self.calls: torch.Tensor
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.stops:
            raise KeyboardInterrupt
        return x * self.weight


def test_an_interrupted_call_leaves_the_state_of_its_models() -> None:
    model = Counts()
    model.stops = True
    with pytest.raises(KeyboardInterrupt):
        hold_callee(lambda: model(X), (), {}, WatchChoice())
    assert model.calls.item() == 0


def test_a_function_without_arguments_needs_no_inputs() -> None:
    assert torch.equal(held(lambda: lambda: 2 * X, None).plain[""], 2 * X)
    assert torch.equal(held(lambda: lambda *args, **kwargs: 2 * X, None).plain[""], 2 * X)
    with pytest.raises(SessionError, match="first, last; give inputs"):
        held(lambda first, second=2, *more, last, **others: X, None)


class HasKeys:
    """Named arguments of a class that is no mapping, as a tokenizer gives them."""

    def keys(self) -> Any:
        return iter(["x"])

    def __getitem__(self, key: str) -> torch.Tensor:
        return {"x": X}[key]


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        (None, ((), {})),
        (X, ((X,), {})),
        ((X, 2), ((X, 2), {})),
        ([X, 2], ((X, 2), {})),
        ({"x": X, "y": None}, ((), {"x": X, "y": None})),
        ({1: X}, ((), {"1": X})),
        (HasKeys(), ((), {"x": X})),
        (lambda: [X], ((X,), {})),
        ("text", (("text",), {})),
    ],
)
def test_inputs_stand_for_arguments(inputs: Any, expected: Any) -> None:
    assert held_functions.arguments_of(inputs) == expected


def test_a_function_is_imported_from_its_file_before_any_other_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name, result in (("first", 1), ("second", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "held_example.py").write_text(f"class Kind:\n    def make():\n        return {result}\n")
    sys.path.append(str(tmp_path / "first"))
    function = FunctionInFile(str(tmp_path / "second" / "held_example.py"), "Kind.make")
    try:
        assert (function(), function()) == (2, 2)
        assert sys.path.count(str(tmp_path / "second")) == 1
        with pytest.raises(SessionError, match=r"^compare: .*/second/held_example.py has no 'Kind.other'$"):
            FunctionInFile(function.path, "Kind.other").find()
        with pytest.raises(SessionError, match=r"^compare: the name of .*/first/held_example.py is that of another"):
            FunctionInFile(str(tmp_path / "first" / "held_example.py"), "Kind.make").find()
    finally:
        sys.modules.pop("held_example", None)


def test_models_that_a_held_call_calls_are_brought_back_with_it() -> None:
    model = Counts()
    assert hold_callee(lambda: gl.tap("mine", model(X)), (), {}, WatchChoice()).taps == ("mine",)
    holding.repeat_call()
    drop_call()
    assert model.calls.item() == 0


def test_a_call_that_raises_is_described_by_its_exception() -> None:
    def fails(x: torch.Tensor = X) -> torch.Tensor:
        raise ValueError("bad\nmore")

    assert held(lambda: fails).raises == "ValueError: bad"


def test_a_dropped_call_is_ended_once() -> None:
    model = Counts()
    drop_call()  # there is none
    hold_callee(lambda: model(X), (), {}, WatchChoice())
    model(X)
    drop_call()
    assert model.calls.item() == 0
    model(X)
    drop_call()
    assert model.calls.item() == 1, "the state from before the call was restored again"


def test_a_rank_that_holds_nothing_refuses_to_repeat_it() -> None:
    held(lambda: torch.nn.Identity())
    assert holding.repeat_call()
    drop_call()
    for ask in (holding.describe_call, holding.repeat_call, holding.OfCall(HeldCall.try_backward)):
        with pytest.raises(SessionError, match="this rank holds no call"):
            ask()
    with pytest.raises(SessionError, match="this rank holds no update"):
        holding.OfUpdate(HeldUpdate.show_inputs)()
