"""The proxy thread for connections to other machines."""

from __future__ import annotations

import logging
import os
import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.deadline import DEADLINE
from kit.support import wait_until

from graftlab.errors import MessageError
from graftlab.exchange.channel import SocketChannel, frames_in
from graftlab.exchange.tcp import TcpChannel
from graftlab.jobs.proxy import Proxy


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
        self.closed = False
        self.arrived: Any = []
        self.sent: list[bytes] = []

    def receive(self) -> list[bytes]:
        frames, self.arrived = self.arrived, []
        return frames

    def send(self, payload: bytes, attached: object = None) -> None:
        self.sent.append(payload)

    def close(self) -> None:
        self.closed = True


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
