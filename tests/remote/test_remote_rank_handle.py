"""The notebook's handle of a rank elsewhere: its end, its log, and the wait when a machine with many has vanished."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from kit import processes
from kit.mailboxes import DEADLINE, in_background
from kit.refusals import exactly

from graftlab.base.world import Place
from graftlab.ranks.devices import DeviceAssignment
from graftlab.remote import rank_supervisor, remote_rank_handle
from graftlab.remote.rank_supervisor import RankEnd, RankSupervisor
from graftlab.remote.remote_rank_handle import EndPatience, RemoteRankHandle


class Clock:
    """A clock that only the waits of :class:`Silence` move, in seconds."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class Silence:
    """A process whose machine has vanished: every question about it takes as long as it may."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def start(self, spec: bytes) -> None: ...

    def end(self, timeout: float) -> RankEnd | str | None:
        self.clock.now += timeout
        return None

    def log_tail(self, timeout: float) -> bytes:
        self.clock.now += timeout
        return b""

    def signal(self, number: int) -> None: ...

    def release_in_child(self) -> None: ...


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(remote_rank_handle, "time", made)
    return made


@pytest.fixture
def lost(clock: Clock, tmp_path: Path) -> Iterator[list[RemoteRankHandle]]:
    """The handles of eight ranks that had joined, and whose connections have ended."""
    patience = EndPatience()
    made = [
        RemoteRankHandle(Place("target", number, 1, 8), tmp_path, Silence(clock), patience, lambda rank: None)
        for number in range(8)
    ]
    for rank in made:
        rank.assign_process(1, DeviceAssignment("cpu", "gloo"))
        rank.take_ends()[0].close()
        rank.alive = False
    yield made
    for rank in made:
        rank.release()


def test_the_ranks_of_a_vanished_machine_are_waited_for_one_second_in_all(
    lost: list[RemoteRankHandle], clock: Clock
) -> None:
    for rank in lost:
        assert rank.how_it_ended() == "closed its connection, or its machine is gone"
        assert rank.log_tail() == "(nothing, or its machine cannot be reached)"
    assert clock.now == 101.0


def test_ranks_that_end_later_are_waited_for_again(lost: list[RemoteRankHandle], clock: Clock) -> None:
    lost[0].how_it_ended()
    assert clock.now == 101.0
    clock.now += 4.0
    lost[1].how_it_ended()
    assert clock.now == 105.0
    clock.now += 2.0
    lost[2].how_it_ended()
    assert clock.now == 108.0


class Running:
    """A process whose end and output the test sets; it notes what it was asked."""

    def __init__(self) -> None:
        self.ended: RankEnd | str | None = None
        self.output = b""
        self.signals: list[int] = []
        self.limits: list[float] = []

    def start(self, spec: bytes) -> None: ...

    def end(self, timeout: float) -> RankEnd | str | None:
        return self.ended

    def log_tail(self, timeout: float) -> bytes:
        self.limits.append(timeout)
        return self.output

    def signal(self, number: int) -> None:
        self.signals.append(number)

    def release_in_child(self) -> None: ...


@pytest.fixture
def released() -> list[RemoteRankHandle]:
    return []


@pytest.fixture
def process() -> Running:
    return Running()


@pytest.fixture
def rank(process: Running, released: list[RemoteRankHandle], tmp_path: Path) -> Iterator[RemoteRankHandle]:
    made = RemoteRankHandle(Place("target", 0, 1, 1), tmp_path, process, EndPatience(), released.append)
    yield made
    made.release()


def join(rank: RemoteRankHandle) -> None:
    rank.assign_process(1, DeviceAssignment("cpu", "gloo"))
    rank.take_ends()[0].close()


def test_the_log_of_a_running_rank_is_fetched_and_that_of_an_ended_one_kept(
    rank: RemoteRankHandle, process: Running
) -> None:
    join(rank)
    process.output = b"one\ntwo\n\xff"
    assert rank.log_tail(2) == "two\n\N{REPLACEMENT CHARACTER}"
    assert process.limits == [10.0]
    assert rank.log.read_bytes() == process.output
    # A user's output is for that user alone.
    assert rank.log.stat().st_mode & 0o777 == 0o600
    # A machine that does not answer for once leaves what is known.
    process.output = b""
    assert rank.log_tail(1) == "\N{REPLACEMENT CHARACTER}"
    process.ended = RankEnd(3, b"the last line")
    assert rank.log_tail() == "the last line"
    assert rank.log.read_bytes() == b"the last line"
    assert len(process.limits) == 2


def test_a_log_is_shown_although_it_cannot_be_written(rank: RemoteRankHandle, process: Running) -> None:
    rank.log.parent.parent.mkdir(exist_ok=True)
    rank.log.parent.write_text("a file in place of the folder")
    process.output = b"a line"
    assert rank.log_tail() == "a line"


def test_how_a_rank_ended_is_what_its_supervisor_reports(rank: RemoteRankHandle, process: Running) -> None:
    assert (rank.reported, rank.absence(), rank.join(0.0)) == (None, "not started yet", False)
    join(rank)
    process.ended = RankEnd(-9, b"")
    assert (rank.reported, rank.join(0.0)) == ("killed by SIGKILL", True)
    assert rank.absence() == "gone: killed by SIGKILL"
    # The first report stands.
    process.ended = "ended with its Ray actor: it died"
    assert rank.how_it_ended() == "killed by SIGKILL"


def test_a_rank_that_the_session_ended_says_why(rank: RemoteRankHandle, process: Running) -> None:
    join(rank)
    rank.end("was stuck")
    process.ended = RankEnd(-9, b"")
    assert (process.signals, rank.absence()) == ([9], "gone: was stuck")


def test_the_output_of_a_rank_that_has_not_joined_is_waited_for(rank: RemoteRankHandle, process: Running) -> None:
    rank.alive = False
    for _ in range(2):
        rank.log_tail()
    assert process.limits == [10.0, 10.0]


def test_a_rank_whose_supervisor_is_gone_has_its_words(rank: RemoteRankHandle, process: Running) -> None:
    join(rank)
    process.ended = "ended with its Ray actor: it died"
    assert rank.how_it_ended() == "ended with its Ray actor: it died"


def test_only_a_rank_that_lives_is_signalled_and_any_is_killed(rank: RemoteRankHandle, process: Running) -> None:
    rank.signal(2)
    assert process.signals == []
    join(rank)
    rank.signal(2)
    rank.alive = False
    rank.kill()
    assert process.signals == [2, 9]


def test_a_rank_is_released_once(rank: RemoteRankHandle, process: Running, released: list[RemoteRankHandle]) -> None:
    join(rank)
    process.ended = RankEnd(0, b"the end")
    rank.release()
    rank.release()
    assert released == [rank]
    # Its report was read before its machine was given back.
    assert not rank.alive
    assert (rank.how_it_ended(), rank.log.read_bytes()) == ("ended with exit code 0", b"the end")


def test_a_supervisor_reports_the_end_with_what_the_process_wrote_last(monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor, closed = RankSupervisor(), []

    def join(limit: float) -> None:
        # Programs with their own session may keep the pipe open.
        assert limit == 2.0
        cast("Any", supervisor)._tail.extend(b"ValueError: shapes")

    def start(spec: bytes) -> None:
        made: Any = supervisor
        made._process = SimpleNamespace(wait=lambda: 3, pid=7)
        made._death_pipe = SimpleNamespace(close=lambda: closed.append(spec))
        # The process has ended, and its pipe still has the rest.
        made._reader = SimpleNamespace(join=join)

    monkeypatch.setattr(supervisor, "_start", start)
    ended: list[int] = []
    monkeypatch.setattr(rank_supervisor, "end_programs_of", ended.append)
    assert supervisor.run(b"spec") == RankEnd(3, b"ValueError: shapes")
    assert (ended, closed) == ([7], [b"spec"])


def test_a_rank_is_given_its_specification_and_a_session_that_ends_with_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "rank"
    # Its descriptor, its session, its input, and a program that would keep its output open.
    program.write_text(
        """#!/bin/sh
        test -S /proc/$$/fd/$3 && echo connected >&2
        test $(cut -d' ' -f6 /proc/$$/stat) = $$ && echo leads
        cat
        sleep 60 & echo " $!"
        exit 3
        """
    )
    program.chmod(0o700)
    monkeypatch.setattr(rank_supervisor, "sys", SimpleNamespace(executable=str(program), path=["a", "b"]))
    end = RankSupervisor().run(b"spec")
    text, _, pid = end.tail.decode().rpartition(" ")
    assert (end.code, text) == (3, 'connected\nleads\n["a", "b"]\nspec')
    assert processes.still_there(processes.watch([int(pid)])) == []


def test_a_rank_that_ends_before_it_reads_shows_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "rank"
    program.write_text("#!/bin/sh\nexec 0<&-\necho no torch\n")
    program.chmod(0o700)
    monkeypatch.setattr(rank_supervisor, "sys", SimpleNamespace(executable=str(program), path=["a", "b"]))
    # More than a pipe holds.
    assert RankSupervisor().run(bytes(1 << 20)) == RankEnd(0, b"no torch\n")


def test_a_supervisor_keeps_the_last_mib_of_the_output() -> None:
    supervisor = RankSupervisor()
    with pytest.raises(RuntimeError, match=exactly("this rank has not been started")):
        supervisor.signal(9)
    lines = b"".join(b"%07d\n" % number for number in range(400_000))
    read, write = os.pipe()

    def fill() -> None:
        with open(write, "wb") as pipe:
            pipe.write(lines)

    filler = in_background(fill)
    with open(read, "rb") as output:
        supervisor._read_output(SimpleNamespace(stdout=output))  # type: ignore[arg-type]
    filler.result(DEADLINE)
    assert supervisor.log_tail() == lines[-(1 << 20) :]
    assert len(supervisor._tail) <= 2 << 20
