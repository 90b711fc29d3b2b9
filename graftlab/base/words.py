"""Small words of messages."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """How many of them there are: ``1 run``, ``2,000 runs``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
