"""The proxy thread for connections to other machines."""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.deadline import DEADLINE
from kit.mailboxes import in_background
from kit.processes import descriptors
from kit.support import wait_until

from graftlab.config import Endpoint
from graftlab.errors import MessageError, SessionError
from graftlab.exchange.channel import SocketChannel, frames_in
from graftlab.exchange.keys import new_token
from graftlab.exchange.tcp import TcpChannel
from graftlab.jobs import proxy as proxy_module
from graftlab.jobs.handshake import JoinRequest, RequestRefused, pack_handshake, unpack_handshake
from graftlab.jobs.proxy import OnFirstFrame, Proxy, TcpListener, TcpSessionClient


class FailingRouter:
    """Fails as soon as there is something to read."""

    def __init__(self) -> None:
        self.ready, self.wake = os.pipe()
        self.closed = False

    def fileno(self) -> int:
        return self.ready

    def collect(self) -> Any:
        raise RuntimeError("planted in the router")

    def close(self) -> None:
        self.closed = True


class FarEnd(TcpChannel):
    def __init__(self) -> None:
        self.closed = self.forgotten = False
        self.arrived: Any = []
        self.sent: list[bytes] = []

    def receive(self) -> list[bytes]:
        frames, self.arrived = self.arrived, []
        return frames

    def send(self, payload: bytes, attached: object = None) -> None:
        self.sent.append(payload)

    def close(self) -> None:
        self.closed = self.forgotten = True


def bundled(*frames: bytes) -> bytes:
    """The bundle read at one end of a channel when these frames were sent at the other."""
    ends = [SocketChannel(end) for end in socket.socketpair()]
    for frame in frames:
        ends[0].send(frame)
    bundle = ends[1].receive_bundle()
    for end in ends:
        end.close()
    return bundle


def unbundled(bundle: bytes) -> list[bytes]:
    return [bundle[start:end] for start, end in frames_in(bundle)]


class QuietRouter(FailingRouter):
    """Has these connections; becomes readable when a test writes to ``wake``."""

    def __init__(self, *far: FarEnd) -> None:
        super().__init__()
        self.far = far

    def collect(self) -> Any:
        return [(far, far.receive()) for far in self.far]


def test_a_fault_in_the_proxy_ends_every_connection(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "graftlab")
    router: Any = FailingRouter()
    far: Any = FarEnd()
    proxy = Proxy(router)
    ours, theirs = socket.socketpair()
    proxy.forward(far, (theirs, socket.socket()))
    os.write(router.wake, b"x")
    ours.settimeout(DEADLINE)
    assert ours.recv(1) == b""
    proxy.close()
    assert (far.closed, router.closed) == (True, True)
    assert "the proxy for other machines failed; every connection through it ends" in caplog.text
    assert "planted in the router" in caplog.text
    for descriptor in (router.ready, router.wake):
        os.close(descriptor)
    ours.close()


@given(st.lists(st.binary(max_size=40), max_size=5), st.integers(1, 8))
def test_a_bundle_returns_its_frames_and_is_refused_when_cut(frames: list[bytes], cut: int) -> None:
    bundle = bundled(*frames)
    assert unbundled(bundle) == frames
    if bundle and cut <= 8 + len(frames[-1]) - (not frames[-1]):
        with pytest.raises(MessageError, match=rf"frame {len(frames) - 1} of a bundle"):
            unbundled(bundle[:-cut])


def test_a_connection_that_another_machine_closes_is_drained_first(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    close = SocketChannel.close

    def note_close(channel: SocketChannel) -> None:
        done.append("close")
        close(channel)

    monkeypatch.setattr(SocketChannel, "drain", lambda channel, seconds: done.append(f"drain {seconds:g}"))
    monkeypatch.setattr(SocketChannel, "close", note_close)
    far: Any = FarEnd()
    far.arrived = [bundled(b"mlast")]
    done.clear()
    far.closed = True
    router: Any = QuietRouter(far)
    proxy = Proxy(router, lambda far, frame: None)
    ours, theirs = socket.socketpair()
    proxy.forward(far, (theirs, socket.socket()))
    os.write(router.wake, b"x")
    ours.settimeout(DEADLINE)
    while ours.recv(100):
        pass
    proxy.close()
    assert done == ["drain 1", "close"]
    for descriptor in (router.ready, router.wake):
        os.close(descriptor)
    ours.close()


def test_frames_travel_in_bundles_and_a_broken_one_cuts_only_its_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken, whole = FarEnd(), FarEnd()
    router: Any = QuietRouter(broken, whole)
    proxy = Proxy(router, lambda far, frame: None)
    ends = []
    # More than a hundred of them have arrived before the proxy looks.
    rows = [b"r%d" % number for number in range(1000)]
    for far, said in ((broken, []), (whole, rows)):
        ours, theirs = socket.socketpair()
        ends.append(SocketChannel(ours))
        for row in said:
            ends[-1].send(row)
        line: Any = far
        proxy.forward(line, (theirs, socket.socket()))
    broken.arrived, whole.arrived = [b"broken"], [bundled(b"mfirst", b"rsecond")]
    os.write(router.wake, b"x")
    heard: list[bytes] = []

    def both() -> bool:
        ends[0].receive()
        heard.extend(ends[1].receive())
        return ends[0].closed and len(heard) == 2

    wait_until(both, "what came from afar")
    assert heard == [b"mfirst", b"rsecond"]
    assert "frame 0 of a bundle of" in caplog.text
    wait_until(lambda: sum(map(len, map(unbundled, whole.sent))) == len(rows), "the rows")
    assert [row for bundle in whole.sent for row in unbundled(bundle)] == rows
    assert len(whole.sent) < len(rows)
    proxy.close()
    for end in ends:
        end.close()
    for descriptor in (router.ready, router.wake):
        os.close(descriptor)


# ---- one end of the connection, and a stand-in for the other machine ------------------------------------------------


class Router(QuietRouter):
    """Is readable from :meth:`bring` until the proxy has read; with ``hold`` a reading proxy waits until released."""

    def __init__(self) -> None:
        super().__init__()
        self.far: tuple[FarEnd, ...] = ()
        self.reads = 0
        self._turn = threading.Condition()
        self._holding = self._held = False

    def bring(self, far: FarEnd | None = None, *frames: bytes) -> None:
        """Let these frames arrive."""
        if far is not None:
            far.arrived = list(frames)
            self.far = (*(each for each in self.far if each is not far), far)
        os.write(self.wake, b"x")

    def hold(self) -> None:
        """Return once the proxy waits in its read."""
        with self._turn:
            self._holding = True
            self.bring()
            assert self._turn.wait_for(lambda: self._held, DEADLINE)

    def release(self) -> None:
        with self._turn:
            self._holding = False
            self._turn.notify_all()

    def collect(self) -> Any:
        self.reads += 1
        if select.select([self.ready], [], [], 0)[0]:
            os.read(self.ready, 4096)
        found = [(each, each.receive()) for each in self.far]
        with self._turn:
            self._held = True
            self._turn.notify_all()
            assert self._turn.wait_for(lambda: not self._holding, DEADLINE)
            self._held = False
        # As the real one, it reports an end once.
        self.far = tuple(each for each in self.far if not each.closed)
        return [(far, frames) for far, frames in found if frames or far.closed]


class Line:
    """This machine's ends of one connection."""

    def __init__(self) -> None:
        ours, self.theirs = socket.socketpair()
        self.wake, self.their_wake = socket.socketpair()
        self.wake.setblocking(False)
        self.channel = SocketChannel(ours)
        self.far: Any = FarEnd()
        self.frames: list[bytes] = []

    @property
    def ends(self) -> tuple[socket.socket, socket.socket]:
        return self.theirs, self.their_wake

    def has(self, *frames: bytes) -> None:
        """Wait for these frames from the other machine, and no others before them."""

        def came() -> bool:
            self.frames += map(bytes, self.channel.receive())
            return len(self.frames) >= len(frames)

        wait_until(came, f"the arrival of {len(frames)} frames")
        assert tuple(self.frames) == frames

    def sent(self) -> list[bytes]:
        """The frames that the other machine was sent."""
        return [frame for bundle in self.far.sent for frame in unbundled(bundle)]

    def has_sent(self, *frames: bytes) -> None:
        wait_until(lambda: len(self.sent()) >= len(frames), f"the departure of {len(frames)} frames")
        assert tuple(self.sent()) == frames

    def woken(self) -> bytes:
        """What the reader's wake socket has received, if anything."""
        try:
            return self.wake.recv(4096)
        except BlockingIOError:
            return b"asleep"

    def ends_too(self) -> None:
        """Wait until this machine's ends are closed as well."""

        def ended() -> bool:
            self.frames += map(bytes, self.channel.receive())
            return self.channel.closed and self.woken() == b""

        wait_until(ended, "the end")
        assert self.far.closed

    def close(self) -> None:
        self.channel.close()
        for end in (self.wake, *self.ends):
            end.close()


class Place:
    def __init__(self, on_first_frame: OnFirstFrame | None, lines: int) -> None:
        self.router: Any = Router()
        self.lines = [Line() for _ in range(lines)]
        self.proxy = Proxy(self.router, on_first_frame)
        for line in self.lines:
            self.proxy.forward(line.far, line.ends)

    def close(self) -> None:
        self.router.release()
        self.proxy.close()
        for line in self.lines:
            line.close()
        for descriptor in (self.router.ready, self.router.wake):
            os.close(descriptor)


MakePlace = Callable[..., Place]


@pytest.fixture
def place() -> Iterator[MakePlace]:
    """Makes a job's proxy, or with ``on_first_frame`` a server's, that forwards between these lines."""
    made: list[Place] = []

    def make(lines: int, on_first_frame: OnFirstFrame | None = None) -> Place:
        made.append(Place(on_first_frame, lines))
        return made[-1]

    yield make
    for each in made:
        each.close()


def nobody_joins(far: TcpChannel, frame: bytes) -> None:
    raise AssertionError("no first frame was expected")


def test_a_reader_is_woken_by_messages_and_not_by_rows(place: MakePlace) -> None:
    server = place(1, nobody_joins)
    (line,) = server.lines
    server.router.bring(line.far, bundled(b"rone", b"rtwo"))
    line.has(b"rone", b"rtwo")
    server.router.hold()
    assert line.woken() == b"asleep"
    server.router.release()
    server.router.bring(line.far, bundled(b"mfirst", b"rlast"))
    line.has(b"rone", b"rtwo", b"mfirst", b"rlast")
    wait_until(lambda: line.woken() == b"!", "the wake")
    # A reader that does not look keeps no frame back, however full its wake socket is.
    server.router.bring(line.far, *[bundled(b"m%d" % number) for number in range(1000)])
    line.has(b"rone", b"rtwo", b"mfirst", b"rlast", *[b"m%d" % number for number in range(1000)])


def test_bundles_that_came_with_the_answer_arrive_first_and_wake_the_reader(place: MakePlace) -> None:
    server, line = place(0, nobody_joins), Line()
    server.lines.append(line)
    # The proxy waits already, and nothing else makes it look.
    server.router.bring()
    wait_until(lambda: server.router.reads, "a read")
    server.proxy.forward(line.far, line.ends, [bundled(b"mearly"), bundled(b"rrow")])
    assert line.woken() == b"!"
    line.has(b"mearly", b"rrow")
    line.channel.send(b"manswer")
    line.has_sent(b"manswer")
    # What wakes the proxy has been read: otherwise it would never rest.
    wait_until(lambda: not select.select([server.proxy._wake], [], [], 0)[0], "a rest")


def test_an_ended_connection_leaves_the_others(place: MakePlace, caplog: pytest.LogCaptureFixture) -> None:
    server = place(4, nobody_joins)
    ends, broken, closes, stays = server.lines
    ends.channel.close()
    wait_until(lambda: ends.far.closed, "the end at the other machine")
    # Nothing of a bundle is forwarded if half a frame would spoil what follows, nor what came after it.
    server.router.bring(broken.far, bundled(b"mwhole") + b"half", bundled(b"mlater"))
    broken.ends_too()
    assert broken.frames == []
    closes.far.closed = True
    server.router.bring(closes.far, bundled(b"mlast"))
    closes.ends_too()
    assert closes.frames == [b"mlast"]
    # One that ends before its first frame has no line.
    stranger = FarEnd()
    stranger.closed = True
    server.router.bring(stranger)
    wait_until(lambda: stranger.forgotten, "the end of a stranger")
    server.router.bring(stays.far, bundled(b"mfrom afar"))
    stays.has(b"mfrom afar")
    stays.channel.send(b"mhere")
    stays.has_sent(b"mhere")
    # Without connections it waits for the next.
    stays.channel.close()
    wait_until(lambda: stays.far.closed, "the end of the last one")
    new = Line()
    server.lines.append(new)
    server.proxy.forward(new.far, new.ends)
    server.router.bring(new.far, bundled(b"mnew"))
    new.has(b"mnew")
    assert "failed" not in caplog.text


def test_a_server_forwards_each_frame_at_once(place: MakePlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy_module, "_GATHER", 2000 * DEADLINE)
    (line,) = place(1, nobody_joins).lines
    for number in range(3):
        line.channel.send(b"m%d" % number)
        line.has_sent(*(b"m%d" % each for each in range(number + 1)))


def test_a_job_gathers_its_rows_until_it_wakes_its_reader(place: MakePlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy_module, "_GATHER", 2000 * DEADLINE)
    (line,) = place(1).lines
    line.channel.send(b"rfirst")
    line.has_sent(b"rfirst")
    sent = [b"rfirst"]
    for number in range(3):
        rows = [b"r%d of %d" % (each, number) for each in range(20)]
        for row in rows:
            line.channel.send(row)
        assert line.sent() == sent
        line.wake.send(b"!")
        sent += rows
        line.has_sent(*sent)
        assert len(line.far.sent) == 2 + number
        # Or nothing would be gathered from now on.
        assert not select.select([line.their_wake], [], [], 0)[0]


def test_first_frames_are_answered_and_not_forwarded(place: MakePlace, caplog: pytest.LogCaptureFixture) -> None:
    line, first = Line(), bundled(b"mjoin")

    def admit(far: TcpChannel, frame: bytes) -> Any:
        assert frame == first
        far.send(bundled(b"manswer"))
        if far is line.far:
            return line.ends
        if far is answered:
            return None
        raise SessionError("a rank with this name exists") if far is refused[0] else OSError("no descriptor is left")

    answered, refused = FarEnd(), [FarEnd() for _ in range(7)]
    server = place(0, admit)
    server.lines.append(line)
    server.router.bring(answered, first)
    for far in refused:
        server.router.bring(far, first)
        wait_until(lambda far=far: far.closed, "the refusal")
    server.router.bring(line.far, first, bundled(b"mnext"))
    line.has(b"mnext")
    line.channel.send(b"mhere")
    line.has_sent(b"manswer", b"mhere")
    assert not answered.closed
    assert "a process on another machine was refused: a rank with this name exists" in caplog.text
    server.proxy.close()
    assert "2 more processes were refused; the last: a process on another machine was refused: no desc" in caplog.text


def test_what_arrives_before_a_jobs_proxy_knows_its_connection_is_not_lost(place: MakePlace) -> None:
    job, line = place(0), Line()
    job.lines.append(line)
    # As the plan in force does, which a session sends a job that returns.
    job.router.bring(line.far, bundled(b"mplan"))
    assert not job.proxy._thread.is_alive()
    job.proxy.forward(line.far, line.ends, [bundled(b"manswer")])
    line.has(b"manswer", b"mplan")
    # One that never had a connection closes its port, too.
    other = place(0)
    other.proxy.close()
    assert other.router.closed


def test_a_jobs_proxy_ends_with_its_last_connection(place: MakePlace) -> None:
    before = descriptors()
    job = place(0)
    job.lines += [Line(), Line()]
    for line in job.lines:
        job.proxy.forward(line.far, line.ends)
    # Only the session that it asked is heard.
    job.router.bring(FarEnd(), bundled(b"mstranger"))
    one, other = job.lines
    one.channel.close()
    wait_until(lambda: one.far.closed, "the end of one")
    other.channel.send(b"mhere")
    other.has_sent(b"mhere")
    assert not job.router.closed
    other.channel.send(b"mlast")
    other.channel.close()
    other.has_sent(b"mhere", b"mlast")
    wait_until(lambda: not job.proxy._thread.is_alive(), "the end of both")
    assert job.router.closed
    # What is closed stays untouched, whatever has its number by now.
    read, write = os.pipe()
    job.proxy.close()
    assert not select.select([read], [], [], 0)[0]
    for descriptor in (read, write):
        os.close(descriptor)
    for line in job.lines:
        line.close()
    left = {int(number) for number, _ in descriptors() - before}
    assert left == {job.router.ready, job.router.wake}


def test_a_closed_proxy_has_forwarded_what_had_arrived(place: MakePlace, caplog: pytest.LogCaptureFixture) -> None:
    server = place(3, nobody_joins)
    line, other, gone = server.lines
    [thread] = [each for each in threading.enumerate() if each.name == "graftlab-proxy"]
    # A process can end without closing it.
    assert thread.daemon
    server.router.hold()
    line.channel.send(b"mhere")
    gone.channel.close()
    # More than a socket takes at once.
    large = b"m" + bytes(8 << 20)
    reader = in_background(lambda: other.has(large))
    # It waits as long as needed, but the proxy is done at once.
    closing = in_background(lambda: server.proxy.close(timeout=10 * DEADLINE))
    wait_until(lambda: server.proxy._closing, "the request to close")
    for each, frame in ((line, b"mfar"), (other, large)):
        server.router.bring(each.far, bundled(frame) if each is line else len(frame).to_bytes(8, "little") + frame)
    server.router.release()
    closing.result(DEADLINE)
    reader.result(DEADLINE)
    line.has(b"mfar")
    line.ends_too()
    assert line.sent() == [b"mhere"]
    assert gone.far.closed
    assert server.router.closed
    assert "failed" not in caplog.text


def test_a_job_that_is_done_sends_its_last_rows_however_late_they_come(place: MakePlace) -> None:
    job = place(1)
    (line,) = job.lines
    closing = in_background(lambda: job.proxy.close(when_done=True, timeout=10 * DEADLINE))
    for number in range(3):
        line.channel.send(b"r%d" % number)
        line.has_sent(*(b"r%d" % each for each in range(number + 1)))
    assert not closing.done()
    line.channel.close()
    closing.result(DEADLINE)
    assert line.far.closed


def test_a_job_that_never_had_a_connection_is_not_waited_for(place: MakePlace) -> None:
    job = place(0)
    in_background(lambda: job.proxy.close(when_done=True, timeout=10 * DEADLINE)).result(DEADLINE)


def test_a_job_that_keeps_its_connection_is_waited_for_only_so_long(place: MakePlace) -> None:
    job = place(1)
    job.proxy.close(when_done=True, timeout=0.05)
    job.lines[0].ends_too()


# ---- by TCP ----------------------------------------------------------------------------------------------------------

REQUEST = JoinRequest(
    side="target",
    rank=0,
    world_size=1,
    other_world_size=1,
    pid=1,
    device="cpu",
    backend="gloo",
    plan=None,
    rejoin=None,
)
ANSWER = RequestRefused("this is the answer", False)


def test_a_job_and_its_server_on_another_machine_hear_each_other() -> None:
    listener, line = TcpListener(Endpoint("127.0.0.1", 0), new_token()), Line()

    def admit(far: TcpChannel, frame: bytes) -> Any:
        assert unpack_handshake(frame) == REQUEST
        far.send(pack_handshake(ANSWER))
        line.far = far
        return line.ends

    listener.open(admit)
    client = TcpSessionClient(listener.endpoint, listener.token)
    assert client.ask(REQUEST, DEADLINE) == (ANSWER, [])
    assert not client.reached_unauthenticated
    channel, wake, proxy = client.open_connection([bundled(b"mearly")])
    line.channel.send(b"mlater")
    heard: list[bytes] = []

    def both() -> bool:
        heard.extend(map(bytes, channel.receive()))
        return len(heard) == 2

    wait_until(both, "the first frames")
    assert heard == [b"mearly", b"mlater"]
    wake.settimeout(DEADLINE)
    assert wake.recv(1) == b"!"
    channel.send(b"rlast")
    channel.close()
    proxy.close(when_done=True)
    line.has(b"rlast")
    line.ends_too()
    listener.close()
    line.close()
    wake.close()


def test_a_job_learns_why_it_got_no_answer() -> None:
    """No answer in time, no listener, and a listener with another token are different."""
    silent = TcpListener(Endpoint("127.0.0.1", 0), new_token())
    silent.open(lambda far, frame: None)
    client = TcpSessionClient(silent.endpoint, silent.token)
    reads: list[object] = []
    receive = client._channel.receive
    client._channel.receive = lambda: reads.append(None) or receive()  # type: ignore[method-assign]
    assert client.ask(REQUEST, 0.2) is None
    # It waits instead of looking again and again.
    assert len(reads) < 50
    assert not client.reached_unauthenticated
    assert client._router.over.is_set()

    other = TcpSessionClient(silent.endpoint, new_token())
    # It does not wait for what cannot come.
    assert in_background(lambda: other.ask(REQUEST, 100 * DEADLINE)).result(DEADLINE) is None
    assert other.reached_unauthenticated
    silent.close()
    TcpListener(silent.endpoint, silent.token).close()

    nothing = TcpSessionClient(silent.endpoint, silent.token)
    assert in_background(lambda: nothing.ask(REQUEST, 100 * DEADLINE)).result(DEADLINE) is None
    assert not nothing.reached_unauthenticated
    # Nor does one that never opened keep its port.
    socket.create_server(silent.endpoint).close()


def test_frames_that_came_with_the_answer_are_kept_and_a_client_can_be_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        endpoint = Endpoint(*listening.getsockname()[:2])
    client = TcpSessionClient(endpoint, new_token())
    client._channel.arrived.extend([pack_handshake(ANSWER), b"one", b"two"])
    assert client.ask(REQUEST, DEADLINE) == (ANSWER, [b"one", b"two"])
    assert not client._router.over.is_set()
    client.close()
    assert client._router.over.is_set()
