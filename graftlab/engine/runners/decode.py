"""Decode in one graph: the whole forward of a batch with one token per request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from graftlab.engine.attention import AttentionBackend
from graftlab.engine.batch import ForwardBatch
from graftlab.engine.graph_attention import GraphAttention
from graftlab.engine.kv_cache import PADDING_SLOT, KVCache
from graftlab.engine.runners.eager import EagerRunner, RunnerFactory
from graftlab.engine.runners.graph import GraphRunner, checked_sizes, doubling, padded_size
from graftlab.graphs.builders import build_decode_registry
from graftlab.graphs.registry import CudaGraphBufferRegistry
from graftlab.models import Transformer


class DecodeGraphRunner(GraphRunner):
    """A runner with one graph, attention and all, for each padded size of a decode's batch.

    ``batch_sizes`` are the sizes to pad to, by default 1, 2, 4 and so on up to all requests that fit into the cache.
    Larger batches, and those that are not decodes, go to the runner that ``prefill`` makes. ``registry`` may be shared;
    by default it is made here, on the process's pool with ``share_pool``. ``attention`` has to read from static memory
    on CUDA, as `GraphAttention` does.

    Raises :class:`GraphError` for sizes that the cache, or the registry, has no room for.
    """

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        *,
        prefill: RunnerFactory = EagerRunner,
        batch_sizes: Sequence[int] | None = None,
        attention: AttentionBackend | None = None,
        registry: CudaGraphBufferRegistry | None = None,
        share_pool: bool = False,
    ) -> None:
        most = cache.max_requests if registry is None else registry.max_bs
        self.batch_sizes = checked_sizes("batch_sizes", doubling(most) if batch_sizes is None else batch_sizes, most)
        if registry is None:
            registry = build_decode_registry(
                cache.table.device, max_bs=most, share_pool=share_pool, padding_slot=PADDING_SLOT
            )
        attention = attention or GraphAttention(cache, model.config.sliding_window, most)
        super().__init__(model, cache, registry, attention)
        self.prefill = prefill(model, cache)

    def status(self) -> dict[str, Any]:
        return {**super().status(), "prefill": self.prefill.status()}

    def forward(self, batch: ForwardBatch) -> Tensor:
        size = padded_size(self.batch_sizes, batch.batch_size)
        if batch.mode != "decode" or size is None:
            return self._pass_on(self.prefill, batch)
        # A copy: the next replay writes over the graph's own.
        return self._replay(batch, size, size)[: batch.batch_size].clone()
