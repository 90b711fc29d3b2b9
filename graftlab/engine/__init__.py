"""A small serving engine: continuous batching over a slot-based cache, the worked example of the kit."""

from __future__ import annotations

from graftlab.engine.attention import AttentionBackend, CacheAttention, masked_attention
from graftlab.engine.batch import ForwardBatch, SamplingBatchInfo
from graftlab.engine.engine import ByteTokenizer, Engine
from graftlab.engine.graph_attention import GraphAttention
from graftlab.engine.kv_cache import PADDING_SLOT, KVCache, SlotAllocator
from graftlab.engine.presets import PRESETS, build_model
from graftlab.engine.runners.breakable import BreakableGraphRunner
from graftlab.engine.runners.decode import DecodeGraphRunner
from graftlab.engine.runners.draft import DraftGraphRunner
from graftlab.engine.runners.eager import EagerRunner, Runner, RunnerFactory
from graftlab.engine.runners.prefill import PrefillGraphRunner
from graftlab.engine.sampling import gumbel_noise, sample
from graftlab.requests.served import FinishedRequest, Request, Response

__all__ = [
    "PADDING_SLOT",
    "PRESETS",
    "AttentionBackend",
    "BreakableGraphRunner",
    "ByteTokenizer",
    "CacheAttention",
    "DecodeGraphRunner",
    "DraftGraphRunner",
    "EagerRunner",
    "Engine",
    "FinishedRequest",
    "ForwardBatch",
    "GraphAttention",
    "KVCache",
    "PrefillGraphRunner",
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
