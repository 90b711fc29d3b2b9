"""The input of one forward: flat tensors over its tokens and over its requests.

Letters in the shapes: T tokens of the batch, B requests. In decode, T == B. Indices and lengths are int64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Mode = Literal["prefill", "decode"]


@dataclass(frozen=True)
class SamplingBatchInfo:
    """How each request's next token is chosen, all ``[B]``: `sampling.sample` takes it.

    ``temperatures`` float32, 0 for greedy; ``seeds``; ``positions``, the next token's; ``top_ks``, the
    vocabulary's size for no limit. ``all_greedy`` is a bool of the host, so that reading it does not wait for the
    device. The ids are those of the batch.
    """

    temperatures: Tensor
    seeds: Tensor
    positions: Tensor
    top_ks: Tensor
    all_greedy: bool
    rids_int: Tensor | None = None
    bootstrap_room_ids_int: Tensor | None = None


@dataclass(frozen=True)
class ForwardBatch:
    """One prefill of B requests' next T prompt tokens, request after request; or one decode of a token each.

    Over tokens ``[T]``: ``input_ids``; ``positions`` in the request; ``out_cache_loc``, the cache slot for the token's
    key and value. Over requests ``[B]``: ``req_pool_indices``, the row in the cache's table; ``seq_lens``, tokens in
    the cache once this forward is done, on the device and on the host; ``extend_lens_cpu``, how many of them are in
    this batch. The last is None in decode, where each request has one. A request's earlier tokens,
    ``seq_lens - extend_lens``, are in the cache already.

    ``mrope_positions`` ``[3, T]`` and ``encoder_lens`` ``[B]`` are set for the models that read
    them: `MultimodalTransformer` and `CrossAttentionTransformer`.
    ``rids_int`` and ``bootstrap_room_ids_int`` ``[B]`` are set if the engine was asked for them, ``request_ids``
    always.
    """

    mode: Mode
    input_ids: Tensor
    positions: Tensor
    out_cache_loc: Tensor
    req_pool_indices: Tensor
    seq_lens: Tensor
    seq_lens_cpu: Tensor
    extend_lens_cpu: Tensor | None = None
    mrope_positions: Tensor | None = None
    encoder_lens: Tensor | None = None
    rids_int: Tensor | None = None
    bootstrap_room_ids_int: Tensor | None = None
    request_ids: tuple[str, ...] = ()
    sampling_info: SamplingBatchInfo | None = None

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[0]

    @property
    def batch_size(self) -> int:
        return self.seq_lens_cpu.shape[0]

    @property
    def extras(self) -> dict[str, Tensor]:
        """The extras that identify the rows of a tensor over the tokens, for `align_by_request`; empty without ids."""
        if self.rids_int is None:
            return {}
        lens = self.extend_lens_cpu
        return {"rids_int": self.rids_int} | ({} if lens is None else {"request_lens": lens})

    def last_tokens(self) -> Tensor:
        """``[B]`` on the device: the row of each request's last token."""
        if self.extend_lens_cpu is None:
            return torch.arange(self.batch_size, device=self.input_ids.device)
        return (self.extend_lens_cpu.cumsum(0) - 1).to(self.input_ids.device)
