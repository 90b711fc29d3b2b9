"""What the notebook's end of a rank's process leaves behind when it is released, and how a trial's process ends."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kit.in_process import talking_ranks
from kit.refusals import exactly

from graftlab.errors import SessionError
from graftlab.plan.plan import GraftPlan
from graftlab.ranks import trial_process
from graftlab.ranks.trial_process import try_in_process


def test_a_release_removes_the_files_of_shared_cuda_memory_of_that_process_alone(tmp_path: Path) -> None:
    # No process has a number that long.
    pid = int(f"{os.getpid()}00000000")
    own, others = Path(f"/dev/shm/torch_{pid}_1_0"), Path(f"/dev/shm/torch_{pid}7_1_0")
    try:
        with talking_ranks(tmp_path, 1, 1) as (talking, *_):
            rank: Any = talking.rank
            rank.pid = pid
            own.touch()
            others.touch()
            rank.release()
            assert [own.exists(), others.exists()] == [False, True]
            # Once released, the number may be another process's.
            own.touch()
            rank.release()
            assert own.exists()
    finally:
        own.unlink(missing_ok=True)
        others.unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("sends", "start_limit", "expected"),
    [
        ([], 0.0, None),
        ([b"ready"], 60.0, "the draft did not end within 0.125 s and was stopped; does it loop forever?"),
    ],
)
def test_a_trial_says_what_it_waited_for(
    sends: list[bytes], start_limit: float, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[Any] = []
    process = SimpleNamespace(pid=None, exitcode=3, kill=lambda: ends.append("killed"), join=ends.append)

    def start(function: Any, arguments: tuple[Connection], name: str) -> Any:
        there = Connection(os.dup(arguments[0].fileno()))
        for each in sends:
            there.send_bytes(each)
        held.append(there)
        return process

    held: list[Connection] = []
    monkeypatch.setattr(trial_process, "start_process", start)
    monkeypatch.setattr(trial_process, "_START_LIMIT", start_limit)
    if expected is None:
        with pytest.raises(SessionError, match=exactly("the process of the trial was not ready within 0 s")):
            try_in_process(None, GraftPlan(), None, "cpu", 0.125)
    else:
        assert try_in_process(None, GraftPlan(), None, "cpu", 0.125).error == expected
    assert ends[0] == "killed"
    held[0].close()


def test_a_trial_whose_process_ends_shows_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    process = SimpleNamespace(pid=None, exitcode=3, kill=lambda: None, join=lambda timeout: None)
    monkeypatch.setattr(trial_process, "start_process", lambda *_: process)
    trial = try_in_process(None, GraftPlan(), None, "cpu", 0.125)
    assert trial.error == "the draft ended its process (exit code 3)"
