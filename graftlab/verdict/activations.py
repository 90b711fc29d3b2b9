"""Hints at activations: the function of earlier taps that each side computes at a tap."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from graftlab.verdict.hints import GOOD_FIT, Hint

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu (tanh approximation)": lambda x: F.gelu(x, approximate="tanh"),
    "quick gelu (x sigmoid(1.702 x))": lambda x: x * torch.sigmoid(1.702 * x),
    "squared relu": lambda x: F.relu(x).square(),
    "leaky relu (0.01)": F.leaky_relu,
    "elu": F.elu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
    "mish": F.mish,
    "hardswish": F.hardswish,
    "relu6": F.relu6,
    "no activation": lambda x: x,
}
# How closely a side must match the function. Variants of GELU differ by 1e-4; float32 rounds to 1e-7.
_TOLERANCE = 2e-5
_COARSE_TOLERANCE = 5e-3


def activation_hint(baseline: Tensor, target: Tensor, before: Mapping[str, Tensor]) -> Hint | None:
    """Both sides' activations at a tap, found among functions of earlier taps; None if the baseline's is not found.

    Each is a function of one earlier tap, perhaps times a second one (a gated MLP). All these taps have its shape.
    """
    fitting = {
        name: value for name, value in before.items() if value.shape == baseline.shape and not value.is_complex()
    }
    inputs = {name: value.double() for name, value in fitting.items()}
    if not inputs or not baseline.is_floating_point() or not target.is_floating_point():
        return None
    ours = _found(baseline.double(), inputs, _tolerance(baseline))
    if ours is None:
        return None
    theirs = _found(target.double(), inputs, _tolerance(target))
    if theirs is None or theirs == ours:
        return None
    fit = 1 - _off(target.double(), _computed(theirs, inputs)) / _off(target.double(), baseline.double())
    return Hint(f"the target computes {_text(theirs)}, the baseline {_text(ours)}", fit) if fit >= GOOD_FIT else None


Formula = tuple[str, str, str | None]
"""An activation, its input tap, and the tap that it is multiplied by, if any."""


def _found(value: Tensor, inputs: Mapping[str, Tensor], tolerance: float) -> Formula | None:
    candidates = [
        (activation, name, factor)
        for factor in (None, *inputs)
        for activation, name in itertools.product(ACTIVATIONS, inputs)
        if factor != name
    ]
    norm = float(value.norm())
    best = min(candidates, key=lambda each: _off(value, _computed(each, inputs)))
    return best if norm and _off(value, _computed(best, inputs)) <= tolerance * norm else None


def _computed(formula: Formula, inputs: Mapping[str, Tensor]) -> Tensor:
    activation, name, factor = formula
    value = ACTIVATIONS[activation](inputs[name])
    return value if factor is None else value * inputs[factor]


def _off(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm())


def _tolerance(value: Tensor) -> float:
    return _TOLERANCE if value.dtype in (torch.float32, torch.float64) else _COARSE_TOLERANCE


def _text(formula: Formula) -> str:
    activation, name, factor = formula
    return f"{activation} of {name}" + (f", times {factor}" if factor else "")
