"""What the rows of each run come to, tap by tap, kept up to date as they arrive: the last value, the worst, and every
value in a few bytes, so that nothing that only sums up has to make a frame."""

from __future__ import annotations

import itertools
import json
import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson

from graftlab.base.tags import SIDE_NAMES, TapIdentity, identity
from graftlab.rows.encoding import record
from graftlab.rows.schema import COLUMNS, Row, are_whole, converted
from graftlab.rows.store import RowStore

logger = logging.getLogger(__name__)

Array = npt.NDArray[Any]

COMPARED, GRAFTED, FAILED, ALONE, OTHER = range(5)
"""Kinds of rows, as :class:`Values` has them: up to ``GRAFTED`` they were measured; what is ``ALONE`` the other side
does not have."""
KINDS = {
    "compared": COMPARED,
    "grafted": GRAFTED,
    "failed": FAILED,
    "missing": ALONE,
    "unmatched": ALONE,
    "recomputed": ALONE,
}

# So many rows wait for whoever asks; of more a thread of its own takes care, at half of its time at the most.
_WAITING = 50_000
_PIECE = 2000
# Of so many the arrival of rows waits: what is not summed up yet is held in memory.
_MOST_WAITING = 400_000

_AT = {name: COLUMNS.index(name) for name in COLUMNS}
_RUN, _STEP, _ORDER, _NAME, _TAGS, _DIRECTION = (_AT[n] for n in ("run", "step", "order", "name", "tags", "direction"))
_SIDE, _RANK, _STATUS, _VALUE, _DIFFER = (_AT[n] for n in ("side", "rank", "status", "rel_l2", "nonfinite_differ"))
_DTYPE, _CAST, _PLAN, _OCCURRENCE = (_AT[n] for n in ("dtype", "cast", "plan_version", "occurrence"))


class Values(NamedTuple):
    """The rows of a run in the order in which they came, an array a column. They only grow at their ends."""

    at: Array
    """Which of the store's rows each is."""
    tap: Array
    """The place of its tap in :attr:`RunDigest.taps`."""
    step: Array
    order: Array
    occurrence: Array
    kind: Array
    value: Array
    """``rel_l2``; NaN where there is none."""
    apart: Array
    """The same as a floor is compared with it: infinite where whole numbers differ."""
    differ: Array
    """How many non-finite values differ."""


class TapDigest:
    """One tap on one receiving rank, one way: what all steps of a run made of it."""

    __slots__ = ("_identity", "_values", "last_index", "place", "rows", "worst", "worst_step")

    def __init__(self, place: int) -> None:
        self.place = place
        self.rows = 0
        self.last_index = -1
        self.worst = -math.inf
        """The largest ``rel_l2`` that was measured; infinite where non-finite values differed, -inf where none was."""
        self.worst_step = -1
        self._values: list[Any] = []
        self._identity: TapIdentity | None = None

    @property
    def last(self) -> Row:
        """The newest row."""
        return record(list(self._values))

    @property
    def tags(self) -> dict[str, Any]:
        """The tags of the newest row, with what each side calls the tap."""
        return {**{name: self._values[_AT[name]] for name in SIDE_NAMES}, **self._values[_TAGS]}

    @property
    def identity(self) -> TapIdentity:
        if self._identity is None:
            self._identity = identity(self._values[_TAGS])
        return self._identity

    @property
    def direction(self) -> str | None:
        found: str | None = self._values[_DIRECTION]
        return found

    @property
    def receiver(self) -> tuple[str, int]:
        return self._values[_SIDE], self._values[_RANK]


class _Growing:
    """An array that grows at its end. What was handed out stays as it is."""

    def __init__(self, dtype: Any) -> None:
        self._held = np.empty(256, dtype)
        self._count = 0

    def extend(self, values: Sequence[Any]) -> None:
        count = self._count + len(values)
        if count > len(self._held):
            grown = np.empty(max(count, 2 * len(self._held)), self._held.dtype)
            grown[: self._count] = self._held[: self._count]
            self._held = grown
        self._held[self._count : count] = values
        self._count = count

    def upto(self, count: int) -> Array:
        found: Array = self._held[:count]
        return found


# As the fields of Values.
_DTYPES = (np.int64, np.int32, np.int64, np.int32, np.int32, np.int8, np.float64, np.float64, np.int64)


@dataclass
class RunDigest:
    """A run as far as its rows were summed up."""

    number: int
    taps: list[TapDigest] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    plan_versions: set[int] = field(default_factory=set)
    dtypes: set[str] = field(default_factory=set)
    row_count: int = 0
    _columns: list[_Growing] = field(default_factory=lambda: [_Growing(dtype) for dtype in _DTYPES])
    _places: dict[Any, TapDigest] = field(default_factory=dict)

    @property
    def values(self) -> Values:
        """All of its rows so far."""
        count = self.row_count
        return Values(*(column.upto(count) for column in self._columns))

    def tags_of_rows(self, told_apart_by: Collection[str]) -> Iterator[Mapping[str, Any]]:
        """The tags of its rows, as filters see them; of rows that are equal in these tags perhaps of one alone."""
        if "step" not in told_apart_by:
            yield from (tap.tags for tap in list(self.taps))
            return
        values = self.values
        steps, places = np.unique(values.step, return_inverse=True)
        pairs = np.unique(values.tap * np.int64(len(steps)) + places.reshape(-1))
        for tap, at in zip(*np.divmod(pairs, max(1, len(steps))), strict=True):
            yield {**self.taps[int(tap)].tags, "step": int(steps[at])}

    def take(self, rows: Iterable[tuple[int, list[Any]]]) -> None:
        """Add rows, each with its index in the store, which came one after the other. One thread at a time."""
        columns: tuple[list[Any], ...] = tuple([] for _ in Values._fields)
        at_, tap_, step_, order_, occurrence_, kind_, value_, apart_, differ_ = (column.append for column in columns)
        for index, row in rows:
            tap = self._tap_of(row)
            status, value, differ, step = row[_STATUS], row[_VALUE], row[_DIFFER] or 0, row[_STEP]
            kind = KINDS.get(status, OTHER)
            number = math.nan if value is None else value
            if kind <= GRAFTED:
                badness = math.inf if differ else number
                if badness > tap.worst:
                    tap.worst, tap.worst_step = badness, step
            tap.rows += 1
            tap.last_index, tap._values = index, row
            self.statuses[status] += 1
            self.plan_versions.add(row[_PLAN] or 0)
            if row[_DTYPE] is not None:
                self.dtypes.add(row[_DTYPE])
            if row[_CAST]:
                # The receiver's alone says nothing of how the other side rounds.
                self.dtypes.update(converted(row[_CAST]))
            at_(index), tap_(tap.place), step_(step), order_(row[_ORDER] or 0), occurrence_(row[_OCCURRENCE] or 0)
            kind_(kind), value_(number), differ_(differ)
            apart_(math.inf if number > 0 and are_whole(row[_DTYPE], row[_CAST]) else number)
        for column, values in zip(self._columns, columns, strict=True):
            column.extend(values)
        # Last, because whoever reads meanwhile goes by it.
        self.row_count += len(columns[0])

    def _tap_of(self, row: list[Any]) -> TapDigest:
        tags = row[_TAGS]
        # All that tells taps apart, and the ranks; the step is the one thing that differs from row to row.
        step = tags.get("step")
        if step is not None:
            tags["step"] = None
        key: Any = (row[_DIRECTION], row[_SIDE], row[_RANK], *tags, *tags.values())
        try:
            tap = self._places.get(key)
        except TypeError:  # a list as a tag's value
            key = repr(key)
            tap = self._places.get(key)
        if step is not None:
            tags["step"] = step
        if tap is None:
            tap = self._places[key] = TapDigest(len(self.taps))
            tap._values = row
            self.taps.append(tap)
        return tap


class Digest:
    """The digests of all runs of a session. Rows are taken when they arrive, and summed up when somebody asks.

    Where many come, a thread sums them up meanwhile, so that nobody who asks has to wait for long.
    """

    def __init__(self, store: RowStore) -> None:
        self._store = store
        self._runs: dict[int, RunDigest] = {}
        self._waiting: deque[Sequence[bytes]] = deque()
        self._came = self._taken = len(store)
        self._taking = threading.Lock()
        self._is_busy = False
        self.unread = 0
        """How many rows could not be read, and are in no digest."""
        store.followers.append(self._add)

    def _add(self, lines: Sequence[bytes]) -> None:
        """Called by the store, in the order in which rows come."""
        self._waiting.append(lines)
        self._came += len(lines)
        if self.behind > _MOST_WAITING:
            self.catch_up(_PIECE)
        elif self.behind > _WAITING and not self._is_busy:
            self._is_busy = True
            threading.Thread(target=self._keep_up, name="graftlab-digest", daemon=True).start()

    @property
    def taken(self) -> int:
        """How many rows are summed up."""
        return self._taken

    @property
    def behind(self) -> int:
        """How many rows are not summed up yet."""
        return self._came - self._taken

    def catch_up(self, limit: int | None = None) -> None:
        """Sum up what has come, or ``limit`` rows of it at the most."""
        if threading.current_thread() is not threading.main_thread():
            self._catch_up(limit)
        elif self.behind:
            # An interrupt may end this thread's work anywhere, in the middle of a tap's sums too.
            thread = threading.Thread(target=self._catch_up, args=(limit,), name="graftlab-digest", daemon=True)
            thread.start()
            thread.join()

    def _catch_up(self, limit: int | None) -> None:
        with self._taking:
            last = self._came if limit is None else min(self._came, self._taken + limit)
            while self._taken < last:
                lines: list[bytes] = []
                room = min(_PIECE, last - self._taken)
                while self._waiting and len(lines) < room:
                    came = self._waiting.popleft()
                    if len(came) > room - len(lines):
                        self._waiting.appendleft(came[room - len(lines) :])
                    lines += came[: room - len(lines)]
                first, unread = self._taken, self.unread
                try:
                    self._take(lines)
                except Exception:
                    # A fault in one of them must not keep those that follow out of the summary.
                    self.unread = unread + len(lines)
                    logger.exception("some of the rows %d to %d are in no summary", first, first + len(lines) - 1)
                finally:
                    self._taken += len(lines)

    def _take(self, lines: list[bytes]) -> None:
        for number, rows in itertools.groupby(self._decoded(lines), key=lambda pair: pair[1][_RUN]):
            if number not in self._runs:
                self._runs[number] = RunDigest(number)
            self._runs[number].take(rows)

    def _decoded(self, lines: Sequence[bytes]) -> Iterator[tuple[int, list[Any]]]:
        """The values of these rows, and the index of each. What cannot be read is counted, and left out.

        One at a time: where thousands of lists are there at once, the garbage collector takes longer than all else.
        """
        for index, line in enumerate(lines, self._taken):
            try:
                row = orjson.loads(line) if line.startswith(b"[") else json.loads(line)
                if type(row) is not list or len(row) != len(COLUMNS):
                    raise ValueError("not a row")
                if type(row[_TAGS]) is not dict or type(row[_RUN]) is not int or type(row[_STEP]) is not int:
                    raise ValueError("not the tags, the run and the step of a row")
            except ValueError as error:
                self.unread += 1
                logger.error("row %d cannot be read, and is in no summary: %s", index, error)
                continue
            yield index, row

    def _keep_up(self) -> None:
        pause = threading.Event()
        try:
            while self.behind > _PIECE:
                self._store.let_readers_go_first()
                began = time.monotonic()
                self.catch_up(_PIECE)
                # The interpreter is the hub's and the notebook's too.
                pause.wait(time.monotonic() - began)
        finally:
            self._is_busy = False

    def run(self, number: int) -> RunDigest:
        """The digest of a run as far as its rows were summed up; an empty one where it has none."""
        return self._runs.get(number) or RunDigest(number)

    @property
    def newest(self) -> RunDigest | None:
        """The digest of the newest run that has rows; None where there is none."""
        return self._runs[max(self._runs)] if self._runs else None

    def row(self, index: int) -> Row:
        """One of the store's rows."""
        [found] = self._store.rows(index, index + 1)
        return found

    def rows_of_step(self, run: RunDigest, step: int) -> list[Row]:
        """All rows of one step of a run, as they came."""
        values = run.values
        chosen = values.at[values.step == step]
        if not len(chosen):
            return []
        first = int(chosen[0])
        wanted = set(chosen.tolist())
        rows = self._store.rows(first, int(chosen[-1]) + 1)
        return [row for index, row in enumerate(rows, first) if index in wanted]


class FirstAbove:
    """Since which step each tap of a run diverges: looks at each row once, as long as the floor stays."""

    def __init__(self, run: RunDigest, floor: float) -> None:
        self.run, self.floor = run, floor
        self._seen = 0
        self._steps: dict[int, int] = {}
        self._first: tuple[int, int, str, int, int] | None = None

    def look(self) -> None:
        """Take in what is new."""
        values = self.run.values
        new = Values(*(column[self._seen :] for column in values))
        self._seen += len(new.at)
        with np.errstate(invalid="ignore"):
            above = (new.kind == COMPARED) & ((new.apart > self.floor) | (new.differ > 0))
        at = np.flatnonzero(above)
        places, first = np.unique(new.tap[at], return_index=True)
        for place, number in zip(places.tolist(), at[first].tolist(), strict=True):
            if place not in self._steps:
                self._steps[place] = int(new.step[number])
                side, rank = self.run.taps[place].receiver
                found = (int(new.step[number]), int(new.order[number]), side, rank, int(new.at[number]))
                self._first = found if self._first is None else min(self._first, found)

    def step_of(self, tap: TapDigest) -> int | None:
        """The first step at which this tap was above the floor; None where it never was."""
        return self._steps.get(tap.place)

    @property
    def first(self) -> int | None:
        """Which of the store's rows is the first above the floor, in execution order."""
        return None if self._first is None else self._first[-1]
