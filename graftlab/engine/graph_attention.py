"""Attention for captured graphs: the kernels read a batch's data from buffers that do not move."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from graftlab.engine.attention import CacheAttention, masked_attention
from graftlab.engine.batch import ForwardBatch
from graftlab.engine.kv_cache import PADDING_SLOT, KVCache
from graftlab.errors import GraphError


class GraphAttention:
    """`CacheAttention` of up to ``max_num_tokens`` tokens in shapes that depend only on their number.

    Each token looks over the whole width of the table, ``max_context`` places, and sees its request's up to its own.
    That is more work than in `CacheAttention`; the numbers are the same except for rounding. The metadata for the
    layers (slots, and which of them are visible) is written into static buffers before each replay.
    """

    def __init__(self, cache: KVCache, sliding_window: int | None, max_num_tokens: int) -> None:
        self.cache, self.sliding_window, self.max_num_tokens = cache, sliding_window, max_num_tokens
        shape, device = (max_num_tokens, cache.max_context), cache.table.device
        with torch.inference_mode(False):
            self._slots = torch.full(shape, PADDING_SLOT, dtype=torch.int64, device=device)
            self._visible = torch.zeros(shape, dtype=torch.bool, device=device)
            self._columns = torch.arange(cache.max_context, device=device)
        self._out_cache_loc = torch.empty(0, dtype=torch.int64, device=device)

    def prepare_metadata(self, batch: ForwardBatch) -> None:
        """Write the metadata for the layers. Tokens past the last request's are padding, and see the padding's slot.

        Raises :class:`GraphError` for more tokens than there is room for.
        """
        if batch.num_tokens > self.max_num_tokens:
            raise GraphError(
                f"GraphAttention has room for {self.max_num_tokens} tokens, and the batch has {batch.num_tokens}"
            )
        self._out_cache_loc = batch.out_cache_loc
        rows, places = token_places(batch)
        own, padding = slice(0, rows.shape[0]), slice(rows.shape[0], batch.num_tokens)
        self._slots[own] = self.cache.table[rows]
        self._slots[padding] = PADDING_SLOT
        age = places[:, None] - self._columns
        self._visible[own] = age >= 0 if self.sliding_window is None else (age >= 0) & (age < self.sliding_window)
        # At least one place, because a softmax over none is NaN.
        self._visible[padding] = self._columns == 0

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.cache.write(layer, self._out_cache_loc, k.squeeze(1), v.squeeze(1))
        slots, visible = self._slots[: q.shape[0]], self._visible[: q.shape[0], None]
        return masked_attention(q, self.cache.keys[layer][slots], self.cache.values[layer][slots], visible)


def token_places(batch: ForwardBatch) -> tuple[Tensor, Tensor]:
    """The row in the cache's table, and the place in its request, of each token that is not padding, ``[T]`` each.

    The batch's lengths decide, not its positions, as in `CacheAttention`.
    """
    if batch.extend_lens_cpu is None:
        # The two axes may be padded to different sizes.
        return batch.req_pool_indices[: batch.num_tokens], batch.seq_lens[: batch.num_tokens] - 1
    lens, device = batch.extend_lens_cpu, batch.input_ids.device
    request = torch.repeat_interleave(torch.arange(lens.shape[0], device="cpu"), lens)
    first = batch.seq_lens_cpu - lens.cumsum(0)
    places = first[request] + torch.arange(request.shape[0], device="cpu")
    return batch.req_pool_indices[request.to(device)], places.to(device)


class UnpaddedAttention(CacheAttention):
    """`CacheAttention` for eager calls between graphs. It leaves out a prefill's padding tokens, whose results are
    undefined.
    """

    def prepare_metadata(self, batch: ForwardBatch) -> None:
        lens = batch.extend_lens_cpu
        if lens is not None:
            real = int(lens.count_nonzero())  # padding comes last
            batch = dataclasses.replace(
                batch,
                req_pool_indices=batch.req_pool_indices[:real],
                seq_lens=batch.seq_lens[:real],
                seq_lens_cpu=batch.seq_lens_cpu[:real],
                extend_lens_cpu=lens[:real],
            )
        super().prepare_metadata(batch)
