"""The comparison of a call that both sides hold: matches if names do not pair, judges, and concludes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import pandas as pd

from graftlab.base.tap_groups import is_output, kind_of_group
from graftlab.base.text import counted, first_of
from graftlab.comparison.answers import NOT_COMPARED, Comparison, ReasonedAnswer, answer_of, is_beyond_rounding
from graftlab.comparison.call_remarks import (
    AFTER_CALL,
    ARGUMENT,
    difference_without_taps,
    differing_numbers,
    in_padding,
    in_training_alone,
    not_checked,
    not_trusted,
    rounds_earlier,
)
from graftlab.comparison.closer_look import CloserLook, in_more_bits
from graftlab.comparison.equal_rows import have_equal_rows, have_no_near_rows
from graftlab.comparison.inherited_rounding import InheritedRounding
from graftlab.comparison.orders_of_parts import differences_in_order, in_words, order_of_parts
from graftlab.comparison.other_work import given_equal_tokens, other_batch, other_tokens
from graftlab.comparison.repeats import JudgingChoice, Repeats
from graftlab.control.verdicts import Verdict
from graftlab.diffs.results import values_of_other_shapes
from graftlab.diffs.rounding import roundoff
from graftlab.errors import MatchError
from graftlab.layouts.regroup import Regroup
from graftlab.matching.names import words_of
from graftlab.matching.pair import Pair
from graftlab.matching.proposal import Proposal
from graftlab.matching.rounds import INTERRUPTED
from graftlab.plan.pairs import PairRule, TapCallName, outputs_move_rows
from graftlab.ranks.call_description import CallDescription
from graftlab.ranks.holding import repeat_call
from graftlab.verdict.findings import Findings
from graftlab.verdict.model_data import BEGINNINGS
from graftlab.verdict.returned_values import BY_PLACE, compare_returned, of_other_taps, without_places
from graftlab.verdict.rounds_differently import sentence_on_single_taps
from graftlab.verdict.wording import NOT_CHECKED

# If a smaller share of taps (of the side with fewer) has a partner of the same name, taps are matched by value.
_ENOUGH = 0.8
_PAIRS_ALONE = (
    "All that was compared agrees, the output too, but pairs contradict their names or each other (below): if they are "
    "wrong, a mistake may show only from other inputs."
)
_NO_ROW = (
    "Both calls are given the same tokens, and no row of the one result is near any row of the other, so they differ "
    "whatever the order of their rows."
)
_OTHER_PLACES = (
    "The sides return different numbers of values ({} and {}), so {place} may not be the same value on both sides."
)
# Shorter words, such as indices, begin many others.
_LEAST_WORD = 3
_MOST_WEIGHTS = 4
"""The most sentences on weights that have another weight's values."""


def judge_held_calls(
    repeats: Repeats,
    baseline: Sequence[CallDescription],
    target: Sequence[CallDescription],
    choice: JudgingChoice,
    proposal: Proposal | None = None,
    inherited: InheritedRounding | None = None,
) -> Comparison:
    """Judge the calls that both sides hold, by their ranks' descriptions.

    ``proposal`` has the pairs of an earlier call, which are in force, and ``inherited`` what rounding moved in it.
    """
    if any(each.raises for each in (*baseline, *target)):
        return judge_until_exception(repeats, baseline, target, choice)
    remarks, earlier = list(not_trusted(baseline, target)), proposal
    proposal, unpaired = _paired(repeats, baseline, target, choice, proposal)
    remarks += unpaired
    backward = _add_backward(repeats, baseline, target)
    judge = partial(
        repeats.verdict, choice, gradient_parts=len(target) > 1 and any(call.needs_backward for call in target)
    )
    verdict = judge()
    by_place = _results_differ_by_place(baseline, target, verdict.findings) if proposal is None else []
    if choice.match is None and by_place and len(by_place) == len(verdict.findings.named):
        with suppress(MatchError):
            proposal = _matched(repeats, target)
            verdict = judge()
    by_chance: list[str] = []
    if earlier is not None and proposal is not None and not remarks:
        verdict, proposal, by_chance = _without_pairs_by_chance(repeats, verdict, judge, proposal)
    if inherited is not None:
        verdict = replace(verdict, findings=inherited.without_earlier_results(verdict.findings))
    trusted, look = not remarks, CloserLook(verdict)
    if trusted:
        is_first = all(each.number <= 1 for each in (*baseline, *target))
        unnamed = {*baseline[0].values} - {*target[0].values}
        look = in_more_bits(repeats, verdict, choice, proposal, is_first, unnamed)
        remarks += look.said
    verdict = look.verdict
    findings, pairs = verdict.findings, repeats.session.plan.pairs
    may_be = look.may_be_rounding
    conclusion = _conclude(baseline, target, findings, pairs, choice.threshold, proposal, trusted, may_be)
    conclusion.doubt(look.doubt)
    differ = conclusion.answer == "differ"
    if proposal is not None:
        remarks += [f"{each}." for each in proposal.wrong_weights[:_MOST_WEIGHTS]]
        # Code that agrees may read its weights in any order.
        remarks += [f"{each}." for each in proposal.odd_orders[:_MOST_WEIGHTS] if differ]
    agrees_else = trusted and answer_of(replace(findings, without_output=()), True, True) == "agree"
    lacks_result = agrees_else and conclusion.answer == "inconclusive" and conclusion.reasons == [NOT_COMPARED]
    remarks += conclusion.reasons
    remarks[:0] = _in_order_of_parts(baseline, target, choice.threshold, conclusion, findings.data)
    if differ and by_place and proposal is None:
        counts = [len(call.returned) for call in (baseline[0], target[0])]
        remarks.append(_OTHER_PLACES.format(*counts, place=first_of(by_place)))
    if differ:
        remarks += [*in_training_alone(baseline[0], target[0]), *differing_numbers(baseline, target)]
        remarks += in_padding(baseline[0], findings)
    remarks += [f"{NOT_CHECKED}{each}" for each in [*by_chance, *not_checked(baseline, target), *backward]]
    return Comparison(
        findings,
        verdict.runs,
        repeats.session,
        proposal,
        conclusion.answer,
        tuple(remarks),
        has_other_batch=conclusion.has_other_batch,
        lacks_result=lacks_result,
    )


def _paired(
    repeats: Repeats,
    baseline: Sequence[CallDescription],
    target: Sequence[CallDescription],
    choice: JudgingChoice,
    proposal: Proposal | None,
) -> tuple[Proposal | None, list[str]]:
    """The pairs found by value, if names do not pair, and a sentence if taps could not be paired."""
    if proposal is not None and (unfit := repeats.unfit_taps() - proposal.unfit):
        # A decode step after a prefill has other rows, and other numbers of them.
        with suppress(MatchError):
            proposal = _matched(repeats, target, proposal, unfit)
    if proposal is None and (choice.match or (choice.match is None and not _pair_by_names(baseline, target))):
        try:
            proposal = _matched(repeats, target)
        except MatchError as error:
            return None, [f"Taps could not be paired by value: {error}"]
    elif proposal is None and choice.match_trained and choice.match is None and _train_others(baseline, target):
        with suppress(MatchError):
            proposal = _matched(repeats, target)
    elif proposal is None and choice.match is None and len(baseline) == 1 < len(target) and repeats.have_other_parts():
        with suppress(MatchError):
            proposal = _with_other_parts(repeats)
    return proposal, []


def _with_other_parts(repeats: Repeats) -> Proposal | None:
    """Put in force, and return, pairs of taps of one name whose ranks have other parts than their numbers say."""
    found = repeats.match()
    pairs = tuple(each for each in found.pairs if any(isinstance(step, Regroup) for step in each.layout.steps))
    if not pairs:
        return None
    proposal = Proposal(pairs, order=found.order)
    repeats.session.edit(pairs=proposal)
    return proposal


def _without_pairs_by_chance(
    repeats: Repeats, verdict: Verdict, judge: Callable[[], Verdict], proposal: Proposal
) -> tuple[Verdict, Proposal, list[str]]:
    """The verdict without pairs of unlike names whose whole numbers, once equal, differ in this call, if it shows no
    difference then: such as the slots of a cache that were a request's positions. With a phrase on what was left out.
    """
    given = {TapCallName.of(pair.target).name: pair for pair in proposal.pairs if pair.target.startswith("input.")}
    groups = {group.partition("@")[0] for group in verdict.findings.inputs}
    unlike = [pair for name, pair in given.items() if name in groups and not _share_words(pair)]
    frame = verdict.findings.frame
    dtypes = frame.loc[frame["name"].isin([TapCallName.of(pair.target).name for pair in unlike]), "dtype"]
    if not unlike or any(roundoff(dtype) for dtype in dtypes) or not verdict.findings.data:
        return verdict, proposal, []
    fewer = proposal.reject(*(pair.target for pair in unlike))
    repeats.session.edit(pairs=fewer)
    again = judge()
    if answer_of(again.findings, True, True) == "differ":
        repeats.session.edit(pairs=proposal)
        return verdict, proposal, []
    names = first_of([f"{TapCallName.of(each.target).name}, which once was {each.baseline}" for each in unlike])
    return again, fewer, [f"{names}, and differs in this call, while nothing else does: perhaps equal by chance."]


def _share_words(pair: Pair) -> bool:
    """Whether the names of both taps have a word in common, in the singular or plural, or shortened as ``pos`` is."""
    ours, theirs = ({*words_of(TapCallName.of(name).name)} - {"input"} for name in (pair.baseline, pair.target))
    return any(_is_same_word(*sorted((one, other), key=len)) for one in ours for other in theirs)


def _is_same_word(shorter: str, longer: str) -> bool:
    return shorter.rstrip("s") == longer.rstrip("s") or (len(shorter) >= _LEAST_WORD and longer.startswith(shorter))


def _conclude(
    baseline: Sequence[CallDescription],
    target: Sequence[CallDescription],
    findings: Findings,
    pairs: Sequence[PairRule],
    threshold: float,
    proposal: Proposal | None,
    trusted: bool,
    may_be_rounding: bool,
) -> ReasonedAnswer:
    """The answer of these findings, and of what else the calls show. ``trusted`` is false if a call cannot be repeated,
    or has no pairs; ``may_be_rounding`` is true if rounded weights may explain what the findings name.
    """
    results = compare_returned([each.returned for each in baseline], [each.returned for each in target], pairs)
    moves_rows = outputs_move_rows(pairs)
    known = results.compared or (moves_rows and have_equal_rows(baseline, target, threshold))
    no_row = moves_rows and not known and given_equal_tokens(baseline, target) and have_no_near_rows(baseline, target)
    # Pairs that contradict each other are the last reason: the others say more.
    conclusion = ReasonedAnswer(answer_of(replace(findings, contradicting_pairs=()), trusted, known))
    if may_be_rounding and conclusion.answer == "differ":
        # A result of a different shape, for example, differs still.
        conclusion.answer = "inconclusive"
    if findings.in_float32 is None:
        conclusion.doubt(sentence_on_single_taps(findings.frame))
    if without := difference_without_taps(baseline, target, results.differences, threshold, pairs):
        conclusion.reasons.append(without)
        conclusion.withdraw_agreement("differ")
    if no_row and trusted and conclusion.answer == "inconclusive" and not (findings.quantised or may_be_rounding):
        conclusion.answer = "differ"
        conclusion.reasons += [_NO_ROW, *_last_that_agrees(baseline[0], findings)]
    conclusion.doubt(rounds_earlier(baseline, target, findings))
    packs = any(rule.moves_rows for rule in pairs)
    of_tokens = other_tokens(baseline, target) if packs and trusted else []
    if of_tokens and not findings.named and not findings.data:
        conclusion.has_other_batch = True
        conclusion.answer = "inconclusive"
        conclusion.reasons += of_tokens
        return conclusion
    far = [each.rel_l2 for each in results.differences if is_beyond_rounding(each, threshold)]
    if far and conclusion.answer == "inconclusive" and trusted and findings.inconclusive:
        conclusion.answer = "differ"
        conclusion.reasons.append(f"The results of the two calls differ by {max(far):.2g}.")
    inputs = findings.frame[findings.frame["group"].map(kind_of_group) == "input"]
    others = of_other_taps(baseline[0].returned, target[0].returned, pairs)
    returned = baseline[0].returned, without_places(target[0].returned, others)
    cannot_tell = trusted and not results.compared
    unlike: list[str] = []
    given_alike = bool(len(inputs)) and not _has_parts(inputs, pairs)
    if moves_rows:
        if not known:
            conclusion.withdraw_agreement()
        if len(inputs) and inputs["aligned_by"].isna().all():
            # Both sides were given the same rows, so that a result with fewer lacks some.
            conclusion.doubt(next(iter(values_of_other_shapes(*returned, matched=True)), None))
    elif len(baseline) == len(target):
        # Different numbers of ranks may have parts of the result, and a match may have found its rows or its layout.
        plain = without_places(target[0].plain, others)
        unlike = values_of_other_shapes(baseline[0].plain, plain, matched=proposal is not None)
    may_be_other_work = cannot_tell and not given_alike and conclusion.answer != "differ"
    if may_be_other_work and (unlike or conclusion.answer == "inconclusive"):
        of_batches = other_batch(baseline, target)
        conclusion.has_other_batch = bool(of_batches)
        conclusion.reasons += of_batches or unlike[:1]
    else:
        conclusion.reasons += unlike[:1]
    if unlike and trusted and conclusion.answer != "differ":
        # If the inputs are equal, a different number of values is a different result.
        resized = values_of_other_shapes(*returned, matched=True)
        conclusion.answer = "differ" if given_alike and resized else "inconclusive"
    if conclusion.answer == "inconclusive" and cannot_tell and not unlike:
        conclusion.reasons.append(NOT_COMPARED)
    if proposal is not None and proposal.unpaired_rows:
        conclusion.reasons.append(proposal.unpaired_rows)
        conclusion.withdraw_agreement()
    if findings.contradicting_pairs:
        conclusion.doubt(_PAIRS_ALONE)
    return conclusion


def _last_that_agrees(baseline: CallDescription, findings: Findings) -> list[str]:
    """A sentence on the last compared value of the baseline, and on the first after it without a partner."""
    measured = findings.frame[findings.frame["ratio"].notna()]
    places = [place for place, name in enumerate(baseline.values) if name in {*measured["name"]}]
    if findings.named or not places or places[-1] == len(baseline.values) - 1:
        return []
    last, following = baseline.values[places[-1] : places[-1] + 2]
    return [
        f"All values that were compared agree, the last of them {last}; from {following} on, the baseline's values "
        "have no partner, so the difference arises there."
    ]


def _has_parts(inputs: pd.DataFrame, pairs: Sequence[PairRule]) -> bool:
    """Whether one of these inputs is a part of the other side's, such as one row of a batch of two."""
    names = {*inputs["name"]}
    return any(rule.is_part for rule in pairs if TapCallName.of(rule.baseline).name in names)


def _in_order_of_parts(
    baseline: Sequence[CallDescription],
    target: Sequence[CallDescription],
    threshold: float,
    conclusion: ReasonedAnswer,
    data: Sequence[str],
) -> list[str]:
    """A sentence on ranks that have parts of an input in another order than taps are aligned in, which proves nothing.
    The results in that order give the answer, unless ``data`` has weights or settings that differ: these need no order.
    """
    found = order_of_parts(baseline, target)
    if found is None:
        return []
    path, dim, order = found
    sentence = in_words(ARGUMENT.sub(r"\1", path), dim, order)
    results = differences_in_order(baseline, target, dim, order)
    far = [each.rel_l2 for each in results if is_beyond_rounding(each, threshold)]
    if far:
        conclusion.answer = "differ"
        how = f"In that order the results differ by {max(far):.2g}, so something is computed differently."
    else:
        if all(line.startswith(BEGINNINGS["input"]) for line in data):
            conclusion.answer = "inconclusive"
        how = "In that order the results agree to rounding." if results else "The results cannot be put in that order."
    aligned = "Taps were compared as if the parts were consecutive, so what follows about them proves nothing."
    return [f"{sentence} {how} {aligned} To compare taps, give the ranks consecutive parts."]


def judge_until_exception(
    repeats: Repeats, baseline: Sequence[CallDescription], target: Sequence[CallDescription], choice: JudgingChoice
) -> Comparison:
    """Judge a call that raises on one side only, by the values before its exception.

    Raises :class:`RunError` if both raise.
    """
    session = repeats.session
    if all(any(each.raises for each in side) for side in (baseline, target)):
        session.run(repeat_call, repeat_call)
    remarks = []
    proposal = None
    if choice.match or (choice.match is None and not names_pair(baseline[0], target[0])):
        try:
            proposal = repeats.match()
            session.edit(pairs=proposal)
        except MatchError as error:
            remarks.append(f"Taps could not be paired by value: {error}")
    verdict = repeats.verdict(choice)
    answer = answer_of(verdict.findings, True, False)
    return Comparison(verdict.findings, verdict.runs, session, proposal, answer, tuple(remarks))


def names_pair(baseline: CallDescription, target: CallDescription) -> bool:
    """Whether the names of the taps of both sides pair."""
    return enough_in_common(set(baseline.taps), set(target.taps))


def _pair_by_names(baseline: Sequence[CallDescription], target: Sequence[CallDescription]) -> bool:
    """Whether taps pair by name: not if the names differ, or the results have different rows, as of a packed batch."""
    if not names_pair(baseline[0], target[0]):
        return False
    if len(baseline) != 1 or len(target) != 1 or any(call.needs_backward for call in (*baseline, *target)):
        # Ranks may have parts of a batch, and so may the calls before one update.
        return True
    return _have_equal_shapes(baseline[0], target[0])


def _results_differ_by_place(
    baseline: Sequence[CallDescription], target: Sequence[CallDescription], findings: Findings
) -> list[str]:
    """The named values at numbered places of results that have different numbers of values, so that the baseline's
    ``[0]`` may be what the target does not return.
    """
    if len(baseline) != 1 or len(target) != 1:
        return []
    ours, theirs = (len(call.returned) for call in (baseline[0], target[0]))
    if ours == theirs or min(ours, theirs) == 1:
        return []
    return [group for group in findings.named if is_output(group) and BY_PLACE.search(group)]


def _train_others(baseline: Sequence[CallDescription], target: Sequence[CallDescription]) -> bool:
    """Whether each side trains weights that the other has no name for, so that their updates would not be compared.

    Several ranks, and results of other shapes, may have parts of a batch, whose values do not pair.
    """
    if len(baseline) != 1 or len(target) != 1 or not (baseline[0].needs_backward and target[0].needs_backward):
        return False
    ours, theirs = {*baseline[0].trained}, {*target[0].trained}
    return bool(ours - theirs and theirs - ours) and _have_equal_shapes(baseline[0], target[0])


def _have_equal_shapes(baseline: CallDescription, target: CallDescription) -> bool:
    """Whether all results that both sides have are of the same shape."""
    ours, theirs = baseline.returned, target.returned
    return all(ours[path].shape == theirs[path].shape for path in ours if path in theirs)


def enough_in_common(ours: set[str], theirs: set[str]) -> bool:
    return len(ours & theirs) >= _ENOUGH * min(len(ours), len(theirs))


def _matched(
    repeats: Repeats, target: Sequence[CallDescription], known: Proposal | None = None, unfit: Collection[str] = ()
) -> Proposal:
    """Pair the taps of this call by value, and put the pairs in force. If an earlier call's pairs are ``known``, only
    the layouts of ``unfit`` taps are replaced. Raises :class:`MatchError`.
    """
    found = repeats.match()
    proposal = found if known is None else known.with_layouts_of(found, unfit)
    repeats.session.edit(pairs=proposal)
    if INTERRUPTED in found.notices:
        # The match returns the pairs found so far, but the interrupt was meant for the rest, too.
        raise KeyboardInterrupt(_paired_so_far(proposal, target[0]))
    return proposal


def _paired_so_far(proposal: Proposal, target: CallDescription) -> str:
    paired = len({pair.target for pair in proposal.graftable})
    return f"{paired} of {counted(len(target.taps), 'tap')} of the target had a partner."


def _add_backward(
    repeats: Repeats, baseline: Sequence[CallDescription], target: Sequence[CallDescription]
) -> list[str]:
    """Include a backward pass in each repetition, if the results need gradients. Returns what of it is not checked."""
    calls = [*baseline, *target]
    if not any(call.needs_backward for call in calls):
        return []
    if (why := why_no_backward(calls)) is not None:
        return [f"the backward pass: {why}.", AFTER_CALL]
    if (failed := repeats.add_backward()) is not None:
        return [f"the backward pass, which could not be repeated ({failed}).", AFTER_CALL]
    return [AFTER_CALL]


def why_no_backward(calls: Sequence[CallDescription]) -> str | None:
    """Why the backward passes of these calls cannot be compared; None if they can."""
    if not all(call.needs_backward for call in calls):
        return "the results of one side alone need gradients"
    shapes = [[tensor.shape for tensor in call.returned.values()] for call in calls]
    if any(each != shapes[0] for each in shapes):
        return "results of different shapes have no gradients in common"
    return None
