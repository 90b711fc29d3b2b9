"""Files in folders that another user may have filled: what is opened, what is refused, and what is closed again."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from graftlab.base import files
from graftlab.base.files import open_regular, opened, read_all


@pytest.fixture
def left_open(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[int]]:
    """The descriptors that were opened here and not closed."""
    descriptors: set[int] = set()
    plain_open, plain_close = os.open, os.close

    def noted(*args: Any, **options: Any) -> int:
        descriptors.add(descriptor := plain_open(*args, **options))
        return descriptor

    def closed(descriptor: int) -> None:
        descriptors.discard(descriptor)
        plain_close(descriptor)

    monkeypatch.setattr(files.os, "open", noted)
    monkeypatch.setattr(files.os, "close", closed)
    yield descriptors
    for each in descriptors:
        plain_close(each)


def test_a_file_in_a_folder_of_the_folder_is_read(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "rows").write_bytes(b"its rows")
    assert read_all(tmp_path, "inner", "rows") == b"its rows"
    assert read_all(tmp_path, "inner", "rows", most=8) == b"its rows"
    with pytest.raises(OSError, match="at most 0 are read") as refused:
        read_all(tmp_path, "inner", "rows", most=7)
    assert refused.value.errno == errno.EFBIG


@pytest.mark.parametrize("name", ["", ".", "..", "inner/rows", "../rows", "/rows", "rows\0"])
@pytest.mark.parametrize("is_folder", [False, True])
def test_no_name_leads_out_of_the_folder(name: str, is_folder: bool, tmp_path: Path) -> None:
    (tmp_path / "inner" / "inner").mkdir(parents=True)
    for place in (tmp_path, tmp_path / "inner", tmp_path / "inner" / "inner"):
        (place / "rows").write_bytes(b"")
    with pytest.raises(OSError, match="is not the name of a file in the folder"):
        read_all(tmp_path / "inner", *([name, "rows"] if is_folder else [name]))


def test_folders_and_what_is_refused_are_closed_again(tmp_path: Path, left_open: set[int]) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "rows").write_bytes(b"")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        open_regular(tmp_path / "pipe")
    with pytest.raises(FileNotFoundError), opened(tmp_path, "inner", "rows"):
        pass
    assert left_open == set()
    with opened(tmp_path, "rows") as file:
        assert left_open == {file.fileno()}
    # The file closes itself.
    left_open.clear()
