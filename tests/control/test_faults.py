"""What goes wrong on the ranks, on the disk or in the notebook: it is told at once, and costs no more than itself."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from kit.support import wait_until

import graftlab as gl

pytestmark = pytest.mark.ranks


def test_an_evaluation_in_inference_mode_leaves_later_taps_alone() -> None:
    def run(inference: bool) -> None:
        with torch.inference_mode(inference):
            gl.tap("a", torch.ones(3))

    with gl.launch(1, 1) as session:
        for inference in (True, False):
            frame = session.run(run, run, args=(inference,)).frame
            assert frame[["status", "rel_l2"]].values.tolist() == [["compared", 0.0]]


# ---- one rank fails while others go on ------------------------------------------------------------------------------


def loop_forever() -> None:
    while True:
        gl.step()


def fail() -> None:
    raise ZeroDivisionError("planted")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def two_targets() -> Iterator[gl.Session]:
    with gl.launch(1, 2) as session:
        yield session


def test_the_first_failure_stops_the_others_and_is_told_first(two_targets: gl.Session) -> None:
    run = two_targets.start(loop_forever, lambda: fail() if gl.here().rank == 1 else loop_forever())
    with pytest.raises(gl.RunError) as told:
        run.wait()
    assert run.done
    text = str(told.value)
    assert text.index("target[1] raised ZeroDivisionError: planted") < text.index(
        "baseline[0], target[0] was interrupted, because target[1] failed"
    )
    assert isinstance(told.value.__cause__, ZeroDivisionError)
    assert two_targets.run("1", "2").target == [2, 2]


def test_a_failure_is_shown_while_the_others_are_left_to_go_on(two_targets: gl.Session) -> None:
    run = two_targets.start(loop_forever, fail, on_failure="continue")
    wait_until(lambda: len(two_targets.failing) == 2, "the news of the failure")
    assert two_targets.failing["target[0]"] == "ZeroDivisionError: planted"
    with pytest.raises(
        TimeoutError, match=r"target\[0\]: failed: ZeroDivisionError: planted.*baseline\[0\]: computing"
    ):
        run.wait(0.5)
    assert "target[1]: failed: ZeroDivisionError" in repr(run)
    assert two_targets.status()["state"].tolist()[1:] == ["failed: ZeroDivisionError: planted"] * 2
    assert "failed: ZeroDivisionError" in two_targets._repr_mimebundle_()["text/html"]
    two_targets.interrupt()
    with pytest.raises(gl.RunError, match="ZeroDivisionError"):
        run.wait()
    with pytest.raises(gl.SessionError, match="on_failure='no'"):
        two_targets.start("1", "1", on_failure="no")


def test_a_rank_in_a_collective_does_not_hold_up_what_its_peer_raised(two_targets: gl.Session) -> None:
    def meet() -> None:
        if gl.here().rank == 1:
            fail()
        dist.all_reduce(torch.ones(1))

    run = two_targets.start(target=meet)
    with pytest.raises(gl.RunError) as told:
        run.wait()
    assert str(told.value).index("ZeroDivisionError: planted") < str(told.value).index("not ended yet")
    assert "target[0]: computing" in str(told.value)
    assert not run.done


def test_a_dead_rank_is_told_while_others_go_on() -> None:
    with gl.launch(1, 1) as session:
        run = session.start(loop_forever, die, on_failure="continue")
        wait_until(lambda: session.failing, "the news of the death")
        with pytest.raises(TimeoutError, match=r"target\[0\]: failed: killed by SIGKILL"):
            run.wait(0.2)
        session.interrupt()
        with pytest.raises(gl.RunError, match=r"target\[0\] died: killed by SIGKILL"):
            run.wait()
    with gl.launch(1, 1) as session, pytest.raises(gl.RunError, match=r"baseline.* was interrupted, because target.*"):
        session.run(loop_forever, die)
