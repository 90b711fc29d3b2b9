"""The ranks' states as a frame, and as the table that sessions and dashboards show."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from graftlab.base.html import cell, table
from graftlab.base.text import shortened
from graftlab.ranks.handle import RankHandle
from graftlab.rows.rendering import bounded_repr


class RanksFrame(pd.DataFrame):
    """A pandas frame that a notebook shows with all its rows and without its empty columns."""

    @property
    def _constructor(self) -> Any:
        return RanksFrame

    def __repr__(self) -> str:
        return bounded_repr(self)

    def _repr_html_(self) -> str:
        texts = {name: ["" if value is pd.NA else str(value) for value in self[name]] for name in self.columns}
        shown = [name for name, values in texts.items() if any(values)]
        lines = [
            "".join(
                cell(texts[name][at], "number" if name in ("step", "plan_version", "taps") else "") for name in shown
            )
            for at in range(len(self))
        ]
        return table(tuple(map(html.escape, shown)), [f"<tr>{line}</tr>" for line in lines])


def ranks_frame(
    ranks: Sequence[RankHandle], closed: bool, failing: Mapping[str, str], lost_groups: Mapping[str, str]
) -> RanksFrame:
    """One row per rank; see :meth:`Session.status`.

    ``failing`` has the failures of the run in progress, by rank; ``lost_groups`` has the reasons why sides lost their
    process groups.
    """
    lines = []
    for rank in ranks:
        status = rank.status()
        lines.append(
            {
                "side": rank.place.side,
                "rank": rank.place.rank,
                "generation": rank.generation,
                "pid": rank.pid,
                "device": rank.assignment.device,
                "backend": rank.assignment.backend,
                "links": rank.links,
                "state": "closed" if closed else _state(rank, status.state, failing, lost_groups),
                "step": status.step if status.step >= 0 else pd.NA,
                "plan_version": status.plan_version,
                "taps": status.taps,
                "last_tap": status.tap,
                "awaits": ", ".join(ranks[other].label for other in status.awaits),
                "note": "; ".join(rank.assignment.notes),
            }
        )
    return RanksFrame(lines).astype({"step": "Int64"})


def ranks_table(
    ranks: Sequence[RankHandle], closed: bool, failing: Mapping[str, str], lost_groups: Mapping[str, str]
) -> str:
    """The HTML table: most of the frame, a line per rank."""
    lines = []
    for rank in ranks:
        status = rank.status()
        if closed:
            state, kind = "closed", "quiet"
        else:
            state = _state(rank, status.state, failing, lost_groups)
            kind = "" if state == status.state else "bad"
        if status.awaits and rank.alive:
            state += " for " + ", ".join(ranks[other].label for other in status.awaits)
        cells = [
            cell(rank.label if rank.generation == 1 else f"{rank.label}, generation {rank.generation}"),
            cell(rank.pid),
            cell(rank.assignment.device),
            cell(state, kind),
            cell(status.step if status.step >= 0 else "-", "number"),
            cell(status.plan_version, "number"),
            cell(f"{status.taps:,}", "number"),
            cell(shortened(status.tap, 60)),
        ]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return table(("rank", "pid", "device", "state", "step", "plan", "taps", "last tap"), lines)


def _state(rank: RankHandle, state: str, failing: Mapping[str, str], lost_groups: Mapping[str, str]) -> str:
    if not rank.alive:
        return rank.absence()
    if rank.label in failing:
        return f"failed: {failing[rank.label]}"
    return f"{state}; its group is gone" if rank.place.side in lost_groups else state


def titled_table(
    title: str,
    facts: str,
    ranks: Sequence[RankHandle],
    closed: bool,
    failing: Mapping[str, str],
    lost_groups: Mapping[str, str],
) -> str:
    """The HTML of a session: a title, facts, lost process groups with the reason, and the ranks."""
    lost = "".join(
        f"<div>the process group of the {side} is gone ({html.escape(why)}): session.restart() brings it back</div>"
        for side, why in lost_groups.items()
        if not closed
    )
    return f"<b>{title}</b> {html.escape(facts)}{lost}{ranks_table(ranks, closed, failing, lost_groups)}"
