"""The memory of a notebook while rows arrive for half an hour, most of them only on disk.

``GRAFTLAB_SOAK_MINUTES`` says for how long; the figures go to ``build/soak-memory.json``.
"""

from __future__ import annotations

import gc
import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from kit.support import wait_until

import graftlab as gl

MINUTES = float(os.environ.get("GRAFTLAB_SOAK_MINUTES", "2"))
FIGURES = Path(__file__).resolve().parents[1] / "build" / "soak-memory.json"

pytestmark = [pytest.mark.soak, pytest.mark.timeout(0)]

TAPS, STEPS_A_MINUTE, SAMPLES = 20, 450, 60
KEEP_ROWS = 2_000
# What the memory may gain in MiB; the rows of half an hour would take 140.
WANDERS = 24


def tap_slowly(steps: int) -> int:
    rest = threading.Event()
    for step in range(steps):
        for layer in range(TAPS):
            gl.tap("x", torch.full((64,), float(step)), layer=layer)
        gl.step()
        rest.wait(60 / STEPS_A_MINUTE)
    return steps


def resident() -> float:
    """How many MiB this process has, those of files and of shared memory left out."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))


def test_a_notebook_that_keeps_few_rows_does_not_grow_with_those_that_come() -> None:
    steps = round(MINUTES * STEPS_A_MINUTE)
    figures: list[tuple[int, float]] = []
    with gl.launch(1, 1, keep_rows=KEEP_ROWS) as session:
        run = session.start(tap_slowly, tap_slowly, args=(steps,))
        for number in range(SAMPLES):
            run.wait_steps(steps * number // SAMPLES)
            assert len(session.status()) == 2
            if number == SAMPLES // 10:
                # It reads all rows so far, and forgets them. What it leaves with the allocator grows with its length.
                assert session.frame["rel_l2"].max() == 0
            gc.collect()
            figures.append((session.row_count, resident()))
        run.wait()
        wait_until(lambda: session.row_count == steps * TAPS, "all rows")
        figures.append((session.row_count, resident()))
        frame = session.frame
        assert (frame["status"] == "compared").all()
        assert frame.groupby("layer")["step"].nunique().tolist() == [steps] * TAPS
        held = resident()
        del frame
        gc.collect()
        after = resident()
        assert len(gl.load_run(session.folder)) == steps * TAPS
    FIGURES.parent.mkdir(exist_ok=True)
    FIGURES.write_text(
        json.dumps({"minutes": MINUTES, "with a frame of all": held, "after it": after, "rows": figures}) + "\n"
    )
    memory = np.array([each for _, each in figures])
    assert np.median(memory[-10:]) - np.median(memory[SAMPLES // 10 + 2 :][:10]) < WANDERS, figures
