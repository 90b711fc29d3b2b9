"""Following rows live: the newest row of every tap, at a bounded cost, whatever comes in between."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given
from hypothesis import strategies as st
from kit.examples import examples

from graftlab.rows.encoding import encode
from graftlab.rows.newest import LiveTaps
from graftlab.rows.schema import Row
from graftlab.rows.store import RowStore


def row(tap: int, index: int, rank: int = 0) -> Row:
    tags = {"name": f"tap{tap}", "step": index, "side": "target", "rank": rank, "recompute_status": "original"}
    place = ("b2t", "target", rank)
    return Row(0, index, index, f"tap{tap}", tags, *place, status="compared", senders=[0], rel_l2=float(index))


class CountingStore(RowStore):
    """Counts the rows that were read."""

    read = 0

    def rows(self, start: int = 0, stop: int | None = None) -> list[Row]:
        found = super().rows(start, stop)
        self.read += len(found)
        return found


@examples(60)
@given(
    batches=st.lists(st.lists(st.integers(0, 6), max_size=30), max_size=12),
    limit=st.integers(1, 20),
    parse_between=st.booleans(),
)
def test_every_tap_eventually_shows_its_newest_row(batches: list[list[int]], limit: int, parse_between: bool) -> None:
    with TemporaryDirectory() as folder:
        store = CountingStore(Path(folder))
        live = LiveTaps(store)
        expected: dict[str, int] = {}
        index = 0
        for batch in batches:
            rows = []
            for tap in batch:
                rows.append(encode(row(tap, index)))
                expected[f"tap{tap}"] = index
                index += 1
            if rows:
                store.append(rows)
            if parse_between:
                store.frame()
            before = store.read
            live.look(limit)
            assert store.read - before <= limit
        for _ in range(index // limit + 1):
            live.look(limit)
        assert live.behind == 0
        shown = live.look(limit)
        assert {found.name: found.step for found in shown} == expected
        assert [found.order for found in shown] == sorted(found.order for found in shown)
        # Nothing is read twice: looking at all of it costs as many rows as there are.
        assert store.read == index
        store.close()


def test_the_newest_rows_are_read_first_during_a_flood(tmp_path: Path) -> None:
    store = RowStore(tmp_path)
    store.append([encode(row(index % 3, index)) for index in range(500)])
    live = LiveTaps(store)
    assert [found.step for found in live.look(10)] == [497, 498, 499]
    assert live.behind == 490
    store.append([encode(row(0, 500)), encode(row(1, 501))])
    assert live.behind == 492
    assert [found.step for found in live.look(10)] == [497, 500, 501]
    assert live.behind == 482
    store.close()


def test_each_rank_of_a_tap_has_its_own_newest_row(tmp_path: Path) -> None:
    store = RowStore(tmp_path)
    store.append([encode(row(0, 0, rank)) for rank in range(3)])
    store.append([encode(row(0, 0, 1)._replace(side="baseline"))])
    found = sorted((found.side, found.rank) for found in LiveTaps(store).look())
    assert found == [("baseline", 1), ("target", 0), ("target", 1), ("target", 2)]
    store.close()


def test_taps_of_several_steps_are_in_the_order_of_their_execution(tmp_path: Path) -> None:
    store = RowStore(tmp_path)
    # A step counts its rows anew.
    store.append([encode(row(tap, step)._replace(order=order)) for tap, step, order in ((0, 2, 0), (1, 1, 5))])
    assert [found.name for found in LiveTaps(store).look()] == ["tap1", "tap0"]
    store.close()


def test_rows_of_runs_that_are_set_aside_replace_none(tmp_path: Path) -> None:
    store = RowStore(tmp_path)
    store.append([encode(row(0, 0)), encode(row(0, 1)._replace(run=1)), encode(row(1, 2)._replace(run=1))])
    store.set_aside.add(1)
    assert [(found.name, found.step) for found in LiveTaps(store).look()] == [("tap0", 0)]
    store.close()
