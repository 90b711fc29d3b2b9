"""What a held update shows of what it is given, and which state repetitions begin from."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from kit.grafters import become_rank
from torch import nn
from torch.utils.checkpoint import checkpoint

from graftlab.ranks.held_update import GradientWatch, HeldUpdate, TensorSample
from graftlab.taps.routing import handled_by


class Taps:
    """Takes taps, and overwrites those of some names and kinds in place."""

    def __init__(self, grafts: Mapping[tuple[str, str], float] | None = None) -> None:
        self.shown: list[tuple[str, str]] = []
        self.tags: list[Mapping[str, Any]] = []
        self._grafts = grafts or {}

    def tap(self, name: str, value: Any, extras: Any, tags: Mapping[str, Any], replace: bool = False) -> Any:
        self.shown.append((name, tags["kind"]))
        self.tags.append(tags)
        if (filled := self._grafts.get((name, tags["kind"]))) is not None:
            with torch.no_grad():
                value.fill_(filled)
        return value


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> nn.Linear:
    become_rank(monkeypatch, "target")
    torch.manual_seed(0)
    made = nn.Linear(2, 1)
    made(torch.ones(3, 2)).sum().backward()
    return made


def update_of(model: nn.Module, optimizer: torch.optim.Optimizer, gradients: GradientWatch | None = None) -> HeldUpdate:
    step = partial(type(optimizer).step, optimizer)
    return HeldUpdate(step, optimizer, {"Net": model}, gradients or GradientWatch(), {}, number=3, calls=2)


def test_weights_come_before_the_optimizers_state_and_gradients_in_backward_order(model: nn.Linear) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    optimizer.step()
    taps = Taps()
    with handled_by(taps):
        update_of(model, optimizer).show_inputs()
    assert taps.shown == [
        *(("weight", "param"), ("bias", "param")),
        *(("weight.momentum_buffer", "optimizer"), ("bias.momentum_buffer", "optimizer")),
        *(("bias", "param_grad"), ("weight", "param_grad")),
    ]


def test_a_repeated_step_does_not_tap_the_settings_that_its_description_has(model: nn.Linear) -> None:
    held = update_of(model, torch.optim.SGD(model.parameters(), 0.1))
    taps = Taps()
    with handled_by(taps):
        held()
    assert {*taps.shown} == {(name, kind) for name in ("weight", "bias") for kind in ("param", "param_grad")}
    assert held.describe().settings["lr"] == {"weight": 0.1, "bias": 0.1}
    held.end()


def test_repetitions_begin_with_what_taps_leave_only_once_it_is_taken(model: nn.Linear) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    before = model.bias.item()
    held = update_of(model, optimizer)
    taps = Taps({("bias", "param"): 5.0, ("bias", "param_grad"): 1.0})
    with handled_by(taps):
        held.show_inputs()
    held()
    assert model.bias.item() == pytest.approx(before - 3.0)
    with handled_by(taps):
        held.take_inputs()
    held()
    held()
    assert model.bias.item() == 4.0
    held.end()
    assert held.is_released
    assert model.bias.item() == pytest.approx(before)
    assert model.bias.grad is not None
    assert model.bias.grad.item() == 3.0


def test_a_graft_at_a_weight_that_the_optimizer_lacks_ends_with_its_repetition(model: nn.Linear) -> None:
    update = update_of(model, torch.optim.SGD([model.weight], 0.1))
    before = model.bias.detach().clone()
    with handled_by(Taps({("bias", "param"): 7.0})):
        update()
        assert model.bias.item() == 7.0
    shown = Taps()
    with handled_by(shown):
        update()
    assert ("bias", "param") in shown.shown
    assert torch.equal(model.bias, before)
    with handled_by(Taps({("bias", "param"): 7.0})):
        update()
    update.end()
    assert torch.equal(model.bias, before)


def test_a_script_continues_with_what_was_taken_if_it_is_kept(model: nn.Linear) -> None:
    held = update_of(model, torch.optim.SGD(model.parameters(), 1.0))
    with handled_by(Taps({("bias", "param"): 5.0})):
        held.take_inputs()
    held.keep_inputs()
    held()
    held.end()
    assert model.bias.item() == 5.0


def test_repetitions_begin_with_divided_gradients_until_the_script_continues(model: nn.Linear) -> None:
    held = update_of(model, torch.optim.SGD(model.parameters(), 1.0))
    before, weight = model.bias.item(), model.weight.clone()
    gradient = model.weight.grad.clone()  # type: ignore[union-attr]
    # A repetition before has moved the weights.
    held()
    held.divide_gradients(2, {"bias"})
    for _ in range(2):
        held()
        assert model.bias.item() == pytest.approx(before - 1.5)
        assert torch.equal(model.weight, weight - gradient)
    held.end()
    assert model.bias.grad is not None
    assert model.bias.grad.item() == 3.0


def test_gradients_with_the_factor_of_a_scaler_are_shown_without_it(model: nn.Linear) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    optimizer.grad_scale = torch.tensor(2.0)  # type: ignore[attr-defined]
    shown: dict[str, float] = {}

    class Values(Taps):
        def tap(self, name: str, value: Any, *rest: Any, **more: Any) -> Any:
            shown[f"{name} {rest[1]['kind']}"] = float(value.detach().flatten()[0])
            return super().tap(name, value, *rest, **more)

    held = update_of(model, optimizer)
    with handled_by(Values()):
        held.show_inputs()
    assert shown["bias param_grad"] == 1.5
    assert shown["weight param_grad"] == 1.5
    held = HeldUpdate(lambda: None, optimizer, {"Net": model}, GradientWatch(), {}, number=1, calls=1)
    assert held.describe().gradients["bias"].values.tolist() == [1.5]


def test_the_description_names_what_the_optimizer_and_the_gradients_leave_out() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1), nn.Linear(1, 1))
    model[2].weight.requires_grad_(False)
    watch = GradientWatch()
    watch.add_weights(model)
    optimizer = torch.optim.SGD([*model[0].parameters(), *model[2].parameters()], 0.1)
    result = model[1](model[0](torch.ones(1, 2)))
    watch.add_results({"out": result, "mask": torch.ones(2)})
    result.sum().backward()
    model[0].bias.grad.mul_(2)
    found = update_of(model, optimizer, watch).describe()
    assert (found.optimizer, found.number, found.calls) == ("SGD", 3, 2)
    assert found.frozen == ("1.weight", "1.bias", "2.weight")
    assert found.without_gradient == ("2.weight", "2.bias")
    assert set(found.gradients) == set(found.accumulated) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    # The last layer's come first.
    assert [name[0] for name in found.accumulated] == ["1", "1", "0", "0"]
    assert torch.equal(found.gradients["0.bias"].values, 2 * found.accumulated["0.bias"].values)
    assert found.of_results["out"].values.tolist() == [1.0]
    assert set(found.settings["lr"]) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert (found.not_repeated, found.has_closure, found.scale) == (False, False, 1.0)
    watch.of_shards[0] = found.gradients["0.bias"]
    watch.begin_step()
    assert (watch.accumulated, watch.of_results, watch.of_shards) == ({}, {}, {})
    assert (set(found.of_results), len(found.accumulated)) == ({"out"}, 4)


@contextlib.contextmanager
def watched(model: nn.Module) -> Iterator[GradientWatch]:
    watch = GradientWatch()
    watch.install()
    watch.add_weights(model)
    try:
        yield watch
    finally:
        watch.remove()


def in_order(model: nn.Module, watch: GradientWatch) -> list[str]:
    return [*update_of(model, torch.optim.SGD(model.parameters(), 0.1), watch).describe().accumulated]


def test_gradients_are_in_the_order_of_a_pass_where_each_pass_reaches_only_some() -> None:
    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in ("top", "one", "trunk", "other")})

    def hidden() -> torch.Tensor:
        return model["top"](model["trunk"](torch.ones(1, 2)))

    with watched(model) as watch:
        model["one"](hidden()).sum().backward()
        model["other"](hidden()).sum().backward()
        order = ["one.weight", "other.weight", "top.weight", "trunk.weight"]
        assert in_order(model, watch) == order
        # A pass that graftlab makes is none of the script's.
        watch.begin_step()
        watch.is_paused = True
        model["other"](hidden()).sum().backward()
        watch.is_paused = False
        model["one"](hidden()).sum().backward()
        assert in_order(model, watch) == [name for name in order if name != "other.weight"]


def test_a_weight_that_one_pass_reaches_repeatedly_counts_in_its_last_place() -> None:
    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in ("tied", "inside")})

    with watched(model) as watch:
        # A checkpoint of this kind makes a pass within the pass.
        hidden = checkpoint(model["inside"], model["tied"](torch.ones(1, 2)), use_reentrant=True)
        checkpoint(model["tied"], hidden, use_reentrant=True).sum().backward()
        assert in_order(model, watch) == ["inside.weight", "tied.weight"]


def test_a_pass_that_ends_after_another_in_a_second_thread_is_over() -> None:
    watch, weights = GradientWatch(), [torch.ones(1, requires_grad=True) for _ in range(3)]
    for weight in weights:
        weight.grad = torch.ones(1)
    begun, over = threading.Event(), threading.Event()

    def reaches(*found: torch.Tensor) -> Callable[..., None]:
        return lambda *_: [watch._note(weight) for weight in found] and None

    def second(*_: Any) -> None:
        begun.set()
        over.wait(60)

    def first(*_: Any) -> None:
        watch._backward = second  # type: ignore[assignment]
        thread.start()
        begun.wait(60)

    thread = threading.Thread(target=lambda: watch._note_loss(weights[0]))
    watch._backward = first  # type: ignore[assignment]
    watch._note_loss(weights[0])
    over.set()
    thread.join(60)
    # What each of two later passes reaches is known.
    for found in (weights, weights[::2]):
        watch._backward = reaches(*found)  # type: ignore[assignment]
        watch._note_loss(weights[0])
    assert watch.order() == [id(weight) for weight in weights]


def test_losses_are_numbers_from_which_passes_of_the_script_begin() -> None:
    weight = nn.Parameter(torch.ones(2))
    before, watch = torch.autograd.backward, GradientWatch()
    watch.install()
    try:
        for factor in (2.0, 3.0):
            (weight * factor).sum().backward()
        (weight * 5).sum().backward(torch.tensor(2.0))
        torch.autograd.backward((weight * 5).sum(), grad_tensors=torch.tensor(1.0))
        torch.autograd.backward([weight.sum(), weight.sum()])
        watch.is_paused = True
        weight.sum().backward()
        assert watch.losses == [4.0, 6.0]
        found = update_of(nn.ParameterList([weight]), torch.optim.SGD([weight], 0.1), watch).describe()
        watch.begin_step()
        assert (found.losses, watch.losses) == ((4.0, 6.0), [])
    finally:
        watch.remove()
    assert torch.autograd.backward is before
    assert weight.grad is not None
    assert weight.grad.tolist() == [23.0, 23.0]


def test_a_watch_that_other_code_has_wrapped_passes_on_and_notes_no_further_loss() -> None:
    weight = nn.Parameter(torch.ones(1))
    before, watch = torch.autograd.backward, GradientWatch()
    watch.install()
    inner = torch.autograd.backward
    try:
        other = torch.autograd.backward = lambda *args, **kwargs: inner(*args, **kwargs)
        watch.remove()
        assert torch.autograd.backward is other
        weight.sum().backward()
    finally:
        torch.autograd.backward = before
    assert (watch.losses, weight.grad) == ([], torch.ones(1))


def test_weights_are_watched_once_however_often_a_model_is_called() -> None:
    model, watch = nn.Linear(1, 1), GradientWatch()
    model.bias.requires_grad_(False)
    for _ in range(3):
        watch.add_weights(model)
    assert len(model.weight._post_accumulate_grad_hooks) == 1  # type: ignore[attr-defined]
    for _ in range(2):
        model(torch.ones(1, 1)).sum().backward()
    assert watch.accumulated[id(model.weight)].values.tolist() == [2.0]
    assert len(watch.accumulated) == 1


def test_weights_of_another_optimizer_are_neither_frozen_nor_tapped(model: nn.Linear) -> None:
    other = torch.optim.SGD([model.bias], 0.1)
    held = update_of(model, torch.optim.SGD([model.weight], 0.1))
    taps = Taps()
    with handled_by(taps):
        held()
    assert ("bias", "param") not in taps.shown
    assert ("weight", "param") in taps.shown
    found = held.describe()
    assert (found.frozen, found.elsewhere) == ((), ("bias",))
    taps.shown.clear()
    before = model.weight.tolist()
    with handled_by(taps):
        held.show_unchanged()
    assert (taps.shown, model.weight.tolist()) == ([("weight", "param")], before)
    assert taps.tags[-1] == {"kind": "param", "updated": True}
    held.end()
    model.bias.grad = None
    assert held.describe().without_gradient == ()
    model.bias.requires_grad_(False)
    found = held.describe()
    assert (found.frozen, found.elsewhere) == (("bias",), ())
    model.bias.requires_grad_(True)
    del other.param_groups[0]["params"][:]
    found = held.describe()
    assert (found.frozen, found.elsewhere) == (("bias",), ())
    # A weight that no optimizer has needs no gradient.
    assert found.without_gradient == ()


class Watched:
    """The taps of a model's calls, which can be removed."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.removed = model, 0

    def remove(self) -> None:
        self.removed += 1


def test_a_step_is_described_without_being_made_and_watched_while_it_runs(
    model: nn.Linear,
) -> None:
    optimizer, steps, watched = torch.optim.SGD(model.parameters(), 1.0), [0], list[Any]()

    def step() -> None:
        steps[0] += 1

    def watch(watched_model: nn.Module) -> Any:
        watched.append(Watched(watched_model))
        return watched[-1]

    held = HeldUpdate(step, optimizer, {"N": model}, GradientWatch(), {}, number=1, calls=0, watch_calls=watch)
    assert held.describe().has_closure
    assert (steps, watched) == ([0], [])
    held()
    held()
    assert steps == [2]
    assert [(each.model, each.removed) for each in watched] == [(model, 0)]
    held.end()
    assert watched[0].removed == 1


def test_settings_are_plain_values_without_those_that_leave_the_result_unchanged(model: nn.Linear) -> None:
    rate = torch.tensor(0.25)
    settings = update_of(model, torch.optim.Adam(model.parameters(), rate, foreach=False)).describe().settings
    assert settings["betas"] == {"weight": (0.9, 0.999), "bias": (0.9, 0.999)}
    assert settings["lr"]["weight"] == 0.25
    assert not isinstance(settings["lr"]["weight"], torch.Tensor)
    assert not {"params", "foreach", "fused", "capturable", "differentiable"} & {*settings}
    # Each group has its settings.
    groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.5}]
    settings = update_of(model, torch.optim.SGD(groups, 0.25)).describe().settings
    assert settings["lr"] == {"weight": 0.25, "bias": 0.5}


def test_weights_of_a_model_called_without_its_head_have_their_names_in_the_whole() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(2, 2), nn.Linear(2, 1)

    class Trainer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Whole()

    # A module around the model with no weights beside it, made first.
    trainer = Trainer()
    whole = trainer.model
    outer = nn.ModuleList([trainer, nn.Linear(2, 2)])
    nn.Module.__new__(nn.Linear)
    held = update_of(whole.body, torch.optim.SGD(whole.parameters(), 0.1))
    assert list(held.describe().dtypes) == ["body.weight", "body.bias", "head.weight", "head.bias"]
    # Without the outer module, the two have no module in common.
    alone = nn.Parameter(torch.ones(1))
    held = update_of(outer[1], torch.optim.SGD([*outer[1].parameters(), alone], 0.1))
    again = update_of(outer[1], torch.optim.SGD([*outer[1].parameters(), alone], 0.1))
    names = ["parameter_2", "Net.weight", "Net.bias"]
    assert list(held.describe().dtypes) == list(again.describe().dtypes) == names


def test_a_sample_has_both_ends_of_a_large_tensor_and_the_norm_of_the_whole() -> None:
    values = torch.arange(10_000.0)
    sample = TensorSample.of(values.reshape(100, 100).bfloat16())
    assert (sample.shape, sample.dtype, len(sample.values)) == ((100, 100), "bfloat16", 4096)
    assert (sample.values[0].item(), sample.values[-1].item()) == (0.0, 9984.0)
    assert sample.norm == pytest.approx(float(values.bfloat16().double().norm()), rel=1e-6)
    assert TensorSample.of(torch.empty(0)).values.tolist() == []
    small = TensorSample.of(torch.tensor([3.0, 4.0]))
    assert (small.values.tolist(), small.norm) == ([3.0, 4.0], 5.0)
    pair = TensorSample.of(torch.tensor([3 + 4j]))
    assert (pair.values.tolist(), pair.norm, pair.shape, pair.dtype) == ([3.0, 4.0], 5.0, (1,), "complex64")


@pytest.mark.parametrize("count", [1, 2, 3, 7, 1000, 4095, 4096])
def test_a_sample_of_a_small_tensor_is_all_of_it(count: int) -> None:
    sample = TensorSample.of(torch.arange(float(count)))
    assert sample.values.tolist() == sample.places.tolist() == [*range(count)]


def test_a_step_that_depends_on_more_than_it_is_given_does_not_repeat() -> None:
    model = nn.Linear(1, 1)
    model(torch.ones(1, 1)).backward()
    optimizer, made = torch.optim.SGD(model.parameters(), 0.1), [0]

    def step() -> None:
        made[0] += 1
        with torch.no_grad():
            model.weight.fill_(float(made[0]))

    held = HeldUpdate(step, optimizer, {"Net": model}, GradientWatch(), {}, number=1, calls=1)
    assert held.describe().not_repeated


def test_the_scale_of_losses_is_that_of_the_one_scaler_in_use(model: nn.Linear) -> None:
    held = update_of(model, torch.optim.SGD(model.parameters(), 0.1))
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0, enabled=enabled) for enabled in (True, False)]
    assert held.describe().scale == 8.0
    scalers.append(torch.amp.GradScaler("cpu", init_scale=4.0))
    assert held.describe().scale == 1.0
    del scalers[0]
    assert held.describe().scale == 4.0


def test_sparse_gradients_are_left_out_of_the_description() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    head = nn.Linear(2, 1)
    optimizer = torch.optim.SGD([*table.parameters(), *head.parameters()], lr=0.1)
    head(table(torch.tensor([1]))).sum().backward()
    step = partial(torch.optim.SGD.step, optimizer)
    models = {"Table": table, "Head": head}
    described = HeldUpdate(step, optimizer, models, GradientWatch(), {}, number=1, calls=1).describe()
    assert {name.rpartition(".")[2] for name in described.gradients} == {"weight", "bias"}
    assert len(described.gradients) == 2
