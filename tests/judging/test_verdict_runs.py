"""The runs of a verdict, beside a session that only notes them: their plans, rows, repetitions and failures."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock, call

import pandas as pd
import pytest
from kit.refusals import exactly

from graftlab.control.work import pack_callees
from graftlab.errors import LaunchError, RunError, SessionError, WaitInterrupted
from graftlab.filters.expressions import compile_filter
from graftlab.grafting.filled_memory import Repetition
from graftlab.grafting.self_graft import SelfGraft
from graftlab.judging import floor_cache, job_verdict_runs, verdict_runs
from graftlab.judging.floor_cache import floor_key, known_floor, remember_floor
from graftlab.judging.job_verdict_runs import StepRuns
from graftlab.judging.started_runs import RecordedSteps, StartedRuns
from graftlab.judging.verdict_request import VerdictRequest
from graftlab.judging.verdict_runs import CalledRuns, RunFilters, TracedRun, VerdictAbandoned
from graftlab.plan.pairs import PairRule
from graftlab.plan.plan import GraftPlan
from graftlab.ranks.messages import Acknowledgement, RunSelfGraft
from graftlab.ranks.recorded_step import RecordSummary, graft_record
from graftlab.ranks.remote_functions import call_until_exception
from graftlab.recordings.recorded_side import RecordedSide
from graftlab.rows.schema import Row
from graftlab.rows.store import to_frame
from graftlab.transforms import TransformSpec

PLAN = GraftPlan(b2t="mine", pairs=[PairRule("a", "b")], version=3)
_SOURCE = "def transform(graft_input):\n    return graft_input.target\n"
WEIGHT = {"name": "w", "kind": "param"}


def rows(*of: tuple[str, dict[str, Any], str], version: int = 4, step: int = 2) -> pd.DataFrame:
    """Rows with these names, tags and statuses."""
    made = [
        Row(0, step, order, name, tags, "b2t", "target", 0, status, [0], plan_version=version)
        for order, (name, tags, status) in enumerate(of)
    ]
    return to_frame(made)


X = ("x", {"name": "x"}, "compared")


class Calls:
    """A session of functions: ``answers`` are the runs that it makes, ``made`` their callees, by side, and changes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **request: Any) -> None:
        self.answers: list[Any] = []
        self.made: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.set_aside: set[int] = set()
        self.session: Any = Mock(plan=PLAN, runs=[], row_count=0)
        monkeypatch.setattr(verdict_runs, "start_under", self._start)
        monkeypatch.setattr(verdict_runs, "internals_of", lambda session: SimpleNamespace(set_aside=self.set_aside))
        self.restored = Mock()
        monkeypatch.setattr(verdict_runs, "restore_plan", self.restored)
        usual = {"baseline": "forward(x)", "target": "other(x)"}
        self.runs = CalledRuns(self.session, VerdictRequest(**{**usual, **request}))

    def _start(self, session: Any, changes: Any, callees: Any) -> Any:
        self.made.append((dict(callees), dict(changes)))
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        self.session.runs.append(SimpleNamespace(number=len(self.session.runs), failures={}))
        return answer, GraftPlan(version=4)

    def answer(self, baseline: Any = (), target: Any = (), frame: Any = None, **wait: Any) -> Any:
        run = Mock(baseline=list(baseline), target=list(target), frame=rows(X) if frame is None else frame)
        run.wait = Mock(return_value=run, **wait)
        self.answers.append(run)
        return run


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


# ---- functions -------------------------------------------------------------------------------------------------------


def test_each_run_has_the_users_plan_with_the_verdicts_filters(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Calls(monkeypatch).runs
    runs.before = GraftPlan(
        b2t="True",
        transform=[TransformSpec("source", _SOURCE, where="layer == 1"), TransformSpec("source", _SOURCE)],
        pairs=PLAN.pairs,
    )
    more = PairRule("c", "d")
    found = runs.changes(RunFilters(b2t="x", compare="True", keep="k", leaving="late", pairs=[more]))
    assert found["b2t"] == f"(x) and not {CalledRuns.never_grafted} and not late"
    assert (found["t2b"], found["compare"], found["keep"]) == (None, "True", "k")
    assert [spec.where for spec in found["transform"]] == ["layer == 1", "True"]
    assert list(found["pairs"]) == [*PLAN.pairs, more]
    runs.leave_out([("y", None)])
    assert "fullmatch('y', name)" in str(runs.changes(RunFilters(b2t="True"))["b2t"])
    left_out = runs.changes(RunFilters(t2b="x", compare="True"))
    assert left_out["b2t"] is None
    assert "y" in str(left_out["t2b"])
    assert str(left_out["compare"]).startswith("(True) and not (")
    runs._lent = "w"
    assert runs.changes(RunFilters())["b2t"] == "w"
    assert str(runs.changes(RunFilters(b2t="x"))["b2t"]).endswith(") or w")
    runs.return_weights()
    assert runs.changes(RunFilters())["b2t"] is None
    runs.leave_out([("z", None)])
    runs.take_back([("y", None)])
    only = compile_filter(str(runs.changes(RunFilters(b2t="True"))["b2t"])).matches
    assert [only({"name": name}) for name in ("x", "y", "z")] == [True, True, False]


def test_an_expression_with_arguments_is_refused_before_any_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ({}, {"baseline": print}, {"target": print, "exact": "exact(x)", "baseline": print}):
        with pytest.raises(SessionError, match="is an expression, which takes no args; write them into it"):
            Calls(monkeypatch, args=(1,), **wrong)


def test_all_runs_but_the_first_are_set_aside(calls: Calls) -> None:
    run = calls.answer()
    calls.runs.both("first", RunFilters(compare="True"))
    assert (calls.set_aside, calls.runs.count) == (set(), 1)
    bar = run.wait.call_args.kwargs["bar"]
    assert bar._title == "verdict, run 1 of about 3: first"
    calls.runs.request.stop.set()
    with pytest.raises(KeyboardInterrupt), bar:
        pass
    calls.answers.append(SessionError("refused"))
    with pytest.raises(SessionError, match="refused"):
        calls.runs.both("second", RunFilters())
    assert calls.set_aside == set()


@pytest.mark.parametrize("error", [ValueError(), None])
def test_a_verdict_that_fails_or_ends_restores_the_plan(calls: Calls, error: Exception | None) -> None:
    calls.runs.__exit__(type(error) if error else None, error, None)
    calls.restored.assert_called_once_with(calls.session)
    calls.session.interrupt.assert_not_called()


def test_a_verdict_that_is_stopped_interrupts_its_run_and_says_what_is_left(calls: Calls) -> None:
    with pytest.raises(WaitInterrupted) as stopped, calls.runs:
        raise KeyboardInterrupt
    assert str(stopped.value).startswith("the verdict was stopped before its first run; its code on the ranks was int")
    # No run is its own yet.
    calls.session.interrupt.assert_not_called()
    calls.restored.assert_called_once_with(calls.session)
    calls.answer(side_effect=KeyboardInterrupt)
    with (
        pytest.raises(
            WaitInterrupted,
            match=exactly(
                "the verdict was stopped in its run 1; its code on the ranks was interrupted, and the plan "
                "from before is in force again"
            ),
        ),
        calls.runs,
    ):
        calls.runs.both("first", RunFilters())
    calls.session.interrupt.assert_called_once_with()


def test_a_verdict_of_jobs_that_is_stopped_leaves_them_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdict_runs, "restore_plan", Mock())
    steps = Steps(monkeypatch)
    steps.runs._jobs = jobs = MagicMock()
    with pytest.raises(
        WaitInterrupted,
        match=exactly("the verdict was stopped before its first run; the plan from before is in force again"),
    ):
        steps.runs.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    steps.session.interrupt.assert_not_called()
    jobs.__exit__.assert_called_once()


def test_a_run_under_an_edited_plan_is_not_judged(calls: Calls) -> None:
    calls.answer(frame=rows(X, version=5))
    with pytest.raises(
        VerdictAbandoned,
        match=exactly("the plan was edited during the verdict. Do not edit the filters until it is done"),
    ):
        calls.runs.both("first", RunFilters())
    calls.answer(frame=rows())
    assert len(calls.runs.both("no rows", RunFilters())) == 0
    calls.answer(["a"], ["b"], frame=rows(X, step=7))
    calls.runs.both("second", RunFilters())
    assert calls.runs.returned is not None
    calls.runs.pair("x", 1, 2, {"layer": 3})
    calls.session.tensors.assert_called_once_with("x", rank=1, step=9, layer=3)


def test_only_an_exception_of_the_first_run_is_one_of_the_functions(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verdict_runs, "exception_of_one_side", lambda session, failures: "the target raises")
    # The session's first run was the user's own.
    calls.session.runs.append(SimpleNamespace(number=0, failures={}))
    calls.answer(side_effect=RunError("run 1 failed on target[0]"))
    calls.answer(["a"], ["b"])
    calls.runs.both("first", RunFilters())
    assert (calls.runs.raised, calls.runs.count, calls.runs.returned) == ("the target raises", 1, None)
    assert calls.set_aside == {1}
    assert all(each.func is call_until_exception for each in calls.made[1][0].values())
    # So does the twin in higher precision.
    twin = Calls(monkeypatch, exact="exact(x)")
    monkeypatch.setattr(verdict_runs, "exception_of_one_side", lambda session, failures: "the target raises")
    monkeypatch.setattr(verdict_runs, "known_floor", lambda session, key: None)
    monkeypatch.setattr(verdict_runs, "floor_key", lambda *given: "key")
    monkeypatch.setattr(verdict_runs, "remember_floor", Mock())
    twin.answer(side_effect=RunError("run 0 failed on target[0]"))
    twin.answer(["a"], ["b"])
    twin.runs.both("first", RunFilters())
    twin.answer([SelfGraft()])
    twin.runs.baseline_against_itself(rows(X), [])
    assert [each.func for each in twin.made[-1][0]["baseline"].args[:2]] == [call_until_exception] * 2
    # Grafts of a later run may lead to an exception that neither function raises without them.
    calls = Calls(monkeypatch)
    monkeypatch.setattr(verdict_runs, "exception_of_one_side", lambda session, failures: "the target raises")
    calls.answer(["a"], ["b"])
    calls.runs.both("first", RunFilters())
    calls.answer(side_effect=RunError("run 1 failed on target[0]"))
    with pytest.raises(RunError, match=exactly("run 1 failed on target[0]")):
        calls.runs.both("second", RunFilters())
    assert calls.runs.raised is None


def test_weights_are_lent_from_one_run_on_unless_a_graft_of_them_fails(calls: Calls) -> None:
    lent = rows(("w", WEIGHT, "grafted"), X)
    calls.answer(frame=lent)
    assert list(calls.runs.lend_weights(["w"], ["w"])["name"]) == ["x"]
    _, changes = calls.made[-1]
    assert "w" in str(changes["b2t"])
    assert "w" in str(changes["keep"])
    calls.answer(frame=lent)
    assert list(calls.runs.both("next", RunFilters())["name"]) == ["x"]
    assert all(side[0]["target"] is not side[0]["baseline"] for side in calls.made)
    calls.runs.return_weights()
    calls.answer(frame=lent)
    assert list(calls.runs.both("after", RunFilters())["name"]) == ["w", "x"]
    failed = lent.assign(status=["failed", "compared"], error=["another shape", None])
    alone = lent.assign(status=["missing", "compared"], error=["no such weight", None])
    for frame, why in ((failed, "another shape"), (alone, "no such weight"), (rows(X), "none of them was reached")):
        calls.answer(frame=frame)
        with pytest.raises(SessionError, match=f"the differing weights could not be grafted: {why}"):
            calls.runs.lend_weights(["w"], [])
        assert calls.runs._lent is None


def test_the_targets_repetition_is_made_once(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdict_runs, "floor_key", lambda *given: "key")
    monkeypatch.setattr(verdict_runs, "known_floor", lambda session, key: None)
    remember = Mock()
    monkeypatch.setattr(verdict_runs, "remember_floor", remember)
    assert calls.runs.unwritten_memory() == []
    floor = SelfGraft()
    repetitions = [Repetition(["a"], ["m", "n"]), Repetition(["b", "a"], ["m"])]
    calls.answer([floor], repetitions)
    assert calls.runs.baseline_against_itself(rows(X), ["x"]) == [floor]
    remember.assert_called_once_with(calls.session, "key", [floor])
    assert calls.runs.target_against_itself() == ["a", "b"]
    assert len(calls.made) == 1
    calls.answer([Repetition([], []), Repetition([], [])])
    assert calls.runs.unwritten_memory() == ["m", "n"]
    assert [*calls.made[-1][0]] == ["baseline"]
    # What the baseline reads too, such as padding, makes no difference.
    calls.answer([Repetition([], []), Repetition([], ["m"])])
    assert calls.runs.unwritten_memory() == []


def test_a_failing_target_leaves_the_baselines_floor(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdict_runs, "floor_key", lambda *given: "key")
    known: list[Any] = [None, ["known"]]
    monkeypatch.setattr(verdict_runs, "known_floor", lambda session, key: known.pop(0))
    monkeypatch.setattr(verdict_runs, "remember_floor", Mock())
    calls.answer(side_effect=RunError("run 2 failed on target[0]"))
    calls.answer(["floor"])
    assert calls.runs.baseline_against_itself(rows(X), []) == ["floor"]
    assert [[*sides] for sides, _ in calls.made] == [["baseline", "target"], ["baseline"]]
    assert calls.runs.baseline_against_itself(rows(X), []) == ["known"]
    calls.answer(target=[Repetition(["a"], [])])
    assert calls.runs.target_against_itself() == ["a"]


def test_a_group_without_dependents_has_none_on_any_rank(calls: Calls) -> None:
    calls.answer([["a", "b"], ["b", "c"]])
    assert calls.runs.without_dependents(["a", "b", "c"]) == ["b"]


def test_choices_are_as_far_apart_as_on_the_ranks_that_differ_most(calls: Calls) -> None:
    """Each side's taps are asked for by its own names."""

    def found(distance: float, *, exist: bool = True, is_known: bool = True) -> Any:
        return SimpleNamespace(exist=exist, is_known=is_known, distance=lambda other: distance)

    paired = rows(("a", {"name": "a"}, "compared"), ("b", {"name": "b", "kind": "param"}, "compared"))
    paired = paired.assign(baseline_name=["ours", "w"], target_name=["theirs", "w"])
    calls.answer([found(0.1), found(0.3)], [found(0.0), found(0.0)])
    assert calls.runs.unseen_choices(paired) == (0.3, True)
    asked = {side: callee.args[1] for side, callee in calls.made[-1][0].items()}
    assert asked == {"baseline": ["ours"], "target": ["theirs"]}
    assert all(callee.args[2] is True for callee in calls.made[-1][0].values())
    calls.answer([found(0.1), found(math.nan)], [found(0.0)])
    distance, is_known = calls.runs.unseen_choices(paired)
    assert (math.isnan(distance or 0.0), is_known) == (True, True)
    none = [found(0.1, exist=False), found(0.1, exist=False, is_known=False)]
    calls.answer(none, [found(0.0)])
    assert calls.runs.unseen_choices(paired) == (None, False)


def test_a_match_of_the_present_pairs_is_a_run_of_the_verdict(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        verdict_runs, "match", lambda *given, rounds: asked.append(rounds) or SimpleNamespace(graftable=("p", "q"))
    )
    assert calls.runs.present_pairs() == ["p", "q"]
    assert (asked, calls.runs.count) == ([0], 1)


def test_a_known_floor_is_one_with_the_same_doubtful_taps(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[Any] = []
    monkeypatch.setattr(verdict_runs, "floor_key", lambda *given: keys.append(given[-1]) or "key")
    monkeypatch.setattr(verdict_runs, "known_floor", lambda session, key: ["known"])
    monkeypatch.setattr(verdict_runs, "beyond_one_rounding", lambda frame: ["doubtful"])
    calls.runs.baseline_against_itself(rows(X), ["kept"])
    assert keys == [["kept", "doubtful"]]


def test_a_recording_is_neither_repeated_nor_traced_nor_matched(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch, baseline=Mock(spec=RecordedSide))
    runs = calls.runs
    assert (runs.recorded, runs.shows_module_inputs, runs.can_lend_weights) == (True, False, False)
    assert runs.baseline_against_itself(rows(X), []) == runs.present_pairs() == []
    assert isinstance(runs.traced("", RunFilters(), [], frozenset(), {}), str)
    calls.answer(target=[Repetition([], ["m"])])
    runs.target_against_itself()
    assert runs.unwritten_memory() == ["m"]
    assert len(calls.made) == 1
    # It returns the number of its taps, which is no result of a model.
    calls.answer(baseline=[7], target=[8])
    runs.both("without grafts", RunFilters())
    assert runs.returned is not None
    assert runs.returned.differences == ()


# ---- scripts that are started for each run ---------------------------------------------------------------------------


def started(calls: Calls, start: Callable[[], None], *moved: str) -> StartedRuns:
    record = RecordSummary(("x",), {}, skipped=("s",), not_recorded=2)
    sides: Any = {"baseline": [record, record], "target": [record]}
    recorded = RecordedSteps("folder", sides, {"baseline": [[], moved], "target": [["b", "a"], ["a"]]})
    return StartedRuns(calls.session, VerdictRequest("forward(x)", "other(x)"), start, recorded)


def test_scripts_that_do_not_start_again_end_the_verdict(calls: Calls) -> None:
    def start() -> None:
        raise LaunchError("the port is taken")

    with pytest.raises(VerdictAbandoned, match="the port is taken"):
        started(calls, start).both("first", RunFilters())
    assert calls.made == []


def test_each_run_of_scripts_starts_them_and_has_the_verdicts_filters(calls: Calls) -> None:
    starts: list[None] = []
    runs = started(calls, lambda: starts.append(None))
    wanted = RunFilters(b2t="x", compare="True")
    for count in (1, 2):
        calls.answer()
        runs.both("again", wanted)
        assert len(starts) == count
        assert calls.made[-1][1] == runs.changes(wanted)


def test_a_started_baseline_is_moved_at_each_tap_alone_and_then_at_all_in_turn(calls: Calls) -> None:
    starts: list[None] = []
    runs = started(calls, lambda: starts.append(None))
    calls.answer([SelfGraft(added=["one"], last="x"), SelfGraft()])  # type: ignore[list-item,arg-type]
    calls.answer([SelfGraft(outputs=["o"], returned={"": 0.1}), SelfGraft()])  # type: ignore[list-item]
    first, second = runs.baseline_against_itself(rows(X), ["x"])
    assert len(starts) == 2
    made = [side["baseline"] for side, _ in calls.made]
    assert [(each.func, each.keywords) for each in made] == [
        (graft_record, {"resets": True}),
        (graft_record, {"resets": False}),
    ]
    assert (first.added, first.last, first.outputs, first.returned) == (["one"], "x", ["o"], {"": 0.1})
    assert [(each.skipped, each.not_recorded, each.not_repeated) for each in (first, second)] == [(["s"], 2, [])] * 2
    assert runs.target_against_itself() == ["b", "a"]


def test_a_started_baseline_that_varies_has_no_floor(calls: Calls) -> None:
    runs = started(calls, lambda: pytest.fail("it was started"), "x", "y")
    assert [each.not_repeated for each in runs.baseline_against_itself(rows(X), [])] == [[], ["x", "y"]]


# ---- floors that are known already -----------------------------------------------------------------------------------


def test_a_floor_is_known_only_for_the_same_code_plan_and_values() -> None:
    session: Any = Mock(options=SimpleNamespace(keep_budget=1 << 20))
    frame = rows(X, ("y", {"name": "y", "step": 2}, "failed"))

    def key(
        plan: GraftPlan = PLAN,
        rows: pd.DataFrame = frame,
        callees: Any = ("f(x)", None),
        keep: Any = ("x",),
    ) -> str:
        return floor_key(session, plan, rows, callees, keep)

    same = key()
    assert key(GraftPlan(b2t="other", compare=None, pairs=PLAN.pairs, version=9)) == same
    assert key(rows=rows(("x", {"name": "x", "step": 5}, "compared"), step=5)) == same
    function: Callable[[int], int] = lambda x: x  # noqa: E731
    others = [
        key(GraftPlan(b2t="mine", version=3)),
        key(GraftPlan(b2t="mine", pairs=PLAN.pairs, transform=TransformSpec("source", _SOURCE))),
        key(rows=frame.assign(mean_baseline=0.5)),
        key(rows=frame.assign(dtype="bfloat16")),
        key(rows=frame.assign(status="compared")),
        key(rows=rows(("x", {"name": "x", "layer": 1}, "compared"))),
        key(callees=("g(x)", None)),
        key(callees=("f(x)", "f(x.double())")),
        key(callees=(*pack_callees({"baseline": function}, (1,), {}), None)),
        key(callees=(*pack_callees({"baseline": function}, (2,), {}), None)),
        key(callees=(partial(call_until_exception, *pack_callees({"baseline": function}, (2,), {})), None)),
        key(callees=(partial(call_until_exception, *pack_callees({"baseline": function}, (3,), {})), None)),
        key(keep=("y",)),
    ]
    session.options.keep_budget = 1
    assert len({same, *others, key()}) == len(others) + 2


def test_the_floors_used_last_are_kept_and_none_of_a_baseline_that_varies() -> None:
    class Session:
        pass

    session: Any = Session()
    floor, varies = [SelfGraft()], [SelfGraft(), SelfGraft(not_repeated=["x"])]
    remember_floor(session, "varies", varies)
    assert known_floor(session, "varies") is None
    for number in range(floor_cache._MOST_KEPT):
        remember_floor(session, str(number), floor)
    assert known_floor(session, "0") is floor
    remember_floor(session, "more", floor)
    assert known_floor(session, "0") is floor
    assert known_floor(session, "1") is None
    other: Any = Session()
    assert known_floor(other, "0") is None


# ---- steps of jobs ---------------------------------------------------------------------------------------------------


class Steps:
    """A session of jobs with one baseline and two target ranks; ``found`` answers each question on a self-graft."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **request: Any) -> None:
        self.jobs = Mock(run=0, after=Mock(return_value=6), is_edited=Mock(return_value=False))
        self.jobs.ask.side_effect = self._answer
        self.orders: list[tuple[str, RunSelfGraft]] = []
        self.found: list[Any] = []
        self.ranks = [
            SimpleNamespace(label=f"{side}[{rank}]", place=SimpleNamespace(side=side, rank=rank))
            for side, rank in (("baseline", 0), ("target", 0), ("target", 1))
        ]
        self.session: Any = Mock(plan=PLAN, ranks=self.ranks, row_count=0, options=SimpleNamespace(keep_budget=9))
        self.session.select.return_value = self.ranks[:1]
        monkeypatch.setattr(job_verdict_runs, "JobSteps", lambda *given: self.jobs)
        monkeypatch.setattr(job_verdict_runs, "open_value", lambda rank, packed: packed)
        self.lend = Mock(return_value=GraftPlan(version=4))
        monkeypatch.setattr(job_verdict_runs, "lend_plan", self.lend)
        self.runs = StepRuns(self.session, VerdictRequest(**request))

    def _answer(self, rank: Any, question: Any, kind: Any) -> Any:
        if isinstance(question, RunSelfGraft):
            self.orders.append((rank.label, question))
            return Acknowledgement()
        return SimpleNamespace(packed=self.found.pop(0)) if self.found else Mock()


def test_jobs_that_repeat_a_step_are_measured_and_others_have_no_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, steps=2)
    recorded = [SelfGraft(not_recorded=3), SelfGraft(not_repeated=["t"]), SelfGraft(not_repeated=["t", "u"])]
    grafted = SelfGraft(added=["added"], outputs=["outputs"])  # type: ignore[list-item]
    steps.found = [*recorded, grafted]
    (found,) = steps.runs.baseline_against_itself(rows(X), ["x"])
    assert (found.added, found.outputs, found.not_recorded) == (["added"], ["outputs"], 3)
    assert steps.runs.target_against_itself() == ["t", "u"]
    first, second = steps.orders[:3], steps.orders[3:]
    assert [(name, order.passes, order.keep) for name, order in first] == [
        (rank.label, ("record", "repeat"), ("x",)) for rank in steps.ranks
    ]
    assert [order.passes for _, order in second] == [("graft", "drift"), ("rest",), ("rest",)]
    assert {(order.version, order.steps, order.budget) for _, order in steps.orders} == {(4, 2, 9)}
    assert [each.args[2] for each in steps.jobs.after.call_args_list] == [2, 2]
    # Without a repetition on the baseline nothing is measured, and the record's gaps do not count.
    steps = Steps(monkeypatch)
    steps.found = [SelfGraft(not_recorded=3, not_repeated=["x"]), SelfGraft(), SelfGraft()]
    assert steps.runs.baseline_against_itself(rows(X), []) == [SelfGraft(not_repeated=["x"])]
    assert steps.runs.target_against_itself() == []
    steps.found = [SelfGraft(not_repeated=["x", "x"])]
    assert steps.runs.baseline_changed() == ["x"]


def test_an_edit_between_orders_and_steps_ends_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch)
    steps.lend.return_value = GraftPlan(version=5)
    with pytest.raises(VerdictAbandoned):
        steps.runs.baseline_changed()
    steps.jobs.after.assert_not_called()
    steps.lend.return_value = GraftPlan(version=4)
    steps.jobs.is_edited.return_value = True
    steps.found = [SelfGraft()]
    with pytest.raises(VerdictAbandoned):
        steps.runs.baseline_changed()
    steps.found = [None]
    with pytest.raises(
        SessionError,
        match=exactly(
            "verdict: baseline[0] did not run against itself (whether the baseline is unchanged); its log "
            "has the reason"
        ),
    ):
        steps.runs.baseline_changed()
    steps.jobs.after.return_value = None
    with pytest.raises(VerdictAbandoned):
        steps.runs.baseline_changed()


@pytest.mark.parametrize(
    ("graft_weights", "b2t", "first", "runs"), [(True, "True", 8, 2), (True, None, 6, 1), (False, "True", 6, 1)]
)
def test_rows_begin_after_the_steps_in_which_weights_arrive(
    monkeypatch: pytest.MonkeyPatch, graft_weights: bool, b2t: str | None, first: int, runs: int
) -> None:
    steps = Steps(monkeypatch, steps=2, graft_weights=graft_weights)
    lost = "v", {"name": "v", "kind": "param"}, "failed"
    made = [rows(("w", WEIGHT, "grafted"), lost, X, step=number) for number in range(5, 12)]
    steps.jobs.rows_from.return_value = pd.concat(made, ignore_index=True)
    frame = steps.runs.both("first", RunFilters(b2t=b2t))
    assert steps.jobs.after.call_args.args[2] == runs
    assert sorted(set(frame["step"])) == [first, first + 1]
    assert steps.runs._weights_grafted == (2 if b2t else 0)
    # Rows of grafted weights are no values of the run; those that could not be grafted are reported.
    assert list(frame["name"]) == (["v", "x"] * 2 if b2t else ["w", "v", "x"] * 2)
    assert list(frame.index) == list(range(len(frame)))
    steps.runs.pair("x", 0, 1, {})
    steps.session.tensors.assert_called_once_with("x", rank=0, step=first + 1)
    # Rows of another plan are not those of the run.
    steps.jobs.rows_from.return_value = pd.concat([*made[:-1], rows(X, step=first, version=9)], ignore_index=True)
    with pytest.raises(VerdictAbandoned):
        steps.runs.both("edited meanwhile", RunFilters(b2t=b2t))
    steps.jobs.rows_from.return_value = made[0][:0]
    assert len(steps.runs.both("without rows", RunFilters(b2t=b2t))) == 0
    steps.session.tensors.reset_mock()
    steps.runs.pair("x", 0, 1, {})
    steps.session.tensors.assert_called_once_with("x", rank=0, step=first + 1)
    steps.jobs.is_edited.return_value = True
    with pytest.raises(VerdictAbandoned):
        steps.runs.both("second", RunFilters())


def test_a_newer_pair_stands_in_only_where_steps_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch)
    steps.session.tensors.side_effect = [SessionError("gone"), "the newest pair"]
    assert steps.runs.pair("x", 1, 0, {"layer": 2}) == "the newest pair"
    assert steps.session.tensors.mock_calls == [call("x", rank=1, step=0, layer=2), call("x", rank=1, layer=2)]
    steps.session.tensors.side_effect = SessionError("gone")
    steps.runs._repeats = False
    for runs in (steps.runs, Steps(monkeypatch, steps=2).runs):
        runs.session.tensors.side_effect = SessionError("gone")
        with pytest.raises(SessionError):
            runs.pair("x", 0, 0, {})
        assert runs.session.tensors.call_count in (1, 3)


def test_what_functions_return_is_compared_with_the_requests_in_their_order(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[Any] = []
    monkeypatch.setattr(verdict_runs, "extents_by_request", lambda frame: (len(frame), 8))
    monkeypatch.setattr(verdict_runs, "compare_returned", lambda *given, **more: compared.append((given, more)))
    calls.answer([1.0], [2.0])
    calls.runs.both("first", RunFilters(compare="True"))
    assert compared == [(([1.0], [2.0], PLAN.pairs), {"by_request": (1, 8)})]


def test_steps_of_functions_are_searched_for_a_shift(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdict_runs, "find_misaligned_steps", lambda compared: ("shifted", len(compared)))
    assert calls.runs.misaligned_steps(rows(X)) == ("shifted", 1)


def test_a_search_for_a_shift_takes_enough_steps_whatever_a_run_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, steps=4)
    steps.runs._repeats = False
    monkeypatch.setattr(job_verdict_runs, "may_be_misaligned", lambda compared: True)
    steps.jobs.rows_from.return_value = pd.concat([rows(X, step=number) for number in range(5, 20)], ignore_index=True)
    searched: list[pd.DataFrame] = []
    monkeypatch.setattr(job_verdict_runs, "find_misaligned_steps", searched.append)
    steps.runs.misaligned_steps(rows(X))
    # Two runs of four steps: one has fewer than the search needs.
    assert steps.jobs.after.call_args.args[2] == 2
    assert sorted(searched[0]["step"]) == [*range(6, 14)]
    # Where steps repeat, the sides are where they were.
    steps.runs._repeats = True
    assert steps.runs.misaligned_steps(rows(X)) is None
    assert len(searched) == 1


def test_the_coarser_dtype_of_each_tap_is_known_and_blank_where_they_are_equal() -> None:
    casts = [
        ("a", "float32", "float32 -> bfloat16"),
        ("b", "float16", "float16 -> float32"),
        # The coarsest of its calls counts.
        ("c", "float32", "float32 -> float16"),
        ("c", "float32", "float32 -> bfloat16"),
        ("c", "float32", "float32 -> float16"),
        ("moved", "bfloat16", "cpu -> cuda"),
        ("same", "bfloat16", None),
    ]
    taps = [(name, {"name": name}, "compared") for name, _, _ in casts]
    found = rows(*taps).assign(dtype=[dtype for _, dtype, _ in casts], cast=[cast for _, _, cast in casts])
    expected = {"a": "bfloat16", "b": "float16", "c": "bfloat16", "moved": "", "same": ""}
    assert verdict_runs.coarser_dtypes(found) == expected


def test_a_traced_run_needs_the_values_of_all_ranks_of_both_sides() -> None:
    def trace(number: int, *, lacks: bool = False) -> Any:
        made = SimpleNamespace(values={number: None}, without_fingerprint=(number,) if lacks else ())
        made.beside = lambda earlier: (number, earlier.values)
        return made

    def run(*lacking: int) -> TracedRun:
        a, b, c = (trace(number, lacks=number in lacking) for number in (1, 2, 3))
        return TracedRun(rows(X), [[None, a]], [[b, None], [None, c]])

    assert run().needed == {1, 2, 3}
    assert [run(*each).without_fingerprint for each in ((), (1,), (2,), (3,))] == [False, True, True, True]
    # Where a rank did not trace a call in both runs, the newer run has all that is known.
    both: Any = run().beside(run())
    assert both.baseline == [[None, (1, {1: None})]]
    assert both.target == [[(2, {2: None}), None], [None, (3, {3: None})]]


def test_what_jobs_graft_and_what_came_before_it_is_known_from_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    update = "w", {**WEIGHT, "updated": True}, "compared"
    weight = "w", WEIGHT, "compared"
    frame = rows(weight, X, update)
    for graft_weights, names in ((False, ["x"]), (True, ["x", "w"])):
        steps = Steps(monkeypatch, graft_weights=graft_weights)
        assert list(steps.runs.to_be_grafted(frame)["name"]) == names
    of_jobs = pd.concat([rows(weight, X, update, step=step) for step in (3, 4, 5)], ignore_index=True)
    steps.jobs.rows_from.return_value = pd.concat([of_jobs, rows(weight, step=4).assign(run=1)], ignore_index=True)
    found = steps.runs.weights_before(rows(X, step=5))
    # Those of the newest step before the graft, in the jobs' own run.
    assert found[["name", "step", "run"]].to_numpy().tolist() == [["w", 4, 0]]


def test_the_first_difference_of_jobs_is_none_of_a_tap_that_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch)
    steps.session.options = SimpleNamespace(baseline=1, target=2)
    steps.jobs.rows_from.return_value = pd.concat(
        [rows(X, ("y", {"name": "y"}, "compared")), rows(X).assign(run=1)], ignore_index=True
    )
    judged: list[Any] = []
    monkeypatch.setattr(
        job_verdict_runs, "first_difference", lambda frame, *given: judged.append((list(frame["name"]), given))
    )
    floors: Any = object()
    steps.runs.first_difference(floors)
    steps.runs.leave_out([("y", None)])
    steps.runs.first_difference(floors)
    assert judged == [(["x", "y"], (floors, 5.0, (1, 2))), (["x"], (floors, 5.0, (1, 2)))]
