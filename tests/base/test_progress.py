"""The progress bar of a long wait: absent while the wait is short, correct afterwards."""

from __future__ import annotations

import io
import re
import sys
import threading

import pytest
from kit.kernels import kernel

from graftlab.base import progress
from graftlab.base.progress import LongWait, reported_to


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_short_wait_shows_no_bar_and_returns_the_next_poll_time() -> None:
    with LongWait("run 1", "rows", lambda: 0) as wait:
        assert 0 < wait.next_look(None) <= progress.PATIENCE
        assert wait.next_look(0.01) == 0.01
        assert wait._bar is None


def test_long_wait_counts_items_since_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    monkeypatch.setattr(sys, "stdout", Terminal())
    counts = iter([100, 103, 110, 114])
    with LongWait("run 1", "rows", lambda: next(counts)) as wait:
        assert wait.next_look(None) == progress.INTERVAL
        assert wait._bar.n == 3
        wait.next_look(None)
        assert wait._bar.n == 10
    assert wait._bar.n == 14, "what came after the last look"


def test_wait_without_progress_shows_elapsed_time_and_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    counts = [3]
    with LongWait("run 1", "rows", lambda: counts[0], where=lambda: "target[1]: waiting at tap 'h'") as wait:
        wait.next_look(None)
        drawn = len(terminal.getvalue())
        now[0] += 4.0
        wait.next_look(None)
        assert len(terminal.getvalue()) > drawn, "the time is drawn anew though nothing came"
        assert wait._bar.postfix == ""
        now[0] += 2.0
        wait.next_look(None)
        assert wait._bar.postfix == "nothing for 6 s: target[1]: waiting at tap 'h'"
        counts[0] = 4
        wait.next_look(None)
        assert wait._bar.postfix == ""


@pytest.mark.ranks
def test_notebook_bar_is_updated_text_that_a_saved_notebook_does_not_need() -> None:
    with kernel() as notebook:
        reply = notebook.run(
            "from graftlab.base import progress\n"
            "progress.PATIENCE = 0.0\n"
            "counts = iter(range(100))\n"
            "with progress.LongWait('run 1', 'rows', lambda: next(counts)) as wait:\n"
            "    for _ in range(3):\n"
            "        wait.next_look(None)"
        )
    assert not reply.error, reply.error
    shown = [*reply.shown, *reply.updates]
    assert len(shown) > 2
    assert {kind for data in shown for kind in data} == {"text/plain", "text/html"}
    assert shown[1]["text/plain"].startswith("run 1: ")
    assert shown[-1]["text/plain"] == ""
    assert re.sub("<style>.*?</style>|<[^>]*>", "", shown[-1]["text/html"], flags=re.DOTALL) == ""
    assert "display: none" in shown[-1]["text/html"], "an output without text has a height all the same"
    assert reply.stdout == reply.stderr == ""


def test_a_wait_that_is_over_at_once_is_reported_too() -> None:
    titles: list[str] = []
    with reported_to(titles.append), LongWait("run 1", "rows", int) as wait:
        assert titles == ["run 1"]
        assert [wait.next_look(left) for left in (None, 0.05, 60.0, -1.0)] == [0.2, 0.05, 0.2, 0.0]
    assert titles == ["run 1"] * 5


def test_a_wait_that_is_stopped_does_not_begin_and_does_not_look_again() -> None:
    stop = threading.Event()
    titles: list[str] = []
    with reported_to(titles.append), LongWait("run 1", "rows", int, stop=stop) as wait:
        stop.set()
        with pytest.raises(KeyboardInterrupt):
            wait.next_look(None)
    with pytest.raises(KeyboardInterrupt), LongWait("run 2", "rows", int, stop=stop):
        pytest.fail("it has begun")
    assert titles == ["run 1"]


def test_titles_are_reported_to_one_at_a_time_and_no_longer_than_asked() -> None:
    outer: list[str] = []
    inner: list[str] = []
    with reported_to(outer.append):
        with reported_to(inner.append):
            progress.report_progress("one")
        progress.report_progress("two")
    progress.report_progress("three")
    assert (inner, outer) == (["one"], ["two"])


def test_a_bar_is_made_once_and_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    for stream, hidden in ((Terminal(), False), (io.StringIO(), True)):
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", stream)
        with LongWait("run 1", "rows", lambda: 0) as wait:
            wait.next_look(None)
            bar = wait._bar
            wait.next_look(None)
            assert wait._bar is bar
            assert bar.disable is hidden
        assert bar.disable, "it is closed"


def test_until_a_bar_is_due_the_wait_is_looked_at_when_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with LongWait("run 1", "rows", lambda: 0) as wait:
        now[0] += progress.PATIENCE - progress.INTERVAL / 4
        assert wait.next_look(None) == pytest.approx(progress.INTERVAL / 4)
