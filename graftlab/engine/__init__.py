"""A small serving engine: continuous batching over a slot-based cache, the worked example of the kit."""

from __future__ import annotations

from .attention import AttentionBackend, CacheAttention, masked_attention
from .batch import ForwardBatch, SamplingBatchInfo
from .engine import Engine
from .kv_cache import PADDING_SLOT, KVCache, SlotAllocator
from .presets import PRESETS, build_model
from .request import Finished, Request, Response
from .runner import EagerRunner, Runner, RunnerFactory
from .sampling import gumbel_noise, sample
from .tokenizer import ByteTokenizer

__all__ = [
    "PADDING_SLOT",
    "PRESETS",
    "AttentionBackend",
    "ByteTokenizer",
    "CacheAttention",
    "EagerRunner",
    "Engine",
    "Finished",
    "ForwardBatch",
    "KVCache",
    "Request",
    "Response",
    "Runner",
    "RunnerFactory",
    "SamplingBatchInfo",
    "SlotAllocator",
    "build_model",
    "gumbel_noise",
    "masked_attention",
    "sample",
]
