"""A place in a cell's output whose text is renewed, and that leaves nothing behind: no widget that a saved notebook
would miss."""

from __future__ import annotations

import html
import sys
import uuid
from collections.abc import Callable
from typing import Any

# An output without text has the height of a line all the same, and so has the part of a cell that holds no other one.
_NOTHING = """<span class="graftlab-gone"></span><style>
.jp-OutputArea-child:has(.graftlab-gone) { display: none }
.jp-Cell-outputWrapper:has(.jp-OutputArea-child:only-child .graftlab-gone) { display: none }
</style>"""
_STYLE = "margin:0;font-size:var(--jp-code-font-size,13px);white-space:pre-wrap"


def publisher() -> Callable[..., Any] | None:
    """What shows a bundle in this notebook; None outside of one."""
    shell = sys.modules.get("IPython.core.getipython")
    if shell is None or getattr(shell.get_ipython(), "kernel", None) is None:
        return None
    from IPython.display import publish_display_data

    made: Callable[..., Any] = publish_display_data
    return made


class LiveText:
    """Shows text in a notebook, in the place of the one before; outside of a notebook nothing."""

    def __init__(self) -> None:
        self._id: str | None = None
        self._shown = ""

    def show(self, text: str) -> None:
        """Show this; the empty text leaves the place empty, and without a height."""
        publish = publisher()
        if publish is None or text == self._shown:
            return
        is_new = self._id is None
        self._id = self._id or f"graftlab-{uuid.uuid4().hex}"
        self._shown = text
        markup = f'<pre class="graftlab-live" style="{_STYLE}">{html.escape(text)}</pre>' if text else _NOTHING
        transient = {"display_id": self._id}
        publish({"text/plain": text, "text/html": markup}, transient=transient, update=not is_new)
