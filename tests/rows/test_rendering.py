"""A frame as a notebook shows it: the answer first, nothing hidden without a word, and pandas in all it does."""

from __future__ import annotations

import html
import math
import pickle
import re
from typing import Any

import pandas as pd
import pytest

from graftlab.rows import rendering
from graftlab.rows.rendering import RowsFrame
from graftlab.rows.schema import Row
from graftlab.rows.store import to_frame


def row(order: int, rel_l2: float | None, **more: Any) -> Row:
    tags = {"name": "h", "step": 0, "side": "target", "rank": 1, "recompute_status": "original", "layer": order}
    made = Row(0, 0, order, "h", tags, "b2t", "target", 1, "compared", [0], rel_l2=rel_l2, max_abs=rel_l2, numel=4)
    return made._replace(nonfinite_differ=0, dtype="float32")._replace(**more)


def table(frame: pd.DataFrame) -> list[list[str]]:
    markup = frame._repr_html_()
    lines = re.findall("<tr>(.*?)</tr>", markup)
    return [[html.unescape(cell) for cell in re.findall("<t[hd][^>]*>(.*?)</t[hd]>", line)] for line in lines]


def test_the_most_useful_columns_come_first_and_the_others_are_named_below() -> None:
    frame = to_frame(
        [row(0, 1e-7), row(1, 0.5, note="cast to float32"), row(2, None, status="missing", error="<late>")]
    )
    head, *lines = table(frame)
    relative, largest = (
        f"{said} difference<br><small>{name}</small>" for said, name in (("relative", "rel_l2"), ("largest", "max_abs"))
    )
    assert head == ["order", "name", "layer", relative, largest, "status", "rank", "note"]
    assert lines == [
        ["0", "h", "0", "1.00e-07", "1.00e-07", "compared", "target[1]", ""],
        ["1", "h", "1", "5.00e-01", "5.00e-01", "compared", "target[1]", "cast to float32"],
        ["2", "h", "2", "-", "-", "missing", "target[1]", "<late>"],
    ]
    markup = frame._repr_html_()
    assert "the same in all: run=0, step=0, direction=b2t" in markup
    assert re.search("empty: .*cosine", markup)
    # What the notes show is not listed once more.
    below = markup.rpartition("</table>")[2]
    assert not {"error", "note", "side", "tags", "name"} & set(re.findall(r"\w+", below))
    assert "<late>" not in markup


def test_a_count_that_is_the_same_in_all_has_no_decimals() -> None:
    assert "numel=4, nonfinite_differ=0," in str(to_frame([row(0, 0.1), row(1, 0.2)])._repr_html_())


def test_a_bar_grows_with_the_logarithm_and_a_nan_is_no_number() -> None:
    markup = to_frame([row(0, 1e-9), row(1, 1e-3), row(2, 0.0, nonfinite_differ=3)])._repr_html_()
    assert re.findall(r"(\d+)%, transparent", markup) == ["25", "75"]
    assert "not finite (3)" in markup


def test_the_worst_of_many_rows_are_shown_in_execution_order() -> None:
    frame = to_frame([row(order, 0.5 if order % 3 == 0 else 1e-8) for order in range(50)])
    _, *lines = table(frame)
    assert [int(line[0]) for line in lines[:3]] == [0, 1, 2]
    assert sum(line[3] == "5.00e-01" for line in lines) == 17
    assert len(lines) == 20
    assert "the 20 worst of 50 rows, in execution order" in frame._repr_html_()


def test_notes_and_directions_have_a_column_only_where_some_row_has_one() -> None:
    head, *_ = table(to_frame([row(0, 1e-7), row(1, 0.5)]))
    assert not {"note", "direction"} & set(head)
    head, *lines = table(to_frame([row(0, 1e-7), row(1, 0.5, status="grafted")]))
    assert [line[head.index("direction")] for line in lines] == ["", "b2t"]


def test_several_steps_have_a_column() -> None:
    head, *_ = table(to_frame([row(0, 1e-7), row(1, 1e-7, step=1)]))
    assert head[0] == "step"


def test_a_frame_without_its_columns_is_shown_as_plain_pandas() -> None:
    frame = to_frame([row(0, 1e-7), row(1, 0.5)])
    assert isinstance(frame, RowsFrame)
    assert isinstance(frame[frame["rel_l2"] > 0.1], RowsFrame)
    assert type(frame.full()) is pd.DataFrame
    part = frame[["name", "rel_l2"]]
    twice = pd.concat([frame, frame[["name"]]], axis=1)
    for each in (part, twice):
        assert isinstance(each, RowsFrame)
        assert each._repr_html_() == pd.DataFrame(each)._repr_html_()
    assert frame.groupby("name")["rel_l2"].max().to_dict() == {"h": 0.5}
    pd.testing.assert_frame_equal(pickle.loads(pickle.dumps(frame)), frame)
    assert "no rows" in frame.iloc[:0]._repr_html_()


def test_columns_that_are_folded_are_counted_and_named() -> None:
    from graftlab.rows.rendering import _folded

    frame = pd.DataFrame({"x": [1, 2], "c": [5, 5], "d": [6, 6], "e": [None, None], "o": [1, 2], "p": [None, 2]})
    assert _folded(frame, {"x"}) == (
        "<details><summary>5 columns more</summary><div>the same in all: c=5, d=6</div><div>empty: e</div>"
        "<div>and: o, p</div></details>"
    )
    assert _folded(frame[["x"]], {"x"}) == ""


def test_a_notebook_shows_up_to_20_rows_whole_and_the_worst_20_of_more() -> None:
    for count, shown, said in (
        (1, 1, "1 row;"),
        (20, 20, "20 rows;"),
        (21, 20, "the 20 worst of 21 rows, in execution"),
    ):
        frame = to_frame([row(order, 1e-3 + order) for order in range(count)])
        assert len(table(frame)) == 1 + shown
        assert f"<p>{said}" in frame._repr_html_()
    assert [int(line[0]) for line in table(frame)[1:]] == list(range(1, 21))


def test_unmeasured_and_non_finite_rows_rank_as_worst() -> None:
    bad = {
        70: {"rel_l2": None, "status": "missing"},
        71: {"rel_l2": None, "status": "failed"},
        72: {"rel_l2": None, "status": "timeout"},
        73: {"rel_l2": 0.0, "nonfinite_differ": 1},
        74: {"rel_l2": math.inf},
        # Nothing came of these, which is no fault.
        75: {"rel_l2": None, "status": "unmatched"},
        76: {"rel_l2": math.nan},
    }
    frame = to_frame([row(order, 0.5)._replace(**bad.get(order, {})) for order in range(80)])
    shown = [int(line[0]) for line in table(frame)[1:]]
    assert shown == [*range(15), 70, 71, 72, 73, 74]


@pytest.mark.parametrize(
    ("value", "percent", "strength"),
    [(1e-13, 0, "0.12"), (1e-12, 0, "0.12"), (1e-6, 50, "0.31"), (1.0, 100, "0.50"), (7.0, 100, "0.50")],
)
def test_a_bar_reaches_from_float64_rounding_to_unrelated_tensors(value: float, percent: int, strength: str) -> None:
    markup = str(to_frame([row(0, value)])._repr_html_())
    assert re.findall(r"rgba\(213, 94, 0, ([\d.]+)\) (\d+)%, transparent (\d+)%", markup) == [
        (strength, str(percent), str(percent))
    ]
    assert f">{value:.2e}</td>" in markup


def test_values_that_are_no_numbers_have_no_bar() -> None:
    for value, said in ((0.0, "0.00e+00"), (None, "-"), (math.nan, "-")):
        markup = str(to_frame([row(0, value)])._repr_html_())
        assert "rgba" not in markup
        assert table(to_frame([row(0, value)]))[1][3] == said
    assert "100%" in str(to_frame([row(0, math.inf)])._repr_html_())


def test_the_note_of_a_row_is_the_first_line_of_its_error_or_remark() -> None:
    for more, said in (
        ({"error": "late\nTraceback", "note": "n", "aligned_by": "a"}, "late"),
        ({"note": "n", "aligned_by": "a"}, "n"),
        ({"aligned_by": "a"}, "a"),
        ({"note": "x" * 81}, "x" * 80),
    ):
        assert table(to_frame([row(0, 0.5, **more)]))[1][-1] == said


def test_constant_columns_are_not_searched_for_in_large_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "_FOLDED_ROWS", 3)
    few, many = (to_frame([row(order, 0.5, cast="y" * 90) for order in range(count)]) for count in (3, 4))
    assert f"cast={'y' * 75}," in str(few[["cast", "max_abs", *rendering._NEEDED]]._repr_html_())
    assert "the same in all" not in str(many._repr_html_())
    assert re.search(r"<div>and: run, .*cast", str(many._repr_html_()))


@pytest.mark.parametrize("count", [1, 25, 5000])
def test_the_text_of_a_frame_never_fills_a_screen(count: int) -> None:
    frame = to_frame([row(order, 0.1, note="a long note " * 20) for order in range(count)])
    text = repr(frame)
    assert text.count("\n") <= 22
    assert len(text) <= 2048
    assert f"[{count} rows x {len(frame.columns)} columns]" in text
    assert len(repr(frame[["note"]])) <= 2048
    assert repr(frame[["name"]].iloc[:3]) == repr(pd.DataFrame(frame[["name"]].iloc[:3]))
