"""Attention for several tokens of each request at once; only the first of them is sure to be kept."""

from __future__ import annotations

import torch
from torch import Tensor

from graftlab.engine.attention import masked_attention
from graftlab.engine.batch import ForwardBatch
from graftlab.engine.kv_cache import PADDING_SLOT, KVCache


class VerifyAttention:
    """Each request has ``depth`` tokens in the batch: the one that the engine decodes, and guesses of what follows.

    The first token's key and value go into the cache. The guesses' do not, for they may be wrong, and a request need
    not have slots for them: they are kept here until :meth:`commit`. All of what the layers read is in static buffers.
    """

    def __init__(self, cache: KVCache, sliding_window: int | None, depth: int) -> None:
        self.cache, self.sliding_window, self.depth = cache, sliding_window, depth
        requests, width, device = cache.max_requests, cache.max_context, cache.table.device
        layers, _, *per_token = cache.keys.shape
        with torch.inference_mode(False):
            # One row more than the table's: where padding leaves its own.
            shape = (layers, requests + 1, depth, *per_token)
            self._keys = torch.zeros(shape, dtype=cache.keys.dtype, device=device)
            self._values = torch.zeros(shape, dtype=cache.values.dtype, device=device)
            self._rows = torch.full((requests,), requests, dtype=torch.int64, device=device)
            self._slots = torch.full((requests, width), PADDING_SLOT, dtype=torch.int64, device=device)
            self._visible = torch.zeros(requests, depth, width + depth, dtype=torch.bool, device=device)
            self._steps, self._columns = torch.arange(depth, device=device), torch.arange(width, device=device)
        self._out_cache_loc = torch.empty(0, dtype=torch.int64, device=device)

    def prepare_metadata(self, batch: ForwardBatch) -> None:
        """Compute which token attends to which: earlier places in the cache, and the others in the batch itself."""
        count = batch.batch_size
        self._out_cache_loc = batch.out_cache_loc[:: self.depth]
        is_padding = self._out_cache_loc == PADDING_SLOT
        self._rows[:count] = torch.where(is_padding, self.cache.max_requests, batch.req_pool_indices)
        self._slots[:count] = self.cache.table[batch.req_pool_indices]
        cached = (batch.seq_lens - self.depth)[:, None]
        age_in_cache = (cached + self._steps)[..., None] - self._columns
        age_in_batch = self._steps[:, None] - self._steps
        width = self._columns.shape[0]
        longest = width + self.depth if self.sliding_window is None else self.sliding_window
        self._visible[:count, :, :width] = (self._columns < cached)[:, None] & (age_in_cache < longest)
        self._visible[:count, :, width:] = (age_in_batch >= 0) & (age_in_batch < longest)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        queries, keys, values = (each.reshape(-1, self.depth, *each.shape[2:]) for each in (q, k, v))
        rows, slots = self._rows[: len(queries)], self._slots[: len(queries)]
        self._keys[layer].index_copy_(0, rows, keys)
        self._values[layer].index_copy_(0, rows, values)
        self.cache.write(layer, self._out_cache_loc, keys[:, 0], values[:, 0])
        keys = torch.cat((self.cache.keys[layer][slots], keys), dim=1)
        values = torch.cat((self.cache.values[layer][slots], values), dim=1)
        return masked_attention(queries, keys, values, self._visible[: len(queries)]).reshape(q.shape)

    def commit(self, batch: ForwardBatch, depths: Tensor) -> None:
        """Write keys and values of `batch`'s tokens into the cache: each request's guess of `depths` ``[B]``."""
        rows = batch.req_pool_indices
        self.cache.keys[:, batch.out_cache_loc] = self._keys[:, rows, depths]
        self.cache.values[:, batch.out_cache_loc] = self._values[:, rows, depths]
