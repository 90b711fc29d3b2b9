"""The columns that a conclusion reads from a frame, as arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from graftlab.base.tags import display_tags
from graftlab.verdict.order import Array, apart, numbers

COMPARED, GRAFTED, FAILED, OTHER = range(4)
"""Kinds of rows: those up to ``GRAFTED`` were measured."""
_KINDS = {"compared": COMPARED, "grafted": GRAFTED, "failed": FAILED}


def tap_name(name: str, tags: Mapping[str, Any]) -> str:
    """A tap as sentences name it: its name with its own tags."""
    return " ".join([name, *(f"{tag}={value}" for tag, value in display_tags(tags).items())])


class Facts:
    """The rows of a frame in execution order: an entry each of ``kind``, ``value``, ``apart`` and ``differ``.

    ``value`` is ``rel_l2``, or NaN; ``apart`` is the same for comparison with a floor (infinite where whole numbers
    differ); ``differ`` is the number of non-finite values that differ.
    """

    def __init__(self, frame: pd.DataFrame) -> None:
        self._frame = frame
        kinds = frame["status"].astype(str).map(_KINDS) if len(frame) else pd.Series(dtype=float)
        self.kind: Array = kinds.fillna(OTHER).to_numpy(dtype=np.int8)
        self.value = numbers(frame, "rel_l2")
        self.apart = apart(frame, self.value)
        self.differ = np.nan_to_num(numbers(frame, "nonfinite_differ"))
        self.dtypes = sorted(_distinct(frame, "dtype"))
        self.casts = _distinct(frame, "cast")
        self.has_several_steps = "step" in frame.columns and frame["step"].nunique() > 1

    def row(self, at: int) -> Mapping[str, Any]:
        """The row at this place, by column."""
        return {str(name): value for name, value in self._frame.iloc[at].items()}

    def names(self, mask: Array) -> set[str]:
        """The names of these rows' taps, with their own tags."""
        pairs = zip(self._frame["name"][mask], self._frame["tags"][mask], strict=True)
        return {tap_name(name, tags) for name, tags in pairs}


def _distinct(frame: pd.DataFrame, column: str) -> list[Any]:
    return list(frame[column].dropna().unique()) if column in frame.columns else []
