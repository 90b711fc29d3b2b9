"""Checksums of lines of rows: what the disk has changed is named by its line, and lines without one are accepted."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import pytest

from graftlab.errors import SessionError
from graftlab.rows.checksums import SUMS_FILE, Sums, SumsWriter, sums_of


def sums(folder: Path, lines: list[bytes], first: int = 7) -> Sums:
    (folder / SUMS_FILE).write_bytes(first.to_bytes(8, "little") + sums_of(lines))
    return Sums(folder, 7)


def test_a_checksum_is_the_crc_of_the_line_in_four_bytes_of_one_order() -> None:
    assert sums_of([b"[1,2]", b""]) == zlib.crc32(b"[1,2]").to_bytes(4, "little") + bytes(4)


@pytest.mark.parametrize("changed", range(4))
@pytest.mark.parametrize("before", [0, 3])
def test_the_first_line_that_is_not_what_was_written_is_named(changed: int, before: int, tmp_path: Path) -> None:
    lines = [b"earlier"] * before + [b"zero", b"one", b"two", b"three"]
    found = sums(tmp_path, lines)
    now = lines[before:]
    assert found.wrong(before, now) is None
    now[changed] = now[changed].upper()
    # A later one does not matter.
    now[-1] = b"THREE"
    assert found.wrong(before, now) == before + changed + 1


def test_lines_beyond_the_checksums_are_accepted_as_they_are(tmp_path: Path) -> None:
    found = sums(tmp_path, [b"zero", b"one"])
    assert found.wrong(1, [b"one", b"more"]) is None
    assert found.wrong(1, [b"ONE", b"more"]) == 2
    assert found.wrong(2, [b"more"]) is None
    # Half a checksum is none.
    with open(tmp_path / SUMS_FILE, "ab") as file:
        file.write(b"\1\2\3")
    assert Sums(tmp_path, 7).wrong(1, [b"one", b"more"]) is None
    (tmp_path / SUMS_FILE).unlink()
    assert Sums(tmp_path, 7).wrong(0, [b"any"]) is None


def test_checksums_of_another_log_are_ignored(tmp_path: Path) -> None:
    found = sums(tmp_path, [b"zero"], first=6)
    assert found.wrong(0, [b"ZERO"]) is None


def test_unreadable_checksums_raise_an_error_that_names_the_file(tmp_path: Path) -> None:
    (tmp_path / SUMS_FILE).mkdir()
    with pytest.raises(SessionError, match=r"the checksums in .*rows\.crc32 cannot be read: it is not a regular file"):
        Sums(tmp_path, 0)


def test_checksums_are_appended_replaced_and_continued_after_the_end(tmp_path: Path) -> None:
    earlier = SumsWriter(tmp_path)
    earlier.begin(0, b"of an earlier session")
    earlier.close()
    writer = SumsWriter(tmp_path)
    writer.begin(3, b"header")
    path = tmp_path / SUMS_FILE
    writer.write([b"a", b"b"])
    assert path.read_bytes() == (3).to_bytes(8, "little") + sums_of([b"header", b"a", b"b"])
    assert path.stat().st_mode & 0o777 == 0o600
    writer.begin(4, b"other", dropped=2)
    writer.write([b"c"])
    writer.close()
    writer.write([b"d"])
    assert path.read_bytes() == (4).to_bytes(8, "little") + sums_of([b"other", b"b", b"c", b"d"])


def test_checksums_that_a_full_disk_refused_are_kept_with_those_of_the_same_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    writer = SumsWriter(tmp_path)
    writer.begin(0, b"header")
    writer.write([b"a", b"b"])
    with monkeypatch.context() as patch:
        patch.setattr(writer, "_flush", full)
        writer.write([b"c"])
    writer.begin(1, b"other", dropped=2)
    with monkeypatch.context() as patch:
        patch.setattr(writer, "_flush", full)
        writer.write([b"d"])
        writer.begin(2, b"third", dropped=2)
    writer.close()
    assert (tmp_path / SUMS_FILE).read_bytes() == (2).to_bytes(8, "little") + sums_of([b"third", b"c", b"d"])


def test_checksums_refused_by_a_full_disk_are_written_with_the_next_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = SumsWriter(tmp_path)
    writer.begin(0, b"header")

    class Full:
        room = 6

        def write(self, data: bytes) -> int:
            if not self.room:
                raise OSError(28, "No space left on device")
            taken = data[: self.room]
            self.room = 0
            return os.write(descriptor.fileno(), taken)

    descriptor = writer._file
    assert descriptor is not None
    monkeypatch.setattr(writer, "_file", Full())
    writer.write([b"a", b"b"])
    writer.write([b"c"])
    assert len((tmp_path / SUMS_FILE).read_bytes()) == 8 + 4 + 6
    monkeypatch.setattr(writer, "_file", descriptor)
    writer.write([b"d"])
    assert (tmp_path / SUMS_FILE).read_bytes() == bytes(8) + sums_of([b"header", b"a", b"b", b"c", b"d"])
    writer.close()
