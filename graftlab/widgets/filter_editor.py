"""The filter editor: the plan's four filters, a line each, checked while they are typed and applied while ranks run.

What is applied is what is on the screen. The kernel may have older texts than the screen shows, so Apply asks every
line for its text and publishes when all have answered; Ctrl-Enter brings the text of its own line along.

The plan can be changed from anywhere. A line in which nobody has typed follows it. A line with text of its own keeps
that text, says what is in force, and only that line's filter is changed by Apply.
"""

from __future__ import annotations

import functools
import html
import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import ipywidgets as widgets

from graftlab.base.tags import PLACE_TAGS
from graftlab.base.world import Side
from graftlab.control.core import SessionCore
from graftlab.errors import FilterError, GraftError
from graftlab.filters.expressions import HELPERS, Filter, compile_filter
from graftlab.plan.plan import FILTERS, GraftPlan
from graftlab.widgets import filter_view as view
from graftlab.widgets.code_editor import TextareaEditor, code_editor
from graftlab.widgets.refresher import explain, refresher_of

logger = logging.getLogger(__name__)

TAP_LIMIT = 10_000
"""Taps that a text is matched against. More would be felt while typing."""

_PLANS_LISTED = 30
# A text may mention any number of tags that nobody has.
_REMARKS = 3
_MEANINGS = {
    "b2t": "baseline → target",
    "t2b": "target → baseline",
    "compare": "measure only",
    "keep": "hold for plots",
}


class Check:
    """A text, compiled once, and which of the taps seen so far it matches, each judged once.

    ``fault`` is the :class:`FilterError` of a text that is no filter, and ``hits`` the indices of what it matches.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.fault: FilterError | None = None
        self.filter: Filter | None = None
        self.hits: list[int] = []
        self._judged = 0
        try:
            self.filter = compile_filter(text)
        except FilterError as fault:
            self.fault = fault

    def catch_up(self, taps: Sequence[view.Tags]) -> None:
        """Judge the taps that were not there the last time, up to :data:`TAP_LIMIT`."""
        stop = min(len(taps), TAP_LIMIT)
        if self.filter is not None:
            matches = self.filter.matches
            self.hits += [index for index in range(self._judged, stop) if matches(taps[index])]
        self._judged = stop


class _Line:
    """One filter: its editor, the text that is in force, and what is shown about the text below it."""

    def __init__(self, name: str, text: str, plain: bool) -> None:
        self.name = name
        self.in_force = text
        self.overtaken = False
        """Whether the filter in force was changed by somebody else after this text had been typed."""
        self.check = Check(text)
        self.editor = code_editor(text, language="filter", lines=1, plain=plain)
        self.below = widgets.HTML().add_class("graftlab-below")
        title = f'<div class="name">{name}</div><div class="meaning">{_MEANINGS[name]}</div>'
        self.row = widgets.HBox(
            [
                widgets.HTML(title, layout=widgets.Layout(width="9em", flex="0 0 auto")),
                widgets.VBox([self.editor, self.below], layout=widgets.Layout(flex="1 1 auto", min_width="0")),
            ]
        )
        self.row.add_class("graftlab-filter").add_class(f"graftlab-filter-{name}")

    @property
    def typed(self) -> bool:
        """Whether the text is another one than that in force."""
        return not _same(self.editor.value, self.in_force)

    def follow(self, plan: GraftPlan) -> None:
        """Take the plan's text, if nobody has typed here."""
        text = _text_of(plan, self.name)
        if text == self.in_force:
            return
        typed, self.in_force = self.typed, text
        if not typed:
            self.editor.offer(text)
        self.overtaken = self.typed

    def take(self, plan: GraftPlan) -> None:
        """Take the plan's text, whatever was typed."""
        self.in_force = _text_of(plan, self.name)
        self.overtaken = False
        self.editor.set_text(self.in_force)

    def look(self, taps: Sequence[view.Tags]) -> None:
        if self.check.text != self.editor.value:
            self.check = Check(self.editor.value)
        self.check.catch_up(taps)


class FilterEditor(widgets.VBox):  # type: ignore[misc]
    """Edit the filters of a session's plan while its ranks run: ``session.filter_editor()``.

    Below each line: where the text is at fault, or how many of the taps seen so far it matches, and which. A tap that
    both b2t and t2b match is marked, and nothing can be applied until none is. ``plain=True`` asks for plain text
    areas, as in :func:`graftlab.widgets.code_editor.code_editor`.
    """

    def __init__(self, session: SessionCore, *, plain: bool = False) -> None:
        self.session = session
        self._lock = threading.RLock()
        self._plan = session.plan
        self._taps: list[dict[str, Any]] = []
        self._tags_seen: set[str] = set()
        self._question = 0
        self._answers: dict[str, str] = {}
        self._note: tuple[str, bool] = ("", False)
        self._trouble = ""
        self._shown: object = None
        self._closed = False

        lines = {}
        for name in reversed(FILTERS):
            line = lines[name] = _Line(name, _text_of(self._plan, name), plain)
            # One reason why there is no better editor is enough: the last line's.
            plain = plain or isinstance(line.editor, TextareaEditor)
            line.editor.on_change(functools.partial(self._guard, self._on_change, line))
            line.editor.on_submit(functools.partial(self._guard, self._on_submit, line))
        self._lines = {name: lines[name] for name in FILTERS}
        self._apply = self._button("apply", "Publish the filters as they are on the screen", self.apply)
        self._revert = self._button("revert", "Drop what was typed", self.revert)
        self._keys = widgets.HTML(
            "" if isinstance(lines["b2t"].editor, TextareaEditor) else '<span class="quiet">Ctrl/⌘-Enter applies</span>'
        )
        self._version = widgets.HTML().add_class("graftlab-adopted")
        self._message = widgets.HTML().add_class("graftlab-message")
        self._rows: dict[int, widgets.HBox] = {}
        self._list = widgets.VBox().add_class("graftlab-plans")
        self._earlier = widgets.Accordion([self._list]).add_class("graftlab-earlier")
        super().__init__(
            [
                widgets.HTML(view.STYLE),
                *(line.row for line in self._lines.values()),
                widgets.HBox([self._apply, self._revert, self._keys]).add_class("graftlab-buttons"),
                self._message,
                self._version,
                self._earlier,
            ]
        )
        self.add_class("graftlab-filter-editor")
        self.refresh()
        refresher_of(session).add(self)

    # ---- for the caller -----------------------------------------------------------------------------------------

    def apply(self) -> None:
        """Publish what is on the screen, as the button does; without a browser that shows it nothing happens."""
        self._ask({})

    def revert(self) -> None:
        """Show the filters in force in place of what was typed."""
        with self._lock:
            self._plan = self.session.plan
            for line in self._lines.values():
                line.take(self._plan)
            self._say("")

    def restore(self, plan: GraftPlan) -> None:
        """Publish an earlier plan anew: its filters, its transform and its renames, as the next version."""
        with self._lock:
            new = self.session.edit(
                **{name: getattr(plan, name) for name in FILTERS},
                transform=plan.transform,
                rename=_rename_of(plan),
            )
            self.revert()
            self._say(f"Version {plan.version} is restored, as version {new.version}.")

    def refresh(self) -> None:
        """Show what is new in the session; called by its refresher, and cheap where nothing is."""
        with self._lock:
            if self._closed:
                return
            self._follow()
            self._show()

    def show_error(self, text: str) -> None:
        """Show why a refresh failed, or that it works again."""
        with self._lock:
            if not self._closed:
                self._trouble = text
                self._show_message()

    def close(self) -> None:
        """Take the editor out of the browser and leave the session alone."""
        refresher_of(self.session).remove(self)
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for child in self.children:
            _close(child)
        super().close()

    # ---- what the browser says ----------------------------------------------------------------------------------

    def _guard(self, callback: Callable[..., None], *arguments: Any) -> None:
        """Nobody else would show a callback's exceptions."""
        try:
            callback(*arguments)
        except Exception as error:
            if not isinstance(error, GraftError):
                logger.exception("a callback of the filter editor failed")
            with self._lock:
                self._say(explain(error), bad=True)

    def _on_change(self, line: _Line, text: str) -> None:
        with self._lock:
            line.overtaken = line.typed and (line.overtaken or line.editor.offer_declined)
            self._say("")

    def _on_submit(self, line: _Line, text: str, action: str) -> None:
        if action == "apply":
            self._ask({line.name: text})
            return
        with self._lock:
            if action == f"collect {self._question}":
                self._answers[line.name] = text
                if len(self._answers) == len(self._lines):
                    self._publish(self._answers)

    def _ask(self, known: dict[str, str]) -> None:
        """Ask the lines whose text is not known for what is on the screen; the last answer publishes."""
        with self._lock:
            self._question += 1
            self._answers = dict(known)
            question = f"collect {self._question}"
        for name, line in self._lines.items():
            if name not in known:
                line.editor.submit(question)

    def _publish(self, texts: Mapping[str, str]) -> None:
        typed = {name: text for name, text in texts.items() if not _same(text, self._lines[name].in_force)}
        self._follow()
        checks = {name: Check(typed.get(name, line.in_force)) for name, line in self._lines.items()}
        faults = [f"{name}: {check.fault.message}" for name, check in checks.items() if check.fault is not None]
        for name in ("b2t", "t2b"):
            checks[name].catch_up(self._taps)
        both = _both(checks)
        if both:
            faults.append(view.overlap(len(both)))
        if faults:
            self._say("Not applied. " + "; ".join(faults), bad=True)
            return
        changes: dict[str, Any] = {
            name: text if text.strip() else None
            for name, text in typed.items()
            if not _same(text, self._lines[name].in_force)
        }
        if not changes:
            self._say(f"Nothing to apply: these filters are in force, as version {self._plan.version}.")
            return
        self._plan = self.session.edit(**changes)
        for name, line in self._lines.items():
            line.in_force = _text_of(self._plan, name)
            line.overtaken = False
        self._say(f"Version {self._plan.version} is published; it changes {' and '.join(changes)}.")

    # ---- what is shown ------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        plan = self.session.plan
        if plan is not self._plan:
            self._plan = plan
            self._note = ("", False)
            for line in self._lines.values():
                line.follow(plan)
        taps = self.session.taps
        if len(taps) > len(self._taps):
            self._tags_seen.update(*taps[len(self._taps) : TAP_LIMIT])
            self._taps = taps
            for line in self._lines.values():
                line.editor.completions = sorted(self._tags_seen.union(HELPERS))

    def _say(self, note: str, bad: bool = False) -> None:
        self._note = note, bad
        if not self._closed:
            self._show()

    def _show(self) -> None:
        """Show the state, with the lock held; the browser is only sent what is another value than before."""
        adopted = self.session.adopted(self._plan.version)
        alive = [rank.label for rank in self.session.ranks if rank.alive]
        closed = self.session.closed
        lines = self._lines.values()
        texts = [(line.editor.value, line.in_force, line.overtaken) for line in lines]
        state = (self._plan.version, len(self._taps), texts, adopted, alive, closed, self._note)
        if state == self._shown:
            return
        for line in lines:
            line.look(self._taps)
        both = _both({name: line.check for name, line in self._lines.items()})
        for line in lines:
            line.below.value = self._below(line, both if line.name in ("b2t", "t2b") else ())
            line.editor.read_only = closed
        faulty = bool(both) or any(line.check.fault for line in lines)
        self._apply.disabled = closed or faulty
        self._apply.button_style = "primary" if any(line.typed for line in lines) and not faulty else ""
        self._revert.disabled = closed
        self._version.value = view.adoption(self._plan.version, adopted, alive, closed)
        self._show_message()
        self._show_earlier(closed)
        self._shown = state

    def _below(self, line: _Line, both: Collection[int]) -> str:
        check, parts = line.check, []
        if check.fault is not None:
            parts.append(view.fault(check.fault))
        elif check.filter is not None:
            if both:
                parts.append(f'<div class="bad" role="alert">{view.overlap(len(both))}</div>')
            if line.editor.value.strip():
                parts.append(view.matches(check.hits, both, self._taps, TAP_LIMIT))
                parts += self._remarks(check.filter)
            else:
                parts.append(view.quiet("matches nothing"))
        if line.typed:
            parts.append(view.in_force(line.in_force, line.overtaken))
        return "".join(parts)

    def _remarks(self, filter_: Filter) -> list[str]:
        if not self._taps:
            return []
        unknown = sorted(filter_.names - self._tags_seen)[:_REMARKS]
        remarks = [view.unknown_tag(name, get_close_matches(name, self._tags_seen, n=1)) for name in unknown]
        # Their values are those of the moment in which a tap was first seen.
        moment = sorted(filter_.names & PLACE_TAGS)
        if moment:
            remarks.append(view.quiet(f"judged by the {' and '.join(moment)} at which each tap was first seen"))
        return remarks

    def _show_message(self) -> None:
        note, bad = (self._trouble, True) if self._trouble else self._note
        if self.session.closed:
            note, bad = "The session is closed; its plan cannot be changed any more.", False
        role, kind = ("alert", "bad") if bad else ("status", "quiet")
        self._message.value = f'<div class="{kind}" role="{role}">{html.escape(note)}</div>' if note else ""

    def _show_earlier(self, closed: bool) -> None:
        earlier = self.session.plans[:-1]
        listed = {plan.version: plan for plan in reversed(earlier[-_PLANS_LISTED:])}
        if listed.keys() != self._rows.keys():
            rows = {version: self._rows.pop(version, None) or self._row(plan) for version, plan in listed.items()}
            dropped, self._rows = self._rows, rows
            self._list.children = tuple(rows.values())
            for row in dropped.values():
                _close(row)
            self._earlier.titles = (f"Earlier plans ({len(earlier)})",)
        for row in self._rows.values():
            row.children[0].disabled = closed
        self._earlier.layout.display = None if listed else "none"

    def _row(self, plan: GraftPlan) -> widgets.HBox:
        restore = functools.partial(self.restore, plan)
        button = self._button("restore", f"Publish version {plan.version} anew", restore)
        row = widgets.HBox([button, widgets.HTML(view.described(plan))])
        return row.add_class(f"graftlab-plan-{plan.version}")

    def _button(self, name: str, tooltip: str, action: Callable[[], None]) -> widgets.Button:
        button = widgets.Button(description=name.capitalize(), tooltip=tooltip, layout=widgets.Layout(width="6em"))
        button.on_click(lambda _: self._guard(action))
        return button.add_class(f"graftlab-{name}")


# ---- texts and plans ------------------------------------------------------------------------------------------------


def _text_of(plan: GraftPlan, name: str) -> str:
    return getattr(plan, name) or ""


def _same(one: str, other: str) -> bool:
    return one.strip() == other.strip()


def _rename_of(plan: GraftPlan) -> dict[Side, dict[str, str]]:
    rules: dict[Side, dict[str, str]] = {}
    for side, pattern, replacement in plan.rename:
        rules.setdefault(side, {})[pattern] = replacement
    return rules


def _both(checks: Mapping[str, Check]) -> Collection[int]:
    """The taps that b2t and t2b both match, in the order in which they were seen."""
    return dict.fromkeys(sorted(set(checks["b2t"].hits).intersection(checks["t2b"].hits)))


# ---- widgets -------------------------------------------------------------------------------------------------------


def _close(widget: widgets.Widget) -> None:
    """Close a widget with what is in it, which ipywidgets leaves open."""
    for child in getattr(widget, "children", ()):
        _close(child)
    widget.close()
