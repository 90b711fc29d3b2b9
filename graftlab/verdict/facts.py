"""What a conclusion looks at in rows, whether they are a frame or the digest of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import pandas as pd

from graftlab.base.tags import display_tags
from graftlab.rows.digest import KINDS, OTHER, Digest, RunDigest
from graftlab.rows.schema import Row, are_whole, converted
from graftlab.verdict.order import Array, apart, numbers


def tap_name(name: str, tags: Mapping[str, Any]) -> str:
    """A tap as sentences name it: with its own tags."""
    return " ".join([name, *(f"{tag}={value}" for tag, value in display_tags(tags).items())])


class Facts(Protocol):
    """Rows, an entry each of ``kind``, ``value`` (``rel_l2``), ``apart`` and ``differ``.

    See :class:`graftlab.rows.digest.Values`.

    A mask chooses some of them; first and last are in execution order.
    """

    kind: Array
    value: Array
    apart: Array
    differ: Array
    dtypes: list[Any]
    has_several_steps: bool

    def first(self, mask: Array) -> int: ...

    def last(self, mask: Array) -> int: ...

    def is_before(self, one: int, other: int) -> bool: ...

    def row(self, at: int) -> Mapping[str, Any]: ...

    def names(self, mask: Array) -> set[str]:
        """The names of the taps that these rows are of, with their own tags."""


class _InOrder:
    """Facts whose entries stand in execution order."""

    def first(self, mask: Array) -> int:
        return int(mask.argmax())

    def last(self, mask: Array) -> int:
        return int(np.flatnonzero(mask)[-1])

    def is_before(self, one: int, other: int) -> bool:
        return one < other


class FrameFacts(_InOrder):
    """Of a frame whose rows are in execution order."""

    def __init__(self, frame: pd.DataFrame) -> None:
        self._frame = frame
        kinds = frame["status"].astype(str).map(KINDS) if len(frame) else pd.Series(dtype=float)
        self.kind: Array = kinds.fillna(OTHER).to_numpy(dtype=np.int8)
        self.value = numbers(frame, "rel_l2")
        self.apart = apart(frame, self.value)
        self.differ = np.nan_to_num(numbers(frame, "nonfinite_differ"))
        self.dtypes = sorted(
            {*_distinct(frame, "dtype"), *(n for cast in _distinct(frame, "cast") for n in converted(cast))}
        )
        self.has_several_steps = "step" in frame.columns and frame["step"].nunique() > 1

    def row(self, at: int) -> Mapping[str, Any]:
        return {str(name): value for name, value in self._frame.iloc[at].items()}

    def names(self, mask: Array) -> set[str]:
        pairs = zip(self._frame["name"][mask], self._frame["tags"][mask], strict=True)
        return {tap_name(name, tags) for name, tags in pairs}


def _distinct(frame: pd.DataFrame, column: str) -> list[Any]:
    return list(frame[column].dropna().unique()) if column in frame.columns else []


class RowsFacts(_InOrder):
    """Of rows in execution order, each of which counts whichever step it is of."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows
        self.kind: Array = np.array([KINDS.get(row.status, OTHER) for row in rows], dtype=np.int8)
        self.value: Array = np.array([row.rel_l2 for row in rows], dtype=np.float64)
        whole = [bool(row.rel_l2) and are_whole(row.dtype, row.cast) for row in rows]
        self.apart = np.where(whole, np.inf, self.value)
        self.differ: Array = np.array([row.nonfinite_differ or 0 for row in rows], dtype=np.int64)
        dtypes = {row.dtype for row in rows if row.dtype is not None}
        self.dtypes: list[Any] = sorted(dtypes.union(*(converted(row.cast) for row in rows if row.cast)))
        self.has_several_steps = False

    def row(self, at: int) -> Mapping[str, Any]:
        return self._rows[at]._asdict()

    def names(self, mask: Array) -> set[str]:
        return {tap_name(row.name, row.tags) for row, chosen in zip(self._rows, mask, strict=True) if chosen}


class RunFacts:
    """Of the rows of a run that were summed up."""

    def __init__(self, digest: Digest, run: RunDigest) -> None:
        self._digest, self._run = digest, run
        self._values = values = run.values
        self.kind, self.value, self.apart, self.differ = values.kind, values.value, values.apart, values.differ
        self.dtypes = sorted(run.dtypes)
        self.has_several_steps = len(values.step) > 0 and bool((values.step != values.step[0]).any())

    def _place(self, at: int) -> tuple[int, int, str, int, int]:
        values = self._values
        side, rank = self._run.taps[int(values.tap[at])].receiver
        return int(values.step[at]), int(values.order[at]), side, rank, at

    def first(self, mask: Array) -> int:
        return self._end(mask, np.min, min)

    def last(self, mask: Array) -> int:
        return self._end(mask, np.max, max)

    def _end(self, mask: Array, of_numbers: Any, of_places: Any) -> int:
        at = np.flatnonzero(mask)
        for column in (self._values.step, self._values.order):
            found = column[at]
            at = at[found == of_numbers(found)]
        return int(of_places(self._place(int(each)) for each in at)[-1])

    def is_before(self, one: int, other: int) -> bool:
        return self._place(one) < self._place(other)

    def row(self, at: int) -> Mapping[str, Any]:
        return self._digest.row(int(self._values.at[at]))._asdict()

    def names(self, mask: Array) -> set[str]:
        taps = (self._run.taps[place] for place in np.unique(self._values.tap[mask]).tolist())
        return {tap_name(tags["name"], tags) for tags in (tap.tags for tap in taps)}
