"""Control connections to other machines: a thread that forwards frames between TCP and sockets of this process.

The rank at one end and the hub at the other have sockets, as on one machine. Frames are sent in bundles, because
encrypting and sending a single frame costs far more than a row.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from graftlab.config import Endpoint
from graftlab.errors import GraftError, MessageError
from graftlab.exchange.channel import SocketChannel, frames_in
from graftlab.exchange.keys import derive_keys
from graftlab.exchange.tcp import RouterSocket, TcpChannel
from graftlab.jobs.handshake import JoinRequest, pack_handshake, unpack_handshake
from graftlab.jobs.refusals import RefusalLog

logger = logging.getLogger(__name__)

SERVER_NAME = b"session server"
"""The name under which jobs connect to a session server."""

# The first byte of a frame that is not a row, and should be read at once.
_MESSAGE = b"m"
# Milliseconds for which a rank's frames are gathered, unless it wakes its reader. Few, because unsent frames are lost
# if the process is killed.
_GATHER = 2

Ends = tuple[socket.socket, socket.socket]
"""A socket for frames, and one that wakes the reader at the other end."""

OnFirstFrame = Callable[[TcpChannel, bytes], Ends | None]
"""Receives the first frame of a new connection, and returns the ends to which the following frames are forwarded."""


@dataclass
class _ForwardedPair:
    far: TcpChannel
    near: SocketChannel
    wake: socket.socket


class Proxy:
    """Forwards until :meth:`close`. With ``on_first_frame`` it accepts connections; without, it begins with its first
    and ends with its last.
    """

    def __init__(self, router: RouterSocket, on_first_frame: OnFirstFrame | None = None) -> None:
        self._router = router
        self._on_first_frame = on_first_frame
        self._pairs: dict[TcpChannel, _ForwardedPair] = {}
        self._lock = threading.Lock()
        self._closing = self._ended = False
        self._refusals = RefusalLog()
        self._wake = os.eventfd(0)
        self._thread = threading.Thread(target=self._serve, name="graftlab-proxy", daemon=True)
        self._starting = threading.Lock()
        # A job's thread starts with its first connection: until then, it would drop what arrives.
        if on_first_frame is not None:
            self._start()

    def forward(self, far: TcpChannel, near: Ends, early: Sequence[bytes] = ()) -> None:
        """Forward between these from now on, first the bundles that have arrived ``early``."""
        connection, wake = near
        wake.setblocking(False)
        pair = _ForwardedPair(far, SocketChannel(connection), wake)
        for bundle in early:
            self._deliver(pair, bundle)
        with self._lock:
            self._pairs[far] = pair
        self._start()
        self._wake_thread()

    def _start(self) -> None:
        with self._starting:
            if self._thread.ident is None and not self._ended:
                self._thread.start()

    def close(self, *, when_done: bool = False, timeout: float = 5.0) -> None:
        """Forward arrived frames, and end every connection; with ``when_done``, once this process closes its ends."""
        # The thread ends with its last connection, and so not by itself if it never had one.
        if when_done and self._pairs:
            self._thread.join(timeout)
        self._closing = True
        with self._starting:
            if self._thread.ident is None:
                # Python 3.12.1 starts no thread while the interpreter ends.
                self._close_all()
                return
        self._wake_thread()
        self._thread.join(timeout)

    def _wake_thread(self) -> None:
        with self._lock:
            # Once the thread has closed the descriptor, its number may belong to another file.
            if not self._ended:
                os.eventfd_write(self._wake, 1)

    # ---- on its own thread --------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            self._forward_all()
        except Exception:
            # Both ends see their connection end, and continue without it.
            logger.exception("the proxy for other machines failed; every connection through it ends")
        finally:
            self._close_all()

    def _close_all(self) -> None:
        for pair in list(self._pairs.values()):
            pair.near.drain(1.0)
            self._end(pair)
        self._refusals.close()
        self._router.close()
        with self._lock:
            if not self._ended:
                self._ended = True
                os.close(self._wake)

    def _forward_all(self) -> None:
        poller = select.poll()
        poller.register(self._router.fileno(), select.POLLIN)
        poller.register(self._wake, select.POLLIN)
        watched: set[int] = set()
        while not self._closing:
            with self._lock:
                near = {pair.near.fileno() for pair in self._pairs.values()}
            for descriptor in near - watched:
                poller.register(descriptor, select.POLLIN)
            for descriptor in watched - near:
                with contextlib.suppress(KeyError, OSError):
                    poller.unregister(descriptor)
            watched = near
            if not near and self._on_first_frame is None:
                break
            ready = {descriptor for descriptor, _ in poller.poll()}
            if self._wake in ready:
                os.eventfd_read(self._wake)
            self._forward_from_far()
            for pair in list(self._pairs.values()):
                if pair.near.fileno() in ready:
                    self._forward_from_near(pair)
            # A session server sends little, and all of it is urgent.
            if self._on_first_frame is None and near & ready:
                self._gather()
        self._forward_from_far()
        for pair in list(self._pairs.values()):
            self._forward_from_near(pair)

    def _forward_from_far(self) -> None:
        for far, frames in self._router.collect():
            pair = self._pairs.get(far)
            for frame in frames:
                if pair is None:
                    self._begin(far, frame)
                    pair = self._pairs.get(far)
                    continue
                try:
                    self._deliver(pair, frame)
                except MessageError as error:
                    self._refusals.warn(f"the connection to another machine is cut: {error}")
                    far.close()
                    break
            if far.closed:
                if pair is None:
                    far.close()
                else:
                    # The last frames have yet to be read.
                    pair.near.drain(1.0)
                    self._end(pair)

    def _begin(self, far: TcpChannel, frame: bytes) -> None:
        if self._on_first_frame is None:
            return
        try:
            near = self._on_first_frame(far, frame)
        except (GraftError, OSError) as error:
            self._refusals.warn(f"a process on another machine was refused: {error}")
            far.close()
        else:
            if near is not None:
                self.forward(far, near)

    def _deliver(self, pair: _ForwardedPair, bundle: bytes) -> None:
        """Forward a bundle from the other machine. Raises :class:`MessageError`."""
        # Checked as a whole, because half a frame would spoil all frames after it.
        spans = list(frames_in(bundle))
        wakes = any(bundle.startswith(_MESSAGE, start) for start, _ in spans)
        pair.near.send_bundle(bundle)
        if wakes:
            # A full socket wakes the reader anyway.
            with contextlib.suppress(OSError):
                pair.wake.send(b"!")

    def _gather(self) -> None:
        poller = select.poll()
        wakes = [pair.wake for pair in self._pairs.values()]
        for descriptor in (self._router.fileno(), self._wake, *(wake.fileno() for wake in wakes)):
            poller.register(descriptor, select.POLLIN)
        poller.poll(_GATHER)
        for wake in wakes:
            with contextlib.suppress(OSError):
                wake.recv(4096)

    def _forward_from_near(self, pair: _ForwardedPair) -> None:
        if bundle := pair.near.receive_bundle():
            pair.far.send(bundle)
        if pair.near.closed:
            self._end(pair)

    def _end(self, pair: _ForwardedPair) -> None:
        with self._lock:
            del self._pairs[pair.far]
        pair.far.close()
        pair.near.close()
        pair.wake.close()


class TcpListener:
    """The port at which a session server accepts jobs of other machines, from :meth:`open` on.

    A process that does not know the token cannot send a single frame.
    """

    def __init__(self, endpoint: Endpoint, token: str) -> None:
        """Raises OSError if it cannot listen there, and :class:`ConfigError` for a token that could be guessed."""
        self.token = token
        self._router = RouterSocket(derive_keys(token), SERVER_NAME, endpoint.host, (endpoint.port,))
        self.endpoint = Endpoint(endpoint.host, self._router.port)
        self._proxy: Proxy | None = None

    def open(self, on_first_frame: OnFirstFrame) -> None:
        """Accept connections. ``on_first_frame`` is called on the proxy's thread."""
        self._proxy = Proxy(self._router, on_first_frame)

    def close(self) -> None:
        if self._proxy is None:
            self._router.close()
        else:
            self._proxy.close()


class TcpSessionClient:
    """A job's connection to a session server on another machine, from the first request on."""

    def __init__(self, endpoint: Endpoint, token: str) -> None:
        self._router = RouterSocket(derive_keys(token), b"job " + secrets.token_hex(8).encode())
        self._channel = self._router.connect(SERVER_NAME, *endpoint)

    @property
    def reached_unauthenticated(self) -> bool:
        """Whether a process listens there that has not proved that it knows the token."""
        return self._channel.reached and not self._channel.linked

    def ask(self, request: JoinRequest, limit: float) -> tuple[Any, list[bytes]] | None:
        """Return the answer, and the frames that came with it; None if none came within ``limit`` seconds."""
        self._channel.send(pack_handshake(request))
        deadline = time.monotonic() + limit
        while (remaining := deadline - time.monotonic()) > 0:
            frames = self._channel.receive()
            if frames:
                return unpack_handshake(frames[0]), frames[1:]
            if self._channel.closed:
                break
            select.select([self._router], [], [], remaining)
        self.close()
        return None

    def open_connection(self, early: list[bytes]) -> tuple[SocketChannel, socket.socket, Proxy]:
        """Return the job's ends of its control connection, and the proxy that forwards between them and the server."""
        near, far = socket.socketpair()
        wake, far_wake = socket.socketpair()
        proxy = Proxy(self._router)
        proxy.forward(self._channel, (far, far_wake), early)
        return SocketChannel(near), wake, proxy

    def close(self) -> None:
        self._router.close()
