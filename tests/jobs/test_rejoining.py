"""Jobs that are started again, by torchrun or by hand, while the other side continues."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
from kit import warm
from kit.deadline import DEADLINE
from kit.job_scripts import SCRIPTS, end, environment, start, variables
from kit.support import wait_until

import graftlab as gl
from graftlab.__main__ import main

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]

SECOND = "generation 2 of target"


@pytest.fixture
def jobs() -> Iterator[list[warm.Running]]:
    """For all that a test starts, because nothing of it ends by itself."""
    started: list[warm.Running] = []
    yield started
    for job in started:
        job.kill()
        job.communicate()


def measured(frame: pd.DataFrame) -> pd.DataFrame:
    return frame[frame["status"] == "compared"]


def test_a_side_restarted_by_torchrun_joins_again_at_a_step_of_the_other(
    tmp_path: Path, jobs: list[warm.Running]
) -> None:
    stop = tmp_path / "stop"
    told = {"run_dir": tmp_path / "run", "timeout": 2 * DEADLINE}
    one = start("resumes.py", stop, 2.0, 0, 0.05, **variables("baseline", 1, 2, **told))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    two = warm.start(
        [*torchrun, SCRIPTS / "resumes.py", stop, 1.0, 0, 0],
        environment(variables("target", 1, 2, **told) | {"FALL_AT": "3"}),
        children=True,
    )
    jobs += (one, two)
    rows = tmp_path / "run" / "rows.jsonl"
    wait_until(rows.exists, "the session")
    wait_until(lambda: "compared" in rows.read_text(), "rows of the first generation")
    wait_until(lambda: rows.read_text().count(SECOND) > 8, "rows of the second generation")
    stop.touch()
    for job in jobs:
        code, out, err = end(job)
        # One side may end while the other is in a step; its session ends with it.
        assert (code, "counted" in out) == (0, True), err
    frame = measured(gl.load_run(tmp_path / "run"))
    # Each holds what the baseline showed at that step, and no other.
    assert (frame["max_baseline"] == 2.0 * (1 + frame["step"])).all()
    first, second = frame[frame["run"] == 0], frame[frame["run"] == 1]
    assert first["note"].isna().all()
    assert set(second["note"]) == {SECOND}
    assert set(second["rank"]) == {0, 1}
    # The new ranks began at one step of the baseline's, after all steps of the old ones, and pair with it from there.
    begin = second["step"].min()
    assert begin > first["step"].max()
    assert (first["max_target"] == 1.0 + first["step"]).all()
    assert (second["max_target"] == 1.0 + second["step"] - begin).all()


def test_a_killed_job_resumes_at_its_step_and_a_fault_in_graftlab_ends_no_job(
    tmp_path: Path, jobs: list[warm.Running], capsys: pytest.CaptureFixture[str]
) -> None:
    stop, folder = tmp_path / "stop", tmp_path / "run"
    session = gl.listen(baseline=1, target=1, folder=folder, timeout=2 * DEADLINE)
    told = {"address": folder, "timeout": 2 * DEADLINE}
    one = start("resumes.py", stop, 2.0, 0, 0.05, **variables("baseline", 1, 1, **told))
    two = start("resumes.py", stop, 1.0, 0, 0, **variables("target", 1, 1, **told))
    jobs += (one, two)
    wait_until(lambda: session.row_count > 8, "rows")
    two.kill()
    assert end(two)[0] == -signal.SIGKILL
    wait_until(lambda: "gone" in session.status()["state"][1], "word of the death")
    assert session.status()["state"][1] == "gone: left, or its process ended; its job can be started again"
    last = session.frame["step"].max()
    wait_until(lambda: session.status()["step"][0] > last + 5, "the baseline's going on alone")
    # From a checkpoint that lies behind what the baseline has done since.
    resumed = variables("target", 1, 1, first_step=4, **told)
    again = start("resumes.py", stop, 1.0, 4, 0, **resumed, PLANT=str(tmp_path / "plant"))
    jobs.append(again)
    wait_until(lambda: len(measured(session.frame_of(1))) > 4, "pairs of the second generation")
    assert session.status()["generation"].tolist() == [1, 2]
    assert session.status()["note"][1] == "joined again as generation 2, and began at step 4"
    assert main(["status", str(folder)]) == 0
    assert "generation" in capsys.readouterr().out
    frame = session.frame_of(1)
    paired = measured(frame)
    assert (paired["rel_l2"] == 0.5).all()
    assert (paired["max_target"] == 1.0 + paired["step"]).all()
    assert (
        "the target was started again (generation 2), and its first step is step 4 here" in session.runs[1].summary[0]
    )
    # What the baseline had behind it when they met is missing, and is not waited for.
    missed = frame[frame["status"] == "missing"]
    assert missed["step"].min() == 4
    assert missed["step"].max() < paired["step"].min()
    assert missed["error"].str.contains(r"baseline\[0\] ended the step without this tap").all()
    assert set(frame["note"]) == {SECOND}
    plan = session.edit(b2t="True")
    wait_until(lambda: len(session.adopted(plan.version)) == 2, "a plan in force on both")
    # What fails in graftlab's own thread there ends its part, and not the job.
    plant = tmp_path / "plant"
    plant.touch()
    wait_until(lambda: not plant.exists(), "the planting")
    session.edit(b2t=None)
    wait_until(lambda: "gone" in session.status()["state"][1], "the end of graftlab in the target")
    assert again.poll() is None
    last = session.status()["step"][0]
    wait_until(lambda: session.status()["step"][0] > last + 5, "the baseline's going on alone")
    stop.touch()
    ends = [end(job) for job in (one, again)]
    assert [(code, out) for code, out, _ in ends] == [(0, "counted True\n")] * 2, ends
    assert ends[1][2].count("GraftWarning") == 1
    assert "graftlab failed on target[0] and stopped taking taps; the job continues (planted in" in ends[1][2]
    wait_until(lambda: session.runs[-1].done, "the end of the run")
    assert ["target[0]" in run.failures for run in session.runs] == [True, True]
    assert all("baseline[0]" not in run.failures for run in session.runs)
    session.close()
    assert not (folder / ".rendezvous" / "socket").exists()
