"""The heartbeat sends a rank's status when it has changed, and a wait only when it lasts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from graftlab.exchange import heartbeat
from graftlab.exchange.heartbeat import Heartbeat
from graftlab.exchange.status_page import RankStatus

IDLE, RUNNING = RankStatus("idle"), RankStatus("running", step=1)
WAITING, LONGER = RankStatus("waiting", step=1), RankStatus("waiting", step=2)


class Page:
    """What each read finds; None is memory that is no longer mapped."""

    def __init__(self, *found: RankStatus | None) -> None:
        self.found = list(found)

    def read(self) -> RankStatus:
        status = self.found.pop(0)
        if status is None:
            raise ValueError("mmap closed or invalid")
        return status


@pytest.fixture
def rests(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """The seconds of each rest, which takes no time."""
    found: list[float | None] = []
    monkeypatch.setattr(threading.Event, "wait", lambda self, timeout=None: found.append(timeout))
    return found


def run(page: Page, details: Callable[[], object], is_over: Callable[[], bool], **rest: float) -> list[RankStatus]:
    sent: list[RankStatus] = []
    given: Any = page
    Heartbeat(given, sent.append, details, is_over, **rest)._run()
    return sent


@pytest.mark.parametrize(
    ("found", "sent"),
    [
        ([IDLE, IDLE, IDLE], [IDLE]),
        ([IDLE, RUNNING, RUNNING, IDLE], [IDLE, RUNNING, IDLE]),
        ([RUNNING, WAITING, RUNNING], [RUNNING]),
        ([WAITING, WAITING, WAITING], [WAITING]),
        # Each of these waits ended before the next read.
        ([WAITING, LONGER, WAITING, LONGER], []),
        ([RUNNING, WAITING, LONGER, LONGER, RUNNING], [RUNNING, LONGER, RUNNING]),
    ],
)
def test_a_status_is_sent_once_and_a_wait_once_two_reads_found_it(
    rests: list[float | None], found: list[RankStatus], sent: list[RankStatus]
) -> None:
    page = Page(*found)
    assert run(page, lambda: 0, lambda: not page.found) == sent


def test_changed_details_are_sent_though_the_status_is_the_same(rests: list[float | None]) -> None:
    page, details = Page(IDLE, IDLE, IDLE, WAITING, WAITING, WAITING), iter([0, 0, 1, 1, 2, 2])
    assert run(page, lambda: next(details), lambda: not page.found) == [IDLE, IDLE, WAITING]


def test_details_are_read_before_the_page_that_they_are_sent_with(
    rests: list[float | None],
) -> None:
    order: list[str] = []

    class Noting(Page):
        def read(self) -> RankStatus:
            order.append("page")
            return super().read()

    page = Noting(IDLE, IDLE)
    run(page, lambda: order.append("details"), lambda: not page.found)
    assert order == ["details", "page"] * 2


def test_it_rests_as_long_as_it_is_given_and_ends_with_the_memory(rests: list[float | None]) -> None:
    for given, rested in (({}, 0.05), ({"rest": 0.25}, 0.25)):
        assert run(Page(IDLE, RUNNING, None), lambda: 0, lambda: False, **given) == [IDLE, RUNNING]
        assert rests == [rested] * 2
        rests.clear()


def test_its_thread_does_not_keep_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []

    class Thread:
        def __init__(self, **given: Any) -> None:
            made.append(given)

        def start(self) -> None:
            made[-1]["target"]()

    monkeypatch.setattr(heartbeat.threading, "Thread", Thread)
    over: list[bool] = []

    def is_over() -> bool:
        over.append(True)
        return True

    page: Any = Page()
    Heartbeat(page, lambda status: None, lambda: 0, is_over).start()
    assert (made[0]["daemon"], over) == (True, [True])
