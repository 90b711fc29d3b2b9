"""Verdicts on code that computes with numbers of 8 bits."""

from __future__ import annotations

import pytest
import torch

import graftlab as gl

pytestmark = pytest.mark.ranks


def quantised_linear(name: str, x: torch.Tensor, weight: torch.Tensor, wrong: str) -> torch.Tensor:
    """A product of numbers of 8 bits, with a scale for each token and one for each row of the weight."""
    scale = x.abs().amax(-1, keepdim=True) / 448
    of_weight = weight.abs().amax(1, keepdim=True) / 448
    q = gl.tap(f"{name}.q", (x / scale).to(torch.float8_e4m3fn))
    w = (weight / of_weight).to(torch.float8_e4m3fn)
    if wrong == "scale":
        scale = scale * 1.02
    if wrong == "order":
        half = x.shape[-1] // 2
        product = q.float()[..., half:] @ w.float().T[half:] + q.float()[..., :half] @ w.float().T[:half]
    else:
        product = q.float() @ w.float().T
    return gl.tap(f"{name}.out", product * scale * of_weight.T)


def network(wrong: str) -> torch.Tensor:
    """Three blocks. ``wrong`` is the target's difference."""
    me = gl.here()
    wrong = wrong if me is not None and me.side == "target" else ""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 8, 64, generator=generator)
    for layer in range(3):
        up, down = (torch.randn(64, 64, generator=generator) / 8 for _ in range(2))
        fault = wrong if layer == 1 else ""
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        h = (x - mean) * (variance + 1e-5).rsqrt()
        if wrong == "norm":
            h = torch.nn.functional.layer_norm(x, (64,))
        h = quantised_linear(f"layers.{layer}.up", h, up, fault)
        x = gl.tap(f"layers.{layer}.x", x + quantised_linear(f"layers.{layer}.down", h.relu(), down, ""))
    return x


def test_a_wrong_scale_after_8_bits_is_not_cleared_as_their_rounding(session: gl.Session) -> None:
    verdict = session.verdict(network, network, args=("scale",))
    assert verdict.named == ["layers.*.up.out"], verdict.text
    assert "1.02" in verdict.text


@pytest.mark.parametrize("other", ["order", "norm"])
def test_another_order_of_sums_before_and_after_8_bits_is_rounding(session: gl.Session, other: str) -> None:
    verdict = session.verdict(network, network, args=(other,))
    assert not verdict.named, verdict.text
    assert "Nothing above float8_e4m3fn rounding" in verdict.text
