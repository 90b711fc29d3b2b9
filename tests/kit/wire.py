"""Cables that are slow, lose packets and change their order: a process that carries Ethernet frames between namespaces.

``tc netem`` does the same where the system's kernel has it; this works on any that has ``/dev/net/tun``.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import sys
import time
from pathlib import Path

_TUNSETIFF = 0x400454CA
_TAP, _NO_HEADER = 0x0002, 0x1000
_NEW_NETWORK = 0x40000000


def plug(namespace: str, name: str) -> int:
    """The other end of a new network interface in this namespace."""
    space = os.open(Path("/run/netns") / namespace, os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(space, _NEW_NETWORK):
        raise OSError(ctypes.get_errno(), f"the namespace {namespace} cannot be entered")
    os.close(space)
    interface = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(interface, _TUNSETIFF, struct.pack("16sH", name.encode(), _TAP | _NO_HEADER))
    return interface


def carry(ends: dict[int, int], delay: float, lost: float, jitter: float) -> None:
    """Pass on what comes out of each end, all but this share of it, ``delay`` to ``delay + jitter`` seconds later.

    Packets overtake each other within that time.
    """
    chance, count = random.Random(0), itertools.count()
    on_their_way: list[tuple[float, int, int, bytes]] = []
    while True:
        wait = max(0.0, on_their_way[0][0] - time.monotonic()) if on_their_way else None
        for end in select.select(list(ends), [], [], wait)[0]:
            try:
                frame = os.read(end, 65536)
            except OSError:
                continue  # the interface is not up
            if chance.random() >= lost:
                due = time.monotonic() + delay + jitter * chance.random()
                heapq.heappush(on_their_way, (due, next(count), ends[end], frame))
        while on_their_way and on_their_way[0][0] <= time.monotonic():
            *_, end, frame = heapq.heappop(on_their_way)
            try:
                os.write(end, frame)
            except OSError:
                continue  # as above


def main() -> None:
    delay, lost, jitter, switch, *names = sys.argv[1:]
    ends = {}
    for number, name in enumerate(names):
        one, other = plug(name, "eth0"), plug(switch, f"p{number}")
        ends[one], ends[other] = other, one
    print("ready", flush=True)
    carry(ends, float(delay), float(lost), float(jitter))


if __name__ == "__main__":
    main()
