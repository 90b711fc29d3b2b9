"""Lines to other machines: a thread that passes on what comes, between their connections and sockets of this process.

So whoever has an end of a line, a rank or the hub, does not know how long it is. Frames travel in bundles: to encrypt
and to send one costs far more than a row does.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from graftlab.errors import GraftError, MessageError
from graftlab.exchange.channel import Channel, frames_in
from graftlab.exchange.tcp import RemoteChannel, RouterSocket

HOST = b"host"
"""How the far end of a job's connection is called."""

logger = logging.getLogger(__name__)

# Of frames that are no rows, which should be read now.
_MESSAGE = b"m"
# Milliseconds for which what a rank says gathers, unless its bell rings. They are few, because what has not travelled
# when a process is killed is lost.
_REST = 2


@dataclass
class _Pair:
    far: RemoteChannel
    near: Channel
    bell: socket.socket | None


class Relay:
    """Passes on until :meth:`close`. ``on_stranger`` gets the first frame of a connection that is of no line yet."""

    def __init__(self, post: RouterSocket, on_stranger: Callable[[RemoteChannel, bytes], None] | None = None) -> None:
        self._post = post
        self._on_stranger = on_stranger
        self._pairs: dict[RemoteChannel, _Pair] = {}
        self._lock = threading.Lock()
        self._closing = False
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._serve, name="graftlab-relay", daemon=True)
        self._thread.start()

    def join(
        self,
        far: RemoteChannel,
        near: socket.socket,
        bell: socket.socket | None = None,
        early: Sequence[bytes] = (),
    ) -> None:
        """Pass on between these two from now on, and first the bundles that came ``early`` from afar.

        The bell is rung for what should be read at once, at either end.
        """
        pair = _Pair(far, Channel(near), bell)
        if bell is not None:
            bell.setblocking(False)
        for bundle in early:
            self._bring(pair, bundle)
        with self._lock:
            self._pairs[far] = pair
        self._wake()

    def close(self, *, when_done: bool = False, timeout: float = 5.0) -> None:
        """Pass on what has come, and end every line; with ``when_done``, once the ends in this process are closed."""
        if not when_done or not self._pairs:
            self._closing = True
            self._wake()
        self._thread.join(timeout)
        if self._thread.is_alive():
            self._closing = True
            self._wake()
            self._thread.join(timeout)

    def _wake(self) -> None:
        # Its descriptors end with it.
        if self._thread.is_alive():
            with contextlib.suppress(OSError):
                os.write(self._wake_write, b"x")

    def _serve(self) -> None:
        try:
            self._pass_on()
        except Exception:
            # Whoever has an end of a line sees that it has ended, and goes on without.
            logger.exception("the lines to other machines are cut")
        finally:
            for pair in list(self._pairs.values()):
                pair.near.drain(1.0)
                self._end(pair)
            self._post.close()
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _pass_on(self) -> None:
        poller = select.poll()
        poller.register(self._post.fileno(), select.POLLIN)
        poller.register(self._wake_read, select.POLLIN)
        watched: set[int] = set()
        had_lines = False
        while not self._closing:
            with self._lock:
                near = {pair.near.fileno() for pair in self._pairs.values()}
            for descriptor in near - watched:
                poller.register(descriptor, select.POLLIN)
            for descriptor in watched - near:
                with contextlib.suppress(KeyError, OSError):
                    poller.unregister(descriptor)
            watched = near
            had_lines |= bool(near)
            if had_lines and not near and self._on_stranger is None:
                break
            ready = {descriptor for descriptor, _ in poller.poll()}
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)
            self._from_afar()
            for pair in list(self._pairs.values()):
                if pair.near.fileno() in ready:
                    self._from_near(pair)
            # Who lets strangers in speaks for the notebook, which sends little, and nothing that may wait.
            if self._on_stranger is None and near & ready:
                self._rest()
        self._from_afar()
        for pair in list(self._pairs.values()):
            self._from_near(pair)

    def _from_afar(self) -> None:
        for far, frames in self._post.collect():
            pair = self._pairs.get(far)
            for frame in frames:
                if pair is not None:
                    try:
                        self._bring(pair, frame)
                    except MessageError as error:
                        logger.error("a line to another machine is cut: %s", error)
                        far.close()
                        break
                else:
                    self._meet(far, frame)
                    pair = self._pairs.get(far)
            if far.closed:
                if pair is not None:
                    # What it had said last is still to be read.
                    pair.near.drain(1.0)
                    self._end(pair)
                else:
                    far.close()

    def _meet(self, far: RemoteChannel, frame: bytes) -> None:
        if self._on_stranger is None:
            return
        try:
            self._on_stranger(far, frame)
        except (GraftError, OSError) as error:
            logger.warning("a process on another machine that wanted to join was not let in: %s", error)
            far.close()

    def _bring(self, pair: _Pair, bundle: bytes) -> None:
        """Hand on what came from afar. Raises :class:`MessageError`."""
        # All of it, because half a frame would spoil whatever follows it.
        places = list(frames_in(bundle))
        rings = any(bundle.startswith(_MESSAGE, start) for start, _ in places)
        pair.near.send_bundle(bundle)
        if rings and pair.bell is not None:
            # A full bell rings already.
            with contextlib.suppress(OSError):
                pair.bell.send(b"!")

    def _rest(self) -> None:
        poller, bells = select.poll(), [pair.bell for pair in self._pairs.values() if pair.bell is not None]
        for descriptor in (self._post.fileno(), self._wake_read, *(bell.fileno() for bell in bells)):
            poller.register(descriptor, select.POLLIN)
        poller.poll(_REST)
        for bell in bells:
            with contextlib.suppress(OSError):
                bell.recv(4096)

    def _from_near(self, pair: _Pair) -> None:
        if bundle := pair.near.receive_bundle():
            pair.far.send(bundle)
        if pair.near.closed:
            self._end(pair)

    def _end(self, pair: _Pair) -> None:
        with self._lock:
            self._pairs.pop(pair.far, None)
        pair.far.close()
        pair.near.close()
        if pair.bell is not None:
            pair.bell.close()
