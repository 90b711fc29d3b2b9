"""A run and the table of ranks without ranks: waits with a limit, what is shown, and how a failure stops the others."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from kit.refusals import exactly
from kit.rows import row

from graftlab.base import jupyter
from graftlab.base.world import Place
from graftlab.control import runs as runs_module
from graftlab.control.ranks_table import ranks_frame, ranks_table, titled_table
from graftlab.control.run import Run, failing_in
from graftlab.control.run_state import RunState
from graftlab.control.runs import Runs
from graftlab.errors import RunError, SessionError, WaitInterrupted
from graftlab.exchange.status_page import RankStatus
from graftlab.plan.plan import GraftPlan
from graftlab.ranks.messages import Failure, Interrupt, Output, RunDone, pack
from graftlab.rows.schema import Row
from graftlab.rows.store import to_frame
from graftlab.verdict.conclusion import conclude

ENDED = RunDone(3, None, None)
FAILED = RunDone(3, None, Failure("ValueError", "no", ""))


def status(state: str, step: int, tap: str = "", awaits: tuple[int, ...] = ()) -> RankStatus:
    return RankStatus(state, step, plan_version=2, taps=1234, tap=tap, awaits=awaits)


class Rank:
    """The handle of a rank that does nothing but note what it is sent."""

    trusted, alive, was_ended, generation, pid, links = True, True, False, 1, 4711, "shared memory"
    takes_work = True

    def __init__(self, place: Place) -> None:
        self.place, self.label = place, place.label
        self.assignment = SimpleNamespace(device="cpu", backend="gloo", notes=["a note", "another"])
        self.at = status("running", 5, "h")
        self.sent: list[bytes] = []
        self.channel = SimpleNamespace(send=self.sent.append)
        self.why: str | None = None
        self.log = Path("/logs/rank")

    def status(self) -> RankStatus:
        return self.at

    def absence(self) -> str:
        return "gone: killed"

    def how_it_ended(self) -> str:
        return "killed"

    def log_tail(self, lines: int = 30, *, with_grafts: bool = True) -> str:
        return f"the last {lines} lines"

    def end(self, why: str) -> None:
        self.why = why


def three() -> list[Any]:
    return [Rank(place) for place in Place("baseline", 0, 1, 2).everyone()]


def run_of(*rows: Row, **more: Any) -> tuple[Run, RunState, list[Any]]:
    ranks = three()
    state = RunState(3, cast("Any", ranks), first_step=4)
    return (
        Run(state, **{"frame": lambda number: to_frame(list(rows)), "write": lambda text: None, **more}),
        state,
        ranks,
    )


def ends(state: RunState, ranks: Sequence[Any], done: RunDone = ENDED) -> None:
    for rank in ranks:
        state.note_done(rank, done)
        state.note_settled(rank)


# ---- waiting ---------------------------------------------------------------------------------------------------------


def test_a_wait_that_is_over_time_says_where_the_ranks_are_and_what_to_do() -> None:
    run, state, ranks = run_of()
    state.note_done(ranks[0], FAILED)
    with pytest.raises(
        TimeoutError,
        match=r"run 3 is still running after 0 s \(baseline\[0\]: failed: Value.*target",
    ):
        run.wait(timeout=0)
    with pytest.raises(
        TimeoutError,
        match=r"run 3 has ended 1 of 2 steps after 0 s \(.*wait_steps\(2\) waits again",
    ):
        run.wait_steps(2, timeout=0)
    assert run.wait_steps(1, timeout=0) is run
    ends(state, ranks[1:])
    state.note_settled(ranks[0])
    # A run that is over is never late, nor short of steps.
    assert run.wait_steps(99) is run
    with pytest.raises(RunError, match=exactly("run 3 failed on baseline[0]\n\nbaseline[0] raised ValueError: no")):
        run.wait(timeout=0)


def test_a_wait_shows_what_arrived_before_the_run_ended() -> None:
    shown: list[str] = []
    run, state, ranks = run_of(write=shown.append)
    state.note_output(ranks[0], Output("printed\n"))
    ends(state, ranks)
    assert run.wait() is run
    assert "printed" in "".join(shown)


def test_a_wait_ends_where_a_rank_cannot_be_stopped() -> None:
    run, state, ranks = run_of()
    state.note_done(ranks[0], FAILED)
    state.is_held_up = True
    with pytest.raises(
        RunError,
        match="cannot be interrupted where it is",
    ):
        run.wait()


def test_rows_of_this_run_that_are_not_on_disk_are_an_error_beside_its_results() -> None:
    since: list[int] = []
    run, state, ranks = run_of(count=lambda: 17, unwritten=lambda row: since.append(row) or "the disk is full")
    ends(state, ranks)
    with pytest.raises(
        SessionError,
        match=exactly(
            "run 3 has ended and session.runs[-1] has its results, but some of its rows are not on disk: "
            "the disk is full"
        ),
    ):
        run.wait()
    assert since == [17]


def test_the_stop_button_ends_the_wait_with_advice() -> None:
    def stop(text: str) -> None:
        raise KeyboardInterrupt

    run, state, ranks = run_of(write=stop)
    state.note_output(ranks[0], Output("printed\n"))
    ends(state, ranks)
    with pytest.raises(
        WaitInterrupted,
        match=exactly(
            "stopped waiting for run 3; the ranks continue. session.runs[-1].wait() waits again, "
            "session.interrupt() stops the code on the ranks"
        ),
    ):
        run.wait()


# ---- what is shown ---------------------------------------------------------------------------------------------------


def test_filters_that_matched_nothing_are_known_once_the_run_has_ended() -> None:
    # The first plan is of an earlier run.
    plans = [GraftPlan(b2t="name == 'earlier'"), GraftPlan(b2t="name == 'x'", version=1)]
    known = plans[:1]
    run, state, ranks = run_of(row("a", plan_version=1), plans=lambda: plans[: len(known)])
    known.append(plans[1])
    first, *_ = run.summary
    assert run.unmatched == {}
    assert "matched no tap" not in first
    ends(state, ranks)
    assert "b2t" in run.unmatched
    assert any("b2t matched no tap in this run: " in line for line in run.summary)
    state.remarks.append("a remark")
    assert run.summary[0] == "a remark"
    # The plan that was in force when the run began counts.
    run, state, ranks = run_of(row("a", plan_version=1), plans=lambda: plans)
    ends(state, ranks)
    assert "b2t" in run.unmatched


def test_calls_that_one_rank_lacks_are_in_the_summary() -> None:
    run, state, ranks = run_of(*(row("h", rank=rank, order=order) for rank, order in ((0, 0), (0, 1), (1, 0))))
    assert not run.summary[0].startswith("not on all ranks"), "a rank may still reach it"
    ends(state, ranks)
    assert run.summary[0] == "not on all ranks: 1 tap (h): 1 call on target[1], and 2 on target[0]"


def test_a_run_is_shown_with_its_failures_counts_and_conclusions() -> None:
    rows = [row("<a>", order=0), row("b", order=1), row("c", order=2, status="missing")]
    run, state, ranks = run_of(*rows)
    assert "in progress; baseline[0]: " in repr(run)
    assert run._repr_mimebundle_()["text/html"].startswith("<b>run 3</b> in progress; baseline[0]: ")
    ends(state, ranks[:2])
    ends(state, ranks[2:], FAILED)
    assert repr(run) == "<Run 3: failed on target[1], 3 rows>"
    shown = run._repr_mimebundle_()
    assert shown["text/html"].startswith("<b>run 3</b> failed on target[1]; 2 compared, 1 missing<br>")
    assert shown["text/plain"].startswith("<Run 3: failed on target[1], 3 rows>\nnot compared: 1 missing;")
    assert "the frame&#x27;s column error says why<br>" in shown["text/html"]
    run, state, ranks = run_of()
    ends(state, ranks, RunDone(3, None, Failure("KeyboardInterrupt", "", "")))
    assert repr(run) == "<Run 3: interrupted on baseline[0], target[0], target[1], 0 rows>"
    empty, state, ranks = run_of()
    ends(state, ranks)
    assert repr(empty) == "<Run 3: done, 0 rows>"
    assert empty._repr_mimebundle_()["text/html"] == "<b>run 3</b> done; no taps"


def test_the_figure_of_a_run_is_drawn_once_it_has_ended_with_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    displayed: list[Any] = []
    drawn: list[int] = []
    monkeypatch.setattr("IPython.display.display", lambda shown, **more: displayed.append(shown))
    monkeypatch.setattr(jupyter, "show_canvas", print)

    def draw(number: int) -> Any:
        drawn.append(number)
        return "the figure"

    run, state, ranks = run_of(row("a"), draw=draw)
    with pytest.raises(NotImplementedError):
        run._ipython_display_()
    assert drawn == []
    ends(state, ranks)
    run._ipython_display_()
    assert drawn == [3]
    assert displayed[1] == "the figure"
    empty, state, ranks = run_of(draw=draw)
    ends(state, ranks)
    with pytest.raises(NotImplementedError):
        empty._ipython_display_()
    monkeypatch.setattr(jupyter, "show_canvas", None)
    with pytest.raises(NotImplementedError):
        run._ipython_display_()


def test_a_page_names_the_failures_of_the_run_whose_rows_it_shows() -> None:
    run, state, ranks = run_of()
    state.note_death(ranks[0], "killed. Its log (/tmp/log) ends: the end")
    other: Any = SimpleNamespace(number=2, failing={"target[0]": "of another run"})
    found = conclude(to_frame([row("a", run=3)]), [])
    assert failing_in([other, run], found) == {"baseline[0]": "killed"}
    assert failing_in([other], found) == {}
    assert failing_in([other, run], conclude(to_frame([]), [])) == {}


# ---- the table of ranks ----------------------------------------------------------------------------------------------


def cells(markup: str) -> list[list[str]]:
    lines = re.findall(r"<tr>(<td.*?)</tr>", markup, re.DOTALL)
    return [[html.unescape(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", line)] for line in lines]


def test_each_rank_has_a_line_with_its_state_generation_and_what_it_waits_for() -> None:
    ranks = three()
    ranks[0].at = status("waiting", 5, "<h>", (1, 2))
    ranks[1].generation, ranks[1].at = 2, status("idle", -1)
    ranks[2].alive, ranks[2].at = False, status("waiting", 1, awaits=(0,))

    def shown(closed: bool = False, failing: Any = (), lost: Any = ()) -> list[str]:
        return [line[3] for line in cells(ranks_table(ranks, closed, dict(failing), dict(lost)))]

    first, second, third = cells(ranks_table(ranks, False, {}, {}))
    assert first == ["baseline[0]", "4711", "cpu", "waiting for target[0], target[1]", "5", "2", "1,234", "<h>"]
    assert [*second[:1], *second[3:5]] == ["target[0], generation 2", "idle", "-"]
    # One that is gone waits for nothing.
    assert third[3] == "gone: killed"
    assert shown(failing={"target[0]": "ValueError: no"})[1] == "failed: ValueError: no"
    assert shown(lost={"target": "killed"})[:2] == ["waiting for target[0], target[1]", "idle; its group is gone"]
    assert shown(closed=True)[1:] == ["closed", "closed"]
    markup = ranks_table(ranks, False, {"target[0]": "no"}, {})
    assert markup.count('class="bad"') == 2
    frame = ranks_frame(ranks, False, {"target[0]": "no"}, {})
    assert frame["state"].tolist() == ["waiting", "failed: no", "gone: killed"]
    assert frame["step"].isna().tolist() == [False, True, False]
    assert frame["awaits"].tolist() == ["target[0], target[1]", "", "baseline[0]"]
    # A column with a text for some ranks alone is not empty.
    assert ">awaits<" in frame._repr_html_()
    assert set(frame["note"]) == {"a note; another"}
    assert set(ranks_frame(ranks, True, {}, {})["state"]) == {"closed"}
    for rank in ranks:
        rank.at = status("idle", -1)
    assert ">awaits<" not in ranks_frame(ranks, False, {}, {})._repr_html_()


def test_lost_groups_are_explained_above_the_ranks_unless_the_session_is_closed() -> None:
    lost = {"target": "target[0] <died>"}
    shown = titled_table("session", "2 & 2", three(), False, {}, lost)
    assert shown.startswith("<b>session</b> 2 &amp; 2<div>the process group of the target is gone (target[0] &lt;died")
    assert "brings it back" in shown
    assert "process group" not in titled_table("session", "", three(), True, {}, lost)


# ---- a failure stops the others --------------------------------------------------------------------------------------


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What would be called after a moment, by its seconds."""
    waiting: list[Any] = []
    monkeypatch.setattr(runs_module, "_later", lambda seconds, call, run: waiting.append((seconds, call, run)))
    return waiting


def runs_of(ranks: list[Any], stacks: Any = None) -> Runs:
    rows: Any = SimpleNamespace(
        first_step=0, first_run=3, frame=lambda number: to_frame([]), unwritten=lambda since: None, __len__=None
    )
    return Runs(ranks, type("Rows", (), {**vars(rows), "__len__": lambda self: 0})(), list, stacks or (lambda rank: ""))


def test_the_first_failure_interrupts_the_others_once_and_ends_those_in_a_collective(
    later: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = [Rank(place) for place in Place("baseline", 0, 2, 2).everyone()]

    def stack(rank: Any) -> str:
        if rank.label == "baseline[1]":
            raise SessionError("no answer")
        return str(rank.label)

    monkeypatch.setattr(runs_module, "collective_in", lambda text: "all_reduce" if text == "target[1]" else None)
    runs = runs_of(ranks, stack)
    state = RunState(3, cast("Any", ranks))
    runs._states.append(state)
    for rank in (ranks[2], ranks[0]):
        runs.note_done(FAILED, cast("Any", rank))
    [(moment, interrupt, run)] = later
    interrupt(run)
    assert [len(rank.sent) for rank in ranks] == [0, 1, 0, 1]
    assert ranks[1].sent == [pack(Interrupt(3))]
    [_, (grace, end, _)] = later
    assert 0 < moment < grace
    end(run)
    assert [rank.why for rank in ranks] == [
        *[None] * 3,
        "was ended, because it waited in a collective (all_reduce) after target[0] had failed",
    ]
    # The other one did not report where it is, and is not waited for.
    assert state.is_held_up


@pytest.mark.parametrize(("on_failure", "count"), [("stop", 1), ("continue", 0)])
def test_a_death_stops_the_others_unless_the_run_continues(on_failure: Any, count: int, later: list[Any]) -> None:
    ranks = three()
    runs = runs_of(ranks)
    run = runs._make(ranks, on_failure)
    runs.note_death(cast("Any", ranks[1]))
    assert len(later) == count
    assert run.failing == {"target[0]": "killed (pid 4711, last seen at tap 'h'). Its log (/logs/rank) ends:"}
    assert str(run.failures["target[0]"]).endswith("the last 60 lines")
    ranks[2].was_ended = True
    runs.note_death(cast("Any", ranks[2]))
    assert run.failures["target[1]"] == "killed"
    ranks[1].alive = False
    with pytest.raises(RunError, match=r"The process group of the target is gone \(target\[0\] killed\)"):
        run._state.raise_failures()
    # The next run begins behind the step in which it died.
    assert runs._next_step == 6


def test_a_joint_run_begins_behind_the_steps_of_all_ranks_and_settles_earlier_runs() -> None:
    ranks = three()
    ranks[2].at = status("running", 8)
    runs = runs_of(ranks)
    first, second = runs.begin_joint_run(), runs.begin_joint_run()
    assert (first.run, first.first_step, first.participants) == (3, 9, (0, 1, 2))
    assert (second.run, second.first_step) == (4, 9)
    for rank in ranks:
        runs.note_moved(cast("Any", rank))
    assert [run.done for run in runs.all()] == [True, False]
    assert np.all([rank.sent == [] for rank in ranks])
