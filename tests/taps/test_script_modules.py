"""Modules of TorchScript are watched from outside: they refuse hooks, and Python does not call what is inside them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from kit.recorder import Recorder
from torch import nn

import graftlab as gl
from graftlab.ranks.held_call import HeldCall, WatchChoice

X = torch.arange(8.0).reshape(2, 4)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.inner(x))


def scripted(module: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        made: nn.Module = torch.jit.script(module)
    return made


def traced(module: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        made: nn.Module = torch.jit.trace(module, X)
    return made


def doubled(value: torch.Tensor) -> torch.Tensor:
    return value * 2


def test_a_scripted_module_is_one_tap_among_others_and_can_be_grafted(recorder: Recorder) -> None:
    torch.manual_seed(0)
    layers = [Layer(), Layer()]
    model = nn.Sequential(scripted(layers[0]), scripted(layers[1]))
    recorder.grafts = {"0": doubled, "1": doubled}
    with torch.no_grad(), gl.watch(model) as watched:
        found = model(X)
        assert torch.equal(found, 2 * layers[1](2 * layers[0](X)))
    assert watched.names == ["output", "0", "1"]
    assert recorder.names == ["0", "1", "output"]
    model(X)
    assert len(recorder.names) == 3


@pytest.mark.parametrize("make", [scripted, traced])
def test_a_whole_model_of_torchscript_shows_its_arguments_and_weights(make: Any, recorder: Recorder) -> None:
    layer = Layer()
    model = make(layer)
    recorder.grafts = {"input.x input": doubled}
    with gl.watch(model, inputs=True, params=True):
        assert torch.equal(model(X), layer(2 * X))
    assert recorder.names == ["inner.weight param", "inner.bias param", "input.x input", "output"]


def test_a_call_of_torchscript_can_be_held(recorder: Recorder) -> None:
    model = scripted(Layer())
    held = HeldCall(lambda: model(X), {"": model}, {"x": X}, WatchChoice())
    description = held.describe()
    held.end()
    assert description.fails_when_repeated is None
    assert description.taps == ("input.x", "output")


def test_filters_know_the_class_of_a_scripted_module() -> None:
    model = nn.Sequential(scripted(Layer()), nn.Linear(4, 4))
    assert gl.watch(model, include="type == 'Layer'").names == ["0"]
