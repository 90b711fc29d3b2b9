"""Reading what the browser shows at this moment, before something is done with it.

A click on a button comes to the kernel at once. A change of a choice or of a text does not: ipywidgets holds it back as
long as the kernel has not worked off the one before it. So at the click the kernel may have an older text than the
person sees. Whatever acts on a click therefore asks the browser first, and acts when the answers have come. That is
solved here once, for every panel.

Anything with an ``ask`` can be read. The code editors have one of their own; the choices of this module raise the
number ``asked``, a link that runs in the browser copies it to ``answered``, and that copy goes through the same queue
as the choice. When it arrives, every choice that was made before it has arrived too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import ipywidgets as widgets
import traitlets


class Askable(Protocol):
    """What can be asked for what the browser shows of it."""

    def ask(self, action: str, answer: Callable[[Any], object]) -> None:
        """Call ``answer(value)`` once, when the browser has told; ``action`` says what for.

        Without a browser there is no answer. Several pages may show the widget; the first answer counts.
        """


class Asked(widgets.Widget):  # type: ignore[misc]
    """What makes a widget with a ``value`` one that can be asked."""

    asked = traitlets.Int(0).tag(sync=True)
    answered = traitlets.Int(0).tag(sync=True)

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._waiting: dict[int, Callable[[Any], object]] = {}
        self._waiting_lock = threading.RLock()
        super().__init__(*arguments, **options)
        self._link = widgets.jsdlink((self, "asked"), (self, "answered"))
        self.observe(self._on_answered, "answered")

    def ask(self, action: str, answer: Callable[[Any], object]) -> None:
        with self._waiting_lock:
            number = self.asked + 1
            self._waiting[number] = answer
            self.asked = number

    @property
    def is_waiting(self) -> bool:
        """Whether there are questions that the browser has not answered."""
        return bool(self._waiting)

    def close(self) -> None:
        self._link.close()
        super().close()

    def _on_answered(self, _change: Any) -> None:
        with self._waiting_lock:
            value = self.value
            due = [self._waiting.pop(number) for number in sorted(self._waiting) if number <= self.answered]
        for answer in due:
            answer(value)


class Line(Asked, widgets.Text):  # type: ignore[misc]
    """A line of text."""


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


class _Reading:
    """One question to all inputs, and what has been answered so far."""

    def __init__(self, action: str, known: Mapping[str, Any]) -> None:
        self.action = action
        self.values = dict(known)
        self.is_of_a_key = bool(known)


class Inputs:
    """The inputs of a panel, which are read together.

    ``done(action, values)`` is called with the values of all, by their names here. Any thread may ask.
    """

    def __init__(self, inputs: Mapping[str, Askable], done: Callable[[str, dict[str, Any]], object]) -> None:
        self._inputs = dict(inputs)
        self._done = done
        self._lock = threading.RLock()
        self._newest: dict[str, _Reading] = {}

    def read(self, action: str, **known: Any) -> None:
        """Ask every input but those whose value is known, because it came along with a key.

        A click that is repeated while the first one is not answered yet counts once.
        """
        reading = _Reading(action, known)
        missing = [name for name in self._inputs if name not in known]
        with self._lock:
            if not reading.is_of_a_key:
                self._newest[action] = reading
        if not missing:
            self._done(action, dict(reading.values))
        for name in missing:
            self._inputs[name].ask(action, partial(self._on_answer, reading, name))

    def _on_answer(self, reading: _Reading, name: str, value: Any) -> None:
        with self._lock:
            reading.values[name] = value
            if len(reading.values) < len(self._inputs):
                return
            overtaken = not reading.is_of_a_key and self._newest.get(reading.action) is not reading
        if not overtaken:
            self._done(reading.action, dict(reading.values))
