"""The part of the transform editor for writing or naming a draft."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ipywidgets as widgets

from graftlab.widgets.code_editor import CodeEditor, code_editor
from graftlab.widgets.drafts import FIELDS, Draft
from graftlab.widgets.inputs import ChoiceButtons, NameBox, PanelInput
from graftlab.widgets.panel import row, update

KINDS = {
    "text": ("Python", "Write the transform here"),
    "name": ("Function or path", "Use a function of the notebook, or one that can be imported"),
    "default": ("Default", "Pair by rank, or concatenate and slice shards"),
}
_LINES = 14


class DraftBox(widgets.VBox):  # type: ignore[misc]
    """Buttons for the kind of draft, and an editor for its text, or a field for its name with its source, read-only.

    A field below takes the filter of the taps to transform. ``source_of`` returns the source of a named draft.
    """

    def __init__(self, text: str, source_of: Callable[[Draft], str]) -> None:
        self._source_of = source_of
        self.kinds = ChoiceButtons(
            options=[(label, kind) for kind, (label, _) in KINDS.items()],
            tooltips=[tooltip for _, tooltip in KINDS.values()],
            style={"button_width": "auto"},
        ).add_class("graftlab-kinds")
        self.name = NameBox(
            placeholder="a function of the notebook, or package.module.function",
            tooltip="Function or dotted path",
            ensure_option=False,
            continuous_update=False,
            layout=widgets.Layout(width="auto", flex="1 1 16em", display="none"),
        ).add_class("graftlab-name")
        self.where = NameBox(
            placeholder="blank: where the plan grafts; or a filter (True: all taps, including compared ones)",
            tooltip="Filter of the taps to transform",
            description="where",
            ensure_option=False,
            continuous_update=False,
            layout=widgets.Layout(width="auto"),
            style={"description_width": "initial"},
        ).add_class("graftlab-where")
        self.editor = code_editor(text, language="python", lines=_LINES, label="Transform")
        self.editor.add_class("graftlab-source")
        self.editor.completions = ["torch", "gl", "graft_input", *(f"graft_input.{name}" for name in FIELDS)]
        # A read-only editor for the source of a named draft; created on first use.
        self._viewer: CodeEditor | None = None
        self._sources = widgets.VBox([self.editor])
        super().__init__([row(self.kinds, self.name), self._sources, self.where])

    @property
    def inputs(self) -> dict[str, PanelInput]:
        """The inputs to read before acting on the draft; see :meth:`of`."""
        return {"kind": self.kinds, "name": self.name, "text": self.editor, "where": self.where}

    @staticmethod
    def of(values: Mapping[str, Any]) -> Draft:
        """Make a draft from the values of the inputs."""
        kind = values["kind"]
        if kind == "default":
            return Draft(kind)
        return Draft(kind, values["text"] if kind == "text" else values["name"].strip(), values["where"].strip())

    @property
    def draft(self) -> Draft:
        """The current draft, according to the kernel, which may be behind the browser."""
        values = {"kind": self.kinds.value, "name": self.name.value, "text": self.editor.value}
        return self.of({**values, "where": self.where.value})

    def take(self, draft: Draft) -> None:
        """Replace the draft, whatever the browser shows."""
        if draft.kind == "text":
            self.editor.set_text(draft.text)
        elif draft.kind == "name":
            self.name.value = draft.text
        self.where.value = draft.where
        self.kinds.value = draft.kind
        self.show_source()

    def propose(self, names: Sequence[str]) -> None:
        """Suggest these names, each once."""
        update(self.name, options=tuple(dict.fromkeys(names)))

    def show_source(self) -> None:
        """Show the editor, or the source of a named draft."""
        draft = self.draft
        if draft.kind != "text":
            source = self._source_of(draft)
            if self._viewer is None:
                self._viewer = code_editor(source, language="python", lines=_LINES, label="Source, read-only")
                self._viewer.read_only = True
                self._viewer.add_class("graftlab-viewer")
                self._sources.children = (self.editor, self._viewer)
            elif self._viewer.value != source:
                self._viewer.set_text(source)
        for widget, is_shown in (
            (self.name, draft.kind == "name"),
            (self.editor, draft.kind == "text"),
            (self.where, draft.kind != "default"),
            (self._viewer, draft.kind != "text"),
        ):
            if widget is not None:
                update(widget.layout, display=None if is_shown else "none")
