"""The little HTML that renderings are made of."""

from __future__ import annotations

import html
import math

# Titles of columns whose cells are numbers.
_NUMBERS = frozenset({"step", "plan", "taps", "rel_l2", "max_abs", "non-finite"})


def bundle(plain: str, rich: str) -> dict[str, str]:
    """A MIME bundle for ``_repr_mimebundle_``."""
    return {"text/plain": plain, "text/html": rich}


def table(head: tuple[str, ...], lines: list[str]) -> str:
    titles = "".join(f'<th class="{"number" if title in _NUMBERS else ""}">{title}</th>' for title in head)
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def cell(value: object, kind: str = "") -> str:
    return f'<td class="{kind}">{html.escape(str(value))}</td>'


def number(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.2e}"


def shortened(text: str, limit: int) -> str:
    """Without its middle: the beginnings and the ends of module names tell them apart."""
    return text if len(text) <= limit else f"{text[: limit // 2 - 1]}…{text[-limit // 2 :]}"
