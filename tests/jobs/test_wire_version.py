"""Two copies of graftlab that would not understand each other name both, whatever their packages are."""

from __future__ import annotations

import contextlib
import re
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.deadline import DEADLINE
from kit.limits import limited

import graftlab as gl
from graftlab.base.world import Place
from graftlab.config import GraftConfig
from graftlab.errors import MessageError
from graftlab.exchange.keys import read_token
from graftlab.jobs import handshake
from graftlab.jobs.handshake import (
    WIRE_VERSION,
    HoldRequest,
    RequestRefused,
    StatusQuery,
    StatusReply,
    pack_handshake,
    receive_handshake,
    send_handshake,
    unpack_handshake,
)
from graftlab.jobs.proxy import TcpSessionClient
from graftlab.jobs.rendezvous import Rendezvous
from graftlab.jobs.script_launcher import _Admission
from graftlab.jobs.session_client import SessionClient
from graftlab.jobs.status_query import query_status
from graftlab.plan.plan import GraftPlan
from graftlab.ranks.held_call import WatchChoice
from graftlab.ranks.options import LaunchOptions

OTHER = WIRE_VERSION + 1
BOTH = (
    rf"the other process has graftlab '.*', of wire version {OTHER}, and this one graftlab '.*', of wire version "
    rf"{WIRE_VERSION}, .* install one release of graftlab in the environments of both"
)


def of_other_version(data: bytes) -> bytes:
    """The same message as a copy of graftlab with another wire version sends it."""
    return data[:4] + struct.pack("<H", OTHER) + data[6:]


@pytest.fixture
def sent_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process sends is of another wire version; what it receives is not."""
    packed = handshake.pack_handshake
    monkeypatch.setattr(handshake, "pack_handshake", lambda message: of_other_version(packed(message)))
    for module in ("session_server", "proxy"):
        monkeypatch.setattr(f"graftlab.jobs.{module}.pack_handshake", handshake.pack_handshake)


def test_a_release_with_a_long_name_is_cut_off_and_the_message_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "graftlab_release", lambda: "1.0+" + "x" * 300)
    message = RequestRefused("why", settings=True)
    data = handshake.pack_handshake(message)
    assert handshake.unpack_handshake(data) == message
    # Its length is one byte.
    assert b"1.0+" + b"x" * 251 in data
    assert b"x" * 252 not in data


@pytest.mark.parametrize("error", [ConnectionResetError, BrokenPipeError, EOFError])
def test_a_process_that_is_gone_sends_no_message(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def receive(*given: object) -> bytes:
        raise error

    monkeypatch.setattr(handshake, "receive_exactly", receive)
    with socket.socket() as connection:
        assert handshake.receive_handshake(connection) is None


def test_a_release_that_is_no_text_is_named_all_the_same() -> None:
    data = of_other_version(b"gl\0h" + struct.pack("<HB", WIRE_VERSION, 2) + b"1\xff")
    with pytest.raises(gl.SessionError, match="the other process has graftlab '1\ufffd', of wire version"):
        unpack_handshake(data)


def test_a_message_is_read_to_its_end_and_not_a_byte_further() -> None:
    arriving = [b"abc", b"de", b"f"]
    asked: list[int] = []
    connection: Any = SimpleNamespace(recv=lambda length: asked.append(length) or arriving.pop(0))
    # Descriptors arrive with the byte that follows.
    assert handshake.receive_exactly(connection, 6) == b"abcdef"
    assert asked == [6, 3, 1]


def test_a_message_that_claims_to_be_huge_is_refused_before_it_is_read() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(struct.pack("<I", (256 << 20) + 1))
        theirs.close()
        with pytest.raises(MessageError, match="it claims 268,435,457 bytes; the limit is 268,435,456"):
            receive_handshake(ours)


@contextmanager
def connected(folder: Path) -> Iterator[socket.socket]:
    with Rendezvous(folder) as place:
        connection = place.connect(DEADLINE)
        assert connection is not None
        with connection:
            connection.settimeout(DEADLINE)
            yield connection


def test_a_session_refuses_another_wire_version_and_names_both(tmp_path: Path) -> None:
    with gl.listen(1, 1, folder=tmp_path), connected(tmp_path) as connection:
        message = of_other_version(pack_handshake(StatusQuery(stacks=False)))
        connection.sendall(struct.pack("<I", len(message)) + message)
        answer = receive_handshake(connection)
    assert isinstance(answer, RequestRefused)
    with pytest.raises(gl.SessionError, match=BOTH):
        raise gl.SessionError(answer.error)


def test_equal_wire_versions_of_different_releases_understand_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with gl.listen(1, 1, folder=tmp_path), connected(tmp_path) as connection:
        monkeypatch.setattr(handshake, "graftlab_release", lambda: "9.9")
        send_handshake(connection, StatusQuery(stacks=False))
        assert isinstance(receive_handshake(connection), StatusReply)


def test_a_job_names_both_versions_of_the_session_that_it_cannot_join(tmp_path: Path, sent_by_another: None) -> None:
    config = GraftConfig(role="baseline", baseline_world_size=1, target_world_size=1, address=str(tmp_path))
    with gl.listen(1, 1, folder=tmp_path):
        with pytest.raises(gl.SessionError, match=BOTH):
            SessionClient(Place("baseline", 0, 1, 1), config).join()
        with pytest.raises(gl.SessionError, match=BOTH):
            query_status(tmp_path, stacks=False)


def test_so_does_a_job_on_another_machine(
    tmp_path: Path, sent_by_another: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with gl.listen(1, 1, folder=tmp_path, address="tcp://127.0.0.1:0"):
        (address,) = set(re.findall(r"GRAFTLAB_ADDRESS=(\S+)", capsys.readouterr().out))
        endpoint = GraftConfig(address=address).endpoint
        assert endpoint is not None
        client = TcpSessionClient(endpoint, read_token(tmp_path / ".rendezvous" / "token"))
        with pytest.raises(gl.SessionError, match=BOTH):
            client.ask(StatusQuery(stacks=False), DEADLINE)  # type: ignore[arg-type]
        client.close()


def test_so_does_a_script_that_is_compared(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    admission = _Admission([], LaunchOptions(1, 1), GraftPlan(), WatchChoice(), tmp_path)
    thread = threading.Thread(target=admission._accept, args=(ours,))
    thread.start()
    request = of_other_version(pack_handshake(HoldRequest("target", 0, 1, 1, "cpu", "gloo")))
    with ours, theirs:
        theirs.settimeout(DEADLINE)
        theirs.sendall(struct.pack("<I", len(request)) + request)
        answer = receive_handshake(theirs)
        thread.join()
    assert isinstance(answer, RequestRefused)
    with pytest.raises(gl.SessionError, match=BOTH):
        raise gl.SessionError(answer.error)


@pytest.mark.parametrize("data", [b"", b"\x00" * 16, b"gl\x00h"])
def test_bytes_that_are_not_a_handshake_are_refused_without_a_version(data: bytes) -> None:
    with pytest.raises(MessageError, match="not a handshake of graftlab"):
        unpack_handshake(data)


@given(st.binary(max_size=60), st.booleans(), st.integers(0, 2))
def test_any_bytes_are_a_handshake_or_refused(data: bytes, begins_well: bool, version: int) -> None:
    if begins_well:
        data = handshake._HEAD.pack(handshake._MARK, version, 1) + b"1" + data
    with limited(), contextlib.suppress(gl.SessionError, MessageError):
        unpack_handshake(data)
