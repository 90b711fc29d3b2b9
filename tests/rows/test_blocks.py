"""Rows in compressed blocks: the same rows as in lines, whenever a process was killed, and whatever the disk does."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import math
import os
import shutil
import struct
import subprocess
import sys
import threading
import zlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st
from kit.examples import examples
from kit.support import wait_until

import graftlab as gl
from graftlab.diffs import kernel
from graftlab.rows import archive, blocks, compacting, store
from graftlab.rows.archive import BLOCKS_FILE, Archive
from graftlab.rows.blocks import pack, unpack
from graftlab.rows.encoding import decode_all, encode
from graftlab.rows.loading import ROWS_FILE
from graftlab.rows.parsing import Parsed, parse
from graftlab.rows.schema import COLUMNS, Row
from graftlab.rows.store import RowStore, to_frame

compiled = pytest.mark.skipif(kernel.load() is None, reason=f"no compiled library: {kernel.description()}")


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
    """Blocks of some ten rows, made when the test says so, and at the end."""
    monkeypatch.setattr(store, "_BLOCK", 6_000)
    monkeypatch.setattr(store, "_LAST_LINES", 2_000)
    monkeypatch.setattr(compacting, "SOME", 1 << 40)
    monkeypatch.setattr(compacting, "AT_THE_END", 1)


def orders(frame: pd.DataFrame) -> list[int]:
    return [int(order) for order in frame["order"]]


# ---- a block --------------------------------------------------------------------------------------------------------

numbers = st.floats() | st.sampled_from([0.0, -0.0, 1e-160, 5e-324, 1e308, math.inf, -math.inf, 1.0, 1 - 2**-53])
plain_values = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
floats = ["rel_l2", "rel_diff", "cosine", "max_abs", "std_baseline", "std_target"]
some_rows = st.lists(
    st.builds(
        lambda order, floats, tags, more: row(order, **floats, **more)._replace(tags=tags),
        st.integers(-(10**17), 10**17),
        st.dictionaries(st.sampled_from(floats), numbers | st.none()),
        st.dictionaries(
            st.sampled_from(["step", "layer", 'a"b\\', "é"]), plain_values | st.lists(st.floats(), max_size=2)
        ),
        st.fixed_dictionaries(
            {},
            optional={
                "numel": st.none() | st.integers(0, 10**17),
                "max_abs_index": st.none() | st.lists(st.integers(0, 3), max_size=2).map(tuple),
                "note": st.none() | st.text(max_size=4),
            },
        ),
    ),
    min_size=1,
    max_size=20,
)


@compiled
@given(some_rows)
@example([row(order) for order in (1, 2, 3, 4)])
@example([row(order) for order in (-7, -14, -21)])
def test_a_block_has_the_very_rows_that_were_packed(made: list[Row]) -> None:
    text = b"".join(encode(each) + b"\n" for each in made)
    if (parsed := parse(text)) is None:
        return  # such lines are kept as they are
    back = unpack(pack(parsed))
    for name, cells in parsed.numbers.items():
        assert (back.numbers[name].dtype, back.numbers[name].tobytes()) == (cells.dtype, cells.tobytes()), name
    assert back.numbers.keys() == parsed.numbers.keys()
    # By repr, because NaN is not equal to itself, and True is to 1.
    assert repr(back.values()) == repr(parsed.values()) == repr(decode_all(text)[0])
    assert repr(back[1:3].values()) == repr(back.values()[1:3])


@compiled
def test_a_row_that_is_compressed_takes_less_than_a_hundred_bytes() -> None:
    text = b"".join(line + b"\n" for line in lines(0, 4_000))
    parsed = parse(text)
    assert parsed is not None
    assert len(pack(parsed)) / 4_000 < 100 < len(text) / 4_000


@compiled
def test_a_block_of_another_version_has_the_columns_that_both_know(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = parse(b"".join(line + b"\n" for line in lines(0, 3)))
    assert parsed is not None
    absent = {"note", "rel_l2", "nonfinite_target"}
    numbers = {name: cells for name, cells in parsed.numbers.items() if name not in absent | {"rel_diff"}}
    others = {name: column for name, column in parsed.others.items() if name not in absent}
    others["of_later"] = parsed.others["name"]
    numbers["counted_later"] = parsed.numbers["order"]
    back = unpack(pack(Parsed(numbers, others, parsed.tag_steps)))
    expected = [row(order)._replace(note=None, rel_l2=None, nonfinite_target=None, rel_diff=None) for order in range(3)]
    assert back.values() == [json.loads(encode(each)) for each in expected]
    assert {*back.numbers, *back.others} == {*COLUMNS}


# ---- the store ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small")
@given(st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=6), st.integers(0, 90), st.integers(0, 40))
@examples(25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rows_in_blocks_and_in_lines_are_the_rows_that_came(
    tmp_path_factory: pytest.TempPathFactory, batches: list[tuple[int, bool]], start: int, length: int
) -> None:
    folder = tmp_path_factory.mktemp("blocks")
    made, count = RowStore(folder), 0
    for more, looks in batches:
        made.append(lines(count, count + more))
        count += more
        if looks:
            # Between the frames the lines that were read may have gone into blocks.
            assert orders(made.frame()) == list(range(count))
        while made._compact():
            pass
        assert made.rows(start, start + length) == [row(order) for order in range(start, min(start + length, count))]
        assert orders(gl.load_run(folder)) == list(range(count))
    made.close()
    assert made.rows() == [row(order) for order in range(count)]
    expected = to_frame([row(order) for order in range(count)])
    pd.testing.assert_frame_equal(made.frame(), expected)
    pd.testing.assert_frame_equal(gl.load_run(folder), expected, check_frame_type=False)
    # On disk they are in blocks, and no more in lines.
    assert sum(place.row_count for place in archive.places(folder / BLOCKS_FILE)) == count
    assert (folder / ROWS_FILE).read_bytes().count(b"\n") == 1


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_rows_come_while_others_read_them_and_lines_become_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compacting, "SOME", 1)
    monkeypatch.setattr(compacting, "MUCH", 1)
    made = RowStore(tmp_path)
    total, batch = 3_000, 30
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
        reader.join(60)
    assert not faults
    assert len(made._archive.places) > 1
    made.close()


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("calls", range(1, 13))
def test_a_process_that_is_killed_while_lines_become_a_block_loses_no_row(
    tmp_path: Path, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each change of a file the folder is copied, as a kill at that moment would leave it."""
    (tmp_path / "run").mkdir()
    made = RowStore(tmp_path / "run")
    made.append(lines(0, calls * 3))
    copies = itertools.count()

    def copying(change: Any) -> Any:
        def changed(*given: Any) -> Any:
            done = change(*given)
            shutil.copytree(tmp_path / "run", tmp_path / f"copy{next(copies)}")
            return done

        return changed

    with monkeypatch.context() as patch:
        for name in ("pwrite", "ftruncate"):
            patch.setattr(os, name, copying(getattr(os, name)))
        patch.setattr(made._sums, "restart", copying(made._sums.restart))
        patch.setattr(made, "_write", copying(made._write))
        while made._compact():
            pass
        made.append(lines(calls * 3, calls * 3 + 1))
    made.close()
    count = next(copies)
    assert count > 4
    for copy in range(count):
        folder = tmp_path / f"copy{copy}"
        rows = calls * 3 + (copy == count - 1)
        assert orders(gl.load_run(folder)) == list(range(rows)), copy
        # What was killed can be gone on with.
        again = RowStore(folder, append=True)
        again.append([encode(row(rows)._replace(step=again.first_step))])
        assert len(again.frame()) == 1
        again.close()
        assert orders(gl.load_run(folder)) == list(range(rows + 1)), copy


@pytest.mark.parametrize("cut", [1, 5, 20, 40, 200])
@pytest.mark.usefixtures("small")
def test_a_block_that_was_cut_short_is_still_in_lines(tmp_path: Path, cut: int) -> None:
    made = RowStore(tmp_path)
    made.append(lines(0, 30))
    assert made._compact()
    blocks = tmp_path / BLOCKS_FILE
    os.truncate(blocks, blocks.stat().st_size - cut)
    assert orders(gl.load_run(tmp_path)) == list(range(30))
    again = Archive(tmp_path)
    assert again.row_count == 0
    made._compactor._ending.set()
    made.close()


@pytest.mark.usefixtures("small")
def test_blocks_that_are_gone_are_missed(tmp_path: Path) -> None:
    made = RowStore(tmp_path)
    made.append(lines(0, 40))
    while made._compact():
        pass
    made.close()
    blocks = tmp_path / BLOCKS_FILE
    last = list(archive.places(blocks))[-1]
    os.truncate(blocks, last.offset + 7)
    with pytest.raises(gl.SessionError, match=rf"rows\.blocks: rows {40 - last.row_count} to 39 are missing"):
        gl.load_run(tmp_path)
    blocks.unlink()
    with pytest.raises(gl.SessionError, match=r"rows\.blocks: rows 0 to 39 are missing"):
        gl.load_run(tmp_path)


@given(st.data())
@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.usefixtures("small")
def test_a_bit_that_flips_anywhere_in_a_block_is_noticed(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("flips")
    made = RowStore(folder)
    made.append(lines(0, 25))
    made.close()
    file = folder / BLOCKS_FILE
    written = bytearray(file.read_bytes())
    place = data.draw(st.integers(0, len(written) - 1), "place")
    written[place] ^= 1 << data.draw(st.integers(0, 7), "bit")
    file.write_bytes(written)
    with pytest.raises(
        gl.SessionError, match=r"rows\.blocks: (the block of )?rows \d+ to \d+ (is not what was|are missing)"
    ):
        gl.load_run(folder)


@given(st.data())
@examples(150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.usefixtures("small")
def test_a_block_that_somebody_made_up_is_refused_or_read(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("forged")
    made = RowStore(folder)
    odd = [encode(row(order, rel_l2=5e-324 if data.draw(st.booleans(), "as lines") else 0.5)) for order in range(8)]
    made.append(odd)
    made.close()
    file = folder / BLOCKS_FILE
    written = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 3), "changes")):
        written[data.draw(st.integers(8, len(written) - 1), "place")] = data.draw(st.integers(0, 255), "byte")
    struct.pack_into("<I", written, 4, zlib.crc32(written[8:]))
    file.write_bytes(written)
    with contextlib.suppress(gl.SessionError):
        gl.load_run(folder)


@compiled
@pytest.mark.parametrize(
    ("at", "value"),
    [
        (0, 1 << 40),
        (0, 0),
        (2, {"order": (1 << 64) - 1}),
        (3, {"name": [5, 0, 0, 0]}),
        (3, {"name": -1}),
        (4, zlib.compress(b'{"name": [3]}')),
    ],
)
def test_a_block_beyond_every_measure_takes_no_memory_and_is_refused(at: int, value: Any) -> None:
    parsed = parse(b"".join(line + b"\n" for line in lines(0, 3)))
    assert parsed is not None
    block = msgspec.msgpack.decode(pack(parsed))
    block[at] = {**block[at], **value} if isinstance(value, dict) else value
    with pytest.raises((ValueError, TypeError, LookupError, OverflowError, zlib.error)):
        unpack(msgspec.msgpack.encode(block))


@compiled
def test_text_is_inflated_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "MOST_TEXT", 1 << 20)
    parsed = parse(lines(0, 1)[0] + b"\n")
    assert parsed is not None
    block = msgspec.msgpack.decode(pack(parsed))
    block[4] = zlib.compress(b"[" + b" " * blocks.MOST_TEXT + b"]")
    with pytest.raises(ValueError, match="more than 1048576 bytes"):
        unpack(msgspec.msgpack.encode(block))


@pytest.mark.usefixtures("small")
def test_lines_that_the_disk_changed_do_not_become_a_block(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = RowStore(tmp_path)
    made.append(lines(0, 30))
    file = tmp_path / ROWS_FILE
    file.write_bytes(file.read_bytes().replace(b"[0,1,7,", b"[0,1,8,"))
    made.close()
    assert "rows are not compressed any more" in caplog.text
    assert not (tmp_path / BLOCKS_FILE).exists()
    with pytest.raises(gl.SessionError, match=r"rows\.jsonl, line 9: this is not what was written"):
        gl.load_run(tmp_path)


@pytest.mark.usefixtures("small")
def test_a_disk_without_room_for_a_block_keeps_lines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = RowStore(tmp_path)
    made.append(lines(0, 60))
    pwrite, room = os.pwrite, [500]

    def full(file: int, data: Any, place: int) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "no space left")
        taken = pwrite(file, data[: room[0]], place)
        room[0] -= taken
        return taken

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        made.close()
    assert "rows stay as lines" in caplog.text
    assert orders(gl.load_run(tmp_path)) == orders(made.frame()) == list(range(60))
    again = RowStore(tmp_path, append=True)
    assert (again.first_run, again.first_step) == (1, 12)
    again.append(lines(60, 62))
    again.close()
    assert orders(gl.load_run(tmp_path)) == list(range(62))


@pytest.mark.usefixtures("small")
def test_lines_that_only_python_reads_are_kept_in_blocks_too(tmp_path: Path) -> None:
    made = RowStore(tmp_path)
    odd = [row(order, rel_l2=5e-324) for order in range(30)]
    odd[7] = odd[7]._replace(tags={**odd[7].tags, "long": 10**30, "nan": float("nan")})
    made.append([encode(each) for each in odd])
    made.close()
    assert (tmp_path / ROWS_FILE).read_bytes().count(b"\n") == 1
    assert repr(made.rows()) == repr(odd)
    assert gl.load_run(tmp_path)["long"].tolist()[7] == 10**30


@compiled
@pytest.mark.usefixtures("small")
def test_a_block_that_would_not_be_read_as_it_was_packed_is_kept_as_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(rows: Parsed) -> bytes:
        return pack(Parsed(rows.numbers | {"order": rows.numbers["order"] + 1}, rows.others, rows.tag_steps))

    monkeypatch.setattr(archive, "pack", other)
    made = RowStore(tmp_path)
    made.append(lines(0, 30))
    made.close()
    assert sum(place.row_count for place in archive.places(tmp_path / BLOCKS_FILE)) == 30
    assert made.rows() == [row(order) for order in range(30)]
    assert orders(gl.load_run(tmp_path)) == list(range(30))


@pytest.mark.usefixtures("small")
def test_rows_of_an_earlier_version_become_a_block_when_a_session_goes_on_after_them(tmp_path: Path) -> None:
    made = [row(order) for order in range(3)]
    (tmp_path / ROWS_FILE).write_text("".join(json.dumps(each._asdict()) + "\n" for each in made))
    again = RowStore(tmp_path, append=True)
    again.append(lines(3, 5))
    again.close()
    pd.testing.assert_frame_equal(
        gl.load_run(tmp_path), to_frame([row(order) for order in range(5)]), check_frame_type=False
    )


def test_few_rows_stay_lines_and_many_become_blocks_when_no_more_come(tmp_path: Path) -> None:
    made = RowStore(tmp_path)
    made.append(lines(0, 50))
    assert made._compactor._thread is None
    many = lines(50, 1_050)
    for _ in range(12):
        made.append(many)
    assert made._compactor._thread is not None
    assert (tmp_path / ROWS_FILE).stat().st_size > compacting.SOME
    wait_until(lambda: (tmp_path / ROWS_FILE).stat().st_size < 2_000, "lines in blocks")
    assert orders(made.frame()) == sorted([*range(50), *(12 * list(range(50, 1_050)))])
    made.close()
    assert (tmp_path / BLOCKS_FILE).stat().st_mode & 0o777 == 0o600


def test_an_end_that_is_interrupted_is_finished_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compacting, "AT_THE_END", 1)
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


_KILLED = """
import os, sys
from pathlib import Path
from graftlab.rows import compacting, store
from graftlab.rows.encoding import encode
from rows.test_blocks import row
store._BLOCK, store._LAST_LINES = 6_000, 2_000
compacting.SOME = compacting.MUCH = 1
made = store.RowStore(Path(sys.argv[1]))
for order in range(10**9):
    made.append([encode(row(order))])
    # One by one: what was said is on disk.
    os.write(1, b"%d\\n" % order)
"""


@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_a_writer_that_is_killed_at_any_moment_has_lost_no_row(tmp_path: Path) -> None:
    for round_ in range(2):
        folder = tmp_path / str(round_)
        folder.mkdir()
        command = [sys.executable, "-c", _KILLED, str(folder)]
        tests = str(Path(__file__).parents[1])
        paths = os.pathsep.join([tests, str(Path(gl.__file__).parents[1])])
        with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": paths}) as writer:
            assert writer.stdout is not None
            said = -1
            while said < 120 + 61 * round_:
                said = int(writer.stdout.readline())
            writer.kill()
            rest = writer.stdout.read().splitlines()
        said = int(rest[-1]) if rest and rest[-1] else said
        found = orders(gl.load_run(folder))
        assert found == list(range(len(found)))
        assert len(found) > said
        assert sum(place.row_count for place in archive.places(folder / BLOCKS_FILE))
