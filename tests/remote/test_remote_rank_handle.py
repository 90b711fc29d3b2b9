"""What a notebook waits for when a machine with many ranks has vanished."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from graftlab.base.world import Place
from graftlab.ranks.devices import DeviceAssignment
from graftlab.remote import remote_rank_handle
from graftlab.remote.rank_supervisor import RankEnd
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
