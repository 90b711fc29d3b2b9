"""Rows by column: what frames are made of, in a fraction of the memory and time that an object a cell would take."""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from graftlab.base.tags import RESERVED_TAGS
from graftlab.rows.parsing import NO_INTEGER, Array, Parsed, Repeated
from graftlab.rows.rendering import RowsFrame
from graftlab.rows.schema import COLUMNS, EXECUTION_ORDER, TABLE

_COUNTS = frozenset(column.name for column in TABLE if column.is_nullable and column.storage == "integer")
_STORAGE = {column.name: column.storage for column in TABLE}
_TAGS_WITH_A_COLUMN = RESERVED_TAGS.intersection(COLUMNS)

BECAME = "became"
"""A column of frames that follows from others: whose statistics in the row are those of the value that the model went
on with. A graft is measured before it overwrites, so those of the receiver's own side are of what is gone."""
_ABSENT: Any = object()
# Rows for which room is left, at the least.
_LEAST_ROOM = 1024
_THEIR_OWN_KEYS = {str, type(None), object}

Block = dict[str, Array]


class Columns:
    """Makes blocks of rows, puts blocks together, and makes frames of them. One thread at a time.

    A block is some rows as one array a column: of float64, int64 or objects, or, for what mostly repeats, of places in
    a table of the values. A tag's column is called ``.tag`` in it. Blocks are never changed, so frames may share them.
    """

    def __init__(self, *, grows: bool = False) -> None:
        """``grows``: room is left behind what is merged, so that later rows are put there and nothing is copied."""
        self._tables: dict[str, Table] = {}
        self._grows = grows
        # What the columns of merged blocks are the first part of, all of one length.
        self._room = 0
        self._arrays: dict[str, Array] = {}

    def block(self, rows: Sequence[Sequence[Any]] | Parsed) -> Block:
        """Rows as they come, each the values of :data:`.schema.COLUMNS`. Raises ValueError for other lengths."""
        if isinstance(rows, Parsed):
            held = {name: _without_counts(cells) if name in _COUNTS else cells for name, cells in rows.numbers.items()}
            for name, (values, places) in rows.others.items():
                held[name] = self._held(name, values)[places]
            tags, rows_of = rows.others["tags"]
            held["tags"] = _with_steps(rows.others["tags"], rows.tag_steps)
            made = {name: held[name] for name in COLUMNS}
            made.update((name, column[rows_of]) for name, column in self._of_tags(tags).items())
            return made
        cells = zip(*rows, strict=True) if rows else [()] * len(COLUMNS)
        made = {name: self._held(name, each) for name, each in zip(COLUMNS, cells, strict=True)}
        return made | self._of_tags(made["tags"])

    def _held(self, name: str, cells: Sequence[Any]) -> Array:
        storage = _STORAGE[name]
        if storage == "float":
            return np.array(cells, dtype=np.float64)
        if storage == "integer":
            # Counts that rows without a measurement lack. Not a nullable type of pandas: its 0 / 0 is NA, which raises
            # where a number is compared.
            if name in _COUNTS:
                return np.array(cells, dtype=np.float64)
            return np.array([NO_INTEGER if v is None else v for v in cells] if None in cells else cells, np.int64)
        if storage == "tags":
            return np.fromiter(cells, object, len(cells))
        if storage == "index":
            # A tuple indexes a tensor as it is, and the garbage collector stops tracking it.
            return np.fromiter((None if v is None else tuple(v) for v in cells), object, len(cells))
        keys = [None if v is None else tuple(v) for v in cells] if storage == "list" else _keys(cells)
        return self._table(name).places(cells, keys)

    def _of_tags(self, cells: Iterable[Any]) -> Block:
        """A column for each tag that has none, called ``.tag``."""
        tags = [cell or {} for cell in cells]
        made = {}
        for name in dict.fromkeys(name for names in dict.fromkeys(map(tuple, tags)) for name in names):
            if name not in _TAGS_WITH_A_COLUMN:
                values = [cell.get(name, _ABSENT) for cell in tags]
                made[f".{name}"] = self._table(f".{name}").places(values, _keys(values))
        return made

    def merge(self, ordered: Block, more: Sequence[Block], shown: int | None = None) -> Block:
        """All of these rows in :data:`.schema.EXECUTION_ORDER`, which ``ordered``, that came from here, is in already.

        The rows that ``ordered`` has are not moved: they may stand where they are in what is returned. With ``shown``
        only so many of them are not: no frame shows the others, and ``ordered`` is not to be used any more.
        """
        more = [block for block in more if len(block["step"])]
        if not more:
            return {name: _column(ordered, name) for name in self._names()}
        by = [self._sortable(name, np.concatenate([block[name] for block in more])) for name in EXECUTION_ORDER]
        is_sorted = _is_sorted(by)
        least = 0 if is_sorted else np.lexsort(by[::-1])[0]
        known, count = len(ordered["step"]), len(by[0])
        # Most new rows go behind the known ones, except those of the step that is going on.
        stays = self._first_after(ordered, tuple(column[least] for column in by))
        if stays < (known if shown is None else shown) or known + count > self._room:
            # Elsewhere, because frames may show what is here.
            self._room = known + count + ((known + count) // 2 + _LEAST_ROOM if self._grows else 0)
            self._arrays = {}
        made = {name: self._extended(_column(ordered, name), name, more) for name in self._names()}
        if stays < known or not is_sorted:
            order = np.lexsort([self._sortable(name, made[name][stays:]) for name in reversed(EXECUTION_ORDER)])
            for column in made.values():
                column[stays:] = column[stays:][order]
        return made

    def _extended(self, column: Array, name: str, more: Sequence[Block]) -> Array:
        """The column with that of these blocks behind it, where it lies, if there is room behind it."""
        at, array = len(column), self._arrays.get(name)
        if array is None or column.base is not array:
            array = self._arrays[name] = np.empty(self._room, column.dtype)
            array[:at] = column
        end = at + sum(len(block["step"]) for block in more)
        np.concatenate([_column(block, name) for block in more], out=array[at:end])
        return array[:end]

    def _names(self) -> list[str]:
        """All columns of a block that lacks none."""
        return [*COLUMNS, *(name for name in self._tables if name.startswith("."))]

    def _first_after(self, ordered: Block, row: tuple[Any, ...]) -> int:
        """The place of the first of these rows that comes after ``row`` in :data:`.schema.EXECUTION_ORDER`."""
        low, high = 0, len(ordered["step"])
        for name, value in zip(EXECUTION_ORDER, row, strict=True):
            cells = self._sortable(name, ordered[name][low:high])
            low, high = (low + int(np.searchsorted(cells, value, side)) for side in ("left", "right"))
        return high

    def frame(self, block: Block) -> pd.DataFrame:
        """The frame of a block: the types of its columns follow from the values that these rows have."""
        columns: dict[str, Any] = {}
        for name in [*COLUMNS, BECAME, *self.tags_in(block)]:
            cells = _as_pandas_holds(*self.text(name, block)) if repeats(name) else cells_in_frame(block[name])
            columns[name_in_frame(name, columns)] = cells
        return RowsFrame(columns, copy=False)

    @staticmethod
    def tags_in(block: Block) -> list[str]:
        """The columns of tags that some of these rows have."""
        return [name for name, cells in block.items() if name.startswith(".") and cells.any()]

    def text(self, name: str, block: Block, start: int = 0) -> tuple[Sequence[Any], Array]:
        """The values of a column, and the place among them of those of each row from ``start`` on."""
        if name != BECAME:
            return self._table(name).known, block[name][start:]
        is_grafted = self._table("status").equal("grafted")[block["status"][start:]]
        is_to_baseline = self._table("direction").equal("t2b")[block["direction"][start:]]
        places = np.where(is_grafted, is_to_baseline, block["side"][start:] + 2)
        return ["baseline", "target", *self._table("side").known], places

    def _sortable(self, name: str, cells: Array) -> Array:
        return self._table(name).ranks()[cells] if _STORAGE[name] == "text" else cells

    def _table(self, name: str) -> Table:
        return self._tables.setdefault(name, Table())


def repeats(name: str) -> bool:
    """Whether a column's cells are places in a table of its values."""
    return _STORAGE.get(name, "text") in ("text", "list")


def cells_in_frame(cells: Array) -> Any:
    """A column of numbers or objects, as a frame takes it."""
    # Objects are not to be looked through for what type they might be instead.
    return cells if cells.dtype != object else pd.arrays.NumpyExtensionArray(cells)


def name_in_frame(name: str, others: Container[str]) -> str:
    """What a block's column is called in a frame that has these others already."""
    if name.startswith("."):
        name = name[1:]
        while name in others:
            name = f"tag_{name}"
    return name


class Table:
    """The distinct values of a column, each at its place; the first is that of rows that do not have this column."""

    def __init__(self) -> None:
        self._values: list[Any] = [None]
        self._places: dict[Any, int] = {_ABSENT: 0}

    def places(self, cells: Sequence[Any], keys: Sequence[Any]) -> Array:
        """Where these values are; ``keys`` are what to tell them apart by."""
        new = set(keys).difference(self._places)
        if new:
            for key, value in zip(keys, cells, strict=True):
                if key in new and key not in self._places:
                    self._values.append(value)
                    self._places[key] = len(self._values) - 1
        return np.fromiter(map(self._places.__getitem__, keys), np.int32, len(keys))

    def ranks(self) -> Array:
        """Where each value stands among all of them as text."""
        return np.argsort(np.argsort([str(value) for value in self._values], kind="stable"))

    @property
    def known(self) -> Sequence[Any]:
        return self._values

    def equal(self, value: str) -> Array:
        """Which of the values are this one."""
        return np.array([each == value for each in self._values])


def _as_pandas_holds(values: Sequence[Any], places: Array) -> Any:
    """The values at these places, of the type that a column of just these has."""
    used = np.bincount(places, minlength=len(values)) > 0
    return taken(*told_apart(values, used), places)


def told_apart(values: Sequence[Any], used: Array) -> tuple[Any, Array]:
    """An array of the values that are used, of the type that pandas gives it, and the place in it of each value.

    The others do not count, because they might make it of another type.
    """
    chosen = [value for value, is_used in zip(values, used, strict=True) if is_used]
    return pd.Series(chosen, dtype=object if chosen == [None] else None).array, np.maximum(np.cumsum(used) - 1, 0)


def taken(known: Any, at: Array, places: Array) -> Any:
    if not len(known):
        return known
    if len(known) == 1 and known[0] is None:
        # An empty array of objects is one of None, and takes neither time nor memory.
        return pd.arrays.NumpyExtensionArray(np.empty(len(places), object))
    return known.take(at[places])


def _without_counts(cells: Array) -> Array:
    made = cells.astype(np.float64)
    made[cells == NO_INTEGER] = np.nan
    return made


def _with_steps(tags: Repeated, steps: Array) -> Array:
    """The tags of each row, with the step in them; neighbours that have the same ones share them."""
    values, places = tags
    if not (steps != NO_INTEGER).any():
        return np.fromiter(values, object, len(values))[places]
    made: list[Any] = []
    last_place = last_step = -1
    of_this: Any = None
    for place, step in zip(places.tolist(), steps.tolist(), strict=True):
        if step != last_step or place != last_place:
            last_place, last_step, of_this = place, step, values[place]
            if step != NO_INTEGER:
                of_this = of_this.copy()
                of_this["step"] = step
        made.append(of_this)
    return np.fromiter(made, object, len(made))


def _keys(cells: Sequence[Any]) -> Sequence[Any]:
    """What to tell values apart by: True, 1 and 1.0 are equal, and not the same value."""
    kinds = set(map(type, cells))
    if kinds <= _THEIR_OWN_KEYS:
        return cells
    if kinds == {int}:
        return list(zip(itertools.repeat(int), cells, strict=False))
    return [cell if type(cell) in _THEIR_OWN_KEYS else (type(cell), _hashable(cell)) for cell in cells]


def _hashable(value: Any) -> Any:
    return value if type(value) in (int, float, bool) else repr(value)


def _is_sorted(by: Sequence[Array]) -> bool:
    """Whether rows are in the order of these columns, the first of which counts most."""
    before = np.ones(max(0, len(by[0]) - 1), bool)  # equal in all columns so far
    for column in by:
        if (before & (column[1:] < column[:-1])).any():
            return False
        before &= column[1:] == column[:-1]
    return True


def _column(block: Block, name: str) -> Array:
    column = block.get(name)
    return np.zeros(len(block["step"]), np.int32) if column is None else column
