"""Two scripts from their first call to their ends: what is judged, what is only looked at, and when that is over."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pandas as pd
import pytest
import torch
from kit.refusals import exactly

from graftlab.comparison import scripts, unit_judge
from graftlab.comparison.answers import Answer, Comparison, ComparisonStopped
from graftlab.comparison.repeats import JudgingChoice
from graftlab.comparison.scripts import ScriptChoice, _HeldInTurn, compare_scripts
from graftlab.diffs.results import written_path
from graftlab.errors import RunError, SessionError
from graftlab.jobs.held_script import uncompared_calls
from graftlab.jobs.script_launcher import ScriptSettings
from graftlab.jobs.script_process import ScriptCommand
from graftlab.jobs.script_rank import leave
from graftlab.ranks.call_description import CallDescription
from graftlab.ranks.held_update import UpdateDescription
from graftlab.ranks.holding import ScriptEnd
from graftlab.verdict.added import COLUMNS
from graftlab.verdict.findings import Findings

# Seconds between two calls of a script.
BETWEEN = 20.0


def call(number: int, result: torch.Tensor | None = None, **more: Any) -> CallDescription:
    returned = {"logits": torch.full((8,), float(number)) if result is None else result}
    return replace(CallDescription("Net", number, False, ("fc",), returned, returned), **more)


def calls(count: int) -> list[CallDescription]:
    return [call(number) for number in range(1, count + 1)]


def update(number: int, **more: Any) -> UpdateDescription:
    made = object.__new__(UpdateDescription)
    usual = {"optimizer": "AdamW", "number": number, "calls": 1, "not_repeated": False, "has_closure": False}
    made.__dict__.update({**usual, **more})
    return made


@dataclass(frozen=True)
class Late:
    """A unit that a script reaches after this many seconds."""

    unit: object
    seconds: float


def compared(answer: Answer, **found: Any) -> Comparison:
    row = {"name": "w", "group": "fc", "tags": {"kind": "param_grad"}, "label": "clean", "error": 0.1, "ratio": 0.5}
    frame = pd.DataFrame([{**row, "added": 0.0, "dtype": "float32", "cast": None, "order": 0}])
    return Comparison(Findings(**{"frame": frame, "threshold": 5.0, "target_ranks": 1, **found}), 1, None, None, answer)  # type: ignore[arg-type]


class Scripts:
    """A session of two scripts that make these calls and updates in turn, on a clock that only they move.

    A side with several ranks has a tuple for each call.
    """

    def __init__(self, folder: Path, baseline: Iterable[object], target: Iterable[object]) -> None:
        self.folder = folder
        self.plan = SimpleNamespace(pairs=())
        self.edit = lambda **changes: None
        self.ranks = [SimpleNamespace(alive=True), SimpleNamespace(alive=True)]
        self.now = 0.0
        self.asked: list[str] = []
        self.closed = False
        self.failures: list[str] = []
        self._units = {"baseline": iter(baseline), "target": iter(target)}
        self._held: dict[str, Any] = {side: next(self._units[side]) for side in self._units}

    def run(self, baseline: Callable[..., object] | None, target: Callable[..., object] | None = None) -> Any:
        results = {side: self._ask(side, function) for side, function in (("baseline", baseline), ("target", target))}
        return SimpleNamespace(done=True, **results)

    def start(self, *functions: Any, on_failure: str) -> Any:
        assert on_failure == "continue"
        self.now += BETWEEN
        asked = {side for side, function in zip(self._held, functions, strict=True) if function}
        seconds = 0.0
        for side in asked:
            if isinstance(late := self._held[side], Late):
                self._held[side], seconds = late.unit, late.seconds
        run = self.run(*functions)
        run.done = not seconds

        def wait_until(is_over: Callable[[], bool], bar: object) -> None:
            if not run.done:
                self.now += seconds
                run.done = not is_over()

        def raise_failures(before: str) -> None:
            raise RunError(before + "it died", {})

        run._state = SimpleNamespace(
            where=lambda: "where each rank is", wait_until=wait_until, raise_failures=raise_failures
        )
        return run

    def close(self) -> None:
        self.closed = True

    def _ask(self, side: str, function: Callable[..., object] | None) -> list[Any]:
        if function is None:
            return [None]
        self.asked.append(f"{side} {getattr(function, 'method', function).__name__}")
        if function is scripts.release_call:
            self._held[side] = next(self._units[side], ScriptEnd())
        held = self._held[side]
        ranks = [*held] if isinstance(held, tuple) else [held]
        if function is scripts.describe_result:
            return [
                replace(each, taps=(), whole_numbers={}) if isinstance(each, CallDescription) else each
                for each in ranks
            ]
        return ranks


class Compared:
    """A comparison of two scripts, and the units that were judged in it."""

    def __init__(self, folder: Path, choice: ScriptChoice) -> None:
        self.folder, self.choice = folder, choice
        self.judged: list[str] = []
        # By unit, such as "call 2".
        self.answers: dict[str, Answer | Comparison] = {}
        self.seconds = 0.0
        self.session_type = Scripts
        self.started: Any = None
        self.scripts: Scripts

    def judge(self, baseline: Iterable[object], target: Iterable[object] | None = None) -> Comparison:
        ours, theirs = itertools.tee(baseline) if target is None else (baseline, target)
        self.scripts = self.session_type(self.folder, ours, theirs)
        self.turns = _HeldInTurn(self.scripts, self.choice, self.started)  # type: ignore[arg-type]
        return self.turns.judge()

    def answer(self, kind: str, baseline: Any, target: Any) -> Comparison:
        assert kind == "update" or all(each.taps for each in (*baseline, *target))
        self.judged.append(f"{kind} {baseline[0].number}")
        self.scripts.now += self.seconds
        answer = self.answers.get(self.judged[-1], "agree")
        return answer if isinstance(answer, Comparison) else compared(answer)


@pytest.fixture
def of_scripts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Compared]:
    made: list[Compared] = []

    def make(**choice: Any) -> Compared:
        made.append(Compared(tmp_path, ScriptChoice(**choice)))
        return made[-1]

    monkeypatch.setattr(unit_judge, "judge_held_calls", lambda _, *sides: made[-1].answer("call", *sides[:2]))
    monkeypatch.setattr(unit_judge, "judge_held_updates", lambda _, *sides: made[-1].answer("update", *sides[:2]))
    monkeypatch.setattr(scripts, "scripts_of", lambda session: {})
    monkeypatch.setattr(scripts, "other_exit_code", lambda ended: None)
    monkeypatch.setattr(scripts, "time", SimpleNamespace(monotonic=lambda: made[-1].scripts.now if made else 0.0))
    return make


# ---- calls -----------------------------------------------------------------------------------------------------------


def test_four_calls_are_judged_by_default_and_the_results_of_later_ones_looked_at(
    of_scripts: Callable[..., Compared],
) -> None:
    found = of_scripts()
    found.seconds = 100.0
    agree = found.judge(calls(6))
    assert found.judged == ["call 1", "call 2", "call 3", "call 4"]
    assert agree.answer == "agree"
    assert agree.remarks == ("4 calls of Net agree, and so do the results of the next 2 calls.",)
    # To describe a whole call repeats it several times.
    described = [each for each in found.scripts.asked if "describe" in each and each.startswith("baseline")]
    assert described == ["baseline describe_call"] * 4 + ["baseline describe_result"] * 3


def test_only_held_calls_match_weights_that_names_leave_unpaired(
    monkeypatch: pytest.MonkeyPatch, of_scripts: Callable[..., Compared]
) -> None:
    # Of scripts that are started again, pairs by value cannot be confirmed.
    given: list[object] = []

    def judge(choice: object) -> Comparison:
        given.append(choice)
        return compared("agree")

    monkeypatch.setattr(unit_judge, "judge_held_calls", lambda *parts: judge(parts[3]))
    assert of_scripts(judging=JudgingChoice(threshold=7.0)).judge(calls(1)).answer == "agree"
    assert given == [JudgingChoice(threshold=7.0, match_trained=True)]
    refused = of_scripts()
    refused.started = Mock(starts=3, judge_call=lambda *parts: judge(parts[2]))
    monkeypatch.setattr(unit_judge, "why_not_repeated", lambda _: "It cannot be repeated.")
    refused.judge(calls(1))
    assert given[1:] == [JudgingChoice(match_trained=True), JudgingChoice()]


@pytest.mark.parametrize(
    "result", [torch.full((8,), 9.0), torch.ones(9), torch.full((8,), torch.nan)], ids=["numbers", "shape", "nan"]
)
def test_a_later_call_whose_result_differs_is_judged_and_named_by_its_number(
    result: torch.Tensor, of_scripts: Callable[..., Compared]
) -> None:
    found = of_scripts(calls=2)
    found.seconds = 100.0
    found.answers = {"call 5": "differ"}
    differ = found.judge(calls(6), [*calls(4), call(5, result), call(6)])
    assert found.judged == ["call 1", "call 2", "call 5"]
    assert (differ.answer, differ.remarks[0]) == (
        "differ",
        "2 calls of Net agree, and so do the results of the next 2 calls. In call 5, of Net:",
    )


def test_a_later_call_that_lacks_a_value_is_judged_although_its_other_values_agree(
    of_scripts: Callable[..., Compared],
) -> None:
    more = call(3).plain | {"router": torch.ones(8)}
    found = of_scripts(calls=2)
    found.answers = {"call 3": "differ"}
    assert found.judge([*calls(2), call(3, plain=more)], calls(3)).answer == "differ"
    assert found.judged == ["call 1", "call 2", "call 3"]


def test_tokens_are_looked_up_in_whole_descriptions_of_the_last_two_calls(
    monkeypatch: pytest.MonkeyPatch, of_scripts: Callable[..., Compared]
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(_HeldInTurn, "_chosen_tokens", lambda turns, _: given.append((turns._before, turns._newest)))
    found = of_scripts(calls=1)
    found.answers, found.seconds = {"call 3": "differ"}, 100.0
    tokens = {"ids": torch.tensor([1])}
    ours, theirs = ([*calls(2), call(3, torch.full((8,), size), whole_numbers=tokens)] for size in (3.0, 9.0))
    found.judge(ours, theirs)
    (((before, its_partner), newest),) = given
    assert (before.number, its_partner.number) == (2, 2)
    assert [(each.number, each.whole_numbers) for each in newest] == [(3, tokens), (3, tokens)]


def test_of_several_ranks_the_first_stands_for_its_side(
    monkeypatch: pytest.MonkeyPatch, of_scripts: Callable[..., Compared]
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(_HeldInTurn, "_chosen_tokens", lambda turns, _: given.append((turns._before, turns._newest)))
    found = of_scripts(calls=1)
    found.answers, found.seconds = {"call 3": "differ"}, 100.0
    ranks = [(each, replace(each, number=each.number + 100, model="Other")) for each in calls(3)]
    theirs = [*ranks[:2], tuple(replace(each, plain=call(9).plain) for each in ranks[2])]
    (said,) = found.judge(ranks, theirs).remarks
    assert said == "1 call of Net agrees, and so do the results of the next call. In call 3, of Net:"
    assert [[each.number for each in pair] for pair in given[0]] == [[2, 2], [3, 3]]


def test_what_is_awaited_is_shown_with_its_number_and_the_place_of_each_rank(
    monkeypatch: pytest.MonkeyPatch, of_scripts: Callable[..., Compared]
) -> None:
    shown: list[tuple[str, str]] = []
    monkeypatch.setattr(scripts, "LongWait", lambda title, *_, where: shown.append((title, where())))
    found = of_scripts(calls=2)
    found.seconds = 100.0
    found.judge([call(1, raises="ValueError: x"), *calls(3)])
    titles = ["a call", "call 2", "call 3", "call 4"]
    assert shown == [(f"waiting for {what}", "where each rank is") for what in titles]


def test_results_that_prove_nothing_end_the_look_at_further_calls(of_scripts: Callable[..., Compared]) -> None:
    found = of_scripts(calls=1)
    found.seconds = 100.0
    empty = [call(number, plain={}) for number in range(2, 9)]
    agree = found.judge([call(1), *empty])
    assert agree.remarks == ("1 call of Net agrees.", scripts._NOT_ALL)
    assert found.scripts.asked.count("baseline release_call") == 1


def test_calls_before_an_update_say_nothing_of_those_after_it(of_scripts: Callable[..., Compared]) -> None:
    found = of_scripts(calls=8)
    found.answers = {"call 2": "differ"}
    needs = call(2, needs_backward=True), call(3, needs_backward=True)
    # The baseline has called its model without gradients only before the first update.
    result = found.judge([call(1), update(1), *needs, update(2)], [call(1), update(1), call(2), needs[1], update(2)])
    assert result.answer == "differ"
    assert found.judged == ["call 1", "update 1", "call 2", "call 3"]


@pytest.mark.parametrize(("seconds", "looked_at"), [(100.0, 6), (1.0, 1)])
def test_further_results_are_looked_at_as_long_as_the_judgement_took(
    seconds: float, looked_at: int, of_scripts: Callable[..., Compared]
) -> None:
    # A short judgement leaves ten seconds, in which one more call comes.
    found = of_scripts(calls=1)
    found.seconds = seconds
    agree = found.judge(call(number) for number in itertools.count(1))
    assert agree.remarks[1] == scripts._NOT_ALL
    assert len(found.turns._so_far.results) == looked_at


@pytest.mark.parametrize("how", ["keep_going", "started"])
def test_scripts_that_continue_or_began_again_are_not_delayed_by_later_results(
    how: str, of_scripts: Callable[..., Compared]
) -> None:
    found = of_scripts(calls=2, keep_going=how == "keep_going")
    if how == "started":
        found.started = SimpleNamespace(starts=3)
    found.seconds = 100.0
    assert scripts._NOT_ALL in found.judge(calls(6)).remarks
    assert found.scripts.asked.count("baseline release_call") == 1


def test_a_call_is_awaited_however_long_until_enough_were_judged(of_scripts: Callable[..., Compared]) -> None:
    found = of_scripts(calls=2)
    agree = found.judge([call(1), Late(call(2), 1000.0), Late(call(3), 10_000.0), call(4)])
    assert found.judged == ["call 1", "call 2"]
    assert (agree.answer, agree.remarks) == ("agree", ("2 calls of Net agree.", scripts._NOT_ALL))


def test_calls_in_other_processes_of_a_side_are_named_as_not_checked(
    of_scripts: Callable[..., Compared], tmp_path: Path
) -> None:
    uncompared_calls(tmp_path, "target").touch()
    remarks = of_scripts(calls=1).judge(calls(1)).remarks
    assert [each for each in remarks if "other processes" in each] == [
        "Not checked: calls of models in other processes of the target, such as a data loader's workers."
    ]


def test_a_later_call_is_looked_at_where_scripts_could_be_started_again_and_were_not(
    of_scripts: Callable[..., Compared],
) -> None:
    found = of_scripts(calls=2)
    found.started, found.seconds = SimpleNamespace(starts=0), 100.0
    assert found.judge(calls(3)).remarks == ("2 calls of Net agree, and so do the results of the next call.",)


@pytest.mark.parametrize(("ties", "answer"), [((True, True), "agree"), ((True, False), "differ")])
def test_tokens_that_differ_clear_a_call_only_if_each_of_them_is_a_tie(
    ties: tuple[bool, ...], answer: Answer, monkeypatch: pytest.MonkeyPatch, of_scripts: Callable[..., Compared]
) -> None:
    tokens = [SimpleNamespace(is_tie=is_tie) for is_tie in ties]
    monkeypatch.setattr(_HeldInTurn, "_chosen_tokens", lambda turns, compared: tokens)
    monkeypatch.setattr(scripts, "sentence_on", lambda found, number, model: f"Tokens of call {number}, of {model}.")
    found = of_scripts()
    found.answers = {"call 3": "differ"}
    result = found.judge([call(1, model="Embed"), call(2), call(3)])
    assert result.answer == answer
    said = "1 call of Embed and 1 call of Net agree. Tokens of call 3, of Net."
    assert result.remarks == ((said, scripts._AFTER_A_TIE) if answer == "agree" else (said,))


def test_state_that_an_earlier_call_left_differing_is_said_before_what_is_named(
    of_scripts: Callable[..., Compared],
) -> None:
    left = [torch.arange(8.0) + number for number in range(3)]
    ours = [call(number, plain={"['state']": each}) for number, each in enumerate(left, 1)]
    theirs = [
        call(number, plain={written_path("args[1]"): each * (1 + (number == 2))}) for number, each in enumerate(left, 1)
    ]
    found = of_scripts()
    found.answers = {"call 3": "differ"}
    before, state, *_ = found.judge(ours, theirs).remarks
    assert (before, state[:35]) == ("2 calls of Net agree. In call 3, of Net:", "State differs that call 2 has left:")
    # Otherwise it is no mistake, as where one side keeps its rows in another order.
    assert of_scripts().judge(ours, theirs).answer == "agree"


def test_state_after_a_call_that_was_left_to_an_update_is_not_paired(of_scripts: Callable[..., Compared]) -> None:
    """It has no number among those that are compared, and perhaps did other work on each side."""
    left = [torch.arange(8.0) + number for number in range(5)]
    ours = [{"['state']": each} for each in left]
    theirs = [{written_path("args[1]"): each * (1 + (number == 3))} for number, each in enumerate(left)]
    found = of_scripts()
    found.answers = {"call 1": "differ", "call 2": "differ", "call 4": "differ"}
    differ = found.judge(
        [trained(1, plain=ours[1]), call(2, plain=ours[2]), update(1), *(call(n, plain=ours[n]) for n in (3, 4))],
        [call(1, plain=theirs[1]), trained(2, plain=theirs[2]), update(1), *(call(n, plain=theirs[n]) for n in (3, 4))],
    )
    assert found.judged == ["call 1", "call 2", "update 1", "call 3", "call 4"]
    assert [each for each in differ.remarks if "State differs" in each] == []


def test_a_tie_does_not_clear_an_earlier_call_that_was_undecided(
    monkeypatch: pytest.MonkeyPatch, of_scripts: Callable[..., Compared]
) -> None:
    monkeypatch.setattr(_HeldInTurn, "_chosen_tokens", lambda turns, compared: [SimpleNamespace(is_tie=True)])
    monkeypatch.setattr(scripts, "sentence_on", lambda found, number, model: f"Tokens of call {number}, of {model}.")
    found = of_scripts()
    found.answers = {"call 1": replace(compared("inconclusive"), remarks=("A reason.",)), "call 3": "differ"}
    result = found.judge(calls(3))
    assert result.answer == "inconclusive"
    said = "1 call of Net agrees. Call 1 can only be judged in part. Tokens of call 3, of Net."
    assert result.remarks == (said, scripts._AFTER_A_TIE, "A reason.")


def test_calls_before_differing_inputs_are_not_said_to_agree_if_one_was_undecided(
    of_scripts: Callable[..., Compared],
) -> None:
    frame = pd.DataFrame({"group": ["x@input"], "label": ["culprit"], "name": ["x"], "tags": [{}], "error": [1.0]})
    found = of_scripts()
    found.answers = {"call 1": "inconclusive", "call 3": compared("differ", frame=frame, inputs=["x@input"])}
    (said,) = found.judge(calls(3)).remarks
    assert "Before call 3, of Net, its inputs differ, and no call before it is known to differ:" in said


@pytest.mark.parametrize("kind", ["call", "update"])
def test_what_a_verdict_shows_not_to_repeat_is_refused_without_a_start_again(
    kind: str, of_scripts: Callable[..., Compared]
) -> None:
    found = of_scripts(restart=False)
    found.answers = {f"{kind} 1": compared("inconclusive", not_repeated=["fc"])}
    result = found.judge([trained(1), update(1), trained(2), update(2)])
    assert result.answer == "inconclusive"
    assert any(each.endswith("--no-restart refuses that.") for each in result.remarks)
    assert found.judged[-1] == f"{kind} 1"


# ---- updates ---------------------------------------------------------------------------------------------------------


def trained(number: int, result: torch.Tensor | None = None, **more: Any) -> CallDescription:
    return call(number, result, needs_backward=True, **more)


def test_the_update_after_a_judged_call_is_judged_and_calls_before_it_looked_at(
    of_scripts: Callable[..., Compared],
) -> None:
    found = of_scripts(calls=1)
    agree = found.judge([trained(1), trained(2), update(1), *(trained(number) for number in range(3, 9))])
    assert found.judged == ["call 1", "update 1"]
    # The judgement took 40 seconds up to the update, and after as many the look is over.
    results = "1 call of Net and 1 update of the weights agree, and so do the results of the next 4 calls."
    assert agree.remarks == (results, scripts._NOT_ALL)
    found = of_scripts(calls=2)
    found.answers = {"update 2": "differ"}
    differ = found.judge([trained(1), update(1), trained(2), update(2)])
    assert differ.remarks[0] == "2 calls of Net and 1 update of the weights agree. In update 2 of the weights:"


def test_the_update_after_calls_whose_results_cannot_be_compared_is_judged(of_scripts: Callable[..., Compared]) -> None:
    """As where one side packs its batch, and accumulates the gradients of more calls than are judged."""
    found = of_scripts(calls=1)
    found.answers = {"update 1": "differ"}
    without = torch.empty(0)
    differ = found.judge([trained(1), trained(2, without), trained(3, without), update(1)])
    assert (differ.answer, found.judged) == ("differ", ["call 1", "update 1"])


def test_updates_after_the_judged_calls_are_judged_too_while_time_lasts(of_scripts: Callable[..., Compared]) -> None:
    found = of_scripts(calls=1)
    found.seconds = 100.0
    found.answers = {"update 3": "differ"}
    units = [each for number in range(1, 5) for each in (trained(number), update(number))]
    assert found.judge(units).answer == "differ"
    # The calls are only looked at, from equal weights.
    assert found.judged == ["call 1", "update 1", "update 2", "update 3"]
    found = of_scripts(calls=1)
    agree = found.judge(each for number in itertools.count(1) for each in (trained(number), update(number)))
    assert (found.judged, agree.remarks[-1]) == (["call 1", "update 1", "update 2"], scripts._NOT_ALL)


def test_a_call_after_the_judged_updates_is_judged_if_its_result_differs(of_scripts: Callable[..., Compared]) -> None:
    """Such as one of an average of the weights that is updated by another factor."""
    found = of_scripts(calls=1)
    found.seconds = 100.0
    found.answers = {"call 3": "differ"}
    units = [trained(1), update(1), trained(2), update(2)]
    differ = found.judge([*units, call(3)], [*units, call(3, torch.ones(8))])
    assert (differ.answer, found.judged) == ("differ", ["call 1", "update 1", "update 2", "call 3"])


def test_calls_in_other_orders_are_not_looked_at_after_an_update(of_scripts: Callable[..., Compared]) -> None:
    """Time may be over before the update that shows whether they do different work."""
    found = of_scripts(calls=1)
    other = torch.ones(8)
    ours = [trained(1), update(1), trained(2), call(3), update(2)]
    theirs = [trained(1), update(1), call(2, other), trained(3, other), update(2)]
    found.seconds = 100.0
    assert found.judge(ours, theirs).answer == "agree"
    assert found.judged == ["call 1", "update 1", "update 2"]


def test_updates_without_calls_between_are_judged_as_often_as_chosen(of_scripts: Callable[..., Compared]) -> None:
    found = of_scripts(calls=3)
    found.judge([trained(1), *(update(number, calls=0) for number in range(1, 9))])
    assert found.judged == ["call 1", "update 1", "update 2", "update 3"]


def test_an_update_that_never_comes_is_awaited_for_64_calls(
    monkeypatch: pytest.MonkeyPatch, of_scripts: Callable[..., Compared]
) -> None:
    begun: list[object] = []
    monkeypatch.setattr(scripts, "take_baseline_weights", lambda session: begun.append(list(session.asked)))
    found = of_scripts(calls=1, training=True)
    unclear = found.judge(trained(number) for number in itertools.count(1))
    assert found.scripts.asked.count("baseline release_call") == 63
    assert unclear.answer == "inconclusive"
    assert unclear.remarks[0].startswith("No optimizer made a step")
    # Before anything is described.
    assert begun == [[]]
    of_scripts(calls=1).judge([trained(1), update(1)])
    assert len(begun) == 1


def test_one_update_is_enough_after_calls_that_accumulate_gradients(
    monkeypatch: pytest.MonkeyPatch, of_scripts: Callable[..., Compared]
) -> None:
    monkeypatch.setattr(scripts, "take_baseline_weights", lambda session: None)
    found = of_scripts(calls=2, training=True)
    agree = found.judge([trained(1), trained(2), update(1)])
    assert found.judged == ["call 1", "call 2", "update 1"]
    assert (agree.answer, agree.remarks[0]) == ("agree", "2 calls of Net and 1 update of the weights agree.")


@pytest.mark.parametrize("side", [0, 1])
def test_the_side_with_smaller_batches_continues_alone_to_its_update(
    side: int, of_scripts: Callable[..., Compared]
) -> None:
    half = [trained(number, torch.ones(4)) for number in (1, 2)]
    sides = [[trained(1, torch.ones(8)), update(1)], [*half, update(1)]]
    found = of_scripts(calls=1)
    found.answers = {"call 1": "inconclusive"}
    assert found.judge(sides[side], sides[1 - side]).answer == "agree"
    assert found.judged == ["call 1", "update 1"]
    other = ("target", "baseline")[side]
    asked = found.scripts.asked
    # The other one waits in its update, which is not made once more to describe it.
    alone = asked.index(f"{other} release_call", asked.index(f"{other} release_call") + 1)
    assert asked[alone : alone + 2] == [f"{other} release_call", f"{other} describe_call"]
    assert [each for each in asked[alone:] if "release" in each or "describe" in each] == asked[alone : alone + 2]


def test_after_batches_that_differ_only_calls_of_equal_shapes_are_judged(of_scripts: Callable[..., Compared]) -> None:
    found = of_scripts(calls=2)
    found.answers = {"call 1": "inconclusive"}
    ours = [trained(1, torch.ones(8)), call(2, torch.ones(8)), trained(3, torch.ones(4))]
    theirs = [trained(1, torch.ones(4)), call(2, torch.ones(4)), trained(3, torch.ones(4))]
    assert found.judge(ours, theirs).answer == "inconclusive"
    assert found.judged == ["call 1", "call 3"]


@pytest.mark.parametrize("updates", [[], [update(1)]])
def test_micro_batches_are_judged_by_their_update_alone(
    updates: list[object], of_scripts: Callable[..., Compared]
) -> None:
    half = [trained(number, torch.ones(4)) for number in (1, 2)]
    found = of_scripts(calls=1)
    found.answers = {"call 1": "inconclusive"}
    result = found.judge([trained(1, torch.ones(8)), *updates], [*half[: 1 + len(updates)], *updates])
    if updates:
        # The target made two calls, and the baseline one.
        assert found.judged == ["call 1", "update 1"]
        assert (result.answer, result.remarks[0]) == ("agree", "1 update of the weights agrees.")
        assert any(each.startswith("Not checked: single calls") for each in result.remarks)
    else:
        assert (found.judged, result.answer) == (["call 1"], "inconclusive")
        assert not any("agree" in each for each in result.remarks)


def part(number: int, tokens: int) -> CallDescription:
    """A call in training that returns its loss."""
    given = {"ids": torch.ones(tokens, 6, dtype=torch.int64)}
    return trained(number, torch.ones(()), whole_numbers=given)


def sums(**tap: Any) -> Comparison:
    """The comparison of calls whose loss and gradients differ, and perhaps another tap."""
    taps = [
        {"name": "output", "group": "output", "tags": {}, "shape": []},
        {"name": "w", "group": "w@param_grad", "tags": {"kind": "param_grad"}, "shape": [4, 4], "error": 0.6},
        *([tap] if tap else []),
    ]
    usual = dict.fromkeys(COLUMNS) | {"step": 0, "order": 0, "rank": 0, "occurrence": 0, "dtype": "float32"}
    usual |= {"label": "culprit", "error": 0.5, "ratio": 9.0, "added": 0.5, "floor": 1e-6}
    return compared("differ", frame=pd.DataFrame([{**usual, **each} for each in taps]))


@pytest.mark.parametrize("updates", [[], [update(1)]])
def test_the_loss_of_a_micro_batch_is_judged_by_its_update_alone(
    updates: list[object], of_scripts: Callable[..., Compared]
) -> None:
    found = of_scripts(calls=1)
    found.answers = {"call 1": sums()}
    result = found.judge([part(1, 4), *updates], [part(1, 2), *([part(2, 2)] if updates else []), *updates])
    # Gradients of other rows do not show how far rounding moves them.
    assert found.turns._unit_judge._apart == {}
    if updates:
        assert found.judged == ["call 1", "update 1"]
        assert (result.answer, result.remarks[0]) == ("agree", "1 update of the weights agrees.")
        found.answers["update 1"] = "differ"
        assert found.judge([part(1, 4), *updates], [part(1, 2), *updates]).answer == "differ"
    else:
        assert (found.judged, result.answer) == (["call 1"], "inconclusive")
        assert result.remarks[0].startswith(
            "The baseline's call is given 24 numbers, such as tokens or labels, and the target's 12,"
        )


def test_a_micro_batch_does_not_excuse_what_is_computed_differently_in_each_row(
    of_scripts: Callable[..., Compared],
) -> None:
    found = of_scripts(calls=1)
    found.answers = {"call 1": sums(name="fc", group="fc", tags={}, shape=[2, 6, 4])}
    assert found.judge([part(1, 4), update(1)], [part(1, 2), update(1)]).answer == "differ"
    found.answers = {"call 1": sums()}
    assert found.judge([part(1, 4), update(1)], [part(1, 4), update(1)]).answer == "differ"
    found.answers = {"call 1": replace(sums(), findings=replace(sums().findings, data=("The weights differ.",)))}
    assert found.judge([part(1, 4), update(1)], [part(1, 2), update(1)]).answer == "differ"


def test_an_inconclusive_call_of_equal_shapes_is_not_excused_as_a_micro_batch(
    of_scripts: Callable[..., Compared],
) -> None:
    smaller = torch.ones(4)
    found = of_scripts(calls=1)
    found.answers = {"call 1": "differ"}
    # Nor is one that differs.
    assert found.judge([trained(1), update(1)], [trained(1, smaller), update(1)]).answer == "differ"
    for first, second in ((trained(1), trained(1)), (call(1), call(1, smaller))):
        found = of_scripts(calls=1)
        found.answers = {"call 1": "inconclusive"}
        result = found.judge([first, update(1)], [second, update(1)])
        assert result.answer == "inconclusive"
        assert "Call 1 can only be judged in part." in result.remarks[0]


# ---- calls of a part of a model --------------------------------------------------------------------------------------


def filter_call(number: int, **more: Any) -> CallDescription:
    """A call of a part of Net, as of one that makes a table when weights are loaded."""
    return call(number, torch.ones(3), **{"model": "Filter", "weights": 10, **more})


def net_calls(count: int, first: int = 1) -> list[CallDescription]:
    return [call(number, weights=100) for number in range(first, first + count)]


def test_a_part_of_a_model_leaves_the_other_side_to_a_later_call_of_the_whole(
    of_scripts: Callable[..., Compared],
) -> None:
    found = of_scripts()

    def answer(kind: str, baseline: Any, target: Any) -> Comparison:
        found.judged.append(f"{kind} {baseline[0].number}")
        return compared("agree" if baseline[0].model == target[0].model else "inconclusive")

    found.answer = answer  # type: ignore[method-assign]
    parts = [filter_call(1), filter_call(2, model="Filter[1]")]
    agree = found.judge(net_calls(2), [*parts, *net_calls(2)])
    # The second part is not judged again.
    assert found.judged == ["call 1", "call 1", "call 2"]
    assert agree.answer == "agree"
    assert agree.remarks == (
        "2 calls of Net agree.",
        "Not checked: 2 calls of Filter by the target: it has 10 weights, and the baseline's Net 100, so it is perhaps "
        "a part that is called alone.",
    )
    # What the baseline's part returns may be what the target lacks.
    assert found.judge([*parts, *net_calls(2)], net_calls(2)).answer == "inconclusive"


def test_of_several_parts_the_first_has_the_answer_if_no_other_call_can_be_judged(
    of_scripts: Callable[..., Compared],
) -> None:
    found = of_scripts()

    def answer(kind: str, baseline: Any, target: Any) -> Comparison:
        found.judged.append(target[0].model)
        return replace(compared("inconclusive"), remarks=(f"{target[0].model} lacks a result.",))

    found.answer = answer  # type: ignore[method-assign]
    unclear = found.judge(net_calls(1), [filter_call(1), filter_call(2, model="Head")])
    assert (unclear.answer, found.judged) == ("inconclusive", ["Filter", "Head"])
    assert unclear.remarks[0] == "Filter lacks a result."


@pytest.mark.parametrize(
    ("more", "judged"),
    [
        # Results that can be compared make two calls partners, however few weights one model has.
        ({"result": torch.ones(8)}, ["call 1", "call 2"]),
        # So do models of about one size.
        ({"weights": 50}, ["call 1", "call 2"]),
        ({}, ["call 1"]),
    ],
)
def test_only_a_small_model_without_common_results_is_taken_for_a_part(
    of_scripts: Callable[..., Compared], more: dict[str, Any], judged: list[str]
) -> None:
    found = of_scripts()
    found.answers = {"call 1": "inconclusive"}
    result = more.pop("result", torch.ones(3))
    parts = [replace(filter_call(number), plain={"logits": result}, **more) for number in (1, 2)]
    unclear = found.judge(net_calls(2), parts)
    # Nothing was judged if both calls of the target were left out.
    assert (unclear.answer, found.judged) == ("inconclusive", judged)


@pytest.mark.parametrize("first", [torch.ones(8), torch.ones(3)], ids=["a call", "a call to warm up"])
def test_a_model_with_few_parameters_is_compared_wherever_its_results_can_be(
    of_scripts: Callable[..., Compared], first: torch.Tensor
) -> None:
    # A quantised model has most of its weights in buffers. Its calls must not all be left out for one of them.
    found = of_scripts()
    other = replace(call(2, torch.ones(3)), model="Net", weights=10)
    packed = [replace(call(number, first if number == 1 else None), weights=10) for number in (1, 2, 3)]
    found.answers = {"call 1": "inconclusive", "call 2": "inconclusive"}
    is_warm_up = first.numel() == 3
    judged = found.judge(net_calls(3), packed if is_warm_up else [packed[0], other, packed[2]])
    assert judged.answer == "inconclusive"
    assert found.judged == (["call 1", "call 1", "call 2"] if is_warm_up else ["call 1", "call 2", "call 3"])


# ---- calls that raise ------------------------------------------------------------------------------------------------


def test_a_side_whose_call_raises_continues_alone_and_its_next_call_is_judged(
    monkeypatch: pytest.MonkeyPatch, of_scripts: Callable[..., Compared]
) -> None:
    monkeypatch.setattr(scripts, "judge_until_exception", lambda *_: compared("inconclusive", raised="It raises."))
    found = of_scripts()
    agree = found.judge([call(1)], [call(1, raises="ValueError: x"), call(2)])
    assert found.judged == ["call 1"]
    assert next(each for each in found.scripts.asked if "release" in each) == "target release_call"
    raised = "Not checked: the target's call 1 of Net, which raises ValueError: x; its script has continued."
    assert agree.answer == "agree"
    (said,) = (each for each in agree.remarks if "raises" in each)
    assert said.startswith(raised)
    # The text of the verdict on the values before it.
    assert len(said) > len(raised)


def test_scripts_whose_calls_only_raise_are_left_after_sixteen_with_all_the_reasons(
    of_scripts: Callable[..., Compared],
) -> None:
    found = of_scripts()
    with pytest.raises(SessionError) as error:
        found.judge(call(number, raises=f"ValueError: {number}") for number in itertools.count(1))
    lines = str(error.value).splitlines()
    # Both sides raise, so both continue.
    assert len(lines) == 16
    assert "the baseline's call 1 of Net, which raises ValueError: 1" in lines[0]
    assert "the target's call 8 of Net, which raises ValueError: 8" in lines[-1]
    assert found.scripts.asked.count("baseline release_call") == found.scripts.asked.count("target release_call") == 8


def test_values_that_differ_before_an_exception_are_the_answer_unless_the_inputs_do(
    monkeypatch: pytest.MonkeyPatch, of_scripts: Callable[..., Compared]
) -> None:
    frame = pd.DataFrame({"group": ["fc"], "label": ["culprit"], "ratio": [9.0]})

    def judge(**found: Any) -> tuple[Comparison, list[str]]:
        before = compared("differ", **{"frame": frame, "raised": "The target raises.", **found})
        monkeypatch.setattr(scripts, "judge_until_exception", lambda *_: before)
        made = of_scripts(calls=2)
        return made.judge(calls(2), [call(1), call(2, raises="ValueError: x"), call(2)]), made.judged

    differ, judged = judge()
    assert (judged, differ.answer) == (["call 1"], "differ")
    assert differ.remarks[0] == "1 call of Net agrees. In call 2, of Net:"
    # Other inputs may be a trial that the script expects to fail.
    for found in ({"data": ["The inputs already differ: x"]}, {"inputs": ["fc"]}):
        agree, judged = judge(**found)
        assert (judged, agree.answer) == (["call 1", "call 2"], "agree")


def test_a_call_that_raises_after_the_judged_ones_is_described_whole(
    monkeypatch: pytest.MonkeyPatch, of_scripts: Callable[..., Compared]
) -> None:
    given: list[Any] = []
    no_note = [compared("inconclusive"), compared("inconclusive", raised="It raises.")]
    no_note[1].findings.frame["ratio"] = float("nan")

    def judge(_: object, baseline: Any, target: Any, choice: object) -> Comparison:
        given.extend([*baseline, *target])
        return no_note.pop()

    monkeypatch.setattr(scripts, "judge_until_exception", judge)
    for _ in range(2):
        found = of_scripts(calls=1)
        found.seconds = 100.0
        remarks = found.judge(calls(2), [call(1), call(2, raises="ValueError: x"), call(2)]).remarks
        # Nothing was compared that a sentence could be on.
        assert remarks[-1].endswith("its script has continued.")
    assert [each.taps for each in given] == [("fc",)] * 4


def test_values_that_differ_before_an_exception_in_the_first_call_need_no_number(
    monkeypatch: pytest.MonkeyPatch, of_scripts: Callable[..., Compared]
) -> None:
    frame = pd.DataFrame({"group": ["fc"], "label": ["culprit"], "ratio": [9.0]})
    before = compared("differ", frame=frame, raised="The target raises.")
    monkeypatch.setattr(scripts, "judge_until_exception", lambda *_: before)
    found = of_scripts()
    assert found.judge(calls(1), [call(1, raises="ValueError: x")]).remarks == ()
    # A call beside an update has no partner to be compared with.
    agree = of_scripts().judge([trained(1), update(1)], [trained(1), trained(2, raises="x"), update(1)])
    assert agree.answer == "agree"


def test_a_call_that_cannot_be_repeated_is_not_compared_up_to_its_exception(
    monkeypatch: pytest.MonkeyPatch, of_scripts: Callable[..., Compared]
) -> None:
    monkeypatch.setattr(scripts, "judge_until_exception", lambda *_: pytest.fail("it would run again"))
    found = of_scripts()
    once = call(1, raises="ValueError: x", fails_when_repeated="KeyError")
    said = found.judge([call(1)], [once, call(2)]).remarks[-1]
    assert said.endswith("its script has continued.")


# ---- ends ------------------------------------------------------------------------------------------------------------


def test_a_script_that_fails_after_calls_that_agree_leaves_the_answer_open(
    monkeypatch: pytest.MonkeyPatch, of_scripts: Callable[..., Compared]
) -> None:
    process = SimpleNamespace(command=SimpleNamespace(text="run.py"), last_lines=lambda: "the last line")
    monkeypatch.setattr(scripts, "scripts_of", lambda session: {"baseline": process, "target": process})
    found = of_scripts()
    open_end = found.judge(calls(1), [call(1), ScriptEnd("OSError: full")])
    assert open_end.answer == "inconclusive"
    assert open_end.remarks[0] == (
        "1 call of Net agrees. Then the target `run.py` raised OSError: full. Its output ends:\nthe last line"
    )
    with pytest.raises(SessionError, match=r"^The target `run.py` raised OSError: full"):
        of_scripts().judge(calls(1), [ScriptEnd("OSError: full")])


def test_a_script_that_was_killed_is_named_with_its_signal(
    monkeypatch: pytest.MonkeyPatch, of_scripts: Callable[..., Compared]
) -> None:
    process = SimpleNamespace(command=SimpleNamespace(text="run.py"), last_lines=lambda: "the last line")
    process.wait, process.is_done = (lambda limit: True), False
    process.how_it_ended = lambda: "was killed by SIGKILL"
    monkeypatch.setattr(scripts, "scripts_of", lambda session: {"target": process})
    # What its exit code means is said already.
    monkeypatch.setattr(scripts, "other_exit_code", lambda ended: pytest.fail("it was asked again"))

    class Killed(Scripts):
        def _ask(self, side: str, function: Callable[..., object] | None) -> list[Any]:
            results = super()._ask(side, function)
            self.ranks[1].alive = self._held["target"] is not None
            return results

    found = of_scripts()
    found.session_type = Killed
    open_end = found.judge([call(1), ScriptEnd()], [call(1), None])
    assert open_end.answer == "inconclusive"
    assert open_end.remarks[0].startswith("1 call of Net agrees. Then the target `run.py` was killed by SIGKILL.")


def test_a_rank_that_lives_and_reports_nothing_has_failed(of_scripts: Callable[..., Compared]) -> None:
    with pytest.raises(RunError, match=exactly("1 call of Net agrees. Then it died")):
        of_scripts().judge([call(1), None], calls(1))


# ---- the whole comparison --------------------------------------------------------------------------------------------


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The session of :func:`compare_scripts`, with how it was opened, and the scripts' processes."""
    made: Any = Scripts(tmp_path, calls(1), calls(1))
    made.processes = {side: SimpleNamespace(keeps_going=False) for side in ("baseline", "target")}

    def opened(options: Any, plan: object, folder: object, start: object) -> Any:
        made.options = options
        return made

    monkeypatch.setattr(scripts, "open_session", opened)
    monkeypatch.setattr(scripts, "make_run_folder", lambda folder: folder)
    monkeypatch.setattr(scripts, "scripts_of", lambda session: session.processes)
    return made


def compare(monkeypatch: pytest.MonkeyPatch, result: object, **choice: Any) -> Any:
    """Compare two scripts with this result of all judgements; an exception is raised."""
    made: list[Any] = []

    def judge(turns: Any) -> object:
        made.append(turns._unit_judge.started)
        if isinstance(result, BaseException):
            raise result
        return result

    monkeypatch.setattr(_HeldInTurn, "judge", judge)
    commands = ScriptCommand(("a",), ranks=1), ScriptCommand(("b",), ranks=2)
    assert compare_scripts(*commands, ScriptChoice(**choice)) is result
    return made[0]


def test_scripts_are_started_with_their_ranks_and_time_and_again_unless_refused(
    monkeypatch: pytest.MonkeyPatch, session: Any
) -> None:
    for training in (False, True):
        started = compare(monkeypatch, compared("agree"), training=training, settings=ScriptSettings(timeout=7.0))
        assert (started.session, started._training) == (session, training)
    assert (session.options.baseline, session.options.target, session.options.timeout) == (1, 2, 7.0)
    # The session stays open, for questions about the answer, and its scripts end with it.
    assert not session.closed
    assert session.asked == []
    assert compare(monkeypatch, compared("agree"), restart=False) is None
    assert compare(monkeypatch, compared("agree"), keep_going=True) is None


@pytest.mark.parametrize("alive", [True, False])
def test_scripts_that_keep_going_are_left_unless_a_rank_has_ended(
    alive: bool, monkeypatch: pytest.MonkeyPatch, session: Any
) -> None:
    session.ranks[1].alive = alive
    compare(monkeypatch, compared("agree"), keep_going=True)
    assert [process.keeps_going for process in session.processes.values()] == [alive, alive]
    assert session.asked == ([f"{side} {leave.__name__}" for side in ("baseline", "target")] if alive else [])


@pytest.mark.parametrize("error", [SessionError("no"), KeyboardInterrupt(), RuntimeError()])
def test_nothing_runs_on_after_an_error_or_an_interrupt(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, session: Any
) -> None:
    with pytest.raises(type(error)) as raised:
        compare(monkeypatch, error)
    assert session.closed
    assert not isinstance(raised.value, ComparisonStopped) or raised.value.known == "Nothing was judged yet."
    assert isinstance(raised.value, ComparisonStopped) == isinstance(error, KeyboardInterrupt)
