"""The source of both sides around the lines that differ, side by side, as HTML."""

from __future__ import annotations

import html
import linecache
from collections.abc import Callable, Sequence

from graftlab.base.jupyter import file_link
from graftlab.verdict.lines import DifferingLine, notes_on, only_here_in_words

AROUND = 3
"""How many lines of source are shown before and after each line."""
_GRID = "display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,30em),1fr));gap:0.5em 1.5em;margin:0.6em 0"
_PRE = "overflow-x:auto;margin:0.2em 0;font-size:12px;line-height:1.45"


def source_view(lines: Sequence[DifferingLine], link: Callable[[str, str], str] = file_link) -> str:
    """Return the lines of each group, the target's beside the baseline's, each marked in its source.

    ``link`` makes HTML from a file's path and the text that names it.
    """
    groups = dict.fromkeys(line.group for line in lines)
    return "".join(_group(group, [line for line in lines if line.group == group], link) for group in groups)


def _group(group: str, lines: Sequence[DifferingLine], link: Callable[[str, str], str]) -> str:
    columns = []
    for side in ("target", "baseline"):
        of_side = [_excerpt(line, link) for line in lines if line.side == side]
        columns.append(f'<div style="min-width:0">{"".join(of_side)}</div>' if of_side else "")
    title = f"Where {html.escape(group)} first differs"
    return (
        f'<section class="graftlab-lines" aria-label="{title}"><p>{title}:</p>'
        f'<div style="{_GRID}">{"".join(columns)}</div></section>'
    )


def _excerpt(line: DifferingLine, link: Callable[[str, str], str]) -> str:
    place = link(line.file, str(line.stack[0]))
    notes = [*([_confirmation(line)] if line.confirmed else []), *notes_on(line)]
    note = html.escape("; ".join(notes))
    shown = "\n".join(_numbered(number, text, number == line.line) for number, text in _source_around(line))
    return (
        f'<div class="graftlab-line"><b>{line.side}</b> {place}{f" ({note})" if note else ""}'
        f'<pre style="{_PRE}" title="{html.escape(line.file, quote=True)}">{shown}</pre>'
        f'<div style="font-size:12px;overflow-wrap:anywhere">{html.escape(line.operation)}</div></div>'
    )


def _confirmation(line: DifferingLine) -> str:
    if line.is_only_here:
        without = "without it" if line.side == "target" else "with it"
        return f"confirmed: {only_here_in_words(line)}, and {without} the tap agrees"
    return "confirmed: with the baseline's value there, the tap agrees"


def _numbered(number: int, text: str, is_marked: bool) -> str:
    shown = f"{number:>5}  {html.escape(text)}"
    # The arrow is for readers who cannot see the mark's colour.
    return f"<mark>▶{shown[1:]}</mark>" if is_marked and shown[0] == " " else shown


def _source_around(line: DifferingLine) -> list[tuple[int, str]]:
    """Return lines of source by their numbers; only the line itself if the file here is not the one that ran."""
    known = [each.rstrip("\n") for each in linecache.getlines(line.file)]
    if not (0 < line.line <= len(known) and known[line.line - 1].strip() == line.source):
        return [(line.line, line.source)]
    first = max(1, line.line - AROUND)
    around = list(enumerate(known[first - 1 : line.line + AROUND], start=first))
    # Remove the common indent.
    indent = min((len(text) - len(text.lstrip()) for _, text in around if text.strip()), default=0)
    return [(number, text[indent:]) for number, text in around]
