"""The taps of a list of rows, a line each: what tables and figures that follow a run show."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from graftlab.base.tags import TapIdentity, identity
from graftlab.rows.schema import Row
from graftlab.verdict.summary import differences, first_divergent_at, floor_of

UNMEASURED = frozenset({"failed", "timeout", "missing"})

_TOLD_OF = ("name", "tags", "status", "rel_l2", "nonfinite_differ", "numel", "side", "rank", "dtype", "step", "error")


@dataclass(frozen=True)
class TapLine:
    """A tap, with the row of that receiving rank where it is worst."""

    row: Row
    name: str
    """The tap's name and own tags."""
    badness: float


@dataclass(frozen=True)
class SoFar:
    """What the newest rows of a run come to: its taps in execution order, and the conclusion."""

    lines: Sequence[TapLine]
    floor: float
    first: int | None
    """The line of the first divergent tap."""
    sentences: Sequence[str]
    """What matters most first; see :func:`graftlab.verdict.summary.differences`."""


def so_far(rows: Sequence[Row], noise_floor: float | None = None) -> SoFar:
    """Sum up rows that stand in the order of one step, whichever step each is of."""
    lines = tap_lines(rows)
    frame = pd.DataFrame({column: [getattr(row, column) for row in rows] for column in _TOLD_OF}, dtype=object)
    floor, _ = floor_of(frame, noise_floor)
    at = first_divergent_at(frame, floor)
    first = None
    if at is not None:
        key = _key(rows[at])
        first = next(number for number, line in enumerate(lines) if _key(line.row) == key)
    # Each is the newest of its tap, so that steps tell none apart.
    return SoFar(lines, floor, first, differences(frame.drop(columns="step"), noise_floor))


def of_newest_run(rows: Sequence[Row], taps: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Those of the newest run, each the newest of its tap, in the order of one step: that in which ``taps`` were seen.

    They come from one step or the next, so that their own order would begin in the middle.
    """
    newest = max((row.run for row in rows), default=None)
    places: dict[TapIdentity, int] = {}
    for place, tags in enumerate(taps):
        places.setdefault(identity(tags), place)
    last = len(places)
    chosen = (row for row in rows if row.run == newest)
    return sorted(chosen, key=lambda row: (places.get(identity(row.tags), last), row.side, row.rank))


def tap_lines(rows: Sequence[Row]) -> list[TapLine]:
    """One line a tap, in the order of the rows."""
    found: dict[tuple[Any, ...], TapLine] = {}
    for row in rows:
        tap = identity(row.tags)
        shown = [tap.name, *(f"{name}={value}" for name, value in tap.tags)]
        if tap.recompute_status == "recompute":
            shown.append("recompute")
        line = TapLine(row, " ".join(shown), _badness(row))
        key = _key(row)
        if key not in found or line.badness > found[key].badness:
            found[key] = line
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
