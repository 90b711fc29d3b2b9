"""Regular expressions of filters and of renames: those of `re`, bounded in time.

`re` cannot be stopped, and some patterns take it longer than anybody lives, on a text of forty characters. Most filters
hold none that could: `re` answers those, in less than a microsecond. The others go to the package `regex`, which reads
the same language and has a time limit. (`google-re2` needs none, and has no lookahead and no backreference.)
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable

import regex

from graftlab.errors import FilterError

SECONDS = 0.25
"""That one pattern may take on one text."""

_QUANTIFIER = re.compile(r"[*+?{]")
_REPEATED_GROUP = re.compile(r"\)[*+?{]")
# What `re` takes as it stands and `regex` may not: a brace that begins no number of times, outside of sets.
_BRACE = re.compile(r"(?s)\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(?!(?:\d*,\d*|\d+)\})")
# Steps of which a search surely needs fewer, so that it needs no limit.
_FEW_STEPS = 1e7


def bounded(pattern: str, helper: str) -> Callable[[str], object]:
    """The function ``helper`` of a pattern: ``search``, ``match`` or ``fullmatch``.

    Raises what ``re.compile`` raises. The function raises :class:`FilterError` when its time is over.
    """
    quickly: Callable[[str], object] = getattr(_compile(pattern), helper)
    longest = _longest_for_re(pattern)
    if longest is None:
        return quickly
    limited = getattr(_compile_limited(pattern), helper)

    def find(text: str) -> object:
        if len(text) <= longest:
            return quickly(text)
        try:
            return limited(text, timeout=SECONDS)
        except TimeoutError:
            raise _over(f"{helper}({pattern!r}, ...)", text) from None

    return find


def bounded_rewrite(pattern: str, replacement: str) -> Callable[[str], str | None]:
    """The function that makes of a text what ``re.sub`` makes of it, and None where the pattern is not found.

    Raises what ``re.compile`` raises. The function raises :class:`FilterError` when its time is over.
    """
    expression = _compile(pattern)
    longest = _longest_for_re(pattern)
    limited = None if longest is None else _compile_limited(pattern)

    def rewrite(text: str) -> str | None:
        if limited is None or longest is None or len(text) <= longest:
            made, count = expression.subn(replacement, text)
        else:
            try:
                made, count = limited.subn(replacement, text, timeout=SECONDS)
            except TimeoutError:
                raise _over(f"the rename {pattern!r} -> {replacement!r}", text) from None
        return made if count else None

    return rewrite


def _longest_for_re(pattern: str) -> int | None:
    """How long a text may be for `re` to search it without a limit; None for any length."""
    quantifiers = len(_QUANTIFIER.findall(pattern))
    if not quantifiers:
        return None
    # Each thing that may be repeated, and the place where a match begins, can be tried at each place of the text; what
    # is repeated may be tried in far more ways where it has alternatives or repeats of its own.
    return 0 if _REPEATED_GROUP.search(pattern) else int(_FEW_STEPS ** (1 / (quantifiers + 1)))


def _compile(pattern: str) -> re.Pattern[str]:
    # That another version of Python may read a set in another way. Not catch_warnings: what it puts back may be what
    # another thread has set for a while only.
    warnings.filterwarnings("ignore", "Possible (nested )?set ", FutureWarning, module=__name__)
    return re.compile(pattern)


def _compile_limited(pattern: str) -> regex.Pattern[str]:
    # To `regex` x{e} is an x with any number of errors.
    same = _BRACE.sub(lambda found: "\\{" if found.group() == "{" else found.group(), pattern)
    try:
        return regex.compile(same, regex.VERSION0)
    except regex.error as error:
        raise FilterError(f"this pattern may take for ever, and cannot be bounded ({error}): {pattern}") from None


def _over(what: str, text: str) -> FilterError:
    return FilterError(
        f"{what} takes more than {SECONDS:g} s on {text[:80]!r} ({len(text)} characters); write it without repeats of "
        f"what repeats itself"
    )
