"""The column of tags in a frame: dicts that are made when they are read, and otherwise a column of objects."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest

from graftlab.rows.rendering import RowsFrame
from graftlab.rows.schema import Row
from graftlab.rows.store import to_frame


def row(order: int, **tags: Any) -> Row:
    place = {"name": "x", "step": order // 2, "side": "target", "rank": 0}
    return Row(0, order // 2, order, "x", {**place, **tags}, "b2t", "target", 0, "compared", [0])


ROWS = [row(0, layer=1), row(1, layer=2), row(2, layer=1), row(3, layer=2), row(4, request={"ids": [1, 2]})]


@pytest.fixture
def frame() -> RowsFrame:
    made = to_frame(ROWS)
    assert isinstance(made, RowsFrame)
    return made


def of_objects(frame: pd.DataFrame) -> pd.DataFrame:
    """The same frame with an ordinary column of dicts."""
    made = frame.copy()
    made["tags"] = pd.Series([each.tags for each in ROWS], dtype=object)
    return made


def parquet(frame: pd.DataFrame) -> pd.DataFrame:
    file = io.BytesIO()
    frame[["tags", "order"]].to_parquet(file)
    return pd.read_parquet(file)


def changed(change: Callable[[pd.DataFrame], None]) -> Callable[[pd.DataFrame], Any]:
    def apply(frame: pd.DataFrame) -> Any:
        change(frame)
        return frame["tags"].tolist()

    return apply


def set_one(frame: pd.DataFrame) -> None:
    frame.at[1, "tags"] = {"mine": 1}


def set_none(frame: pd.DataFrame) -> None:
    frame.loc[frame["order"] > 2, "tags"] = None


def set_all(frame: pd.DataFrame) -> None:
    frame["tags"] = frame["tags"].map(lambda tags: {**tags, "more": 1})


USES: dict[str, Callable[[pd.DataFrame], Any]] = {
    "list": lambda frame: frame["tags"].tolist(),
    "cells": lambda frame: [frame["tags"].iloc[at] for at in range(-5, 5)],
    "at": lambda frame: frame.at[3, "tags"],
    "array": lambda frame: frame["tags"].to_numpy(),
    "objects": lambda frame: frame["tags"].astype(object),
    "text": lambda frame: frame["tags"].astype(str).tolist(),
    "map": lambda frame: frame["tags"].map(lambda tags: tags.get("layer")),
    "apply": lambda frame: frame["tags"].apply(len),
    "columns": lambda frame: frame["tags"].apply(pd.Series),
    "mask": lambda frame: frame[frame["order"] > 1]["tags"].tolist(),
    "slices": lambda frame: frame.iloc[3:0:-2]["tags"].tolist(),
    "sorted": lambda frame: frame.sort_values("order", ascending=False)["tags"].tolist(),
    "reindexed": lambda frame: frame.reindex([4, 9, 0])["tags"].tolist(),
    "joined": lambda frame: frame[["order", "tags"]].merge(frame[["order", "name"]], on="order")["tags"].tolist(),
    "concat": lambda frame: pd.concat([frame, frame.iloc[:2]], ignore_index=True)["tags"].tolist(),
    "of-two": lambda frame: pd.concat([frame, to_frame(ROWS[1:3])])["tags"].tolist(),
    "missing": lambda frame: frame["tags"].isna().tolist(),
    "equal": lambda frame: (frame["tags"] == frame["tags"].iloc[1]).tolist(),
    "equal-all": lambda frame: (frame["tags"] == frame["tags"]).tolist(),
    "first": lambda frame: frame.groupby("step")["tags"].first().tolist(),
    "groups": lambda frame: [(step, part["tags"].tolist()) for step, part in frame.groupby("step")],
    "aggregate": lambda frame: frame.groupby("step")["tags"].agg(list).tolist(),
    "records": lambda frame: frame[["order", "tags"]].to_dict("records"),
    "tuples": lambda frame: [each.tags for each in frame.itertuples()],
    "rows": lambda frame: [each["tags"] for _, each in frame.iterrows()],
    "one-row": lambda frame: frame.iloc[2]["tags"],
    "by-row": lambda frame: frame.apply(lambda each: each["tags"]["step"], axis=1).tolist(),
    "values": lambda frame: frame[["order", "tags"]].to_numpy().tolist(),
    "turned": lambda frame: frame[["order", "tags"]].T.iloc[1].tolist(),
    "json": lambda frame: frame[["order", "tags"]].to_json(),
    "csv": lambda frame: frame[["order", "tags"]].to_csv(),
    "html": lambda frame: pd.DataFrame(frame[["order", "tags"]]).to_html(),
    "repr": lambda frame: repr(frame[["order", "tags"]]),
    "series-repr": lambda frame: repr(frame["tags"]).rpartition("dtype")[0],
    "notebook": lambda frame: frame._repr_html_(),
    "parquet": parquet,
    "pickle": lambda frame: pickle.loads(pickle.dumps(frame))["tags"].tolist(),
    "deep-copy": lambda frame: copy.deepcopy(frame)["tags"].tolist(),
    "normal": lambda frame: pd.json_normalize(frame["tags"].tolist()),
    "set-one": changed(set_one),
    "set-none": changed(set_none),
    "set-all": changed(set_all),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_the_column_of_tags_is_used_like_one_of_objects(frame: RowsFrame, use: Callable[[Any], Any]) -> None:
    expected = of_objects(frame)
    found, wanted = use(frame), use(expected)
    assert type(found) is type(wanted)
    if isinstance(wanted, pd.DataFrame):
        pd.testing.assert_frame_equal(found, wanted)
    elif isinstance(wanted, pd.Series):
        pd.testing.assert_series_equal(found, wanted)
    elif isinstance(wanted, np.ndarray):
        assert found.dtype == wanted.dtype
        assert found.tolist() == wanted.tolist()
    else:
        # NaN differs from itself.
        assert repr(found) == repr(wanted)


def test_a_tag_that_is_replaced_is_replaced_in_that_frame_alone(frame: RowsFrame) -> None:
    whole = to_frame(ROWS)
    for part in (whole.copy(), whole.iloc[1:4].copy()):
        part.at[1, "tags"] = {"mine": 1}
        assert part["tags"].loc[1] == {"mine": 1}
        assert part["tags"].loc[2] == ROWS[2].tags
        part.at[2, "tags"] = None
        assert part["tags"].isna().loc[1:3].tolist() == [False, True, False]
    assert whole["tags"].tolist() == frame["tags"].tolist() == [each.tags for each in ROWS]


def test_the_tags_of_many_rows_are_read_in_parts_each_once(frame: RowsFrame, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graftlab.rows.tags_column._AT_ONCE", 2)
    assert list(frame["tags"]) == [each.tags for each in ROWS]


def test_a_dict_that_was_read_belongs_to_its_reader(frame: RowsFrame) -> None:
    frame["tags"].iloc[0]["layer"] = "mine"
    assert frame["tags"].iloc[0] == ROWS[0].tags
    assert frame["tags"].iloc[2] == ROWS[2].tags


def test_a_copy_of_the_column_as_an_array_is_its_readers(frame: RowsFrame) -> None:
    frame.at[1, "tags"] = {"mine": 1}
    cells = np.array(frame["tags"].array)
    cells[1] = None
    assert frame["tags"].loc[1] == {"mine": 1}


def test_two_frames_are_equal_by_their_tags(frame: RowsFrame) -> None:
    pd.testing.assert_frame_equal(frame, to_frame(ROWS))
    assert frame.equals(to_frame(ROWS))
    other = to_frame([*ROWS[:-1], row(4, request={"ids": [1, 3]})])
    assert not frame["tags"].equals(other["tags"])
    assert not frame[["tags"]].equals(other[["tags"]])


def test_the_tags_of_many_rows_take_twelve_bytes_a_row() -> None:
    many = to_frame([row(order, layer=order % 4) for order in range(1000)])
    assert many["tags"].array.nbytes == many["tags"].memory_usage(index=False) == 12_000
    assert many["tags"].tolist()[7] == row(7, layer=3).tags
