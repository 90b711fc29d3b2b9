"""What a comparison says of tokens that differ, and of the calls and updates before, as a whole."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from graftlab.comparison.answers import Comparison
from graftlab.comparison.chosen_tokens import ChosenToken, sentence_on
from graftlab.comparison.units_so_far import UnitsSoFar
from graftlab.judging.unmeasured import BEGIN_INPUT
from graftlab.verdict.findings import Findings


def tie(row: int) -> ChosenToken:
    return ChosenToken(row, 11, 70 + row, 0.00123, 0.0456, True)


def far(row: int, is_targets_largest: bool = True) -> ChosenToken:
    return ChosenToken(row, 5, 6 + row, 0.789, 0.0456, is_targets_largest)


SAID: list[tuple[str, str]] = [
    (
        sentence_on([tie(1)], 3, "Model"),
        "Before call 3, of Model, the tokens differ in row 1 (11 on the baseline, 71 on the target), "
        "by a near tie: in the previous call, the baseline's logits of the two tokens are 0.0012 "
        "apart, rounding explains up to 0.046, and each side took its largest. Later differences are "
        "inherited from this choice.",
    ),
    (
        sentence_on([tie(1), tie(2)], 3, "Model"),
        "Before call 3, of Model, the tokens differ in row 1 (11 on the baseline, 71 on the target), "
        "row 2 (11 on the baseline, 72 on the target), by a near tie: in the previous call, the "
        "baseline's logits of the two tokens are 0.0012 apart, rounding explains up to 0.046, and "
        "each side took its largest. Later differences are inherited from this choice.",
    ),
    (
        sentence_on([tie(row) for row in range(6)], 3, "Model"),
        "Before call 3, of Model, the tokens differ in row 0 (11 on the baseline, 70 on the target), "
        "row 1 (11 on the baseline, 71 on the target), row 2 (11 on the baseline, 72 on the target) "
        "and 3 more rows, by a near tie: in the previous call, the baseline's logits of the two "
        "tokens are 0.0012 apart, rounding explains up to 0.046, and each side took its largest. "
        "Later differences are inherited from this choice.",
    ),
    (
        sentence_on([tie(1), far(2)], 4, "Decoder"),
        "Before call 4, of Decoder, the tokens differ in row 2 (5 on the baseline, 8 on the target), "
        "and that is not a near tie: in the previous call, the baseline's logits of the two tokens "
        "are 0.79 apart, and rounding explains only 0.046.",
    ),
    (
        sentence_on([far(2, False), tie(1)], 4, "Decoder"),
        "Before call 4, of Decoder, the tokens differ in row 2 (5 on the baseline, 8 on the target), "
        "and the target's token does not have the largest of its logits: the code that chooses "
        "tokens differs.",
    ),
]


@pytest.mark.parametrize(("said", "expected"), SAID, ids=[expected[:50] for _, expected in SAID])
def test_a_sentence_on_tokens_has_both_sides_and_how_near_they_were(said: str, expected: str) -> None:
    assert said == expected


def so_far(models: str, updates: int = 0, results: int = 0, calls: Any = (), made: Any = ()) -> UnitsSoFar:
    """Calls of models A and B; those in ``calls``, from 0, and the updates ``made``, from 1, were judged in part."""
    units = UnitsSoFar()
    units.models, units.updates, units.results = [*models], updates, ["A"] * results
    units.undecided = {place: comparison() for place in calls}
    units.undecided_updates = {number: comparison() for number in made}
    return units


def comparison(**found: Any) -> Comparison:
    frame = pd.DataFrame({"name": [], "group": [], "label": [], "ratio": []})
    findings = Findings(**{"frame": frame, "threshold": 5.0, "target_ranks": 1, **found})
    return Comparison(findings, 1, None, None, "inconclusive")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("units", "given", "said"),
    [
        (so_far("A"), {}, "1 call of A agrees."),
        (so_far("AAB"), {}, "2 calls of A and 1 call of B agree."),
        (so_far("AA", 1), {}, "2 calls of A and 1 update of the weights agree."),
        (so_far("", 2), {}, "2 updates of the weights agree."),
        (so_far("AAA", 3), {"calls": 2, "updates": 1}, "2 calls of A and 1 update of the weights agree."),
        (so_far("A", results=1), {}, "1 call of A agrees, and so do the results of the next call."),
        (so_far("AA", results=3), {}, "2 calls of A agree, and so do the results of the next 3 calls."),
        (
            so_far("A", results=2, calls=[0]),
            {},
            "The results of the next 2 calls agree. Call 1 can only be judged in part.",
        ),
        (so_far("ABA", calls=[0, 2]), {}, "1 call of B agrees. Calls 1 and 3 can only be judged in part."),
        (so_far("ABA", calls=[0, 2]), {"calls": 2}, "1 call of B agrees. Call 1 can only be judged in part."),
        (
            so_far("A", 2, made=[2]),
            {},
            "1 call of A and 1 update of the weights agree. Update 2 can only be judged in part.",
        ),
        (so_far("A", 2, made=[2]), {"updates": 1}, "1 call of A and 1 update of the weights agree."),
        (so_far("A", 2, made=[1, 2]), {}, "1 call of A agrees. Updates 1 and 2 can only be judged in part."),
        (so_far(""), {}, ""),
    ],
)
def test_a_sentence_on_what_agrees_counts_each_call_and_update_once(
    units: UnitsSoFar, given: dict[str, int], said: str
) -> None:
    assert units.agreed(**given) == said


@pytest.mark.parametrize(
    ("units", "found", "said"),
    [
        (so_far("AB"), {}, "In call 2, of B:"),
        (so_far("AB", 2, made=[2]), {}, "In call 2, of B, or before it in update 2, which can only be judged in part:"),
        (
            so_far("AB"),
            {"not_grafted": [f"{BEGIN_INPUT} x"]},
            "Before call 2, of B, its inputs have different shapes: one side has made an extra call before it, or the "
            "scripts' own code between the calls differs.",
        ),
        # Before the first call there is none.
        (so_far("A", 1), {"not_grafted": [f"{BEGIN_INPUT} x"]}, "In call 1, of A:"),
    ],
)
def test_where_the_last_call_differs_is_said_with_its_number(
    units: UnitsSoFar, found: dict[str, Any], said: str
) -> None:
    assert units.at_last_call(comparison(**found)) == said
