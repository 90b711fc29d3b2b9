"""Blocks of rows as pandas frames. A frame with more rows than the last one costs only the new rows."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from graftlab.rows.columns import BECAME, Block, Columns, repeats
from graftlab.rows.rendering import RowsFrame
from graftlab.rows.schema import COLUMNS
from graftlab.rows.tables import Array
from graftlab.rows.tags_column import TagsColumn

# From 3.0 on pandas itself copies what two frames share, when one of them is changed.
_COPY_ON_WRITE = int(pd.__version__.partition(".")[0]) >= 3


def _type_of_texts() -> Any:
    inferred: Any = pd.Series(["text"]).dtype
    if not isinstance(inferred, pd.StringDtype):
        return inferred
    # Each row has a pointer to its text, which it shares with others; Arrow's strings would have a copy a row.
    missing: Any = inferred.na_value
    return pd.StringDtype("python", na_value=missing)


_TEXT = _type_of_texts()
"""The type that pandas gives a column of texts."""

# Rows whose temporary arrays stay in the processor's cache, and in memory that is used again.
_PART = 1 << 16


def frame_of(columns: Columns, block: Block) -> pd.DataFrame:
    """The frame of a block: the types of its columns follow from the values that these rows have."""
    made: dict[str, Any] = {}
    room = np.empty(len(block["step"]), np.intp)
    for name in [*COLUMNS, BECAME, *columns.tags_in(block)]:
        if repeats(name):
            values, places = columns.text(name, block)
            cells = _taken(*_used_values(values, _used(places, len(values))), places, room)
        else:
            cells = _column(columns, name, block[name], block["step"])
        made[_name_in_frame(name, made)] = cells
    return _frame(made, len(block["step"]))


class GrowingFrame:
    """Makes frames of successive blocks; :meth:`Columns.merge` made each from the one before and more rows.

    A frame's columns are the first part of arrays that are longer. Later rows are written behind what frames show.
    """

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._texts: dict[str, _TextColumn] = {}
        # Frames of the whole arrays. pandas copies what a user changes as long as another frame shows it, so each is
        # kept for as long as rows are still written into any of its arrays.
        self._wholes: list[pd.DataFrame] = []
        self._arrays: list[Any] = []

    def of(self, block: Block) -> pd.DataFrame:
        """The frame of a block. The caller may change it."""
        if not _COPY_ON_WRITE:
            return frame_of(self._columns, {name: cells.copy() for name, cells in block.items()})
        if not self._columns.has_room(block):
            return frame_of(self._columns, block)
        steps: Any = block["step"].base
        if not self._arrays or self._arrays[0] is not steps:
            self._texts, self._wholes, self._arrays = {}, [], []
        wholes: dict[str, Any] = {}
        arrays = [steps]
        room = np.empty(len(steps), np.intp)
        for name in [*COLUMNS, BECAME, *self._columns.tags_in(block)]:
            if repeats(name):
                if name not in self._texts:
                    self._texts[name] = _TextColumn(self._columns, name)
                array = column = self._texts[name].upto(block, room)
            else:
                array = block[name].base
                assert array is not None
                column = _column(self._columns, name, array, steps)
            arrays.append(array)
            wholes[_name_in_frame(name, wholes)] = column
        if len(arrays) != len(self._arrays) or any(a is not b for a, b in zip(arrays, self._arrays, strict=True)):
            self._wholes.append(_frame(wholes, len(steps)))
            self._arrays = arrays
        return self._wholes[-1].iloc[: len(block["step"])]


class _TextColumn:
    """A column of values that repeat, with room behind it."""

    def __init__(self, columns: Columns, name: str) -> None:
        self._columns, self._name = columns, name
        self._state = _TextState(0, np.zeros(0, bool), None, np.zeros(0, np.intp), None)

    def upto(self, block: Block, room: Array) -> Any:
        """The whole array, as long as ``room``, of the type that the block's values have, and filled with them."""
        count, used, known, at, whole = self._state
        values, places = self._columns.text(self._name, block, count)
        now = _used(places, len(values))
        now[: len(used)] |= used
        if whole is None or now.sum() > used.sum():
            known, at = _used_values(values, now)
        upto = count + len(places)
        if whole is not None and known.dtype == whole.dtype:
            whole[count:upto] = _taken(known, at, places, room)
        else:
            if count:
                _, places = self._columns.text(self._name, block)
            whole = _taken(known, at, places, room, int(np.argmax(now)))
        # At once, because the stop button may interrupt this anywhere.
        self._state = _TextState(upto, now, known, at, whole)
        return whole


class _TextState(NamedTuple):
    upto: int
    used: Array
    """Which of the values have been seen."""
    known: Any
    at: Array
    whole: Any


def _column(columns: Columns, name: str, cells: Array, steps: Array) -> Any:
    """A column of numbers, objects or tags, as a frame takes it; ``steps`` are those of the same rows."""
    if name == "tags":
        return TagsColumn(columns.values_of(name).known, cells, steps)
    return cells


def _frame(columns: dict[str, Any], count: int) -> pd.DataFrame:
    """The frame of these columns of ``count`` rows; it shares their memory."""
    index = pd.RangeIndex(count)
    for name, cells in columns.items():
        # Not columns of text, which are instances of it too.
        array = cells.to_numpy() if type(cells) is pd.arrays.NumpyExtensionArray else cells
        if isinstance(array, np.ndarray) and array.dtype == object:
            # Otherwise pandas searches all objects for a common type.
            columns[name] = pd.Series(array, index, dtype=object, copy=False)
    return RowsFrame(columns, index=index, copy=False)


def _name_in_frame(name: str, others: Container[str]) -> str:
    """The name of a block's column in a frame that has these others already."""
    if name.startswith("."):
        name = name[1:]
        while name in others:
            name = f"tag_{name}"
    return name


def _used_values(values: Sequence[Any], used: Array) -> tuple[Any, Array]:
    """An array of the values that are used, of the type that pandas gives it, and the place in it of each value.

    The others do not count, because they might make it of another type.
    """
    chosen = [value for value, is_used in zip(values, used, strict=True) if is_used]
    kinds = {*map(type, chosen)}
    if str in kinds and kinds <= {str, type(None)}:
        # pandas would search for a common type, which takes ten times as long.
        array = pd.array(chosen, dtype=_TEXT)
    else:
        array = pd.Series(chosen, dtype=object if chosen == [None] else None).array
    return array, np.maximum(np.cumsum(used) - 1, 0)


def _used(places: Array, count: int) -> Array:
    """Which of ``count`` values these places are of."""
    used = np.zeros(count, bool)
    for start in range(0, len(places), _PART):
        used |= np.bincount(places[start : start + _PART], minlength=count) > 0
    return used


def _taken(known: Any, at: Array, places: Array, room: Array, behind: int | None = None) -> Any:
    """The value at each of these places; with ``behind``, the value of that place fills up the room.

    ``room`` is memory for as many numbers or more: new memory costs more than all else here, so columns share it.
    """
    if not len(known):
        return known
    index = room[: len(places)] if behind is None else room
    if len(known) == 1 and known[0] is None:
        # An empty array of objects is one of None, and takes neither time nor memory.
        return pd.arrays.NumpyExtensionArray(np.empty(len(index), object))
    for start in range(0, len(places), _PART):
        part = places[start : start + _PART]
        index[start : start + len(part)] = at[part]
    if behind is not None:
        index[len(places) :] = at[behind]
    return known.take(index)
