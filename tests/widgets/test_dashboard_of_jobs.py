"""The dashboard of a session that listens for jobs: which process has a place, and how often a side was started."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from kit.pages import Browser, Screen
from kit.support import wait_until

import graftlab as gl
from graftlab.control.core import internals_of
from graftlab.exchange.channel import SocketChannel
from graftlab.jobs.attached_rank_handle import AttachedRankHandle
from graftlab.jobs.session_server import SessionServer
from graftlab.ranks.devices import DeviceAssignment
from graftlab.ranks.messages import LinkReport, WorldSwitch
from graftlab.widgets.refresher import refresher_of


class Jobs:
    """A rank of each side, for which the test speaks."""

    def __init__(self, session: gl.Session) -> None:
        self.session = session
        self.ranks = cast("list[AttachedRankHandle]", session.ranks)
        # The session only has the method that closes it.
        closes: Any = internals_of(session).close_first
        self.server: SessionServer = closes.__self__
        self._ends: dict[int, SocketChannel] = {}

    def come(self, *numbers: int) -> None:
        """A new process takes each of these places; then all have their connections."""
        membership = self.server._membership
        with self.server._lock:
            for number in numbers:
                rank = self.ranks[number]
                if rank.has_joined:
                    rank.renew()
                    internals_of(self.session).jobs.hub.add(rank)
                rank.assign_process(1000 + number, DeviceAssignment("cpu", "none"))
                line, wake = rank.take_ends()
                self._ends[number] = SocketChannel(line)
                wake.close()
                membership.enter(rank, None, None)
            for number in numbers:
                membership.note_ready(self.ranks[number])
            for number, rank in enumerate(self.ranks):
                membership.share_of(rank, membership._world)
                membership.note_linked(rank, LinkReport(membership._world, (1 - number,), ()))

    def move(self, number: int, step: int) -> None:
        """Move a remaining rank to the new world after this step."""
        with self.server._lock:
            self.server._membership.note_moved(self.ranks[number], WorldSwitch(self.server._membership._world, step))

    def die(self, number: int) -> None:
        self._ends.pop(number).close()
        wait_until(lambda: not self.server._membership.is_at_work(self.ranks[number]), "word of its death")

    def close(self) -> None:
        for end in self._ends.values():
            end.close()


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    with gl.listen(1, 1, folder=tmp_path / "run") as session:
        made = Jobs(session)
        yield made
        made.close()


@pytest.fixture
def board(jobs: Jobs, simulated: Browser, monkeypatch: pytest.MonkeyPatch) -> Iterator[Screen]:
    """A dashboard, which is only refreshed when the test does it."""
    monkeypatch.setattr(refresher_of(jobs.session), "interval", 1000)
    made = jobs.session.dashboard()
    yield Screen(simulated, made)
    made.close()


def test_a_restarted_side_shows_its_generation_in_its_line(jobs: Jobs, board: Screen) -> None:
    def shown() -> list[tuple[str, str]]:
        """What stands for each rank, and its state."""
        board.panel.refresh()
        return [(line[0], line[3]) for line in board.lines("ranks")]

    assert shown() == [("baseline[0]", "not joined yet"), ("target[0]", "not joined yet")]
    jobs.come(0, 1)
    assert shown() == [("baseline[0]", "idle"), ("target[0]", "idle")]
    gone = "gone: left, or its process ended; its job can be started again"
    for generation in (2, 3):
        jobs.die(1)
        assert shown()[1][1] == gone
        jobs.come(1)
        jobs.move(0, step=100 * generation)
        assert shown() == [("baseline[0]", "idle"), (f"target[0], generation {generation}", "idle")]
    # And so in what stays in the notebook.
    assert ">target[0], generation 3</td>" in board.panel.static_html()
