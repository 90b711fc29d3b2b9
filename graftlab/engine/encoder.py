"""Encoder states of requests: where their keys and values are, and attention over them."""

from __future__ import annotations

import torch
from torch import Tensor

from graftlab.engine.attention import masked_attention
from graftlab.engine.batch import ForwardBatch
from graftlab.engine.kv_cache import KVCache
from graftlab.errors import GraphError
from graftlab.models import CrossAttentionTransformer, Transformer


class EncoderAttention:
    """Attention of each token over its request's encoder states; ``encoder_lens`` is their number.

    With ``max_num_tokens`` the metadata of as many tokens is in static buffers, because a captured graph needs memory
    that does not move. Without it the metadata is made anew for each batch.
    """

    def __init__(self, cache: KVCache, max_num_tokens: int | None) -> None:
        if cache.encoder_keys is None or cache.encoder_values is None:
            raise GraphError(
                "the model has cross-attention, and its cache has no room for encoder states; make the cache with "
                "encoder_states=True, as Engine does for such a model"
            )
        self.keys, self.values = cache.encoder_keys, cache.encoder_values
        self.max_num_tokens = max_num_tokens
        device = cache.table.device
        with torch.inference_mode(False):
            self._columns = torch.arange(self.keys.shape[2], device=device)
            self._rows = torch.zeros(max_num_tokens or 0, dtype=torch.int64, device=device)
            self._visible = torch.zeros(max_num_tokens or 0, self.keys.shape[2], dtype=torch.bool, device=device)

    def prepare_metadata(self, batch: ForwardBatch) -> None:
        """Compute which states each token sees; padding tokens see none.

        Raises :class:`GraphError` for a batch without ``encoder_lens``, and for one with too many tokens.
        """
        if batch.encoder_lens is None:
            raise GraphError("the model has cross-attention, and the batch has no encoder_lens")
        count = batch.num_tokens
        if self.max_num_tokens is None:
            self._rows = self._columns.new_zeros(count)
            self._visible = torch.zeros(count, len(self._columns), dtype=torch.bool, device=self._columns.device)
        elif count > self.max_num_tokens:
            raise GraphError(f"EncoderAttention has room for {self.max_num_tokens} tokens, and the batch has {count}")
        requests = _request_of_each_token(batch)
        own, padding = slice(0, len(requests)), slice(len(requests), count)
        self._rows[own] = batch.req_pool_indices[requests]
        self._rows[padding] = 0
        self._visible[own] = self._columns < batch.encoder_lens[requests][:, None]
        self._visible[padding] = False

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """``[T, 1, H, D]`` for q of that shape; zero where the request has no encoder states."""
        rows, visible = self._rows[: q.shape[0]], self._visible[: q.shape[0]]
        mixed = masked_attention(q, self.keys[layer][rows], self.values[layer][rows], visible[:, None])
        # A softmax over no state is NaN.
        return torch.where(visible.any(dim=1)[:, None, None, None], mixed, 0)


def encoder_attention(model: Transformer, cache: KVCache, max_num_tokens: int | None = None) -> EncoderAttention | None:
    """For a model with cross-attention; None for any other."""
    return EncoderAttention(cache, max_num_tokens) if isinstance(model, CrossAttentionTransformer) else None


def _request_of_each_token(batch: ForwardBatch) -> Tensor:
    """The index of each token's request in the batch, for tokens that are not padding."""
    device = batch.input_ids.device
    if batch.extend_lens_cpu is None:
        # The two axes may be padded to different sizes.
        return torch.arange(min(batch.num_tokens, batch.batch_size), device=device)
    lens = batch.extend_lens_cpu
    return torch.repeat_interleave(torch.arange(lens.shape[0], device="cpu"), lens).to(device)
