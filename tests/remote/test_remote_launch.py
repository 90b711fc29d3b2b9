"""How a session's ranks on other machines find each other, with threads of this process for ranks."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit.mailboxes import DEADLINE
from kit.refusals import exactly

from graftlab.base.world import Place
from graftlab.config import Endpoint
from graftlab.errors import LaunchError, MessageError, SessionError
from graftlab.exchange.channel import SocketChannel
from graftlab.exchange.status_page import RankStatus
from graftlab.jobs.handshake import JoinRequest, RequestRefused
from graftlab.jobs.peer_connector import PeerConnector
from graftlab.plan.plan import GraftPlan
from graftlab.plan.wire import from_wire
from graftlab.ranks.messages import (
    Hello,
    LinkReport,
    LiveOutput,
    Output,
    Shutdown,
    StoreAddress,
    WorldStart,
    pack,
    unpack_to_rank,
)
from graftlab.ranks.options import LaunchOptions
from graftlab.remote import launcher, remote_rank
from graftlab.remote.launcher import _Assignments, _device, _RemoteLaunch, _require_fit, launch_remote_ranks
from graftlab.remote.rank_supervisor import HostFacts, RankEnd, RankSupervisor
from graftlab.remote.remote_rank import WORLD, RemoteRankSpec, _find_modules, _joined, _LaunchSetup

FACTS = RankSupervisor().facts()


class ThreadOfRank:
    """Runs what a rank does before its first run, or what a test gives instead."""

    def __init__(self, body: Callable[[RemoteRankSpec], None]) -> None:
        self._body = body
        self.spec: RemoteRankSpec
        self.ended: RankEnd | str | None = None
        self.signals: list[int] = []
        self.error: BaseException | None = None

    def start(self, spec: bytes) -> None:
        self.spec = remote_rank._decoder.decode(spec)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._body(self.spec)
        except BaseException as error:
            self.error = error

    def end(self, timeout: float) -> RankEnd | str | None:
        return self.ended

    def log_tail(self, timeout: float) -> bytes:
        return b"its log"

    def signal(self, number: int) -> None:
        self.signals.append(number)
        self.ended = RankEnd(-number, b"its last words")

    def release_in_child(self) -> None: ...

    def join(self) -> None:
        self._thread.join(DEADLINE)
        if self.error is not None:
            raise self.error


class Hosts:
    """One machine, or as many as ``facts`` names."""

    host, port, uses_folder, threads, gpus = "127.0.0.1", 0, True, 3, 0.0

    def __init__(self, bodies: list[Callable[[RemoteRankSpec], None]]) -> None:
        self.ranks = [ThreadOfRank(body) for body in bodies]
        self.released = 0

    def reserve(self, options: LaunchOptions, folder: Path) -> Hosts:
        return self

    def facts(self) -> list[HostFacts]:
        return [FACTS] * len(self.ranks)

    def process(self, place: Place) -> ThreadOfRank:
        return self.ranks[place.world_rank]

    def release(self) -> None:
        self.released += 1


@pytest.fixture(autouse=True)
def closed_connectors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The connections of ranks to each other, which otherwise end with their processes."""
    made: list[PeerConnector] = []

    def connector(*given: Any) -> PeerConnector:
        made.append(PeerConnector(*given))
        return made[-1]

    monkeypatch.setattr(remote_rank, "PeerConnector", connector)
    # A rank sets it, if it has no value.
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    yield
    for each in made:
        each.close()


@pytest.fixture
def joined() -> Iterator[Callable[[RemoteRankSpec], Any]]:
    """Makes a rank's connection to the notebook, which is closed after the test."""
    proxies: list[Any] = []

    def join(spec: RemoteRankSpec) -> Any:
        line, proxy = _joined(spec)
        proxies.append(proxy)
        return line

    yield join
    for proxy in proxies:
        proxy.close(when_done=False, timeout=1.0)


def test_ranks_receive_their_settings_meet_and_find_their_sides_store(
    joined: Callable[[RemoteRankSpec], Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend("a folder here")
    caplog.set_level(logging.INFO, "graftlab")
    world: dict[str, Any] = {}
    stores: dict[str, Any] = {}
    limits: list[float] = []
    left_behind: list[bool] = []

    def rank(spec: RemoteRankSpec) -> None:
        line = joined(spec)
        setup = _LaunchSetup(spec, line)
        exchange, connector = setup.connect()
        world[spec.place.label] = connector.kinds()
        limits.append(exchange.timeout)
        # No other process connects from here on.
        left_behind.append(connector._folder.exists())
        stores[spec.place.label] = setup.store()
        # Importing a model's libraries may print.
        line.send(Output(f"{spec.place.label} imports\n"))
        line.send(LiveOutput(1, "50 %"))
        line.send_status(RankStatus("idle", step=7))
        line.send(Hello(os.getpid()))

    hosts = Hosts([rank] * 3)
    options = LaunchOptions(1, 2, timeout=DEADLINE, tap_timeout=7.0, buffer_budget=1 << 20, keep_budget=1 << 21)
    ranks = launch_remote_ranks(options, tmp_path, GraftPlan(b2t="name == 'x'"), hosts)
    for each in hosts.ranks:
        each.join()
    try:
        assert (limits, left_behind) == ([7.0] * 3, [False] * 3)
        assert world == {"baseline[0]": ((1, 2), ()), "target[0]": ((0, 2), ()), "target[1]": ((0, 1), ())}
        assert [each.links for each in ranks] == ["shared memory"] * 3
        assert [each.pid for each in ranks] == [os.getpid()] * 3
        assert [each.alive for each in ranks] == [True] * 3
        assert [each.status().step for each in ranks] == [7] * 3
        assert "target[1]: target[1] imports" in caplog.messages
        # A store of each side, at its rank 0.
        stores["target[0]"].set("key", "of the target")
        assert stores["target[1]"].get("key") == b"of the target"
        assert not stores["baseline[0]"].check(["key"])
        specs = [each.spec for each in hosts.ranks]
        assert {(each.timeout, each.tap_timeout, each.buffer_budget, each.keep_budget) for each in specs} == {
            (DEADLINE, 7.0, 1 << 20, 1 << 21)
        }
        assert [(each.local_rank, each.local_world_size) for each in specs] == [(0, 1), (0, 2), (1, 2)]
        assert {(each.device, each.backend, each.threads, each.folder) for each in specs} == {
            ("cpu", "gloo", 3, os.getcwd())
        }
        assert from_wire(specs[0].plan).b2t == GraftPlan(b2t="name == 'x'").b2t
        assert all(os.path.isabs(path) for path in specs[0].search_path)
        assert specs[0].search_path[0] == str(Path.cwd() / "a folder here")
    finally:
        for handle in ranks:
            handle.release()
        assert hosts.released == 1


def test_the_machines_are_given_back_with_the_last_rank(tmp_path: Path) -> None:
    hosts = Hosts([lambda spec: None] * 3)
    launch = _RemoteLaunch(LaunchOptions(1, 2), tmp_path, GraftPlan(), hosts)
    for rank in launch.ranks[:2]:
        rank.release()
        rank.release()
    assert hosts.released == 0
    launch.ranks[2].release()
    assert hosts.released == 1


def test_ranks_start_once_all_are_connected_and_a_store_is_for_its_side_alone(tmp_path: Path) -> None:
    launch = _RemoteLaunch(LaunchOptions(1, 3), tmp_path, GraftPlan(), Hosts([lambda spec: None] * 4))
    received: list[tuple[str, object]] = []
    try:
        for rank in launch.ranks:
            sent = lambda frame, name=rank.label: received.append((name, unpack_to_rank(frame)))  # noqa: E731
            rank.channel = SimpleNamespace(send=sent, close=lambda: None)  # type: ignore[assignment]
        # A report again, as ranks that lose a link make it, counts once.
        for number in (0, 2, 2, 3):
            launch._on_linked(LinkReport(WORLD, (), ()), launch.ranks[number])
        assert received == []
        launch._on_linked(LinkReport(WORLD, (), ()), launch.ranks[1])
        assert received == [(rank.label, WorldStart(WORLD)) for rank in launch.ranks]
        received.clear()
        address = StoreAddress("10.0.0.5", 7)
        launch._on_store(address, launch.ranks[2])
        assert received == [("target[0]", address), ("target[2]", address)]
    finally:
        launch.abandon()


def test_a_rank_that_ends_before_it_joins_ends_the_launch_with_its_log(tmp_path: Path) -> None:
    hosts = Hosts([lambda spec: None] * 2)
    hosts.ranks[1].ended = RankEnd(3, b"ImportError: no torch")
    with pytest.raises(
        LaunchError,
        match=exactly("target[0] died while starting (ended with exit code 3). Its log ends:\nImportError: no torch"),
    ):
        launch_remote_ranks(LaunchOptions(1, 1, timeout=DEADLINE), tmp_path, GraftPlan(), hosts)
    # The other one does not stay behind.
    assert hosts.ranks[0].signals
    assert hosts.released == 1
    assert (tmp_path / "logs" / "target-0.log").read_text() == "ImportError: no torch"


def test_a_rank_that_ends_later_while_the_launch_waits_ends_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "_LOOK", 0.01)
    looks = iter([None, None])
    hosts = Hosts([lambda spec: None] * 2)
    hosts.ranks[1].end = lambda timeout: next(looks, RankEnd(3, b"its last words"))  # type: ignore[method-assign]
    with pytest.raises(LaunchError, match=r"died while starting \(ended with exit code 3\)"):
        launch_remote_ranks(LaunchOptions(1, 1, timeout=DEADLINE), tmp_path, GraftPlan(), hosts)


def test_a_rank_whose_connection_ends_before_it_is_ready_ends_the_launch(
    joined: Callable[[RemoteRankSpec], Any], tmp_path: Path
) -> None:
    def leave(spec: RemoteRankSpec) -> None:
        joined(spec).channel.close()

    hosts = Hosts([leave] * 2)
    with pytest.raises(
        LaunchError,
        match=r"died while starting .* Its log ends:",
    ):
        launch_remote_ranks(LaunchOptions(1, 1, timeout=DEADLINE), tmp_path, GraftPlan(), hosts)
    assert hosts.released == 1


def test_a_rank_joins_once_and_no_other_process_joins_as_it(
    joined: Callable[[RemoteRankSpec], Any], tmp_path: Path
) -> None:
    hosts = Hosts([lambda spec: None] * 2)
    launch = _RemoteLaunch(LaunchOptions(1, 1, timeout=DEADLINE), tmp_path, GraftPlan(), hosts)
    launch._listener.open(launch._admit)
    try:
        spec = launch._spec_of(launch.ranks[1].place)
        joined(spec)
        assert [rank.has_joined for rank in launch.ranks] == [False, True]
        with pytest.raises(SessionError, match=r"refused target\[0\]: target\[0\] has joined already"):
            joined(spec)
        other = replace(spec.place, world_size=2, rank=1)
        with pytest.raises(SessionError, match=r"target\[1\] has joined already, or is not one of its ranks"):
            joined(RemoteRankSpec(**{**{name: getattr(spec, name) for name in spec.__struct_fields__}, "place": other}))
        assert [rank.has_joined for rank in launch.ranks] == [False, True]
    finally:
        launch.abandon()


def test_an_answer_of_another_program_is_not_taken_for_the_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(Place("target", 0, 2, 1), timeout=0.25)
    answers: list[Any] = [None, (RequestRefused("it is full", settings=False), []), (Hello(1), [])]
    asked: list[Any] = []
    closed: list[Any] = []

    class Client:
        def __init__(self, endpoint: Endpoint, token: str) -> None:
            assert (endpoint, token) == (Endpoint("127.0.0.1", 1), "t")

        def ask(self, request: JoinRequest, limit: float) -> Any:
            asked.append((request, limit))
            return answers.pop(0)

        def close(self) -> None:
            closed.append(self)

    monkeypatch.setattr(remote_rank, "TcpSessionClient", Client)
    with pytest.raises(SessionError, match=r"target\[0\] could not reach the notebook at .* within 0\.25 s: .*listen="):
        _joined(spec)
    with pytest.raises(SessionError, match=r"refused target\[0\]: it is full"):
        _joined(spec)
    with pytest.raises(SessionError, match="answered Hello"):
        _joined(spec)
    assert len(closed) == 2
    request, limit = asked[0]
    assert limit == 0.25
    assert (request.side, request.rank, request.world_size, request.other_world_size) == ("target", 0, 2, 1)
    assert (request.pid, request.device, request.backend) == (os.getpid(), "cpu", "gloo")


def spec_of(place: Place, **more: Any) -> RemoteRankSpec:
    usual: dict[str, Any] = {
        **{"place": place, "host": "127.0.0.1", "port": 1, "token": "t", "device": "cpu", "backend": "gloo"},
        **{"local_rank": 0, "local_world_size": 1, "timeout": 0.01, "tap_timeout": 1.0, "buffer_budget": 0},
        **{"keep_budget": 0, "threads": 1, "plan": None, "search_path": (), "folder": ""},
    }
    return RemoteRankSpec(**{**usual, **more})


# ---- a rank whose notebook is silent, gone or wrong ------------------------------------------------------------------


class Line:
    """A rank's connection, at which these messages wait."""

    def __init__(self, *messages: Any, closed: bool = False) -> None:
        self._theirs, ours = socket.socketpair()
        self.channel, notebook = SocketChannel(ours), SocketChannel(self._theirs)
        for message in messages:
            notebook.send(pack(message))
        if closed:
            self._theirs.close()
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)


def test_a_rank_names_whom_it_waited_for() -> None:
    target = Place("target", 0, 1, 1)
    line = Line()
    with pytest.raises(SessionError, match=exactly("target[0] waited 0.01 s for baseline[0]")):
        _LaunchSetup(spec_of(target, token="0" * 64), line).connect()  # type: ignore[arg-type]
    # Nothing is left of where it listened.
    assert not Path(line.sent[0].socket).parent.exists()
    second = Place("target", 1, 2, 1)
    with pytest.raises(SessionError, match=r"target\[1\] waited 0\.01 s for the address of its side's rank 0"):
        _LaunchSetup(spec_of(second), Line()).store()  # type: ignore[arg-type]


def test_a_rank_whose_notebook_has_gone_or_sends_a_later_message_ends() -> None:
    setup = _LaunchSetup(spec_of(Place("target", 1, 2, 1), timeout=60.0), Line(closed=True))  # type: ignore[arg-type]
    with pytest.raises(SessionError, match="the notebook has ended, or gave up this launch"):
        setup.store()
    setup = _LaunchSetup(spec_of(Place("target", 1, 2, 1), timeout=60.0), Line(Shutdown()))  # type: ignore[arg-type]
    with pytest.raises(MessageError, match="the notebook sent Shutdown before the start"):
        setup.store()


def test_a_network_interface_that_the_user_has_chosen_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for chosen, used in (("eth7", "eth7"), (None, "lo")):
        if chosen is None:
            monkeypatch.delenv("GLOO_SOCKET_IFNAME")
        else:
            monkeypatch.setenv("GLOO_SOCKET_IFNAME", chosen)
        _LaunchSetup(spec_of(Place("target", 0, 2, 1)), Line())  # type: ignore[arg-type]
        assert os.environ["GLOO_SOCKET_IFNAME"] == used


def test_a_side_of_one_rank_listens_at_no_port_for_others() -> None:
    line = Line()
    store = _LaunchSetup(spec_of(Place("target", 0, 1, 1)), line).store()  # type: ignore[arg-type]
    assert isinstance(store, torch.distributed.HashStore)
    assert line.sent == []


def test_a_rank_that_ends_sends_what_is_left_and_closes_its_connection() -> None:
    done: list[object] = []
    channel = SimpleNamespace(drain=lambda seconds: done.append(seconds), close=lambda: done.append("closed"))
    rank: Any = remote_rank._RemoteRank.__new__(remote_rank._RemoteRank)
    rank._line = SimpleNamespace(channel=channel)
    rank.proxy = SimpleNamespace(close=lambda **how: done.append(how))
    rank.drain(3.0)
    # The proxy ends with the connection, and otherwise after that time.
    assert done[-2:] == ["closed", {"when_done": True, "timeout": 3.0}]
    assert done[0] == 3.0


def test_the_notebooks_folder_and_path_are_used_after_the_machines_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here = Path.cwd()
    own = tmp_path / "own"
    path = [str(own), "x"]
    monkeypatch.setattr(remote_rank, "sys", SimpleNamespace(path=path))
    monkeypatch.chdir(here)
    for folder in ("own", "new"):
        (tmp_path / folder).mkdir()
    given = (str(tmp_path / "new"), str(own), str(tmp_path / "missing"))
    _find_modules(spec_of(Place("target", 0, 1, 1), search_path=given, folder=str(tmp_path / "absent")))
    assert path == [str(own), "x", str(tmp_path / "new")]
    assert Path.cwd() == here
    _find_modules(spec_of(Place("target", 0, 1, 1), folder=str(tmp_path / "new")))
    assert Path.cwd() == tmp_path / "new"


# ---- what a machine must have ---------------------------------------------------------------------------------------


def test_machines_with_another_minor_version_of_python_are_refused() -> None:
    places = Place("baseline", 0, 1, 1).everyone()
    major, minor, _ = FACTS.python.split(".", 2)
    _require_fit(places, [FACTS, replace(FACTS, python=f"{major}.{minor}.99")])
    with pytest.raises(LaunchError, match=r"^target\[0\]: elsewhere has Python "):
        _require_fit(places, [FACTS, replace(FACTS, python=f"{major}.{minor}9.0", node="elsewhere")])
    with pytest.raises(
        LaunchError,
        match=r"^target\[0\]: .* of wire version",
    ):
        _require_fit(places, [FACTS, replace(FACTS, wire_version=FACTS.wire_version + 1)])


def test_ranks_are_counted_by_side_and_machine_unless_each_sees_its_own_gpus() -> None:
    options = LaunchOptions(2, 3)
    places = Place("baseline", 0, 2, 3).everyone()
    facts = [replace(FACTS, node=node) for node in ("a", "b", "a", "b", "b")]
    assert _Assignments(options, places, facts, 0.0).local == [(0, 1), (0, 1), (0, 1), (0, 2), (1, 2)]
    assert _Assignments(options, places, facts, 1.0).local == [(0, 1)] * 5


@pytest.mark.parametrize(
    ("device", "backend", "gpus", "ranks", "assigned"),
    [
        (None, None, 0.0, 2, ("cpu", "gloo")),
        (None, None, 1.0, 2, ("cuda:0", "nccl")),
        ("cuda:1", None, 2.0, 2, ("cuda:1", "nccl")),
        ("cpu", None, 1.0, 2, ("cpu", "gloo")),
        ("cpu", "mpi", 0.0, 2, ("cpu", "mpi")),
        # Ranks that share a GPU cannot use nccl with each other.
        (None, None, 0.5, 2, ("cuda:0", "gloo")),
        (None, "gloo", 0.5, 2, ("cuda:0", "gloo")),
        (None, None, 0.5, 1, ("cuda:0", "nccl")),
    ],
)
def test_a_rank_has_the_device_and_backend_of_its_share(
    device: str | None, backend: str | None, gpus: float, ranks: int, assigned: tuple[str, str]
) -> None:
    found = _device(LaunchOptions(1, ranks, device=device, backend=backend), Place("target", 0, ranks, 1), gpus)
    assert (found.device, found.backend) == assigned
    # The user hears of a backend that was not asked for.
    assert bool(found.notes) == (gpus == 0.5 and ranks == 2 and backend is None)


@pytest.mark.parametrize("device", ["cuda:2", "xla", "cuda:first", "cuda:-1"])
def test_a_device_that_a_rank_does_not_have_is_refused(device: str) -> None:
    with pytest.raises(LaunchError, match=rf"device='{device}': each rank has 2 GPUs"):
        _device(LaunchOptions(1, 1, device=device), Place("target", 0, 1, 1), 2.0)
