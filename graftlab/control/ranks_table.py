"""The strip of ranks that sessions and dashboards show."""

from __future__ import annotations

from collections.abc import Sequence

from graftlab.base.html import cell, shortened, table
from graftlab.ranks.launcher import RankProcess


def ranks_table(ranks: Sequence[RankProcess], closed: bool) -> str:
    """The strip of ranks: what :meth:`Session.status` says, in a line each."""
    lines = []
    for rank in ranks:
        look = rank.whereabouts()
        if closed:
            state, kind = "closed", "quiet"
        elif not rank.alive:
            state, kind = f"gone: {rank.how_it_ended()}", "bad"
        else:
            state, kind = look.state, ""
        if look.awaits and rank.alive:
            state += " for " + ", ".join(ranks[other].label for other in look.awaits)
        cells = [
            cell(rank.label),
            cell(rank.pid),
            cell(rank.seat.device),
            cell(state, kind),
            cell(look.step if look.step >= 0 else "-", "number"),
            cell(look.plan_version, "number"),
            cell(f"{look.taps:,}", "number"),
            cell(shortened(look.tap, 60)),
        ]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return table(("rank", "pid", "device", "state", "step", "plan", "taps", "last tap"), lines)
