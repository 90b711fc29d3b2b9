"""Building blocks of HTML renderings: tables, cells, MIME bundles."""

from __future__ import annotations

import html
import math
from collections.abc import Container

# Titles of columns whose cells are numbers.
_NUMBERS = frozenset(
    {
        "step",
        "plan",
        "plan_version",
        "taps",
        "rel_l2",
        "non-finite",
        "added",
        "floor",
        "ratio",
        "alone",
        "order",
    }
)
# JupyterLab's own style sheet aligns all text in tables to the right, and breaks numbers at the minus sign.
_LEFT, _RIGHT = "text-align:left", "text-align:right;white-space:nowrap"


def bundle(plain: str, rich: str) -> dict[str, str]:
    """Return a MIME bundle for ``_repr_mimebundle_``."""
    return {"text/plain": plain, "text/html": rich}


def table(head: tuple[str, ...], lines: list[str], numbers: Container[str] = ()) -> str:
    """Return a table of these rows; it has a header only if some title is not empty.

    Columns in ``numbers``, and those whose title is always numeric, are right-aligned.
    """
    titles = "".join(_cell("th", title, "number" if title in _NUMBERS or title in numbers else "") for title in head)
    above = f"<thead><tr>{titles}</tr></thead>" if any(head) else ""
    return f"<table>{above}<tbody>{''.join(lines)}</tbody></table>"


def cell(value: object, kind: str = "") -> str:
    """Return a table cell; cells of the kind ``number`` are right-aligned and never wrapped."""
    return _cell("td", html.escape(str(value)), kind)


def marked_up(markup: str) -> str:
    """Return a cell whose text is already markup."""
    return _cell("td", markup, "")


def rest_of(count: int, of: str, see: str) -> list[str]:
    """Return the last row of a shortened table: how many rows it omits, and where to see them; empty for none."""
    if count <= 0:
        return []
    text = f"and {count:,} {of} more: <code>{html.escape(see)}</code>"
    return [f'<tr><td colspan="9" style="{_LEFT}">{text}</td></tr>']


def _cell(tag: str, markup: str, kind: str) -> str:
    style = _RIGHT if "number" in kind.split() else _LEFT
    return f'<{tag} class="{kind}" style="{style}">{markup}</{tag}>'


def number(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.2e}"
