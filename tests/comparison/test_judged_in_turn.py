"""How each held call and update of two scripts is judged in its turn, and what is said before the comparison's text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from kit.refusals import exactly

from graftlab.comparison import left_to_updates, scripts, unit_judge
from graftlab.comparison.answers import Answer, Comparison
from graftlab.comparison.held_units import HeldUnits
from graftlab.comparison.scripts import ScriptChoice, _HeldInTurn
from graftlab.comparison.started_scripts import _not_seeded, how_started
from graftlab.errors import SessionError
from graftlab.ranks.call_description import CallDescription
from graftlab.ranks.held_update import HeldUpdate, UpdateDescription
from graftlab.ranks.holding import OfUpdate, ScriptEnd
from graftlab.verdict.findings import Findings
from graftlab.verdict.rounds_differently import RoundingGroups

KEEP = OfUpdate(HeldUpdate.keep_inputs)


def call(model: str = "Net", number: int = 1, **more: Any) -> CallDescription:
    return replace(CallDescription(model, number, False, ("a",), {"": torch.ones(2)}, {}), **more)


def update(**more: Any) -> Any:
    made = object.__new__(UpdateDescription)
    usual = {"optimizer": "AdamW", "number": 1, "not_repeated": False, "has_closure": False}
    made.__dict__.update({**usual, **more})
    return made


def compared(answer: Answer = "agree", remarks: Sequence[str] = (), **found: Any) -> Comparison:
    row = {"name": "w", "group": "w", "tags": {"kind": "param_grad"}, "label": "clean", "error": 0.1}
    frame = pd.DataFrame([{**row, "ratio": 0.5, "added": 0.0, "dtype": "float32", "cast": None}])
    return Comparison(
        Findings(**{"frame": frame, "threshold": 5.0, "target_ranks": 1, **found}),
        1,
        SESSION,
        None,
        answer,
        tuple(remarks),
    )


SESSION: Any = SimpleNamespace(
    folder=None, plan=SimpleNamespace(pairs=()), edits=[], runs=[], ranks=[SimpleNamespace(alive=True)] * 2
)
SESSION.edit = lambda **changes: SESSION.edits.append(changes)
SESSION.run = lambda *functions: SESSION.runs.append(functions)


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Any:
    SESSION.folder = tmp_path
    SESSION.edits.clear()
    SESSION.runs.clear()
    announced: list[str] = []
    made: Any = _HeldInTurn(SESSION, ScriptChoice(), announce=announced.append)
    made.announced = announced
    made._compared = compared()
    return made


def test_parts_of_gradients_are_cleared_by_an_update_alone(turns: Any) -> None:
    turns._in_parts = compared(gradient_parts=["w@param_grad"])
    turns._so_far.models.append("Net")
    found = turns._concluded()
    assert found.answer == "inconclusive"
    assert found.remarks[0].startswith("Each of the target's ranks has only a summand of some gradients, and no update")
    turns._so_far.updates = 1
    assert turns._concluded().answer == "agree"


@pytest.mark.parametrize("ahead", [call(number=2), update(number=2, calls=1), ScriptEnd()])
def test_the_second_of_two_optimizers_follows_before_the_other_side_continues(ahead: Any) -> None:
    second = update(number=2, calls=0)
    assert held(second, ahead).behind == "baseline"
    assert held(ahead, second).behind == "target"
    assert held(second, second).behind is None


def test_an_update_by_other_optimizers_agrees_once_a_later_one_does(turns: Any) -> None:
    part = replace(compared("inconclusive"), left_to_next_update=("w",))
    later = replace(compared("agree"), equal_weights=frozenset({"w", "v"}))
    turns._so_far.updates, turns._so_far.undecided_updates = 3, {1: part, 2: compared("inconclusive")}
    turns._so_far.clear_updates(later)
    assert [*turns._so_far.undecided_updates] == [2]
    turns._so_far.undecided_updates[3] = part
    assert turns._concluded().answer == "inconclusive"
    # No further update shows whether the last one agrees.
    turns._so_far.undecided_updates = {3: part}
    found = turns._concluded()
    assert (found.answer, found.remarks[0]) == ("agree", "2 updates of the weights agree.")
    turns._so_far.updates, turns._so_far.undecided_updates = 1, {1: part}
    assert turns._concluded().answer == "inconclusive"


def test_weights_of_another_optimizer_that_are_not_equal_later_clear_no_update(turns: Any) -> None:
    """Such as those whose second optimizer makes no step, at a low learning rate."""
    part = replace(compared("inconclusive"), left_to_next_update=("w",))
    turns._so_far.updates, turns._so_far.undecided_updates = 2, {1: part}
    turns._so_far.clear_updates(replace(compared("agree"), equal_weights=frozenset({"v"})))
    turns._so_far.undecided_updates[2] = part
    found = turns._concluded()
    assert (found.answer, turns._so_far.updates) == ("inconclusive", 2)
    assert "Before update 2 they differ by more than one rounding." in found.remarks


class Started:
    """Scripts that are started again for each run."""

    def __init__(self) -> None:
        self.judged: list[Any] = []
        self.kept: list[Any] = []
        self.starts = 3

    def judge_call(self, *given: Any) -> Comparison:
        self.judged.append(given)
        return compared("differ")

    def judge_update(self, *given: Any) -> Comparison:
        self.judged.append(given)
        return compared()

    def keep(self, units: Any) -> None:
        self.kept.append(units)


def held(baseline: Any = None, target: Any = None) -> HeldUnits:
    return HeldUnits([baseline or call()], [target or call()])


# ---- what agrees -----------------------------------------------------------------------------------------------------


def test_calls_updates_and_results_that_agree_are_counted(turns: Any) -> None:
    turns._so_far.models = ["Embed", "Net", "Net"]
    assert turns._so_far.agreed() == "1 call of Embed and 2 calls of Net agree."
    assert turns._so_far.agreed(1) == "1 call of Embed agrees."
    turns._so_far.results = ["Net"] * 2
    assert turns._so_far.agreed() == (
        "1 call of Embed and 2 calls of Net agree, and so do the results of the next 2 calls."
    )
    turns._so_far.models, turns._so_far.updates = [], 1
    turns._so_far.results = []
    assert turns._so_far.agreed() == "1 update of the weights agrees."
    turns._so_far.updates, turns._so_far.results = 0, ["Net"]
    assert turns._so_far.agreed() == "The results of the next call agree."
    turns._so_far.undecided, turns._so_far.models = (
        {0: compared("inconclusive"), 1: compared("inconclusive")},
        ["Net", "Net"],
    )
    turns._so_far.results = []
    assert turns._so_far.agreed() == "Calls 1 and 2 can only be judged in part."
    assert turns._so_far.agreed(1) == "Call 1 can only be judged in part."
    turns._so_far.undecided, turns._so_far.models = dict.fromkeys(range(3), compared("inconclusive")), ["Net"] * 3
    assert turns._so_far.agreed() == "Calls 1, 2 and 3 can only be judged in part."


@pytest.mark.parametrize(("calls", "updates"), [(1, 0), (0, 1)])
def test_after_an_interrupt_what_was_judged_so_far_is_said(calls: int, updates: int, turns: Any) -> None:
    turns._so_far.models, turns._so_far.updates = ["Net"], 1
    assert turns.known == "Nothing was judged yet."
    turns._so_far.judged = calls, updates
    assert turns.known == ("So far: 1 call of Net agrees." if calls else "So far: 1 update of the weights agrees.")


def test_a_single_call_that_proves_nothing_has_its_reasons_in_its_own_text(turns: Any) -> None:
    turns._so_far.models, turns._so_far.undecided = ["Net"], {0: compared("inconclusive", ["its reason"])}
    found = turns._concluded(["more calls"])
    assert (found.answer, [each for each in found.remarks if each]) == ("inconclusive", ["more calls", "its reason"])
    turns._so_far.models.append("Net")
    assert turns._concluded().remarks[0] == "1 call of Net agrees. Call 1 can only be judged in part."
    turns._so_far.models.pop()
    turns._so_far.updates = 1
    assert turns._concluded().remarks[0].startswith("1 update of the weights agrees.")


def test_how_the_runs_were_made_and_what_was_passed_are_part_of_the_answer(turns: Any) -> None:
    turns._so_far.raised = ["a call that raises"]
    found = turns._with(compared("agree", ["own"]), ("first",), "inconclusive")
    assert (found.answer, found.remarks) == ("inconclusive", ("first", "own", "a call that raises"))
    assert (found.how, found.starts) == (scripts._HOW, 0)
    turns._unit_judge.started = Started()
    found = turns._with(compared("differ"), ())
    assert (found.answer, found.how, found.starts) == ("differ", how_started(3), 3)
    turns._unit_judge.started.starts = 0
    assert turns._with(compared(), ()).how == scripts._HOW


def test_where_something_differs_it_is_said_in_which_call_or_update(turns: Any) -> None:
    def said(models: Sequence[str], updates: int = 0, since: int = 1, **found: Any) -> str:
        turns._so_far.models, turns._so_far.updates, turns._so_far.since_update = list(models), updates, since
        return "".join(turns._at_last(compared("differ", **found)).remarks[:1])

    assert said(["Net"]) == ""
    assert said(["Embed", "Net"]) == "1 call of Embed agrees. In call 2, of Net:"
    assert said([], 1, 0) == "In update 1 of the weights:"
    assert said([], 2, 0) == "1 update of the weights agrees. In update 2 of the weights:"
    assert said(["Net"], 1, 0) == "1 call of Net agrees. In update 1 of the weights:"
    # A call after an update that agrees.
    assert said(["Net"], 1, 1) == "1 update of the weights agrees. In call 1, of Net:"
    resized = "The input input.x has the shape [2] on the baseline and [3] on the target."
    assert said(["Net", "Net"], not_grafted=[resized]).endswith(
        "Before call 2, of Net, its inputs have different shapes: one side has made an extra call before it, or the "
        "scripts' own code between the calls differs."
    )
    assert said(["Net", "Net"], not_grafted=["a has the shape"]).endswith("In call 2, of Net:")
    inputs = pd.DataFrame({"group": ["input.x@input"], "label": ["culprit"]})
    of_inputs: dict[str, Any] = {"frame": inputs, "inputs": ["input.x@input"]}
    assert said(["Embed", "Net"], **of_inputs) == (
        "1 call of Embed agrees. Before call 2, of Net, its inputs differ, and the calls before it agree: the scripts' "
        "own code between the calls differs, or rounding has flipped a choice, such as a token."
    )
    # Nothing came before the first call.
    assert said(["Net"], 1, 1, **of_inputs).endswith("In call 1, of Net:")


def test_tokens_are_compared_only_where_their_logits_were_and_nothing_else_differs(
    turns: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripts, "chosen_tokens", lambda before, newest, threshold: ["a token"])
    inputs = pd.DataFrame({"group": ["input.x@input"], "label": ["culprit"]})
    of_inputs: dict[str, Any] = {"frame": inputs, "inputs": ["input.x@input"], "data": ["The inputs already differ: x"]}

    def tokens(**more: Any) -> bool:
        return bool(turns._chosen_tokens(compared("differ", **{**of_inputs, **more})))

    turns._before = turns._newest = (call(), call())
    assert tokens()
    assert not tokens(failed=["the swap failed"])
    assert not tokens(not_repeated=["a"])
    assert not tokens(target_not_repeated=["a"])
    assert not tokens(inputs=["input.y@input"])
    assert not tokens(data=[*of_inputs["data"], "The weights already differ: w"])
    assert not tokens(frame=inputs.assign(label="clean"))
    both = pd.DataFrame({"group": ["input.x@input", "o"], "label": ["culprit"] * 2})
    assert not tokens(frame=both)
    assert tokens(frame=both, rounding=RoundingGroups(("o",)))
    turns._newest = None
    assert not tokens()
    turns._before, turns._newest = None, (call(), call())
    assert not tokens()


# ---- one call, one update --------------------------------------------------------------------------------------------


def test_pairs_of_a_model_are_in_force_only_for_its_calls(turns: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def judge(repeats: Any, ours: Any, theirs: Any, judging: Any, known: Any, inherited: Any) -> Comparison:
        given.append(known)
        return replace(compared(), match=f"pairs of {ours[0].model}")  # type: ignore[arg-type]

    monkeypatch.setattr(unit_judge, "judge_held_calls", judge)
    edits = []
    for model in ("Embed", "Embed", "Net", "Embed", "Embed"):
        turns._judge_call(held(call(model), call(model)))
        edits.append(list(SESSION.edits))
        SESSION.edits.clear()
    first = "pairs of Embed"
    assert given == [None, first, None, first, first]
    assert edits == [[], [], [{"pairs": None}], [{"pairs": first}], []]
    assert turns._so_far.models == ["Embed", "Embed", "Net", "Embed", "Embed"]
    assert turns._unit_judge._apart == {"w": 0.1}


def test_a_call_that_cannot_be_repeated_is_judged_by_starting_again_or_refused(
    turns: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unit_judge, "judge_held_calls", lambda *_: compared())
    cannot = held(call(fails_when_repeated="KeyError"))
    refused = turns._judge_call(cannot)
    assert refused.remarks[-1] == f"{unit_judge._REFUSED} --keep-going refuses that."
    without: Any = _HeldInTurn(SESSION, ScriptChoice(restart=False))
    assert without._judge_call(cannot).remarks[-1] == f"{unit_judge._REFUSED} --no-restart refuses that."
    assert turns._judge_call(held()).remarks == ()
    turns._unit_judge.started = Started()
    assert turns._judge_call(held()).answer == "agree"
    assert (turns._unit_judge.started.judged, turns.announced) == ([], [])
    assert turns._judge_call(cannot).answer == "differ"
    assert len(turns._unit_judge.started.judged) == 1
    (said,) = turns.announced
    assert "The scripts will be started again" in said
    # A difference that was found anyway needs no other start.
    monkeypatch.setattr(unit_judge, "judge_held_calls", lambda *_: compared("differ", not_repeated=["a"]))
    assert turns._judge_call(held()).answer == "differ"
    assert len(turns._unit_judge.started.judged) == 1
    # A verdict may show it later than the description.
    monkeypatch.setattr(unit_judge, "judge_held_calls", lambda *_: compared("inconclusive", not_repeated=["a"]))
    assert turns._judge_call(held()).answer == "differ"
    assert len(turns._unit_judge.started.judged) == 2


def test_an_update_knows_how_far_each_weights_gradient_was_apart_in_calls(
    turns: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = compared()
    row = one.findings.frame.iloc[0].to_dict()
    given = [("w", "param_grad", 0.3), ("w", "param_grad", 0.1), ("v", "param_grad", float("nan")), ("u", "grad", 0.9)]
    rows = [{**row, "name": name, "tags": {"kind": kind}, "error": error} for name, kind, error in given]
    judged = replace(one, findings=replace(one.findings, frame=pd.DataFrame(rows)))
    monkeypatch.setattr(unit_judge, "judge_held_calls", lambda *_: judged)
    turns._judge_call(held())
    assert turns._unit_judge._apart == {"w": 0.3}


def test_a_call_that_proves_nothing_is_followed_unless_it_cannot_be_repeated(turns: Any) -> None:
    unclear = compared("inconclusive")
    assert turns._unit_judge.may_follow(held(), unclear)
    assert not turns._unit_judge.may_follow(held(), replace(unclear, is_last=True))
    cannot = held(call(fails_when_repeated="KeyError"))
    assert not turns._unit_judge.may_follow(cannot, unclear)
    turns._unit_judge.started = Started()
    assert turns._unit_judge.may_follow(cannot, unclear)
    assert not turns._unit_judge.may_follow(held(), compared("inconclusive", target_not_repeated=["a"]))


def test_an_update_is_judged_with_the_newest_pairs_and_kept_if_it_agrees(
    turns: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    answers: list[Answer] = ["agree", "differ", "agree"]

    def judge(repeats: Any, ours: Any, theirs: Any, judging: Any, proposal: Any, apart: Any) -> Comparison:
        given.append((proposal, dict(apart)))
        return compared(answers.pop(0))

    monkeypatch.setattr(unit_judge, "judge_held_updates", judge)
    turns._unit_judge._proposals, turns._unit_judge._apart = {("A", "A"): "of A", ("B", "B"): "of B"}, {"w": 0.1}
    turns._so_far.since_update = 4
    assert turns._judged_update(held(update(), update())).answer == "agree"
    assert given == [("of B", {"w": 0.1})]
    assert (turns._so_far.updates, turns._so_far.since_update) == (1, 0)
    assert SESSION.runs == [(KEEP, KEEP)]
    turns._left_to_updates = [left_to_updates._SPLIT_DIFFERENTLY]
    differing = turns._judged_update(held(update(), update()))
    assert differing.remarks[-1].startswith(
        "Not checked: single calls, whose results have different shapes on the two sides"
    )
    assert len(SESSION.runs) == 1
    turns._unit_judge.started = Started()
    turns._judged_update(held(update(number=3), update(number=4)))
    assert turns._unit_judge.started.kept == [{"baseline": ("update", 3), "target": ("update", 4)}]
    assert turns.announced == []


def test_an_update_that_proves_nothing_is_followed_and_clears_nothing(
    turns: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[Answer] = ["inconclusive", "agree"]
    monkeypatch.setattr(unit_judge, "judge_held_updates", lambda *_: compared(answers[0], [answers.pop(0)]))
    following = [held(update(number=2), update(number=2)), None]
    both = held(update(), update())
    turns._first = lambda: both
    turns._brought_together = lambda held: held
    turns._next = lambda side, before: following.pop(0)
    found = turns.judge()
    assert found.answer == "inconclusive"
    assert found.remarks[0] == "1 update of the weights agrees. Update 1 can only be judged in part."
    assert found.remarks[-1] == "inconclusive"
    # The target continues with the baseline's values, as after an update that agrees.
    assert SESSION.runs == [(KEEP, KEEP)] * 2
    assert not turns._unit_judge.may_follow(held(update(not_repeated=True), update()), found)


def test_an_update_by_a_closure_is_refused_without_starting_again(turns: Any) -> None:
    by_closure = held(update(has_closure=True), update())
    with pytest.raises(
        SessionError,
        match=exactly(
            "the scripts begin with an update by a closure, which cannot be repeated, and starting them "
            "again was refused"
        ),
    ):
        turns._judged_update(by_closure)
    turns._so_far.judged, turns._compared = (1, 0), compared("differ", ["of call 1"])
    found = turns._judged_update(by_closure)
    assert (found.answer, found.remarks[0], turns._so_far.updates) == ("agree", "of call 1", 0)
    assert found.remarks[-1].endswith("--keep-going refuses that.")
    turns._unit_judge.started = Started()
    assert turns._judged_update(by_closure).remarks == ()
    assert len(turns._unit_judge.started.judged) == len(turns.announced) == 1


def test_calls_that_may_do_different_work_differ_with_that_remark() -> None:
    def of(ours: int, theirs: int, *needs: bool) -> HeldUnits:
        sides = zip((ours, theirs), needs, strict=True)
        return held(*(call(needs_backward=own, whole_numbers={"ids": torch.ones(size)}) for size, own in sides))

    found = left_to_updates.perhaps_of_other_work(compared("differ", ["named"]), of(32, 64, False, True))
    assert found.answer == "differ"
    assert found.remarks[0].startswith(
        "The baseline's call is given 32 numbers, such as tokens, without gradients, and the target's 64, with"
    )
    for alike in (of(32, 32, False, True), of(32, 64, True, True)):
        assert left_to_updates.perhaps_of_other_work(compared("differ", ["named"]), alike).remarks == ("named",)
    assert left_to_updates.perhaps_of_other_work(compared(), of(32, 64, False, True)).remarks == ()


def in_other_order(
    turns: Any, monkeypatch: pytest.MonkeyPatch, last: Sequence[HeldUnits], *needs: tuple[bool, bool]
) -> Comparison:
    """The comparison of calls that need gradients on these sides, which differ where one side's do; then ``last``."""
    calls = [held(*(call(needs_backward=each) for each in both)) for both in needs]
    following: list[Any] = [*calls[1:], *last, None]

    def judge(turns: Any, held: HeldUnits) -> Comparison:
        left = len([*calls[1:], *last, None]) - len(following)
        answer: Answer = "differ" if left_to_updates.needs_differ(held) else "agree"
        found = compared(answer, ["of a call", f"after {left} units", "Not checked: a result."])
        turns._so_far.add_call("Net", found)
        turns._unit_judge._proposals.setdefault(("Net", "Net"), None)
        return found

    monkeypatch.setattr(_HeldInTurn, "_judge_call", judge)
    monkeypatch.setattr(unit_judge, "judge_held_updates", lambda *_: compared("agree", ["of an update"]))
    turns._first = lambda: calls[0]
    turns._brought_together = lambda held: held
    turns._next = lambda side, before: following.pop(0)
    found: Comparison = turns.judge()
    return found


def test_calls_in_another_order_are_left_to_the_update_that_follows(
    turns: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates = [held(update(), update())]
    found = in_other_order(turns, monkeypatch, updates, (False, True), (True, False))
    assert found.answer == "agree"
    assert found.remarks[0] == "1 update of the weights agrees."
    assert found.remarks[-2:] == ("of an update", left_to_updates._IN_OTHER_ORDER)
    # What these calls did not show matters no longer.
    assert not any("a result" in remark for remark in found.remarks)
    # Pairs found between calls of different work are not used again.
    assert turns._unit_judge._proposals == {}


@pytest.mark.parametrize("last", [[], [held(update(), update())]])
def test_calls_that_need_gradients_on_one_side_differ_if_no_order_explains_it(
    turns: Any, monkeypatch: pytest.MonkeyPatch, last: list[HeldUnits]
) -> None:
    # Beside one call of training each, the target's evaluation alone computes with gradients.
    found = in_other_order(turns, monkeypatch, last, (True, True), (False, True))
    assert found.answer == "differ"
    assert found.remarks[:2] == ("1 call of Net agrees. In call 2, of Net:", "of a call")


def test_of_calls_that_need_gradients_on_one_side_the_first_that_differs_is_named(
    turns: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As where the target alone generates with gradients: later calls are given other tokens.
    found = in_other_order(turns, monkeypatch, [], (False, True), (False, True))
    assert (found.answer, found.remarks[:2]) == ("differ", ("of a call", "after 0 units"))


def test_a_call_in_another_order_after_the_last_update_differs(turns: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    units = [held(update(), update()), held(*(call(needs_backward=each) for each in (False, True)))]
    found = in_other_order(turns, monkeypatch, units, (True, True))
    assert (found.answer, found.remarks[1]) == ("differ", "of a call")


# ---- sides that do not wait alike -----------------------------------------------------------------------------------


def test_the_side_that_calls_while_the_other_updates_continues_alone(turns: Any) -> None:
    sides: list[Any] = []

    def continued(side: str, before: HeldUnits) -> HeldUnits:
        sides.append(side)
        return HeldUnits([update()], before.target)

    turns._next = continued
    found = turns._brought_together(held(call(), update()))
    assert sides == ["baseline"]
    assert found.both_hold(UpdateDescription)
    turns._next = lambda side, before: None
    assert turns._brought_together(held(call(), update())) is None
    same = held()
    assert turns._brought_together(same) is same


def test_a_side_that_calls_again_after_the_other_ended_differs(turns: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripts, "scripts_of", lambda session: {})
    ended = object.__new__(ScriptEnd)
    turns._so_far.models, turns._so_far.judged = ["Net"], (1, 0)
    monkeypatch.setattr(scripts, "other_exit_code", lambda ended: None)
    for units, said in (
        (held(call(), ended), "1 call of Net agrees. Then the baseline calls a model again, and the target ends"),
        (held(ended, call()), "1 call of Net agrees. Then the target calls a model again, and the baseline ends"),
        (held(ended, update()), "1 call of Net agrees. Then the target updates its weights again, and the baseline"),
    ):
        found = turns._ended(units)
        assert found.answer == "differ"
        assert found.remarks[0].startswith(said)
    assert turns._ended(held(ended, ended)).answer == "agree"
    monkeypatch.setattr(scripts, "other_exit_code", lambda ended: "target `run` exits with 3.")
    found = turns._ended(held(ended, ended))
    assert (found.answer, found.remarks[0]) == (
        "inconclusive",
        "1 call of Net agrees. Then the target `run` exits with 3.",
    )
    # The code of a script that continues is not known.
    monkeypatch.setattr(scripts, "other_exit_code", lambda ended: pytest.fail("it has not ended"))
    assert turns._ended(held(call(), ended)).answer == "differ"
    turns._so_far.judged = None
    turns._so_far.raised = ["only raised"]
    with pytest.raises(SessionError, match="only raised"):
        turns._ended(held(ended, ended))
    turns._so_far.raised = []
    with pytest.raises(SessionError, match=scripts._NOTHING_TO_JUDGE):
        turns._ended(held(ended, ended))


@pytest.mark.parametrize(
    ("taps", "more"), [("a", "a. The"), ("ab", "a and at 1 more tap."), ("abc", "a and at 2 more taps.")]
)
def test_taps_that_differ_between_two_starts_are_counted(taps: str, more: str) -> None:
    assert f"different values in call 1, first at {more}" in _not_seeded("target", list(taps), "call 1")
