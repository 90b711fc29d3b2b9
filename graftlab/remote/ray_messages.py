"""What a session and the process that is connected to its Ray cluster tell each other; needs neither torch nor Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graftlab.base.world import Side
from graftlab.remote.rank_supervisor import HostFacts


@dataclass(frozen=True)
class RayRequest:
    """What a launch needs. ``resources`` are those of one rank, ``ranks`` the number of ranks of each side."""

    address: str
    resources: Mapping[str, float]
    runtime_env: Mapping[str, Any] | None
    placement: str
    ranks: Mapping[Side, int]
    timeout: float


@dataclass(frozen=True)
class RayReservation:
    """Where the cluster's head is, and what is known of each rank's machine, in world-rank order."""

    head: str
    facts: Sequence[HostFacts]
