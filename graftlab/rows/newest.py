"""The newest row of every tap, read at a bounded cost from a stream that may be faster than any reader."""

from __future__ import annotations

from operator import attrgetter

from graftlab.base.tags import TapIdentity, identity
from graftlab.rows.schema import EXECUTION_ORDER, Row
from graftlab.rows.store import RowStore

_execution_order = attrgetter(*EXECUTION_ORDER)


class LiveTaps:
    """Follows a store of rows at a bounded cost: each look reads a limited number of rows, the newest first.

    Later looks read the rows that earlier ones left out. A row never replaces a newer one. Not thread-safe.
    """

    def __init__(self, store: RowStore) -> None:
        self._store = store
        # Without the direction, which is the plan's: a graft in the other direction replaces the row.
        self._newest: dict[tuple[TapIdentity, str, int], tuple[int, Row]] = {}
        self.upto = 0
        """How many rows had arrived at the last look."""
        self._left_out: list[tuple[int, int]] = []

    @property
    def behind(self) -> int:
        """How many rows have not been read yet."""
        return len(self._store) - self.upto + sum(stop - start for start, stop in self._left_out)

    def look(self, limit: int = 3000) -> list[Row]:
        """Read up to ``limit`` more rows; returns the newest row of each tap and rank, in execution order.

        The newest is the last to arrive, whatever its step and occurrence.
        """
        total = len(self._store)
        start = max(self.upto, total - limit)
        if start > self.upto:
            self._left_out.append((self.upto, start))
        self.upto = total
        self._read(start, total)
        limit -= total - start
        while limit > 0 and self._left_out:
            first, stop = self._left_out.pop()
            start = max(first, stop - limit)
            self._read(start, stop)
            limit -= stop - start
            if start > first:
                self._left_out.append((first, start))
        return sorted((row for _, row in self._newest.values()), key=_execution_order)

    def _read(self, start: int, stop: int) -> None:
        for index, row in enumerate(self._store.rows(start, stop), start):
            key = (identity(row.tags), row.side, row.rank)
            if row.run in self._store.set_aside:
                continue
            known = self._newest.get(key)
            if known is None or known[0] < index:
                self._newest[key] = (index, row)
