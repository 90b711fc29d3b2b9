"""Remarks of a verdict on what it left out, as a whole: the taps, how far they are off, and what follows."""

from __future__ import annotations

import pytest

from graftlab.judging.masked_values import left_out, masks_alike
from graftlab.judging.partial_sums import (
    Summands,
    averages_not_named,
    gradients_not_compared,
    not_adding_up,
    not_compared,
)
from graftlab.judging.split_calls import SplitCalls, not_paired
from graftlab.judging.stored_weights import text_on_stored

CALLS: SplitCalls = {
    ("h.0.attn", None): {"baseline": 1, "target": 4},
    ("h.0.mlp", "grad"): {"baseline": 2, "target": 3},
}
OFF = {"a": Summands(["a"], ["a.1"], 0.0123), "b": Summands(["b"], [], 0.5), "c": Summands(["c"], [])}


def said(sentences: list[str]) -> str:
    return " | ".join(sentences)


SAID: list[tuple[str, str]] = [
    (
        said(not_paired(CALLS)),
        "2 taps (h.0.attn, h.0.mlp): the sides divide their work into different calls (1 call on the "
        "baseline and 4 on the target, of other shapes), so none of these calls is judged. Let both "
        "sides make the same calls to see where a difference arises.",
    ),
    (
        said(not_paired({(f"t{n}", None): {"baseline": 6, "target": 3} for n in range(6)})),
        "6 taps (t0, t1, t2, t3 and 2 more): the sides divide their work into different calls (6 "
        "calls on the baseline and 3 on the target, of other shapes), so none of these calls is "
        "judged. Let both sides make the same calls to see where a difference arises.",
    ),
    (
        said(gradients_not_compared({"w@param_grad": ["w"], "x@grad": ["x"]})),
        "the gradients of the weight w, x: each rank of the target has a summand, and together they "
        "add up to the baseline's. Whether the script adds them up shows in its next update.",
    ),
    (
        said(averages_not_named(["loss", "z"])),
        "loss, z on each rank of the target: only the average over the ranks is the baseline's, as "
        "where each rank has the loss of its part of the batch.",
    ),
    (
        said(not_adding_up({"a": Summands(["a"], ["a.0", "a.1"]), "b": Summands(["b"], ["b.0"])})),
        "At a.0, a.1, b.0 the sum over the target's ranks differs from the baseline's value, "
        "although what follows agrees to rounding: the code before them may be wrong.",
    ),
    (
        said(not_adding_up({"a": Summands(["a"], [])})),
        "",
    ),
    (
        said(not_compared({"a": Summands(["a"], [])})),
        "a: each rank of the target has a summand of this value, and together they add up to the "
        "baseline's. What follows is judged without it; gl.tap(..., layout=...) declares partial "
        "sums, and compares their sum.",
    ),
    (
        said(not_compared({"a": Summands(["a"], ["a.1"]), "b": Summands(["b"], [])})),
        "a, b: each rank of the target has a summand of these values, and together they add up to "
        "the baseline's, but not at a.1. What follows is judged without them; gl.tap(..., "
        "layout=...) declares partial sums, and compares their sum.",
    ),
    (
        said(not_compared(OFF)),
        "c: each rank of the target has a summand of this value, and together they add up to the "
        "baseline's. What follows is judged without it; gl.tap(..., layout=...) declares partial "
        "sums, and compares their sum. | a, b: each rank of the target has a summand of these "
        "values, and together they differ from the baseline's by 0.5. What follows is judged without "
        "them; gl.tap(..., layout=...) declares partial sums, and compares their sum.",
    ),
    (
        masks_alike(["scores", "mask"]),
        "At scores, mask, minus infinity on one side and a number below -10000 on the other count as "
        "equal, since both mask.",
    ),
    (
        masks_alike([f"s{n}" for n in range(5)]),
        "At s0, s1, s2 and 2 more, minus infinity on one side and a number below -10000 on the other "
        "count as equal, since both mask.",
    ),
    (
        left_out(["scores"]),
        "At scores, values below -10000 on both sides count as masked, and are left out.",
    ),
    (
        said(text_on_stored({"h.0.w": "transposed", "h.1.w": "transposed", "out.w": "rolled by 3"})),
        "The target stores weights in another form: h.*.w (transposed), out.w (rolled by 3). What "
        "their modules compute from them agrees.",
    ),
    (
        said(text_on_stored({})),
        "",
    ),
]


@pytest.mark.parametrize(("said", "expected"), SAID, ids=[expected[:50] for _, expected in SAID])
def test_a_remark_has_every_name_and_number_in_its_place(said: str, expected: str) -> None:
    assert said == expected
