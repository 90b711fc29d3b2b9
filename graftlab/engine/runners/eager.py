"""Runners: how a batch goes through the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from graftlab.engine.attention import AttentionBackend, CacheAttention
from graftlab.engine.batch import ForwardBatch
from graftlab.engine.encoder import encoder_attention
from graftlab.engine.kv_cache import KVCache
from graftlab.engine.model_inputs import call_model, positions_of
from graftlab.models import Transformer
from graftlab.taps.calls import tags
from graftlab.taps.extras import carrying


class Runner(Protocol):
    """What the engine asks for once a step."""

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Logits ``[B, V]`` after each request's last token in the batch; its keys and values are then in the cache."""

    def status(self) -> dict[str, Any]:
        """The runner's status as JSON; its class is under ``"runner"``."""


RunnerFactory = Callable[[Transformer, KVCache], Runner]
"""Makes an engine's runner. A class that takes model and cache is one; options go in through a `partial`."""


class EagerRunner:
    """The model called as it is, every tap in it tagged ``phase="prefill"`` or ``"decode"``.

    The tokens of a batch are the rows, ``[T, 1]``, in both phases: taps show ``[T, 1, ...]``, a row a token. Where the
    batch has identities, they travel with every tap, so that `align_by_request` pairs its rows.
    """

    def __init__(self, model: Transformer, cache: KVCache, attention: AttentionBackend | None = None) -> None:
        self.model = model
        self.attention = attention or CacheAttention(cache, model.config.sliding_window)
        self.encoder = encoder_attention(model, cache)

    def forward(self, batch: ForwardBatch) -> Tensor:
        return self.forward_tokens(batch)[batch.last_tokens()]

    def status(self) -> dict[str, Any]:
        return {"runner": type(self).__name__}

    @torch.no_grad()
    def forward_tokens(self, batch: ForwardBatch) -> Tensor:
        """Logits ``[T, V]`` after every token of the batch."""
        self.attention.prepare_metadata(batch)
        if self.encoder is not None:
            self.encoder.prepare_metadata(batch)
        input_ids, positions = batch.input_ids[:, None], positions_of(self.model, batch)
        with tags(phase=batch.mode), carrying(batch.extras):
            # T rows of one token, not one row of T: a model limits the length of a row, and a batch may be longer than
            # any context.
            logits = call_model(self.model, input_ids, positions, self.attention.attend, self.encoder)
        return logits.squeeze(1)
