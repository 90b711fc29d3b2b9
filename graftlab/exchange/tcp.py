"""Frames between processes that share no memory: over TCP, authenticated by the session's keys, and encrypted.

Each process has one ZeroMQ socket, which listens at one port and connects to those of others. ZeroMQ's own threads
encrypt, send, and ping the other end. So a rank that computes for minutes does not count as dead, and the loss of a
machine is noticed. A connection that has ended is not reopened: the frames in transit were lost, and an exchange that
continued without them would be wrong.
"""

from __future__ import annotations

import contextlib
import os
import select
import struct
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from graftlab.exchange.keys import Keys
from graftlab.exchange.unauthenticated import UnauthenticatedConnections

if TYPE_CHECKING:
    from zmq.auth.thread import ThreadAuthenticator

PING_INTERVAL = 2.0
"""Seconds between two pings to the other end."""

PING_TIMEOUT = 20.0
"""Seconds without an answer after which a connection counts as lost. After an outage of five seconds a network may take
nine to deliver again, because TCP doubles its pauses."""

_CONNECT_LIMIT = 10.0
_NEVER = (1 << 31) - 1
_LINGER = 2.0
# Larger frames and tensors are sent in pieces of this size, so that one is encrypted while the previous one is
# transmitted. A process that has not yet proved that it knows the token can make this one hold little more than that.
_PIECE = 512 << 10
_LARGEST_PIECE = _PIECE + (64 << 10)
# One byte each; every frame of an exchange is longer. After the last comes the number of the frame's pieces.
_HELLO, _WELCOME, _BYE, _IN_PIECES = b"h", b"w", b"b", b"p"
_COUNT = struct.Struct("<I")
# Between the name of the process that connects and the number of its attempt.
_ATTEMPT = b"#"
_DOMAIN = "graftlab"
# No process listens there, or its keys are different.
_CONNECT_FAILED = (
    zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

_sockets: weakref.WeakSet[RouterSocket] = weakref.WeakSet()


class FrameWithPayload(bytes):
    """A frame with its attached bytes, which were not copied after ZeroMQ received them."""

    payload: Sequence[memoryview] = ()


class TcpChannel:
    """A connection to one other process, with the methods of :class:`.channel.Channel`. Any thread may send."""

    def __init__(self, router: RouterSocket, name: bytes, endpoint: str = "") -> None:
        self._router = router
        self.name = name
        # The address connected to; blank where the other end made the connection.
        self.endpoint = endpoint
        self.closed = False
        # Whether a TCP connection exists. Its other end may have different keys, or not be graftlab.
        self.reached = False
        # Whether the other end has proved that it has the session's keys, and has answered.
        self.linked = False
        # Whether the other end has closed the connection deliberately.
        self.said_goodbye = False
        # Whether nothing will arrive after what is in ``arrived``.
        self.ended = False
        self.arrived: deque[bytes] = deque()

    def fileno(self) -> int:
        """The descriptor that all channels of this process share: readable when a frame has arrived for any of them."""
        return self._router.fileno()

    def send(self, payload: bytes | bytearray, attached: memoryview | None = None) -> None:
        """Send one frame. ``attached`` is sent without a copy, and must not change until the receiver has it.

        A frame is dropped when the other end is gone.
        """
        self._router.send(self, payload, attached)

    def drain(self, timeout: float) -> bool:
        """Return True: ZeroMQ has every frame already, and sends them in the background."""
        return True

    def receive(self) -> list[bytes]:
        """Return all frames that have arrived, without waiting. When the connection has ended, sets ``closed``."""
        return self._router.receive(self)

    def close(self) -> None:
        """Close the connection, and notify the other end."""
        self._router.end(self)


class RouterSocket:
    """This process's ZeroMQ ROUTER socket for all its connections. ``name`` identifies it uniquely in the session.

    It listens at ``address``, if given, at the first free one of these ports; port 0 lets the system choose. What
    connects there is unauthenticated until its first frame arrives; see :class:`UnauthenticatedConnections`.
    """

    def __init__(self, keys: Keys, name: bytes, address: str | None = None, ports: Sequence[int] = (0,)) -> None:
        """Raises OSError when it cannot listen there."""
        self.name = name
        self.over = threading.Event()
        self._keys = keys
        self._lock = threading.RLock()
        self._channels: dict[bytes, TcpChannel] = {}
        self._by_descriptor: dict[int, TcpChannel] = {}
        self._attempts = 0
        # The latest channel that each process has opened, and the number of that attempt.
        self._latest: dict[bytes, tuple[int, TcpChannel]] = {}
        self._to_close: set[int] = set()
        self._unauthenticated = UnauthenticatedConnections()
        self._context = zmq.Context()
        self._authenticator: ThreadAuthenticator | None = None
        self._socket = socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # The buffer budget bounds the frames in transit. A socket that stopped reading would also miss pings.
        socket.set_hwm(0)
        # ZeroMQ closes a connection that claims a larger one, before it has read it.
        socket.setsockopt(zmq.MAXMSGSIZE, _LARGEST_PIECE)
        socket.setsockopt(zmq.LINGER, int(_LINGER * 1000))
        # In effect never reconnect. With -1, which forbids it, ZeroMQ would drop frames that arrived before the
        # connection ended.
        socket.setsockopt(zmq.RECONNECT_IVL, _NEVER)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, int(_CONNECT_LIMIT * 1000))
        socket.setsockopt(zmq.HANDSHAKE_IVL, int(_CONNECT_LIMIT * 1000))
        socket.setsockopt(zmq.HEARTBEAT_IVL, int(PING_INTERVAL * 1000))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(PING_TIMEOUT * 1000))
        socket.setsockopt(zmq.HEARTBEAT_TTL, int(PING_TIMEOUT * 1000))
        # Accept IPv4 and IPv6 addresses, and host names.
        socket.setsockopt(zmq.IPV6, 1)
        self._monitor = socket.get_monitor_socket(
            zmq.EVENT_LISTENING | zmq.EVENT_ACCEPTED | zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | _CONNECT_FAILED
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
        # The listening part keeps its keys; these are for the connections that the socket makes.
        socket.setsockopt(zmq.CURVE_SERVER, 0)
        socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server_public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.client_secret)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.client_public)
        _sockets.add(self)

    def _listen(self, address: str, ports: Sequence[int]) -> None:
        # Imported here because it imports asyncio, which most processes do not need.
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
        raise OSError(f"cannot listen at {address}, {shown}: {why}")

    def fileno(self) -> int:
        """A descriptor that is readable when there may be frames to :meth:`receive`."""
        return self._ready.fileno()

    # ---- connections --------------------------------------------------------------------------------------------

    def connect(self, name: bytes, address: str, port: int) -> TcpChannel:
        """Begin to connect to the process of this name; the channel's ``linked`` becomes True on success."""
        with self._lock:
            # ZeroMQ aborts the process if a socket has two connections of one name, and a failed one may linger. At
            # the other end a second connection of this process would be ignored while the first one lingers.
            self._attempts += 1
            self._socket.setsockopt(zmq.ROUTING_ID, self.name + _ATTEMPT + b"%d" % self._attempts)
            label = name + b" %d" % self._attempts
            channel = TcpChannel(self, label, f"tcp://{_bracketed(address)}:{port}")
            self._channels[label] = channel
            self._socket.setsockopt(zmq.CONNECT_ROUTING_ID, label)
            self._socket.connect(channel.endpoint)
            self._write(channel, _HELLO, None)
            return channel

    def forget(self, channel: TcpChannel) -> None:
        """Drop a connection that failed, so that another can be tried."""
        with self._lock:
            self._note_end(channel)
            self._channels.pop(channel.name, None)

    def channel_from(self, name: bytes) -> TcpChannel | None:
        """Return the channel that the process of this name has opened last, or None."""
        with self._lock:
            return self._latest.get(name, (0, None))[1]

    def wake(self) -> None:
        """Make the descriptor readable, for frames that a channel has already taken from the socket."""
        with self._lock:
            if not self.over.is_set():
                os.eventfd_write(self._wake, 1)

    def send(self, channel: TcpChannel, payload: bytes | bytearray, attached: memoryview | None) -> None:
        with self._lock:
            if not (channel.closed or channel.ended):
                self._write(channel, payload, attached)

    def _write(self, channel: TcpChannel, payload: bytes | bytearray, attached: memoryview | None) -> None:
        socket = self._socket
        try:
            parts: list[bytes | memoryview] = [channel.name]
            if len(payload) > _PIECE:
                pieces = _pieces_of(memoryview(payload))
                parts += [_IN_PIECES, _COUNT.pack(len(pieces)), *pieces]
            else:
                parts.append(bytes(payload))
            if attached is not None:
                parts += _pieces_of(attached) or [b""]
            last = len(parts) - 1
            for number, part in enumerate(parts):
                more = zmq.SNDMORE if number < last else 0
                socket.send(part, zmq.DONTWAIT | more, copy=isinstance(part, bytes))
        except zmq.ZMQError as error:
            # The connection is gone; its receiver has seen or will see the end.
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
        # Sending also makes ZeroMQ read its events, after which its descriptor signals no earlier arrival.
        if _readable(socket):
            os.eventfd_write(self._wake, 1)

    def receive(self, channel: TcpChannel) -> list[bytes]:
        with self._lock:
            self.pump()
            frames = list(channel.arrived)
            channel.arrived.clear()
            channel.closed |= channel.ended
            # Nothing else signals frames that were just read for a channel other than this one.
            unread = any(each.arrived or (each.ended and not each.closed) for each in self._channels.values())
            if unread and not self.over.is_set():
                os.eventfd_write(self._wake, 1)
            return frames

    def collect(self) -> list[tuple[TcpChannel, list[bytes]]]:
        """Receive from all channels that have frames or have ended, at once.

        With a thousand channels, asking each of them takes far longer than reading.
        """
        with self._lock:
            self.pump()
            ready = [each for each in self._channels.values() if each.arrived or (each.ended and not each.closed)]
            collected = []
            for channel in ready:
                collected.append((channel, list(channel.arrived)))
                channel.arrived.clear()
                channel.closed |= channel.ended
            return collected

    def pump(self) -> None:
        """Pass all arrived frames to their channels, and note opened and ended connections. Does not wait."""
        with self._lock:
            if self.over.is_set():
                return
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            # Before the frames: those that an ended connection had delivered are read below.
            ended = self._read_events()
            while True:
                try:
                    parts = self._socket.recv_multipart(zmq.DONTWAIT, copy=False)
                except zmq.Again:
                    break
                ended += self._handle(parts)
            for descriptor in self._unauthenticated.superfluous():
                self._unauthenticated.end(descriptor, lambda: ended.extend(self._read_events()))
            for channel in ended:
                self._note_end(channel)

    def _note_end(self, channel: TcpChannel) -> None:
        """Mark a channel as ended, once all its frames have been read."""
        known, channel.ended = channel.ended, True
        # Only once: a new connection to the same endpoint may have begun.
        if channel.endpoint and not known:
            # Otherwise unsent frames would wait for a connection that is never made.
            self._socket.setsockopt(zmq.LINGER, 0)
            with contextlib.suppress(zmq.ZMQError):
                self._socket.disconnect(channel.endpoint)
            self._socket.setsockopt(zmq.LINGER, int(_LINGER * 1000))

    def _read_events(self) -> list[TcpChannel]:
        """Read the socket's events of its connections; return the channels that have ended."""
        ended = []
        while _readable(self._monitor):
            event = recv_monitor_message(self._monitor, zmq.DONTWAIT)
            descriptor = int(event["value"])
            if event["event"] == zmq.EVENT_DISCONNECTED:
                self._to_close.discard(descriptor)
                self._unauthenticated.known.pop(descriptor, None)
                channel = self._by_descriptor.pop(descriptor, None)
                if channel is not None:
                    ended.append(channel)
            elif event["event"] & _CONNECT_FAILED:
                where = event["endpoint"].decode()
                ended += [each for each in self._channels.values() if each.endpoint == where and not each.linked]
            else:
                self._to_close.add(descriptor)
                if event["event"] == zmq.EVENT_ACCEPTED:
                    # Unless its first frame was read before this event.
                    if descriptor not in self._by_descriptor:
                        self._unauthenticated.add(descriptor)
                elif event["event"] == zmq.EVENT_CONNECTED:
                    self._note_reached(event["endpoint"].decode(), descriptor)
        return ended

    def _note_reached(self, where: str, descriptor: int) -> None:
        for channel in self._channels.values():
            if channel.endpoint == where and not (channel.linked or channel.ended):
                channel.reached = True
                # The connection may end before its first frame arrives.
                self._by_descriptor[descriptor] = channel

    def _handle(self, parts: Sequence[zmq.Frame]) -> list[TcpChannel]:
        """Handle one message. Returns the channels that have ended."""
        name, body = parts[0].bytes, parts[1].bytes if len(parts) > 1 else b""
        channel = self._channels.get(name)
        if body in (_HELLO, _WELCOME):
            # The system reuses descriptors of ended connections, so note their ends before the new connection.
            ended = self._read_events()
            if body == _HELLO and channel is None:
                channel, given_up = self._opened(name)
                ended += given_up
            if channel is None:
                return ended
            channel.linked = True
            descriptor: Any = parts[0].get(zmq.SRCFD)
            self._by_descriptor[descriptor] = channel
            self._unauthenticated.known.pop(descriptor, None)
            if body == _HELLO:
                self._write(channel, _WELCOME, None)
            return ended
        if channel is None or channel.closed:
            return []
        if body == _BYE:
            channel.said_goodbye = True
            return [channel]
        frame, rest = body, parts[2:]
        if body == _IN_PIECES:
            frame, rest = _joined(rest)
        if rest:
            frame = FrameWithPayload(frame)
            frame.payload = [part.buffer for part in rest]
        channel.arrived.append(frame)
        return []

    def _opened(self, label: bytes) -> tuple[TcpChannel | None, list[TcpChannel]]:
        """The channel that another process has just opened, and the one that it gave up for this one.

        None if it has opened a later one already: the first frame of a connection that ended may be read after that of
        the next.
        """
        name, attempt = _process_and_attempt(label)
        known = self._latest.get(name)
        if known is not None and attempt < known[0]:
            return None, []
        channel = self._channels[label] = TcpChannel(self, label)
        self._latest[name] = attempt, channel
        return channel, [] if known is None else [known[1]]

    # ---- the end ------------------------------------------------------------------------------------------------

    def end(self, channel: TcpChannel) -> None:
        with self._lock:
            self._channels.pop(channel.name, None)
            process, _ = _process_and_attempt(channel.name)
            if self.channel_from(process) is channel:
                del self._latest[process]
            if channel.closed:
                return
            self.pump()
            if not (self.over.is_set() or channel.ended):
                self._write(channel, _BYE, None)
            channel.closed = True
            channel.arrived.clear()

    def close(self) -> None:
        """End all connections, after sending what was queued, for at most two seconds."""
        with self._lock:
            if self.over.is_set():
                return
            self.pump()
            self.over.set()
            for channel in self._channels.values():
                if not (channel.closed or channel.ended):
                    self._write(channel, _BYE, None)
                    channel.closed = True
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._socket.close()
            if self._authenticator is not None:
                self._authenticator.stop()
            self._context.term()
            self._ready.close()
            os.close(self._wake)
            self._unauthenticated.close()

    # ---- forked children ----------------------------------------------------------------------------------------

    def _before_fork(self) -> None:
        self._lock.acquire()
        if not self.over.is_set():
            for channel in self._read_events():
                channel.ended = True
                os.eventfd_write(self._wake, 1)

    def _after_fork(self) -> None:
        self._lock.release()

    def _release_in_child(self) -> None:
        # A connection ends only when every process that holds its descriptor has closed it, and a data loader's
        # workers may outlive their rank. ZeroMQ itself must not be used here, because its threads are not forked.
        for descriptor in self._to_close:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self.over.set()
        self._lock = threading.RLock()
        for channel in self._channels.values():
            channel.closed = True


class _SessionKeyCheck:
    """Accepts connections that have the session's client key."""

    def __init__(self, keys: Keys) -> None:
        self._known = keys.client_public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._known


def _process_and_attempt(label: bytes) -> tuple[bytes, int]:
    name, _, number = label.rpartition(_ATTEMPT)
    return (name, int(number)) if name and number.isdigit() else (label, 0)


def _pieces_of(data: memoryview) -> list[memoryview]:
    return [data[start : start + _PIECE] for start in range(0, len(data), _PIECE)]


def _joined(parts: Sequence[zmq.Frame]) -> tuple[bytes, Sequence[zmq.Frame]]:
    """The frame that was sent in pieces, and the parts after it.

    Parts that no process of graftlab sends make a frame that no reader can decode, which ends the connection there.
    """
    try:
        (count,) = _COUNT.unpack(parts[0].bytes)
    except (IndexError, struct.error):
        return _IN_PIECES, ()
    if not 0 < count < len(parts):
        return _IN_PIECES, ()
    return b"".join(part.buffer for part in parts[1 : 1 + count]), parts[1 + count :]


def _readable(socket: zmq.Socket[bytes]) -> bool:
    events: Any = socket.getsockopt(zmq.EVENTS)
    return bool(events & zmq.POLLIN)


def _descriptor(socket: zmq.Socket[bytes]) -> int:
    found: Any = socket.getsockopt(zmq.FD)
    return int(found)


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _each(call: str) -> Any:
    def call_each() -> None:
        for each in list(_sockets):
            getattr(each, call)()

    return call_each


os.register_at_fork(
    before=_each("_before_fork"),
    after_in_parent=_each("_after_fork"),
    after_in_child=_each("_release_in_child"),
)
