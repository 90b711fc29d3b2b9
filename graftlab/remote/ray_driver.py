"""The process of a session that is connected to a Ray cluster: reserves resources, and calls the actors.

It stands between the notebook and Ray, because Ray handles a process's signals, prints into its output, and ends it if
the cluster is gone. A notebook must keep its variables. When the notebook closes the connection, or ends, this process
gives back its reservations, and ends. It does not import torch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import ray
import ray.exceptions
import ray.util
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from graftlab.base.world import SIDES, Side
from graftlab.errors import LaunchError
from graftlab.remote.rank_supervisor import RankSupervisor
from graftlab.remote.ray_messages import RayRequest, RayReservation

# Threads of an actor: one waits for the rank's end, the others answer.
_CONCURRENCY = 4


def main() -> None:
    """Serve the notebook, at the socket whose descriptor is the first argument, until it is gone."""
    logging.basicConfig(level=logging.INFO)
    driver = _Driver(Connection(int(sys.argv[1])))
    try:
        driver.serve()
    finally:
        driver.release()
        ray.shutdown()
        # Threads of Ray may wait for a cluster that is gone.
        os._exit(0)


class _Driver:
    """Handles requests. Each has a number that its answer repeats, and answers are sent as soon as they are known."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._groups: list[Any] = []
        self._actors: list[Any] = []

    def serve(self) -> None:
        handlers: dict[str, Callable[..., None]] = {
            "reserve": self._reserve,
            "run": self._run,
            "log_tail": self._log_tail,
            "signal": self._signal,
        }
        # The end of the connection means the end of the session.
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                number, method, arguments = self._connection.recv()
                handlers[method](number, *arguments)

    def _answer(self, number: int, answer: object) -> None:
        with self._sending, contextlib.suppress(OSError):
            self._connection.send((number, answer))

    def _answer_with(self, number: int, reference: Any) -> None:
        """Answer with the result of an actor's method, as soon as it is known."""

        def send(future: Any) -> None:
            error = future.exception()
            self._answer(number, future.result() if error is None else LaunchError(_first_line(error)))

        reference.future().add_done_callback(send)

    # ---- requests -----------------------------------------------------------------------------------------------

    def _reserve(self, number: int, request: RayRequest) -> None:
        # On a thread, so that the notebook's end is noticed while the cluster grows.
        threading.Thread(target=self._try_to_reserve, args=(number, request), daemon=True).start()

    def _try_to_reserve(self, number: int, request: RayRequest) -> None:
        try:
            answer: object = self._reserved(request)
        except LaunchError as error:
            answer = error
        except Exception as error:
            answer = LaunchError(f"Ray could not reserve resources: {type(error).__name__}: {error}")
        self._answer(number, answer)

    def _reserved(self, request: RayRequest) -> RayReservation:
        _connect(request)
        deadline = time.monotonic() + request.timeout
        bundle = {name: float(amount) for name, amount in request.resources.items() if amount}
        for side in SIDES:
            bundles = [bundle] * request.ranks[side]
            strategy = request.placement.upper()
            self._groups.append(ray.util.placement_group(bundles, strategy=strategy, name=f"graftlab {side}"))
        for side, group in zip(SIDES, self._groups, strict=True):
            if not group.wait(max(0.1, deadline - time.monotonic())):
                raise LaunchError(_describe_lack(side, request))
        actor = ray.remote(RankSupervisor)
        for group in self._groups:
            for index in _by_node(group):
                self._actors.append(actor.options(**_actor_options(bundle, group, index)).remote())
        try:
            limit = max(1.0, deadline - time.monotonic())
            facts = ray.get([each.facts.remote() for each in self._actors], timeout=limit)
        except ray.exceptions.GetTimeoutError:
            raise LaunchError(
                f"Ray did not start the ranks' actors within {request.timeout:g} s; a larger timeout waits longer"
            ) from None
        except ray.exceptions.RayError as error:
            raise LaunchError(
                f"Ray could not start the ranks' actors: {str(error).strip()}\ngraftlab must be installed on each "
                f"machine of the cluster (runtime_env={{'pip': ...}} can do that)"
            ) from error
        return RayReservation(_head(request.address), facts)

    def _run(self, number: int, world_rank: int, spec: bytes) -> None:
        # Passed as an object, because arguments are part of a task's description, which Ray keeps and shows.
        self._answer_with(number, self._actors[world_rank].run.remote(ray.put(spec)))

    def _log_tail(self, number: int, world_rank: int) -> None:
        self._answer_with(number, self._actors[world_rank].log_tail.remote())

    def _signal(self, number: int, world_rank: int, signal: int) -> None:
        self._answer_with(number, self._actors[world_rank].signal.remote(signal))

    # ---- the end ------------------------------------------------------------------------------------------------

    def release(self) -> None:
        """End every actor, and with it its rank, and remove the placement groups."""
        if not ray.is_initialized():
            return
        for actor in self._actors:
            with contextlib.suppress(Exception):
                ray.kill(actor)
        for group in self._groups:
            try:
                ray.util.remove_placement_group(group)
            except Exception as error:
                logging.warning("a placement group could not be removed: %s", error)


def _connect(request: RayRequest) -> None:
    environment = {} if request.runtime_env is None else {"runtime_env": dict(request.runtime_env)}
    try:
        ray.init(address=request.address, logging_level=logging.ERROR, log_to_driver=False, **environment)
    except Exception as error:
        # Ray raises RuntimeError for other versions, ConnectionError and ValueError for addresses.
        raise LaunchError(
            f"no connection to the Ray cluster at {request.address!r}: {str(error).strip()}\nRay and Python of the "
            f"notebook must have the cluster's versions; here they are {ray.__version__} and "
            f"{platform.python_version()}"
        ) from error


def _head(address: str) -> str:
    """The host and port at which this machine reaches the cluster's head."""
    client = "ray://"
    if address.startswith(client):
        return address.removeprefix(client).partition("/")[0]
    return str(ray.get_runtime_context().gcs_address)


def _actor_options(bundle: Mapping[str, float], group: Any, index: int) -> dict[str, Any]:
    place = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)
    chosen: dict[str, Any] = {
        "num_cpus": bundle.get("CPU", 0),
        "num_gpus": bundle.get("GPU", 0),
        "resources": {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU", "memory")},
        "scheduling_strategy": place,
        "max_concurrency": _CONCURRENCY,
        "max_restarts": 0,
    }
    return chosen | ({"memory": bundle["memory"]} if "memory" in bundle else {})


def _by_node(group: Any) -> list[int]:
    """The bundles of a placement group, ordered so that ranks of one machine are neighbours."""
    nodes: dict[int, str] = ray.util.placement_group_table(group)["bundles_to_node_id"]
    return sorted(nodes, key=lambda index: (nodes[index], index))


def _describe_lack(side: Side, request: RayRequest) -> str:
    total, free = ray.cluster_resources(), ray.available_resources()
    parts = []
    for name, amount in request.resources.items():
        needed = amount * sum(request.ranks.values())
        there = f"{total.get(name, 0.0):g} in the cluster ({free.get(name, 0.0):g} free now)"
        parts.append(f"{needed:g} {name} of {there}")
    return (
        f"the {side}'s {request.ranks[side]} ranks have no place on the Ray cluster after {request.timeout:g} s. Both "
        f"sides need {', '.join(parts)}; each rank needs {dict(request.resources)} on one machine, and "
        f"placement={request.placement!r}. Ask for fewer ranks or resources, free some (`ray status` shows what is in "
        f"use), or pass a larger timeout while the cluster grows"
    )


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
