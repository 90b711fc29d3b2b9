"""The open descriptors that the ranks of a graft world share. The notebook makes them and sends them."""

from __future__ import annotations

import os
import socket
from array import array
from collections.abc import Sequence
from mmap import mmap
from pathlib import Path

from graftlab.base.world import Place
from graftlab.errors import LaunchError
from graftlab.exchange.arena import Arena, create_segment
from graftlab.exchange.channel import SocketChannel
from graftlab.exchange.contract import Exchange
from graftlab.exchange.rank_exchange import RankExchange
from graftlab.grafting.tap_rows import PendingRow

# The system's limit is slightly higher.
_DESCRIPTORS_A_MESSAGE = 200
# Set on receipt where the system supports it, so that a program started at that moment does not inherit them.
_CLOSED_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
MEMORY_FILES = hasattr(os, "memfd_create")


class SharedDescriptors:
    """One segment for each rank, one socket pair for each two ranks, and optionally one store file for each side."""

    def __init__(self, places: list[Place]) -> None:
        self.segments: list[int] = []
        self.segment_size = 0
        self._places = places
        self._stores: dict[str, int] = {}
        self._links: dict[tuple[int, int], socket.socket] = {}

    def make(self, stores: Path | None = None) -> None:
        """Create them. With the folder ``stores`` each side gets the file of its rendezvous store.

        Raises :class:`LaunchError` where the system's limits are too low.
        """
        try:
            for _ in self._places:
                descriptor, self.segment_size = create_segment()
                self.segments.append(descriptor)
            if stores is not None:
                for side in ("baseline", "target"):
                    self._stores[side] = _make_store(stores / f"{side}.store")
            for one in range(len(self._places)):
                for other in range(one):
                    self._links[one, other], self._links[other, one] = socket.socketpair()
        except OSError as error:
            raise LaunchError(
                f"cannot create shared memory and sockets for {len(self._places)} ranks: {error}; "
                f"fewer ranks, or higher limits (ulimit -n, -f, -v), may help"
            ) from error

    def of(self, place: Place) -> list[int]:
        """Return one rank's descriptors: all segments, its sockets to the others, and its side's store if any."""
        me = place.world_rank
        links = [self._links[me, other].fileno() for other in range(len(self._places)) if other != me]
        stores = [self._stores[place.side]] if self._stores else []
        return [*self.segments, *links, *stores]

    def release(self) -> None:
        """Close the notebook's copies; the ranks have their own."""
        for descriptor in (*self.segments, *self._stores.values()):
            os.close(descriptor)
        for link in self._links.values():
            link.close()
        self.segments, self._stores, self._links = [], {}, {}


def send_descriptors(connection: socket.socket, descriptors: list[int]) -> None:
    """Send open descriptors to the process that calls :func:`receive_descriptors` at the other end."""
    for start in range(0, len(descriptors), _DESCRIPTORS_A_MESSAGE):
        socket.send_fds(connection, [b"d"], descriptors[start : start + _DESCRIPTORS_A_MESSAGE])


def receive_descriptors(connection: socket.socket, count: int) -> list[int]:
    """Receive the descriptors that precede the first message. Raises EOFError when the sender is gone."""
    connection.setblocking(True)
    descriptors = array("i")
    room = socket.CMSG_LEN(_DESCRIPTORS_A_MESSAGE * descriptors.itemsize)
    while len(descriptors) < count:
        # Not socket.recv_fds(), which ignores its flags.
        data, parts, _, _ = connection.recvmsg(1, room, _CLOSED_ON_EXEC)
        if not data:
            raise EOFError("the notebook ended before this rank had started")
        for _, _, numbers in parts:
            descriptors.frombytes(numbers)
    return descriptors.tolist()


def make_exchange(
    place: Place, descriptors: Sequence[int], segment_size: int, *, budget: int, timeout: float
) -> tuple[Exchange[PendingRow], mmap]:
    """Make this rank's exchange, and map its own segment, whose first page is its status page.

    ``descriptors`` are those of :meth:`SharedDescriptors.of`, without the store.
    """
    everyone = [other.world_rank for other in place.everyone()]
    segments, sockets = descriptors[: len(everyone)], descriptors[len(everyone) :]
    arenas = {}
    for world_rank, descriptor in zip(everyone, segments, strict=True):
        arenas[world_rank] = Arena(descriptor, segment_size, writable=world_rank == place.world_rank)
        os.close(descriptor)
    own = arenas.pop(place.world_rank)
    channels = (SocketChannel(socket.socket(fileno=descriptor)) for descriptor in sockets)
    links = {rank: (link, arenas[rank]) for rank, link in zip(arenas, channels, strict=True)}
    return RankExchange(place, own, links, budget=budget, timeout=timeout), own.map


def _make_store(path: Path) -> int:
    """Create the rendezvous store of a side's process group: an unnamed file where the system supports it."""
    if MEMORY_FILES:
        return os.memfd_create("graftlab-store", os.MFD_CLOEXEC)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
