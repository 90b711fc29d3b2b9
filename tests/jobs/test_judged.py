"""A verdict on jobs: in the steps that they make anyway, under plans that do not outlive it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit import warm
from kit.deadline import DEADLINE
from kit.job_scripts import end, on_look, start, variables
from kit.support import wait_until

import graftlab as gl
from graftlab.plan.plan import FILTERS

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]

Jobs = list[warm.Running]


@pytest.fixture
def stop(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "stop"
    yield path
    path.touch()


def listened(folder: Path, stop: Path, script: str, wrong: str = "act") -> tuple[gl.Session, Jobs]:
    """A session of two jobs that run this script, the target's with a fault. They have not joined yet."""
    session = gl.listen(baseline=1, target=1, folder=folder, timeout=4 * DEADLINE)
    told = {"address": folder, "timeout": 4 * DEADLINE}
    jobs = [
        start(script, stop, fault, **variables(role, 1, 1, **told))
        for role, fault in (("baseline", "none"), ("target", wrong))
    ]
    return session, jobs


def filters_of(plan: gl.GraftPlan) -> dict[str, str | None]:
    return {name: getattr(plan, name) for name in FILTERS}


def interrupt() -> None:
    raise KeyboardInterrupt


def test_jobs_that_repeat_a_step_are_judged_and_left_unchanged(
    tmp_path: Path, stop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, jobs = listened(tmp_path / "run", stop, "repeats.py")
    before = filters_of(session.edit(b2t="name == 'nobody'", keep="name == 'out'"))
    # It waits for both jobs to join.
    verdict = session.verdict()
    assert verdict.named == ["layers.*.act"]
    assert "layers.*.act is computed differently in layer 1 of 0-2 (added 0.01, " in verdict.text
    assert " x the floor, float32, at layers.1.act)." in verdict.text
    # Swapped, which needs that a step is repeated: the output is compared with that of another step.
    assert "With the baseline's layers.*.act the output out agrees (" in verdict.text
    assert "\nHint (layers.*.act): at layers.1.act, the target's values are 1.01 times the baseline's" in verdict.text
    labels = {row.name: row.label for row in verdict.frame.itertuples()}
    assert [labels[name] for name in ("tokens", "layers.1.h", "layers.1.act", "layers.2.h", "out")] == [
        *("clean", "clean", "culprit", "inherited", "inherited")
    ]
    assert "Not checked: whether both jobs have the same weights, which no tap shows" in verdict.text
    # Its operations were recorded in a step that the jobs made anyway, and confirmed in another.
    assert "\nThe values first differ here; with the baseline's value there, the tap agrees:\n" in verdict.text
    assert [(row.side, row.operation, row.confirmed) for row in verdict.lines.itertuples()] == [
        ("target", "mul(f32[16, 32], 1.01)", True),
        ("baseline", "mul(f32[16, 32], 1)", False),
    ]
    assert verdict.lines["source"].iloc[0].startswith('x = x + gl.tap(f"layers.{layer}.act", torch.tanh(h)')
    assert filters_of(session.plan) == before
    assert session.lines("layers.1.act").frame["operation"].tolist() == verdict.lines["operation"].tolist()
    assert filters_of(session.plan) == before
    wait_until(lambda: len(session.adopted(session.plan.version)) == 2, "the plan from before in force")
    assert "layers.*.act is computed differently" in session.report(tmp_path / "report.html").read_text()

    # Runs of several steps, whose output is the last step's.
    verdict = session.verdict(steps=2)
    assert verdict.named == ["layers.*.act"]
    assert verdict.lines["confirmed"].tolist() == [True, False]
    assert "With the baseline's layers.*.act the output out agrees (" in verdict.text
    assert "\nHint (layers.*.act): at layers.1.act, " in verdict.text
    assert verdict.frame["step"].tolist() == [0] * 8 + [1] * 8
    assert filters_of(session.plan) == before

    with pytest.raises(gl.SessionError, match=r"jobs that another launcher started.*session\.verdict\(\) judges"):
        session.verdict("f()", "f()")
    with pytest.raises(gl.SessionError, match="no tap named 'nothing' was measured"):
        session.verdict(output="nothing")
    assert filters_of(session.plan) == before
    on_look(session, monkeypatch, interrupt)
    with pytest.raises(KeyboardInterrupt):
        session.verdict()
    assert filters_of(session.plan) == before
    on_look(session, monkeypatch, lambda: session.edit(keep=None))
    assert "results are missing: the plan was edited during the verdict" in session.verdict().text
    assert session.plan.keep is None  # the user's edit stays
    before = filters_of(session.edit(**before))

    # A notebook that goes away in the middle of one leaves its jobs the plan from before.
    on_look(session, monkeypatch, session.close)
    assert "results are missing" in session.verdict().text
    assert session.closed
    again = gl.listen(baseline=1, target=1, folder=tmp_path / "run", append=True, timeout=2 * DEADLINE)
    wait_until(lambda: again.status()["state"].isin(["running", "waiting"]).all(), "both ranks")
    assert filters_of(again.plan) == before

    # And so does a job that dies.
    target = again.ranks[1].pid
    assert target == jobs[1].pid
    on_look(again, monkeypatch, lambda: os.kill(jobs[1].pid, signal.SIGKILL))
    text = again.verdict().text
    assert "results are missing: the verdict was abandoned, and" in text
    assert "failed on target[0]" in text
    assert filters_of(again.plan) == before
    with pytest.raises(gl.SessionError, match=r"target\[0\] is missing, and a verdict needs every rank"):
        again.verdict()
    assert jobs[0].poll() is None
    wait_until(lambda: "baseline[0]" in again.adopted(again.plan.version), "the plan from before in force")
    stop.touch()
    code, out, err = end(jobs[0])
    assert (code, out) == (0, "went on True\n"), err
    again.close()


def test_a_verdict_on_training_jobs_names_the_floor_it_used(tmp_path: Path, stop: Path) -> None:
    session, jobs = listened(tmp_path / "run", stop, "trains.py")
    verdict = session.verdict()
    assert "\nThe jobs do not repeat a step: from one to the next, the baseline differs at input.x" in verdict.text
    assert "the floor is not measured but assumed for float32 (rel_l2 1e-05), no code was swapped" in verdict.text
    assert "the weights agree, and the first tap that differs is layers.1.act (by 0.05)." in verdict.text
    assert "\nThe weights already differ: " in f"\n{verdict.text}"
    assert (
        "layers.*.act is computed differently in layer 1 of 0-2 (added 0.05, 5e+03 x the assumed floor" in verdict.text
    )
    # Others compute with weights that the fault has changed.
    assert verdict.named == ["layers.*.act"]
    assert "\nNot judged, because of weights that have diverged since then" in verdict.text
    assert ", which may explain what is added: layers.*.linear" in verdict.text
    assert "\nWeights were not grafted, so differing weights may explain what is named." in verdict.text
    assert "how the optimizers' steps update the weights: that needs permanent grafts" in verdict.text
    assert "the output" not in verdict.text.replace("what moves the output", "")
    assert not session.plan.b2t
    # Each step has other values, and both sides are traced in the same one.
    confirmed = verdict.lines[verdict.lines["confirmed"]]
    assert confirmed["source"].tolist() == ["return torch.tanh(x) * self.gain"]

    verdict = session.verdict(graft_weights=True, floor=1e-4)
    assert verdict.named == ["layers.*.act"]
    assert "the floor is the given one (rel_l2 0.0001)" in verdict.text
    assert "in layer 1 of 0-2 (added 0.05, 5e+02 x the given floor, float32, at layers.1.act)." in verdict.text
    assert "may explain what is named" not in verdict.text
    assert verdict.lines["source"].tolist() == ["return torch.tanh(x) * self.gain"] * 2
    assert verdict.lines["confirmed"].tolist() == [True, False]
    assert "From now on the target has the baseline's weights" in verdict.text
    updates = verdict.frame[[tags.get("updated", False) for tags in verdict.frame["tags"]]]
    assert len(updates) == 12
    assert updates["added"].max() == 0.0
    stop.touch()
    for job in jobs:
        code, out, err = end(job)
        assert (code, out) == (0, "trained True\n"), err
    session.close()


def test_a_job_that_is_two_batches_ahead_is_reported_and_no_layer_is_named(tmp_path: Path, stop: Path) -> None:
    session, jobs = listened(tmp_path / "run", stop, "trains.py", "ahead")
    before = filters_of(session.plan)
    verdict = session.verdict()
    assert verdict.text.startswith("The target is ahead by 2 steps: its values at input.x are those that the baseline")
    assert verdict.named == []
    assert filters_of(session.plan) == before
    stop.touch()
    assert [end(job)[0] for job in jobs] == [0, 0]
    session.close()
