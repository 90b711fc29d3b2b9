"""The interface of a cluster: it has room for all ranks, and one supervised process for each."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from graftlab.base.world import Place
from graftlab.ranks.options import LaunchOptions
from graftlab.remote.rank_supervisor import HostFacts, RankEnd


class RemoteProcess(Protocol):
    """A rank's process on another machine, with its supervisor there. No method raises if either is gone."""

    def start(self, spec: bytes) -> None:
        """Start the process with this packed specification."""

    def end(self, timeout: float) -> RankEnd | str | None:
        """Return how the process ended, in words if the supervisor is gone; None if it has not within ``timeout``
        seconds.
        """

    def log_tail(self, timeout: float) -> bytes:
        """Return the end of the output; empty if it cannot be fetched within ``timeout`` seconds."""

    def signal(self, number: int) -> None:
        """Send it a signal."""

    def release_in_child(self) -> None:
        """Release it in a forked child of the notebook, which must not keep it alive."""


class RankHosts(Protocol):
    """The machines that were reserved for a session's ranks."""

    host: str
    """The address of the notebook's machine, as these machines reach it."""

    port: int
    """The port at which the notebook listens; 0 lets the system choose."""

    uses_folder: bool
    """Whether ranks work in the notebook's folder, if it exists on their machine."""

    threads: int
    """How many threads torch uses on each rank."""

    gpus: float
    """How many GPUs each rank has; less than 1 if ranks share one."""

    def facts(self) -> list[HostFacts]:
        """Return the facts of each rank's machine, in world-rank order. Raises :class:`LaunchError`."""

    def process(self, place: Place) -> RemoteProcess:
        """Return the process of this rank, which has not been started."""

    def release(self) -> None:
        """End every process and give the machines back. Never raises for processes or machines that are gone."""


class Cluster(Protocol):
    """Reserves machines: all that a session needs, or none; a :class:`graftlab.Ray` is one."""

    def reserve(self, options: LaunchOptions, folder: Path) -> RankHosts:
        """Wait until every rank of both sides has a place; ``folder`` is the session's.

        Raises :class:`LaunchError` that names the missing resources.
        """
