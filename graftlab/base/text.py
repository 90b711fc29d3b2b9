"""Counts and names in running text and options."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterable, Mapping, Sequence


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: ``1 run``, ``2,000 runs``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def shortened(text: str, limit: int) -> str:
    """Shorten a text in its middle, because module names differ at the beginning and the end."""
    return text if len(text) <= limit else f"{text[: limit // 2 - 1]}…{text[-limit // 2 :]}"


def listed(names: Sequence[str], last: str = "and", most: int | None = None) -> str:
    """Names as a sentence lists them; of more than ``most`` the first three, and how many are left.

    >>> listed(["q", "k", "v"], "or")
    'q, k or v'
    """
    if most is not None and len(names) > most:
        return first_of(names)
    return f"{', '.join(names[:-1])} {last} {names[-1]}" if len(names) > 1 else "".join(names)


def first_of(names: Sequence[str], most: int = 3) -> str:
    """The first names, and how many are left.

    >>> first_of(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    left = len(names) - most
    return ", ".join(names[:most]) + (f" and {left:,} more" if left > 0 else "")


def spans(numbers: Iterable[int]) -> str:
    """Whole numbers in order, in few characters: ``0-3, 7``.

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


def numbered(noun: str, numbers: Collection[int]) -> str:
    """A noun with the numbers of what it stands for: ``step 3``, ``ranks 0-2, 5``."""
    return f"{noun}{'s' if len(numbers) > 1 else ''} {spans(numbers)}"


def failed_on(failing: Mapping[str, str]) -> str:
    """How a run ended on these ranks, from what went wrong on each; an interrupt alone is no failure."""
    is_interrupt = all(why.startswith("KeyboardInterrupt") for why in failing.values())
    return f"{'interrupted' if is_interrupt else 'failed'} on {', '.join(failing)}"


def positive(text: str) -> int:
    """The type of a command line's option that takes a whole number of at least 1."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, not {text!r}")
    return int(text)
