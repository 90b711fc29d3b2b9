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
from graftlab.ranks import rank_process, trial_process
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
    ("code", "said"),
    [
        (0, "ended with exit code 0"),
        (3, "ended with exit code 3"),
        (-9, "killed by SIGKILL"),
        (-15, "killed by SIGTERM"),
        (-1000, "ended with exit code -1000"),
        (None, "closed its connection"),
        (255, "ended, by a signal or with exit code 255: the forkserver, which had the exact status, is gone"),
    ],
)
def test_how_a_rank_ended_is_in_words_also_once_it_is_released(code: int | None, said: str, tmp_path: Path) -> None:
    with talking_ranks(tmp_path, 1, 1) as (talking, other):
        talking.process.exitcode = other.process.exitcode = code
        assert talking.rank.how_it_ended() == said
        talking.rank.release()
        assert talking.rank.how_it_ended() == said
        other.rank.end("restarted by the notebook")
        assert other.rank.how_it_ended() == "restarted by the notebook"


def test_a_signal_to_a_rank_that_has_just_ended_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    signals: list[tuple[int, int]] = []

    def kill(pid: int, number: int) -> None:
        signals.append((pid, number))
        if len(signals) == 2:
            raise ProcessLookupError

    monkeypatch.setattr(rank_process.os, "kill", kill)
    with talking_ranks(tmp_path, 1, 1) as (talking, *_):
        rank: Any = talking.rank
        del rank.signal  # that of the stand-in
        rank.pid, rank.alive = 7, True
        rank.signal(2)
        rank.signal(15)
        rank.alive = False
        rank.signal(2)
        rank.pid = None
    assert signals == [(7, 2), (7, 15)]


def test_programs_of_a_rank_are_ended_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process group may get its number later."""
    ended: list[int] = []
    monkeypatch.setattr(rank_process, "end_programs_of", ended.append)
    with talking_ranks(tmp_path, 1, 1) as (talking, *_):
        rank: Any = talking.rank
        del rank.end_programs  # that of the stand-in
        rank.pid = None
        rank.end_programs()
        rank.pid = 7
        rank.end_programs()
        rank.end_programs()
        rank.pid = None
    assert ended == [7]


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
