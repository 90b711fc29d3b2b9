"""The newest row of every tap, kept up with a stream that may be faster than anybody can read."""

from __future__ import annotations

from typing import Any

from graftlab.rows.schema import Row
from graftlab.rows.store import RowStore

_NOT_THE_TAP = frozenset({"step", "recompute_status"})


class LiveTaps:
    """Follows a store of rows at a bounded cost: each look reads so many rows and no more, the newest first.

    What a look had to leave out is read by later ones, as soon as they have time; a row never replaces a newer one. One
    thread at a time.
    """

    def __init__(self, store: RowStore) -> None:
        self._store = store
        self._newest: dict[tuple[Any, ...], tuple[int, Row]] = {}
        self._upto = 0
        self._left_out: list[tuple[int, int]] = []

    @property
    def behind(self) -> int:
        """How many rows have not been looked at yet."""
        return len(self._store) - self._upto + sum(stop - start for start, stop in self._left_out)

    def look(self, limit: int = 3000) -> list[Row]:
        """Read up to ``limit`` more rows; returns the newest row of each tap and receiving rank, in execution order."""
        total = len(self._store)
        start = max(self._upto, total - limit)
        if start > self._upto:
            self._left_out.append((self._upto, start))
        self._upto = total
        self._read(start, total)
        limit -= total - start
        while limit > 0 and self._left_out:
            first, stop = self._left_out.pop()
            start = max(first, stop - limit)
            self._read(start, stop)
            limit -= stop - start
            if start > first:
                self._left_out.append((first, start))
        rows = [row for _, row in self._newest.values()]
        return sorted(rows, key=lambda row: (row["run"], row["step"], row["order"], row["side"], row["rank"]))

    def _read(self, start: int, stop: int) -> None:
        for index, row in enumerate(self._store.rows(start, stop), start):
            tags = ((name, value) for name, value in row["tags"].items() if name not in _NOT_THE_TAP)
            key = (row["direction"], row["side"], row["rank"], *((n, str(v)) for n, v in tags))
            known = self._newest.get(key)
            if known is None or known[0] < index:
                self._newest[key] = (index, row)
