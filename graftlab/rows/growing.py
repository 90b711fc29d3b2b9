"""The frame of ever more rows: what it costs again is what is new in it.

Its columns are the first part of arrays that are longer. Rows that come later are written behind what frames show.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from graftlab.rows.columns import BECAME, Block, Columns, cells_in_frame, name_in_frame, repeats, taken, told_apart
from graftlab.rows.parsing import Array
from graftlab.rows.rendering import RowsFrame
from graftlab.rows.schema import COLUMNS

# From 3.0 on pandas itself copies what two frames share, when one of them is changed.
_COPY_ON_WRITE = int(pd.__version__.partition(".")[0]) >= 3


class GrowingFrame:
    """Makes frames of blocks, each of which :meth:`Columns.merge` made of the one before and of more rows."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._texts: dict[str, _Text] = {}
        # Frames of the whole arrays. pandas copies what a user changes as long as another frame shows it, so each is
        # kept for as long as rows are still written into any of its arrays.
        self._wholes: list[pd.DataFrame] = []
        self._arrays: list[Any] = []

    def of(self, block: Block) -> pd.DataFrame:
        """The frame of a block, which is the caller's."""
        steps = block["step"].base
        if not _COPY_ON_WRITE or steps is None:
            return self._columns.frame(block)
        if not self._arrays or self._arrays[0] is not steps:
            self._texts, self._wholes, self._arrays = {}, [], []
        wholes: dict[str, Any] = {}
        arrays = [steps]
        for name in [*COLUMNS, BECAME, *self._columns.tags_in(block)]:
            if repeats(name):
                if name not in self._texts:
                    self._texts[name] = _Text(self._columns, name)
                array = column = self._texts[name].upto(block, len(steps))
            else:
                array = block[name].base
                assert array is not None
                column = cells_in_frame(array)
            arrays.append(array)
            wholes[name_in_frame(name, wholes)] = column
        if len(arrays) != len(self._arrays) or any(a is not b for a, b in zip(arrays, self._arrays, strict=True)):
            self._wholes.append(RowsFrame(wholes, copy=False))
            self._arrays = arrays
        return self._wholes[-1].iloc[: len(block["step"])]


class _Text:
    """A column of values that repeat, with room behind it."""

    def __init__(self, columns: Columns, name: str) -> None:
        self._columns, self._name = columns, name
        self._state = _Filled(0, np.zeros(0, bool), None, np.zeros(0, np.intp), None)

    def upto(self, block: Block, room: int) -> Any:
        """The whole array, of the type that the block's values have, and filled with them."""
        count, used, known, at, whole = self._state
        values, places = self._columns.text(self._name, block, count)
        now = np.bincount(places, minlength=len(values)) > 0
        now[: len(used)] |= used
        if whole is None or now.sum() > used.sum():
            known, at = told_apart(values, now)
        if whole is not None and known.dtype == whole.dtype:
            whole[count : count + len(places)] = taken(known, at, places)
        else:
            _, places = self._columns.text(self._name, block)
            rest = np.full(room - len(places), np.argmax(now), places.dtype)
            count, whole = 0, taken(known, at, np.concatenate([places, rest]))
        # At once, because the stop button may interrupt this anywhere.
        self._state = _Filled(count + len(places), now, known, at, whole)
        return whole


class _Filled(NamedTuple):
    upto: int
    used: Array
    """Which of the values were there."""
    known: Any
    at: Array
    whole: Any
