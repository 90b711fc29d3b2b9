"""What a comparison says of tokens that differ, as a whole."""

from __future__ import annotations

import pytest

from graftlab.comparison.chosen_tokens import ChosenToken, sentence_on


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
