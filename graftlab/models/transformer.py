"""A decoder-only transformer in one process: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Letters in the shapes: B sequences, T tokens, H query heads, K key/value heads, D head_dim, V vocab_size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graftlab.taps.calls import tags, tap

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""``attend(layer_index, q[B,T,H,D], k[B,T,K,D], v[B,T,K,D]) -> out[B,T,H,D]``, with q and k already rotated.

A serving engine passes its own: it writes k and v into its cache and attends over what the cache holds.
"""


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a model. Sizes are counts; `sliding_window` is in tokens, the query's own included.

    With `long_after`, positions are divided by `long_factor` (position interpolation, Chen et al. 2023) in every batch
    that has a token at that position or beyond: for all tokens in it, as engines do that choose between a model's short
    and long rotary factors once a batch.

    Raises `ValueError` naming the field that cannot be.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    max_positions: int
    rope_base: float = 10000.0
    norm_eps: float = 1e-6
    sliding_window: int | None = None
    tie_embeddings: bool = False
    long_after: int | None = None
    long_factor: float = 4.0

    def __post_init__(self) -> None:
        counts = (
            "vocab_size",
            "hidden_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "intermediate_size",
            "max_positions",
        )
        for name in counts:
            _require_count(name, getattr(self, name))
        if self.sliding_window is not None:
            _require_count("sliding_window", self.sliding_window, "or None for no window")
        if self.long_after is not None:
            _require_count("long_after", self.long_after, "or None for one factor at any length")
        for name in ("rope_base", "norm_eps", "long_factor"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"ModelConfig: {name} must be a finite number above 0, got {value!r}")
        if self.hidden_size % self.num_heads or self.head_dim % 2:
            raise ValueError(
                f"ModelConfig: hidden_size={self.hidden_size} over num_heads={self.num_heads} leaves no even "
                "head_dim, which rotary positions need; make hidden_size a multiple of 2 * num_heads"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"ModelConfig: num_heads={self.num_heads} must be a multiple of num_kv_heads="
                f"{self.num_kv_heads}, so that the query heads share them evenly"
            )

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads


def _require_count(name: str, value: object, alternative: str = "") -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(
            f"ModelConfig: {name} must be an int of at least 1 {alternative}".rstrip() + f", got {value!r}"
        )


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in: float32 for the half-width types, and float64 stays what it is."""
    return torch.promote_types(dtype, torch.float32)


def rotary_angles(
    positions: Tensor, head_dim: int, base: float, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Cosine and sine, each [B,T,1,D/2] of `dtype`, of ``position * base ** (-2i / D)`` (RoFormer, eq. 15).

    Computed, not looked up: a table held as a buffer would lose its precision in ``model.bfloat16()``.
    """
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=dtype) / head_dim
    angles = positions.to(dtype)[..., None, None] * base**-exponents
    return angles.cos(), angles.sin()


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [B,T,heads,D] in the planes (i, i + D/2), the "rotate half" pairing; same dtype as x."""
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, sliding_window: int | None = None) -> Tensor:
    """Causal grouped-query attention with an explicit softmax, in float32 or wider.

    q is [B,T,H,D]; k and v are [B,S,K,D] with S >= T: the queries are the last T of the S tokens, and query
    head h reads key/value head ``h // (H / K)``. A query sees itself and what came before it, at most
    `sliding_window` tokens in all. Returns [B,T,H,D] of q's dtype.
    """
    batch, queries, heads, head_dim = q.shape
    tokens, kv_heads = k.shape[1], k.shape[2]
    exact = _at_least_float32(q.dtype)
    grouped = q.to(exact).reshape(batch, queries, kv_heads, heads // kv_heads, head_dim)
    scores = torch.einsum("btkgd,bskd->bkgts", grouped, k.to(exact)) * head_dim**-0.5
    index = torch.arange(tokens, device=q.device)
    age = index[tokens - queries :, None] - index
    visible = age >= 0 if sliding_window is None else (age >= 0) & (age < sliding_window)
    weights = scores.masked_fill(~visible, -math.inf).softmax(dim=-1)
    return torch.einsum("bkgts,bskd->btkgd", weights, v.to(exact)).reshape(q.shape).to(q.dtype)


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension (Zhang and Sennrich 2019).

    All of it happens in float32 or wider and is rounded to x's dtype once, at the end.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size, device="cpu", dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        exact = x.to(_at_least_float32(x.dtype))
        inverse = torch.rsqrt(exact.square().mean(dim=-1, keepdim=True) + self.eps)
        return (exact * inverse * self.weight).to(x.dtype)


class Linear(nn.Linear):
    """Without bias, in float32 on the CPU, with its weight still to be filled by the caller."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False, device="cpu", dtype=torch.float32)

    def reset_parameters(self) -> None:
        """Do nothing: torch's own draws from the global random state, which belongs to the caller."""


class Embedding(nn.Embedding):
    """In float32 on the CPU, its weight still to be filled by who made it, as with `Linear`."""

    def __init__(self, num_embeddings: int, embedding_dim: int) -> None:
        super().__init__(num_embeddings, embedding_dim, device="cpu", dtype=torch.float32)

    def reset_parameters(self) -> None:
        """Do nothing, as with `Linear`."""


class Attention(nn.Module):
    """Projections, rotation and taps around an `Attend`; as many heads as the projections have rows for."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.q_proj = Linear(config.hidden_size, config.num_heads * config.head_dim)
        self.k_proj = Linear(config.hidden_size, config.num_kv_heads * config.head_dim)
        self.v_proj = Linear(config.hidden_size, config.num_kv_heads * config.head_dim)
        self.o_proj = Linear(config.num_heads * config.head_dim, config.hidden_size)

    def forward(self, x: Tensor, layer: int, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        split = (-1, self.head_dim)
        q = tap("q", apply_rotary(self.q_proj(x).unflatten(-1, split), cos, sin))
        k = tap("k", apply_rotary(self.k_proj(x).unflatten(-1, split), cos, sin))
        v = tap("v", self.v_proj(x).unflatten(-1, split))
        out = attend(layer, q, k, v)
        if out.shape != q.shape:
            raise ValueError(
                f"attend returned shape {list(out.shape)} in layer {layer}; it must be q's, {list(q.shape)}"
            )
        projected: Tensor = self.o_proj(out.flatten(-2))
        return projected


class MLP(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))`` (Shazeer 2020)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """One pre-norm layer: attention, then MLP, each added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, layer: int, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        normed = tap("attn_norm", self.attn_norm(x))
        out = tap("attn_out", self.attention(normed, layer, cos, sin, attend))
        x = tap("attn_residual", x + out)
        normed = tap("mlp_norm", self.mlp_norm(x))
        out = tap("mlp_out", self.mlp(normed))
        x = tap("mlp_residual", x + out)
        return x


class Transformer(nn.Module):
    """The whole model, built on the CPU in float32; move it with ``.to(device, dtype)``.

    Weights depend on `config` and `seed` alone, so every process builds the same, and the global random state
    stays as it was. Taps, in the order of execution: ``embed``; in each layer, tagged ``layer=i``,
    ``attn_norm``, ``q`` and ``k`` (after rotation), ``v``, ``attn_out``, ``attn_residual``, ``mlp_norm``,
    ``mlp_out``, ``mlp_residual``; then ``final_norm`` and ``logits``.
    """

    # What positions have in front of the shape of the tokens.
    _position_rows: ClassVar[tuple[int, ...]] = ()

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.final_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        if config.tie_embeddings:
            self.lm_head.weight = self.embedding.weight
        self._draw_weights(seed)

    @torch.no_grad()
    def _draw_weights(self, seed: int) -> None:
        """Fill the parameters with normal noise, in the order of their registration.

        The scales keep activations near 1, so that a wrong mask, angle or weight shows in the logits. Norm
        weights are spread around 1 for the same reason: a norm that ignores its weight must not go unnoticed.
        """
        generator = torch.Generator(device="cpu").manual_seed(seed)
        for name, parameter in self.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, device="cpu", dtype=torch.float32)
            if parameter.ndim == 1:
                parameter.copy_(1 + 0.1 * noise)
            elif name == "embedding.weight" and not self.config.tie_embeddings:
                parameter.copy_(noise)
            else:
                parameter.copy_(noise * parameter.shape[1] ** -0.5)

    def forward(self, input_ids: Tensor, positions: Tensor | None = None, attend: Attend | None = None) -> Tensor:
        """Logits [B,T,V], of the weights' dtype, of the tokens `input_ids` [B,T] (int64).

        `positions` [B,T] (int64, default 0..T-1) place the tokens for the rotation; they are not checked
        against max_positions, which would make the host wait for the device. `attend` replaces the default,
        causal attention by order within the row with the config's sliding window.

        Raises `ValueError` for wrong shapes and for more tokens than max_positions.
        """
        x, cos, sin = self._begin(input_ids, positions)
        for layer, block in enumerate(self.blocks):
            with tags(layer=layer):
                x = block(x, layer, cos, sin, attend or self._attend)
        return self._end(x)

    def _begin(self, input_ids: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """The embedded tokens, and the angles of their positions."""
        if input_ids.ndim != 2:
            raise ValueError(f"input_ids must be [batch, tokens], got shape {list(input_ids.shape)}")
        if input_ids.shape[1] > self.config.max_positions:
            raise ValueError(
                f"input_ids has {input_ids.shape[1]} tokens a row, more than max_positions={self.config.max_positions}"
            )
        shape = (*self._position_rows, *input_ids.shape)
        if positions is None:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand(shape)
        elif positions.shape != shape:
            whose = "input_ids' shape" if not self._position_rows else "three rows of input_ids' shape,"
            raise ValueError(f"positions must have {whose} {list(shape)}, got {list(positions.shape)}")
        x = tap("embed", self.embedding(input_ids))
        return x, *self._angles(positions, _at_least_float32(x.dtype))

    def _end(self, x: Tensor) -> Tensor:
        x = tap("final_norm", self.final_norm(x))
        logits: Tensor = tap("logits", self.lm_head(x))
        return logits

    def _angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        config = self.config
        if config.long_after is not None:
            # Chosen on the device, so that the host does not wait and a captured graph chooses at each replay.
            is_long = (positions >= config.long_after).any()
            near = positions.to(dtype)
            positions = torch.where(is_long, near / config.long_factor, near)
        return rotary_angles(positions, config.head_dim, config.rope_base, dtype)

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return causal_attention(q, k, v, self.config.sliding_window)
