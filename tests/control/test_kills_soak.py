"""Ranks that are killed at random moments inside runs, on a machine that is busy; figures go to ``build/kills.json``.

A moment is a number of calls that a rank has made in graftlab, or a number of rows that have arrived; none is a time.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pandas as pd
import pytest
import torch
from kit.deadline import DEADLINE
from kit.mailboxes import in_background
from kit.processes import shared_memory_left, still_there, watch
from kit.support import wait_until

import graftlab as gl
from graftlab.verdict.conclusion import conclude

pytestmark = [pytest.mark.ranks, pytest.mark.soak, pytest.mark.timeout(3600)]

KILLS, SEED = 50, 1
FIGURES = Path(__file__).resolve().parents[2] / "build" / "kills.json"
LAYERS, PLANTED = 6, 3
NAMED = ["part d"]
PACKAGE = str(Path(gl.__file__).parent)


def die_at(count: int) -> None:
    """Let this process be killed when this thread has entered or left this many functions from graftlab's code."""
    left = count

    def look(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal left
        if frame.f_code.co_filename.startswith(PACKAGE):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(look)


def step_for_ever(victim: str | None, count: int) -> None:
    """Taps of which one differs, each with values that tell its step; the victim dies inside."""
    me = gl.here()
    assert me is not None
    if f"{me.side}[{me.rank}]" == victim:
        die_at(count)
    number = 0
    while True:
        for layer in range(LAYERS):
            wrong = layer == PLANTED and me.side == "target"
            # Of many sizes, so that some are in one frame with their tap and others in shared memory.
            x = torch.full((1 + layer * 20_000,), float(1 + number)) * (0.5 if wrong else 1.0)
            gl.tap("x", x, layer=layer)
        gl.step()
        number += 1


def model(x: torch.Tensor) -> torch.Tensor:
    me = gl.here()
    assert me is not None
    for layer in range(LAYERS):
        x = torch.tanh(x) * (0.5 if layer == PLANTED and me.side == "target" else 1.0) + 1
        x = gl.tap(f"part {'abcdef'[layer]}", x)
    return x


def die_in_model(x: torch.Tensor, victim: str, count: int) -> torch.Tensor:
    me = gl.here()
    assert me is not None
    if f"{me.side}[{me.rank}]" == victim:
        die_at(count)
    return model(x)


@contextmanager
def busy_machine() -> Iterator[None]:
    """Processes that compute without end, one for each processor."""
    burn = f"import os\nos.nice(2)\nwhile os.getppid() == {os.getpid()}: sum(range(10 ** 6))"
    burning = [subprocess.Popen([sys.executable, "-c", burn]) for _ in os.sched_getaffinity(0)]
    try:
        yield
    finally:
        for process in burning:
            process.kill()
            process.wait()


def require_nothing_wrong(frame: pd.DataFrame) -> None:
    """Every pair that was compared or grafted is of one step, and nothing but the planted layer is called different."""
    assert not frame.duplicated(["run", "step", "name", "layer", "side", "rank"]).any()
    measured = frame[frame["status"].isin(["compared", "grafted"])]
    planted = measured["layer"] == PLANTED
    assert (measured[~planted]["max_abs"] == 0).all()
    assert set(measured[planted]["rel_l2"]) <= {0.5}
    assert set(frame["status"]) <= {"compared", "grafted", "missing", "unmatched", "failed"}
    # One of two senders is dead, or the death of another rank has ended its run.
    failed = frame[frame["status"] == "failed"]
    assert failed["error"].str.contains("which was not sent").all()
    known = failed["note"].str.contains(r"\[[01]\] (?:died|ended the (?:run|step) without this tap)")
    assert known.all(), failed.loc[~known.astype(bool), "note"].unique()
    found = conclude(frame, [])
    if found.first is not None:
        assert found.lines[found.first].row.tags["layer"] == PLANTED
    if planted.any():
        # A rank that died may leave each planted tap without a measured row in its newest step.
        assert found.first is not None or found.earlier


def test_kills_at_fifty_random_moments_of_runs_free_the_others_and_spoil_nothing() -> None:
    chance = random.Random(SEED)
    shared = set(os.listdir("/dev/shm"))
    freed: list[dict[str, Any]] = []
    counted = 0
    with busy_machine(), gl.launch(2, 2, plan=gl.GraftPlan(b2t="layer == 1", t2b="layer == 2")) as session:
        everyone = watch(rank.pid for rank in session.ranks if rank.pid)
        for _ in range(KILLS):
            victim = chance.choice(session.ranks)
            pid = victim.pid
            assert pid is not None
            end = os.pidfd_open(pid)
            from_outside, calls, rows = chance.random() < 0.4, chance.randrange(1, 40_000), chance.randrange(1, 600)
            before = session.row_count
            run = session.start(step_for_ever, step_for_ever, args=(None if from_outside else victim.label, calls))
            if from_outside:
                wait_until(lambda rows=before + rows: session.row_count >= rows, "rows")
                os.kill(pid, signal.SIGKILL)
            assert select.select([end], [], [], DEADLINE)[0], "it was not killed"
            os.close(end)
            began = time.monotonic()
            with pytest.raises(gl.RunError) as caught:
                run.wait(DEADLINE)
            freed.append(
                {"victim": victim.label, "rows": len(run.frame), "seconds": round(time.monotonic() - began, 3)}
            )
            assert f"{victim.label} died: killed by SIGKILL" in str(caught.value)
            require_nothing_wrong(run.frame)
            counted += len(run.frame)
            session.restart()
            everyone |= watch(rank.pid for rank in session.ranks if rank.pid)
        assert len(gl.load_run(session.folder)) == session.row_count == counted
    require_nothing_wrong(gl.load_run(session.folder))
    assert still_there(everyone) == []
    assert shared_memory_left(shared) == set()
    assert "memfd:graftlab" not in Path("/proc/self/maps").read_text()
    FIGURES.parent.mkdir(exist_ok=True)
    FIGURES.write_text(json.dumps({"slowest": max(each["seconds"] for each in freed), "kills": freed}) + "\n")


def test_a_kill_inside_a_verdict_clears_nothing() -> None:
    chance = random.Random(SEED)
    x, killed = torch.linspace(-1, 1, 1000), 0
    with busy_machine(), gl.launch(1, 2) as session:
        for _ in range(8):
            told = (x, chance.choice(session.ranks).label, chance.randrange(1, 8_000))
            outcome = in_background(lambda told=told: session.verdict(die_in_model, die_in_model, args=told))
            failure = outcome.exception(4 * DEADLINE)
            if failure is None:
                found = outcome.result()
                # It was over before the count was, or a first run shows a difference, and what is missing is stated.
                assert found.named == NAMED or found.findings.unexplained, found.text
                assert found.named == NAMED or "failed, so its results are missing" in found.text
                if not all(rank.alive for rank in session.ranks):
                    session.restart()
            else:
                assert isinstance(failure, gl.GraftError)
                assert "killed by SIGKILL" in str(failure)
                killed += 1
                session.restart()
            assert session.plan.b2t is None
        assert session.verdict(model, model, args=(x,)).named == NAMED
    assert killed > 4
