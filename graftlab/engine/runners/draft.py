"""Speculative decoding: a smaller model guesses some tokens ahead, and one forward of the model verifies them.

The engine still asks for one token of each request at a time. The other verified logits are kept, and answer the next
steps without a forward as long as the engine chooses the guessed tokens. So a guess never changes an output, greedy or
drawn, however bad it is: a wrong guess is just dropped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from graftlab.engine.attention import masked_attention
from graftlab.engine.batch import ForwardBatch, SamplingBatchInfo
from graftlab.engine.graph_attention import token_places
from graftlab.engine.kv_cache import PADDING_SLOT, KVCache
from graftlab.engine.runners.decode import DecodeGraphRunner
from graftlab.engine.runners.eager import EagerRunner, RunnerFactory
from graftlab.engine.runners.graph import GraphRunner, doubling, padded_size
from graftlab.engine.runners.prefill import with_extend_lens
from graftlab.errors import GraphError
from graftlab.graphs.builders import build_decode_registry
from graftlab.models import CrossAttentionTransformer, MultimodalTransformer, Transformer
from graftlab.taps.calls import tags

T = TypeVar("T", ForwardBatch, SamplingBatchInfo)


@dataclass(frozen=True)
class VerifiedTokens:
    """The model's logits ``[ahead + 1, V]`` after each of a request's `tokens`; the first token is at `place`."""

    place: int
    tokens: list[int]
    logits: Tensor

    def depth_of(self, place: int, token: int) -> int | None:
        """The index of this token among those verified; None if it differs, or lies beyond them."""
        depth = place - self.place
        return depth if 0 <= depth < len(self.tokens) and self.tokens[depth] == token else None


class DraftGraphRunner(GraphRunner):
    """Decodes with ``ahead`` tokens guessed by the model ``draft``, greedily; both models run in graphs.

    ``draft`` has the model's vocabulary and is on its device. Its cache has room for every request that the table can
    have. Static buffers are those of the process's pool, which the graphs of both models share with a
    `DecodeGraphRunner` that has ``share_pool``. Prefills go to the runner that ``prefill`` makes, and, eagerly, through
    the draft.

    ``guessed`` counts guesses that were verified, and ``accepted`` tokens that they saved a forward for. ``row_ids``
    are those of the requests that needed one; None where all had been guessed. Taps of the draft have the tag
    ``model="draft"``; those of the model show all tokens that are verified, so they compare with another such runner's.

    Raises :class:`GraphError` for a different vocabulary, for less than one token ahead, and for a draft that needs
    inputs that the model's batches lack: encoder states, or multimodal positions.
    """

    attention: VerifyAttention

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        *,
        draft: Transformer,
        ahead: int = 3,
        prefill: RunnerFactory = EagerRunner,
    ) -> None:
        if draft.config.vocab_size != model.config.vocab_size:
            raise GraphError(
                f"the draft has a vocabulary of {draft.config.vocab_size} tokens, and the model has "
                f"{model.config.vocab_size}; a guessed token would be a different token to the model"
            )
        if isinstance(draft, CrossAttentionTransformer):
            raise GraphError(
                "the draft has cross-attention, but its cache gets no encoder states; use a draft without it, "
                "or a DecodeGraphRunner"
            )
        if isinstance(draft, MultimodalTransformer) and not isinstance(model, MultimodalTransformer):
            raise GraphError(
                "the draft has multimodal rotary positions, and batches of this model have none; "
                "use a draft without them"
            )
        if ahead < 1:
            raise GraphError(f"ahead={ahead}; guess at least one token ahead, or use a DecodeGraphRunner")
        depth, most = ahead + 1, cache.max_requests
        registry = build_decode_registry(
            cache.table.device, most, share_pool=True, padding_slot=PADDING_SLOT, num_tokens_per_bs=depth
        )
        attention = VerifyAttention(cache, model.config.sliding_window, depth)
        super().__init__(model, cache, with_extend_lens(registry), attention)
        self.guessed = self.accepted = 0
        self.prefill = prefill(model, cache)
        self.draft = DecodeGraphRunner(draft, _cache_for(draft, cache), share_pool=True)
        self._batch_sizes = doubling(most)
        # By request id, of requests that the latest decode had.
        self._verified: dict[str, VerifiedTokens] = {}

    def status(self) -> dict[str, Any]:
        own = super().status()
        return {**own, "guessed": self.guessed, "accepted": self.accepted, "draft": self.draft.status()}

    @torch.no_grad()
    def forward(self, batch: ForwardBatch) -> Tensor:
        if batch.mode == "prefill":
            for rid in batch.request_ids:
                self._verified.pop(rid, None)
            rows, places = token_places(batch)
            with tags(model="draft"):
                self.draft.forward(dataclasses.replace(batch, out_cache_loc=self.draft.cache.table[rows, places]))
            return self._pass_on(self.prefill, batch)
        self._row_ids = ()
        asked = list(zip(batch.request_ids, (batch.seq_lens_cpu - 1).tolist(), batch.input_ids.tolist(), strict=True))
        self._verified = {rid: self._verified[rid] for rid in batch.request_ids if rid in self._verified}
        unknown = [i for i, each in enumerate(asked) if self._depth_of(*each) is None]
        if unknown:
            self._look_ahead(_requests_of(batch, unknown))
        depths = [self._depth_of(*each) or 0 for each in asked]
        self.accepted += sum(depth > 0 for depth in depths)
        self.attention.commit(batch, torch.tensor(depths, device=batch.input_ids.device))
        return torch.stack(
            [self._verified[rid].logits[depth] for rid, depth in zip(batch.request_ids, depths, strict=True)]
        )

    def _depth_of(self, rid: str, place: int, token: int) -> int | None:
        verified = self._verified.get(rid)
        return None if verified is None else verified.depth_of(place, token)

    def _look_ahead(self, batch: ForwardBatch) -> None:
        tokens = self._guess(batch)
        count, depth = tokens.shape
        size = padded_size(self._batch_sizes, count)
        assert size is not None, "as many as the cache can have"
        logits = self._replay(self._to_verify(batch, tokens), size, size * depth)[: tokens.numel()].clone()
        self.guessed += count * (depth - 1)
        places = (batch.seq_lens_cpu - 1).tolist()
        found = zip(places, tokens.tolist(), logits.view(count, depth, -1), strict=True)
        self._verified.update(zip(batch.request_ids, (VerifiedTokens(*each) for each in found), strict=True))

    def _guess(self, batch: ForwardBatch) -> Tensor:
        """``[B, ahead + 1]``: each request's token, and what the draft would choose after it."""
        cache, tokens = self.draft.cache, [batch.input_ids]
        # Once more than guesses are made, so that the draft's cache has the last one too if all are right.
        for step in range(self.attention.depth):
            # No token is ever fed from the last place, so guesses past the end may be written there.
            seq_lens = (batch.seq_lens + step).clamp(max=cache.max_context)
            following = dataclasses.replace(
                batch,
                input_ids=tokens[-1],
                positions=batch.positions + step,
                out_cache_loc=cache.table[batch.req_pool_indices, seq_lens - 1],
                seq_lens=seq_lens,
                mrope_positions=None if batch.mrope_positions is None else batch.mrope_positions + step,
                seq_lens_cpu=(batch.seq_lens_cpu + step).clamp(max=cache.max_context),
            )
            with tags(model="draft"):
                tokens.append(self.draft.forward(following).argmax(dim=-1))
        return torch.stack(tokens[:-1], dim=1)

    def _to_verify(self, batch: ForwardBatch, tokens: Tensor) -> ForwardBatch:
        count, depth = tokens.shape
        out_cache_loc = torch.full_like(tokens, PADDING_SLOT)
        out_cache_loc[:, 0] = batch.out_cache_loc
        steps, three = torch.arange(depth, device=tokens.device), batch.mrope_positions
        return dataclasses.replace(
            batch,
            input_ids=tokens.flatten(),
            positions=(batch.positions[:, None] + steps).flatten(),
            # Output is text, so each of the three positions advances by one.
            mrope_positions=None if three is None else (three[..., None] + steps).flatten(1),
            out_cache_loc=out_cache_loc.flatten(),
            seq_lens=batch.seq_lens + depth - 1,
            seq_lens_cpu=batch.seq_lens_cpu + depth - 1,
            extend_lens_cpu=torch.full((count,), depth, device="cpu"),
        )


def _cache_for(draft: Transformer, cache: KVCache) -> KVCache:
    """Make a cache for the draft with the model's rows; each row always has slots for a whole context."""
    config, weight = draft.config, draft.embedding.weight
    own = KVCache(
        config.num_layers,
        config.num_kv_heads,
        config.head_dim,
        max_requests=cache.max_requests,
        max_context=cache.max_context,
        max_tokens=cache.max_requests * cache.max_context,
        dtype=weight.dtype,
        device=weight.device,
    )
    slots = torch.arange(own.max_tokens, device=weight.device) + PADDING_SLOT + 1
    own.table.copy_(slots.view_as(own.table))
    return own


def _requests_of(batch: ForwardBatch, which: Sequence[int]) -> ForwardBatch:
    """A decode of these requests alone."""
    if len(which) == batch.batch_size:
        return batch
    some = _select(batch, torch.tensor(which, device="cpu"))
    info = batch.sampling_info
    if info is not None:
        identities: dict[str, Any] = {"rids_int": some.rids_int, "bootstrap_room_ids_int": some.bootstrap_room_ids_int}
        info = dataclasses.replace(_select(info, torch.tensor(which, device="cpu")), **identities)
    return dataclasses.replace(some, request_ids=tuple(batch.request_ids[i] for i in which), sampling_info=info)


def _select(holder: T, which: Tensor) -> T:
    tensors = {name: value for name, value in vars(holder).items() if isinstance(value, Tensor)}
    # The last axis is that of requests in a decode, also where there are three positions a token.
    chosen: dict[str, Any] = {name: value.index_select(-1, which.to(value.device)) for name, value in tensors.items()}
    return dataclasses.replace(holder, **chosen)


class VerifyAttention:
    """Attention for several tokens of each request at once; only the first of them is sure to be kept.

    Each request has ``depth`` tokens in the batch: the one that the engine decodes, and guesses of what follows.

    The first token's key and value go into the cache. The guesses' do not, for they may be wrong, and a request need
    not have slots for them: they are kept here until :meth:`commit`. All of what the layers read is in static buffers.
    """

    def __init__(self, cache: KVCache, sliding_window: int | None, depth: int) -> None:
        self.cache, self.sliding_window, self.depth = cache, sliding_window, depth
        requests, width, device = cache.max_requests, cache.max_context, cache.table.device
        layers, _, *per_token = cache.keys.shape
        with torch.inference_mode(False):
            # One row more than the table has: padding writes there.
            shape = (layers, requests + 1, depth, *per_token)
            self._keys = torch.zeros(shape, dtype=cache.keys.dtype, device=device)
            self._values = torch.zeros(shape, dtype=cache.values.dtype, device=device)
            self._rows = torch.full((requests,), requests, dtype=torch.int64, device=device)
            self._slots = torch.full((requests, width), PADDING_SLOT, dtype=torch.int64, device=device)
            self._visible = torch.zeros(requests, depth, width + depth, dtype=torch.bool, device=device)
            self._steps, self._columns = torch.arange(depth, device=device), torch.arange(width, device=device)
        self._out_cache_loc = torch.empty(0, dtype=torch.int64, device=device)

    def prepare_metadata(self, batch: ForwardBatch) -> None:
        """Compute which token attends to which: earlier places in the cache, and the others in the batch itself."""
        count = batch.batch_size
        self._out_cache_loc = batch.out_cache_loc[:: self.depth]
        is_padding = self._out_cache_loc == PADDING_SLOT
        self._rows[:count] = torch.where(is_padding, self.cache.max_requests, batch.req_pool_indices)
        self._slots[:count] = self.cache.table[batch.req_pool_indices]
        cached = (batch.seq_lens - self.depth)[:, None]
        age_in_cache = (cached + self._steps)[..., None] - self._columns
        age_in_batch = self._steps[:, None] - self._steps
        width = self._columns.shape[0]
        longest = width + self.depth if self.sliding_window is None else self.sliding_window
        self._visible[:count, :, :width] = (self._columns < cached)[:, None] & (age_in_cache < longest)
        self._visible[:count, :, width:] = (age_in_batch >= 0) & (age_in_batch < longest)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        queries, keys, values = (each.reshape(-1, self.depth, *each.shape[2:]) for each in (q, k, v))
        rows, slots = self._rows[: len(queries)], self._slots[: len(queries)]
        self._keys[layer].index_copy_(0, rows, keys)
        self._values[layer].index_copy_(0, rows, values)
        self.cache.write(layer, self._out_cache_loc, keys[:, 0], values[:, 0])
        keys = torch.cat((self.cache.keys[layer][slots], keys), dim=1)
        values = torch.cat((self.cache.values[layer][slots], values), dim=1)
        return masked_attention(queries, keys, values, self._visible[: len(queries)]).reshape(q.shape)

    def commit(self, batch: ForwardBatch, depths: Tensor) -> None:
        """Write keys and values of `batch`'s tokens into the cache: each request's guess of `depths` ``[B]``."""
        rows = batch.req_pool_indices
        self.cache.keys[:, batch.out_cache_loc] = self._keys[:, rows, depths]
        self.cache.values[:, batch.out_cache_loc] = self._values[:, rows, depths]
