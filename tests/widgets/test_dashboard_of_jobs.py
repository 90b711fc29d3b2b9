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
from graftlab.exchange.channel import Channel
from graftlab.jobs.attached_rank import AttachedRank
from graftlab.jobs.host import Host
from graftlab.ranks.devices import DeviceAssignment
from graftlab.ranks.messages import LinkReport, WorldSwitch
from graftlab.widgets.refresher import refresher_of


class Jobs:
    """A rank of each side, for which the test speaks."""

    def __init__(self, session: gl.Session) -> None:
        self.session = session
        self.ranks = cast("list[AttachedRank]", session.ranks)
        # The session knows of it no more than how to end it.
        closes: Any = internals_of(session).close_first
        self.host: Host = closes.__self__
        self._ends: dict[int, Channel] = {}

    def come(self, *numbers: int) -> None:
        """A new process takes each of these places; then all have their connections."""
        gathering = self.host._gathering
        with self.host._lock:
            for number in numbers:
                rank = self.ranks[number]
                if rank.has_joined:
                    rank.renew()
                    internals_of(self.session).jobs.hear(rank)
                rank.hand_over(1000 + number, DeviceAssignment("cpu", "none"))
                line, bell = rank.take_line()
                self._ends[number] = Channel(line)
                bell.close()
                gathering.enter(rank, None, None)
            for number in numbers:
                gathering.greet(self.ranks[number])
            for number, rank in enumerate(self.ranks):
                gathering.share_of(rank, gathering._world)
                gathering.note_linked(rank, LinkReport(gathering._world, (1 - number,), ()))

    def move(self, number: int, step: int) -> None:
        """One that stayed goes on with the new ones, after this step."""
        with self.host._lock:
            self.host._gathering.note_moved(self.ranks[number], WorldSwitch(self.host._gathering._world, step))

    def die(self, number: int) -> None:
        self._ends.pop(number).close()
        wait_until(lambda: not self.host._gathering.is_at_work(self.ranks[number]), "word of its death")

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
