"""Graphs that break in the middle of a forward pass, so that host code can read or change values there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from torch import Tensor, nn

from graftlab.engine.attention import AttentionBackend
from graftlab.engine.batch import ForwardBatch, Mode
from graftlab.engine.graph_attention import GraphAttention
from graftlab.engine.kv_cache import KVCache
from graftlab.engine.runners.graph import OnHost
from graftlab.engine.runners.prefill import TokenGraphRunner, token_registry, with_extend_lens
from graftlab.errors import GraphError
from graftlab.graphs.registry import CudaGraphBufferRegistry
from graftlab.models import Transformer
from graftlab.models.transformer import Attend

Break = Callable[[Tensor], Tensor]
"""What the host does between two graphs: it is given a module's output, and returns what takes its place.

Rows past the batch's own, and what an earlier run left in memory, are the graph's: look at them, but keep a copy.
"""


class BreakableGraphRunner(TokenGraphRunner):
    """A runner of prefills and decodes in one graph each, which breaks at grafted taps, and after chosen modules.

    Where the plan grafts a tap into this side, the graph breaks, so that transforms run in the middle of a replay. It
    needs one capture for each choice of taps, and one replay a batch for any number of grafted taps. A runner with
    switches needs no capture, but one more replay for each grafted tap.

    ``breaks`` has the function that runs after each of these modules, by the names of ``model.named_modules()``. It may
    be set at any time, and applies from the next batch on. Other functions at the same modules run between the existing
    graphs; a new choice of modules is captured, once. The other arguments are those of `TokenGraphRunner`. A
    ``registry`` is usually that of a `PrefillGraphRunner`. ``attention`` has to read from static memory on CUDA, as
    `GraphAttention` does.
    """

    grafts = "breaks"

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        *,
        breaks: Mapping[str, Break] | None = None,
        token_sizes: Sequence[int] | None = None,
        attention: AttentionBackend | None = None,
        registry: CudaGraphBufferRegistry | None = None,
        share_pool: bool = False,
    ) -> None:
        registry = token_registry(cache, token_sizes, share_pool) if registry is None else with_extend_lens(registry)
        attention = attention or GraphAttention(cache, model.config.sliding_window, registry.max_num_tokens)
        super().__init__(model, cache, attention, registry, token_sizes)
        self.breaks = breaks or {}

    @property
    def breaks(self) -> Mapping[str, Break]:
        """What runs after which module. Setting it raises :class:`GraphError` for a module that does not exist."""
        return self._breaks

    @breaks.setter
    def breaks(self, breaks: Mapping[str, Break]) -> None:
        known = dict(self.model.named_modules())
        if unknown := [name for name in breaks if name not in known]:
            raise GraphError(
                f"breaks at {unknown}, which are not modules of the model; the modules are {sorted(known)[1:]}"
            )
        self._breaks = dict(breaks)

    def forward(self, batch: ForwardBatch) -> Tensor:
        return self._replay_tokens(batch)

    def _variant(self) -> frozenset[str]:
        return frozenset(self._breaks)

    def _call_model(self, mode: Mode, input_ids: Tensor, positions: Tensor, attend: Attend, on_host: OnHost) -> Tensor:
        # Only for this call, because another runner may share the model.
        with contextlib.ExitStack() as hooks:
            for name in self._breaks:
                broken = on_host(partial(self._break, name))
                handle = self.model.get_submodule(name).register_forward_hook(partial(_replace_output, broken))
                hooks.callback(handle.remove)
            return super()._call_model(mode, input_ids, positions, attend, on_host)

    def _break(self, name: str, value: Tensor) -> Tensor:
        # Looked up by name at each replay, so that a function may be exchanged without a capture.
        result = self._breaks[name](value)
        if (result.shape, result.dtype, result.device) != (value.shape, value.dtype, value.device):
            raise GraphError(
                f"the break after {name!r} returned {result.dtype} of shape {list(result.shape)} on {result.device}; "
                f"it takes the place of {value.dtype} of shape {list(value.shape)} on {value.device} in a graph"
            )
        return result


def _replace_output(broken: Break, module: nn.Module, args: object, output: Tensor) -> Tensor:
    return broken(output)
