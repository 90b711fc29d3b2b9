"""A stand-in for NCCL between GPUs, over Unix sockets, for ranks of one process and for ranks that are processes.

It is as unforgiving as NCCL: a send waits for its receive and a receive for its send, forever; transfers of one
communicator follow each other as they were issued; a receive writes into memory that holds something else; what is
aborted never ends. It works when it is asked whether it is done, which is what the wire threads do all the time.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from graftlab.base.tensor_bytes import copyable
from graftlab.base.world import Place
from graftlab.exchange.nccl import find_nccl
from graftlab.exchange.wire_gpu import WireGpu
from kit.gpus import OnGpu, on_gpu
from kit.mailboxes import Processes, World, a_world, processes, until_joined

NAME = "nccl stand-in"
_POSTED = b"p"
_STALE = 0xEE


class Fabric:
    """What the test decides for all GPUs of its process, and what it counts."""

    def __init__(self) -> None:
        self.copies_take_long = False
        self.transfers_take_long = False
        # Whether the end of a process is told to whoever is joined to it; a machine that vanishes says nothing.
        self.tells_of_ends = True
        # (which end, or None for both; at what)
        self.fails_at: tuple[int | None, str] | None = None
        self.hangs_at: tuple[int | None, str] | None = None
        self.abort_may_return = threading.Event()
        self.abort_may_return.set()
        self.late: list[LateCopy] = []
        self.ends: list[SocketEnd] = []
        self.handed_over = 0

    def finish_copies(self) -> None:
        self.copies_take_long = False
        for copy in self.late:
            copy.make()

    def may_fail(self, end: int | None, at: str) -> None:
        if self.fails_at in ((end, at), (None, at)):
            raise RuntimeError(f"{at} is forbidden here")

    @property
    def transfers(self) -> list[Operation]:
        return [each for end in self.ends for each in end.issued]


class LateCopy:
    """Bytes that are there when the device has come so far."""

    def __init__(self, source: torch.Tensor, late: bool) -> None:
        self._source = source
        self.bytes = torch.full((source.numel(),), _STALE, dtype=torch.uint8)
        self._made = False
        if not late:
            self.make()

    def make(self) -> None:
        self.bytes.copy_(self._source)
        self._made = True

    def is_made(self) -> bool:
        return self._made


class SocketWireGpu:
    """One rank's GPU."""

    name = NAME

    def __init__(self, place: Place | None = None, fabric: Fabric | None = None, folder: str = "") -> None:
        """Its sockets have names of the system's own, which no other network namespace sees, or files in a folder."""
        self.fabric = fabric or Fabric()
        self._names = f"{folder}/" if folder else "\0graftlab-test-"
        self._listeners: dict[bytes, socket.socket] = {}
        self._thread = 0

    def begin_thread(self) -> None:
        self._thread = threading.get_ident()

    def _on_thread(self) -> None:
        assert threading.get_ident() == self._thread, "only one thread may use a communicator"

    def takes(self, tensor: torch.Tensor) -> bool:
        return isinstance(tensor, OnGpu)

    def copy(self, tensor: torch.Tensor, nbytes: int) -> LateCopy:
        self.fabric.may_fail(None, "copy")
        source = copyable(tensor.detach().resolve_conj().resolve_neg()).as_subclass(torch.Tensor)
        flat = source.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
        assert flat.numel() == nbytes
        copy = LateCopy(flat, self.fabric.copies_take_long)
        self.fabric.late.append(copy)
        return copy

    def hand_over(self, received: torch.Tensor) -> None:
        self.fabric.handed_over += 1

    def new_id(self) -> bytes:
        self._on_thread()
        self.fabric.may_fail(0, "new_id")
        name = (self._names + secrets.token_hex(8)).encode()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(name)
        listener.listen(1)
        listener.setblocking(False)
        self._listeners[name] = listener
        return name

    def join(self, end: int, unique_id: bytes) -> SocketEnd:
        self._on_thread()
        self.fabric.may_fail(end, "join")
        joined = SocketEnd(self, end, unique_id, self._listeners.pop(unique_id, None))
        self.fabric.ends.append(joined)
        return joined


class Operation:
    """A transfer, issued by one end."""

    def __init__(self, end: SocketEnd, data: torch.Tensor, sends: bool) -> None:
        self.bytes = data
        self.sends = sends
        self.done = False
        self.posted = False
        self.so_far = 0
        self._end = end

    def is_done(self) -> bool:
        self._end.progress()
        return self.done

    def progress(self, connection: socket.socket) -> None:
        """Raises BlockingIOError where the other end has to do something first."""
        if not self.posted:
            if self.sends:
                if not connection.recv(1):
                    raise ConnectionResetError
            else:
                connection.send(_POSTED)
            self.posted = True
        view = memoryview(self.bytes.numpy())
        while self.so_far < len(view):
            rest = view[self.so_far :]
            moved = connection.send(rest) if self.sends else connection.recv_into(rest)
            if not moved:
                raise ConnectionResetError
            self.so_far += moved
        self.done = True


class SocketEnd:
    """One end of a communicator."""

    def __init__(self, gpu: SocketWireGpu, end: int, name: bytes, listener: socket.socket | None) -> None:
        self._gpu = gpu
        self._fabric = gpu.fabric
        self._end = end
        self._name = name
        self._listener = listener
        self._connection: socket.socket | None = None
        self._queue: deque[Operation] = deque()
        self._error = ""
        self.issued: list[Operation] = []
        self.aborted = False

    def _connect(self) -> None:
        if self._connection is None:
            with contextlib.suppress(BlockingIOError):
                if self._listener is not None:
                    self._connection, _ = self._listener.accept()
                    self._listener.close()
                else:
                    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                    connection.connect(self._name)
                    self._connection = connection
                self._connection.setblocking(False)

    def is_ready(self) -> bool:
        self._gpu._on_thread()
        self._fabric.may_fail(self._end, "ready")
        if self._fabric.hangs_at in ((self._end, "ready"), (None, "ready")):
            return False
        self._connect()
        return self._connection is not None

    def _issue(self, data: torch.Tensor, sends: bool) -> Operation:
        self._gpu._on_thread()
        assert not self.aborted
        self._fabric.may_fail(self._end, "send" if sends else "receive")
        operation = Operation(self, data, sends)
        self._queue.append(operation)
        self.issued.append(operation)
        return operation

    def send(self, source: torch.Tensor) -> Operation:
        return self._issue(source, True)

    def receive(self, nbytes: int) -> Operation:
        return self._issue(torch.full((nbytes,), _STALE, dtype=torch.uint8), False)

    def progress(self) -> None:
        self._gpu._on_thread()
        self._fabric.may_fail(self._end, "transfer")
        if self._error:
            raise RuntimeError(self._error)
        while self._queue and not self._fabric.transfers_take_long:
            assert self._connection is not None
            try:
                self._queue[0].progress(self._connection)
            except BlockingIOError:
                return
            except OSError:
                if self._fabric.tells_of_ends:
                    self._error = "remote process exited or there was a network error"
                    raise RuntimeError(self._error) from None
                return
            self._queue.popleft()

    def abort(self) -> None:
        assert self._fabric.abort_may_return.wait(60)
        for each in (self._listener, self._connection):
            if each is not None:
                each.close()
        self.aborted = True


@contextmanager
def a_world_of_wires(baseline: int, target: int, *, fabric: Fabric | None = None, **options: Any) -> Iterator[World]:
    """Every rank of a graft world in this process, each with a GPU on a host of its own, and all of them joined."""
    shared = fabric or Fabric()
    with a_world(baseline, target, tcp=True, wire=lambda place: SocketWireGpu(place, shared), **options) as world:
        until_joined(*world.mailboxes)
        yield world


@contextmanager
def processes_with_wires(*arguments: Any, **options: Any) -> Iterator[Processes]:
    """Ranks that are processes, each with a GPU on a host of its own, and all of them joined."""
    with processes(*arguments, tcp=True, wire=SocketWireGpu, put=on_gpu, **options) as made:
        yield made


def nccl_of_rank(place: Place) -> WireGpu:
    """The real one, for ranks that are processes, those of each side on a GPU of their own."""
    device = torch.device("cuda", int(place.side == "target"))
    torch.cuda.set_device(device)
    return find_nccl(device)


WIRES = partial(a_world_of_wires, put=on_gpu)
