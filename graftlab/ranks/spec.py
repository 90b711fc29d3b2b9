"""What a rank is told before it begins, and the function in which its process begins.

Apart from the worker, which imports all that a rank needs: the notebook's process only has to name these two.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass

from graftlab.exchange.base import Place

# A process can be handed this many descriptors in one message; the system's limit is a little higher.
FDS_A_MESSAGE = 200


@dataclass(frozen=True)
class RankSpec:
    """All that a rank is told before it begins."""

    place: Place
    device: str
    backend: str
    notes: tuple[str, ...]
    store: str
    log: str
    stacks: str
    segment_size: int
    timeout: float
    buffer_budget: int
    keep_budget: int
    threads: int
    environ: dict[str, str]
    sys_path: list[str]
    cwd: str


def enter(spec: RankSpec, connection: socket.socket) -> None:
    """Become a rank; does not return."""
    from graftlab.ranks.worker import main

    main(spec, connection)
