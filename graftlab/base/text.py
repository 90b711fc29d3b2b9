"""Counts and names in running text."""

from __future__ import annotations

from collections.abc import Sequence


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: ``1 run``, ``2,000 runs``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def shortened(text: str, limit: int) -> str:
    """Shorten a text in its middle, because module names differ at the beginning and the end."""
    return text if len(text) <= limit else f"{text[: limit // 2 - 1]}…{text[-limit // 2 :]}"


def spans(numbers: Sequence[int]) -> str:
    """Sorted whole numbers in few characters: ``0-3, 7``.

    >>> spans([0, 1, 2, 3, 7])
    '0-3, 7'
    """
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)
