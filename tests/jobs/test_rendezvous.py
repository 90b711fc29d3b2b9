"""Only one user's processes can use a rendezvous, at either end."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import stat
import threading
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kit.deadline import DEADLINE
from kit.processes import descriptors

import graftlab as gl
from graftlab.base.world import Place
from graftlab.config import Endpoint, GraftConfig
from graftlab.errors import GraftError
from graftlab.exchange.keys import new_token
from graftlab.jobs import handshake_listener, refusals, rendezvous, session_server
from graftlab.jobs.handshake import StatusQuery, StatusReply, receive_handshake, send_handshake
from graftlab.jobs.handshake_listener import HandshakeListener
from graftlab.jobs.rendezvous import Rendezvous
from graftlab.jobs.script_launcher import _Admission
from graftlab.jobs.session_client import SessionClient
from graftlab.jobs.session_server import open_session_server
from graftlab.plan.plan import GraftPlan
from graftlab.ranks.held_call import WatchChoice
from graftlab.ranks.messages import AskWaitReason, WaitReason, pack, unpack_to_rank
from graftlab.ranks.options import LaunchOptions


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_no_other_user_can_enter_the_rendezvous(tmp_path: Path) -> None:
    with Rendezvous(tmp_path / "run") as place, place.locked():
        listener = place.listen()
        assert listener is not None
        (room,) = (tmp_path / "run").iterdir()
        assert mode(room) == 0o700
        assert {mode(each) for each in room.iterdir()} == {0o600}
        listener.close()
    room.chmod(0o750)
    with pytest.raises(gl.ConfigError, match=r"mode 0700.*name another address"):
        Rendezvous(tmp_path / "run")


def test_a_session_that_cannot_be_opened_leaves_no_listener_and_no_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(session_server, "describe_session", fails)
    with Rendezvous(tmp_path / "run") as place:
        before = descriptors()
        with pytest.raises(gl.LaunchError, match="no space left") as failed:
            open_session_server(
                gl.Session,
                LaunchOptions(1, 1),
                GraftPlan(),
                tmp_path,
                place,
                listen_at=(Endpoint("127.0.0.1", 0), None),
            )
        # A notebook keeps the exception, with all that its frames hold.
        assert failed.value.__traceback__ is not None
        assert descriptors() <= before


def test_a_session_of_another_user_is_not_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Rendezvous(tmp_path) as place, place.locked():
        assert place.connect(1.0) is None
        listener = place.listen()
        assert listener is not None
        connection = place.connect(1.0)
        assert connection is not None
        connection.close()
        monkeypatch.setattr(rendezvous, "peer_uid", lambda connection: os.getuid() + 1)
        with pytest.raises(
            gl.ConfigError, match=f"process that listens there belongs to user {os.getuid() + 1}, not {os.getuid()}"
        ):
            place.connect(1.0)
        listener.close()


def test_a_process_of_another_user_gets_no_answer_from_a_session(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with gl.listen(baseline=1, target=1, folder=tmp_path), Rendezvous(tmp_path) as place:
        # The session looks at a connection when it accepts it.
        monkeypatch.setattr(handshake_listener, "peer_uid", lambda connection: os.getuid() + 1)
        connection = place.connect(1.0)
        assert connection is not None
        with connection:
            connection.settimeout(DEADLINE)
            # The session may close the connection before it is written to.
            with contextlib.suppress(ConnectionError):
                send_handshake(connection, StatusQuery(stacks=False))
                assert connection.recv(1) == b""
    assert f"it belongs to user {os.getuid() + 1}, not {os.getuid()}" in caplog.text


def test_processes_that_connect_and_are_silent_delay_no_other(tmp_path: Path) -> None:
    with gl.listen(baseline=1, target=1, folder=tmp_path), Rendezvous(tmp_path) as place, ExitStack() as connections:

        def connection() -> socket.socket:
            made = place.connect(1.0)
            assert made is not None
            made.settimeout(DEADLINE)
            return connections.enter_context(made)

        silent = [connection() for _ in range(70)]
        asks = connection()
        send_handshake(asks, StatusQuery(stacks=False))
        assert isinstance(receive_handshake(asks), StatusReply)
        # The oldest made room for others.
        assert silent[0].recv(1) == b""


def test_a_listener_that_closes_ends_the_handshakes_in_progress(tmp_path: Path) -> None:
    began = threading.Event()
    received: list[bytes] = []

    def accept(connection: socket.socket) -> None:
        began.set()
        received.append(connection.recv(1))

    with Rendezvous(tmp_path) as place, place.locked():
        listener = place.listen()
        assert listener is not None
        handshakes = HandshakeListener(listener, accept, refusals.RefusalLog())
        with listener, place.connect(1.0) or contextlib.nullcontext():
            assert began.wait(DEADLINE)
            handshakes.close()
            assert received == [b""]


@pytest.mark.parametrize(
    "error", [ConnectionResetError("reset"), TimeoutError("silent"), EOFError("cut"), GraftError("no")]
)
def test_a_process_whose_handshake_fails_is_refused_with_the_reason(
    error: Exception, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limits: list[float | None] = []

    def accept(connection: socket.socket) -> None:
        limits.append(connection.gettimeout())
        raise error

    with Rendezvous(tmp_path) as place, place.locked():
        listener = place.listen()
        assert listener is not None
        handshakes = HandshakeListener(listener, accept, refusals.RefusalLog())
        connection = place.connect(1.0)
        assert connection is not None
        with listener, connection:
            connection.settimeout(DEADLINE)
            assert connection.recv(1) == b""
            handshakes.close()
    assert [line for line in caplog.messages if "refused" in line] == [f"a process was refused: {error}"]
    assert limits == [handshake_listener._SILENCE_LIMIT]


def test_refusals_of_many_processes_are_a_few_lines_with_their_number(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals, "_SECONDS", 1e9)
    with gl.listen(baseline=1, target=1, folder=tmp_path), Rendezvous(tmp_path) as place:
        for _ in range(126):
            connection = place.connect(1.0)
            assert connection is not None
            with connection:
                connection.settimeout(DEADLINE)
                # A frame of one byte, which is no message.
                connection.sendall(b"\1\0\0\0x")
                while connection.recv(4096):
                    pass
    lines = [line for line in caplog.messages if "refused" in line]
    assert len(lines) == 6
    assert lines[-1].startswith("121 more processes were refused; the last: ")


def test_refusals_of_processes_of_scripts_are_a_few_lines_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    admission = _Admission([], LaunchOptions(1, 1), GraftPlan(), WatchChoice(), tmp_path)
    for _ in range(30):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(b"\1\0\0\0x")
            admission._accept(ours)
    assert len([line for line in caplog.messages if "refused" in line]) == 5


def test_a_folder_that_cannot_be_made_is_named_with_its_variables(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(gl.ConfigError, match=r"cannot meet in the folder .*/file/run: .*GRAFTLAB_RUN_DIR"):
        Rendezvous(tmp_path / "file" / "run")


def session_client(folder: Path, timeout: float = 60.0) -> SessionClient:
    """The client of a baseline's only rank."""
    config = GraftConfig(
        role="baseline", baseline_world_size=1, target_world_size=1, address=str(folder), timeout=timeout
    )
    return SessionClient(Place("baseline", 0, 1, 1), config)


def test_a_second_job_of_one_role_is_refused_with_likely_causes(tmp_path: Path) -> None:
    with gl.listen(1, 1, folder=tmp_path):
        first = session_client(tmp_path).join()
        with pytest.raises(gl.SessionError, match=r"has joined already, as pid \d+\. Should this job be the target"):
            session_client(tmp_path).join()
        first.channel.close()
        first.wake.close()


def test_a_session_server_that_does_not_answer_is_named_with_its_log(tmp_path: Path) -> None:
    with Rendezvous(tmp_path) as place, place.locked():
        listener = place.listen()
    assert listener is not None
    with (
        listener,
        pytest.raises(gl.SessionError, match=r"not answer within 0\.05 s\. .* its log is session-server\.log"),
    ):
        session_client(tmp_path, timeout=0.05).join()


def test_a_waiting_rank_learns_which_process_was_refused(tmp_path: Path) -> None:
    with gl.listen(baseline=1, target=1, folder=tmp_path) as session:
        entry = session_client(tmp_path).join()
        with pytest.raises(gl.SessionError, match="has joined already"):
            session_client(tmp_path).join()
        entry.channel.send(pack(AskWaitReason()))
        poller = select.poll()
        poller.register(entry.channel.fileno(), select.POLLIN)
        heard: list[object] = []
        while not heard:
            poller.poll()
            heard += [
                found for frame in entry.channel.receive() if isinstance(found := unpack_to_rank(frame), WaitReason)
            ]
        (missing,) = heard
        assert isinstance(missing, WaitReason)
        assert missing.what.startswith("baseline[0], target[0] had not joined (baseline[0] (pid ")
        assert "was refused: baseline[0] has joined already" in missing.what
        assert "Should this job be the target (GRAFTLAB_ROLE)?" in missing.what
        entry.channel.close()
        entry.wake.close()
        assert session.row_count == 0


def test_a_locked_rendezvous_keeps_others_out_and_leaves_no_descriptor(tmp_path: Path) -> None:
    before = descriptors()
    with Rendezvous(tmp_path) as place:
        with place.locked():
            other = os.open(tmp_path / rendezvous._FOLDER / rendezvous._LOCK, os.O_RDWR)
            with pytest.raises(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(other)
        token = place.session_token()
        assert place.session_token() == token
        given = new_token()
        assert place.session_token(given) == place.session_token() == given
    assert descriptors() <= before


def test_refusals_are_counted_for_ten_seconds_from_the_first(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = SimpleNamespace(value=3.0)
    monkeypatch.setattr(refusals, "time", SimpleNamespace(monotonic=lambda: now.value))
    log = refusals.RefusalLog()
    for second in (3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 12.9, 13.0):
        now.value = second
        log.warn(f"at {second:g}")
    log.close()
    log.close()
    assert caplog.messages == [
        *(f"at {second}" for second in (3, 4, 5, 6, 7)),
        "2 more processes were refused; the last: at 12.9",
        "at 13",
    ]


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o777])
def test_the_folders_of_all_ports_lie_in_one_that_no_other_user_can_enter(mode: int, tmp_path: Path) -> None:
    above = tmp_path / f"graftlab-{os.getuid()}"
    above.mkdir()
    above.chmod(mode)
    if mode == 0o700:
        with Rendezvous(above / "29500") as found:
            assert found.folder.is_dir()
        return
    with pytest.raises(gl.ConfigError, match="must be a folder of this user with mode 0700"):
        Rendezvous(above / "29500")
