"""Regular expressions of filters: those of `re`, bounded in time.

`re` cannot be stopped, and some patterns take it longer than anybody lives, on a text of forty characters. Most filters
hold none that could: `re` answers those, in less than a microsecond. The others go to the package `regex`, which reads
the same language and has a time limit. (`google-re2` needs none, and has no lookahead and no backreference.)
"""

from __future__ import annotations

import re
from collections.abc import Callable

import regex

from graftlab.errors import FilterError

SECONDS = 0.25
"""That one pattern may take on one text."""

_QUANTIFIER = re.compile(r"[*+?{]")
_REPEATED_GROUP = re.compile(r"\)[*+?{]")
# Steps of which a search surely needs fewer, so that it needs no limit.
_FEW_STEPS = 1e7


def bounded(pattern: str, helper: str) -> Callable[[str], object]:
    """The function ``helper`` of a pattern: ``search``, ``match`` or ``fullmatch``.

    Raises what ``re.compile`` raises. The function raises :class:`FilterError` when its time is over.
    """
    quickly: Callable[[str], object] = getattr(re.compile(pattern), helper)
    quantifiers = len(_QUANTIFIER.findall(pattern))
    if not quantifiers:
        return quickly
    # Each thing that may be repeated, and the place where a match begins, can be tried at each place of the text; what
    # is repeated may be tried in far more ways where it has alternatives or repeats of its own.
    longest = 0 if _REPEATED_GROUP.search(pattern) else int(_FEW_STEPS ** (1 / (quantifiers + 1)))
    try:
        limited = getattr(regex.compile(pattern, regex.VERSION0), helper)
    except regex.error as error:
        raise FilterError(f"this pattern may take for ever, and cannot be bounded ({error}): {pattern}") from None

    def find(text: str) -> object:
        if len(text) <= longest:
            return quickly(text)
        try:
            return limited(text, timeout=SECONDS)
        except TimeoutError:
            raise FilterError(
                f"{helper}({pattern!r}, ...) takes more than {SECONDS:g} s on {text[:80]!r} ({len(text)} characters); "
                f"write it without repeats of what repeats itself"
            ) from None

    return find
