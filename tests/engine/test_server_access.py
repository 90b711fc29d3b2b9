"""A server's token is its user's alone, and a process without descriptors hangs up rather than spins."""

from __future__ import annotations

import errno
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kit.deadline import DEADLINE

from graftlab.engine import access
from graftlab.engine.access import ListeningSocket, write_token


def test_a_token_is_in_a_new_file_that_only_its_user_reads(tmp_path: Path) -> None:
    path = tmp_path / "made" / "token"
    write_token(path, "first")
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    path.chmod(0o644)
    with path.open() as held:
        write_token(path, "second")
        # One that could read the former file learns nothing.
        assert held.read() == "first\n"
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("second\n", 0o600)


def test_a_full_disk_leaves_no_empty_token(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_token(tmp_path / "token", "secret")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


class Scarce(ListeningSocket):
    """Cannot accept as long as there are errors left."""

    errors: list[int]

    def _accept(self) -> Any:
        if self.errors:
            raise OSError(self.errors.pop(0), "as planned")
        return super()._accept()  # type: ignore[misc]


@pytest.fixture
def listening() -> Iterator[Scarce]:
    made = Scarce(socket.create_server(("127.0.0.1", 0)))
    made.errors = []
    yield made
    made.close()


def test_a_client_for_whom_no_descriptor_is_left_is_hung_up_on(
    listening: Scarce, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [1000.0]
    monkeypatch.setattr(access.time, "monotonic", lambda: now[0])
    warned = []
    for error, later in ((errno.EMFILE, 0.0), (errno.ENFILE, 1.0), (errno.EMFILE, 60.0)):
        now[0] += later
        listening.errors = [error]
        with socket.create_connection(listening.getsockname(), DEADLINE) as client:
            with pytest.raises(BlockingIOError, match="closed a client's connection"):
                listening.accept()
            assert client.recv(1) == b""
        warned.append(len(caplog.records))
    assert warned == [1, 1, 2]
    # Then as before.
    with socket.create_connection(listening.getsockname(), DEADLINE) as client:
        found, _ = listening.accept()
        with found:
            found.sendall(b"x")
        assert client.recv(1) == b"x"
    listening.errors = [errno.ECONNABORTED]
    with pytest.raises(ConnectionAbortedError, match="as planned"):
        listening.accept()


def test_a_listening_socket_has_a_spare_descriptor_until_it_is_closed(listening: Scarce) -> None:
    spare = listening._spare
    os.fstat(spare)
    listening.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(spare)
    # A second time it would close that of somebody else.
    spare = os.open(os.devnull, os.O_RDONLY)
    listening._spare = spare
    listening.close()
    os.close(spare)
