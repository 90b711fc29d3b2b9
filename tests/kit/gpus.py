"""Stand-ins for CUDA over the CPU's memory, so that the exchange's way over GPUs can be tested without one."""

from __future__ import annotations

import pickle
import tempfile
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kit.mailboxes import Processes, World, a_world, key, processes


class OnGpu(torch.Tensor):
    """A tensor that says it is not on the CPU."""

    is_cpu = False  # type: ignore[assignment]


def on_gpu(value: torch.Tensor | float) -> torch.Tensor:
    return torch.as_tensor(value).as_subclass(OnGpu)


class Machine:
    """What the GPUs of all ranks of one process have in common, and what the test decides and counts."""

    def __init__(self) -> None:
        self.shared: list[Any] = []
        self.synchronized = 0
        self.reads_take_long = False
        self.reads: list[LateEvent] = []
        self.fails_at: str | None = None
        # How many bytes of pinned memory were asked for, each time.
        self.pinned: list[int] = []
        self.current_stream = "default"

    def finish_reads(self) -> None:
        """Receivers' streams come past everything that was issued on them."""
        for event in self.reads:
            event.mark.passed = True

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's bytes lie in a chunk."""
        chunks = [each for each in self.shared if isinstance(each, torch.Tensor)]
        return any(c.data_ptr() <= tensor.data_ptr() < c.data_ptr() + c.numel() for c in chunks)


class Mark:
    """One record of an event; a wait is for the latest record at its beginning."""

    def __init__(self, stream: str, passed: bool) -> None:
        self.stream = stream
        self.passed = passed


class LateEvent:
    def __init__(self, gpu: LateGpu, shared: bool) -> None:
        self.gpu = gpu
        self.shared = shared
        self.mark = Mark("", True)

    def query(self) -> bool:
        return self.mark.passed

    def synchronize(self) -> None:
        self.gpu.machine.synchronized += 1
        self.mark.passed = True


class LateGpu:
    """One rank's GPU, as late as a GPU can be: a copy is made when a receiver waits for an event behind it.

    Each of its methods raises where the machine's ``fails_at`` names it.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.chunks: list[int] = []
        self.events: list[LateEvent] = []
        self.issued: defaultdict[str, deque[Any]] = defaultdict(deque)

    def _may_fail(self, at: str) -> None:
        if self.machine.fails_at == at:
            raise RuntimeError(f"{at} is forbidden here")

    def takes(self, tensor: torch.Tensor) -> bool:
        return isinstance(tensor, OnGpu)

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        self._may_fail("allocate")
        self.chunks.append(nbytes)
        return torch.full((nbytes,), 0xEE, dtype=torch.uint8)

    def _share(self, thing: Any) -> bytes:
        self.machine.shared.append(thing)
        return pickle.dumps(len(self.machine.shared) - 1)

    def share(self, chunk: torch.Tensor) -> bytes:
        self._may_fail("share")
        return self._share(chunk)

    def open(self, shared: bytes) -> torch.Tensor:
        self._may_fail("open")
        chunk: torch.Tensor = self.machine.shared[pickle.loads(shared)]
        return chunk

    def copy(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        self._may_fail("copy")
        self.issued[self.machine.current_stream].append((source.clone(), destination))

    def new_event(self, *, shared: bool) -> LateEvent:
        event = LateEvent(self, shared)
        if shared:
            self.events.append(event)
        return event

    def share_event(self, event: Any) -> bytes:
        self._may_fail("share_event")
        return self._share(event)

    def open_event(self, shared: bytes, device: torch.device) -> LateEvent:
        self._may_fail("open_event")
        event: LateEvent = self.machine.shared[pickle.loads(shared)]
        return event

    def record(self, event: Any, device: torch.device) -> None:
        stream = self.machine.current_stream
        if event.shared:
            event.mark = Mark(stream, False)
            self.issued[stream].append(event.mark)
        else:
            event.mark = Mark(stream, not self.machine.reads_take_long)
            self.machine.reads.append(event)

    def wait(self, event: Any, device: torch.device) -> None:
        if event.gpu is not self:
            event.gpu.run_past(event.mark)
        elif event.mark.stream != self.machine.current_stream:
            self.issued[self.machine.current_stream].append(partial(self.run_past, event.mark))

    def pinned(self, nbytes: int) -> torch.Tensor:
        self._may_fail("pinned")
        self.machine.pinned.append(nbytes)
        return torch.full((nbytes,), 0xEE, dtype=torch.uint8)

    def run_past(self, mark: Mark) -> None:
        while not mark.passed:
            self._run_next(mark.stream)

    def run_all(self) -> None:
        for stream, issued in list(self.issued.items()):
            while issued:
                self._run_next(stream)

    def _run_next(self, stream: str) -> None:
        first = self.issued[stream].popleft()
        if isinstance(first, Mark):
            first.passed = True
        elif callable(first):
            first()
        else:
            source, destination = first
            destination.copy_(source)


class FileEvent:
    def __init__(self, flag: torch.Tensor) -> None:
        self.flag = flag

    def query(self) -> bool:
        return bool(self.flag.item())

    def synchronize(self) -> None:
        raise AssertionError("nothing is ever late here")


class FileGpu:
    """One rank's GPU whose memory is files in a folder, for ranks that are processes. It does everything at once."""

    def __init__(self, folder: str, rank: int) -> None:
        self._folder = Path(folder)
        self._rank = rank
        self._made = 0
        self.allocated = 0

    def takes(self, tensor: torch.Tensor) -> bool:
        return isinstance(tensor, OnGpu)

    def _map(self, name: str, nbytes: int) -> torch.Tensor:
        return torch.from_file(str(self._folder / name), shared=True, size=nbytes, dtype=torch.uint8)

    def _new(self, nbytes: int) -> tuple[str, int]:
        self._made += 1
        return f"{self._rank}-{self._made}", nbytes

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        self.allocated += nbytes
        self._chunk = self._new(nbytes)
        return self._map(*self._chunk)

    def share(self, chunk: torch.Tensor) -> bytes:
        return pickle.dumps(self._chunk)

    def open(self, shared: bytes) -> torch.Tensor:
        return self._map(*pickle.loads(shared))

    def copy(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        destination.copy_(source)

    def new_event(self, *, shared: bool) -> FileEvent:
        if not shared:
            return FileEvent(torch.zeros(1, dtype=torch.uint8))
        self._event = self._new(1)
        return FileEvent(self._map(*self._event))

    def share_event(self, event: Any) -> bytes:
        return pickle.dumps(self._event)

    def open_event(self, shared: bytes, device: torch.device) -> FileEvent:
        return FileEvent(self._map(*pickle.loads(shared)))

    def record(self, event: Any, device: torch.device) -> None:
        event.flag.fill_(1)

    def wait(self, event: Any, device: torch.device) -> None:
        assert event.query()

    def pinned(self, nbytes: int) -> torch.Tensor:
        raise RuntimeError("files cannot be pinned")


def to_cuda(tensor: torch.Tensor) -> torch.Tensor:
    """On the GPU with the same strides, which ``.cuda()`` does not always keep."""
    empty = torch.empty(0, dtype=tensor.dtype, device="cuda")
    return empty.set_(tensor.untyped_storage().cuda(), tensor.storage_offset(), tensor.shape, tensor.stride())


@contextmanager
def a_world_of_gpus(baseline: int, target: int, *, machine: Machine | None = None, **options: Any) -> Iterator[World]:
    """Every rank of a graft world in this process, each with a GPU of the machine, which all have proved to share."""
    shared = machine or Machine()
    with a_world(baseline, target, gpu=lambda rank: LateGpu(shared), **options) as world:
        world.begin(run=-1, first_step=-1)
        for mailbox in world.mailboxes:
            mailbox.exchange.publish(key("way", step=-1), on_gpu(1.0), None)
        for mailbox in world.mailboxes:
            mailbox.take(key("way", step=-1))
        world.end(step=-1)
        yield world


@contextmanager
def processes_with_gpus(*arguments: Any, **options: Any) -> Iterator[Processes]:
    """Ranks that are processes, whose GPUs' memory is files in a folder of their own."""
    with tempfile.TemporaryDirectory() as folder:
        gpu = partial(FileGpu, folder)
        with processes(*arguments, gpu=gpu, put=on_gpu, proves_ipc=True, **options) as made:
            yield made
