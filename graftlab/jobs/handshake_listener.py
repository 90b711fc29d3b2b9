"""The listener of a session server: gives each process that connects a thread and a limited time for its handshake."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import socket
import threading
import time
from collections.abc import Callable

from graftlab.errors import GraftError, SessionError
from graftlab.jobs.refusals import RefusalLog
from graftlab.jobs.rendezvous import peer_uid

logger = logging.getLogger(__name__)

# Seconds that a process has, once connected, to send the beginning of its request, and all of it.
_SILENCE_LIMIT = 10.0
_HANDSHAKE_LIMIT = 30.0
# How many handshakes may be in progress; each has a thread and a descriptor.
_MOST_HANDSHAKES = 64


class HandshakeListener:
    """Calls ``accept`` with the connection of each process of this user, and closes the connection when it returns.

    ``accept`` runs on the connection's thread. If it raises an :class:`OSError`, :class:`EOFError` or
    :class:`GraftError`, the process is refused.
    """

    def __init__(self, listener: socket.socket, accept: Callable[[socket.socket], None], refusals: RefusalLog) -> None:
        self._listener = listener
        self._accept = accept
        self._refusals = refusals
        # The threads that wait for a process's request, each with its connection and its deadline.
        self._handshakes: dict[threading.Thread, tuple[socket.socket, float]] = {}
        self._wake = os.eventfd(0)
        self._thread = threading.Thread(target=self._serve, name="graftlab-session-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all handshakes, and accept no further connections. The listening socket stays open."""
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)

    def _serve(self) -> None:
        poller = select.poll()
        poller.register(self._listener, select.POLLIN)
        poller.register(self._wake, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poller.poll(1000 if self._handshakes else None)}
            if self._wake in ready:
                break
            self._end_handshakes(time.monotonic())
            if ready:
                try:
                    connection, _ = self._listener.accept()
                except OSError as error:
                    logger.warning("a process cannot connect: %s", error)
                    # Descriptors become free when other connections end.
                    select.select([self._wake], [], [], 1.0)
                    continue
                # In parallel, so that a process that connects and is silent delays no other.
                thread = threading.Thread(
                    target=self._shake_hands, args=(connection,), name="graftlab-handshake", daemon=True
                )
                self._handshakes[thread] = connection, time.monotonic() + _HANDSHAKE_LIMIT
                thread.start()
        for thread in self._end_handshakes(math.inf):
            thread.join()

    def _end_handshakes(self, now: float) -> list[threading.Thread]:
        """End the handshakes whose time is over, and the oldest if there are too many; returns their threads."""
        self._handshakes = {thread: each for thread, each in self._handshakes.items() if thread.is_alive()}
        ended = []
        for thread, (connection, end) in list(self._handshakes.items()):
            if end <= now or len(self._handshakes) >= _MOST_HANDSHAKES:
                # The thread may already have closed it.
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
                del self._handshakes[thread]
                ended.append(thread)
        return ended

    def _shake_hands(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(_SILENCE_LIMIT)
            try:
                if (uid := peer_uid(connection)) != os.getuid():
                    raise SessionError(f"it belongs to user {uid}, not {os.getuid()}")
                self._accept(connection)
            except (OSError, EOFError, GraftError) as error:
                self._refusals.warn(f"a process was refused: {error}")
