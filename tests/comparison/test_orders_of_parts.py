"""Ranks whose parts of the baseline's input are not consecutive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from graftlab.comparison.answers import Answer, ReasonedAnswer
from graftlab.comparison.held_calls import _in_order_of_parts
from graftlab.comparison.orders_of_parts import order_of_parts
from graftlab.ranks.call_description import CallDescription

IDS = torch.arange(16).reshape(2, 8)
ZIGZAG = [[0, 1, 6, 7], [2, 3, 4, 5]]
STRIDED = [[0, 2, 4, 6], [1, 3, 5, 7]]


def call(ids: torch.Tensor, *, result: torch.Tensor | None = None) -> CallDescription:
    returned = {"": ids.double().sin() if result is None else result}
    # The mask is the same in any order.
    return CallDescription("Net", 1, False, (), returned, returned, whole_numbers={"['mask']": ids * 0, "['ids']": ids})


def answered(
    *parts: CallDescription, answer: Answer = "differ", data: Sequence[str] = (), whole: torch.Tensor | None = None
) -> tuple[Answer, str]:
    conclusion = ReasonedAnswer(answer)
    said = _in_order_of_parts([call(IDS, result=whole)], parts, 5.0, conclusion, data)
    return conclusion.answer, " ".join(said)


@pytest.mark.parametrize(("order", "places"), [(ZIGZAG, "0-1, 6-7 on rank 0; 2-5"), (STRIDED, "0, 2, 4, 6 on rank 0")])
def test_results_are_compared_in_the_order_of_the_ranks_parts(order: list[list[int]], places: str) -> None:
    answer, said = answered(*(call(IDS[:, at]) for at in order))
    assert answer == "inconclusive"
    assert said.startswith(f"The target's ranks do not have consecutive parts of ids along dim 1: {places}")
    assert "In that order the results agree to rounding." in said
    wrong = IDS[:, order[1]].double().sin() * 1.1
    answer, said = answered(call(IDS[:, order[0]]), call(IDS[:, order[1]], result=wrong), answer="agree")
    assert answer == "differ"
    assert "In that order the results differ by 0.1, so something is computed differently." in said
    for shape in ((), (2, 3), (2, 20), (8,)):
        parts = [call(IDS[:, at], result=torch.ones(shape)) for at in order]
        answer, said = answered(*parts, whole=torch.ones(shape))
        assert (answer, "The results cannot be put in that order." in said) == ("inconclusive", True)


def test_weights_that_differ_need_no_order() -> None:
    parts = [call(IDS[:, at]) for at in ZIGZAG]
    inputs, weights = "The inputs already differ: input.ids (rel_l2 1).", "The weights already differ: w (rel_l2 1)."
    assert answered(*parts, data=[inputs])[0] == "inconclusive"
    assert answered(*parts, data=[inputs, weights])[0] == "differ"


def test_parts_that_follow_one_another_or_differ_change_nothing() -> None:
    assert answered(call(IDS[:, :4]), call(IDS[:, 4:])) == ("differ", "")
    assert answered(call(IDS[:, :4]), call(IDS[:, :4])) == ("differ", "")
    assert answered(call(IDS), call(IDS)) == ("differ", "")
    assert answered(call(IDS[:, ZIGZAG[0]])) == ("differ", "")


def test_arguments_in_different_orders_prove_no_order() -> None:
    # The labels have the order of the tokens on the baseline alone.
    whole = replace(call(IDS), whole_numbers={"['ids']": IDS, "['labels']": IDS + 1})
    parts = [
        replace(call(IDS[:, at]), whole_numbers={"['ids']": IDS[:, at], "['labels']": IDS[:, straight] + 1})
        for at, straight in zip(ZIGZAG, ([0, 1, 2, 3], [4, 5, 6, 7]), strict=True)
    ]
    assert order_of_parts([whole], parts) is None
    together = [
        replace(each, whole_numbers={p: t for p, t in each.whole_numbers.items() if "ids" in p}) for each in parts
    ]
    assert order_of_parts([whole], together) is not None
