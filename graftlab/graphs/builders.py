"""The registries of a decode and of a prefill: which fields of a batch go through static buffers, padded how."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from graftlab.graphs.registry import CudaGraphBufferRegistry
from graftlab.graphs.slots import Axis, GraphSlot, PaddingPolicy
from graftlab.requests.identity import NO_ROOM, PADDING_ID


def build_decode_registry(
    device: torch.device | str,
    max_bs: int,
    max_num_tokens: int | None = None,
    share_pool: bool = False,
    *,
    source: Any = None,
    padding_slot: int = 0,
) -> CudaGraphBufferRegistry:
    """Slots for batches in which each request has one token, so that all of them lie along the batch axis.

    ``source`` has buffers to adopt: a registry, a mapping by name, or any object with them as attributes. What it does
    not have is allocated. ``max_num_tokens`` is ``max_bs`` unless told, for slots that are registered later.
    ``padding_slot`` is the cache's slot that belongs to no request: padding tokens write their keys and values there.

    Raises :class:`GraphError` for a buffer to adopt that has not exactly the slot's shape, dtype and device.
    """
    largest = max_bs if max_num_tokens is None else max_num_tokens
    registry = CudaGraphBufferRegistry(device, max_bs, largest, share_pool)
    return _with_slots(registry, "bs", source, padding_slot)


def build_prefill_registry(
    device: torch.device | str,
    max_bs: int,
    max_num_tokens: int,
    share_pool: bool = False,
    *,
    source: Any = None,
    padding_slot: int = 0,
) -> CudaGraphBufferRegistry:
    """Slots for batches of whole prompts, or pieces of them: what tokens have lies along the token axis.

    The parameters, and what it raises, are those of :func:`build_decode_registry`.
    """
    registry = CudaGraphBufferRegistry(device, max_bs, max_num_tokens, share_pool)
    return _with_slots(registry, "tokens", source, padding_slot)


def _with_slots(
    registry: CudaGraphBufferRegistry, token_axis: Axis, source: Any, padding_slot: int
) -> CudaGraphBufferRegistry:
    def add(name: str, axis: Axis, pad_value: int, **options: Any) -> None:
        options.setdefault("shape_fn", lambda *most: (_length(axis, *most),))
        slot = GraphSlot(
            name,
            dtype=torch.int64,
            axis=axis,
            padding_policy=PaddingPolicy.FILL_SENTINEL,
            pad_value=pad_value,
            **options,
        )
        registry.register_slot(slot, bind=_buffer_of(source, name))

    # All of these are indices, lengths or identities, so none may keep a tail: what an earlier batch left there points
    # into memory that has another owner by now. Each is reset to a value that is in range and belongs to nobody.

    # Token 0 is in every vocabulary.
    add("input_ids", token_axis, 0)
    # Position 0 is in every table of positions, and it is that of a request with one token, as seq_lens says below.
    add("positions", token_axis, 0)
    # The worst of all if stale: a padding token would write its key and value over those of a running request.
    add("out_cache_loc", token_axis, padding_slot)
    # Only read, and row 0 always exists; what padding reads there comes out in rows that nobody looks at.
    add("req_pool_indices", "bs", 0)
    # Not 0, because a softmax over no place at all is NaN. The host's copy decides loops and sizes of kernels, where
    # a stale length costs time too.
    add("seq_lens", "bs", 1)
    add("seq_lens_cpu", "bs", 1, device="cpu")
    # One position a token for time, height and width, so tokens lie along its second axis.
    add(
        "mrope_positions",
        token_axis,
        0,
        shape_fn=lambda *most: (3, _length(token_axis, *most)),
        slice_fn=lambda buffer, n: buffer[:, :n],
    )
    # A request without an image has 0 too, so that cross-attention knows what to do with it.
    add("encoder_lens", "bs", 0)
    # The padding's own identities, which no request has: a stale one would give a row to the wrong request.
    add("rids_int", "bs", PADDING_ID)
    add("bootstrap_room_ids_int", "bs", NO_ROOM)
    return registry


def _length(axis: Axis, max_bs: int, max_num_tokens: int) -> int:
    return max_bs if axis == "bs" else max_num_tokens


def _buffer_of(source: Any, name: str) -> Tensor | None:
    if isinstance(source, CudaGraphBufferRegistry):
        return source.get_slot(name).buffer if source.has_slot(name) else None
    if isinstance(source, Mapping):
        return source.get(name)
    found: Tensor | None = getattr(source, name, None)
    return found
