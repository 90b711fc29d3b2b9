"""Whether a rank can use NCCL; what it does with it needs GPUs, and is in the contract's tests of processes."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from graftlab.exchange import nccl
from graftlab.exchange.nccl import NoNcclError, find_nccl

GPU = torch.device("cuda", 0)


class Version:
    def __init__(self, *release: int) -> None:
        self.release = release

    def __str__(self) -> str:
        return ".".join(map(str, self.release))


@pytest.fixture
def bindings(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules that nccl4py and cuda-bindings would bring, with the library of a test's choice."""
    core: Any = ModuleType("nccl.core")
    core.get_version = lambda: SimpleNamespace(libnccl=core.library)
    core.library = SimpleNamespace(version=Version(2, 28, 9))
    packages: dict[str, Any] = {name: ModuleType(name) for name in ("nccl", "cuda", "cuda.bindings")}
    packages["nccl"].core = core
    packages["cuda.bindings"].runtime = ModuleType("cuda.bindings.runtime")
    for name, module in {**packages, "nccl.core": core}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    return core


def test_a_rank_says_which_nccl_it_has(bindings: Any) -> None:
    assert find_nccl(GPU).name == "nccl 2.28.9"


def test_a_rank_on_the_cpu_says_so(bindings: Any) -> None:
    with pytest.raises(NoNcclError, match=r"had not used a GPU when it joined; call torch\.cuda\.set_device"):
        find_nccl(torch.device("cpu"))


def test_where_all_kernels_wait_in_one_line_nccl_is_refused(bindings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with pytest.raises(NoNcclError, match="CUDA_DEVICE_MAX_CONNECTIONS is 1"):
        find_nccl(GPU)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    assert find_nccl(GPU).name


def test_without_its_bindings_a_rank_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nccl", None)
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    with pytest.raises(NoNcclError, match=r"nccl4py cannot be used \(.*pip install 'graftlab\[nccl\]'"):
        find_nccl(GPU)


@pytest.mark.parametrize(
    ("library", "why"),
    [(None, "finds no libnccl"), (SimpleNamespace(version=Version(2, 21, 5)), "is 2.21.5; it has to be 2.23 or newer")],
)
def test_a_library_that_is_missing_or_too_old_is_named(library: Any, why: str, bindings: Any) -> None:
    bindings.library = library
    with pytest.raises(NoNcclError, match=why):
        find_nccl(GPU)


class Result:
    def __init__(self, name: str) -> None:
        self.name = name


def test_a_transfer_is_done_when_nccl_has_issued_it_and_the_gpu_is_past_it(
    bindings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is recorded before NCCL is ready again would lie before its kernel."""
    happened = []
    state = Result("InProgress")
    communicator = SimpleNamespace(
        get_async_error=lambda: state,
        get_last_error=lambda: "the cable was cut",
        send=lambda source, peer, stream: happened.append(("send", peer, stream)),
    )

    class Event:
        passed = False

        def record(self, stream: Any) -> None:
            happened.append(("record", stream.cuda_stream, 0))

        def query(self) -> bool:
            return self.passed

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: SimpleNamespace(cuda_stream=77))
    bindings.NCCLConfig = lambda **options: happened.append(("config", options["blocking"], 0))
    bindings.UniqueId = SimpleNamespace(from_bytes=bytes)
    bindings.Communicator = SimpleNamespace(init=lambda count, end, unique_id, config: communicator)
    bindings.get_error_string = lambda result: result.name
    joined = find_nccl(GPU).join(0, b"id")
    assert not joined.is_ready()
    state.name = "Success"
    assert joined.is_ready()
    state.name = "InProgress"
    transfer = joined.send(torch.zeros(4))
    assert not transfer.is_done()
    state.name = "Success"
    assert not transfer.is_done()
    Event.passed = True
    assert transfer.is_done()
    assert happened == [("config", False, 0), ("send", 1, 77), ("record", 77, 0)]
    state.name = "RemoteError"
    with pytest.raises(RuntimeError, match=r"NCCL says RemoteError \(the cable was cut\)"):
        transfer.is_done()


def test_a_tensor_that_is_being_captured_or_is_elsewhere_is_not_taken(
    bindings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = nccl.Nccl(bindings, None, torch.device("cpu"), "2.28.9")
    captures = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures[0])
    assert gpu.takes(torch.zeros(1))
    assert not gpu.takes(torch.zeros(1, device="meta"))
    captures[0] = True
    assert not gpu.takes(torch.zeros(1))
