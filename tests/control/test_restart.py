"""Sessions outlive their ranks: a lost group is reported, a rank stuck in it is ended, a restart brings all back."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from kit.processes import descriptors, still_there, watch
from kit.support import wait_until

import graftlab as gl
from graftlab.control import core
from graftlab.control.plans import Plans

pytestmark = pytest.mark.ranks


@pytest.fixture
def session() -> Iterator[gl.Session]:
    with gl.launch(1, 2) as session:
        yield session


def tap_and_meet() -> float:
    x = gl.tap("model.a", torch.full((3,), 1.0 + gl.here().rank))
    dist.all_reduce(x)
    return x.sum().item()


def tap() -> None:
    gl.tap("a", torch.ones(3))


def twice(graft_input: gl.GraftTransformInput) -> torch.Tensor:
    return 2 * graft_input.received_list[0]


def works_as_planned(session: gl.Session) -> None:
    run = session.run(tap, tap_and_meet)
    assert run.target == [12.0, 12.0]
    assert run.frame[["status", "plan_version"]].values.tolist() == [["grafted", session.plan.version]] * 2


def test_a_restart_brings_back_ranks_and_plan_and_runs_nothing(session: gl.Session) -> None:
    session.edit(b2t="name in ('a', 'model.a')", transform=twice, rename={"target": {"^model\\.": ""}})
    session.execute("kept = 1", on="both")
    works_as_planned(session)
    rows, plan, before = session.row_count, session.plan, watch(rank.pid for rank in session.ranks if rank.pid)
    os.kill(session.ranks[1].pid or 0, signal.SIGKILL)
    wait_until(lambda: session.lost_groups, "the news of the death")
    assert "the group of the target is gone" in repr(session)
    assert session.status()["state"].tolist() == ["idle", "gone: killed by SIGKILL", "idle; its group is gone"]
    assert "target is gone (target[0] killed by SIGKILL)" in session._repr_mimebundle_()["text/html"]
    with pytest.raises(
        gl.SessionClosedError, match=r"target\[0\] is gone \(killed by SIGKILL\) .*session\.restart\(\)"
    ):
        session.run(target="1")
    session.restart()
    assert still_there(before) == []
    assert (session.row_count, session.plan, session.lost_groups) == (rows, plan, {})
    wait_until(lambda: len(session.adopted(plan.version)) == 3, "the plan on the new ranks")
    assert session.status()["state"].tolist() == ["idle"] * 3
    works_as_planned(session)
    with pytest.raises(gl.RunError, match="NameError"):
        session.run(target="kept")
    frame = session.frame
    assert frame["run"].is_monotonic_increasing
    assert frame.groupby("run")["step"].agg(["min", "max"]).values.tolist() == [[1, 1], [2, 2]]
    assert len(gl.load_run(session.folder)) == len(frame) == 4


def test_restarted_ranks_begin_with_the_newest_plan(session: gl.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = session.edit(b2t="name == 'a'")
    with monkeypatch.context() as patch:
        # However late the notebook tells its ranks of plans.
        patch.setattr(Plans, "publish_again", lambda self: None)
        session.restart()
        assert session.status()[["state", "plan_version"]].values.tolist() == [["idle", plan.version]] * 3
        assert session.status()["step"].isna().all(), "no step has begun, and none is -1"
    assert set(session.run(tap, tap).frame["status"]) == {"grafted"}
    wait_until(lambda: len(session.adopted(plan.version)) == 3, "what the ranks say of the plan that they began with")


def test_steps_of_a_run_that_a_restart_ended_are_not_used_again(session: gl.Session) -> None:
    def loop() -> None:
        while True:
            tap()
            gl.step()

    run = session.start(loop, loop).wait_steps(5)
    session.restart()
    with pytest.raises(gl.RunError, match=r"died: the session was restarted"):
        run.wait(60)
    last = run.frame["step"].max()
    assert session.run(tap, tap).frame["step"].min() > last


def test_a_rank_in_a_collective_is_ended_when_its_peer_has_failed(session: gl.Session) -> None:
    def meet() -> None:
        if gl.here().rank == 1:
            raise ZeroDivisionError("planted")
        dist.all_reduce(torch.ones(1))

    run = session.start(target=meet)
    with pytest.raises(gl.RunError) as told:
        run.wait()
    text = str(told.value)
    assert run.done
    assert text.index("target[1] raised ZeroDivisionError: planted") < text.index(
        "target[0] was ended, because it waited in a collective ("
    )
    assert "dist.all_reduce(torch.ones(1))) after target[1] had failed" in text
    assert text.count("it waited in a collective") == 1
    assert "The process group of the target is gone: its collectives fail from now on" in text
    with pytest.raises(gl.SessionClosedError, match=r"target\[0\] is gone \(was ended, because") as refused:
        session.run(target="1")
    assert "Its log" not in str(refused.value), "which says nothing of an end from outside"
    assert isinstance(told.value.__cause__, ZeroDivisionError)
    assert session.run(baseline="1").baseline == [1]
    session.restart()
    assert session.run(target=tap_and_meet, baseline=tap).target == [9.0, 9.0]


def test_a_collective_that_timed_out_is_reported_as_a_lost_group() -> None:
    def wait_alone() -> None:
        if gl.here().rank == 0:
            dist.recv(torch.ones(1), 1)

    with gl.launch(1, 2, timeout=5) as session:
        with pytest.raises(gl.RunError, match=r"process group of the target is gone \(a collective failed on target.0"):
            session.run(target=wait_alone)
        assert session.status()["state"].tolist()[1:] == ["idle; its group is gone"] * 2


def test_a_restart_that_fails_leaves_a_session_that_can_be_read_restarted_and_closed(
    session: gl.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.run(tap, tap)

    def full(*what: object) -> None:
        raise gl.LaunchError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(core, "launch_ranks", full)
        with pytest.raises(gl.LaunchError, match="planted"):
            session.restart()
    assert len(session.frame) == 2
    with pytest.raises(gl.SessionClosedError, match=r"session\.restart\(\)"):
        session.run(target="1")
    session.restart()
    assert session.run(target="1").target == [1, 1]
    session.close()
    assert session.status()["state"].tolist() == ["closed"] * 3
    with pytest.raises(gl.SessionClosedError):
        session.restart()


def test_restarts_leave_no_descriptor_behind(session: gl.Session) -> None:
    session.restart()
    before = len(descriptors())
    session.restart()
    # What another test left to be closed may have gone meanwhile.
    assert len(descriptors()) <= before
