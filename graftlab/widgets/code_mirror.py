"""What the kernel and the browser's CodeMirror tell each other; the browser's half of it is ``js/editor.js``.

The browser speaks in custom messages only, because the synchronisation of traits is throttled: under a busy
kernel it delivers an old text, while custom messages all arrive, in order. Each is a dict with

- ``type``: ``"changed"`` (the person has paused typing) or ``"submit"`` (``action`` says which key or button),
- ``text``: the whole source, so that no message depends on another one having arrived,
- ``serial``: a number that grows; ``acknowledged`` answers with it,
- ``revision``: of the last text from the kernel that this browser shows; it is behind the kernel's where the person
  typed before an offer came,
- ``page``: which browser page it was typed in,
- ``request``: the number of the kernel's request that a ``"submit"`` answers, or ``None``.

The kernel speaks in traits only, because the browser applies those in order, and finds them after a reload.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anywidget
import traitlets

BUNDLE = Path(__file__).parent / "static" / "code_editor.bundle.js"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EditorMessage:
    """One message of the browser. ``action`` is ``None`` in a ``"changed"`` message."""

    text: str
    serial: int
    revision: int
    page: str
    action: str | None = None
    request: int | None = None

    @classmethod
    def read(cls, content: Any) -> EditorMessage | None:
        """The message in ``content``, or ``None``, and a line in the log, where it is none of ours."""
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
            logger.warning("the code editor sent a message that cannot be read: %s", error)
            return None


class CodeMirror(anywidget.AnyWidget):
    """The state that the browser shows. Making one needs the bundle."""

    _esm = traitlets.Unicode().tag(sync=True)
    # ``page`` is where the text was typed, so that the page itself does not take its own older text for news;
    # "" is the kernel. ``over`` is None, or, in an offer, the text that a page must still show to take this one.
    document = traitlets.Dict({"text": "", "revision": 0, "page": "", "over": None}).tag(sync=True)
    acknowledged = traitlets.Int(0).tag(sync=True)
    # A trait, not a message: it must not overtake a document that was set before it.
    request = traitlets.Dict({"number": 0, "action": ""}).tag(sync=True)
    error: traitlets.Dict[str, Any] = traitlets.Dict({"line": None, "message": ""}).tag(sync=True)
    completions = traitlets.List(traitlets.Unicode()).tag(sync=True)
    read_only = traitlets.Bool(False).tag(sync=True)
    dark = traitlets.Bool(None, allow_none=True).tag(sync=True)
    language = traitlets.Unicode("python").tag(sync=True)
    lines = traitlets.Int(16).tag(sync=True)
    label = traitlets.Unicode("Editor").tag(sync=True)

    @traitlets.default("_esm")
    def _script(self) -> str:
        return BUNDLE.read_text(encoding="utf-8")
