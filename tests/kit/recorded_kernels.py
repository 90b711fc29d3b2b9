"""Stand-ins for CUDA graphs on the CPU: what is captured are the kernels, and no Python runs when they are replayed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from graftlab.engine.runners import graph
from graftlab.graphs import capture

# They make the host wait for a number, which no capture can.
_READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.equal.default}


class Tape(TorchDispatchMode):
    """Every kernel that ran while it was open, with the memory it read and wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in _READS, f"{func} inside a capture"
        out = func(*args, **(kwargs or {}))
        aliases = [returned.alias_info for returned in func._schema.returns]
        # A view is no kernel: it stays where it is.
        if not any(alias is not None and not alias.is_write for alias in aliases):
            self.calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            for static, fresh in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(fresh, torch.ScriptObject):
                    # A collective's handle. On a GPU what comes after it waits for it on the stream.
                    dist.Work.unbox(fresh).wait()
                elif static is not fresh:
                    static.copy_(fresh)


@contextlib.contextmanager
def record(tape: Tape, **options: Any) -> Iterator[None]:
    with tape:
        yield


class Stream:
    def __init__(self, device: object = None) -> None:
        pass

    def wait_stream(self, other: Stream) -> None:
        pass


def record_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runners on the CPU capture as they do on CUDA."""
    for name, stand_in in {
        "CUDAGraph": Tape,
        "graph": record,
        "graph_pool_handle": lambda: (0, 0),
        "Stream": Stream,
        "current_stream": Stream,
        "stream": contextlib.nullcontext,
        "device": contextlib.nullcontext,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    capture._memory_of.cache_clear()
    monkeypatch.setattr(graph, "capturer_for", capture.CudaCapturer)
