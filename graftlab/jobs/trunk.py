"""One connection that carries the lines of all jobs of a host: what travels on it, and what each end does with it.

A message holds parts of any number of lines, so that what several jobs say at about the same time is encrypted and
sent once. A part is a piece of the line's stream, wherever that was cut: neither end looks into it. Each line has a
window: what was sent and not yet taken at the far end is at most so much, so that a line nobody reads fills no memory,
and stops no other.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

from graftlab.errors import MessageError

HOST = b"host"
"""What whoever holds a session is called by those that connect to it."""

HELLO = b"graftlab-lines/1"
"""Who carries lines says so first, and then who it is; the answer of who takes them."""

WINDOW = 4 << 20
"""Bytes of one line, in one direction, that were sent and not taken yet."""

# A line's number, what the part is, and how many bytes of it follow.
_HEAD = struct.Struct("<IBI")
_COUNT = struct.Struct("<I")
# From who carries: a line begins. From either: a piece of it; read it now; so many bytes were taken; the line ends.
OPEN, DATA, RING, TAKEN, END = range(5)
# What is read of a line before the others have their turn.
_TURN = 256 << 10
_CHUNK = 1 << 16
# Taken bytes are told of together.
_TELL = WINDOW // 4


class Part(NamedTuple):
    """One of a message. ``body`` is a piece of the stream, or the number of bytes taken."""

    line: int
    kind: int
    body: bytes | memoryview = b""


def pack_part(line: int, kind: int, body: bytes | bytearray = b"") -> bytes:
    return _HEAD.pack(line, kind, len(body)) + body


def parts_in(message: bytes) -> Iterator[Part]:
    """The parts of a message. Raises :class:`MessageError` where it breaks off, or says what nobody says."""
    end, view = 0, memoryview(message)
    while end < len(message):
        start = end + _HEAD.size
        if start > len(message):
            raise MessageError(f"a message of {len(message)} bytes breaks off in the head of a part")
        line, kind, length = _HEAD.unpack_from(message, end)
        end = start + length
        if end > len(message) or kind > END or (kind == TAKEN and length != _COUNT.size):
            raise MessageError(f"a message of {len(message)} bytes has a part of kind {kind} with {length} bytes in it")
        yield Part(line, kind, view[start:end])


class Strand:
    """One line at one end of a trunk: between it and a socket of this process, or of another one of this host."""

    def __init__(self, trunk: Trunk, number: int) -> None:
        self.number = number
        self.near: socket.socket | None = None
        self.bell: socket.socket | None = None
        self.on_end: Callable[[], None] = lambda: None
        # What came from afar for somebody who has not read it yet.
        self.waiting = bytearray()
        self.owed = 0
        self.credit = WINDOW
        # The near end said its last word, or the far end did.
        self.near_ended = self.far_ended = False
        # What the socket's readiness is asked for at the moment.
        self.asked = 0
        self._trunk = trunk

    def send(self, data: bytes) -> None:
        """Say this on the line before it has a near end."""
        self.credit -= len(data)
        self._trunk.post(self.number, DATA, data)

    def carry(self, near: socket.socket, bell: socket.socket | None) -> None:
        """Pass on from now on between this socket and the far end; what has come already goes first."""
        self._trunk.carry(self, near, bell)

    def close(self) -> None:
        self._trunk.end(self)


class Trunk:
    """One end of it. All calls come from one thread; none waits.

    ``send`` takes one message. With ``rings_near`` bells are rung here for those who read; else they are heard.
    """

    def __init__(
        self,
        send: Callable[[bytes], None],
        on_open: Callable[[Strand], None] | None = None,
        on_data: Callable[[Strand], None] = lambda strand: None,
        *,
        rings_near: bool,
    ) -> None:
        """``on_open`` is told of a line that the far end begins, ``on_data`` of what came for one without near end."""
        self.strands: dict[int, Strand] = {}
        self._send = send
        self._on_open = on_open
        self._on_data = on_data
        self._rings_near = rings_near
        self._parts: list[bytes] = []
        self._lines, self._bells = select.epoll(), select.epoll()
        self._of_line: dict[int, Strand] = {}
        self._of_bell: dict[int, Strand] = {}
        self._next = 0

    @property
    def descriptors(self) -> tuple[int, int]:
        """Readable when there is something to :meth:`work` at, and when what waits there should not wait."""
        return self._lines.fileno(), self._bells.fileno()

    # ---- lines --------------------------------------------------------------------------------------------------

    def open(self, near: socket.socket, bell: socket.socket | None, on_end: Callable[[], None]) -> Strand:
        """Begin a line. ``on_end`` is called when it has ended, and the far end has all that was said on it."""
        strand = self.strands[self._next] = Strand(self, self._next)
        self._next += 1
        strand.on_end = on_end
        self.post(strand.number, OPEN)
        self.carry(strand, near, bell)
        return strand

    def carry(self, strand: Strand, near: socket.socket, bell: socket.socket | None) -> None:
        near.setblocking(False)
        near.set_inheritable(False)
        strand.near, strand.bell = near, bell
        self._of_line[near.fileno()] = strand
        if bell is not None:
            bell.setblocking(False)
            bell.set_inheritable(False)
            if not self._rings_near:
                self._of_bell[bell.fileno()] = strand
                self._bells.register(bell, select.EPOLLIN)
        # It was counted when it came.
        strand.owed -= len(strand.waiting)
        self._hand_on(strand)

    def end(self, strand: Strand) -> None:
        """End this line at once, and tell the far end."""
        if not strand.near_ended:
            strand.near_ended = True
            self.post(strand.number, END)
        strand.waiting.clear()
        if strand.far_ended or strand.near is None:
            self._forget(strand)
        else:
            self._close_near(strand)

    def close(self) -> None:
        """End every line: there is no far end any more. What its sockets hold is still read."""
        for strand in list(self.strands.values()):
            strand.near_ended = True
            self._forget(strand)
        self._lines.close()
        self._bells.close()

    def _forget(self, strand: Strand) -> None:
        self.strands.pop(strand.number, None)
        # Who is told looks for the reason, and finds it before the end.
        strand.on_end()
        self._close_near(strand)

    def _close_near(self, strand: Strand) -> None:
        if strand.bell is not None:
            if self._of_bell.pop(strand.bell.fileno(), None) is not None:
                self._bells.unregister(strand.bell)
            strand.bell.close()
            strand.bell = None
        if strand.near is not None:
            self._ask(strand, 0)
            del self._of_line[strand.near.fileno()]
            strand.near.close()
            strand.near = None

    # ---- from near ----------------------------------------------------------------------------------------------

    def work(self) -> bool:
        """Read and write what can be at the near ends; whether more is there that should not wait."""
        urgent = False
        for descriptor, _ in self._bells.poll(0):
            strand = self._of_bell.get(descriptor)
            if strand is None or strand.bell is None:
                continue
            try:
                ended = not strand.bell.recv(4096)
            except BlockingIOError:
                continue
            except OSError:
                ended = True
            if ended:
                # Its line tells the rest.
                del self._of_bell[descriptor]
                self._bells.unregister(descriptor)
                continue
            urgent |= self._read(strand)
            self.post(strand.number, RING)
        for descriptor, event in self._lines.poll(0):
            found = self._of_line.get(descriptor)
            if found is None:
                continue
            if found.waiting and event & ~select.EPOLLIN:
                self._hand_on(found)
            if found.near is not None:
                urgent |= self._read(found)
        return urgent

    def _read(self, strand: Strand) -> bool:
        """Take what a line says, up to its window; whether there is more than that of this turn."""
        near, took = strand.near, bytearray()
        limit = min(_TURN, strand.credit)
        ended = False
        while near is not None and not strand.near_ended and len(took) < limit:
            try:
                data = near.recv(min(_CHUNK, limit - len(took)))
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                ended = True
                break
            took += data
            if len(data) < _CHUNK:
                break
        if took:
            strand.credit -= len(took)
            self.post(strand.number, DATA, took)
        if ended:
            strand.near_ended = True
            strand.waiting.clear()
            self.post(strand.number, END)
            if strand.far_ended:
                self._forget(strand)
            else:
                self._close_near(strand)
        elif near is not None:
            self._ask_as_needed(strand)
        return len(took) == _TURN

    def post(self, line: int, kind: int, body: bytes | bytearray = b"") -> None:
        """Have this part go with the next message."""
        self._parts.append(pack_part(line, kind, body))

    def flush(self) -> None:
        """Send all that has gathered, as one message."""
        if self._parts:
            parts, self._parts = self._parts, []
            self._send(b"".join(parts))

    # ---- from afar ----------------------------------------------------------------------------------------------

    def hear(self, message: bytes) -> None:
        """Take one message of the far end. Raises :class:`MessageError`."""
        for number, kind, body in parts_in(message):
            strand = self.strands.get(number)
            if kind == OPEN:
                if self._on_open is None or strand is not None:
                    raise MessageError(f"line {number} is begun by who may not, or twice")
                self._on_open(self._begun(number))
            elif strand is None:
                # It has ended here, and the far end did not know.
                continue
            elif kind == DATA:
                # Mostly the near end takes all of it at once.
                if strand.near is not None and not strand.waiting and self._pass(strand, body):
                    continue
                strand.waiting += body
                if strand.near is None and not strand.near_ended:
                    self._took(strand, len(body))
                    self._on_data(strand)
                else:
                    self._hand_on(strand)
            elif kind == RING:
                if strand.bell is not None:
                    # A full bell rings already.
                    with contextlib.suppress(OSError):
                        strand.bell.send(b"!")
            elif kind == TAKEN:
                strand.credit += _COUNT.unpack(body)[0]
                self._ask_as_needed(strand)
            else:
                strand.far_ended = True
                self._hand_on(strand)

    def _pass(self, strand: Strand, body: bytes | memoryview) -> bool:
        """Write this piece, of which what does not fit waits; False where nothing can be written."""
        assert strand.near is not None
        try:
            sent = strand.near.send(body)
        except OSError:
            return False
        self._took(strand, sent)
        if sent < len(body):
            strand.waiting += body[sent:]
            self._ask_as_needed(strand)
        return True

    def _begun(self, number: int) -> Strand:
        strand = self.strands[number] = Strand(self, number)
        return strand

    def _hand_on(self, strand: Strand) -> None:
        """Write what waits, as far as it is taken; a line of which both ends have said all is over."""
        if strand.near is not None and strand.waiting:
            had = len(strand.waiting)
            self._write(strand)
            self._took(strand, had - len(strand.waiting))
        elif strand.near_ended:
            # Nobody reads it any more.
            self._took(strand, len(strand.waiting))
            strand.waiting.clear()
        if strand.far_ended and not (strand.waiting and strand.near is not None):
            if not strand.near_ended:
                strand.near_ended = True
                self.post(strand.number, END)
            self._forget(strand)
        elif strand.near is not None:
            self._ask_as_needed(strand)

    def _write(self, strand: Strand) -> None:
        assert strand.near is not None
        while strand.waiting:
            try:
                with memoryview(strand.waiting) as view:
                    sent = strand.near.send(view[:_CHUNK])
            except BlockingIOError:
                return
            except OSError:
                # It is gone; the reading of it says so.
                sent = len(strand.waiting)
            del strand.waiting[:sent]

    def _took(self, strand: Strand, count: int) -> None:
        strand.owed += count
        if strand.owed >= _TELL:
            self.post(strand.number, TAKEN, _COUNT.pack(strand.owed))
            strand.owed = 0

    def _ask_as_needed(self, strand: Strand) -> None:
        reads = select.EPOLLIN if strand.credit > 0 and not strand.near_ended else 0
        self._ask(strand, reads | (select.EPOLLOUT if strand.waiting else 0))

    def _ask(self, strand: Strand, wanted: int) -> None:
        """What to be told of this line's socket. One that nothing is asked of would tell of its end all the time."""
        near = strand.near
        if near is None or wanted == strand.asked:
            return
        if not wanted:
            self._lines.unregister(near)
        elif strand.asked:
            self._lines.modify(near, wanted)
        else:
            self._lines.register(near, wanted)
        strand.asked = wanted
