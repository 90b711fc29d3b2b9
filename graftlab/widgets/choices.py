"""Choices whose last value a button's callback can wait for.

ipywidgets holds a change of a trait back as long as the kernel has not worked off the one before it; a click is not
held back. So at the click the kernel may have an older choice than the person sees. A choice of this module can be
asked: it raises the number ``asked``, a link that runs in the browser copies it to ``answered``, and that copy goes
through the same queue as the choice. When it arrives, every choice that was made before it has arrived too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets as widgets
import traitlets


class Asked(widgets.Widget):  # type: ignore[misc]
    """What makes a widget one that can be asked."""

    asked = traitlets.Int(0).tag(sync=True)
    answered = traitlets.Int(0).tag(sync=True)


class Buttons(Asked, widgets.ToggleButtons):  # type: ignore[misc]
    """A few choices, one of which is pressed."""


class NameBox(Asked, widgets.Combobox):  # type: ignore[misc]
    """A line of text, with proposals."""


class Menu(Asked, widgets.Dropdown):  # type: ignore[misc]
    """One of many choices. ``filling`` tells those who observe ``value`` that nobody has chosen anything."""

    filling = False

    def fill(self, options: Sequence[tuple[str, Any]], value: Any) -> None:
        """New options, with this one chosen; or the first, where it is none of them."""
        values = [option for _, option in options]
        self.filling = True
        try:
            with self.hold_sync():
                self.options = options
                self.value = value if value in values else values[0] if values else None
        finally:
            self.filling = False


class Questions:
    """Asks all of ``choices`` and calls ``answered(action)`` when the last values of all are there.

    Without a browser there is no answer. Several pages may show the widgets; the first answer counts. Any thread may
    ask.
    """

    def __init__(self, choices: Sequence[Asked], answered: Callable[[str], None]) -> None:
        self._choices = choices
        self._answered = answered
        self._lock = threading.RLock()
        self._asked = 0
        self._open: dict[int, str] = {}
        self._links = [widgets.jsdlink((choice, "asked"), (choice, "answered")) for choice in choices]
        for choice in choices:
            choice.observe(self._on_answer, "answered")

    def ask(self, action: str) -> None:
        with self._lock:
            self._asked += 1
            self._open[self._asked] = action
            for choice in self._choices:
                choice.asked = self._asked

    def close(self) -> None:
        for link in self._links:
            link.close()

    def _on_answer(self, _change: Any) -> None:
        with self._lock:
            upto = min(choice.answered for choice in self._choices)
            due = [self._open.pop(number) for number in sorted(self._open) if number <= upto]
        for action in due:
            self._answered(action)
