"""A disk that is full under each of graftlab's writers: what was not written is stated, and nothing else is lost."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.job_scripts import end, start, variables
from kit.processes import descriptors
from kit.small_disk import fill, small_disk
from kit.support import wait_until

import graftlab as gl
from graftlab.comparison import new_notebook
from graftlab.comparison.new_notebook import notebook_of
from graftlab.control.run_folder import describe_session, description_of
from graftlab.engine import access
from graftlab.exchange.keys import write_token
from graftlab.jobs import job_log
from graftlab.requests import RequestDumper, load_dump


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk") as folder:
        yield folder


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def forward(count: int) -> str:
    for index in range(count):
        gl.tap("a", torch.ones(3), index=index)
    return "ended"


@pytest.mark.ranks
def test_rows_beyond_a_full_disk_are_kept_and_written_once_there_is_room(disk: Path) -> None:
    with gl.launch(1, 1, folder=disk / "run") as session:
        session.run(forward, forward, args=(50,))
        filled = fill(disk)
        with pytest.raises(gl.SessionError, match=r"run 1 has ended.* rows \d+ to 1049 are not on disk.*No space"):
            session.run(forward, forward, args=(1000,))
        assert session.runs[-1].target == ["ended"]
        assert len(session.frame) == 1050
        filled.unlink()
        session.run(forward, forward, args=(1,))
        assert len(gl.load_run(disk / "run")) == 1051
    assert len(gl.load_run(disk / "run")) == 1051


@pytest.mark.ranks
def test_a_rank_and_its_log_on_a_full_disk_continue(disk: Path) -> None:
    def speak() -> str:
        for number in range(2000):
            print("line", number)
        return "went on"

    with gl.launch(1, 1, folder=disk / "run") as session:
        filled = fill(disk)
        assert session.run(target=speak).target == ["went on"]
        assert session.stacks()["target[0]"]
        filled.unlink()


@pytest.mark.ranks
def test_a_job_whose_log_is_on_a_full_disk_warns_once_and_continues(tmp_path: Path, disk: Path) -> None:
    """Python's logging prints the traceback of each line that it cannot write."""
    stop = tmp_path / "stop"
    with gl.listen(baseline=1, target=1, folder=disk / "run", timeout=240) as session:
        session.edit(b2t="True")
        told = {"address": disk / "run", "timeout": 240}
        jobs = [start("goes_on.py", stop, 1.0, **variables(role, 1, 1, **told)) for role in ("baseline", "target")]
        wait_until(lambda: session.row_count > 10, "rows", 240)
        filled = fill(disk)
        rows = session.row_count
        wait_until(lambda: session.row_count > rows + 500, "rows", 240)
        stop.touch()
        ends = [end(job) for job in jobs]
        assert [(code, out) for code, out, _ in ends] == [(0, "went on True\n")] * 2
        for _, _, err in ends:
            assert "Traceback" not in err
            assert err.count("only the rows show what each graft does") == 1
        filled.unlink()


def test_the_log_of_a_job_warns_again_after_it_could_be_written(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    package = logging.getLogger("graftlab")
    before, level, propagates = list(package.handlers), package.level, package.propagate
    try:
        job_log.log_to(disk / "job.log")
        package.info("written")
        for _ in range(2):
            filled = fill(disk)
            for number in range(3000):
                package.info("lost %s", number)
            filled.unlink()
            package.info("written")
        assert caplog.text.count("No space left on device; only the rows show what each graft does") == 2
        assert (disk / "job.log").read_text().endswith("written\n")
    finally:
        for handler in [each for each in package.handlers if each not in before]:
            package.removeHandler(handler)
            handler.close()
        package.setLevel(level)
        package.propagate = propagates


def test_a_recording_on_a_full_disk_ends_with_a_warning_and_can_be_read_up_to_there(disk: Path) -> None:

    def record() -> None:
        with gl.record(disk / "recorded"):
            for number in range(40):
                gl.tap("x", torch.full((1 << 19,), float(number)))

    with pytest.warns(gl.GraftWarning, match=r"the recording ended: .*cannot be written \(.*[Nn]o space"):
        record()
    with pytest.raises(gl.RecordingError, match="is truncated: "):
        gl.Recording(disk / "recorded")
    found = [tensor for _, tensor, _ in gl.Recording(disk / "recorded", partial=True).taps(0)]
    assert all(torch.equal(each, torch.full((1 << 19,), float(number))) for number, each in enumerate(found))


def test_a_recording_that_cannot_begin_leaves_nothing_in_the_way_of_the_next(disk: Path) -> None:
    (disk / "recorded" / "rank-00000").mkdir(parents=True)
    filled = fill(disk)
    with pytest.raises(gl.RecordingError, match=r"cannot record to .*No space left"), gl.record(disk / "recorded"):
        pytest.fail("it began")
    filled.unlink()
    with gl.record(disk / "recorded"):
        gl.tap("x", torch.ones(3))
    assert gl.Recording(disk / "recorded").world_size == 1


def test_a_request_that_no_disk_takes_is_written_when_there_is_room(disk: Path) -> None:
    dumper = RequestDumper(disk / "served", threshold=1)
    filled, before = fill(disk), descriptors()
    for rid in "abc":
        assert dumper.add({"rid": rid, "text": "x" * 100_000}, {"text": "y"}, 0.0, 1.0)
    assert not dumper.flush()
    assert dumper.waiting == 3
    # A journal that cannot be written leaves no file and no descriptor for each request.
    assert names(disk / "served") == set()
    assert descriptors() <= before
    filled.unlink()
    assert dumper.flush()
    assert dumper.close()
    paths = sorted((disk / "served").iterdir())
    assert [record.request["rid"] for path in paths for record in load_dump(path)["requests"]] == ["a", "b", "c"]
    assert {path.suffix for path in paths} == {".pkl"}


def test_a_notebook_that_cannot_be_written_leaves_no_half(tmp_path: Path, disk: Path) -> None:
    for side in ("a", "b"):
        (tmp_path / f"{side}.py").write_text(f"def {side}(): pass\n")
    filled = fill(disk)
    made = notebook_of(disk / "new.ipynb", f"{tmp_path}/a.py:a", f"{tmp_path}/b.py:b")
    with pytest.raises(gl.ConfigError, match=r"new\.ipynb cannot be written: No space left"):
        new_notebook._write(disk / "new.ipynb", made)
    assert names(disk) == {filled.name}
    filled.unlink()
    new_notebook._write(disk / "new.ipynb", made)
    assert (disk / "new.ipynb").stat().st_size > 100


@pytest.mark.parametrize("write", [write_token, access.write_token], ids=["session", "engine"])
def test_a_token_that_cannot_be_written_leaves_no_empty_one(write: Any, disk: Path) -> None:
    filled = fill(disk)
    with pytest.raises(OSError, match="No space left"):
        write(disk / "token", "t" * 50)
    assert names(disk) == {filled.name}


def test_the_description_of_an_earlier_session_survives_a_full_disk(
    disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    describe_session(disk, (1, 2), 0)
    before = description_of(disk)
    fill(disk)
    describe_session(disk, (2, 2), 5)
    assert "session.json cannot be written" in caplog.text
    assert description_of(disk) == before
    assert names(disk) == {"session.json", "other files"}


@pytest.mark.ranks
def test_a_report_and_a_picture_that_no_disk_takes_are_errors_and_leave_the_former(disk: Path) -> None:
    with gl.launch(1, 1) as session:
        session.run(forward, forward, args=(2,))
        report = disk / "report.html"
        report.write_text("the former one")
        filled = fill(disk)
        with pytest.raises(gl.SessionError, match=r"the report cannot be written to .*No space left"):
            session.report(report)
        with pytest.raises(gl.SessionError, match=r"the report cannot be written to .*No space left"):
            gl.load_run(session.folder).report(report)
        assert report.read_text() == "the former one"
        assert names(disk) == {"report.html", filled.name}


PRINTS = """
import sys
for number in range(100_000):
    print("line", number, flush=True)
"""


@pytest.mark.ranks
def test_a_script_whose_output_no_disk_takes_is_reported_with_that(
    tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for side in "ab":
        (tmp_path / f"{side}.py").write_text(PRINTS)
    monkeypatch.setenv("GRAFTLAB_HOME", str(disk))
    with pytest.raises(gl.LaunchError, match=r"(?s)ended with exit code .*the disk of .* is full, so its last output"):
        gl.compare(f"{sys.executable} {tmp_path}/a.py", f"{sys.executable} {tmp_path}/b.py")
