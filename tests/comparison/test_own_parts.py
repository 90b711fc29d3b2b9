"""Parts of a model that its script calls by themselves complete the model's call, and have no partner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pandas as pd
import pytest
import torch

from graftlab.comparison import unit_judge
from graftlab.comparison.answers import NOT_COMPARED, Comparison
from graftlab.comparison.held_units import HeldUnits
from graftlab.comparison.own_parts import OwnPart, OwnParts
from graftlab.comparison.scripts import ScriptChoice, _HeldInTurn
from graftlab.ranks.call_description import CallDescription
from graftlab.ranks.holding import ScriptEnd
from graftlab.verdict.findings import Findings

LOGITS = torch.arange(6.0).reshape(2, 3)
REMARK = (
    "The target's Engine returns no result that could be compared; that of its part Head, which the script calls by "
    "itself next, differs by 0.13 from the baseline's result. All else that was compared agrees, so Head differs, or "
    "the script's own code between the two calls does, such as the choice of rows."
)


def call(model: str, result: torch.Tensor, part_of: str = "", **parts: Any) -> CallDescription:
    return CallDescription(model, 1, parts.pop("trains", False), ("a",), {"": result}, {}, part_of=part_of, **parts)


WHOLE = HeldUnits([call("Net", LOGITS)], [call("Engine", torch.ones(5, 4))])
PART = HeldUnits([call("Net", LOGITS + 1)], [call("Head", LOGITS.clone(), "Engine")])


class Turns(_HeldInTurn):
    """Scripts that hold ``units`` one after the other; a call of the engine is judged with ``compared``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, units: Sequence[HeldUnits], **parts: Any) -> None:
        super().__init__(Mock(folder=folder), ScriptChoice())
        self._session.plan.pairs = ()  # type: ignore[attr-defined, misc]
        self._units = list(units)
        self.continued: list[str | None] = []
        frame = pd.DataFrame([{"name": "a", "group": "a", "tags": {}, "label": "clean", "error": 0.0, "ratio": 0.5}])
        frame = frame.assign(added=0.0, dtype="float32", cast=None)
        parts = {"remarks": (NOT_COMPARED,), "lacks_result": True, **parts}
        found = Findings(frame, 5.0, 1, without_output=("The output was not compared.",))
        compared = Comparison(found, 1, self._session, None, parts.pop("answer", "inconclusive"), **parts)
        monkeypatch.setattr(unit_judge, "judge_held_calls", lambda *_: compared)

    def _first(self) -> HeldUnits:
        return self._units.pop(0)

    def _next(self, side: Any, before: object) -> HeldUnits | None:
        self.continued.append(side)
        return self._units.pop(0) if self._units else None


def test_a_call_whose_part_returns_the_result_agrees(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    turns = Turns(monkeypatch, tmp_path, [WHOLE, PART])
    compared = turns.judge()
    assert (compared.answer, turns.continued) == ("agree", [None, "target"])
    lines = compared.text.splitlines()
    assert lines[0] == "1 call of Net agrees."
    assert not any("not be compared" in each or "output was not compared" in each for each in lines)
    assert (
        "Not checked: 1 call of Head by the target, a part of its Engine that its script calls by itself, except for "
        "results that complete those of a call before." in lines
    )


def test_a_part_that_returns_another_result_differs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wrong = HeldUnits(PART.baseline, [call("Head", LOGITS + torch.eye(3)[:2] * 0.7, "Engine")])
    compared = Turns(monkeypatch, tmp_path, [WHOLE, wrong]).judge()
    assert (compared.answer, compared.remarks[0]) == ("differ", REMARK)


@pytest.mark.parametrize("result", [torch.ones(4, 4), LOGITS])
def test_a_part_completes_only_a_call_that_agrees_but_for_its_result(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, result: torch.Tensor
) -> None:
    other = HeldUnits(PART.baseline, [call("Head", result, "Engine")])
    lacks = bool(result is not LOGITS)
    assert Turns(monkeypatch, tmp_path, [WHOLE, other], lacks_result=lacks).judge().answer == "inconclusive"


@pytest.mark.parametrize(("factor", "answer"), [(1.0, "inconclusive"), (1.3, "differ")])
def test_a_part_that_returns_only_some_of_the_result_clears_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, factor: float, answer: str
) -> None:
    both = replace(call("Net", LOGITS), plain={"[0]": LOGITS, "[1]": LOGITS * 2})
    head = replace(call("Head", LOGITS, "Engine"), plain={"[0]": LOGITS * factor})
    units = [HeldUnits([both], WHOLE.target), HeldUnits([both], [head])]
    assert Turns(monkeypatch, tmp_path, units).judge().answer == answer


@pytest.mark.parametrize(
    ("side", "result", "answer"),
    [
        ("baseline", LOGITS[:, :2], "inconclusive"),
        ("baseline", LOGITS + 1, "inconclusive"),
        ("baseline", LOGITS, "agree"),
        ("target", LOGITS[:, :2], "agree"),
    ],
)
def test_a_part_of_the_baseline_whose_result_the_target_lacks_clears_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, side: str, result: torch.Tensor, answer: str
) -> None:
    ours, theirs = [call("Net", LOGITS)], [call("Engine", LOGITS)]
    part = [call("Head", result, "Net" if side == "baseline" else "Engine")]
    alone = HeldUnits(part, [ScriptEnd()]) if side == "baseline" else HeldUnits([ScriptEnd()], part)
    complete = {"answer": "agree", "remarks": (), "lacks_result": False}
    compared = Turns(monkeypatch, tmp_path, [HeldUnits(ours, theirs), alone], **complete).judge()
    lacking = (
        "The baseline's script calls Head, a part of its Net, by itself, and no call of the target returns the same, "
        "so the target may lack it."
    )
    assert (compared.answer, lacking in compared.text.splitlines()) == (answer, answer == "inconclusive")


def test_only_one_sides_part_of_a_called_model_is_called_alone() -> None:
    parts = OwnParts()
    assert parts.called_alone(PART) is None
    parts.note(WHOLE)
    assert parts.called_alone(PART) == OwnPart("target", "Head", "Engine")
    ended = HeldUnits([ScriptEnd()], PART.target)
    assert parts.called_alone(ended) == OwnPart("target", "Head", "Engine")
    assert parts.called_alone(WHOLE) is None
    # The baseline's next model may be the part's partner.
    assert parts.called_alone(HeldUnits([call("Other", LOGITS)], PART.target)) is None
    assert parts.called_alone(HeldUnits(PART.baseline, [call("Head", LOGITS, "Other")])) is None
    assert parts.called_alone(HeldUnits(PART.baseline, [call("Head", LOGITS, "Engine", trains=True)])) is None
    assert parts.called_alone(HeldUnits(PART.baseline, [*PART.target, ScriptEnd()])) is None


def test_only_the_first_part_after_a_call_is_its_completion() -> None:
    parts = OwnParts()
    parts.note(WHOLE)
    (part,) = [parts.called_alone(PART)]
    assert part is not None
    assert parts.results(part, PART).compared
    assert not parts.results(part, PART).compared
    assert parts.not_compared == [part.not_compared(2)]
