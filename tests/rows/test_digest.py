"""What rows come to, tap by tap: the same as a frame of all of them says, however they come and whoever asks when."""

from __future__ import annotations

import json
import logging
import math
import signal
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kit.digests import digest_of, row
from kit.examples import examples

from graftlab.rows import digest as digests
from graftlab.rows.digest import Digest, FirstAbove, RunDigest
from graftlab.rows.encoding import encode
from graftlab.rows.schema import COLUMNS, Row
from graftlab.rows.store import RowStore, to_frame
from graftlab.verdict.facts import tap_name
from graftlab.verdict.summary import differences, differences_of_run

FLOOR = 1e-5


@st.composite
def runs(draw: st.DrawFn) -> list[Row]:
    """Rows of two ranks over some steps, a rank's in order, and the ranks' in any."""
    ranks: list[list[Row]] = []
    for rank in range(2):
        made = []
        for step in range(draw(st.integers(0, 4))):
            for order in range(1, draw(st.integers(1, 4))):
                status = draw(st.sampled_from(["compared", "compared", "grafted", "failed", "missing"]))
                measured = status in ("compared", "grafted")
                value = draw(st.sampled_from([0.0, 1e-7, 1e-3, 2e-3, 0.5, math.nan])) if measured else None
                differ = draw(st.sampled_from([0, 0, 0, 3])) if measured else None
                fields = {"status": status, "rel_l2": value, "nonfinite_differ": differ, "error": "no such dim"}
                fields["dtype"] = dtype = draw(st.sampled_from(["float32", "float32", "int64"]))
                fields["cast"] = draw(st.sampled_from([None, None, f"bfloat16 -> {dtype}"]))
                made.append(row(f"t{order}", order, step, rank=rank, own={"layer": order}, **fields))
        ranks.append(made)
    together = []
    while any(ranks):
        together.append(draw(st.sampled_from([each for each in ranks if each])).pop(0))
    return together


@example([row("t1", rel_l2=1e-7), row("t2", 2, rel_l2=0.0, nonfinite_differ=3)], [1], 1)
@example([row("t1", rel_l2=1e-7), row("t2", 2, rel_l2=1e-7, dtype="int64")], [1], 1)
@example([row("t1", rel_l2=1e-7, dtype="int64", cast="float32 -> int64")], [1], 1)
@examples(80)
@given(rows=runs(), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=9), limit=st.integers(1, 4))
def test_a_run_is_summed_up_as_a_frame_of_all_its_rows_would_be(rows: list[Row], sizes: list[int], limit: int) -> None:
    with TemporaryDirectory() as folder:
        store = RowStore(Path(folder))
        digest = Digest(store)
        at = 0
        for number in range(len(rows)):
            batch = rows[at : at + sizes[number % len(sizes)]]
            at += len(batch)
            store.append([encode(each) for each in batch])
            digest.catch_up(limit)
        digest.catch_up()
        assert digest.behind == 0
        run, frame = digest.run(0), to_frame(rows)
        assert differences_of_run(digest, run) == differences(frame)
        assert run.statuses == dict(frame["status"].value_counts())
        assert run.row_count == len(rows)
        above = FirstAbove(run, FLOOR)
        above.look()
        for tap in run.taps:
            own = [
                each
                for each in rows
                if (tap_name(each.name, each.tags), each.rank) == (_name(tap.tags), tap.receiver[1])
            ]
            bad = [
                each.step
                for each in own
                if each.status == "compared" and (each.nonfinite_differ or (each.rel_l2 or 0.0) > _floor_of(each))
            ]
            assert above.step_of(tap) == (bad[0] if bad else None)
            assert tap.last.step == own[-1].step
            assert digest.row(tap.last_index).order == own[-1].order
        store.close()


def _floor_of(row: Row) -> float:
    """Whole numbers have none, unless the other side's were fractions."""
    return 0.0 if row.dtype == "int64" and row.cast is None else FLOOR


def _name(tags: dict[str, Any]) -> str:
    return tap_name(tags["name"], tags)


def test_the_worst_is_what_was_measured_and_a_value_that_is_not_finite_is_worse_than_any() -> None:
    tap = digest_of(
        row("a", rel_l2=1e-3), row("a", step=1, rel_l2=1e-7), row("a", step=2, rel_l2=None, status="failed")
    ).taps[0]
    assert (tap.worst, tap.worst_step, tap.last.status) == (1e-3, 0, "failed")
    tap = digest_of(row("a", rel_l2=1e-3), row("a", step=1, rel_l2=0.0, nonfinite_differ=2)).taps[0]
    assert (tap.worst, tap.worst_step) == (math.inf, 1)


def test_the_first_step_above_the_floor_is_known_for_whichever_floor_and_for_rows_that_come_later() -> None:
    run = digest_of(*(row("a", step=step, rel_l2=10.0 ** (step - 8)) for step in range(6)))
    above = FirstAbove(run, 1e-5)
    above.look()
    assert above.step_of(run.taps[0]) == 4
    other = FirstAbove(run, 1.0)
    other.look()
    assert other.step_of(run.taps[0]) is None
    run.take([(6, list(row("a", step=6, rel_l2=2.0)))])
    other.look()
    assert other.step_of(run.taps[0]) == 6
    assert other.first == 6


def test_many_rows_are_summed_up_while_they_come_and_nobody_has_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "_WAITING", 100)
    monkeypatch.setattr(digests, "_PIECE", 20)
    store = RowStore(tmp_path)
    digest = Digest(store)
    for step in range(300):
        store.append([encode(row("a", step=step))])
    for thread in threading.enumerate():
        if thread.name == "graftlab-digest":
            thread.join(30)
    assert digest.behind <= 100
    digest.catch_up()
    assert digest.run(0).values.step.tolist() == list(range(300))
    store.close()


def test_what_is_not_summed_up_is_bounded_however_fast_rows_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "_MOST_WAITING", 50)
    monkeypatch.setattr(digests, "_PIECE", 10)
    store = RowStore(tmp_path)
    digest = Digest(store)
    for step in range(200):
        store.append([encode(row("a", step=step))])
        assert digest.behind <= 51
    store.close()


def test_runs_are_kept_apart_and_the_rows_of_a_step_are_found(tmp_path: Path) -> None:
    store = RowStore(tmp_path)
    digest = Digest(store)
    assert digest.newest is None
    rows = [row(f"t{order}", order, step, run=run) for run in range(2) for step in range(3) for order in (1, 2)]
    store.append([encode(each) for each in rows])
    digest.catch_up()
    assert [digest.run(number).row_count for number in range(3)] == [6, 6, 0]
    newest = digest.newest
    assert newest is not None
    assert newest.number == 1
    assert [(each.run, each.step, each.name) for each in digest.rows_of_step(newest, 1)] == [(1, 1, "t1"), (1, 1, "t2")]
    assert digest.rows_of_step(newest, 9) == []
    store.close()


def test_a_row_that_cannot_be_read_is_told_of_and_those_around_it_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = RowStore(tmp_path)
    digest = Digest(store)
    store.append([encode(row("a")), b"[1,2", encode(row("a", step=1))])
    with caplog.at_level(logging.ERROR):
        digest.catch_up()
    assert "row 1 cannot be read" in caplog.text
    assert digest.run(0).values.at.tolist() == [0, 2]
    assert digest.unread == 1
    store.close()


def test_a_fault_in_some_rows_costs_those_alone_and_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(digests, "_PIECE", 2)
    store = RowStore(tmp_path)
    digest = Digest(store)
    rows = [list(row("a", step=step)) for step in range(7)]
    rows[4][COLUMNS.index("run")] = "x"
    rows[5][COLUMNS.index("rel_l2")] = "much"
    store.append([json.dumps(each).encode() for each in rows])
    with caplog.at_level(logging.ERROR):
        digest.catch_up()
    assert digest.behind == 0
    assert "some of the rows 4 to 5 are in no summary" in caplog.text
    assert digest.unread == 2
    assert digest.run(0).values.step.tolist() == [0, 1, 2, 3, 6]
    assert digest.newest is digest.run(0)
    store.close()


def test_an_interrupt_of_whoever_asks_loses_no_row_and_counts_none_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = RowStore(tmp_path)
    digest = Digest(store)
    store.append([encode(row("a", step=step)) for step in range(100)])
    take = RunDigest.take

    def interrupt_in_the_middle(self: RunDigest, rows: Iterable[tuple[int, list[Any]]]) -> None:
        def some() -> Iterator[tuple[int, list[Any]]]:
            for number, each in enumerate(rows):
                if number == 50:
                    main = threading.main_thread()
                    assert main.ident is not None
                    signal.pthread_kill(main.ident, signal.SIGINT)
                yield each

        take(self, some())

    monkeypatch.setattr(RunDigest, "take", interrupt_in_the_middle)
    with pytest.raises(KeyboardInterrupt):
        digest.catch_up()
    digest.catch_up()
    run = digest.run(0)
    assert run.values.step.tolist() == list(range(100))
    assert (run.statuses["compared"], run.taps[0].rows, digest.unread) == (100, 100, 0)
    store.close()


def test_what_was_handed_out_stays_as_it_was_while_more_rows_come() -> None:
    run = digest_of(*(row("a", step=step, rel_l2=1.0) for step in range(200)))
    before = run.values
    run.take((step, list(row("a", step=step, rel_l2=2.0))) for step in range(200, 2000))
    assert np.array_equal(before.value, np.ones(200))
    assert len(run.values.value) == 2000


def test_ranks_steps_and_directions_are_told_apart_and_equal_tags_are_not() -> None:
    run = digest_of(
        row("a", own={"layer": 1}),
        row("a", own={"layer": 1.0}, step=1),
        row("a", own={"layer": 2}),
        row("a", own={"layer": 1}, rank=1),
        row("a", own={"layer": ["x"]}),
        row("a", own={"layer": ["x"]}, step=1),
    )
    assert [tap.rows for tap in run.taps] == [2, 1, 1, 2]


def test_a_tap_knows_who_received_it_which_way_and_what_each_side_calls_it() -> None:
    names = {"baseline_name": "theirs", "target_name": "ours"}
    (tap,) = digest_of(
        row("a", side="baseline", rank=3, step=1), row("a", side="baseline", rank=3, step=2, **names)
    ).taps
    assert (tap.direction, tap.receiver, tap.place, tap.rows, tap.last_index) == ("b2t", ("baseline", 3), 0, 2, 1)
    assert tap.tags.items() >= {"name": "a", "step": 2, **names}.items()
    assert tap.identity is tap.identity
    assert tap.identity.name == "a"


def test_filters_see_the_tags_of_every_step_where_they_ask_for_it() -> None:
    run = digest_of(*(row(name, step=step) for step in (3, 5, 4) for name in "ab"), row("a", step=9), row("a", step=9))
    seen = [(tags["name"], tags["step"]) for tags in run.tags_of_rows({"name", "step"})]
    assert sorted(seen) == [*(("a", step) for step in (3, 4, 5, 9)), *(("b", step) for step in (3, 4, 5))]
    assert [tags["name"] for tags in run.tags_of_rows({"name"})] == ["a", "b"]
    assert list(RunDigest(0).tags_of_rows({"step"})) == []


def test_what_else_a_run_had_is_known_of_it() -> None:
    run = digest_of(
        row("a", plan_version=2, dtype="bfloat16"), row("a", plan_version=5, status="missing", dtype=None), row("b")
    )
    assert (run.plan_versions, run.dtypes, run.row_count) == ({0, 2, 5}, {"bfloat16", "float32"}, 3)
    assert run.statuses == {"compared": 2, "missing": 1}
    values = run.values
    assert values.kind.tolist() == [digests.COMPARED, digests.ALONE, digests.COMPARED]
    assert (values.tap.tolist(), values.at.tolist(), values.differ.tolist()) == ([0, 0, 1], [0, 1, 2], [0, 0, 0])


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        ("compared", digests.COMPARED),
        ("grafted", digests.GRAFTED),
        ("failed", digests.FAILED),
        ("missing", digests.ALONE),
        ("unmatched", digests.ALONE),
        ("recomputed", digests.ALONE),
        ("timeout", digests.OTHER),
    ],
)
def test_only_what_was_measured_counts_for_the_worst(status: str, kind: int) -> None:
    run = digest_of(row("a", status=status, rel_l2=0.25, step=7))
    assert run.values.kind.tolist() == [kind]
    is_measured = status in ("compared", "grafted")
    assert (run.taps[0].worst, run.taps[0].worst_step) == ((0.25, 7) if is_measured else (-math.inf, -1))
    # The first of several equal ones.
    run.take([(1, list(row("a", status=status, rel_l2=0.25, step=8)))])
    assert run.taps[0].worst_step == (7 if is_measured else -1)


def test_rows_that_come_one_by_one_are_not_copied_each_time() -> None:
    run, arrays = digest_of(row("a")), set()
    for step in range(1, 5000):
        run.take([(step, list(row("a", step=step)))])
        arrays.add(run.values.step.base.ctypes.data if run.values.step.base is not None else 0)
    assert len(arrays) <= 6
    assert run.values.step.tolist() == list(range(5000))
