"""Machines whose clocks differ, and are set while a session runs: nothing waits, is ordered or is judged by them."""

from __future__ import annotations

import random
import re
import socket
import time
from pathlib import Path

import pandas as pd
import pytest
import torch
from kit import warm
from kit.deadline import DEADLINE
from kit.job_scripts import SCRIPTS, end, start, variables
from kit.support import shorten_waits, wait_until

import graftlab as gl
from graftlab.exchange.keys import new_token, write_token

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]


def rows_of(folder: Path) -> int:
    path = folder / "rows.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def more_rows(folder: Path, count: int) -> None:
    before = rows_of(folder)
    wait_until(lambda: rows_of(folder) >= before + count, "rows", 4 * DEADLINE)


def require_rows_in_order(frame: pd.DataFrame) -> None:
    """Check that the tensors of each step met, and that the steps are in order."""
    met = frame[frame["status"].isin(["compared", "grafted"])]
    assert len(met) >= 20
    assert (met["max_abs"] == met["step"] + 1).all()
    assert frame["step"].is_monotonic_increasing


def test_jobs_whose_clocks_differ_and_are_set_meanwhile_pair_and_a_kill_frees_one(tmp_path: Path) -> None:
    write_token(tmp_path / "token", new_token())
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    jobs: list[warm.Running] = []
    for role, hour, scale in (("baseline", 3600, 2.0), ("target", -3600, 1.0)):
        told = variables(
            *(role, 1, 1),
            address=f"tcp://127.0.0.1:{port}",
            token_file=tmp_path / "token",
            t2b_filter="True",
            compare_filter="",
            timeout=4 * DEADLINE,
            run_dir=tmp_path / "run",
        )
        jobs.append(start("clocks.py", hour, SCRIPTS / "counts.py", tmp_path / "stop", scale, **told))
    run = tmp_path / "run"
    more_rows(run, 40)
    jobs[1].kill()
    # Each wait for it would take minutes.
    more_rows(run, 20)
    (tmp_path / "stop").touch()
    assert end(jobs[0])[:2] == (0, "counted True True\n")
    end(jobs[1])
    frame = gl.load_run(run)
    assert set(frame["status"]) <= {"grafted", "missing", "unmatched"}
    require_rows_in_order(frame)
    # The clock was as wrong as it was to be.
    logged = re.findall(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),.* grafted", log_of(run), re.MULTILINE)
    assert pd.Timedelta(max(map(pd.Timestamp, logged)) - min(map(pd.Timestamp, logged))) > pd.Timedelta(hours=1)


def log_of(run: Path) -> str:
    return (run / "logs" / "baseline-0.log").read_text()


def wrong_model(x: torch.Tensor) -> torch.Tensor:
    """Taps on a rank whose clock is set at each tap."""
    me, right, chance = gl.here(), time.time, random.Random(0)
    assert me is not None
    time.time = lambda: right() + chance.uniform(-86_400, 86_400)
    try:
        for name in "abc":
            x = gl.tap(name, torch.tanh(x) * (1.5 if name == "b" and me.side == "target" else 1.0))
        return x
    finally:
        time.time = right


def wait_in_vain() -> None:
    shorten_waits(1.0)
    right, chance = time.time, random.Random(1)
    time.time = lambda: right() + chance.uniform(-86_400, 86_400)
    try:
        gl.tap("here alone", torch.ones(3))
    finally:
        time.time = right


def test_clocks_set_while_a_verdict_is_made_change_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    right, chance = time.time, random.Random(2)
    with gl.launch(1, 1) as session:
        monkeypatch.setattr(time, "time", lambda: right() + chance.uniform(-86_400, 86_400))
        verdict = session.verdict(wrong_model, wrong_model, args=(torch.linspace(-1, 1, 100),))
        assert verdict.named == ["b"]
        taps = session.frame[session.frame["name"].isin(list("abc"))]
        for _, step in taps.groupby("step"):
            assert step["name"].tolist() == sorted(step["name"])


def test_a_wait_ends_by_its_limit_whatever_the_clock_is_set_to(tmp_path: Path) -> None:
    go = tmp_path / "go"

    def later() -> None:
        wait_until(go.exists, "the end of the wait")

    with gl.launch(1, 1) as session:
        run = session.start(later, wait_in_vain)
        wait_until(lambda: session.row_count == 1, "the end of the wait")
        go.touch()
        run.wait()
        assert run.frame["status"].tolist() == ["timeout"]
