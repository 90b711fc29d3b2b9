"""Where an error arises is concluded from what modules computed from equal inputs, and from which were compared."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pandas as pd
import pytest

from graftlab.base.tap_groups import group_of
from graftlab.base.world import Side
from graftlab.taps.module_inputs import KIND, Argument, ModuleCall
from graftlab.verdict.origins import (
    ErrorOrigin,
    ErrorOrigins,
    _is_given_the_same,
    _merged,
    are_alike,
    find_origins,
    names_for_arguments,
    origin_in_words,
    sentences_on,
    shared_origin,
)

THRESHOLD = 2.0
FLOOR = 0.01
MODEL = "model"
CALLS = {
    "attn": ModuleCall("attn", (MODEL,), "forward", True, 1),
    "attn.o": ModuleCall("attn.o", ("attn", MODEL), "forward", True, 2),
}


class Tap(NamedTuple):
    """A call of a tap in the run with the inputs of modules: how far over the floor, and None if not compared."""

    name: str
    ratio: float | None
    argument: str | None = None
    occurrence: int = 0
    side: str = "target"
    baseline: str | None = None


def origins(
    *taps: Tap,
    of: Sequence[str] = ("attn.o",),
    calls: dict[str, ModuleCall] = CALLS,
    added: Mapping[str, float] = {},
    on_target: Mapping[str, ModuleCall] | None = None,
) -> ErrorOrigins:
    """The origins of taps that all differ in the verdict's first run."""
    rows, again, frame = [], [], []
    for order, tap in enumerate(taps):
        tags: dict[str, Any] = {"name": tap.name}
        if tap.argument is not None:
            tags |= {"kind": KIND, "argument": tap.argument}
        names = {"name": tap.name, "baseline_name": tap.baseline or tap.name, "target_name": tap.name}
        place = {"rank": 0, "step": 0, "occurrence": tap.occurrence, "order": order, "tags": tags, "side": tap.side}
        rows.append({**names, **place, "status": "unmatched" if tap.ratio is None else "compared"})
        if tap.ratio is not None:
            measured = {
                "added": added.get(tap.name, tap.ratio * FLOOR),
                "floor": FLOOR,
                "ratio": tap.ratio,
                "group": group_of(tap.name),
            }
            again.append({"name": tap.name, "target_name": tap.name, **place, **measured})
            if tap.argument is None:
                frame.append({**again[-1], "ratio": 10.0 - tap.occurrence})
    tables = [pd.DataFrame(each) for each in (frame, rows, again)]
    both: Any = {"baseline": [calls], "target": [calls if on_target is None else on_target]}
    return find_origins(tables[0], of, tables[1], tables[2], both, THRESHOLD)


def given(name: str, ratio: float | None, argument: str = "first", **more: Any) -> Tap:
    return Tap(f"{name}.in", ratio, argument, **more)


def test_a_module_that_agrees_from_equal_inputs_is_right() -> None:
    taps = Tap("embed", 0.5), given("attn", 0.5), Tap("q", 0.5), given("attn.o", 9.0), Tap("attn.o", 0.5)
    found = origins(*taps)
    (origin,) = found.found
    assert (origin.is_itself, origin.given_to, origin.arguments, origin.before) == (False, "attn.o", ("first",), ("q",))
    assert origin.modules == {"baseline": "attn", "target": "attn"}
    assert (origin.function, origin.is_method, origin.input_tap, origin.tensors) == (
        "forward",
        True,
        "attn.o.in",
        frozenset({2}),
    )
    assert found.are_right("attn.o")
    assert found.covers("attn.o")
    assert not found.covers("attn")
    assert not found.not_compared


def test_the_taps_of_a_group_with_the_same_origin_are_one_finding() -> None:
    names = [f"layers.{layer}.o" for layer in range(2)]
    calls = {name: ModuleCall(name, (MODEL,), "forward", True, 1) for name in names}
    taps = [tap for name in names for tap in (given(name, 9.0), Tap(name, 0.5))]
    (origin,) = origins(*taps, of=["layers.*.o"], calls=calls).found
    assert (origin.tap, origin.taps) == (names[0], tuple(names))


def test_a_comprehension_that_calls_a_module_is_not_named_as_a_function() -> None:
    calls = {**CALLS, "attn.o": replace(CALLS["attn.o"], function="<listcomp>")}
    (origin,) = origins(given("attn", 0.5), given("attn.o", 9.0), Tap("attn.o", 0.5), calls=calls).found
    assert origin.function is None


def test_a_function_is_a_method_only_of_the_module_whose_input_is_right() -> None:
    # The call comes from a method of a module between the two that has no tensor as its input.
    calls = {**CALLS, "attn.o": ModuleCall("attn.o", ("attn.inner", "attn", MODEL), "project", True, 2)}
    (origin,) = origins(given("attn", 0.5), given("attn.o", 9.0), Tap("attn.o", 0.5), calls=calls).found
    assert (origin.modules["target"], origin.function, origin.is_method) == ("attn", "project", False)
    calls["attn.o"] = replace(calls["attn.o"], function="forward")
    (origin,) = origins(given("attn", 0.5), given("attn.o", 9.0), Tap("attn.o", 0.5), calls=calls).found
    assert (origin.modules["target"], origin.function) == ("attn", None)
    calls["attn.o"] = replace(calls["attn.o"], function="project")
    calls["attn.o"] = replace(calls["attn.o"], within=("attn", MODEL))
    (origin,) = origins(given("attn", 0.5), given("attn.o", 9.0), Tap("attn.o", 0.5), calls=calls).found
    assert (origin.function, origin.is_method) == ("project", True)


def test_a_module_that_differs_from_equal_inputs_is_wrong_itself() -> None:
    found = origins(given("attn", 0.5), given("attn.o", 9.0), Tap("attn.o", 5.0))
    (origin,) = found.found
    assert (origin.is_itself, origin.tap, origin.given_to) == (True, "attn.o", "")
    assert origin.modules == {"baseline": "attn.o", "target": "attn.o"}
    assert not found.are_right("attn.o")
    # Without a call of that name on the baseline, its module has the name of the tap.
    (origin,) = origins(given("attn.o", 0.5), Tap("attn.o", 5.0), calls={}, on_target=CALLS).found
    assert origin.modules["baseline"].startswith("attn.o")


def test_at_the_threshold_a_module_agrees() -> None:
    assert origins(given("attn.o", 9.0), Tap("attn.o", THRESHOLD)).are_right("attn.o")


@pytest.mark.parametrize(
    ("taps", "left"),
    [
        # Only the module around had its inputs compared: the error may be before this one.
        ((given("attn", 0.5), Tap("attn.o", 5.0)), ()),
        ((given("attn.o", 0.5), given("attn.o", None, "mask"), Tap("attn.o", 5.0)), ("mask",)),
        ((given("attn.o", 0.5), given("attn.o", None, "bias", side="baseline"), Tap("attn.o", 5.0)), ("bias",)),
        ((Tap("attn.o", 5.0),), ()),
    ],
)
def test_a_module_whose_inputs_were_not_all_compared_is_not_called_wrong(
    taps: tuple[Tap, ...], left: tuple[str, ...]
) -> None:
    found = origins(*taps)
    assert found.found == ()
    assert found.not_compared == {"attn.o": left}
    assert not found.covers("attn.o")


def test_an_input_of_another_module_paired_with_the_same_tap_is_no_doubt() -> None:
    # A layer's first result may be what its last module returns, and both are paired with the baseline's module.
    alike = {"baseline": "attn.in"}
    layer = given("layer", None, "residual", **alike)
    taps = (given("attn", 0.5, **alike), Tap("q", 0.5), given("attn.o", 9.0), Tap("attn.o", 0.5))
    assert origins(*taps, layer).found[0].not_compared == ()
    own = given("attn", None, "mask", side="baseline", **alike)
    assert origins(*taps, layer, own).found[0].not_compared == ("mask",)


@pytest.mark.parametrize(
    ("taps", "calls"),
    [
        # No longer measured, a tap of no module, and a module that agrees, without inputs or with equal ones.
        ((given("attn.o", 9.0), Tap("attn.o", float("nan"))), CALLS),
        ((given("attn.o", 9.0), Tap("attn.o", 0.5)), {}),
        ((Tap("attn.o", 0.5),), CALLS),
        ((given("attn.o", 0.0), Tap("attn.o", 0.5)), CALLS),
    ],
)
def test_without_evidence_no_origin_is_reported(taps: tuple[Tap, ...], calls: dict[str, ModuleCall]) -> None:
    found = origins(*taps, calls=calls)
    assert (found.found, found.not_compared) == ((), {})
    assert not found.are_right("attn.o")


def test_the_innermost_module_with_a_wrong_input_is_given_it() -> None:
    (origin,) = origins(given("attn", 7.0), given("attn.o", 0.5), Tap("attn.o", 0.5)).found
    assert (origin.given_to, origin.modules) == ("attn", {})
    (origin,) = origins(given("attn", 7.0), given("attn.o", 3.0), Tap("attn.o", 0.5)).found
    assert origin.given_to == "attn.o"


def test_of_small_differences_the_largest_counts() -> None:
    """An ill-conditioned module makes much of a small difference."""
    inputs = (given("attn", 0.2), given("attn.o", 1.5), given("attn.o", 1.2, "mask"), given("attn.o", 0.3, "bias"))
    (origin,) = origins(*inputs, Tap("attn.o", 0.5)).found
    assert (origin.given_to, origin.arguments) == ("attn.o", ("first", "mask"))


def test_an_input_that_is_not_finite_on_one_side_is_wrong_whatever_else_agrees() -> None:
    # Statistics leave out what is not finite, so nothing is added by the numbers that remain.
    (origin,) = origins(Tap("q", 0.5), given("attn.o", math.inf), Tap("attn.o", 0.0), added={"attn.o.in": 0.0}).found
    assert (origin.is_itself, origin.given_to, origin.arguments) == (False, "attn.o", ("first",))


def test_a_tap_with_both_kinds_of_calls_counts_as_wrong_by_its_worst_such_call() -> None:
    calls = [
        (given("attn.o", 9.0, occurrence=n), Tap("attn.o", ratio, occurrence=n))
        for n, ratio in enumerate((0.5, 5.0, 6.0))
    ]
    (origin,) = origins(*(tap for pair in calls for tap in pair)).found
    # The second differs most in the first run.
    assert (origin.is_itself, origin.occurrence) == (True, 1)


def test_each_call_is_judged_by_the_inputs_before_it() -> None:
    later = (given("attn.o", 9.0, occurrence=1), Tap("attn.o", 0.5, occurrence=1))
    (origin,) = origins(given("attn.o", 0.0), *later).found
    assert (origin.occurrence, origin.input_occurrence) == (1, 1)
    # What a module is given later has no part in it.
    assert origins(given("attn.o", 0.0), Tap("attn.o", 0.5), given("attn.o", 9.0, occurrence=1)).found == ()


def test_wrong_inputs_are_one_only_if_both_the_code_and_the_arguments_are_alike() -> None:
    at: dict[Side, str] = {"target": "m"}
    one = ErrorOrigin("a", "a", 0, 0, 0, False, at, ("a",), given_to="m", arguments=("second",))
    assert _is_given_the_same(one, replace(one, group="b", tap="b", taps=("b",)))
    assert not _is_given_the_same(one, replace(one, arguments=("third",)))
    assert not _is_given_the_same(one, replace(one, modules={"target": "other"}, given_to="other"))
    first = replace(one, arguments=("first",), tensors=frozenset({1}))
    assert _is_given_the_same(first, replace(first, group="b", tensors=frozenset({1, 2})))
    assert not _is_given_the_same(first, replace(first, group="b", tensors=frozenset({2})))


def test_a_wrong_input_is_placed_after_the_last_input_of_the_module_around_it() -> None:
    taps = given("attn", 0.5), Tap("k", 0.5), given("attn", 0.5, "mask"), Tap("q", 0.5)
    (origin,) = origins(*taps, given("attn.o", 9.0), Tap("attn.o", 0.5)).found
    assert origin.before == ("q",)


def test_doubts_about_a_group_are_those_of_its_first_tap_with_any() -> None:
    names = [f"layers.{layer}.o" for layer in range(2)]
    calls = {name: ModuleCall(name, (MODEL,), "forward", True, 1) for name in names}
    first, second = ([given(name, 0.5), given(name, None, "mask"), Tap(name, 5.0)] for name in names)
    group = "layers.*.o"
    assert origins(*first, *second, of=[group], calls=calls).not_compared == {group: ("mask",)}
    assert origins(*first, Tap(names[1], 5.0), of=[group], calls=calls).not_compared == {group: ("mask",)}


def test_arguments_that_neither_side_shares_are_named_by_the_target() -> None:
    lacking = given("attn", None, "mask"), given("attn", None, "bias", side="baseline")
    taps = given("attn", 0.5), *lacking, given("attn.o", 9.0), Tap("attn.o", 0.5)
    (origin,) = origins(*taps).found
    assert (origin.not_compared, origin.not_compared_of) == (("mask",), "target")
    (origin,) = origins(*taps[:1], *taps[2:]).found
    assert (origin.not_compared, origin.not_compared_of) == (("bias",), "baseline")


def test_a_wrong_input_is_placed_after_the_last_five_taps_before_it() -> None:
    before = [Tap(name, 0.5) for name in "abcdefg"]
    (origin,) = origins(given("attn", 0.5), *before, given("attn.o", 9.0), Tap("attn.o", 0.5)).found
    assert origin.before == tuple("cdefg")


def test_a_wrong_input_is_placed_after_taps_that_no_other_module_computes() -> None:
    names = ("norm", "norm.scaled", "pair", "pair[0]", "pair[1]", "pairs", "norms.x")
    before = [Tap(name, 0.5) for name in names]
    (origin,) = origins(given("attn", 0.5), *before, given("attn.o", 9.0), Tap("attn.o", 0.5)).found
    assert origin.before == ("norm", "pair", "pairs", "norms.x")


# ---- in words --------------------------------------------------------------------------------------------------------

GIVEN = ErrorOrigin(
    "attn.o", "layers.0.attn.o", 0, 0, 0, False, {"target": "attn", "baseline": "mixer"}, ("layers.0.attn.o",),
    given_to="attn.o", arguments=("first",), before=("attn.q", "attn.k"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "subject", "between"),
    [
        ({}, "attn", ", between q, k and o"),
        ({"before": ()}, "attn", ", between its inputs and o"),
        # The code lies between a tap and its own next call.
        ({"before": ("attn.o",)}, "attn", ", between one o and the next"),
        ({"before": ("attn.o", "attn.q")}, "attn", ", between q and o"),
        ({"function": "mix"}, "mix, called in attn,", ", between q, k and o"),
        ({"function": "mix", "is_method": True}, "attn.mix", ", between q, k and o"),
        ({"function": "forward", "is_method": True}, "attn", ", between q, k and o"),
        ({"modules": {}}, "The input of attn.o", ""),
        ({"arguments": ("mask",), "function": "mix"}, "Input mask of o", ", in mix, called in attn"),
        ({"arguments": ("mask", "bias"), "function": None}, "Each of the inputs mask and bias of o", ", in attn"),
        (
            {"arguments": ("mask",), "function": "mix", "is_method": True},
            "Input mask of o",
            ", in attn.mix",
        ),
    ],
)
def test_an_error_is_placed_between_what_is_right_and_the_module_that_is_given_it(
    changes: dict[str, Any], subject: str, between: str
) -> None:
    words = origin_in_words([replace(GIVEN, **changes)])
    assert (words.subject, words.between) == (subject, between)
    assert words.right == ("attn.o itself is right" if changes == {"modules": {}} else "o itself is right")
    assert words.unsure is None


def test_groups_with_one_origin_share_its_sentence() -> None:
    first = replace(GIVEN, tensors=frozenset({1}))
    second = replace(first, group="attn.v", taps=("layers.0.attn.v",), given_to="attn.v", before=("attn.q",))
    both = ErrorOrigins((first, second))
    assert list(shared_origin(both, ["attn.o", "attn.v"])) == [first, second]
    words = origin_in_words([first, second])
    # The code begins after the last tap before either.
    assert (words.between, words.right) == (", between q and o or v", "o and v themselves are right")
    assert not shared_origin(both, ["attn.o", "attn.v", "attn.w"])
    assert not shared_origin(ErrorOrigins((first, first)), ["attn.o", "attn.v"])
    assert not shared_origin(ErrorOrigins((replace(first, is_itself=True),)), ["attn.o"])
    assert not shared_origin(ErrorOrigins((first, replace(second, tensors=frozenset({2})))), ["attn.o", "attn.v"])


def test_a_module_of_compiled_code_may_be_right() -> None:
    # Its output is a tap, and its inputs are not.
    found = origins(Tap("q", 0.5), Tap("attn.o", 9.0), on_target={})
    assert (found.found, dict(found.not_compared)) == ((), {"attn.o": ()})
    # A tap that is no module's output has no inputs, and one that agrees is not in doubt.
    assert origins(Tap("attn.o", 9.0), calls={}) == ErrorOrigins()
    assert origins(Tap("attn.o", 0.5), on_target={}) == ErrorOrigins()


def test_a_module_of_compiled_code_is_right_if_only_its_input_differs() -> None:
    # Compiled code does not show which code calls a module; the baseline's calls do.
    taps = (given("attn", 0.5), Tap("q", 0.5), given("attn.o", 9.0), Tap("attn.o", 0.5))
    found = origins(*taps, on_target={})
    assert found == origins(*taps)
    assert found.are_right("attn.o")


def test_inputs_that_were_not_compared_are_named() -> None:
    unsure = replace(GIVEN, not_compared=("mask",))
    found = ErrorOrigins((unsure, replace(GIVEN, group="up", is_itself=True)), {"down": ("x", "y"), "norm": ()})
    at = "attn is computed differently, between q, k and o (o itself is right at layers.0.attn.o)."
    assert sentences_on(found) == [
        at,
        "Or mask may differ, an input of attn that was not compared.",
        "Each of the inputs x and y of down was not compared: down itself may be right, and its input wrong.",
        "The inputs of norm were not compared: norm itself may be right, and its input wrong.",
    ]
    assert sentences_on(found, ["attn.o"]) == sentences_on(found)[2:]
    both = replace(unsure, not_compared=("mask", "bias"), not_compared_of="baseline")
    assert sentences_on(ErrorOrigins((both,)))[1] == (
        "Or mask and bias may differ, inputs of the baseline's mixer that were not compared."
    )


def test_an_argument_that_only_some_layers_have_is_a_doubt_about_all() -> None:
    plain, masked = GIVEN, replace(GIVEN, tap="layers.1.attn.o", tensors=frozenset({2}), not_compared=("mask",))
    (found,) = _merged([plain, masked])
    assert found.taps == (plain.tap, "layers.1.attn.o")
    assert (found.tap, found.not_compared, found.tensors) == (plain.tap, ("mask",), plain.tensors | {2})
    # Of several arguments, each is stated.
    biased = replace(masked, not_compared=("bias",), not_compared_of="baseline")
    assert [each.not_compared for each in _merged([plain, masked, biased])] == [(), ("mask",), ("bias",)]
    assert _merged([biased])[0].not_compared_of == "baseline"


# ---- arguments with other names -------------------------------------------------------------------------------------


def renamed(ours: str, theirs: str) -> dict[str, str]:
    """The names for the baseline's arguments; each is written as ``name:dtype:numel``."""

    def call(arguments: str) -> dict[str, ModuleCall]:
        split = [each.split(":") for each in arguments.split()]
        return {"m": ModuleCall("m", arguments=tuple(Argument(name, dtype, int(n)) for name, dtype, n in split))}

    found = names_for_arguments({"baseline": [{}, call(ours)], "target": [call(theirs)]}, [("m.in", "m.in")])
    return found.get("m", {})


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ("idx:int64:8 w:float32:8", "weights:bfloat16:8 chosen:int64:8", {"idx": "chosen", "w": "weights"}),
        # Which of them is which shows neither in their names nor in their sizes.
        ("cos:float32:8 sin:float32:8", "c:float32:8 s:float32:8", {}),
        ("mask:float32:8 cos:float32:8", "mask:float32:8 c:float32:8", {"cos": "c"}),
        ("w:float32:8", "scale:float32:1", {}),
        ("w:float32:8", "mask:bool:8", {}),
        ("idx:int64:8", "slots:int32:8", {}),
        ("w:float32:8", "a:float32:8 b:float32:8", {}),
        ("w:float32:8", "w:float32:4", {}),
    ],
)
def test_arguments_without_a_namesake_are_paired_with_those_of_their_kind(
    ours: str, theirs: str, expected: dict[str, str]
) -> None:
    assert renamed(ours, theirs) == expected


@pytest.mark.parametrize(
    ("status", "rel_l2", "cosine", "expected"),
    [
        ("grafted", 1.0, 0.96, True),
        ("grafted", 0.0, math.nan, True),
        ("grafted", 0.8, 0.94, False),
        ("failed", math.nan, math.nan, False),
    ],
)
def test_unlike_arguments_are_not_taken_for_each_other(
    status: str, rel_l2: float, cosine: float, expected: bool
) -> None:
    own = {"tags": {"kind": KIND, "argument": "w"}, "side": "target", "baseline_name": "m.in"}
    row = {**own, "status": status, "rel_l2": rel_l2, "cosine": cosine}
    others = [
        {**row, "tags": {"kind": KIND, "argument": "mask"}, "cosine": 0.0, "rel_l2": 1.0},
        {**row, "tags": {"argument": "w"}, "cosine": 0.0, "rel_l2": 1.0},
        {**row, "baseline_name": "n.in", "cosine": 0.0, "rel_l2": 1.0},
        {**row, "side": "baseline", "status": "unmatched"},
    ]
    assert are_alike(pd.DataFrame([*others, row]), {"m": {"weights": "w"}}) is expected
