"""What a job and the holder of a session say to each other before the job has joined: one message each.

Plain data, checked on arrival. What is handed over with it, as open descriptors, follows.
"""

from __future__ import annotations

import socket
import struct
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec

from graftlab.base import wire
from graftlab.base.world import RunInfo, Side
from graftlab.errors import MessageError
from graftlab.plan.wire import WirePlan

_LENGTH = struct.Struct("<I")
# A plan's transform may be a function with what it captures.
_LARGEST = 256 << 20


class HandshakeMessage(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The root of all of them."""


class RejoinState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a job that is in a graft world already has: the run that goes on, and the plan in force.

    ``lost_rows`` is how many rows were made while nobody took them. With ``linked`` its memory is its own affair, and
    it says itself where it is. ``session`` is the one in which it was last.
    """

    run: RunInfo
    plan: WirePlan
    lost_rows: int
    linked: bool = False
    session: str = ""


class JoinRequest(HandshakeMessage, frozen=True):
    """A process asks to be this rank. With ``plan`` it is one that wants to meet others that have the same.

    One that has a ``rejoins`` asks for a new line alone; the descriptor of its own segment follows.
    """

    version: str
    side: Side
    rank: int
    world_size: int
    other_world_size: int
    pid: int
    device: str
    backend: str
    plan: WirePlan | None
    rejoins: RejoinState | None
    first_step: int | None = None


class WorldShareRequest(HandshakeMessage, frozen=True):
    """A process that has joined asks for what it shares with the others in this world."""

    world: int
    side: Side
    rank: int
    world_size: int
    other_world_size: int
    pid: int


class WorldShare(HandshakeMessage, frozen=True):
    """The answer. So many descriptors follow; each segment has this size."""

    segment_size: int
    descriptors: int


class JoinAccepted(HandshakeMessage, frozen=True):
    """The process is that rank from now on. Its ends of the control connection follow as ``descriptors`` descriptors.

    With ``address`` ranks may be on several machines, and connect to each other themselves
    (:mod:`graftlab.jobs.peer_connector`), under the keys of ``token``. A process that asked over TCP gets no
    descriptors, because that connection becomes its control connection, and no token, because it has it. ``session``
    names the session uniquely.
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


class StatusQuery(HandshakeMessage, frozen=True):
    """Somebody wants to see what the session does, and with ``stacks`` where its ranks are in the code."""

    stacks: bool


class RankReport(msgspec.Struct, frozen=True):
    """One rank: the columns of the session's ``status()``, as text."""

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
    """What the session does. ``behind`` rows are not in ``taps`` yet."""

    summary: str
    rows: int
    behind: int
    ranks: list[RankReport]
    taps: list[TapReport]


class JoinRefused(HandshakeMessage, frozen=True):
    """It is not. ``settings`` where it is what the two were told that does not fit.

    ``again`` where it may be let in before long: nobody has noticed yet that the process before it is gone.
    """

    error: str
    settings: bool
    again: bool = False


_decoder = wire.Decoder(
    JoinRequest | JoinAccepted | WorldShareRequest | WorldShare | JoinRefused | StatusQuery | StatusReply
)


def graftlab_version() -> str:
    """Which graftlab this is; only equal ones understand each other."""
    try:
        return version("graftlab")
    except PackageNotFoundError:
        return "0+unknown"


def pack_handshake(message: HandshakeMessage) -> bytes:
    return wire.encode(message)


def unpack_handshake(data: bytes) -> Any:
    """The inverse of :func:`pack_handshake`. Raises :class:`MessageError`."""
    return _decoder.decode(data)


def send_handshake(connection: socket.socket, message: HandshakeMessage) -> None:
    data = wire.encode(message)
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive_handshake(connection: socket.socket) -> Any:
    """The next message; None where the other end is gone. Raises :class:`MessageError` for anything else, and
    TimeoutError."""
    head = _exactly(connection, _LENGTH.size)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    if length > _LARGEST:
        raise MessageError(f"a greeting of {length:,} bytes is none")
    data = _exactly(connection, length)
    return None if data is None else _decoder.decode(data)


def _exactly(connection: socket.socket, length: int) -> bytes | None:
    # Not a byte more: descriptors come with the next one.
    parts = bytearray()
    while len(parts) < length:
        try:
            more = connection.recv(length - len(parts))
        except ConnectionError:
            return None
        if not more:
            return None
        parts += more
    return bytes(parts)
