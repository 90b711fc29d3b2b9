"""The interface of both code editors: several lines of source that a person edits in the browser."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets as widgets
import traitlets

LANGUAGES = ("python", "filter", "text")

logger = logging.getLogger(__name__)


class CodeEditor(widgets.VBox):  # type: ignore[misc]
    """Several lines of source that a person edits in the browser. Use :func:`.code_editor` to make one.

    Both editors keep this promise: **what a submit delivers is what was on the screen, however busy the kernel is.**
    Each has a way of its own to keep it.

    ``value`` is the text to start with, ``language`` one of ``"python"``, ``"filter"`` and ``"text"``, ``lines`` the
    height, ``label`` what a screen reader calls it. ``"filter"`` is for one line, which grows with its text; Enter and
    Tab are no part of that. Raises ``ValueError`` for another language.

    Callbacks run on whichever thread takes the front end's messages, which differs between releases of
    ipykernel; they should do no more than enqueue work. An exception in one is shown in the editor and logged.
    """

    value = traitlets.Unicode(read_only=True, help="The text as the kernel last had it: typed or set.")
    acknowledged = traitlets.Int(0, read_only=True, help="The number of the last submit or change that arrived.")
    error_line = traitlets.Int(None, allow_none=True, min=1, help="The 1-based line that is marked, or None.")
    error_message = traitlets.Unicode(help="What is shown as the error; empty for none.")
    completions = traitlets.List(traitlets.Unicode(), help="Names to complete besides the language's; may be dotted.")
    read_only = traitlets.Bool(False, help="The text can be read and copied, not changed.")
    dark = traitlets.Bool(None, allow_none=True, help="Dark colours; None follows JupyterLab's theme.")

    def __init__(self, value: str = "", *, language: str = "python", lines: int = 16, label: str = "") -> None:
        if language not in LANGUAGES:
            raise ValueError(f"the code editor knows no language {language!r}: use one of {', '.join(LANGUAGES)}")
        self._on_submit: list[Callable[[str, str], object]] = []
        self._on_change: list[Callable[[str], object]] = []
        self._lock = threading.RLock()
        self.offer_declined = False
        super().__init__()
        self.set_trait("value", value)
        self.layout.width = "100%"
        self._build(language, lines, label or {"python": "Python editor", "filter": "Filter"}.get(language, "Editor"))

    # --- for the caller --------------------------------------------------------------

    def on_submit(self, callback: Callable[[str, str], object], remove: bool = False) -> None:
        """Call ``callback(text, action)`` with each submit: a key in the editor, or an answer to :meth:`submit`."""
        _register(self._on_submit, callback, remove)

    def on_change(self, callback: Callable[[str], object], remove: bool = False) -> None:
        """Call ``callback(text)`` when the person has changed the text.

        Not for every key: CodeMirror waits for a pause of 300 ms, the text area for the kernel. The last text
        always arrives. A submit whose text is news comes here first. :meth:`set_text` does not call it.
        """
        _register(self._on_change, callback, remove)

    def submit(self, action: str = "apply") -> None:
        """Ask the browser for its text; the ``on_submit`` callbacks get it, with ``action``. For buttons.

        The answer comes later, and it is the text on the screen, which ``value`` need not be. Without a browser
        there is no answer. Several browser pages may show the editor; only the first answer counts.
        """
        self.ask(action, lambda text: self._call(self._on_submit, text, action))

    def ask(self, action: str, answer: Callable[[str], object]) -> None:
        """Like :meth:`submit`, but only ``answer(text)`` is called."""
        raise NotImplementedError

    def set_text(self, text: str) -> None:
        """Replace the text in the browser, whatever it shows, and take the error away.

        What was typed before the browser shows ``text`` does not come back into ``value``. A submit that was
        on its way then is still delivered, with its own text.
        """
        raise NotImplementedError

    def offer(self, text: str) -> None:
        """Replace the text in the browser, unless the person has typed something that the kernel has not heard of yet.

        ``value`` is ``text`` at once. If the browser declines, what was typed comes as a change, during which
        ``offer_declined`` is true.
        """
        raise NotImplementedError

    def show_error(self, message: str, line: int | None = None) -> None:
        """Show ``message``, and mark the 1-based ``line`` if it is known."""
        with self.hold_trait_notifications():
            self.error_message = message
            self.error_line = line

    def clear_error(self) -> None:
        """Take the error message and the mark away."""
        self.show_error("")

    def close(self) -> None:
        """Take the editor out of the browser and free what belongs to it."""
        for child in self.children:
            child.close()
        super().close()

    # --- for the two editors -----------------------------------------------------------

    def _build(self, language: str, lines: int, label: str) -> None:
        raise NotImplementedError

    def _store(self, text: str) -> bool:
        """Take ``text`` from the browser, with the lock held. Returns whether it is news."""
        news: bool = text != self.value
        self.set_trait("value", text)
        return news

    def _call(self, callbacks: Sequence[Callable[..., object]], *arguments: str) -> None:
        """Call back, without the lock."""
        for callback in tuple(callbacks):
            try:
                callback(*arguments)
            except Exception as error:
                # ipywidgets would log it where nobody looks, and the next callback still has to run.
                logger.exception("a callback of the code editor failed")
                name = getattr(callback, "__name__", repr(callback))
                self.show_error(f"{name} failed: {type(error).__name__}: {error}")


def _register(callbacks: list[Any], callback: Any, remove: bool) -> None:
    if not remove:
        callbacks.append(callback)
    elif callback in callbacks:
        callbacks.remove(callback)
