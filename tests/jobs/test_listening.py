"""A session that listens: jobs join it, are steered while they run, and outlive it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from kit.deadline import DEADLINE
from kit.job_scripts import end, start, variables
from kit.support import wait_until

import graftlab as gl
from graftlab.__main__ import main

pytestmark = pytest.mark.ranks


@pytest.fixture
def stop(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "stop"
    yield path
    path.touch()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("without_session", ["keep", pytest.param("nothing", marks=pytest.mark.soak)])
def test_a_second_notebook_takes_over_the_jobs_of_the_first(
    tmp_path: Path, stop: Path, capsys: pytest.CaptureFixture[str], without_session: str
) -> None:
    folder = tmp_path / "run"
    session = gl.listen(baseline=1, target=1, folder=folder, timeout=2 * DEADLINE)
    said = capsys.readouterr().out
    assert f"target: GRAFTLAB_ENABLE=1 GRAFTLAB_ROLE=target GRAFTLAB_ADDRESS={folder} " in said
    assert session.status()["state"].tolist() == ["not joined yet"] * 2
    told = {
        "address": folder,
        "timeout": 2 * DEADLINE,
        "b2t_filter": "name == 'nobody'",
        "without_session": without_session,
    }
    jobs = [
        start("goes_on.py", stop, 1.0, **variables("baseline", 1, 1, **told)),
        start("goes_on.py", stop, 1.5, **variables("target", 1, 1, **told)),
    ]
    wait_until(lambda: session.row_count > 4, "rows")
    assert set(session.frame["status"]) == {"compared"}
    assert set(session.status()["device"]) == {"cpu"}
    assert [tags["name"] for tags in session.taps] == ["hidden", "out"]
    # Edited while they run: from one step on, on both.
    plan = session.edit(b2t="layer == 0", keep="layer == 0")
    wait_until(lambda: len(session.adopted(plan.version)) == 2, "the plan in force")
    assert len(set(session.adopted(plan.version).values())) == 1
    wait_until(lambda: (session.frame["status"] == "grafted").any(), "a graft")
    baseline, target = session.tensors("hidden", layer=0)
    assert torch.equal(baseline * 1.5, target)
    assert session.try_transform(lambda given: given.received_list[0] * 1.5, "hidden").after.max_abs == 0.0
    assert "goes_on.py" in session.stacks()["target[0]"]
    assert session.plot.divergence() is not None
    assert session.status()["links"].tolist() == ["shared memory"] * 2
    # And so from a terminal.
    assert main(["stacks", str(folder)]) == main(["status", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "--- target[0]\n" in shown
    assert "goes_on.py" in shown
    assert [line.split()[0] for line in shown.splitlines() if line.startswith(("hidden", "out"))] == ["hidden", "out"]
    for refused in (
        lambda: session.run(target="1"),
        session.interrupt,
        session.restart,
        lambda: session.verdict("1", "1"),
    ):
        with pytest.raises(gl.SessionError, match="jobs that another launcher started"):
            refused()
    assert session.plan.version == plan.version
    with pytest.raises(gl.LaunchError, match="a session already listens"):
        gl.listen(folder=folder, append=True)
    session.close()
    assert [job.poll() for job in jobs] == [None, None]
    for job in jobs:
        assert job.stderr is not None
        assert any("the session ended; the job continues" in line for line in job.stderr)

    again = gl.listen(baseline=1, target=1, folder=folder, append=True, timeout=2 * DEADLINE)
    before = again.row_count
    wait_until(lambda: again.status()["state"].isin(["running", "waiting"]).all(), "both ranks")
    if without_session == "nothing":
        assert (again.plan.b2t, again.plan.compare, again.plan.keep) == (None, None, None)
        assert again.plan.version > plan.version
        again.edit(compare="True")
        wait_until(lambda: again.row_count > before, "rows under the plan of whoever took over")
    else:
        wait_until(lambda: again.row_count > before, "rows of jobs that were taken over")
        assert again.status()["note"].str.contains("rows were made while no session listened, and are lost").any()
        # Under the plan that they had; and it can be edited again.
        assert again.plan.b2t == "layer == 0"
        assert again.frame.iloc[-1]["plan_version"] == plan.version
    assert "hidden" in [tags["name"] for tags in again.taps]
    newer = again.edit(b2t=None)
    wait_until(lambda: len(again.adopted(newer.version)) == 2, "the newer plan in force")
    steps = again.frame.groupby(["name", "run"])["step"]
    assert (steps.nunique() == steps.size()).all()
    stop.touch()
    for job in jobs:
        code, out, err = end(job)
        assert (code, out) == (0, "went on True\n"), err
    wait_until(lambda: again.runs[-1].done, "the end of the run")
    assert again.runs[-1].failures == {}
    again.close()
