"""Counts and names in running text."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """How many of them there are: ``1 run``, ``2,000 runs``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def shortened(text: str, limit: int) -> str:
    """Without its middle: the beginnings and the ends of module names tell them apart."""
    return text if len(text) <= limit else f"{text[: limit // 2 - 1]}…{text[-limit // 2 :]}"
