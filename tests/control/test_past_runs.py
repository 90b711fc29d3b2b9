"""Run folders: listed with what they hold, removed when they are too many, and never while a session has one open."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

import graftlab as gl
from graftlab.__main__ import main
from graftlab.control import past_runs, run_folder
from graftlab.control.past_runs import find_runs, prune, runs_text
from graftlab.rows.store import RowStore

DAY = 86400.0
MIB = 1 << 20


def a_run(where: Path, name: str, days: float, mib: int = 1) -> Path:
    folder = where / name
    (folder / "logs").mkdir(parents=True)
    (folder / "logs" / "target-0.log").write_bytes(bytes(mib * MIB))
    RowStore(folder).close()
    began = time.time() - days * DAY
    (folder / "session.json").write_text(json.dumps({"started": began}))
    os.utime(folder / "rows.jsonl", (began, began))
    return folder


def left(where: Path) -> list[str]:
    return [each.folder.name for each in find_runs(where)]


def test_the_oldest_go_first_until_the_rest_fit(tmp_path: Path) -> None:
    for name, days in (("b", 2), ("c", 1), ("a", 3)):
        a_run(tmp_path, name, days)
    assert left(tmp_path) == ["a", "b", "c"]
    exactly = sum(each.bytes for each in find_runs(tmp_path))
    assert prune(tmp_path, gib=exactly / 2**30) == []
    assert [each.folder.name for each in prune(tmp_path, gib=2.5 * MIB / 2**30)] == ["a"]
    assert left(tmp_path) == ["b", "c"]
    assert [each.folder.name for each in prune(tmp_path, days=1.5)] == ["b"]
    assert prune(tmp_path) == []


def test_open_new_and_foreign_folders_stay(tmp_path: Path) -> None:
    a_run(tmp_path, "new", 0)
    # One that began long ago may have been closed a moment ago.
    os.utime(a_run(tmp_path, "long", 2) / "rows.jsonl")
    store = RowStore(a_run(tmp_path, "open", 3), append=True)
    os.utime(tmp_path / "open" / "rows.jsonl", (0, 0))
    (tmp_path / "mine").mkdir()
    # A person's own folder, into which the rows of a run were copied.
    (tmp_path / "mine" / "rows.jsonl").touch()
    os.utime(tmp_path / "mine" / "rows.jsonl", (0, 0))
    (tmp_path / "link").symlink_to(a_run(tmp_path / "elsewhere", "old", 9))
    assert prune(tmp_path, gib=0, days=0) == []
    assert [(each.folder.name, each.is_open) for each in find_runs(tmp_path)] == [
        ("open", True),
        ("long", False),
        ("new", False),
    ]
    assert [line.split()[4:-1] for line in runs_text(find_runs(tmp_path)).splitlines()[:2]] == [["open"], []]
    store.close()
    assert [each.folder.name for each in prune(tmp_path, gib=0)] == ["open"]
    assert (tmp_path / "elsewhere" / "old" / "rows.jsonl").exists()


def test_a_run_that_another_process_opens_or_removes_meanwhile_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    a_run(tmp_path, "opened", 3)
    a_run(tmp_path, "removed", 3)
    found = find_runs(tmp_path)
    store = RowStore(tmp_path / "opened", append=True)
    os.utime(tmp_path / "opened" / "rows.jsonl", (0, 0))
    shutil.rmtree(tmp_path / "removed")
    monkeypatch.setattr(past_runs, "find_runs", lambda *_: found)
    assert prune(tmp_path, gib=0) == []
    assert not caplog.records
    store.close()
    monkeypatch.undo()
    # Between two looks at it.
    monkeypatch.setattr(past_runs, "_is_open", Mock(side_effect=FileNotFoundError))
    assert find_runs(tmp_path) == []


def test_a_closed_run_is_looked_at_again_only_if_rows_were_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at: list[str] = []
    is_open = past_runs._is_open

    def noting(rows: Path) -> bool:
        looked_at.append(rows.parent.name)
        return is_open(rows)

    monkeypatch.setattr(past_runs, "_is_open", noting)
    for name, days in (("a", 3), ("b", 2)):
        a_run(tmp_path, name, days)
    assert prune(tmp_path) == []
    assert sorted(looked_at) == ["a", "b"]
    store = RowStore(a_run(tmp_path, "open", 1, mib=0), append=True)
    for _ in range(2):
        assert prune(tmp_path) == []
    store.close()
    assert sorted(looked_at) == ["a", "b", "open", "open"]
    (tmp_path / "a" / "logs" / "more.log").write_bytes(bytes(2 * MIB))
    os.utime(tmp_path / "a" / "rows.jsonl", (time.time() - DAY,) * 2)
    # Both fit if the first has its size of before.
    assert [each.folder.name for each in prune(tmp_path, gib=3.5 * MIB / 2**30)] == ["a"]
    assert sorted(looked_at) == ["a", "a", "b", "open", "open", "open"]


def test_the_command_and_the_call_list_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a_run(tmp_path, "one", 40, mib=3)
    frame = gl.runs(tmp_path)
    assert frame["folder"].tolist() == [tmp_path / "one"]
    assert 3 * MIB < frame["bytes"][0] < 4 * MIB
    assert main(["runs", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "3.0 MiB" in shown
    assert str(tmp_path / "one") in shown
    assert main(["runs", "--prune", str(tmp_path)]) == 0
    assert "left:\n0 run folders, 0.0 MiB" in capsys.readouterr().out
    assert gl.runs(tmp_path).empty


def test_30_days_and_10_gib_are_kept_unless_configured_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GRAFTLAB_RUNS_DAYS", raising=False)
    monkeypatch.delenv("GRAFTLAB_RUNS_GIB", raising=False)
    for name, days in (("a", 31), ("b", 29), ("c", 3)):
        a_run(tmp_path, name, days)
    # Its size, without the bytes.
    os.truncate(tmp_path / "b" / "logs" / "target-0.log", 10 << 30)
    assert [each.folder.name for each in prune(tmp_path)] == ["a", "b"]
    monkeypatch.setenv("GRAFTLAB_RUNS_GIB", "0.0001")
    assert [each.folder.name for each in prune(tmp_path, days=9)] == ["c"]
    a_run(tmp_path, "d", 3)
    monkeypatch.setenv("GRAFTLAB_RUNS_GIB", "inf")
    monkeypatch.setenv("GRAFTLAB_RUNS_DAYS", "2")
    assert [each.folder.name for each in prune(tmp_path)] == ["d"]


@pytest.mark.parametrize("given", ["much", "nan", "-1"])
def test_an_invalid_budget_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: str
) -> None:
    monkeypatch.setenv("GRAFTLAB_RUNS_GIB", given)
    with pytest.raises(gl.SessionError, match=f"GRAFTLAB_RUNS_GIB='{given}': give a number"):
        prune(tmp_path)
    assert main(["runs", "--prune", str(tmp_path)]) == 2
    assert "GRAFTLAB_RUNS_GIB" in capsys.readouterr().err


@pytest.mark.ranks
def test_a_launch_removes_run_folders_beyond_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAFTLAB_HOME", str(tmp_path))
    a_run(tmp_path / "runs", "old", 40)
    with gl.launch(1, 1) as session:
        assert left(tmp_path / "runs") == [session.folder.name]


def test_two_sessions_of_one_second_never_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = [b"ab", b"ab", b"cd"]
    monkeypatch.setenv(run_folder.HOME_VARIABLE, str(tmp_path))
    monkeypatch.setattr(run_folder, "time", SimpleNamespace(strftime=lambda form: "now"))
    monkeypatch.setattr(os, "urandom", lambda size: numbers.pop(0))
    made = [run_folder.make_run_folder(None).name for _ in range(2)]
    assert made == [f"now-{os.getpid()}-{number.hex()}" for number in (b"ab", b"cd")]
    assert len(list((tmp_path / "runs").iterdir())) == 2
