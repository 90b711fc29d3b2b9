"""The dashboard: every rank, every tap and both editors in one place, while the ranks run.

It shows the newest state at a bounded cost: each tick reads a limited number of rows and updates only what changed.
"""

from __future__ import annotations

import html
import threading
from functools import partial

import ipywidgets as widgets

from graftlab.control.core import SessionCore, callees_of
from graftlab.control.ranks_table import ranks_table
from graftlab.control.run import failing_in
from graftlab.errors import SessionError
from graftlab.judging.judge import judge
from graftlab.judging.verdict_request import VerdictRequest
from graftlab.plots import explorer
from graftlab.widgets import tap_explorer
from graftlab.widgets.filter_editor import FilterEditor
from graftlab.widgets.inputs import TextInput
from graftlab.widgets.panel import Panel, row, update
from graftlab.widgets.tap_explorer import TapExplorer
from graftlab.widgets.transform_editor import TransformEditor

_LOG_LINES = 200
_TITLES = ("Taps", "Filters", "Transform", "Logs")

_STYLE = """
.graftlab-verdict b { overflow-wrap: anywhere }
.graftlab-dashboard .gle .headline { display: none }
.graftlab-ranks table { border-collapse: collapse; font-size: 12px; width: 100% }
.graftlab-ranks td { font-variant-numeric: tabular-nums }
.graftlab-ranks th { text-align: left; font-weight: 600; border-bottom: 1px solid var(--gl-rule) }
.graftlab-ranks th, .graftlab-ranks td { padding: 2px 8px; white-space: nowrap }
.graftlab-ranks th.number, .graftlab-ranks td.number { text-align: right }
.graftlab-ranks tbody tr:nth-child(even) { background: var(--gl-fill) }
.graftlab-ranks td.bad { font-weight: 600; white-space: normal }
.graftlab-verdict-text th, .graftlab-verdict-text td { padding: 2px 12px 2px 0 }
.graftlab-pair img { max-width: 100% }
.graftlab-log pre { margin: 0; padding: 6px; font-size: 11px; line-height: 1.35; white-space: pre-wrap }
"""


class Dashboard(Panel):
    """Live view of a session: ``session.dashboard()`` or ``%graft ui``.

    :meth:`close`, closing the session, or clearing the output stops the updates; showing it again restarts them.
    """

    style_sheet = _STYLE

    def __init__(self, session: SessionCore) -> None:
        super().__init__(session)
        refresh = self.guarded(lambda _: self.refresh())

        self._verdict = widgets.HTML().add_class("graftlab-verdict")
        self._ranks = widgets.HTML().add_class("graftlab-ranks")
        self._taps = TapExplorer(self, self._graft)
        self.filters = FilterEditor(session)
        self.transform = TransformEditor(session)
        labels = [rank.label for rank in session.ranks]
        self._which_log = widgets.Dropdown(options=labels, description="Rank", layout={"width": "auto"})
        self._which_log.add_class("graftlab-which-log").observe(refresh, "value")
        self._log_path = widgets.HTML()
        self._log = widgets.HTML(tabbable=True, tooltip="Log").add_class("graftlab-log").add_class("graftlab-scrolls")
        self._parts = widgets.Tab(
            children=[
                self._taps,
                self.filters,
                self.transform,
                widgets.VBox([self._which_log, self._log_path, self._log]),
            ],
            titles=_TITLES,
        ).add_class("graftlab-parts")
        self.add_class("graftlab-dashboard")
        self._judged = VerdictView(self)
        self._open([self._verdict, self._judged, self._ranks, self._message_line, self._parts])

    def static_html(self, with_figures: bool = False) -> str:
        session = self.session
        ranks = ranks_table(session.ranks, session.closed, session.failing, session.lost_groups)
        found = self._taps.found
        taps = tap_explorer.static_html(found, with_figures, failing_in(session.runs, found))
        return f"{self._judged.static_html()}{taps}{ranks}{self.filters.static_html()}{self.transform.static_html()}"

    def _graft(self, text: str) -> None:
        """Add a tap to the b2t filter as if it had been typed there, so that a person can still change their mind."""
        self.filters.propose("b2t", text)
        self._parts.selected_index = _TITLES.index("Filters")

    def _follow(self) -> None:
        self._taps.follow()

    def _show(self) -> None:
        self._show_message()
        session = self.session
        update(self._ranks, value=ranks_table(session.ranks, session.closed, session.failing, session.lost_groups))
        self._taps.show()
        self._judged.refresh()
        found = self._taps.found
        headline = html.escape(explorer.headline(found, failing_in(session.runs, found)))
        update(self._verdict, value=f'<b role="status">{headline}</b>')
        [rank] = session.select(self._which_log.value)
        update(self._log_path, value=f'<div class="quiet">{html.escape(str(rank.log))}</div>')
        tail = html.escape(rank.log_tail(_LOG_LINES))
        update(self._log, value=f"<pre>{tail}</pre>")


class VerdictView(Panel):
    """Judges an expression that both sides evaluate, as ``%graft verdict EXPR`` does, without blocking the page."""

    def __init__(self, parent: Panel) -> None:
        super().__init__(parent.session, parent=parent)
        self._expression = TextInput(
            placeholder="an expression, such as model(x)",
            description="Verdict on",
            continuous_update=False,
            layout={"width": "34em", "max_width": "100%"},
            style={"description_width": "max-content"},
        )
        self._expression.add_class("graftlab-verdict-expression")
        # Jobs run their own code, so there is no expression to enter.
        self._of_jobs = not all(rank.takes_work for rank in parent.session.ranks)
        if self._of_jobs:
            self._expression.placeholder = "the jobs' own steps"
        tooltip = "Run both sides several times and name the computations that differ"
        self._result = widgets.HTML().add_class("graftlab-verdict-text")
        # At the click the browser may still hold back the expression on the screen, so it is fetched first.
        ask = partial(self._expression.fetch, "judge", self.guarded(self._judge))
        self._button = self.button("Judge", "judge", tooltip, self._judge_jobs if self._of_jobs else ask)
        self._stop: threading.Event | None = None
        self._is_announced = False
        self._stop_button = self.button("■ Stop", "stop", "Stop the verdict, and restore the plan", self._press_stop)
        self._open([row(self._expression, self._button, self._stop_button), self._result])

    def _show(self) -> None:
        # The message line is the parent's.
        closed = self.session.closed
        update(self._expression, disabled=closed or self._of_jobs)
        update(self._button, disabled=closed)
        update(self._stop_button, disabled=closed or self._stop is None)

    def static_html(self, with_figures: bool = False) -> str:
        """The result that the page shows, for a saved notebook."""
        # An announcement would stay in the notebook if the verdict is refused, which changes nothing else.
        result: str = "" if self._is_announced else self._result.value
        return f'<div class="graftlab-verdict-text">{result}</div>' if result else ""

    def close(self) -> None:
        """Stop the verdict too: no other view shows its result or can stop it."""
        self._press_stop()
        super().close()

    def _press_stop(self) -> None:
        if self._stop is not None:
            self._stop.set()

    def _judge_jobs(self) -> None:
        self._announce("the jobs")
        self.in_background(self._judge_now, None)

    def _judge(self, typed: str) -> None:
        expression = typed.strip()
        if not expression:
            raise SessionError("enter the expression for both sides to evaluate, such as model(x)")
        # An error of the previous expression does not apply to this one.
        self.say("")
        self._announce(f"<code>{html.escape(expression)}</code>")
        self.in_background(self._judge_now, expression)

    def _announce(self, what: str) -> None:
        self._is_announced = True
        update(self._result, value=f"judging {what} …")

    def _judge_now(self, expression: str | None) -> None:
        stop = self._stop = threading.Event()
        update(self._stop_button, disabled=False)
        request = VerdictRequest(*callees_of(self.session, expression), stop=stop)
        try:
            shown = judge(self.session, request)._repr_mimebundle_()["text/html"]
        except KeyboardInterrupt as stopped:
            update(self._result, value="")
            self.say(str(stopped))
            return
        except BaseException:
            # The panel's message shows why.
            update(self._result, value="")
            raise
        finally:
            self._stop = None
            self._is_announced = False
            update(self._stop_button, disabled=True)
        update(self._result, value=shown)
