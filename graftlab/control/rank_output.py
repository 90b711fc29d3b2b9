"""What ranks print and display, shown where somebody waits for them, labelled by rank and in order."""

from __future__ import annotations

import html
import sys
import uuid
from collections.abc import Callable
from typing import Any

from graftlab.ranks.messages import LiveOutput, Output, Shown

Piece = Output | LiveOutput | Shown

# Of a rank that this notebook did not start, nothing that a browser would run.
_HARMLESS = frozenset({"text/plain", "image/png", "image/jpeg"})


_STYLE = "margin:0;font-size:var(--jp-code-font-size,13px)"


class RankOutput:
    """Shows pieces until it is closed. Progress bars stand in a place of their own, one for each rank and stream."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write
        self._bars: dict[tuple[str, int], str] = {}
        self._shown: dict[tuple[str, int], str] = {}

    def show(self, pieces: list[tuple[str, bool, Piece]]) -> None:
        """Each with the label of its rank, and whether that rank is trusted."""
        # Of a bar only how it stands in the end.
        last = {(label, piece.stream): piece.text for label, _, piece in pieces if isinstance(piece, LiveOutput)}
        for label, trusted, piece in pieces:
            if isinstance(piece, Output):
                self._write("".join(f"{label} | {line}\n" for line in piece.text.splitlines()))
            elif isinstance(piece, Shown):
                self._display(label, piece.data if trusted else _harmless(piece.data))
        for (label, stream), text in last.items():
            self._bar(label, stream, text)

    def close(self) -> None:
        """Take the bars away: the lines that they end with were shown as lines."""
        for (label, stream), text in list(self._shown.items()):
            if text:
                self._bar(label, stream, "")

    def _display(self, label: str, data: dict[str, str]) -> None:
        publish = _publisher()
        if publish is None:
            lines = data.get("text/plain", "").splitlines()
            self._write("".join(f"{label} | {line}\n" for line in lines))
            return
        self._write(f"{label} |\n")
        publish(data)

    def _bar(self, label: str, stream: int, text: str) -> None:
        publish = _publisher()
        key = (label, stream)
        if publish is None or self._shown.get(key, "") == text:
            return
        lines = "\n".join(f"{label} | {line}" for line in text.splitlines())
        markup = f'<pre class="graftlab-live" style="{_STYLE}">{html.escape(lines)}</pre>' if text else ""
        is_new = key not in self._bars
        display_id = self._bars.setdefault(key, f"graftlab-{uuid.uuid4().hex}")
        publish({"text/plain": lines, "text/html": markup}, transient={"display_id": display_id}, update=not is_new)
        self._shown[key] = text


def _publisher() -> Callable[..., Any] | None:
    """What shows a bundle in this notebook; None outside of one."""
    shell = sys.modules.get("IPython.core.getipython")
    if shell is None or getattr(shell.get_ipython(), "kernel", None) is None:
        return None
    from IPython.display import publish_display_data

    made: Callable[..., Any] = publish_display_data
    return made


def _harmless(data: dict[str, str]) -> dict[str, str]:
    return {kind: value for kind, value in data.items() if kind in _HARMLESS}
