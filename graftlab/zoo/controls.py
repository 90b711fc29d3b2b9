"""The benign variants of the zoo: different arithmetic for the same mathematics. A verdict must name nothing.

If a variant has different tensors at some taps but the same outputs, those groups are in ``cancels``: a verdict may
report that they cancel, but must not call them culprits.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from graftlab.zoo.faults import Regime, Specimen
from graftlab.zoo.model import Math

CONTROLS: list[Specimen] = []


def _control(
    area: str, *cancels: str, regime: Regime = "forward", dtype: torch.dtype | None = None, weights: Any = None
) -> Any:
    """Register a subclass of Math as benign. Its docstring states the difference."""

    def register(math_of_the_control: type[Math]) -> type[Math]:
        name = "".join(f"_{c.lower()}" if c.isupper() else c for c in math_of_the_control.__name__).lstrip("_")
        CONTROLS.append(
            Specimen(
                name, area, frozenset(), math_of_the_control, weights, regime, dtype=dtype, cancels=frozenset(cancels)
            )
        )
        return math_of_the_control

    return register


@_control("nothing")
class Identical(Math):
    """The same code."""


@_control("attention")
class ScaledDotProductAttention(Math):
    """torch's fused attention."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        k, v = self.share_heads(k, layer), self.share_heads(v, layer)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        mask = self.mask(q.shape[2], k.shape[2], layer)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)


@_control("attention")
class SoftmaxThroughLogarithms(Math):
    """exp(x - logsumexp(x))."""

    def softmax(self, scores: Tensor, layer: int) -> Tensor:
        return (scores - scores.logsumexp(-1, keepdim=True)).exp()


@_control("attention")
class QueriesScaledFirst(Math):
    """The scale is applied to the queries, not to the scores."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        k, v = self.share_heads(k, layer), self.share_heads(v, layer)
        scores = torch.einsum("bqhd,bkhd->bhqk", q * self.scale(layer), k)
        scores = scores.masked_fill(~self.mask(q.shape[1], k.shape[1], layer), torch.finfo(scores.dtype).min)
        return torch.einsum("bhqk,bkhd->bqhd", self.softmax(scores, layer), v)


@_control("attention")
class AttentionInBlocks(Math):
    """Keys are taken in blocks with a running maximum and sum (FlashAttention's order of additions)."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        k, v = self.share_heads(k, layer), self.share_heads(v, layer)
        mask = self.mask(q.shape[1], k.shape[1], layer)
        top = torch.full((q.shape[0], q.shape[2], q.shape[1], 1), -math.inf, dtype=q.dtype)
        total = torch.zeros_like(top)
        mixed = torch.zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[-1], dtype=q.dtype)
        for start in range(0, k.shape[1], 5):
            block = slice(start, start + 5)
            scores = torch.einsum("bqhd,bkhd->bhqk", q, k[:, block]) * self.scale(layer)
            scores = scores.masked_fill(~mask[:, block], -math.inf)
            above = torch.maximum(top, scores.amax(-1, keepdim=True))
            known = torch.nan_to_num((top - above).exp(), nan=0.0)
            exps = torch.nan_to_num((scores - above).exp(), nan=0.0)
            total = total * known + exps.sum(-1, keepdim=True)
            mixed = mixed * known + torch.einsum("bhqk,bkhd->bhqd", exps, v[:, block])
            top = above
        return (mixed / total).transpose(1, 2)


@_control("norms")
class FusedNorm(Math):
    """torch's own RMSNorm."""

    def norm(self, x: Tensor, weight: Tensor, layer: int | None, which: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, self.config.eps)


@_control("norms")
class WeightBeforeScale(Math):
    """The weight is applied before the division by the root."""

    def norm(self, x: Tensor, weight: Tensor, layer: int | None, which: str) -> Tensor:
        return (x * weight) / (x.square().sum(-1, keepdim=True) / x.shape[-1] + self.config.eps).sqrt()


@_control("order of sums")
class SumsInPieces(Math):
    """Projections add up halves of the hidden dimension, the second first."""

    def project(self, x: Tensor, weight: Tensor, bias: Tensor, layer: int, which: str) -> Tensor:
        half = x.shape[-1] // 2
        whole = x[..., half:] @ weight[:, half:].T + x[..., :half] @ weight[:, :half].T + bias
        return whole.reshape(*x.shape[:-1], -1, self.config.head_dim)

    def head(self, x: Tensor, weight: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        return x[..., half:] @ weight[:, half:].T + x[..., :half] @ weight[:, :half].T


@_control("order of sums")
class HiddenTurnedAround(Math):
    """Every sum over the hidden dimension runs from its end."""

    def project(self, x: Tensor, weight: Tensor, bias: Tensor, layer: int, which: str) -> Tensor:
        return super().project(x.flip(-1), weight.flip(-1), bias, layer, which)

    def join(self, mixed: Tensor, weight: Tensor, layer: int) -> Tensor:
        return self.reduce(mixed.flatten(-2).flip(-1) @ weight.flip(-1).T, layer, "attn")


@_control("order of sums")
class BatchTurnedAround(Math):
    """Attention and MLP process the batch in reverse order."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        return super().attend(q.flip(0), k.flip(0), v.flip(0), layer).flip(0)

    def down(self, x: Tensor, weight: Tensor, layer: int) -> Tensor:
        return super().down(x.flip(0), weight, layer).flip(0)


@_control("mlp")
class SiluByHand(Math):
    """x / (1 + exp(-x))."""

    def activate(self, gate: Tensor, up: Tensor, layer: int) -> Tensor:
        return gate / (1 + (-gate).exp()) * up


@_control("experts")
class ExpertsInTurn(Math):
    """One expert after the other, each with only its own tokens."""

    def experts(self, x: Tensor, shares: Tensor, gate: Tensor, up: Tensor, down: Tensor, layer: int) -> Tensor:
        out = torch.zeros_like(x)
        for expert in range(gate.shape[0]):
            at = shares[..., expert] > 0
            inner = F.silu(x[at] @ gate[expert].T) * (x[at] @ up[expert].T)
            out[at] = out[at] + shares[..., expert][at][:, None] * (inner @ down[expert].T)
        return self.reduce(out, layer, "mlp")


@_control("positions")
class ComplexRotation(Math):
    """Rotary positions as a product of complex numbers."""

    def rotate(self, x: Tensor, positions: Tensor, layer: int, which: str) -> Tensor:
        half = self.config.head_dim // 2
        frequency = self.config.theta ** (-torch.arange(half, dtype=torch.float64) / half)
        turn = torch.polar(torch.ones(()).double(), positions[:, None] * frequency).to(torch.complex64)
        turned = torch.complex(x[..., :half].float(), x[..., half:].float()) * turn[:, None]
        return torch.cat([turned.real, turned.imag], -1).to(x.dtype)


@_control("positions", "layers.*.q_rot", "layers.*.k_rot")
class AllPositionsShifted(Math):
    """Every position is shifted by three, which leaves all scores unchanged."""

    def positions(self, start: int, count: int, layer: int) -> Tensor:
        return super().positions(start, count, layer) + 3


@_control("embedding")
class EmbeddingAsProduct(Math):
    """One-hot rows times the matrix."""

    def embed(self, weight: Tensor, tokens: Tensor) -> Tensor:
        return F.one_hot(tokens, self.config.vocab).to(weight.dtype) @ weight


def _folded(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    folded = dict(weights)
    for name, weight in weights.items():
        if name.endswith("norm1"):
            for part in "qkv":
                folded[name.replace("norm1", part)] = weights[name.replace("norm1", part)] * weight
            folded[name] = torch.ones_like(weight)
    return folded


@_control("weights", "layers.*.norm1", "layers.*.q", "layers.*.k", "layers.*.v", weights=_folded)
class NormFoldedIntoWeights(Math):
    """norm1's weight is multiplied into the projections that read it."""


def _permuted(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    # Whole groups are exchanged: key/value heads 0 and 1, and the query heads that read them.
    permuted = dict(weights)
    for name, weight in weights.items():
        last = name.split(".")[-1]
        if last in ("q", "k", "v", "q_bias", "k_bias", "v_bias"):
            permuted[name] = weight.roll(weight.shape[0] // 2, 0)
        elif last == "attn":
            permuted[name] = weight.roll(weight.shape[1] // 2, 1)
    return permuted


@_control(
    "weights",
    *(f"layers.*.{name}" for name in ("q", "k", "v", "attn")),
    weights=_permuted,
)
class HeadsPermuted(Math):
    """Heads are permuted, in the projections and in the weights that read them."""


@_control("dtype", dtype=torch.bfloat16)
class HalfPrecision(Math):
    """The same model in bfloat16."""


@_control("dtype", dtype=torch.bfloat16)
class HalfPrecisionFusedNorm(FusedNorm):
    """In bfloat16, with torch's RMSNorm."""


@_control("decode", regime="decode")
class DecodesWithACache(Math):
    """The same code, one token at a time."""


@_control("tp", regime="tp")
class TensorParallel(Math):
    """A correct split over two ranks."""


@_control("backward", regime="backward")
class BackwardOfTheSame(Math):
    """The same code, forward and backward."""


@_control("backward", regime="backward")
class BackwardThroughFused(ScaledDotProductAttention):
    """torch's fused attention, forward and backward."""


@_control("tp-backward", regime="tp-backward")
class TensorParallelBackward(Math):
    """A correct split over two ranks, forward and backward."""
