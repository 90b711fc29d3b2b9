"""Rows as a frame: in memory, on disk, and read back; none is lost and none is invented."""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import random
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from kit.deadline import DEADLINE
from kit.examples import examples
from kit.refusals import exactly
from kit.support import wait_until

import graftlab as gl
from graftlab.base.tags import RESERVED_TAGS
from graftlab.diffs.measure import measure
from graftlab.rows import columns, log, moving, parquet
from graftlab.rows import store as stores
from graftlab.rows.checksums import SUMS_FILE
from graftlab.rows.columns import BECAME, Block, Columns
from graftlab.rows.encoding import decode, decode_lines, encode
from graftlab.rows.frames import GrowingFrame
from graftlab.rows.log import ROWS_FILE, RowLog, header_line
from graftlab.rows.schema import COLUMNS, STATISTICS, Row
from graftlab.rows.store import RowStore, to_frame
from graftlab.rows.tables import RepeatedTags, RowError, table_of_lines, with_steps


def row(**changes: Any) -> Row:
    tags = {"name": "x", "step": 0, "side": "target", "rank": 0, "recompute_status": "original"}
    made = Row(0, 0, 1, "x", tags, None, "target", 0, "compared", [0], [2], "float32", seconds=0.25)
    return made._replace(numel=2, rel_l2=0.5, max_abs=1.0)._replace(**changes)


def tagged(**tags: Any) -> Row:
    made = row()
    return made._replace(tags={**made.tags, **tags})


class FullDisk:
    """A log's file on a disk with room for a few bytes."""

    closed = False

    def __init__(self, file: Any = None, room: int = 0) -> None:
        self.file = file
        self.room = room

    def close(self) -> None:
        pass

    def write(self, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "no space left")
        written = self.file.write(data[: self.room])
        self.room -= written
        return int(written)


def same(one: pd.DataFrame, other: pd.DataFrame) -> None:
    pd.testing.assert_frame_equal(one, other, check_frame_type=False)  # load_run gives one that can report


@pytest.fixture(autouse=True)
def log_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows stay in the log when their session ends; tests/rows/test_parquet.py has those that move."""
    monkeypatch.setattr(moving, "AT_THE_END", 1 << 40)


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> int:
    """How many bytes of a file are read at once here, so that a small file is read in several pieces."""
    monkeypatch.setattr(log, "_PIECE", 1 << 15)
    return 1 << 15


# ---- the frame ------------------------------------------------------------------------------------------------------


def test_a_frame_has_every_column_even_without_rows() -> None:
    frame = to_frame([])
    assert tuple(name for name in frame.columns if name != BECAME) == COLUMNS
    assert len(frame) == 0
    # Made of the same types, so that what is computed from it does not depend on whether there are rows.
    with_rows = to_frame([row()])
    for name in ("rel_l2", "max_abs", "seconds", "step", "order", "numel", "nonfinite_differ"):
        assert frame[name].dtype == with_rows[name].dtype


def test_every_tag_of_the_caller_is_a_column() -> None:
    frame = to_frame([tagged(layer=3, phase="decode"), tagged(layer=4, head=1)])
    assert frame["layer"].tolist() == [3, 4]
    assert frame["phase"].tolist()[0] == "decode"
    assert pd.isna(frame["phase"].tolist()[1])
    assert pd.isna(frame["head"].tolist()[0])
    assert frame["recompute_status"].tolist() == ["original", "original"]


def test_a_tag_that_is_called_like_a_column_gets_a_prefix() -> None:
    frame = to_frame([tagged(error="planted", shape="round", layer=1)])
    assert frame["tag_error"].tolist() == ["planted"]
    assert frame["tag_shape"].tolist() == ["round"]
    assert frame["error"].isna().all()
    assert frame["shape"].tolist() == [[2]]
    assert not {f"tag_{name}" for name in RESERVED_TAGS} & set(frame.columns)


def test_a_tag_that_is_called_like_a_prefixed_one_is_not_lost() -> None:
    given = {"error": "plain", "tag_error": "prefixed", "tag_tag_error": "twice"}
    for names in (given, [*given][::-1]):
        frame = to_frame([tagged(**{name: given[name] for name in names})])
        shown = frame.loc[0, [name for name in frame.columns if name.startswith("tag_")]]
        assert sorted(shown) == sorted(given.values())


def test_rows_without_a_measurement_have_no_numbers() -> None:
    unmeasured = row(status="missing", rel_l2=None, max_abs=None, numel=None, nonfinite_differ=None, seconds=1.0)
    frame = to_frame([row(nonfinite_differ=2), unmeasured])
    assert frame["rel_l2"].isna().tolist() == [False, True]
    assert frame["rel_l2"].dtype == "float64"
    assert frame["nonfinite_differ"].isna().tolist() == [False, True]
    assert frame["numel"].dtype == "float64"


def test_required_counts_are_integers_and_measured_counts_are_floats() -> None:
    frame = to_frame([row(occurrence=3), row(status="missing", numel=None)])
    for name in ("run", "step", "order", "rank", "occurrence", "plan_version"):
        assert frame[name].dtype == np.int64, name
    for name in ("numel", "nonfinite_baseline", "nonfinite_target", "nonfinite_differ", "rows_matched"):
        assert frame[name].dtype == np.float64, name
    assert frame["occurrence"].tolist() == [3, 0]


def test_counts_are_plain_numbers_that_can_be_divided_and_compared() -> None:
    unmeasured = row(status="missing", numel=None, nonfinite_differ=None)
    frame = to_frame([row(numel=0, nonfinite_differ=0), unmeasured])
    share = frame["nonfinite_differ"] / frame["numel"]
    assert not any(bool(each > 0.5) for each in share)
    assert share.isna().all()


def test_became_names_the_side_whose_value_the_model_continued_with() -> None:
    rows = [
        row(side="target", status="grafted", direction="b2t"),
        row(side="baseline", status="grafted", direction="t2b"),
        row(side="target", status="compared", direction="b2t"),
        row(side="baseline", status="unmatched", direction=None),
    ]
    frame = to_frame([each._replace(order=i) for i, each in enumerate(rows)])
    assert frame["became"].tolist() == ["baseline", "target", "target", "baseline"]
    assert list(to_frame([]).columns).count("became") == 1


def test_frames_are_in_execution_order_whatever_the_order_of_arrival() -> None:
    rows = [row(step=step, order=order, rank=rank) for rank in (1, 0) for step, order in ((1, 5), (0, 2), (0, 1))]
    frame = to_frame(rows)
    assert list(zip(frame["step"], frame["order"], frame["rank"], strict=True)) == [
        *[(0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1)],
        *[(1, 5, 0), (1, 5, 1)],
    ]
    assert frame.index.tolist() == list(range(6))


def as_pandas_has_it(rows: list[Row]) -> pd.DataFrame:
    """A frame of these rows made by pandas alone, from a list of objects a column."""
    columns = {name: [getattr(row, name) for row in rows] for name in COLUMNS}
    for tag in dict.fromkeys(tag for row in rows for tag in row.tags if tag not in ("name", "step", "side", "rank")):
        columns[f"tag_{tag}" if tag in COLUMNS else tag] = [row.tags.get(tag) for row in rows]
    empty = to_frame([])
    numbers = {name: empty[name].dtype for name in COLUMNS if empty[name].dtype != object}
    frame = pd.DataFrame(columns, dtype=None if rows else object).astype(numbers)
    became = pd.Series(list(columns["side"]), dtype=None if rows else object)
    frame.insert(len(COLUMNS), BECAME, became)
    frame["max_abs_index"] = pd.Series([index and tuple(index) for index in columns["max_abs_index"]], dtype=object)
    # From pandas 3 on; before that text is an object.
    for name in [name for name in frame.columns if isinstance(frame[name].dtype, pd.StringDtype)]:
        frame[name] = frame[name].astype(pd.StringDtype("python", na_value=math.nan))
    return frame.sort_values(["step", "order", "side", "rank"], kind="stable", ignore_index=True)


few = st.integers(0, 3)
tag_values = (
    st.none()
    | st.booleans()
    | st.integers(0, 2)
    | st.just(-(1 << 40))
    | st.sampled_from([0.0, 1.0, 0.5, "0", "decode", [1], [True], {"a": 1}, {"a": [2.5]}])
)
measured = st.fixed_dictionaries(
    {"rel_l2": st.floats(), "numel": few, "nonfinite_differ": few, "max_abs_index": st.lists(few, max_size=2)}
)
some_rows = st.lists(
    st.builds(
        lambda more, tags, place, statistics: row(**more, **place, **statistics, tags={**place, **tags}),
        more=st.fixed_dictionaries(
            {"name": st.sampled_from("abc"), "note": st.none() | st.sampled_from("xy"), "run": few},
            optional={"shape": st.lists(few, max_size=2), "error": st.none() | st.just("planted")},
        ),
        tags=st.dictionaries(st.sampled_from(["layer", "phase", "error", "lr"]), tag_values),
        place=st.fixed_dictionaries(
            {"step": few, "order": few, "rank": few, "side": st.sampled_from(["baseline", "target"])}
        ),
        statistics=st.just({}) | measured,
    ),
    max_size=12,
)


asked_when = st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["", "frame", "decode", "move"])), max_size=8)


def frames_are_the_same(rows: list[Row], batches: list[tuple[int, str]], piece: int) -> None:
    rows = [decode(encode(made)) for made in rows]
    with TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(log, "_PIECE", piece)
        patch.setattr(log, "_STRIDE", 3)
        patch.setattr(parquet, "_GROUP", 5)
        # The example decides when rows move, in place of the thread.
        patch.setattr(moving.RowMover, "look", lambda self: None)
        store = RowStore(Path(name))
        sent = 0
        shown = []
        for count, then in [*batches, (len(rows), "frame")]:
            batch = rows[sent : sent + count]
            if batch:
                store.append([encode(made) for made in batch])
            sent += len(batch)
            if then == "decode":
                store._decode_ahead()
            if then == "move":
                store._move(piece)
            if then == "frame":
                frame = store.frame()
                shown.append((frame, as_pandas_has_it(rows[:sent])))
        for earlier, wanted in shown:
            # What came later, whether it was decoded ahead or for another frame, has changed nothing in it.
            same(earlier, wanted)
        same(frame, to_frame(rows))
        same(gl.load_run(name), frame)
        assert repr(store.rows()) == repr(rows)
        for run in range(4):
            # Which tags are columns, and of what type, depends on the run's own rows alone.
            of_run = as_pandas_has_it([made for made in rows if made.run == run])
            pd.testing.assert_frame_equal(store.frame(run), of_run, check_like=True)
        store.close()


@pytest.mark.slow
@given(some_rows, asked_when, st.integers(64, 4096))
@examples(10)
def test_a_frame_does_not_depend_on_how_rows_arrived_or_when_it_was_made(
    rows: list[Row], batches: list[tuple[int, str]], piece: int
) -> None:
    frames_are_the_same(rows, batches, piece)


def test_a_frame_of_very_different_rows_does_not_depend_on_their_arrival() -> None:
    """One example of the test above, in the fast tests too."""
    numbers = random.Random(7)
    tags: list[dict[str, Any]] = [
        {"layer": value, "error": "mine"} for value in (None, True, 1, 1.0, 0.5, -(1 << 40), "0", [1], {"a": [2.5]})
    ]
    rows = []
    for number in range(24):
        place = {"step": number // 6 - number % 2, "order": numbers.randrange(3), "rank": number % 2}
        place["step"] = max(place["step"], 0)
        measured = number % 5 != 0
        statistics = {
            "rel_l2": math.nan if number == 7 else number / 8,
            "numel": number,
            "nonfinite_differ": number % 3,
            "max_abs_index": [number, 1],
        }
        side = numbers.choice(["baseline", "target"])
        more = {"name": "abc"[number % 3], "run": number // 9, "note": "x" if number % 4 else None, "side": side}
        own = {**place, "side": side, **(tags[number % len(tags)] if number % 7 else {})}
        rows.append(row(**more, **place, **(statistics if measured else {}), shape=[number % 2], tags=own))
    for when in (
        [],
        [(4, "frame"), (3, "decode"), (4, "frame"), (4, ""), (4, "decode"), (3, "frame")],
        [(4, "decode"), (3, "move"), (4, "frame"), (4, "decode"), (2, "move"), (1, "move"), (3, "frame")],
        [(1, "frame")] * 8,
    ):
        frames_are_the_same(rows, when, 700)


def test_a_tag_that_appears_late_becomes_a_column_of_all_rows(tmp_path: Path) -> None:
    store = RowStore(tmp_path)
    store.append([encode(row(order=1))])
    assert "layer" not in store.frame()
    store.append([encode(tagged(layer=7)._replace(order=2))])
    frame = store.frame()
    assert frame["layer"].isna().tolist() == [True, False]
    assert frame["layer"].tolist()[1] == 7
    store.close()


def test_a_damaged_row_is_named_by_its_place(tmp_path: Path) -> None:
    store = RowStore(tmp_path)
    store.append([encode(row(order=1))])
    assert len(store.frame()) == 1
    store.append([encode(row(order=2)), b'{"step":'])
    with pytest.raises(gl.SessionError, match=r"rows\.jsonl: row 2 is damaged: \S"):
        store.frame()


def test_changing_a_frame_does_not_change_another(tmp_path: Path) -> None:
    store = RowStore(tmp_path)
    store.append([encode(tagged(layer=order)._replace(order=order)) for order in range(4)])
    before = to_frame(store.rows())
    for _ in range(2):
        for frame in (store.frame(), store.frame(0)):
            frame.loc[1, "rel_l2"] = -1.0
            frame.loc[:, "order"] = 9
            frame.loc[0, "name"] = "mine"
            frame.at[0, "tags"] = None
            frame.at[0, "shape"] = None
            frame.loc[2, "layer"] = 77
            frame["mine"] = 1
            del frame["status"]
        same(store.frame(), before)
        same(store.frame(0), before)
    store.append([encode(tagged(layer=4)._replace(order=4))])
    same(store.frame().head(4), before)
    store.close()


# ---- lines ----------------------------------------------------------------------------------------------------------

texts = st.text(max_size=20)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(texts, values, max_size=4))
def test_json_values_survive_the_line_unchanged(tags: dict[str, Any]) -> None:
    made = row(tags=tags, error="line one\nline two\x00\u2028")
    line = encode(made)
    assert b"\n" not in line
    assert decode(line) == made


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({1, 2}, "{1, 2}"),
        (3 + 4j, "(3+4j)"),
        ({(1, 2): 3}, "{(1, 2): 3}"),
        (b"\xff", r"b'\xff'"),
        ([{"deep": {0, 1}}], [{"deep": "{0, 1}"}]),
    ],
    ids=str,
)
def test_values_without_a_json_form_are_written_as_their_repr(value: Any, expected: Any) -> None:
    assert decode(encode(tagged(kind=value))).tags["kind"] == expected


def test_cyclic_tags_and_half_characters_do_not_stop_the_model() -> None:
    loop: list[Any] = []
    loop.append(loop)
    assert decode(encode(tagged(kind=loop))).tags["kind"] == "[[...]]"
    assert decode(encode(tagged(kind="\ud800"))).tags["kind"] == "?"


@pytest.mark.parametrize("value", [2**62 + 1, 2**63 - 1, 2**63 + 1, 2**64 + 1, -(2**63), -(2**63) - 1, 10**40 + 1])
def test_integers_of_any_length_are_read_back_exactly(value: int) -> None:
    back = decode(encode(tagged(layer=value))).tags["layer"]
    assert (type(back), back) == (int, value)


def test_numpy_numbers_stay_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    tags = decode(encode(tagged(layer=numpy.int64(3), scale=numpy.float32(0.5)))).tags
    assert (tags["layer"], tags["scale"]) == (3, 0.5)


def test_a_number_that_is_not_finite_is_no_missing_tag() -> None:
    tags = decode(encode(tagged(low=-math.inf, high=math.inf, nothing=math.nan))).tags
    assert (tags["low"], tags["high"], math.isnan(tags["nothing"])) == (-math.inf, math.inf, True)


@pytest.mark.parametrize("line", [b"", b"[1]", b"{}", b'{"name": "x"', b"\xff"], ids=str)
def test_lines_that_are_not_rows_are_refused(line: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - json's own messages
        decode(line)


def test_two_rows_in_one_line_are_no_row() -> None:
    line = encode(row())
    assert len(decode_lines([line, line])) == 2
    with pytest.raises(ValueError, match=r"unexpected|Extra data|not a list"):
        decode_lines([line + b"," + line])


def test_an_empty_line_among_rows_is_no_row() -> None:
    line = encode(row()) + b"\n"
    with pytest.raises(RowError, match="this is not a row of graftlab") as refused:
        table_of_lines(line + b"\n" + line)
    assert refused.value.index == 1


# ---- the store and the file -----------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4), max_size=6), st.integers(0, 10))
@examples(30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rows_on_disk_are_the_rows_in_memory(
    tmp_path_factory: pytest.TempPathFactory, batches: list[list[int]], start: int
) -> None:
    folder = tmp_path_factory.mktemp("store")
    store = RowStore(folder)
    order = 0
    for batch in batches:
        lines = []
        for step in batch:
            order += 1
            lines.append(encode(row(step=step, order=order)))
        store.append(lines)
        assert len(store) == order
        if step % 2:
            store.frame()  # what was read once is not read again, and not lost either
    everything = store.rows()
    assert [made.order for made in everything] == list(range(1, order + 1))
    assert store.rows(start) == everything[start:]
    assert store.rows(start, start + 3) == everything[start : start + 3]
    store.close()
    same(gl.load_run(folder), to_frame(everything))


def test_a_closed_store_still_takes_and_returns_rows(tmp_path: Path) -> None:
    store = RowStore(tmp_path)
    store.append([encode(row())])
    store.close()
    store.append([encode(row(order=2))])
    assert [made.order for made in store.rows()] == [1, 2]
    assert store.frame()["order"].tolist() == gl.load_run(tmp_path)["order"].tolist() == [1, 2]


def test_rows_are_on_disk_before_anything_reads_them(tmp_path: Path) -> None:
    store = RowStore(tmp_path)
    store.append([encode(row()), encode(row(order=2))])
    # The store is still open, as it is when its process is killed.
    assert gl.load_run(tmp_path)["order"].tolist() == [1, 2]
    store.close()


def test_a_kill_while_writing_loses_only_the_line_being_written(tmp_path: Path) -> None:
    lines = [encode(row(order=order)) for order in range(1, 4)]
    whole = b"\n".join([header_line(), *lines]) + b"\n"
    file = tmp_path / ROWS_FILE
    last = len(whole) - len(lines[-1]) - 1
    for length in (last, last + 1, last + 20, len(whole) - 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        assert gl.load_run(tmp_path)["order"].tolist() == [1, 2]
    file.write_bytes(whole)
    assert gl.load_run(str(tmp_path))["order"].tolist() == [1, 2, 3]


def test_a_row_takes_about_half_a_kilobyte() -> None:
    name = "encoder.layer.3.output.dense"
    x = torch.linspace(-1, 1, 6000).reshape(2, 30, 100)
    measured = {column: getattr(measure(x, x + 1e-6 * x.cos()), column) for column in STATISTICS}
    made = row(**measured, name=name, shape=[2, 30, 100], baseline_name=name, target_name=name)
    assert 400 < len(encode(made._replace(tags={**made.tags, "name": name}))) < 650


def test_a_run_without_a_row_is_an_empty_frame(tmp_path: Path) -> None:
    RowStore(tmp_path).close()
    same(gl.load_run(tmp_path), to_frame([]))


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    head = header_line() + b"\n"
    (tmp_path / ROWS_FILE).write_bytes(head + encode(row()) + b'\n{"broken\n' + encode(row()) + b"\n")
    with pytest.raises(gl.SessionError, match=r"rows.jsonl, line 3: this is not a row"):
        gl.load_run(tmp_path)
    (tmp_path / ROWS_FILE).write_bytes(json.dumps([1]).encode() + b"\n")
    with pytest.raises(gl.SessionError, match="line 1: this does not name the columns of rows"):
        gl.load_run(tmp_path)


def test_a_damaged_line_far_down_is_named(tmp_path: Path, pieces: int) -> None:
    lines = [encode(row(order=order)) for order in range(2_000)]
    assert len(b"".join(lines)) > 9 * pieces
    lines[1_500] = b'{"broken'
    (tmp_path / ROWS_FILE).write_bytes(b"\n".join([header_line(), *lines]) + b"\n")
    with pytest.raises(gl.SessionError, match=r"rows.jsonl, line 1502: this is not a row"):
        gl.load_run(tmp_path)


@pytest.mark.parametrize("name", [ROWS_FILE, f"{ROWS_FILE}.partial", "rows.crc32.partial"])
def test_a_link_planted_in_the_run_folder_is_not_followed(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises((OSError, gl.SessionError), match="it is a link, which is not followed"):
        RowStore(folder)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("name", [ROWS_FILE, "rows.crc32", "rows-0000000000-1-00000000.parquet"])
def test_a_pipe_in_a_run_folder_is_refused_and_not_waited_for(tmp_path: Path, name: str) -> None:
    store = RowStore(tmp_path)
    store.append([encode(row())])
    store.close()
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(gl.SessionError, match=f"{name}.*it is not a regular file"):
        gl.load_run(tmp_path)


def test_a_flipped_bit_in_the_version_is_damage_and_not_another_version(tmp_path: Path) -> None:
    (tmp_path / ROWS_FILE).write_bytes(header_line().replace(b'"version": 1', b'"version": 0') + b"\n")
    with pytest.raises(gl.SessionError, match="line 1: this does not match its checksum"):
        gl.load_run(tmp_path)


@given(st.data())
@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_flipped_bit_anywhere_in_the_log_is_reported_with_its_line(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("flips")
    store = RowStore(folder)
    for start in range(0, 12, 4):
        store.append([encode(row(order=order, rel_l2=order / 7)) for order in range(start, start + 4)])
    store.close()
    file = folder / ROWS_FILE
    written = bytearray(file.read_bytes())
    place = data.draw(st.integers(0, len(written) - 2), "place")
    line = written.count(b"\n", 0, place) + 1
    written[place] ^= 1 << data.draw(st.integers(0, 7), "bit")
    file.write_bytes(written)
    with pytest.raises(gl.SessionError, match=rf"rows\.jsonl, line {line}: this (is|does) not "):
        gl.load_run(folder)


def test_a_changed_number_is_refused_and_a_log_without_checksums_is_read(tmp_path: Path, pieces: int) -> None:
    store = RowStore(tmp_path)
    store.append([encode(row(order=order, max_abs=0.5)) for order in range(1000)])
    store.close()
    assert (tmp_path / ROWS_FILE).stat().st_size > 4 * pieces
    assert len(gl.load_run(tmp_path)) == 1000
    file = tmp_path / ROWS_FILE
    lines = file.read_bytes().split(b"\n")
    assert lines[900].count(b"0.5") == 2
    lines[900] = lines[900].replace(b"0.5", b"0.7")
    file.write_bytes(b"\n".join(lines))
    with pytest.raises(gl.SessionError, match=r"rows\.jsonl, line 901: this is not what was written, by its checksum"):
        gl.load_run(tmp_path)
    with pytest.raises(gl.SessionError, match="line 901"):
        RowStore(tmp_path, append=True)
    (tmp_path / SUMS_FILE).unlink()
    assert gl.load_run(tmp_path)["rel_l2"].tolist().count(0.7) == 1


def test_columns_that_were_renamed_are_refused(tmp_path: Path) -> None:
    store = RowStore(tmp_path)
    store.append([encode(row())])
    store.close()
    file = tmp_path / ROWS_FILE
    header, rest = file.read_bytes().split(b"\n", 1)
    # As an older version wrote it, without a checksum in the line itself.
    columns = json.loads(header.replace(b'"rel_l2"', b'"max_abs"').replace(b'"max_abs"', b'"rel_l2"', 1))["columns"]
    file.write_bytes(json.dumps({"columns": columns}).encode() + b"\n" + rest)
    with pytest.raises(gl.SessionError, match=r"rows\.jsonl, line 1: this is not what was written"):
        gl.load_run(tmp_path)


@pytest.mark.parametrize("cut", [0, 1, 30])
@pytest.mark.parametrize("sums", [0, 3, 5, 12, 16])
def test_rows_appended_to_a_truncated_log_are_checked(tmp_path: Path, cut: int, sums: int) -> None:
    store = RowStore(tmp_path)
    store.append([encode(row(order=order)) for order in range(3)])
    store.close()
    file = tmp_path / ROWS_FILE
    os.truncate(file, file.stat().st_size - cut)
    os.truncate(tmp_path / SUMS_FILE, sums)
    left = 2 if cut else 3
    assert len(gl.load_run(tmp_path)) == left
    store = RowStore(tmp_path, append=True)
    store.append([encode(row(order=order)) for order in range(3, 5)])
    store.close()
    assert gl.load_run(tmp_path)["order"].tolist() == [*range(left), 3, 4]
    file.write_bytes(file.read_bytes().replace(b'"x"', b'"y"'))
    with pytest.raises(gl.SessionError, match=r"line 2: this is not what was written"):
        gl.load_run(tmp_path)


def test_rows_are_appended_while_others_read_them(tmp_path: Path) -> None:
    store = RowStore(tmp_path)
    total, batch = 3000, 30
    seen: list[list[int]] = []
    faults: list[BaseException] = []

    def read() -> None:
        try:
            while not seen or len(seen[-1]) < total:
                seen.append(store.frame()["order"].tolist())
                count = len(store)
                assert [made.order for made in store.rows(max(0, count - 5), count)] == list(range(count))[-5:]
        except BaseException as fault:
            faults.append(fault)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for start in range(0, total, batch):
        store.append([encode(row(order=order)) for order in range(start, start + batch)])
    for reader in readers:
        reader.join(60)
    assert not faults
    assert seen[-1] == list(range(total))
    for orders in seen:
        # Whole batches, from the first on.
        assert orders == list(range(len(orders)))
        assert len(orders) % batch == 0
    store.close()


def test_rows_are_decoded_while_they_arrive_before_a_frame_needs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moving, "DECODED_AT_ONCE", 10)
    store = RowStore(tmp_path)
    store.append([encode(row(order=order)) for order in range(9)])
    assert store._mover._thread is None
    store.append([encode(row(order=9))])
    wait_until(lambda: store._tail.row == 10, "the rows' decoding")
    for orders in (range(10, 40), range(40, 70)):
        store.append([encode(row(order=order)) for order in orders])
        wait_until(lambda: store._tail.row == len(store), "the rows' decoding")
    with monkeypatch.context() as patch:
        # Nothing is left to decode.
        patch.setattr(stores, "table_of_lines", lambda *given: pytest.fail("rows were decoded again"))
        assert store.frame()["order"].tolist() == list(range(70))
    store.close()
    assert store._mover._thread is not None
    assert not store._mover._thread.is_alive()
    assert len(store.frame()) == 70


def test_rows_are_decoded_while_the_mover_waits_for_a_pause_of_the_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moving, "DECODED_AT_ONCE", 10)
    monkeypatch.setattr(moving, "SOME", 1)
    monkeypatch.setattr(moving, "_QUIET", 2 * DEADLINE)
    store = RowStore(tmp_path)
    for end in (20, 60, 90):
        store.append([encode(row(order=order)) for order in range(len(store), end)])
        wait_until(lambda: store._tail.row == len(store), "the rows' decoding")
        wait_until(lambda: store._mover._awaits_pause, "the thread's wait")
    store.close()
    assert store.frame()["order"].tolist() == list(range(90))


def test_a_store_that_keeps_few_rows_makes_the_same_frames_and_holds_none(tmp_path: Path) -> None:
    folders = tmp_path / "all", tmp_path / "few"
    for folder in folders:
        folder.mkdir()
    store, few = RowStore(folders[0]), RowStore(folders[1], keep_rows=10)
    for end in (8, 30, 60):
        lines = [encode(row(order=order, run=order // 40)) for order in range(len(store), end)]
        for each in (store, few):
            each.append(lines)
        held = few.frame()
        same(held, store.frame())
        same(few.frame(run=0), store.frame(run=0))
        assert len(few._framed.block["step"]) == (8 if end == 8 else 0)
        assert len(held) == end
    store.close()
    few.close()


def test_a_continued_folder_counts_the_rows_of_this_session_alone(tmp_path: Path) -> None:
    store = RowStore(tmp_path)
    store.append([encode(row(order=order)) for order in range(30)])
    store.close()
    store = RowStore(tmp_path, append=True, keep_rows=10)
    store.append([encode(row(run=1))])
    assert len(store.frame()) == len(store._framed.block["step"]) == 1
    file, store._log._file = store._log._file, FullDisk()
    store.append([encode(row(run=1, order=order)) for order in (1, 2)])
    assert (store.unwritten() or "").startswith("rows 1 to 2 are not on disk")
    store._log._file = file
    assert store.unwritten() is None
    store.close()
    assert len(gl.load_run(tmp_path)) == 33


def test_rows_that_come_later_change_no_frame_that_is_shown(tmp_path: Path) -> None:
    store = RowStore(tmp_path)
    even = [row(order=order, note=str(order)) for order in range(0, 40, 2)]
    odd = [row(order=order, note=str(order)) for order in range(1, 40, 2)]
    store.append([encode(made) for made in even])
    frame = store.frame()
    for some in (odd[10:], odd[:10]):
        store.append([encode(made) for made in some])
        store._decode_ahead()
    same(frame, to_frame(even))
    same(store.frame(), to_frame(even + odd))
    store.close()


def test_a_deleted_log_does_not_stop_appends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving, "DECODED_AT_ONCE", 10)
    store = RowStore(tmp_path)
    (tmp_path / ROWS_FILE).unlink()
    store.append([encode(row(order=order)) for order in range(20)])
    thread = store._mover._thread
    assert thread is not None
    thread.join(DEADLINE)
    assert not thread.is_alive()
    store.append([encode(row(order=order)) for order in range(20, 40)])
    assert len(store) == 40
    with pytest.raises(gl.SessionError, match="no rows can be read"):
        store.frame()
    store.close()


def test_columns_in_memory_of_their_own_grow_and_can_be_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns, "_HUGE_FROM", 1)
    rows = [row(order=order, step=order // 100, rel_l2=order / 7, rank=order % 2) for order in range(3_000)]
    store = RowStore(tmp_path)
    for count in (10, 1_000, 3_000):
        store.append([encode(each) for each in rows[len(store) : count]])
        frame = store.frame()
        same(frame, to_frame(rows[:count]))
        frame.loc[0, "rel_l2"] = -1.0
        frame.loc[0, "rank"] = 7
    store.close()


def test_zeros_are_read_back_by_sign_and_over_what_an_interrupted_reader_left() -> None:
    zeros = to_frame([row(mean_baseline=-0.0, mean_target=0.0)]).iloc[0]
    assert (math.copysign(1.0, zeros["mean_baseline"]), math.copysign(1.0, zeros["mean_target"])) == (-1.0, 1.0)

    def blocks(found: list[Row]) -> Block:
        return made.block(table_of_lines(b"".join(encode(each) + b"\n" for each in found)))

    def interrupted() -> Iterator[Block]:
        yield blocks([row(order=2, rel_l2=7.0, occurrence=9)])
        raise KeyboardInterrupt

    made = Columns(grows=True)
    known = made.merge(made.empty(), [blocks([row(order=1)])], 1)
    with pytest.raises(KeyboardInterrupt):
        made.merge(known, interrupted(), 1)
    read = made.merge(known, [blocks([row(order=2, rel_l2=0.0, occurrence=0)])], 1)
    assert (read["rel_l2"].tolist(), read["occurrence"].tolist()) == ([0.5, 0.0], [0, 0])


def test_an_interrupted_reader_skips_and_duplicates_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_PIECE", 1024)
    store = RowStore(tmp_path)
    store.append([encode(row(order=order)) for order in range(20)])
    for kind, method in ((Columns, "block"), (Columns, "merge"), (Columns, "text"), (GrowingFrame, "of")):
        original = getattr(kind, method)
        calls = itertools.count()

        def stops(*given: Any, original: Any = original, calls: Any = calls) -> Any:
            made = original(*given)
            if next(calls) == 1 or original.__name__ in ("merge", "of"):
                raise KeyboardInterrupt
            return made

        with monkeypatch.context() as patch:
            patch.setattr(kind, method, stops)
            store.append([encode(row(order=order)) for order in range(len(store), len(store) + 20)])
            with pytest.raises(KeyboardInterrupt):
                store.frame()
    assert store.frame()["order"].tolist() == list(range(100))
    store.close()


def test_a_full_disk_does_not_damage_rows_written_before_or_after(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = RowStore(tmp_path)
    store.append([encode(row(order=1))])
    file = store._log._file
    store._log._file = FullDisk(file, 40)
    for order in (2, 3):
        store.append([encode(row(order=order))])
    assert [made.order for made in store.rows()] == store.frame()["order"].tolist() == [1, 2, 3]
    assert [made.order for made in store.rows(2)] == [3]
    assert gl.load_run(tmp_path)["order"].tolist() == [1]
    assert store.unwritten() == store.unwritten(1)
    # Once, not with each row.
    assert [record.levelname for record in caplog.records if "cannot be written" in record.getMessage()] == ["ERROR"]
    assert re.match(
        r"rows 1 to 2 are not on disk, because .*rows.jsonl cannot be written: no space left", store.unwritten() or ""
    )
    assert store.unwritten(3) is None
    with pytest.raises(gl.SessionError, match="rows 1 to 2 are not on disk"):
        store.close()
    store._log._file = file
    store.append([encode(row(order=4))])
    assert store.unwritten() is None
    assert store.frame()["order"].tolist() == gl.load_run(tmp_path)["order"].tolist() == [1, 2, 3, 4]
    assert [made.order for made in store.rows()] == [1, 2, 3, 4]
    store.close()


def test_rows_that_are_written_while_they_are_read_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = RowStore(tmp_path)
    rows, file = [encode(row(order=order)) for order in range(3)], store._log._file
    store.append(rows[:1])
    store._log._file = FullDisk()
    store.append(rows[1:2])
    pieces = log._pieces

    def late(*given: Any) -> Any:
        # The disk has room again, after the reader has taken what was in memory.
        monkeypatch.setattr(log, "_pieces", pieces)
        store._log._file = file
        store.append(rows[2:])
        return pieces(*given)

    monkeypatch.setattr(log, "_pieces", late)
    assert store._log.lines_from(store._log.begin[1]).splitlines() == rows[:2]
    store.close()


def test_rows_that_a_full_disk_lacks_are_counted_also_once_the_store_is_closed(tmp_path: Path) -> None:
    store = RowStore(tmp_path)
    store.append([encode(row(order=1))])
    file = store._log._file
    store._log._file = FullDisk()
    store.append([encode(row(order=2))])
    # The disk has room again too late: the file is closed.
    store._log._file = file
    file.close()
    said = (
        f"rows 1 to 1 are not on disk, because {tmp_path / ROWS_FILE} cannot be written: no space left. They are in "
        "memory and in session.frame until the session ends; make room, and the next row, run or close() writes them"
    )
    assert store.unwritten() == said
    with pytest.raises(gl.SessionError, match=exactly(said)):
        store.close()


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "no space left"), KeyboardInterrupt()])
def test_a_folder_whose_rows_cannot_be_begun_stays_free_for_another_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fails(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(RowLog, "start", fails)
        # The error keeps what the store had opened.
        with pytest.raises((gl.SessionError, KeyboardInterrupt)) as raised:
            RowStore(tmp_path)
    RowStore(tmp_path).close()
    if isinstance(error, OSError):
        assert str(raised.value) == f"the run folder {tmp_path} cannot be written: no space left"


def test_a_log_with_other_columns_is_read_by_their_names(tmp_path: Path) -> None:
    rows = [tagged(layer=layer) for layer in range(3)]
    names = [name for name in reversed(COLUMNS) if name not in ("note", "plan_version")] + ["of_later"]
    lines = [json.dumps([getattr(made, name, "?") for name in names]) for made in rows]
    (tmp_path / ROWS_FILE).write_text("\n".join([json.dumps({"columns": names}), *lines]) + "\n")
    same(gl.load_run(tmp_path), to_frame(rows))


def test_a_log_in_a_later_format_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / ROWS_FILE
    path.write_text(json.dumps({"columns": COLUMNS, "version": 2}) + "\n")
    with pytest.raises(
        gl.SessionError, match=f"{path} has rows in format 2, and this version of graftlab reads format 1"
    ):
        gl.load_run(tmp_path)


def test_the_log_names_its_columns(tmp_path: Path) -> None:
    store = RowStore(tmp_path)
    store.append([encode(row(order=5))])
    store.close()
    header, line = (json.loads(line) for line in (tmp_path / ROWS_FILE).read_text().splitlines())
    assert dict(zip(header["columns"], line, strict=True)) == row(order=5)._asdict()


@pytest.mark.parametrize(
    ("replaced", "why"), [(None, "No such file or directory"), (os.mkfifo, "it is not a regular file")]
)
def test_a_log_that_is_gone_or_replaced_is_named(tmp_path: Path, replaced: Any, why: str) -> None:
    store = RowStore(tmp_path)
    store.append([encode(row())])
    (tmp_path / ROWS_FILE).unlink()
    if replaced is not None:
        replaced(tmp_path / ROWS_FILE)
    advice = "it must be in the run folder of a session (session.folder)"
    with pytest.raises(
        gl.SessionError, match=exactly(f"no rows can be read from {tmp_path / ROWS_FILE}: {why}; {advice}")
    ):
        store.frame()
    store.close()


def test_a_row_of_megabytes_is_read_back(tmp_path: Path) -> None:
    store = RowStore(tmp_path)
    store.append([encode(tagged(prompt="x" * (3 << 20))), encode(row())])
    store.close()
    assert [len(str(tags.get("prompt", ""))) for tags in gl.load_run(tmp_path)["tags"]] == [3 << 20, 0]


def test_a_folder_without_rows_is_named_with_what_to_pass(tmp_path: Path) -> None:
    with pytest.raises(gl.SessionError, match=r"no rows can be read from .*session.folder"):
        gl.load_run(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("column", "value"),
    [
        *(("step", "x"), ("step", 1.5), ("tags", 5), ("shape", "no"), ("rel_l2", [1]), ("max_abs_index", 3)),
        *(("name", None), ("rank", 1 << 63), ("status", {}), ("senders", None)),
    ],
)
def test_an_invalid_value_is_named_with_its_line_and_column(tmp_path: Path, column: str, value: Any) -> None:
    good = json.loads(encode(row()))
    bad = list(good)
    bad[COLUMNS.index(column)] = value
    lines = [json.dumps(each) for each in ({"columns": COLUMNS}, good, bad)]
    (tmp_path / ROWS_FILE).write_text("\n".join(lines) + "\n")
    found = rf"rows.jsonl, line 3: this has {re.escape(repr(value))} as its {column}, "
    with pytest.raises(gl.SessionError, match=found):
        gl.load_run(tmp_path)


@pytest.mark.parametrize("first", [0, 1, 1000])
def test_tags_get_their_rows_step_and_neighbours_share_them(first: int) -> None:
    tags = [RepeatedTags({"a": at, "step": None}, True) for at in range(1500)] + [RepeatedTags({"a": "whole"}, False)]
    places = [first, first, first + 300, first + 300, first, first, 1500, 1500]
    steps = [first, first, first, first + 400, first + 400, 3, 3, 4]
    for upto in (6, 8):
        made = with_steps(tags, np.array(places[:upto]), np.array(steps[:upto]))
        expected = [{**tags[place].tags, "step": step} for place, step in zip(places[:6], steps, strict=False)]
        assert made.tolist() == expected + [{"a": "whole"}] * (upto - 6)
        assert list(made[0]) == ["a", "step"]
        # So that a million rows are not a million dicts.
        assert made[0] is made[1]
    assert tags[first].tags == {"a": first, "step": None}


def test_a_folder_that_was_refused_for_its_rows_can_be_continued_at_once(tmp_path: Path) -> None:
    store = RowStore(tmp_path)
    store.append([encode(row(order=0))])
    store.close()
    # The exception keeps the refused store alive, as a notebook does.
    with pytest.raises(gl.SessionError, match="pass append=True") as kept:
        RowStore(tmp_path)
    RowStore(tmp_path, append=True).close()
    assert kept.value is not None
