"""Ranks on a Ray cluster: an actor for each rank, which supervises its process, in one placement group a side.

Ray finds the machines, gives each rank its GPUs, and ends the actors when the notebook is gone; with an actor its rank
ends. Ray is imported only where a session is launched on it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args

from graftlab.base.world import Place, Side
from graftlab.config import Endpoint
from graftlab.errors import DependencyError, LaunchError
from graftlab.jobs.peer_connector import address_towards
from graftlab.plan.plan import GraftPlan
from graftlab.ranks.handle import RankHandle
from graftlab.ranks.options import LaunchOptions
from graftlab.remote.launcher import launch_remote_ranks
from graftlab.remote.rank_supervisor import HostFacts, RankEnd, RankSupervisor

logger = logging.getLogger(__name__)

Placement = Literal["pack", "spread", "strict_pack", "strict_spread"]

_CLIENT = "ray://"
# Seconds that a call of an actor may take which has nothing to wait for.
_ANSWER_LIMIT = 10.0
# Threads of an actor: one waits for the rank's end, the others answer.
_CONCURRENCY = 4
_SIDES: tuple[Side, Side] = ("baseline", "target")


@dataclass(frozen=True)
class Ray:
    """A Ray cluster on which :func:`launch` starts its ranks, for models that do not fit on the notebook's machine.

    ``address`` is that of the cluster's head, as ``ray.init`` takes it: ``"10.0.0.5:6379"`` or ``"auto"`` on a machine
    of the cluster, ``"ray://10.0.0.5:10001"`` from elsewhere; by default ``"auto"``. Where this process is connected to
    a cluster already, that one is used. ``resources`` is what each rank gets, such as ``{"GPU": 1, "CPU": 8}``, in
    Ray's names and units; by default one GPU. ``runtime_env`` is Ray's, for the ranks. ``placement`` says how the
    ranks of a side are spread over machines: ``"pack"``, ``"spread"``, ``"strict_pack"`` or ``"strict_spread"``.

    The ranks connect to the notebook at ``listen``, such as ``"tcp://10.0.0.7:29500"``; by default at the address from
    which this machine reaches the cluster's head, and a port that the system chooses.

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

    def reserve(self, options: LaunchOptions) -> RayHosts:
        """Reserve the resources of both sides. Raises :class:`LaunchError` that says what the cluster lacks."""
        ray = _import_ray()
        connection = _connect(ray, self)
        try:
            return RayHosts(ray, self, options, connection)
        except BaseException:
            connection.release()
            raise


def _is_amount(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value) and value >= 0


def _import_ray() -> ModuleType:
    try:
        import ray
        import ray.util
    except ModuleNotFoundError as error:
        raise DependencyError(
            "ranks on a Ray cluster need ray, which is not installed; `pip install 'graftlab[ray]'` brings it"
        ) from error
    found: ModuleType = ray
    return found


# ---- the connection to the cluster ----------------------------------------------------------------------------------


class _RayConnection:
    """This process's connection to a cluster, of which Ray allows one; the sessions share it.

    A connection that was made for a session ends with the last session.
    """

    _shared: _RayConnection | None = None
    _lock = threading.Lock()

    def __init__(self, ray: ModuleType, address: str, owned: bool) -> None:
        self._ray, self.address, self._owned = ray, address, owned
        self._users = 0

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                type(self)._shared = None
                if self._owned and self._ray.is_initialized():
                    self._ray.shutdown()


def _connect(ray: ModuleType, wanted: Ray) -> _RayConnection:
    address = wanted.address or "auto"
    with _RayConnection._lock:
        shared = _RayConnection._shared
        if shared is None or not ray.is_initialized():
            owned = not ray.is_initialized()
            if owned:
                _init(ray, address, wanted.runtime_env)
            shared = _RayConnection._shared = _RayConnection(ray, address, owned)
        elif wanted.address is not None and shared.address != address:
            raise LaunchError(
                f"address={address!r}: another session of this process uses the Ray cluster at {shared.address!r}, and "
                f"Ray connects a process with one cluster; close that session first"
            )
        shared._users += 1
        return shared


def _init(ray: ModuleType, address: str, runtime_env: Mapping[str, Any] | None) -> None:
    # A working directory is uploaded only for a whole connection, not for one actor.
    given = {} if runtime_env is None else {"runtime_env": dict(runtime_env)}
    try:
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False, **given)
    except Exception as error:
        # Ray raises RuntimeError for other versions, ConnectionError and ValueError for addresses.
        raise LaunchError(
            f"this process cannot connect to the Ray cluster at {address!r}: {str(error).strip()}\n"
            f"Ray and Python of the notebook must have the cluster's versions; here they are {ray.__version__} and "
            f"{sys.version.split()[0]}"
        ) from error


# ---- the cluster's part of one launch -------------------------------------------------------------------------------


class RayHosts:
    """The placement groups and actors of one launch."""

    uses_folder: bool

    def __init__(self, ray: ModuleType, wanted: Ray, options: LaunchOptions, connection: _RayConnection) -> None:
        self._ray, self._wanted, self._connection = ray, wanted, connection
        self._groups: list[Any] = []
        self._actors: dict[int, Any] = {}
        self._released = False
        self._timeout = options.timeout
        self.gpus = float(wanted.resources.get("GPU", 0))
        endpoint = None if wanted.listen is None else Endpoint.parse(wanted.listen)
        self.host, self.port = endpoint or (_own_address(ray, connection.address), 0)
        # A working directory of Ray's is where the code is, so ranks stay there.
        self.uses_folder = "working_dir" not in (wanted.runtime_env or {})
        self.threads = max(1, int(wanted.resources.get("CPU", 1)))
        try:
            self._place(options)
        except BaseException:
            self._remove()
            raise

    def _place(self, options: LaunchOptions) -> None:
        """Create both placement groups, wait for them, and create the actors. Raises :class:`LaunchError`."""
        ray, wanted = self._ray, self._wanted
        counts = {"baseline": options.baseline, "target": options.target}
        bundle = {name: float(value) for name, value in wanted.resources.items() if value}
        for side in _SIDES:
            bundles = [bundle] * counts[side]
            self._groups.append(
                ray.util.placement_group(bundles, strategy=wanted.placement.upper(), name=f"graftlab {side}")
            )
        deadline = time.monotonic() + options.timeout
        for side, group in zip(_SIDES, self._groups, strict=True):
            if not group.wait(max(0.1, deadline - time.monotonic())):
                raise LaunchError(self._describe_lack(side, counts, options.timeout))
        actor = ray.remote(RankSupervisor)
        world_rank = 0
        for group in self._groups:
            for index in _by_node(ray, group):
                self._actors[world_rank] = actor.options(**self._actor_options(bundle, group, index)).remote()
                world_rank += 1

    def _actor_options(self, bundle: Mapping[str, float], group: Any, index: int) -> dict[str, Any]:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        chosen: dict[str, Any] = {
            "num_cpus": bundle.get("CPU", 0),
            "num_gpus": bundle.get("GPU", 0),
            "resources": {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU", "memory")},
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=index
            ),
            "max_concurrency": _CONCURRENCY,
            "max_restarts": 0,
        }
        if "memory" in bundle:
            chosen["memory"] = bundle["memory"]
        if self._wanted.runtime_env is not None and not self._connection._owned:
            chosen["runtime_env"] = dict(self._wanted.runtime_env)
        return chosen

    def _describe_lack(self, side: Side, counts: Mapping[str, int], timeout: float) -> str:
        ray = self._ray
        total, free = ray.cluster_resources(), ray.available_resources()
        parts = []
        for name, amount in self._wanted.resources.items():
            needed = amount * sum(counts.values())
            parts.append(
                f"{needed:g} {name} of {total.get(name, 0.0):g} in the cluster ({free.get(name, 0.0):g} free now)"
            )
        return (
            f"the {side}'s {counts[side]} ranks have no place on the Ray cluster after {timeout:g} s. Both sides need "
            f"{', '.join(parts)}; each rank needs {dict(self._wanted.resources)} on one machine, and "
            f"placement={self._wanted.placement!r}. Ask for fewer ranks or resources, free some (`ray status` shows "
            f"what is in use), or pass a larger timeout while the cluster grows"
        )

    def facts(self) -> list[HostFacts]:
        ray = self._ray
        try:
            found: list[HostFacts] = ray.get(
                [self._actors[number].facts.remote() for number in sorted(self._actors)], timeout=self._timeout
            )
        except ray.exceptions.RayError as error:
            raise LaunchError(
                f"Ray could not start the ranks' actors: {str(error).strip()}\ngraftlab must be installed on each "
                f"machine of the cluster, in the notebook's version (runtime_env={{'pip': ...}} can do that)"
            ) from error
        return found

    def process(self, place: Place) -> RayProcess:
        return RayProcess(self._ray, self._actors[place.world_rank])

    def release(self) -> None:
        if not self._released:
            self._released = True
            self._remove()
            self._connection.release()

    def _remove(self) -> None:
        # Where this process has left the cluster, Ray has ended all of it.
        if not self._ray.is_initialized():
            return
        for actor in self._actors.values():
            with contextlib.suppress(Exception):
                self._ray.kill(actor)
        for group in self._groups:
            try:
                self._ray.util.remove_placement_group(group)
            except Exception as error:
                logger.warning("a placement group could not be removed from the Ray cluster: %s", error)


class RayProcess:
    """A rank's process, reached through its actor."""

    def __init__(self, ray: ModuleType, actor: Any) -> None:
        self._ray, self._actor = ray, actor
        self._end: Any = None

    def start(self, spec: bytes) -> None:
        # An object, because arguments are part of a task's description, which Ray keeps and shows.
        spec_object = self._ray.put(spec)
        self._end = self._actor.run.remote(spec_object)

    def end(self, timeout: float) -> RankEnd | str | None:
        if self._end is None:
            return None
        if not self._ray.is_initialized():
            return "ended when this process left the Ray cluster"
        try:
            ready, _ = self._ray.wait([self._end], timeout=timeout)
            return self._ray.get(ready[0]) if ready else None
        except self._ray.exceptions.RayError as error:
            return f"ended with its Ray actor: {_first_line(error)}"
        except ConnectionError as error:
            return f"cannot be reached, because the connection to the Ray cluster has ended: {_first_line(error)}"

    def log_tail(self) -> bytes:
        if not self._ray.is_initialized():
            return b""
        try:
            found: bytes = self._ray.get(self._actor.log_tail.remote(), timeout=_ANSWER_LIMIT)
        except (self._ray.exceptions.RayError, ConnectionError) as error:
            logger.info("a rank's actor does not answer: %s", _first_line(error))
            return b""
        return found

    def signal(self, number: int) -> None:
        # Without waiting for the answer: its machine may be gone.
        if self._ray.is_initialized():
            with contextlib.suppress(self._ray.exceptions.RayError, ConnectionError):
                self._actor.signal.remote(number)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _by_node(ray: ModuleType, group: Any) -> list[int]:
    """The bundles of a placement group, so that ranks of one machine follow each other."""
    nodes: dict[int, str] = ray.util.placement_group_table(group)["bundles_to_node_id"]
    return sorted(nodes, key=lambda index: (nodes[index], index))


def _own_address(ray: ModuleType, address: str) -> str:
    """The address of this machine from which it reaches the cluster's head."""
    head = address.removeprefix(_CLIENT) if address.startswith(_CLIENT) else ray.get_runtime_context().gcs_address
    endpoint = Endpoint.parse(head.partition("/")[0])
    if endpoint is None:
        raise LaunchError(f"the address {head!r} of the Ray cluster's head cannot be read; give listen=")
    try:
        return address_towards(*endpoint)
    except OSError as error:
        raise LaunchError(f"this machine has no route to the Ray cluster's head at {endpoint}: {error}") from error
