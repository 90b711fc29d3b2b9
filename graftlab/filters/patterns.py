"""Regular expressions of filters and renames: those of `re`, bounded in time.

`re` cannot be stopped, and some patterns take it centuries on a text of forty characters. Most filters contain no such
pattern, and `re` matches them in less than a microsecond. The others go to the package `regex`, which reads the same
syntax and has a time limit. (`google-re2` needs no limit, but lacks lookahead and backreferences.)
"""

from __future__ import annotations

import importlib
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any

import regex

from graftlab.errors import FilterError

SECONDS = 0.25
"""The time limit for one pattern on one text."""

LARGEST = 10_000
"""How many parts a pattern may have, each repeat counted as often as it repeats: `regex` writes repeats out."""

_parser: Any = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")
_REPEATS = {value for name, value in vars(_parser).items() if name.endswith("_REPEAT")}
_QUANTIFIER = re.compile(r"[*+?{]")
_REPEATED_GROUP = re.compile(r"\)[*+?{]")
# A brace outside of sets that does not start a repeat count: `re` takes it literally, `regex` may not.
_BRACE = re.compile(r"(?s)\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(?!(?:\d*,\d*|\d+)\})")
# A search of at most this many steps needs no limit.
_FEW_STEPS = 1e7


def bounded(pattern: str, helper: str) -> Callable[[str], object]:
    """Return a pattern's function ``helper``: ``search``, ``match`` or ``fullmatch``.

    Raises the errors of ``re.compile``, and :class:`FilterError` for a pattern that is too large. The returned
    function raises :class:`FilterError` at the time limit.
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
    """Return a function that rewrites a text as ``re.sub`` does, and returns None if the pattern is not found.

    Raises the errors of ``re.compile``, and :class:`FilterError` for a pattern that is too large. The returned
    function raises :class:`FilterError` at the time limit.
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
    """Return the longest text that `re` may search without a time limit; None for any length."""
    quantifiers = len(_QUANTIFIER.findall(pattern))
    if not quantifiers:
        return None
    # Each repeat, and the start of a match, can be tried at each position of the text. A repeated group can be tried in
    # far more ways, because it may contain alternatives or further repeats.
    return 0 if _REPEATED_GROUP.search(pattern) else int(_FEW_STEPS ** (1 / (quantifiers + 1)))


def _expanded_size(parsed: Any) -> int:
    """How many parts a parsed pattern has when each repeat is written out as often as it counts."""
    if isinstance(parsed, _parser.SubPattern):
        return sum(_size_of_part(*part) for part in parsed.data)
    return sum(map(_expanded_size, parsed)) if isinstance(parsed, tuple | list) else 0


def _size_of_part(code: Any, given: Any) -> int:
    if any(code is each for each in _REPEATS):
        least, most, repeated = given
        size = _expanded_size(repeated)
        count: int = least if most is _parser.MAXREPEAT else most
        # A group is written out once more than it repeats.
        return size * (count + 1) if size > 1 else max(1, count)
    return 1 + _expanded_size(given)


def _compile(pattern: str) -> re.Pattern[str]:
    # Most have no repeats inside repeats.
    if "{" in pattern or ")+" in pattern or len(pattern) > LARGEST:
        size = _expanded_size(_parser.parse(pattern))
        if size > LARGEST:
            raise FilterError(
                f"the pattern {pattern:.80} has {size:,} parts when its repeats are written out, and takes too much "
                f"memory; at most {LARGEST:,} are allowed, so write it with fewer repeats inside repeats"
            )
    # This warns that future versions of Python may read a set differently. Not catch_warnings: it might restore a state
    # that another thread had set only temporarily.
    warnings.filterwarnings("ignore", "Possible (nested )?set ", FutureWarning, module=__name__)
    return re.compile(pattern)


def _compile_limited(pattern: str) -> regex.Pattern[str]:
    # `regex` reads x{e} as an x with any number of errors.
    same = _BRACE.sub(lambda found: "\\{" if found.group() == "{" else found.group(), pattern)
    try:
        return regex.compile(same, regex.VERSION0)
    except regex.error as error:
        raise FilterError(
            f"this pattern may take forever, and its time cannot be limited ({error}): {pattern}"
        ) from None


def _over(what: str, text: str) -> FilterError:
    return FilterError(
        f"{what} takes more than {SECONDS:g} s on {text[:80]!r} ({len(text)} characters); write it without nested "
        f"repeats"
    )
