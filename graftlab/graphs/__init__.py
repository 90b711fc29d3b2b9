"""Captured graphs: the static buffers they read, and how a batch gets into those and nothing else stays in them."""

from __future__ import annotations

from .attention import GraphAttention
from .breakable_runner import BreakableGraphRunner
from .builders import build_decode_registry, build_prefill_registry
from .decode_runner import DecodeGraphRunner
from .draft_runner import DraftGraphRunner
from .pool import clear_input_buffer_pool, share_input_buffer
from .prefill_runner import PrefillGraphRunner
from .registry import CudaGraphBufferRegistry
from .slots import FillContext, GraphSlot, PaddingPolicy

__all__ = [
    "BreakableGraphRunner",
    "CudaGraphBufferRegistry",
    "DecodeGraphRunner",
    "DraftGraphRunner",
    "FillContext",
    "GraphAttention",
    "GraphSlot",
    "PaddingPolicy",
    "PrefillGraphRunner",
    "build_decode_registry",
    "build_prefill_registry",
    "clear_input_buffer_pool",
    "share_input_buffer",
]
