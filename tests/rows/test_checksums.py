"""Checksums of lines of rows: what the disk has changed is named by its line, and lines without one are taken."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.examples import examples

from graftlab.diffs import kernel
from graftlab.errors import SessionError
from graftlab.rows.checksums import SUMS_FILE, Sums, SumsWriter, sums_in, sums_of

lines_of_any_kind = st.lists(st.binary(max_size=40).map(lambda line: line.replace(b"\n", b"")), min_size=1, max_size=20)


def sums(folder: Path, lines: list[bytes]) -> Sums:
    (folder / SUMS_FILE).write_bytes(sums_of(lines))
    return Sums(folder)


def joined(lines: list[bytes]) -> bytes:
    return b"".join(line + b"\n" for line in lines)


def test_a_checksum_is_the_crc_of_the_line_in_four_bytes_of_one_order() -> None:
    assert sums_of([b"[1,2]", b""]) == zlib.crc32(b"[1,2]").to_bytes(4, "little") + bytes(4)


@given(lines_of_any_kind, st.integers(0, 30), st.binary(max_size=5))
@examples(30)
def test_the_compiled_library_and_python_find_the_same(lines: list[bytes], most: int, half: bytes) -> None:
    data = joined(lines) + half.replace(b"\n", b"")
    length = len(joined(lines))
    quick = sums_in(data, length, most).tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "load", lambda: None)
        assert sums_in(data, length, most).tolist() == quick == [zlib.crc32(line) for line in lines[:most]]


@pytest.mark.parametrize("changed", range(4))
@pytest.mark.parametrize("before", [0, 3])
def test_the_first_line_that_is_not_what_was_written_is_named(changed: int, before: int, tmp_path: Path) -> None:
    lines = [b"earlier"] * before + [b"zero", b"one", b"two", b"three"]
    found = sums(tmp_path, lines)
    now = lines[before:]
    assert found.wrong(before, joined(now), len(joined(now))) is None
    now[changed] = now[changed].upper()
    # Another one after it does not matter.
    now[-1] = b"THREE"
    assert found.wrong(before, joined(now), len(joined(now))) == before + changed + 1


def test_lines_beyond_the_checksums_are_taken_as_they_are(tmp_path: Path) -> None:
    found = sums(tmp_path, [b"zero", b"one"])
    assert found.wrong(1, b"one\nmore\n", 9) is None
    assert found.wrong(1, b"ONE\nmore\n", 9) == 2
    assert found.wrong(2, b"more\n", 5) is None
    # Half a checksum is none.
    with open(tmp_path / SUMS_FILE, "ab") as file:
        file.write(b"\1\2\3")
    assert Sums(tmp_path).wrong(1, b"one\nmore\n", 9) is None
    (tmp_path / SUMS_FILE).unlink()
    assert Sums(tmp_path).wrong(0, b"any\n", 4) is None


def test_checksums_that_cannot_be_read_are_an_error_that_names_them(tmp_path: Path) -> None:
    (tmp_path / SUMS_FILE).mkdir()
    with pytest.raises(SessionError, match=r"the checksums in .*rows\.crc32 cannot be read: Is a directory"):
        Sums(tmp_path)


def test_checksums_are_appended_begin_anew_and_go_on_after_the_end(tmp_path: Path) -> None:
    earlier = SumsWriter(tmp_path)
    earlier.write([b"of an earlier session"])
    earlier.close()
    writer = SumsWriter(tmp_path)
    path = tmp_path / SUMS_FILE
    writer.write([b"a", b"b"])
    assert path.read_bytes() == sums_of([b"a", b"b"])
    assert path.stat().st_mode & 0o777 == 0o600
    writer.restart()
    writer.write([b"c"])
    writer.close()
    writer.write([b"d"])
    assert path.read_bytes() == sums_of([b"c", b"d"])


def test_what_the_disk_does_not_take_is_written_with_what_comes_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = SumsWriter(tmp_path)

    class Full:
        closed = False
        room = 6

        def write(self, data: bytes) -> int:
            if not self.room:
                raise OSError(28, "No space left on device")
            taken = data[: self.room]
            self.room = 0
            return os.write(descriptor.fileno(), taken)

        def close(self) -> None: ...

    descriptor = writer._file
    monkeypatch.setattr(writer, "_file", Full())
    writer.write([b"a", b"b"])
    writer.write([b"c"])
    assert len((tmp_path / SUMS_FILE).read_bytes()) == 6
    monkeypatch.setattr(writer, "_file", descriptor)
    writer.write([b"d"])
    assert (tmp_path / SUMS_FILE).read_bytes() == sums_of([b"a", b"b", b"c", b"d"])
    writer.close()
