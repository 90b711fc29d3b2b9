"""What only shows after many repetitions: sessions that come and go, and ranks that are killed at any moment."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path

import pytest
import torch
from kit.support import wait_until

import graftlab as gl

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]


def many_taps() -> int:
    for step in range(10_000):
        for layer in range(8):
            gl.tap("x", torch.full((64,), float(step)), layer=layer)
        gl.step()
    return step


def test_a_million_lines_that_a_transform_prints_hold_no_run(capsys: pytest.CaptureFixture[str]) -> None:
    def print_much(graft_input: gl.GraftTransformInput) -> torch.Tensor:
        for number in range(1_000_000):
            print("line", number)
        return graft_input.received_list[0]

    def tap() -> float:
        return gl.tap("x", torch.ones(3) * (1 + (gl.here().side == "baseline"))).sum().item()

    with gl.launch(1, 1, plan=gl.GraftPlan(b2t="True", transform=print_much)) as session:
        run = session.run(tap, tap)
        assert run.target == [6.0]
        logged = (session.folder / "logs" / "target-0.log").read_text().splitlines()
    assert [line for line in logged if line.startswith("line ")] == [f"line {number}" for number in range(1_000_000)]
    shown = capsys.readouterr().out.splitlines()
    # A session that keeps up shows them all, as where other work slows the rank down.
    cut = sum("the rest is only in the log of this rank" in line for line in shown)
    assert cut == (sum(line.startswith("target[0] | line ") for line in shown) < 1_000_000)


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").exists() and Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] == "Z"


def test_forty_sessions_whose_ranks_are_killed_at_random_leave_nothing() -> None:
    chance = random.Random(0)
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(40):
        with gl.launch(baseline=chance.choice([1, 2]), target=chance.choice([1, 2])) as session:
            pids = list(session.status()["pid"])
            run = session.start(many_taps, many_taps)
            run.wait_steps(chance.randrange(1, 30))
            if chance.random() < 0.7:
                os.kill(chance.choice(pids), signal.SIGKILL)
                # The others continue alone; what they wait for is free at once.
                wait_until(lambda: any(not rank.alive for rank in session.ranks), "the death to be seen")
        for pid in pids:
            wait_until(lambda pid=pid: gone(pid), f"the end of {pid}")
        assert "memfd:graftlab" not in Path("/proc/self/maps").read_text()
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 8
    assert threading.active_count() < 12
