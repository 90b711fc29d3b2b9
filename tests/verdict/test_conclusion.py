"""The conclusion on a run: what has a line, which tap comes first, and that a live display ends with all of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.examples import examples
from kit.rows import row

from graftlab.plots import explorer
from graftlab.rows.encoding import encode
from graftlab.rows.newest import LiveTaps
from graftlab.rows.schema import Row
from graftlab.rows.store import RowStore, to_frame
from graftlab.verdict import conclusion
from graftlab.verdict.conclusion import (
    LiveConclusion,
    conclude,
    conclude_from,
    history_of,
    in_order_of,
    newest_rows,
    of_newest_run,
    tap_summaries,
)

FLOOR = 1e-5


def tap(status: str, rank: int, rel_l2: float) -> Row:
    return row("h", rank=rank, rel_l2=rel_l2, own={"recompute_status": status, "layer": 3, "tp_rank": rank})


def test_a_tap_has_one_line_for_all_ranks_and_one_for_its_recomputed_forward() -> None:
    found = tap_summaries([tap("original", 0, 1e-7), tap("original", 1, 0.5), tap("recompute", 0, 1e-6)])
    assert [(line.name, line.row.rank, line.row.rel_l2) for line in found] == [
        ("h layer=3", 1, 0.5),
        ("h layer=3 recompute", 0, 1e-6),
    ]


@pytest.mark.parametrize(("since", "status"), [(4, "compared"), (5, "compared"), (6, "unmatched")])
def test_a_tap_that_one_side_no_longer_has_does_not_stay_compared(since: int, status: str) -> None:
    alone = row("h", side="baseline", step=since, rel_l2=None, status="unmatched")
    found = conclude_from([alone, row("h", step=5, rel_l2=0.0), row("h", rank=1, step=5, rel_l2=1e-7)])
    assert [line.row.status for line in found.lines] == [status]
    assert ("Not compared: 1 unmatched." in explorer.headline(found)) == (status == "unmatched")


def test_the_headline_has_the_most_important_sentence_of_several() -> None:
    rows = [row("a", rel_l2=1e-7), row("b", rel_l2=0.5), row("c", rel_l2=None, status="failed", error="it broke")]
    found = conclude_from(rows, noise_floor=FLOOR)
    assert len(found.sentences) > 1
    text = explorer.headline(found)
    assert text.startswith("Run ")
    assert f", 3 taps: {found.sentences[0]}." in text
    assert not any(each in text for each in found.sentences[1:])


def test_the_headline_has_the_non_finite_values_of_earlier_steps() -> None:
    first, worse = row("a", order=1, rel_l2=0.5), row("b", order=2, step=1, nonfinite_differ=3)
    then = [row(name, order=order, step=2, rel_l2=0.25) for order, name in enumerate("ab")]
    text = explorer.headline(conclude(to_frame([first, row("b", order=2), worse, *then]), []))
    assert " Non-finite values first differ at b on target[0] in step 1: 3 of 64 elements " in text
    # Said once, where the first divergence is that row; and of the newest rows, where no history is known yet.
    assert "Non-finite values" not in explorer.headline(conclude(to_frame([worse, then[1]]), []))
    newest = [row("a", order=1, rel_l2=0.5), worse._replace(step=0)]
    assert (
        explorer.headline(conclude_from(newest)).count("on-finite values first differ at b on target[0] in step 0") == 1
    )


def test_a_table_of_taps_has_the_largest_value_of_the_run_beside_the_newest() -> None:
    rows = [row("a", step=step, rel_l2=rel_l2) for step, rel_l2 in enumerate((1e-7, 0.5, 1e-6))]
    shown = explorer.figures(conclude(to_frame(rows), []))
    assert (shown["value"], shown["highest"]) == ([1e-6], [0.5])


def test_each_line_of_a_live_display_has_what_is_known_of_its_row() -> None:
    rows = [
        row("a", order=0, nonfinite_differ=3, rel_l2=0.123456, plan_version=2, step=4, note="a note\nmore"),
        row("b", order=1, status="grafted", direction="t2b", side="baseline", rank=1, step=5, error="e" * 1000),
        row("c", order=2, direction="t2b", aligned_by="requests", step=5, nonfinite_differ=None),
    ]
    found = conclude_from(rows)
    shown = explorer.figures(found, "3 rows")
    assert shown["status"] == ["compared", "grafted", "compared"]
    assert shown["value"][0] == 0.1235
    assert shown["nonfinite"] == [3, 0, 0]
    assert shown["worst"] == ["target[0]", "baseline[1]", "target[0]"]
    assert (shown["step"], shown["plan"]) == ([4, 5, 5], [2, 0, 0])
    # Only a graft has a direction that matters.
    assert shown["way"] == ["", "t2b", ""]
    assert (shown["note"][0], shown["note"][2]) == ("a note", "requests")
    assert 10 < len(shown["note"][1]) < 1000
    assert shown["notes"] == [[0, "first divergent: a"]]
    assert (shown["count"], shown["headline"]) == ("3 rows", explorer.headline(found))
    assert explorer.headline(found).startswith("Run 0, steps 4 to 5, plans 0 to 2, 3 taps: ")
    failing = explorer.headline(found, {"target[0]": "ValueError: " + "x" * 300, "target[1]": "other"})
    assert failing.startswith("Run 0 failed on target[0], target[1] (ValueError: x")
    assert len(failing) < 600
    stopped = explorer.headline(found, dict.fromkeys(("baseline[0]", "target[0]"), "KeyboardInterrupt: "))
    assert stopped.startswith("Run 0 interrupted on baseline[0], target[0] (KeyboardInterrupt), steps")
    assert explorer.headline(conclude_from([])) == "Nothing was compared yet."
    assert [column[1] for column in shown["columns"] if column[1] not in {*shown, *explorer.taps(found)}] == []
    assert [explorer.rounded(value) for value in (None, math.nan, 1.23456e-7)] == [None, None, 1.235e-7]
    assert explorer.rounded(math.inf) == explorer._INFINITE
    both = conclude_from([row("h", direction="b2t"), row("h", order=2, side="baseline", direction="t2b")])
    assert explorer.taps(both) == {"label": ["h", "h t2b"], "order": [1, 2]}


def test_the_first_divergent_line_follows_the_order_of_the_rows_not_their_steps() -> None:
    rows = [
        row("grafted", step=9, rel_l2=0.5, status="grafted"),
        row("missing", step=9, rel_l2=None, status="missing"),
        row("first", step=9, rel_l2=1e-3),
        row("worst", step=8, rel_l2=1.0),
    ]
    found = conclude_from(rows)
    assert found.first == 2
    assert found.floor == 1e-5
    assert found.sentences[0].startswith("grafted 1 tap; first divergent after it: first on target[0]: rel_l2 1.00e-03")
    assert conclude_from(rows, noise_floor=0.1).first == 3
    assert conclude_from(rows, noise_floor=2.0).first is None
    assert conclude_from([]).sentences == []


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


def _floor_of(row: Row) -> float:
    """Whole numbers have none, unless the other side's were fractions."""
    return 0.0 if row.dtype == "int64" and row.cast is None else FLOOR


@examples(30)
@given(rows=runs())
def test_history_has_each_taps_worst_value_and_the_first_step_above_the_floor(rows: list[Row]) -> None:
    frame = to_frame(rows)
    history = history_of(frame, FLOOR)
    in_order = sorted(rows, key=lambda each: (each.step, each.order, each.rank))
    bad = [
        each
        for each in in_order
        if each.status == "compared" and (each.nonfinite_differ or (each.rel_l2 or 0.0) > _floor_of(each))
    ]
    for line in tap_summaries(in_order, history):
        own = [each for each in rows if each.name == line.row.name]
        values = [
            math.inf if each.nonfinite_differ else each.rel_l2
            for each in own
            if each.status in ("compared", "grafted") and (each.nonfinite_differ or not math.isnan(each.rel_l2 or 0.0))
        ]
        assert line.worst == max((value for value in values if value is not None), default=None)
        assert line.since == next((each.step for each in bad if each.name == line.row.name), None)
    assert (history.first is None) == (not bad)
    if history.first is not None:
        assert (history.first.name, history.first.step) == (bad[0].name, bad[0].step)
    newest = {(each.name, each.rank): each.step for each in rows}
    assert {(each.name, each.rank): each.step for each in newest_rows(frame)} == newest


def test_rows_read_from_a_frame_equal_the_original_rows() -> None:
    rows = [
        row("a", max_abs_index=(1, 2), shape=[3, 4], max_abs=0.5, note="odd"),
        row("b", 2, status="missing", rel_l2=None, nonfinite_differ=None, numel=None, error="not there"),
    ]
    found = newest_rows(to_frame(rows))
    assert found == rows
    # Counts are whole numbers, which a frame with rows that lack them has as fractions.
    assert list(map(repr, found)) == list(map(repr, rows))


def test_taps_are_in_the_order_seen_and_others_last() -> None:
    rows = [row("new"), row("b", rank=1), row("b"), row("a", step=1)]
    seen = [{"name": "a"}, {"name": "b"}]
    assert [(each.name, each.rank) for each in in_order_of(seen, rows)] == [("a", 0), ("b", 0), ("b", 1), ("new", 0)]


def test_the_first_divergence_in_an_earlier_step_is_reported() -> None:
    def run(*values: float) -> pd.DataFrame:
        return to_frame([row("a", step=step, rel_l2=value) for step, value in enumerate(values)])

    assert conclude(run(0.0, 1.0, 0.0), []).earlier.startswith("first divergent in this run: a on target[0] in step 1:")
    assert conclude(run(0.0, 1.0, 1.0), []).earlier == "first above the floor in step 1"
    assert conclude(run(0.0, 0.0, 1.0), []).earlier == ""
    given = conclude(run(0.0, 1.0, 0.0), [], noise_floor=2.0)
    assert (given.earlier, given.floor) == ("", 2.0)


def test_a_difference_of_a_tap_that_is_lost_afterwards_is_still_reported() -> None:
    rows = [row("a", step=1, rel_l2=0.0), row("b", step=1, rel_l2=1.0)]
    lost = row("b", step=2, rel_l2=None, status="missing", error="target[0] died")
    found = conclude(to_frame([*rows, lost]), [])
    assert found.first is None
    assert found.earlier.startswith("first divergent in this run: b on target[0] in step 1:")
    assert conclude(to_frame(rows), []).earlier == ""


class Live:
    """A run whose rows come one after the other, and a display that looks at it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = RowStore(folder)
        self.has_ended = False
        self.now = 0.0
        self.frames = 0
        monkeypatch.setattr(conclusion.time, "monotonic", lambda: self.now)
        self.display = LiveConclusion(LiveTaps(self.store), self._frame, lambda number: self.has_ended)

    def _frame(self, number: int) -> pd.DataFrame:
        self.frames += 1
        self.now += 1.0
        return self.store.frame(number)

    def come(self, *rows: Row) -> None:
        self.store.append([encode(each) for each in rows])

    def look(self, limit: int = 100, noise_floor: float | None = None) -> conclusion.Conclusion:
        return self.display.look([], noise_floor, limit)


@pytest.fixture
def live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    made = Live(tmp_path, monkeypatch)
    yield made
    made.store.close()


def _values(found: conclusion.Conclusion) -> list[Any]:
    return [(line.name, line.row.step, line.worst, line.since) for line in found.lines]


def test_a_display_shows_new_rows_at_once_and_their_history_when_due(live: Live) -> None:
    live.come(row("a", step=0, rel_l2=1.0), row("a", step=1))
    assert _values(live.look()) == [("a", 1, 0.0, None)]
    assert live.display.behind == 2
    assert _values(live.look()) == [("a", 1, 1.0, 0)]
    assert live.display.behind == 0
    live.come(row("a", step=2, rel_l2=3.0), row("a", step=3))
    assert _values(live.look()) == [("a", 3, 1.0, 0)]
    assert (live.display.behind, live.frames) == (2, 1)
    live.now += 9.5
    assert _values(live.look()) == [("a", 3, 3.0, 0)]
    assert (live.display.behind, live.frames) == (0, 2)
    assert live.look() is live.look()
    # The first look at the next run has no history, neither that run's nor this one's.
    live.come(row("a", run=1, step=4))
    found = live.look()
    assert (_values(found), found.earlier) == ([("a", 4, 0.0, None)], "")


def test_an_ended_run_is_concluded_from_all_its_rows(live: Live) -> None:
    live.come(*(row("a", step=step, rel_l2=1.0 if step == 3 else 0.0) for step in range(50)), row("b", step=49))
    live.has_ended = True
    found = live.look(limit=1)
    assert _values(found) == [("a", 49, 1.0, 3), ("b", 49, 0.0, None)]
    assert found.earlier.startswith("first divergent in this run: a on target[0] in step 3")
    assert live.display.behind == 0
    assert live.look(limit=1) is found
    assert live.look(limit=1, noise_floor=2.0).earlier == ""


def test_the_display_moves_on_to_the_next_run(live: Live) -> None:
    live.come(row("a", rel_l2=1.0))
    live.has_ended = True
    assert _values(live.look()) == [("a", 0, 1.0, 0)]
    live.has_ended = False
    live.come(row("c", run=1, step=1))
    assert _values(live.look()) == [("c", 1, 0.0, None)]
    assert _values(live.look()) == [("c", 1, 0.0, None)]


def test_a_tap_that_was_never_measured_has_no_history() -> None:
    lost = [row("x", order=1, status="timeout", rel_l2=None), row("y", order=2, rel_l2=0.5)]
    history = history_of(to_frame(lost), FLOOR)
    assert [key[1].name for key in history.worst] == ["y"]
    assert [key[1].name for key in history.since] == ["y"]


def test_a_line_has_the_largest_difference_of_the_run_not_the_newest() -> None:
    frame = to_frame([row("h", step=0, rel_l2=0.5), row("h", step=1, rel_l2=1e-7)])
    assert [line.worst for line in tap_summaries(newest_rows(frame), history_of(frame, FLOOR))] == [0.5]
    assert [line.worst for line in tap_summaries([row("h", rel_l2=0.7)], history_of(frame, FLOOR))] == [0.7]


def test_a_row_of_no_numbers_has_no_difference() -> None:
    (line,) = tap_summaries([row("empty", rel_l2=None)])
    assert line.worst is None
    (line,) = tap_summaries([row("empty", rel_l2=None), row("empty", rank=1, rel_l2=0.5)])
    assert (line.row.rank, line.worst) == (1, 0.5)


def test_a_call_without_a_partner_counts_only_if_nothing_newer_was_received() -> None:
    received = [row("x", 1, 1, rank=1), row("x", 1, 5)]
    alone = row("x", 1, 3, side="baseline", status="unmatched")
    assert [each.row.status for each in tap_summaries([*received, alone])] == ["compared"]
    assert [each.row.status for each in tap_summaries([*received, alone._replace(step=6)])] == ["unmatched"]


def test_the_first_divergent_tap_is_marked_by_its_line_whatever_ranks_the_taps_have() -> None:
    found = conclude_from([row("a", rel_l2=1e-7), row("a", rank=1, rel_l2=1e-7), row("b", 2, rel_l2=0.5)])
    assert found.first == 1
    assert found.lines[1].name == "b"


def test_rows_are_in_the_order_in_which_taps_first_ran() -> None:
    rows = [row("b"), row("a", rank=1), row("a", side="baseline", rank=2), row("late"), row("a")]
    taps = [{"name": name} for name in "aba"]
    assert [(each.name, each.side, each.rank) for each in in_order_of(taps, rows)] == [
        ("a", "baseline", 2),
        ("a", "target", 0),
        ("a", "target", 1),
        ("b", "target", 0),
        ("late", "target", 0),
    ]


def test_the_newest_run_is_that_of_the_largest_number() -> None:
    rows = [row("a", run=1), row("b", run=2), row("a", run=2), row("c", run=0)]
    assert [each.name for each in of_newest_run(rows)] == ["b", "a"]
    assert of_newest_run([]) == []
