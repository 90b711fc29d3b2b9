"""Rows in Parquet files: the same rows as in the log, whenever a process was killed, and whatever the disk does."""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import math
import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pandas as pd
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st
from kit import warm
from kit.deadline import DEADLINE
from kit.examples import examples
from kit.limits import limited
from kit.support import wait_until

import graftlab as gl
from graftlab.rows import log, moving, parquet
from graftlab.rows.encoding import decode, encode
from graftlab.rows.log import ROWS_FILE, RowLog, header_line
from graftlab.rows.schema import COLUMNS, Row
from graftlab.rows.store import RowStore, to_frame
from graftlab.rows.tables import table_of_lines

MEASURED = ("rel_l2", "mean_abs", "mean_baseline", "mean_target")


def row(order: int, **changes: Any) -> Row:
    tags = {"name": f"layer.{order % 5}", "step": order // 5, "side": "target", "rank": 0, "layer": order % 5}
    made = Row(0, order // 5, order, f"layer.{order % 5}", tags, "b2t", "target", 0, "compared", [0], [2, 3], "float32")
    noise = dict(zip(MEASURED, np.random.default_rng(abs(order)).random(4).tolist(), strict=True))
    made = made._replace(numel=6, cosine=1 - 1e-9, max_abs_index=(order % 2, order % 3), **noise)
    return made._replace(**changes)


def lines(first: int, stop: int) -> list[bytes]:
    return [encode(row(order)) for order in range(first, stop)]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of some ten rows, written when the test asks for it, and at the end."""
    monkeypatch.setattr(log, "_PIECE", 2_000)
    monkeypatch.setattr(parquet, "_GROUP", 7)
    monkeypatch.setattr(moving, "MUCH", 6_000)
    monkeypatch.setattr(moving, "SOME", 1 << 40)
    monkeypatch.setattr(moving, "DECODED_AT_ONCE", 1 << 40)
    monkeypatch.setattr(moving, "AT_THE_END", 1)


def move_all(store: RowStore) -> None:
    while store._decode_ahead():
        pass
    while store._move(6_000):
        pass


def orders(frame: pd.DataFrame) -> list[int]:
    return [int(order) for order in frame["order"]]


def in_files(folder: Path) -> int:
    return sum(file.count for file in parquet.row_files(folder))


# ---- what is read is what was written -------------------------------------------------------------------------------

numbers = st.floats() | st.sampled_from([0.0, -0.0, 1e-160, 5e-324, 1e308, math.inf, -math.inf, 1.0, 1 - 2**-53])
text = st.text(max_size=5) | st.sampled_from(["NaN", 'a,NaN,"b', ",Infinity,", '"step":0,', "null", "", " "])
plain_values = st.none() | st.booleans() | st.integers() | numbers | text
floats = ["rel_l2", "rel_diff", "cosine", "max_abs", "std_baseline", "std_target", "seconds"]
some_rows = st.lists(
    st.builds(
        lambda order, floats, tags, more: row(order, **floats, **more)._replace(tags=tags),
        st.integers(-(2**63), 2**63 - 1),
        st.dictionaries(st.sampled_from(floats), numbers),
        st.dictionaries(
            st.sampled_from(["step", "layer", 'a"b\\', "é", 'x"step']) | text,
            plain_values | st.lists(plain_values, max_size=2) | st.dictionaries(st.just("step"), plain_values),
            max_size=4,
        ),
        st.fixed_dictionaries(
            {},
            optional={
                "numel": st.none() | st.integers(0, 10**17),
                "step": st.integers(0, 3),
                "max_abs_index": st.none() | st.lists(st.integers(0, 3), max_size=2).map(tuple),
                "shape": st.none() | st.lists(st.integers(0, 2**40), max_size=3),
                "note": st.none() | text,
                "name": text,
                "match_rel": st.none() | numbers,
                "direction": st.sampled_from(["b2t", "t2b", None]),
            },
        ),
    ),
    min_size=1,
    max_size=12,
)


def odd_rows() -> list[Row]:
    """Rows that the quick reader of lines leaves to Python, or that it must not take for others."""
    tags = row(0).tags
    return [
        row(0)._replace(tags={**tags, "long": 10**30, "nan": math.nan}),
        row(1, rel_l2=math.nan, cosine=-math.inf, note="a,NaN,b"),
        row(2, rel_l2=math.inf)._replace(tags={**tags, "word": "NaN", "list": [1, math.inf]}),
        row(3)._replace(tags={**tags, "step": 0, "inner": {"step": 0}}),
        row(4)._replace(tags={"inner": {"step": 0}, "rank": 0}),
        row(5)._replace(tags={**tags, "step": None}),
        row(6)._replace(tags={**tags, "step": True}),
        row(7)._replace(tags={}),
        row(8, name="\ud800 is half a character"),
    ]


@pytest.mark.usefixtures("small")
@given(some_rows, st.integers(0, 12))
@example(odd_rows(), 4)
@example([row(order) for order in (1, 2, 3, 4)], 2)
@examples(12, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rows_read_from_log_and_files_equal_those_written(
    tmp_path_factory: pytest.TempPathFactory, made: list[Row], in_log: int
) -> None:
    written = [encode(each) for each in made]
    # By repr, because NaN is not equal to itself, and True is to 1.
    expected = repr([decode(line) for line in written])
    for moved in {0, max(0, len(made) - in_log), len(made)}:
        folder = tmp_path_factory.mktemp("rows")
        store = RowStore(folder)
        store.append(written[:moved])
        if moved:
            move_all(store)
        store.append(written[moved:])
        assert in_files(folder) == moved
        assert repr(store.rows()) == expected
        shown = to_frame(map(decode, written)).to_dict("records")
        assert repr(store.frame().to_dict("records")) == repr(shown)
        assert repr(gl.load_run(folder).to_dict("records")) == repr(shown)
        store._log.close()


@pytest.mark.usefixtures("small")
@given(st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=6), st.integers(0, 90), st.integers(0, 40))
@examples(5, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_frames_and_slices_of_rows_are_right_while_rows_move(
    tmp_path_factory: pytest.TempPathFactory, batches: list[tuple[int, bool]], start: int, length: int
) -> None:
    folder = tmp_path_factory.mktemp("files")
    made, count = RowStore(folder), 0
    for more, looks in batches:
        made.append(lines(count, count + more))
        count += more
        if looks:
            # Between the frames the lines that were read may have moved.
            assert orders(made.frame()) == list(range(count))
        move_all(made)
        assert made.rows(start, start + length) == [row(order) for order in range(start, min(start + length, count))]
        assert orders(gl.load_run(folder)) == list(range(count))
    made.close()
    assert made.rows() == [row(order) for order in range(count)]
    expected = to_frame([row(order) for order in range(count)])
    pd.testing.assert_frame_equal(made.frame(), expected)
    pd.testing.assert_frame_equal(gl.load_run(folder), expected, check_frame_type=False)
    # On disk they are in files, and no longer in the log.
    assert in_files(folder) == count
    assert (folder / ROWS_FILE).read_bytes() == header_line(count) + b"\n"


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_readers_see_whole_batches_while_rows_arrive_and_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving, "SOME", 1)
    monkeypatch.setattr(moving, "DECODED_AT_ONCE", 1)
    made = RowStore(tmp_path)
    total, batch = 900, 30
    faults: list[BaseException] = []

    def read() -> None:
        try:
            seen = 0
            while seen < total:
                found = orders(made.frame())
                assert found == list(range(len(found)))
                assert len(found) >= seen
                seen = len(found)
                assert [each.order for each in made.rows(max(0, seen - 70), seen)] == found[-70:]
                on_disk = orders(gl.load_run(tmp_path))
                assert on_disk == list(range(len(on_disk)))
                assert len(on_disk) >= seen
        except BaseException as fault:
            faults.append(fault)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for start in range(0, total, batch):
        made.append(lines(start, start + batch))
    for reader in readers:
        reader.join(90)
    assert not faults
    assert len(made.files) > 1
    made.close()


@pytest.mark.usefixtures("small")
def test_a_range_of_rows_takes_of_each_file_what_lies_in_it() -> None:
    files = [parquet.RowFile(Path(f"{first}.parquet"), first, 10, 0) for first in (0, 10, 20)]

    def taken(start: int, stop: int) -> list[tuple[int, int, int]]:
        return [(file.first, first, behind) for file, first, behind in parquet.slices(files, start, stop)]

    assert taken(5, 22) == [(0, 5, 10), (10, 0, 10), (20, 0, 2)]
    assert taken(10, 20) == [(10, 0, 10)]
    assert (taken(13, 14), taken(30, 40)) == ([(10, 3, 4)], [])


def test_rows_are_read_though_they_move_after_their_place_was_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = RowStore(tmp_path)
    made.append(lines(0, 30))
    while made._decode_ahead():
        pass
    lines_from = RowLog.lines_from

    def moved_meanwhile(log: RowLog, place: int) -> bytes:
        monkeypatch.setattr(RowLog, "lines_from", lines_from)
        assert made._move(6_000)
        return log.lines_from(place)

    monkeypatch.setattr(RowLog, "lines_from", moved_meanwhile)
    assert [each.order for each in made.rows(2, 25)] == list(range(2, 25))
    assert RowLog.lines_from is lines_from
    made.close()


@pytest.mark.usefixtures("small")
def test_rows_that_arrive_while_others_move_are_neither_lost_nor_moved_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, drop = RowStore(tmp_path), RowLog.drop
    made.append(lines(0, 30))
    while made._decode_ahead():
        pass
    # As when more lines wait to be written: the file is there, and the log begins where it began.
    monkeypatch.setattr(RowLog, "drop", lambda *_: False)
    assert not made._move(6_000)
    monkeypatch.setattr(RowLog, "drop", drop)
    assert orders(made.frame()) == list(range(30))
    move_all(made)
    assert orders(made.frame()) == list(range(30))
    made.close()
    assert in_files(tmp_path) == 30


def test_a_row_in_a_file_takes_less_than_a_hundred_bytes(tmp_path: Path) -> None:
    joined = b"".join(line + b"\n" for line in lines(0, 4_000))
    file = parquet.write(tmp_path, 0, table_of_lines(joined))
    assert file.path.stat().st_size / 4_000 < 100 < len(joined) / 4_000
    assert file.path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in tmp_path.iterdir()] == [file.path.name]


def test_a_run_folder_opens_in_another_tool(tmp_path: Path) -> None:
    made = RowStore(tmp_path)
    made.append(lines(0, 25))
    move_all(made)
    made.close()
    found = polars.read_parquet(tmp_path / "*.parquet")
    assert found["order"].to_list() == list(range(25))
    assert found["rel_l2"].to_list() == [row(order).rel_l2 for order in range(25)]
    assert found["tags"].str.json_path_match("$.layer").to_list() == [str(order % 5) for order in range(25)]


# ---- a process that was killed --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("batches", [1, 2, 5, pytest.param(9, marks=pytest.mark.soak)])
def test_a_kill_while_rows_move_loses_and_duplicates_none(
    tmp_path: Path, batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each change of a file the folder is copied, as a kill at that moment would leave it."""
    (tmp_path / "run").mkdir()
    made = RowStore(tmp_path / "run")
    made.append(lines(0, batches * 5))
    states: list[dict[str, bytes]] = []

    def copying(change: Any) -> Any:
        def changed(*given: Any, **named: Any) -> Any:
            done = change(*given, **named)
            state = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
            # Not every call changes what a kill leaves.
            if state not in states[-1:]:
                states.append(state)
            return done

        return changed

    with monkeypatch.context() as patch:
        for name in ("open", "write", "fsync", "rename", "replace"):
            patch.setattr(os, name, copying(getattr(os, name)))
        while made._decode_ahead():
            pass
        while made._move(6_000):
            made.append(lines(len(made), len(made) + 1))
    assert len(states) > 5
    made.close()
    seen = 0
    for copy, state in enumerate(states):
        folder = tmp_path / f"copy{copy}"
        folder.mkdir()
        for name, content in state.items():
            (folder / name).write_bytes(content)
        found = orders(gl.load_run(folder))
        assert found == list(range(len(found))), copy
        assert len(found) >= max(seen, batches * 5)
        seen = len(found)
        # What was killed can be continued.
        again = RowStore(folder, append=True)
        again.append([encode(row(seen)._replace(step=again.first_step))])
        assert len(again.frame()) == 1
        again.close()
        assert orders(gl.load_run(folder)) == list(range(seen + 1)), copy
        assert not list(folder.glob("*.partial"))


_KILLED = """
import faulthandler, os, sys
from pathlib import Path
from graftlab.rows import log, moving, store
from graftlab.rows.encoding import encode
from rows.test_parquet import row
log._PIECE = 2_000
moving.MUCH = 6_000
moving.SOME = moving.DECODED_AT_ONCE = 1
faulthandler.enable()
made = store.RowStore(Path(sys.argv[1]))
for order in range(10**9):
    made.append([encode(row(order))])
    # One by one: what was printed is on disk.
    os.write(1, b"%d\\n" % order)
"""


def test_rows_move_though_a_stream_resumes_after_a_pause_and_has_no_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(moving, "_QUIET", 0)
    sizes, moved = [moving.SOME], threading.Event()

    def decode() -> bool:
        # More has arrived than was decoded.
        sizes.append(sizes[-1] + (1 << 20))
        assert sizes[-1] < 10 * moving.MUCH
        return True

    def move(most: int) -> bool:
        moved.set()
        sizes.append(0)
        return True

    mover = moving.RowMover(decode, move, lambda: 0, lambda: sizes[-1])
    mover.look()
    assert moved.wait(DEADLINE)
    mover.finish()
    assert max(sizes) == moving.MUCH


def _stacks(writer: Any) -> str:
    """End a process, with what it has said and where its threads were."""
    os.kill(writer.pid, signal.SIGABRT)
    said: str = writer.communicate()[1]
    return said


@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_a_killed_writer_loses_no_row(tmp_path: Path) -> None:
    for round_ in range(2):
        folder = tmp_path / str(round_)
        folder.mkdir()
        tests = str(Path(__file__).parents[1])
        paths = os.pathsep.join([tests, str(Path(gl.__file__).parents[1])])
        with warm.start(["-c", _KILLED, folder], {**os.environ, "PYTHONPATH": paths}) as writer:
            assert writer.stdout is not None
            # Small files are merged, so there may never be three at a time.
            printed, seen = -1, set[str]()
            while len(seen) <= 2 * round_ or printed % 61:
                seen.update(each.name for each in folder.glob("*.parquet"))
                printed = int(writer.stdout.readline())
                if printed > 200_000:
                    pytest.fail(f"rows of {sorted(seen)} alone have moved into files\n{_stacks(writer)}")
            writer.kill()
            rest = writer.stdout.read().splitlines()
        printed = int(rest[-1]) if rest and rest[-1] else printed
        found = orders(gl.load_run(folder))
        assert found == list(range(len(found)))
        assert len(found) > printed
        assert in_files(folder)


@pytest.mark.usefixtures("small")
def test_rows_of_an_earlier_session_are_continued(tmp_path: Path) -> None:
    first = RowStore(tmp_path)
    first.append(lines(0, 12))
    move_all(first)
    first.append(lines(12, 15))
    first._log.close()
    with pytest.raises(gl.SessionError, match="has the rows of an earlier session; pass append=True"):
        RowStore(tmp_path)
    again = RowStore(tmp_path, append=True)
    assert (again.first_run, again.first_step) == (1, 3)
    again.append(lines(15, 17))
    assert [each.order for each in again.rows()] == orders(again.frame()) == [15, 16]
    again.close()
    assert orders(gl.load_run(tmp_path)) == list(range(17))


def test_a_log_that_begins_behind_the_files_lacks_the_rows_between(tmp_path: Path) -> None:
    store = RowStore(tmp_path)
    store.append(lines(0, 2))
    store._log.drop(1, store._log.begin[1] + len(lines(0, 1)[0]) + 1)
    store._log.close()
    with pytest.raises(gl.SessionError, match="rows 0 to 0 are missing; a Parquet file was removed"):
        gl.load_run(tmp_path)


# ---- damage ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small")
def test_removed_or_copied_files_are_reported(tmp_path: Path) -> None:
    made = RowStore(tmp_path)
    made.append(lines(0, 40))
    move_all(made)
    made.close()
    *_, before, last = made.files
    hidden = before.path.rename(tmp_path / "elsewhere")
    stop = last.first - 1
    with pytest.raises(
        gl.SessionError, match=rf"rows {before.first} to {stop} are missing; a Parquet file was removed"
    ):
        gl.load_run(tmp_path)
    hidden.rename(before.path)
    last.path.unlink()
    with pytest.raises(gl.SessionError, match=rf"rows {last.first} to 39 are missing; a Parquet file was removed"):
        gl.load_run(tmp_path)
    shutil.copy(before.path, before.path.with_name(before.path.name.replace(f"{before.first:010d}", "0000000000")))
    with pytest.raises(gl.SessionError, match="has rows that another file has too"):
        gl.load_run(tmp_path)


@pytest.fixture
def folder_of_a_file(tmp_path: Path) -> Path:
    parquet.write(tmp_path, 0, table_of_lines(b"".join(line + b"\n" for line in lines(0, 25))))
    (tmp_path / ROWS_FILE).write_bytes(header_line(25) + b"\n")
    return tmp_path


def rewritten(folder: Path, data: bytes, count: int = 25) -> None:
    """Put these bytes in the place of the folder's file, under a name that fits."""
    [known] = folder.glob("*.parquet")
    known.unlink()
    (folder / f"rows-0000000000-{count}-{crc32(data):08x}.parquet").write_bytes(data)


@given(st.data())
@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_flipped_bit_anywhere_in_a_file_is_reported(folder_of_a_file: Path, data: st.DataObject) -> None:
    [file] = parquet.row_files(folder_of_a_file)
    written = file.path.read_bytes()
    changed = bytearray(written)
    place = data.draw(st.integers(0, len(written) - 1), "place")
    changed[place] ^= 1 << data.draw(st.integers(0, 7), "bit")
    file.path.write_bytes(changed)
    with pytest.raises(gl.SessionError, match=r"these rows, 0 to 24, are not what was written, by the checksum"):
        gl.load_run(folder_of_a_file)
    file.path.write_bytes(written)


def test_pages_have_checksums_for_other_readers_too(folder_of_a_file: Path) -> None:
    [file] = parquet.row_files(folder_of_a_file)
    written = bytearray(file.path.read_bytes())
    start = pq.read_metadata(file.path).row_group(0).column(COLUMNS.index("rel_l2")).data_page_offset
    # In the values, which no header describes.
    written[start + 120] ^= 1
    rewritten(folder_of_a_file, bytes(written))
    with pytest.raises(gl.SessionError, match=r"cannot be read as Parquet \(.*CRC"):
        gl.load_run(folder_of_a_file)


@pytest.mark.parametrize("length", [0, 4, 100, -1, -9])
def test_a_file_that_is_cut_short_is_refused(folder_of_a_file: Path, length: int) -> None:
    [file] = parquet.row_files(folder_of_a_file)
    rewritten(folder_of_a_file, file.path.read_bytes()[:length])
    with pytest.raises(gl.SessionError, match="cannot be read as Parquet"):
        gl.load_run(folder_of_a_file)


def changed_table(folder: Path, table: pa.Table, version: str = "1") -> None:
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, table.schema, store_schema=False) as writer:
        writer.add_key_value_metadata({"graftlab.rows": version})
        writer.write_table(table)
    rewritten(folder, sink.getvalue().to_pybytes(), len(table))


def not_utf8(count: int) -> pa.Array:
    """Texts whose bytes are none."""
    return pa.Array.from_buffers(pa.string(), count, pa.array([b"\xff"] * count).buffers())


def test_missing_columns_get_defaults_and_unknown_ones_are_ignored(folder_of_a_file: Path) -> None:
    [file] = parquet.row_files(folder_of_a_file)
    table = parquet.read(file)
    absent = ["note", "rel_l2", "nonfinite_target", "plan_version", "seconds"]
    other = table.drop_columns(absent).append_column("of_later", table.column("name"))
    changed_table(folder_of_a_file, other.select(list(reversed(other.column_names))))
    frame = gl.load_run(folder_of_a_file)
    changes: dict[str, Any] = dict.fromkeys(absent) | {"plan_version": 0, "seconds": 0.0}
    expected = to_frame([row(order, **changes) for order in range(25)])
    pd.testing.assert_frame_equal(frame, expected, check_frame_type=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda table: table.drop_columns(["order"]), "have no column order"),
        (lambda table: table.set_column(5, "direction", pa.nulls(25, pa.int64())), "have int64 as their direction"),
        (lambda table: table.set_column(0, "run", pa.nulls(25, pa.int64())), "have a run that is null"),
        (lambda table: table.set_column(4, "tags", pa.array(["[1]"] * 25)), "that are not graftlab's"),
        (lambda table: table.set_column(4, "tags", pa.array(['{"step":1}'] * 25)), "that are not graftlab's"),
        (lambda table: table.set_column(4, "tags", pa.array(["{"] * 25)), "that are not graftlab's"),
        (lambda table: table.set_column(3, "name", not_utf8(25)), "cannot be read as Parquet .*UTF8"),
    ],
)
def test_invalid_columns_are_named(folder_of_a_file: Path, change: Any, message: str) -> None:
    [file] = parquet.row_files(folder_of_a_file)
    changed_table(folder_of_a_file, change(parquet.read(file)))
    with pytest.raises(gl.SessionError, match=message):
        gl.load_run(folder_of_a_file)


def test_a_file_in_a_later_format_is_refused_by_its_format(folder_of_a_file: Path) -> None:
    [file] = parquet.row_files(folder_of_a_file)
    changed_table(folder_of_a_file, parquet.read(file), version="2")
    with pytest.raises(gl.SessionError, match="are in format '2', and this version of graftlab reads format 1"):
        gl.load_run(folder_of_a_file)


def test_what_a_file_declares_is_checked_before_it_is_read(
    folder_of_a_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [file] = parquet.row_files(folder_of_a_file)
    data = file.path.read_bytes()
    monkeypatch.setattr(parquet, "_rows_of", lambda *given: pytest.fail("it was read"))
    rewritten(folder_of_a_file, data, 26)
    with pytest.raises(gl.SessionError, match=r"claim to be 25 rows of \d+ columns"):
        gl.load_run(folder_of_a_file)
    rewritten(folder_of_a_file, data)
    for name, value, message in (
        ("MOST_ROWS", 24, "claim to be 25 rows of"),
        ("_MOST_COLUMNS", 3, "claim to be 25 rows of"),
        ("_MOST_BYTES", 1, "more than graftlab writes into a file"),
        ("_MOST_UNPACKED", 1, "claim to take"),
        ("_ROW_IN_MEMORY", 1 << 50, r"has 25 rows, which take about \d+ GiB as a frame"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(parquet, name, value)
            with pytest.raises(gl.SessionError, match=message):
                gl.load_run(folder_of_a_file)


def test_a_line_longer_than_any_row_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "_PIECE", 1 << 12)
    monkeypatch.setattr(log, "_LONGEST_LINE", 1 << 14)
    head = header_line() + b"\n"
    (tmp_path / ROWS_FILE).write_bytes(head + encode(row(0)) + b"\n" + b"[" * (1 << 16))
    with pytest.raises(gl.SessionError, match=r"rows\.jsonl: the line at byte \d+ is longer than"):
        gl.load_run(tmp_path)


@given(st.data())
@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
def test_a_forged_file_is_refused_or_read(folder_of_a_file: Path, data: st.DataObject) -> None:
    [file] = parquet.row_files(folder_of_a_file)
    written = file.path.read_bytes()
    changed = bytearray(written)
    for _ in range(data.draw(st.integers(1, 3), "changes")):
        changed[data.draw(st.integers(4, len(changed) - 9), "place")] = data.draw(st.integers(0, 255), "byte")
    rewritten(folder_of_a_file, bytes(changed))
    with limited(), contextlib.suppress(gl.SessionError):
        gl.load_run(folder_of_a_file)
    rewritten(folder_of_a_file, written)


@pytest.mark.usefixtures("small")
def test_damaged_lines_do_not_move(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = RowStore(tmp_path)
    made.append(lines(0, 30))
    file = tmp_path / ROWS_FILE
    file.write_bytes(file.read_bytes().replace(b"[0,1,7,", b"[0,1,8,"))
    made.close()
    assert "rows stay in the log, and are no longer moved" in caplog.text
    assert not in_files(tmp_path)
    with pytest.raises(gl.SessionError, match=r"rows\.jsonl, line 9: this is not what was written"):
        gl.load_run(tmp_path)


@pytest.mark.usefixtures("small")
def test_a_disk_without_room_for_a_file_keeps_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = RowStore(tmp_path)
    made.append(lines(0, 60))

    def full(file: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, "no space left")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        made.close()
    assert "rows stay in the log, ten times as large" in caplog.text
    assert not list(tmp_path.glob("*.partial"))
    assert orders(gl.load_run(tmp_path)) == orders(made.frame()) == list(range(60))
    again = RowStore(tmp_path, append=True)
    assert (again.first_run, again.first_step) == (1, 12)
    again.append(lines(60, 62))
    again.close()
    assert orders(gl.load_run(tmp_path)) == list(range(62))


def test_a_file_that_the_disk_takes_in_parts_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda file, data: write(file, data[:999]))
        made = parquet.write(tmp_path, 0, table_of_lines(b"\n".join(lines(0, 60)) + b"\n"))
    assert parquet.read(made).num_rows == 60


def test_a_file_is_forced_to_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    for name in ("fsync", "rename"):
        call = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *given, name=name, call=call: (done.append(name), call(*given)))
    parquet.write(tmp_path, 0, table_of_lines(b"\n".join(lines(0, 3)) + b"\n"))
    # Then its folder, which has the name.
    assert done == ["fsync", "rename", "fsync"]


@pytest.mark.usefixtures("small")
def test_a_log_that_the_disk_takes_in_part_replaces_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Short(io.FileIO):
        def write(self, data: Any) -> int:
            return super().write(data if data.startswith(b"{") else data[:99])

    def opened(path: Path, mode: str, **how: Any) -> Any:
        return Short(path, mode, opener=how["opener"]) if path.suffix == ".partial" else open(path, mode, **how)

    made = RowStore(tmp_path)
    made.append(lines(0, 30))
    while made._decode_ahead():
        pass
    with monkeypatch.context() as patch:
        patch.setattr(log, "open", opened, raising=False)
        with pytest.raises(OSError, match="No space left"):
            made._move(6_000)
    assert orders(gl.load_run(tmp_path)) == orders(made.frame()) == list(range(30))
    made.close()


@pytest.mark.usefixtures("small")
def test_a_log_that_could_not_be_replaced_is_replaced_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = RowStore(tmp_path)
    made.append(lines(0, 30))
    while made._decode_ahead():
        pass
    with monkeypatch.context() as patch:
        patch.setattr(made._log, "_copy", lambda *given: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        with pytest.raises(OSError, match="full"):
            made._move(6_000)
    assert len(made.files) == 1
    assert not list(tmp_path.glob("*.partial"))
    made.append(lines(30, 40))
    assert orders(gl.load_run(tmp_path)) == orders(made.frame()) == list(range(40))
    move_all(made)
    assert orders(gl.load_run(tmp_path)) == [each.order for each in made.rows()] == list(range(40))
    made.close()


# ---- when rows move -------------------------------------------------------------------------------------------------


def test_few_rows_stay_in_the_log_and_many_move_when_the_stream_pauses(tmp_path: Path) -> None:
    made = RowStore(tmp_path)
    made.append(lines(0, 50))
    assert made._mover._thread is None
    many = lines(50, 1_050)
    for _ in range(12):
        made.append(many)
    assert made._mover._thread is not None
    assert (tmp_path / ROWS_FILE).stat().st_size > moving.SOME
    wait_until(lambda: (tmp_path / ROWS_FILE).stat().st_size < 2_000, "lines in a file")
    assert orders(made.frame()) == sorted([*range(50), *(12 * list(range(50, 1_050)))])
    made.close()


def test_an_interrupted_close_is_finished_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving, "AT_THE_END", 1)
    made = RowStore(tmp_path)
    made.append(lines(0, 50))
    join, calls = threading.Thread.join, itertools.count()

    def interrupted(thread: threading.Thread, timeout: float | None = None) -> None:
        if next(calls) == 0:
            raise KeyboardInterrupt
        join(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.close()
    made.close()
    assert (tmp_path / ROWS_FILE).read_bytes().count(b"\n") == 1
    assert orders(gl.load_run(tmp_path)) == list(range(50))


def test_a_log_that_was_closed_meanwhile_is_not_replaced_and_leaves_no_other_file(tmp_path: Path) -> None:
    log = RowLog(tmp_path)
    log.append([b"{}"])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    log.close()
    assert not log.drop(0, 0)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
