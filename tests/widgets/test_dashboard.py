"""The dashboard without a browser: what it shows of the ranks and taps, at what cost, and how it ends."""

from __future__ import annotations

import html
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from kit.support import reset, wait_for_file, wait_until

import graftlab as gl
from graftlab.rows.encoding import encode
from graftlab.widgets import dashboard as module
from graftlab.widgets.dashboard import Dashboard
from graftlab.widgets.refresher import refresher_of

PNG = b"\x89PNG"


@pytest.fixture(scope="module")
def session() -> Iterator[gl.Session]:
    with gl.launch(baseline=1, target=2) as session:
        yield session


@pytest.fixture
def board(session: gl.Session) -> Iterator[Dashboard]:
    board = reset(session).dashboard()
    # The tests look when they choose to.
    refresher_of(session).remove(board)
    yield board
    board.close()


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


def lines(table: str) -> list[list[str]]:
    """The cells of an HTML table's body."""
    body = table.partition("<tbody>")[2]
    rows = re.findall(r"<tr>(.*?)</tr>", body, re.DOTALL)
    return [[html.unescape(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL)] for row in rows]


def test_every_rank_has_a_line_with_its_state(session: gl.Session, board: Dashboard) -> None:
    session.run(three_taps, three_taps)
    board.refresh()
    shown = lines(board._ranks.value)
    assert [line[0] for line in shown] == ["baseline[0]", "target[0]", "target[1]"]
    assert [int(line[1]) for line in shown] == list(session.status()["pid"])
    assert {line[3] for line in shown} == {"idle"}
    assert {line[7] for line in shown} == {"<b>third</b>"}


def test_a_rank_that_waits_says_for_whom(session: gl.Session, board: Dashboard, tmp_path: Path) -> None:
    def late(go: str) -> None:
        wait_for_file(go)
        gl.tap("late", torch.ones(1))

    def early(go: str) -> None:
        gl.tap("late", torch.ones(1))

    go = tmp_path / "go"
    run = session.start(late, early, args=(str(go),))
    wait_until(lambda: all(rank.whereabouts().awaits for rank in session.ranks[1:]), "waiting at the tap")
    board.refresh()
    assert [line[3] for line in lines(board._ranks.value)] == ["running", *["waiting for baseline[0]"] * 2]
    go.touch()
    run.wait()


def test_a_tap_shows_the_worst_of_its_ranks_and_names_cannot_inject_markup(
    session: gl.Session, board: Dashboard
) -> None:
    session.run(three_taps, three_taps)
    board.refresh()
    shown = {line[0]: line for line in lines(board._table.value)}
    assert list(shown) == ["first layer=0", "second layer=1", "<b>third</b>"]
    assert shown["first layer=0"][2] == "0.00e+00"
    assert shown["second layer=1"][2:4] == ["2.00e+00", "2.00e+00"]
    assert shown["second layer=1"][5] == "target[1]"
    assert shown["<b>third</b>"][4] == "1"
    assert "<b>third" not in board._table.value


def test_taps_sort_by_order_and_by_error_and_the_box_filters_them(session: gl.Session, board: Dashboard) -> None:
    session.run(three_taps, three_taps)
    board._sort.value = "worst first"
    assert [line[0] for line in lines(board._table.value)] == ["<b>third</b>", "second layer=1", "first layer=0"]
    board._filter.value = "LAYER=1 sec"
    assert [line[0] for line in lines(board._table.value)] == ["second layer=1"]
    assert "1 of 3 taps" in board._count.value
    board._filter.value = "nothing like it"
    assert "no tap to show" in board._table.value


def test_the_figure_is_drawn_of_the_newest_run(session: gl.Session, board: Dashboard) -> None:
    session.run(three_taps, three_taps)
    board.refresh()
    assert board._painting is not None
    board._painting.result(60)
    assert bytes(board._figure.value).startswith(PNG)
    first = board._figure.value
    board.refresh()
    board._painting.result(60)
    assert board._figure.value is first, "nothing new came, so nothing was drawn"


def test_the_log_of_the_chosen_rank_is_shown(session: gl.Session, board: Dashboard) -> None:
    session.run(lambda: print("from the baseline"), lambda: print("from the target"))
    board.refresh()
    assert "from the baseline" in board._log.value
    board._which_log.value = "target[1]"
    assert "from the target" in board._log.value
    assert "from the baseline" not in board._log.value


def test_only_what_changed_is_sent(session: gl.Session, board: Dashboard) -> None:
    session.run(three_taps, three_taps)
    board.refresh()
    sent: list[str] = []
    for widget in (board._ranks, board._table, board._count, board._log, board._figure):
        widget.observe(lambda change: sent.append(change["name"]), "value")
    if board._painting is not None:
        board._painting.result(60)
    sent.clear()
    for _ in range(20):
        board.refresh()
    assert sent == []


def test_a_flood_of_rows_costs_a_bounded_look_a_tick_and_the_last_state_is_shown(
    session: gl.Session, board: Dashboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.run(three_taps, three_taps)
    board.refresh()
    template = session._rows.rows()[-1]

    def line(index: int) -> bytes:
        name = f"flood{index % 5}"
        row = template._replace(order=10_000 + index, rel_l2=float(index), nonfinite_differ=0)
        return encode(row._replace(name=name, tags={**template.tags, "name": name}))

    read: list[int] = []
    look = board._live._read
    monkeypatch.setattr(board._live, "_read", lambda a, b: read.append(b - a) or look(a, b))
    session.on_rows([line(index) for index in range(20_000)])
    board.refresh()
    assert sum(read) <= module._ROWS_A_TICK
    shown = {cells[0]: cells[2] for cells in lines(board._table.value)}
    assert shown["flood4 "[:6]] == f"{19_999:.2e}"
    assert "not read yet" in board._count.value
    for _ in range(20_000 // module._ROWS_A_TICK + 1):
        board.refresh()
    assert "not read yet" not in board._count.value


@pytest.mark.parametrize("elsewhere", [False, True])
def test_callbacks_work_on_the_main_thread_and_on_another_while_it_is_busy(
    session: gl.Session, board: Dashboard, elsewhere: bool
) -> None:
    session.run(three_taps, three_taps)

    def choose() -> None:
        board._sort.value = "name"
        board._sort.value = "worst first"

    if elsewhere:
        thread = threading.Thread(target=choose)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()
    else:
        choose()
    assert lines(board._table.value)[0][0] == "<b>third</b>"


def test_a_fault_in_a_callback_is_shown(board: Dashboard, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise gl.SessionError("the reason")

    monkeypatch.setattr(board, "refresh", fails)
    board._sort.value = "name"
    assert "the reason" in board._message.value
    board.show_error("")
    assert board._message.value == ""


def test_it_refreshes_while_somebody_looks_and_stops_when_the_output_is_cleared(session: gl.Session) -> None:
    reset(session)
    board = session.dashboard()
    refresher = refresher_of(session)
    try:
        board._view_count = 1
        assert board in refresher._widgets
        board._view_count = 0
        assert board not in refresher._widgets
        board._view_count = 2
        assert board in refresher._widgets
    finally:
        board.close()
    assert not refresher.running


def test_it_lives_on_its_own_and_shows_the_last_state_of_a_session_that_closes() -> None:
    with gl.launch(baseline=1, target=1) as session:
        board = session.dashboard()
        session.run(three_taps, three_taps)
        wait_until(lambda: "second" in board._table.value, "the tap in the table")
    wait_until(lambda: "closed" in board._ranks.value, "the closed session")
    wait_until(lambda: not refresher_of(session).running, "the end of the refresher")
    assert "second" in board._table.value
    board.close()
