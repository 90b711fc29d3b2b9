"""The handshake between a job and a session server: one request and one answer.

Each message begins with its sender's wire version and release, so that two copies of graftlab that do not understand
each other notice, and name both releases. The rest is plain data, checked on arrival. A message's descriptors follow
it.
"""

from __future__ import annotations

import socket
import struct
from typing import Any, TypeVar

import msgspec

from graftlab.base import wire
from graftlab.base.wire import WIRE_VERSION, graftlab_release
from graftlab.base.world import RunInfo, Side
from graftlab.errors import GraftError, MessageError, SessionError
from graftlab.plan.wire import WirePlan

_LENGTH = struct.Struct("<I")
# The header of each message: a mark, the wire version, and the length of the release's name, which follows.
_HEAD = struct.Struct("<4sHB")
_MARK = b"gl\x00h"
# A plan's transform may be a function, with everything that it captures.
_LARGEST = 256 << 20


A = TypeVar("A")


class HandshakeMessage(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The root of all messages of the handshake."""


class RejoinState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The run and the plan in force of a job that has lost its session.

    ``lost_rows`` counts the rows made while no session listened. ``linked`` means that the rank made its own
    connections: the server cannot read its memory, so the rank sends its status. ``session`` is its last session.
    """

    run: RunInfo
    plan: WirePlan
    lost_rows: int
    linked: bool = False
    session: str = ""


class JoinRequest(HandshakeMessage, frozen=True):
    """A process asks to be this rank. With a ``plan`` it starts a run, and all other jobs must have the same plan.

    With ``rejoin`` it is already in a run, and only needs a new control connection. The descriptor of its segment
    follows, unless it is ``linked``.
    """

    side: Side
    rank: int
    world_size: int
    other_world_size: int
    pid: int
    device: str
    backend: str
    plan: WirePlan | None
    rejoin: RejoinState | None
    first_step: int | None = None


class WorldShareRequest(HandshakeMessage, frozen=True):
    """An attached rank asks for the descriptors that connect it to the others in a world."""

    world: int
    side: Side
    rank: int
    world_size: int
    other_world_size: int
    pid: int


class WorldShare(HandshakeMessage, frozen=True):
    """The answer to :class:`WorldShareRequest`: ``descriptors`` descriptors follow. ``segment_size`` is in bytes."""

    segment_size: int
    descriptors: int


class JoinAccepted(HandshakeMessage, frozen=True):
    """The process is that rank from now on. ``descriptors`` descriptors follow, its ends of the control connection.

    With ``address``, ranks may be on several machines, and connect to each other themselves
    (:mod:`graftlab.jobs.peer_connector`), with keys made from ``token``. A process that asked over TCP receives no
    descriptors, because that connection becomes its control connection, and no token, because it has the token.
    ``session`` names the session uniquely.
    """

    folder: str
    log: str
    tap_timeout: float
    buffer_budget: int
    keep_budget: int
    descriptors: int
    address: str = ""
    token: str = ""
    session: str = ""


class HoldRequest(HandshakeMessage, frozen=True):
    """A script's process has reached a call of its model, and asks to be the rank that holds it."""

    side: Side
    rank: int
    world_size: int
    pid: int
    device: str
    backend: str


class HoldAccepted(HandshakeMessage, frozen=True):
    """The process is that rank from now on.

    ``descriptors`` descriptors follow: those of the shared memory and of the sockets to the other ranks, its two ends
    of the control connection, and its end of the death pipe. ``include``, ``functions`` and ``inside`` choose the taps,
    as for :func:`graftlab.watch`.
    """

    other_world_size: int
    segment_size: int
    descriptors: int
    tap_timeout: float
    buffer_budget: int
    keep_budget: int
    plan: WirePlan
    include: str | None
    functions: tuple[str, ...]
    inside: str | None


class StatusQuery(HandshakeMessage, frozen=True):
    """Ask for the session's status, and with ``stacks`` for the stacks of its ranks."""

    stacks: bool


class RankReport(msgspec.Struct, frozen=True):
    """The columns of the session's ``status()`` for one rank, as text."""

    label: str
    columns: dict[str, str]
    stacks: str


class TapReport(msgspec.Struct, frozen=True):
    """The newest row of one tap on one rank."""

    name: str
    step: int | None
    rank: str
    status: str
    rel_l2: float | None


class StatusReply(HandshakeMessage, frozen=True):
    """The answer to :class:`StatusQuery`. ``behind`` rows are not in ``taps`` yet."""

    summary: str
    rows: int
    behind: int
    ranks: list[RankReport]
    taps: list[TapReport]


class RequestRefused(HandshakeMessage, frozen=True):
    """The server refuses the request. ``settings`` is true if the settings of job and session do not fit each other.

    ``again`` is true if the rank may soon be free: its last process may be gone without the server having noticed.
    """

    error: str
    settings: bool
    again: bool = False


_decoder = wire.Decoder(
    JoinRequest
    | JoinAccepted
    | WorldShareRequest
    | WorldShare
    | RequestRefused
    | StatusQuery
    | StatusReply
    | HoldRequest
    | HoldAccepted
)


def pack_handshake(message: HandshakeMessage) -> bytes:
    release = graftlab_release().encode()[:255]
    return _HEAD.pack(_MARK, WIRE_VERSION, len(release)) + release + wire.encode(message)


def unpack_handshake(data: bytes) -> Any:
    """Invert :func:`pack_handshake`.

    Raises :class:`SessionError` for another wire version, and :class:`MessageError` for other bytes.
    """
    if len(data) < _HEAD.size:
        raise MessageError(f"{len(data)} bytes are not a handshake of graftlab")
    mark, theirs, length = _HEAD.unpack_from(data)
    if mark != _MARK:
        raise MessageError(f"a message that begins with {data[:4]!r} is not a handshake of graftlab")
    start = _HEAD.size + length
    if theirs != WIRE_VERSION:
        release = data[_HEAD.size : start].decode(errors="replace")
        raise SessionError(
            f"the other process has graftlab {release!r:.80}, of wire version {theirs}, and this one graftlab "
            f"{graftlab_release()!r}, of wire version {WIRE_VERSION}, which do not understand each other: "
            "install one release of graftlab in the environments of both. Python, torch and all other packages may "
            "differ"
        )
    return _decoder.decode(data[start:])


def send_handshake(connection: socket.socket, message: HandshakeMessage) -> None:
    data = pack_handshake(message)
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive_handshake(connection: socket.socket) -> Any:
    """Return the next message; None if the other end is gone. Raises as :func:`unpack_handshake`, and TimeoutError."""
    try:
        (length,) = _LENGTH.unpack(receive_exactly(connection, _LENGTH.size))
        if length > _LARGEST:
            raise MessageError(f"it claims {length:,} bytes; the limit is {_LARGEST:,}")
        data = receive_exactly(connection, length)
    except (ConnectionError, EOFError):
        return None
    return unpack_handshake(data)


def ask(connection: socket.socket, request: HandshakeMessage, expected: type[A], refused: type[GraftError]) -> A:
    """Send a request, and return its answer, which has the type ``expected``. Raises ``refused`` for any other."""
    send_handshake(connection, request)
    answer = receive_handshake(connection)
    if isinstance(answer, expected):
        return answer
    if answer is None:
        raise refused("the other end closed the connection without an answer")
    raise refused(
        answer.error if isinstance(answer, RequestRefused) else f"the other end answered {type(answer).__name__}"
    )


def receive_exactly(connection: socket.socket, length: int) -> bytes:
    """Receive this number of bytes, and not one more, because descriptors arrive with the next. Raises EOFError."""
    parts = bytearray()
    while len(parts) < length:
        more = connection.recv(length - len(parts))
        if not more:
            raise EOFError("the other end is gone")
        parts += more
    return bytes(parts)
