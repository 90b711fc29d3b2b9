"""A verdict on jobs that do not get on, end or are not there: it is given up, and says why; the plan comes back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kit.in_process import TalkingRank, talking_ranks
from kit.refusals import exactly
from kit.support import wait_until

from graftlab.base.progress import LongWait
from graftlab.control.core import SessionCore
from graftlab.control.run import state_of
from graftlab.errors import RunError, SessionError
from graftlab.judging import job_verdict_runs
from graftlab.judging.job_steps import JobSteps
from graftlab.judging.judge import judge
from graftlab.judging.verdict_request import VerdictRequest
from graftlab.judging.verdict_runs import RunFilters, TracedRun, VerdictAbandoned
from graftlab.plan.plan import GraftPlan
from graftlab.plan.wire import to_wire
from graftlab.ranks.control_thread import pack_value
from graftlab.ranks.messages import (
    Acknowledgement,
    AskSelfGraft,
    FallbackPlan,
    JobCode,
    LineTraces,
    PlanUpdate,
    RunDone,
    RunRequest,
    RunSettled,
    SelfGraftResult,
)
from graftlab.ranks.options import LaunchOptions
from graftlab.rows.store import RowStore
from graftlab.verdict.optimizer_settings import SETTINGS

PLAN = GraftPlan().edit(b2t="name == 'mine'", keep="layer == 3")


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[TalkingRank]]:
    with talking_ranks(tmp_path, 1, 1) as made:
        for each in made:
            each.rank.takes_work = False
        yield made


@pytest.fixture
def session(ranks: list[TalkingRank], tmp_path: Path) -> Iterator[SessionCore]:
    (tmp_path / "run").mkdir()
    store = RowStore(tmp_path / "run")
    held = [each.rank for each in ranks]
    made = SessionCore(LaunchOptions(1, 1, timeout=0.05), held, PLAN, store, tmp_path / "run")
    yield made
    made.close()


def under_way(session: SessionCore, ranks: list[TalkingRank]) -> int:
    """The jobs have begun; returns the number of their run."""
    run = session._runs.begin({0: JobCode(), 1: JobCode()}, session.plan, "continue")
    for each in ranks:
        each.hear_a(RunRequest)
        each.is_at("running", 3)
    return run.number


def filters(plan: Any) -> tuple[Any, ...]:
    return plan.b2t, plan.t2b, plan.compare, plan.keep


def test_a_verdict_times_out_if_jobs_end_no_step(session: SessionCore, ranks: list[TalkingRank]) -> None:
    under_way(session, ranks)
    with pytest.raises(
        SessionError,
        match=r"no job made progress for 0\.05 s .* where they call gl\.step\(\)",
    ):
        judge(session, VerdictRequest())
    assert filters(session.plan) == filters(PLAN)
    for each in ranks:
        # Whatever becomes of the notebook, a job knows to which plan it goes back.
        assert each.hear_a(FallbackPlan).plan == to_wire(PLAN)
        assert filters(each.hear_a(PlanUpdate).plan) == (None, None, "True", SETTINGS)
        assert filters(each.hear_a(PlanUpdate).plan) == filters(PLAN)
        assert each.hear_a(FallbackPlan).plan is None


def test_a_job_that_ends_ends_the_verdict(session: SessionCore, ranks: list[TalkingRank]) -> None:
    run = under_way(session, ranks)
    ranks[0].line.send(RunDone(run, None, None))
    ranks[0].line.send(RunSettled(run, 4))
    wait_until(lambda: state_of(session.runs[-1]).has_ended(ranks[0].rank), "the end of the baseline's part")
    with pytest.raises(
        SessionError,
        match=exactly(
            "the verdict was abandoned: baseline[0] ended before it was done, after its run 0. A verdict "
            "takes about twenty steps of the jobs; let them run longer"
        ),
    ):
        judge(session, VerdictRequest())
    assert filters(session.plan) == filters(PLAN)


def test_a_job_that_dies_ends_the_verdict_and_is_named(
    session: SessionCore, ranks: list[TalkingRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    under_way(session, ranks)
    lend = job_verdict_runs.lend_plan

    def lend_and_die(session: SessionCore, **changes: Any) -> GraftPlan:
        plan = lend(session, **changes)
        if ranks[1].rank.alive:
            ranks[1].die()
            wait_until(lambda: session.runs[-1].failing, "word of its death")
        return plan

    monkeypatch.setattr(job_verdict_runs, "lend_plan", lend_and_die)
    with pytest.raises(RunError, match=r"the verdict was abandoned, .* failed on target\[0\]"):
        judge(session, VerdictRequest())
    assert filters(session.plan) == filters(PLAN)


def test_a_question_to_a_job_that_has_died_raises_its_failure(session: SessionCore, ranks: list[TalkingRank]) -> None:
    under_way(session, ranks)
    steps = JobSteps(session, "verdict", "A verdict takes about twenty steps of the jobs")
    ranks[1].die()
    wait_until(lambda: session.runs[-1].failing, "word of its death")
    with pytest.raises(RunError, match=r"the verdict was abandoned, .* failed on target\[0\]"):
        steps.ask(ranks[1].rank, AskSelfGraft(), SelfGraftResult)


def test_orders_end_with_a_version_of_the_plan_and_so_at_one_step(
    session: SessionCore, ranks: list[TalkingRank]
) -> None:
    under_way(session, ranks)
    with JobSteps(session, "verdict", "A verdict takes about twenty steps of the jobs"):
        ordered = job_verdict_runs.lend_plan(session, compare=session.plan.compare).version
    # If the plan of the last order stayed in force, ranks would drop the order at different steps.
    assert session.plan.version > ordered
    assert filters(session.plan) == filters(PLAN)


@pytest.mark.parametrize("graft_weights", [False, True])
def test_the_state_of_jobs_is_grafted_only_if_it_may_be(
    graft_weights: bool, session: SessionCore, ranks: list[TalkingRank]
) -> None:
    under_way(session, ranks)
    runs = job_verdict_runs.StepRuns(session, VerdictRequest(graft_weights=graft_weights))
    plan = GraftPlan(b2t=runs.changes(RunFilters(b2t="True"))["b2t"])
    kinds: dict[str, dict[str, Any]] = {
        "value": {},
        "weight": {"kind": "param"},
        "moment": {"kind": "optimizer", "updated": True},
        "moment before": {"kind": "optimizer", "updated": False},
    }
    grafted = [name for name, tags in kinds.items() if plan.action_for({"name": name, **tags}).graft]
    assert grafted == (["value", "weight", "moment"] if graft_weights else ["value"])


def test_missing_jobs_are_named_and_the_plan_is_unchanged(session: SessionCore, ranks: list[TalkingRank]) -> None:
    with pytest.raises(
        SessionError,
        match=exactly(
            "verdict: waited 0.05 s for the jobs to begin their run. Start each job with the variables "
            "that gl.listen printed; session.status() shows which ranks have joined, and "
            "gl.listen(timeout=...) sets how long to wait for the next one"
        ),
    ):
        judge(session, VerdictRequest())
    under_way(session, ranks)
    ranks[1].rank.alive = False
    with pytest.raises(
        SessionError,
        match=exactly(
            "verdict: target[0] is missing, and a verdict needs every rank of both jobs; session.status() shows them"
        ),
    ):
        judge(session, VerdictRequest())
    ranks[0].rank.alive = False
    with pytest.raises(
        SessionError,
        match=exactly(
            "verdict: baseline[0], target[0] are missing, and a verdict needs every rank of both jobs; "
            "session.status() shows them"
        ),
    ):
        judge(session, VerdictRequest())
    assert session.plan.version == PLAN.version


def test_a_verdict_waits_for_jobs_that_have_not_joined(
    session: SessionCore, ranks: list[TalkingRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in ranks:
        each.rank.alive, each.rank.is_expected = False, True
    waits: list[tuple[float | None, str]] = []
    request, stops = VerdictRequest(), list[Any]()

    class Looks(LongWait):
        """Lets a rank join at each look: first the baseline's, then the target's, and then their run begins."""

        def __init__(
            self, title: str, what: str, count: Any, total: int | None = None, where: Any = None, stop: Any = None
        ) -> None:
            super().__init__(title, what, count, total, where, stop)
            self.look = (total, where)
            stops.append(stop)

        def next_look(self, remaining: float | None) -> float:
            total, where = self.look
            assert where is not None
            waits.append((total, where()))
            if len(waits) <= 2:
                rank = ranks[len(waits) - 1].rank
                rank.alive, rank.is_expected = True, False
            elif len(waits) == 3:
                under_way(session, ranks)
            return 0.0

    monkeypatch.setattr("graftlab.judging.job_steps.LongWait", Looks)
    # Together the waits are longer than the limit, which holds for each rank that joins.
    limit = session.options.timeout
    clock = SimpleNamespace(
        monotonic=lambda: 0.8 * limit * len(waits) if session.runs == [] else time.monotonic(),
    )
    monkeypatch.setattr("graftlab.judging.job_steps.time", clock)
    with pytest.raises(
        SessionError,
        match=r"no job made progress",
    ):
        judge(session, request)
    # The stop button ends each of these waits.
    assert len(stops) > 1
    assert all(each is request.stop for each in stops)
    told = ["baseline[0], target[0] to join", "target[0] to join", "the jobs to begin their run"]
    assert waits[:3] == [(2, text) for text in told]


def test_a_verdict_ends_its_wait_for_jobs_at_the_time_limit(session: SessionCore, ranks: list[TalkingRank]) -> None:
    ranks[1].rank.alive, ranks[1].rank.is_expected = False, True
    with pytest.raises(
        SessionError,
        match=exactly(
            "verdict: waited 0.05 s for target[0] to join. Start each job with the variables that "
            "gl.listen printed; session.status() shows which ranks have joined, and gl.listen(timeout=...) "
            "sets how long to wait for the next one"
        ),
    ):
        judge(session, VerdictRequest())
    assert session.plan.version == PLAN.version


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"baseline": "f()"}, "cannot be given code to run"),
        ({"args": (1,)}, "cannot be given code to run"),
        ({"exact": len}, "cannot be given code to run"),
        ({"steps": 0}, "steps, the jobs' steps in one run, must be"),
        ({"floor": 0}, "floor must be 'auto' or a number above 0"),
        ({"floor": True}, "floor must be 'auto' or a number above 0"),
        ({"threshold": True}, "must be above 0, not True"),
        ({"output": 3}, "output must be the name of a tap, not 3"),
    ],
)
def test_code_for_jobs_is_refused_before_the_plan_changes(
    session: SessionCore, ranks: list[TalkingRank], given: Any, says: str
) -> None:
    under_way(session, ranks)
    with pytest.raises(SessionError, match=says):
        judge(session, VerdictRequest(**given))
    assert session.plan.version == PLAN.version


def test_a_verdict_on_a_launched_session_needs_functions(session: SessionCore, ranks: list[TalkingRank]) -> None:
    for each in ranks:
        each.rank.takes_work = True
    with pytest.raises(
        SessionError,
        match=exactly(
            "give baseline= and target=, the functions to judge; only a session that listens for "
            "jobs judges without them, in the steps that the jobs make anyway"
        ),
    ):
        judge(session, VerdictRequest())
    with pytest.raises(
        SessionError,
        match=exactly(
            "verdict: steps= and graft_weights= are for a session that listens for jobs. A function that "
            "is called for each run makes all of its steps, and begins from the same weights"
        ),
    ):
        judge(session, VerdictRequest("f()", "f()", steps=2))


def test_a_job_that_did_not_run_against_itself_ends_the_verdict_and_is_named() -> None:
    plan, asked = GraftPlan(), []

    def ask(rank: Any, question: Any, expected: type) -> Any:
        asked.append((rank.label, type(question).__name__))
        return SelfGraftResult(None) if expected is SelfGraftResult else Acknowledgement()

    made: Any = object.__new__(job_verdict_runs.StepRuns)
    ranks: list[Any] = [SimpleNamespace(label="baseline[0]"), SimpleNamespace(label="target[0]")]
    made.session = SimpleNamespace(plan=plan, ranks=ranks, options=SimpleNamespace(keep_budget=1))
    made._jobs, made._steps = SimpleNamespace(ask=ask, is_edited=lambda version: False), 1
    made._publish = lambda wanted: plan.version + 1
    made._after_steps = lambda why, version, runs: 3
    with pytest.raises(
        SessionError, match=exactly("verdict: target[0] did not run against itself (the floor); its log has the reason")
    ):
        made._against_themselves("the floor", ("rest",), ranks[1:])
    # The other rank skips its taps meanwhile.
    assert asked == [("baseline[0]", "RunSelfGraft"), ("target[0]", "RunSelfGraft"), ("target[0]", "AskSelfGraft")]


def test_a_job_that_did_not_trace_its_step_ends_the_verdict(
    session: SessionCore, ranks: list[TalkingRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    under_way(session, ranks)
    answers = {"baseline": LineTraces(None, ""), "target": LineTraces(None, "no room")}

    class Jobs:
        def ask(self, rank: Any, question: Any, expected: type[Any]) -> Any:
            return answers[rank.place.side] if expected is LineTraces else Acknowledgement()

    runs = job_verdict_runs.StepRuns(session, VerdictRequest())
    monkeypatch.setattr(runs, "_jobs", Jobs())
    monkeypatch.setattr(runs, "_publish", lambda wanted: session.plan.version + 1)
    monkeypatch.setattr(runs, "_after_steps", lambda why, version, count: 0)
    given: Any = ("lines", RunFilters(), (), frozenset(), {"baseline": [[]], "target": [[]]})
    with pytest.raises(
        SessionError, match=exactly("verdict: baseline[0] did not trace its step (lines); its log has the reason")
    ):
        runs.traced(*given)
    answers = {side: LineTraces(pack_value([side]), "") for side in ("baseline", "target")}
    monkeypatch.setattr(runs, "_rows_under", lambda version, *rest: version)
    traced = runs.traced(*given)
    assert isinstance(traced, TracedRun)
    assert (traced.baseline, traced.target) == ([["baseline"]], [["target"]])
    answers["baseline"] = answers["target"] = LineTraces(None, "no room")
    assert runs.traced(*given) == "on baseline[0], no room"
    monkeypatch.setattr(runs, "_publish", lambda wanted: session.plan.version + 2)
    with pytest.raises(VerdictAbandoned):
        runs.traced(*given)
