"""Reads from the browser what its inputs show at this moment, before a panel acts on it.

A click on a button reaches the kernel at once. A change of a choice or of a text does not: ipywidgets holds it back
until the kernel has processed the change before it. So at a click the kernel may have an older text than the person
sees. A panel that acts on a click therefore first requests the values from the browser, and acts when they arrive.

Every input has a ``fetch``. The code editors have their own; the widgets of this module raise the number ``requested``,
a link that runs in the browser copies it to ``answered``, and that copy passes through the same queue as the value.
When it arrives, every change that was made before it has arrived too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import ipywidgets as widgets
import traitlets


class PanelInput(Protocol):
    """An input whose value can be fetched from the browser."""

    def fetch(self, action: str, deliver: Callable[[Any], object]) -> None:
        """Call ``deliver(value)`` once, when the browser has sent its value; ``action`` names the purpose.

        Without a browser no value comes. Several pages may show the widget; the first answer counts.
        """


class BrowserInput(widgets.Widget):  # type: ignore[misc]
    """A base for widgets with a ``value``: lets that value be fetched from the browser."""

    requested = traitlets.Int(0).tag(sync=True)
    answered = traitlets.Int(0).tag(sync=True)

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._waiting: dict[int, Callable[[Any], object]] = {}
        self._waiting_lock = threading.RLock()
        super().__init__(*arguments, **options)
        self._link = widgets.jsdlink((self, "requested"), (self, "answered"))
        self.observe(self._on_answered, "answered")

    def fetch(self, action: str, deliver: Callable[[Any], object]) -> None:
        with self._waiting_lock:
            number = self.requested + 1
            self._waiting[number] = deliver
            self.requested = number

    def close(self) -> None:
        self._link.close()
        super().close()

    def _on_answered(self, _change: Any) -> None:
        with self._waiting_lock:
            value = self.value
            due = [self._waiting.pop(number) for number in sorted(self._waiting) if number <= self.answered]
        for deliver in due:
            deliver(value)


class TextInput(BrowserInput, widgets.Text):  # type: ignore[misc]
    """A field for one line of text."""


class ChoiceButtons(BrowserInput, widgets.ToggleButtons):  # type: ignore[misc]
    """A row of buttons for a single choice."""


class NameBox(BrowserInput, widgets.Combobox):  # type: ignore[misc]
    """A field for one line of text, with suggestions."""


class Menu(BrowserInput, widgets.Dropdown):  # type: ignore[misc]
    """A choice from a list. While ``filling`` is true, a change of ``value`` is not the person's choice."""

    filling = False

    def fill(self, options: Sequence[tuple[str, Any]], value: Any) -> None:
        """Replace the options and choose ``value``, or the first option where ``value`` is none of them."""
        values = [option for _, option in options]
        self.filling = True
        try:
            with self.hold_sync():
                self.options = options
                self.value = value if value in values else values[0] if values else None
        finally:
            self.filling = False


class _ValuesRequest:
    """One request for the values of all inputs, and the answers so far."""

    def __init__(self, action: str, known: Mapping[str, Any]) -> None:
        self.action = action
        self.values = dict(known)
        self.is_from_key = bool(known)


class Inputs:
    """The inputs of a panel, which are read together.

    Calls ``done(action, values)`` with the values of all inputs by name. Any thread may call :meth:`read`.
    """

    def __init__(self, inputs: Mapping[str, PanelInput], done: Callable[[str, dict[str, Any]], object]) -> None:
        self._inputs = dict(inputs)
        self._done = done
        self._lock = threading.RLock()
        self._newest: dict[str, _ValuesRequest] = {}

    def read(self, action: str, **known: Any) -> None:
        """Fetch every input except those in ``known``, whose values came with a key press.

        A click that is repeated before the first one is answered counts once.
        """
        request = _ValuesRequest(action, known)
        missing = [name for name in self._inputs if name not in known]
        with self._lock:
            if not request.is_from_key:
                self._newest[action] = request
        if not missing:
            self._done(action, dict(request.values))
        for name in missing:
            self._inputs[name].fetch(action, partial(self._on_value, request, name))

    def _on_value(self, request: _ValuesRequest, name: str, value: Any) -> None:
        with self._lock:
            request.values[name] = value
            if len(request.values) < len(self._inputs):
                return
            replaced = not request.is_from_key and self._newest.get(request.action) is not request
        if not replaced:
            self._done(request.action, dict(request.values))
