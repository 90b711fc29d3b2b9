"""The part of the transform editor that lists earlier transforms and texts that were set aside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets as widgets

from graftlab.plan.plan import GraftPlan
from graftlab.transforms import TransformSpec
from graftlab.widgets.choices import Menu
from graftlab.widgets.drafts import Draft, Version, difference, source_of
from graftlab.widgets.trial_view import difference_html

_LISTED = 50
_SET_ASIDE_LIMIT = 10

ACTIONS = {
    "compare": ("Compare", "Show what differs from what is in the editor"),
    "load": ("Load", "Take it into the editor; nothing is applied"),
    "restore": ("Restore", "Put it in force again"),
}


class VersionList(widgets.Accordion):  # type: ignore[misc]
    """The transforms of a session's plans, newest first; ``press`` is called with one of :data:`ACTIONS`."""

    def __init__(self, press: Callable[[str], None]) -> None:
        self.versions: list[Version] = []
        self._plans = 0
        self._set_aside: list[str] = []
        self.menu = Menu(options=[], layout=widgets.Layout(width="auto", flex="1 1 20em", min_width="10em")).add_class(
            "graftlab-version"
        )
        self.buttons: dict[str, widgets.Button] = {}
        for action, (label, tooltip) in ACTIONS.items():
            button = widgets.Button(description=label, tooltip=tooltip, layout=widgets.Layout(width="auto"))
            button.on_click(lambda _, action=action: press(action))
            self.buttons[action] = button.add_class(f"graftlab-{action}")
        self.comparing = False
        """Whether a difference is shown, which ought to be that of what is in the editor."""
        self._diff = widgets.HTML().add_class("graftlab-difference")
        row = widgets.HBox(
            [self.menu, *self.buttons.values()], layout=widgets.Layout(flex_flow="row wrap", align_items="center")
        )
        super().__init__([widgets.VBox([row, self._diff])])
        self.add_class("graftlab-versions")
        self.menu.observe(self._on_choice, "value")

    @property
    def in_force(self) -> Version:
        return self.versions[-1]

    @property
    def chosen(self) -> Version | None:
        version: Version | None = self.menu.value
        return version

    def follow(self, plans: Sequence[GraftPlan]) -> bool:
        """Take in the plans that are new; returns whether there were any."""
        if len(plans) == self._plans:
            return False
        for plan in plans[self._plans :]:
            if not self.versions or self.versions[-1].spec != plan.transform:
                self.versions.append(Version(plan.version, plan.transform))
        self._plans = len(plans)
        self._fill()
        return True

    def set_aside(self, draft: Draft) -> None:
        """Keep a text that is about to be replaced, if it is nowhere else."""
        known = draft.text in self._set_aside or any(version.draft == draft for version in self.versions)
        if draft.kind == "text" and draft.text.strip() and not known:
            self._set_aside = [*self._set_aside, draft.text][-_SET_ASIDE_LIMIT:]
            self._fill()

    def compare(self, draft_source: str) -> None:
        """Show what has been changed since the chosen version, until another one is chosen."""
        if self.chosen is not None:
            self.comparing = True
            lines = difference(source_of(self.chosen.spec), draft_source, self.chosen.label, "in the editor")
            self._diff.value = difference_html(lines)

    def _on_choice(self, _change: Any) -> None:
        if not self.menu.filling:
            self.comparing = False
            self._diff.value = ""

    def _fill(self) -> None:
        newest, *earlier = reversed(self.versions[-_LISTED:])
        options = [(f"{newest.label} (in force)", newest), *((version.label, version) for version in earlier)]
        unapplied = [Version(None, TransformSpec("source", text)) for text in reversed(self._set_aside)]
        options += [(version.label, version) for version in unapplied]
        labels = [label for label, _ in options]
        if labels != [label for label, _ in self.menu.options]:
            self.menu.fill(options, self.chosen)
            self.titles = (f"Versions ({len(options)})",)
