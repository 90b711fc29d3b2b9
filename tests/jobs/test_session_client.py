"""How a job asks to be admitted: where, how often, and what is reported if no session admits it."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from kit.refusals import exactly

from graftlab.base.world import Place, RunInfo
from graftlab.config import GraftConfig
from graftlab.errors import ConfigError, SessionError
from graftlab.exchange.keys import new_token
from graftlab.jobs import session_client
from graftlab.jobs.handshake import RejoinState, RequestRefused, WorldShare, WorldShareRequest
from graftlab.jobs.session_client import SessionClient, _RankTakenError
from graftlab.plan.plan import GraftPlan
from graftlab.plan.wire import to_wire

HERE = "tcp://localhost:29500"


class Clock:
    """The monotonic clock; waits pass at once."""

    def __init__(self) -> None:
        self.now = 100.0
        self.waits: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(session_client, "time", made)
    monkeypatch.setattr(session_client, "threading", SimpleNamespace(Event=lambda: made))
    return made


def client(tmp_path: Path, **settings: Any) -> SessionClient:
    usual = {"role": "target", "baseline_world_size": 1, "target_world_size": 1, "address": str(tmp_path)}
    return SessionClient(Place("target", 0, 1, 1), GraftConfig(**{**usual, "timeout": 60.0, **settings}))


class Server:
    """A rendezvous at which ``answers`` connections are possible, one for each try; None means no listener."""

    def __init__(self, folder: Path, *answers: object) -> None:
        self.folder = folder
        self._answers = list(answers)
        self.listeners = 0
        self.is_locked = False

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        self.is_locked = True
        yield
        self.is_locked = False

    def connect(self, timeout: float) -> Any:
        found = self._answers.pop(0)
        return None if found is None else contextlib.nullcontext(found)

    def listen(self) -> Any:
        assert self.is_locked
        self.listeners += 1
        return contextlib.nullcontext()

    def session_token(self) -> str:
        return "the session's token"


@pytest.mark.parametrize("was_far", [False, True])
def test_a_job_joins_again_where_it_joined_before(
    was_far: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = client(tmp_path, address=HERE, token=new_token())
    made._joined_over_network = was_far
    monkeypatch.setattr(
        session_client, "Rendezvous", lambda folder: contextlib.nullcontext(Server(folder, "connection"))
    )
    monkeypatch.setattr(made, "_ask", lambda connection, state, segment: "here")
    monkeypatch.setattr(made, "_ask_over_network", lambda endpoint, state: "far")
    state: Any = None
    found: Any = made.rejoin(state, None)
    assert found == ("far" if was_far else "here")


def test_a_job_brings_its_plan_once_and_then_the_state_of_its_run(tmp_path: Path) -> None:
    made = client(tmp_path, first_step=5, b2t_filter="layer == 3")
    asked = made._request(None)
    assert (asked.side, asked.rank, asked.world_size, asked.other_world_size) == ("target", 0, 1, 1)
    assert (asked.pid, asked.device, asked.rejoin, asked.first_step) == (os.getpid(), "cpu", None, 5)
    assert asked.plan == to_wire(GraftPlan(b2t="layer == 3", compare="True"))
    state = RejoinState(RunInfo(3, 7, (0, 1)), to_wire(GraftPlan()), lost_rows=0)
    again = made._request(state)
    assert (again.plan, again.rejoin) == (None, state)


def test_a_server_that_ends_before_it_answers_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(connection: object, request: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(session_client, "send_handshake", fails)
    assert client(tmp_path)._ask(MagicMock(), None) is None


@pytest.mark.parametrize("rejoins", [False, True])
def test_a_far_session_that_refuses_is_left_and_given_its_time(
    rejoins: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = MagicMock()
    far.ask.return_value = RequestRefused("full", settings=False), []
    monkeypatch.setattr(session_client, "TcpSessionClient", lambda endpoint, token: far)
    made = client(tmp_path, address=HERE, token=new_token(), timeout=0.5)
    state: Any = RejoinState(RunInfo(3, 7, (0, 1)), to_wire(GraftPlan()), lost_rows=0) if rejoins else None
    with pytest.raises(SessionError, match=exactly("full")):
        made._ask_over_network(made._config.endpoint, state)  # type: ignore[arg-type]
    far.close.assert_called_once_with()
    # The timeout of a job is for its first session alone.
    limit = far.ask.call_args.args[1]
    assert limit == 15.0 if rejoins else 0.0 < limit <= 0.5


def test_a_share_of_a_world_is_awaited_for_the_jobs_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    connection = MagicMock()
    connection.settimeout = done.append
    share = WorldShare(4096, 2)
    place = SimpleNamespace(connect=lambda timeout: done.append(timeout) or connection)
    monkeypatch.setattr(session_client, "Rendezvous", lambda folder: contextlib.nullcontext(place))

    def ask(asked: object, request: object, kind: object, error: object) -> WorldShare:
        done.append((asked, request, kind, error))
        return share

    monkeypatch.setattr(session_client, "ask", ask)
    monkeypatch.setattr(session_client, "receive_descriptors", lambda asked, count: [count])
    assert client(tmp_path).fetch_share(7) == (share, [2])
    request = WorldShareRequest(7, "target", 0, 1, 1, os.getpid())
    assert done == [60.0, 60.0, (connection, request, WorldShare, SessionError)]
    monkeypatch.setattr(place, "connect", lambda timeout: None)
    with pytest.raises(SessionError, match=exactly("the session server has ended")):
        client(tmp_path).fetch_share(7)


@pytest.mark.parametrize(("rejoins", "limit"), [(False, 55.0), (True, 60.0)])
def test_an_answer_is_awaited_as_long_as_the_job_may_still_wait(
    rejoins: bool, limit: float, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = client(tmp_path)
    clock.now += 5.0
    limits: list[float] = []
    monkeypatch.setattr(session_client, "send_handshake", lambda connection, request: None)
    connection: Any = SimpleNamespace(settimeout=limits.append)

    def receive(found: object) -> Any:
        assert (found, limits) == (connection, [limit])
        raise TimeoutError

    monkeypatch.setattr(session_client, "receive_handshake", receive)
    said = (
        f"the session server in {made._config.rendezvous} did not answer within 60 s. One that a job started may take "
        f"that long to start: a larger timeout (GRAFTLAB_TIMEOUT) waits longer; its log is session-server.log there"
    )
    state: Any = "its run" if rejoins else None
    with pytest.raises(SessionError, match=exactly(said)):
        made._ask(connection, state)


# ---- on one machine --------------------------------------------------------------------------------------------------


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The tokens of the servers that were started."""
    tokens: list[Any] = []

    def start(config: GraftConfig, rendezvous: Server, listener: object, token: str | None) -> Any:
        assert rendezvous.is_locked
        tokens.append(token)
        return SimpleNamespace(poll=lambda: 5)

    monkeypatch.setattr(session_client, "start_headless_server", start)
    return tokens


def asking(made: SessionClient, monkeypatch: pytest.MonkeyPatch, *results: Any) -> None:
    answers = iter(results)
    monkeypatch.setattr(made, "_ask", lambda connection, state: next(answers))


def test_a_server_that_listens_is_asked_and_none_is_started(
    tmp_path: Path, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, server = client(tmp_path), Server(tmp_path, "connection")
    asking(made, monkeypatch, "admitted")
    assert made._join_here(server, None) == "admitted"  # type: ignore[arg-type, comparison-overlap]
    assert (started, server.listeners) == ([], 0)


def test_where_none_listens_one_is_started_and_a_server_that_just_ended_replaced(
    tmp_path: Path, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, server = client(tmp_path), Server(tmp_path, "ending", None, "new")
    asking(made, monkeypatch, None, "admitted")
    assert made._join_here(server, None) == "admitted"  # type: ignore[arg-type, comparison-overlap]
    assert started == [None]


def test_after_three_servers_that_ended_the_job_names_the_log(
    tmp_path: Path, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, server = client(tmp_path), Server(tmp_path, None, "a", None, None, None, "c", "too late")
    asking(made, monkeypatch, None, None)
    with pytest.raises(SessionError, match=r"ended before it answered \(exit code 5\); see .*session-server\.log"):
        made._join_here(server, None)  # type: ignore[arg-type]
    assert len(started) == 3
    asking(made, monkeypatch, None, None, None)
    with pytest.raises(SessionError, match=r"ended before it answered; see"):
        made._join_here(Server(tmp_path, "a", "b", "c"), None)  # type: ignore[arg-type]


def test_a_job_that_starts_a_session_for_other_machines_prints_its_token_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint = GraftConfig(address=HERE).endpoint
    made, server = client(tmp_path), Server(tmp_path)
    assert made._token_to_listen(server, None) is None  # type: ignore[arg-type]
    assert made._token_to_listen(server, endpoint) == "the session's token"  # type: ignore[arg-type]
    assert "join with GRAFTLAB_TOKEN=the session's token" in capsys.readouterr().err
    assert made._token_to_listen(server, endpoint) == "the session's token"  # type: ignore[arg-type]
    token = new_token()
    assert client(tmp_path, token=token)._token_to_listen(server, endpoint) == token  # type: ignore[arg-type]
    assert capsys.readouterr().err == ""


# ---- by a network ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("is_own", "listens", "by"), [(True, False, "here"), (True, True, "net"), (False, False, "net")]
)
def test_an_address_here_without_a_listener_is_joined_by_its_folder(
    is_own: bool, listens: bool, by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = client(tmp_path, address=HERE, run_dir=str(tmp_path))
    monkeypatch.setattr(session_client, "is_own_address", lambda host: is_own)
    monkeypatch.setattr(session_client, "Rendezvous", lambda where: contextlib.nullcontext("rendezvous"))
    monkeypatch.setattr(made, "_is_listening", lambda endpoint: listens)
    monkeypatch.setattr(made, "_join_here", lambda rendezvous, endpoint: "here" if endpoint is not None else "folder")
    monkeypatch.setattr(made, "_join_over_network", lambda endpoint: "net")
    assert made._try_to_join() == by  # type: ignore[comparison-overlap]


def test_a_port_is_tried_and_closed_again(tmp_path: Path) -> None:
    with socket.create_server(("localhost", 0)) as listener:
        endpoint = GraftConfig(address=f"tcp://localhost:{listener.getsockname()[1]}").endpoint
        assert endpoint is not None
        assert client(tmp_path)._is_listening(endpoint)
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(60)
            assert connection.recv(1) == b""
    assert not client(tmp_path)._is_listening(endpoint)


def test_a_host_without_an_address_is_a_wrong_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = client(tmp_path, address=HERE)

    def unknown(host: str) -> bool:
        raise socket.gaierror(-2, "no such name")

    monkeypatch.setattr(session_client, "is_own_address", unknown)
    with pytest.raises(ConfigError, match=r"GRAFTLAB_ADDRESS.* localhost cannot be resolved: .*no such name"):
        made._try_to_join()


def test_without_a_token_no_other_machine_is_asked(tmp_path: Path) -> None:
    made = client(tmp_path, address=HERE)
    with pytest.raises(
        ConfigError,
        match=exactly(
            "token (GRAFTLAB_TOKEN) is not given, nor is token_file (GRAFTLAB_TOKEN_FILE); address is "
            "tcp://localhost:29500, where jobs on several machines meet: the session that listens there "
            "has printed the token, or `graftlab token FILE` makes one beforehand"
        ),
    ):
        made._join_over_network(made._config.endpoint)  # type: ignore[arg-type]


def test_another_machine_is_asked_until_the_time_is_over(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = client(tmp_path, address=HERE, token=new_token(), timeout=2.2)
    asked: list[Any] = []
    monkeypatch.setattr(made, "_ask_over_network", lambda endpoint, state: asked.append(state))
    with pytest.raises(
        SessionError,
        match=r"answered at .* within 2\.2 s: does a session listen there",
    ):
        made._join_over_network(made._config.endpoint)  # type: ignore[arg-type]
    assert (asked, clock.waits) == ([None] * 5, [0.5] * 4)
    made._reached_unauthenticated = True
    with pytest.raises(
        SessionError,
        match=r"the process that listens there has a different token",
    ):
        made._join_over_network(made._config.endpoint)  # type: ignore[arg-type]
    monkeypatch.setattr(made, "_ask_over_network", lambda endpoint, state: "admitted")
    assert made._join_over_network(made._config.endpoint) == "admitted"  # type: ignore[arg-type, comparison-overlap]


def test_a_process_with_another_token_warns_at_once_and_again_after_a_change(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = client(tmp_path, address=HERE, token=new_token())
    endpoint: Any = made._config.endpoint
    for is_unauthenticated in (False, True, True, False, True):
        made._warn_of_unauthenticated(endpoint, is_unauthenticated)
        assert made._reached_unauthenticated is is_unauthenticated
    assert len([line for line in caplog.messages if "This job keeps trying" in line]) == 2


# ---- a rank that is taken --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("timeout", "tries"), [(600.0, 61), (2.0, 5)])
def test_a_job_whose_place_is_taken_asks_again_for_a_while(
    timeout: float, tries: int, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = client(tmp_path, timeout=timeout)
    asked: list[int] = []

    def taken() -> Any:
        asked.append(1)
        raise _RankTakenError("target[0] has joined already")

    monkeypatch.setattr(made, "_try_to_join", taken)
    with pytest.raises(SessionError, match=exactly("target[0] has joined already")):
        made.join()
    assert len(asked) == tries
    monkeypatch.setattr(made, "_try_to_join", lambda: "admitted")
    assert made.join() == "admitted"  # type: ignore[comparison-overlap]


def test_the_time_that_is_left_is_never_none(tmp_path: Path, clock: Clock) -> None:
    made = client(tmp_path, timeout=10.0)
    clock.now += 4
    assert made.remaining() == 6.0
    clock.now += 60
    assert made.remaining() == 0.001


@pytest.mark.parametrize(
    ("reply", "kind", "says"),
    [
        (RequestRefused("taken", settings=False, again=True), _RankTakenError, "taken"),
        (RequestRefused("two sizes", settings=True), ConfigError, "two sizes"),
        (RequestRefused("full", settings=False), SessionError, "full"),
        (WorldShare(1, 2), SessionError, "the session server answered WorldShare"),
    ],
)
def test_a_job_asks_again_or_reports_its_settings_as_the_answer_says(
    reply: Any, kind: type[Exception], says: str, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=exactly(says)) as raised:
        client(tmp_path)._accepted(reply)
    assert type(raised.value) is kind
