"""The code editor: several lines of source that a person edits in the browser.

It is CodeMirror, or a bare text area where CodeMirror's script was not built. Both keep one promise: **a submit
delivers the text that was on the screen, however busy the kernel is.**
"""

from __future__ import annotations

import html
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets as widgets
import traitlets

from graftlab.widgets import code_mirror
from graftlab.widgets.code_mirror import CodeMirror, EditorMessage
from graftlab.widgets.inputs import BrowserInput

LANGUAGES = ("python", "filter", "text")

NOT_BUILT = "CodeMirror was not built; building it takes npm (in graftlab's repository: python hatch_build.py)"
"""Shown beside a text area."""

logger = logging.getLogger(__name__)


def code_editor(value: str = "", *, language: str = "python", lines: int = 16, label: str = "") -> CodeEditor:
    """A CodeMirror editor, or a text area where CodeMirror's script was not built."""
    kind = CodeMirrorEditor if code_mirror.BUNDLE.is_file() else TextAreaEditor
    return kind(value, language=language, lines=lines, label=label)


class CodeEditor(widgets.VBox):  # type: ignore[misc]
    """What both editors share. Use :func:`code_editor` to make one.

    ``value`` is the initial text, ``language`` one of ``"python"``, ``"filter"`` and ``"text"``, ``lines`` the height,
    ``label`` the name for screen readers. ``"filter"`` is for one line, which wraps and takes no Enter or Tab. Raises
    ``ValueError`` for any other language.

    Callbacks run on the thread that takes the front end's messages, which differs between releases of ipykernel; they
    should only enqueue work. An exception in a callback is shown in the editor and logged.
    """

    value = traitlets.Unicode(read_only=True, help="The text as the kernel last had it: typed or set.")
    error_line = traitlets.Int(None, allow_none=True, min=1, help="The 1-based line that is marked, or None.")
    error_message = traitlets.Unicode(help="The error shown; empty for none.")
    completions = traitlets.List(traitlets.Unicode(), help="Names to complete besides the language's; may be dotted.")
    read_only = traitlets.Bool(False, help="The text can be read and copied, not changed.")
    dark = traitlets.Bool(None, allow_none=True, help="Dark colours; None follows JupyterLab's theme.")

    def __init__(self, value: str = "", *, language: str = "python", lines: int = 16, label: str = "") -> None:
        if language not in LANGUAGES:
            raise ValueError(f"the code editor has no language {language!r}: use one of {', '.join(LANGUAGES)}")
        self._on_submit: list[Callable[[str, str], object]] = []
        self._on_change: list[Callable[[str], object]] = []
        self._lock = threading.RLock()
        self.offer_declined = False
        super().__init__()
        self.set_trait("value", value)
        self.layout.width = "100%"
        self._build(language, lines, label or {"python": "Python editor", "filter": "Filter"}.get(language, "Editor"))

    # --- for the caller --------------------------------------------------------------

    def on_submit(self, callback: Callable[[str, str], object]) -> None:
        """Call ``callback(text, action)`` with each submit: a key in the editor, or an answer to :meth:`submit`."""
        self._on_submit.append(callback)

    def on_change(self, callback: Callable[[str], object]) -> None:
        """Call ``callback(text)`` when the person has changed the text.

        Not for every key: CodeMirror waits for a pause of 300 ms, the text area for the kernel. The last text always
        arrives. A submit with a new text calls this first. :meth:`set_text` does not call it.
        """
        self._on_change.append(callback)

    def submit(self, action: str = "apply") -> None:
        """Ask the browser for its text; the ``on_submit`` callbacks get it, with ``action``. For buttons.

        The answer comes later, and is the text on the screen, which may differ from ``value``. Without a browser no
        answer comes. Several browser pages may show the editor; only the first answer counts.
        """
        self.fetch(action, lambda text: self._call(self._on_submit, text, action))

    def fetch(self, action: str, deliver: Callable[[str], object]) -> None:
        """Like :meth:`submit`, but only ``deliver(text)`` is called."""
        raise NotImplementedError

    def set_text(self, text: str) -> None:
        """Replace the text in the browser, whatever it shows, and remove the error.

        A submit that was on its way is still delivered, with its own text. In CodeMirror, text typed before the browser
        shows ``text`` does not return to ``value``.
        """
        raise NotImplementedError

    def offer(self, text: str) -> None:
        """Replace the text in the browser, unless it shows typed text that the kernel does not have yet.

        ``value`` is ``text`` at once. If CodeMirror declines, the typed text arrives as a change, during which
        ``offer_declined`` is true. The text area never declines.
        """
        raise NotImplementedError

    def show_error(self, message: str, line: int | None = None) -> None:
        """Show ``message``, and mark the 1-based ``line`` if it is known."""
        with self.hold_trait_notifications():
            self.error_message = message
            self.error_line = line

    def clear_error(self) -> None:
        """Remove the error message and the mark."""
        self.show_error("")

    def close(self) -> None:
        """Remove the editor from the browser and close its widgets."""
        for child in self.children:
            child.close()
        super().close()

    # --- for the two editors -----------------------------------------------------------

    def _build(self, language: str, lines: int, label: str) -> None:
        raise NotImplementedError

    def _store(self, text: str) -> bool:
        """Take ``text`` from the browser, with the lock held. Returns whether it is new."""
        is_new: bool = text != self.value
        self.set_trait("value", text)
        return is_new

    def _call(self, callbacks: Sequence[Callable[..., object]], *arguments: str) -> None:
        """Run the callbacks, without the lock."""
        for callback in tuple(callbacks):
            try:
                callback(*arguments)
            except Exception as error:
                # ipywidgets would log it where no user looks, and the next callback still has to run.
                logger.exception("a callback of the code editor failed")
                name = getattr(callback, "__name__", repr(callback))
                self.show_error(f"{name} failed: {type(error).__name__}: {error}")


class CodeMirrorEditor(CodeEditor):
    """The editor with colours, line numbers and completion. Needs the bundled script.

    Every message of the browser contains the whole source, so a submit brings its own text (see
    :mod:`graftlab.widgets.code_mirror`).

    Keys: Ctrl/Cmd-Enter submits ``"apply"``, Shift-Ctrl/Cmd-Enter ``"try"`` (neither while read-only), Tab
    indents or accepts a completion, Escape and then Tab leaves the editor.
    """

    def _build(self, language: str, lines: int, label: str) -> None:
        self._revision = 0
        self._settled = 0  # the newest revision that was no offer, so that no page has declined it
        self._requests = 0
        self._unanswered: dict[int, Callable[[str], object]] = {}
        self._front: CodeMirror = CodeMirror(
            language=language, lines=lines, label=label, document=self._document(self.value)
        )
        self._front.on_msg(self._receive)
        for name in ("completions", "read_only", "dark"):
            traitlets.dlink((self, name), (self._front, name))
        self.observe(self._show_error, ["error_line", "error_message"])
        self.children = (self._front,)

    def fetch(self, action: str, deliver: Callable[[str], object]) -> None:
        with self._lock:
            self._requests += 1
            self._unanswered[self._requests] = deliver
            self._front.request = {"number": self._requests, "action": action}

    def set_text(self, text: str) -> None:
        with self._lock:
            self._revision += 1
            self._settled = self._revision
            self.set_trait("value", text)
            self._front.document = self._document(text)
        self.clear_error()

    def offer(self, text: str) -> None:
        with self._lock:
            self._revision += 1
            over = self.value
            self.set_trait("value", text)
            self._front.document = self._document(text, over=over)

    def _document(self, text: str, page: str = "", over: str | None = None) -> dict[str, Any]:
        return {"text": text, "revision": self._revision, "page": page, "over": over}

    def _show_error(self, _change: Any) -> None:
        self._front.error = {"line": self.error_line, "message": self.error_message}

    def _receive(self, _front: CodeMirror, content: Any, _buffers: Any) -> None:
        message = EditorMessage.read(content)
        if message is not None:
            self._take(message)

    def _take(self, message: EditorMessage) -> None:
        deliver = None
        with self._lock:
            # Before the callbacks: the kernel has the message, even if they fail.
            self._front.acknowledged = message.serial
            if message.request is not None and (deliver := self._unanswered.pop(message.request, None)) is None:
                return  # another page was faster
            changed = False
            if message.revision >= self._settled:
                self.offer_declined = message.revision < self._revision
                changed = self._store(message.text)
                # A page that is opened or reloaded later starts with this.
                self._front.document = self._document(message.text, message.page)
        if changed:
            self._call(self._on_change, message.text)
        if deliver is not None:
            self._call([deliver], message.text)
        elif message.action is not None:
            self._call(self._on_submit, message.text, message.action)


class _TextArea(BrowserInput, widgets.Textarea):  # type: ignore[misc]
    """A text area whose text can be fetched from the browser."""


class TextAreaEditor(CodeEditor):
    """A bare text area, for where CodeMirror's script was not built: no colours, keys or completion.

    Text that is typed while the kernel replaces the text may be lost.
    """

    def _build(self, language: str, lines: int, label: str) -> None:
        self._area = _TextArea(self.value, rows=lines, tooltip=label, layout=widgets.Layout(width="auto"))
        self._area.observe(self._on_typed, "value")
        traitlets.dlink((self, "read_only"), (self._area, "disabled"))
        self._error = widgets.HTML()
        self.observe(self._show_error, ["error_line", "error_message"])
        self.children = (self._area, self._error)
        self.add_class("graftlab-plain-editor")

    def fetch(self, action: str, deliver: Callable[[str], object]) -> None:
        self._area.fetch(action, lambda text: self._call([deliver], text))

    def set_text(self, text: str) -> None:
        self.offer(text)
        self.clear_error()

    def offer(self, text: str) -> None:
        with self._lock:
            self.set_trait("value", text)
            self._area.value = text

    def _on_typed(self, change: Any) -> None:
        with self._lock:
            is_new = self._store(change["new"])
        if is_new:
            self._call(self._on_change, change["new"])

    def _show_error(self, _change: Any) -> None:
        where = "" if self.error_line is None else f"line {self.error_line}: "
        text = html.escape(f"{where}{self.error_message}")
        shown = self.error_message or self.error_line is not None
        self._error.value = f'<div class="graftlab-error bad" role="alert">{text}</div>' if shown else ""
