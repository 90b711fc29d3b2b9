"""Rows by column: what frames are made of, in a fraction of the memory and time that an object a cell would take."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from graftlab.base.tags import RESERVED_TAGS
from graftlab.rows.parsing import Parsed
from graftlab.rows.rendering import RowsFrame
from graftlab.rows.schema import COLUMNS, EXECUTION_ORDER, TABLE

_NULLABLE = frozenset(column.name for column in TABLE if column.is_nullable)
_STORAGE = {column.name: column.storage for column in TABLE}
_TAGS_WITH_A_COLUMN = RESERVED_TAGS.intersection(COLUMNS)

# Rows without a measurement have no counts, and an integer array cannot hold None.
_NO_INTEGER = np.iinfo(np.int64).max
BECAME = "became"
"""A column of frames that follows from others: whose statistics in the row are those of the value that the model went
on with. A graft is measured before it overwrites, so those of the receiver's own side are of what is gone."""
_ABSENT: Any = object()
_THEIR_OWN_KEYS = {str, type(None), object}

Array = npt.NDArray[Any]
Block = dict[str, Array]


class Columns:
    """Makes blocks of rows, puts blocks together, and makes frames of them. One thread at a time.

    A block is some rows as one array a column: of float64, int64 or objects, or, for what mostly repeats, of places in
    a table of the values. A tag's column is called ``.tag`` in it. Blocks are never changed, so frames may share them.
    """

    def __init__(self) -> None:
        self._tables: dict[str, _Table] = {}

    def block(self, rows: Sequence[Sequence[Any]] | Parsed) -> Block:
        """Rows as they come, each the values of :data:`.schema.COLUMNS`. Raises ValueError for other lengths."""
        if isinstance(rows, Parsed):
            held = dict(rows.numbers)
            for name, (values, places) in rows.others.items():
                held[name] = self._held(name, values)[places]
            made = {name: held[name] for name in COLUMNS}
            tags, rows_of = rows.others["tags"]
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
            known = [_NO_INTEGER if v is None else v for v in cells] if None in cells else cells
            return np.array(known, dtype=np.int64)
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

    def merge(self, ordered: Block, more: Sequence[Block]) -> Block:
        """All of these rows in :data:`.schema.EXECUTION_ORDER`, which ``ordered`` is in already."""
        more = [block for block in more if len(block["step"])]
        if not more:
            return {name: _column(ordered, name) for name in self._names()}
        new = {name: _joined(name, more) for name in self._names()}
        by = [self._sortable(name, new[name]) for name in EXECUTION_ORDER]
        if not _is_sorted(by):
            order = np.lexsort(by[::-1])
            new = {name: column[order] for name, column in new.items()}
            by = [column[order] for column in by]
        # Most new rows go behind the known ones, except those of the step that is going on.
        stays = self._first_after(ordered, tuple(column[0] for column in by))
        if stays < len(ordered["step"]):
            rest = [{name: _column(ordered, name)[stays:] for name in self._names()}, new]
            order = np.lexsort([self._sortable(name, _joined(name, rest)) for name in reversed(EXECUTION_ORDER)])
            new = {name: _joined(name, rest)[order] for name in self._names()}
        if not stays:
            return new
        return {name: np.concatenate([_column(ordered, name)[:stays], column]) for name, column in new.items()}

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
        columns: dict[str, Any] = {name: self._cells(name, block[name]) for name in COLUMNS}
        columns[BECAME] = self._became(block)
        for name, cells in block.items():
            if name.startswith(".") and cells.any():
                column = name[1:]
                while column in columns:
                    column = f"tag_{column}"
                columns[column] = self._cells(name, cells)
        return RowsFrame(columns, copy=False)

    def _became(self, block: Block) -> Any:
        is_grafted = self._table("status").equal("grafted")[block["status"]]
        is_to_baseline = self._table("direction").equal("t2b")[block["direction"]]
        sides = self._table("side").known
        places = np.where(is_grafted, is_to_baseline, block["side"] + 2)
        return _as_pandas_holds(["baseline", "target", *sides], places)

    def _cells(self, name: str, cells: Array) -> Any:
        storage = _STORAGE.get(name)
        if storage in ("float", "index", "tags"):
            return cells
        if storage == "integer":
            # Not a nullable type of pandas: its 0 / 0 is NA, which raises where a number is compared.
            return np.where(cells == _NO_INTEGER, np.nan, cells) if name in _NULLABLE else cells
        return self._table(name).values(cells)

    def _sortable(self, name: str, cells: Array) -> Array:
        return self._table(name).ranks()[cells] if _STORAGE[name] == "text" else cells

    def _table(self, name: str) -> _Table:
        return self._tables.setdefault(name, _Table())


class _Table:
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

    def values(self, places: Array) -> Any:
        """The values at these places as pandas would hold them if it had been given each."""
        return _as_pandas_holds(self._values, places)


def _as_pandas_holds(values: Sequence[Any], places: Array) -> Any:
    """The values at these places, of the type that a column of just these has."""
    used = np.bincount(places, minlength=len(values)) > 0
    chosen = [value for value, is_used in zip(values, used, strict=True) if is_used]
    if chosen == [None]:
        # An empty array of objects is one of None, and takes neither time nor memory.
        return pd.arrays.NumpyExtensionArray(np.empty(len(places), object))
    found = pd.Series(chosen).array
    # The others must not change the type of these, so they are stood in for.
    return found.take(np.maximum(np.cumsum(used) - 1, 0)).take(places) if len(found) else found


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


def _joined(name: str, blocks: Sequence[Block]) -> Array:
    return np.concatenate([_column(block, name) for block in blocks])
