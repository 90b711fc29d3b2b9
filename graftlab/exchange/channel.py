"""Frames over a stream socket, with a send that never blocks.

A socket buffers a few hundred small frames. After that a blocking send would make a sender wait for a receiver that is
busy computing. So the channel keeps the rest, and a thread sends it, which ends when nothing is left.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol

from graftlab.errors import MessageError

_LENGTH = struct.Struct("<Q")
# Bytes of one read. malloc would map a buffer of 128 KiB or more anew for each read, which costs far more than reading
# a small frame.
_CHUNK = 1 << 16
_PIECE = 1 << 16

Received = bytes | memoryview
"""One frame that has arrived. A large one is a view of the memory into which it was read, which nothing else uses."""

_channels: weakref.WeakSet[SocketChannel] = weakref.WeakSet()


class Channel(Protocol):
    """One end of a connection to another process, by :class:`SocketChannel` or :class:`.tcp.TcpChannel`.

    Any thread may send; one thread at a time may receive.
    """

    closed: bool
    """Whether this end is closed, or has received everything that the other end sent before it closed."""

    def fileno(self) -> int:
        """Return a descriptor that is readable when there may be something to :meth:`receive`."""
        ...

    def send(self, payload: bytes | bytearray, /) -> None:
        """Send one frame without waiting. A frame to an end that is gone is dropped."""
        ...

    def drain(self, timeout: float) -> bool:
        """Wait until the system has taken everything that was sent; False if ``timeout`` seconds pass first."""
        ...

    def receive(self) -> Sequence[Received]:
        """Return every whole frame that has arrived, without waiting."""
        ...

    def close(self) -> None: ...


class SocketChannel:
    """One end of a connection. Any thread may send; one thread at a time may receive."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        # A socket received over another socket is inheritable, and every program that this process starts would get it.
        connection.set_inheritable(False)
        self._socket = connection
        self._sending = threading.Lock()
        self._waiting: deque[memoryview] = deque()
        self._flusher: threading.Thread | None = None
        self._received = bytearray()
        self.closed = False
        _channels.add(self)

    def fileno(self) -> int:
        return self._socket.fileno()

    def make_room(self, size: int) -> None:
        """Have the socket buffer up to ``size`` bytes, if the system allows it, before a thread has to send them."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)

    def send(self, payload: bytes | bytearray) -> None:
        """Send one frame, now or as soon as the other end reads. A frame is dropped when the other end is gone."""
        with self._sending:
            if self.closed:
                return
            if len(payload) < _PIECE:
                data = _LENGTH.pack(len(payload)) + payload
                # Usually the socket takes the whole frame at once.
                sent = 0 if self._waiting else self._try(data)
                if sent < len(data):
                    self._offer(memoryview(data)[sent:])
            else:
                self._offer(memoryview(_LENGTH.pack(len(payload))))
                self._offer(memoryview(payload))

    def send_bundle(self, bundle: bytes) -> None:
        """Send a bundle of whole frames, as :meth:`receive_bundle` returns it and :func:`frames_in` has checked it."""
        with self._sending:
            if not self.closed:
                self._offer(memoryview(bundle))

    @property
    def backed_up(self) -> bool:
        """Whether frames wait here until the other end reads."""
        return bool(self._waiting)

    def _offer(self, data: memoryview) -> None:
        if not self._waiting:
            data = self._write(data)
        if data:
            self._waiting.append(data)
            if self._flusher is None:
                self._flusher = threading.Thread(target=self._flush, name="graftlab-flush", daemon=True)
                self._flusher.start()

    def _write(self, data: memoryview) -> memoryview:
        """Write what fits and return the rest."""
        while data:
            sent = self._try(data)
            if not sent:
                return data
            data = data[sent:]
        return data

    def _try(self, data: bytes | memoryview) -> int:
        """Write as much of this as the socket takes, and return the number of bytes."""
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            # The other end is gone; the reader at this end has seen or will see the end of the stream.
            self._waiting.clear()
            return len(data)

    def _flush(self) -> None:
        poller = select.poll()
        try:
            poller.register(self._socket, select.POLLOUT)
        except (OSError, ValueError):
            return
        while True:
            poller.poll()
            with self._sending:
                while self._waiting:
                    rest = self._write(self._next_piece())
                    if rest:
                        self._waiting.appendleft(rest)
                        break
                if not self._waiting or self.closed:
                    self._flusher = None
                    return

    def _next_piece(self) -> memoryview:
        """Take the next piece to send. Small frames are joined, because each write costs far more than its bytes."""
        pieces = [self._waiting.popleft()]
        size = len(pieces[0])
        while self._waiting and size + len(self._waiting[0]) <= _PIECE:
            pieces.append(self._waiting.popleft())
            size += len(pieces[-1])
        return pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))

    def drain(self, timeout: float) -> bool:
        """Wait until the socket has taken everything; False when the time limit ended the wait."""
        flusher = self._flusher
        if flusher is not None:
            flusher.join(timeout)
            return not flusher.is_alive()
        return True

    def receive(self) -> list[Received]:
        """Return all whole frames that have arrived, without waiting. At the end of the stream sets ``closed``."""
        self._read()
        frames: list[Received] = []
        start, end = 0, len(self._received)
        while end - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received, start)
            if end - start - _LENGTH.size < length:
                break
            start += _LENGTH.size
            if length >= _PIECE:
                # Not copied: the frame keeps this memory, and what came after it moves to another.
                frames.append(memoryview(self._received)[start : start + length])
                self._received = self._received[start + length :]
                start, end = 0, len(self._received)
                continue
            # Not from a slice, which would be one more copy.
            with memoryview(self._received) as received:
                frames.append(bytes(received[start : start + length]))
            start += length
        if start:
            del self._received[:start]
        return frames

    def receive_bundle(self) -> bytes:
        """Return the same frames as one string of bytes, each with its length in front."""
        self._read()
        whole, end = 0, len(self._received)
        while end - whole >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received, whole)
            if end - whole - _LENGTH.size < length:
                break
            whole += _LENGTH.size + length
        bundle = bytes(memoryview(self._received)[:whole])
        del self._received[:whole]
        return bundle

    def _read(self) -> None:
        while not self.closed:
            try:
                data = self._socket.recv(_CHUNK)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.closed = True
                break
            self._received += data
            if len(data) < _CHUNK:
                break

    def close(self) -> None:
        with self._sending:
            self.closed = True
            self._waiting.clear()
            # So that a reader in another thread sees the end of the stream before the descriptor is closed.
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()

    def _release_in_child(self) -> None:
        self.closed = True
        self._waiting = deque()
        self._sending = threading.Lock()  # a thread of the parent may have held it
        # No shutdown, which would end the parent's connection too.
        self._socket.close()


def frames_in(bundle: bytes) -> Iterator[tuple[int, int]]:
    """Return the start and end of each frame of a bundle. Raises :class:`MessageError` for an incomplete frame."""
    end, number = 0, 0
    while end < len(bundle):
        start = end + _LENGTH.size
        if start > len(bundle) or (end := start + _LENGTH.unpack_from(bundle, end)[0]) > len(bundle):
            raise MessageError(f"frame {number} of a bundle of {len(bundle)} bytes is incomplete")
        yield start, end
        number += 1


def _after_fork_in_child() -> None:
    # A stream ends only when every process that holds its descriptor has closed it, and a data loader's workers may
    # outlive their rank.
    for channel in list(_channels):
        channel._release_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
