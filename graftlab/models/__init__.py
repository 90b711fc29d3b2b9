"""Small reference transformers with taps, plain and tensor-parallel, for demonstrations and tests."""

from __future__ import annotations

from graftlab.models.cross_attention import CrossAttend, CrossAttentionTransformer
from graftlab.models.multimodal import MultimodalTransformer
from graftlab.models.tensor_parallel import TensorParallelTransformer
from graftlab.models.transformer import Attend, ModelConfig, RMSNorm, Transformer, causal_attention

__all__ = [
    "Attend",
    "CrossAttend",
    "CrossAttentionTransformer",
    "ModelConfig",
    "MultimodalTransformer",
    "RMSNorm",
    "TensorParallelTransformer",
    "Transformer",
    "causal_attention",
]
