"""Frames between processes that share no memory: over TCP, each end proved by the session's keys, all of it encrypted.

One ZeroMQ socket a process, which listens at one port and connects to those of others. Its own threads encrypt, send,
and look whether the other end is still there; so a rank that computes for minutes is not taken for dead, and one whose
machine is gone is noticed. A connection that ends is not made again: what was on its way is lost, and an exchange that
went on would have holes.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from graftlab.exchange.keys import Keys

if TYPE_CHECKING:
    from zmq.auth.thread import ThreadAuthenticator

HEARTBEAT = 2.0
"""Seconds between two looks whether the other end is there."""

SILENCE = 20.0
"""Seconds without an answer after which a connection counts as gone. A network that is away for five seconds may take
nine to deliver again, because TCP doubles its pauses."""

_CONNECT_LIMIT = 10.0
_NEVER = (1 << 31) - 1
_LINGER = 2.0
# Larger tensors travel in pieces of this size: one is encrypted while the one before is on the wire.
_PIECE = 4 << 20
# Of one byte each, which no frame of an exchange has.
_HELLO, _WELCOME, _BYE = b"h", b"w", b"b"
_DOMAIN = "graftlab"
# Nobody listens there, or who does has other keys.
_IN_VAIN = (
    zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

_posts: weakref.WeakSet[RouterSocket] = weakref.WeakSet()


class FrameWithPayload(bytes):
    """A frame, with what it brought along: bytes that were not copied on their way from the socket."""

    payload: Sequence[memoryview] = ()


class RemoteChannel:
    """The connection to one other process; the same to its user as :class:`.channel.Channel`. Any thread may send."""

    def __init__(self, post: RouterSocket, name: bytes, endpoint: str = "") -> None:
        self._post = post
        self.name = name
        # Where we have connected to; blank where the other end has.
        self.endpoint = endpoint
        self.closed = False
        # Whether somebody is there, who may have other keys or be no process of graftlab.
        self.reached = False
        # Whether the other end has proved to be there, and to know us.
        self.linked = False
        # The last that came from it said that it goes; else its connection ended without a word.
        self.said_goodbye = False
        # Nothing follows what has arrived.
        self.ended = False
        self.arrived: deque[bytes] = deque()

    def fileno(self) -> int:
        """Of all channels of this process: readable when something came for any."""
        return self._post.fileno()

    def send(self, payload: bytes, attached: memoryview | None = None) -> None:
        """Send one frame. What is ``attached`` is sent from where it lies, and must stay as it is until it is read.

        A frame for an end that is gone is dropped.
        """
        self._post.send(self, payload, attached)

    @property
    def backed_up(self) -> bool:
        return False

    def drain(self, timeout: float) -> bool:
        """Everything is with the socket already, which sends it in its own time."""
        return True

    def receive(self) -> list[bytes]:
        """Every whole frame that is there, without waiting. At the end of the connection ``closed`` becomes True."""
        return self._post.receive(self)

    def close(self) -> None:
        """End this connection; the other end is told."""
        self._post.end(self)


class RouterSocket:
    """A socket of this process for all others. ``name`` is how they call it, and nobody else's in the session.

    It listens at ``address``, if one is given, at one of these ports, or at any that is free.
    """

    def __init__(self, keys: Keys, name: bytes, address: str | None = None, ports: Sequence[int] = (0,)) -> None:
        """Raises OSError where it cannot listen there."""
        self.name = name
        self.over = threading.Event()
        self._keys = keys
        self._lock = threading.RLock()
        self._channels: dict[bytes, RemoteChannel] = {}
        self._by_descriptor: dict[int, RemoteChannel] = {}
        self._attempts = 0
        self._to_close: set[int] = set()
        self._context = zmq.Context()
        self._authenticator: ThreadAuthenticator | None = None
        self._socket = socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTING_ID, name)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # The buffer budget bounds what is on its way. Were the socket to stop reading it would miss heartbeats too.
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, int(_LINGER * 1000))
        # Never, in effect. Were it forbidden, what had come on a connection that ended would be thrown away with it.
        socket.setsockopt(zmq.RECONNECT_IVL, _NEVER)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, int(_CONNECT_LIMIT * 1000))
        socket.setsockopt(zmq.HANDSHAKE_IVL, int(_CONNECT_LIMIT * 1000))
        socket.setsockopt(zmq.HEARTBEAT_IVL, int(HEARTBEAT * 1000))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(SILENCE * 1000))
        socket.setsockopt(zmq.HEARTBEAT_TTL, int(SILENCE * 1000))
        # Takes names and addresses of either kind.
        socket.setsockopt(zmq.IPV6, 1)
        self._monitor = socket.get_monitor_socket(
            zmq.EVENT_LISTENING | zmq.EVENT_ACCEPTED | zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | _IN_VAIN
        )
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ready = select.epoll()
        for descriptor in (_descriptor(socket), _descriptor(self._monitor), self._wake):
            self._ready.register(descriptor, select.EPOLLIN)
        self.port = 0
        if address is not None:
            try:
                self._listen(address, ports)
            except OSError:
                self.close()
                raise
        # What listens goes on with the keys that it was given; from now on the socket connects, as another role.
        socket.setsockopt(zmq.CURVE_SERVER, 0)
        socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server_public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.client_secret)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.client_public)
        _posts.add(self)

    def _listen(self, address: str, ports: Sequence[int]) -> None:
        # Brings asyncio along, which most processes can do without.
        from zmq.auth.thread import ThreadAuthenticator

        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(_DOMAIN, credentials_provider=_SessionKeyCheck(self._keys))
        socket = self._socket
        socket.setsockopt_string(zmq.ZAP_DOMAIN, _DOMAIN)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys.server_secret)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._keys.server_public)
        why = ""
        for port in ports:
            try:
                socket.bind(f"tcp://{_bracketed(address)}:{port or '*'}")
            except zmq.ZMQError as error:
                why = error.strerror
                continue
            self.port = int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
            return
        shown = f"port {ports[0]}" if len(ports) == 1 else f"any of the ports {ports[0]} to {ports[-1]}"
        raise OSError(f"nothing can listen at {address}, {shown}: {why}")

    def fileno(self) -> int:
        """Readable when there may be something to :meth:`receive`."""
        return self._ready.fileno()

    # ---- connections --------------------------------------------------------------------------------------------

    def connect(self, name: bytes, address: str, port: int) -> RemoteChannel:
        """Begin to connect to the process of this name; ``linked`` of the channel says when it is there."""
        with self._lock:
            # ZeroMQ ends the process if a socket has two connections of one name, and one that failed may linger.
            self._attempts += 1
            label = name + b" %d" % self._attempts
            channel = RemoteChannel(self, label, f"tcp://{_bracketed(address)}:{port}")
            self._channels[label] = channel
            self._socket.setsockopt(zmq.CONNECT_ROUTING_ID, label)
            self._socket.connect(channel.endpoint)
            self._put(channel, _HELLO, None)
            return channel

    def forget(self, channel: RemoteChannel) -> None:
        """Give up a connection that did not come about, so that another may be tried."""
        with self._lock:
            self._note_end(channel)
            self._channels.pop(channel.name, None)

    def channels(self) -> list[RemoteChannel]:
        """All channels that there are: those we have made, and those of others who have connected."""
        with self._lock:
            return list(self._channels.values())

    def channel_from(self, name: bytes) -> RemoteChannel | None:
        """The channel to the process of this name, where it has connected to us."""
        with self._lock:
            return self._channels.get(name)

    def rouse(self) -> None:
        """Be readable: what came while others looked is with the channels, and the socket tells nobody of it."""
        with self._lock:
            if not self.over.is_set():
                os.eventfd_write(self._wake, 1)

    def send(self, channel: RemoteChannel, payload: bytes, attached: memoryview | None) -> None:
        with self._lock:
            if not (channel.closed or channel.ended):
                self._put(channel, payload, attached)

    def _put(self, channel: RemoteChannel, payload: bytes, attached: memoryview | None) -> None:
        socket = self._socket
        try:
            socket.send(channel.name, zmq.SNDMORE | zmq.DONTWAIT)
            if attached is None:
                socket.send(payload, zmq.DONTWAIT)
            else:
                socket.send(payload, zmq.SNDMORE | zmq.DONTWAIT)
                last = (len(attached) - 1) // _PIECE
                for number in range(last + 1):
                    piece = attached[number * _PIECE : (number + 1) * _PIECE]
                    socket.send(piece, zmq.DONTWAIT | (zmq.SNDMORE if number < last else 0), copy=False)
        except zmq.ZMQError as error:
            # It is gone; whoever receives has seen or will see the end.
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
        # To send reads the socket's own mail too: what came meanwhile would wake nobody.
        if _readable(socket):
            os.eventfd_write(self._wake, 1)

    def receive(self, channel: RemoteChannel) -> list[bytes]:
        with self._lock:
            self.pump()
            frames = list(channel.arrived)
            channel.arrived.clear()
            channel.closed |= channel.ended
            # What has just come for another channel, which may have been read a moment before, is told by nothing else.
            unread = any(each.arrived or (each.ended and not each.closed) for each in self._channels.values())
            if unread and not self.over.is_set():
                os.eventfd_write(self._wake, 1)
            return frames

    def collect(self) -> list[tuple[RemoteChannel, list[bytes]]]:
        """The same of all channels that have something, or have ended, at once: with a thousand of them to ask each
        takes far longer than to read."""
        with self._lock:
            self.pump()
            news = [each for each in self._channels.values() if each.arrived or (each.ended and not each.closed)]
            collected = []
            for channel in news:
                collected.append((channel, list(channel.arrived)))
                channel.arrived.clear()
                channel.closed |= channel.ended
            return collected

    def pump(self) -> None:
        """Bring every frame that has come to its channel, and note new connections and ends. Does not wait."""
        with self._lock:
            if self.over.is_set():
                return
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            # First: what such a connection had brought is read below.
            ended = self._look_at_connections()
            while True:
                try:
                    parts = self._socket.recv_multipart(zmq.DONTWAIT, copy=False)
                except zmq.Again:
                    break
                ended += self._take(parts)
            for channel in ended:
                self._note_end(channel)

    def _note_end(self, channel: RemoteChannel) -> None:
        """Nothing comes from there any more, and all that came has been read."""
        known, channel.ended = channel.ended, True
        # Once: another try may be on its way to the same endpoint.
        if channel.endpoint and not known:
            # Else what was sent in vain would wait for a connection that will never be.
            self._socket.setsockopt(zmq.LINGER, 0)
            with contextlib.suppress(zmq.ZMQError):
                self._socket.disconnect(channel.endpoint)
            self._socket.setsockopt(zmq.LINGER, int(_LINGER * 1000))

    def _look_at_connections(self) -> list[RemoteChannel]:
        """Read what the socket says of its connections; returns those that have ended."""
        ended = []
        while _readable(self._monitor):
            event = recv_monitor_message(self._monitor, zmq.DONTWAIT)
            descriptor = int(event["value"])
            if event["event"] == zmq.EVENT_DISCONNECTED:
                self._to_close.discard(descriptor)
                channel = self._by_descriptor.pop(descriptor, None)
                if channel is not None:
                    ended.append(channel)
            elif event["event"] & _IN_VAIN:
                where = event["endpoint"].decode()
                ended += [each for each in self._channels.values() if each.endpoint == where and not each.linked]
            else:
                self._to_close.add(descriptor)
                if event["event"] == zmq.EVENT_CONNECTED:
                    self._note_reached(event["endpoint"].decode(), descriptor)
        return ended

    def _note_reached(self, where: str, descriptor: int) -> None:
        for channel in self._channels.values():
            if channel.endpoint == where and not (channel.linked or channel.ended):
                channel.reached = True
                # Its end may come before a word does.
                self._by_descriptor[descriptor] = channel

    def _take(self, parts: Sequence[zmq.Frame]) -> list[RemoteChannel]:
        """One message. Returns connections that are now known to have ended."""
        name, body = parts[0].bytes, parts[1].bytes if len(parts) > 1 else b""
        channel = self._channels.get(name)
        if body in (_HELLO, _WELCOME):
            # The system gives numbers of ended connections to new ones: note the ends before the beginning.
            ended = self._look_at_connections()
            if channel is None:
                channel = self._channels[name] = RemoteChannel(self, name)
            channel.linked = True
            self._by_descriptor[parts[0].get(zmq.SRCFD)] = channel
            if body == _HELLO:
                self._put(channel, _WELCOME, None)
            return ended
        if channel is None or channel.closed:
            return []
        if body == _BYE:
            channel.said_goodbye = True
            return [channel]
        frame = body
        if len(parts) > 2:
            frame = FrameWithPayload(body)
            frame.payload = [part.buffer for part in parts[2:]]
        channel.arrived.append(frame)
        return []

    # ---- the end ------------------------------------------------------------------------------------------------

    def end(self, channel: RemoteChannel) -> None:
        with self._lock:
            self._channels.pop(channel.name, None)
            if channel.closed:
                return
            self.pump()
            if not (self.over.is_set() or channel.ended):
                self._put(channel, _BYE, None)
            channel.closed = True
            channel.arrived.clear()

    def close(self) -> None:
        """End all connections. What was sent goes on its way first, as long as it may linger."""
        with self._lock:
            if self.over.is_set():
                return
            self.pump()
            self.over.set()
            for channel in self._channels.values():
                if not (channel.closed or channel.ended):
                    self._put(channel, _BYE, None)
                    channel.closed = True
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._socket.close()
            if self._authenticator is not None:
                self._authenticator.stop()
            self._context.term()
            self._ready.close()
            os.close(self._wake)

    # ---- children -----------------------------------------------------------------------------------------------

    def _before_fork(self) -> None:
        self._lock.acquire()
        if not self.over.is_set():
            for channel in self._look_at_connections():
                channel.ended = True
                os.eventfd_write(self._wake, 1)

    def _after_fork(self) -> None:
        self._lock.release()

    def _release_in_child(self) -> None:
        # The connection ends when the last process that holds it is gone: a data loader's workers must not outlive
        # its rank. ZeroMQ itself is not to be touched here, where its threads are not.
        for descriptor in self._to_close:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self.over.set()
        self._lock = threading.RLock()
        for channel in self._channels.values():
            channel.closed = True


class _SessionKeyCheck:
    """Says which keys may connect."""

    def __init__(self, keys: Keys) -> None:
        self._known = keys.client_public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._known


def _readable(socket: zmq.Socket[bytes]) -> bool:
    events: Any = socket.getsockopt(zmq.EVENTS)
    return bool(events & zmq.POLLIN)


def _descriptor(socket: zmq.Socket[bytes]) -> int:
    found: Any = socket.getsockopt(zmq.FD)
    return int(found)


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _each(call: str) -> Any:
    def tell() -> None:
        for post in list(_posts):
            getattr(post, call)()

    return tell


os.register_at_fork(
    before=_each("_before_fork"),
    after_in_parent=_each("_after_fork"),
    after_in_child=_each("_release_in_child"),
)
