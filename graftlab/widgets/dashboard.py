"""The dashboard: every rank, every tap and both editors in one place, while the ranks run.

It shows the newest state at a bounded cost: each tick looks at a limited number of rows and sets only what changed.
"""

from __future__ import annotations

import html

import ipywidgets as widgets

from graftlab.base.tags import TapIdentity, identity
from graftlab.control.core import SessionCore
from graftlab.control.ranks_table import ranks_table
from graftlab.rows.schema import Row
from graftlab.widgets import tap_table
from graftlab.widgets.divergence_view import DivergenceView
from graftlab.widgets.filter_editor import FilterEditor
from graftlab.widgets.panel import Panel, update
from graftlab.widgets.tap_table import TapTable
from graftlab.widgets.transform_editor import TransformEditor

ROWS_A_TICK = 3000
"""Rows that are read at once: what 50,000 rows a second leave for the rest of the kernel."""

_LOG_LINES = 200

_STYLE = """
.graftlab-dashboard table { border-collapse: collapse; font-size: 12px; width: 100% }
.graftlab-dashboard td { font-variant-numeric: tabular-nums }
.graftlab-dashboard th { text-align: left; font-weight: 600; border-bottom: 1px solid var(--gl-rule) }
.graftlab-dashboard th, .graftlab-dashboard td { padding: 2px 8px; white-space: nowrap }
.graftlab-dashboard th.number, .graftlab-dashboard td.number { text-align: right }
.graftlab-dashboard tbody tr:nth-child(even) { background: var(--gl-fill) }
.graftlab-dashboard td.bad { font-weight: 600 }
.graftlab-figure img { max-width: 100% }
.graftlab-log .scroll { max-height: 380px; overflow: auto; border: 1px solid var(--gl-rule) }
.graftlab-log pre { margin: 0; padding: 6px; font-size: 11px; line-height: 1.35; white-space: pre-wrap }
"""


class Dashboard(Panel):
    """Live view of a session: ``session.dashboard()`` or ``%graft ui``.

    :meth:`close`, closing the session, or clearing the output ends its work; showing it again begins anew.
    """

    style_sheet = _STYLE + tap_table.STYLE

    def __init__(self, session: SessionCore) -> None:
        super().__init__(session)
        self._live = session.live_taps()
        self._rows: list[Row] = []
        refresh = self.guarded(lambda _: self.refresh())

        self._ranks = widgets.HTML().add_class("graftlab-ranks")
        self._taps = TapTable(refresh)
        self._figure = DivergenceView(self)
        self.filters = FilterEditor(session)
        self.transform = TransformEditor(session)
        labels = [rank.label for rank in session.ranks]
        self._which_log = widgets.Dropdown(options=labels, description="Rank", layout={"width": "220px"})
        self._which_log.add_class("graftlab-which-log").observe(refresh, "value")
        self._log = widgets.HTML().add_class("graftlab-log")
        parts = widgets.Tab(
            children=[
                self._taps,
                self._figure,
                self.filters,
                self.transform,
                widgets.VBox([self._which_log, self._log]),
            ],
            titles=["Taps", "Divergence", "Filters", "Transform", "Logs"],
        ).add_class("graftlab-parts")
        self.add_class("graftlab-dashboard")
        self._open([self._ranks, self._message_line, parts])

    def _follow(self) -> None:
        if self._live.behind or not self._rows:
            rows = self._live.look(ROWS_A_TICK)
            newest = max((row.run for row in rows), default=None)
            self._rows = self._in_tap_order([row for row in rows if row.run == newest])

    def _in_tap_order(self, rows: list[Row]) -> list[Row]:
        """The newest row of each tap comes from one step or the next; put them in the order of one step."""
        places: dict[TapIdentity, int] = {}
        for place, tags in enumerate(self.session.taps):
            places.setdefault(identity(tags), place)
        last = len(places)
        return sorted(rows, key=lambda row: (places.get(identity(row.tags), last), row.side, row.rank))

    def _show(self) -> None:
        self._show_message()
        session = self.session
        update(self._ranks, value=ranks_table(session.ranks, session.closed, session.failing, session.lost_groups))
        self._taps.show(self._rows, session.row_count, self._live.behind)
        self._figure.show(self._rows, session.row_count, is_running=any(not run.done for run in session.runs[-1:]))
        update(self._log, value=self._log_html())

    def _log_html(self) -> str:
        [rank] = self.session.select(self._which_log.value)
        tail = html.escape(rank.log_tail(_LOG_LINES)) or "nothing yet"
        return f'<div class="quiet">{html.escape(str(rank.log))}</div><div class="scroll"><pre>{tail}</pre></div>'
