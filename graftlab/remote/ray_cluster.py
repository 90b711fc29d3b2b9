"""Ranks on a Ray cluster: an actor for each rank, which supervises its process, in one placement group a side.

Ray finds the machines, gives each rank its GPUs, and ends the actors when the session is gone; a rank ends with its
actor. Ray itself is imported in a separate process (:mod:`graftlab.remote.ray_driver`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import math
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, get_args

from graftlab.base.world import Place
from graftlab.config import Endpoint
from graftlab.errors import DependencyError, GraftError, LaunchError
from graftlab.jobs.peer_connector import address_towards
from graftlab.plan.plan import GraftPlan
from graftlab.ranks.handle import RankHandle
from graftlab.ranks.options import LaunchOptions
from graftlab.remote.launcher import launch_remote_ranks
from graftlab.remote.rank_supervisor import HostFacts, RankEnd
from graftlab.remote.ray_messages import RayRequest, RayReservation

Placement = Literal["pack", "spread", "strict_pack", "strict_spread"]

# Seconds that the driver has to give everything back.
_RELEASE_LIMIT = 5.0
# Seconds beyond the launch's timeout in which the driver reports the missing resources.
_REPORT_LIMIT = 30.0
_BEGIN = "import sys, json; sys.path[:] = json.loads({path!r}); from graftlab.remote.ray_driver import main; main()"


@dataclass(frozen=True)
class Ray:
    """A Ray cluster on which :func:`launch` starts its ranks, for models that do not fit on the notebook's machine.

    ``address`` is that of the cluster's head, in the form of ``ray.init``: ``"10.0.0.5:6379"`` or ``"auto"`` on a
    machine of the cluster, ``"ray://10.0.0.5:10001"`` from elsewhere; by default ``"auto"``. ``resources`` are those of
    each rank, such as ``{"GPU": 1, "CPU": 8}``, in Ray's names and units; by default one GPU. ``runtime_env`` is Ray's,
    for the ranks. ``placement`` chooses how the ranks of a side are spread over machines: ``"pack"``, ``"spread"``,
    ``"strict_pack"`` or ``"strict_spread"``.

    The ranks connect to the notebook at ``listen``, such as ``"tcp://10.0.0.7:29500"``. By default that is the address
    from which this machine reaches the cluster's head, and a port that the system chooses.

    Raises :class:`LaunchError` for values that cannot be used.

    >>> gl.Ray(resources={"CPU": 1})
    Ray(address=None, resources={'CPU': 1}, ...)
    """

    address: str | None = None
    resources: Mapping[str, float] = field(default_factory=lambda: {"GPU": 1})
    runtime_env: Mapping[str, Any] | None = None
    placement: Placement = "pack"
    listen: str | None = None

    def __post_init__(self) -> None:
        if self.placement not in get_args(Placement):
            raise LaunchError(
                f"placement={self.placement!r}: a side is placed by one of {', '.join(get_args(Placement))}"
            )
        wrong = {name: value for name, value in self.resources.items() if not _is_amount(value)}
        if wrong or not any(self.resources.values()):
            raise LaunchError(
                f"resources={dict(self.resources)!r}: give each rank an amount of some resource, such as {{'GPU': 1}} "
                f"or {{'CPU': 1}}"
            )
        if self.listen is not None and Endpoint.parse(self.listen) is None:
            raise LaunchError(f"listen={self.listen!r}: give an address of this machine, such as tcp://10.0.0.7:29500")

    def start_ranks(self, options: LaunchOptions, folder: Path, plan: GraftPlan) -> Sequence[RankHandle]:
        """Start every rank of a session; :func:`launch` calls this."""
        return launch_remote_ranks(options, folder, plan, self)

    def reserve(self, options: LaunchOptions, folder: Path) -> RayHosts:
        """Reserve the resources of both sides. Raises :class:`LaunchError` with what the cluster lacks."""
        if importlib.util.find_spec("ray") is None:
            raise DependencyError(
                "ranks on a Ray cluster need ray, which is not installed; `pip install 'graftlab[ray]'` installs it"
            )
        driver = _DriverProcess(folder / "logs" / "ray.log")
        try:
            return RayHosts(self, options, driver)
        except BaseException:
            driver.close()
            raise


def _is_amount(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value) and value >= 0


class RayHosts:
    """The machines of one launch."""

    def __init__(self, wanted: Ray, options: LaunchOptions, driver: _DriverProcess) -> None:
        self._driver = driver
        # A working directory that Ray sets contains the code, so ranks stay in it.
        self.uses_folder = "working_dir" not in (wanted.runtime_env or {})
        self.threads = max(1, int(wanted.resources.get("CPU", 1)))
        self.gpus = float(wanted.resources.get("GPU", 0))
        reserved = _reserve(wanted, options, driver)
        self._facts = list(reserved.facts)
        endpoint = None if wanted.listen is None else Endpoint.parse(wanted.listen)
        self.host, self.port = endpoint or (_own_address(reserved.head), 0)

    def facts(self) -> list[HostFacts]:
        return self._facts

    def process(self, place: Place) -> RayProcess:
        return RayProcess(self._driver, place.world_rank)

    def release(self) -> None:
        self._driver.close()


class RayProcess:
    """A rank's process, reached through its actor."""

    def __init__(self, driver: _DriverProcess, world_rank: int) -> None:
        self._driver, self._world_rank = driver, world_rank
        self._ended: Future[RankEnd] | None = None

    def start(self, spec: bytes) -> None:
        self._ended = self._driver.ask("run", self._world_rank, spec)

    def end(self, timeout: float) -> RankEnd | str | None:
        if self._ended is None:
            return None
        try:
            return self._ended.result(timeout)
        except NotYet:
            return None
        except GraftError as error:
            return f"ended with its Ray actor: {error}"

    def log_tail(self, timeout: float) -> bytes:
        try:
            tail: bytes = self._driver.ask("log_tail", self._world_rank).result(timeout)
        except (GraftError, NotYet):
            return b""
        return tail

    def signal(self, number: int) -> None:
        # Without waiting for the answer, because the machine may be gone.
        self._driver.ask("signal", self._world_rank, number)

    def release_in_child(self) -> None:
        self._driver.release_in_child()


def _reserve(wanted: Ray, options: LaunchOptions, driver: _DriverProcess) -> RayReservation:
    request = RayRequest(
        wanted.address or "auto",
        dict(wanted.resources),
        None if wanted.runtime_env is None else dict(wanted.runtime_env),
        wanted.placement,
        {"baseline": options.baseline, "target": options.target},
        options.timeout,
    )
    try:
        reserved: RayReservation = driver.ask("reserve", request).result(options.timeout + _REPORT_LIMIT)
    except NotYet:
        raise LaunchError(
            f"the Ray cluster at {request.address!r} did not answer within {options.timeout + _REPORT_LIMIT:g} s"
        ) from None
    return reserved


def _own_address(head: str) -> str:
    """This machine's address in packets to the cluster's head."""
    endpoint = Endpoint.parse(head)
    if endpoint is None:
        raise LaunchError(f"the address {head!r} of the Ray cluster's head cannot be read; give listen=")
    try:
        return address_towards(*endpoint)
    except OSError as error:
        raise LaunchError(f"this machine has no route to the Ray cluster's head at {endpoint}: {error}") from error


class _DriverProcess:
    """The notebook's end of the connection to :mod:`graftlab.remote.ray_driver`."""

    def __init__(self, log: Path) -> None:
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        ours, theirs = socket.socketpair()
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            with theirs:
                # Its own session: the stop button's signal is for the notebook.
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _BEGIN.format(path=json.dumps(sys.path)), str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=descriptor,
                    stderr=descriptor,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
        finally:
            os.close(descriptor)
        self._socket = ours
        self._connection = Connection(os.dup(ours.fileno()))
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._asked: dict[int, Future[Any]] | None = {}
        threading.Thread(target=self._read_answers, name="graftlab-ray", daemon=True).start()

    def ask(self, method: str, *arguments: Any) -> Future[Any]:
        """Return the future answer; its exception is a :class:`LaunchError`."""
        answer = Future[Any]()
        with self._lock:
            if self._asked is None:
                answer.set_exception(self._gone())
                return answer
            number = next(self._numbers)
            self._asked[number] = answer
            # If the driver is gone, the thread that reads its answers ends every wait.
            with contextlib.suppress(OSError):
                self._connection.send((number, method, arguments))
        return answer

    def close(self) -> None:
        """Let it give everything back, and wait for its end; kill it if its cluster does not answer."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(_RELEASE_LIMIT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._socket.close()

    def release_in_child(self) -> None:
        """Close a forked child's copies of the connection, so that it still ends with the session."""
        self._socket.close()
        self._connection.close()

    def _read_answers(self) -> None:
        try:
            with self._connection:
                while True:
                    number, answer = self._connection.recv()
                    with self._lock:
                        assert self._asked is not None
                        waiting = self._asked.pop(number)
                    if isinstance(answer, Exception):
                        waiting.set_exception(answer)
                    else:
                        waiting.set_result(answer)
        except (EOFError, OSError):
            with self._lock:
                left, self._asked = self._asked or {}, None
            for waiting in left.values():
                waiting.set_exception(self._gone())

    def _gone(self) -> LaunchError:
        return LaunchError(f"this session's process that was connected to Ray has ended; its log is {self._log}")
