"""The rank's own end of what it was handed: descriptors become its exchange."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from mmap import mmap

from graftlab.base.world import Place
from graftlab.exchange.arena import Arena
from graftlab.exchange.channel import SocketChannel
from graftlab.exchange.contract import Exchange
from graftlab.exchange.rank_exchange import RankExchange
from graftlab.grafting.receive_pipeline import PendingRow


def exchange_of(
    place: Place, descriptors: Sequence[int], segment_size: int, *, budget: int, timeout: float
) -> tuple[Exchange[PendingRow], mmap]:
    """The exchange of this rank, and its own segment's map, whose first page says where it is.

    ``descriptors`` are what :meth:`graftlab.ranks.shared.Shared.of` gave, without a store.
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
