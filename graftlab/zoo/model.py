"""The zoo's model: a small decoder whose every step is a method that a fault can replace, and a tap.

Its taps are named by path (``layers.2.q``), so that a tap's group is its path without the number. Under tensor
parallelism each rank holds its share of the heads, of the MLP's columns and of the experts' columns, as in Megatron-LM
(https://arxiv.org/abs/1909.08053), and partial sums are added up over the side's default process group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from graftlab.taps.calls import tap


@dataclass(frozen=True)
class Config:
    """Sizes. All differ, so that a wrong dimension raises instead of giving a number."""

    vocab: int = 67
    hidden: int = 32
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    mlp: int = 48
    experts: int = 6
    chosen: int = 2
    moe_layers: tuple[int, ...] = (1, 3)
    theta: float = 10000.0
    eps: float = 1e-5


@dataclass(frozen=True)
class RankShard:
    """The part of the model on this rank."""

    rank: int = 0
    size: int = 1

    def of(self, tensor: Tensor, dim: int) -> Tensor:
        return tensor.chunk(self.size, dim)[self.rank] if self.size > 1 else tensor


@dataclass
class Cache:
    """Keys and values of earlier positions, by layer: [batch, position, kv head, dim]."""

    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)

    @property
    def length(self) -> int:
        return next(iter(self.keys.values())).shape[1] if self.keys else 0


Weights = Mapping[str, Tensor]


def make_weights(config: Config, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Random weights from a seed, scaled so that the hidden states stay of the order of one."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> Tensor:
        drawn = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
        return (drawn * gain / math.sqrt(columns)).to(dtype)

    def vector(size: int, around: float) -> Tensor:
        return (around + 0.1 * torch.randn(size, generator=generator, dtype=torch.float64)).to(dtype)

    c = config
    weights = {"embed": matrix(c.vocab, c.hidden, math.sqrt(c.hidden)), "head": matrix(c.vocab, c.hidden)}
    weights["norm"] = vector(c.hidden, 1.0)
    for i in range(c.layers):
        layer = f"layers.{i}."
        weights[layer + "norm1"] = vector(c.hidden, 1.0)
        weights[layer + "norm2"] = vector(c.hidden, 1.0)
        for name, rows in (("q", c.heads), ("k", c.kv_heads), ("v", c.kv_heads)):
            weights[f"{layer}{name}"] = matrix(rows * c.head_dim, c.hidden)
            weights[f"{layer}{name}_bias"] = vector(rows * c.head_dim, 0.0)
        weights[layer + "attn"] = matrix(c.hidden, c.heads * c.head_dim)
        if i in c.moe_layers:
            weights[layer + "router"] = matrix(c.experts, c.hidden, 2.0)
            experts = [
                (matrix(c.mlp, c.hidden), matrix(c.mlp, c.hidden), matrix(c.hidden, c.mlp)) for _ in range(c.experts)
            ]
            for name, parts in zip(("gate", "up", "down"), zip(*experts, strict=True), strict=True):
                weights[f"{layer}experts.{name}"] = torch.stack(parts)
        else:
            weights[layer + "gate"] = matrix(c.mlp, c.hidden)
            weights[layer + "up"] = matrix(c.mlp, c.hidden)
            weights[layer + "down"] = matrix(c.hidden, c.mlp)
    return weights


# The dimension along which tensor parallelism splits each weight. Other weights are replicated.
SHARDED = {
    **dict.fromkeys(("q", "k", "v", "q_bias", "k_bias", "v_bias", "gate", "up"), 0),
    **{"attn": 1, "down": 1, "experts.gate": 1, "experts.up": 1, "experts.down": 2},
}


def shard_weights(weights: Weights, shard: RankShard) -> dict[str, Tensor]:
    """This rank's part of each weight."""
    cut = {}
    for name, weight in weights.items():
        dim = SHARDED.get(name.split(".", 2)[-1]) if name.startswith("layers.") else None
        cut[name] = weight if dim is None else shard.of(weight, dim).contiguous()
    return cut


class Math:
    """The model's arithmetic, one method a step. Faults and benign variants are subclasses that override one.

    ``layer`` is None outside the layers.
    """

    def __init__(self, config: Config, shard: RankShard | None = None) -> None:
        self.config = config
        self.shard = shard or RankShard()

    def embed(self, weight: Tensor, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, weight)

    def norm(self, x: Tensor, weight: Tensor, layer: int | None, which: str) -> Tensor:
        wide = x.float() if x.dtype != torch.float64 else x
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config.eps)
        return (wide * scale).to(x.dtype) * weight

    def project(self, x: Tensor, weight: Tensor, bias: Tensor, layer: int, which: str) -> Tensor:
        """[batch, position, hidden] to [batch, position, head, dim]; ``which`` is q, k or v."""
        return F.linear(x, weight, bias).reshape(*x.shape[:-1], -1, self.config.head_dim)

    def positions(self, start: int, count: int, layer: int) -> Tensor:
        return torch.arange(start, start + count, dtype=torch.float64)

    def rotate(self, x: Tensor, positions: Tensor, layer: int, which: str) -> Tensor:
        """Rotary positions (https://arxiv.org/abs/2104.09864), halves as in Llama; ``which`` is q or k."""
        half = self.config.head_dim // 2
        frequency = self.config.theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = (positions[:, None] * frequency).to(x.device)
        cos, sin = angle.cos()[:, None].to(x.dtype), angle.sin()[:, None].to(x.dtype)
        first, second = x[..., :half], x[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def cached(self, old: Tensor | None, new: Tensor, layer: int, which: str) -> Tensor:
        """Keys or values of all positions so far; ``which`` is k or v."""
        return new if old is None else torch.cat([old, new], 1)

    def mask(self, queries: int, keys: int, layer: int) -> Tensor:
        """True where a query may look: at itself and at earlier positions."""
        return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)

    def scale(self, layer: int) -> float:
        return 1 / math.sqrt(self.config.head_dim)

    def share_heads(self, x: Tensor, layer: int) -> Tensor:
        """Each key/value head serves a group of neighbouring query heads."""
        return x.repeat_interleave(self.config.heads // self.config.kv_heads, dim=2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        k, v = self.share_heads(k, layer), self.share_heads(v, layer)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * self.scale(layer)
        scores = scores.masked_fill(~self.mask(q.shape[1], k.shape[1], layer), -math.inf)
        return torch.einsum("bhqk,bkhd->bqhd", self.softmax(scores, layer), v)

    def softmax(self, scores: Tensor, layer: int) -> Tensor:
        return scores.softmax(-1)

    def join(self, mixed: Tensor, weight: Tensor, layer: int) -> Tensor:
        """The heads' outputs through the output projection."""
        return self.reduce(F.linear(mixed.flatten(-2), weight), layer, "attn")

    def reduce(self, partial: Tensor, layer: int, which: str) -> Tensor:
        """The sum over the ranks; ``which`` is attn or mlp. Its gradient is handed on as it is."""
        return _SumOutputs.apply(partial) if self.shard.size > 1 else partial  # type: ignore[no-untyped-call]

    def enter(self, x: Tensor, layer: int, which: str) -> Tensor:
        """Where a replicated tensor enters what is shared out: its gradient is the sum over the ranks."""
        return _SumGradients.apply(x) if self.shard.size > 1 else x  # type: ignore[no-untyped-call]

    def add(self, x: Tensor, y: Tensor, layer: int, which: str) -> Tensor:
        return x + y

    def activate(self, gate: Tensor, up: Tensor, layer: int) -> Tensor:
        return F.silu(gate) * up

    def down(self, x: Tensor, weight: Tensor, layer: int) -> Tensor:
        return self.reduce(F.linear(x, weight), layer, "mlp")

    def route(self, x: Tensor, weight: Tensor, layer: int) -> Tensor:
        """What each expert's output counts for: [batch, position, expert], zero for those not chosen, sum one."""
        chosen, places = F.linear(x, weight).softmax(-1).topk(self.config.chosen, -1)
        shares = chosen / chosen.sum(-1, keepdim=True)
        return torch.zeros(*x.shape[:-1], self.config.experts, dtype=x.dtype).scatter(-1, places, shares)

    def experts(self, x: Tensor, shares: Tensor, gate: Tensor, up: Tensor, down: Tensor, layer: int) -> Tensor:
        inner = F.silu(torch.einsum("bsh,emh->bsem", x, gate)) * torch.einsum("bsh,emh->bsem", x, up)
        each = torch.einsum("bsem,ehm->bseh", inner, down)
        return self.reduce(torch.einsum("bseh,bse->bsh", each, shares), layer, "mlp")

    def head(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)

    def loss(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Cross-entropy of each position's next token, the mean over all positions that have one."""
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


class _SumOutputs(torch.autograd.Function):
    """Sum over the ranks forward, identity backward."""

    @staticmethod
    def forward(ctx: object, partial: Tensor) -> Tensor:
        whole = partial.clone()
        torch.distributed.all_reduce(whole)
        return whole

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        return gradients[0]


class _SumGradients(torch.autograd.Function):
    """Identity forward, sum over the ranks backward."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        whole = gradients[0].clone()
        torch.distributed.all_reduce(whole)
        return whole


class Model:
    """Weights and arithmetic. ``grad`` also taps the gradient of every tensor."""

    def __init__(self, math: Math, weights: Weights, *, grad: bool = False) -> None:
        self.math = math
        self.weights = dict(weights)
        self._more = {"grad": True} if grad else {}

    def _tap(self, name: str, value: Tensor) -> Tensor:
        return tap(name, value, **self._more)

    def __call__(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """Logits [batch, position, vocab] of ``tokens`` [batch, position], which follow those in ``cache``."""
        m, w, show = self.math, self.weights, self._tap
        start = 0 if cache is None else cache.length
        x = show("embed", m.embed(w["embed"], tokens))
        for i in range(m.config.layers):
            x = self._layer(i, x, start, cache)
        x = show("norm", m.norm(x, w["norm"], None, "norm"))
        return show("logits", m.head(x, w["head"]))

    def _layer(self, i: int, x: Tensor, start: int, cache: Cache | None) -> Tensor:
        m = self.math
        at = f"layers.{i}."

        def w(name: str) -> Tensor:
            return self.weights[at + name]

        def show(name: str, value: Tensor) -> Tensor:
            return self._tap(at + name, value)

        h = m.enter(show("norm1", m.norm(x, w("norm1"), i, "norm1")), i, "attn")
        q, k, v = (show(name, m.project(h, w(name), w(f"{name}_bias"), i, name)) for name in "qkv")
        positions = m.positions(start, x.shape[1], i)
        q, k = show("q_rot", m.rotate(q, positions, i, "q")), show("k_rot", m.rotate(k, positions, i, "k"))
        if cache is not None:
            k = show("cache_k", m.cached(cache.keys.get(i), k, i, "k"))
            v = show("cache_v", m.cached(cache.values.get(i), v, i, "v"))
            cache.keys[i], cache.values[i] = k.detach().clone(), v.detach().clone()
        mixed = show("mix", m.attend(q, k, v, i))
        x = show("mid", m.add(x, show("attn", m.join(mixed, w("attn"), i)), i, "mid"))
        h = show("norm2", m.norm(x, w("norm2"), i, "norm2"))
        if i in m.config.moe_layers:
            shares = show("router", m.route(h, w("router"), i))
            inner = m.enter(h, i, "mlp")
            out = m.experts(
                inner, m.enter(shares, i, "router"), w("experts.gate"), w("experts.up"), w("experts.down"), i
            )
        else:
            inner = m.enter(h, i, "mlp")
            gate, up = show("gate", F.linear(inner, w("gate"))), show("up", F.linear(inner, w("up")))
            out = m.down(show("act", m.activate(gate, up, i)), w("down"), i)
        return show("out", m.add(x, show("mlp", out), i, "out"))
