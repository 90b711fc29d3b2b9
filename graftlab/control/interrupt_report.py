"""Interrupting a run, and telling what that ended and what it could not."""

from __future__ import annotations

import time

from graftlab.control.core import SessionCore
from graftlab.control.process_groups import collective_in
from graftlab.control.run import state_of
from graftlab.ranks.handle import RankHandle

PATIENCE = 2.0
"""Seconds until what still goes on is told of."""


def interrupt_and_report(session: SessionCore, patience: float = PATIENCE) -> list[str]:
    """Interrupt the run that goes on; a line on each of its ranks: what it was in, and whether that has ended."""
    run = state_of(session.runs[-1]) if session.runs else None
    if run is None or run.done:
        return ["nothing is running"]
    going_on = [rank for rank in run.ranks if not run.has_ended(rank)]
    before = {rank.label: str(rank.status()) for rank in going_on}
    session.interrupt()
    run.wait_ended(going_on, time.monotonic() + patience)
    lines = []
    for rank in going_on:
        if rank.was_ended:
            lines.append(f"{rank.label}: {rank.how_it_ended()}")
        elif run.has_ended(rank):
            lines.append(f"{rank.label}: ended; it was {before[rank.label]}")
        else:
            lines.append(f"{rank.label}: goes on; {_why(session, rank)}")
    for side, why in session.lost_groups.items():
        lines.append(f"the process group of the {side} is gone ({why}); `%graft restart` brings it back")
    return lines


def _why(session: SessionCore, rank: RankHandle) -> str:
    limit = session.options.timeout
    stack = session.stacks().get(rank.label, "")
    where = collective_in(stack)
    if where is not None:
        return (
            f"it waits in a collective ({where}), which cannot be interrupted and ends with the time limit of its "
            f"group, {limit:g} s; `%graft restart` ends it now"
        )
    last = [line.strip() for line in stack.splitlines() if line.strip().startswith("File ")][-1:]
    place = f" ({last[0]})" if last else ""
    return f"its code has not come back from where no interrupt is seen{place}; `%graft restart` ends it"
