"""What a filter's text matches among the taps that a session has seen."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from graftlab.errors import FilterError
from graftlab.filters.expressions import Filter, compile_filter

Tags = Mapping[str, object]

TAP_LIMIT = 10_000
"""Taps that a text is matched against. More would be felt while typing."""


class Check:
    """A text, compiled once, and which of the taps seen so far it matches, each judged once.

    ``fault`` is the :class:`FilterError` of a text that is no filter, and ``hits`` the indices of what it matches.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.fault: FilterError | None = None
        self.filter: Filter | None = None
        self.hits: list[int] = []
        self._judged = 0
        try:
            self.filter = compile_filter(text)
        except FilterError as fault:
            self.fault = fault

    def catch_up(self, taps: Sequence[Tags]) -> None:
        """Judge the taps that were not there the last time, up to :data:`TAP_LIMIT`."""
        stop = min(len(taps), TAP_LIMIT)
        if self.filter is not None:
            matches = self.filter.matches
            self.hits += [index for index in range(self._judged, stop) if matches(taps[index])]
        self._judged = stop


def matched_by_both(checks: Mapping[str, Check]) -> Collection[int]:
    """The taps that b2t and t2b both match, in the order in which they were seen."""
    return dict.fromkeys(sorted(set(checks["b2t"].hits).intersection(checks["t2b"].hits)))
