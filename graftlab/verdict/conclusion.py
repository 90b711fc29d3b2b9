"""The conclusion on a run, as tables and figures show it: its taps, and where they diverge."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from graftlab.base.tags import TapIdentity, identity
from graftlab.diffs.rounding import assumed_floor
from graftlab.rows.newest import LiveTaps
from graftlab.rows.schema import COLUMNS, MEASURED, TABLE, UNMEASURED, Column, Row
from graftlab.verdict.facts import GRAFTED, Facts
from graftlab.verdict.order import Array, is_missing, tap_codes
from graftlab.verdict.summary import (
    differences,
    divergent_rows,
    first_divergent_at,
    floor_of,
    sentence_of_first,
    sentence_of_nonfinite,
)

# While a run is in progress, computing its history takes at most this share of the time.
_SHARE = 0.1

_Key = tuple[str | None, TapIdentity]
"""A direction and a tap."""


@dataclass(frozen=True)
class TapSummary:
    """A tap, with its worst row among the receiving ranks."""

    row: Row
    name: str
    """The tap's name and own tags."""
    badness: float
    worst: float | None = None
    """The largest ``rel_l2`` in any step of the run; infinite where non-finite values differed."""
    since: int | None = None
    """The first step of the run in which the tap was compared and above the floor."""


@dataclass(frozen=True)
class History:
    """Each tap's worst value over the steps of a run, and the first step in which it is above the floor."""

    worst: Mapping[_Key, float] = field(default_factory=dict)
    since: Mapping[_Key, int] = field(default_factory=dict)
    first: Row | None = None
    """The first row above the floor, in execution order."""
    nonfinite: Row | None = None
    """The first row whose non-finite values differ."""


@dataclass(frozen=True)
class Conclusion:
    """The newest row of each tap in execution order, and the sentences on them."""

    lines: Sequence[TapSummary]
    floor: float
    first: int | None
    """The index in ``lines`` of the first divergent tap."""
    sentences: Sequence[str]
    """The most important first; see :func:`graftlab.verdict.summary.differences`."""
    earlier: str = ""
    """The run's first divergence, if it is none of these rows."""
    nonfinite: str = ""
    """Where non-finite values first differ in the run, unless a first divergence is there."""
    rows: Sequence[Row] = ()


def conclude(frame: pd.DataFrame, taps: Sequence[Mapping[str, Any]], noise_floor: float | None = None) -> Conclusion:
    """The conclusion on the frame of a run. ``taps`` are all taps seen, in execution order."""
    rows = in_order_of(taps, newest_rows(frame))
    return conclude_from(rows, history_of(frame, _floor_of(rows, noise_floor)), noise_floor)


def conclude_from(rows: Sequence[Row], history: History = History(), noise_floor: float | None = None) -> Conclusion:
    """The conclusion on the newest row of each tap and rank, in the order of one step."""
    # Rows may be of different steps; each is the newest of its tap, so no sentence names a step.
    frame = pd.DataFrame(list(rows), columns=list(COLUMNS)).drop(columns="step")
    facts = Facts(frame)
    floor, _ = floor_of(facts, noise_floor)
    lines = tap_summaries(rows, history)
    at, first = first_divergent_at(facts, floor), None
    if at is not None:
        key = _key(rows[at])
        first = next(number for number, line in enumerate(lines) if _key(line.row) == key)
    earlier = _earlier(rows, None if first is None else lines[first].row, history.first, floor)
    known = [rows[at]] if at is not None else []
    known += [history.first] if earlier and history.first is not None else []
    nonfinite = _nonfinite_elsewhere(rows, history.nonfinite, known)
    return Conclusion(lines, floor, first, differences(frame, noise_floor), earlier, nonfinite, rows)


def tap_summaries(rows: Sequence[Row], history: History = History()) -> list[TapSummary]:
    """One summary a tap, in the order of the rows."""
    by_tap: dict[_Key, list[Row]] = {}
    for row in rows:
        by_tap.setdefault(_key(row), []).append(row)
    found = []
    for key, own in by_tap.items():
        row, tap = _worst(own), key[1]
        shown = [tap.name, *(f"{name}={value}" for name, value in tap.tags)]
        if tap.recompute_status == "recompute":
            shown.append("recompute")
        # The history may be older than this row.
        worst = max(history.worst.get(key, -math.inf), difference_of(row))
        found.append(
            TapSummary(row, " ".join(shown), _badness(row), worst if worst >= 0 else None, history.since.get(key))
        )
    return found


def _worst(rows: Sequence[Row]) -> Row:
    """The worst of a tap's newest rows; one without a partner only if the other side has none of its step or later."""
    received = [row for row in rows if row.status != "unmatched"]
    last = max((row.step for row in received), default=-1)
    return max([row for row in rows if row.status == "unmatched" and row.step > last] or received, key=_badness)


def history_of(frame: pd.DataFrame, noise_floor: float) -> History:
    if not len(frame):
        return History()
    facts = Facts(frame)
    codes, first_rows = tap_codes(frame, "direction")
    keys: list[_Key] = [
        (direction if isinstance(direction, str) else None, identity(tags))
        for direction, tags in zip(frame["direction"].iloc[first_rows], frame["tags"].iloc[first_rows], strict=True)
    ]
    worst = np.full(len(keys), -math.inf)
    measured = facts.kind <= GRAFTED
    np.fmax.at(worst, codes[measured], np.where(facts.differ > 0, math.inf, facts.value)[measured])
    above = np.flatnonzero(divergent_rows(facts, noise_floor))
    taps, places = np.unique(codes[above], return_index=True)
    steps = frame["step"].to_numpy()
    return History(
        {key: value for key, value in zip(keys, worst.tolist(), strict=True) if value >= 0},
        {keys[tap]: int(steps[above[place]]) for tap, place in zip(taps.tolist(), places.tolist(), strict=True)},
        _first_of(frame, above),
        _first_of(frame, np.flatnonzero(measured & (facts.differ > 0))),
    )


def _first_of(frame: pd.DataFrame, places: Array) -> Row | None:
    return _rows(frame.iloc[places[:1]])[0] if len(places) else None


def newest_rows(frame: pd.DataFrame) -> list[Row]:
    """The newest row of each tap and rank in a frame, in the order in which taps first ran.

    The direction is the plan's, not the tap's, so a graft in the other direction replaces the earlier row.
    """
    if not len(frame):
        return []
    codes, first_rows = tap_codes(frame, "side", "rank")
    last = np.zeros(len(first_rows), dtype=np.int64)
    np.maximum.at(last, codes, np.arange(len(frame)))
    return _rows(frame.iloc[last])


def in_order_of(taps: Sequence[Mapping[str, Any]], rows: Sequence[Row]) -> list[Row]:
    """Rows in the order of one step: that of ``taps``, and the ranks of each in turn.

    The rows may be of different steps, so their own order may begin in the middle of a step.
    """
    places: dict[TapIdentity, int] = {}
    for place, tags in enumerate(taps):
        places.setdefault(identity(tags), place)
    last = len(places)
    return sorted(rows, key=lambda row: (places.get(identity(row.tags), last), row.side, row.rank))


class LiveConclusion:
    """The conclusion on the newest run, for a display that refreshes several times a second. Not thread-safe.

    While the run is in progress, a look reads a bounded number of new rows, which have the newest values. The history
    needs a frame of all rows, so computing it is limited to a tenth of the time. Once the run has ended, the whole
    conclusion is computed from its frame.
    """

    def __init__(
        self, live: LiveTaps, frame_of: Callable[[int], pd.DataFrame], has_ended: Callable[[int], bool]
    ) -> None:
        """``frame_of`` and ``has_ended`` take the number of a run."""
        self._live = live
        self._frame_of = frame_of
        self._has_ended = has_ended
        self._found = conclude_from([])
        self._found_for: object = None
        self._history = History()
        self._history_for: tuple[int, float] | None = None
        self._known = 0
        self._next_history = 0.0

    @property
    def row_count(self) -> int:
        """How many rows had arrived at the last look."""
        return self._live.upto

    @property
    def behind(self) -> int:
        """How many of these rows the conclusion does not cover yet."""
        return self._live.upto - self._known

    def look(self, taps: Sequence[Mapping[str, Any]], noise_floor: float | None, limit: int) -> Conclusion:
        """The conclusion on the newest run so far, after reading up to ``limit`` more rows.

        ``taps`` are all taps seen, in execution order. Returns the same object if nothing is new.
        """
        rows = of_newest_run(self._live.look(limit))
        if not rows:
            return self._found
        run = rows[0].run
        if self._has_ended(run):
            if self._found_for != (run, self._live.upto, noise_floor):
                self._found = conclude(self._frame_of(run), taps, noise_floor)
                self._found_for, self._known = (run, self._live.upto, noise_floor), self._live.upto
            return self._found
        is_renewed = self._renew_history(run, _floor_of(rows, noise_floor))
        state = (run, self._live.upto, self._live.behind, noise_floor)
        if is_renewed or self._found_for != state:
            self._found = conclude_from(in_order_of(taps, rows), self._history, noise_floor)
            self._found_for = state
        return self._found

    def _renew_history(self, run: int, floor: float) -> bool:
        if self._history_for != (run, floor):
            # The next look computes it, because a cell may be waiting for the first one.
            self._history, self._history_for, self._known = History(), (run, floor), 0
            return True
        if not self.behind or time.monotonic() < self._next_history:
            return False
        began, upto = time.monotonic(), self._live.upto
        self._history = history_of(self._frame_of(run), floor)
        self._known = upto
        self._next_history = time.monotonic() + (time.monotonic() - began) * (1 / _SHARE - 1)
        return True


def newest_run(frame: pd.DataFrame, set_aside: Collection[int] = ()) -> pd.DataFrame:
    """The rows of the newest run in a frame, if possible of one that is not ``set_aside``."""
    runs = [run for run in frame["run"].unique() if run not in set_aside] or frame["run"]
    is_newest = frame["run"] == max(runs, default=0)
    return frame if is_newest.all() else frame[is_newest].reset_index(drop=True)


def of_newest_run(rows: Sequence[Row]) -> list[Row]:
    """The rows of the newest run among these."""
    newest = max((row.run for row in rows), default=0)
    return [row for row in rows if row.run == newest]


def _floor_of(rows: Sequence[Row], noise_floor: float | None) -> float:
    if noise_floor is not None:
        return noise_floor
    return assumed_floor({row.dtype for row in rows if row.dtype}, {row.cast for row in rows if row.cast})[0]


def _earlier(rows: Sequence[Row], first: Row | None, earliest: Row | None, floor: float) -> str:
    """The run's first divergence, unless these rows have it; ``first`` is the first divergent row among them."""
    if earliest is None or any(_place(row) == _place(earliest) for row in rows):
        return ""
    if first is not None and identity(first.tags) == identity(earliest.tags):
        return f"first above the floor in step {earliest.step}"
    return sentence_of_first(earliest, floor)


def _nonfinite_elsewhere(rows: Sequence[Row], first: Row | None, known: Sequence[Row]) -> str:
    """A sentence on the run's first non-finite difference, unless it is one of the ``known`` rows."""
    # The history may be older than these rows.
    newest = (row for row in rows if row.status in MEASURED and row.nonfinite_differ)
    found = first or next(newest, None)
    if found is None or _place(found) in map(_place, known):
        return ""
    return sentence_of_nonfinite(found)


def _place(row: Row) -> tuple[object, ...]:
    return (row.step, row.side, row.rank, identity(row.tags))


def _rows(frame: pd.DataFrame) -> list[Row]:
    """A frame's rows as values; missing ones are None."""
    return [Row(*map(_cell, TABLE, values)) for values in frame[list(COLUMNS)].itertuples(index=False, name=None)]


def _cell(column: Column, value: Any) -> Any:
    if is_missing(value):
        return None
    return int(value) if column.storage == "integer" else value


def _key(row: Row) -> _Key:
    return (row.direction, identity(row.tags))


def difference_of(row: Row) -> float:
    """The difference between the sides in this row; -inf if it was not measured."""
    if row.status not in MEASURED:
        return -math.inf
    if row.nonfinite_differ:
        return math.inf
    return -math.inf if row.rel_l2 is None or math.isnan(row.rel_l2) else row.rel_l2


def _badness(row: Row) -> float:
    if row.status in UNMEASURED:
        return math.inf
    if row.nonfinite_differ:
        return 1e300
    value = row.rel_l2
    return -1.0 if value is None or math.isnan(value) else float(value)
