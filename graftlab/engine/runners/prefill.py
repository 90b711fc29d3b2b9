"""Prefill in pieces: graphs between eager attention calls, which alone know where one request ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from graftlab.engine.attention import AttentionBackend
from graftlab.engine.batch import ForwardBatch
from graftlab.engine.graph_attention import UnpaddedAttention
from graftlab.engine.kv_cache import PADDING_SLOT, KVCache
from graftlab.engine.runners.eager import EagerRunner, RunnerFactory
from graftlab.engine.runners.graph import GraphRunner, OnHost, checked_sizes, doubling, padded_size
from graftlab.graphs.builders import build_prefill_registry
from graftlab.graphs.registry import CudaGraphBufferRegistry
from graftlab.graphs.slots import GraphSlot, PaddingPolicy
from graftlab.models import Transformer
from graftlab.models.transformer import Attend

DEFAULT_MAX_NUM_TOKENS = 512


class TokenGraphRunner(GraphRunner):
    """Batches whose tokens are padded, to the least of ``token_sizes`` that has room for them.

    By default the sizes are 8, 16, 32 and so on, up to ``max_num_tokens`` of the ``registry``, or to 512 if it is made
    here. Requests are always padded to the registry's maximum, so that only the number of tokens needs several graphs.
    Larger batches go through ``for_larger``, which is eager.

    Raises :class:`GraphError` for sizes that the registry has no room for.
    """

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        attention: AttentionBackend,
        registry: CudaGraphBufferRegistry,
        token_sizes: Sequence[int] | None,
    ) -> None:
        most = registry.max_num_tokens
        sizes = doubling(most, first=8) if token_sizes is None else token_sizes
        self.token_sizes = checked_sizes("token_sizes", sizes, most)
        super().__init__(model, cache, registry, attention)
        self.for_larger = EagerRunner(model, cache)

    def _replay_tokens(self, batch: ForwardBatch) -> Tensor:
        size = padded_size(self.token_sizes, batch.num_tokens)
        if size is None or batch.batch_size > self.registry.max_bs:
            return self._pass_on(self.for_larger, batch)
        # A copy, as indexing with a tensor is: the next replay writes over the graph's own.
        return self._replay(batch, self.registry.max_bs, size)[batch.last_tokens()]


class PrefillGraphRunner(TokenGraphRunner):
    """A runner with graphs for what lies between the attention calls of a prefill, which are eager.

    Other batches go to the runner that ``decode`` makes. ``attention`` gets padded batches, whose padding requests
    have no tokens. The other arguments are those of `TokenGraphRunner`.
    """

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        *,
        decode: RunnerFactory = EagerRunner,
        token_sizes: Sequence[int] | None = None,
        attention: AttentionBackend | None = None,
        registry: CudaGraphBufferRegistry | None = None,
        share_pool: bool = False,
    ) -> None:
        attention = attention or UnpaddedAttention(cache, model.config.sliding_window)
        registry = token_registry(cache, token_sizes, share_pool) if registry is None else with_extend_lens(registry)
        super().__init__(model, cache, attention, registry, token_sizes)
        self.decode = decode(model, cache)

    def status(self) -> dict[str, Any]:
        return {**super().status(), "decode": self.decode.status()}

    def forward(self, batch: ForwardBatch) -> Tensor:
        return self._pass_on(self.decode, batch) if batch.mode == "decode" else self._replay_tokens(batch)

    def _attend(self, on_host: OnHost) -> Attend:
        return on_host(self.attention.attend)


def token_registry(cache: KVCache, token_sizes: Sequence[int] | None, share_pool: bool) -> CudaGraphBufferRegistry:
    """For all requests that the cache can have, and the largest of the sizes."""
    registry = build_prefill_registry(
        cache.table.device,
        max_bs=cache.max_requests,
        max_num_tokens=max(token_sizes or [DEFAULT_MAX_NUM_TOKENS]),
        share_pool=share_pool,
        padding_slot=PADDING_SLOT,
    )
    return with_extend_lens(registry)


def with_extend_lens(registry: CudaGraphBufferRegistry) -> CudaGraphBufferRegistry:
    """The registry, with a slot for the number of tokens of each request in the batch: 0 for padding requests."""
    if not registry.has_slot("extend_lens_cpu"):
        registry.register_slot(
            GraphSlot(
                "extend_lens_cpu",
                lambda max_bs, max_num_tokens: (max_bs,),
                torch.int64,
                "bs",
                device="cpu",
                padding_policy=PaddingPolicy.FILL_SENTINEL,
                pad_value=0,
            )
        )
    return registry
