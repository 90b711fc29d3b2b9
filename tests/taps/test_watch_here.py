"""Taps of watched modules in this process: what a graft replaces, what stays the caller's, and what is left."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kit.recorder import Recorder
from torch import nn

import graftlab as gl
from graftlab.taps import calls
from graftlab.taps.ambient_tags import ambient
from graftlab.taps.module_inputs import ArgumentTaps, ModuleInputs, _is_own, _watched
from graftlab.taps.watch import kinds_of_watched

X = torch.linspace(-1, 1, 8).reshape(2, 4)


def doubled(value: torch.Tensor) -> torch.Tensor:
    return value * 2


class Taking(nn.Module):
    """A module that notes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.given: dict[str, Any] = {}

    def forward(self, x: torch.Tensor, mask: torch.Tensor, *, scale: torch.Tensor, batch: Any = None) -> torch.Tensor:
        self.given = {"x": x, "mask": mask, "scale": scale, "batch": dict(batch or {})}
        if batch == {}:
            raise ValueError("an empty batch")
        if batch is not None and "wrong" in batch:
            raise ValueError("a wrong batch")
        return x * mask * scale


@pytest.mark.parametrize("name", ["x", "mask", "scale"])
def test_a_graft_of_one_argument_leaves_the_others_the_callers(name: str, recorder: Recorder) -> None:
    model, given = Taking(), {"x": X.clone(), "mask": torch.ones(2, 4), "scale": torch.ones(1)}
    with gl.watch(model, inputs=True, include="False"):
        model(given["x"], given["mask"], scale=given["scale"])
        assert all(model.given[each] is given[each] for each in given)
        recorder.grafts[f"input.{name} input"] = doubled
        model(given["x"], given["mask"], scale=given["scale"])
    assert [each for each in given if model.given[each] is not given[each]] == [name]
    assert torch.equal(model.given[name], 2 * given[name])
    assert torch.equal(given["x"], X)


def test_a_graft_in_the_callers_dict_is_taken_back_even_after_an_exception(
    recorder: Recorder,
) -> None:
    model, scale = Taking(), torch.ones(1)
    recorder.grafts["input.batch.ids input"] = doubled
    with gl.watch(model, inputs=True, include="False"):
        for more in ({}, {"wrong": True}):
            batch: dict[str, Any] = {"ids": X, **more}
            if more:
                with pytest.raises(ValueError, match="a wrong batch"):
                    model(X, X, scale=scale, batch=batch)
            else:
                model(X, X, scale=scale, batch=batch)
            assert torch.equal(model.given["batch"]["ids"], 2 * X)
            assert batch["ids"] is X


@pytest.mark.parametrize(("cache", "at"), [({"seen": X}, "seen"), ([X], 0)], ids=["dict", "list"])
def test_what_a_call_puts_in_place_of_a_graft_stays_for_later_calls(cache: Any, at: Any, recorder: Recorder) -> None:
    class Remembering(nn.Module):
        def forward(self, cache: Any) -> torch.Tensor:
            cache[at] = cache[at] + 1
            result: torch.Tensor = cache[at]
            return result

    recorder.grafts["input.cache.seen input" if at else "input.cache[0] input"] = doubled
    with gl.watch(model := Remembering(), inputs=True, include="False"):
        model(cache)
    assert torch.equal(cache[at], 2 * X + 1)


def test_a_graft_of_a_modules_output_or_gradient_replaces_it_for_what_follows(recorder: Recorder) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity())

    def gradient() -> torch.Tensor:
        model.zero_grad()
        model(X).sum().backward()
        assert model[0].weight.grad is not None
        return model[0].weight.grad.clone()

    plain, expected = model(X).detach(), gradient()
    with gl.watch(model, include="name in ('0', 'output')", grads=True):
        recorder.grafts["0"] = doubled
        assert torch.allclose(model(X), 2 * plain)
        recorder.grafts = {"0 grad": doubled}
        assert torch.allclose(gradient(), 2 * expected)
        assert {"0", "0 grad", "output", "output grad"} == set(recorder.names)
    assert torch.equal(model(X), plain)


def test_of_several_results_inside_a_module_one_can_be_grafted(recorder: Recorder) -> None:
    class Halves(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, second = x.chunk(2, -1)
            return torch.cat((first, second), -1)

    for name, expected in (("first", [2.0, 1.0]), ("second", [1.0, 2.0])):
        recorder.grafts = {name: doubled}
        with gl.watch(model := Halves(), include="False", inside="name == 'output'"):
            assert model(torch.ones(2)).tolist() == expected


def test_modules_are_known_as_long_as_they_are_watched(recorder: Recorder) -> None:
    model = nn.Sequential(nn.Identity())
    with gl.watch(model, prefix="m."):
        with gl.watch(model, include="name == '0'"):
            assert [each.name for each in _watched[model[0]]] == ["m.0", "0"]
        assert [each.name for each in _watched[model[0]]] == ["m.0"]
        assert [(each.name, each.inside) for each in _watched[model]] == [("m.output", "m.")]
    assert model not in _watched
    assert model[0] not in _watched


def test_the_kinds_of_taps_are_known_to_who_asked_before_the_watch() -> None:
    kinds = kinds_of_watched()
    gl.watch(nn.Sequential(nn.ReLU()), prefix="watched_later.")
    assert (kinds["watched_later.0"], kinds["watched_later.output"]) == ("ReLU", "Sequential")


def test_inputs_are_no_longer_tapped_once_their_run_has_ended(recorder: Recorder) -> None:
    before, after = nn.Sequential(nn.Identity()), nn.Sequential(nn.Identity())
    x = torch.ones(2)
    with ModuleInputs(["0"], ["0"]), gl.watch(before):
        before(x)
    assert "0.in module_input" in recorder.names
    recorder.shown.clear()
    with gl.watch(after):
        after(x)
    assert recorder.names == ["0", "output"]


def test_a_module_in_a_variable_of_the_caller_is_not_around_the_call(recorder: Recorder) -> None:
    def call() -> torch.Tensor:
        variable = model[1]
        return variable(model[0](torch.ones(2)))

    model = nn.Sequential(nn.Identity(), nn.Identity())
    with ModuleInputs(["0", "1"], ["0", "1"]) as inputs, gl.watch(model):
        call()
        assert {name: (each.within, each.function) for name, each in inputs.calls.items()} == {
            "0": ((), "call"),
            "1": ((), "call"),
        }
        model(torch.ones(2))
        assert [inputs.calls[name].within for name in ("0", "1")] == [("output",)] * 2


def test_the_tags_of_a_generator_hold_only_while_it_runs(recorder: Recorder) -> None:
    def layers() -> Iterator[int]:
        for layer in range(2):
            with gl.tags(layer=layer):
                yield layer

    def layer_of(name: str) -> Any:
        gl.tap(name, X)
        return dict(ambient.get()).get("layer")

    with gl.tags(phase="decode"):
        running = layers()
        for layer in running:
            assert layer_of(f"in {layer}") is None
        assert dict(ambient.get()) == {"phase": "decode"}

        def inside() -> Iterator[Any]:
            with gl.tags(layer=7):
                yield layer_of("a")
                yield layer_of("b")

        found = inside()
        assert next(found) == 7
        with gl.tags(layer=1):
            assert layer_of("between") == 1
            # It ends after a block that was opened later.
            assert [*found] == [7]
            assert layer_of("after") == 1
        assert layer_of("outside") is None
    assert dict(ambient.get()) == {}


def test_an_argument_that_a_graft_replaces_reaches_the_module_and_the_others_stay(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, other, new = torch.ones(2), torch.zeros(2), torch.full((2,), 5.0)
    named: list[str] = []

    def tap_one(name: str, value: torch.Tensor) -> torch.Tensor:
        named.append(name)
        return new if value is given else value

    def forward(x: torch.Tensor, *rest: torch.Tensor, mask: Any = None) -> None:
        """A module's forward."""

    hook = ArgumentTaps(forward, lambda: tap_one, lambda name, value, tap: tap(name, value))
    module = nn.Identity()
    assert hook(module, (other, other), {"mask": other}) is None
    assert named == ["x", "[1]", "mask"]
    calls_of: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((given, other), {"mask": other}),
        ((other, given), {}),
        ((other,), {"mask": given}),
    ]
    for args, kwargs in calls_of:
        found = hook(module, args, kwargs)
        assert found is not None
        changed = [*found[0], *found[1].values()]
        wanted = [new if each is given else each for each in (*args, *kwargs.values())]
        assert all(one is another for one, another in zip(changed, wanted, strict=True))
    named.clear()
    monkeypatch.setattr(calls, "_handler", None)
    assert hook(module, (given,), {}) is None
    assert named == [], "there is no session"


def test_another_tensor_in_the_place_of_a_deleted_one_has_another_number() -> None:
    inputs = ModuleInputs([], [])
    one, other = torch.ones(1), torch.ones(1)
    assert [inputs._number(each) for each in (one, other, one)] == [1, 2, 1]
    gone = torch.ones(1)
    inputs._tensors[id(one)] = weakref.ref(gone), 7
    assert inputs._number(one) == 3
    del gone
    inputs._tensors[id(other)] = weakref.ref(torch.ones(1)), 8
    assert inputs._number(other) == 4


def test_the_gradients_of_watched_modules_are_taps_with_their_tags(recorder: Recorder) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    x = torch.ones(1, 4)
    recorder.grafts["1 grad"] = torch.zeros_like
    with gl.watch(model, grads=True), gl.tags(phase="train"):
        model(x).sum().backward()
    assert recorder.names == ["0", "1", "output", "1 grad", "output grad", "0 grad"]
    assert recorder.tags["0 grad"] == {"phase": "train", "kind": "grad"}
    # A graft into a gradient flows on.
    weight = model[0].weight
    assert weight.grad is not None
    assert weight.grad.abs().sum() == 0
    recorder.shown.clear()
    with gl.watch(model):
        model(x).sum().backward()
    assert recorder.names == ["0", "1", "output"]


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("torch", True),
        ("torch.nn.modules.module", True),
        ("graftlab.taps", True),
        ("torchvision.ops", False),
        ("", False),
    ],
)
def test_code_is_torchs_own_by_its_package_and_not_by_the_beginning_of_its_name(name: str, own: bool) -> None:
    assert _is_own({"__name__": name}) is own
