"""The code editor of the widgets: CodeMirror where its script is there, a plain text area where it is not.

``code_editor()`` picks. Both editors have the interface of :class:`CodeEditor` and keep its promises, above all
this one: **what a submit delivers is what was on the screen, however busy the kernel is.** Each has a way of its
own to keep it.

CodeMirror sends the whole source in the message of the submit (see :mod:`graftlab.widgets.code_mirror`).

A text area has only ipywidgets' synchronisation of traits, which holds a change back as long as the kernel has not
worked off the one before it. The click on a button is not held back, so at the click the kernel may still have the
text of a while ago. Therefore ``submit`` does not read the text: it raises the number ``asked`` in the text area's
model, a link that runs in the browser copies it to ``answered``, and that copy goes through the same queue as the
text. When it arrives, everything that was typed before it has arrived too. ``set_text`` has the opposite
trouble, a held-back change that would overwrite the new text; it puts a new text area in the place of the old one,
whose late messages then change nothing. An ``offer`` must not lose a held-back change, so it first asks, as a submit
does, and replaces the text area when the answer, if it was a prompt one, shows that nothing was typed.
"""

from __future__ import annotations

import html
import importlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets
import traitlets

if TYPE_CHECKING:
    from graftlab.widgets.code_mirror import CodeMirror, Sent

LANGUAGES = ("python", "filter", "text")

# What a text area is asked for an offer, in the place of a submit's action; and how old an answer may be, in seconds,
# for nothing to have been typed since.
_OFFER = "offer"
_PROMPT = 0.5

logger = logging.getLogger(__name__)


class CodeEditor(widgets.VBox):  # type: ignore[misc]
    """Several lines of source that a person edits in the browser; the interface of both editors.

    ``value`` is the text to start with, ``language`` one of ``"python"``, ``"filter"`` and ``"text"``, ``lines`` the
    height. ``"filter"`` is for one line, which grows with its text; Enter and Tab are no part of that. Raises
    ``ValueError`` for another language. Use :func:`code_editor` to make one.

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

    def __init__(self, value: str = "", *, language: str = "python", lines: int = 16) -> None:
        if language not in LANGUAGES:
            raise ValueError(f"the code editor knows no language {language!r}: use one of {', '.join(LANGUAGES)}")
        self._on_submit: list[Callable[[str, str], object]] = []
        self._on_change: list[Callable[[str], object]] = []
        self._lock = threading.RLock()
        self.offer_declined = False
        super().__init__()
        self.set_trait("value", value)
        self.layout.width = "100%"
        self._build(language, lines)

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

    def _build(self, language: str, lines: int) -> None:
        raise NotImplementedError

    def _store(self, text: str) -> bool:
        """Take ``text`` from the browser, with the lock held. Returns whether it is news."""
        news: bool = text != self.value
        self.set_trait("value", text)
        return news

    def _tell(self, text: str, changed: bool, actions: Iterable[str]) -> None:
        """Call back, without the lock."""
        if changed:
            self._call(self._on_change, text)
        for action in actions:
            self._call(self._on_submit, text, action)

    def _call(self, callbacks: Sequence[Callable[..., object]], *arguments: str) -> None:
        for callback in tuple(callbacks):
            try:
                callback(*arguments)
            except Exception as error:
                # ipywidgets would log it where nobody looks, and the next callback still has to run.
                logger.exception("a callback of the code editor failed")
                name = getattr(callback, "__name__", repr(callback))
                self.show_error(f"{name} failed: {type(error).__name__}: {error}")


class CodeMirrorEditor(CodeEditor):
    """The editor with colours, line numbers and completion. Needs anywidget and the bundled script.

    Keys: Ctrl/Cmd-Enter submits ``"apply"``, Shift-Ctrl/Cmd-Enter ``"try"`` (neither while read-only), Tab
    indents or accepts a completion, Escape and then Tab leaves the editor.
    """

    def _build(self, language: str, lines: int) -> None:
        from graftlab.widgets.code_mirror import CodeMirror

        self._revision = 0
        self._settled = 0  # the newest revision that was no offer, so that no page has declined it
        self._requests = 0
        self._unanswered: dict[int, str] = {}
        self._front: CodeMirror = CodeMirror(language=language, lines=lines, document=self._document(self.value))
        self._front.on_msg(self._receive)
        for name in ("completions", "read_only", "dark"):
            traitlets.dlink((self, name), (self._front, name))
        self.observe(self._show_error, ["error_line", "error_message"])
        self.children = (self._front,)

    def submit(self, action: str = "apply") -> None:
        with self._lock:
            self._requests += 1
            self._unanswered[self._requests] = action
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
        from graftlab.widgets.code_mirror import Sent

        sent = Sent.read(content)
        if sent is not None:
            self._take(sent)

    def _take(self, sent: Sent) -> None:
        with self._lock:
            # Before the callbacks: the kernel has the message, whatever they make of it.
            self._front.acknowledged = sent.serial
            self.set_trait("acknowledged", sent.serial)
            if sent.request is not None and self._unanswered.pop(sent.request, None) is None:
                return  # another page was faster
            changed = False
            if sent.revision >= self._settled:
                self.offer_declined = sent.revision < self._revision
                changed = self._store(sent.text)
                # A page that is opened or reloaded later starts with this.
                self._front.document = self._document(sent.text, sent.page)
        self._tell(sent.text, changed, [] if sent.action is None else [sent.action])


class _TextArea(widgets.Textarea):  # type: ignore[misc]
    """A text area whose model carries two numbers more; see the module's docstring."""

    asked = traitlets.Int(0).tag(sync=True)
    answered = traitlets.Int(0).tag(sync=True)

    def __init__(self, value: str, lines: int) -> None:
        super().__init__(value, rows=lines, continuous_update=True, layout=widgets.Layout(width="auto", height="auto"))
        self.unanswered: dict[int, str] = {}
        self.meant: dict[str, str] = {}
        """Of a text that nobody has typed, what was offered in its place."""
        self.retired = False
        self._link = widgets.jsdlink((self, "asked"), (self, "answered"))

    def close(self) -> None:
        self._link.close()
        super().close()


class TextareaEditor(CodeEditor):
    """The editor without colours, on ipywidgets alone. ``reason`` says under it why it is not the other one.

    It has no keys for submitting, completes nothing (``completions`` is kept, not shown), and shows the marked
    line in words.
    """

    def __init__(self, value: str = "", *, language: str = "python", lines: int = 16, reason: str = "") -> None:
        self.reason = reason
        super().__init__(value, language=language, lines=lines)

    def _build(self, language: str, lines: int) -> None:
        self._lines = lines
        self._asked = 0
        self._offered: tuple[str, str, float] | None = None  # an offer, the text that it is to replace, and its time
        self._text = self._text_area(self.value)
        self._error = widgets.HTML(layout=widgets.Layout(margin="0"))
        note = f'<span class="graftlab-note">{html.escape(self.reason)}</span>' if self.reason else ""
        self._note = widgets.HTML(_STYLE + note, layout=widgets.Layout(margin="0"))
        self.add_class("graftlab-plain-editor")
        self.observe(self._show_error, ["error_line", "error_message"])
        self.observe(self._lock_text, "read_only")
        self.observe(self._colour, "dark")
        self.children = (self._text, self._error, self._note)

    def submit(self, action: str = "apply") -> None:
        with self._lock:
            self._asked += 1
            self._text.unanswered[self._asked] = action
            self._text.asked = self._asked

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
            self.submit(_OFFER)

    def _replace(self, text: str) -> None:
        old = self._text
        self._offered = None
        self._text = self._text_area(text)
        old.retired = True
        self.children = (self._text, *self.children[1:])
        if not old.unanswered:
            old.close()

    def _text_area(self, value: str) -> _TextArea:
        area = _TextArea(value, self._lines)
        area.disabled = self.read_only
        area.observe(self._arrived, ["value", "answered"])
        return area

    def _arrived(self, change: Any) -> None:
        area: _TextArea = change["owner"]
        with self._lock:
            due = {number: action for number, action in area.unanswered.items() if number <= area.answered}
            for number in due:
                del area.unanswered[number]
            if not area.retired:
                self._settle(area, due.values())
            arrived: str = area.value
            text = area.meant.get(arrived, arrived)
            if due:
                self.set_trait("acknowledged", max(due))
            changed = not area.retired and self._store(text)
            if area.retired and not area.unanswered:
                area.close()
        self._tell(text, changed, [action for action in due.values() if action != _OFFER])

    def _settle(self, area: _TextArea, due: Iterable[str]) -> None:
        """Decide on the offer, if there is one, by the text that came."""
        self.offer_declined = False
        if self._offered is None:
            return
        offered, over, since = self._offered
        if area.value not in (over, offered):
            self._offered = None
            self.offer_declined = True
            area.meant.clear()
        elif _OFFER in due and time.monotonic() - since < _PROMPT:
            self._replace(offered)
        elif _OFFER in due:
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


def code_editor(value: str = "", *, language: str = "python", lines: int = 16, plain: bool = False) -> CodeEditor:
    """The best editor there is: CodeMirror, or, where that is missing, a text area that says why.

    ``plain=True`` asks for the text area, for a JupyterLab that runs in another environment than the kernel and
    has no anywidget there, which cannot be seen from the kernel. The rest is :class:`CodeEditor`'s.
    """
    if plain:
        return TextareaEditor(value, language=language, lines=lines)
    if reason := _missing():
        return TextareaEditor(value, language=language, lines=lines, reason=f"Plain text area: {reason}")
    return CodeMirrorEditor(value, language=language, lines=lines)


def _missing() -> str:
    """What CodeMirror lacks here and how to get it; empty if nothing."""
    try:
        code_mirror = importlib.import_module("graftlab.widgets.code_mirror")
    except ImportError as error:
        return f"anywidget cannot be imported ({error}); pip install 'graftlab[editor]' brings it."
    if not code_mirror.BUNDLE.is_file():
        return "the code editor was not built, which takes npm (in graftlab's repository: python hatch_build.py)."
    return ""


def _register(callbacks: list[Any], callback: Any, remove: bool) -> None:
    if not remove:
        callbacks.append(callback)
    elif callback in callbacks:
        callbacks.remove(callback)


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
.graftlab-plain-editor .graftlab-note { color: var(--jp-ui-font-color2, #757575); font-size: 12px; }
</style>"""
