"""The messages and traits between the kernel and the browser's CodeMirror, whose half is ``js/editor.js``.

The browser only sends custom messages, because the synchronisation of traits is throttled: under a busy
kernel it delivers an old text, while custom messages all arrive, in order. Each is a dict with

- ``type``: ``"changed"`` (the person has paused typing) or ``"submit"`` (``action`` names the key or button),
- ``text``: the whole source, so that no message depends on an earlier one,
- ``serial``: an increasing number; ``acknowledged`` repeats it,
- ``revision``: of the last text from the kernel that this browser shows; lower than the kernel's if the person
  typed before an offer arrived,
- ``page``: the browser page in which the text was typed,
- ``request``: the number of the kernel's request that a ``"submit"`` answers, or ``None``.

The kernel only sets traits, because the browser applies them in order and still has them after a reload.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import traitlets

from graftlab.widgets.scripts import Script, ScriptedWidget, shared

BUNDLE = Path(__file__).parent / "static" / "code_editor.bundle.js"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EditorMessage:
    """One message from the browser. ``action`` is ``None`` in a ``"changed"`` message."""

    text: str
    serial: int
    revision: int
    page: str
    action: str | None = None
    request: int | None = None

    @classmethod
    def read(cls, content: Any) -> EditorMessage | None:
        """Read a message; log and return ``None`` if ``content`` is malformed."""
        try:
            kind, text, request = content["type"], content["text"], content.get("request")
            if kind not in ("changed", "submit") or not isinstance(text, str):
                raise ValueError(f"type {kind!r} with a text of {type(text).__name__}")
            return cls(
                text=text,
                serial=int(content["serial"]),
                revision=int(content["revision"]),
                page=str(content["page"]),
                action=str(content["action"]) if kind == "submit" else None,
                request=None if request is None else int(request),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            logger.warning("the code editor sent a malformed message: %s", error)
            return None


class CodeMirror(ScriptedWidget):
    """The state that the browser shows. Needs the bundle."""

    # ``page`` is where the text was typed, so that a page does not mistake its own older text for a new one;
    # "" is the kernel. ``over`` is None, or, in an offer, the text that a page must still show to accept this one.
    document = traitlets.Dict({"text": "", "revision": 0, "page": "", "over": None}).tag(sync=True)
    acknowledged = traitlets.Int(0).tag(sync=True)
    # A trait, not a message: it must not arrive before a document that was set earlier.
    request = traitlets.Dict({"number": 0, "action": ""}).tag(sync=True)
    error: traitlets.Dict[str, Any] = traitlets.Dict({"line": None, "message": ""}).tag(sync=True)
    completions = traitlets.List(traitlets.Unicode()).tag(sync=True)
    read_only = traitlets.Bool(False).tag(sync=True)
    dark = traitlets.Bool(None, allow_none=True).tag(sync=True)
    language = traitlets.Unicode("python").tag(sync=True)
    lines = traitlets.Int(16).tag(sync=True)
    label = traitlets.Unicode("Editor").tag(sync=True)

    @traitlets.default("script")
    def _script(self) -> Script:
        return shared(BUNDLE.read_text(encoding="utf-8"))
