"""The taps of a run, a line each: what tables and figures that follow a run show."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from graftlab.base.tags import TapIdentity, identity
from graftlab.rows.digest import FirstAbove, RunDigest, TapDigest
from graftlab.rows.schema import Row
from graftlab.verdict.facts import RowsFacts
from graftlab.verdict.summary import first_divergent_of, floor_in_words, sentence_of_first, sentences

UNMEASURED = frozenset({"failed", "timeout", "missing"})


@dataclass(frozen=True)
class TapLine:
    """A tap, with the row of that receiving rank where it is worst."""

    row: Row
    name: str
    """The tap's name and own tags."""
    badness: float
    worst: float | None = None
    """The largest ``rel_l2`` in any step of the run; infinite where non-finite values differed."""
    since: int | None = None
    """The first step of the run in which it was compared and above the floor."""


@dataclass(frozen=True)
class SoFar:
    """What the newest rows of a run come to: its taps in execution order, and the conclusion."""

    lines: Sequence[TapLine]
    floor: float
    first: int | None
    """The line of the first divergent tap."""
    sentences: Sequence[str]
    """What matters most first; see :func:`graftlab.verdict.summary.differences`."""
    earlier: str = ""
    """Where the run diverged first, or in which step, if that was in another step than those of these rows."""
    rows: Sequence[Row] = ()


def so_far(rows: Sequence[Row], noise_floor: float | None = None) -> SoFar:
    """Sum up rows that stand in the order of one step, whichever step each is of."""
    lines = tap_lines(rows)
    # Each is the newest of its tap, so that steps tell none apart.
    facts = RowsFacts(rows)
    floor, _ = floor_in_words(facts.dtypes, noise_floor)
    at = first_divergent_of(facts, floor)
    first = None
    if at is not None:
        key = _key(rows[at])
        first = next(number for number, line in enumerate(lines) if _key(line.row) == key)
    return SoFar(lines, floor, first, sentences(facts, noise_floor), rows=rows)


class SummedUp(Protocol):
    """As much of a :class:`.Digest` as is needed here."""

    @property
    def newest(self) -> RunDigest | None: ...

    def row(self, index: int) -> Row: ...


class Following:
    """Sums up the newest run again and again while it goes on. One thread at a time."""

    def __init__(self, digest: SummedUp) -> None:
        self._digest = digest
        self._above: FirstAbove | None = None

    def look(self, taps: Sequence[Mapping[str, Any]], noise_floor: float | None = None) -> SoFar:
        """The newest run as far as its rows were summed up. ``taps`` are all that were seen, in execution order."""
        run = self._digest.newest
        if run is None:
            return so_far([])
        newest = _newest(run, taps)
        found = so_far([tap.last for tap in newest], noise_floor)
        if self._above is None or (self._above.run, self._above.floor) != (run, found.floor):
            self._above = FirstAbove(run, found.floor)
        self._above.look()
        over_time: dict[tuple[Any, ...], tuple[float, int | None]] = {}
        for tap in list(run.taps):
            key, since = (tap.direction, tap.identity), self._above.step_of(tap)
            worst, first = over_time.get(key, (-math.inf, None))
            over_time[key] = (
                max(worst, tap.worst),
                since if first is None else first if since is None else min(first, since),
            )
        lines = []
        for line in found.lines:
            worst, since = over_time.get(_key(line.row), (-math.inf, None))
            shown = worst if worst >= 0 else None
            lines.append(TapLine(line.row, line.name, line.badness, shown, since))
        return SoFar(lines, found.floor, found.first, found.sentences, self._earlier(found), found.rows)

    def _earlier(self, found: SoFar) -> str:
        assert self._above is not None
        index = self._above.first
        if index is None:
            return ""
        row = self._digest.row(index)
        if any(each.step == row.step for each in found.rows):
            return ""
        if found.first is not None and identity(found.lines[found.first].row.tags) == identity(row.tags):
            return f"first above the floor in step {row.step}"
        return sentence_of_first(row, found.floor)


def _newest(run: RunDigest, taps: Sequence[Mapping[str, Any]]) -> list[TapDigest]:
    """The newest of each tap and rank, in the order of one step: that in which ``taps`` were seen.

    They come from one step or the next, so that their own order would begin in the middle. Which way a tensor goes is
    the plan's, not the tap's: a graft the other way makes what was here old.
    """
    found: dict[tuple[TapIdentity, str, int], TapDigest] = {}
    for tap in list(run.taps):
        key = (tap.identity, *tap.receiver)
        if key not in found or found[key].last_index < tap.last_index:
            found[key] = tap
    places: dict[TapIdentity, int] = {}
    for place, tags in enumerate(taps):
        places.setdefault(identity(tags), place)
    last = len(places)
    return sorted(found.values(), key=lambda tap: (places.get(tap.identity, last), *tap.receiver))


def tap_lines(rows: Sequence[Row]) -> list[TapLine]:
    """One line a tap, in the order of the rows."""
    found: dict[tuple[Any, ...], TapLine] = {}
    for row in rows:
        tap = identity(row.tags)
        key = (row.direction, tap)
        badness = _badness(row)
        if key not in found or badness > found[key].badness:
            shown = [tap.name, *(f"{name}={value}" for name, value in tap.tags)]
            if tap.recompute_status == "recompute":
                shown.append("recompute")
            found[key] = TapLine(row, " ".join(shown), badness)
    return list(found.values())


def _key(row: Row) -> tuple[Any, ...]:
    return (row.direction, identity(row.tags))


def _badness(row: Row) -> float:
    if row.status in UNMEASURED:
        return math.inf
    if row.nonfinite_differ:
        return 1e300
    value = row.rel_l2
    return -1.0 if value is None or math.isnan(value) else float(value)
