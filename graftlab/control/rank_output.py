"""Output of the ranks, shown in the cell that waits for them, in order and labelled by rank."""

from __future__ import annotations

from collections.abc import Callable

from graftlab.base.live import LiveText, publisher
from graftlab.ranks.messages import DisplayData, LiveOutput, Output

Piece = Output | LiveOutput | DisplayData

# The forms shown of ranks that this notebook did not start: none that a browser could run.
_HARMLESS = frozenset({"text/plain", "image/png", "image/jpeg"})


class RankOutput:
    """Shows pieces of output until it is closed. Each stream of a rank has one live area for its progress bars."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write
        self._bars: dict[tuple[str, int], LiveText] = {}

    def show(self, pieces: list[tuple[str, bool, Piece]]) -> None:
        """Show pieces, each with the label of its rank and whether that rank is trusted."""
        # Only the last state of each bar.
        last = {(label, piece.stream): piece.text for label, _, piece in pieces if isinstance(piece, LiveOutput)}
        for label, trusted, piece in pieces:
            if isinstance(piece, Output):
                self._write("".join(f"{label} | {line}\n" for line in piece.text.splitlines()))
            elif isinstance(piece, DisplayData):
                self._display(label, piece.data if trusted else _harmless(piece.data))
        for (label, stream), text in last.items():
            place = self._bars.setdefault((label, stream), LiveText())
            place.show("\n".join(f"{label} | {line}" for line in text.splitlines()))

    def close(self) -> None:
        """Remove the bars, whose last state was also sent as a line."""
        for place in self._bars.values():
            place.show("")

    def _display(self, label: str, data: dict[str, str]) -> None:
        publish = publisher()
        if publish is None:
            lines = data.get("text/plain", "").splitlines()
            self._write("".join(f"{label} | {line}\n" for line in lines))
            return
        self._write(f"{label} |\n")
        publish(data)


def _harmless(data: dict[str, str]) -> dict[str, str]:
    return {kind: value for kind, value in data.items() if kind in _HARMLESS}
