"""NCCL between the GPUs of two hosts, by NVIDIA's own bindings (nccl4py); implements :mod:`.wire_gpu`.

torch's NCCL process group is not used: it ends the process when a peer dies, and meets at a store that anybody may
reach. Here each communicator has two ranks and never makes a call of the host wait; what does not come is aborted.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from graftlab.base.tensor_bytes import copyable

# ncclCommInitRankScalable, which the bindings call, is there since this one.
_OLDEST = (2, 23)
# Thread blocks that a transfer may take from the job's own kernels.
_MOST_CTAS = 4


class NoNcclError(Exception):
    """Why this rank cannot use NCCL."""


def find_nccl(device: torch.device) -> Nccl:
    """NCCL for this device of the rank's. Raises :class:`NoNcclError`."""
    if device.type != "cuda":
        raise NoNcclError(
            "this process had not used a GPU when it joined; call torch.cuda.set_device before, where it has one"
        )
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        raise NoNcclError(
            "CUDA_DEVICE_MAX_CONNECTIONS is 1, which makes all kernels of this process wait in one line: a transfer "
            "that waits for the other host would hold up the job's own collectives, and they it, for good"
        )
    try:
        from cuda.bindings import runtime
        from nccl import core

        found = core.get_version().libnccl
    except Exception as error:
        # Modules of two releases of CUDA that do not fit together may raise anything.
        raise NoNcclError(
            f"nccl4py cannot be used ({type(error).__name__}: {error}); pip install 'graftlab[nccl]', and "
            f"cuda-bindings of the CUDA release that torch was built for"
        ) from error
    if found is None:
        raise NoNcclError("nccl4py finds no libnccl.so.2; CUDA builds of torch bring one")
    if found.version.release < _OLDEST:
        raise NoNcclError(f"libnccl is {found.version}; it has to be {'.'.join(map(str, _OLDEST))} or newer")
    return Nccl(core, runtime, device, str(found.version))


class Nccl:
    """Implements :class:`.wire_gpu.WireGpu`."""

    def __init__(self, core: Any, runtime: Any, device: torch.device, version: str) -> None:
        self.name = f"nccl {version}"
        self._core = core
        self._runtime = runtime
        self._device = device

    def begin_thread(self) -> None:
        torch.cuda.set_device(self._device)
        # Else a graph that another thread captures would forbid this one most calls, and be spoilt by them.
        modes = self._runtime.cudaStreamCaptureMode
        (error, *_) = self._runtime.cudaThreadExchangeStreamCaptureMode(modes.cudaStreamCaptureModeRelaxed)
        if error != self._runtime.cudaError_t.cudaSuccess:
            raise RuntimeError(f"the thread's capture mode cannot be set: {error}")

    def takes(self, tensor: torch.Tensor) -> bool:
        # What is captured into a graph happens later, so there is nothing to copy yet.
        return tensor.device == self._device and not torch.cuda.is_current_stream_capturing()

    def copy(self, tensor: torch.Tensor, nbytes: int) -> _Copy:
        # Outlives the caller's inference mode, outside of which what was made in it cannot be written.
        with torch.inference_mode(False), torch.no_grad():
            made = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            source = copyable(tensor)
            made.view(source.dtype).view(source.shape).copy_(source)
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return _Copy(made, event)

    def hand_over(self, received: torch.Tensor) -> None:
        # It has come; what is left to say is that its memory is not free before this stream has read it.
        received.record_stream(torch.cuda.current_stream(self._device))

    def new_id(self) -> bytes:
        return bytes(self._core.get_unique_id())

    def join(self, end: int, unique_id: bytes) -> _Communicator:
        return _Communicator(self, self._core, self._device, end, unique_id)


class _Copy:
    def __init__(self, made: torch.Tensor, event: Any) -> None:
        self.bytes = made
        self._event = event

    def is_made(self) -> bool:
        return bool(self._event.query())


class _Communicator:
    """Implements :class:`.wire_gpu.Communicator`, on a stream of its own."""

    def __init__(self, gpu: Nccl, core: Any, device: torch.device, end: int, unique_id: bytes) -> None:
        self._gpu = gpu
        self._core = core
        self._other = 1 - end
        # Of high priority, so that what both ends have begun is over soon.
        self.stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._device = device
        config = core.NCCLConfig(blocking=False, max_ctas=_MOST_CTAS)
        self._communicator = core.Communicator.init(2, end, core.UniqueId.from_bytes(unique_id), config)

    def is_ready(self) -> bool:
        result = self._communicator.get_async_error()
        if result.name == "InProgress":
            return False
        if result.name != "Success":
            last = self._communicator.get_last_error()
            raise RuntimeError(f"NCCL says {self._core.get_error_string(result)} ({last or result.name})")
        return True

    def send(self, source: torch.Tensor) -> _Transfer:
        # Not before the copy was made, which its sender knows: the streams need not wait for each other.
        self._communicator.send(source, self._other, stream=self.stream.cuda_stream)
        return _Transfer(self, source)

    def receive(self, nbytes: int) -> _Transfer:
        # Of this stream's memory: any other could still be in use on its own.
        with torch.inference_mode(False), torch.cuda.stream(self.stream):
            room = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        self._communicator.recv(room, self._other, stream=self.stream.cuda_stream)
        return _Transfer(self, room)

    def abort(self) -> None:
        self._gpu.begin_thread()
        self._communicator.abort()
        self.stream.synchronize()


class _Transfer:
    """Implements :class:`.wire_gpu.Transfer`."""

    def __init__(self, communicator: _Communicator, data: torch.Tensor) -> None:
        self.bytes = data
        self._communicator = communicator
        self._event: Any = None

    def is_done(self) -> bool:
        # An error that NCCL notices later is told here, too.
        if not self._communicator.is_ready():
            return False
        if self._event is None:
            # Only now: until NCCL is ready again it may still be putting its kernel on the stream.
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(self._communicator.stream)
        return bool(self._event.query())
