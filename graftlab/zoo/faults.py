"""The faults of the zoo, each with the groups that a verdict should name, written down before any scoring.

Each is a mistake that people have made in engines, conversions and trainers: a subclass of
:class:`~graftlab.zoo.model.Math` for the target, or different weights. ``truth`` are the groups of taps that are
computed differently, as ``graftlab.verdict`` groups them: the path without the layer's number. A gradient's group ends
with ``@grad``: the gradient *of* that tap is the first that differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from graftlab.zoo.model import Math, RankShard, Weights

Spoil = Callable[[dict[str, Tensor]], dict[str, Tensor]]
Regime = Literal["forward", "decode", "tp", "backward", "tp-backward"]


@dataclass(frozen=True)
class Specimen:
    """One fault, or one benign variant whose ``truth`` is empty.

    ``layers`` are the faulty ones, None for all. ``weights`` changes the target's whole weights before they are sharded
    over its ranks. ``cancels`` are groups that differ and whose effects cancel each other.
    """

    name: str
    area: str
    truth: frozenset[str]
    math: type[Math] = Math
    weights: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None
    regime: Regime = "forward"
    layers: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    cancels: frozenset[str] = frozenset()


FAULTS: list[Specimen] = []


def _fault(area: str, *truth: str, regime: Regime = "forward", layers: tuple[int, ...] | None = None) -> Any:
    """Register a subclass of Math. Its docstring states the fault, its name names the specimen."""

    def register(math_of_the_fault: type[Math]) -> type[Math]:
        name = "".join(f"_{c.lower()}" if c.isupper() else c for c in math_of_the_fault.__name__).lstrip("_")
        FAULTS.append(Specimen(name, area, frozenset(truth), math_of_the_fault, None, regime, layers))
        return math_of_the_fault

    return register


def _weights_fault(area: str, *truth: str, regime: Regime = "forward") -> Callable[[Spoil], Spoil]:
    """Register a function that spoils the target's weights."""

    def register(spoil: Spoil) -> Spoil:
        FAULTS.append(Specimen(spoil.__name__, area, frozenset(truth), Math, spoil, regime))
        return spoil

    return register


def only_in(base: type[Math], layers: tuple[int, ...] | None) -> type[Math]:
    """A Math with its fault only in these layers."""
    if layers is None:
        return base

    class OnlyThere(base):  # type: ignore[valid-type, misc]
        pass

    for name, method in vars(base).items():
        if callable(method) and not name.startswith("__"):
            setattr(OnlyThere, name, _guarded(method, getattr(Math, name), layers))
    return OnlyThere


def _guarded(faulty: Callable[..., Any], right: Callable[..., Any], layers: tuple[int, ...]) -> Callable[..., Any]:
    import inspect

    signature = inspect.signature(right)

    def method(self: Math, *args: Any, **kwargs: Any) -> Any:
        layer = signature.bind(self, *args, **kwargs).arguments["layer"]
        return (faulty if layer in layers else right)(self, *args, **kwargs)

    return method


# ---- positions ------------------------------------------------------------------------------------------------------


@_fault("positions", "layers.*.q_rot")
class QueriesOnePositionLate(Math):
    """Queries, not keys, are rotated by the next position: a decode's off-by-one."""

    def rotate(self, x: Tensor, positions: Tensor, layer: int, which: str) -> Tensor:
        return super().rotate(x, positions + (which == "q"), layer, which)


@_fault("positions", "layers.*.q_rot", "layers.*.k_rot")
class OtherTheta(Math):
    """The base of the rotary frequencies is another release's."""

    def rotate(self, x: Tensor, positions: Tensor, layer: int, which: str) -> Tensor:
        half = self.config.head_dim // 2
        angle = positions[:, None] * 500000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        return _turn(x, angle.cos(), angle.sin())


@_fault("positions", "layers.*.q_rot", "layers.*.k_rot")
class InterleavedPairs(Math):
    """Neighbours are rotated together (GPT-J), not halves (Llama)."""

    def rotate(self, x: Tensor, positions: Tensor, layer: int, which: str) -> Tensor:
        apart = torch.cat([x[..., ::2], x[..., 1::2]], -1)
        turned = super().rotate(apart, positions, layer, which)
        half = self.config.head_dim // 2
        return torch.stack([turned[..., :half], turned[..., half:]], -1).flatten(-2)


@_fault("positions", "layers.*.q_rot", "layers.*.k_rot")
class RotatedBackwards(Math):
    """The sine's sign is turned around; scores of tokens at a distance change all the same."""

    def rotate(self, x: Tensor, positions: Tensor, layer: int, which: str) -> Tensor:
        half = self.config.head_dim // 2
        frequency = self.config.theta ** (-torch.arange(half, dtype=torch.float64) / half)
        return _turn(x, (positions[:, None] * frequency).cos(), -(positions[:, None] * frequency).sin())


@_fault("positions", "layers.*.k_rot")
class KeysNotRotated(Math):
    """Keys go into the cache without their position."""

    def rotate(self, x: Tensor, positions: Tensor, layer: int, which: str) -> Tensor:
        return x if which == "k" else super().rotate(x, positions, layer, which)


@_fault("positions", "layers.*.q_rot", layers=(2,))
class OneLayerForgetsQueries(Math):
    """Queries of one layer are not rotated."""

    def rotate(self, x: Tensor, positions: Tensor, layer: int, which: str) -> Tensor:
        return x if which == "q" else super().rotate(x, positions, layer, which)


@_fault("positions", "layers.*.q_rot", "layers.*.k_rot")
class AnglesInHalfPrecision(Math):
    """Angles are computed in bfloat16, which cannot tell late positions apart."""

    def rotate(self, x: Tensor, positions: Tensor, layer: int, which: str) -> Tensor:
        half = self.config.head_dim // 2
        frequency = self.config.theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = (positions[:, None].bfloat16() * frequency.bfloat16()).double()
        return _turn(x, angle.cos(), angle.sin())


@_fault("positions", "layers.*.q_rot", "layers.*.k_rot")
class HalfOfTheHeadRotated(Math):
    """Only the first half of each head is rotated (a partial rotary factor of 0.5)."""

    def rotate(self, x: Tensor, positions: Tensor, layer: int, which: str) -> Tensor:
        turned = super().rotate(x, positions, layer, which)
        quarter = self.config.head_dim // 4
        keep = torch.ones(self.config.head_dim, dtype=torch.bool)
        keep[:quarter] = keep[2 * quarter : 3 * quarter] = False
        return torch.where(keep, x, turned)


@_fault("positions", "layers.*.q_rot", "layers.*.k_rot", regime="decode")
class PositionsFromZero(Math):
    """Each call counts its positions from zero, ignoring the cache."""

    def positions(self, start: int, count: int, layer: int) -> Tensor:
        return super().positions(0, count, layer)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


# ---- attention ------------------------------------------------------------------------------------------------------


@_fault("attention", "layers.*.mix")
class ScaledByHeadDim(Math):
    """Scales by 1 / d instead of 1 / sqrt(d)."""

    def scale(self, layer: int) -> float:
        return 1 / self.config.head_dim


@_fault("attention", "layers.*.mix", layers=(0,))
class OneLayerUnscaled(Math):
    """The first layer's scores are not scaled."""

    def scale(self, layer: int) -> float:
        return 1.0


@_fault("attention", "layers.*.mix")
class SeesOneAhead(Math):
    """The mask's diagonal is one too high."""

    def mask(self, queries: int, keys: int, layer: int) -> Tensor:
        return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries + 1)


@_fault("attention", "layers.*.mix")
class NotCausal(Math):
    """An encoder's mask."""

    def mask(self, queries: int, keys: int, layer: int) -> Tensor:
        return torch.ones(queries, keys, dtype=torch.bool)


@_fault("attention", "layers.*.mix")
class ShortWindow(Math):
    """A sliding window that this model does not have."""

    def mask(self, queries: int, keys: int, layer: int) -> Tensor:
        whole = super().mask(queries, keys, layer)
        return whole & ~whole.tril(keys - queries - 4)


@_fault("attention", "layers.*.mix")
class HeadsSharedInTurn(Math):
    """Key/value heads are repeated in turn (repeat), not for neighbours (repeat_interleave)."""

    def share_heads(self, x: Tensor, layer: int) -> Tensor:
        return x.repeat(1, 1, self.config.heads // self.config.kv_heads, 1)


@_fault("attention", "layers.*.mix")
class SoftmaxInHalfPrecision(Math):
    """Probabilities are rounded to bfloat16."""

    def softmax(self, scores: Tensor, layer: int) -> Tensor:
        return scores.softmax(-1).bfloat16().to(scores.dtype)


@_fault("attention", "layers.*.mix", layers=(3,))
class SinkInTheLastLayer(Math):
    """Adds one to the softmax's denominator (an attention sink)."""

    def softmax(self, scores: Tensor, layer: int) -> Tensor:
        exps = (scores - scores.amax(-1, keepdim=True)).exp()
        return exps / (exps.sum(-1, keepdim=True) + 1)


@_fault("attention", "layers.*.attn")
class HeadsJoinedAcross(Math):
    """Heads and dims are joined the wrong way around before the output projection."""

    def join(self, mixed: Tensor, weight: Tensor, layer: int) -> Tensor:
        return super().join(mixed.transpose(-1, -2), weight, layer)


@_fault("attention", "layers.*.v")
class NoValueBias(Math):
    """The values' bias was not loaded."""

    def project(self, x: Tensor, weight: Tensor, bias: Tensor, layer: int, which: str) -> Tensor:
        return super().project(x, weight, torch.zeros_like(bias) if which == "v" else bias, layer, which)


@_fault("attention", "layers.*.k")
class KeyBiasTwice(Math):
    """The keys' bias is added by the projection and again after it."""

    def project(self, x: Tensor, weight: Tensor, bias: Tensor, layer: int, which: str) -> Tensor:
        return super().project(x, weight, bias * 2 if which == "k" else bias, layer, which)


# ---- norms ----------------------------------------------------------------------------------------------------------

_NORMS = ("layers.*.norm1", "layers.*.norm2", "norm")


@_fault("norms", *_NORMS)
class LargeEps(Math):
    """An eps of 1e-3 instead of 1e-5."""

    def norm(self, x: Tensor, weight: Tensor, layer: int | None, which: str) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-3) * weight


@_fault("norms", *_NORMS)
class MeanRemoved(Math):
    """LayerNorm instead of RMSNorm."""

    def norm(self, x: Tensor, weight: Tensor, layer: int | None, which: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], eps=self.config.eps) * weight


@_fault("norms", *_NORMS)
class OnePlusWeight(Math):
    """Weights are offsets from one (Gemma's convention)."""

    def norm(self, x: Tensor, weight: Tensor, layer: int | None, which: str) -> Tensor:
        return super().norm(x, 1 + weight, layer, which)


@_fault("norms", *_NORMS)
class VarianceInHalfPrecision(Math):
    """The mean of squares is taken in bfloat16."""

    def norm(self, x: Tensor, weight: Tensor, layer: int | None, which: str) -> Tensor:
        squares = x.bfloat16().square().mean(-1, keepdim=True).to(x.dtype)
        return x * torch.rsqrt(squares + self.config.eps) * weight


@_fault("norms", "norm")
class LastNormWithoutWeight(Math):
    """The final norm's weight was not loaded."""

    def norm(self, x: Tensor, weight: Tensor, layer: int | None, which: str) -> Tensor:
        return super().norm(x, torch.ones_like(weight) if which == "norm" else weight, layer, which)


@_weights_fault("norms", "layers.*.norm2")
def norms_mixed_up(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """norm2 has norm1's weight."""
    return {name: weights[name.replace("norm2", "norm1")] for name in weights}


# ---- the MLP, residuals ---------------------------------------------------------------------------------------------


@_fault("mlp", "layers.*.act")
class GeluForSilu(Math):
    """GELU instead of SiLU."""

    def activate(self, gate: Tensor, up: Tensor, layer: int) -> Tensor:
        return F.gelu(gate) * up


@_fault("mlp", "layers.*.act")
class QuickGelu(Math):
    """x * sigmoid(1.702 x)."""

    def activate(self, gate: Tensor, up: Tensor, layer: int) -> Tensor:
        return gate * torch.sigmoid(1.702 * gate) * up


@_fault("mlp", "layers.*.act")
class GateAndUpSwapped(Math):
    """The activation is on the wrong half of a fused projection."""

    def activate(self, gate: Tensor, up: Tensor, layer: int) -> Tensor:
        return F.silu(up) * gate


@_fault("mlp", "layers.*.act")
class Clamped(Math):
    """Activations are clamped, as a quantised kernel does."""

    def activate(self, gate: Tensor, up: Tensor, layer: int) -> Tensor:
        return super().activate(gate, up, layer).clamp(-1, 1)


@_fault("residuals", "layers.*.mid", layers=(1,))
class ResidualForgotten(Math):
    """One layer's attention replaces the residual stream."""

    def add(self, x: Tensor, y: Tensor, layer: int, which: str) -> Tensor:
        return y if which == "mid" else x + y


@_fault("residuals", "layers.*.out")
class ResidualScaled(Math):
    """A residual multiplier of 0.9."""

    def add(self, x: Tensor, y: Tensor, layer: int, which: str) -> Tensor:
        return x + 0.9 * y if which == "out" else x + y


@_weights_fault("mlp", "layers.*.up")
def up_of_the_neighbour(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Layer 0's and layer 2's up projections were exchanged."""
    names = {"layers.0.up": "layers.2.up", "layers.2.up": "layers.0.up"}
    return {name: weights[names.get(name, name)] for name in weights}


# ---- experts --------------------------------------------------------------------------------------------------------


@_fault("experts", "layers.*.router")
class SharesNotNormalised(Math):
    """The chosen experts' shares do not sum to one."""

    def route(self, x: Tensor, weight: Tensor, layer: int) -> Tensor:
        chosen, places = F.linear(x, weight).softmax(-1).topk(self.config.chosen, -1)
        return torch.zeros(*x.shape[:-1], self.config.experts, dtype=x.dtype).scatter(-1, places, chosen)


@_fault("experts", "layers.*.router")
class OneExpertTooFew(Math):
    """Top 1 instead of top 2."""

    def route(self, x: Tensor, weight: Tensor, layer: int) -> Tensor:
        chosen, places = F.linear(x, weight).softmax(-1).topk(1, -1)
        return torch.zeros(*x.shape[:-1], self.config.experts, dtype=x.dtype).scatter(-1, places, chosen / chosen)


@_fault("experts", "layers.*.router")
class SigmoidRouter(Math):
    """Sigmoid scores instead of a softmax."""

    def route(self, x: Tensor, weight: Tensor, layer: int) -> Tensor:
        chosen, places = F.linear(x, weight).sigmoid().topk(self.config.chosen, -1)
        shares = chosen / chosen.sum(-1, keepdim=True)
        return torch.zeros(*x.shape[:-1], self.config.experts, dtype=x.dtype).scatter(-1, places, shares)


@_fault("experts", "layers.*.mlp", layers=(1, 3))
class ExpertsOffByOne(Math):
    """Each token's output comes from the expert after the one that was chosen."""

    def experts(self, x: Tensor, shares: Tensor, gate: Tensor, up: Tensor, down: Tensor, layer: int) -> Tensor:
        return super().experts(x, shares.roll(1, -1), gate, up, down, layer)


@_fault("experts", "layers.*.mlp", layers=(1, 3))
class SharesOnTheInput(Math):
    """Tokens are scaled before the experts, not after."""

    def experts(self, x: Tensor, shares: Tensor, gate: Tensor, up: Tensor, down: Tensor, layer: int) -> Tensor:
        scaled = x[..., None, :] * shares[..., None]
        inner = F.silu(torch.einsum("bseh,emh->bsem", scaled, gate)) * torch.einsum("bseh,emh->bsem", scaled, up)
        return self.reduce(torch.einsum("bsem,ehm->bsh", inner, down), layer, "mlp")


# ---- embeddings and head --------------------------------------------------------------------------------------------


@_fault("embedding", "embed")
class ScaledEmbedding(Math):
    """Multiplied by sqrt(hidden) (Gemma's convention)."""

    def embed(self, weight: Tensor, tokens: Tensor) -> Tensor:
        return super().embed(weight, tokens) * math.sqrt(self.config.hidden)


@_fault("embedding", "embed")
class TokenZeroIsPadding(Math):
    """Token 0 is treated as padding."""

    def embed(self, weight: Tensor, tokens: Tensor) -> Tensor:
        return super().embed(weight, tokens) * (tokens != 0)[..., None]


@_fault("head", "logits")
class SoftCap(Math):
    """Logits are capped at 30."""

    def head(self, x: Tensor, weight: Tensor) -> Tensor:
        return 30 * (super().head(x, weight) / 30).tanh()


@_weights_fault("head", "logits")
def head_tied(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The head was tied to the embeddings."""
    return {**weights, "head": weights["embed"]}


# ---- dtypes ---------------------------------------------------------------------------------------------------------


@_fault("dtype", "layers.*.q")
class QueriesInHalfPrecision(Math):
    """The query projection ran under autocast."""

    def project(self, x: Tensor, weight: Tensor, bias: Tensor, layer: int, which: str) -> Tensor:
        if which != "q":
            return super().project(x, weight, bias, layer, which)
        half = super().project(x.bfloat16(), weight.bfloat16(), bias.bfloat16(), layer, which)
        return half.to(x.dtype)


@_fault("dtype", "layers.*.mid", "layers.*.out")
class ResidualInHalfPrecision(Math):
    """The residual stream is kept in float16."""

    def add(self, x: Tensor, y: Tensor, layer: int, which: str) -> Tensor:
        return (x + y).half().to(x.dtype)


@_fault("dtype", "logits")
class LogitsInHalfPrecision(Math):
    """Logits are rounded to bfloat16."""

    def head(self, x: Tensor, weight: Tensor) -> Tensor:
        return super().head(x, weight).bfloat16().to(x.dtype)


# ---- caches ---------------------------------------------------------------------------------------------------------


@_fault("cache", "layers.*.cache_k", regime="decode")
class LastKeyOverwritten(Math):
    """A new key overwrites the previous one, so it is cached twice."""

    def cached(self, old: Tensor | None, new: Tensor, layer: int, which: str) -> Tensor:
        whole = super().cached(old, new, layer, which)
        if old is not None and which == "k":
            whole = torch.cat([whole[:, :-2], whole[:, -1:], whole[:, -1:]], 1)
        return whole


@_fault("cache", "layers.*.cache_v", regime="decode")
class StaleValues(Math):
    """The newest value is not in the cache yet when it is read."""

    def cached(self, old: Tensor | None, new: Tensor, layer: int, which: str) -> Tensor:
        if old is not None and which == "v":
            return torch.cat([old, torch.zeros_like(new)], 1)
        return super().cached(old, new, layer, which)


@_fault("cache", "layers.*.cache_k", "layers.*.cache_v", regime="decode")
class CacheInEightBits(Math):
    """The cache is quantised to float8."""

    def cached(self, old: Tensor | None, new: Tensor, layer: int, which: str) -> Tensor:
        return super().cached(old, new.to(torch.float8_e4m3fn).to(new.dtype), layer, which)


# ---- tensor parallel, forward ---------------------------------------------------------------------------------------


@_fault("tp", "layers.*.attn", regime="tp", layers=(1,))
class OneSumForgotten(Math):
    """One layer's attention output is not summed over the ranks."""

    def reduce(self, partial: Tensor, layer: int, which: str) -> Tensor:
        return partial if which == "attn" else super().reduce(partial, layer, which)


@_fault("tp", "layers.*.mlp", regime="tp")
class MeanForSum(Math):
    """The MLP's partial sums are averaged."""

    def reduce(self, partial: Tensor, layer: int, which: str) -> Tensor:
        whole = super().reduce(partial, layer, which)
        return whole / self.shard.size if which == "mlp" else whole


@_fault("tp", *_NORMS, regime="tp")
class OneRanksEps(Math):
    """Rank 1 was started with a different eps."""

    def norm(self, x: Tensor, weight: Tensor, layer: int | None, which: str) -> Tensor:
        if self.shard.rank == 0:
            return super().norm(x, weight, layer, which)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-2) * weight


@_weights_fault("tp", "layers.*.k", "layers.*.v", regime="tp")
def key_heads_swapped(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each rank has the other's key/value heads."""
    sharded = {f"layers.{i}.{n}" for i in range(4) for n in ("k", "v", "k_bias", "v_bias")}
    return {n: w.roll(w.shape[0] // 2, 0) if n in sharded else w for n, w in weights.items()}


@_weights_fault("tp", "layers.*.up", regime="tp")
def up_columns_swapped(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each rank has the other's columns of the up projection, and its own of the gate."""
    return {
        n: w.roll(w.shape[0] // 2, 0) if n.endswith(".up") and "experts" not in n else w for n, w in weights.items()
    }


# ---- backward -------------------------------------------------------------------------------------------------------


class _WrongSilu(torch.autograd.Function):
    """silu forward, the gradient of relu backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.silu(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        x: Tensor = ctx.saved_tensors[0]
        return gradients[0] * (x > 0)


class _ScaledBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.factor, None


def _scaled_backward(x: Tensor, factor: float) -> Tensor:
    return _ScaledBackward.apply(x, factor)  # type: ignore[no-untyped-call, no-any-return]


@_fault("backward", "layers.*.gate@grad", regime="backward")
class ActivationsGradient(Math):
    """A fused activation whose backward is another function's."""

    def activate(self, gate: Tensor, up: Tensor, layer: int) -> Tensor:
        return _WrongSilu.apply(gate) * up  # type: ignore[no-untyped-call, no-any-return]


@_fault("backward", "layers.*.q_rot@grad", "layers.*.k_rot@grad", regime="backward")
class ScaleForgottenBackward(Math):
    """The scores' scale is applied forward and forgotten backward."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        factor = math.sqrt(self.config.head_dim)
        return super().attend(_scaled_backward(q, factor), _scaled_backward(k, factor), v, layer)


@_fault("backward", "logits@grad", regime="backward")
class LossOverAllTokens(Math):
    """The loss is divided by the number of tokens, not of tokens that have a next one."""

    def loss(self, logits: Tensor, tokens: Tensor) -> Tensor:
        return super().loss(logits, tokens) * (tokens.shape[1] - 1) / tokens.shape[1]


@_fault("backward", "layers.*.v@grad", regime="backward", layers=(2,))
class ValuesGradientHalved(Math):
    """One layer's values get half of their gradient."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        return super().attend(q, k, _scaled_backward(v, 0.5), layer)


@_fault("backward", "layers.*.router@grad", regime="backward")
class RouterDetachedHalf(Math):
    """Half of the router's gradient is lost."""

    def experts(self, x: Tensor, shares: Tensor, gate: Tensor, up: Tensor, down: Tensor, layer: int) -> Tensor:
        return super().experts(x, _scaled_backward(shares, 0.5), gate, up, down, layer)


@_fault("tp-backward", "layers.*.norm1@grad", regime="tp-backward")
class AttentionsGradientNotSummed(Math):
    """The gradient of the attention's input is not summed over the ranks."""

    def enter(self, x: Tensor, layer: int, which: str) -> Tensor:
        return x if which == "attn" else super().enter(x, layer, which)


@_fault("tp-backward", "layers.*.norm2@grad", regime="tp-backward")
class MlpsGradientNotSummed(Math):
    """The gradient of the MLP's input is not summed over the ranks."""

    def enter(self, x: Tensor, layer: int, which: str) -> Tensor:
        return x if which == "mlp" else super().enter(x, layer, which)


@_fault("tp-backward", "layers.*.router@grad", regime="tp-backward")
class RoutersGradientNotSummed(Math):
    """Each rank keeps its own share of the router's gradient."""

    def enter(self, x: Tensor, layer: int, which: str) -> Tensor:
        return x if which == "router" else super().enter(x, layer, which)


@_fault("tp-backward", "layers.*.mix@grad", regime="tp-backward")
class GradientCountedTwice(Math):
    """The backward pass of the attention's sum counts its gradient once for each rank."""

    def reduce(self, partial: Tensor, layer: int, which: str) -> Tensor:
        whole = super().reduce(partial, layer, which)
        return _scaled_backward(whole, float(self.shard.size)) if which == "attn" else whole


def weights_of(specimen: Specimen, weights: Weights) -> dict[str, Tensor]:
    """The target's whole weights."""
    own = dict(weights)
    return own if specimen.weights is None else specimen.weights(own)


def math_of(specimen: Specimen) -> type[Math]:
    """The target's arithmetic."""
    return only_in(specimen.math, specimen.layers)


__all__ = ["FAULTS", "RankShard", "Regime", "Specimen", "math_of", "weights_of"]
