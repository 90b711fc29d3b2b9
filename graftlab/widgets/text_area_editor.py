"""The code editor where CodeMirror is not there: a plain text area of ipywidgets.

It has only ipywidgets' synchronisation of traits, which holds a change back as long as the kernel has not worked off
the one before it. So it is asked for its text (see :mod:`graftlab.widgets.asked`). ``set_text`` has the opposite
trouble, a held-back change that would overwrite the new text; it puts a new text area in the place of the old one,
whose late messages then change nothing. An ``offer`` must not lose a held-back change, so it first asks, as a submit
does, and replaces the text area when the answer, if it was a prompt one, shows that nothing was typed.
"""

from __future__ import annotations

import html
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import ipywidgets as widgets

from graftlab.widgets.asked import Asked
from graftlab.widgets.editor import CodeEditor

# How old an answer to an offer may be, in seconds, for nothing to have been typed since.
_PROMPT = 0.5


class _TextArea(Asked, widgets.Textarea):  # type: ignore[misc]
    """The text area that is shown, or one that was replaced and whose last answers are still on their way."""

    def __init__(self, value: str, lines: int, label: str) -> None:
        layout = widgets.Layout(width="auto", height="auto")
        super().__init__(value, rows=lines, continuous_update=True, layout=layout, tooltip=label)
        self.meant: dict[str, str] = {}
        """Of a text that nobody has typed, what was offered in its place."""
        self.is_replaced = False


class TextareaEditor(CodeEditor):
    """The editor without colours, on ipywidgets alone. ``reason`` says under it why it is not the other one.

    It has no keys for submitting, completes nothing (``completions`` is kept, not shown), and shows the marked
    line in words.
    """

    def __init__(
        self, value: str = "", *, language: str = "python", lines: int = 16, label: str = "", reason: str = ""
    ) -> None:
        self.reason = reason
        super().__init__(value, language=language, lines=lines, label=label)

    def _build(self, language: str, lines: int, label: str) -> None:
        self._lines = lines
        self._label = label
        self._offered: tuple[str, str, float] | None = None  # an offer, the text that it is to replace, and its time
        self._text = self._text_area(self.value)
        self._error = widgets.HTML(layout=widgets.Layout(margin="0"))
        reason = f'<span class="graftlab-reason">{html.escape(self.reason)}</span>' if self.reason else ""
        self._reason = widgets.HTML(_STYLE + reason, layout=widgets.Layout(margin="0"))
        self.add_class("graftlab-plain-editor")
        self.observe(self._show_error, ["error_line", "error_message"])
        self.observe(self._lock_text, "read_only")
        self.observe(self._colour, "dark")
        self.children = (self._text, self._error, self._reason)

    def ask(self, action: str, answer: Callable[[str], object]) -> None:
        with self._lock:
            self._text.ask(action, partial(self._on_answer, self._text, answer))

    def set_text(self, text: str) -> None:
        with self._lock:
            self.set_trait("value", text)
            self._replace(text)
        self.clear_error()

    def offer(self, text: str) -> None:
        with self._lock:
            self._offered = text, self._text.value, time.monotonic()
            self._text.meant[self._text.value] = text
            self.set_trait("value", text)
            self._text.ask("offer", partial(self._on_answer, self._text, None))

    def _replace(self, text: str) -> None:
        old = self._text
        self._offered = None
        self._text = self._text_area(text)
        old.is_replaced = True
        self.children = (self._text, *self.children[1:])
        if not old.is_waiting:
            old.close()

    def _text_area(self, value: str) -> _TextArea:
        area = _TextArea(value, self._lines, self._label)
        area.disabled = self.read_only
        area.observe(lambda _: self._take(area), "value")
        return area

    def _on_answer(self, area: _TextArea, answer: Callable[[str], object] | None, _value: str) -> None:
        """The browser has told what it shows; without an ``answer`` it was asked because of an offer."""
        text = self._take(area, is_asked=True, is_offered=answer is None)
        if answer is not None:
            self._call([answer], text)

    def _take(self, area: _TextArea, is_asked: bool = False, is_offered: bool = False) -> str:
        """Take in what the text area has now; returns the text that is meant."""
        with self._lock:
            if not area.is_replaced:
                self._decide_on_offer(area, is_offered)
            arrived: str = area.value
            text = area.meant.get(arrived, arrived)
            if is_asked:
                self.set_trait("acknowledged", self.acknowledged + 1)
            changed = not area.is_replaced and self._store(text)
            if area.is_replaced and not area.is_waiting:
                area.close()
        if changed:
            self._call(self._on_change, text)
        return text

    def _decide_on_offer(self, area: _TextArea, is_answer: bool) -> None:
        """Accept or drop the offer, if there is one, by the text that came."""
        self.offer_declined = False
        if self._offered is None:
            return
        offered, over, since = self._offered
        if area.value not in (over, offered):
            self._offered = None
            self.offer_declined = True
            area.meant.clear()
        elif is_answer and time.monotonic() - since < _PROMPT:
            self._replace(offered)
        elif is_answer:
            # The kernel was busy for a while, in which something may have been typed that comes after this answer.
            self.offer(offered)

    def _show_error(self, _change: Any) -> None:
        message, line = self.error_message, self.error_line
        if not message and line is None:
            self._error.value = ""
            return
        source = self.value.split("\n")
        shown = f"<code>{html.escape(source[line - 1])}</code>" if line is not None and line <= len(source) else ""
        where = f"line {line}: " if line is not None else ""
        self._error.value = f'<div class="graftlab-error" role="alert">{where}{html.escape(message)}{shown}</div>'

    def _lock_text(self, change: Any) -> None:
        self._text.disabled = change["new"]

    def _colour(self, change: Any) -> None:
        for name, wanted in (("graftlab-dark", True), ("graftlab-light", False)):
            (self.add_class if change["new"] is wanted else self.remove_class)(name)


# ipywidgets has no trait for the font of a text area.
_STYLE = """<style>
.graftlab-plain-editor textarea {
  font-family: var(--jp-code-font-family, monospace); font-size: var(--jp-code-font-size, 13px);
  line-height: 1.45; tab-size: 4; white-space: pre; overflow-x: auto;
}
.graftlab-plain-editor.graftlab-light textarea { background: #fff; color: #1f2328; }
.graftlab-plain-editor.graftlab-dark textarea { background: #1b1e23; color: #dde1e6; }
.graftlab-plain-editor .graftlab-error {
  color: var(--jp-error-color1, #d32f2f); white-space: pre-wrap; line-height: 1.4;
}
.graftlab-plain-editor .graftlab-error code { display: block; white-space: pre; color: inherit; }
.graftlab-plain-editor .graftlab-reason { color: var(--jp-ui-font-color2, #757575); font-size: 12px; }
</style>"""
