"""The dashboard of a session that listens for jobs: which process has a place, and how often a side was started."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from kit.deadline import DEADLINE
from kit.pages import Browser, Screen
from kit.support import wait_until

import graftlab as gl
from graftlab.control.core import internals_of
from graftlab.exchange.channel import SocketChannel
from graftlab.jobs.attached_rank_handle import AttachedRankHandle
from graftlab.jobs.session_server import SessionServer
from graftlab.ranks.devices import DeviceAssignment
from graftlab.ranks.messages import LinkReport, WorldSwitch
from graftlab.widgets import dashboard
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
def arrives_on() -> str:
    # The editors and test_snapshot have both.
    return "another thread"


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


# ---- the verdict, whose judging a test stands for --------------------------------------------------------------------


class Judging:
    """Stands for ``judge``: it notes what is asked, and ends as the test wants, or once it is stopped."""

    def __init__(self) -> None:
        self.asked: list[tuple[str | None, str | None]] = []
        self.began = threading.Event()
        self.waits = False
        self.error: Exception | None = None

    def __call__(self, session: gl.Session, request: Any) -> Judging:
        self.asked.append((request.baseline, request.target))
        self.began.set()
        if self.waits and request.stop.wait(DEADLINE):
            raise KeyboardInterrupt("the verdict was stopped in run 3")
        if self.error is not None:
            raise self.error
        return self

    def _repr_mimebundle_(self) -> dict[str, str]:
        return {"text/html": f"<b>found {len(self.asked)}</b>"}


@pytest.fixture
def judging(monkeypatch: pytest.MonkeyPatch) -> Judging:
    made = Judging()
    monkeypatch.setattr(dashboard, "judge", made)
    return made


@pytest.fixture
def screen(
    jobs: Jobs, simulated: Browser, judging: Judging, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Screen]]:
    """Opens the dashboard, of ranks that evaluate expressions if ``takes_work``."""
    made: list[Any] = []

    def open_it(takes_work: bool = True) -> Screen:
        monkeypatch.setattr(AttachedRankHandle, "takes_work", takes_work)
        monkeypatch.setattr(refresher_of(jobs.session), "interval", 1000)
        made.append(jobs.session.dashboard())
        return Screen(simulated, made[-1])

    yield open_it
    for each in made:
        each.close()


def test_jobs_are_judged_by_their_own_steps(screen: Callable[..., Screen], judging: Judging) -> None:
    seen = screen(takes_work=False)
    expression = seen.state(seen.find("verdict-expression"))
    assert (expression["placeholder"], expression["disabled"]) == ("the jobs' own steps", True)
    assert seen.find("stop").disabled
    assert "graftlab-verdict-text" not in seen.panel.static_html()
    seen.click("judge")
    seen.settle()
    assert judging.asked == [(None, None)]
    assert seen.shown("verdict-text") == "found 1"
    assert '<div class="graftlab-verdict-text"><b>found 1</b></div>' in seen.panel.static_html()
    assert seen.find("stop").disabled


def test_a_verdict_is_announced_and_stopped_and_an_error_replaces_it(
    screen: Callable[..., Screen], judging: Judging
) -> None:
    seen = screen()
    assert not seen.find("verdict-expression").disabled
    seen.enter("verdict-expression", " ")
    seen.click("judge")
    seen.settle()
    assert seen.message.startswith("enter the expression")
    judging.waits = True
    seen.enter("verdict-expression", " f(1 < 2) ")
    seen.click("judge")
    # Until its input has been fetched, the browser has several messages to exchange with the kernel.
    seen.browser.kernel_works()
    assert judging.began.wait(DEADLINE)
    assert judging.asked == [("f(1 < 2)", "f(1 < 2)")]
    assert seen.shown("verdict-text") == "judging f(1 < 2) …"
    # A saved notebook would show it for good.
    assert "judging" not in seen.panel.static_html()
    assert seen.message == ""
    wait_until(lambda: not seen.find("stop").disabled, "a button that stops it")
    seen.panel.refresh()
    assert not seen.find("stop").disabled
    seen.click("stop")
    seen.settle()
    assert seen.message == "the verdict was stopped in run 3"
    assert seen.shown("verdict-text") == ""
    assert seen.find("stop").disabled
    judging.waits = False
    for judging.error, shown, message in (
        (None, "found 2", ""),
        (gl.SessionError("both sides died"), "", "both sides died"),
        (None, "found 4", ""),
    ):
        seen.click("judge")
        seen.settle()
        assert (seen.shown("verdict-text"), seen.message) == (shown, message)
        assert not seen.find("judge").disabled


def test_closing_the_dashboard_stops_its_verdict(
    screen: Callable[..., Screen], judging: Judging, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, stopped = screen(takes_work=False), threading.Event()
    judging.waits = True
    judge = dashboard.judge

    def note(*call: Any) -> Any:
        try:
            return judge(*call)
        except KeyboardInterrupt:
            stopped.set()
            raise

    monkeypatch.setattr(dashboard, "judge", note)
    seen.click("judge")
    seen.browser.kernel_works()
    assert judging.began.wait(DEADLINE)
    assert seen.shown("verdict-text") == "judging the jobs …"
    seen.panel.close()
    assert stopped.wait(DEADLINE)


def test_a_closed_session_is_not_judged(jobs: Jobs, screen: Callable[..., Screen]) -> None:
    seen = screen()
    jobs.session.close()
    seen.panel.refresh()
    assert [seen.find(name).disabled for name in ("judge", "stop", "verdict-expression")] == [True, True, True]


def test_the_log_of_the_chosen_job_is_shown_with_its_path(jobs: Jobs, screen: Callable[..., Screen]) -> None:
    seen = screen()
    assert seen.options("which-log") == ["baseline[0]", "target[0]"]
    for text, shown in (("", "(nothing)"), ("<b>{} & more\n", "<b>baseline[0] & more")):
        for rank in jobs.session.ranks:
            rank.log.parent.mkdir(parents=True, exist_ok=True)
            rank.log.write_text(text.format(rank.label))
        seen.panel.refresh()
        assert seen.shown("log") == shown
    seen.choose("which-log", "target[0]")
    seen.browser.kernel_works()
    assert seen.shown("log") == "<b>target[0] & more"
    path, markup = str(jobs.session.ranks[1].log), seen.panel._log_path.value
    assert path in markup
    # People who use a keyboard can scroll it.
    assert seen.state(seen.find("log"))["tabbable"]


def test_a_tap_that_is_grafted_is_added_to_the_filter_on_the_screen(screen: Callable[..., Screen]) -> None:
    seen = screen()
    parts = seen.state(seen.find("parts"))
    assert (parts["titles"], len(parts["children"])) == (("Taps", "Filters", "Transform", "Logs"), 4)
    seen.panel._graft("name == 'hidden'")
    seen.settle()
    assert seen.state(seen.find("parts"))["selected_index"] == 1
    assert seen.panel.filters.message.startswith("b2t is changed here but not published yet")
    assert seen.all("dashboard") == [seen.panel]
    assert 'role="status"' in seen.markup("verdict")
    assert seen.shown("verdict")
