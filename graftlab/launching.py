"""``launch``: starts the ranks of a session.

It is apart from the session, so that the forkserver imports torch while this process imports what a session needs.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from graftlab.base import limits
from graftlab.base.uninterrupted import import_module
from graftlab.ranks import forkserver

if TYPE_CHECKING:
    from graftlab.plan.plan import GraftPlan
    from graftlab.ranks.options import RankStarter, StartMethod
    from graftlab.recordings.recorded_side import RecordedSide
    from graftlab.session import Session

if importlib.util.find_spec("torch") is None:
    raise ModuleNotFoundError("No module named 'torch'", name="torch")


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Keep the garbage collector off while modules are imported, and from looking through them afterwards.

    What they make stays. To look through it again and again takes a sixth of the processor time of a cold launch.
    """
    was_on = gc.isenabled()
    known = len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            # Counting what is frozen takes a tenth of a second for a million objects, at each launch of such a process.
            if len(sys.modules) > known and gc.get_freeze_count() == 0:
                # Both together move all objects into the oldest generation. What the user froze stays frozen.
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def launch(
    baseline: int | RecordedSide = 1,
    target: int | RecordedSide = 1,
    *,
    device: str | None = None,
    backend: str | None = None,
    plan: GraftPlan | None = None,
    timeout: float = limits.TIMEOUT,
    start_method: StartMethod = "forkserver",
    folder: str | Path | None = None,
    append: bool = False,
    buffer_budget: int = limits.BUFFER_BUDGET,
    keep_budget: int = limits.KEEP_BUDGET,
    keep_rows: int | None = None,
    tap_timeout: float | None = None,
    on: RankStarter | None = None,
) -> Session:
    """Start ``baseline`` + ``target`` ranks and return their :class:`Session`, a context manager.

    A side that is a :class:`Recording` has as many ranks as were recorded, and replays its taps in each run that gives
    it no other code.

    ``device`` is ``"cpu"``, ``"cuda"``, ``"cuda:N"`` or None (the GPUs if there are any); ``backend`` the collective
    backend of each side's own default process group. ``timeout``, in seconds, bounds the start and the groups'
    collectives; ``tap_timeout`` bounds every wait of a tap, by default by half of it, so that a tap times out before
    the collective in which a peer waits for its rank. ``folder`` is for this session's rows and logs (default: a new
    folder under ``$GRAFTLAB_HOME`` or ``~/.graftlab``, see :func:`runs`); one session uses it at a time, and a folder
    with rows needs ``append=True``. ``buffer_budget`` and ``keep_budget`` are bytes per rank, for tensors in transit
    and for pairs that the plan keeps. Rows that a frame has read stay in memory for the next frame, unless they are
    more than ``keep_rows``: then each frame reads them from disk anew. ``on`` is where the ranks run if not on this
    machine: a :class:`Ray` cluster.

    Raises :class:`LaunchError`, with the log's tail if a rank died.

    >>> with gl.launch(baseline=1, target=2, timeout=30) as other:
    ...     [rank.label for rank in other.ranks]
    ['baseline[0]', 'target[0]', 'target[1]']
    """
    if start_method == "forkserver" and on is None:
        forkserver.warm_up()
    with _without_collector():
        opening = import_module("graftlab.session")
    session: Session = opening.open_launched(
        baseline,
        target,
        plan,
        folder,
        append,
        device=device,
        backend=backend,
        timeout=timeout,
        start_method=start_method,
        buffer_budget=buffer_budget,
        keep_budget=keep_budget,
        tap_timeout=tap_timeout,
        keep_rows=keep_rows,
        on=on,
    )
    return session
