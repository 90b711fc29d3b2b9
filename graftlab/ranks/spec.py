"""What a rank is told before it begins, and the function in which its process begins.

Apart from the worker, which imports all that a rank needs: the notebook's process only has to name these two.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from graftlab.exchange.base import Place
from graftlab.ranks.streams import redirect_to

# A process can be handed this many descriptors in one message; the system's limit is a little higher.
FDS_A_MESSAGE = 200


@dataclass(frozen=True)
class RankSpec:
    """All that a rank is told before it begins.

    ``store`` is the path of the file through which the ranks of a side find each other; empty where it has no name
    and comes as a descriptor.
    """

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
    # Its own session: the stop button's SIGINT goes to the notebook's process group and must not end the ranks.
    os.setsid()
    # Before anything that can fail: the notebook shows the end of this log when a rank dies before its hello.
    redirect_to(spec.log)
    from graftlab.ranks.worker import main

    main(spec, connection)
