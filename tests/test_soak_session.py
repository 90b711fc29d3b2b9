"""One session for a long time, edited, interrupted and killed: every row once, one plan a step, nothing grows.

Its figures go to ``build/soak.json``. ``GRAFTLAB_SOAK_TAPS`` says how many taps there are to be.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.support import wait_until

import graftlab as gl

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

FIGURES = Path(__file__).resolve().parents[1] / "build" / "soak.json"
LAYERS, STEPS, RANKS = 20, 25, 2
# Seconds between two kills, and how much the memory of a rank may wander.
KILL_EVERY, WANDERS = 60, 64 << 20


def forward() -> int:
    for step in range(STEPS):
        for layer in range(LAYERS):
            gl.tap("x", torch.full((64,), float(step)), layer=layer)
        gl.step()
    return STEPS


def resident(pid: int | None) -> int:
    """Bytes, those of files and of shared memory left out."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def held(session: gl.Session) -> dict[str, Any]:
    """Memory and descriptors of the notebook and of its ranks."""
    pids = {"notebook": os.getpid(), **{rank.label: rank.pid for rank in session.ranks}}
    return {
        "bytes": {name: resident(pid) for name, pid in pids.items()},
        "descriptors": {name: len(os.listdir(f"/proc/{pid}/fd")) for name, pid in pids.items()},
    }


def test_a_long_session_loses_no_row_mixes_no_plans_and_does_not_grow() -> None:
    wanted = int(os.environ.get("GRAFTLAB_SOAK_TAPS", "200000"))
    chance = random.Random(0)
    done = {"taps": 0, "steps": 0, "edits": 0, "interrupts": 0, "kills": 0}
    began = time.monotonic()
    with gl.launch(RANKS, RANKS) as session:
        # Both ways: a rank that waits for the first time opens what it waits with.
        session.edit(b2t="layer == 0", t2b="layer == 1")
        for _ in range(5):
            session.run(forward, forward)
        start = held(session)
        last_kill = time.monotonic()
        kills = [wanted // 2]
        while done["taps"] < wanted:
            run = session.start(forward, forward)
            kill = time.monotonic() - last_kill > KILL_EVERY or (bool(kills) and done["taps"] >= kills[0])
            interrupt = not kill and chance.random() < 0.05
            for number in range(1, 6):
                run.wait_steps(number * STEPS // 6)
                layer = chance.randrange(LAYERS)
                session.edit(b2t=f"layer == {layer}", t2b=f"layer == {(layer + 1) % LAYERS}")
                done["edits"] += 1
                if number == 3 and interrupt:
                    session.interrupt()
                if number == 3 and kill:
                    os.kill(chance.choice(session.ranks).pid or 0, signal.SIGKILL)
            try:
                run.wait(120)
                ended = not kill
            except gl.RunError:
                assert kill or interrupt
                ended = False
            frame = run.frame
            assert not frame.duplicated(["step", "layer", "side", "rank"]).any()
            assert (frame.groupby("step")["plan_version"].nunique() == 1).all()
            if ended:
                assert len(frame) == STEPS * LAYERS * RANKS
                assert set(frame["status"]) <= {"compared", "grafted"}
                assert (frame["max_abs"] == 0).all()
            done["taps"] += len(frame)
            done["steps"] += frame["step"].nunique()
            done["interrupts"] += interrupt
            if kill:
                wait_until(lambda: any(not rank.alive for rank in session.ranks), "the death to be seen")
                session.restart()
                last_kill, kills = time.monotonic(), kills[1:]
                done["kills"] += 1
                session.run(forward, forward)
        end = held(session)
        assert len(gl.load_run(session.folder)) == session.row_count == len(session.frame)
    FIGURES.parent.mkdir(exist_ok=True)
    figures = {**done, "seconds": round(time.monotonic() - began, 1), "start": start, "end": end}
    FIGURES.write_text(json.dumps(figures, indent=2) + "\n")
    assert end["descriptors"] == start["descriptors"]
    for label, before in start["bytes"].items():
        # The notebook holds the rows, which are to grow.
        if label != "notebook":
            assert abs(end["bytes"][label] - before) < WANDERS, label
