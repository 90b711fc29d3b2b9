"""The part of the transform editor that lists earlier transforms and unpublished drafts."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from functools import partial
from typing import Any

import ipywidgets as widgets

from graftlab.plan.plan import GraftPlan
from graftlab.transforms import TransformSpec
from graftlab.widgets.drafts import Draft, Version, source_of
from graftlab.widgets.inputs import Menu
from graftlab.widgets.panel import FoldableBox, Panel, row
from graftlab.widgets.trial_view import difference_html

_LISTED = 50
_SAVED_LIMIT = 10

ACTIONS = {
    "compare": ("Compare", "Show the differences from the editor"),
    "load": ("Load", "Load it into the editor without applying it"),
    "restore": ("Restore", "Publish it again"),
}


class VersionList(FoldableBox):
    """The transforms of a session's plans, newest first; its buttons submit the :data:`ACTIONS` to ``panel``."""

    def __init__(self, panel: Panel) -> None:
        self.versions: list[Version] = []
        self._plans = 0
        self._saved: list[Draft] = []
        layout = widgets.Layout(width="auto", flex="1 1 20em", min_width="10em")
        self.menu = Menu(options=[], layout=layout, tooltip="Earlier transforms").add_class("graftlab-version")
        self.buttons = {
            action: panel.button(label, action, tooltip, partial(panel.submit, action))
            for action, (label, tooltip) in ACTIONS.items()
        }
        self.compared: Version | None = None
        """The version that is shown compared with the editor."""
        self._diff = widgets.HTML().add_class("graftlab-difference")
        super().__init__(widgets.VBox([row(self.menu, *self.buttons.values()), self._diff]))
        self.add_class("graftlab-versions")
        self.menu.observe(self._on_choice, "value")

    @property
    def in_force(self) -> Version:
        return self.versions[-1]

    def follow(self, plans: Sequence[GraftPlan]) -> bool:
        """Add new plans; returns whether there were any."""
        if len(plans) == self._plans:
            return False
        for plan in plans[self._plans :]:
            if not self.versions or self.versions[-1].spec != plan.transform:
                self.versions.append(Version(plan.version, plan.transform))
        self._plans = len(plans)
        self._fill()
        return True

    def save_draft(self, draft: Draft) -> None:
        """Save a draft that is about to be replaced, unless it is listed already."""
        known = draft in self._saved or any(version.draft == draft for version in self.versions)
        if draft.kind == "text" and draft.text.strip() and not known:
            self._saved = [*self._saved, draft][-_SAVED_LIMIT:]
            self._fill()

    def compare(self, version: Version, draft_source: str) -> None:
        """Show the changes since this version, until a different one is chosen."""
        self.compared = version
        sources = source_of(version.spec).splitlines(), draft_source.splitlines()
        lines = difflib.unified_diff(*sources, version.label, "in the editor", lineterm="")
        self._diff.value = difference_html(list(lines))

    def _on_choice(self, _change: Any) -> None:
        if not self.menu.filling:
            self.compared = None
            self._diff.value = ""

    def _fill(self) -> None:
        newest, *earlier = reversed(self.versions[-_LISTED:])
        options = [(f"{newest.label} (in force)", newest), *((version.label, version) for version in earlier)]
        unapplied = [
            Version(None, TransformSpec("source", draft.text, where=draft.where or None))
            for draft in reversed(self._saved)
        ]
        options += [(version.label, version) for version in unapplied]
        labels = [label for label, _ in options]
        if labels != [label for label, _ in self.menu.options]:
            self.menu.fill(options, self.menu.value)
            self.title = f"Versions ({len(options)})"
