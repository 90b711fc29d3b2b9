"""The registries of a decode and of a prefill: which fields of a batch have static buffers, and how they are padded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from graftlab.errors import GraphError
from graftlab.graphs.registry import CudaGraphBufferRegistry
from graftlab.graphs.slots import Axis, FillContext, GraphSlot, PaddingPolicy
from graftlab.requests.identity import IDENTITIES, NO_ROOM, PADDING_ID, is_switched_on


def build_decode_registry(
    device: torch.device | str,
    max_bs: int,
    max_num_tokens: int | None = None,
    share_pool: bool = False,
    *,
    max_num_token: int | None = None,
    source: Any = None,
    padding_slot: int = 0,
    num_tokens_per_bs: int = 1,
    seq_len_fill_value: int = 1,
    encoder_len_fill_value: int = 0,
    is_encoder_decoder: bool = True,
    cache_loc_dtype: torch.dtype | None = None,
    dtypes: Mapping[str, torch.dtype] | None = None,
    enable_mamba_track: bool = False,
    enable_num_token_non_padded: bool = False,
    require_gathered_buffer: bool = False,
    enable_prefill_cp: bool = False,
    attn_tp_rank: int = 0,
    attn_tp_size: int = 1,
    require_mlp_tp_gather: bool = False,
    dp_size: int = 1,
    register_global_num_tokens: bool | None = None,
    request_ids: bool | None = None,
) -> CudaGraphBufferRegistry:
    """Slots for batches in which each request has ``num_tokens_per_bs`` tokens.

    With one token, everything lies along the batch axis. With several, as when guessed tokens are verified, per-token
    fields lie along the token axis. ``max_num_tokens``, or ``max_num_token``, is ``max_bs`` times that number by
    default.

    ``source`` has buffers to adopt: a registry, a mapping by name, or any object with them as attributes. Of a larger
    buffer the head is adopted, and a different integer dtype becomes the slot's. Buffers that it lacks are allocated.
    ``dtypes`` chooses other dtypes by name, and ``cache_loc_dtype`` that of ``out_cache_loc``.

    ``padding_slot`` is the cache's slot that belongs to no request: padding tokens write their keys and values there.
    ``seq_len_fill_value`` and ``encoder_len_fill_value`` are the lengths of padding requests. Without
    ``is_encoder_decoder`` there is no ``encoder_lens``; with ``enable_mamba_track`` there are ``mamba_track_indices``
    and ``mamba_track_mask``. Several are computed. ``num_token_non_padded`` is the batch's, or else its own number of
    tokens; with ``require_gathered_buffer``, and without ``enable_prefill_cp``, the part of it that the attention's
    tensor parallel rank ``attn_tp_rank`` of ``attn_tp_size`` has. ``global_num_tokens``, ``global_num_tokens_gpu`` and
    ``global_num_tokens_for_logprob_gpu`` (``require_gathered_buffer``; the last two also by
    ``register_global_num_tokens``) are the padded number, whatever the batch says: once, or with
    ``require_mlp_tp_gather`` for each of ``dp_size`` ranks.

    ``rids_int`` and ``bootstrap_room_ids_int`` have no memory before ``request_ids``, by default the environment
    variable ``GRAFTLAB_REQUEST_IDS``, or :meth:`~CudaGraphBufferRegistry.enable_slot`, switches them on, or ``source``
    has them. A source's ``pp_proxy_tensors`` and ``ngram_embedding_info`` (``column_starts``, ``req_lens``) become
    slots with dotted names, which take as many rows as arrive.

    Raises :class:`GraphError` for a buffer to adopt that is too small, on another device or of no integers.
    """
    max_num_tokens = _one_of(max_num_tokens, max_num_token)
    if num_tokens_per_bs < 1:
        raise GraphError(f"num_tokens_per_bs={num_tokens_per_bs}; each request needs at least one token")
    largest = max_bs * num_tokens_per_bs if max_num_tokens is None else max_num_tokens
    registry = CudaGraphBufferRegistry(device, max_bs, largest, share_pool)
    encoder_len = encoder_len_fill_value if is_encoder_decoder else None
    slots = _slots("bs" if num_tokens_per_bs == 1 else "tokens", padding_slot, seq_len_fill_value, encoder_len)
    if attn_tp_size < 1 or not 0 <= attn_tp_rank < attn_tp_size:
        raise GraphError(f"attn_tp_rank={attn_tp_rank} of attn_tp_size={attn_tp_size} is not a rank")
    cut = (attn_tp_rank, attn_tp_size) if require_gathered_buffer and not enable_prefill_cp else (0, 1)
    slots += _optional_slots(enable_num_token_non_padded, cut, require_gathered_buffer, enable_mamba_track)
    if require_gathered_buffer if register_global_num_tokens is None else register_global_num_tokens:
        count = dp_size if require_mlp_tp_gather else 1
        hook = _write_padded_num_tokens if require_gathered_buffer else None
        names = ("global_num_tokens_gpu", "global_num_tokens_for_logprob_gpu")
        slots += [_number(name, count, copy_from_batch=False, post_fill=hook) for name in names]
    slots += _slots_of_source(source)
    return _registered(registry, slots, source, _chosen(dtypes, cache_loc_dtype), request_ids)


def build_prefill_registry(
    device: torch.device | str,
    max_bs: int,
    max_num_tokens: int | None = None,
    share_pool: bool = False,
    *,
    max_num_token: int | None = None,
    source: Any = None,
    padding_slot: int = 0,
    seq_len_fill_value: int = 1,
    encoder_len_fill_value: int = 0,
    is_encoder_decoder: bool = True,
    cache_loc_dtype: torch.dtype | None = None,
    dtypes: Mapping[str, torch.dtype] | None = None,
    enable_mamba_track: bool = False,
    enable_num_token_non_padded: bool = False,
    require_gathered_buffer: bool = False,
    is_multimodal: bool = False,
    hidden_size: int = 0,
    embed_dtype: torch.dtype | None = None,
    register_input_embeds: bool = True,
    request_ids: bool | None = None,
) -> CudaGraphBufferRegistry:
    """Slots for batches of whole prompts, or pieces of them: per-token fields lie along the token axis.

    Parameters and errors are those of :func:`build_decode_registry`. With ``is_multimodal`` and
    ``register_input_embeds`` there is a slot ``input_embeds``, ``[tokens, hidden_size]`` of ``embed_dtype``, into which
    the model itself writes: only its tail is reset. With ``enable_mamba_track`` there is ``mamba_track_seqlens`` too.
    """
    max_num_tokens = _one_of(max_num_tokens, max_num_token)
    if max_num_tokens is None:
        raise GraphError("max_num_tokens is not given; it is the largest number of tokens in a batch")
    registry = CudaGraphBufferRegistry(device, max_bs, max_num_tokens, share_pool)
    encoder_len = encoder_len_fill_value if is_encoder_decoder else None
    slots = _slots("tokens", padding_slot, seq_len_fill_value, encoder_len)
    slots += _optional_slots(enable_num_token_non_padded, (0, 1), require_gathered_buffer, enable_mamba_track)
    if enable_mamba_track:
        slots.append(_slot("mamba_track_seqlens", "bs", 0, dtype=torch.int32))
    if is_multimodal and register_input_embeds:
        if hidden_size < 1 or embed_dtype is None:
            raise GraphError(
                f"is_multimodal needs hidden_size and embed_dtype for the slot input_embeds, not {hidden_size} and "
                f"{embed_dtype}; register_input_embeds=False leaves it out"
            )
        slots.append(
            GraphSlot(
                "input_embeds",
                lambda _, tokens: (tokens, hidden_size),
                embed_dtype,
                padding_policy=PaddingPolicy.ZERO,
                copy_from_batch=False,
            )
        )
    return _registered(registry, slots, source, _chosen(dtypes, cache_loc_dtype), request_ids)


def _one_of(max_num_tokens: int | None, max_num_token: int | None) -> int | None:
    if max_num_tokens is not None and max_num_token is not None:
        raise GraphError("max_num_tokens and max_num_token are two names of one number; give one of them")
    return max_num_token if max_num_tokens is None else max_num_tokens


def _chosen(dtypes: Mapping[str, torch.dtype] | None, cache_loc_dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    return {**({} if cache_loc_dtype is None else {"out_cache_loc": cache_loc_dtype}), **(dtypes or {})}


def _slots(
    token_axis: Axis, padding_slot: int, seq_len_fill_value: int, encoder_len_fill_value: int | None
) -> list[GraphSlot]:
    # All of these are indices, lengths or identities, so none may keep a tail: values of an earlier batch would point
    # into memory that belongs to another request now. Each is reset to a value that is in range and that no request
    # uses.
    return [
        # Token 0 is in every vocabulary.
        _slot("input_ids", token_axis, 0),
        # Position 0 is in every table of positions. It is the position of a request with one token, which matches
        # seq_lens below.
        _slot("positions", token_axis, 0),
        # The worst one to be stale: a padding token would overwrite the key and value of a running request.
        _slot("out_cache_loc", token_axis, padding_slot),
        # Only read, and row 0 always exists; what padding reads there affects only output rows that are dropped.
        _slot("req_pool_indices", "bs", 0),
        # Not 0 by default, because a softmax over no places is NaN. The host's copy decides loops and sizes of kernels,
        # where a stale length also costs time.
        _slot("seq_lens", "bs", seq_len_fill_value),
        _slot("seq_lens_cpu", "bs", seq_len_fill_value, device="cpu"),
        # One position a token for time, height and width, so tokens lie along its second axis.
        _slot(
            "mrope_positions",
            token_axis,
            0,
            shape_fn=lambda *most: (3, _length(token_axis, *most)),
            slice_fn=lambda buffer, n: buffer[:, :n],
        ),
        # A request without an image has 0 too, so that cross-attention knows what to do with it.
        *([] if encoder_len_fill_value is None else [_slot("encoder_lens", "bs", encoder_len_fill_value)]),
        # The padding's own identities, which no request has: a stale one would give a row to the wrong request.
        _slot("rids_int", "bs", PADDING_ID),
        _slot("bootstrap_room_ids_int", "bs", NO_ROOM),
    ]


def _optional_slots(
    num_token_non_padded: bool, cut: tuple[int, int], gathered: bool, mamba_track: bool
) -> list[GraphSlot]:
    slots = []
    if mamba_track:
        # Row 0 of the states is as good as any to read, and no state is kept where the mask is off.
        slots.append(_slot("mamba_track_indices", "bs", 0))
        slots.append(_slot("mamba_track_mask", "bs", False, dtype=torch.bool))
    if num_token_non_padded:
        hook = None if cut == (0, 1) else partial(_keep_own_part, cut)
        slots.append(_number("num_token_non_padded", source_fn=_own_num_tokens, post_fill=hook))
    if gathered:
        slots.append(_number("global_num_tokens", copy_from_batch=False, post_fill=_write_padded_num_tokens))
    return slots


def _slot(name: str, axis: Axis, pad_value: int | bool, **options: Any) -> GraphSlot:
    options.setdefault("shape_fn", lambda *most: (_length(axis, *most),))
    options.setdefault("dtype", torch.int64)
    return GraphSlot(name, axis=axis, padding_policy=PaddingPolicy.FILL_SENTINEL, pad_value=pad_value, **options)


def _number(name: str, count: int = 1, **options: Any) -> GraphSlot:
    return GraphSlot(name, shape_fn=lambda *most: (count,), dtype=torch.int32, axis="none", **options)


def _slots_of_source(source: Any) -> list[GraphSlot]:
    """Slots for buffers of a source whose values a batch holds inside another object or beside it."""
    found: dict[str, tuple[Tensor, Callable[[Any, FillContext], Any]]] = {}
    ngram = getattr(source, "ngram_embedding_info", None)
    for name in () if ngram is None else ("column_starts", "req_lens"):
        found[f"ngram_embedding_info.{name}"] = (
            getattr(ngram, name),
            partial(_ngram_tensor, name),
        )
    for name, buffer in (getattr(source, "pp_proxy_tensors", None) or {}).items():
        found[f"pp_proxy_tensors.{name}"] = (buffer, partial(_pp_proxy_tensor, name))
    return [
        GraphSlot(
            name,
            partial(_same_shape, tuple(buffer.shape)),
            buffer.dtype,
            axis="none",
            device=buffer.device,
            source_fn=source_fn,
            buffer=buffer,
        )
        for name, (buffer, source_fn) in found.items()
    ]


def _same_shape(shape: tuple[int, ...], max_bs: int, max_num_tokens: int) -> tuple[int, ...]:
    return shape


def _ngram_tensor(name: str, batch: Any, ctx: FillContext) -> Any:
    return getattr(getattr(batch, "ngram_embedding_info", None), name, None)


def _pp_proxy_tensor(name: str, batch: Any, ctx: FillContext) -> Any:
    arrived = getattr(ctx.pp_proxy_tensors, "tensors", ctx.pp_proxy_tensors)
    return None if arrived is None else arrived[name]


def _own_num_tokens(batch: Any, ctx: FillContext) -> Tensor:
    found = getattr(batch, "num_token_non_padded", None)
    if isinstance(found, Tensor):
        return found.reshape(1)
    return torch.tensor([ctx.raw_num_tokens if found is None else found], dtype=torch.int32, device="cpu")


def _keep_own_part(place: tuple[int, int], buffer: Tensor, batch: Any, ctx: FillContext) -> None:
    # Each rank has an equal share of the padded tokens; the last shares may be padding alone.
    rank, size = place
    share = ctx.padded_num_tokens // size
    buffer.sub_(rank * share).clamp_(0, share)


def _write_padded_num_tokens(buffer: Tensor, batch: Any, ctx: FillContext) -> None:
    # The other ranks gather as many rows of this rank as its graph has, padding included.
    buffer.fill_(ctx.padded_num_tokens)


def _registered(
    registry: CudaGraphBufferRegistry,
    slots: list[GraphSlot],
    source: Any,
    dtypes: Mapping[str, torch.dtype],
    request_ids: bool | None,
) -> CudaGraphBufferRegistry:
    if request_ids is None:
        request_ids = is_switched_on()
    known = {slot.name for slot in slots}
    if unknown := sorted(dtypes.keys() - known):
        raise GraphError(f"dtypes are given for {unknown}, which are not slots here; the slots are {sorted(known)}")
    for slot in slots:
        if slot.buffer is not None:
            registry.register_slot(slot)
            continue
        found = _buffer_of(source, slot.name)
        # Identities that a source has are in use there.
        enabled = request_ids or found is not None or slot.name not in IDENTITIES
        slot = replace(slot, dtype=dtypes.get(slot.name, slot.dtype), enabled=enabled)
        if found is None:
            registry.register_slot(slot)
            continue
        if slot.name not in dtypes:
            slot = _with_dtype_of(slot, found)
        registry.register_slot(slot, bind=_head(found, slot.shape_fn(registry.max_bs, registry.max_num_tokens)))
    return registry


def _with_dtype_of(slot: GraphSlot, found: Tensor) -> GraphSlot:
    """The slot with the buffer's integer dtype; the registry refuses buffers of other dtypes."""
    is_integer = not (found.dtype.is_floating_point or found.dtype.is_complex or found.dtype == torch.bool)
    return replace(slot, dtype=found.dtype) if is_integer and slot.dtype != torch.bool else slot


def _head(found: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The head of a buffer that is larger than needed; any other buffer unchanged, for the registry to check."""
    if found.dim() != len(shape) or found.shape == shape or any(a < b for a, b in zip(found.shape, shape, strict=True)):
        return found
    return found[tuple(slice(size) for size in shape)]


def _length(axis: Axis, max_bs: int, max_num_tokens: int) -> int:
    return max_bs if axis == "bs" else max_num_tokens


def _buffer_of(source: Any, name: str) -> Tensor | None:
    if isinstance(source, CudaGraphBufferRegistry):
        return source.get_slot(name).buffer if source.has_slot(name) else None
    if isinstance(source, Mapping):
        return source.get(name)
    found: Tensor | None = getattr(source, name, None)
    return found
