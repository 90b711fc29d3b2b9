"""The code editor on CodeMirror, with colours, line numbers and completion."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import traitlets

from graftlab.widgets.editor import CodeEditor

if TYPE_CHECKING:
    from graftlab.widgets.code_mirror import CodeMirror, Sent


class CodeMirrorEditor(CodeEditor):
    """The editor with colours, line numbers and completion. Needs anywidget and the bundled script.

    Every message of the browser has the whole source in it, so a submit brings its own text (see
    :mod:`graftlab.widgets.code_mirror`).

    Keys: Ctrl/Cmd-Enter submits ``"apply"``, Shift-Ctrl/Cmd-Enter ``"try"`` (neither while read-only), Tab
    indents or accepts a completion, Escape and then Tab leaves the editor.
    """

    def _build(self, language: str, lines: int, label: str) -> None:
        from graftlab.widgets.code_mirror import CodeMirror

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

    def ask(self, action: str, answer: Callable[[str], object]) -> None:
        with self._lock:
            self._requests += 1
            self._unanswered[self._requests] = answer
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
        answer = None
        with self._lock:
            # Before the callbacks: the kernel has the message, whatever they make of it.
            self._front.acknowledged = sent.serial
            self.set_trait("acknowledged", sent.serial)
            if sent.request is not None and (answer := self._unanswered.pop(sent.request, None)) is None:
                return  # another page was faster
            changed = False
            if sent.revision >= self._settled:
                self.offer_declined = sent.revision < self._revision
                changed = self._store(sent.text)
                # A page that is opened or reloaded later starts with this.
                self._front.document = self._document(sent.text, sent.page)
        if changed:
            self._call(self._on_change, sent.text)
        if answer is not None:
            self._call([answer], sent.text)
        elif sent.action is not None:
            self._call(self._on_submit, sent.text, sent.action)
