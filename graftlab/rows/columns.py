"""Rows by column, from which frames are made, in a fraction of the memory and time of one object per cell."""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from graftlab.base.tags import RESERVED_TAGS
from graftlab.rows.schema import COLUMNS, EXECUTION_ORDER, TABLE
from graftlab.rows.tables import IS_JSON, SCHEMA, Array, dictionary_of, repeated_tags, values_of_texts

_COUNTS = frozenset(column.name for column in TABLE if column.is_nullable and column.storage == "integer")
_STORAGE = {column.name: column.storage for column in TABLE}
_TAGS_WITH_A_COLUMN = RESERVED_TAGS.intersection(COLUMNS)

BECAME = "became"
"""A column of frames that follows from others: whose statistics in the row are those of the value that the model
continued with. A graft is measured before it overwrites, so the receiver's own statistics are of a replaced value."""
_ABSENT: Any = object()
# The least number of rows to leave room for.
_LEAST_ROOM = 1024
# Bytes of an array from which on numpy asks for huge pages.
_HUGE_FROM = 1 << 22
_THEIR_OWN_KEYS = {str, type(None), object}

Block = dict[str, Array]


class Columns:
    """Makes blocks of rows, and puts blocks together. One thread at a time.

    A block is some rows as one array a column: of float64, int64 or objects, or, for what mostly repeats, of places in
    a table of the values; the tags in it lack their rows' steps. A tag's column is called ``.tag`` in it. Blocks are
    never changed, so frames may share them.
    """

    def __init__(self, *, grows: bool = False) -> None:
        """``grows`` leaves room behind merged rows, so that later rows are written there and nothing is copied."""
        self._values: dict[str, DistinctValues] = {}
        self._grows = grows
        # Arrays of one length; the columns of merged blocks are their first parts.
        self._arrays: dict[str, Array] = {}

    def empty(self) -> Block:
        """A block without rows."""
        return self.block(SCHEMA.empty_table())

    def block(self, table: pa.Table) -> Block:
        """The rows of a table of :mod:`.tables`, as they come. Raises ValueError for text that no row has."""
        made: Block = {}
        tags: Sequence[Any] = ()
        rows_of_tags = np.zeros(0, np.int32)
        for column in TABLE:
            cells = table.column(column.name)
            if column.storage == "float" or column.name in _COUNTS:
                # Counts that rows without a measurement lack are floats too. Not a nullable type of pandas: its 0 / 0
                # is NA, which raises where a number is compared.
                made[column.name] = cells.to_numpy().astype(np.float64, copy=False)
                continue
            if column.storage == "integer":
                made[column.name] = cells.to_numpy()
                continue
            texts, places = dictionary_of(cells)
            if column.storage == "tags":
                tags, rows_of_tags = repeated_tags(texts, column), places
                made[column.name] = self.values_of(column.name).places(tags, texts)[places]
                continue
            values = values_of_texts(texts, column) if column.storage in IS_JSON else texts
            if column.storage == "index":
                made[column.name] = _objects(values)[places]
            else:
                keys = [None if v is None else tuple(v) for v in values] if column.storage == "list" else values
                made[column.name] = self.values_of(column.name).places(values, keys)[places]
        return made | self._of_tags(tags, rows_of_tags)

    def _of_tags(self, tags: Sequence[Any], rows: Array) -> Block:
        """A column for each tag that has none, called ``.tag``; ``rows`` has the place of each row's tags."""
        made = {}
        tags = [{} if each is None else each.tags for each in tags]
        for name in dict.fromkeys(name for names in dict.fromkeys(map(tuple, tags)) for name in names):
            if name not in _TAGS_WITH_A_COLUMN:
                values = [each.get(name, _ABSENT) for each in tags]
                made[f".{name}"] = self.values_of(f".{name}").places(values, _keys(values))[rows]
        return made

    def merge(self, ordered: Block, more: Iterable[Block], count: int) -> Block:
        """All of these rows in :data:`.schema.EXECUTION_ORDER`, which ``ordered``, that came from here, is in already.

        The rows of ``ordered`` are not moved: they may stay where they are in what is returned. ``more`` has about
        ``count`` rows. Each block of it is copied when it comes, so that it need not be in memory longer.
        """
        known = at = len(ordered["step"])
        arrays, is_shown = self._arrays, True
        if not self._is_here(ordered) or known + count > len(arrays["step"]):
            arrays, is_shown = self._elsewhere(ordered, known + count), False
        for block in more:
            end = at + len(block["step"])
            if end > len(arrays["step"]):
                arrays, is_shown = self._elsewhere({name: array[:at] for name, array in arrays.items()}, end), False
            for name in [name for name in block if name not in arrays]:
                # A tag that no row had before.
                arrays[name] = _zeros(len(arrays["step"]), np.dtype(np.int32))
            for name, array in arrays.items():
                # An interrupt may have left rows in arrays that frames show; others have zeros here.
                if is_shown or (name in block and _has_any(block[name])):
                    array[at:end] = block.get(name, 0)
            at = end
        by = [self._sortable(name, arrays[name][known:at]) for name in EXECUTION_ORDER]
        is_sorted = _is_sorted(by)
        if at > known:
            least = 0 if is_sorted else np.lexsort(by[::-1])[0]
            # Most new rows come after the known ones, except those of the step that is running.
            stays = self._first_after(ordered, tuple(column[least] for column in by))
            if stays < known and is_shown:
                arrays = self._elsewhere({name: array[:at] for name, array in arrays.items()}, at)
            if stays < known or not is_sorted:
                order = np.lexsort([self._sortable(name, arrays[name][stays:at]) for name in reversed(EXECUTION_ORDER)])
                for array in arrays.values():
                    array[stays:at] = array[stays:at][order]
        # At once, because the stop button may interrupt this anywhere.
        self._arrays = arrays
        return {name: array[:at] for name, array in arrays.items()}

    def _elsewhere(self, block: Block, count: int) -> dict[str, Array]:
        """Other arrays, which begin with the block, for ``count`` rows and more; frames show the present ones."""
        room = count + (count // 8 + _LEAST_ROOM if self._grows else 0)
        arrays = {}
        for name, cells in block.items():
            arrays[name] = _zeros(room, cells.dtype)
            if _has_any(cells):
                arrays[name][: len(cells)] = cells
        return arrays

    def _is_here(self, block: Block) -> bool:
        """Whether a block's columns are the first part of these arrays."""
        return bool(self._arrays) and block["step"].base is self._arrays["step"]

    def _first_after(self, ordered: Block, row: tuple[Any, ...]) -> int:
        """The place of the first of these rows that comes after ``row`` in :data:`.schema.EXECUTION_ORDER`."""
        low, high = 0, len(ordered["step"])
        for name, value in zip(EXECUTION_ORDER, row, strict=True):
            cells = self._sortable(name, ordered[name][low:high])
            low, high = (low + int(np.searchsorted(cells, value, side)) for side in ("left", "right"))
        return high

    def has_room(self, block: Block) -> bool:
        """Whether the columns of a block are the first part of longer arrays."""
        return self._grows and self._is_here(block)

    @staticmethod
    def tags_in(block: Block) -> list[str]:
        """The columns of tags that some of these rows have."""
        return [name for name, cells in block.items() if name.startswith(".") and cells.any()]

    def text(self, name: str, block: Block, start: int = 0) -> tuple[Sequence[Any], Array]:
        """The values of a column, and the place among them of those of each row from ``start`` on."""
        if name != BECAME:
            return self.values_of(name).known, block[name][start:]
        is_grafted = self.values_of("status").equal("grafted")[block["status"][start:]]
        is_to_baseline = self.values_of("direction").equal("t2b")[block["direction"][start:]]
        places = np.where(is_grafted, is_to_baseline, block["side"][start:] + 2)
        return ["baseline", "target", *self.values_of("side").known], places

    def _sortable(self, name: str, cells: Array) -> Array:
        return self.values_of(name).ranks()[cells] if _STORAGE[name] == "text" else cells

    def values_of(self, name: str) -> DistinctValues:
        """The distinct values of a column."""
        return self._values.setdefault(name, DistinctValues())


def repeats(name: str) -> bool:
    """Whether a column's cells are places in a table of its values."""
    return _STORAGE.get(name, "text") in ("text", "list")


class DistinctValues:
    """The distinct values of a column, each at its place; the first is for rows that lack the column."""

    def __init__(self) -> None:
        self._values: list[Any] = [None]
        self._places: dict[Any, int] = {_ABSENT: 0}

    def places(self, cells: Sequence[Any], keys: Sequence[Any]) -> Array:
        """The places of these values; their ``keys`` differ where they do."""
        new = set(keys).difference(self._places)
        if new:
            for key, value in zip(keys, cells, strict=True):
                if key in new and key not in self._places:
                    self._values.append(value)
                    self._places[key] = len(self._values) - 1
        return np.fromiter(map(self._places.__getitem__, keys), np.int32, len(keys))

    def ranks(self) -> Array:
        """The rank of each value among all of them as text."""
        return np.argsort(np.argsort([str(value) for value in self._values], kind="stable"))

    @property
    def known(self) -> Sequence[Any]:
        """The values, each at its place."""
        return self._values

    def equal(self, value: str) -> Array:
        """Which of the values equal this one."""
        return np.array([each == value for each in self._values])


def _objects(values: Iterable[Any]) -> Array:
    found = list(values)
    return np.fromiter(found, object, len(found))


def _keys(cells: Sequence[Any]) -> Sequence[Any]:
    """Keys that differ where values do: True, 1 and 1.0 are equal, but not the same value."""
    kinds = set(map(type, cells))
    if kinds <= _THEIR_OWN_KEYS:
        return cells
    if kinds == {int}:
        return list(zip(itertools.repeat(int), cells, strict=False))
    return [cell if type(cell) in _THEIR_OWN_KEYS else (type(cell), _hashable(cell)) for cell in cells]


def _hashable(value: Any) -> Any:
    return value if type(value) in (int, float, bool) else repr(value)


def _zeros(count: int, dtype: np.dtype[Any]) -> Array:
    """Zeros in pages of the usual size, or an array for objects.

    The first use of memory costs more than all else here. For large arrays numpy asks for huge pages, which are four
    times as expensive in a virtual machine whose host takes free memory back: it takes only what is huge.
    """
    if dtype.hasobject:
        return np.empty(count, dtype)
    size = count * dtype.itemsize
    if size < _HUGE_FROM:
        return np.zeros(count, dtype)
    return np.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype)


def _has_any(cells: Array) -> bool:
    """Whether cells need to be written into memory of zeros.

    Many columns of a session have nothing but zeros, such as the number of its only rank.
    """
    # By their bits, because -0.0 is not zero there.
    return cells.dtype == object or bool(cells.view(f"i{cells.dtype.itemsize}").any())


def _is_sorted(by: Sequence[Array]) -> bool:
    """Whether rows are sorted by these columns, the most significant first."""
    before = np.ones(max(0, len(by[0]) - 1), bool)  # equal in all columns so far
    for column in by:
        if (before & (column[1:] < column[:-1])).any():
            return False
        before &= column[1:] == column[:-1]
    return True
