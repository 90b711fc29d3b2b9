"""The messages between a session and the process connected to its Ray cluster. Imports neither torch nor Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graftlab.base.world import Side
from graftlab.remote.rank_supervisor import HostFacts


@dataclass(frozen=True)
class RayRequest:
    """A launch's needs. ``resources`` are those of one rank, ``ranks`` has the number of ranks of each side."""

    address: str
    resources: Mapping[str, float]
    runtime_env: Mapping[str, Any] | None
    placement: str
    ranks: Mapping[Side, int]
    timeout: float


@dataclass(frozen=True)
class RayReservation:
    """The address of the cluster's head, and the facts of each rank's machine, in world-rank order."""

    head: str
    facts: Sequence[HostFacts]
