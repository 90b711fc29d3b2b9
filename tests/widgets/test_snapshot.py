"""What stays of a widget in a saved notebook: the newest state, made when something has ended, and not more often."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from kit.pages import Browser
from kit.support import wait_until

import graftlab as gl
from graftlab.rows.store import RowStore
from graftlab.widgets import panel, snapshot
from graftlab.widgets.refresher import refresher_of

pytestmark = pytest.mark.ranks


def model(off: float) -> None:
    gl.tap("h", torch.ones(4) + off)


def test_the_newest_state_stays_in_the_notebook(simulated: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    published: list[tuple[dict[str, str], dict[str, Any]]] = []
    monkeypatch.setattr(snapshot, "publish_display_data", lambda data, **more: published.append((data, more)))
    monkeypatch.setattr(panel, "_SNAPSHOT_INTERVAL", 0.0)
    monkeypatch.setattr(panel, "_SNAPSHOT_SHARE", 1e9)
    with gl.launch(1, 1) as session:
        board = session.dashboard()
        assert published == [], "nothing is shown yet"
        board._ipython_display_()
        assert "application/vnd.jupyter.widget-view+json" in published[0][0]
        assert published[0][0]["text/plain"] == "", "a viewer without widgets would show their repr"
        (_, options), name = published[1], published[1][1]["transient"]
        assert not options["update"]
        # What papermill and nbconvert keep, which miss updates after the cell has ended.
        assert "Filters of plan 0" in published[1][0]["text/html"]
        session.run(lambda: model(0.0), lambda: model(1.0))

        def newest() -> str:
            board.refresh()
            return published[-1][0].get("text/html", "")

        wait_until(lambda: "first divergent: h on target[0]" in newest(), "the conclusion")
        assert "data:image/png;base64" in newest()
        assert "Filters of plan 0" in newest()
        wait_until(lambda: not board.busy, "the end of the drawing")
        count = len(published)
        for _ in range(5):
            board.refresh()
        assert len(published) == count, "nothing has ended since"
        assert all(more["transient"] == name and more["update"] for _, more in published[2:])
        # The next snapshot is not due for a long time; the last one is taken regardless.
        board._next_snapshot = math.inf
    wait_until(lambda: "closed" in published[-1][0].get("text/html", ""), "the closed session")
    board.close()


def test_rows_and_run_ends_that_arrive_during_a_display_are_shown_next(
    simulated: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    published: list[str] = []
    monkeypatch.setattr(snapshot, "publish_display_data", lambda data, **_: published.append(data.get("text/html", "")))
    monkeypatch.setattr(panel, "_SNAPSHOT_INTERVAL", 0.0)
    monkeypatch.setattr(panel, "_SNAPSHOT_SHARE", 1e9)
    append, boards = RowStore.append, []

    def append_and_refresh(store: RowStore, lines: Sequence[bytes]) -> None:
        append(store, lines)
        # The rows have arrived by now, and the run has not ended.
        while boards:
            boards.pop().refresh()

    monkeypatch.setattr(RowStore, "append", append_and_refresh)
    with gl.launch(1, 1) as session:
        board = session.dashboard()
        # What the refresher does is done here, at the moments that count.
        refresher_of(session).remove(board)
        monkeypatch.setattr(board, "in_background", lambda callback: callback())
        board._ipython_display_()

        boards.append(board)
        session.run(lambda: model(0.0), lambda: model(float("nan")))
        assert not boards
        board.refresh()
        assert "4 of 4 elements are NaN" in published[-1]

        show = board._show

        def run_meanwhile() -> None:
            show()
            monkeypatch.setattr(board, "_show", show)
            session.run(lambda: model(0.0), lambda: model(1.0))

        monkeypatch.setattr(board, "_show", run_meanwhile)
        board.refresh()
        board.refresh()
        assert "first divergent: h on target[0]" in published[-1]
        assert "4 of 4 elements are NaN" not in published[-1]
