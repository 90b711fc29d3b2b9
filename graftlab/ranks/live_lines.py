"""Lines that a program writes over and over, as a progress bar does: what stands there at this moment."""

from __future__ import annotations

import re

_PARTS = re.compile(r"\r|\n|\x1b\[A|\x1b\[[0-9;?]*[A-Za-z]|[^\r\n\x1b]+|\x1b")
_UP = "\x1b[A"
# A bar within bars takes a line each; what has been pushed up further than this is done.
_MOST_LINES = 8
_LONGEST = 1000


def is_live(text: str) -> bool:
    """Whether this goes back in its line, or to the one before, which text that only goes on does not."""
    return "\r" in text.replace("\r\n", "\n") or _UP in text


class LiveLines:
    """A few lines of a terminal, of which a bar writes one again and again, and nested bars one each."""

    def __init__(self) -> None:
        self._lines = [""]
        self._row = self._column = 0

    def write(self, text: str) -> str:
        """Take in what is written; returns the lines that nothing will be written over any more, with their ends."""
        done = ""
        for part in _PARTS.findall(text.replace("\r\n", "\n")):
            if part == "\r":
                self._column = 0
            elif part == "\n":
                self._row, self._column = self._row + 1, 0
                if self._row == len(self._lines):
                    self._lines.append("")
                if len(self._lines) > _MOST_LINES:
                    done += self._lines.pop(0).rstrip() + "\n"
                    self._row -= 1
            elif part == _UP:
                self._row = max(0, self._row - 1)
            elif not part.startswith("\x1b"):
                line = self._lines[self._row].ljust(self._column)
                self._lines[self._row] = (line[: self._column] + part + line[self._column + len(part) :])[:_LONGEST]
                self._column += len(part)
        return done

    @property
    def is_over(self) -> bool:
        """Whether it stands at the beginning of an empty line below all others: a bar may have ended its line."""
        return self._row == len(self._lines) - 1 and self._column == 0 and not self._lines[-1] and self._row > 0

    @property
    def text(self) -> str:
        """The lines as they stand."""
        return "\n".join(line.rstrip() for line in self._lines).rstrip("\n")
