"""Staging on GPUs: tensors between ranks of one host through CUDA IPC, ordered by events on the streams.

A sender copies a tensor into a chunk of GPU memory that every receiver has opened once, records an event after the
copy and continues. A receiver makes its own stream wait for that event and reads the bytes in place. Neither rank ever
waits for the device. A location is free again when the receiver's GPU has passed an event after the last read.

Only the receivers' replies prove that CUDA IPC works here. Until they have arrived, and if they report a failure,
tensors go through the host's memory.
"""

from __future__ import annotations

import contextlib
import pickle
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol

import torch
import torch.multiprocessing  # teaches ForkingPickler to pickle CUDA tensors as IPC handles

from graftlab.base.tensor_bytes import copyable
from graftlab.errors import warn
from graftlab.exchange.arena import ALIGNMENT, Allocator
from graftlab.exchange.frames import DeviceLocation

CHUNK = 64 << 20
"""Bytes of a chunk, unless a tensor needs more or the budget has less left."""

# Drivers allow a few thousand interprocess events.
_MOST_EVENTS = 1024


class Event(Protocol):
    """A point in a stream of a GPU; :class:`torch.cuda.Event` is one."""

    def query(self) -> bool:
        """Whether the GPU has passed it."""

    def synchronize(self) -> None:
        """Wait until the GPU has passed it."""


class Gpu(Protocol):
    """The operations of CUDA that an exchange uses. Streams are the calling thread's current ones."""

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is on a GPU of this kind and can be copied now."""

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Allocate bytes on the device."""

    def share(self, chunk: torch.Tensor) -> bytes:
        """Return a handle with which one other process can open the chunk; each process needs its own."""

    def open(self, shared: bytes) -> torch.Tensor:
        """Open another process's chunk."""

    def copy(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Issue a copy on the device's stream."""

    def new_event(self, *, shared: bool) -> Event:
        """Make an event; other processes can open a shared one."""

    def share_event(self, event: Event) -> bytes:
        """Return a handle with which any other process can open an event that was recorded."""

    def open_event(self, shared: bytes, device: torch.device) -> Event:
        """Open another process's event."""

    def record(self, event: Event, device: torch.device) -> None:
        """Record the event after everything issued so far on the device's stream."""

    def wait(self, event: Event, device: torch.device) -> None:
        """Make everything issued from now on on the device's stream wait for the event."""

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Allocate pinned memory of the host, which its GPUs access directly.

        The allocator reuses it only when the GPU has finished with it. Raises RuntimeError where pinning fails.
        """


class Cuda:
    """Implements :class:`Gpu` with torch."""

    def takes(self, tensor: torch.Tensor) -> bool:
        # Work captured into a graph runs later, so the tensor has no value to copy yet.
        return tensor.is_cuda and not torch.cuda.is_current_stream_capturing()

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        # The chunk outlives the caller's inference mode; a tensor made in it could not be written afterwards.
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def share(self, chunk: torch.Tensor) -> bytes:
        return pickle.dumps((chunk.device.index, bytes(ForkingPickler.dumps(chunk))))

    def open(self, shared: bytes) -> torch.Tensor:
        theirs, handle = pickle.loads(shared)
        mine = torch.cuda.current_device()
        if theirs != mine and not torch.cuda.can_device_access_peer(mine, theirs):
            raise RuntimeError(f"cuda:{mine} has no access to the memory of cuda:{theirs}")
        with torch.inference_mode(False):
            chunk: torch.Tensor = pickle.loads(handle)
        return chunk

    def copy(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        destination.copy_(source)

    def new_event(self, *, shared: bool) -> Event:
        return torch.cuda.Event(interprocess=shared)  # type: ignore[no-untyped-call]

    def share_event(self, event: Any) -> bytes:
        return bytes(event.ipc_handle())

    def open_event(self, shared: bytes, device: torch.device) -> Event:
        event: Event = torch.cuda.Event.from_ipc_handle(device, shared)  # type: ignore[no-untyped-call]
        return event

    def record(self, event: Any, device: torch.device) -> None:
        event.record(torch.cuda.current_stream(device))

    def wait(self, event: Any, device: torch.device) -> None:
        event.wait(torch.cuda.current_stream(device))

    def pinned(self, nbytes: int) -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)


@dataclass
class _Chunk:
    """A chunk of a sender's GPU memory, and the receivers (world ranks) that were sent its handle."""

    bytes: torch.Tensor
    allocator: Allocator
    sent_to: set[int] = field(default_factory=set)


class DeviceStaging:
    """A rank's own chunks, at most ``budget`` bytes. They are kept for later tensors.

    ``send(rank, chunk, shared)`` sends a receiver the handle of a chunk. Its reply must be passed to
    :meth:`note_reply`.
    """

    def __init__(self, gpu: Gpu, label: str, budget: int, send: Callable[[int, int, bytes], None]) -> None:
        self._gpu = gpu
        self._label = label
        self._budget = budget
        self._send = send
        self._chunks: list[_Chunk] = []
        self._sent_to: set[int] = set()
        self._proven: set[int] = set()
        self._events: list[tuple[Event, bytes]] = []
        self._idle: defaultdict[torch.device, list[int]] = defaultdict(list)
        self._latest: dict[torch.device, Event] = {}
        self._failure: str | None = None
        self._noted = False
        # Bytes put here and not yet released. Kept as a number, because every tap reads it.
        self.bytes_in_use = 0

    @property
    def awaits_replies(self) -> bool:
        """Whether some receiver has not yet confirmed that it can open a chunk."""
        return self._failure is None and not self._sent_to <= self._proven

    def note_reply(self, receiver: int, failure: str | None) -> None:
        """Record that a receiver has opened a chunk, or why it cannot read one."""
        if failure is None:
            self._proven.add(receiver)
        else:
            self._failure = failure

    def put(self, tensor: torch.Tensor, nbytes: int, receivers: set[int]) -> DeviceLocation | None:
        if not self._gpu.takes(tensor):
            return None
        location = None
        if self._failure is None:
            try:
                location = self._put(tensor, nbytes, receivers)
            except Exception as error:
                # Whatever the error, use the host's memory instead. A broken GPU will fail there too.
                self._failure = f"{type(error).__name__}: {error}"
        if self._failure is not None:
            self._note(f"its memory cannot be shared between the ranks ({self._failure})")
        self._count()
        return location

    def release(self, location: DeviceLocation) -> None:
        chunk = self._chunks[location.chunk]
        chunk.allocator.release(location.offset)
        self._idle[chunk.bytes.device].append(location.event)
        self._count()

    def _count(self) -> None:
        self.bytes_in_use = sum(chunk.allocator.bytes_in_use for chunk in self._chunks)

    def _put(self, tensor: torch.Tensor, nbytes: int, receivers: set[int]) -> DeviceLocation | None:
        device = tensor.device
        room = self._find_room(device, nbytes)
        if room is None:
            return None
        number, offset = room
        chunk = self._chunks[number]
        location = None
        try:
            for rank in receivers - chunk.sent_to:
                chunk.sent_to.add(rank)
                self._sent_to.add(rank)
                self._send(rank, number, self._gpu.share(chunk.bytes))
            if receivers <= self._proven and (self._idle[device] or len(self._events) < _MOST_EVENTS):
                event = self._copy(copyable(tensor), chunk.bytes, offset, nbytes)
                location = DeviceLocation(number, offset, event, self._events[event][1])
        finally:
            if location is None:
                chunk.allocator.release(offset)
        return location

    def _copy(self, source: torch.Tensor, chunk: torch.Tensor, offset: int, nbytes: int) -> int:
        """Copy a tensor into a chunk and return the number of the event after the copy."""
        device = chunk.device
        fresh = not self._idle[device]
        number = len(self._events) if fresh else self._idle[device].pop()
        event = self._gpu.new_event(shared=True) if fresh else self._events[number][0]
        latest = self._latest.get(device)
        if latest is not None:
            # The earlier copy to these bytes may be on another stream, and no receiver may have waited for it.
            self._gpu.wait(latest, device)
        self._gpu.copy(source, _window(chunk, offset, nbytes, source.dtype, source.shape))
        self._gpu.record(event, device)
        self._latest[device] = event
        if fresh:
            # An event gets its device, and so its handle, when it is first recorded.
            self._events.append((event, self._gpu.share_event(event)))
        return number

    def _find_room(self, device: torch.device, nbytes: int) -> tuple[int, int] | None:
        """Reserve memory in a chunk on the device, made if need be; return the chunk's number and the offset."""
        for number, chunk in enumerate(self._chunks):
            offset = chunk.allocator.take(nbytes) if chunk.bytes.device == device else None
            if offset is not None:
                return number, offset
        need = -(-nbytes // ALIGNMENT) * ALIGNMENT
        size = min(max(CHUNK, need), self._budget - sum(chunk.bytes.numel() for chunk in self._chunks))
        if size < need:
            self._note(f"the buffer budget of {self._budget >> 20} MiB has no room for {nbytes} bytes on {device}")
            return None
        made = _Chunk(self._gpu.allocate(size, device), Allocator(size, start=0))
        self._chunks.append(made)
        offset = made.allocator.take(nbytes)
        assert offset is not None
        return len(self._chunks) - 1, offset

    def _note(self, why: str) -> None:
        if not self._noted:
            self._noted = True
            warn(f"gl.tap on {self._label}: GPU tensors go through the host's memory, which is slower: {why}")


class DeviceReader:
    """A receiver's view of all senders' chunks, and the reads that its own streams may not have finished."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._chunks: dict[tuple[int, int], torch.Tensor | str] = {}
        self._events: dict[tuple[int, int], Event] = {}
        self.reading: deque[tuple[Event, Any]] = deque()

    def open(self, sender: int, chunk: int, shared: bytes) -> str | None:
        """Open a sender's chunk. Returns the reason if that fails, and else None."""
        try:
            self._chunks[sender, chunk] = self._gpu.open(shared)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
            self._chunks[sender, chunk] = failure
            return failure
        return None

    def window(
        self,
        sender: int,
        location: DeviceLocation,
        nbytes: int,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        *,
        alive: bool,
    ) -> torch.Tensor:
        """Return the bytes at ``location`` as a tensor for its device's current stream, without a copy.

        Raises RuntimeError when the chunk could not be opened, or when the sender is not ``alive`` and died before its
        GPU had made the copy.
        """
        chunk = self._chunks[sender, location.chunk]
        if isinstance(chunk, str):
            raise RuntimeError(chunk)
        event = self._events.get((sender, location.event))
        if event is None:
            event = self._gpu.open_event(location.opens_event, chunk.device)
            self._events[sender, location.event] = event
        if not alive and not event.query():
            raise RuntimeError("it died before its GPU had made the copy")
        self._gpu.wait(event, chunk.device)
        return _window(chunk, location.offset, nbytes, dtype, shape)

    def release(self, sender: int, location: DeviceLocation, item: Any) -> None:
        """Note that nothing issued later reads there; :meth:`read` returns ``item`` when all earlier work has run."""
        event = self._gpu.new_event(shared=False)
        chunk = self._chunks[sender, location.chunk]
        assert isinstance(chunk, torch.Tensor)
        # A failed GPU reads nothing more, and the user's next CUDA call reports the failure.
        with contextlib.suppress(RuntimeError):
            self._gpu.record(event, chunk.device)
        self.reading.append((event, item))

    def read(self, *, wait: bool) -> list[Any]:
        """Return the items that no stream reads any longer; with ``wait``, wait for all others and return them too."""
        done = []
        while self.reading:
            event, item = self.reading[0]
            with contextlib.suppress(RuntimeError):  # as above
                if not event.query():
                    if not wait:
                        break
                    event.synchronize()
            done.append(item)
            self.reading.popleft()
        return done


def _window(chunk: torch.Tensor, offset: int, nbytes: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    # Offsets are multiples of ALIGNMENT, and so of any dtype's size.
    return chunk[offset : offset + nbytes].view(dtype).view(shape)
