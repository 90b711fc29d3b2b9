"""Small registries for tests, and batches whose requests have one token each."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from graftlab.graphs import CudaGraphBufferRegistry, GraphSlot

on_devices = pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))],
)

MAX_BS, MAX_TOKENS = 8, 16
PADDED = 6


def make(name: str = "x", **options: Any) -> GraphSlot:
    """An int64 slot along the batch axis, unless told."""
    axis = options.setdefault("axis", "bs")
    shapes = {"bs": lambda bs, tokens: (bs,), "tokens": lambda bs, tokens: (tokens,)}
    options.setdefault("shape_fn", shapes.get(axis, lambda bs, tokens: (4,)))
    return GraphSlot(name, **{"dtype": torch.int64, **options})


def registry_of(*slots: GraphSlot, device: str = "cpu", share_pool: bool = False) -> CudaGraphBufferRegistry:
    registry = CudaGraphBufferRegistry(device=device, max_bs=MAX_BS, max_num_tokens=MAX_TOKENS, share_pool=share_pool)
    for slot in slots:
        registry.register_slot(slot)
    return registry


def buffer_of(registry: CudaGraphBufferRegistry, name: str = "x") -> Tensor:
    buffer = registry.get_slot(name).buffer
    assert buffer is not None
    return buffer


def content(registry: CudaGraphBufferRegistry, name: str = "x") -> list[Any]:
    return buffer_of(registry, name).tolist()


def ones(size: int, value: int = 1, **options: Any) -> Tensor:
    return torch.full((size,), value, **{"dtype": torch.int64, **options})


def fill(registry: CudaGraphBufferRegistry, raw: int, padded: int = PADDED, **fields: Any) -> SimpleNamespace:
    batch = SimpleNamespace(**fields)
    registry.fill_from(batch, raw_bs=raw, padded_bs=padded, raw_num_tokens=raw, padded_num_tokens=padded)
    return batch


def extract(registry: CudaGraphBufferRegistry, template: Any, padded: int = PADDED) -> Any:
    return registry.extract_buffer(padded_bs=padded, padded_num_tokens=padded, forward_batch_template=template)
