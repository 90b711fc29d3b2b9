"""A frame as a notebook shows it: the answer first, nothing hidden without a word, and pandas in all it does."""

from __future__ import annotations

import html
import pickle
import re
from typing import Any

import pandas as pd

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


def test_the_columns_that_answer_come_first_and_the_others_are_named_below() -> None:
    frame = to_frame(
        [row(0, 1e-7), row(1, 0.5, note="cast to float32"), row(2, None, status="missing", error="<late>")]
    )
    head, *lines = table(frame)
    assert head == ["order", "name", "layer", "rel_l2", "max_abs", "status", "rank", "note"]
    assert lines == [
        ["0", "h", "0", "1.00e-07", "1.00e-07", "compared", "target[1]", ""],
        ["1", "h", "1", "5.00e-01", "5.00e-01", "compared", "target[1]", "cast to float32"],
        ["2", "h", "2", "-", "-", "missing", "target[1]", "<late>"],
    ]
    markup = frame._repr_html_()
    assert "the same in all: run=0, step=0, direction=b2t" in markup
    assert re.search("empty: .*cosine", markup)
    assert "<late>" not in markup


def test_a_bar_grows_with_the_logarithm_and_a_nan_is_no_number() -> None:
    markup = to_frame([row(0, 1e-9), row(1, 1e-3), row(2, 0.0, nonfinite_differ=3)])._repr_html_()
    assert re.findall(r"(\d+)%, transparent", markup) == ["25", "75"]
    assert "not finite (3)" in markup


def test_of_many_rows_the_worst_are_shown_in_execution_order_and_that_is_said() -> None:
    frame = to_frame([row(order, 0.5 if order % 3 == 0 else 1e-8) for order in range(150)])
    _, *lines = table(frame)
    assert [int(line[0]) for line in lines[:3]] == [0, 1, 2]
    assert sum(line[3] == "5.00e-01" for line in lines) == 50
    assert len(lines) == 60
    assert "the 60 worst of 150 rows, in execution order" in frame._repr_html_()


def test_several_steps_have_a_column() -> None:
    head, *_ = table(to_frame([row(0, 1e-7), row(1, 1e-7, step=1)]))
    assert head[0] == "step"


def test_it_is_a_pandas_frame_and_what_is_no_frame_of_rows_any_more_looks_like_one() -> None:
    frame = to_frame([row(0, 1e-7), row(1, 0.5)])
    assert isinstance(frame, RowsFrame)
    assert isinstance(frame[frame["rel_l2"] > 0.1], RowsFrame)
    assert type(frame.full()) is pd.DataFrame
    part = frame[["name", "rel_l2"]]
    assert part._repr_html_() == pd.DataFrame(part)._repr_html_()
    assert frame.groupby("name")["rel_l2"].max().to_dict() == {"h": 0.5}
    pd.testing.assert_frame_equal(pickle.loads(pickle.dumps(frame)), frame)
    assert "no rows" in frame.iloc[:0]._repr_html_()


def test_columns_that_are_folded_are_counted_and_named() -> None:
    from graftlab.rows.rendering import _folded

    frame = pd.DataFrame({"x": [1, 2], "c": [5, 5], "d": [6, 6], "e": [None, None], "o": [1, 2]})
    assert _folded(frame, {"x"}) == (
        "<details><summary>4 columns more</summary><div>the same in all: c=5, d=6</div><div>empty: e</div>"
        "<div>and: o</div></details>"
    )
    assert _folded(frame[["x"]], {"x"}) == ""
