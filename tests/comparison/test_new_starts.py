"""What a new start of both scripts does before a run, with a session that only notes what it is asked."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from kit.refusals import exactly

import graftlab as gl
from graftlab.comparison import started_scripts
from graftlab.comparison.answers import Answer, Comparison
from graftlab.comparison.repeats import JudgingChoice
from graftlab.comparison.started_scripts import StartedScripts
from graftlab.errors import RunError
from graftlab.judging.started_runs import RecordedSteps
from graftlab.judging.verdict_request import VerdictRequest
from graftlab.judging.verdict_runs import VerdictAbandoned
from graftlab.ranks.call_description import CallDescription
from graftlab.ranks.held_update import UpdateDescription
from graftlab.ranks.holding import OfUpdate, ScriptEnd, held_unit
from graftlab.ranks.recorded_step import RecordSummary
from graftlab.rows.schema import COLUMNS
from graftlab.verdict.findings import Findings


class Noted:
    """A session whose ranks hold each unit that they are sent to, or what ``holds`` has for one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, holds: dict[tuple[str, int], object] | None = None) -> None:
        self.done: list[object] = []
        self._holds = holds or {}
        self._at: tuple[object, object] = ("", "")
        for name in ("replace_ranks", "take_baseline_weights", "take_equal_inputs"):
            monkeypatch.setattr(started_scripts, name, lambda *_, name=name: self.done.append(name))

    def run(self, baseline: Any, target: Any, args: tuple[object, ...] = ()) -> SimpleNamespace:
        if baseline is held_unit:
            ours, theirs = ([self._holds.get(each, each)] for each in self._at)  # type: ignore[call-overload]
            return SimpleNamespace(baseline=ours, target=theirs)
        if isinstance(baseline, partial):
            self._at = baseline.args, target.args
            self.done.append(self._at)
        else:
            name = baseline.method.__qualname__ if isinstance(baseline, OfUpdate) else baseline.__name__
            self.done.append((name, *args))
        return SimpleNamespace()


def started(session: Any, *, training: bool = False) -> StartedScripts:
    return StartedScripts(session, lambda: [], training=training)


def test_a_new_start_takes_the_same_values_at_the_same_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = Noted(monkeypatch)
    scripts = started(noted, training=True)
    scripts.keep({"baseline": ("update", 1), "target": ("update", 2)})
    scripts._units = {"baseline": ("update", 3), "target": ("update", 4)}
    scripts._reach()
    begins: list[object] = [
        "replace_ranks",
        "take_baseline_weights",
        (("update", 1), ("update", 2)),
        "take_equal_inputs",
        ("HeldUpdate.keep_inputs",),
        (("update", 3), ("update", 4)),
        ("prepare_once", False),
    ]
    assert noted.done == [*begins, "take_equal_inputs"]
    noted.done.clear()
    scripts._reach(takes_inputs=False)
    assert noted.done == begins
    assert scripts.starts == 2


def test_a_call_is_reached_without_values_of_the_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = Noted(monkeypatch)
    scripts = started(noted)
    scripts._units, scripts._backward = {"baseline": ("call", 3), "target": ("call", 3)}, True
    scripts._reach()
    assert noted.done == ["replace_ranks", (("call", 3), ("call", 3)), ("prepare_once", True)]


@pytest.mark.parametrize(
    ("holds", "said"),
    [
        (("call", 2), "the target was started again and waits before call 3"),
        (("update", 3), "the target was started again and waits before call 3"),
        (ScriptEnd("ValueError: x"), r"the target was started again and ended \(ValueError: x\) before call 3"),
        (ScriptEnd(None), "the target was started again and ended before call 3"),
    ],
)
def test_a_side_that_does_not_reach_the_same_call_again_is_named(
    holds: object, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = started(Noted(monkeypatch, {("call", 3): holds}))
    scripts._units = {"baseline": ("call", 1), "target": ("call", 3)}
    with pytest.raises(gl.SessionError, match=said):
        scripts._reach()


def test_scripts_are_not_started_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = Noted(monkeypatch)
    scripts = started(noted)
    scripts.starts = started_scripts.MOST_STARTS
    with pytest.raises(VerdictAbandoned, match=exactly("the scripts were started 100 times, which is the limit")):
        scripts._reach()
    assert noted.done == []


@pytest.mark.parametrize("backward", [True, False])
def test_a_backward_pass_that_fails_is_left_out_of_later_starts(
    backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached: list[bool] = []

    class Failing:
        folder = Path(".")
        options = SimpleNamespace(keep_budget=0)

        def run(self, *recorders: Any) -> SimpleNamespace:
            if reached == [backward]:
                raise RunError("RuntimeError: no gradient\nTraceback")
            return SimpleNamespace(baseline=[], target=[])

    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: None)
    scripts = started(Failing())
    monkeypatch.setattr(scripts, "_reach", lambda: reached.append(scripts._backward))
    scripts._backward = backward
    if not backward:
        with pytest.raises(RunError):
            scripts._record("call 1")
        return
    assert scripts._record("call 1") is None
    # The failed start is not recorded: a further start takes its place, before the repetition.
    assert reached == [True, False, False]
    assert scripts.add_backward() == "RuntimeError: no gradient"


# ---- one judgement --------------------------------------------------------------------------------------------------


class Judged(StartedScripts):
    """Scripts whose starts are only noted. ``given`` has the descriptions that were judged."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: Answer = "agree") -> None:
        super().__init__(SimpleNamespace(), lambda: [], training=False)  # type: ignore[arg-type]
        self.done: list[object] = []
        self.given: list[Any] = []

        def judge(repeats: object, ours: Any, theirs: Any, *more: object) -> Comparison:
            self.done.append("judge")
            self.given = [*ours, *theirs]
            nothing: Any = Findings(pd.DataFrame(), 5.0, 1)
            return Comparison(nothing, 1, self.session, None, answer)

        monkeypatch.setattr(started_scripts, "judge_held_calls", judge)
        monkeypatch.setattr(started_scripts, "judge_held_updates", judge)

    def _reach(self, *, takes_inputs: bool = True) -> None:
        self.starts += 1
        self.done.append((self._units["target"], self._backward, takes_inputs))

    def _record(self, where: str) -> str | None:
        self.done.append(where)
        shown = {
            side: [RecordSummary((f"{side} tap",), {"": torch.zeros(1)}, (), 0)] for side in ("baseline", "target")
        }
        self._recorded = RecordedSteps("", shown, {})  # type: ignore[arg-type]
        return None


def call(number: int = 1, **more: Any) -> CallDescription:
    usual: Any = {"needs_backward": False, "taps": (), "plain": {"": torch.ones(1)}, "tapped": {}}
    return CallDescription("Net", number, **{**usual, **more})


def update() -> UpdateDescription:
    return UpdateDescription("AdamW", 2, 1, {}, {}, {}, {}, {}, {}, (), (), not_repeated=True)


def test_a_call_is_judged_by_what_its_first_start_showed(monkeypatch: pytest.MonkeyPatch) -> None:
    scripts = Judged(monkeypatch)
    scripts._no_backward = "of an earlier call"
    held = call(3, not_repeated=("a",), fails_when_repeated="KeyError", needs_backward=True)
    assert scripts.judge_call([held], [held], JudgingChoice(), None).answer == "agree"
    # What cannot be repeated in its process says nothing about runs that begin anew.
    assert [(each.taps, each.not_repeated, each.fails_when_repeated) for each in scripts.given] == [
        (("baseline tap",), (), None),
        (("target tap",), (), None),
    ]
    assert all(each.tapped[""].tolist() == [0.0] for each in scripts.given)
    assert scripts.add_backward() is None
    # The scripts continue from there.
    assert scripts.done == ["call 3 of Net", "judge", (("call", 3), True, True)]


def test_an_update_is_shown_as_it_is_before_the_baselines_values_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    scripts = Judged(monkeypatch)
    scripts._units, scripts._backward, scripts._no_backward = {"target": ("call", 1)}, True, "of an earlier call"
    compared = scripts.judge_update([update()], [update()], JudgingChoice(), None, {})
    assert (compared.answer, compared.starts) == ("agree", 2)
    assert [each.not_repeated for each in scripts.given] == [False, False]
    # Values that the target has taken would hide how its own differ.
    unit = "update", 2
    assert scripts.done == ["update 2 of the weights", (unit, False, False), "judge", (unit, False, True)]
    assert scripts.add_backward() is None


def test_scripts_that_differ_are_not_started_to_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    scripts = Judged(monkeypatch, "differ")
    assert scripts.judge_call([call()], [call()], JudgingChoice(), None).answer == "differ"
    assert scripts.done == ["call 1 of Net", "judge"]


@pytest.mark.parametrize("explain", [True, False])
def test_an_update_has_no_output_that_could_be_chosen(explain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[VerdictRequest] = []
    monkeypatch.setattr(started_scripts, "StartedRuns", lambda session, request, *_: asked.append(request))
    monkeypatch.setattr(started_scripts, "judge_runs", lambda runs: "the verdict")
    scripts = Judged(monkeypatch)
    scripts._record("call 1")
    choice = JudgingChoice(output="logits", floor=1e-3, threshold=7.0)
    given = {} if explain else {"explain": False}
    assert scripts.verdict(choice, **given) == "the verdict"  # type: ignore[comparison-overlap]
    (request,) = asked
    assert (request.output, request.explain) == (("logits", True) if explain else (None, False))
    assert (request.floor, request.threshold) == (1e-3, 7.0)


@pytest.mark.parametrize(
    ("ours", "theirs", "backward"), [(False, False, False), (True, True, True), (True, False, False)]
)
def test_each_start_has_a_backward_pass_only_where_both_calls_may_have_one(
    ours: bool, theirs: bool, backward: bool
) -> None:
    scripts: Any = object.__new__(StartedScripts)
    scripts._record = lambda what: f"{what} moved"
    scripts._not_comparable = lambda moved, choice: (moved, scripts._backward, choice)
    calls = [
        CallDescription("Net", 3, needs, (), {"": torch.ones(2, requires_grad=needs)}, {}) for needs in (ours, theirs)
    ]
    found = scripts.judge_call(calls[:1], calls[1:], "a choice", None)
    assert found == ("call 3 of Net moved", backward, "a choice")


def test_scripts_that_do_not_repeat_themselves_have_no_rows_of_the_last_run() -> None:
    last = pd.DataFrame([{**dict.fromkeys(COLUMNS, 0), "name": "h", "tags": {}, "status": "compared"}])
    scripts = started(SimpleNamespace(frame=last, options=SimpleNamespace(target=2)))
    compared = scripts._not_comparable("It moves.", JudgingChoice(threshold=7.0))
    found = compared.findings
    assert (len(found.frame), found.inconclusive, found.threshold, found.target_ranks) == (0, ["It moves."], 7.0, 2)
    assert (compared.answer, compared.runs) == ("inconclusive", 2)


def test_only_the_weights_are_taken_from_the_baseline_and_the_plan_is_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[object] = []
    monkeypatch.setattr(started_scripts, "lend_plan", lambda session, **plan: done.append(plan))
    monkeypatch.setattr(started_scripts, "restore_plan", lambda session: done.append("restored"))
    session: Any = SimpleNamespace(run=lambda *both: done.append([each.method.__name__ for each in both]))
    started_scripts.take_baseline_weights(session)
    assert done == [{"b2t": "kind == 'param'"}, ["take_weights"] * 2, "restored"]
