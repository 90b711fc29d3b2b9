"""The base of all runners of captured graphs: how a batch gets into static buffers, and through a graph."""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from graftlab.engine.attention import AttentionBackend
from graftlab.engine.batch import ForwardBatch, Mode
from graftlab.engine.encoder import encoder_attention
from graftlab.engine.kv_cache import KVCache
from graftlab.engine.model_inputs import call_model, positions_of
from graftlab.engine.runners.eager import EagerRunner, Runner
from graftlab.errors import GraphError
from graftlab.grafting.active import grafter
from graftlab.graphs.capture import capturer_for
from graftlab.graphs.captured_function import CapturedFunction
from graftlab.graphs.registry import CudaGraphBufferRegistry
from graftlab.graphs.slots import FillContext
from graftlab.graphs.tap_sites import Grafts, WantedTaps
from graftlab.models import Transformer
from graftlab.models.transformer import Attend
from graftlab.requests.identity import IDENTITIES
from graftlab.taps.calls import tags
from graftlab.taps.extras import carrying
from graftlab.taps.watch import latest_change

OnHost = Callable[[Callable[..., Tensor]], Callable[..., Tensor]]
"""Makes a function that the host runs in the middle of a captured one; see `CapturedFunction.on_host`."""

# Graphs of one size with different taps or breaks: variants that a user tries and returns to.
_MOST_VARIANTS = 8


class GraphRunner:
    """A model, the static buffers its graphs read, and the graphs, each captured when it is first needed.

    Taps inside show the values of each replay, without the rows that are padding, as :mod:`captured_function` says;
    ``grafts`` says how a graft gets in. ``captures`` and ``replays`` count both. Not for several threads at once.

    With ``eager``, which may be set at any time, static buffers are still filled, but the model is called on the batch
    itself. A fault that disappears then is due to the padding or the capture.
    """

    grafts: ClassVar[Grafts] = "switches"

    def __init__(
        self, model: Transformer, cache: KVCache, registry: CudaGraphBufferRegistry, attention: AttentionBackend
    ) -> None:
        self.model, self.cache, self.registry, self.attention = model, cache, registry, attention
        self.encoder = encoder_attention(model, cache, registry.max_num_tokens)
        self.captures = self.replays = 0
        self.eager = False
        self._hooks = latest_change()
        self._capturer = capturer_for(cache.table.device)
        self._wanted = WantedTaps(self.grafts)
        self._captured: defaultdict[Hashable, list[CapturedFunction]] = defaultdict(list)
        self._row_ids: tuple[Tensor, ...] = ()

    @property
    def row_ids(self) -> tuple[Tensor, Tensor] | None:
        """The latest batch's, as the graph read them: ``rids_int`` and ``bootstrap_room_ids_int``, ``[B]`` with
        the padding. None where it had none, or was not replayed. The next replay writes over them."""
        return (self._row_ids[0], self._row_ids[1]) if self._row_ids else None

    def status(self) -> dict[str, Any]:
        """The numbers of captures and replays, and the taps in the graphs that were replayed last, one of each size.

        ``taps_captured`` and ``taps_broken_at`` have names, and how many taps of each there are.
        """
        latest = [variants[0] for variants in self._captured.values() if variants]
        most = max(latest, key=lambda function: len(function.sites), default=None)
        sites = most.sites if most else []
        return {
            "runner": type(self).__name__,
            "eager": self.eager,
            "captures": self.captures,
            "replays": self.replays,
            "graphs": sum(len(variants) for variants in self._captured.values()),
            "grafts": self.grafts,
            "taps": len(sites),
            "taps_captured": dict(Counter(site.name for site in sites if site.slot is not None)),
            "taps_broken_at": dict(Counter(site.name for site in sites if site.breaks)),
        }

    @torch.no_grad()
    def _replay(self, batch: ForwardBatch, padded_bs: int, padded_num_tokens: int) -> Tensor:
        """Logits after every token, ``[padded_num_tokens, V]`` in the graph's memory, the batch's own first."""
        for name in IDENTITIES:
            if getattr(batch, name) is not None and self.registry.has_slot(name):
                self.registry.enable_slot(name)
        padded = {"padded_bs": padded_bs, "padded_num_tokens": padded_num_tokens}
        with tags(phase=batch.mode):
            self.registry.fill_from(batch, raw_bs=batch.batch_size, raw_num_tokens=batch.num_tokens, **padded)
        if self.eager:
            self._row_ids = ()
            return EagerRunner(self.model, self.cache, self.attention).forward_tokens(batch)
        view = self.registry.extract_buffer(forward_batch_template=batch, **padded)
        function = self._function_for(view, **padded)
        # Before every replay: the metadata that layers share must be this batch's, not that of the capture.
        prepare = partial(self._prepare_metadata, view)
        sizes = FillContext(batch.batch_size, padded_bs, batch.num_tokens, padded_num_tokens)
        (logits, *row_ids), replays = function.replay(prepare, sizes)
        self.replays += replays
        self._row_ids = tuple(row_ids)
        return logits

    def _function_for(self, view: ForwardBatch, padded_bs: int, padded_num_tokens: int) -> CapturedFunction:
        # A graph captured without identities cannot serve a batch with them, nor the reverse; the same holds for taps.
        key = (view.mode, padded_bs, padded_num_tokens, len(_identities(view)), self._variant(), grafter() is None)
        if self._hooks != latest_change():
            # A graph keeps the hooks that the model had when it was captured.
            self._hooks = latest_change()
            self._release_all([function for functions in self._captured.values() for function in functions])
            self._captured.clear()
        variants = self._captured[key]
        for function in variants:
            if function.suits():
                # The most recently used first, for `status`; the least recently used are dropped first.
                variants.remove(function)
                variants.insert(0, function)
                return function
        padded = FillContext(padded_bs, padded_bs, padded_num_tokens, padded_num_tokens)
        function = CapturedFunction(padded, self._wanted, self._capturer)
        self._prepare_metadata(view)
        function.capture(self._forward_of(view, function.on_host))
        self.captures += 1
        # A graph with fewer taps that is otherwise the same will never be used again.
        others = [other for other in variants if other.broken_at != function.broken_at]
        self._captured[key] = kept = [function, *others][:_MOST_VARIANTS]
        self._release_all([other for other in variants if other not in kept])
        return function

    def _prepare_metadata(self, view: ForwardBatch) -> None:
        self.attention.prepare_metadata(view)
        if self.encoder is not None:
            self.encoder.prepare_metadata(view)

    def _release_all(self, functions: Sequence[CapturedFunction]) -> None:
        for function in functions:
            function.release()

    def _pass_on(self, runner: Runner, batch: ForwardBatch) -> Tensor:
        """Pass a batch to another runner, without reading its identities here."""
        self._row_ids = ()
        return runner.forward(batch)

    def _forward_of(self, view: ForwardBatch, on_host: OnHost) -> Callable[[], tuple[Tensor, ...]]:
        """Return the function to capture. It uses the static buffers, and nothing else of the batch behind `view`."""
        mode, input_ids, positions = view.mode, view.input_ids[:, None], positions_of(self.model, view)
        identities, extras, attend = _identities(view), view.extras, self._attend(on_host)

        def forward() -> tuple[Tensor, ...]:
            with carrying(extras):
                logits = self._call_model(mode, input_ids, positions, attend, on_host)
            return (logits.squeeze(1), *(each.clone() for each in identities))

        return forward

    def _call_model(self, mode: Mode, input_ids: Tensor, positions: Tensor, attend: Attend, on_host: OnHost) -> Tensor:
        with tags(phase=mode):
            return call_model(self.model, input_ids, positions, attend, self.encoder)

    def _variant(self) -> Hashable:
        """A further key of a graph, beside its sizes."""
        return None

    def _attend(self, on_host: OnHost) -> Attend:
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
    """The sizes, sorted and without repeats. Raises :class:`GraphError` for none, and for one not in 1 to `largest`."""
    if not sizes or min(sizes) < 1 or max(sizes) > largest:
        raise GraphError(f"{name}={list(sizes)}; sizes must be from 1 to {largest}, the largest that fits")
    return sorted(set(sizes))


def padded_size(sizes: Sequence[int], size: int) -> int | None:
    """The smallest of the sorted `sizes` that has room for `size`; None if none has."""
    place = bisect.bisect_left(sizes, size)
    return sizes[place] if place < len(sizes) else None
