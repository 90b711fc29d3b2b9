"""A job's rank moves to another world: tensors sent in the old world are never received in the new one."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock, call

import pytest
import torch
from kit.implementations import WORLDS, MakeWorld
from kit.mailboxes import DEADLINE, Mailbox, World, in_background, key

from graftlab.base.tags import TagItems
from graftlab.base.world import Place, RunInfo
from graftlab.exchange.status_page import StatusPage
from graftlab.grafting.kept import KeptPairs
from graftlab.jobs.job_grafter import JobGrafter, WorldOffer
from graftlab.plan.plan import GraftPlan
from graftlab.rows.schema import Row

PLAN = GraftPlan(t2b="True", compare=None)


class Job:
    """A grafter on a mailbox, and what it reported."""

    def __init__(self, mailbox: Mailbox) -> None:
        self.rows: list[Row] = []
        self.moves: list[RunInfo] = []
        self.failures: list[Exception] = []
        self.mailbox = mailbox
        ambient: ContextVar[TagItems] = ContextVar("tags", default=())
        self.grafter = JobGrafter(mailbox.place, mailbox.exchange, _page(), ambient, self, KeptPairs())
        self.grafter.on_failure = self.failures.append

    def row(self, row: Row) -> None:
        self.rows.append(row)

    def seen(self, tags: dict[str, Any]) -> None: ...

    def adopted(self, version: int, step: int) -> None: ...

    def tap(self, value: float) -> float:
        """The value with which the model continues."""
        put = self.mailbox.put(torch.full((2,), value))
        taken = self.grafter.tap("x", put, None, {})
        return float(taken[0])

    def offer(self, mailbox: Mailbox, run: RunInfo) -> list[str]:
        """Offer another world; the list notes when it is closed instead."""
        closed: list[str] = []
        self.grafter.offer(
            WorldOffer(mailbox.exchange, _page(), run, PLAN, self.moves.append, lambda: closed.append("closed"))
        )
        self.mailbox = mailbox
        return closed


def _page() -> StatusPage:
    return StatusPage(mmap.mmap(-1, mmap.PAGESIZE))


@pytest.fixture(params=WORLDS)
def worlds(request: pytest.FixtureRequest) -> Iterator[tuple[World, World]]:
    make: MakeWorld = request.param
    with make(1, 1) as old, make(1, 1) as new:
        yield old, new


def run(number: int = 0, first_step: int = 0) -> RunInfo:
    return RunInfo(number, first_step, (0, 1), (1, 1 + number))


def test_tensors_that_a_dead_rank_sent_ahead_never_pair_with_its_successors(
    worlds: tuple[World, World],
) -> None:
    old, new = worlds
    stays = Job(old.baseline)
    stays.grafter.begin_run(run(), PLAN)
    old.target.exchange.begin_run(run())
    old.target.publish(key("x"), torch.full((2,), 1.0))
    # A step ahead, and not received yet: on its way, when its sender dies.
    old.target.exchange.end_step(0)
    old.target.publish(key("x", step=1), torch.full((2,), 2.0))
    old.deliver()
    assert stays.tap(-1.0) == 1.0
    old.target.die()
    comes = new.target
    comes.exchange.begin_run(run(1, 1))
    comes.publish(key("x", step=1), torch.full((2,), 30.0))
    new.deliver()
    closed = stays.offer(new.baseline, run(1))
    stays.grafter.step()
    assert stays.tap(-2.0) == 30.0
    assert stays.moves == [run(1, first_step=1)]
    assert [(row.run, row.step, row.status) for row in stays.rows] == [(0, 0, "grafted"), (1, 1, "grafted")]
    assert not stays.failures
    assert not closed


def test_a_rank_that_switches_worlds_late_delays_no_other_rank(
    worlds: tuple[World, World],
) -> None:
    old, new = worlds
    stays = Job(old.baseline)
    stays.grafter.begin_run(run(), PLAN)
    stays.offer(new.baseline, run(1))
    # Ahead: it resumes at another step.
    comes = Job(new.target)
    coming = in_background(lambda: comes.grafter.begin_run(run(1, first_step=3), PLAN))
    stays.grafter.step()
    for _ in range(2):
        stays.tap(-1.0)
        stays.grafter.step()
    coming.result(DEADLINE)
    assert comes.tap(7.0) == 7.0
    assert stays.tap(-1.0) == 7.0
    assert [(row.step, row.status) for row in stays.rows] == [(1, "missing"), (2, "missing"), (3, "grafted")]
    assert "target[0] ended the step without this tap" in str(stays.rows[0].error)


def test_a_withdrawn_or_superseded_world_is_closed_and_never_entered(worlds: tuple[World, World]) -> None:
    old, new = worlds
    stays = Job(old.baseline)
    stays.grafter.begin_run(run(), PLAN)
    first = stays.offer(new.baseline, run(1))
    second = stays.offer(new.baseline, run(2))
    assert (first, second) == (["closed"], [])
    stays.grafter.offer(None)
    assert second == ["closed"]
    stays.mailbox = old.baseline
    old.target.exchange.begin_run(run())
    old.target.publish(key("x", step=1), torch.full((2,), 5.0))
    old.deliver()
    stays.grafter.step()
    assert stays.tap(-1.0) == 5.0
    assert stays.moves == []


def test_a_move_ends_the_old_world_and_only_then_enters_the_new_one() -> None:
    place, calls = Place("baseline", 0, 1, 1), Mock()
    old, new = calls.old, calls.new
    old.timeout, new.timeout = 3.5, 60.0
    old.take_unmatched.return_value = []
    job = Job(SimpleNamespace(place=place, exchange=old))  # type: ignore[arg-type]
    job.grafter.begin_run(run(), PLAN)
    page, tracing = _page(), MagicMock(is_left=True)
    job.grafter._tracing = tracing
    job.grafter.offer(WorldOffer(new, page, run(1), PLAN, calls.moved, calls.closed))
    calls.reset_mock()
    job.grafter.step()
    ends = [each[0] for each in calls.mock_calls if each[0] in ("old.end_run", "old.take_unmatched", "old.close")]
    assert ends[-3:] == ["old.end_run", "old.take_unmatched", "old.close"]
    # The steps before have no tensors there, and the leader says which plan this one has.
    moved = calls.mock_calls.index(call.moved(run(1, first_step=1)))
    assert calls.mock_calls.index(call.old.close()) < moved
    assert calls.mock_calls[moved + 1 :][:2] == [call.new.end_step(0), call.new.announce(1, b"")]
    assert new.timeout == 3.5
    assert job.grafter.exchange is new
    assert page.read().step == 1
    # What traces the lines of a step leaves out those of graftlab.
    tracing.pause.return_value.__exit__.assert_called_once()
