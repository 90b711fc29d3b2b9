"""What is TCP's own affair: who is let in, what is not looked at, and connections that end."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from hypothesis import given
from hypothesis import strategies as st
from kit.gpus import LateGpu, Machine, on_gpu
from kit.mailboxes import DEADLINE, MIB, World, a_world, in_background, key, make_post
from kit.support import wait_until

from graftlab.errors import MessageError
from graftlab.exchange import tcp, unauthenticated
from graftlab.exchange.channel import frames_in
from graftlab.exchange.frames import ChunkFrame, DeviceLocation, PublishFrame, decode, encode
from graftlab.exchange.keys import derive_keys, new_token
from graftlab.exchange.tcp import FrameWithPayload, RouterSocket, TcpChannel
from graftlab.jobs.handshake import unpack_handshake
from graftlab.ranks.messages import unpack_from_rank, unpack_to_rank

TOKEN = new_token()


@pytest.fixture
def posts() -> Iterator[tuple[RouterSocket, RouterSocket]]:
    made = make_post(0), make_post(1)
    yield made
    for post in made:
        post.close()


def channels_of(router: RouterSocket) -> list[TcpChannel]:
    return list(router._channels.values())


def joined(posts: tuple[RouterSocket, RouterSocket]) -> tuple[TcpChannel, TcpChannel]:
    """Both ends of a connection; the second post has made it.

    It tries again as ranks do: until its first frame arrives it is unauthenticated, and any of many may be ended.
    """
    first, second = posts
    ours = second.connect(first.name, "127.0.0.1", first.port)

    def both() -> bool:
        nonlocal ours
        first.pump()
        second.pump()
        if ours.ended:
            second.forget(ours)
            ours = second.connect(first.name, "127.0.0.1", first.port)
        return ours.linked and first.channel_from(second.name) is not None

    wait_until(both, "the connection")
    theirs = first.channel_from(second.name)
    assert theirs is not None
    return theirs, ours


def heard(channel: TcpChannel, count: int) -> list[bytes]:
    frames: list[bytes] = []

    def enough() -> bool:
        frames.extend(channel.receive())
        return len(frames) >= count or channel.closed

    wait_until(enough, f"{count} frames")
    return frames


def test_frames_read_for_another_channel_are_signalled(posts: tuple[RouterSocket, RouterSocket]) -> None:
    third = make_post(2)
    try:
        first, second = posts
        from_second, to_first = joined((first, second))
        from_third, also_to_first = joined((first, third))
        to_first.send(b"one")
        also_to_first.send(b"two")

        def both_are_here() -> bool:
            first.pump()
            return bool(from_second.arrived and from_third.arrived)

        wait_until(both_are_here, "both frames")
        assert from_second.receive() == [b"one"]
        assert select.select([first.fileno()], [], [], 0)[0], "no one would read the other channel"
        assert from_third.receive() == [b"two"]
        assert not select.select([first.fileno()], [], [], 0)[0], "a waiting thread would spin"
    finally:
        third.close()


# ---- who is let in --------------------------------------------------------------------------------------------------


class Bomb:
    """Leaves a file behind where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, ...]]:
        return os.mkdir, (str(self.path),)


def test_a_process_without_the_token_is_not_heard(posts: tuple[RouterSocket, RouterSocket], tmp_path: Path) -> None:
    stranger = RouterSocket(derive_keys(new_token()), b"stranger")
    channel = stranger.connect(posts[0].name, "127.0.0.1", posts[0].port)
    frame = PublishFrame(key(), 1, "float32", (), 4, None, pickle.dumps(Bomb(tmp_path / "gone off")))
    channel.send(encode(frame))
    wait_until(lambda: channel.receive() or channel.closed, "the refusal")
    assert (channel.reached, channel.linked) == (True, False)
    posts[0].pump()
    assert channels_of(posts[0]) == []
    assert not (tmp_path / "gone off").exists()
    # Nor are those that do kept out by it.
    theirs, ours = joined(posts)
    ours.send(b"frame")
    assert heard(theirs, 1) == [b"frame"]
    stranger.close()


def test_a_foreign_listener_is_distinguished_from_no_listener(posts: tuple[RouterSocket, RouterSocket]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        channel = posts[0].connect(b"host", *other.getsockname())
        connection, _ = other.accept()
        with connection:
            connection.recv(64)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        wait_until(lambda: channel.receive() or channel.closed, "the end")
        nowhere = other.getsockname()
    assert (channel.reached, channel.linked) == (True, False)
    posts[0].forget(channel)
    again = posts[0].connect(b"host", *nowhere)
    wait_until(lambda: again.receive() or again.closed, "the refusal")
    assert (again.reached, again.linked) == (False, False)


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", bytes(64), os.urandom(4096), pickle.dumps(0)])
def test_noise_at_the_port_has_no_effect(said: bytes, posts: tuple[RouterSocket, RouterSocket]) -> None:
    with socket.create_connection(("127.0.0.1", posts[0].port)) as noisy:
        noisy.sendall(said)
        theirs, ours = joined(posts)
        ours.send(b"frame")
        assert heard(theirs, 1) == [b"frame"]
    assert channels_of(posts[0]) == [theirs]


def pass_on(source: socket.socket, to: socket.socket, seen: bytearray) -> None:
    # Until the test closes either.
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            seen += data
            to.sendall(data)


def test_frames_are_encrypted_in_transit(posts: tuple[RouterSocket, RouterSocket]) -> None:
    secret, seen = b"a secret of both processes " * 8, bytearray()
    with socket.create_server(("127.0.0.1", 0)) as between:
        channel = posts[1].connect(posts[0].name, "127.0.0.1", between.getsockname()[1])
        channel.send(secret)
        near, _ = between.accept()
        with near, socket.create_connection(("127.0.0.1", posts[0].port)) as far:
            for source, to in ((near, far), (far, near)):
                threading.Thread(target=pass_on, args=(source, to, seen), daemon=True).start()
            wait_until(lambda: posts[0].pump() or channels_of(posts[0]), "the connection")
            assert heard(channels_of(posts[0])[0], 1) == [secret]
    assert b"CURVE" in seen
    assert b"a secret" not in seen


class Relay:
    """Passes a connection on; ``to_first`` may change each piece that goes to the first post."""

    def __init__(self, first: RouterSocket, to_first: Callable[[Relay, bytes], bytes]) -> None:
        self.sent = bytearray()
        self._to_first = to_first
        self._first = first
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        near, _ = self._listener.accept()
        with near, socket.create_connection(("127.0.0.1", self._first.port)) as far:
            threading.Thread(target=pass_on, args=(far, near, bytearray()), daemon=True).start()
            with contextlib.suppress(OSError):
                while (data := near.recv(random.randint(1, 3000))) and (changed := self._to_first(self, data)):
                    self.sent += data
                    far.sendall(changed)

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def relayed(posts: tuple[RouterSocket, RouterSocket]) -> Iterator[Callable[..., tuple[Relay, TcpChannel]]]:
    """Connect the second post to the first through a relay."""
    made: list[Relay] = []

    def connect(to_first: Callable[[Relay, bytes], bytes]) -> tuple[Relay, TcpChannel]:
        made.append(Relay(posts[0], to_first))
        return made[-1], posts[1].connect(posts[0].name, "127.0.0.1", made[-1].port)

    yield connect
    for relay in made:
        relay.close()


def test_a_handshake_and_frames_that_are_sent_again_are_not_heard(
    posts: tuple[RouterSocket, RouterSocket], relayed: Callable[..., tuple[Relay, TcpChannel]]
) -> None:
    relay, channel = relayed(lambda relay, data: data)
    channel.send(b"run this once")
    wait_until(lambda: posts[0].pump() or channels_of(posts[0]), "the connection")
    [theirs] = channels_of(posts[0])
    assert heard(theirs, 1) == [b"run this once"]
    with socket.create_connection(("127.0.0.1", posts[0].port)) as again:
        again.setblocking(False)
        again.sendall(bytes(relay.sent))
        wait_until(lambda: posts[0].pump() or not still_open([again]), "the refusal")
    assert channels_of(posts[0]) == [theirs]
    assert theirs.receive() == []
    theirs.send(b"still here")
    assert heard(channel, 1) == [b"still here"]


@pytest.fixture
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits of a second for sockets that are made from now on, in place of ten and twenty."""
    monkeypatch.setattr(tcp, "_CONNECT_LIMIT", 1.0)
    monkeypatch.setattr(tcp, "PING_INTERVAL", 0.5)
    monkeypatch.setattr(tcp, "PING_TIMEOUT", 1.0)


# The greeting has 64 bytes, and the handshake's first command 202, more than a third of them filling.
@pytest.mark.parametrize("place", [200, 300, 700, 5_000, 300_000])
def test_a_connection_that_is_tampered_with_ends_and_changes_no_frame(
    place: int,
    short_limits: None,
    posts: tuple[RouterSocket, RouterSocket],
    relayed: Callable[..., tuple[Relay, TcpChannel]],
) -> None:
    def flip(relay: Relay, data: bytes) -> bytes:
        at = place - len(relay.sent)
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] if 0 <= at < len(data) else data

    _, channel = relayed(flip)
    sent = [b"%d" % number * 50_000 for number in range(10)]
    for frame in sent:
        channel.send(frame)
    found: list[bytes] = []

    def has_ended() -> bool:
        posts[0].pump()
        for each in channels_of(posts[0]):
            found.extend(each.receive())
        channel.receive()
        return channel.closed

    wait_until(has_ended, "the end of the connection")
    assert len(found) < len(sent)
    assert found == sent[: len(found)]


def test_frames_over_a_line_that_stalls_and_cuts_them_into_pieces_arrive_in_order(
    posts: tuple[RouterSocket, RouterSocket], relayed: Callable[..., tuple[Relay, TcpChannel]]
) -> None:
    stalled, may_pass = threading.Event(), threading.Event()

    def stall(relay: Relay, data: bytes) -> bytes:
        if len(relay.sent) > 100_000 and not may_pass.is_set():
            stalled.set()
            may_pass.wait(DEADLINE)
        return data

    _, channel = relayed(stall)
    tensor = memoryview(os.urandom(MIB))
    for number in range(20):
        channel.send(b"frame %d" % number, tensor if number % 5 == 0 else None)
    assert stalled.wait(DEADLINE)
    wait_until(lambda: posts[0].pump() or channels_of(posts[0]), "the connection")
    may_pass.set()
    frames = heard(channels_of(posts[0])[0], 20)
    assert frames == [b"frame %d" % number for number in range(20)]
    assert b"".join(map(bytes, getattr(frames[5], "payload", ()))) == tensor


# ---- frames ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 65536, 4 * MIB, 9 * MIB + 1])
def test_attached_bytes_arrive_whole_in_pieces(size: int, posts: tuple[RouterSocket, RouterSocket]) -> None:
    theirs, ours = joined(posts)
    sent = torch.randint(0, 256, (size,), dtype=torch.uint8)
    ours.send(b"before")
    ours.send(b"tensor", memoryview(sent.numpy()))
    ours.send(b"after")
    frames = heard(theirs, 3)
    assert frames == [b"before", b"tensor", b"after"]
    assert isinstance(frames[1], FrameWithPayload)
    assert b"".join(bytes(piece) for piece in frames[1].payload) == sent.numpy().tobytes()
    assert max(map(len, frames[1].payload)) <= MIB


@pytest.mark.parametrize("size", [512 << 10, (512 << 10) + 1, 9 * MIB + 1])
@pytest.mark.parametrize("attached", [None, b"", b"attached"])
def test_large_frames_arrive_whole_in_pieces(
    size: int, attached: bytes | None, posts: tuple[RouterSocket, RouterSocket]
) -> None:
    theirs, ours = joined(posts)
    sent = os.urandom(64) * (size // 64) + bytes(size % 64)
    ours.send(sent, None if attached is None else memoryview(attached))
    ours.send(b"next")
    first, second = heard(theirs, 2)
    assert (first == sent, second) == (True, b"next")
    assert b"".join(getattr(first, "payload", ())) == (attached or b"")


# What a process that knows the token may send in place of a frame in pieces, whose parts are their number and they.
BROKEN_PIECES = {
    "no number": [],
    "half a number": [b"\x01\x00"],
    "more than a number": [bytes(5), b"piece"],
    "no pieces": [bytes(4), b"piece"],
    "fewer pieces than their number": [(3).to_bytes(4, "little"), b"piece", b"piece"],
    "four thousand million pieces": [b"\xff" * 4, b"piece"],
}


def send_parts(channel: TcpChannel, *parts: bytes) -> None:
    """Send a message of these parts to the other end."""
    router = channel._router
    with router._lock:
        router._socket.send_multipart([channel.name, *parts])


@pytest.mark.parametrize("pieces", BROKEN_PIECES.values(), ids=BROKEN_PIECES)
def test_broken_pieces_disconnect_the_rank_that_sent_them_and_no_other(
    pieces: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    with a_world(2, 1, tcp=True) as world:
        broken, whole, receiver = world.begin().mailboxes
        [*_, to_target] = broken.channels
        assert isinstance(to_target, TcpChannel)
        send_parts(to_target, b"p", *pieces)
        whole.publish(key(), 3.0)
        receipt = receiver.receive(key())
        assert [each.tensor.item() for each in receipt.contributions] == [3.0]
        assert "was disconnected: it sent a frame that target[0] cannot read" in receipt.absent[0]
        assert [record.message.count("was disconnected") for record in caplog.records] == [1]


@given(st.lists(st.binary(max_size=6) | st.sampled_from([b"p", bytes(4), b"\1\0\0\0", b"\2\0\0\0"]), max_size=5))
def test_any_parts_of_a_message_are_a_frame_whole_or_one_that_no_reader_decodes(parts: list[bytes]) -> None:
    router = RouterSocket(derive_keys(TOKEN), b"reader")
    try:
        channel = router._channels[b"other"] = TcpChannel(router, b"other")
        assert router._handle([zmq.Frame(part) for part in (b"other", b"p", *parts)]) == []
        [frame] = channel.receive()
    finally:
        router.close()
    count = int.from_bytes(parts[0], "little") if parts and len(parts[0]) == 4 else 0
    if 0 < count < len(parts):
        assert frame == b"".join(parts[1 : 1 + count])
        assert list(getattr(frame, "payload", ())) == parts[1 + count :]
    else:
        assert (frame, type(frame)) == (b"p", bytes)


def test_a_frame_that_no_reader_decodes_is_refused_wherever_frames_are_read() -> None:
    for read in (decode, unpack_handshake, unpack_to_rank, unpack_from_rank, lambda frame: list(frames_in(frame))):
        with pytest.raises((ValueError, MessageError)):
            read(b"p")


# ---- unauthenticated connections -------------------------------------------------------------------------------------

# ZMTP 3.1, mechanism CURVE, not a server.
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
# A command of eight GiB.
HUGE = b"\x06" + (8 << 30).to_bytes(8, "big")


def test_a_descriptor_that_is_of_another_connection_by_now_is_left_open() -> None:
    one, other = socket.socketpair()
    connections = unauthenticated.UnauthenticatedConnections()
    connections.add(one.fileno())
    # While the first was ended, another was accepted and has its number.
    connections.end(one.fileno(), lambda: connections.known.update({one.fileno(): 0.5}))
    assert connections.known == {one.fileno(): 0.5}
    other.send(b"x")
    assert one.recv(1) == b"x"
    connections.end(one.fileno(), lambda: None)
    assert (connections.known, other.recv(1)) == ({}, b"")
    connections.close()
    one.close()
    other.close()


def flood(connection: socket.socket, pump: Callable[[], None]) -> int:
    """How many bytes the other end takes of a message without an end, up to 64 MiB."""
    connection.settimeout(0.05)
    deadline = time.monotonic() + DEADLINE
    sent = 0
    while sent < 64 * MIB and time.monotonic() < deadline:
        pump()
        with contextlib.suppress(TimeoutError):
            try:
                sent += connection.send(bytes(MIB))
            except ConnectionError:
                break
    return sent


def test_an_unauthenticated_process_cannot_send_a_message_of_any_size(posts: tuple[RouterSocket, RouterSocket]) -> None:
    with socket.create_connection(("127.0.0.1", posts[0].port)) as connection:
        connection.sendall(GREETING + HUGE)
        # What the system's buffers have, and not ZeroMQ.
        assert flood(connection, posts[0].pump) < 32 * MIB
    theirs, ours = joined(posts)
    ours.send(b"frame")
    assert heard(theirs, 1) == [b"frame"]


def test_a_foreign_listener_cannot_send_a_message_of_any_size(posts: tuple[RouterSocket, RouterSocket]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        posts[0].connect(b"server", *other.getsockname())
        connection, _ = other.accept()
        with connection:
            connection.sendall(GREETING + HUGE)
            assert flood(connection, posts[0].pump) < 32 * MIB


def still_open(connections: list[socket.socket]) -> int:
    count = 0
    for connection in connections:
        with contextlib.suppress(ConnectionError):
            try:
                while connection.recv(4096):
                    pass
            except BlockingIOError:
                count += 1
    return count


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ({"_MOST": 20}, 20),
        # All are slow.
        ({"_SLOW": 0.0}, 8),
        # All have descriptors that are kept for the session.
        ({"_RESERVED": 1 << 40}, 8),
    ],
    ids=["many", "slow", "no descriptors left"],
)
def test_unauthenticated_connections_are_limited_and_keep_no_rank_out(
    settings: dict[str, Any], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Here ZeroMQ ends no handshake, and a busy machine makes none slow.
    monkeypatch.setattr(tcp, "_CONNECT_LIMIT", 600.0)
    for setting, value in {"_SLOW": 1e9, **settings}.items():
        monkeypatch.setattr(unauthenticated, setting, value)
    posts = first, second, third = make_post(0), make_post(1), make_post(2)
    made = []
    try:
        theirs, ours = joined((first, second))
        for _ in range(60):
            made.append(socket.create_connection(("127.0.0.1", first.port)))
            made[-1].setblocking(False)
            made[-1].send(GREETING)

        def few() -> bool:
            first.pump()
            return len(first._unauthenticated.known) == most and still_open(made) == most

        wait_until(few, "the end of the others")
        from_third, to_first = joined((first, third))
        for sender, receiver in ((ours, theirs), (to_first, from_third)):
            sender.send(b"frame")
            assert heard(receiver, 1) == [b"frame"]
    finally:
        for each in (*posts, *made):
            each.close()


@pytest.mark.parametrize("ends", ["who has connected", "who was connected to"])
def test_frames_sent_before_the_end_arrive_before_it(ends: str, posts: tuple[RouterSocket, RouterSocket]) -> None:
    theirs, ours = joined(posts)
    if ends == "who was connected to":
        posts, theirs, ours = (posts[1], posts[0]), ours, theirs
    for number in range(100):
        ours.send(b"%d frame" % number)
    posts[1].close()
    assert heard(theirs, 101) == [b"%d frame" % number for number in range(100)]
    assert theirs.closed
    assert theirs.said_goodbye
    # And what is sent there from now on is dropped.
    theirs.send(b"in vain")


def test_a_process_that_connects_anew_is_heard_although_its_last_connection_lingers(
    posts: tuple[RouterSocket, RouterSocket],
) -> None:
    lingering, _ = joined(posts)
    theirs, ours = joined(posts)
    assert theirs is not lingering
    ours.send(b"frame")
    assert heard(theirs, 1) == [b"frame"]
    theirs.send(b"answer")
    assert heard(ours, 1) == [b"answer"]
    # Its other end gave it up.
    assert lingering.ended
    assert not theirs.ended


def test_the_first_frame_of_an_attempt_that_was_given_up_changes_nothing(
    posts: tuple[RouterSocket, RouterSocket], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = posts
    read: list[bytes] = []
    opened = first._opened
    monkeypatch.setattr(first, "_opened", lambda label: read.append(label) or opened(label))
    second._attempts = 7
    theirs, ours = joined(posts)
    # Read after the frame of the attempt that came later.
    second._attempts = 5
    second.connect(first.name, "127.0.0.1", first.port)
    wait_until(lambda: first.pump() or len(read) == 2, "the earlier attempt")  # type: ignore[func-returns-value]
    assert first.channel_from(second.name) is theirs
    assert not theirs.ended
    ours.send(b"frame")
    assert heard(theirs, 1) == [b"frame"]


def test_a_refused_connection_ends_at_once_and_can_be_retried(
    posts: tuple[RouterSocket, RouterSocket],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    for _ in range(3):
        channel = posts[1].connect(posts[0].name, "127.0.0.1", port)
        wait_until(lambda channel=channel: channel.receive() or channel.closed, "the end")  # type: ignore[misc]
        posts[1].forget(channel)
    theirs, ours = joined(posts)
    ours.send(b"frame")
    assert heard(theirs, 1) == [b"frame"]


def test_connections_differ_in_name_and_their_frames_have_time_to_leave(
    posts: tuple[RouterSocket, RouterSocket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeroMQ would abort the process at a second connection of one name, so none is made here."""
    made = Recorded(posts[1]._socket)
    monkeypatch.setattr(posts[1], "_socket", made)
    monkeypatch.setattr(posts[1], "_write", lambda *frame: None)
    first, other = (posts[1].connect(posts[0].name, "127.0.0.1", posts[0].port) for _ in range(2))
    assert made.names == [first.name, other.name]
    assert first.name != other.name
    assert made.getsockopt(zmq.LINGER) == 2000
    posts[1].forget(first)
    assert made.getsockopt(zmq.LINGER) == 2000


class Recorded:
    """A socket that notes the names of connections, and makes none."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self.names: list[bytes] = []

    def setsockopt(self, option: int, value: Any) -> None:
        if option == zmq.CONNECT_ROUTING_ID:
            self.names.append(value)
        else:
            self._socket.setsockopt(option, value)

    def connect(self, endpoint: str) -> None: ...

    def disconnect(self, endpoint: str) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)


# ---- what a rank on another machine may not send --------------------------------------------------------------------

FORBIDDEN = {
    "a handle of GPU memory, which torch would unpickle": ChunkFrame(0, pickle.dumps(0)),
    "a place on its GPU": PublishFrame(key(), 1, "float32", (), 4, DeviceLocation(0, 0, 0, b""), None),
}


@pytest.mark.parametrize("frame", FORBIDDEN.values(), ids=FORBIDDEN)
def test_a_remote_frame_that_needs_shared_memory_disconnects_its_sender(frame: Any) -> None:
    with a_world(1, 1, tcp=True) as world:
        world.begin()
        world.baseline.channels[0].send(encode(frame))
        receipt = world.target.receive(key())
        assert receipt.contributions == []
        assert "was disconnected: it sent a frame that target[0] cannot read" in receipt.absent[0]


def _attached(world: World, nbytes: int, attached: bytes) -> str:
    frame = PublishFrame(key(), 7, "float32", (nbytes // 4,), nbytes, 4096, None)
    channel = world.baseline.channels[0]
    assert isinstance(channel, TcpChannel)
    channel.send(encode(frame), memoryview(attached) if attached else None)
    receipt = world.target.receive(key())
    receipt.release()
    return receipt.absent.get(0, "")


@pytest.mark.parametrize(("nbytes", "attached"), [(16, b""), (16, bytes(12)), (4, bytes(16))])
def test_a_tensor_with_missing_bytes_is_missing(nbytes: int, attached: bytes) -> None:
    with a_world(1, 1, tcp=True) as world:
        why = _attached(world.begin(), nbytes, attached)
        assert f"cannot be read here: received {len(attached)} of {nbytes} bytes" in why


def test_a_gpu_tensor_goes_to_another_machine_through_the_hosts_memory() -> None:
    machine = Machine()
    with a_world(2, 1, tcp=True, gpu=lambda rank: LateGpu(machine), budget=4 * MIB) as world:
        first, second, receiver = world.begin().mailboxes
        for number in range(20):
            for rank, sender in enumerate((first, second)):
                value = on_gpu(torch.full((100_000,), float(10 * number + rank)))
                sender.publish(key(occurrence=number), value)
                # Nothing is copied later, when the model has written over it.
                value.zero_()
            receipt = receiver.receive(key(occurrence=number))
            assert [each.tensor.unique().tolist() for each in receipt.contributions] == [
                [10 * number],
                [10 * number + 1],
            ]
            receipt.release()
        # No process of another machine is asked to open what it has no way to.
        assert machine.shared == []
        world.end(0)
        assert first.bytes_in_use() == second.bytes_in_use() == 0


def test_unrequested_tensors_are_not_kept_past_their_step() -> None:
    with a_world(1, 1, tcp=True) as world:
        sender, receiver = world.begin().mailboxes
        for number in range(10):
            sender.publish(key(occurrence=number), torch.zeros(1000))
        world.deliver()
        receiver.exchange.end_step(-1)
        peer = receiver.exchange._peers.others[0]  # type: ignore[attr-defined]
        assert len(peer.carried) == 10
        receiver.take(key(occurrence=3))
        assert len(peer.carried) == 9
        receiver.exchange.end_step(0)
        assert peer.carried == {}


def test_a_status_older_than_the_last_tensor_sent_proves_no_wait() -> None:
    """Else a sender without room would take a receiver that has just been served for one that waits in vain."""
    with a_world(1, 1, tcp=True) as world:
        sender, receiver = world.begin().mailboxes
        peers = sender.exchange._peers  # type: ignore[attr-defined]

        def waits_for_sender() -> bool:
            sender.exchange.end_step(-1)  # reads what has come
            return bool(peers.ranks_waiting_for_me())

        waiting = in_background(lambda: receiver.receive(key("later")))
        receiver.until_it_waits()
        wait_until(waits_for_sender, "word of the wait")
        sender.publish(key("sooner"), 1.0)
        assert not waits_for_sender()
        # A wait that continues after the tensor has arrived is for a later tap.
        wait_until(waits_for_sender, "newer word of the wait")
        sender.publish(key("later"), 2.0)
        assert [each.tensor.item() for each in waiting.result(DEADLINE).contributions] == [2.0]


def test_the_first_free_port_of_several_is_taken(posts: tuple[RouterSocket, RouterSocket]) -> None:
    taken, other = (post.port for post in posts)
    keys = derive_keys(TOKEN)
    said = rf"^cannot listen at 127\.0\.0\.1, any of the ports {taken} to {other}: Address already in use"
    with pytest.raises(OSError, match=said):
        RouterSocket(keys, b"third", "127.0.0.1", (taken, other))
    third = RouterSocket(keys, b"third", "127.0.0.1", (taken, other, 0))
    assert third.port not in (0, taken, other)
    third.close()


def test_a_socket_that_is_closed_closes_all_its_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    router, close, closed = make_post(0), os.close, list[int]()
    held = {router._wake, router._unauthenticated._nothing, router._unauthenticated._spare}

    def note(descriptor: int) -> None:
        closed.append(descriptor)
        close(descriptor)

    monkeypatch.setattr(os, "close", note)
    router.close()
    assert held <= set(closed)


def test_a_forked_child_without_a_descriptor_lets_go_of_the_connection() -> None:
    router = make_post(0)
    # One that the child, as a data loader's worker, has closed already.
    router._to_close.add(-1)
    router._release_in_child()
    assert router.over.is_set()
    # This process is no child, and has it still.
    router.over.clear()
    router.close()


@pytest.mark.parametrize("count", range(5))
def test_a_frame_in_pieces_has_as_many_as_it_says_or_is_refused(count: int) -> None:
    parts = [zmq.Frame(tcp._COUNT.pack(count)), *map(zmq.Frame, (b"ab", b"c", b"rest"))]
    frame, rest = tcp._joined(parts)
    if 0 < count <= 3:
        assert (frame, [part.bytes for part in rest]) == (
            b"abcrest"[: (0, 2, 3, 7)[count]],
            [b"ab", b"c", b"rest"][count:],
        )
    else:
        assert (frame, rest) == (tcp._IN_PIECES, ())
