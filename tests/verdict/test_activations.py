"""Activation variants: told where both sides are known functions of the taps before, and only there."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from graftlab.verdict.activations import ACTIVATIONS, activation_hint

gate, up, other = (torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
TAPS = {"gate": gate, "up": up, "norm": torch.randn(4, 6, 3)}


@pytest.mark.parametrize(("ours", "theirs"), list(itertools.permutations(["silu", "gelu", "relu", "tanh", "elu"], 2)))
def test_an_activation_is_named_with_its_input_tap(ours: str, theirs: str) -> None:
    hint = activation_hint(ACTIVATIONS[ours](gate), ACTIVATIONS[theirs](gate), TAPS)
    assert hint is not None
    assert hint.text == f"the target computes {theirs} of gate, the baseline {ours} of gate"


def test_variants_of_gelu_are_distinguished() -> None:
    hint = activation_hint(F.gelu(gate), F.gelu(gate, approximate="tanh"), TAPS)
    assert hint is not None
    assert hint.text == "the target computes gelu (tanh approximation) of gate, the baseline gelu of gate"


def test_swapped_gate_and_up_are_reported() -> None:
    hint = activation_hint(F.silu(gate) * up, F.silu(up) * gate, TAPS)
    assert hint is not None
    assert hint.text == "the target computes silu of up, times gate, the baseline silu of gate, times up"


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (F.silu(gate) * 1.5, F.gelu(gate)),  # the baseline's is none that is known
        (F.silu(gate), F.gelu(gate) * 1.5),
        (F.silu(gate), F.silu(gate)),
        (F.silu(other), F.gelu(other)),  # of a tensor that no tap shows
        (torch.arange(4), torch.arange(4) + 1),
        (torch.zeros(4, 6, 8), F.gelu(gate)),
        (F.silu(gate) * gate, F.gelu(gate) * gate),  # no gated MLP multiplies a tensor by itself
    ],
)
def test_an_unknown_activation_has_no_hint(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert activation_hint(ours, theirs, TAPS) is None


def test_an_activation_is_found_in_a_bfloat16_target() -> None:
    hint = activation_hint(F.silu(gate), F.relu(gate.bfloat16()), TAPS)
    assert hint is not None
    assert "relu of gate" in hint.text


def test_complex_taps_are_no_inputs_of_a_real_activation() -> None:
    # Their real parts would be, and torch would warn that it discards the others.
    assert activation_hint(F.silu(gate), F.gelu(gate), {"rotated": torch.complex(gate, up)}) is None
