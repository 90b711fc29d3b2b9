"""What a rank is told before it begins."""

from __future__ import annotations

from dataclasses import dataclass

from graftlab.base.world import Place
from graftlab.plan.wire import WirePlan

# So many descriptors fit into one message; the system's limit is a little higher.
FDS_A_MESSAGE = 200


@dataclass(frozen=True)
class RankSpec:
    """All that a rank is told before it begins.

    ``store`` is the path of the file through which the ranks of a side find each other; empty where it has no name
    and comes as a descriptor. ``multiprocessing`` is the start method that the notebook's process uses; None where it
    has not chosen one.
    """

    place: Place
    device: str
    backend: str
    store: str
    log: str
    stacks: str
    segment_size: int
    timeout: float
    tap_timeout: float
    multiprocessing: str | None
    buffer_budget: int
    keep_budget: int
    threads: int
    plan: WirePlan
    environ: dict[str, str]
    sys_path: list[str]
    cwd: str
