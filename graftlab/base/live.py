"""Live text in a cell's output, updated in place. It is not a widget, which a saved notebook could not show."""

from __future__ import annotations

import html
import sys
import uuid
from collections.abc import Callable
from typing import Any

# Even an empty output has the height of a line, and so has the output area of a cell that contains nothing else.
_NOTHING = """<span class="graftlab-gone"></span><style>
.jp-OutputArea-child:has(.graftlab-gone) { display: none }
.jp-Cell-outputWrapper:has(.jp-OutputArea-child:only-child .graftlab-gone) { display: none }
</style>"""
_STYLE = "margin:0;font-size:var(--jp-code-font-size,13px);white-space:pre-wrap"


def publisher() -> Callable[..., Any] | None:
    """Return the function that displays a MIME bundle in this notebook; None outside a notebook."""
    shell = sys.modules.get("IPython.core.getipython")
    if shell is None or getattr(shell.get_ipython(), "kernel", None) is None:
        return None
    from IPython.display import publish_display_data

    made: Callable[..., Any] = publish_display_data
    return made


class LiveText:
    """Shows text in a notebook and replaces it with each update; does nothing outside a notebook."""

    def __init__(self) -> None:
        self._id: str | None = None
        self._shown = ""

    def show(self, text: str) -> None:
        """Show this text; an empty text removes the output and its height."""
        publish = publisher()
        if publish is None or text == self._shown:
            return
        is_new = self._id is None
        self._id = self._id or f"graftlab-{uuid.uuid4().hex}"
        self._shown = text
        markup = f'<pre class="graftlab-live" style="{_STYLE}">{html.escape(text)}</pre>' if text else _NOTHING
        transient = {"display_id": self._id}
        publish({"text/plain": text, "text/html": markup}, transient=transient, update=not is_new)
