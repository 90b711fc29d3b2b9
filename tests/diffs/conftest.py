"""The ways to measure: the kernel at each level that this processor has, and in small blocks, and torch operations."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from kit.build_hook import ROOT, hook

from graftlab.diffs import fallback, kernel

SMALL = ("PIECE=64", "BLOCK=128", "STRIPE=256")


def levels() -> list[str]:
    """All that this processor has, the highest first."""
    highest = kernel.processor_level()
    return [*kernel.X86_LEVELS][[*kernel.X86_LEVELS].index(highest) :] if highest in kernel.X86_LEVELS else [highest]


@pytest.fixture(scope="session")
def small_library(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """A kernel whose blocks are so small that tensors of a few elements have several."""
    compiler = hook.machine_compiler() or hook.zig_compiler()
    if compiler is None:
        pytest.skip("no C compiler was found, so there is no kernel of small blocks")
    made = f"{hook.kernel_hash(ROOT)} for {compiler.tag}"
    folder = tmp_path_factory.getbasetemp()
    if worker_id != "master":
        folder = folder.parent  # shared by all workers of this run; the first one compiles it
    library: Path = folder / "small-blocks.so"
    with (folder / "small-blocks.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            hook.compile_kernel(kernel.SOURCES, library, compiler, made, SMALL)
    return library


@pytest.fixture(params=["fallback", *levels(), "small blocks"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Let tensors be measured in this way."""
    if request.param == "fallback":
        compiled = None
        monkeypatch.setattr(fallback, "CPU_BLOCK", request.module.FALLBACK_BLOCK)
    elif request.param == "small blocks":
        compiled = kernel.open_library(request.getfixturevalue("small_library"))
        monkeypatch.setattr(kernel, "THREADS_FROM", 0)
        monkeypatch.setattr(kernel, "LETS_GO_FROM", 0)
    elif not kernel.LIBRARY.exists():
        pytest.skip(kernel.description())
    else:
        compiled = kernel.open_library(kernel.LIBRARY, request.param)
    monkeypatch.setattr(kernel, "load", lambda: compiled)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield request.param
    torch.set_num_threads(threads)
