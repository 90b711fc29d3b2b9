"""Files in folders that another user may have filled: what is opened, what is refused, and what is closed again."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kit.refusals import exactly

from graftlab.base import files
from graftlab.base.files import open_regular, opened, others_can_write, read_all


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
    with pytest.raises(OSError, match=exactly("[Errno 27] it has 0 MiB, and at most 0 are read")) as refused:
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


@pytest.mark.parametrize(("mode", "expected"), [(0o700, False), (0o755, False), (0o757, True), (0o1777, True)])
def test_a_folder_is_others_to_write_by_its_mode(mode: int, expected: bool, tmp_path: Path) -> None:
    tmp_path.chmod(mode)
    assert others_can_write(tmp_path) == expected


def test_a_folder_that_belongs_to_another_user_is_theirs_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = tmp_path.stat().st_uid + 1
    monkeypatch.setattr(files.os, "getuid", lambda: 12_345)
    monkeypatch.setattr(Path, "stat", lambda self: SimpleNamespace(st_uid=owner, st_mode=0o40700, st_gid=0))
    assert others_can_write(tmp_path)
    # root is trusted.
    monkeypatch.setattr(Path, "stat", lambda self: SimpleNamespace(st_uid=0, st_mode=0o40700, st_gid=0))
    assert not others_can_write(tmp_path)


@pytest.mark.parametrize(("group", "expected"), [("me", False), ("team", True), (None, True)])
def test_a_group_can_write_into_a_folder_unless_it_is_this_users_alone(
    group: str | None, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def named(number: int) -> SimpleNamespace:
        if group is None:
            raise KeyError(number)
        return SimpleNamespace(gr_name=group)

    monkeypatch.setattr(files.grp, "getgrgid", named)
    monkeypatch.setattr(files.pwd, "getpwuid", lambda number: SimpleNamespace(pw_name="me"))
    tmp_path.chmod(0o770)
    assert others_can_write(tmp_path) == expected
    tmp_path.chmod(0o750)
    assert not others_can_write(tmp_path)
