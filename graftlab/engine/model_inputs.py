"""Further inputs of a batch, for models that read more than tokens and positions."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from graftlab.engine.batch import ForwardBatch
from graftlab.engine.encoder import EncoderAttention
from graftlab.engine.kv_cache import KVCache
from graftlab.engine.scheduler import Work
from graftlab.errors import GraphError
from graftlab.models import CrossAttentionTransformer, MultimodalTransformer, Transformer
from graftlab.models.transformer import Attend


def with_model_inputs(batch: ForwardBatch, work: Work, model: Transformer, cache: KVCache) -> ForwardBatch:
    """The batch with ``mrope_positions`` or ``encoder_lens`` where the model reads them.

    The encoder states of requests that begin are written into the cache.
    """
    device = batch.input_ids.device
    if isinstance(model, MultimodalTransformer):
        spans = work.spans
        found = [model.mrope_positions(s.live.request.input_ids, s.stop)[:, s.live.computed :] for s in spans]
        return dataclasses.replace(batch, mrope_positions=torch.cat(found, dim=1).to(device))
    if isinstance(model, CrossAttentionTransformer):
        lens = [model.source_len(span.live.request.input_ids) for span in work.spans]
        for span, count in zip(work.spans, lens, strict=True):
            if span.live.computed == 0 and count:
                assert span.live.place is not None, "the scheduler plans only requests that have a place"
                source = torch.tensor(span.live.request.input_ids[:count], dtype=torch.int64, device=device)
                cache.write_encoder(span.live.place.row, *model.encode(source))
        return dataclasses.replace(batch, encoder_lens=torch.tensor(lens, dtype=torch.int64, device=device))
    return batch


def positions_of(model: Transformer, batch: ForwardBatch) -> Tensor:
    """The positions that this model takes, of a batch whose tokens are the rows: ``[T, 1]``, or ``[3, T, 1]``.

    Raises :class:`GraphError` where the model reads multimodal positions and the batch has none.
    """
    if not isinstance(model, MultimodalTransformer):
        return batch.positions[:, None]
    if batch.mrope_positions is None:
        raise GraphError("the model has multimodal rotary positions, and the batch has no mrope_positions")
    return batch.mrope_positions[..., None]


def call_model(
    model: Transformer, input_ids: Tensor, positions: Tensor, attend: Attend, encoder: EncoderAttention | None
) -> Tensor:
    """The model's logits; with its encoder's attention where it has one."""
    logits: Tensor = (
        model(input_ids, positions, attend) if encoder is None else model(input_ids, positions, attend, encoder.attend)
    )
    return logits
