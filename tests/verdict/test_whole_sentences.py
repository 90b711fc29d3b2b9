"""Sentences of a verdict as a whole: which side, how many, and what to do about it."""

from __future__ import annotations

import pytest

from graftlab.verdict.first_step import on_diverged_weights
from graftlab.verdict.misaligned_steps import MisalignedSteps
from graftlab.verdict.outdated_pairs import OutdatedPair, learned_from_other_code, no_longer_equal
from graftlab.verdict.wrong_calls import _of_part, common_rule


def outdated(name: str, present: str = "", is_mended: bool = False) -> OutdatedPair:
    return OutdatedPair(f"h.{name}", f"blocks.{name}", "same", 1.234e-6, 0.0456, present, is_mended)


SAID: list[tuple[str, str]] = [
    (
        MisalignedSteps("target", 2, "step", "embed", 5, 1).sentence,
        "The target is ahead by 2 steps: its values at embed are those that the baseline shows 2 "
        "steps later, in 5 pairs of steps. So different steps were compared, and no computation is "
        "judged. Let both begin with the same step, for example by 2 more calls of gl.step() on the "
        "target before its first step, and judge again.",
    ),
    (
        MisalignedSteps("baseline", 1, "step", "embed", 1, 2).sentence,
        "The baseline is ahead by 1 step: its values at embed are those that the target shows 1 step "
        "later, in 1 pair of steps, and so are those at 1 more tap. So different steps were "
        "compared, and no computation is judged. Let both begin with the same step, for example by 1 "
        "more call of gl.step() on the baseline before its first step, and judge again.",
    ),
    (
        MisalignedSteps("target", 1, "call", "embed", 5, 4).sentence,
        "The target is ahead by 1 call: its values at embed are those that the baseline shows 1 call "
        "later, in 5 pairs of calls, and so are those at 3 more taps. So different calls were "
        "compared, and no computation is judged. Let both make the same calls: the baseline makes 1 "
        "call first that the target does not, and judge again.",
    ),
    (
        on_diverged_weights(["*", "layers.*.attn"]),
        "Not judged, because of weights that have diverged since then, which may explain what is "
        "added: members of the model, layers.*.attn. graft_weights=True first gives the target the "
        "baseline's weights, permanently.",
    ),
    (
        on_diverged_weights([f"g{n}" for n in range(9)]),
        "Not judged, because of weights that have diverged since then, which may explain what is "
        "added: g0, g1, g2, g3, g4, g5 and 3 more. graft_weights=True first gives the target the "
        "baseline's weights, permanently.",
    ),
    (
        no_longer_equal([outdated("a")]),
        "blocks.a matched h.a by value to 1e-06 when the pairs were made, and differs by 0.046 now. "
        "If the target's code has changed since, match again.",
    ),
    (
        no_longer_equal([outdated("a"), outdated("b", "has the values of h.c"), outdated("c")]),
        "blocks.b and 2 more matched h.b by value to 1e-06 when the pairs were made, and now has the "
        "values of h.c. If the target's code has changed since, match again.",
    ),
    (
        learned_from_other_code([outdated("a", "has the values of h.b", True)]),
        "The plan's pairs are outdated: blocks.a was paired with h.a, and now has the values of h.b. "
        "Match again: session.edit(pairs=session.match(...)), or %graft match. Nothing is judged "
        "until then, because a graft by such a pair is a mistake itself.",
    ),
    (
        learned_from_other_code([outdated("a", "has the values of h.b", True)] * 3),
        "The plan's pairs are outdated: blocks.a was paired with h.a, and now has the values of h.b "
        "(2 more pairs like it). Match again: session.edit(pairs=session.match(...)), or %graft "
        "match. Nothing is judged until then, because a graft by such a pair is a mistake itself.",
    ),
    (
        _of_part("rid", {"b", "a"}, {"a", "b", "c", "d"}),
        " in calls with rid=a, b (2 of 4 values)",
    ),
    (
        _of_part("rid", set("abcdefgh"), set("abcdefghij")),
        " in calls with rid=a, b, c, d, e, f, ... (8 of 10 values)",
    ),
    (
        _of_part("step", {4, 5, 6}, set(range(7))),
        " from step 4 on (of 0-6)",
    ),
    (
        _of_part("step", {1}, {0, 1, 2}),
        " in step 1 of 0-2",
    ),
    (
        _of_part("step", {0, 2, 4}, set(range(6))),
        " in steps 0, 2, 4 of 0-5 (all even numbers and no others)",
    ),
    (
        _of_part("occurrence", {1, 2}, {0, 1, 2, 4}),
        " in occurrences 1-2 of 0-2, 4",
    ),
    (
        _of_part("length", {16, 32, 48}, {8, 16, 24, 32, 40, 48}),
        " in calls with length=16, 32, 48 of 8, 16, 24, 32, 40, 48 (all multiples of 16 and no others)",
    ),
    (
        _of_part("length", {32, 48}, {8, 32, 48}),
        " in calls from length=32 on (of 8, 32, 48)",
    ),
    (
        common_rule({16, 32}, {8, 16, 24, 32, 40}),
        "all multiples of 16 and no others",
    ),
    (
        common_rule({3, 5, 9}, {2, 3, 4, 5, 9}),
        "all odd numbers and no others",
    ),
    (
        common_rule({3, 5}, {2, 3, 4, 5, 6}),
        "",
    ),
    (
        common_rule({2, 4, 6}, {2, 4, 6, 7}),
        "",
    ),
]


@pytest.mark.parametrize(("said", "expected"), SAID, ids=[expected[:50] for _, expected in SAID])
def test_a_sentence_has_every_name_and_number_in_its_place(said: str, expected: str) -> None:
    assert said == expected
