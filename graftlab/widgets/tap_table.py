"""The part of the dashboard that lists the taps of the newest run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ipywidgets as widgets

from graftlab.base.html import cell, number, shortened, table
from graftlab.base.tags import identity
from graftlab.rows.schema import Row
from graftlab.widgets.panel import row as row_of
from graftlab.widgets.panel import update

SORTS = ("order", "worst first", "name")

# A longer table would only be scrolled past; the filter box finds the rest.
_TABLE_LIMIT = 200
_UNMEASURED = frozenset({"failed", "timeout", "missing"})


@dataclass(frozen=True)
class TapLine:
    """A tap, with the row of that receiving rank where it is worst."""

    row: Row
    name: str
    """The tap's name and own tags."""
    badness: float


def tap_lines(rows: Sequence[Row]) -> list[TapLine]:
    """One line a tap, in the order of the rows."""
    found: dict[tuple[Any, ...], TapLine] = {}
    for row in rows:
        tap = identity(row.tags)
        shown = [tap.name, *(f"{name}={value}" for name, value in tap.tags)]
        if tap.recompute_status == "recompute":
            shown.append("recompute")
        line = TapLine(row, " ".join(shown), _badness(row))
        key = (row.direction, tap)
        if key not in found or line.badness > found[key].badness:
            found[key] = line
    return list(found.values())


def _badness(row: Row) -> float:
    if row.status in _UNMEASURED:
        return math.inf
    if row.nonfinite_differ:
        return 1e300
    value = row.rel_l2
    return -1.0 if value is None or math.isnan(value) else float(value)


class TapTable(widgets.VBox):  # type: ignore[misc]
    """A table of taps that can be sorted and searched; ``changed`` is called when either was asked for."""

    def __init__(self, changed: Callable[[Any], None]) -> None:
        self._sort = widgets.Dropdown(options=SORTS, description="Sort", layout={"width": "auto"})
        self._sort.add_class("graftlab-sort")
        self._filter = widgets.Text(
            placeholder="words that a tap's name or tags contain", tooltip="Find taps", layout={"width": "24em"}
        ).add_class("graftlab-tap-filter")
        self._count = widgets.HTML().add_class("graftlab-count")
        # Its own element scrolls, for what is in it is made anew with each tick.
        self._table = widgets.HTML(tabbable=True, tooltip="Taps").add_class("graftlab-taps")
        self._table.add_class("graftlab-scrolls")
        for control in (self._sort, self._filter):
            control.observe(changed, "value")
        super().__init__([row_of(self._sort, self._filter, self._count), self._table])

    def show(self, rows: Sequence[Row], row_count: int, behind: int) -> None:
        """Show these rows, which are in execution order; of ``row_count`` rows so many have not been read yet."""
        lines = tap_lines(rows)
        words = self._filter.value.lower().split()
        chosen = [line for line in lines if all(word in line.name.lower() for word in words)]
        if self._sort.value == "worst first":
            chosen.sort(key=lambda line: -line.badness)
        elif self._sort.value == "name":
            chosen.sort(key=lambda line: line.name.lower())
        catching_up = f", {behind:,} not read yet" if behind else ""
        shown = f"{min(len(chosen), _TABLE_LIMIT)} of {len(lines)} taps; {row_count:,} rows{catching_up}"
        update(self._count, value=f'<span class="quiet">{shown}</span>')
        update(self._table, value=_html(chosen[:_TABLE_LIMIT]))


def _html(lines: Sequence[TapLine]) -> str:
    if not lines:
        return '<div class="quiet">no tap to show: nothing was compared yet, or the filter box leaves none</div>'
    head = ("tap", "status", "rel_l2", "max_abs", "non-finite", "worst on", "step", "way", "")
    return table(head, [_line_html(line) for line in lines])


def _line_html(line: TapLine) -> str:
    row = line.row
    nonfinite = row.nonfinite_differ or 0
    cells = [
        cell(shortened(line.name, 90)),
        cell(row.status, "bad" if row.status in _UNMEASURED else ""),
        cell(number(row.rel_l2), "number"),
        cell(number(row.max_abs), "number"),
        cell(nonfinite or "", "number bad" if nonfinite else "number"),
        cell(f"{row.side}[{row.rank}]"),
        cell(row.step, "number"),
        cell(row.direction or ""),
        cell(shortened((row.error or row.note or row.aligned_by or "").partition("\n")[0], 80)),
    ]
    if nonfinite:
        # The figure is that of what is finite, and may be 0.
        cells[2] = cell("not finite", "number bad")
    return f"<tr>{''.join(cells)}</tr>"
