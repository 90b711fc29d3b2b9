"""What a comparison of calls reads of their descriptions before anything runs, and which numbers it hands over."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pandas as pd
import pytest
import torch
from torch import Tensor

from graftlab.comparison import call_remarks, closer_look, functions, held_calls
from graftlab.comparison.answers import Comparison, ComparisonStopped, ReasonedAnswer, answer_of, known_at
from graftlab.comparison.call_remarks import (
    difference_without_taps,
    differing_numbers,
    in_padding,
    in_training_alone,
    not_checked,
    not_trusted,
    rounds_earlier,
)
from graftlab.comparison.equal_rows import have_equal_rows, have_no_near_rows
from graftlab.comparison.held_calls import why_no_backward
from graftlab.comparison.held_units import HeldUnits, why_not_held
from graftlab.comparison.left_to_updates import perhaps_of_other_work, unless_of_a_part, why_left_to_update
from graftlab.comparison.other_work import other_batch
from graftlab.comparison.repeats import _part_near, _unequal_numbers, described, dtypes_to_round
from graftlab.diffs.results import ResultDifference, written_path
from graftlab.errors import SessionError, WaitInterrupted
from graftlab.plan.pairs import PairRule
from graftlab.ranks.call_description import CallDescription
from graftlab.ranks.held_call import WEIGHT
from graftlab.verdict.findings import Findings

X = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
PAIR = ("float32", "float32")


def call(plain: Tensor | dict[str, Tensor], tapped: Tensor | None = None, **more: Any) -> CallDescription:
    values = {"": plain} if isinstance(plain, Tensor) else plain
    given: dict[str, Any] = {"needs_backward": False, "taps": ("a", "b"), **more}
    return CallDescription("Net", 1, plain=values, tapped=values if tapped is None else {"": tapped}, **given)


def test_the_part_of_a_whole_that_a_rank_has_is_the_nearest_one_if_it_is_near() -> None:
    second = X[:, 4:]
    found = _part_near(X, second + 1e-3)
    assert found is not None
    assert torch.equal(found, second)
    assert found.is_contiguous()
    assert torch.equal(_part_near(X, X[1:]), X[1:])  # type: ignore[arg-type]
    for other in (-second, X[:1, :4], X[:, :3], X[:, :0], X[0], X[None]):
        assert _part_near(X, other) is None


def test_numbers_of_a_part_or_of_another_dtype_are_the_baselines_in_the_targets_form() -> None:
    assert _unequal_numbers({"x": X}, {"x": X[:, 4:].contiguous()}, False) == {}
    moved = X[:, 4:] + 1e-3
    (found,) = _unequal_numbers({"x": X}, {"x": moved}, False).values()  # type: ignore[union-attr]
    assert torch.equal(found, X[:, 4:])
    rounded = X.bfloat16()
    assert _unequal_numbers({"x": X}, {"x": rounded}, False) == {}
    (found,) = _unequal_numbers({"x": X}, {"x": rounded + 1}, False).values()  # type: ignore[union-attr]
    assert torch.equal(found, rounded)
    # A number without a partner may be one of another name, in the same form.
    assert _unequal_numbers({"x": X}, {"y": X}, False) == {}
    for other in (X.flatten(), X.view(torch.int32)):
        assert str(_unequal_numbers({"x": X}, {"y": other}, False)).startswith("the target reads y, which earlier")
    for unsent in (None, "too large"):
        assert "that the baseline's call reads" in _unequal_numbers(unsent, {"x": X}, True)
        assert "that the target's call reads" in _unequal_numbers({"x": X}, unsent, True)


def test_numbers_are_rounded_as_the_other_side_has_them() -> None:
    wide, half, brain = torch.float32, torch.float16, torch.bfloat16
    weight, other = f"a{WEIGHT}", f"b{WEIGHT}"
    assert dtypes_to_round({"x": wide, "y": wide, "z": half}, {"x": half, "y": wide, "z": brain}) == {"x": half}
    # A weight with another name has the dtype of all others.
    assert dtypes_to_round({weight: wide}, {other: brain}) == {weight: brain}
    assert dtypes_to_round({weight: wide}, {other: brain, f"c{WEIGHT}": half}) is None
    assert dtypes_to_round({weight: wide}, {other: wide, f"c{WEIGHT}": torch.float64}) == {}
    # What is no weight and has no partner is left as it is.
    assert dtypes_to_round({"x": wide}, {other: brain}) == {}


def test_taps_pair_by_names_unless_results_have_other_shapes_that_are_no_parts() -> None:
    one, other = call(X), call(X[:1])
    pairs = held_calls._pair_by_names
    assert pairs([one], [one])
    assert not pairs([one], [other])
    assert pairs([one], [call({"y": X[:1]})])
    assert not pairs([one], [call(X, taps=("c", "d"))])
    # Ranks may have parts of a batch, and so may the calls before one update.
    assert pairs([one], [other, other])
    assert pairs([one, one], [other])
    assert pairs([one], [call(X[:1], needs_backward=True)])


def test_calls_of_batches_of_different_sizes_are_said_to_be() -> None:
    (said,) = other_batch([call(X)], [call(X[:1])])
    assert said.startswith("The calls have batches of different sizes, 2 on the baseline and 1 on the target")
    scalar = torch.tensor(1.0)
    assert other_batch([call({"": X, "loss": scalar})], [call({"": X[:1], "loss": scalar})]) == [said]
    same: list[tuple[list[CallDescription], list[CallDescription]]] = [
        ([call(X)], [call(X)]),
        ([call(X)], [call(X[:1, :4])]),
        ([call({"": X, "y": X})], [call({"": X[:1], "y": X})]),
        ([call(X)], [call(X[:1]), call(X[:1])]),
        ([call(X), call(X)], [call(X[:1])]),
        ([call(scalar)], [call(scalar)]),
        ([call({"a": X})], [call({"b": X})]),
    ]
    for ours, theirs in same:
        assert other_batch(ours, theirs) == []


def test_what_taps_switch_off_is_named_with_the_farthest_result() -> None:
    plain, tapped = X * 1.5, X
    differences = [ResultDifference("['a']", 0.2, PAIR), ResultDifference("", 0.5, PAIR)]
    ours = call(X)
    said = difference_without_taps([ours], [call(plain, tapped)], differences, 5.0)
    assert said is not None
    assert said.startswith("Without taps the results differ by 0.5, and with taps by 0: the difference arises in code")
    # With taps they differ as much; a side that taps move as far explains it; rounding does.
    assert difference_without_taps([ours], [call(plain)], differences, 5.0) is None
    assert difference_without_taps([call(X * 2, X)], [call(X * 3, X)], differences[:1], 5.0) is None
    assert difference_without_taps([ours], [call(plain, tapped)], [ResultDifference("", 1e-6, PAIR)], 5.0) is None
    # Where taps are matched by value, a result without a batch of one is compared with taps as it is without them.
    bare = call(plain[0], plain[0])
    assert difference_without_taps([call(X[:1])], [bare], differences, 5.0, [PairRule("a", "b")]) is None


def test_what_a_comparison_of_calls_does_not_check_is_listed() -> None:
    ours = call({"": X, written_path("cache"): X}, not_compared=("a cache",), others={"Draft": 2, "Head": 1})
    theirs = call(X * 1.5, X, not_compared=("a cache",))
    found = not_checked([ours, ours], [theirs])
    assert found[0] == "a cache: it is large, or not the same when the call is repeated."
    assert any("cache" in each for each in found[1:2])
    assert "what the target computes without taps: with them its result changes by 0.33, as where hooks" in found[-1]
    assert found.count(found[0]) == 1
    assert (
        "other models that the baseline has called: Draft (2 calls), Head (1 call); --model NAME chooses one." in found
    )
    # Whole numbers do not round.
    assert len(not_checked([call(X.long())], [call(X.long(), X.long() + 1)])) == 1
    large = torch.tensor([100_000_000])
    assert len(not_checked([call(large)], [call(large, large + 1)])) == 1
    assert not_checked([call(X)], [call(X, X * (1 + 1e-7))]) == []


def test_backward_passes_are_compared_of_results_that_all_need_gradients() -> None:
    needs, other = call(X, needs_backward=True), call(X[:1], needs_backward=True)
    assert why_no_backward([needs, needs]) is None
    assert why_no_backward([needs, call(X)]) == "the results of one side alone need gradients"
    assert why_no_backward([needs, other]) == "results of different shapes have no gradients in common"


def test_values_without_a_distance_do_not_hide_how_far_taps_move_others() -> None:
    lost, ones = torch.tensor([torch.nan]), torch.ones(2)
    moved = replace(call({"a": lost, "b": ones}), tapped={"a": lost, "b": 2 * ones})
    assert call_remarks._moved_by_taps([call(X), moved], [moved]) == 1.0
    assert call_remarks._moved_by_taps([call(X)], [moved]) == call_remarks._moved_by_taps([moved], []) == 0.0


def test_weights_that_are_merged_explain_only_what_is_named() -> None:
    def merged(label: str, added: float, *unmatched: str) -> str | None:
        frame = pd.DataFrame({"name": ["up"], "group": ["up"], "label": [label], "added": [added]})
        proposal: Any = SimpleNamespace(unmatched_baseline=unmatched, pairs=[])
        return closer_look._merged_weights(Findings(frame, 5.0, 1), ["bfloat16"], proposal)

    weight = "up.weight[kind=param]"
    assert str(merged("culprit", 1e-3, weight)).startswith("Weights of up have no partner")
    # Where nothing is named, where too much differs, and where its weights have a partner.
    assert merged("clean", 0.0) is merged("clean", 0.0, weight) is None
    assert merged("culprit", 0.1, weight) is merged("culprit", 1e-3) is None
    assert merged("culprit", 1e-3, "upper.weight[kind=param]") is merged("culprit", 1e-3, "up.weight") is None


def test_calls_that_cannot_be_repeated_in_place_are_named_with_the_first_reason() -> None:
    moves, fails = call(X, not_repeated=("a", "b")), call(X, fails_when_repeated="ValueError: x")
    gone = "The {}'s call 1 of Net gives a different result when it is repeated (a)."
    assert why_not_held([call(X), moves], [fails]) == gone.format("baseline")
    assert why_not_held([call(X)], [call(X), moves]) == gone.format("target")
    assert why_not_held([fails], []) == "The baseline's call 1 of Net fails when it is repeated (ValueError: x)."
    assert why_not_held([call(X)], [call(X)]) is None


@pytest.mark.parametrize(
    ("closed", "alive", "drops"), [(False, True, True), (False, False, False), (True, True, False)]
)
def test_a_call_is_dropped_on_all_ranks_unless_one_is_gone(closed: bool, alive: bool, drops: bool) -> None:
    session: Any = MagicMock(closed=closed, ranks=[SimpleNamespace(alive=True), SimpleNamespace(alive=alive)])
    session.runs = [MagicMock(done=True), MagicMock(done=True)]
    functions._drop_call(session)
    assert session.run.called is drops
    assert not session.interrupt.called
    session.runs[-1].done = False
    functions._drop_call(session)
    assert session.interrupt.called
    assert [run.wait_steps.called for run in session.runs] == [False, True]


def test_a_text_that_names_a_function_of_a_file_is_that_function(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text("def f(): ...\n")
    assert functions._named_function(f"{path}:f").name == "f"
    assert functions._named_function(str(path)) == str(path)
    assert functions._named_function(call) is call


def test_a_rank_that_does_not_describe_its_call_is_named() -> None:
    run: Any = SimpleNamespace(baseline=[call(X)], target=[call(X), None])
    with pytest.raises(SessionError, match=r"compare: target\[1\] did not describe its call: None"):
        described(run)
    run.target.pop()
    assert described(run) == (run.baseline, run.target)


def test_what_an_interrupted_comparison_has_found_is_kept() -> None:
    assert known_at(KeyboardInterrupt("3 of 4 taps had a partner.", 5)) == ["3 of 4 taps had a partner."]
    assert known_at(WaitInterrupted("the wait was stopped")) == []
    stopped = ComparisonStopped(["One.", "Two."])
    assert known_at(stopped) == ["One. Two."]
    assert str(ComparisonStopped([])).endswith("both sides have ended. Nothing was judged yet.")


def test_a_side_whose_call_cannot_be_replayed_is_named_with_what_moves_or_fails() -> None:
    still = call(X)
    moves, writes = call(X, not_repeated=("a", "b", "c", "d")), call(X, not_repeated=("a",), writes_weights=True)
    fails = call(X, fails_when_repeated="ValueError: x")
    assert not_trusted([still], [still, still]) == []
    begins = "The {}'s call of Net cannot be replayed: "
    different = "from the same state, arguments and random numbers it returns a different result ({}). "
    ends = "Do not rely on anything below."
    (said,) = not_trusted([still, fails, moves], [still])
    assert said == begins.format("baseline") + f"it fails when it is repeated (ValueError: x). {ends}"
    ours, theirs = not_trusted([still, moves], [writes, still])
    assert ours.startswith(begins.format("baseline") + different.format("a, b, c") + f"{ends} State outside the model")
    assert theirs.startswith(begins.format("target") + different.format("a") + f"{ends} It changes the model's weights")


def test_a_result_of_16_bits_on_the_target_alone_may_round_earlier() -> None:
    def said(ours: Tensor, theirs: Tensor, dtype: str = "bfloat16") -> str | None:
        frame = pd.DataFrame({"dtype": [dtype], "cast": [None]})
        return rounds_earlier([call({"['x']": ours})], [call({"['x']": theirs})], Findings(frame, 5.0, 1))

    rounded, moved = X.bfloat16(), (X * 1.1).bfloat16()
    text = said(X, moved)
    assert text is not None
    assert text.startswith("Both sides compute in bfloat16, and only the baseline has ")
    assert "in float32. The target's is not the baseline's rounded to bfloat16" in text
    # The baseline's rounded; both or the baseline alone in 16 bits; of another shape; computed in more bits.
    for ours, theirs in ((X, rounded), (rounded, moved), (moved, X), (X, moved[:1]), (X, X * 1.1)):
        assert said(ours, theirs) is None
    assert said(X, moved, "float32") is None


def test_whole_numbers_that_no_tap_shows_are_named_if_they_differ() -> None:
    def given(**numbers: int) -> CallDescription:
        paths = {f"['{name}'].x": torch.tensor(value) for name, value in numbers.items()}
        return call(X, whole_numbers=paths, untapped_numbers=tuple(paths))

    assert differing_numbers([given(a=1, b=2)], [given(a=1, b=2)]) == []
    assert differing_numbers([given(a=1, c=2)], [given(a=1, b=3)]) == []
    (said,) = differing_numbers([given(a=1), given(a=1, b=2)], [given(a=1), given(a=2, b=3)])
    assert said.startswith("Whole numbers among the arguments already differ: a.x, b.x. No tap shows them")
    shown = replace(given(a=2), untapped_numbers=())
    assert differing_numbers([given(a=1)], [shown]) == []


def test_dropouts_that_are_active_on_one_side_alone_are_named() -> None:
    one, two = call(X, in_training=("drop",), is_training=True), call(X, in_training=("drop", "norm"))
    still, trains = call(X), call(X, is_training=True)
    assert in_training_alone(still, one) == [
        "On the target drop is in training mode, and the baseline's model is not: model.eval() ends that mode."
    ]
    assert in_training_alone(two, still) == [
        "On the baseline drop, norm are in training mode, and the target's model is not: model.eval() ends that mode."
    ]
    for each in ((still, still), (one, two), (one, trains), (trains, one)):
        assert in_training_alone(*each) == []


def test_only_a_mask_of_ones_and_zeros_shows_padding() -> None:
    moved = X.clone()
    moved[:, 6:] += 1.0
    mask = torch.ones(2, 8, dtype=torch.int64)
    mask[:, 6:] = 0

    def said(mask: Tensor, name: str = "attention_mask", pair: Any = (X, moved), groups: Any = ("h",)) -> list[str]:
        maps = {} if pair is None else {"h": SimpleNamespace(pair=pair)}
        findings: Any = SimpleNamespace(named=groups, maps=maps)
        return in_padding(call(X, whole_numbers={f"['{name}']": mask}), findings)

    begins = "Where the groups named below differ most, only rows that attention_mask masks by zeros differ."
    assert [each.startswith(begins) for each in said(mask)] == [True]
    for other in (mask * 2, 1 - mask, mask[:, :7], mask[0], mask * 0 + 1):
        assert said(other) == []
    assert said(mask, "token_mask") == said(mask, pair=None) == said(mask, groups=()) == said(mask, groups="hg") == []
    assert said(mask, pair=(X, moved + 1.0)) == said(mask, pair=(X, moved[:, :7])) == []


def test_rows_are_far_from_all_others_only_if_there_are_any_also_of_sparse_results() -> None:
    rows = torch.randn(4, 16)

    def are_far(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
        sides = ([CallDescription("Net", 1, False, (), {"": each}, {})] for each in (ours, theirs))
        return have_no_near_rows(*sides)

    assert not are_far(rows[:0], rows[:0])
    assert are_far(rows.to_sparse(), (rows + 1).to_sparse())
    assert not are_far(rows.to_sparse(), rows.flip(0).to_sparse())


def test_results_have_equal_rows_in_any_order_unless_they_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.arange(20.0).reshape(4, 5).sin()
    other = rows.flip(0)
    for ours, theirs, are_equal in (
        (rows, other, True),
        (rows, other[:3], True),
        (rows[1:], other, True),
        (rows, other * 1.1, False),
        (rows, other[:, :4], False),
    ):
        assert have_equal_rows([call(ours)], [call(theirs)], 5.0) == are_equal
    assert not have_equal_rows([call(rows)], [call(other), call(other)], 5.0)
    assert not have_equal_rows([call({})], [call({})], 5.0)
    waves = torch.complex(rows, rows.flip(1))
    assert have_equal_rows([call(waves)], [call(waves.flip(0))], 5.0)
    assert not have_equal_rows([call(waves)], [call(waves.conj().resolve_conj())], 5.0)
    for most, are_equal in ((16, True), (15, False)):
        monkeypatch.setattr("graftlab.comparison.equal_rows._MOST_ROW_PAIRS", most)
        assert have_equal_rows([call(rows)], [call(other)], 5.0) == are_equal


CLEAN = {"name": "output", "group": "output", "label": "clean", "ratio": 0.5, "added": 0.0}


@pytest.mark.parametrize(
    ("tap", "parts", "answer"),
    [
        ({}, {}, "agree"),
        ({}, {"not_repeated": ["h"]}, "inconclusive"),
        ({}, {"target_not_repeated": ["h"]}, "inconclusive"),
        ({}, {"data": ["The weights already differ."]}, "differ"),
        ({}, {"following": ["h.grad"]}, "differ"),
        ({"label": "culprit"}, {}, "differ"),
        ({"label": "culprit"}, {"raised": "The target raises ValueError."}, "differ"),
        ({"label": "culprit"}, {"not_repeated": ["h"]}, "inconclusive"),
        ({}, {"unexplained": ["h differs."]}, "differ"),
        ({}, {"unexplained": ["h differs."], "only_without_grafts": True, "in_float32": 0.5}, "inconclusive"),
        # Nothing was judged.
        ({}, {"raised": "The target raises ValueError."}, "inconclusive"),
        ({}, {"inconclusive": ["Pairs no longer hold."]}, "inconclusive"),
        ({}, {"quantised": ["w"]}, "inconclusive"),
        ({}, {"failed": ["A stage failed."]}, "inconclusive"),
        ({}, {"without_output": ["The output was not compared."]}, "inconclusive"),
        ({}, {"contradicting_pairs": ["k has the values of v."]}, "inconclusive"),
        ({"ratio": float("nan")}, {}, "inconclusive"),
        # Rounding to 16 bits leaves room for a mistake where something moves, and none in float32 has shown otherwise.
        ({}, {"computed_in": "bfloat16"}, "agree"),
        ({}, {"computed_in": "bfloat16", "after_taps": 1e-3}, "inconclusive"),
        ({"added": 1e-3}, {"computed_in": "bfloat16"}, "inconclusive"),
        ({"added": 1e-3}, {"computed_in": "bfloat16", "in_float32": 0.5}, "agree"),
        ({"added": 1e-3}, {}, "agree"),
    ],
)
def test_an_answer_follows_from_what_was_found(tap: dict[str, Any], parts: dict[str, Any], answer: str) -> None:
    found = Findings(pd.DataFrame([{**CLEAN, **tap}]), 5.0, 1, **parts)
    assert answer_of(found, True, True) == answer
    assert answer_of(found, False, True) == "inconclusive"
    # Numbers of the output itself show it where no results are compared, and those of a tap do not.
    assert answer_of(found, True, False) == answer
    other = Findings(pd.DataFrame([{**CLEAN, **tap, "name": "h"}]), 5.0, 1, **parts)
    assert answer_of(other, True, False) == ("inconclusive" if answer == "agree" else answer)


def test_an_agreement_alone_is_withdrawn_and_only_for_a_reason() -> None:
    conclusion = ReasonedAnswer("agree", ["First."])
    conclusion.doubt(None, "")
    assert (conclusion.answer, conclusion.reasons) == ("agree", ["First."])
    conclusion.doubt(None, "Second.", "Third.")
    conclusion.doubt("Fourth.")
    assert (conclusion.answer, conclusion.reasons) == ("inconclusive", ["First.", "Second.", "Third."])
    assert not conclusion.withdraw_agreement("differ")
    differing = ReasonedAnswer("differ")
    differing.doubt("Why.")
    assert (differing.answer, differing.reasons) == ("differ", [])
    other = ReasonedAnswer("agree")
    assert other.withdraw_agreement("differ")
    assert other.answer == "differ"


def held(ours: list[CallDescription], theirs: list[CallDescription]) -> HeldUnits:
    return HeldUnits(ours, theirs)


def in_training(*tokens: int, needs: bool = True, shape: tuple[int, ...] = ()) -> list[CallDescription]:
    """Calls that return a loss, or a tensor of this shape, and are given this many tokens on each rank."""
    given = [{"['ids']": torch.ones(count, dtype=torch.int64)} for count in tokens]
    return [call(torch.ones(shape), needs_backward=needs, whole_numbers=numbers) for numbers in given]


def differing(shape: tuple[int, ...] = (), group: str = "loss", **found: Any) -> Comparison:
    frame = pd.DataFrame([{"name": group, "group": group, "label": "culprit", "shape": shape, "ratio": 9.0}])
    findings = Findings(frame, 5.0, 1, **found)
    return Comparison(findings, 2, None, None, "differ", ("Said before.",))  # type: ignore[arg-type]


def test_sums_over_parts_of_a_batch_may_differ_for_that_reason() -> None:
    parts = held(in_training(4), in_training(2))
    for compared in (differing(), differing((8,), "w@param_grad"), differing((8,), "h@grad")):
        found = unless_of_a_part(compared, parts)
        assert (found.answer, len(found.remarks)) == ("inconclusive", 2)
        assert found.remarks[0].startswith("The baseline's call is given 4 numbers, such as tokens or labels, and the")
    for compared in (differing((8,), "h"), differing(unexplained=["x"]), differing(data=["x"])):
        assert unless_of_a_part(compared, parts) is compared
    compared = differing()
    for other in (
        # As many, or each rank a part of the batch, or not in training.
        held(in_training(4), in_training(4)),
        held(in_training(4, 4), in_training(2, 2)),
        held(in_training(4), in_training(2, needs=False)),
    ):
        assert unless_of_a_part(compared, other) is compared
    agreeing = replace(compared, answer="agree")
    assert unless_of_a_part(agreeing, parts) is agreeing


def test_a_call_is_left_to_the_update_of_another_batch_or_order() -> None:
    parts, alike = held(in_training(4), in_training(2)), held(in_training(4), in_training(4))
    other_order = held(in_training(4), in_training(4, needs=False))
    unclear = replace(differing(), answer="inconclusive")
    said = why_left_to_update(unclear, parts)
    assert said is not None
    assert said.startswith("Not checked: single calls, whose results have different shapes on the two sides")
    shapes = held(in_training(4, shape=(4,)), in_training(4, shape=(2,)))
    assert why_left_to_update(unclear, shapes) == said
    other = why_left_to_update(differing(), other_order)
    assert other is not None
    assert other.startswith("Not checked: single calls, some of which need gradients on one side alone")
    for compared, units in ((unclear, alike), (unclear, other_order), (differing(), parts), (differing(), alike)):
        assert why_left_to_update(compared, units) is None


def test_calls_with_other_tokens_may_do_other_work_if_one_needs_gradients() -> None:
    compared = differing()
    found = perhaps_of_other_work(compared, held(in_training(4, needs=False), in_training(2)))
    assert found.answer == "differ"
    assert found.remarks[0].startswith(
        "The baseline's call is given 4 numbers, such as tokens, without gradients, and the target's 2, with gradients."
    )
    assert found.remarks[1:] == compared.remarks
    unclear = replace(compared, answer="inconclusive")
    for each, units in (
        (compared, held(in_training(4), in_training(4, needs=False))),
        (compared, held(in_training(4), in_training(2))),
        (unclear, held(in_training(4), in_training(2, needs=False))),
    ):
        assert perhaps_of_other_work(each, units) is each
