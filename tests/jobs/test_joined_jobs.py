"""What a session does with the plans of jobs that come back to it."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

import graftlab as gl
from graftlab.base.world import RunInfo
from graftlab.control.joined_jobs import JoinedJobs
from graftlab.control.plans import Plans


def joined_under(plan: gl.GraftPlan) -> tuple[JoinedJobs, Plans]:
    plans, nobody = Plans([]), None
    plans.publish(plan)
    anything: Any = nobody
    return JoinedJobs(anything, plans, anything, threading.RLock(), anything, anything), plans


@pytest.mark.parametrize(("base", "counted_from"), [(None, 9), (4, 4)])
def test_a_run_of_jobs_counts_their_steps_from_its_first_or_from_the_base(base: int | None, counted_from: int) -> None:
    jobs, plans = joined_under(gl.GraftPlan(b2t="layer == 0"))
    runs: Any = SimpleNamespace(begin_joint_run=lambda: RunInfo(3, 9, (0, 1)))
    info, plan = replace(jobs, runs=runs).begin_run((1, 2), base)
    assert info == RunInfo(3, 9, (0, 1), (1, 2), counted_from)
    assert plan is plans.newest


def test_the_sessions_plan_supersedes_a_newer_plan_of_a_job() -> None:
    mine = gl.GraftPlan(b2t="layer == 0").edit(keep="layer == 0")
    jobs, plans = joined_under(mine)
    # Its notebook went away, and it compares nothing since.
    jobs.supersede(mine.edit(b2t=None, keep=None, compare="name == 'x'"))
    assert (plans.newest.b2t, plans.newest.keep, plans.newest.version) == ("layer == 0", "layer == 0", 3)
    # Of two plans of one version, a job would keep its own.
    jobs.supersede(replace(mine, compare="name == 'x'", version=3))
    assert (plans.newest.b2t, plans.newest.version) == ("layer == 0", 4)
    jobs.supersede(plans.newest)
    assert plans.newest.version == 4


def test_the_plan_of_a_verdict_stays_temporary_if_it_supersedes_that_of_a_job() -> None:
    mine = gl.GraftPlan(b2t="layer == 0")
    for comes_back in (JoinedJobs.supersede, lambda jobs, plan: jobs.resume(MagicMock(), plan, published=True)):
        plans, runs = Plans([]), MagicMock()
        plans.publish(mine)
        anything: Any = None
        jobs = JoinedJobs(runs, plans, anything, threading.RLock(), anything, anything)
        plans.publish_temporary(mine.edit(b2t="True"))
        comes_back(jobs, gl.GraftPlan(compare="name == 'x'", version=7))
        assert (plans.newest.b2t, plans.newest.version) == ("True", 8)
        plans.restore()
        assert (plans.newest.b2t, plans.newest.version) == ("layer == 0", 9)


def test_jobs_with_the_same_or_an_older_plan_change_nothing() -> None:
    mine = gl.GraftPlan(b2t="layer == 0").edit(keep="layer == 0")
    jobs, plans = joined_under(mine)
    for theirs in (mine, gl.GraftPlan(compare="name == 'x'")):
        jobs.supersede(theirs)
    assert plans.all() == [mine]
