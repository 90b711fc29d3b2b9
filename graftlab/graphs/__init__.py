"""Captured graphs: the static buffers that they read, and how a batch fills them without leaving stale values."""

from __future__ import annotations

from graftlab.graphs.builders import build_decode_registry, build_prefill_registry
from graftlab.graphs.registry import (
    CudaGraphBufferRegistry,
    ForwardInputBuffers,
    clear_input_buffer_pool,
    share_input_buffer,
)
from graftlab.graphs.slots import FillContext, GraphSlot, PaddingPolicy

__all__ = [
    "CudaGraphBufferRegistry",
    "FillContext",
    "ForwardInputBuffers",
    "GraphSlot",
    "PaddingPolicy",
    "build_decode_registry",
    "build_prefill_registry",
    "clear_input_buffer_pool",
    "share_input_buffer",
]
