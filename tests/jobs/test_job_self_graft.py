"""A job's grafter passes the taps of whole steps to an ordered self-graft, and takes them again."""

from __future__ import annotations

import mmap
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from kit.grafters import OneThreadExchange, Post
from kit.refusals import exactly

from graftlab.base.world import Place, RunInfo
from graftlab.errors import SessionError
from graftlab.exchange.status_page import StatusPage
from graftlab.grafting.grafter import Grafter
from graftlab.grafting.kept import KeptPairs
from graftlab.jobs.job_grafter import JobGrafter
from graftlab.lines.operations import modes_in_force
from graftlab.lines.traces import TraceRequest, WantedCall
from graftlab.plan.plan import GraftPlan
from graftlab.ranks.messages import RunSelfGraft, TraceSteps
from graftlab.rows.schema import Row


class Reports:
    """What the job reports."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def row(self, row: Row) -> None:
        self.rows.append(row)

    def seen(self, tags: dict[str, Any]) -> None: ...

    def adopted(self, version: int, step: int) -> None: ...


@pytest.fixture
def reports() -> Reports:
    return Reports()


@pytest.fixture
def post() -> Post:
    return Post()


@pytest.fixture
def job(reports: Reports, post: Post) -> JobGrafter:
    """The baseline's job, in a run with a target that asks for nothing."""
    place, run = Place("baseline", 0, 1, 1), RunInfo(0, 0, (0, 1))
    exchange: Any = OneThreadExchange(place, post)
    OneThreadExchange(Place("target", 0, 1, 1), post).begin_run(run)
    page = StatusPage(mmap.mmap(-1, mmap.PAGESIZE))
    grafter = JobGrafter(place, exchange, page, ContextVar("tags", default=()), reports, KeptPairs())
    grafter.begin_run(run, GraftPlan(version=1))
    return grafter


def step(job: JobGrafter, value: float = 1.0) -> None:
    job.tap("x", torch.full((4,), value), None, {})
    job.step()


def test_a_self_graft_takes_the_taps_under_its_plan_only(job: JobGrafter, post: Post) -> None:
    sent = post.sent
    step(job)
    assert len(sent) == 1
    job.run_self_graft(RunSelfGraft(2, ("record", "repeat"), budget=1 << 20))
    # Ordered, and not yet: the plan differs.
    step(job)
    assert len(sent) == 2
    job.offer_plan(GraftPlan(version=2))
    step(job)
    assert len(sent) == 3
    assert job.self_graft_result() is None
    step(job)
    step(job, 2.0)
    found = job.self_graft_result()
    assert found is not None
    assert found.not_repeated == ["x"]
    # No order came since, and the plan is still that one.
    step(job)
    assert len(sent) == 3
    job.offer_plan(GraftPlan(version=3))
    step(job)
    step(job)
    assert len(sent) == 4


def test_an_order_and_its_withdrawal_take_effect_only_with_a_plan(job: JobGrafter, post: Post) -> None:
    """Orders reach the ranks of a side at different times, but all ranks must treat a step alike."""
    job.run_self_graft(RunSelfGraft(2, ("record",), budget=1 << 20))
    job.offer_plan(GraftPlan(version=2))
    job.step()
    # For a plan that is not in force yet.
    job.run_self_graft(RunSelfGraft(3, ("repeat",)))
    step(job)
    step(job)
    assert not post.sent
    job.offer_plan(GraftPlan(version=3))
    job.step()
    job.forget_orders(4)
    step(job)
    step(job)
    assert not post.sent
    job.offer_plan(GraftPlan(version=4))
    job.step()
    step(job)
    assert len(post.sent) == 1


def test_an_order_whose_plan_was_superseded_is_dropped(job: JobGrafter, post: Post) -> None:
    job.run_self_graft(RunSelfGraft(2, ("record",), budget=1 << 20))
    job.offer_plan(GraftPlan(version=2))
    job.step()
    job.forget_orders(2)
    job.step()
    step(job)
    assert len(post.sent) == 1


def test_a_rank_waits_for_slower_ranks_only_if_it_keeps_step(job: JobGrafter) -> None:
    exchange: Any = job._exchange
    step(job)
    assert exchange.awaited == []
    job.keeps_step = True
    step(job)
    step(job)
    # In step 2 all others have to have ended step 1 before it ends.
    assert exchange.awaited == [0, 1]


def test_a_self_graft_without_a_recording_is_refused(job: JobGrafter) -> None:
    with pytest.raises(SessionError, match="this rank has recorded nothing to run against"):
        job.run_self_graft(RunSelfGraft(2, ("repeat",)))
    with pytest.raises(SessionError, match=exactly("this rank has recorded nothing to run against")):
        # What a later pass records comes too late for the first.
        job.run_self_graft(RunSelfGraft(2, ("repeat", "record")))
    job.run_self_graft(RunSelfGraft(2, ("record",)))
    job.run_self_graft(RunSelfGraft(3, ("repeat",)))
    job.forget_orders(4)
    with pytest.raises(SessionError, match=exactly("this rank has recorded nothing to run against")):
        job.run_self_graft(RunSelfGraft(4, ("graft",)))


def test_a_failure_in_a_self_graft_ends_graftlab_and_not_the_job(
    job: JobGrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures: list[Exception] = []
    job.on_failure = failures.append
    job.run_self_graft(RunSelfGraft(2, ("record",), budget=1 << 20))
    job.offer_plan(GraftPlan(version=2))
    job.step()
    monkeypatch.setattr("graftlab.grafting.tap_records.plain_tensor", lambda shown: 1 / 0)
    value = torch.ones(4)
    assert job.tap("x", value, None, {}) is value
    assert [type(failure) for failure in failures] == [ZeroDivisionError]


def test_an_order_has_its_own_steps_groups_dtypes_and_budget(job: JobGrafter, post: Post) -> None:
    job.offer_plan(GraftPlan(version=2))
    job.step()
    order = RunSelfGraft(2, ("record", "graft"), steps=2, dtypes={"x": "bfloat16"}, keep=("x",), budget=1 << 20)
    job.run_self_graft(order)
    shown = []
    for value in (1.0, 2.0, 3.0, 2.0, 3.0):
        shown.append(job.tap("x", torch.full((4,), value), None, {}))
        job.step()
    found = job.self_graft_result()
    assert found is not None
    assert found.last["x"].tolist() == [3.0] * 4
    # As far off as bfloat16 rounds, and only where the record is grafted.
    off = [float((each - value).abs().max()) for each, value in zip(shown, (1.0, 2.0, 3.0, 2.0, 3.0), strict=True)]
    assert [1e-3 < each < 2e-2 for each in off] == [False, False, False, True, True]
    job.run_self_graft(RunSelfGraft(2, ("record", "rest"), keep=("x",), budget=15))
    for _ in range(4):
        step(job)
    found = job.self_graft_result()
    assert found is not None
    assert (found.last, found.not_recorded) == ({}, 1)


@pytest.mark.parametrize("where", ["_handle", "step"])
def test_defects_end_graftlab_and_mistakes_of_the_user_are_raised(
    where: str, job: JobGrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures: list[Exception] = []
    job.on_failure = failures.append

    def use() -> None:
        value = torch.ones(4)
        if where == "_handle":
            assert job.tap("x", value, None, {}) is value
        else:
            job.step()

    def raising(error: Exception) -> Any:
        def method(*args: Any, **given: Any) -> None:
            raise error

        return method

    monkeypatch.setattr(Grafter, where, raising(ZeroDivisionError()))
    use()
    assert [type(failure) for failure in failures] == [ZeroDivisionError]
    monkeypatch.setattr(Grafter, where, raising(SessionError("a tap that matches both directions")))
    with pytest.raises(SessionError):
        use()
    assert len(failures) == 1


@pytest.mark.parametrize("is_over", [False, True])
def test_a_trace_that_is_cut_off_leaves_nothing_in_the_loop(is_over: bool, job: JobGrafter) -> None:
    job.trace_steps(TraceSteps(2, TraceRequest([WantedCall("x", {}, 9, 0, 1)], frozenset()), 2))
    step(job)
    assert modes_in_force() == []
    job.offer_plan(GraftPlan(version=2))
    step(job)
    # It begins with a step that is a multiple of two.
    if not modes_in_force():
        step(job)
    assert len(modes_in_force()) == 1
    assert job.line_traces() == (None, "")
    if is_over:
        job.end_run()
    else:
        job.offer_plan(GraftPlan(version=3))
        step(job)
    assert modes_in_force() == []
    assert job.line_traces() == ([None], "")
