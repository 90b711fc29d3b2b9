"""Attention over the cache: each request's tokens attend only to its own slots."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from graftlab.engine.batch import ForwardBatch
from graftlab.engine.kv_cache import KVCache


class AttentionBackend(Protocol):
    """Attention for a runner: metadata once per forward, then `attend` once per layer (`models.Attend`)."""

    def prepare_metadata(self, batch: ForwardBatch) -> None:
        """Compute the metadata that all layers of the next forward share, on the host."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v ``[T, 1, K, D]`` in the batch's slots; ``[T, 1, H, D]`` for q of that shape."""


@dataclass(frozen=True)
class Segment:
    """N requests with Q tokens each, in the rows ``rows`` of the batch, which look back over at most S places.

    ``slots`` ``[N, S]`` are the cache's; ``visible`` ``[N, Q, S]`` says what each token may see.
    """

    rows: slice
    slots: Tensor
    visible: Tensor


class CacheAttention:
    """Grouped-query attention with an explicit softmax, as `models.causal_attention`, with the model's window.

    A decode is one segment, as wide as its longest request; a prefill has a segment for each request.
    """

    def __init__(self, cache: KVCache, sliding_window: int | None) -> None:
        self.cache, self.sliding_window = cache, sliding_window
        self._out_cache_loc = torch.empty(0, dtype=torch.int64, device="cpu")
        self._segments: list[Segment] = []

    def prepare_metadata(self, batch: ForwardBatch) -> None:
        """Look up the slots, and compute which token sees which slot, from the batch's lengths, not its positions."""
        self._out_cache_loc = batch.out_cache_loc
        lens = batch.seq_lens_cpu.tolist()
        if batch.extend_lens_cpu is None:
            rows = slice(0, batch.batch_size)
            self._segments = [self._segment(rows, batch.req_pool_indices, batch.seq_lens[:, None] - 1, max(lens))]
            return
        self._segments, start = [], 0
        for i, (extend, total) in enumerate(zip(batch.extend_lens_cpu.tolist(), lens, strict=True)):
            places = torch.arange(total - extend, total, device=self.cache.table.device)
            rows = slice(start, start + extend)
            self._segments.append(self._segment(rows, batch.req_pool_indices[i : i + 1], places[None], total))
            start += extend

    def _segment(self, rows: slice, requests: Tensor, places: Tensor, width: int) -> Segment:
        """`requests` ``[N]`` are rows of the table, `places` ``[N, Q]`` where their tokens stand."""
        age = places[..., None] - torch.arange(width, device=places.device)
        visible = age >= 0 if self.sliding_window is None else (age >= 0) & (age < self.sliding_window)
        return Segment(rows, self.cache.table[requests, :width], visible)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.cache.write(layer, self._out_cache_loc, k.squeeze(1), v.squeeze(1))
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        out = torch.empty_like(q)
        for segment in self._segments:
            queries = q[segment.rows].view(*segment.visible.shape[:2], *q.shape[2:])
            mixed = masked_attention(queries, keys[segment.slots], values[segment.slots], segment.visible)
            out[segment.rows] = mixed.reshape(-1, *q.shape[1:])
        return out


def masked_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """``[N, Q, H, D]`` of q's dtype, computed in float32 or wider.

    q is ``[N, Q, H, D]``, k and v ``[N, S, K, D]``, visible ``[N, Q, S]``. Query head h reads key/value head
    ``h // (H / K)``.
    """
    exact = torch.promote_types(q.dtype, torch.float32)
    grouped = q.to(exact).reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    scores = torch.einsum("nqkgd,nskd->nkgqs", grouped, k.to(exact)) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~visible[:, None, None], -math.inf).softmax(dim=-1)
    # Slots that no token sees may have another request's values: a NaN there must not spread through 0 * NaN.
    unseen = ~visible.any(dim=1)[..., None, None]
    mixed = torch.einsum("nkgqs,nskd->nqkgd", weights, v.to(exact).masked_fill(unseen, 0))
    return mixed.flatten(2, 3).to(q.dtype)
