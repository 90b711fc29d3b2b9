"""The thread that carries lines to other machines."""

from __future__ import annotations

import logging
import os
import socket
from typing import Any

import pytest
from kit.deadline import DEADLINE

from graftlab.jobs.relay import Relay


class FailingPost:
    """Fails as soon as there is something to read."""

    def __init__(self) -> None:
        self.ready, self.wake = os.pipe()
        self.closed = False

    def fileno(self) -> int:
        return self.ready

    def pump(self) -> None:
        raise RuntimeError("planted in the post")

    def close(self) -> None:
        self.closed = True


class FarEnd:
    closed = False

    def close(self) -> None:
        self.closed = True


def test_a_fault_in_it_ends_every_line_so_that_nobody_listens_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "graftlab")
    post: Any = FailingPost()
    far: Any = FarEnd()
    relay = Relay(post)
    ours, theirs = socket.socketpair()
    relay.join(far, theirs)
    os.write(post.wake, b"x")
    ours.settimeout(DEADLINE)
    assert ours.recv(1) == b""
    relay.close()
    assert (far.closed, post.closed) == (True, True)
    for descriptor in (post.ready, post.wake):
        os.close(descriptor)
    ours.close()
