"""What is concluded of the calls that two scripts make one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pandas as pd
import pytest
import torch

from graftlab.comparison import scripts, unit_judge
from graftlab.comparison.answers import Answer, Comparison
from graftlab.comparison.held_units import HeldUnits, PartOfModel
from graftlab.comparison.inherited_rounding import InheritedRounding
from graftlab.comparison.scripts import ScriptChoice, _HeldInTurn
from graftlab.comparison.units_so_far import UnitsSoFar
from graftlab.ranks.call_description import CallDescription
from graftlab.ranks.held_update import UpdateDescription
from graftlab.ranks.holding import ScriptEnd
from graftlab.session import Session
from graftlab.verdict.findings import Findings


@pytest.mark.parametrize(
    ("differing", "text"),
    [
        ({"0.running_mean": ""}, "Before call 2 buffers of the model differ, and its weights agree"),
        ({"0.running_mean": "", "0.weight": ""}, "Before call 2 the weights differ"),
    ],
)
def test_buffers_that_calls_write_are_distinguished_from_weights(differing: dict[str, str], text: str) -> None:
    turns = _HeldInTurn(cast("Session", None), ScriptChoice())
    turns._so_far.models, turns._so_far.buffers = ["Norm", "Norm"], {"0.running_mean", "0.running_var"}
    findings = Findings(pd.DataFrame(), 5.0, 1, data=["The weights already differ: 0."], weights=differing)
    compared = Comparison(findings, 1, turns._session, None, "differ")
    assert turns._so_far.at_last_call(compared).startswith(text)


def test_a_call_that_differs_after_an_update_judged_in_part_may_inherit_that() -> None:
    turns = _HeldInTurn(cast("Session", None), ScriptChoice())
    turns._so_far.models = ["Net", "Net"]
    frame = pd.DataFrame({"group": ["fc"], "label": ["culprit"]})
    differs = Comparison(Findings(frame, 5.0, 1), 1, turns._session, None, "differ")
    for number in (1, 2, 4):
        turns._so_far.undecided_updates[number] = differs
    before = "or before it in updates 1-2, 4, which can only be judged in part"
    assert turns._so_far.at_last_call(differs) == f"In call 2, of Net, {before}:"


def test_a_call_with_other_inputs_after_one_judged_in_part_may_inherit_that() -> None:
    so_far, frame = UnitsSoFar(), pd.DataFrame({"group": ["fc"], "label": ["culprit"]})
    so_far.models = ["Net", "Net", "Net"]
    differs = Comparison(Findings(frame, 5.0, 1), 1, Mock(), None, "differ")
    given = replace(differs, findings=replace(differs.findings, inputs=["input.ids@input"]))
    assert so_far.at_last_call(given) == "In call 3, of Net:"
    so_far.undecided = {0: differs, 1: differs}
    before = "or before it in calls 1-2, which can only be judged in part, since its inputs differ already"
    assert so_far.at_last_call(given) == f"In call 3, of Net, {before}:"
    # From equal inputs this call itself differs.
    assert so_far.at_last_call(differs) == "In call 3, of Net:"


def test_inputs_that_differ_before_a_later_call_point_to_the_scripts() -> None:
    turns = _HeldInTurn(cast("Session", None), ScriptChoice())
    turns._so_far.models = ["Net", "Net"]
    for group, text in (("input.ids@input", "Before call 2, of Net, its inputs differ"), ("fc", "In call 2, of Net:")):
        frame = pd.DataFrame({"group": [group], "label": ["culprit"]})
        findings = Findings(frame, 5.0, 1, inputs=["input.ids@input"])
        assert turns._so_far.at_last_call(Comparison(findings, 1, turns._session, None, "differ")).startswith(text)
        # With equal inputs the result still differs, so they do not explain it.
        further = replace(findings, unexplained=["Something after the last tap is computed differently."])
        assert (
            turns._so_far.at_last_call(Comparison(further, 1, turns._session, None, "differ")) == "In call 2, of Net:"
        )


def test_calls_that_could_not_be_compared_do_not_count_as_agreeing() -> None:
    turns = _HeldInTurn(cast("Session", None), ScriptChoice())
    assert turns._so_far.agreed() == ""
    turns._so_far.judged = (0, 0)
    assert turns.known == "Nothing was judged yet."
    turns._so_far.updates = 3
    assert turns._so_far.agreed() == "3 updates of the weights agree."


def test_an_update_agrees_once_all_weights_that_it_left_are_equal() -> None:
    so_far = UnitsSoFar()
    left = Comparison(Findings(pd.DataFrame(), 5.0, 1), 1, None, None, "inconclusive", left_to_next_update=("w", "v"))

    def cleared(*equal: str) -> dict[int, Comparison]:
        so_far.undecided_updates, so_far.updates = {1: left, 2: replace(left, left_to_next_update=())}, 3
        so_far.clear_updates(replace(left, equal_weights=frozenset(equal)))
        return so_far.undecided_updates

    assert [*cleared("w", "v", "u")] == [2]
    for equal in ((), ("w",), ("v", "u")):
        found = cleared(*equal)
        assert [*found] == [1, 2]
        assert found[1].left_to_next_update == ()
        assert found[1].remarks[-1] == "Before update 3 they differ by more than one rounding."
        assert found[2].remarks == ()


def test_an_update_that_was_judged_shows_what_followed_the_calls_before_it() -> None:
    so_far, elsewhere = UnitsSoFar(), SimpleNamespace(text="")
    after = "the loss and the optimizer's step, which may follow this call."
    findings = Findings(pd.DataFrame({"group": [], "label": []}), 5.0, 1)
    call = Comparison(findings, 1, Mock(), None, "inconclusive", ("Why.", f"Not checked: {after}"))

    def said() -> tuple[list[str], list[tuple[str, ...]]]:
        not_checked = so_far.not_checked_elsewhere(elsewhere)  # type: ignore[arg-type]
        return not_checked, [each.remarks for each in so_far.undecided.values()]

    so_far.add_call("Net", call)
    so_far.add_undecided_call(call)
    assert said() == ([f"Not checked: in call 1, {after}"], [call.remarks])
    so_far.add_update()
    assert said() == ([], [("Why.",)])
    # No update follows these calls.
    so_far.add_call("Net", call)
    so_far.add_call("Net", call)
    assert said()[0] == [f"Not checked: in calls 2-3, {after}"]


def test_what_a_call_of_a_part_does_not_check_is_forgotten_with_it() -> None:
    so_far, nothing = UnitsSoFar(), SimpleNamespace(text="Not checked: own.")
    part = PartOfModel("target", "Filter", 10, "Net", 100)
    for model, text in (("Net", "One.\nNot checked: x."), ("Filter", "Not checked: x.\nNot checked: y.")):
        so_far.add_call(model, SimpleNamespace(text=f"{text}\nNot checked: own."))  # type: ignore[arg-type]
    said = [so_far.not_checked_elsewhere(nothing)]  # type: ignore[arg-type]
    so_far.leave_out(part)
    said.append(so_far.not_checked_elsewhere(nothing))  # type: ignore[arg-type]
    assert said == [["Not checked: in calls 1-2, x.", "Not checked: in call 2, y."], ["Not checked: in call 1, x."]]
    assert (so_far.models, so_far.of_parts) == (["Net"], {part: 0})


class InTurn(_HeldInTurn):
    """Scripts that call Net as often as there are answers; part N is not checked in call N."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        folder: Path,
        answers: Sequence[Answer],
        rows: tuple[int, int] = (2, 2),
        tokens: tuple[Sequence[int], Sequence[int]] = ((), ()),
        **found: Any,
    ) -> None:
        super().__init__(Mock(folder=folder), ScriptChoice())
        self._rows, self._tokens = rows, tokens
        row = {"name": "a", "group": "a", "tags": {}, "label": "clean", "error": 0.0, "ratio": 0.5, "added": 0.0}
        frame = pd.DataFrame([{**row, "dtype": "float32", "cast": None}])
        self._left_to_judge = [
            Comparison(
                Findings(frame, 5.0, 1, **found), 1, self._session, None, answer, (f"Not checked: part {call}.",)
            )
            for call, answer in enumerate(answers, start=1)
        ]
        monkeypatch.setattr(unit_judge, "judge_held_calls", lambda *_: self._left_to_judge.pop(0))

    def _first(self) -> HeldUnits:
        results = [{"": torch.ones(rows, 3)} for rows in self._rows]
        given = [{"['ids']": torch.tensor(each)} if each else {} for each in self._tokens]
        ours, theirs = (
            CallDescription("Net", len(self._so_far.models) + 1, False, ("a",), each, {}, whole_numbers=numbers)
            for each, numbers in zip(results, given, strict=True)
        )
        return HeldUnits([ours], [theirs])

    def _next(self, side: object, before: object) -> HeldUnits | None:
        return self._first() if self._left_to_judge else None

    def _described_whole(self, held: HeldUnits) -> HeldUnits:
        return held


def test_calls_after_an_inconclusive_one_are_judged_and_may_differ(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answers: list[Answer] = ["inconclusive", "agree", "differ", "agree"]
    compared = InTurn(monkeypatch, tmp_path, answers).judge()
    said = "1 call of Net agrees. Call 1 can only be judged in part. In call 3, of Net:"
    assert (compared.answer, compared.remarks[0]) == ("differ", said)


def test_an_inconclusive_call_is_not_cleared_by_later_ones_that_agree(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compared = InTurn(monkeypatch, tmp_path, ["agree", "inconclusive", "agree"]).judge()
    assert compared.answer == "inconclusive"
    assert compared.remarks[0] == "2 calls of Net agree. Call 2 can only be judged in part."
    # The conclusion is that of call 2, and says what was left out in the others.
    assert compared.remarks[-1] == "Not checked: part 2."
    assert {"Not checked: in call 1, part 1.", "Not checked: in call 3, part 3."} <= {*compared.remarks}
    assert "Not checked: in call 2, part 2." not in compared.remarks


def test_calls_with_other_tokens_are_not_judged_after_one_of_other_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answers: list[Answer] = ["inconclusive", "differ", "differ", "differ", "differ"]
    for tokens, answer in ((([4, 5, 6], [4, 5, 7]), "inconclusive"), (([4, 5, 6], [4, 5, 6]), "differ")):
        chunks = InTurn(monkeypatch, tmp_path, answers, tokens=tokens)
        chunks._left_to_judge[0] = replace(chunks._left_to_judge[0], has_other_batch=True)
        chunks._session.plan.pairs = ()
        assert chunks.judge().answer == answer


def test_calls_of_other_batches_are_not_paired_after_one_of_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    halves = InTurn(monkeypatch, tmp_path, ["inconclusive", "differ", "differ", "differ", "differ"], rows=(2, 1))
    said = "The calls have batches of different sizes, 2 on the baseline and 1 on the target."
    halves._left_to_judge[0] = replace(halves._left_to_judge[0], remarks=(said,), has_other_batch=True)
    halves._session.plan.pairs = ()
    compared = halves.judge()
    assert (compared.answer, len(halves._left_to_judge)) == ("inconclusive", 4)
    assert compared.text.splitlines()[:2] == ["Calls 1, 2, 3 and 4 can only be judged in part.", said]
    # The side with smaller batches makes more calls.
    monkeypatch.setattr(scripts, "scripts_of", lambda _: {})
    halves._session.ranks = [Mock(alive=True)] * 2
    once_more = HeldUnits([ScriptEnd()], [CallDescription("Net", 5, False, ("a",), {}, {})])
    ended = halves._ended(once_more)
    assert ended.answer == "inconclusive"
    assert "The target calls a model again when the baseline has ended, perhaps with smaller batches." in ended.remarks
    # The batches of calls do not change how many updates there are.
    update = UpdateDescription("SGD", 1, 1, {}, {}, {}, {}, {}, {}, (), (), False)
    assert halves._ended(HeldUnits([ScriptEnd()], [update])).answer == "differ"
    halves._so_far.undecided.clear()
    assert halves._ended(once_more).answer == "differ"
    # A warm-up may have another batch than what follows.
    warmed = InTurn(monkeypatch, tmp_path, ["inconclusive", "differ"])
    warmed._left_to_judge[0] = replace(warmed._left_to_judge[0], remarks=(said,), has_other_batch=True)
    assert warmed.judge().answer == "differ"


@pytest.mark.parametrize(
    ("answers", "answer"), [(["inconclusive"] * 2, "inconclusive"), (["inconclusive", "agree"], "differ")]
)
def test_how_often_a_side_calls_proves_nothing_if_no_call_could_be_judged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answers: list[Answer], answer: str
) -> None:
    monkeypatch.setattr(scripts, "scripts_of", lambda _: {})
    turns = InTurn(monkeypatch, tmp_path, answers)
    turns._session.plan.pairs = ()
    turns.judge()
    turns._session.ranks = [Mock(alive=True)] * 2
    once_more = HeldUnits([CallDescription("Net", 5, False, ("a",), {}, {})], [ScriptEnd()])
    assert turns._ended(once_more).answer == answer


def test_what_was_not_checked_in_an_earlier_call_is_said_in_the_conclusion(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compared = InTurn(monkeypatch, tmp_path, ["agree", "agree"]).judge()
    assert compared.answer == "agree"
    assert {"Not checked: in call 1, part 1.", "Not checked: part 2."} <= {*compared.remarks}


def test_a_call_that_may_inherit_a_flipped_choice_of_an_earlier_one_is_inconclusive(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    earlier: list[Comparison] = []
    monkeypatch.setattr(InheritedRounding, "add", lambda _, compared: earlier.append(compared))
    monkeypatch.setattr(InheritedRounding, "doubts", lambda *_: ["It may be right."] if earlier else [])
    compared = InTurn(monkeypatch, tmp_path, ["agree", "differ"]).judge()
    assert compared.answer == "inconclusive"
    assert compared.text.splitlines()[:2] == [
        "1 call of Net agrees. Call 2 can only be judged in part.",
        "It may be right.",
    ]
    earlier.clear()
    assert InTurn(monkeypatch, tmp_path, ["differ"]).judge().answer == "differ"


def test_no_call_follows_one_that_cannot_be_repeated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    turns = InTurn(monkeypatch, tmp_path, ["inconclusive", "differ"], not_repeated=["a"])
    assert turns.judge().answer == "inconclusive"
    assert len(turns._so_far.models) == 1
