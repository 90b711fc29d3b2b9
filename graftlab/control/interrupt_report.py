"""Interrupting a run, and reporting which ranks it ended and why others still run."""

from __future__ import annotations

import time

from graftlab.control.core import SessionCore
from graftlab.control.process_groups import collective_in
from graftlab.control.run import state_of
from graftlab.ranks.handle import RankHandle

_PATIENCE = 2.0
"""Seconds to wait before reporting the ranks that still run."""


def interrupt_and_report(session: SessionCore) -> list[str]:
    """Interrupt the run in progress; returns a line per rank with its place in the code, and whether it has ended."""
    run = state_of(session.runs[-1]) if session.runs else None
    if run is None or run.done:
        return ["nothing is running"]
    running = [rank for rank in run.ranks if not run.has_ended(rank)]
    before = {rank.label: str(rank.status()) for rank in running}
    session.interrupt()
    run.wait_ended(running, time.monotonic() + _PATIENCE)
    lines = []
    for rank in running:
        if rank.was_ended:
            lines.append(f"{rank.label}: {rank.how_it_ended()}")
        elif run.has_ended(rank):
            lines.append(f"{rank.label}: ended; it was {before[rank.label]}")
        else:
            lines.append(f"{rank.label}: still running; {_why(session, rank)}")
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
    return f"its code has not returned from a call that no interrupt reaches{place}; `%graft restart` ends it"
