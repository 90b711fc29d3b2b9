"""What a session asks of a Ray cluster, and gives back to it, on a cluster that stands in for Ray's."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from kit.processes import descriptors
from kit.refusals import exactly

import graftlab as gl
from graftlab.base.world import Place
from graftlab.ranks.options import LaunchOptions
from graftlab.remote import ray_cluster
from graftlab.remote.rank_supervisor import HostFacts, RankEnd, RankSupervisor
from graftlab.remote.ray_cluster import RayHosts, _DriverProcess

DEADLINE = 30.0


class RayError(Exception): ...


class GetTimeoutError(RayError): ...


class Method:
    """A method of an actor: a call returns a reference to the result."""

    def __init__(self, calls: list[Any], name: str, result: Future[Any]) -> None:
        self._calls, self._name, self._result = calls, name, result

    def remote(self, *arguments: Any) -> SimpleNamespace:
        self._calls.append((self._name, *arguments))
        return SimpleNamespace(future=lambda: self._result)


def known(value: object) -> Future[Any]:
    future = Future[Any]()
    future.set_result(value)
    return future


class Actor:
    def __init__(self, number: int, options: dict[str, Any]) -> None:
        self.number, self.options = number, options
        self.calls: list[Any] = []
        self.ended = Future[Any]()
        self.facts = Method(self.calls, "facts", known(HostFacts(1, "0", "3", f"node{number}")))
        self.run = Method(self.calls, "run", self.ended)
        self.log_tail = Method(self.calls, "log_tail", known(b"log of %d" % number))
        self.signal = Method(self.calls, "signal", known(None))


class Cluster:
    """The part of Ray that the driver uses; the second machine's name comes before the first's."""

    def __init__(self) -> None:
        self.joined: list[dict[str, Any]] = []
        self.groups: list[Any] = []
        self.actors: list[Actor] = []
        self.killed: list[int] = []
        self.removed: list[str] = []
        self.shutdowns = 0
        self.refusal: Exception | None = None
        self.has_room = True
        self.failure: Exception | None = None

    def init(self, **options: Any) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.joined.append(options)

    def is_initialized(self) -> bool:
        return bool(self.joined)

    def shutdown(self) -> None:
        self.shutdowns += 1

    def placement_group(self, bundles: list[dict[str, float]], *, strategy: str, name: str) -> Any:
        group = SimpleNamespace(bundles=bundles, strategy=strategy, name=name, wait=self._wait)
        self.groups.append(group)
        return group

    def _wait(self, seconds: float) -> bool:
        # All of the request has that time, and a part of it is over.
        assert 0 < seconds < DEADLINE
        return self.has_room

    def placement_group_table(self, group: Any) -> dict[str, Any]:
        count = len(group.bundles)
        return {"bundles_to_node_id": {index: f"n{count - index}" for index in range(count)}}

    def remove_placement_group(self, group: Any) -> None:
        self.removed.append(group.name)
        if group.name == "graftlab baseline":
            raise RayError("the head is busy")

    def remote(self, supervisor: type) -> Any:
        assert supervisor is RankSupervisor

        def make(**options: Any) -> Any:
            self.actors.append(Actor(len(self.actors), options))
            return SimpleNamespace(remote=lambda: self.actors[-1])

        return SimpleNamespace(options=make)

    def get(self, references: list[Any], *, timeout: float) -> list[Any]:
        if self.failure is not None:
            raise self.failure
        return [reference.future().result(timeout) for reference in references]

    def put(self, value: object) -> object:
        return ("stored", value)

    def kill(self, actor: Actor) -> None:
        self.killed.append(actor.number)
        if not actor.number:
            raise RayError("it is gone already")

    def as_module(self) -> dict[str, types.ModuleType]:
        modules = {name: types.ModuleType(name) for name in ("ray", "ray.exceptions", "ray.util")}
        strategies = modules["ray.util.scheduling_strategies"] = types.ModuleType("ray.util.scheduling_strategies")
        ray: Any = modules["ray"]
        for name in ("init", "is_initialized", "shutdown", "remote", "get", "put", "kill"):
            setattr(ray, name, getattr(self, name))
        ray.__version__ = "2.60.0"
        ray.get_runtime_context = lambda: SimpleNamespace(gcs_address="127.0.0.1:6379")
        ray.cluster_resources = lambda: {"CPU": 4.0, "GPU": 1.0}
        ray.available_resources = lambda: {"CPU": 3.0}
        ray.exceptions, ray.util = modules["ray.exceptions"], modules["ray.util"]
        ray.exceptions.RayError, ray.exceptions.GetTimeoutError = RayError, GetTimeoutError
        for name in ("placement_group", "placement_group_table", "remove_placement_group"):
            setattr(ray.util, name, getattr(self, name))
        strategies.PlacementGroupSchedulingStrategy = lambda **place: place  # type: ignore[attr-defined]
        return modules


class DriverThread:
    """Runs the driver's ``main`` on a thread in place of its process."""

    def __init__(self, module: Any, patch: Callable[..., None], descriptor: int) -> None:
        self.codes: list[int] = []
        self.failure: BaseException | None = None
        self.killed = False
        patch(module, "sys", SimpleNamespace(argv=["", str(descriptor)]))
        patch(module, "os", SimpleNamespace(_exit=self.codes.append))
        self.connection = Connection(descriptor)
        patch(module, "Connection", lambda number: self.connection)
        self.thread = threading.Thread(target=self._run, args=(module.main,), daemon=True)
        self.thread.start()

    def _run(self, main: Callable[[], None]) -> None:
        # A process that ends closes its end.
        with self.connection:
            try:
                main()
            except BaseException as error:
                self.failure = error
                raise

    def wait(self, timeout: float = DEADLINE) -> None:
        self.thread.join(timeout)
        if self.thread.is_alive():
            raise subprocess.TimeoutExpired("driver", timeout)

    def kill(self) -> None:
        self.killed = True


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    made = Cluster()
    for name, module in made.as_module().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "graftlab.remote.ray_driver", raising=False)
    driver = importlib.import_module("graftlab.remote.ray_driver")

    def start(command: list[str], *, pass_fds: list[int], **settings: Any) -> DriverThread:
        assert settings["start_new_session"]
        assert int(command[-1]) == pass_fds[0]
        return DriverThread(driver, monkeypatch.setattr, os.dup(pass_fds[0]))

    monkeypatch.setattr(ray_cluster.subprocess, "Popen", start)
    monkeypatch.setattr(ray_cluster.importlib.util, "find_spec", lambda name: name)
    yield made
    sys.modules.pop("graftlab.remote.ray_driver", None)


@pytest.fixture
def reserve(cluster: Cluster, tmp_path: Path) -> Iterator[Callable[..., RayHosts]]:
    made: list[RayHosts] = []

    def of(timeout: float = DEADLINE, **wanted: Any) -> RayHosts:
        options = LaunchOptions(baseline=1, target=2, timeout=timeout)
        made.append(gl.Ray(**{"resources": {"CPU": 2, "GPU": 0.5}, **wanted}).reserve(options, tmp_path))
        return made[-1]

    yield of
    for hosts in made:
        hosts.release()


def process_of(hosts: RayHosts, place: Place) -> DriverThread:
    driver: _DriverProcess = hosts._driver
    process: Any = driver._process
    return process  # type: ignore[no-any-return]


BASELINE = Place("baseline", 0, 1, 2)
LAST = Place("target", 1, 2, 1)


def test_each_side_has_a_group_and_each_rank_an_actor_with_its_resources(
    cluster: Cluster, reserve: Callable[..., RayHosts]
) -> None:
    wanted = {"CPU": 2, "GPU": 0.5, "memory": 1e9, "fast": 1, "slow": 0}
    hosts = reserve(resources=wanted, placement="strict_pack", runtime_env={"pip": ["x"]}, address="head:6379")
    bundle = {"CPU": 2.0, "GPU": 0.5, "memory": 1e9, "fast": 1.0}
    assert [(group.name, group.strategy, group.bundles) for group in cluster.groups] == [
        ("graftlab baseline", "STRICT_PACK", [bundle]),
        ("graftlab target", "STRICT_PACK", [bundle, bundle]),
    ]
    assert [actor.options for actor in cluster.actors] == [
        {
            "num_cpus": 2.0,
            "num_gpus": 0.5,
            "memory": 1e9,
            "resources": {"fast": 1.0},
            "scheduling_strategy": {"placement_group": group, "placement_group_bundle_index": index},
            "max_concurrency": 4,
            "max_restarts": 0,
        }
        # Ranks of one machine follow each other, and the machine of the second bundle comes first.
        for group, index in [(cluster.groups[0], 0), (cluster.groups[1], 1), (cluster.groups[1], 0)]
    ]
    (joined,) = cluster.joined
    assert (joined["address"], joined["runtime_env"], joined["log_to_driver"]) == ("head:6379", {"pip": ["x"]}, False)
    assert [fact.node for fact in hosts.facts()] == ["node0", "node1", "node2"]
    assert (hosts.threads, hosts.gpus, hosts.uses_folder) == (2, 0.5, True)
    assert (hosts.host, hosts.port) == ("127.0.0.1", 0)


def test_a_cluster_by_default_is_found_by_ray_and_keeps_its_environment(
    cluster: Cluster, reserve: Callable[..., RayHosts]
) -> None:
    hosts = reserve(resources={"tpu": 1}, listen="tcp://10.0.0.7:29500")
    assert cluster.joined[0]["address"] == "auto"
    assert "runtime_env" not in cluster.joined[0]
    options = cluster.actors[0].options
    assert (options["num_cpus"], options["num_gpus"], options["resources"]) == (0, 0, {"tpu": 1.0})
    assert "memory" not in options
    assert (hosts.host, hosts.port, hosts.threads, hosts.gpus) == ("10.0.0.7", 29500, 1, 0.0)


def test_a_rank_with_a_share_of_a_core_has_a_thread(reserve: Callable[..., RayHosts]) -> None:
    assert reserve(resources={"CPU": 0.5}).threads == 1


def test_where_ray_brings_a_working_directory_ranks_stay_in_it(reserve: Callable[..., RayHosts]) -> None:
    assert not reserve(runtime_env={"working_dir": "."}).uses_folder


def test_the_head_behind_a_client_address_is_reached_at_its_host(reserve: Callable[..., RayHosts]) -> None:
    assert reserve(address="ray://127.0.0.1:10001/namespace").host == "127.0.0.1"


def test_a_rank_is_started_signalled_and_read_through_its_own_actor(
    cluster: Cluster, reserve: Callable[..., RayHosts]
) -> None:
    process = reserve().process(LAST)
    assert process.end(0) is None
    process.start(b"spec")
    process.signal(9)
    # Requests are handled in their order, and the caller does not wait for the answer to a signal.
    assert process.log_tail(DEADLINE) == b"log of 2"
    assert process.end(0) is None
    cluster.actors[2].ended.set_result(RankEnd(-9, b"tail"))
    assert process.end(DEADLINE) == RankEnd(-9, b"tail")
    # The spec has the session's token, and arguments are shown by Ray's tools; an object is not.
    assert cluster.actors[2].calls == [("facts",), ("run", ("stored", b"spec")), ("signal", 9), ("log_tail",)]
    assert cluster.actors[1].calls == [("facts",)]


def test_a_driver_that_is_gone_is_asked_without_harm_and_leaves_nothing_open(
    reserve: Callable[..., RayHosts], monkeypatch: pytest.MonkeyPatch
) -> None:
    process = reserve().process(BASELINE)
    driver = process._driver
    # The driver alone writes into its log.
    assert not [link for _, link in descriptors() if link == str(driver._log)]
    ends = Mock(send=Mock(side_effect=BrokenPipeError)), Mock()
    with monkeypatch.context() as gone:
        gone.setattr(driver, "_connection", ends[0])
        gone.setattr(driver, "_socket", ends[1])
        process.signal(2)
        # Open in a forked child, either would keep the session's cluster reserved.
        process.release_in_child()
    for end in ends:
        end.close.assert_called_once_with()


def test_a_machine_that_does_not_answer_in_time_has_no_log(cluster: Cluster, reserve: Callable[..., RayHosts]) -> None:
    process = reserve().process(BASELINE)
    cluster.actors[0].log_tail = Method([], "log_tail", Future[Any]())
    assert process.log_tail(0) == b""


def test_an_answer_that_is_late_for_the_notebooks_end_fails_nowhere(cluster: Cluster) -> None:
    ours, theirs = Pipe()
    driver = importlib.import_module("graftlab.remote.ray_driver")._Driver(theirs)
    ours.close()
    with theirs:
        driver._answer(1, "late")


def test_a_rank_whose_actor_dies_has_ended_with_the_first_line_of_why(
    cluster: Cluster, reserve: Callable[..., RayHosts]
) -> None:
    process = reserve().process(BASELINE)
    process.start(b"spec")
    cluster.actors[0].ended.set_exception(RayError("\n The actor died.\nTraceback of Ray's own"))
    assert process.end(DEADLINE) == "ended with its Ray actor: The actor died."


def test_a_rank_whose_actor_dies_without_a_word_has_ended_with_the_kind_of_error(
    cluster: Cluster, reserve: Callable[..., RayHosts]
) -> None:
    process = reserve().process(BASELINE)
    process.start(b"spec")
    cluster.actors[0].ended.set_exception(RayError("\n"))
    assert process.end(DEADLINE) == "ended with its Ray actor: RayError"


def test_everything_is_given_back_when_the_notebook_goes_even_if_a_part_fails(
    cluster: Cluster, reserve: Callable[..., RayHosts], caplog: pytest.LogCaptureFixture
) -> None:
    hosts = reserve()
    process = process_of(hosts, BASELINE)
    hosts.release()
    assert cluster.killed == [0, 1, 2]
    assert cluster.removed == ["graftlab baseline", "graftlab target"]
    assert "a placement group could not be removed: the head is busy" in caplog.text
    assert (cluster.shutdowns, process.codes, process.killed, process.failure) == (1, [0], False, None)
    rank = hosts.process(LAST)
    rank.start(b"spec")
    assert re.fullmatch(r"ended with its Ray actor: .* has ended; its log is .*ray\.log", str(rank.end(DEADLINE)))
    assert rank.log_tail(DEADLINE) == b""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_all_is_given_back_where_the_driver_fails(cluster: Cluster, reserve: Callable[..., RayHosts]) -> None:
    hosts = reserve()
    with pytest.raises(gl.LaunchError, match="that was connected to Ray has ended"):
        hosts._driver.ask("no such request").result(DEADLINE)
    process_of(hosts, BASELINE).wait()
    assert (cluster.killed, cluster.shutdowns) == ([0, 1, 2], 1)


def test_a_driver_that_does_not_end_in_time_is_killed(reserve: Callable[..., RayHosts]) -> None:
    hosts = reserve()
    process: Any = process_of(hosts, BASELINE)
    waits: list[tuple[float, ...]] = []
    end = process.wait

    def wait(*limit: float) -> None:
        waits.append(limit)
        if not process.killed:
            raise subprocess.TimeoutExpired("driver", 5.0)
        end()

    process.wait = wait
    hosts.release()
    assert (process.killed, waits) == (True, [(5.0,), ()])


def test_a_reservation_has_time_to_report_what_it_lacks_after_the_launchs_own() -> None:
    limits: list[float] = []

    def wait(limit: float) -> None:
        limits.append(limit)
        raise ray_cluster.NotYet

    silent: Any = SimpleNamespace(ask=lambda method, request: SimpleNamespace(result=wait))
    said = "the Ray cluster at 'head:6379' did not answer within 37 s"
    with pytest.raises(gl.LaunchError, match=exactly(said)):
        ray_cluster._reserve(gl.Ray("head:6379"), LaunchOptions(1, 1, timeout=7.0), silent)
    assert limits == [37.0]


def test_a_cluster_without_room_is_refused_and_the_error_names_what_it_lacks(
    cluster: Cluster, reserve: Callable[..., RayHosts]
) -> None:
    cluster.has_room = False
    with pytest.raises(gl.LaunchError) as raised:
        reserve(resources={"CPU": 2, "GPU": 1}, placement="spread")
    text = str(raised.value)
    assert "the baseline's 1 ranks have no place on the Ray cluster after 30 s" in text
    assert "need 6 CPU of 4 in the cluster (3 free now), 3 GPU of 1 in the cluster (0 free now)" in text
    assert "{'CPU': 2, 'GPU': 1} on one machine, and placement='spread'" in text
    # Nothing stays reserved by a launch that failed.
    assert cluster.removed == ["graftlab baseline", "graftlab target"]


@pytest.mark.parametrize(
    ("attribute", "error", "reason"),
    [
        ("refusal", ConnectionError(" no head \n"), "no connection to the Ray cluster at 'auto': no head\n.*2.60.0"),
        ("failure", GetTimeoutError(), "did not start the ranks' actors within 30 s"),
        ("failure", RayError("no module graftlab"), "actors: no module graftlab\ngraftlab must be installed on each"),
        ("failure", KeyError("x"), "Ray could not reserve resources: KeyError: 'x'"),
    ],
)
def test_a_request_that_ray_refuses_is_a_launch_error_with_the_reason(
    cluster: Cluster, reserve: Callable[..., RayHosts], attribute: str, error: Exception, reason: str
) -> None:
    setattr(cluster, attribute, error)
    with pytest.raises(gl.LaunchError, match=f"(?s){reason}"):
        reserve()
    assert len(cluster.removed) == (2 if attribute == "failure" else 0)
    assert cluster.shutdowns == 1
