"""The column of tags in a frame: a dict for each cell, made when the cell is read.

A million rows have a million different dicts, because each has its row's step. Made in advance, they would take most of
a frame's time and memory; most readers of a frame never look at them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pyarrow as pa
from pandas.api.extensions import ExtensionArray, ExtensionDtype, take
from pandas.api.indexers import check_array_indexer

from graftlab.rows.tables import Array, RepeatedTags, with_steps

# Dicts that exist at the same time while a column is read from its first row to its last.
_AT_ONCE = 1 << 12


class TagsDtype(ExtensionDtype):
    """The type of the column of tags. ``astype(object)`` makes the column an ordinary one."""

    # As it was written, so that files that pandas makes of a frame are read where graftlab is not installed.
    name = "object"
    type: ClassVar[Any] = dict
    na_value = np.nan

    @classmethod
    def construct_array_type(cls) -> Any:
        """The class of its columns."""
        return TagsColumn


class TagsColumn(ExtensionArray):
    """A column of dicts. pandas treats it as one of objects, except that two reads of a cell give two equal dicts.

    It has the place of each row's tags among the distinct ones, and the row's step. Where a cell has been replaced, or
    has no tags, it has the cells themselves.
    """

    def __init__(self, known: Sequence[RepeatedTags], places: Array, steps: Array) -> None:
        """``known`` may grow, and is not changed otherwise; of the arrays, only what a frame shows need be filled."""
        self._known, self._places, self._steps = known, places, steps
        self._cells: Array | None = None

    @classmethod
    def _of_cells(cls, cells: Array) -> TagsColumn:
        column = cls((), np.zeros(0, np.int32), np.zeros(0, np.int64))
        column._cells = cells
        return column

    @classmethod
    def _from_sequence(cls, scalars: Any, *, dtype: Any = None, copy: bool = False) -> TagsColumn:
        return cls._of_cells(np.fromiter(scalars, object, len(scalars)))

    def _cast_pointwise_result(self, values: Any) -> Any:
        # What a function made of the cells is usually no column of tags.
        return pd.Series(list(values)).array

    @classmethod
    def _concat_same_type(cls, to_concat: Sequence[TagsColumn]) -> TagsColumn:
        if any(each._cells is not None for each in to_concat):
            return cls._of_cells(np.concatenate([each.to_cells() for each in to_concat]))
        known: list[RepeatedTags] = []
        places, starts = [], dict[int, int]()
        for each in to_concat:
            # Parts of one session's frames have one list.
            if id(each._known) not in starts:
                starts[id(each._known)] = len(known)
                known += each._known
            places.append(each._places + np.int32(starts[id(each._known)]))
        return cls(known, np.concatenate(places), np.concatenate([each._steps for each in to_concat]))

    def to_cells(self) -> Array:
        """All cells, as an array of objects."""
        if self._cells is not None:
            return self._cells
        return with_steps(self._known, self._places, self._steps)

    @property
    def dtype(self) -> TagsDtype:
        """The type of the column."""
        return TagsDtype()

    @property
    def nbytes(self) -> int:
        """Bytes of the column without the distinct tags, which all frames of a session share."""
        if self._cells is not None:
            return self._cells.nbytes
        return self._places.nbytes + self._steps.nbytes

    def __len__(self) -> int:
        return len(self._places if self._cells is None else self._cells)

    def __getitem__(self, item: Any) -> Any:
        item = check_array_indexer(self, item)
        if isinstance(item, tuple):
            # ``column[..., i]``, as pandas writes it at times.
            item = next((each for each in item if each is not Ellipsis), slice(None))
        if self._cells is not None:
            return self._cells[item] if pd.api.types.is_integer(item) else self._of_cells(self._cells[item])
        if pd.api.types.is_integer(item):
            return self._known[self._places[item]].of(int(self._steps[item]))
        return type(self)(self._known, self._places[item], self._steps[item])

    def __setitem__(self, key: Any, value: Any) -> None:
        key = check_array_indexer(self, key)
        if self._cells is None:
            self._cells = self.to_cells()
        if isinstance(value, TagsColumn):
            value = value.to_cells()
        elif isinstance(value, dict) and not pd.api.types.is_integer(key):
            # One for all, and not its keys.
            value = np.fromiter([value], object, 1)
        self._cells[key] = value

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, len(self), _AT_ONCE):
            yield from self[start : start + _AT_ONCE].to_cells().tolist()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        if copy is False and self._cells is None:
            raise ValueError("the tags of a frame are made when they are read, so an array of them is always a copy")
        cells = self.to_cells()
        return np.array(cells, dtype=dtype) if copy or dtype is not None else cells

    def __arrow_array__(self, type: pa.DataType | None = None) -> pa.Array:
        return pa.array(self.to_cells(), type, from_pandas=True)

    def __eq__(self, other: Any) -> Any:
        if isinstance(other, (pd.Series, pd.DataFrame, pd.Index)):
            return NotImplemented
        other = other.to_cells() if isinstance(other, TagsColumn) else other
        return (pd.Series(self.to_cells(), dtype=object) == other).to_numpy()

    def isna(self) -> Array:
        """Which cells have no tags."""
        return np.zeros(len(self), bool) if self._cells is None else pd.isna(self._cells)

    def take(self, indices: Any, *, allow_fill: bool = False, fill_value: Any = None) -> TagsColumn:
        """The cells at these indices; with ``allow_fill``, -1 is a cell without tags."""
        indices = np.asarray(indices, dtype=np.intp)
        if self._cells is None and not (allow_fill and (indices < 0).any()):
            return type(self)(self._known, self._places.take(indices), self._steps.take(indices))
        cells: Any = take(self.to_cells(), indices, allow_fill=allow_fill, fill_value=fill_value)
        return self._of_cells(cells)

    def copy(self) -> TagsColumn:
        """A column that can be changed without changing this one."""
        if self._cells is not None:
            return self._of_cells(self._cells.copy())
        return type(self)(self._known, self._places.copy(), self._steps.copy())
