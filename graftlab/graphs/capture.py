"""Capture and replay: on CUDA a graph of kernels, elsewhere the function itself, run again.

A replay reads the current content of static buffers, and nothing else. If a runner forgets to write one, it keeps the
values of the last batch on every device, so such a fault shows without a GPU too.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

Outputs = tuple[Tensor, ...]

# As many as in torch's notes on CUDA graphs: during these runs, libraries choose kernels and allocate workspaces.
_WARM_UPS = 3


class Graph(Protocol):
    """A captured function."""

    def replay(self) -> Outputs:
        """Replay it with the current content of the buffers; the outputs are always in the same memory."""


class Capturer(Protocol):
    """Captures for one runner, which does nothing else during a capture."""

    def capture(self, function: Callable[[], Outputs]) -> Graph:
        """Capture `function` as a graph. This runs it, perhaps several times, so it must be safe to repeat."""

    def on_host(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A function that breaks the graph in which it is called: it runs on the host at each replay.

        It always gets the tensors of its first call, and its result must always have the same shape, dtype and device.
        """


def capturer_for(device: torch.device) -> Capturer:
    """The capturer for a device."""
    return CudaCapturer(device) if device.type == "cuda" else CpuCapturer()


# ---- without a GPU --------------------------------------------------------------------------------------------------


class CpuCapturer:
    """Captures by remembering the function."""

    def capture(self, function: Callable[[], Outputs]) -> Graph:
        return CpuGraph(function)

    def on_host(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        # All of it runs on the host here.
        return function


class CpuGraph:
    """Runs its function at each replay, and keeps the outputs in one place, as a graph of kernels does."""

    def __init__(self, function: Callable[[], Outputs]) -> None:
        self._function = function
        first = function()
        # Outside inference mode, where a tensor that was made inside it could not be written.
        with torch.inference_mode(False):
            self._outputs = tuple(output.clone() for output in first)

    def replay(self) -> Outputs:
        for output, again in zip(self._outputs, self._function(), strict=True):
            output.copy_(again)
        return self._outputs


# ---- CUDA -----------------------------------------------------------------------------------------------------------


@functools.cache
def _memory_of(device: torch.device) -> Any:
    """One pool of memory for all graphs of a device. They never run at once, so they can reuse each other's memory."""
    with torch.cuda.device(device):
        return torch.cuda.graph_pool_handle()


class CudaCapturer:
    """Captures kernels on a separate stream, after warm-up runs on it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._memory = _memory_of(device)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._recording: _Recording | None = None

    def capture(self, function: Callable[[], Outputs]) -> Graph:
        with torch.cuda.device(self.device):
            outside = torch.cuda.current_stream()
            self._stream.wait_stream(outside)
            with torch.cuda.stream(self._stream):
                for _ in range(_WARM_UPS):
                    function()
                with _Recording(self._memory, self._stream) as recording:
                    self._recording = recording
                    try:
                        outputs = function()
                    finally:
                        self._recording = None
            outside.wait_stream(self._stream)
        return CudaGraphs(recording.steps, outputs)

    def on_host(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def breaking(*args: object) -> Tensor:
            recording = self._recording
            return function(*args) if recording is None else recording.call(function, args)

        return breaking


class _Recording:
    """A capture in progress: complete graphs, and the host's parts between them.

    A capture executes nothing, so each graph is replayed once when it is complete, because the host's part after it
    needs its values.
    """

    def __init__(self, memory: Any, stream: torch.cuda.Stream) -> None:
        self.steps: list[Callable[[], object]] = []
        self._memory, self._stream = memory, stream
        self._open = contextlib.ExitStack()

    def __enter__(self) -> _Recording:
        self._begin()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def _begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        # Only this thread's calls may invalidate the capture: other threads may use the same device meanwhile.
        self._open.enter_context(
            torch.cuda.graph(graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local")
        )
        self.steps.append(graph.replay)

    def call(self, function: Callable[..., Tensor], args: tuple[object, ...]) -> Tensor:
        self._open.close()
        self.steps[-1]()
        # The next graph reads this memory at every replay. `again` holds it and `args`, so that neither is reused.
        result = function(*args)

        def again() -> None:
            latest = function(*args)
            # Copying an inference tensor onto itself outside inference mode raises.
            if latest is not result:
                result.copy_(latest)

        self.steps.append(again)
        self._begin()
        return result


class CudaGraphs:
    """Graphs of kernels in their order, with the host's parts between them."""

    def __init__(self, steps: list[Callable[[], object]], outputs: Outputs) -> None:
        self._steps, self._outputs = steps, outputs

    def replay(self) -> Outputs:
        for step in self._steps:
            step()
        return self._outputs
