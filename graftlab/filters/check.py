"""FilterCheck a filter's text against the taps that a session has seen, and suggest corrections if it matches none."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from difflib import get_close_matches

from graftlab.base.sources import parse_expression
from graftlab.base.tags import PLACE_TAGS
from graftlab.errors import FilterError
from graftlab.filters.expressions import Filter, compile_filter
from graftlab.filters.patterns import bounded

Tags = Mapping[str, object]

TAP_LIMIT = 10_000
"""The most taps that a text is matched against. With more, typing would feel slow."""

# A text may mention any number of unknown tags.
_SUGGESTIONS = 3


class FilterCheck:
    """A filter's text, compiled once, and the taps seen so far that it matches, each tested once.

    ``fault`` is the :class:`FilterError` of a text that is invalid or takes too long, and ``hits`` the indices of the
    matching taps.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.fault: FilterError | None = None
        self.filter: Filter | None = None
        self.hits: list[int] = []
        self._tested = 0
        try:
            self.filter = compile_filter(text)
        except FilterError as fault:
            self.fault = fault

    def catch_up(self, taps: Sequence[Tags], among: Iterable[int] | None = None) -> None:
        """Test the taps that are new since the last call, up to :data:`TAP_LIMIT`; with ``among`` only those."""
        stop = min(len(taps), TAP_LIMIT)
        if self.filter is not None:
            matches = self.filter.matches
            try:
                new = range(self._tested, stop) if among is None else among
                self.hits += [index for index in new if matches(taps[index])]
            except FilterError as fault:
                self.fault, self.filter, self.hits = fault, None, []
        self._tested = stop


def matched_by_both(checks: Mapping[str, FilterCheck]) -> Collection[int]:
    """Return the taps that both b2t and t2b match, in the order in which they were seen.

    Empty if one of the filters uses the step, the side or the rank: a tap is listed only with those of its first call.
    """
    pair = checks["b2t"], checks["t2b"]
    if any(check.filter is None or check.filter.names & PLACE_TAGS for check in pair):
        return {}
    return dict.fromkeys(sorted(set(pair[0].hits).intersection(pair[1].hits)))


def unknown_tags(filter_: Filter, tags_seen: Set[str]) -> dict[str, str | None]:
    """Return the tags that a filter mentions and no tap has, each with the most similar known tag."""
    unknown = sorted(filter_.names - tags_seen)[:_SUGGESTIONS]
    return {name: next(iter(get_close_matches(name, tags_seen, n=1)), None) for name in unknown}


def unknown_values(filter_: Filter, taps: Sequence[Tags]) -> dict[str, str]:
    """Return the texts in a filter that occur in no tag of any tap, each with the most similar known value."""
    values = dict.fromkeys(value for tags in taps[:TAP_LIMIT] for value in tags.values() if isinstance(value, str))
    found = {}
    for text in _texts(filter_):
        if not any(_occurs(text, value) for value in values):
            meant = get_close_matches(text, values, n=1)
            if meant:
                found[text] = meant[0]
    return dict(list(found.items())[:_SUGGESTIONS])


def tested_in_words(taps: Sequence[Tags]) -> str:
    """How many of the taps that were seen a check tests."""
    return f"{len(taps):,} seen" if len(taps) <= TAP_LIMIT else f"the first {TAP_LIMIT:,} of {len(taps):,} seen"


def check_summary(check: FilterCheck, taps: Sequence[Tags]) -> str:
    """Summarize a check that has caught up, in one line: ``0 of 501 seen; did you mean 'name'?``."""
    if check.fault is not None or check.filter is None:
        return str(check.fault)
    if not check.text.strip():
        return "matches nothing"
    if not taps:
        return "no tap has been seen yet"
    parts = [f"{len(check.hits):,} of {tested_in_words(taps)}"]
    for name, meant in unknown_tags(check.filter, {tag for tags in taps[:TAP_LIMIT] for tag in tags}).items():
        parts.append(f"no tap has the tag {name!r}" + (f"; did you mean {meant!r}?" if meant else ""))
    if not check.hits:
        parts += [f"did you mean {meant!r}?" for meant in unknown_values(check.filter, taps).values()]
    return "; ".join(parts)


def _texts(filter_: Filter) -> list[str]:
    tree = parse_expression(f"({filter_.text}\n)")
    return [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def _occurs(text: str, value: str) -> bool:
    """Whether a text from a filter occurs in a value, literally or as a pattern."""
    try:
        return text in value or bounded(text, "search")(value) is not None
    except (re.error, FilterError):
        return False
