"""One line of the filter editor: a filter's text, and the feedback below it."""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set

import ipywidgets as widgets

from graftlab.base.tags import PLACE_TAGS
from graftlab.filters.check import FilterCheck, Tags, unknown_tags, unknown_values
from graftlab.plan.plan import GraftPlan
from graftlab.widgets import filter_view as view
from graftlab.widgets.code_editor import code_editor
from graftlab.widgets.panel import update

# Shorter than the plan's own descriptions, to fit beside a line.
_CAPTIONS = {
    "b2t": "baseline → target",
    "t2b": "target → baseline",
    "compare": "measure only",
    "keep": "hold for plots",
}


class FilterLine(widgets.HBox):  # type: ignore[misc]
    """One filter: its editor, the text in force, and the feedback on the typed text."""

    def __init__(self, name: str, plan: GraftPlan) -> None:
        self.name = name
        self.in_force = text_of(plan, name)
        self.is_changed_elsewhere = False
        """Whether the filter in force changed elsewhere after this text was typed."""
        self.unmatched: tuple[str, int] | None = None
        """A text that was in force and matched no tap in the newest run, and the number of that run."""
        self.check = FilterCheck(self.in_force)
        self.editor = code_editor(self.in_force, language="filter", lines=1, label=f"{name} filter, {_CAPTIONS[name]}")
        self._below = widgets.HTML().add_class("graftlab-below")
        title = f'<div class="name">{name}</div><div class="caption">{_CAPTIONS[name]}</div>'
        super().__init__(
            [
                widgets.HTML(title, layout=widgets.Layout(width="9em", flex="0 0 auto")),
                widgets.VBox([self.editor, self._below], layout=widgets.Layout(flex="1 1 auto", min_width="0")),
            ]
        )
        self.add_class("graftlab-filter").add_class(f"graftlab-filter-{name}")

    @property
    def is_typed(self) -> bool:
        """Whether the text differs from the one in force."""
        return not is_same(self.editor.value, self.in_force)

    def follow(self, plan: GraftPlan) -> None:
        """Take the plan's text, unless the line was edited."""
        text = text_of(plan, self.name)
        if text == self.in_force:
            return
        was_typed, self.in_force = self.is_typed, text
        if not was_typed:
            self.editor.offer(text)
        self.is_changed_elsewhere = self.is_typed

    def take(self, plan: GraftPlan) -> None:
        """Take the plan's text and discard the typed one."""
        self.in_force = text_of(plan, self.name)
        self.is_changed_elsewhere = False
        self.editor.set_text(self.in_force)

    def settle(self, plan: GraftPlan) -> None:
        """Mark the typed text as published."""
        self.in_force = text_of(plan, self.name)
        self.is_changed_elsewhere = False

    def forget(self) -> None:
        """Discard the matches, after taps were renamed."""
        self.check = FilterCheck(self.editor.value)

    def match(self, taps: Sequence[Tags]) -> None:
        """Match the current text against these taps."""
        if self.check.text != self.editor.value:
            self.check = FilterCheck(self.editor.value)
        self.check.catch_up(taps)

    def show(self, taps: Sequence[Tags], tags_seen: Set[str], both: Collection[int]) -> None:
        """Show which taps the text matches; ``both`` are the taps that block Apply."""
        check, parts = self.check, []
        if check.fault is not None:
            parts.append(view.fault_html(check.fault))
        elif check.filter is not None:
            if both:
                parts.append(f'<div class="bad" role="alert">{view.overlap_message(len(both))}</div>')
            if self.editor.value.strip():
                parts.append(view.matches_html(check.hits, both, taps))
                parts += _remarks(check, taps, tags_seen)
            else:
                parts.append(view.quiet("matches nothing"))
        if self.unmatched is not None and is_same(self.unmatched[0], self.editor.value):
            parts.append(view.missed_note(self.unmatched[1]))
        if self.is_typed:
            parts.append(view.in_force_note(self.in_force, self.is_changed_elsewhere))
        update(self._below, value="".join(parts))


def text_of(plan: GraftPlan, name: str) -> str:
    """The text of one filter of a plan."""
    return getattr(plan, name) or ""


def is_same(one: str, other: str) -> bool:
    """Whether two texts are the same filter."""
    return one.strip() == other.strip()


def _remarks(check: FilterCheck, taps: Sequence[Tags], tags_seen: Set[str]) -> list[str]:
    if check.filter is None or not taps:
        return []
    remarks = [view.unknown_tag(name, meant) for name, meant in unknown_tags(check.filter, tags_seen).items()]
    if not check.hits:
        remarks += [view.value_hint(text, value) for text, value in unknown_values(check.filter, taps).items()]
    # Their values are known only from the first time a tap was seen.
    moment = sorted(check.filter.names & PLACE_TAGS)
    if moment:
        remarks.append(view.quiet(f"matched by the {' and '.join(moment)} at which each tap was first seen"))
    return remarks
