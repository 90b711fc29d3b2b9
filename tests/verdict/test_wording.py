"""The words of a verdict: which layers, modules and steps, and what several groups have in common."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from graftlab.base.tap_groups import group_of
from graftlab.base.world import SIDES, Side
from graftlab.comparison.answers import answer_of
from graftlab.lines.frames import SourceFrame
from graftlab.verdict.added import COLUMNS
from graftlab.verdict.findings import Findings, JobRemarks
from graftlab.verdict.lines import (
    DifferingLine,
    explained_by_code,
    first_places,
    lines_in_words,
    most_telling,
    notes_on,
)
from graftlab.verdict.model_data import BEGINNINGS
from graftlab.verdict.origins import NOT_EXAMINED, ErrorOrigin, ErrorOrigins
from graftlab.verdict.rounds_differently import LABEL, RoundingGroups
from graftlab.verdict.wording import ADD_TAPS, _is_coarse, _ranks, _sentence_groups, text_of


def tap(
    name: str, ratio: float, *, kind: str | None = None, step: int = 0, target: str | None = None
) -> dict[str, Any]:
    tags = {"kind": kind} if kind else {}
    return {
        **dict.fromkeys(COLUMNS),
        **{"name": name, "tags": tags, "rank": 0, "step": step, "group": group_of(name, tags)},
        **{"target_name": target or name, "dtype": "float32", "added": ratio * 1e-6, "floor": 1e-6, "ratio": ratio},
        "label": "culprit" if ratio > 5 else "clean",
    }


def said(*taps: dict[str, Any], hints: Mapping[str, str] | None = None) -> str:
    return text_of(Findings(pd.DataFrame(list(taps), columns=list(COLUMNS)), 5.0, 1, hints=hints or {}))


def test_after_a_failed_stage_only_checked_taps_are_called_clean() -> None:
    failed = ["The search for the culprit failed, so its results are missing: OSError"]
    clean, wrong = tap("h.0.out", 1.0), tap("h.1.out", 90.0)
    assert said(clean).startswith("No tap adds more than rounding (")
    text = text_of(Findings(pd.DataFrame([clean], columns=list(COLUMNS)), 5.0, 1, failed=failed))
    assert text.startswith(f"{failed[0]}\nNothing that was checked adds more than rounding (")
    # A named group stands first: the stage could only have named others beside it.
    text = text_of(Findings(pd.DataFrame([clean, wrong], columns=list(COLUMNS)), 5.0, 1, failed=failed))
    assert text.startswith("h.*.out is computed differently in layer 1 of 0-1 (")
    assert text.endswith(failed[0])
    assert text_of(Findings(pd.DataFrame(columns=list(COLUMNS)), 5.0, 1, failed=failed)) == failed[0]


def test_values_that_only_round_differently_agree_before_an_exception() -> None:
    frame = pd.DataFrame([{**tap("a", 1.0), "order": 1}, {**tap("b", 1.0), "order": 2}])
    frame["label"] = ["clean", LABEL]
    raised = "The target raises ValueError: boom; the baseline does not."
    found = Findings(frame, 5.0, 1, raised=raised, rounding=RoundingGroups(("b",), 1, ("bfloat16",)))
    assert text_of(found).startswith(f"{raised} The values before that agree to rounding, up to b, the last that")
    wrong = replace(found, frame=frame.assign(label=["culprit", LABEL], ratio=[90.0, 1.0]))
    assert text_of(wrong).startswith(f"{raised} Before that, values already differ:")
    pairs = ["The plan's pairs contradict their names or each other: k has the values of v."]
    paired = replace(found, contradicting_pairs=pairs)
    assert text_of(paired).splitlines()[0] == text_of(found).splitlines()[0]
    assert text_of(paired).splitlines()[1] == pairs[0]
    given = replace(found, data=["The inputs already differ: x."])
    assert text_of(given).startswith(f"{raised} Before that, values already differ:")


def test_a_group_that_rounds_differently_is_shown_with_its_differing_weights() -> None:
    frame = pd.DataFrame([tap("a", 0.0), tap("b", 1.0)]).assign(label=["clean", LABEL])
    rounding = RoundingGroups(("b",), 1, ("bfloat16",))
    found = Findings(frame, 5.0, 1, rounding=rounding, weights={"b.bias": "b.bias (rel_l2 0.01)", "c.bias": "c.bias"})
    assert "because of weights that already differ: b.bias (rel_l2 0.01)." in text_of(found)


def test_weights_that_the_sentence_of_their_module_states_are_not_stated_before_it() -> None:
    frame = pd.DataFrame([tap("b", 90.0)], columns=list(COLUMNS))
    weights = {name: f"{name} (rel_l2 0.01)" for name in ("b.bias", "c.bias")}
    data = [f"{BEGINNINGS['param']}: {', '.join(weights.values())}.", f"{BEGINNINGS['input']}: x."]
    lines = text_of(Findings(frame, 5.0, 1, weights=weights, data=data)).splitlines()
    assert [line for line in lines if line.startswith(BEGINNINGS["param"])] == [
        "The weights already differ: c.bias (rel_l2 0.01). The code that uses them is judged below."
    ]
    assert data[1] in lines
    assert data[0] in text_of(Findings(frame, 5.0, 1, weights=dict([*weights.items()][1:]), data=data)).splitlines()


@pytest.mark.parametrize(
    ("cast", "first", "advice"),
    [
        (
            "float32 -> bfloat16",
            "The target has bfloat16 at h where the baseline has float32, so differences within",
            "; run the target in float32 for a closer look.",
        ),
        (
            "bfloat16 -> float32, cpu -> cuda:0",
            "The target has float32 at h where the baseline has bfloat16, so differences within",
            "; run the baseline in float32 for a closer look.",
        ),
        (None, "Nothing above bfloat16 rounding (", "; run both sides in float32 for a closer look."),
        ("cpu -> cuda:0", "Nothing above bfloat16 rounding (", "; run both sides in float32 for a closer look."),
    ],
)
def test_a_side_of_low_precision_is_named_first(cast: str | None, first: str, advice: str) -> None:
    text = said({**tap("h", 1.0), "dtype": "bfloat16", "cast": cast})
    assert text.startswith(first)
    assert text.endswith(advice)


def test_each_pair_of_dtypes_that_round_apart_has_a_sentence_with_the_coarser() -> None:
    casts = ["float32 -> bfloat16", "float16 -> bfloat16", "bfloat16 -> float16", "cpu -> cuda:0, float32 -> float16"]
    taps = [{**tap(f"h{n}", 1.0), "dtype": "bfloat16", "cast": cast} for n, cast in enumerate(casts)]
    same = {**tap("same", 1.0), "dtype": "bfloat16", "cast": "bfloat16 -> bfloat16"}
    parts = [
        ("bfloat16", "h0", "float32", "bfloat16"),
        ("bfloat16", "h1", "float16", "bfloat16"),
        ("float16", "h2", "bfloat16", "bfloat16"),
        ("float16", "h3", "float32", "float16"),
    ]
    expected = " ".join(
        f"The target has {after} at {name} where the baseline has {before}, so differences within {coarser} rounding "
        "cannot be seen there."
        for after, name, before, coarser in parts
    )
    assert said(*taps, same).startswith(f"{expected} Nothing above bfloat16 rounding (")


def test_returned_values_that_differ_where_taps_are_bit_equal_are_stated() -> None:
    frame = pd.DataFrame([{**tap("h", 0.0), "dtype": "bfloat16"}], columns=list(COLUMNS))
    assert text_of(Findings(frame, 5.0, 1)).endswith("threshold 5), and all are bit-equal.")
    assert text_of(Findings(frame, 5.0, 1, after_taps=0.0017)).endswith(
        "threshold 5; the returned values differ by 0.0017, though all taps are bit-equal); run both sides in float32 "
        "for a closer look."
    )


def test_many_tensors_of_one_input_share_a_sentence() -> None:
    cache = [tap(f"input.cache[{layer}][{n}]", 900.0 + n, kind="input") for layer in range(2) for n in range(2)]
    other = tap("input.mask", 90.0, kind="input")
    assert said(*cache, other).splitlines()[:2] == [
        "The inputs are computed differently: input.cache[0][0], input.cache[0][1], input.cache[1][0] and 1 more "
        "(added up to 0.0009, 9e+02 x the floor, float32).",
        "The input input.mask is computed differently (added 9e-05, 90 x the floor, float32).",
    ]
    assert len(said(*cache[:3]).splitlines()) == 3


def test_a_module_named_by_a_number_is_distinguished_from_its_neighbours() -> None:
    taps = [tap(f"h.{layer}.mlp.{n}", 900.0 if n == 2 else 1.0) for layer in range(3) for n in range(3)]
    assert "h.*.mlp.* is computed differently in layers 0-2 (mlp.2 alone, added " in said(*taps)
    every = [tap(f"h.{layer}.mlp.{n}", 900.0) for layer in range(3) for n in range(3)]
    assert "alone" not in said(*every)


def test_the_steps_are_named_unless_all_differ() -> None:
    taps = [tap(f"l.{n}.act", 900.0 if (n, s) == (1, 2) else 1.0, step=s) for s in range(3) for n in range(2)]
    assert said(*taps).startswith("l.*.act is computed differently in layer 1 of 0-1 and step 2 of 0-2 (")
    assert said(*(tap("act", 900.0 if s else 1.0, step=s) for s in range(4))).startswith(
        "act is computed differently from step 1 on (of 0-3) ("
    )
    assert "step" not in said(tap("act", 900.0), tap("act", 900.0, step=1))


def test_a_pair_has_the_targets_name_beside_it() -> None:
    one = tap("h.0.out", 9.0, target="blocks.1.mixed")
    assert "float32, at h.0.out, the target's blocks.1.mixed)" in said(one)
    other = tap("h.1.out", 90.0, target="blocks.2.mixed")
    assert "float32, most at h.1.out, the target's blocks.2.mixed)" in said(one, other)
    assert "float32, at the target's mixed)" in said(tap("out", 9.0, target="mixed"))


def test_a_layer_at_the_threshold_is_not_wrong() -> None:
    assert said(tap("h.0.q", 9.0), tap("h.1.q", 5.0)).startswith("h.*.q is computed differently in layer 0 of 0-1 (")


def test_only_the_elements_of_a_stack_are_called_layers() -> None:
    wrong = {"decoder.layers.{}.q": "layers 1-2", "res_blocks.{}.q": "layers 1-2", "net.{}": "members 1-2"}
    wrong |= {"steps.{}.state": "steps.1-2", "mlp.experts.{}.up": "experts.1-2"}
    for name, where in wrong.items():
        text = said(*(tap(name.format(n), 9.0 if n else 1.0) for n in range(3)))
        assert f" is computed differently in {where} of 0-2 (" in text


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            "param_grad",
            "Going backward, the first weight whose gradient is computed differently is a.w; the gradients of weights "
            "are computed differently: a.w, b.w, l.*.w in layer 1 of 0-1 and 1 more",
        ),
        ("param", "The updates of weights are computed differently: a.w, b.w, l.*.w in layer 1 of 0-1 and 1 more"),
    ],
)
def test_many_weights_share_a_sentence(kind: str, words: str) -> None:
    ratios = {"a.w": 10.0, "b.w": 20.0, "l.0.w": 1.0, "l.1.w": 30.0, "c.w": 15.0}
    lines = said(*(tap(name, ratio, kind=kind) for name, ratio in ratios.items())).splitlines()
    assert lines[0] == f"{words} (added up to 3e-05, 30 x the floor, float32)."
    few = said(*(tap(name, 10.0, kind=kind) for name in ("a.w", "b.w", "c.w")))
    assert len(few.splitlines()) == 3


def test_the_first_wrong_gradient_in_backward_order_leads() -> None:
    ratios = {"head.w": 1.0, "norm.w": 2.0, "blocks.2.router.w": 90.0, "a.w": 20.0, "b.w": 10.0, "qkv.w": 500.0}
    text = said(*(tap(name, ratio, kind="param_grad") for name, ratio in ratios.items()))
    assert text.startswith(
        "Going backward, the first weight whose gradient is computed differently is blocks.2.router.w (head.w and "
        "norm.w before it agree); the gradients of weights are computed differently: blocks.*.router.w in layer 2, "
        "a.w, qkv.w and 1 more (added up to 0.0005, 5e+02 x the floor"
    )
    # What inherits an error does not agree.
    inherits = {**tap("head.w", 1.0, kind="param_grad"), "error_ratio": 70.0}
    others = [tap(name, 90.0, kind="param_grad") for name in "abcd"]
    assert "agree" not in said(inherits, *others)
    # What only rounds differently is no mistake.
    rounds = {**tap("head.w", 9.0, kind="param_grad"), "label": LABEL}
    frame = pd.DataFrame([rounds, *others], columns=list(COLUMNS))
    rounding = RoundingGroups((rounds["group"],), 1, ("bfloat16",))
    assert "Going backward" not in text_of(Findings(frame, 5.0, 1, rounding=rounding))
    assert "Going backward" in text_of(Findings(frame[1:], 5.0, 1, rounding=rounding))


def test_members_of_a_model_that_is_a_list_are_named_without_a_star() -> None:
    one, two = ([tap(str(n), 900.0 if n in wrong else 1.0) for n in range(4)] for wrong in ([1], [1, 2]))
    assert said(*one).startswith("The model's member 1 of 0-3 is computed differently (")
    assert said(*two).startswith("The model's members 1-2 of 0-3 are computed differently (")
    later = [tap(str(n), 900.0 if (n, s) == (1, 2) else 1.0, step=s) for s in range(3) for n in range(2)]
    assert said(*later).startswith("The model's member 1 of 0-1 is computed differently in step 2 of 0-2 (")
    gradient = [tap(str(n), 900.0 if n == 1 else 1.0, kind="grad") for n in range(3)]
    assert said(*gradient).startswith(
        "The gradient of the model's members is computed differently in member 1 of 0-2 ("
    )


def test_a_module_whose_inputs_were_not_compared_is_named_with_its_input() -> None:
    def text(*taps: dict[str, Any], of: str) -> str:
        frame = pd.DataFrame(list(taps), columns=list(COLUMNS))
        return text_of(Findings(frame, 5.0, 1, origins=ErrorOrigins(not_compared={of: ()})))

    taps = [tap(f"h.{layer}.mlp", 900.0 if layer == 1 else 1.0) for layer in range(3)]
    found = text(*taps, of="h.*.mlp")
    assert found.startswith("h.*.mlp or its input is computed differently in layer 1 of 0-2 (")
    assert "The inputs of h.*.mlp were not compared: h.*.mlp itself may be right, and its input wrong." in found
    assert text(*taps, of="other").startswith("h.*.mlp is computed differently")
    members = [tap(str(n), 900.0 if n in (1, 2) else 1.0) for n in range(4)]
    found = text(*members, of="*")
    assert found.startswith("The model's members 1-2 of 0-3 or their inputs are computed differently (")
    assert "The inputs of a member of the model were not compared" in found


def test_what_is_wrong_before_a_member_is_not_in_it() -> None:
    def text(group: str, *taps: dict[str, Any]) -> str:
        name = group.replace("*", "1")
        origin = ErrorOrigin(
            group, name, 0, 0, 0, False, {"target": "net", "baseline": "model"}, (name,),
            given_to=name, arguments=("first",), before=("embed",),
        )  # fmt: skip
        frame = pd.DataFrame(list(taps), columns=list(COLUMNS))
        return text_of(Findings(frame, 5.0, 1, origins=ErrorOrigins((origin,)))).splitlines()[0]

    def taps(name: str) -> list[dict[str, Any]]:
        return [tap(name.format(n), 900.0 if n == 1 else 1.0) for n in range(3)]

    assert text("head.*", *taps("head.{}")).startswith(
        "net is computed differently, between embed and head.* (head.* itself is right; added "
    )
    assert text("layers.*.o", *taps("layers.{}.o")).startswith(
        "net is computed differently in layer 1 of 0-2, between embed and layers.*.o ("
    )


def test_members_of_a_list_are_not_layers() -> None:
    taps = [tap(f"net.{n}", 900.0 if n in (1, 4) else 1.0) for n in range(6)]
    assert said(*taps).startswith("net.* is computed differently in members 1, 4 of 0-5 (")
    weights = [tap(f"{n}.weight", 900.0 if n == 1 else 1.0, kind="param") for n in range(3)]
    assert said(*weights).startswith("The update of the weight *.weight is computed differently in member 1 of 0-2 (")
    for name in ("layers.{}", "model.h.{}", "blocks.{}.act", "layers.{}.weight"):
        assert " in layer 1 of 0-2 (" in said(*(tap(name.format(n), 900.0 if n == 1 else 1.0) for n in range(3)))


def test_the_wrong_calls_are_listed() -> None:
    calls = [(rid, t) for rid in range(4) for t in range(40)]
    wrong = [(1, 11), (2, 14), (3, 20)]
    taps = [{**tap("k", 900.0 if each in wrong else 1.0), "tags": {"rid": each[0], "t": each[1]}} for each in calls]
    assert said(*taps).startswith("k is computed differently in 3 of 160 calls: rid=1 t=11, rid=2 t=14, rid=3 t=20 (")
    occurrences = [{**tap("norm", 900.0 if n == 1 else 1.0), "occurrence": n} for n in range(3)]
    assert "computed differently in occurrence 1 of 0-2 (" in said(*occurrences)


def test_two_clearly_separate_sizes_may_have_two_causes() -> None:
    def text(*added: float) -> str:
        return said(*({**tap(f"l.{n}.act", 900.0), "added": each} for n, each in enumerate(added)))

    words = "two sizes, up to 0.06 in 0-4 and 0.4 in 5-7, may have two causes"
    assert words in text(0.06, 0.059, 0.05, 0.06, 0.06, 0.4, 0.39, 0.4)
    assert "sizes" not in text(0.06, 0.1, 0.2, 0.3, 0.4, 0.4)
    # Far apart, and one of them is no single size.
    assert "sizes" not in text(0.01, 0.02, 0.4, 0.4)
    assert "sizes" not in text(0.01, 0.01, 0.4, 0.8)
    assert "sizes" not in text(0.06, 0.06, 0.06, 0.4)
    # Less than three times as large.
    assert "sizes" not in text(0.1, 0.1, 0.25, 0.25)
    assert "sizes" not in text(0.1, 0.1, 0.25, 0.35)


def test_without_a_finite_number_on_both_sides_nothing_is_clean() -> None:
    lost = [{**tap(name, math.nan), "label": "unmeasured"} for name in ("a", "b")]
    assert said(*lost) == "Nothing was compared: no tap has a number that is finite on both sides."
    # What was not measured is not counted among what was.
    assert said(*lost, tap("c", 2.0)) == (
        "No tap adds more than rounding (1 group of taps, at most 2 x the floor, threshold 5)."
    )


def test_equal_hints_share_a_line() -> None:
    hints = {"a": "at a, the target's are 2 times the baseline's (explains 100 % of the difference)"}
    hints["b"] = "at b, the target's are 2 times the baseline's (explains 99.99 % of the difference)"
    hints["c"] = "at c, the target's are 3 times the baseline's (explains 100 % of the difference)"
    lines = [line for line in said(*(tap(name, 9.0) for name in "abc"), hints=hints).splitlines() if "Hint" in line]
    assert lines == [f"Hint (a, b): {hints['a']}.", f"Hint (c): {hints['c']}."]


def test_a_cause_that_neighbouring_values_may_share_is_mentioned() -> None:
    words = "If l.*.q and l.*.k read a tensor that no tap shows, such as a residual stream or positions, one mistake"
    assert words in said(tap("l.0.q", 9.0), tap("l.0.k", 9.0), tap("l.1.q", 1.0), tap("l.1.v", 9.0))
    # In other layers, in other steps, or where one alone is a value.
    assert "read a tensor" not in said(tap("l.0.q", 9.0), tap("l.1.k", 9.0))
    assert "read a tensor" not in said(tap("q", 9.0), tap("k", 9.0, step=1))
    assert "read a tensor" not in said(tap("q", 9.0), tap("q", 9.0, kind="grad"))


def line(group: str, side: Side, number: int = 7, *, confirmed: bool = False, **parts: Any) -> DifferingLine:
    frame = SourceFrame(f"{side}.py", number, "forward", "t = silu(t)")
    flags: dict[str, Any] = dict.fromkeys(("is_suspect", "lacks_sum", "is_only_here"), False)
    place: dict[str, Any] = {"tap": group, "step": 0, "occurrence": 0, "rank": 0}
    known: dict[str, Any] = {"operation": f"silu({group})", "stack": (frame,), **flags, **place}
    known |= dict.fromkeys(("arguments", "shapes", "state", "written"), ())
    return DifferingLine(group, side, frame.file, number, frame.source, confirmed=confirmed, **{**known, **parts})


@pytest.mark.parametrize(
    ("lines", "begins"),
    [
        ([line("a", "target", operation="max(bf16[1, 4], dim=-1)", arguments=("dim=-1",))], True),
        ([line("a", "target", operation="argmax(f32[4])"), line("a", "baseline")], True),
        ([line("a", "target"), line("a", "baseline", operation="topk(f32[4], 1)")], True),
        # The largest of all values, and the larger of two, are no choices.
        ([line("a", "target", operation="max(bf16[4])")], False),
        ([line("a", "target")], False),
        ([line("a", "target", operation="silu(f32[4])"), line("a", "target", 9, operation="topk(f32[4], 1)")], False),
        # The other group has no line.
        ([line("b", "target", operation="argmax(f32[4])")], False),
        ([], False),
    ],
)
def test_rounding_may_change_what_begins_at_a_choice(lines: list[DifferingLine], begins: bool) -> None:
    found = Findings(pd.DataFrame({"group": ["a", "c"], "label": ["culprit", "inherited"]}), 5.0, 1, lines=lines)
    assert bool(found.choices) is begins
    assert not found.is_rounding_possible
    found = replace(found, in_float32=0.5)
    assert found.is_rounding_possible is begins
    assert not replace(found, only_without_grafts=not begins, data=["Weights differ."]).is_rounding_possible
    assert answer_of(found, True, True) == ("inconclusive" if begins else "differ")
    # A choice explains nothing that differs elsewhere too.
    also = pd.DataFrame({"group": ["a", "d"], "label": ["culprit", "culprit"]})
    assert not replace(found, frame=also).is_rounding_possible
    rounding = RoundingGroups(("d",))
    assert replace(found, frame=also, rounding=rounding).is_rounding_possible is begins
    # What only rounds differently explains nothing either.
    only_rounds = replace(found, frame=also[1:], rounding=rounding)
    assert not only_rounds.is_rounding_possible
    assert replace(only_rounds, only_without_grafts=True).is_rounding_possible


def test_the_choice_that_is_shown_is_a_first_line_of_a_named_group() -> None:
    after = line("a", "target", 9, operation="argsort(f32[4])")
    first = line("a", "baseline", operation="topk(f32[4], 1)")
    lines = [
        line("b", "target", operation="argmax(f32[4])"),
        line("a", "target", operation="silu(f32[4])"),
        *(after, first),
    ]
    found = Findings(pd.DataFrame({"group": ["a", "b"], "label": ["culprit", "inherited"]}), 5.0, 1, lines=lines)
    assert found.choices == [first]


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        (
            [line("a", "target", is_random=True), line("a", "baseline", is_random=True)],
            "Both sides draw random numbers",
        ),
        # A dropout of another probability draws from equal generators too.
        (
            [line("a", side, operation=f"bernoulli_(f32[4], 0.{len(side)})", is_random=True) for side in SIDES],
            "Both sides draw random numbers there, by different operations or with other arguments.",
        ),
        ([line("a", "target", is_random=True)], "Only the target draws random numbers there"),
        ([line("a", "baseline", is_random=True)], "Only the baseline draws random numbers there"),
        ([line("a", "target", is_random=True), line("a", "baseline")], None),
        ([line("a", "target"), line("a", "baseline")], None),
        # The tap agrees once this alone is changed, so it is not the numbers.
        ([line("a", side, is_random=True, confirmed=True) for side in SIDES], None),
    ],
)
def test_random_numbers_that_differ_are_said_to(lines: list[DifferingLine], sentence: str | None) -> None:
    drawn = [each for each in lines_in_words(lines, ["a"]) if "random" in each]
    assert [each[: len(sentence or "")] for each in drawn] == ([] if sentence is None else [sentence])


def test_a_line_without_a_counterpart_is_not_said_to_differ() -> None:
    def shown(*lines: DifferingLine) -> str:
        frame = pd.DataFrame([tap("up", 9.0)], columns=list(COLUMNS))
        return text_of(Findings(frame, 5.0, 1, lines=lines)).splitlines()[1]

    ours, theirs = line("up", "baseline"), line("up", "target")
    one_sided = "The values that only one side has begin here (not confirmed):"
    assert shown(theirs, replace(ours, operation="addmm(f32[2])")) == one_sided
    assert shown(theirs) == one_sided
    assert shown(theirs, replace(ours, operation="silu_(f32[2])")) == "The values first differ here (not confirmed):"
    # A padded and a packed batch have no value in common, and a rank has a part of the baseline's.
    padded, packed, whole, part = (((2, 3), size) for size in ((27, 64), (21, 32), (8, 32), (8, 16)))
    assert shown(replace(theirs, shapes=padded), replace(ours, shapes=packed)) == one_sided
    assert "first differ" in shown(replace(theirs, shapes=part), replace(ours, shapes=whole))
    # Of two lines of a side the first is its counterpart.
    meant = [
        replace(theirs, is_suspect=True, operation="silu(f32[2])"),
        replace(theirs, line=8, operation="mul(f32[2])"),
    ]
    assert shown(*meant, ours) == "The values first differ here (not confirmed):"
    confirmed = line("up", "target", confirmed=True)
    assert shown(confirmed).startswith("The values first differ here; with the baseline's value there, the tap agrees")
    # A line that the other side lacks, such as one that draws random numbers, is not thereby confirmed.
    assert shown(replace(theirs, is_only_here=True)) == shown(replace(ours, is_only_here=True)) == one_sided
    without, added = (replace(line("up", side, confirmed=True), is_only_here=True) for side in ("target", "baseline"))
    assert shown(without) == "The values first differ here; without this operation the tap agrees:"
    assert shown(added) == "The values first differ here; with this operation added the tap agrees:"


@pytest.mark.parametrize(("side", "other"), [("target", "baseline"), ("baseline", "target")])
def test_state_that_a_line_reads_is_named_with_the_side_without_it(side: Side, other: str) -> None:
    made = replace(line("up", side), state=("cache.keys", "cache.values"))
    (read,) = notes_on(made)
    assert read == f"reads cache.keys, cache.values, whose values the {other} does not read"
    (written,) = notes_on(replace(made, written=("a.py:3", "", "a.py:3", "b.py:4")))
    assert written == f"{read}; last written a.py:3; b.py:4"


@pytest.mark.parametrize(
    ("others", "said"),
    [
        (["clean"], None),
        (["inherited"], "Everything else is inherited."),
        (["inherited", "clean"], "Everything else is inherited."),
        (["unmeasured"], None),
        (["inherited", "unmeasured"], "Everything else that was measured is inherited."),
    ],
)
def test_what_was_not_measured_is_not_called_inherited(others: list[str], said: str | None) -> None:
    rows = [tap("a", 9.0), *(tap(f"b{place}", 1.0) for place in range(len(others)))]
    frame = pd.DataFrame(rows, columns=list(COLUMNS)).assign(label=["culprit", *others])
    found = [each for each in text_of(Findings(frame, 5.0, 1)).splitlines() if "is inherited" in each]
    assert found == ([] if said is None else [said])


def test_a_suspect_line_is_marked_in_the_text() -> None:
    frame = pd.DataFrame([tap("up", 9.0)], columns=list(COLUMNS))
    lines = [replace(line("up", "target"), is_suspect=True)]
    said = "(from here on values have another order, place or sign, which may be intended)"
    assert said in text_of(Findings(frame, 5.0, 1, lines=lines))


def test_a_telling_line_is_shown_after_one_that_may_be_meant_and_before_a_count() -> None:
    computed = "add(f32[2, 3], i64[3])"
    order = replace(line("up", "target", 1), is_suspect=True, operation=computed)
    count = replace(line("up", "target", 2), operation="arange(3)")
    telling, later = (replace(line("up", "target", number), operation=computed) for number in (3, 4))

    def shown(*lines: DifferingLine) -> list[int]:
        return [number for _, _, number, _ in first_places(lines, ["up"])]

    assert shown(order, count, telling, later) == [1, 3]
    assert shown(count, telling) == [3, 2]
    assert shown(order, count) == [1]
    assert shown(telling, order) == [3]
    # What was tried is all that is said.
    assert shown(order, count, replace(later, confirmed=True)) == [4]
    assert shown(replace(order, confirmed=True), telling) == [1]
    # It takes the place of the last that would be reported.
    assert most_telling([order, count, order, telling, later]) == [order, count, telling]
    assert most_telling([order, telling, count, later]) == [order, telling, count]
    confirmed = replace(order, confirmed=True)
    assert most_telling([confirmed, count, order, telling]) == [confirmed, count, order]
    assert most_telling([order, count]) == [order, count]
    for counts in ("arange(3)", "argsort(i64[8], stable=True)", "cat([int32[2], bool[2]])", "zeros_like(f32[2])"):
        assert not replace(telling, operation=counts).is_telling
    assert not replace(telling, puts_constants=True).is_telling
    for computes in ("index(f32[3, 2], [i64[3]])", "pow(complex64[2], 2)", "cat([float8_e5m2[2]])"):
        assert replace(count, operation=computes).is_telling


def test_groups_with_the_same_first_line_have_it_once_below_them() -> None:
    frame = pd.DataFrame([tap(name, 9.0) for name in ("down", "odd", "up")], columns=list(COLUMNS))
    sides: tuple[Side, Side] = ("target", "baseline")
    lines = [line(group, side, 9 if group == "odd" else 7) for group in ("down", "odd", "up") for side in sides]
    shown = text_of(Findings(frame, 5.0, 1, lines=lines)).splitlines()
    assert [text.partition(" ")[0] for text in shown[:3]] == ["down", "up", "In"]
    assert shown[2] == "In each of them, the values first differ here (not confirmed):"
    assert shown[3].startswith("  target    target.py:7")
    assert shown[4].startswith("  baseline  baseline.py:7")
    assert shown[5].startswith("odd ")
    assert shown[6] == "The values first differ here (not confirmed):"
    # A graft at one of them confirms that one alone, and its operation is shown.
    lines[-2] = line("up", "target", confirmed=True)
    shown = text_of(Findings(frame, 5.0, 1, lines=lines)).splitlines()
    assert shown[2].endswith("first differ here; with the baseline's value there, up agrees:")
    assert "[silu(up)]" in shown[3]


def test_several_groups_that_a_graft_makes_agree_are_named_with_their_kinds() -> None:
    lines = [line(group, "target", confirmed=group != "c") for group in ("a@grad", "b@param", "c")]
    said = lines_in_words(lines, ["a@grad", "b@param", "c"])[0]
    assert said.endswith("there, the gradient of a and the update of the weight b agree:")


@pytest.mark.parametrize(
    ("wrong", "count", "said"),
    [
        ([0], 1, ""),
        ([1], 2, " on rank 1 alone"),
        ([0, 1, 1], 2, " on all ranks"),
        ([3, 1, 2], 8, " on ranks 1-3 alone"),
    ],
)
def test_the_ranks_on_which_a_tap_differs_are_named_in_one_or_several(wrong: list[int], count: int, said: str) -> None:
    assert _ranks(pd.DataFrame({"rank": wrong}), count) == said


def test_only_floating_dtypes_of_few_bits_are_coarse_and_unknown_ones_are_none() -> None:
    dtypes = ("bfloat16", "float8_e5m2", "float32", "int8", "float4_of_a_later_torch", "nn")
    assert [dtype for dtype in dtypes if _is_coarse(dtype)] == ["bfloat16", "float8_e5m2"]


def test_lines_of_one_of_several_groups_are_not_said_to_be_those_of_each() -> None:
    lines = [line("a", side) for side in ("target", "baseline")]
    assert lines_in_words(lines, ["a", "b"], are_several=True)[0].startswith("The values first differ here")
    both = [*lines, *(replace(each, group="b") for each in lines)]
    assert lines_in_words(both, ["a", "b"], are_several=True)[0].startswith("In each of them, the values first differ")
    assert lines_in_words(both, ["a", "b"])[0].startswith("The values first differ here")
    assert lines_in_words(lines, ["b"]) == []


@pytest.mark.parametrize(
    ("side", "ranks", "note"),
    [
        ("target", (), "only the target does this"),
        ("baseline", (), "the target lacks this"),
        ("target", (1,), "only the target does this)  (only rank 1 runs this"),
        ("target", (0, 1), "only the target does this)  (only ranks 0-1 run this"),
    ],
)
def test_a_line_of_one_side_or_of_some_ranks_is_marked(side: Side, ranks: tuple[int, ...], note: str) -> None:
    made = replace(line("up", side), is_only_here=True, ranks=ranks)
    assert lines_in_words([made], ["up"])[1].endswith(f"  [silu(up)]  ({note})")


def test_a_group_is_explained_by_code_if_confirmed_operations_differ() -> None:
    ours, theirs = line("up", "baseline"), line("up", "target", confirmed=True)
    assert explained_by_code([theirs, ours]) == set()
    other = replace(ours, operation="gelu(up)")
    assert explained_by_code([theirs, other]) == explained_by_code([theirs]) == {"up"}
    assert explained_by_code([replace(theirs, confirmed=False), other]) == set()


def frame_of(*taps: dict[str, Any]) -> pd.DataFrame:
    return pd.DataFrame(list(taps), columns=list(COLUMNS))


def test_layers_are_those_of_the_tag_where_names_have_none() -> None:
    def text(*layers: Any) -> str:
        return said(*({**tap("q", 9.0 if n == 1 else 1.0), "tags": {"layer": each}} for n, each in enumerate(layers)))

    assert text(0, 1, 2).startswith("q is computed differently in layer 1 of 0-2 (")
    assert text(*np.arange(3)).startswith("q is computed differently in layer 1 of 0-2 (")
    assert text("a", "b", "c").startswith("q is computed differently (")
    # One call has no layer.
    assert text(None, 1, 2).startswith("q is computed differently in layer 1 of 1-2 (")


def test_closer_looks_are_stated_with_what_they_found_and_not_advised_again() -> None:
    low, high = ({**tap("h", 2.0), "dtype": dtype} for dtype in ("bfloat16", "float32"))
    assert text_of(Findings(frame_of(low), 5.0, 1, in_float32=0.5)) == (
        "Nothing above bfloat16 rounding, nor above float32's in float32 (1 group of taps, at most 2 x the floor, "
        "threshold 5; in float32 0.5 x)."
    )
    inner = Findings(frame_of(high), 5.0, 1, computed_in="bfloat16")
    assert text_of(inner).endswith("threshold 5); compute in float32 on both sides for a closer look.")
    assert text_of(replace(inner, in_float32=0.5, looked_in="float64")).endswith("threshold 5; in float64 0.5 x).")


@pytest.mark.parametrize(
    "doubt",
    [
        {"unexplained": ["Something."]},
        {"without_output": ["Something."]},
        {"failed": ["Something."]},
        {"unseen": ["something."]},
        {"data": ["Something."]},
        {"not_repeated": ["a"]},
        {"target_not_repeated": ["a"]},
    ],
    ids=lambda doubt: next(iter(doubt)),
)
def test_only_what_was_checked_is_called_clean_where_anything_is_in_doubt(doubt: dict[str, Any]) -> None:
    clean = Findings(frame_of(tap("h", 1.0)), 5.0, 1)
    assert text_of(clean).startswith("No tap adds more than rounding (")
    assert "Nothing that was checked adds more than rounding (" in text_of(replace(clean, **doubt))


def test_returned_values_alone_agree_only_without_a_doubt() -> None:
    alone = Findings(frame_of(), 5.0, 1, only_returned=True)
    assert text_of(alone) == "The returned values agree to rounding; nothing else was compared."
    assert text_of(replace(alone, unexplained=["They differ."])) == "They differ."
    assert text_of(replace(alone, without_output=["No output."])) == "No output."


def test_grafts_that_prove_nothing_leave_no_conclusion() -> None:
    assert text_of(Findings(frame_of(tap("h", 90.0)), 5.0, 1, inconclusive=["Pairs no longer hold."])) == (
        "Pairs no longer hold."
    )


def test_inputs_of_modules_are_said_not_to_be_examined_where_a_value_is_named() -> None:
    value, gradient = tap("h", 90.0), tap("h", 90.0, kind="grad")
    assert NOT_EXAMINED in said(value, gradient)
    assert NOT_EXAMINED not in said(gradient)


def test_remarks_on_jobs_are_around_the_conclusion() -> None:
    remarks = JobRemarks(1e-5, "assumed ", ("First.",), ("Basis.",), ("unseen.",), (), ("Last.",))
    lines = text_of(Findings(frame_of(tap("h", 1.0)), 5.0, 1, job_remarks=remarks)).splitlines()
    assert lines == [
        "First.",
        "Nothing that was checked adds more than 5 x the assumed floor of 1e-05 (1 group of taps, at most 1 x the "
        "assumed floor, threshold 5).",
        "Basis.",
        "Last.",
    ]


def test_a_group_with_the_name_of_a_weight_that_differs_is_shown_with_it() -> None:
    found = Findings(frame_of(tap("up.weight", 90.0)), 5.0, 1, weights={"up.weight": "up.weight (rel_l2 0.01)"})
    assert ", with weights that already differ: up.weight (rel_l2 0.01)." in text_of(found)
    assert "already differ" not in text_of(replace(found, weights_lent=True))


def test_groups_without_lines_keep_their_places_between_those_with_lines() -> None:
    lines = [line("b", side) for side in ("target", "baseline")]
    shown = text_of(Findings(frame_of(*(tap(name, 9.0) for name in "abc")), 5.0, 1, lines=lines)).splitlines()
    assert [text.split()[0] for text in shown[:6]] == ["a", "b", "The", "target", "baseline", "c"]


@pytest.mark.parametrize("side", ["baseline", "target"])
def test_a_side_that_does_not_repeat_itself_is_named_first(side: str) -> None:
    changed = {"target_not_repeated" if side == "target" else "not_repeated": ["a", "b"]}
    text = text_of(replace(Findings(frame_of(tap("h", 90.0)), 5.0, 1), **changed))  # type: ignore[arg-type]
    assert text.startswith(f"The {side} does not repeat itself: run twice, it differs at a, b. Do not rely on anything")


def test_without_a_compared_tap_the_advice_follows_from_whether_both_sides_have_taps() -> None:
    nothing = Findings(frame_of(), 5.0, 1)
    begin = "Nothing was compared: no tap was measured on both sides."
    assert text_of(nothing) == f"{begin} {ADD_TAPS}."
    assert text_of(replace(nothing, pairing_advice="Match them")) == f"{begin} Match them."
    inputs = Findings(frame_of(tap("input.x", 90.0, kind="input")), 5.0, 1, inputs=["input.x@input"])
    assert text_of(inputs).startswith(f"Apart from inputs, no tap was measured on both sides. {ADD_TAPS}.")
    assert "both sides. Match them." in text_of(replace(inputs, pairing_advice="Match them"))
    lost = replace(
        inputs, frame=frame_of(tap("input.x", 90.0, kind="input"), {**tap("h", math.nan), "label": "unmeasured"})
    )
    assert text_of(lost).startswith(
        "Apart from inputs, nothing was compared: no tap has a number that is finite on both"
    )


def test_culprits_have_their_sentences_first_and_many_weights_share_one() -> None:
    labels = {"a": "suspect", "b": "culprit", "c": "suspect", "w.*@param": "culprit"}
    weights = {f"w{letter}@param": "suspect" for letter in "abcd"}
    frame = pd.DataFrame({"group": [*labels, *weights], "label": [*labels.values(), *weights.values()]})
    found = _sentence_groups(frame, [*labels, *weights])
    assert found == [["b"], ["w.*@param"], ["a"], ["c"], [*weights]]


@pytest.mark.parametrize(
    ("rounding", "begins"),
    [
        (RoundingGroups(), "Nothing above bfloat16 rounding"),
        (RoundingGroups(groups=("b",)), "Nothing else is above bfloat16 rounding"),
        (RoundingGroups(stands_out="x adds far more than the others."), "Nothing else is above bfloat16 rounding"),
    ],
)
def test_nothing_else_is_above_rounding_where_anything_stands_out(rounding: RoundingGroups, begins: str) -> None:
    frame = pd.DataFrame([{**tap("a", 1.0), "dtype": "bfloat16"}], columns=list(COLUMNS))
    assert begins in text_of(Findings(frame, 5.0, 1, rounding=rounding))
