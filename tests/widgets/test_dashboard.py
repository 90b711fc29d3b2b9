"""The dashboard without a browser: what it shows of the ranks and taps, at what cost, and how it ends."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.pages import Browser, Screen
from kit.support import reset, wait_for_file, wait_until

import graftlab as gl
from graftlab.control.core import internals_of
from graftlab.rows.encoding import encode
from graftlab.rows.schema import Row
from graftlab.rows.store import RowStore
from graftlab.widgets.refresher import refresher_of
from graftlab.widgets.tap_explorer import ROWS_A_TICK

pytestmark = pytest.mark.ranks


class BoardScreen(Screen):
    """A dashboard as a person sees it, in one page of a simulated browser."""

    @property
    def view(self) -> dict[str, Any]:
        """What the browser has of the taps."""
        state = self.state(self.find("tap-view"))
        return {**state["taps"], **state["figures"]}

    @property
    def taps(self) -> list[str]:
        """The taps in execution order."""
        return list(self.view["label"])

    def cells(self, tap: str, *columns: str) -> list[Any]:
        """What is shown of a tap."""
        view = self.view
        return [view[column][view["label"].index(tap)] for column in columns]

    def act(self, what: str, value: Any) -> None:
        """What the script sends when a person clicks."""
        self.browser.send(self.find("tap-view").comm.comm_id, {"what": what, "value": value})


@pytest.fixture
def arrives_on() -> str:
    # The editors and test_snapshot have both.
    return "another thread"


@pytest.fixture(scope="module")
def session() -> Iterator[gl.Session]:
    with gl.launch(baseline=1, target=2) as session:
        yield session


@pytest.fixture
def board(session: gl.Session, simulated: Browser, monkeypatch: pytest.MonkeyPatch) -> Iterator[BoardScreen]:
    """A dashboard, which is only refreshed when the test does it."""
    monkeypatch.setattr(refresher_of(session), "interval", 1000)
    made = reset(session).dashboard()
    yield BoardScreen(simulated, made)
    made.close()


def three_taps() -> None:
    """``first`` agrees; ``second`` is worse on rank 1; ``<b>third</b>`` has a NaN."""
    me = gl.here()
    assert me is not None
    off = 0.0 if me.side == "baseline" else 1.0 + me.rank
    gl.tap("first", torch.ones(4), layer=0)
    gl.tap("second", torch.ones(4) + off, layer=1)
    third = torch.ones(4)
    if me.side == "target":
        third[2] = float("nan")
    gl.tap("<b>third</b>", third)


def test_every_rank_has_a_line_with_its_state(session: gl.Session, board: BoardScreen) -> None:
    session.run(three_taps, three_taps)
    board.panel.refresh()
    shown = board.lines("ranks")
    assert [line[0] for line in shown] == ["baseline[0]", "target[0]", "target[1]"]
    assert [int(line[1]) for line in shown] == list(session.status()["pid"])
    assert {line[3] for line in shown} == {"idle"}
    assert {line[7] for line in shown} == {"<b>third</b>"}


def test_a_waiting_rank_names_the_rank_it_waits_for(session: gl.Session, board: BoardScreen, tmp_path: Path) -> None:
    def late(go: str) -> None:
        wait_for_file(go)
        gl.tap("late", torch.ones(1))

    def early(go: str) -> None:
        gl.tap("late", torch.ones(1))

    go = tmp_path / "go"
    run = session.start(late, early, args=(str(go),))
    wait_until(lambda: all(rank.status().awaits for rank in session.ranks[1:]), "waiting at the tap")
    wait_until(lambda: session.ranks[0].status().state == "running", "the beginning of the baseline's run")
    board.panel.refresh()
    assert [line[3] for line in board.lines("ranks")] == ["running", *["waiting for baseline[0]"] * 2]
    go.touch()
    run.wait()


def test_a_tap_shows_the_worst_of_its_ranks_and_names_cannot_inject_markup(
    session: gl.Session, board: BoardScreen
) -> None:
    session.run(three_taps, three_taps)
    board.panel.refresh()
    assert board.taps == ["first layer=0", "second layer=1", "<b>third</b>"]
    assert board.cells("first layer=0", "value") == [0.0]
    assert board.cells("second layer=1", "value", "max_abs", "worst") == [2.0, 2.0, "target[1]"]
    assert board.cells("<b>third</b>", "value", "max_abs", "nonfinite") == [0.0, 0.0, 1]
    assert "<b>third" not in board.markup("verdict"), "the script sets text, and never markup"


def test_the_first_line_is_the_conclusion_with_step_plan_and_floor(session: gl.Session, board: BoardScreen) -> None:
    assert board.panel.children.index(board.find("verdict")) <= 1, "after the style sheet"
    run = session.run(three_taps, three_taps)
    step, plan = run.frame["step"].max(), session.plan.version
    board.panel.refresh()
    said = board.shown("verdict")
    assert said.startswith(
        f"Run {run.number}, step {step}, plan {plan}, 3 taps: first divergent: second layer=1 on target[0]: "
        "rel_l2 1.00e+00, 100,000 x the floor 1e-05, assumed for float32."
    )
    assert board.view["notes"][0][0] == 1
    board.act("floor", 50.0)
    board.browser.kernel_works()
    board.panel.refresh()
    assert "first divergent: <b>third</b> on target[0]: 1 of 4 elements is NaN" in board.shown("verdict")
    assert (board.view["floor"], board.view["notes"][0][0]) == (50.0, 2)
    board.act("floor", None)
    board.browser.kernel_works()
    assert board.view["floor"] == 1e-5


def test_the_first_line_says_that_the_run_failed(session: gl.Session, board: BoardScreen) -> None:
    def equal_until_it_raises() -> None:
        me = gl.here()
        assert me is not None
        gl.tap("h", torch.ones(4))
        if me.side == "target" and me.rank:
            raise ValueError("no such token")

    with pytest.raises(gl.RunError):
        session.run(equal_until_it_raises, equal_until_it_raises)
    board.panel.refresh()
    number = session.runs[-1].number
    assert board.shown("verdict").startswith(f"Run {number} failed on target[1] (ValueError: no such token), step ")
    assert f"Run {number} failed on target[1]" in board.panel.static_html()


def test_taps_without_a_pair_are_counted_in_the_first_line(session: gl.Session, board: BoardScreen) -> None:
    session.run(lambda: gl.tap("h", torch.ones(2)), lambda: gl.tap("other", torch.ones(2)))
    board.panel.refresh()
    assert "Not compared: 1 missing, 1 unmatched." in board.shown("verdict")


def test_graft_this_adds_the_tap_to_the_b2t_filter_without_publishing(session: gl.Session, board: BoardScreen) -> None:
    session.run(three_taps, three_taps)
    board.panel.refresh()
    before = session.plan
    board.act("graft", "second layer=1")
    board.browser.kernel_works()
    board.panel.refresh()
    line = board.panel.filters._lines["b2t"]
    assert line.editor.value == "name == 'second' and layer == 1"
    assert session.plan is before
    board.act("graft", "first layer=0")
    board.browser.kernel_works()
    assert line.editor.value == "name == 'second' and layer == 1 or (name == 'first' and layer == 0)"


def test_a_kept_pair_opens_and_others_can_be_kept(session: gl.Session, board: BoardScreen) -> None:
    name = f"tap{session.row_count}"  # a name that no earlier test kept

    def own() -> None:
        gl.tap("first", torch.ones(4))
        gl.tap(name, torch.ones(4), layer=1)

    session.run(own, own)
    board.settle()
    board.act("open", f"{name} layer=1")
    board.settle()
    assert f"no pair of tensors is kept for '{name}'" in board.shown("pair")
    assert "“Keep this tap” keeps its tensors" in board.shown("pair")
    board.act("keep", f"{name} layer=1")
    board.settle()
    assert session.plan.keep == f"name == '{name}' and layer == 1"
    says = f"Plan {session.plan.version} keeps {name} layer=1"
    assert board.message == f"{says}; tensors arrive with the next step."
    began = session.run(own, own).first_step
    board.settle()
    assert board.message == f"{says} since step {began}."
    session.run(own, own)
    board.settle()
    board.act("open", f"{name} layer=1")
    board.settle()
    assert board.markup("pair").count("data:image/png;base64,") == 4, "two figures, each for light and for dark pages"
    assert f'alt="{name} layer=1: where the pair differs.' in board.markup("pair")
    assert "This pair is from step" not in board.shown("pair")
    session.edit(keep=None)
    later = session.run(own, own)
    board.settle()
    board.act("open", f"{name} layer=1")
    board.settle()
    older = f"This pair is from step {later.first_step - 1}. The table shows step {later.first_step}"
    assert older in board.shown("pair")
    board.act("chosen", "first")
    board.settle()
    assert board.markup("pair") == "", "the pictures were of another tap"


def messages_for(board: BoardScreen, *names: str) -> list[dict[str, object]]:
    """What will be sent to the browser for these widgets."""
    watched = {board.find(name).comm.comm_id for name in names}
    sent: list[dict[str, object]] = []
    board.browser.on_update.append(lambda comm_id, changed: sent.append(changed) if comm_id in watched else None)
    return sent


def test_the_log_of_the_chosen_rank_is_shown(session: gl.Session, board: BoardScreen) -> None:
    session.run(lambda: print("from the baseline"), lambda: print("from the target"))
    board.panel.refresh()
    assert "from the baseline" in board.shown("log")
    board.choose("which-log", "target[1]")
    board.settle()
    assert "from the target" in board.shown("log")
    assert "from the baseline" not in board.shown("log")


def test_only_what_changed_is_sent(session: gl.Session, board: BoardScreen) -> None:
    session.run(three_taps, three_taps)
    board.settle()
    sent = messages_for(board, "ranks", "verdict", "tap-view", "pair", "log")
    for _ in range(20):
        board.panel.refresh()
    board.settle()
    assert sent == []


def test_a_flood_of_rows_costs_bounded_work_per_tick_and_ends_in_the_last_state(
    session: gl.Session, board: BoardScreen, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    session.run(three_taps, three_taps)
    board.panel.refresh()
    template = session.live_taps().look()[-1]
    go = tmp_path / "go"
    run = session.start(lambda path: wait_for_file(path), lambda path: None, args=(str(go),))

    def line(index: int) -> bytes:
        name = f"flood{index % 5}"
        row = template._replace(run=run.number, order=10_000 + index, rel_l2=float(index), nonfinite_differ=0)
        return encode(row._replace(name=name, tags={**template.tags, "name": name}))

    rows, read = RowStore.rows, list[int]()

    def counted(store: RowStore, start: int = 0, stop: int | None = None) -> list[Row]:
        found = rows(store, start, stop)
        read.append(len(found))
        return found

    monkeypatch.setattr(RowStore, "rows", counted)
    internals_of(session).reports.on_rows([line(index) for index in range(20_000)])
    board.panel.refresh()
    assert sum(read) <= 2 * ROWS_A_TICK, "the taps and the transform editor"
    assert board.view["count"].endswith("not read yet")
    go.touch()
    run.wait()
    board.panel.refresh()
    assert board.cells("flood4", "value", "highest") == [pytest.approx(19_999, rel=1e-3)] * 2
    assert "not read" not in board.view["count"]


def test_divergence_in_an_earlier_step_is_reported_if_the_newest_is_fine(
    session: gl.Session, board: BoardScreen
) -> None:
    def steps(off: float) -> None:
        for step in range(3):
            gl.tap("a", torch.ones(4) + (off if step == 1 else 0.0))
            gl.step()

    run = session.run(steps, steps, args=(0.0,))
    board.panel.refresh()
    assert "in this run" not in board.shown("verdict")
    run = session.run(lambda: steps(0.0), lambda: steps(1.0))
    board.panel.refresh()
    step = run.first_step + 1
    assert "first divergent: none of 2 compared rows is above" in board.shown("verdict")
    assert f"First divergent in this run: a on target[0] in step {step}: rel_l2 1.00e+00" in board.shown("verdict")
    assert board.cells("a", "value", "highest", "since") == [0.0, 1.0, step]

    # In between it may have been equal, so that nothing is said of the time since.
    def comes_back() -> None:
        for step in range(3):
            gl.tap("a", torch.ones(4) + float("target" in str(gl.here()) and step != 1))
            gl.step()

    run = session.run(comes_back, comes_back)
    board.panel.refresh()
    said = f"the floor 1e-05, assumed for float32. First above the floor in step {run.first_step}."
    assert said in board.shown("verdict")


def test_a_callback_error_is_shown(session: gl.Session, board: BoardScreen, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise gl.SessionError("the reason")

    session.run(three_taps, three_taps)
    with monkeypatch.context() as patch:
        patch.setattr(board.panel, "refresh", fails)
        board.choose("which-log", "target[1]")
        board.browser.kernel_works()
    assert board.message == "the reason"
    board.panel.say("")
    assert board.message == ""


def test_a_pair_that_cannot_be_drawn_is_reported_beside_the_rest(
    session: gl.Session, board: BoardScreen, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ZeroDivisionError("no figure today")

    monkeypatch.setattr("graftlab.plots.draw_difference_map", fails)
    session.edit(keep="True")
    session.run(three_taps, three_taps)
    board.settle()
    board.act("open", "second layer=1")
    board.settle()
    assert board.message.endswith("ZeroDivisionError: no figure today")
    assert board.taps == ["first layer=0", "second layer=1", "<b>third</b>"]


def test_it_refreshes_while_it_is_shown_and_stops_when_the_output_is_cleared(
    session: gl.Session, board: BoardScreen
) -> None:
    refresher = refresher_of(session)

    def views(count: int) -> None:
        """What the front end says when the number of views has changed."""
        board.browser.save(board.panel.comm.comm_id, _view_count=count)
        board.browser.kernel_works()

    views(1)
    assert board.panel in refresher
    views(0)
    assert board.panel not in refresher
    before = board.view["count"]
    session.run(three_taps, three_taps)
    assert board.view["count"] == before
    views(2)
    assert board.panel in refresher
    assert board.view["count"] != before
    board.panel.close()
    assert not refresher.running


def test_it_works_alone_and_shows_the_last_state_of_a_closed_session(simulated: Browser) -> None:
    with gl.launch(baseline=1, target=1) as session:
        board = BoardScreen(simulated, session.dashboard())
        session.run(three_taps, three_taps)
        wait_until(lambda: "second layer=1" in board.taps, "the tap in the table")
    wait_until(lambda: "closed" in board.shown("ranks"), "the closed session")
    wait_until(lambda: not refresher_of(session).running, "the end of the refresher")
    assert "second layer=1" in board.taps
    assert board.find("judge").disabled, "there is nothing to run"
    board.panel.close()


def test_closing_it_closes_its_editors_and_leaves_nothing_in_the_browser(
    session: gl.Session, board: BoardScreen
) -> None:
    board.panel.close()
    left = {board.browser.models[comm_id]["_model_name"] for comm_id in board.browser.comms}
    assert {name for name in left if not re.search("Layout|Style", name)} == set()


FORGED = {
    "nothing": None,
    "text": "floor",
    "a list": [],
    "no action": {},
    "an action without a value": {"what": "keep"},
    "a floor that is above everything": {"what": "floor", "value": float("inf")},
    "a floor that nothing is above": {"what": "floor", "value": float("nan")},
    "a negative floor": {"what": "floor", "value": -1},
    "a floor as text": {"what": "floor", "value": "1e300"},
    "a floor as a truth value": {"what": "floor", "value": True},
    "a floor of a megabyte": {"what": "floor", "value": "9" * (1 << 20)},
    "a tap that does not exist": {"what": "keep", "value": "third'); import os #"},
    "a tap of a megabyte": {"what": "graft", "value": "x" * (1 << 20)},
    "a tap that is a list": {"what": "open", "value": ["first layer=0"]},
}


def test_a_forged_message_changes_neither_the_plan_nor_the_conclusion(session: gl.Session, board: BoardScreen) -> None:
    session.run(three_taps, three_taps)
    board.panel.refresh()
    before, headline = session.plan, board.view["headline"]
    for name, content in FORGED.items():
        board.panel.say("not yet sent")
        board.browser.send(board.find("tap-view").comm.comm_id, content)
        board.browser.kernel_works()
        board.panel.refresh()
        assert session.plan == before, name
        assert board.view["headline"] == headline, name
        assert board.panel.status == "bad", name
        assert len(board.panel.message) < 2000, name


def test_taps_that_a_page_has_renamed_are_not_taken_for_others(session: gl.Session, board: BoardScreen) -> None:
    session.run(three_taps, three_taps)
    board.panel.refresh()
    view = board.find("tap-view")
    board.browser.save(view.comm.comm_id, taps={**view.taps, "label": ["second layer=1", "first layer=0", "x"]})
    board.browser.kernel_works()
    board.act("keep", "second layer=1")
    board.browser.kernel_works()
    assert "second" in (session.plan.keep or "")
