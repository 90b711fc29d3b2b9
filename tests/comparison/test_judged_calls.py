"""What a comparison concludes of calls that both sides hold, from their descriptions and a verdict's findings."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pandas as pd
import pytest
import torch
from kit.refusals import exactly

from graftlab.comparison import functions, repeats
from graftlab.comparison.answers import Comparison, ComparisonStopped
from graftlab.comparison.call_remarks import rounds_earlier
from graftlab.comparison.functions import compare_with_compiled
from graftlab.comparison.held_calls import judge_held_calls
from graftlab.comparison.recorded_calls import judge_against_recording
from graftlab.comparison.repeats import JudgingChoice, NoCloserLookError, Repeats
from graftlab.control.verdicts import Verdict
from graftlab.diffs.maps import difference_map
from graftlab.diffs.results import NamedTensors
from graftlab.diffs.rounding import DEFAULT_NOISE_FLOOR
from graftlab.errors import MatchError, RecordingError, RunError, SessionError
from graftlab.layouts import Layout, parse_layout
from graftlab.layouts.regroup import Regroup
from graftlab.matching.pair import Pair
from graftlab.matching.proposal import Proposal
from graftlab.plan.pairs import PairRule
from graftlab.ranks.call_description import CallDescription
from graftlab.ranks.float32_state import KnownState
from graftlab.ranks.held_call import WEIGHT, HeldCall
from graftlab.ranks.held_functions import FunctionInFile, define_call
from graftlab.ranks.holding import OfCall, repeat_call, widen_operators
from graftlab.recordings.recorded_side import RecordedSide
from graftlab.verdict.findings import Findings, ShownMap
from graftlab.verdict.rounds_differently import RoundingGroups

ONES, MANY = torch.ones(4, 3), torch.arange(12.0).reshape(4, 3)
HALF = torch.ones(4, 3, dtype=torch.bfloat16)
NO_ROWS = pd.DataFrame({"name": [], "side": [], "tags": [], "shape": []})


def held(out: torch.Tensor = ONES, **parts: Any) -> CallDescription:
    """A call of Net, whose taps change nothing."""
    usual = {"number": 1, "needs_backward": False, "taps": ("a", "b"), "plain": {"": out}, "tapped": {"": out}}
    return CallDescription("Net", **{**usual, **parts})


def found(*groups: str, label: str = "clean", **parts: Any) -> Findings:
    """Findings with these groups; ``dtype``, ``added``, ``cast`` and ``ratio`` are those of each."""
    values = {"dtype": "float32", "added": 1e-9, "cast": None, "ratio": 0.5} | {
        name: parts.pop(name) for name in ("dtype", "added", "cast", "ratio") if name in parts
    }
    groups = groups or ("a", "out")
    frame = pd.DataFrame([{"name": each, "group": each, "label": label, **values} for each in groups])
    return Findings(frame, 5.0, 1, **parts)


def drawn_rows(seed: int) -> torch.Tensor:
    return torch.randn(3, 16, generator=torch.Generator().manual_seed(seed))


class Runs:
    """Stands in for the runs of a session: ``verdict`` and ``wide`` have these findings."""

    def __init__(self, findings: Findings, wide: Any = None, pairs: Sequence[PairRule] = (), match: Any = None) -> None:
        self.session: Any = Mock(plan=SimpleNamespace(pairs=pairs))
        self.verdict = Mock(return_value=Verdict(findings, 7))
        self.in_float32 = Mock(side_effect=[NoCloserLookError("no reason") if wide is None else wide])
        self.state_in_16_bits = Mock(return_value={})
        self.in_float64 = Mock(side_effect=SessionError("it has a backward pass"))
        self.constants_of_target_alone = Mock(return_value=[])
        self.note_equal = Mock()
        self.match = Mock(side_effect=[match])
        self.unfit_taps = Mock(return_value=set())
        self.have_other_parts = Mock(return_value=False)
        self.add_backward = Mock(return_value=None)

    def judge(self, baseline: Any, target: Any, proposal: Any = None, **choice: Any) -> Comparison:
        """Judge these calls, one or a list of each side."""
        sides = [each if isinstance(each, list) else [each] for each in (baseline, target)]
        return judge_held_calls(self, *sides, JudgingChoice(**choice), proposal)  # type: ignore[arg-type]


def judged(baseline: Any, target: Any, findings: Findings | None = None, **parts: Any) -> tuple[str, list[str]]:
    comparison = Runs(found() if findings is None else findings, **parts).judge(baseline, target)
    return comparison.answer, list(comparison.remarks)


def test_equal_calls_agree_and_nothing_is_remarked() -> None:
    runs = Runs(found())
    comparison = runs.judge(held(), held())
    assert (comparison.answer, comparison.remarks, comparison.runs, comparison.match) == ("agree", (), 7, None)
    runs.in_float32.assert_not_called()
    assert runs.match.mock_calls == runs.add_backward.mock_calls == []


def test_ranks_whose_parts_lie_otherwise_are_paired_by_the_order_found() -> None:
    regrouped = Pair("qkv.weight", "qkv.weight", Layout((Regroup(0, 2, (2, 1, 1)),)))
    proposal = Proposal((Pair("a", "out"), regrouped), order={"target": ("qkv.weight",)})
    for has, known, expected in ((True, proposal, (regrouped,)), (False, proposal, None), (True, Proposal(()), None)):
        runs = Runs(found(), match=known)
        runs.have_other_parts.return_value = has
        comparison = runs.judge(held(), [held(), held()])
        assert (comparison.match.pairs if comparison.match is not None else None) == expected
        assert runs.session.edit.call_count == (expected is not None)
    runs.have_other_parts.return_value = True
    # One rank has the whole.
    runs.judge(held(), held())
    runs.judge(held(), [held(), held()], match=False)
    assert runs.match.call_count == 1


@pytest.mark.parametrize(
    ("partner", "dtype", "then", "answer"),
    [
        ("input.position_ids", "int64", {}, "agree"),
        ("input.slot", "int64", {}, "differ"),
        ("input.slo", "int64", {}, "differ"),
        ("input.sl", "int64", {}, "agree"),
        ("input.position_ids", "float32", {}, "differ"),
        ("input.position_ids", "int64", {"label": "culprit"}, "differ"),
    ],
    ids=["by chance", "like names", "a shortened name", "two letters", "floats", "more differs"],
)
def test_whole_numbers_that_once_were_others_are_left_out_if_nothing_else_differs(
    partner: str, dtype: str, then: dict[str, Any], answer: str
) -> None:
    name = "input.batch.slots"
    tagged = [f"{each}[kind=input]" for each in (partner, name)]
    proposal = Proposal((Pair(*tagged), Pair("a", "a")))
    row = {"name": name, "group": f"{name}@input", "label": "cancels", "dtype": dtype, "added": 1.0, "ratio": 9.0}
    given = found(data=("The inputs already differ: slots.",), inputs=(f"{name}@input",))
    given = replace(given, frame=pd.concat([given.frame, pd.DataFrame([{**row, "cast": None}])]))
    runs = Runs(given)
    runs.verdict.side_effect = [Verdict(given, 7), Verdict(found(**then), 7)]
    comparison = runs.judge(held(), held(), proposal)
    assert comparison.answer == answer
    left = (
        f"Not checked: {name}, which once was {tagged[0]}, and differs in this call, while nothing else does: perhaps"
    )
    assert any(each.startswith(left) for each in comparison.remarks) == (answer == "agree")
    in_force = [each.kwargs["pairs"] for each in runs.session.edit.call_args_list]
    assert comparison.match.pairs == (in_force[-1] if in_force else proposal).pairs
    assert len(comparison.match.pairs) == (1 if answer == "agree" else 2)
    # Gradients of which each rank has only a summand are left out of both verdicts.
    runs.verdict.side_effect = [Verdict(given, 7), Verdict(found(**then), 7)]
    runs.verdict.reset_mock()
    trains = replace(held(), needs_backward=True)
    runs.judge(trains, [trains, trains], proposal)
    assert {each.kwargs["gradient_parts"] for each in runs.verdict.call_args_list} == {True}


@pytest.mark.parametrize(
    ("rows", "tokens", "findings", "answer"),
    [
        (drawn_rows(1), [5, 6, 7], {}, "differ"),
        (drawn_rows(0).flip(0), [5, 6, 7], {}, "agree"),
        # One row of three is near one of the others.
        (torch.cat([drawn_rows(1)[:2], drawn_rows(0)[:1]]), [5, 6, 7], {}, "inconclusive"),
        (drawn_rows(1), [5, 6, 8], {}, "inconclusive"),
        (drawn_rows(1)[:2], [5, 6, 7], {}, "inconclusive"),
        (drawn_rows(1), [5, 6, 7], {"quantised": ("One side has weights of 8 bits.",)}, "inconclusive"),
    ],
    ids=["no row", "all rows", "one row", "other tokens", "fewer rows", "8 bits"],
)
def test_results_without_a_row_in_common_differ(
    rows: torch.Tensor, tokens: list[int], findings: dict[str, Any], answer: str
) -> None:
    padded, packed = torch.tensor([[0, 0, 5], [0, 6, 7]]), torch.tensor(tokens)
    pairs = [PairRule("out", "out", "rows(of='ids', into='ids')")]
    ours = held(drawn_rows(0), whole_numbers={"['ids']": padded}, values=("embed", "a", "q", "out"))
    theirs = held(rows, whole_numbers={"['ids']": packed})
    found_said = judged(ours, theirs, found("embed", "a", **findings), pairs=pairs, match=Proposal(()))
    assert found_said[0] == answer
    if answer == "differ":
        assert found_said[1][:2] == [
            "Both calls are given the same tokens, and no row of the one result is near any row of the other, so they "
            "differ whatever the order of their rows.",
            "All values that were compared agree, the last of them a; from q on, the baseline's values have no "
            "partner, so the difference arises there.",
        ]


def test_calls_with_equal_lengths_and_other_tokens_are_not_said_to_differ() -> None:
    pairs = [PairRule("out", "out", "rows(of='ids', into='ids')")]
    ours, theirs = (
        held(drawn_rows(seed), whole_numbers={"['ids']": torch.tensor(ids), "['lengths']": torch.tensor([4, 5, 6])})
        for seed, ids in enumerate([[11, 12, 13], [21, 22, 23]])
    )
    assert judged(ours, theirs, found("embed", "a"), pairs=pairs, match=Proposal(()))[0] == "inconclusive"
    given = {**ours.whole_numbers, "['slots']": torch.tensor([2, 7, 9])}
    theirs = replace(theirs, whole_numbers=given)
    assert judged(ours, theirs, found("embed", "a"), pairs=pairs, match=Proposal(()))[0] == "differ"


def test_inputs_that_are_rounded_results_of_an_earlier_call_are_no_difference() -> None:
    given, without = found("x@input", label="culprit"), found("x@input")
    inherited: Any = Mock(without_earlier_results=Mock(return_value=without))
    comparison = judge_held_calls(Runs(given), [held()], [held()], JudgingChoice(), None, inherited)  # type: ignore[arg-type]
    assert (comparison.answer, comparison.findings) == ("agree", without)
    inherited.without_earlier_results.assert_called_once_with(given)


def test_pairs_that_contradict_each_other_where_all_agrees_prove_nothing() -> None:
    doubt = "The plan's pairs contradict their names or each other: k has the values of v. They are compared as"
    answer, remarks = judged(held(), held(), found(contradicting_pairs=(doubt,)))
    assert answer == "inconclusive"
    assert remarks[0].startswith("All that was compared agrees, the output too, but pairs contradict")
    # They count where something differs, also what no tap shows, or where weights do.
    far = held(MANY, tapped={"": ONES})
    assert judged(held(), far, found(contradicting_pairs=(doubt,)))[0] == "differ"
    assert judged(held(), held(), found("a", label="culprit", contradicting_pairs=(doubt,)))[0] == "differ"
    assert judged(held(), held(), found(contradicting_pairs=(doubt,), data=("The weights differ.",)))[0] == "differ"
    assert judged(held(), held(), found(data=("The weights differ.",)))[0] == "differ"


@pytest.mark.parametrize("side", ["baseline", "target"])
def test_a_side_that_alone_is_in_training_mode_is_stated_first_if_the_calls_differ(side: str) -> None:
    trains, infers = held(in_training=("drop",), is_training=True), held()
    calls = (infers, trains) if side == "target" else (trains, infers)
    wrong = found("a", label="culprit")
    other = "baseline" if side == "target" else "target"
    assert judged(*calls, wrong)[1] == [
        f"On the {side} drop is in training mode, and the {other}'s model is not: model.eval() ends that mode."
    ]
    assert judged(*calls)[1] == []
    # A model in training mode may have dropouts that are no modules, and one without any computes the same in it.
    functional = held(is_training=True)
    calls = (functional, trains) if side == "target" else (trains, functional)
    assert judged(*calls, wrong)[1] == judged(trains, trains, wrong)[1] == judged(functional, infers, wrong)[1] == []
    # Both may draw dropouts in a model that is not in training mode otherwise.
    draws = held(in_training=("drop",))
    assert judged(draws, draws, wrong)[1] == []


@pytest.mark.parametrize("side", ["baseline", "target"])
def test_a_call_that_cannot_be_replayed_clears_nothing(side: str) -> None:
    moved = held(not_repeated=("w", "x", "w", "y", "z"))
    for wrong, said in ((moved, "a different result (w, x, y)"), (held(fails_when_repeated="oops"), "repeated (oops)")):
        runs = Runs(found(dtype="bfloat16"))
        calls = (wrong, held()) if side == "baseline" else (held(), [held(), wrong])
        comparison = runs.judge(*calls)
        assert comparison.answer == "inconclusive"
        assert comparison.remarks[0].startswith(f"The {side}'s call of Net cannot be replayed")
        assert said in comparison.remarks[0]
        runs.in_float32.assert_not_called()


def test_a_call_that_trains_is_sent_to_the_comparison_of_scripts() -> None:
    moved = held(not_repeated=("x",))
    (remark,) = Runs(found()).judge(replace(moved, writes_weights=True), held()).remarks
    assert remark.endswith("to compare training, give two scripts, whose updates are judged one by one.")
    (remark,) = Runs(found()).judge(moved, held()).remarks
    assert remark.endswith("(torch.empty), may change it.")


def test_untapped_whole_numbers_of_arguments_are_stated_before_a_named_group() -> None:
    numbers = {"['args[1]'].slots": torch.tensor([4, 5]), "['args[0]']": torch.tensor([1]), "['lens']": torch.tensor(3)}
    ours = held(whole_numbers=numbers, untapped_numbers=("['args[1]'].slots", "['lens']"))
    moved = {path: each + 1 for path, each in numbers.items()}
    theirs = replace(ours, whole_numbers={**moved, "['lens']": torch.tensor(3)})
    wrong = found("a", "out", label="culprit")
    answer, (remark,) = judged(ours, theirs, wrong)
    assert answer == "differ"
    assert remark.startswith("Whole numbers among the arguments already differ: args[1].slots. No tap shows them")
    assert "args[1].slots, lens." in judged(ours, replace(ours, whole_numbers=moved), wrong)[1][0]
    assert judged(ours, theirs) == ("agree", [])
    assert judged(ours, ours, wrong) == judged(ours, held(whole_numbers=moved), wrong) == ("differ", [])


# ---- the match -------------------------------------------------------------------------------------------------------


def test_taps_are_matched_where_names_do_not_pair_or_if_asked() -> None:
    proposal = Proposal((Pair("a", "x"),), wrong_weights=("1", "2", "3", "4", "5"))
    others = held(taps=("x", "y"))
    for target, choice, given, wanted in (
        (held(), None, None, False),
        (held(), True, None, True),
        (held(), False, None, False),
        (others, None, None, True),
        (others, False, None, False),
        (others, None, proposal, False),
        (held(taps=("a", "b", "y")), None, None, False),
        # Other rows, as of a packed batch.
        (held(ONES[:2]), None, None, True),
        ([held(ONES[:2]), held(ONES[:2])], None, None, False),
    ):
        runs = Runs(found(), match=proposal)
        comparison = runs.judge(held(), target, given, match=choice)
        assert runs.match.called is wanted
        assert runs.session.edit.mock_calls == ([call(pairs=proposal)] if wanted else [])
        assert comparison.match is (proposal if wanted or given else None)
        assert [each for each in comparison.remarks if len(each) == 2] == (
            ["1.", "2.", "3.", "4."] if wanted or given else []
        )


@pytest.mark.parametrize(
    ("ours", "theirs", "named", "choice", "is_matched", "is_remarked"),
    [
        (3, 2, ("output[0]",), None, True, False),
        (2, 3, ("output[0]", "output[1]"), None, True, False),
        # A value within differs, too: names pair, and the results may be right.
        (3, 2, ("a", "output[0]"), None, False, True),
        (3, 2, ("output[0]",), False, False, True),
        (3, 2, ("a",), None, False, False),
        (2, 2, ("output[0]",), None, False, False),
        (3, 1, ("output[0]",), None, False, False),
        (3, 2, ("output.mu",), None, False, False),
    ],
)
def test_results_with_fewer_values_are_paired_by_value_where_only_they_differ(
    ours: int, theirs: int, named: tuple[str, ...], choice: bool | None, is_matched: bool, is_remarked: bool
) -> None:
    def returning(count: int) -> CallDescription:
        values = {f"[{place}]": MANY for place in range(count)}
        return held(plain=values, tapped=values)

    proposal = Proposal((Pair("output[1]", "output[0]"),))
    runs = Runs(found(*named, label="wrong", ratio=50.0), match=proposal)
    comparison = runs.judge(returning(ours), returning(theirs), match=choice)
    assert runs.match.called is is_matched
    assert runs.verdict.call_count == (2 if is_matched else 1)
    assert any("may not be the same value" in each for each in comparison.remarks) is is_remarked


def test_results_with_fewer_values_that_cannot_be_paired_may_be_right() -> None:
    three, two = (held(plain={f"[{place}]": MANY for place in range(count)}) for count in (3, 2))
    findings = found("output[0]", label="wrong", ratio=50.0)
    comparison = Runs(findings, match=MatchError("no values are alike")).judge(three, two)
    assert "(3 and 2), so output[0]" in next(each for each in comparison.remarks if "the same value" in each)


@pytest.mark.parametrize(
    ("trained", "choice", "wanted"),
    [
        (("a.w", "y.w"), {"match_trained": True}, True),
        (("a.w", "y.w"), {}, False),
        (("a.w", "y.w"), {"match_trained": True, "match": False}, False),
        # The target trains one weight less, or one more.
        (("a.w",), {"match_trained": True}, False),
        (("a.w", "b.w", "y.w"), {"match_trained": True}, False),
    ],
)
def test_weights_that_names_leave_unpaired_are_matched_before_their_update(
    trained: tuple[str, ...], choice: dict[str, bool], wanted: bool
) -> None:
    ours = held(needs_backward=True, trained=("a.w", "b.w"))
    theirs = replace(ours, trained=trained)
    proposal = Proposal((Pair("b.w", "y.w"),))
    runs = Runs(found(), match=proposal)
    assert runs.judge(ours, theirs, **choice).match is (proposal if wanted else None)
    assert runs.match.called is wanted
    # Parts of a batch have no equal values, and names pair the rest if a match fails.
    for split in ([theirs, theirs], replace(theirs, plain={"": ONES[:2]})):
        runs = Runs(found(), match=proposal)
        runs.judge(ours, split, **choice)
        assert not runs.match.called
    comparison = Runs(found(), match=MatchError("no values are alike")).judge(ours, theirs, **choice)
    assert (comparison.answer, [each for each in comparison.remarks if "paired" in each]) == ("agree", [])


def test_pairs_of_an_earlier_call_that_do_not_fit_a_later_one_are_matched_again() -> None:
    def pair(name: str, layout: str) -> Pair:
        return Pair(name, f"t.{name}", parse_layout(layout), sureness="exact")

    known = Proposal(tuple(pair(name, "a b -> (a b)") for name in ("h.0.q", "h.1.q", "out")), wrong_weights=("w",))
    again = Proposal((pair("h.0.q", "a 1 -> a"), pair("out", "a 1 -> a")), unpaired_rows="Rows.")
    runs = Runs(found(), match=again)
    runs.unfit_taps.return_value = {"h.0.q", "h.1.q"}
    match = runs.judge(held(number=2), held(number=2, taps=("x",)), known).match
    # A pair that the second match did not find has its namesake's layout, and one that fits keeps its own.
    assert [each.layout.text for each in match.pairs] == ["a 1 -> a", "a 1 -> a", "a b -> (a b)"]
    assert (match.wrong_weights, match.unpaired_rows) == (("w",), "Rows.")
    assert runs.session.edit.mock_calls == [call(pairs=match)]
    # A tap that the second match did not find is not looked for again.
    runs = Runs(found(), match=Proposal(()))
    runs.unfit_taps.return_value = {"out"}
    given = runs.judge(held(number=2), held(number=2, taps=("x",)), known).match
    assert runs.judge(held(number=3), held(number=3, taps=("x",)), given).match is given
    assert len(runs.match.mock_calls) == 1
    for unfit, found_again in ((set(), again), ({"out"}, MatchError("no values are alike"))):
        runs = Runs(found(), match=found_again)
        runs.unfit_taps.return_value = unfit
        assert runs.judge(held(number=2), held(number=2, taps=("x",)), known).match is known
        assert runs.session.edit.mock_calls == []


def test_a_match_that_fails_or_leaves_rows_unpaired_clears_nothing() -> None:
    answer, remarks = judged(held(), held(taps=("x",)), match=MatchError("no values are alike"))
    assert (answer, remarks) == ("inconclusive", ["Taps could not be paired by value: no values are alike"])
    proposal = Proposal((Pair("a", "x"),), unpaired_rows="Three rows have no partner.")
    answer, remarks = judged(held(), held(taps=("x",)), match=proposal)
    assert (answer, remarks) == ("inconclusive", ["Three rows have no partner."])
    answer, _ = judged(held(), held(taps=("x",)), found("a", "out", label="culprit"), match=proposal)
    assert answer == "differ"


def test_heads_in_different_orders_are_a_reason_only_where_the_sides_differ() -> None:
    proposal = Proposal((Pair("a", "x"),), wrong_weights=("first",), odd_orders=("q and k", *"abcd"))
    parts: dict[str, Any] = {"match": proposal}
    assert judged(held(), held(taps=("x",)), **parts) == ("agree", ["first."])
    answer, remarks = judged(held(), held(taps=("x",)), found("a", "out", label="culprit"), **parts)
    assert (answer, remarks) == ("differ", ["first.", "q and k.", "a.", "b.", "c."])


def test_results_with_rows_in_other_orders_agree_only_if_the_rows_are_equal() -> None:
    moved = PairRule("output", "output", "gather(of=[4], runs=[[3, 1], [2, 1], [1, 1], [0, 1]], into=[4])")
    rows = MANY[[3, 2, 1, 0]]
    for target, answer in ((rows, "agree"), (rows + torch.eye(4, 3), "inconclusive")):
        assert judged(held(MANY), held(target), found("a", "output"), pairs=[moved])[0] == answer
    # From inputs of the same rows, a result with fewer lacks some.
    for aligned, lacks in ((None, True), ("gather", False)):
        findings = found("x@input", "output")
        findings.frame["aligned_by"] = aligned
        answer, remarks = judged(held(MANY), held(rows[:3]), findings, pairs=[moved], match=Proposal(()))
        said = "The returned value has the shape [4, 3] on the baseline and [3, 3] on the target."
        assert (answer, remarks[:1]) == (("inconclusive", [said]) if lacks else ("agree", []))


def test_a_call_that_raises_on_one_side_is_not_cleared_by_the_taps_before() -> None:
    """Also if no run of the verdict raises."""
    raises = held(raises="ValueError")
    for calls in ((raises, held()), (held(), raises), (held(), [held(), raises]), ([held(), raises], held())):
        runs = Runs(found("a", "b"))
        assert runs.judge(*calls).answer == "inconclusive"
        runs.session.run.assert_not_called()
        assert Runs(found("a", label="culprit")).judge(*calls).answer == "differ"
    # If both raise, nothing is judged.
    runs = Runs(found("a", "b"))
    runs.session.run.side_effect = RunError("run 2 failed on baseline[0], target[0]")
    with pytest.raises(RunError, match=exactly("run 2 failed on baseline[0], target[0]")):
        runs.judge(held(raises="ValueError"), held(raises="ValueError"))
    runs.verdict.assert_not_called()


def test_taps_before_an_exception_are_matched_where_names_do_not_pair_or_if_asked() -> None:
    proposal = Proposal((Pair("a", "x"),))
    raises, others = held(raises="ValueError"), held(taps=("x", "y"))
    for target, choice, wanted in (
        (held(), None, False),
        (held(), True, True),
        (others, None, True),
        (others, False, False),
    ):
        runs = Runs(found(), match=proposal)
        comparison = runs.judge(raises, target, match=choice)
        assert runs.session.edit.mock_calls == ([call(pairs=proposal)] if wanted else [])
        assert (comparison.match, comparison.remarks) == (proposal if wanted else None, ())
    comparison = Runs(found(label="culprit"), match=MatchError("no values are alike")).judge(raises, others)
    assert (comparison.answer, comparison.runs, comparison.match) == ("differ", 7, None)
    assert comparison.remarks == ("Taps could not be paired by value: no values are alike",)


# ---- in float32 ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs", "is_earlier"),
    [
        (ONES * 1.01, HALF, True),
        # The baseline's, rounded.
        (ONES * 1.001, HALF, False),
        (ONES[:2] * 1.01, HALF, False),
        (HALF * 1.01, HALF, False),
        (ONES * 1.01, ONES, False),
        (ONES * 1.01, HALF.half(), False),
    ],
    ids=["earlier", "rounded", "other shape", "both narrow", "neither", "not computed in"],
)
def test_a_result_of_16_bits_that_is_not_the_wide_one_rounded_may_round_earlier(
    ours: torch.Tensor, theirs: torch.Tensor, is_earlier: bool
) -> None:
    said = rounds_earlier([held(ours)], [held(theirs)], found(dtype="bfloat16"))
    assert (said is not None) is is_earlier
    if said is not None:
        assert said.startswith(
            "Both sides compute in bfloat16, and only the baseline has the returned value in float32."
        )


def test_a_mistake_that_only_float32_shows_is_the_answer() -> None:
    narrow = found(dtype="bfloat16")
    wide = Verdict(found("a", label="culprit", ratio=9.0), 5)
    for number, is_first in ((1, True), (2, False)):
        runs = Runs(narrow, wide)
        comparison = runs.judge(held(), held(number=number))
        assert (comparison.answer, comparison.named, comparison.runs) == ("differ", ["a"], 12)
        assert comparison.remarks == (
            "In bfloat16 the calls agree to rounding. In float32, from the same numbers, they differ:",
        )
        assert runs.in_float32.call_args.kwargs == {"is_first": is_first}
    unexplained = replace(narrow, unexplained=["The outputs differ."])
    assert judged(held(), held(), unexplained, wide=wide)[1][0].startswith("In bfloat16 no tapped value explains")
    # Weights of another rounding differ, and whatever reads them.
    data = replace(wide.findings, data=["Weights differ."])
    answer, remarks = judged(held(), held(), narrow, wide=Verdict(data, 5))
    assert (answer, remarks) == (
        "agree",
        ["Not checked: the same call in float32: weights that are rounded differently differ in it."],
    )
    assert judged(held(), held(), narrow, wide=Verdict(replace(data, weights_lent=True), 5))[0] == "differ"
    # Pairs that contradict each other are no reason not to look.
    pairs = ("The plan's pairs contradict their names or each other: k has the values of v.",)
    narrow = replace(narrow, contradicting_pairs=pairs)
    for label, answer in (("culprit", "differ"), ("clean", "inconclusive")):
        wide = Verdict(found("a", label=label, contradicting_pairs=pairs), 5)
        assert judged(held(), held(), narrow, wide=wide)[0] == answer


@pytest.mark.parametrize(
    ("added", "alone", "label", "answer"),
    [
        (0.002, "0.q.lora_A.weight[kind=param]", "culprit", "inconclusive"),
        (0.005, "0.q.lora_A.weight[kind=param]", "culprit", "differ"),
        (0.002, "q2.weight[kind=param]", "culprit", "differ"),
        (0.002, "1.q.weight[kind=param]", "culprit", "differ"),
        (0.002, "0.q.base", "culprit", "differ"),
        (0.002, "0.q.lora_A.weight[kind=param]", "clean", "agree"),
    ],
)
def test_the_rounding_of_merged_weights_is_neither_cleared_nor_blamed(
    added: float, alone: str, label: str, answer: str
) -> None:
    wide = Verdict(found("0.q", label=label, ratio=9.0, added=added), 5)
    proposal = Proposal((Pair("0.q", "x"),), {alone: "no target tap has its values"})
    said = judged(held(), held(taps=("x",)), found(dtype="bfloat16"), wide=wide, match=proposal)
    assert said[0] == answer
    merged = "Weights of 0.q have no partner, as where the target has merged them with others."
    assert any(each.startswith(merged) for each in said[1]) is (answer == "inconclusive")
    # A verdict may name the tap as the target does, which may have several partners.
    proposal = replace(proposal, pairs=(*proposal.pairs, Pair("p", "x")))
    wide = Verdict(found("x", label=label, ratio=9.0, added=added), 5)
    assert judged(held(), held(taps=("x",)), found(dtype="bfloat16"), wide=wide, match=proposal)[0] == answer


def test_rounded_weights_do_not_explain_a_result_of_a_different_shape() -> None:
    wide = found("x@input", "0.q")
    wide.frame.loc[1, ["label", "ratio", "added"]] = ["culprit", 9.0, 0.002]
    proposal = Proposal((Pair("0.q", "x"),), {"0.q.lora_A.weight[kind=param]": "no target tap has its values"})
    parts = {"findings": found(dtype="bfloat16"), "wide": Verdict(wide, 5), "match": proposal}
    answer, remarks = judged(held(), held(torch.ones(5, 3), taps=("x",)), **parts)
    assert answer == "differ"
    assert remarks[-1] == "The returned value has the shape [4, 3] on the baseline and [5, 3] on the target."


def test_a_module_beside_the_named_one_may_have_been_folded_into_it() -> None:
    wide = Verdict(found("stem.conv", label="culprit", ratio=9.0, added=0.002), 5)
    proposal = Proposal((Pair("stem.conv", "x"),), {"stem.bn.weight[kind=param]": "no target tap has its values"})
    answer, (said, _) = judged(held(), held(taps=("x",)), found(dtype="bfloat16"), wide=wide, match=proposal)
    assert answer == "inconclusive"
    assert said.startswith("Weights of stem.bn have no partner")


@pytest.mark.parametrize(
    ("moved", "alone", "parts", "answer"),
    [
        (0.004, "rope.cs[kind=param]", {}, "inconclusive"),
        (0.0012, "rope.cs[kind=param]", {}, "differ"),
        (0.004, "rope.cs", {}, "differ"),
        (0.004, "rope.cs[kind=param]", {"unexplained": ["The outputs differ."]}, "differ"),
        (0.004, "rope.cs[kind=param]", {"data": ["The weights already differ."], "weights_lent": True}, "differ"),
    ],
)
def test_what_rounds_on_the_target_alone_may_explain_only_what_it_moves(
    moved: float, alone: str, parts: dict[str, Any], answer: str
) -> None:
    wide, other = (
        Verdict(found("attn.o", "attn.o", label="culprit", ratio=9.0, added=added, **parts), 5)
        for added in (0.001, moved)
    )
    # Of several calls the one that is moved furthest counts.
    other.frame.loc[0, "added"] = 0.0
    proposal = Proposal((Pair("attn.o", "x"),), {}, {alone: "no baseline tap has its values"})
    runs = Runs(found(dtype="bfloat16"), match=proposal)
    runs.in_float32 = Mock(side_effect=[wide, other])
    comparison = runs.judge(held(), held(taps=("x",)))
    assert comparison.answer == answer
    begins = "The target alone has rope.cs, in 16 bits. With other roundings of it, what follows differs by several "
    assert any(each.startswith(begins) for each in comparison.remarks) is (answer == "inconclusive")
    if answer == "inconclusive":
        looks = [{"is_first": True}, {"is_first": True, "rounded_otherwise": ["rope.cs"], "explain": False}]
        assert [each.kwargs for each in runs.in_float32.call_args_list] == looks


@pytest.mark.parametrize("looked_in", ["float32", "float64"])
@pytest.mark.parametrize("constants", [[], ["cos", "sin"]])
def test_constants_of_the_target_alone_are_rounded_otherwise_where_names_pair(
    constants: list[str], looked_in: str
) -> None:
    wide, other = (
        Verdict(found("a", label="culprit", ratio=9.0, added=added, looked_in=looked_in), 5) for added in (0.005, 0.04)
    )
    runs = Runs(found("a", dtype="bfloat16"))
    runs.constants_of_target_alone.return_value = constants
    runs.in_float32 = Mock(side_effect=[wide, other])
    comparison = runs.judge(held(), held())
    assert comparison.answer == ("inconclusive" if constants else "differ")
    assert comparison.remarks[0].startswith(
        "The target alone has cos, sin, in 16 bits. With other roundings of them, "
    ) is bool(constants)
    assert runs.in_float32.call_count == (2 if constants else 1)


def test_taps_of_16_bits_in_float64_are_given_or_were_looked_at_one_by_one() -> None:
    # An embedding computes nothing, so that its result stays in 16 bits.
    wide, narrow = (found("embed", dtype="bfloat16", ratio=0.5, looked_in=each) for each in ("float64", "float32"))
    answer, remarks = judged(held(), held(), found(dtype="bfloat16"), wide=Verdict(wide, 5))
    assert (answer, remarks) == ("agree", [])
    answer, remarks = judged(held(), held(), found(dtype="bfloat16"), wide=Verdict(narrow, 5))
    assert remarks == ["Not checked: the same call in float32: these compute in 16 bits even then: embed."]


@pytest.mark.parametrize("alone", [0, 1, 2])
def test_where_names_pair_few_taps_in_16_bits_a_failed_look_clears_nothing(alone: int) -> None:
    runs = Runs(found("a", dtype="bfloat16"))
    runs.in_float32 = Mock(side_effect=NoCloserLookError("no reason"))
    more = ("layers.0", "layers.1")[:alone]
    comparison = runs.judge(held(values=("a", "both", *more)), held(values=("a", "both", "its.own")))
    assert comparison.answer == ("inconclusive" if alone == 2 else "agree")


@pytest.mark.parametrize("alone", [0, 1, 2])
def test_where_few_taps_were_compared_in_16_bits_a_failed_look_clears_nothing(alone: int) -> None:
    left = {f"layers.{number}": "no target tap has its values" for number in range(alone)}
    # Weights, and further calls of the same taps, are not counted.
    further = ("w[kind=param]", "v[kind=param]", "a#1", "a#2", "layers.0#1", "layers.0#2")
    left |= dict.fromkeys(further if alone else further[:4], "no target tap has its values")
    proposal = Proposal((Pair("a", "x"),), left)
    runs = Runs(found("a", dtype="bfloat16"), match=proposal)
    runs.in_float32 = Mock(side_effect=NoCloserLookError("writes into its tensors round to bfloat16 even then"))
    comparison = runs.judge(held(), held(taps=("x",)))
    assert comparison.answer == ("inconclusive" if alone == 2 else "agree")
    said = (
        "1 tap of values was compared, and 2 of the baseline's have no partner. Between so few, rounding to bfloat16 "
        "adds up, and may hide a mistake. Compare both in float32."
    )
    assert (said in comparison.remarks) is (alone == 2)
    assert "Not checked: the same call in float32: writes into its tensors round to bfloat16 even then." in (
        comparison.remarks
    )


@pytest.mark.parametrize(
    ("parts", "equal"),
    [
        ({"dtype": "bfloat16", "added": 0.0}, True),
        ({"dtype": "bfloat16"}, False),
        ({"dtype": "float32", "added": 0.0}, False),
        ({"dtype": "bfloat16", "added": 0.0, "unexplained": ["It differs."]}, False),
        ({"dtype": "bfloat16", "added": 0.0, "data": ["The weights differ."]}, False),
    ],
)
def test_only_calls_of_16_bits_that_are_bit_equal_are_noted_as_such(parts: dict[str, Any], equal: bool) -> None:
    runs = Runs(found(**parts))
    runs.judge(held(), held())
    assert runs.note_equal.called is equal


def test_agreement_in_float32_is_stated_with_its_largest_ratio() -> None:
    wide = Verdict(found(ratio=0.25), 5)
    comparison = Runs(found(dtype="float16"), wide).judge(held(), held())
    assert (comparison.answer, comparison.findings.in_float32, comparison.runs) == ("agree", 0.25, 12)
    assert comparison.remarks == ()
    # A tap that stayed in 16 bits was not judged in float32.
    still = Verdict(found("a", dtype="float16"), 5)
    assert Runs(found(dtype="float16"), still).judge(held(), held()).findings.in_float32 is None
    rounding = RoundingGroups(("a",))
    coarse = found("a", dtype="float16", label="culprit", rounding=rounding)
    assert judged(held(), held(), coarse)[0] == "inconclusive"
    assert judged(held(), held(), coarse, wide=wide)[0] == "agree"
    # It explains nothing that no tap explains.
    unexplained = found(dtype="float16", unexplained=["The outputs differ."])
    comparison = Runs(unexplained, wide).judge(held(), held())
    assert (comparison.answer, comparison.findings.in_float32, comparison.runs) == ("differ", None, 7)
    # It may be a choice that rounding has changed, if every tap agrees from equal inputs.
    comparison = Runs(replace(unexplained, only_without_grafts=True), wide).judge(held(), held())
    assert (comparison.answer, comparison.findings.in_float32, comparison.runs) == ("inconclusive", 0.25, 12)
    assert comparison.remarks[0].startswith(
        "In float32, from the same numbers, the calls agree. In 16 bits they differ"
    )


@pytest.mark.parametrize(
    ("dtype", "chooses", "wide", "answer"),
    [
        ("bfloat16", True, found(ratio=0.25), "inconclusive"),
        ("bfloat16", True, found("a", label="culprit"), "differ"),
        ("bfloat16", True, found(data=["Weights differ."]), "differ"),
        ("bfloat16", False, None, "differ"),
        ("float32", True, None, "differ"),
    ],
)
def test_a_choice_that_rounding_may_have_changed_is_judged_in_float32(
    dtype: str, chooses: bool, wide: Findings | None, answer: str
) -> None:
    place = {"group": "a", "side": "target", "confirmed": True, "stack": ("moe.py:76",)}
    line: Any = SimpleNamespace(**place, operation="max(bf16[1, 4], dim=-1)", chooses=chooses)
    narrow = found("a", dtype=dtype, label="culprit", lines=[line])
    runs = Runs(narrow, Mock() if wide is None else Verdict(wide, 5))
    comparison = runs.judge(held(), held())
    assert comparison.answer == answer
    assert runs.in_float32.called is (wide is not None)
    if answer == "inconclusive":
        (remark,) = comparison.remarks
        assert remark.startswith("In float32, from the same numbers, the calls agree. In 16 bits they differ from a ")
        assert "choice on (max, moe.py:76): rounding may have" in remark
        assert remark.endswith(", or the target rounds more, or has other code for 16 bits.")
        assert (comparison.findings.in_float32, comparison.runs) == (0.25, 12)
    else:
        # What was named in 16 bits stands.
        assert (comparison.findings, comparison.remarks) == (narrow, ())


@pytest.mark.parametrize(
    ("narrow", "wide", "answer"),
    [
        (found("a", label="culprit", added=2e-3), found("a"), "inconclusive"),
        # By more than a cache rounds.
        (found("a", label="culprit", added=3e-2), found("a"), "differ"),
        (found("a", label="culprit", added=float("nan")), found("a"), "differ"),
        (found("a", label="culprit", unexplained=["The outputs differ."]), found("a"), "differ"),
        (found("a", label="culprit", added=2e-3), found("a", not_repeated=["a"]), "differ"),
        (found("a", label="culprit", added=2e-3), found("b", label="culprit"), "differ"),
    ],
)
def test_only_what_a_state_of_16_bits_rounds_may_explain_is_inconclusive(
    narrow: Findings, wide: Findings, answer: str
) -> None:
    runs = Runs(narrow, Verdict(wide, 5))
    runs.state_in_16_bits = Mock(return_value={"cache": torch.bfloat16})
    comparison = runs.judge(held(), held())
    assert comparison.answer == answer
    if wide.named:
        assert (comparison.findings, comparison.runs) == (wide, 12)
    else:
        assert comparison.findings == narrow


@pytest.mark.parametrize(
    ("findings", "is_tried"),
    [
        (found(dtype="bfloat16"), True),
        (found(dtype="float32"), False),
        (found(dtype="bfloat16", added=0.0), False),
        (found(dtype="bfloat16", cast="float32 -> bfloat16"), True),
        (found(dtype="bfloat16", label="culprit"), False),
        (found(dtype="bfloat16", not_repeated=["a"]), False),
    ],
)
def test_only_narrow_calls_with_roundings_are_tried_in_float32(findings: Findings, is_tried: bool) -> None:
    runs = Runs(findings)
    runs.judge(held(), held())
    assert runs.in_float32.called is is_tried


def test_a_failure_in_float32_is_reported_by_its_first_line() -> None:
    answer, remarks = judged(held(), held(), found(dtype="bfloat16"), wide=RunError("run 9 failed\nat line 3"))
    assert (answer, remarks) == ("agree", ["Not checked: the same call in float32, which failed: run 9 failed"])


def test_runs_in_float32_end_with_the_narrow_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    session, judge = Mock(ranks=[1, 2], closed=False), Mock(side_effect=RunError("run 9 failed"))
    monkeypatch.setattr(repeats, "judge", judge)
    narrow, wide = {"x": torch.bfloat16}, {"x": torch.float32, "y": torch.float32}
    numbers, narrow_again = OfCall(HeldCall.numbers), OfCall(HeldCall.narrow)
    left = OfCall(HeldCall.left_in_16_bits)
    answers: dict[Any, Any] = {
        numbers: ([{"x": ONES}], [{"x": MANY}]),
        narrow_again: ([None], [None]),
        OfCall(HeldCall.dtypes): ([narrow], [wide]),
        left: ([[]], [[]]),
    }

    def run(baseline: Any, target: Any) -> Any:
        if is_in_float64(baseline):
            # From the same numbers as in float32.
            assert (baseline.args, target.args) == (({}, {}, ()), ({"x": ONES}, narrow, (), moved))
            return SimpleNamespace(baseline=[None], target=[fails_in_float64])
        ours, theirs = answers.get(baseline, ([None], [fails]))
        return SimpleNamespace(baseline=ours, target=theirs)

    session.run.side_effect = run
    session.folder = tmp_path
    moved: set[str] = set()
    fails: str | None = None
    fails_in_float64: str | None = "it has a backward pass"
    with pytest.raises(RunError):
        Repeats(session).in_float32(JudgingChoice(), is_first=True)
    assert judge.call_args.args[1].explain is True
    widened = session.run.call_args_list[2].args
    assert [each.args[:2] for each in widened] == [([{}], {}), ([{"x": ONES}], narrow)]
    assert widened[0].args[2] != widened[1].args[2]
    assert list(tmp_path.iterdir()) == []
    assert session.run.call_args.args == (narrow_again, narrow_again)
    fails = "no tensor of 16 bits was found"
    with pytest.raises(SessionError, match=exactly("target[0]: no tensor of 16 bits was found")):
        Repeats(session).in_float32(JudgingChoice(), is_first=True)
    assert session.run.call_args.args == (narrow_again, narrow_again)
    assert judge.call_count == 1
    # A function's numbers of 16 bits may be out of reach; then its operators compute in float64.
    fails_in_float64 = None
    judge.side_effect = None
    judge.return_value = Verdict(found("a"), 3)
    looked = Repeats(session).in_float32(JudgingChoice(), is_first=True)
    assert looked is not None
    assert looked.findings.looked_in == "float64"
    # Ranks that could run in float32 do not while the others run in float64.
    done = [each.args[0] for each in session.run.call_args_list]
    assert done[next(place for place, each in enumerate(done) if is_in_float64(each)) - 1] == narrow_again
    assert judge.call_args.args[1].floor == DEFAULT_NOISE_FLOOR
    Repeats(session).in_float32(JudgingChoice(floor=1e-3), is_first=True)
    assert judge.call_args.args[1].floor == 1e-3
    assert session.run.call_args.args == (narrow_again, narrow_again)
    # What still rounds to 16 bits, as writes into a cache do, would be taken for a mistake.
    answers[left] = ([[]], [["bfloat16"]])
    with pytest.raises(NoCloserLookError, match=exactly("writes into its tensors round to bfloat16 even then")):
        Repeats(session).in_float32(JudgingChoice(), is_first=True)
    # A rank whose operators cannot run in float64 would keep the others waiting.
    session.run.reset_mock()
    session.ranks = [1, 2, 3]
    answers[numbers] = ([{"x": ONES}], [{"x": MANY}, {"x": ONES}])
    with pytest.raises(SessionError, match=exactly("target[0]: no tensor of 16 bits was found")):
        Repeats(session).in_float32(JudgingChoice(), is_first=True)
    assert session.run.call_args_list[2].args[1].args[0] == [{"x": ONES}, {}]
    assert not any(is_in_float64(call.args[0]) for call in session.run.call_args_list)
    # Ranks without a partner each.
    session.run.reset_mock()
    answers[numbers] = ([{"x": ONES}, {"x": ONES}], [{"x": MANY}] * 4)
    with pytest.raises(NoCloserLookError, match=exactly("the baseline has 2 ranks, and the target 4")):
        Repeats(session).in_float32(JudgingChoice(), is_first=True)
    assert session.run.call_count == 1
    # Nor are constants moved there that are not moved in float32.
    session.ranks, fails_in_float64 = [1, 2], None
    answers[numbers], answers[left], moved = ([{"x": ONES}], [{"x": MANY}]), ([[]], [[]]), {"cos", f"cos{WEIGHT}"}
    Repeats(session).in_float32(JudgingChoice(), is_first=True, rounded_otherwise=["cos"], explain=False)
    assert judge.call_args.args[1].explain is False


def test_state_known_in_float32_is_kept_and_moved_only_with_constants_that_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    third = torch.full((2,), 1 / 3).bfloat16()
    answers: dict[Any, Any] = {
        OfCall(HeldCall.numbers): ([{"x": ONES}], [{"x": ONES, "cache": third}]),
        OfCall(HeldCall.known_state): (
            [KnownState(unchanged=frozenset("x"))],
            [KnownState(unchanged=frozenset("x"), in_float32=frozenset({"cache"}))],
        ),
        # The target has the weight in float32, and by another name.
        OfCall(HeldCall.dtypes): (
            [{f"w{WEIGHT}": torch.bfloat16, f"v{WEIGHT}": torch.float16}],
            [{f"W{WEIGHT}": torch.float32}],
        ),
    }

    def run(baseline: Any, target: Any) -> Any:
        ours, theirs = answers.get(baseline, ([None], [None]))
        return SimpleNamespace(baseline=ours, target=theirs)

    def pairings(side: str, path: str, tags: object) -> list[Any]:
        return [SimpleNamespace(baseline_name="w", target_name="W")] if (side, path) == ("target", "W") else []

    session = Mock(ranks=[1, 2], closed=False, folder=tmp_path, plan=SimpleNamespace(pairings=pairings))
    session.run.side_effect = run
    monkeypatch.setattr(repeats, "judge", Mock(return_value=Verdict(found("a"), 3)))
    for otherwise, moved in (((), set()), (["cos"], {"cos", f"cos{WEIGHT}", "cache"})):
        session.run.reset_mock()
        Repeats(session).in_float32(JudgingChoice(), is_first=False, rounded_otherwise=otherwise)
        (ours, theirs) = next(each.args for each in session.run.call_args_list if isinstance(each.args[0], partial))
        assert (ours.args[:2], ours.args[3:], ours.keywords) == (([{}], {}), (2,), {"kept": frozenset()})
        assert (theirs.args[:2], theirs.args[3:]) == (([{}], {f"W{WEIGHT}": torch.bfloat16}), (2, {"cache"}, moved))


def is_in_float64(each: object) -> bool:
    return isinstance(each, partial) and each.func is widen_operators


def test_constants_of_the_target_alone_have_no_partner_and_other_values() -> None:
    third, half = torch.full((2,), 1 / 3).bfloat16(), torch.full((2,), 0.5).bfloat16()
    ours = {"table": third, "same.name": half, "inv": torch.ones(2)}
    theirs = {"cos": half + 1, "renamed": third, "same.name": half + 2, "wide": torch.ones(2) / 7, "paired": half + 3}
    theirs["fused"] = half + 4
    session = Mock()
    made = SimpleNamespace(baseline=[[False, True]])
    session.run.side_effect = [SimpleNamespace(baseline=[ours], target=[theirs]), made]
    # Without a rule, the plan pairs each name with itself.
    partners = {"paired": ["inv", None]}
    session.plan.pairings.side_effect = lambda side, path, tags: [
        SimpleNamespace(baseline_name=each) for each in partners.get(path, [path])
    ]
    assert Repeats(session).constants_of_target_alone() == ["cos"]
    assert session.plan.pairings.call_args.args[0] == "target"
    # Of the two that are left, one is made of the baseline's weights.
    on_baseline, on_target = session.run.call_args.args
    assert (on_baseline.method.func, on_target) == (HeldCall.are_made_of_own, None)
    assert torch.equal(on_baseline.method.keywords["samples"][1][0], (half + 4)[None])


def test_a_call_computed_in_16_bits_is_looked_at_and_doubtful_if_it_cannot_be() -> None:
    hidden = found("a", computed_in="bfloat16", added=1e-3)
    assert judged(held(), held(), hidden)[0] == "inconclusive"
    agrees = Verdict(found("a", dtype="float64", looked_in="float64", computed_in="bfloat16"), 3)
    assert judged(held(), held(), hidden, wide=agrees)[0] == "agree"
    differs = Verdict(found("a", label="culprit", dtype="float64", looked_in="float64"), 3)
    answer, remarks = judged(held(), held(), hidden, wide=differs)
    assert answer == "differ"
    assert remarks[0] == "In bfloat16 the calls agree to rounding. In float64, from the same numbers, they differ:"
    lost = Verdict(found("a", dtype="float64", looked_in="float64", unexplained=["The returned value differs."]), 3)
    assert judged(held(), held(), hidden, wide=lost)[0] == "differ"
    # Bit-equal calls are right.
    equal = replace(hidden, frame=hidden.frame.assign(added=0.0))
    assert judged(held(), held(), equal)[0] == "agree"
    assert judged(held(), held(), replace(equal, after_taps=1e-3))[0] == "inconclusive"


def test_a_result_in_16_bits_agrees_where_it_is_the_baselines_rounded() -> None:
    exact = torch.tensor([[1 / 3, 0.7, -2.1]])
    both = found("a", dtype="bfloat16", added=1e-3)
    agrees = Verdict(found("a"), 3)
    assert judged(held(exact), held(exact.bfloat16()), both, wide=agrees)[0] == "agree"
    earlier = (exact.bfloat16() * 1.01).bfloat16()
    answer, remarks = judged(held(exact), held(earlier), both, wide=agrees)
    assert answer == "inconclusive"
    assert remarks[0].startswith(
        "Both sides compute in bfloat16, and only the baseline has the returned value in float32"
    )
    # A target in 16 bits is looked at in float32, where the baseline is not.
    cast = found("a", dtype="bfloat16", added=1e-3, cast="float32 -> bfloat16")
    assert judged(held(exact), held(earlier), cast, wide=agrees)[0] == "agree"


# ---- results ---------------------------------------------------------------------------------------------------------


def test_results_that_differ_without_taps_alone_are_a_difference() -> None:
    answer, remarks = judged(held(), held(2 * ONES, tapped={"": ONES}))
    assert answer == "differ"
    assert remarks[0].startswith("Without taps the results differ by 1, and with taps by 0: the difference arises in")
    assert remarks[1] == (
        "Not checked: what the target computes without taps: with them its result changes by 0.5, as where hooks "
        "switch a fused path off."
    )
    # As small as a fused path may differ, too.
    assert judged(held(), held(1.0005 * ONES, tapped={"": ONES}))[0] == "differ"
    # With taps too, so the taps show where.
    assert judged(held(), held(2 * ONES))[1] == []
    # One side alone is moved by taps.
    assert judged(held(), held(0.5 * ONES, tapped={"": ONES}))[0] == "differ"
    # Taps move both sides as far, or leave a difference of that size.
    for ours, theirs in (((2.0, 1.0), (1.5, 1.0)), ((1.0, 2.0), (2.0, 1.0))):
        calls = [held(plain * ONES, tapped={"": tapped * ONES}) for plain, tapped in (ours, theirs)]
        assert judged(*calls)[0] == "agree"


def test_results_decide_where_grafts_prove_nothing() -> None:
    stale = found(inconclusive=["The pairs no longer hold."])
    for target, answer, said in (
        (3 * ONES, "differ", ["The results of the two calls differ by 2."]),
        (1.0001 * ONES, "differ", ["The results of the two calls differ by 0.0001."]),
        (ONES, "inconclusive", []),
    ):
        assert judged(held(), held(target), stale) == (answer, said)
    moved = held(3 * ONES, not_repeated=("x",))
    assert judged(held(), moved, stale)[0] == "inconclusive"
    # The farthest of several results counts.
    ours, theirs = ({"['a']": near * ONES, "['b']": far * ONES} for near, far in ((1.0, 1.0), (1.5, 4.0)))
    sides = (replace(held(), plain=each, tapped=each) for each in (ours, theirs))
    assert judged(*sides, stale) == ("differ", ["The results of the two calls differ by 3."])


def test_results_with_other_parts_do_not_differ_if_pairs_explain_them() -> None:
    ours = {"[0]": ONES[0], "[1]": ONES, "[2]": ONES}
    theirs = {"[0]": ONES[:, :2], "[1]": ONES}
    sides = [replace(held(), plain=NamedTensors(each), tapped=NamedTensors(each)) for each in (ours, theirs)]
    with_inputs, match = found("x@input", "a", "output"), Proposal((Pair("a", "a"),))
    answer, remarks = judged(*sides, with_inputs, match=match)
    assert (answer, len(remarks)) == ("differ", 1)
    assert remarks[0].startswith("The returned value [0] has the shape")
    runs = Runs(with_inputs, match=match, pairs=[PairRule("actor", "output[0]"), PairRule("output[2]", "output[1]")])
    assert runs.judge(*sides).remarks == ()


def test_results_of_other_shapes_differ_if_the_inputs_are_equal() -> None:
    said = "The returned value has the shape [4, 3] on the baseline and [4, 2] on the target."
    with_inputs = found("x@input", "a", "output")
    narrower = held(ONES[:, :2])
    proposal = Proposal((Pair("a", "a"),))
    assert judged(held(), narrower, with_inputs, match=proposal) == ("differ", [said])
    answer, remarks = judged(held(), narrower, found("a", "output"), match=proposal)
    assert (answer, remarks) == ("inconclusive", [said])
    # A match may have found the layout.
    flat = held(ONES.reshape(12))
    assert judged(held(), flat, with_inputs, match=proposal)[1] == []
    # Different numbers of ranks may each have a part.
    assert judged(held(), [narrower, narrower], with_inputs)[1] == []
    # Other numbers of rows with other inputs: another batch.
    smaller = Runs(found(), match=proposal).judge(held(), held(ONES[:2]))
    remarks = [*smaller.remarks]
    assert (smaller.answer, smaller.has_other_batch) == ("inconclusive", True)
    assert remarks[0].startswith("The calls have batches of different sizes, 4 on the baseline and 2 on the target")
    assert not Runs(found("a", "output"), match=proposal).judge(held(), narrower).has_other_batch
    # Code that differs from equal values does so in any batch.
    named = Runs(found("a", label="culprit"), match=proposal).judge(held(), held(ONES[:2]))
    assert (named.answer, named.has_other_batch) == ("differ", False)
    assert named.remarks == ("The returned value has the shape [4, 3] on the baseline and [2, 3] on the target.",)
    # An input that is a part of the other side's: as where one side computes both halves of a batch in turn.
    row = PairRule("x[kind=input]", "z[kind=input]", "part(0, of=[2, 2])")
    with_inputs.frame["name"] = [name.removesuffix("@input") for name in with_inputs.frame["name"]]
    for pairs in ([], [replace(row, baseline="a", target="a")]):
        assert judged(held(), held(ONES[:2]), with_inputs, match=proposal, pairs=pairs)[0] == "differ"
    assert judged(held(), held(ONES[:2]), with_inputs, match=proposal, pairs=[row]) == ("inconclusive", remarks)


def test_results_of_calls_with_other_tokens_prove_nothing_unless_code_is_named() -> None:
    rows = PairRule("input.ids", "input.ids", "gather(of=[4], runs=[[3, 1], [0, 3]], into=[4])")
    proposal = Proposal((Pair("a", "a"),))
    step, chunk = (
        held(each * ONES, whole_numbers={"['ids']": torch.tensor(ids)})
        for each, ids in ((1, [41, 52, 63]), (2, [7, 8, 9, 10, 11]))
    )
    unexplained = found(unexplained=["The returned value differs."])
    compared = Runs(unexplained, match=proposal, pairs=[rows]).judge(step, chunk)
    assert (compared.answer, compared.has_other_batch) == ("inconclusive", True)
    assert compared.remarks[0].startswith("The calls are given different tokens, 3 on the baseline and 5 on the target")
    named = Runs(found(label="culprit"), match=proposal, pairs=[rows]).judge(step, chunk)
    assert (named.answer, named.has_other_batch) == ("differ", False)
    # So do weights that differ.
    apart = Runs(found(data=["The weights already differ."]), match=proposal, pairs=[rows]).judge(step, chunk)
    assert (apart.answer, apart.has_other_batch) == ("differ", False)
    # Where rows keep their places, the sides are given the same batch.
    assert Runs(unexplained, match=proposal).judge(step, chunk).answer == "differ"


def test_taps_clear_nothing_if_no_result_was_compared() -> None:
    answer, remarks = judged(held(plain={}, tapped={}), held(plain={}, tapped={}))
    assert answer == "inconclusive"
    assert remarks == [
        "The results of the two calls could not be compared, so the taps that agree do not clear the target."
    ]
    # The model's output is among the taps.
    assert judged(held(plain={}), held(plain={}), found("a", "net.output"))[0] == "agree"


def test_what_was_not_compared_is_listed() -> None:
    written = {"plain": {"": ONES, "written: cache": ONES}}
    ours = held(not_compared=("p", "q", "p"), others={"Head": 1, "Tail": 3}, **written)
    theirs = held(not_compared=("r", "s", "t"), tapped={"": 1.5 * ONES})
    _, remarks = judged(ours, theirs)
    assert remarks == [
        "Not checked: p, q, r and 2 more: it is large, or not the same when the call is repeated.",
        "Not checked: what only the baseline's call writes, to cache.",
        "Not checked: other models that the baseline has called: Head (1 call), Tail (3 calls); --model NAME chooses "
        "one.",
        "Not checked: what the target computes without taps: with them its result changes by 0.5, as where hooks "
        "switch a fused path off.",
    ]


def test_a_backward_pass_is_included_or_its_absence_explained() -> None:
    after = "the loss and the optimizer's step, which may follow this call."
    needs = held(needs_backward=True)
    for target, fails, said in (
        (needs, None, None),
        (needs, "no loss", "the backward pass, which could not be repeated (no loss)."),
        (held(), None, "the backward pass: the results of one side alone need gradients."),
        (
            held(torch.ones(2, 2), needs_backward=True),
            None,
            "the backward pass: results of different shapes have no gradients in common.",
        ),
    ):
        runs = Runs(found(), match=Proposal(()))
        runs.add_backward.return_value = fails
        expected = [f"Not checked: {each}" for each in (said, after) if each is not None]
        assert [each for each in runs.judge(needs, target).remarks if "backward" in each or after in each] == expected
        assert runs.add_backward.called is (said is None or "repeated" in said)
    # Several ranks of the target may have parts of a gradient, if there is one.
    for target, may_have in (([needs], False), ([needs, needs], True), ([held(), held()], False)):
        runs = Runs(found(), match=Proposal(()))
        runs.judge(needs, target)
        assert runs.verdict.call_args.kwargs == {"gradient_parts": may_have}


# ---- a compiled form ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("findings", "untapped", "answer"),
    [
        (found("a", "b"), 1e-7, "agree"),
        # Fused code is wrong only without taps in its graph, where no row shows it.
        (found("a", "b"), 6e-7, "differ"),
        (found("a", label="culprit"), 1e-7, "differ"),
        (found("a", "b"), float("nan"), "inconclusive"),
        # A form that does not repeat itself shows nothing.
        (found("a", "b", not_repeated=["a"]), 6e-7, "inconclusive"),
    ],
)
def test_a_compiled_form_is_judged_by_its_result_without_taps_too(
    findings: Findings, untapped: float, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = SimpleNamespace(verdict=Verdict(findings, 3), untapped=untapped, floor=1e-7)
    session = Mock()
    session.compare_compiled.return_value = compiled
    launched = Mock(return_value=session)
    monkeypatch.setattr(functions, "launch", launched)
    where = {"device": "cpu", "timeout": 9.0, "folder": "here"}
    made = compare_with_compiled(FunctionInFile("a.py", "f"), None, {"backend": "eager"}, threshold=5.0, **where)
    assert made == (session, compiled, answer)
    assert launched.call_args == call(baseline=1, target=1, **where)
    # Both sides hold the function's call before it is judged.
    (defined,) = {*session.run.call_args.args}
    assert (defined.func, defined.args) == (define_call, (FunctionInFile("a.py", "f"), None, None))
    assert [name for name, *_ in session.mock_calls] == ["run", "compare_compiled"]
    assert session.compare_compiled.call_args == call(functions.CALL, threshold=5.0, backend="eager")
    session.close.assert_not_called()
    session.compare_compiled.side_effect = RunError("run 1 failed")
    with pytest.raises(RunError):
        compare_with_compiled(FunctionInFile("a.py", "f"), None, {})
    session.close.assert_called_once_with()


# ---- against a recording ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("taps", "match", "is_matched"),
    [(("a", "b"), None, False), (("a", "b"), True, True), (("x",), None, True), (("x",), False, False)],
)
def test_a_recording_is_matched_and_its_sketches_are_named(
    taps: tuple[str, ...], match: bool | None, is_matched: bool
) -> None:
    session = Mock(frame=NO_ROWS)
    recording = Mock(frame=pd.DataFrame({"name": ["a", "b"], "shape": [(2,)] * 2}), sketched=["s", "t"])
    session.verdict.return_value = Verdict(found("a", "output"), 3)
    target = held(taps=taps, others={"Head": 2})
    choice = JudgingChoice(match, output="o", floor=0.1, threshold=7.0)
    comparison = judge_against_recording(session, recording, [target], choice)
    assert session.verdict.mock_calls == [call(target=repeat_call, output="o", floor=0.1, threshold=7.0)]
    assert session.match.mock_calls == ([call(recording, repeat_call)] if is_matched else [])
    assert comparison.match is (session.match.return_value if is_matched else None)
    assert session.edit.mock_calls == ([call(pairs=comparison.match)] if is_matched else [])
    assert (comparison.answer, comparison.runs) == ("agree", 3)
    assert comparison.remarks[0].startswith("Not checked: the single values of s, t: the recording has only")
    assert comparison.remarks[1].startswith("Not checked: other models that the target has called: Head (2 calls)")
    again = judge_against_recording(session, recording, [replace(target, not_repeated=("x",))], choice)
    assert again.answer == "inconclusive"
    assert again.remarks[0].startswith("The target's call of Net cannot be replayed")


@pytest.mark.parametrize(("output", "answer"), [("head", "agree"), (None, "inconclusive")])
def test_a_named_output_of_a_recording_clears_the_target_without_a_tap_of_that_name(
    output: str | None, answer: str
) -> None:
    session = Mock(frame=NO_ROWS)
    recording = Mock(frame=pd.DataFrame({"name": ["a", "head"], "shape": [(2,)] * 2}), sketched=[])
    session.verdict.return_value = Verdict(found("a", "head"), 1)
    choice = JudgingChoice(output=output)
    comparison = judge_against_recording(session, recording, [held(taps=("a", "head"))], choice)
    assert comparison.answer == answer
    assert any(each.startswith("No recorded value is known to be") for each in comparison.remarks) == (output is None)


@pytest.mark.parametrize(("shape", "is_other"), [((1, 8), False), ((1, 1), False), ((1, 9), True)])
def test_an_input_that_no_call_of_the_target_has_in_its_shape_is_named(shape: tuple[int, int], is_other: bool) -> None:
    inputs = [{"name": "ids", "side": "target", "tags": {"kind": "input"}, "shape": each} for each in ((1, 8), (1, 1))]
    # The baseline's own rows are those of the recording.
    session = Mock(frame=pd.DataFrame([*inputs, {**inputs[0], "side": "baseline", "shape": (1, 9)}]))
    recorded = pd.DataFrame({"name": ["ids", "a"], "shape": [shape, (2,)]})
    session.verdict.return_value = Verdict(found("a", "head"), 1)
    comparison = judge_against_recording(session, Mock(frame=recorded, sketched=[]), [held()], JudgingChoice())
    said = [each for each in comparison.remarks if "so they do different work" in each]
    assert bool(said) == is_other
    assert not said or said[0].startswith("The recorded call has ids of shape [1, 9], and the target's call [1, 1],")


@pytest.mark.parametrize("own", [("bfloat16", 2e-3), ("bfloat16", 0.0), None])
def test_a_target_in_16_bits_is_held_to_its_own_rounding_by_a_recording(own: Any) -> None:
    session = Mock(frame=NO_ROWS)
    recording = Mock(frame=pd.DataFrame({"name": ["a", "head"], "shape": [(2,)] * 2}), sketched=[])
    far, near = Verdict(found("a", "head", label="culprit", added=2e-3), 3), Verdict(found("a", "head"), 3)
    session.verdict.side_effect = [far, near]
    session.run.return_value = SimpleNamespace(target=[own])
    comparison = judge_against_recording(session, recording, [held(taps=("a", "head"))], JudgingChoice(output="head"))
    assert session.run.call_args.kwargs == {"target": OfCall(HeldCall.own_rounding)}
    assert comparison.answer == ("inconclusive" if own else "differ")
    # Results that show no rounding of their own are held to the usual floor.
    floors = [own[1] or DEFAULT_NOISE_FLOOR] if own else []
    assert [each.kwargs["floor"] for each in session.verdict.mock_calls] == ["auto", *floors]
    how_far = f"computes in bfloat16: its results differ by up to {own[1]:.2g} (rel_l2) from" if own else "computes in"
    assert any(how_far in each for each in comparison.remarks) == bool(own)


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (KeyboardInterrupt(), ComparisonStopped),
        (SystemExit(), SystemExit),
        (RunError("it died"), RunError),
        (None, None),
    ],
)
def test_a_comparison_that_ends_early_leaves_no_session(
    error: BaseException | None, raised: type[BaseException] | None
) -> None:
    session = Mock()
    with contextlib.nullcontext() if raised is None else pytest.raises(raised), functions._closed_on_failure(session):
        if error is not None:
            raise error
    assert session.close.called is (error is not None)


def test_weights_are_tapped_unless_the_baseline_is_a_recording_which_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each weight would be listed as a tap that the recording lacks."""
    session = Mock()
    monkeypatch.setattr(functions, "launch", lambda **options: session)
    monkeypatch.setattr(functions, "judge_against_recording", Mock())
    monkeypatch.setattr(functions, "judge_held_calls", Mock())
    monkeypatch.setattr(functions, "described", lambda run: ([], []))
    recording = Mock(spec=RecordedSide, frame=pd.DataFrame({"name": ["a"]}))
    functions.compare(recording, print)
    assert session.run.call_args.kwargs["target"].args[2].params is False
    functions.compare(print, print)
    assert [each.args[2].params for each in session.run.call_args.args] == [True, True]
    recording.frame = recording.frame.iloc[:0]
    with pytest.raises(RecordingError, match="has nothing to compare with"):
        functions.compare(recording, print)


def test_functions_run_where_and_as_long_as_is_said_and_scripts_ten_minutes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched = Mock(side_effect=RunError("not launched"))
    monkeypatch.setattr(functions, "launch", launched)
    with pytest.raises(RunError):
        functions.compare(print, print, device="cuda:1", timeout=7.0, folder="runs")
    launched.assert_called_once_with(baseline=1, target=1, device="cuda:1", timeout=7.0, folder="runs")
    compared = Mock()
    monkeypatch.setattr(functions, "compare_scripts", compared)
    for given, limit in ((7.0, 600.0), (900.0, 900.0)):
        functions.compare("python a.py", "python b.py", timeout=given, folder="runs", threshold=9.0)
        choice = compared.call_args.args[2]
        assert (choice.settings.timeout, choice.folder, choice.judging.threshold) == (limit, "runs", 9.0)


def single_tap_apart() -> Findings:
    """Findings of bfloat16 in which one layer of three is not bit-equal."""
    findings = found("l.*.o", "l.*.o", "l.*.o", "output", dtype="bfloat16", added=0.0)
    findings.frame["name"], findings.frame["added"] = ["l.0.o", "l.1.o", "l.2.o", "output"], [0.0, 1e-3, 0.0, 0.0]
    return findings


def test_a_single_tap_that_is_not_bit_equal_is_not_cleared_without_a_look_in_float32() -> None:
    session = Mock(frame=NO_ROWS)
    recording = Mock(frame=pd.DataFrame({"name": ["a", "b"], "shape": [(2,)] * 2}), sketched=[])
    session.verdict.return_value = Verdict(single_tap_apart(), 3)
    comparison = judge_against_recording(session, recording, [held()], JudgingChoice())
    assert comparison.answer == "inconclusive"
    assert comparison.remarks[0].startswith("l.1.o is not bit-equal from equal inputs, and the other 3 taps of bfloat1")
    answer, remarks = judged(held(HALF), held(HALF), single_tap_apart())
    assert (answer, remarks[0]) == ("inconclusive", "Not checked: the same call in float32: no reason.")
    assert remarks[1].partition(" ")[0] == "l.1.o"
    wide = Verdict(found("l.*.o", "output"), 2)
    assert judged(held(HALF), held(HALF), single_tap_apart(), wide=wide) == ("agree", [])
    # Of several ranks too, if they could not be looked at, as the stages of a pipeline.
    several = [held(HALF), held(HALF)]
    assert judged(held(HALF), several, single_tap_apart(), wide=SessionError("no"))[0] == "inconclusive"
    assert judged(held(HALF), several, single_tap_apart(), wide=wide)[0] == "agree"


def test_a_tap_that_stands_out_is_not_cleared_without_a_look_in_float32() -> None:
    doubtful = replace(
        found("o", "output", dtype="bfloat16", added=1e-2), rounding=RoundingGroups(stands_out="o adds far more.")
    )
    assert judged(held(HALF), held(HALF), doubtful)[0] == "inconclusive"
    wide = Verdict(found("o", "output"), 2)
    assert judged(held(HALF), held(HALF), doubtful, wide=wide)[0] == "agree"
    # The rounding of one side's numbers, which both have in float32, may be the mistake.
    doubtful.frame["cast"] = "float32 -> bfloat16"
    assert judged(held(HALF), held(HALF), doubtful, wide=wide)[0] == "inconclusive"


def test_inputs_of_another_shape_than_the_recorded_ones_come_first() -> None:
    recorded = pd.DataFrame({"name": ["input.t", "output"], "shape": [(2, 7), (2, 7, 3)]})
    session, recording = Mock(), Mock(frame=recorded.assign(name=["input.t", "b"]), sketched=[])
    session.frame = pd.DataFrame(
        {"name": ["input.t"], "side": ["target"], "tags": [{"name": "input.t", "kind": "input"}], "shape": [[2, 9]]}
    )
    session.verdict.return_value = Verdict(found("a", ratio=float("nan")), 3)
    comparison = judge_against_recording(session, recording, [held(taps=("input.t", "b"))], JudgingChoice())
    assert comparison.answer == "inconclusive"
    assert comparison.remarks[0].startswith(
        "The recorded call has input.t of shape [2, 7], and the target's call [2, 9]"
    )


@pytest.mark.parametrize(("dtype", "padding"), [(torch.int64, 0), (torch.bool, 0), (torch.int64, 7)])
def test_a_difference_in_padding_alone_is_stated_first(dtype: torch.dtype, padding: int) -> None:
    mask = torch.tensor([[padding, 1, 1], [1, 1, 1]]).to(dtype)
    ours = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    theirs, elsewhere = ours.clone(), ours.clone()
    theirs[0, 0] += 1
    elsewhere[1, 0] += 1
    given = held(whole_numbers={"['attention_mask']": mask, "['ids']": torch.arange(6).reshape(2, 3)})

    def said(given: Any = given, target: Any = None, **pairs: torch.Tensor | None) -> list[str]:
        shown = {
            name: ShownMap(
                name,
                difference_map(ours, ours if other is None else other),
                pair=None if other is None else (ours, other),
            )
            for name, other in pairs.items()
        }
        findings = replace(found(*pairs, label="culprit"), maps=shown)
        return [each for each in judged(given, target or given, findings)[1] if "masks by zeros" in each]

    # The target may pack its rows, and have no mask.
    (sentence,) = said(attn=theirs, target=held()) or [""]
    if padding:
        # Numbers other than zeros and ones are no mask.
        assert sentence == ""
        return
    assert sentence.startswith("Where the groups named below differ most, only rows that attention_mask masks by zeros")
    assert said(attn=elsewhere) == []
    assert said(attn=theirs, ffn=elsewhere) == []
    assert said(attn=theirs, ffn=None) == []
    # Zeros mean other things elsewhere: tokens of the first segment, or no padding.
    for name in ("token_type_ids", "key_padding_mask", "loss_mask"):
        assert said(held(whole_numbers={f"['{name}']": mask}), attn=theirs) == []
