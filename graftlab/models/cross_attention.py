"""The transformer with cross-attention: each token also attends to what an encoder made of its request's source."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graftlab.models.transformer import Attend, Linear, ModelConfig, RMSNorm, Transformer
from graftlab.taps.calls import tags, tap

CrossAttend = Callable[[int, Tensor], Tensor]
"""``cross_attend(layer_index, q[B,T,H,D]) -> out[B,T,H,D]``: attention over the keys and values of encoder states,
zero for a token whose request has none. A serving engine passes its own, over what its cache holds of each request."""


class CrossAttention(nn.Module):
    """Projections around a `CrossAttend`; keys and values are projections of encoder states, without rotation."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.q_proj = Linear(config.hidden_size, config.num_heads * config.head_dim)
        self.k_proj = Linear(config.hidden_size, config.num_kv_heads * config.head_dim)
        self.v_proj = Linear(config.hidden_size, config.num_kv_heads * config.head_dim)
        self.o_proj = Linear(config.num_heads * config.head_dim, config.hidden_size)

    def forward(self, x: Tensor, layer: int, cross_attend: CrossAttend) -> Tensor:
        q = tap("cross_q", self.q_proj(self.norm(x)).unflatten(-1, (-1, self.head_dim)))
        out: Tensor = self.o_proj(cross_attend(layer, q).flatten(-2))
        return out

    def keys_and_values(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """``[S, K, D]`` each, of encoder states ``[S, hidden]``."""
        split = (-1, self.head_dim)
        return self.k_proj(states).unflatten(-1, split), self.v_proj(states).unflatten(-1, split)


class CrossAttentionTransformer(Transformer):
    """`Transformer` with cross-attention after every layer, over the encoder states of the request's source.

    The source is what stands in the prompt before the first token `separator`; without one it is empty. The weights
    that `Transformer` has too are those of ``Transformer(config, seed)``. More taps, in each layer: ``cross_q``,
    ``cross_out`` and ``cross_residual``; none where the forward is given no ``cross_attend``.

    Raises `ValueError` for a separator outside the vocabulary.
    """

    def __init__(self, config: ModelConfig, seed: int = 0, *, separator: int) -> None:
        if not 0 <= separator < config.vocab_size:
            raise ValueError(f"separator={separator} is not in the vocabulary of {config.vocab_size}")
        super().__init__(config, seed)
        self.separator = separator
        self.encoder = Linear(config.hidden_size, config.hidden_size)
        self.encoder_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.cross = nn.ModuleList(CrossAttention(config) for _ in range(config.num_layers))
        # Once more from the start, so that the weights registered first are those of a plain transformer.
        self._draw_weights(seed)

    def source_len(self, prompt: Sequence[int]) -> int:
        """How many of the prompt's tokens are the source."""
        return list(prompt).index(self.separator) if self.separator in prompt else 0

    @torch.no_grad()
    def encode(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values ``[layers, S, K, D]`` of the encoder states of the tokens ``[S]``."""
        states = self.encoder_norm(F.silu(self.encoder(self.embedding(source))))
        pairs = [cross.keys_and_values(states) for cross in self.cross if isinstance(cross, CrossAttention)]
        return torch.stack([keys for keys, _ in pairs]), torch.stack([values for _, values in pairs])

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor | None = None,
        attend: Attend | None = None,
        cross_attend: CrossAttend | None = None,
    ) -> Tensor:
        """As `Transformer`'s; without `cross_attend`, as if no token's request had a source."""
        x, cos, sin = self._begin(input_ids, positions)
        for layer, (block, cross) in enumerate(zip(self.blocks, self.cross, strict=True)):
            with tags(layer=layer):
                x = block(x, layer, cos, sin, attend or self._attend)
                if cross_attend is not None:
                    out = tap("cross_out", cross(x, layer, cross_attend))
                    x = tap("cross_residual", x + out)
        return self._end(x)
