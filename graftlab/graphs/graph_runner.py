"""What all runners of captured graphs have in common: one way of a batch into static buffers, and through a graph."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from graftlab.engine.attention import AttentionBackend
from graftlab.engine.batch import ForwardBatch, Mode
from graftlab.engine.kv_cache import KVCache
from graftlab.engine.runner import Runner
from graftlab.errors import GraphError
from graftlab.graphs.capture import Graph, capturer_for
from graftlab.graphs.registry import CudaGraphBufferRegistry
from graftlab.models import Transformer
from graftlab.models.transformer import Attend
from graftlab.taps import tags


class GraphRunner:
    """A model, the static buffers its graphs read, and the graphs, each captured when it is first needed.

    ``captures`` and ``replays`` count both. Not for several threads at once.
    """

    def __init__(
        self, model: Transformer, cache: KVCache, registry: CudaGraphBufferRegistry, attention: AttentionBackend
    ) -> None:
        self.model, self.cache, self.registry, self.attention = model, cache, registry, attention
        self.captures = self.replays = 0
        self._capturer = capturer_for(cache.table.device)
        self._graphs: dict[Hashable, Graph] = {}
        self._row_ids: tuple[Tensor, ...] = ()

    @property
    def row_ids(self) -> tuple[Tensor, Tensor] | None:
        """Of the latest batch, as the graph itself read them: ``rids_int`` and ``bootstrap_room_ids_int``, ``[B]`` with
        the padding. None where it had none, or was not replayed. The next replay writes over them."""
        return (self._row_ids[0], self._row_ids[1]) if self._row_ids else None

    @torch.no_grad()
    def _replay(self, batch: ForwardBatch, padded_bs: int, padded_num_tokens: int) -> Tensor:
        """Logits ``[padded_num_tokens, V]`` after every token, the batch's own first, in the graph's memory."""
        padded = {"padded_bs": padded_bs, "padded_num_tokens": padded_num_tokens}
        self.registry.fill_from(batch, raw_bs=batch.batch_size, raw_num_tokens=batch.num_tokens, **padded)
        view = self.registry.extract_buffer(forward_batch_template=batch, **padded)
        # A graph that was captured without the identities cannot have them, nor the other way round.
        key = (view.mode, padded_bs, padded_num_tokens, len(_identities(view)), self._variant())
        graph = self._graphs.get(key)
        if graph is None:
            self.attention.prepare_metadata(view)
            graph = self._graphs[key] = self._capturer.capture(self._forward_of(view))
            self.captures += 1
        # Before every replay: what the layers share is this batch's, and that of the capture is another's by now.
        self.attention.prepare_metadata(view)
        logits, *row_ids = graph.replay()
        self.replays += 1
        self._row_ids = tuple(row_ids)
        return logits

    def _pass_on(self, runner: Runner, batch: ForwardBatch) -> Tensor:
        """To another runner, of whose batch no identity was read here."""
        self._row_ids = ()
        return runner.forward(batch)

    def _forward_of(self, view: ForwardBatch) -> Callable[[], tuple[Tensor, ...]]:
        """What is captured. It has the static buffers, and nothing else of the batch of which `view` is made."""
        mode, input_ids, positions = view.mode, view.input_ids[:, None], view.positions[:, None]
        identities, attend = _identities(view), self._attend()

        def forward() -> tuple[Tensor, ...]:
            logits = self._call_model(mode, input_ids, positions, attend)
            return (logits.squeeze(1), *(each.clone() for each in identities))

        return forward

    def _call_model(self, mode: Mode, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        with tags(phase=mode):
            logits: Tensor = self.model(input_ids, positions, attend)
        return logits

    def _variant(self) -> Hashable:
        """What else a graph is captured for."""
        return None

    def _attend(self) -> Attend:
        """The attention, inside the graph unless a runner takes it out."""
        return self.attention.attend


def _identities(batch: ForwardBatch) -> tuple[Tensor, ...]:
    """Both, or nothing."""
    rids, rooms = batch.rids_int, batch.bootstrap_room_ids_int
    return () if rids is None or rooms is None else (rids, rooms)


def doubling(largest: int, first: int = 1) -> list[int]:
    """Sizes to pad to, so that less than half of each is padding: `first`, twice that, and so on to `largest`."""
    sizes = []
    while first < largest:
        sizes.append(first)
        first *= 2
    return [*sizes, largest]


def checked_sizes(name: str, sizes: Sequence[int], largest: int) -> list[int]:
    """Sorted, each once. Raises :class:`GraphError` for none, for one below 1 and for one beyond `largest`."""
    if not sizes or min(sizes) < 1 or max(sizes) > largest:
        raise GraphError(f"{name}={list(sizes)}; allowed are sizes from 1 to {largest}, for which there is room")
    return sorted(set(sizes))


def padded_size(sizes: Sequence[int], size: int) -> int | None:
    """The least of the sorted `sizes` that has room for `size`; None where none has."""
    place = bisect.bisect_left(sizes, size)
    return sizes[place] if place < len(sizes) else None
