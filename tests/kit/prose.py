"""Pages of prose with code in them: what their blocks are, and what a reader sees who types them in.

A block of ``python`` is a notebook's cell, with magics or without. One that raises is marked after the language, and
the ``text`` block after it is the message; after any other block it is what the cell shows. In such a text ``...``
stands for anything, and how it is broken into lines does not count. A block that cannot run where the tests run comes
after a paragraph that begins with "Not run by the tests", and says why.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from pathlib import Path

from kit.kernels import Reply

_FENCE = re.compile(r"^(?P<fence>`{3,}|~{3,})\s*(?P<info>.*)$")
_NOT_RUN = "*Not run by the tests"


@dataclass(frozen=True)
class Block:
    """A fenced block. ``line`` is that of its fence, from 1; ``paragraph`` the text that it comes after, if any."""

    page: Path
    line: int
    info: str
    text: str
    paragraph: str = ""

    @property
    def language(self) -> str:
        return self.info.partition(" ")[0]

    @property
    def raises(self) -> bool:
        return "raises" in self.info.split()[1:]

    @property
    def is_run(self) -> bool:
        return not self.paragraph.startswith(_NOT_RUN)

    def __str__(self) -> str:
        return f"{self.page.name}, line {self.line}"


def blocks(page: Path) -> list[Block]:
    """Every fenced block of a page, in order. Raises ValueError for one that is never closed."""
    found: list[Block] = []
    paragraph: list[str] = []
    ended = False
    opened: tuple[int, str, str] | None = None
    body: list[str] = []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        fence = _FENCE.match(line)
        if opened is not None:
            at, mark, info = opened
            if fence is not None and fence["fence"].startswith(mark) and not fence["info"]:
                found.append(Block(page, at, info, "\n".join(body), "\n".join(paragraph)))
                opened, paragraph, body = None, [], []
            else:
                body.append(line)
        elif fence is not None:
            opened = (number, fence["fence"], fence["info"].strip())
        elif line.strip():
            if ended:
                paragraph = []
            paragraph.append(line)
        ended = not line.strip()
    if opened is not None:
        raise ValueError(f"{page.name}, line {opened[0]}: this block has no end")
    return found


def cells(page: Path) -> list[tuple[Block, str | None]]:
    """The cells of a page that run, each with what it shows or raises by the page."""
    found = blocks(page)
    return [
        (block, _shown_by(block, following))
        for block, following in itertools.zip_longest(found, found[1:])
        if block.language == "python" and block.is_run
    ]


def _shown_by(block: Block, following: Block | None) -> str | None:
    # Nothing stands between a cell and what it shows.
    if following is None or following.language != "text" or following.paragraph:
        return None
    return following.text


def fits(expected: str, shown: str) -> bool:
    """Whether this is what a page says, whatever stands in place of ``...`` and wherever lines are broken."""
    pattern = ".*".join(re.escape(" ".join(part.split())) for part in expected.split("..."))
    return re.fullmatch(pattern, " ".join(shown.split()), re.DOTALL) is not None


def error_of(reply: Reply) -> str:
    """What the notebook shows where a cell failed; empty where it did not."""
    if reply.error:
        return reply.error
    # Mistakes in a magic's line are printed.
    return reply.stderr if "UsageError:" in reply.stderr else ""


def shown_by(reply: Reply) -> str:
    """What the notebook shows below a cell, as text, but for widgets: a wait that is long shows a bar."""
    # Neither widgets nor the places of bars.
    values = [
        data["text/plain"]
        for data in reply.shown
        if "application/vnd.jupyter.widget-view+json" not in data and "graftlab-live" not in data.get("text/html", "")
    ]
    return "\n".join([reply.stdout, *values])
