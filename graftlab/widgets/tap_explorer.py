"""The part of the dashboard that shows the taps: the conclusion, and a linked figure and table.

The browser's half is ``graftlab/plots/explorer.js``, which reports contain too. It shows traits and sends custom
messages, each a dict with the requested action, ``what``, and a ``value``.
"""

from __future__ import annotations

import html
import logging
import math
from collections.abc import Mapping
from typing import Any

import ipywidgets as widgets
import traitlets
from matplotlib.figure import Figure

from graftlab import plots
from graftlab.base.html import cell, number, table
from graftlab.base.text import counted, shortened
from graftlab.control.session_plots import figures_of_pair
from graftlab.errors import GraftError
from graftlab.plots import explorer
from graftlab.plots.style import to_html
from graftlab.plots.themes import STYLE, in_words
from graftlab.rows.rendering import written
from graftlab.rows.schema import UNMEASURED, in_tables
from graftlab.rows.store import to_frame
from graftlab.verdict.conclusion import Conclusion, LiveConclusion, TapSummary, conclude_from
from graftlab.widgets.kept_taps import filter_to_keep, kept_options, other_options
from graftlab.widgets.panel import Panel, update
from graftlab.widgets.scripts import Script, ScriptedWidget, shared

logger = logging.getLogger(__name__)

ROWS_A_TICK = 3000
"""Rows read in one tick. At 50,000 rows a second, this leaves time for the rest of the kernel."""

# In static HTML, which does not scroll.
_STATIC_LIMIT = 100


class TapView(ScriptedWidget):
    """The widget in the browser. ``taps`` is only sent when the set of taps changes."""

    actions = traitlets.List(traitlets.Unicode(), ["open", "keep", "graft"]).tag(sync=True)
    foldable = traitlets.Bool(False).tag(sync=True)
    taps: traitlets.Dict[str, Any] = traitlets.Dict({"label": [], "order": []}).tag(sync=True)
    figures: traitlets.Dict[str, Any] = traitlets.Dict().tag(sync=True)

    @traitlets.default("script")
    def _script(self) -> Script:
        return shared(explorer.SCRIPT.read_text(encoding="utf-8"))


class TapExplorer(widgets.VBox):  # type: ignore[misc]
    """Shows the taps of the newest run. ``panel`` runs its actions and shows its errors.

    **Graft this** calls ``grafts(text)`` with a filter that matches the tap.
    """

    def __init__(self, panel: Panel, grafts: Any) -> None:
        self._panel = panel
        self._grafts = grafts
        self._noise_floor: float | None = None
        session = panel.session
        self._conclusion = LiveConclusion(session.live_taps(), session.frame_of, self._has_ended)
        self.found = conclude_from([])
        self.view = TapView()
        self.view.figures = explorer.figures(self.found)
        self.view.add_class("graftlab-tap-view")
        self.view.on_msg(panel.guarded(self._on_message))
        self._pair = widgets.HTML().add_class("graftlab-pair")
        super().__init__([self.view, self._pair])

    def follow(self) -> None:
        """Find what is new in the session's rows."""
        self.found = self._conclusion.look(self._panel.session.taps, self._noise_floor, ROWS_A_TICK)

    def _has_ended(self, number: int) -> bool:
        session = self._panel.session
        return session.closed or all(run.done for run in session.runs if run.number == number)

    def show(self) -> None:
        """Show what :meth:`follow` found."""
        behind = f", {self._conclusion.behind:,} not read yet" if self._conclusion.behind else ""
        taps = explorer.taps(self.found)
        with self.view.hold_sync():
            if taps != self.view.taps:
                self.view.taps = taps
            figures = explorer.figures(self.found, f"{counted(self._conclusion.row_count, 'row')}{behind}")
            if figures != self.view.figures:
                self.view.figures = figures

    def _on_message(self, _view: Any, content: Any, _buffers: Any) -> None:
        what, value = content["what"], content["value"]
        try:
            self._take(what, value)
        finally:
            self.view.send({"what": "answered"})

    def _take(self, what: str, value: Any) -> None:
        if what == "floor":
            self._noise_floor = as_floor(value)
            self.follow()
            self.show()
        elif what == "chosen":
            update(self._pair, value="")
        else:
            self._act(what, self._line(str(value)))

    def _line(self, label: str) -> TapSummary:
        # Not those of the view, which a page can change.
        labels: list[str] = explorer.taps(self.found)["label"]
        if label not in labels:
            raise ValueError(f"there is no tap {label!r:.80}")
        return self.found.lines[labels.index(label)]

    def _act(self, what: str, line: TapSummary) -> None:
        session = self._panel.session
        [option] = other_options([line.row.tags], [])
        if what == "graft":
            self._grafts(option.filter)
        elif what == "keep":
            wanted = filter_to_keep(session.plan, option)
            if wanted == (session.plan.keep or "").strip():
                self._panel.say_kept(line.name, session.plan, lambda: self.found.rows)
            else:
                self._panel.say_kept(line.name, session.edit(keep=wanted), lambda: self.found.rows)
        elif what == "open":
            where = f"{line.row.side}[{line.row.rank}]"
            self._show_pair(
                f'<div role="status">Waiting for {where}, which keeps the newest pair of {_name(line)} …</div>'
            )
            self._panel.in_background(self._open, line)

    def _show_pair(self, shown: str) -> None:
        """Show this where the person looks: the browser scrolls to it."""
        update(self._pair, value=shown)
        self.view.send({"what": "opened"})

    def _open(self, line: TapSummary) -> None:
        """Show a kept pair, or explain how to keep one."""
        try:
            pictures = figures_of_pair(self._panel.session, line.row)
        except GraftError as error:
            self._show_pair(f'<div class="bad">{html.escape(str(error))}</div>{_KEEP_IT}')
            return
        self._show_pair(STYLE + self._step_note(line) + drawn(line.name, pictures))

    def _step_note(self, line: TapSummary) -> str:
        """A warning if the newest kept pair is older than the row in the table."""
        [option] = kept_options([line.row.tags])
        steps = [
            int(tags["step"])
            for tags in self._panel.session.kept()
            for other in kept_options([tags])
            if (other.name, other.tags) == (option.name, option.tags)
        ]
        if not steps or max(steps) >= line.row.step:
            return ""
        note = f"This pair is from step {max(steps)}. The table shows step {line.row.step}, but no pair of it is kept."
        return f'<div class="bad">{note}</div>'


def as_floor(value: Any) -> float | None:
    """Return a noise floor that a page has sent. Raises ValueError for anything but a floor or None."""
    # NaN or infinity would be above every difference, and so clear all taps.
    if value is not None and not (type(value) in (int, float) and 0 <= value < math.inf):
        raise ValueError(f"a noise floor is a finite number of at least 0, not {value!r:.80}")
    return None if value is None else float(value)


def drawn(name: str, pictures: Mapping[str, Figure]) -> str:
    """Pictures of the pair of a tap as HTML for a page with :data:`graftlab.plots.themes.STYLE`."""
    return "".join(to_html(figure, f"{name}: {what}. {in_words(figure)}") for what, figure in pictures.items())


def _name(line: TapSummary) -> str:
    return html.escape(line.name)


_KEEP_IT = '<div class="quiet">“Keep this tap” keeps its tensors from the next step on.</div>'


def static_html(found: Conclusion, with_figure: bool, failing: Mapping[str, str] | None = None) -> str:
    """The taps as static HTML: the conclusion, an optional figure, and the worst taps."""
    headline = explorer.headline(found, failing)
    markup = f"<p><b>{html.escape(headline)}</b></p>"
    lines = sorted(found.lines, key=lambda line: -line.badness)[:_STATIC_LIMIT]
    if not lines:
        return markup
    if with_figure:
        # In their present order, as if all were from one step.
        frame = to_frame([row._replace(step=0, order=place) for place, row in enumerate(found.rows)])
        figure = plots.divergence(frame, noise_floor=found.floor)
        markup += STYLE + to_html(figure, f"rel_l2 of each tap in execution order. {headline}", dpi=80)
    head = ("tap", "status", "rel_l2", *in_tables(), "non-finite", "worst on", "step", "direction", "")
    more = len(found.lines) - len(lines)
    rest = f"<p>and {more:,} more taps, none worse</p>" if more else ""
    return markup + table(head, [_line_html(line) for line in lines], in_tables()) + rest


def _line_html(line: TapSummary) -> str:
    row = line.row
    nonfinite = row.nonfinite_differ or 0
    cells = [
        cell(shortened(line.name, 90)),
        cell(row.status, "bad" if row.status in UNMEASURED else ""),
        # rel_l2 covers the finite elements only, and may be 0.
        cell("not finite", "number bad") if nonfinite else cell(number(row.rel_l2), "number"),
        *(cell(written(name, getattr(row, name)), "number") for name in in_tables()),
        cell(nonfinite or "", "number bad" if nonfinite else "number"),
        cell(f"{row.side}[{row.rank}]"),
        cell(row.step, "number"),
        cell(row.direction or ""),
        cell(shortened((row.error or row.note or row.aligned_by or "").partition("\n")[0], 80)),
    ]
    return f"<tr>{''.join(cells)}</tr>"
