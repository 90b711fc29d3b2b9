"""Connections whose other ends have not proved yet that they know the token: few, and none for long.

ZeroMQ accepts every connection. Each takes a descriptor of this process, and memory for up to one piece of a frame.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import socket
import time
from collections.abc import Callable

# The most at a time: each can make this process hold one piece of a frame, and all of them 56 MiB.
_MOST = 100
# The most that are older than this, in seconds. Many ranks may connect at the same time, but each is quick.
_MOST_SLOW, _SLOW = 8, 2.0
# Descriptors reserved for the session's own connections and files.
_RESERVED = 64


class UnauthenticatedConnections:
    """Those of one socket. ``known`` has the time at which each was accepted, by descriptor. Not thread-safe."""

    def __init__(self) -> None:
        self.known: dict[int, float] = {}
        # These exist already, because there may be no descriptor left when one is needed.
        self._nothing = os.eventfd(0, os.EFD_CLOEXEC)
        self._spare = os.dup(self._nothing)

    def add(self, descriptor: int) -> None:
        """Note a connection that was just accepted."""
        self.known[descriptor] = time.monotonic()

    def superfluous(self) -> list[int]:
        """The connections to end now.

        The oldest slow ones, and random others: in a flood neither the oldest nor the newest of those are more likely
        to know no token.
        """
        if len(self.known) <= _MOST_SLOW:
            return []
        before = time.monotonic() - _SLOW
        slow = sorted((each for each, since in self.known.items() if since < before), key=self.known.__getitem__)
        chosen = slow[: max(0, len(slow) - _MOST_SLOW)]
        rest = sorted(self.known.keys() - set(chosen))
        most = _MOST
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if limit != resource.RLIM_INFINITY and rest and rest[-1] >= limit - _RESERVED:
            # The system gives the lowest number that is free.
            most = _MOST_SLOW
        return chosen + random.sample(rest, max(0, len(rest) - most))

    def end(self, descriptor: int, look: Callable[[], None]) -> None:
        """End a connection, unless ``look``, which brings :attr:`known` up to date, finds that it has ended."""
        since = self.known.get(descriptor)
        with contextlib.suppress(OSError):
            # Held first, because once it is closed its number may belong to something else.
            os.dup2(descriptor, self._spare, inheritable=False)
            try:
                look()
                if since is not None and self.known.get(descriptor) == since:
                    del self.known[descriptor]
                    connection = socket.socket(fileno=self._spare)
                    try:
                        connection.shutdown(socket.SHUT_RDWR)
                    finally:
                        connection.detach()
            finally:
                os.dup2(self._nothing, self._spare, inheritable=False)

    def close(self) -> None:
        """Close what is held open for :meth:`end`."""
        os.close(self._spare)
        os.close(self._nothing)
