"""The refresher: widgets are kept up to date by one thread, which shows what fails and ends with the last widget."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from kit.support import wait_until

from graftlab.errors import SessionError
from graftlab.widgets import refresher as module
from graftlab.widgets.refresher import Refresher, explain, refresher_of

SOON = 0.001


class FakeSession:
    """All that a refresher asks of a session."""

    def __init__(self) -> None:
        self.closed = False


class FakeWidget:
    """Notes what it was asked, and on which thread; ``fault`` is raised by its refresh."""

    def __init__(self, session: Any = None) -> None:
        self.session = session
        self.fault: Exception | None = None
        self.refreshed = 0
        self.saw_closed = False
        self.shown: list[str] = []
        self.threads: set[int] = set()

    def refresh(self) -> None:
        self.refreshed += 1
        self.threads.add(threading.get_ident())
        self.saw_closed = self.session is not None and self.session.closed
        if self.fault is not None:
            raise self.fault

    def show_error(self, text: str) -> None:
        self.shown.append(text)


@pytest.fixture
def session() -> FakeSession:
    return FakeSession()


@pytest.fixture
def refresher(session: FakeSession) -> Iterator[Refresher]:
    made = Refresher(session, interval=SOON)
    yield made
    session.closed = True
    wait_until(lambda: not made.running, "the end of the refresher")


def ticks_on(widget: FakeWidget, times: int = 3) -> None:
    before = widget.refreshed
    wait_until(lambda: widget.refreshed >= before + times, "another refresh")


def new_thread(before: set[threading.Thread]) -> threading.Thread:
    [thread] = [each for each in set(threading.enumerate()) - before if each.name == "graftlab-refresher"]
    return thread


def test_every_widget_is_refreshed_again_and_again_by_one_thread(refresher: Refresher) -> None:
    first, second = FakeWidget(), FakeWidget()
    refresher.add(first)
    refresher.add(second)
    refresher.add(second)
    ticks_on(first)
    ticks_on(second)
    assert first.threads == second.threads
    assert first.threads != {threading.get_ident()}


def test_a_widget_that_is_added_twice_is_refreshed_once_a_tick(session: FakeSession) -> None:
    refresher, widget = Refresher(session, interval=1000), FakeWidget()
    refresher.add(widget)
    refresher.add(widget)
    refresher.tick()
    assert widget.refreshed == 1
    refresher.remove(widget)


def test_a_removed_widget_is_not_refreshed_and_others_continue(refresher: Refresher) -> None:
    leaves, stays = FakeWidget(), FakeWidget()
    refresher.add(leaves)
    refresher.add(stays)
    ticks_on(leaves)
    refresher.remove(leaves)
    refresher.remove(leaves)
    ticks_on(stays)  # the tick that may have been going on is over
    before = leaves.refreshed
    ticks_on(stays)
    assert leaves.refreshed == before


def test_the_thread_ends_with_the_last_widget_and_begins_again_with_the_next(refresher: Refresher) -> None:
    widget = FakeWidget()
    for _ in range(2):
        before = set(threading.enumerate())
        refresher.add(widget)
        assert refresher.running
        thread = new_thread(before)
        ticks_on(widget)
        refresher.remove(widget)
        assert not refresher.running
        thread.join(60)
        assert not thread.is_alive()


def test_the_thread_ends_promptly_though_the_interval_is_long(session: FakeSession) -> None:
    refresher, widget, before = Refresher(session, interval=1000), FakeWidget(), set(threading.enumerate())
    refresher.add(widget)
    thread = new_thread(before)
    refresher.remove(widget)
    thread.join(60)
    assert not thread.is_alive()


def test_the_last_refresh_shows_the_closed_session_and_ends_the_thread(
    refresher: Refresher, session: FakeSession
) -> None:
    widgets = [FakeWidget(session) for _ in range(3)]
    for widget in widgets:
        refresher.add(widget)
    ticks_on(widgets[0])
    session.closed = True
    wait_until(lambda: not refresher.running, "the end of the refresher")
    assert all(widget.saw_closed for widget in widgets)
    counts = [widget.refreshed for widget in widgets]
    refresher.tick()
    assert [widget.refreshed for widget in widgets] == counts


def test_a_widget_added_after_the_session_was_closed_is_refreshed_once(
    refresher: Refresher, session: FakeSession
) -> None:
    session.closed = True
    late = FakeWidget(session)
    refresher.add(late)
    wait_until(lambda: not refresher.running, "the end of the refresher")
    assert (late.refreshed, late.saw_closed) == (1, True)


def test_a_failing_refresh_is_shown_and_logged_once_and_others_continue(
    refresher: Refresher, caplog: pytest.LogCaptureFixture
) -> None:
    failing, healthy = FakeWidget(), FakeWidget()
    failing.fault = SessionError("no such thing")
    with caplog.at_level(logging.ERROR, module.__name__):
        refresher.add(failing)
        refresher.add(healthy)
        ticks_on(failing, 5)
        ticks_on(healthy)
    assert failing.shown == ["no such thing"]
    assert [record.exc_info[1] for record in caplog.records if record.exc_info] == [failing.fault]


def test_an_error_disappears_when_the_refresh_works_and_a_new_one_is_shown(refresher: Refresher) -> None:
    widget = FakeWidget()
    widget.fault = SessionError("first")
    refresher.add(widget)
    wait_until(lambda: widget.shown == ["first"], "the first error")
    widget.fault = SessionError("second")
    wait_until(lambda: widget.shown == ["first", "second"], "the second error")
    widget.fault = None
    wait_until(lambda: widget.shown == ["first", "second", ""], "the error's end")
    ticks_on(widget)
    assert len(widget.shown) == 3


def test_a_widget_that_is_shown_again_shows_its_error_again(session: FakeSession) -> None:
    refresher, widget = Refresher(session, interval=1000), FakeWidget()
    widget.fault = SessionError("no such thing")
    for times in (1, 2):
        refresher.add(widget)
        refresher.tick()
        refresher.tick()
        assert widget.shown == ["no such thing"] * times
        refresher.remove(widget)


def test_a_widget_that_cannot_show_its_error_does_not_stop_others(
    refresher: Refresher, caplog: pytest.LogCaptureFixture
) -> None:
    class Hopeless(FakeWidget):
        def show_error(self, text: str) -> None:
            raise RuntimeError("not this either")

    hopeless, healthy = Hopeless(), FakeWidget()
    hopeless.fault = SessionError("cannot be refreshed")
    refresher.add(hopeless)
    refresher.add(healthy)
    ticks_on(hopeless)
    ticks_on(healthy)
    assert "Hopeless could not show that: cannot be refreshed" in caplog.text


def test_a_widget_may_remove_itself_while_it_is_refreshed(refresher: Refresher) -> None:
    class Leaving(FakeWidget):
        def refresh(self) -> None:
            super().refresh()
            refresher.remove(self)

    leaving, stays = Leaving(), FakeWidget()
    refresher.add(leaving)
    refresher.add(stays)
    ticks_on(stays)
    assert leaving.refreshed == 1


def test_a_tick_that_takes_long_is_followed_by_a_pause_as_long(
    session: FakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    refresher, now, pauses = Refresher(session, interval=2.0), 0.0, []

    class Slow(FakeWidget):
        def refresh(self) -> None:
            nonlocal now
            super().refresh()
            now += [7.0, 1.0, 3.0][self.refreshed - 1]

    class Stop(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            pauses.append(timeout)
            return len(pauses) > 3

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    refresher._widgets.append(Slow())
    refresher._keep_refreshing(Stop())
    assert pauses == [2.0, 7.0, 2.0, 3.0]


@pytest.fixture
def old_objects_are_left_out() -> None:
    """Let collections of the test look at its own objects alone: at all that a worker has by then they take seconds."""
    gc.freeze()


@pytest.mark.usefixtures("old_objects_are_left_out")
def test_a_session_has_one_refresher_which_does_not_keep_it_alive() -> None:
    session, other = FakeSession(), FakeSession()
    assert refresher_of(session) is refresher_of(session)
    assert refresher_of(session) is not refresher_of(other)
    gone = weakref.ref(session)
    del session
    gc.collect()
    assert gone() is None


def test_graftlab_errors_show_their_message_and_other_errors_their_location() -> None:
    assert explain(SessionError("write this instead")) == "write this instead"
    try:
        int("no number")
    except ValueError as error:
        shown = explain(error)
    assert "test_refresher.py" in shown
    assert shown.endswith("ValueError: invalid literal for int() with base 10: 'no number'")


class ClosedWhenCollected(FakeWidget):
    """Closed again when it is collected, like the widgets of ipywidgets."""

    def __init__(self, refresher: Refresher, closed: list[str]) -> None:
        super().__init__()
        self.refresher = refresher
        self.closed = closed
        self.itself = self  # so that only the garbage collector finds it

    def __del__(self) -> None:
        self.refresher.remove(self)
        self.closed.append("closed")


class CollectsWhenCompared(FakeWidget):
    """Has the garbage collector run where it could run by itself: in the middle of the refresher's work."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        gc.collect()
        return self is other


@pytest.mark.usefixtures("old_objects_are_left_out")
def test_the_garbage_collector_may_close_a_widget_during_a_refresh(
    refresher: Refresher,
) -> None:
    closed: list[str] = []
    ClosedWhenCollected(refresher, closed)
    one, other = CollectsWhenCompared(), CollectsWhenCompared()
    refresher.add(one)
    # In a separate thread, since it may deadlock.
    adding = threading.Thread(target=refresher.add, args=(other,), daemon=True)
    adding.start()
    adding.join(30)
    assert not adding.is_alive()
    assert closed == ["closed"]
    ticks_on(other)
