"""The dashboard: every rank, every tap and both editors in one place, while the ranks run.

It shows the newest state at a bounded cost: each tick looks at a limited number of rows, sets only what changed, and
draws the figure in a thread of its own, less often the longer that takes.
"""

from __future__ import annotations

import html
import logging
import math
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import ipywidgets as widgets

from graftlab import plots
from graftlab.base.html import cell, number, shortened, table
from graftlab.base.tags import TapIdentity, identity
from graftlab.control.core import SessionCore
from graftlab.control.ranks_table import ranks_table
from graftlab.errors import GraftError
from graftlab.rows.schema import Row
from graftlab.rows.store import to_frame
from graftlab.widgets.filter_editor import FilterEditor
from graftlab.widgets.refresher import refresher_of
from graftlab.widgets.transform_editor import TransformEditor

logger = logging.getLogger(__name__)

# Rows read a tick: what 50,000 rows a second leave for the rest of the kernel.
_ROWS_A_TICK = 3000
# A longer table would only be scrolled past; the filter box finds the rest.
_TABLE_LIMIT = 200
# The figure takes this part of one core at the most.
_FIGURE_SHARE = 0.2
_FIGURE_INTERVAL = 1.0
_LOG_LINES = 200

SORTS = ("order", "worst first", "name")

_STYLE = """<style>
.graftlab-dashboard table { border-collapse: collapse; font-size: 12px; width: 100% }
.graftlab-dashboard td { font-variant-numeric: tabular-nums }
.graftlab-dashboard th { text-align: left; font-weight: 600; border-bottom: 1px solid var(--jp-border-color1, #bbb) }
.graftlab-dashboard th, .graftlab-dashboard td { padding: 2px 8px; white-space: nowrap }
.graftlab-dashboard th.number, .graftlab-dashboard td.number { text-align: right }
.graftlab-dashboard tbody tr:nth-child(even) { background: var(--jp-layout-color2, #f5f5f5) }
.graftlab-dashboard .quiet { color: var(--jp-ui-font-color2, #666) }
.graftlab-dashboard .bad { color: var(--jp-error-color1, #b00020); font-weight: 600 }
.graftlab-dashboard .scroll { max-height: 380px; overflow: auto; border: 1px solid var(--jp-border-color2, #ddd) }
.graftlab-dashboard pre { margin: 0; padding: 6px; font-size: 11px; line-height: 1.35; white-space: pre-wrap }
</style>"""


class Dashboard(widgets.VBox):  # type: ignore[misc]
    """Live view of a session: ``session.dashboard()`` or ``%graft ui``.

    :meth:`close`, closing the session, or clearing the output ends its work; showing it again begins anew.
    """

    def __init__(self, session: SessionCore) -> None:
        self.session = session
        self._live = session.live_taps()
        self._lock = threading.RLock()
        self._shown: dict[str, object] = {}
        self._rows: list[Row] = []
        self._painter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="graftlab-figure")
        self._painting: Future[None] | None = None
        self._painted_rows = -1
        self._next_painting = 0.0

        self._ranks = widgets.HTML().add_class("graftlab-ranks")
        self._sort = widgets.Dropdown(options=SORTS, description="sort", layout={"width": "180px"})
        self._sort.add_class("graftlab-sort")
        self._filter = widgets.Text(placeholder="words that a tap's name or tags contain", layout={"width": "320px"})
        self._filter.add_class("graftlab-tap-filter")
        self._count = widgets.HTML().add_class("graftlab-count")
        self._table = widgets.HTML().add_class("graftlab-taps")
        self._figure = widgets.Image(format="png", layout={"max_width": "100%"}).add_class("graftlab-figure")
        self._message = widgets.HTML().add_class("graftlab-message")
        self._which_log = widgets.Dropdown(
            options=[rank.label for rank in session.ranks], description="rank", layout={"width": "220px"}
        ).add_class("graftlab-which-log")
        self._log = widgets.HTML().add_class("graftlab-log")
        self.filters = FilterEditor(session)
        self.transform = TransformEditor(session)
        parts = widgets.Tab(
            children=[
                widgets.VBox([widgets.HBox([self._sort, self._filter, self._count]), self._table]),
                self._figure,
                self.filters,
                self.transform,
                widgets.VBox([self._which_log, self._log]),
            ],
            titles=["Taps", "Divergence", "Filters", "Transform", "Logs"],
        )
        parts.add_class("graftlab-parts")
        for control in (self._sort, self._filter, self._which_log):
            control.observe(self._on_control, "value")
        super().__init__([widgets.HTML(_STYLE), self._ranks, self._message, parts])
        self.add_class("graftlab-dashboard")
        # Front ends that count views say when the last one is gone: nobody looks, so nothing is drawn.
        self._view_count = 0
        self.observe(self._on_view_count, "_view_count")
        self.refresh()
        refresher_of(session).add(self)

    # ---- a tick -------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Show what is new; called by the refresher some times a second, and once more at the end."""
        with self._lock:
            if self._live.behind or not self._rows:
                rows = self._live.look(_ROWS_A_TICK)
                newest = max((row.run for row in rows), default=None)
                self._rows = self._in_tap_order([row for row in rows if row.run == newest])
            self._set(self._ranks, ranks_table(self.session.ranks, self.session.closed))
            self._show_taps()
            self._set(self._log, self._log_text())
            self._paint_if_due()

    def _in_tap_order(self, rows: list[Row]) -> list[Row]:
        """The newest row of each tap comes from one step or the next; put them in the order of one step."""
        places: dict[TapIdentity, int] = {}
        for place, tags in enumerate(self.session.taps):
            places.setdefault(identity(tags), place)
        last = len(places)
        return sorted(rows, key=lambda row: (places.get(identity(row.tags), last), row.side, row.rank))

    def show_error(self, text: str) -> None:
        """Show why a callback or a tick failed; the empty text says that it works again."""
        self._message.value = f'<pre class="bad">{html.escape(text)}</pre>' if text else ""

    def _set(self, widget: Any, value: object, trait: str = "value") -> None:
        """Send only what changed: every message counts against the notebook's limit."""
        if self._shown.get(widget.model_id) != value:
            self._shown[widget.model_id] = value
            setattr(widget, trait, value)

    def _on_control(self, change: Any) -> None:
        try:
            self.refresh()
        except GraftError as error:
            self.show_error(str(error))

    def _on_view_count(self, change: Any) -> None:
        if change["new"] == 0 and change["old"]:
            refresher_of(self.session).remove(self)
        elif change["new"] and not change["old"]:
            refresher_of(self.session).add(self)

    # ---- the taps -----------------------------------------------------------------------------------------------

    def _show_taps(self) -> None:
        taps = _taps(self._rows)
        words = self._filter.value.lower().split()
        chosen = [tap for tap in taps if all(word in tap["text"] for word in words)]
        if self._sort.value == "worst first":
            chosen.sort(key=lambda tap: -tap["badness"])
        elif self._sort.value == "name":
            chosen.sort(key=lambda tap: tap["text"])
        behind = self._live.behind
        catching_up = f", {behind:,} not read yet" if behind else ""
        shown = f"{min(len(chosen), _TABLE_LIMIT)} of {len(taps)} taps"
        self._set(self._count, f'<span class="quiet">{shown}; {self.session.row_count:,} rows{catching_up}</span>')
        self._set(self._table, _taps_table(chosen[:_TABLE_LIMIT]))

    # ---- the figure ---------------------------------------------------------------------------------------------

    def _paint_if_due(self) -> None:
        rows = self.session.row_count
        if rows == self._painted_rows or (self._painting is not None and not self._painting.done()):
            return
        running = bool(self.session.runs) and not self.session.runs[-1].done
        if running and time.monotonic() < self._next_painting:
            return
        self._painted_rows = rows
        self._painting = self._painter.submit(self._paint, self._rows)

    def _paint(self, rows: list[Row]) -> None:
        began = time.monotonic()
        try:
            # In the order in which they stand, as if all had run in one step.
            in_one_step = [row._replace(step=0, order=place) for place, row in enumerate(rows)]
            picture = plots.to_png(plots.divergence(to_frame(in_one_step)))
            self._set(self._figure, picture)
        except Exception as error:
            logger.exception("the divergence figure could not be drawn")
            self.show_error(f"the divergence figure could not be drawn: {error}")
        took = time.monotonic() - began
        self._next_painting = began + max(_FIGURE_INTERVAL, took / _FIGURE_SHARE)

    # ---- the logs -----------------------------------------------------------------------------------------------

    def _log_text(self) -> str:
        rank = next(rank for rank in self.session.ranks if rank.label == self._which_log.value)
        tail = html.escape(rank.log_tail(_LOG_LINES)) or "nothing yet"
        return f'<div class="quiet">{html.escape(str(rank.log))}</div><div class="scroll"><pre>{tail}</pre></div>'

    def close(self) -> None:
        """End this dashboard; the session goes on."""
        refresher_of(self.session).remove(self)
        self.filters.close()
        self.transform.close()
        self._painter.shutdown(wait=False, cancel_futures=True)
        super().close()


def _taps(rows: list[Row]) -> list[dict[str, Any]]:
    """The newest rows, one entry a tap: the worst of its receiving ranks stands for all."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        tap = identity(row.tags)
        shown = [tap.name, *(f"{name}={value}" for name, value in tap.tags)]
        if tap.recompute_status == "recompute":
            shown.append("recompute")
        badness = _badness(row)
        key = (row.direction, tap)
        known = found.get(key)
        if known is None or badness > known["badness"]:
            entry = {"row": row, "badness": badness, "shown": " ".join(shown), "text": " ".join(shown).lower()}
            found[key] = entry if known is None else {**known, **entry}
    return list(found.values())


def _badness(row: Row) -> float:
    if row.status in ("failed", "timeout", "missing"):
        return math.inf
    if row.nonfinite_differ:
        return 1e300
    value = row.rel_l2
    return -1.0 if value is None or math.isnan(value) else float(value)


def _taps_table(taps: list[dict[str, Any]]) -> str:
    if not taps:
        return '<div class="quiet">no tap to show: nothing was compared yet, or the filter box leaves none</div>'
    lines = []
    for tap in taps:
        row: Row = tap["row"]
        bad = row.status in ("failed", "timeout", "missing")
        nonfinite = row.nonfinite_differ or 0
        cells = [
            cell(shortened(tap["shown"], 90)),
            cell(row.status, "bad" if bad else ""),
            cell(number(row.rel_l2), "number"),
            cell(number(row.max_abs), "number"),
            cell(nonfinite or "", "number bad" if nonfinite else "number"),
            cell(f"{row.side}[{row.rank}]"),
            cell(row.step, "number"),
            cell(row.direction or ""),
            cell(shortened((row.error or row.note or row.aligned_by or "").partition("\n")[0], 80)),
        ]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    head = ("tap", "status", "rel_l2", "max_abs", "non-finite", "worst on", "step", "way", "")
    return f'<div class="scroll">{table(head, lines)}</div>'
