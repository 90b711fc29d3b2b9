"""The filter editor: the plan's four filters, one line each, checked while typing and applied while ranks run.

Apply publishes the texts on the screen: it fetches the text of every line, and Ctrl-Enter includes that of its line.

The plan can also change elsewhere. An unedited line follows the plan. An edited line keeps its text and shows the
filter in force, and Apply only changes the filters of edited lines.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import ipywidgets as widgets

from graftlab.base.html import cell, table
from graftlab.control.core import SessionCore, internals_of
from graftlab.control.run import Run
from graftlab.filters.check import TAP_LIMIT, FilterCheck, matched_by_both
from graftlab.filters.expressions import HELPERS
from graftlab.plan.changes import parts_of
from graftlab.plan.plan import FILTERS, GraftPlan, PlanEdit
from graftlab.widgets import filter_view as view
from graftlab.widgets.code_editor import NOT_BUILT, TextAreaEditor
from graftlab.widgets.filter_line import FilterLine, is_same
from graftlab.widgets.kept_taps import join_filters
from graftlab.widgets.panel import Panel, row, update
from graftlab.widgets.plan_view import PlanList, UndoButtons, adoption
from graftlab.widgets.rename_list import RenameList


class FilterEditor(Panel):
    """Edit the filters of a session's plan while its ranks run: ``session.filter_editor()``.

    Below each line: the syntax error, or the number and names of the taps seen so far that the filter matches. A tap
    that both b2t and t2b match is marked, and blocks Apply.
    """

    style_sheet = view.STYLE
    closed_message = "The session is closed; its plan can no longer be changed."

    def __init__(self, session: SessionCore) -> None:
        super().__init__(session)
        self._plan = session.plan
        self._taps: list[dict[str, Any]] = []
        self._tags_seen: set[str] = set()
        # The pairs and renames that name the taps; see _follow.
        self._names: tuple[object, ...] = (session.plan.pairs, session.plan.rename)
        self._shown: object = None
        self._judged_run: Run | None = None

        self._lines = {name: FilterLine(name, self._plan) for name in FILTERS}
        for line in self._lines.values():
            line.editor.on_change(self.guarded(partial(self._on_change, line)))
            line.editor.on_submit(self.guarded(partial(self._on_key, line)))
        self._apply = self.button("Apply", "apply", "Publish the filters on the screen", self.apply)
        self._revert = self.button("Revert", "revert", "Discard your changes", self.revert)
        keys = NOT_BUILT if isinstance(self._lines["b2t"].editor, TextAreaEditor) else "Ctrl/⌘-Enter applies"
        self._adopted = widgets.HTML().add_class("graftlab-adopted")
        self._renames = RenameList(self)
        self._undo = UndoButtons(self)
        self._earlier = PlanList(self, self.restore)
        self.add_class("graftlab-filter-editor")
        self._open(
            [
                # Above everything that changes size while typing: a button that moves between the press and the
                # release of the mouse is not clicked.
                row(self._apply, self._revert, self._undo, widgets.HTML(f'<span class="quiet">{keys}</span>')),
                self._message_line,
                *self._lines.values(),
                self._adopted,
                self._renames,
                self._earlier,
            ],
            {name: line.editor for name, line in self._lines.items()},
        )

    # ---- for the caller -----------------------------------------------------------------------------------------

    def apply(self) -> None:
        """Publish the filters on the screen, as the button does. Without a browser page nothing happens."""
        self.submit("apply")

    def revert(self) -> None:
        """Replace the typed texts by the filters in force."""
        with self._lock:
            self._plan = self.session.plan
            for line in self._lines.values():
                line.take(self._plan)
            self.say("")

    def propose(self, name: str, text: str) -> None:
        """Extend a filter by ``text`` as if it had been typed: Apply publishes it, Revert discards it."""
        with self._lock:
            editor = self._lines[name].editor
            wanted = join_filters(editor.value.strip(), text)
            if wanted != editor.value.strip():
                editor.set_text(wanted)
            self.say(f"{name} is changed here but not published yet: Apply publishes it.", "good")

    def restore(self, plan: GraftPlan) -> None:
        """Publish the filters, transform, renames and pairs of an earlier plan as the next version."""
        with self._lock:
            new = self.session.edit(**cast("PlanEdit", parts_of(plan)))
            self.revert()
            self.say(f"Restored version {plan.version} as version {new.version}.")

    def static_html(self, with_figures: bool = False) -> str:
        plan = self.session.plan
        lines = [f"<tr>{cell(name)}{cell(getattr(plan, name) or '(matches nothing)')}</tr>" for name in FILTERS]
        return f"<p>Filters of plan {plan.version}</p>{table(('filter', 'expression'), lines)}"

    # ---- events from the browser --------------------------------------------------------------------------------

    def _on_change(self, line: FilterLine, text: str) -> None:
        with self._lock:
            line.is_changed_elsewhere = line.is_typed and (line.is_changed_elsewhere or line.editor.offer_declined)
            self.say("")

    def _on_key(self, line: FilterLine, text: str, action: str) -> None:
        if action == "apply":
            self.submit("apply", **{line.name: text})

    def _act(self, action: str, values: dict[str, Any]) -> None:
        with self._lock:
            self._publish(values)

    def _publish(self, texts: dict[str, str]) -> None:
        typed = {name: text for name, text in texts.items() if not is_same(text, self._lines[name].in_force)}
        self._follow()
        checks = {name: FilterCheck(typed.get(name, line.in_force)) for name, line in self._lines.items()}
        faults = [f"{name}: {check.fault.message}" for name, check in checks.items() if check.fault is not None]
        for name in ("b2t", "t2b"):
            checks[name].catch_up(self._taps)
        both = matched_by_both(checks)
        if both:
            faults.append(view.overlap_message(len(both)))
        if faults:
            self.say("Not applied. " + "; ".join(faults), "bad")
            return
        changes: dict[str, Any] = {
            name: text if text.strip() else None
            for name, text in typed.items()
            if not is_same(text, self._lines[name].in_force)
        }
        if not changes:
            self.say(f"Nothing to apply: version {self._plan.version} already has these filters.")
            return
        self._plan = self.session.edit(**changes)
        for line in self._lines.values():
            line.settle(self._plan)
        self.say(f"Published version {self._plan.version}, which changes {' and '.join(changes)}.")

    # ---- display ------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        plan = self.session.plan
        if plan is not self._plan:
            self._plan = plan
            # The message was about a plan that is no longer in force.
            self._current_message = ("", "quiet")
            for line in self._lines.values():
                line.follow(plan)
        taps = self.session.taps
        if self._names != (plan.pairs, plan.rename):
            # Taps have new names, so every filter must be matched again.
            self._names, self._taps, self._tags_seen = (plan.pairs, plan.rename), [], set()
            for line in self._lines.values():
                line.forget()
        if len(taps) > len(self._taps):
            self._tags_seen.update(*taps[len(self._taps) : TAP_LIMIT])
            self._taps = taps
            for line in self._lines.values():
                line.editor.completions = sorted(self._tags_seen.union(HELPERS))

        run = next(iter(self.session.runs[-1:]), None)
        if run is not None and run.done and run is not self._judged_run:
            self._judged_run = run
            # In the background, because it reads the rows of the run.
            self.in_background(self._judge, run)

    def _judge(self, run: Run) -> None:
        unmatched = run.unmatched
        with self._lock:
            for name, line in self._lines.items():
                line.unmatched = (unmatched[name], run.number) if name in unmatched else None
            self._show()

    def _show(self) -> None:
        self._show_message()
        adopted = self.session.adopted(self._plan.version)
        alive = [rank.label for rank in self.session.ranks if rank.alive]
        closed = self.session.closed
        lines = self._lines.values()
        texts = [(line.editor.value, line.in_force, line.is_changed_elsewhere, line.unmatched) for line in lines]
        state = (self._plan.version, len(self._taps), texts, adopted, alive, closed)
        if state == self._shown:
            return
        for line in lines:
            line.match(self._taps)
        both = matched_by_both({name: line.check for name, line in self._lines.items()})
        for line in lines:
            line.show(self._taps, self._tags_seen, both if line.name in ("b2t", "t2b") else ())
            line.editor.read_only = closed
        faulty = bool(both) or any(line.check.fault for line in lines)
        typed = any(line.is_typed for line in lines)
        update(self._apply, disabled=closed or faulty, button_style="primary" if typed and not faulty else "")
        update(self._revert, disabled=closed)
        update(self._adopted, value=adoption(self._plan.version, adopted, alive, closed))
        self._renames.show(self._plan, closed)
        self._undo.show(closed)
        self._earlier.show(internals_of(self.session).plans.lasting(), closed)
        self._shown = state
