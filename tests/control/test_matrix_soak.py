"""Deaths during an edit, a close and a publish of 256 MiB: of ranks, and of the session server."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from pathlib import Path

import pandas as pd
import pytest
import torch
from kit.deadline import DEADLINE
from kit.job_scripts import end, start, variables
from kit.processes import descriptors, family, shared_memory_left, still_there, watch
from kit.scripts import first_line, script
from kit.support import wait_until

import graftlab as gl
from graftlab.control import core
from graftlab.ranks import launcher

pytestmark = [pytest.mark.ranks, pytest.mark.soak, pytest.mark.timeout(600)]

LABELS = ("baseline[0]", "target[0]", "target[1]")
FILTERS = ("name == 'a'", "name == 'b'", "True")


@pytest.fixture
def shm() -> set[str]:
    return set(os.listdir("/dev/shm"))


def step_for_ever() -> None:
    x = torch.ones(256)
    while True:
        for name in "ab":
            gl.tap(name, x)
        gl.step()


def tap_both() -> None:
    for name in "ab":
        gl.tap(name, torch.ones(256))


def publish_for_ever() -> None:
    large = torch.ones(64 << 20)
    while True:
        gl.tap("large", large)
        gl.step()


def assert_one_plan_a_step(frame: pd.DataFrame) -> None:
    # The row that says that a step has no plan carries the version before it.
    plans = frame[frame["name"] != "gl.step"].groupby("step")["plan_version"].nunique()
    assert (plans == 1).all(), plans[plans > 1]
    assert not frame.duplicated(["run", "step", "name", "side", "rank"]).any()


# ---- a rank ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("label", LABELS)
def test_a_restart_after_a_kill_during_edits_has_the_newest_plan(label: str, shm: set[str]) -> None:
    with gl.launch(1, 2) as session:
        for round_ in range(4):
            [rank] = [rank for rank in session.ranks if rank.label == label]
            everyone = watch(each.pid for each in session.ranks if each.pid)
            rows = session.row_count
            run = session.start(step_for_ever, step_for_ever)
            wait_until(lambda rows=rows: session.row_count > rows + 50, "rows")
            # Many edits, and one meets the death.
            for index in itertools.count():
                if index == 5 + 7 * round_:
                    rank.signal(signal.SIGKILL)
                if run.done:
                    break
                session.edit(compare=FILTERS[index % 3])
            with pytest.raises(gl.RunError, match=r"died: killed by SIGKILL"):
                run.wait(DEADLINE)
            newest = session.plan
            session.restart()
            assert still_there(everyone) == []
            assert session.plan == newest
            as_before = session.run(tap_both, tap_both).frame
            assert set(as_before["name"]) == {name for name in "ab" if newest.compare in ("True", f"name == '{name}'")}
            assert set(as_before["plan_version"]) == {newest.version}
            session.edit(compare="True")
            again = session.run(lambda: gl.tap("c", torch.ones(3)), lambda: gl.tap("c", torch.ones(3)))
            assert again.frame["status"].tolist() == ["compared"] * 2
            assert_one_plan_a_step(session.frame)
            assert len(gl.load_run(session.folder)) == session.row_count
        everyone = watch(each.pid for each in session.ranks if each.pid)
    assert still_there(everyone) == []
    assert shared_memory_left(shm) == set()


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_rank_that_is_killed_while_the_session_is_closed_leaves_nothing(
    label: str, when: str, shm: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gl.launch(1, 1).close()  # everything that lasts as long as the process exists by now
    before = len(descriptors())
    end_ranks = launcher.end_ranks
    for _ in range(3):
        session = gl.launch(1, 2)
        [rank] = [rank for rank in session.ranks if rank.label == label]
        everyone = watch(each.pid for each in session.ranks if each.pid)
        session.start(step_for_ever, step_for_ever)
        wait_until(lambda session=session: session.row_count > 50, "rows")

        def killing(*given: object, rank: object = rank, **named: object) -> None:
            kill = threading.Thread(target=lambda: rank.signal(signal.SIGKILL))  # type: ignore[attr-defined]
            kill.start()
            if when == "before":
                kill.join()
            end_ranks(*given, **named)  # type: ignore[arg-type]
            kill.join()

        with monkeypatch.context() as patch:
            patch.setattr(core, "end_ranks", killing)
            session.close()
        assert session.closed
        assert still_there(everyone) == []
        assert_one_plan_a_step(gl.load_run(session.folder))
        assert len(gl.load_run(session.folder)) == session.row_count
        del session, rank, killing
    assert shared_memory_left(shm) == set()
    assert len(descriptors()) <= before


# ---- the session server ---------------------------------------------------------------------------------------------

HOLDS = """
import itertools, json, os, sys
import graftlab as gl
from control.test_matrix_soak import FILTERS, publish_for_ever, step_for_ever
from graftlab.control import core
from graftlab.ranks import launcher

session = gl.launch(1, 2, folder=sys.argv[1] if len(sys.argv) > 1 else "run")
{work}
"""
EDITS = """
session.start(step_for_ever, step_for_ever)
print(json.dumps([rank.pid for rank in session.ranks]), flush=True)
for index in itertools.count():
    session.edit(compare=FILTERS[index % 3])
    if session.row_count > 100:
        print(index, flush=True)
"""
CLOSES = """
session.start(step_for_ever, step_for_ever)
while session.row_count < 100:
    pass
print(json.dumps([rank.pid for rank in session.ranks]), flush=True)
{how}
session.close()
print("closed", flush=True)
"""
# What the script says when it is at this place of a close: with the killer, which reads it, it races from there on.
BEFORE = """
end_ranks = core.end_ranks
def said(*given, **named):
    print("closing", flush=True)
    return end_ranks(*given, **named)
core.end_ranks = said
"""
AFTER = """
end_ranks = core.end_ranks
def said(*given, **named):
    made = end_ranks(*given, **named)
    print("closing", flush=True)
    return made
core.end_ranks = said
"""
PUBLISHES = """
session.start(publish_for_ever, publish_for_ever)
while session.row_count < 6:
    pass
print(json.dumps([rank.pid for rank in session.ranks]), flush=True)
while True:
    print(session.row_count, flush=True)
"""


@pytest.fixture
def holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tests = str(Path(__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([tests, *filter(None, [os.environ.get("PYTHONPATH")])]))
    return tmp_path


@pytest.mark.parametrize("lines", [1, 20, 150])
@pytest.mark.parametrize(
    "work",
    [EDITS, CLOSES.format(how=BEFORE), CLOSES.format(how=AFTER), PUBLISHES],
    ids=["editing", "closing", "closed its ranks", "publishing 256 MiB"],
)
def test_a_driver_that_is_killed_leaves_its_rows_and_nothing_else(
    holder: Path, shm: set[str], work: str, lines: int
) -> None:
    with script(HOLDS.format(work=work), holder) as process:
        pids = first_line(process)
        everyone = watch(family(process.pid) | set(pids))
        assert process.stdout is not None
        for _ in range(1 if "closing" in work else lines):
            assert process.stdout.readline()
        process.kill()
        assert still_there(everyone) == []
    assert shared_memory_left(shm) == set()
    frame = gl.load_run(holder / "run")
    assert len(frame) > (5 if work is PUBLISHES else 99)
    assert_one_plan_a_step(frame)
    # No session has the folder now.
    with gl.launch(1, 1, folder=holder / "run", append=True) as session:
        session.run(lambda: gl.tap("a", torch.ones(3)), lambda: gl.tap("a", torch.ones(3)))
    assert len(gl.load_run(holder / "run")) == len(frame) + 1


LISTENS = """
import json, sys
import graftlab as gl

session = gl.listen(baseline=1, target=1, folder="run", timeout=600)
print(json.dumps("listening"), flush=True)
while session.row_count < 20:
    pass
print("rows", flush=True)
{work}
"""


@pytest.mark.parametrize("doing", ["nothing", "editing", "closing"])
def test_jobs_outlive_the_notebook_that_listened_and_was_killed(holder: Path, doing: str) -> None:
    work = {
        "nothing": "sys.stdin.read()",
        "editing": "while True:\n    session.edit(compare='True')\n    print('edited', flush=True)",
        "closing": "print('closing', flush=True)\nsession.close()",
    }[doing]
    stop = holder / "stop"
    jobs = []
    try:
        with script(LISTENS.format(work=work), holder) as process:
            # Behind what listening itself prints.
            assert process.stdout is not None
            while process.stdout.readline() != '"listening"\n':
                assert process.poll() is None
            told = {"address": holder / "run", "timeout": 2 * DEADLINE}
            jobs += [
                start("goes_on.py", stop, 1.0, **variables("baseline", 1, 1, **told)),
                start("goes_on.py", stop, 1.5, **variables("target", 1, 1, **told)),
            ]
            assert process.stdout.readline() == "rows\n"
            if doing != "nothing":
                assert process.stdout.readline()
            process.kill()
        assert [job.poll() for job in jobs] == [None, None]
        stop.touch()
        for job in jobs:
            code, out, err = end(job)
            assert (code, out) == (0, "went on True\n"), err
            assert "the session ended" in err
    finally:
        stop.touch()
    assert len(gl.load_run(holder / "run")) >= 20
