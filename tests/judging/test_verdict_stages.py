"""What a verdict makes of the results of its stages: which of them run, and what reaches the findings."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from kit.verdict_stages import JOBS, Made, naming

from graftlab.comparison.answers import answer_of
from graftlab.judging import judgement
from graftlab.verdict.causes import Causes
from graftlab.verdict.first_step import NOT_JUDGED_SINCE, FirstDifference
from graftlab.verdict.quantised_modules import QuantisedModules
from graftlab.verdict.rounds_differently import LABEL, RoundingGroups


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    return Made(monkeypatch)


REPAIRED = Causes({"b": "culprit"})


def test_whatever_the_stages_find_reaches_the_findings(made: Made) -> None:
    made.naming = replace(
        made.naming, unseen=["unseen"], data=["data"], following=["d"], inputs=["c"], maybe_explained=["maybe"]
    )
    verdict = made.verdict()
    found: Any = verdict.findings
    assert (verdict.runs, found.threshold, found.target_ranks) == (7, 5.0, 2)
    assert found.remarks == ["of causes", "masked", "written", "held", "of lines"]
    assert found.may_be_inherited == ["free: b, c", "unread"]
    assert found.hints == {"w": "a hint at weights", "b": "a hint"}
    assert found.maps == {"w": "a map of weights", "b": "a map"}
    assert (found.unseen, found.data, found.following, found.inputs) == (["unseen"], ["data", "maybe"], ["d"], ["c"])
    assert (found.weights, found.weights_lent) == ({"w": "differs"}, False)
    assert (found.unexplained, found.without_output) == (["unexplained"], ["without output"])
    assert (found.not_grafted, found.extra_calls) == (["not grafted"], ["extra calls"])
    assert (found.pairing_advice, found.only_before) == ("pair, jobs: False", {"b": "only before"})
    assert (found.origins, found.lines, found.failed) == ("origins", ["a line"], [])
    assert (found.job_remarks, found.raised, found.only_returned) == (None, None, False)
    assert made.asked == [
        "target",
        ("unexplained", True, ("varies",)),
        # A function may have computed its model's inputs itself.
        ("trace", ("b", "c"), "kept"),
        ("pairs", "rows"),
        "confirm",
        "hints",
    ]


def test_of_jobs_only_what_was_measured_in_their_steps_is_reported(made: Made) -> None:
    made.naming = replace(made.naming, job_remarks=JOBS, not_repeated=["b"], target_not_repeated=["c"], inputs=["c"])
    found = made.verdict().findings
    assert found.job_remarks == JOBS
    assert "of jobs" in found.remarks
    assert (found.not_repeated, found.target_not_repeated, found.weights) == ((), (), {})
    assert found.pairing_advice == "pair, jobs: True"
    # Lines are found in one step of jobs, whether or not it repeats; hints need pairs of equal steps.
    assert "hints" not in made.asked
    assert "confirm" in made.asked
    # The data of jobs comes from their own loops.
    assert ("trace", ("b",), "kept") in made.asked
    made.naming = naming((), job_remarks=JOBS)
    assert "of jobs" not in made.verdict().findings.remarks
    made.runs.recorded = True
    found = made.verdict().findings
    assert found.target_not_repeated == ["varies"]
    assert found.pairing_advice == "pair, jobs: False"


def test_before_nothing_is_named_the_target_runs_again_and_its_memory_is_checked(made: Made) -> None:
    made.naming = naming(())
    made.runs.target_against_itself = lambda: made.note("target", ["varies anyway"])
    made.runs.unwritten_memory = lambda: made.note("memory", ["h"])
    found = made.verdict().findings
    # A value that varies on the baseline too says nothing about the target.
    assert made.asked == ["target", ("unexplained", True, ()), "memory"]
    assert found.target_not_repeated == []
    assert found.without_output == ["without output", "reads unwritten h"]
    assert found.remarks == ["of causes", "masked", "written", "unequal weights", "held"]
    assert (found.hints, found.lines) == ({"w": "a hint at weights"}, [])
    assert made.runs.expected == 0
    made.asked.clear()
    made.runs.target_against_itself = lambda: made.note("target", ["varies"])
    found = made.verdict().findings
    assert made.asked == ["target", ("unexplained", True, ("varies",))]
    assert found.target_not_repeated == ["varies"]


def test_a_verdict_that_explains_runs_the_target_again_and_expects_its_runs(made: Made) -> None:
    made.verdict()
    assert made.runs.expected == 7 + 2 + judgement._RUNS_OF_NAMED
    assert made.asked[0] == "target"
    made.asked.clear()
    made.naming = naming()
    made.runs.request.explain = False
    found = made.verdict().findings
    # Nothing is cleared and nothing is explained.
    assert made.asked == [("unexplained", True, ())]
    assert (found.lines, found.hints) == ([], {"w": "a hint at weights"})


def test_calls_that_were_left_out_are_taps_too(made: Made) -> None:
    made.evidence = replace(made.evidence, compared=made.evidence.compared.iloc[:0])
    made.verdict()
    made.split = {"q": ["q"]}
    found = made.verdict().findings
    assert [each[1] for each in made.asked if each[0] == "unexplained"] == [False, True]
    assert found.only_returned
    assert found.unseen == ["not paired: q"]


def test_weights_that_the_target_had_from_the_baseline_are_reported_as_such(made: Made) -> None:
    made.lent = made.evidence.compared
    assert made.verdict().findings.weights_lent


def test_after_an_exception_taps_of_one_side_are_no_extra_calls(made: Made) -> None:
    made.runs.raised = SimpleNamespace(sentence="The target raises.")
    found = made.verdict().findings
    assert (found.raised, found.extra_calls) == ("The target raises.", [])


@pytest.mark.parametrize("restored", [(0.5, 9.0), (9.0, 0.5), (0.5, 0.5), ()])
def test_data_are_said_to_explain_a_difference_unless_swaps_explain_each_output(
    restored: tuple[float, ...], made: Made
) -> None:
    made.causes = {f"output {n}": replace(REPAIRED, restored=each) for n, each in enumerate(restored)}
    assert all(each.limit == 5.0 for each in made.causes.values())
    made.naming.maybe_explained = ["maybe"]
    assert made.verdict().findings.data == ([] if restored == (0.5, 0.5) else ["maybe"])


def test_a_given_floor_leaves_unexplained_results_beside_quantised_modules_doubtful(made: Made) -> None:
    made.naming = naming((), maybe_explained=["maybe"], quantised=QuantisedModules(text=("Quantised.",)))
    made.runs.request.constant_floor = 0.05
    found = made.verdict().findings
    assert (found.quantised, "Quantised." in found.remarks, "maybe" in found.remarks) == (["maybe"], True, False)
    alone = replace(found, unexplained=[], without_output=[], target_not_repeated=[], not_grafted=[], extra_calls=[])
    assert answer_of(alone, trusted=True, results_compared=True) == "inconclusive"


def test_results_that_differ_each_time_have_hints_only_where_swaps_found_a_cause(made: Made) -> None:
    made.naming.not_repeated = ["b"]
    made.verdict()
    assert "hints" not in made.asked
    assert "confirm" not in made.asked
    made.causes = {"out": REPAIRED}
    found = made.verdict().findings
    assert "hints" in made.asked
    assert (found.not_repeated, found.causes) == (["b"], made.causes)


def test_values_that_round_differently_have_that_label_where_they_differ(made: Made) -> None:
    made.rounding = RoundingGroups(("a", "b"))
    verdict = made.verdict()
    assert verdict.findings.rounding is made.rounding
    frame = verdict.frame
    assert dict(zip(frame["group"], frame["label"] == LABEL, strict=True)) == {
        "a": False,
        "b": True,
        "c": False,
        "d": False,
    }
    # They are no mistake, so no line is sought.
    assert ("trace", ("c",), "kept") in made.asked


def test_a_group_that_its_lines_explain_needs_no_excuse(made: Made) -> None:
    made.explained = {"b"}
    assert made.verdict().findings.may_be_inherited == ["free: c", "unread"]


def test_a_cut_graph_may_explain_what_is_named(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judgement, "cut_graphs", lambda compared, named: [f"cut before {', '.join(named)}"])
    assert made.verdict().findings.may_be_inherited == ["free: b, c", "cut before b, c", "unread"]


@pytest.mark.parametrize("stage", ["trace", "pairs", "confirm", "hints", "target"])
def test_a_stage_that_fails_leaves_the_results_of_the_others(stage: str, made: Made) -> None:
    made.raising = {stage}
    found: Any = made.verdict().findings
    (said,) = found.failed
    assert "a rank died" in said
    assert found.lines == ["a line"]
    assert "confirm" in made.asked
    assert ("b" in found.hints) is (stage != "hints")


def test_steps_that_do_not_correspond_allow_no_conclusion(made: Made) -> None:
    made.runs.misaligned_steps = lambda rows: SimpleNamespace(sentence="The sides are in different steps.")
    verdict = made.verdict()
    assert (verdict.findings.inconclusive, verdict.named) == (["The sides are in different steps."], [])
    assert set(verdict.frame["label"]) == {"unmeasured"}
    assert (verdict.runs, verdict.findings.target_ranks, made.asked) == (7, 2, [])
    made.runs.misaligned_steps = lambda rows: made.note("misaligned", None)
    made.raising = {"misaligned"}
    made.naming.unseen = ["unseen"]
    made.runs.first_difference = lambda floors: FirstDifference(3, "First in step 3.", is_update=True)
    made.naming.job_remarks = JOBS
    found = made.verdict().findings
    assert found.inconclusive == [f"First in step 3. {NOT_JUDGED_SINCE}"]
    assert (found.unseen, len(found.failed)) == (["unseen"], 1)


def test_the_first_step_that_differs_comes_before_other_remarks_on_jobs(made: Made) -> None:
    made.runs.first_difference = lambda floors: FirstDifference(3, "First in step 3.", is_update=False)
    assert made.verdict().findings.job_remarks is None
    made.naming.job_remarks = JOBS
    found = made.verdict().findings.job_remarks
    assert found is not None
    assert found.first == ("First in step 3.", "the first")
    # With the baseline's weights in each step, what an update did no longer counts.
    made.runs.first_difference = lambda floors: FirstDifference(3, "First in step 3.", is_update=True)
    made.runs.request.graft_weights = True
    made.naming.job_remarks = JOBS
    assert made.verdict().findings.inconclusive == ()


def test_pairs_that_no_longer_hold_are_said_of_what_is_named_or_allow_no_conclusion(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judgement, "outdated_pairs", lambda rows, plan, given: ["p"])
    assert "no longer equal: ['p']" in made.verdict().findings.remarks
    monkeypatch.setattr(judgement, "learned_from_other_code", lambda found: "Learned from other code.")
    assert made.verdict().findings.inconclusive == ["Learned from other code."]
    monkeypatch.setattr(judgement, "learned_from_other_code", lambda found: "")
    made.naming = naming(())
    assert not any("no longer" in each for each in made.verdict().findings.remarks)


def test_returned_values_and_parts_of_gradients_reach_the_findings(made: Made) -> None:
    def returned(most: float) -> Any:
        own = ["varies anyway"]
        return SimpleNamespace(compared=True, most=lambda leave: most if leave == own else -1.0, differences=())

    made.parts = {"w@param_grad": ["w"]}
    made.evidence = replace(made.evidence, returned=returned(0.5), returned_grafted=returned(0.25))
    found = made.verdict().findings
    assert (found.after_taps, found.gradient_parts) == (0.25, ["w@param_grad"])
    # The grafted run failed.
    made.evidence = replace(made.evidence, returned_grafted=None)
    assert made.verdict().findings.after_taps == 0.5
    made.evidence = replace(made.evidence, returned=None)
    assert made.verdict().findings.after_taps == 0.0
