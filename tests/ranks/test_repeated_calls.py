"""A call that a rank holds: what it returns and describes, from which numbers it is repeated, and what it leaves."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from kit.grafters import become_rank
from torch import Tensor, nn

import graftlab as gl
from graftlab.diffs.results import NamedTensors, is_written
from graftlab.diffs.rounding import roundoff
from graftlab.grafting.tap_records import CallKey, CountingHandler
from graftlab.ranks import held_call, holding
from graftlab.ranks.autocast import no_autocast, no_autocast_cache
from graftlab.ranks.call_description import CallDescription
from graftlab.ranks.float32_state import Float32State
from graftlab.ranks.held_call import WEIGHT, HeldCall, WatchChoice, arguments_by_name
from graftlab.ranks.holding import (
    ScriptEnd,
    describe_call,
    describe_result,
    held_unit,
    hold,
    prepare_once,
    widen_call,
    widen_operators,
)
from graftlab.ranks.stored_numbers import samples_of
from graftlab.ranks.widening import TrialOfRanks
from graftlab.taps.routing import handled_by


class Lister(CountingHandler):
    """Lists the names and kinds of the taps that are reached."""

    takes_data = True

    def __init__(self) -> None:
        super().__init__()
        self.reached: list[tuple[str, str | None]] = []

    def take(self, place: CallKey, tags: dict[str, Any], own: Tensor) -> None:
        self.reached.append((place[0], tags.get("kind")))


def taps_of(held: HeldCall) -> list[tuple[str, str | None]]:
    with handled_by(lister := Lister()):
        held()
    return lister.reached


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))


def of(call: Any, model: nn.Module, choice: WatchChoice = WatchChoice(), **state: Any) -> HeldCall:  # noqa: B008
    return HeldCall(call, {"": model}, state, choice)


@pytest.fixture(autouse=True)
def on_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    become_rank(monkeypatch, "target")
    monkeypatch.setattr(holding, "_held", None)


def test_items_of_a_generator_are_results_up_to_a_number() -> None:
    endless = of(lambda: (torch.tensor(float(n)) for n in itertools.count()), net())
    assert len(endless()) == 1024
    wide = of(lambda: (torch.ones(2).bfloat16() / 3 + n for n in range(3)), net())
    own = [each.tolist() for each in wide().values()]
    assert wide.widen_operators() is None
    assert [each.tolist() for each in wide().values()] != own
    wide.narrow()
    assert [each.tolist() for each in wide().values()] == own


def test_what_a_call_writes_is_shown_unless_it_is_made_once() -> None:
    model = nn.BatchNorm1d(2)
    x = torch.randn(4, 2)
    held = of(lambda: model(x), model, x=x)
    written = [path for path in held() if path]
    assert written
    held.prepare(False)
    assert list(held()) == [""]
    assert taps_of(held)
    held.end()
    assert not model._forward_hooks
    assert held.is_released


def test_what_a_call_writes_differently_each_time_is_not_compared_and_no_result() -> None:
    model, numbers = nn.BatchNorm1d(2), itertools.count(1)

    def call() -> Tensor:
        assert model.running_mean is not None
        model.running_mean.fill_(float(next(numbers)))
        return torch.ones(2)

    held = of(call, model)
    described = held.describe()
    assert (described.not_repeated, described.not_compared) == ((), ("what the call writes to running_mean",))
    assert list(described.plain) == list(held()) == [""]


def test_what_a_call_writes_beyond_the_budget_is_listed_as_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_call, "_WRITTEN_BUDGET", 8)
    model, x = nn.BatchNorm1d(2), torch.randn(4, 2)
    described = of(lambda: model(x), model).describe()
    # The first of its buffers takes all of that.
    assert described.not_compared == (
        "what the call writes to running_var",
        "what the call writes to num_batches_tracked",
    )


def test_weights_are_taken_in_the_state_before_the_call() -> None:
    model = nn.BatchNorm1d(2, momentum=1.0)
    held = of(lambda: model(torch.ones(4, 2)), model)
    held()
    seen: dict[str, list[float]] = {}

    class Seen(CountingHandler):
        def tap(self, name: str, value: Any, extras: Any, tags: Mapping[str, Any], replace: bool = False) -> Any:
            assert tags == {"kind": "param"}
            seen[name] = value.tolist()
            return value

    with handled_by(Seen()):
        held.take_weights()
    assert (seen["running_mean"], seen["running_var"], seen["weight"]) == ([0.0] * 2, [1.0] * 2, [1.0] * 2)


def test_a_description_keeps_its_numbers_when_the_next_call_overwrites_them() -> None:
    out, model = torch.zeros(2), net()
    x = torch.ones(2)

    def call() -> Tensor:
        return out.copy_(model(x).detach()).requires_grad_(False)

    held = of(call, model, x=x)
    described, result = held.describe(), held.describe_result()
    expected = out.clone()
    out.fill_(9.0)
    for values in (described.plain, described.tapped, result.plain):
        assert torch.equal(values[""], expected)
    assert not of(lambda: model(x), model).describe().plain[""].requires_grad


class TapsItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.last(gl.tap("own", self.first(x)))
        return made


def test_taps_of_the_models_own_code_are_among_the_others_in_their_order() -> None:
    model = TapsItself()
    described = of(lambda: model(torch.ones(2)), model, WatchChoice(params=False), x=torch.ones(2)).describe()
    assert described.taps == ("input.x", "first", "own", "last", "output")


def test_a_call_is_described_with_the_weights_that_need_gradients() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False)).requires_grad_()
    model[0].bias.requires_grad_(False)
    assert of(lambda: model(torch.ones(2)), model).describe().trained == ("0.weight", "1.weight")


def test_a_call_is_described_with_the_number_of_its_models_weights() -> None:
    model = nn.Linear(3, 2)
    held = of(lambda: model(torch.ones(3)), model)
    assert held.describe().weights == held.describe_result().weights == 8


def test_a_call_is_described_with_what_behaves_as_in_training() -> None:
    model = nn.Sequential(nn.Dropout(0.1), nn.Dropout(0.0), nn.BatchNorm1d(2), nn.Linear(2, 2), nn.AlphaDropout(0.1))
    model[4].eval()

    def described() -> tuple[tuple[str, ...], bool]:
        found = of(lambda: model(torch.ones(3, 2)), model).describe()
        return found.in_training, found.is_training

    assert described() == (("0", "2"), True)
    model.eval()
    assert described() == ((), False)
    # One of the models that a call calls is enough.
    both: dict[str, nn.Module] = {"a.": nn.Linear(2, 2), "b.": model}
    assert HeldCall(lambda: torch.ones(2), both, {}, WatchChoice()).describe().is_training
    drop = nn.Dropout(0.5)
    assert of(lambda: drop(torch.ones(2)), drop).describe().in_training == ("Dropout",)


def test_a_call_needs_its_backward_pass_if_one_of_its_results_does() -> None:
    model = net()
    results = {"frozen": torch.ones(2), "out": model(torch.ones(2))}
    held = of(lambda: results, model)
    assert held.describe().needs_backward
    assert held.describe_result().needs_backward
    del results["out"]
    assert not held.describe().needs_backward
    assert not held.describe_result().needs_backward


def test_weights_of_inference_mode_count_no_writes() -> None:
    with torch.inference_mode():
        model = nn.Linear(2, 2)
        described = of(lambda: model(torch.ones(2)), model).describe()
    assert described.writes_weights is False
    assert described.not_repeated == ()


def test_a_call_that_changes_weights_is_described_as_such() -> None:
    model, writes = net(), [False]

    def call() -> Tensor:
        if writes[0]:
            with torch.no_grad():
                model[2].bias.add_(1)
        result: Tensor = model(torch.ones(2))
        return result

    assert not of(call, model).describe().writes_weights
    writes[0] = True
    assert of(call, model).describe().writes_weights


def test_gradients_of_the_script_stay_when_a_call_is_narrow_again() -> None:
    model, x = net().bfloat16(), torch.ones(2, dtype=torch.bfloat16)
    model(x).sum().backward()
    before = {weight: (weight.grad, weight.grad.clone()) for weight in model.parameters()}
    held = of(lambda: model(x), model, x=x)
    assert held.widen({}, {}) is None
    held()
    held.narrow()
    for weight, (gradient, values) in before.items():
        assert weight.grad is gradient
        assert torch.equal(gradient, values)


def test_backward_passes_leave_the_graph_of_what_was_computed_before_a_call() -> None:
    model = net()
    scaled = model[0].weight.exp()
    held = of(lambda: torch.ones(2) @ scaled.T, model)
    assert held.try_backward() is None
    for _ in range(2):
        held()
    held.end()
    scaled.sum().backward()
    assert torch.equal(model[0].weight.grad, scaled)


class Trial(contextlib.nullcontext[None]):
    """A trial in which another rank fails."""

    def end(self, reason: str | None) -> str:
        return reason or "rank 1 failed: x"


def test_a_call_is_narrow_again_where_another_rank_cannot_widen_its_own() -> None:
    x = torch.ones(2, dtype=torch.bfloat16)
    held = HeldCall(lambda: x * 2, {}, {"x": x}, WatchChoice())
    trial: Any = Trial()
    assert held.widen({}, {}, trial) == "rank 1 failed: x"
    assert x.dtype == held()[""].dtype == torch.bfloat16


@pytest.mark.parametrize("kind", [ValueError, ZeroDivisionError])
def test_a_call_that_raises_is_described_with_the_taps_before_it_on_request(kind: type[Exception]) -> None:
    model = net()

    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise kind("bad\nmore")

    model.insert(1, Failing())
    held = of(lambda: model(torch.ones(2)), model)
    for describe in (held.describe, held.describe_result):
        with pytest.raises(kind, match="bad"):
            describe()
    described = held.describe(reports_failure=True)
    assert (described.raises, described.plain, described.tapped) == (f"{kind.__name__}: bad", {}, {})
    assert "0" in described.taps
    assert "2" not in described.taps
    result = held.describe_result(reports_failure=True)
    assert (result.raises, result.taps) == (f"{kind.__name__}: bad", ())


def test_only_small_whole_numbers_among_the_arguments_are_described() -> None:
    model = net()
    most = 1 << 16
    ids = torch.arange(most)
    given = {"ids": ids, "many": torch.arange(most + 1), "x": torch.ones(2), "mask": torch.ones(2, dtype=torch.bool)}
    described = of(lambda: model(torch.ones(2)), model, **given).describe()
    numbers = described.whole_numbers
    assert len(numbers) == 1
    assert described.untapped_numbers == ()
    ((_, found),) = numbers.items()
    ids.fill_(0)
    assert torch.equal(found, torch.arange(most))
    # As the call finds them.
    counter = torch.zeros(1, dtype=torch.int64)
    counting = of(lambda: model(torch.ones(2)) + counter.add_(1), model, counter=counter).describe()
    assert [each.tolist() for each in counting.whole_numbers.values()] == [[0]]
    # A tap shows neither a number nor what an object has.
    hidden = of(lambda: torch.ones(1), model, ids=torch.arange(2), count=3, of=SimpleNamespace(tokens=torch.arange(3)))
    described = hidden.describe()
    assert {path: each.tolist() for path, each in described.whole_numbers.items()} == {
        "['ids']": [0, 1],
        "['count']": 3,
        "['of'].tokens": [0, 1, 2],
    }
    assert described.untapped_numbers == ("['count']", "['of'].tokens")


def test_a_call_of_several_models_is_named_by_their_classes_once() -> None:
    models: Mapping[str, nn.Module] = {"a.": nn.Linear(1, 1), "b.": nn.Linear(1, 1), "c.": nn.LayerNorm(1)}
    described = HeldCall(lambda: torch.ones(1), models, {}, WatchChoice(), number=3, others={"Net": 2}).describe()
    assert (described.model, described.number, described.others) == ("Linear and LayerNorm", 3, {"Net": 2})
    named = HeldCall(lambda: torch.ones(1), models, {}, WatchChoice(), name="Linear[1]")
    assert (named.describe_result().model, named.unit) == ("Linear[1]", ("call", 1))


def test_a_backward_pass_that_fails_is_dropped() -> None:
    model = net()

    def call() -> Tensor:
        made: Tensor = model(torch.ones(2))
        made.register_hook(fail)
        return made

    def fail(gradient: Tensor) -> None:
        raise ValueError("no gradient\nof this")

    held = of(call, model)
    assert held.try_backward() == "ValueError: no gradient"
    assert all(kind not in ("grad", "param_grad") for _, kind in taps_of(held))
    assert held().keys() == {""}


def test_without_weights_that_need_gradients_no_backward_pass_is_repeated() -> None:
    frozen, x = net().requires_grad_(False), torch.ones(2, requires_grad=True)
    held = of(lambda: frozen(x), frozen)
    assert held.try_backward() == "no weight of the call's models needs a gradient"
    tapped = HeldCall(lambda: net()(x), {}, {}, WatchChoice())
    assert tapped.try_backward() == "code that has taps is called as it is, so its weights are not tapped"
    assert held().keys() == tapped().keys() == {""}


class Gradients(CountingHandler):
    """Keeps the gradients of weights that are tapped."""

    def __init__(self) -> None:
        super().__init__()
        self.of: dict[str, list[list[float]]] = {}

    def tap(self, name: str, value: Any, extras: Any, tags: Mapping[str, Any], replace: bool = False) -> Any:
        if tags.get("kind") == "param_grad":
            self.of.setdefault(name, []).append(value.tolist())
        return value


def test_gradients_of_weights_come_last_first_and_of_those_alone_that_have_one() -> None:
    model = net()
    model[0].bias.requires_grad_(False)
    unused = nn.Parameter(torch.ones(1))
    model.register_parameter("unused", unused)
    held = of(lambda: model(torch.ones(2)), model)
    assert held.try_backward() is None
    of_weights = [name for name, kind in taps_of(held) if kind == "param_grad"]
    assert of_weights == ["2.bias", "2.weight", "0.weight"]
    assert ("2", "grad") in taps_of(held)
    # Gradients that the script has accumulated are no part of them, and stay.
    with handled_by(shown := Gradients()):
        held()
        for weight in model.parameters():
            weight.grad = torch.full_like(weight, 100.0) if weight.requires_grad else None
        again = of(lambda: model(torch.ones(2)), model)
        assert again.try_backward() is None
        again()
    assert shown.of["0.weight"][0] == shown.of["0.weight"][-1]
    again.end()
    assert model[0].weight.grad is not None
    assert model[0].weight.grad.tolist() == [[100.0] * 2] * 3
    # A result that needs no gradient has none.
    both = of(lambda: (model(torch.ones(2)), torch.ones(1)), model)
    assert both.try_backward() is None
    held.drop_backward()
    assert not [name for name, kind in taps_of(held) if kind in ("grad", "param_grad")]


def test_results_have_gradients_of_their_own_that_are_the_same_each_time() -> None:
    x = torch.ones(3, 4, dtype=torch.bfloat16)
    one, other = (held_call._gradient_of(place, x) for place in range(2))
    assert one.shape == x.shape
    assert one.dtype == x.dtype
    assert not torch.equal(one, other)
    assert torch.equal(one, held_call._gradient_of(0, x.float()).bfloat16())


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        twice = nn.functional.relu(x) * 2
        return twice + 1


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        (WatchChoice(), {"0", "1", "input.input", "output"}),
        (WatchChoice(include="name == '1'"), {"1", "input.input"}),
        (WatchChoice(functions=("relu",)), {"0", "1", "input.input", "output", "relu.out"}),
        (WatchChoice(inside="1"), {"0", "1", "input.input", "output", "1.twice"}),
    ],
)
def test_a_held_model_is_watched_as_it_was_chosen(choice: WatchChoice, names: set[str]) -> None:
    model = net()
    model[1] = Doubled()
    held = of(lambda: model(torch.ones(2)), model, choice)
    first, again = held.describe(), held.describe()
    # Described twice, it is watched once.
    assert first.taps == again.taps
    reached = [name for name, _ in taps_of(held)]
    assert len(reached) == len(set(reached))
    assert {"0", "1", "input.input", "output", "1.twice", "relu.out"} & {*reached} == names


class Zeros(CountingHandler):
    """Makes weights zero."""

    def tap(self, name: str, value: Any, extras: Any, tags: Mapping[str, Any], replace: bool = False) -> Any:
        with torch.no_grad():
            value.zero_()
        return value

    def take(self, place: CallKey, tags: dict[str, Any], own: Tensor) -> None:
        raise AssertionError


def test_repetitions_and_the_script_continue_with_weights_that_taps_have_set(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = net(), torch.ones(2)
    held = of(lambda: model(x), model, x=x)
    assert held()[""].abs().sum() > 0
    with handled_by(Zeros()):
        held.take_weights()
    assert held()[""].tolist() == [0.0, 0.0]
    assert held.widen({}, {}) is not None or held.narrow() is None
    held.end()
    assert model(x).tolist() == [0.0, 0.0]


def test_buffers_that_taps_have_set_stay_also_after_a_look_in_float32() -> None:
    model, x = nn.BatchNorm1d(2).bfloat16().eval(), torch.ones(3, 2).bfloat16()
    assert model.running_var is not None
    held = of(lambda: model(x), model, x=x)
    with handled_by(Zeros()):
        held.take_weights()
    assert held.widen({}, {}) is None
    assert held()[""].dtype == torch.float32
    held.narrow()
    assert model.running_var.tolist() == [0.0, 0.0]
    held.end()
    assert (model.running_var.tolist(), model.weight.tolist()) == ([0.0, 0.0], [0.0, 0.0])


def test_numbers_that_a_call_reads_are_those_of_its_arguments_and_state(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.BatchNorm1d(2).bfloat16()
    x = torch.ones(3, 2)

    def call() -> Tensor:
        return model(x.add_(1).bfloat16())

    held = of(call, model, x=x, ids=torch.arange(2))
    held()
    numbers = held.numbers()
    assert numbers is not None
    # As the call finds them.
    assert numbers.keys() == {"running_mean", "running_var", "x"}
    assert any(torch.equal(each, torch.ones(3, 2)) for each in numbers.values())
    assert all(each.is_floating_point() for each in numbers.values())
    assert not any(path.endswith(WEIGHT) for path in numbers)
    dtypes = held.dtypes()
    assert {path: dtype for path, dtype in dtypes.items() if path.endswith(WEIGHT)} == {
        f"weight{WEIGHT}": torch.bfloat16,
        f"bias{WEIGHT}": torch.bfloat16,
    }
    assert torch.int64 not in dtypes.values()
    size = sum(each.nbytes for each in numbers.values())
    monkeypatch.setattr(held_call, "_MOST_NUMBERS", size)
    assert held.numbers() is not None
    monkeypatch.setattr(held_call, "_MOST_NUMBERS", size - 1)
    assert held.numbers() is None


def test_a_call_is_repeated_in_float32_from_given_numbers_and_then_from_its_own() -> None:
    model, x = net().bfloat16(), torch.randn(2, generator=torch.Generator().manual_seed(0)).bfloat16()
    held = of(lambda: model(x), model, x=x)
    own = held()[""]
    (path,) = [path for path in held.dtypes() if not path.endswith(WEIGHT)]
    assert held.widen({}, {}) is None
    wide = held()[""]
    assert wide.dtype == torch.float32
    assert torch.allclose(wide, own.float(), rtol=0.1, atol=0.1)
    held.narrow()
    assert torch.equal(held()[""], own)
    assert held.widen({path: torch.zeros(2)}, {"unknown": torch.bfloat16}) is None
    zeros = held()[""]
    assert not torch.equal(zeros, wide)
    held.narrow()
    third = torch.full((2,), 1 / 3)
    assert held.widen({path: third}, {path: torch.bfloat16}) is None
    rounded = held()[""]
    held.narrow()
    assert held.widen({path: third.bfloat16().float()}, {}) is None
    assert torch.equal(held()[""], rounded)
    held.end()
    assert model[0].weight.dtype == x.dtype == torch.bfloat16


def test_given_numbers_are_moved_by_a_few_roundings_in_place_of_the_calls_own() -> None:
    x = torch.ones(64).bfloat16()
    held = HeldCall(x.clone, {}, {"x": x}, WatchChoice(), name="Net")
    assert held.widen({"x": torch.full((64,), 8.0)}, {}, rounded_otherwise=["x"]) is None
    moved = held()[""] / 8 - 1
    held.narrow()
    assert 0 < moved.abs().max() <= 4 * roundoff("bfloat16")
    # In both directions.
    assert moved.min() < 0 < moved.max()


def test_numbers_of_16_bits_are_moved_by_a_few_roundings_in_float32() -> None:
    model, x = net().bfloat16(), torch.ones(2)
    held = of(lambda: model(x.to(model[0].weight.dtype)), model)
    assert held.widen({}, {}) is None
    wide = held()[""]
    held.narrow()
    path = f"0.weight{WEIGHT}"
    assert path in held.dtypes()
    assert held.widen({}, {}, rounded_otherwise=[path, "unknown"]) is None
    apart = float((held()[""] - wide).detach().norm() / wide.detach().norm())
    held.narrow()
    assert 0 < apart < 20 * roundoff("bfloat16")
    assert torch.equal(held()[""], held()[""])


@pytest.mark.parametrize(
    ("reads", "operator"),
    [
        (lambda hidden, x: nn.functional.linear(x.bfloat16(), hidden.T[:2]), "aten::mm"),
        # Its result is that table's, and no operator's.
        (lambda hidden, x: nn.functional.embedding(torch.tensor([1]), hidden) / 3, "aten::div.Tensor"),
        (lambda hidden, x: hidden.mul_(1)[:1], "aten::mul_.Tensor"),
        # Numbers that are converted first are exact, and those that an operator has computed are the call's.
        (lambda hidden, x: x * hidden[0].to(x.dtype), None),
        (lambda hidden, x: (x / 3).bfloat16() * 3, None),
    ],
)
def test_operators_that_round_and_read_16_bits_out_of_reach_are_not_in_float32(
    reads: Any, operator: str | None
) -> None:
    model, hidden = net().bfloat16(), torch.full((2, 2), 1 / 3, dtype=torch.bfloat16)
    x = torch.ones(1, 2, dtype=torch.bfloat16)
    # Kept in a function, as a plain object's weight is.
    held = of(lambda: model(reads(hidden, x).to(model[0].weight.dtype)), model, x=x)
    why = f"operators round to 16 bits even then ({operator}), and read numbers that are out of reach"
    assert held.widen({}, {}) == (operator and why)
    assert model[0].weight.dtype == (torch.float32 if operator is None else torch.bfloat16)
    held.end()
    assert model[0].weight.dtype == torch.bfloat16


def _runs_in_no_mode() -> Callable[[Tensor], Tensor]:
    """Code that fails at first, as a higher-order operator does in a mode that does not know it."""
    errors = [NotImplementedError("There was no rule registered")]

    def code(x: Tensor) -> Tensor:
        while errors:
            raise errors.pop()
        return x

    return code


def _sparse(x: Tensor) -> Tensor:
    return torch.sparse.mm(torch.eye(2).bfloat16().to_sparse().float(), x[:, None])[:, 0]


@pytest.mark.parametrize("code", [_runs_in_no_mode(), _sparse], ids=["runs in no mode", "sparse"])
def test_code_whose_reads_cannot_be_noted_is_repeated_in_float32_all_the_same(
    code: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A compiler that was imported remembers the failure.
    monkeypatch.setattr(held_call, "COMPILER", "torch")
    monkeypatch.setattr(torch.compiler, "reset", reset := Mock())
    model, x = net().bfloat16(), torch.ones(2, dtype=torch.bfloat16)
    held = of(lambda: model(code(x)), model, x=x)
    assert held.widen({}, {}) is None
    assert reset.call_count == (0 if code is _sparse else 1)
    assert held()[""].dtype == torch.float32
    held.end()
    assert model[0].weight.dtype == x.dtype == torch.bfloat16


def test_constants_of_16_bits_are_moved_while_operators_compute_in_float64() -> None:
    model, x = net(), torch.ones(2)
    model.table = torch.full((2,), 1 / 3, dtype=torch.bfloat16)  # type: ignore[assignment]
    held = of(lambda: model(x * model.table.float()), model, x=x)
    assert held.constants().keys() == {"table"}
    assert held.widen_operators() is None
    plain = held()[""]
    held.narrow()
    assert held.widen_operators(rounded_otherwise=["table", "unknown"]) is None
    apart = float((held()[""] - plain).detach().norm() / plain.detach().norm())
    held.narrow()
    assert 0 < apart < 20 * roundoff("bfloat16")
    assert torch.equal(model.table, torch.full((2,), 1 / 3, dtype=torch.bfloat16))
    assert held.widen_operators() is None
    assert torch.equal(held()[""], plain)
    held.end()


def test_a_call_in_float64_reads_numbers_in_place_of_state_rounded_otherwise() -> None:
    model, x = net(), torch.ones(2)
    model.cache = torch.full((2,), 1 / 3, dtype=torch.bfloat16)  # type: ignore[assignment]
    held = of(lambda: model(x * model.cache.to(x.dtype)), model, x=x)
    of_other_side = (model.cache * 3).bfloat16()
    assert held.widen_operators({"cache": of_other_side, "unknown": x}) is None
    given = held()[""]
    held.narrow()
    model.cache = of_other_side
    other = of(lambda: model(x * model.cache.to(x.dtype)), model, x=x)
    assert other.widen_operators() is None
    assert torch.equal(other()[""], given)
    other.narrow()
    # Weights in float32 are rounded as the other side has them.
    assert other.widen_operators({}, {f"0.weight{WEIGHT}": torch.bfloat16}) is None
    assert 0 < float((other()[""] - given).detach().norm()) < 0.1
    other.end()
    # A view of it would keep what the call itself had.
    model.view = model.cache[:1]  # type: ignore[assignment,index]
    viewed = of(lambda: model(x * model.cache.to(x.dtype)), model, x=x)
    assert viewed.widen_operators({"cache": x.bfloat16()}) == "some tensors share their memory"


def test_constants_are_what_no_call_has_changed() -> None:
    model, known = net(), Float32State()
    model.table, model.cache = torch.ones(2), torch.ones(2)  # type: ignore[assignment]
    assert of(lambda: None, model).constants().keys() == {"table", "cache"}
    for _ in range(2):
        held = HeldCall(lambda: None, {"": model}, {"x": torch.ones(1)}, WatchChoice(), float32=known)
        model.cache = torch.zeros(2)  # type: ignore[assignment]
    assert held.constants().keys() == {"table"}


def test_numbers_of_16_bits_that_code_holds_are_constants_and_can_be_moved() -> None:
    table, written = torch.full((3, 2), 1 / 3).bfloat16(), torch.zeros(4, dtype=torch.bfloat16)
    model, x = net().bfloat16(), torch.ones(2, dtype=torch.bfloat16)
    model.scale = torch.ones(2, dtype=torch.bfloat16)  # type: ignore[assignment]

    def call() -> Tensor:
        written[:2] = x * model.scale
        return model(table[1:2] * written[:2] * table.clone()[:1])  # type: ignore[no-any-return]

    held = of(call, model, x=x)
    name = "a bfloat16[3, 2] of no module or argument"
    assert held.constants().keys() == {"scale", name}
    plain = held()[""]
    assert held.widen_operators(rounded_otherwise=[name]) is None
    assert 0 < float((held()[""] - plain).detach().norm() / plain.detach().norm()) < 20 * roundoff("bfloat16")
    held.narrow()
    assert torch.equal(table, torch.full((3, 2), 1 / 3).bfloat16())
    assert torch.equal(held()[""], plain)
    weight = model[0].weight.detach()
    assert held.are_made_of_own([samples_of(torch.cat((weight, weight)).T), samples_of(weight + 1)]) == [False, False]


def test_views_of_a_table_that_code_holds_can_be_moved() -> None:
    """Such as cosines and sines that were computed as one."""
    model, x = net().bfloat16(), torch.ones(2, dtype=torch.bfloat16)
    cosines, sines = (torch.arange(1.0, 5).view(2, 2) / 3).bfloat16().unbind()
    held = of(lambda: model(x * cosines + sines), model, x=x)
    names = ["a bfloat16[2] of no module or argument", "a bfloat16[2] of no module or argument (2)"]
    assert [*held.constants()] == names
    plain = held()[""]
    for moved in (names, names[:1]):
        assert held.widen({}, {}, rounded_otherwise=moved) is None
        held.narrow()
        assert held.widen_operators(rounded_otherwise=moved) is None
        assert not torch.equal(held()[""], plain)
        held.narrow()
    assert torch.equal(held()[""], plain)


def test_too_many_constants_are_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    model.table = torch.ones(2)  # type: ignore[assignment]
    monkeypatch.setattr(held_call, "_MOST_NUMBERS", 8)
    assert of(lambda: None, model).constants().keys() == {"table"}
    monkeypatch.setattr(held_call, "_MOST_NUMBERS", 7)
    assert of(lambda: None, model).constants() == {}
    # With them goes what code holds.
    stored = torch.full((2,), 1 / 3).bfloat16()
    for most, count in ((12, 2), (11, 0)):
        monkeypatch.setattr(held_call, "_MOST_NUMBERS", most)
        assert len(of(lambda: stored * 2.0, model).constants()) == count


def test_a_description_names_the_taps_of_what_modules_return() -> None:
    model, x = net(), torch.ones(2)
    described = of(lambda: model(x), model, x=x).describe()
    assert set(described.values) < set(described.taps)
    assert set(described.values) == {"0", "1", "2", "output"}

    def taps_twice() -> Tensor:
        gl.tap("mine", x)
        gl.tap("mine", x, kind="input")
        result: Tensor = model(x)
        return result

    # The first call of a tap counts.
    assert "mine" in of(taps_twice, model).describe().values


def test_a_call_that_fails_in_float64_is_repeated_with_its_own_numbers_again() -> None:
    model, x = net(), torch.ones(2)
    model.cache = torch.full((2,), 1 / 3, dtype=torch.bfloat16)  # type: ignore[assignment]
    seen: list[torch.dtype] = []

    def call() -> Tensor:
        cache: Any = model.cache
        seen.append(cache.dtype)
        if cache.dtype != torch.bfloat16:
            raise TypeError("a cache is of bfloat16")
        return model(x * cache.to(x.dtype))  # type: ignore[no-any-return]

    held = of(call, model, x=x)
    plain = held()[""]
    assert held.widen_operators({"cache": 2 * model.cache}) == "TypeError: a cache is of bfloat16"
    assert torch.equal(held()[""], plain)
    assert seen == [torch.bfloat16, torch.float32, torch.bfloat16]
    assert held.left_in_16_bits() == []


@pytest.mark.parametrize("kept", [(), ("cache",)])
def test_state_that_is_known_in_float32_is_read_only_where_it_is_kept(kept: tuple[str, ...]) -> None:
    model, x = net(), torch.ones(2)
    cache, wide = torch.full((2,), 1 / 3).bfloat16(), torch.full((2,), 5.0)
    known = Float32State()
    known.see("Sequential", {})
    known.note({"cache": wide})
    known.confirm({"cache": cache})
    model.cache = cache  # type: ignore[assignment]
    held = HeldCall(lambda: x * model.cache, {"": model}, {}, WatchChoice(), float32=known)
    assert held.widen({}, {}, kept=kept) is None
    assert held()[""].tolist() == (wide if kept else cache.float()).tolist()
    held.end()


def test_a_call_with_a_backward_pass_is_not_looked_at_in_float64() -> None:
    model = net()
    held = of(lambda: model(torch.ones(2)), model)
    assert held.try_backward() is None
    assert held.widen_operators() == "it has a backward pass"
    assert held.own_rounding() is None


def test_the_coarsest_rounding_of_a_call_and_what_stays_in_16_bits_are_reported() -> None:
    model, x = net(), torch.linspace(-1, 2, 2)
    held = of(lambda: (x.half() / 3, x.bfloat16() / 3), model, x=x)
    found = held.own_rounding()
    assert found is not None
    assert found[0] == "bfloat16"
    # That of the result that is farther away.
    assert found[1] > 6e-4
    assert of(lambda: model(x), model).own_rounding() is None
    assert held.left_in_16_bits() == []


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2)])
def test_only_a_side_of_one_rank_reports_an_exception_as_a_description(
    rank: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call() -> Tensor:
        raise ValueError("bad")

    hold(of(call, net()))
    monkeypatch.setattr(holding, "here", partial(SimpleNamespace, rank=rank, world_size=size))
    for describe in (describe_call, describe_result):
        if size == 1:
            described = describe()
            assert isinstance(described, CallDescription)
            assert described.raises == "ValueError: bad"
        else:
            with pytest.raises(ValueError, match="bad"):
                describe()


def test_a_script_that_has_ended_is_reported_in_place_of_a_call() -> None:
    end = ScriptEnd("ValueError: bad")
    hold(end)
    assert describe_call() is describe_result() is prepare_once(False) is held_unit() is end


def test_each_rank_widens_its_call_with_its_own_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Asked(HeldCall):
        def __init__(self) -> None: ...

        def widen(
            self,
            numbers: Any,
            rounded: Any,
            trial: TrialOfRanks | None = None,
            sharing: int = 1,
            kept: Collection[str] = (),
            rounded_otherwise: Collection[str] = (),
        ) -> str | None:
            asked.append((numbers, rounded, trial is not None, sharing, kept, rounded_otherwise))
            return None

    hold(Asked())
    first, second = {"x": torch.ones(1)}, {"x": torch.zeros(1)}
    for rank, size in ((0, 1), (1, 2)):
        monkeypatch.setattr(holding, "here", partial(SimpleNamespace, rank=rank, world_size=size))
        widen_call([first, second], {}, str(tmp_path / "trial"), 3, {"cache"}, {"table"})
    assert asked == [(first, {}, False, 3, {"cache"}, {"table"}), (second, {}, True, 3, {"cache"}, {"table"})]
    held: Any = Mock(spec=HeldCall)
    hold(held)
    assert widen_operators(first, {"x": torch.bfloat16}, {"cache"}, {"table"}) is held.widen_operators.return_value
    held.widen_operators.assert_called_once_with(first, {"x": torch.bfloat16}, {"cache"}, {"table"})


def test_arguments_are_named_by_place_or_keyword() -> None:
    assert arguments_by_name((1, 2), {"x": 3}) == {"args[0]": 1, "args[1]": 2, "x": 3}


def test_repetitions_in_an_autocast_block_keep_no_copies_of_weights() -> None:
    model, x = net(), torch.ones(1, 2)
    with torch.autocast("cpu", torch.bfloat16):
        held = of(lambda: model(x), model)
        (before,) = held().values()
        with torch.no_grad():
            model[2].bias.zero_()
            model[2].weight.zero_()
        # The script's own call, and a repetition with other weights.
        assert model(x).count_nonzero() == 0
        assert before.count_nonzero() == 2
        assert torch.is_autocast_cache_enabled()


@pytest.mark.parametrize("is_enabled", [True, False])
def test_autocasts_cache_is_as_before_afterwards(is_enabled: bool) -> None:
    before = torch.is_autocast_cache_enabled()
    try:
        torch.set_autocast_cache_enabled(is_enabled)
        with no_autocast_cache():
            assert not torch.is_autocast_cache_enabled()
        assert torch.is_autocast_cache_enabled() is is_enabled
    finally:
        torch.set_autocast_cache_enabled(before)


def test_autocast_is_left_on_the_devices_that_have_it() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        with no_autocast(["meta", "cpu", "cpu"]):
            assert not torch.is_autocast_enabled("cpu")
            with torch.autocast("cpu", torch.bfloat16):
                assert torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_enabled("cpu")
        with no_autocast(["meta"]):
            assert torch.is_autocast_enabled("cpu")
    with no_autocast(["cpu"]):
        assert not torch.is_autocast_enabled("cpu")


def test_what_a_call_writes_is_not_what_it_returns() -> None:
    cache = torch.zeros(2)

    def call() -> torch.Tensor:
        cache.add_(1)
        return cache * 2

    described = HeldCall(call, {}, {"cache": cache}, WatchChoice()).describe()
    assert [path for path in described.plain if is_written(path)]
    assert {path: each.tolist() for path, each in described.returned.items()} == {"": [2.0, 2.0]}


def test_a_call_in_float32_leaves_the_autocast_block_of_its_script() -> None:
    model, x = net().bfloat16(), torch.ones(1, 2, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        held = HeldCall(lambda: model(x), {"": model}, {"x": x}, WatchChoice())
        assert held.widen({}, {}) is None
        assert [each.dtype for each in held().values()] == [torch.float32]
        held.narrow()
        assert [each.dtype for each in held().values()] == [torch.bfloat16]
        assert torch.is_autocast_enabled("cpu")


def test_a_result_that_is_an_argument_as_it_was_given_is_known_as_such() -> None:
    model, x, written = net(), torch.ones(1, 2), torch.zeros(2)

    def call() -> dict[str, Tensor]:
        written.add_(1)
        return {"memory": x, "written": written, "copy": x.clone(), "y": model(x)}

    described = of(call, model, x=x, written=written).describe()
    for values in (described.plain, described.tapped, described.returned):
        assert isinstance(values, NamedTensors)
        assert values.passed_on == {"['memory']"}
