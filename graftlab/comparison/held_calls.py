"""The comparison of a call that both sides hold: matches if names do not pair, judges, and concludes."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import pandas as pd
import torch
from torch import Tensor

from graftlab.base.tap_groups import group_of, kind_of, kind_of_group
from graftlab.base.tensor_bytes import real_parts
from graftlab.base.text import counted, first_of
from graftlab.base.world import other_side
from graftlab.comparison.answers import Comparison, ReasonedAnswer, answer_of, moves
from graftlab.comparison.inherited_rounding import InheritedRounding
from graftlab.comparison.orders_of_parts import differences_in_order, in_words, order_of_parts
from graftlab.comparison.other_work import other_batch, other_tokens
from graftlab.comparison.repeats import JudgingChoice, NoCloserLookError, Repeats
from graftlab.control.verdicts import Verdict
from graftlab.diffs.results import (
    ResultDifference,
    compare_named,
    is_written,
    value_in_words,
    values_of_other_shapes,
    written_on_one_side,
)
from graftlab.diffs.rounding import DEFAULT_NOISE_FLOOR, assumed_floor, roundoff
from graftlab.errors import GraftError, MatchError
from graftlab.matching.rounds import INTERRUPTED
from graftlab.plan.pairs import PairRule, TapCallName, outputs_move_rows
from graftlab.ranks.held_call import CallDescription
from graftlab.ranks.holding import own_rounding, repeat_call
from graftlab.ranks.widening import NARROW
from graftlab.verdict.added import NOT_NAMED
from graftlab.verdict.model_data import BEGINNINGS
from graftlab.verdict.rounds_differently import sentence_on_single_taps
from graftlab.verdict.unexplained import compare_returned
from graftlab.verdict.wording import NOT_CHECKED, Findings

if TYPE_CHECKING:
    from graftlab.matching.proposal import Proposal
    from graftlab.recordings.recorded_side import RecordedSide
    from graftlab.session import Session

# If a smaller share of taps (of the side with fewer) has a partner of the same name, taps are matched by value.
_ENOUGH = 0.8
_NO_OUTPUT = (
    "No recorded value is known to be the model's output, so the taps that agree do not clear the target: name the tap "
    "that is (output=, or --output)."
)
_PAIRS_ALONE = (
    "All that was compared agrees, the output too, but pairs contradict their names or each other (below): if they are "
    "wrong, a mistake may show only from other inputs."
)
# Four roundings at random add about five times as much as one.
_MOVED = 3.0
_NOT_COMPARED = "The results of the two calls could not be compared, so the taps that agree do not clear the target."
# The largest product of both sides' numbers of rows with which results are compared row by row.
_MOST_ROW_PAIRS = 1 << 24
_NARROW = ("bfloat16", "float16")
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
    remarks = list(_not_trusted(baseline, target))
    proposal, unpaired = _paired(repeats, baseline, target, choice, proposal)
    remarks += unpaired
    backward = _add_backward(repeats, baseline, target)
    verdict = repeats.verdict(choice, gradient_parts=len(target) > 1 and any(call.needs_backward for call in target))
    if inherited is not None:
        verdict = replace(verdict, findings=inherited.without_earlier_results(verdict.findings))
    trusted, merged = not remarks, False
    if trusted:
        is_first = all(each.number <= 1 for each in (*baseline, *target))
        verdict, seen, merged = _in_more_bits(repeats, verdict, choice, proposal, is_first)
        remarks += seen
    findings, pairs = verdict.findings, repeats.session.plan.pairs
    conclusion = _conclude(baseline, target, findings, pairs, choice.threshold, proposal, trusted, merged)
    differ = conclusion.answer == "differ"
    if proposal is not None:
        remarks += [f"{each}." for each in proposal.wrong_weights[:_MOST_WEIGHTS]]
        # Code that agrees may read its weights in any order.
        remarks += [f"{each}." for each in proposal.odd_orders[:_MOST_WEIGHTS] if differ]
    remarks += conclusion.reasons
    remarks[:0] = _in_order_of_parts(baseline, target, choice.threshold, conclusion, findings.data)
    if differ:
        remarks += [*_in_training_alone(baseline[0], target[0]), *_differing_numbers(baseline, target)]
        remarks += _in_padding(baseline[0], findings)
    remarks += [f"{NOT_CHECKED}{each}" for each in [*_not_checked(baseline, target), *backward]]
    return Comparison(
        findings,
        verdict.runs,
        repeats.session,
        proposal,
        conclusion.answer,
        tuple(remarks),
        has_other_batch=conclusion.has_other_batch,
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
    return proposal, []


def _in_more_bits(
    repeats: Repeats, verdict: Verdict, choice: JudgingChoice, proposal: Proposal | None, is_first: bool
) -> tuple[Verdict, list[str], bool]:
    """The verdict after a look at the same call in float32, if 16 bits may hide a mistake; sentences on it; and whether
    merged weights, rounded to 16 bits, may explain what differs.
    """
    try:
        wide = _closer_look(repeats, verdict, choice, is_first)
    except NoCloserLookError as error:
        return verdict, [f"{NOT_CHECKED}the same call in float32: {error}."], False
    except GraftError as error:
        # The verdict on the call itself stands.
        why = str(error).splitlines()[0]
        return verdict, [f"{NOT_CHECKED}the same call in float32, which failed: {why}"], False
    if wide is None:
        return verdict, [], False
    found = wide.findings
    if found.in_float32 is None:
        narrow = dict.fromkeys(each for each in verdict.frame["dtype"] if each in _NARROW)
        dtypes = " and ".join(narrow) or verdict.findings.computed_in
        what = (
            "no tapped value explains the difference" if verdict.findings.unexplained else "the calls agree to rounding"
        )
        merged = None
        if proposal is not None:
            merged = _merged_weights(found, narrow, proposal) or _rounded_alone(
                repeats, found, choice, proposal, is_first
            )
        said = f"In {dtypes} {what}. In {found.looked_in}, from the same numbers, they differ:"
        return wide, [merged, said] if merged else [said], merged is not None
    if found.is_rounding_possible and found.choices:
        chosen = found.choices[0]
        sentence = (
            f"In {found.looked_in}, from the same numbers, the calls agree. In 16 bits they differ from a choice on "
            f"({chosen.operation.partition('(')[0]}, {chosen.stack[0]}): rounding may have made what it chooses from "
            "equal or changed its order, or the target rounds more, or has other code for 16 bits."
        )
        return wide, [sentence], False
    if not found.unexplained:
        return wide, [], False
    sentence = (
        f"In {found.looked_in}, from the same numbers, the calls agree. In 16 bits they differ, though every module "
        "agrees from equal inputs: rounding may have changed a choice, such as a router's, or the target rounds more."
    )
    return wide, [sentence], False


def _conclude(
    baseline: Sequence[CallDescription],
    target: Sequence[CallDescription],
    findings: Findings,
    pairs: Sequence[PairRule],
    threshold: float,
    proposal: Proposal | None,
    trusted: bool,
    merged: bool,
) -> ReasonedAnswer:
    """The answer of these findings, and of what else the calls show. ``trusted`` is false if a call cannot be repeated,
    or has no pairs; ``merged`` is true if merged weights may explain what differs.
    """
    results = compare_returned([each.returned for each in baseline], [each.returned for each in target], pairs)
    moves_rows = outputs_move_rows(pairs)
    known = results.compared or (moves_rows and _have_equal_rows(baseline, target, threshold))
    # Pairs that contradict each other are the last reason: the others say more.
    conclusion = ReasonedAnswer(answer_of(replace(findings, contradicting_pairs=()), trusted, known))
    if merged and conclusion.answer == "differ":
        conclusion.answer = "inconclusive"
    if findings.in_float32 is None:
        conclusion.doubt(sentence_on_single_taps(findings.frame))
    if without_taps := _without_taps(baseline, target, results.differences, threshold, pairs):
        conclusion.reasons.append(without_taps)
        conclusion.withdraw_agreement("differ")
    conclusion.doubt(_rounds_earlier(baseline, target, findings))
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
    returned = baseline[0].returned, target[0].returned
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
        unlike = values_of_other_shapes(baseline[0].plain, target[0].plain, matched=proposal is not None)
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
        conclusion.reasons.append(_NOT_COMPARED)
    if proposal is not None and proposal.unpaired_rows:
        conclusion.reasons.append(proposal.unpaired_rows)
        conclusion.withdraw_agreement()
    if findings.contradicting_pairs:
        conclusion.doubt(_PAIRS_ALONE)
    return conclusion


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
    sentence = in_words(_ARGUMENT.sub(r"\1", path), dim, order)
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


def _rounds_earlier(
    baseline: Sequence[CallDescription], target: Sequence[CallDescription], findings: Findings
) -> str | None:
    """A sentence on a result that the target alone has in 16 bits, though both compute in these, if the target's is not
    the baseline's rounded: a softmax of logits of 16 bits, for example. A run in more bits cannot show that.
    """
    frame = findings.frame
    narrow = {*frame.loc[frame["cast"].isna(), "dtype"], findings.computed_in} & {*_NARROW}
    for path, ours in baseline[0].plain.items():
        theirs = target[0].plain.get(path)
        if theirs is None or theirs.shape != ours.shape or theirs.dtype not in NARROW or ours.dtype in NARROW:
            continue
        dtype = str(theirs.dtype).removeprefix("torch.")
        if dtype in narrow and not torch.equal(ours.to(theirs.dtype), theirs):
            own = str(ours.dtype).removeprefix("torch.")
            return (
                f"Both sides compute in {dtype}, and only the baseline has {value_in_words(path)} in {own}. The "
                f"target's is not the baseline's rounded to {dtype}, so it may round earlier, for instance before a "
                "softmax. To compare what else they compute, let both return one dtype."
            )
    return None


def _merged_weights(wide: Findings, dtypes: Collection[str], proposal: Proposal) -> str | None:
    """A sentence if all that differs in float32 has weights without a partner, as merged ones are, and differs by no
    more than their rounding to these dtypes; else None.
    """
    named = wide.frame[~wide.frame["label"].isin(NOT_NAMED)]
    if wide.unexplained or not len(named) or not (named["added"] <= max(map(roundoff, dtypes), default=0.0)).all():
        return None
    parsed = map(TapCallName.of, proposal.unmatched_baseline)
    alone = [each.name for each in parsed if (each.tags or {}).get("kind") == "param"]
    modules: dict[str, set[str]] = defaultdict(set)
    for pair in proposal.pairs:
        # Some taps have the target's name in a verdict.
        modules[TapCallName.of(pair.target).name].add(TapCallName.of(pair.baseline).name)
    merged: dict[str, None] = {}
    for name, group in zip(named["name"], named["group"], strict=True):
        own = [name, *modules[name]]
        # A folded batch norm is a module beside the one that has its scale now.
        beside = [each.rpartition(".")[0] for each in own if "." in each]
        if any(weight.startswith(f"{each}.") for weight in alone for each in own):
            merged[group] = None
            continue
        found = [weight.rpartition(".")[0] for weight in alone if any(weight.startswith(f"{each}.") for each in beside)]
        if not found:
            return None
        merged.update(dict.fromkeys(map(group_of, found)))
    return (
        f"Weights of {first_of([*merged])} have no partner, as where the target has merged them with others. Their "
        f"rounding to {' and '.join(dtypes)} may explain what follows (up to {named['added'].max():.2g}), and so may a "
        "mistake. Merge them on both sides, or compare both in float32."
    )


def _rounded_alone(
    repeats: Repeats, wide: Findings, choice: JudgingChoice, proposal: Proposal, is_first: bool
) -> str | None:
    """A sentence if other roundings of the target's weights and buffers without a partner, such as a table that the
    baseline computes in each call, move all that differs in float32 about as far as it differs; else None.
    """
    named = wide.frame[~wide.frame["label"].isin(NOT_NAMED)]
    parsed = map(TapCallName.of, proposal.unmatched_target)
    alone = [each.name for each in parsed if (each.tags or {}).get("kind") == "param"]
    if wide.unexplained or wide.data or not len(named) or not alone or wide.looked_in != "float32":
        return None
    try:
        moved = repeats.in_float32(choice, is_first=is_first, rounded_otherwise=alone, explain=False)
    except GraftError:
        return None
    added = moved.frame.groupby("group")["added"].max()
    if not all(added.get(row["group"], 0.0) >= _MOVED * row["added"] for _, row in named.iterrows()):
        return None
    return (
        f"The target alone has {first_of(alone)}, in 16 bits. With other roundings of them, what follows differs by "
        "several times as much. So their rounding may explain it, where the baseline computes a table in each call, or "
        "has apart what the target has merged; and so may a mistake. Compare both in float32."
    )


def _differing_numbers(baseline: Sequence[CallDescription], target: Sequence[CallDescription]) -> list[str]:
    """A sentence on whole numbers among the arguments that differ and that no tap shows, as in an engine's metadata."""
    found: dict[str, None] = {}
    for ours, theirs in zip(baseline, target, strict=False):
        for path in ours.untapped_numbers:
            if path in theirs.untapped_numbers and not torch.equal(
                ours.whole_numbers[path], theirs.whole_numbers[path]
            ):
                found[_ARGUMENT.sub(r"\1", path)] = None
    if not found:
        return []
    return [
        f"Whole numbers among the arguments already differ: {first_of(list(found), 4)}. No tap shows them, so code "
        "that reads them may be named below although it is right."
    ]


def _in_training_alone(baseline: CallDescription, target: CallDescription) -> list[str]:
    """A sentence if dropouts or batch norms are in training mode on one side, and nothing is on the other."""
    for side, own, other in (("target", target, baseline), ("baseline", baseline, target)):
        if own.in_training and not (other.in_training or other.is_training):
            verb = "is" if len(own.in_training) == 1 else "are"
            return [
                f"On the {side} {first_of(list(own.in_training))} {verb} in training mode, and the "
                f"{other_side(side)}'s model is not: model.eval() ends that mode."
            ]
    return []


def _in_padding(call: CallDescription, findings: Findings) -> list[str]:
    """A sentence if the tensors of all named groups differ only in rows that an argument masks by zeros."""
    shown = [findings.maps.get(group) for group in findings.named]
    pairs = [None if each is None else each.pair for each in shown]
    for path, mask in call.whole_numbers.items():
        if not _OF_PADDING.search(path):
            continue
        is_padding = mask == 0
        if mask.dim() == 2 and is_padding.any() and bool((is_padding | (mask == 1)).all()):
            differ_there = [pair is not None and _differ_only_at(is_padding, *pair) for pair in pairs]
            if pairs and all(differ_there):
                name = _ARGUMENT.sub(r"\1", path)
                return [
                    f"Where the groups named below differ most, only rows that {name} masks by zeros differ. Padding "
                    "may differ in a right port, if nothing reads it."
                ]
    return []


# Others have ones for padding, or zeros for tokens that are read, such as those of the first of two segments.
_OF_PADDING = re.compile(r"(attention|attn|input)_mask\W*$")


def _differ_only_at(rows: Tensor, one: Tensor, other: Tensor) -> bool:
    """Whether two tensors agree to rounding except in these rows, given by a mask of their first two dimensions."""
    if one.shape != other.shape or one.shape[:2] != rows.shape:
        return False
    left, right = (each[~rows].double() for each in (one, other))
    limit = assumed_floor([str(each.dtype).removeprefix("torch.") for each in (one, other)])[0]
    return bool((left - right).norm() <= limit * left.norm())


# A path begins with the argument's name in brackets: ['args[1]'].slots.
_ARGUMENT = re.compile(r"^\['(.+?)'\]")


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


def rounding_may_hide_mistakes(verdict: Verdict) -> bool:
    """Whether nothing is named of calls that round to 16 bits, and are not bit-equal."""
    found, frame = verdict.findings, verdict.frame
    if answer_of(_if_rounding(found), True, True) != "agree":
        return False
    narrow = frame.loc[frame["dtype"].isin(_NARROW), "added"]
    # Bit-equal calls are right.
    return bool((found.after_taps and len(narrow)) or (narrow > 0).any() or (found.computed_in and moves(found)))


def _if_rounding(found: Findings) -> Findings:
    """The findings of a verdict if its differences are rounding, and its pairs are right."""
    return replace(
        found, contradicting_pairs=(), in_float32=0.0, unexplained=(), rounding=replace(found.rounding, stands_out="")
    )


def _closer_look(repeats: Repeats, verdict: Verdict, choice: JudgingChoice, is_first: bool) -> Verdict | None:
    """The verdict of the same runs in float32, if rounding to 16 bits may hide a mistake; otherwise None.

    That of float32 where it names something. Otherwise it is the given one, whose differences are rounding then.

    Raises :class:`NoCloserLookError` with the reason if float32 shows nothing.
    """
    found, frame, cleared = verdict.findings, verdict.frame, _if_rounding(verdict.findings)
    if not rounding_may_hide_mistakes(verdict):
        if frame["dtype"].isin(_NARROW).any() and answer_of(found, True, True) == "agree":
            repeats.note_equal()
        if not (found.choices and frame["dtype"].isin(_NARROW).any()):
            return None
    wide = repeats.in_float32(choice, is_first=is_first)
    # What the call is given stays in 16 bits where only its operators compute in more.
    is_given = (wide.frame["group"].map(kind_of_group) == "input") & (wide.frame["added"] == 0)
    if still := [*wide.frame.loc[~is_given & wide.frame["dtype"].isin(_NARROW), "name"]]:
        raise NoCloserLookError(f"these compute in 16 bits even then: {first_of([*dict.fromkeys(still)], 4)}")
    # It computes in more bits now, from numbers of 16 bits.
    wide = replace(wide, findings=replace(wide.findings, computed_in=""))
    answer = answer_of(replace(wide.findings, contradicting_pairs=()), True, True)
    runs = verdict.runs + wide.runs
    if answer == "agree" and (not found.unexplained or found.only_without_grafts):
        # Where one side alone has 16 bits, the rounding of its numbers, which both have now, may be the mistake.
        rounding = found.rounding if frame["cast"].notna().any() else cleared.rounding
        ratio = float(wide.frame["ratio"].max()) if len(wide.frame) else 0.0
        looked = replace(found, in_float32=ratio, looked_in=wide.findings.looked_in, rounding=rounding)
        return Verdict(looked, runs)
    if found.named and not rounding_may_hide_mistakes(verdict):
        return None
    # Weights that differ by one rounding differ in float32, and whatever reads them.
    is_of_code = (wide.named or wide.findings.unexplained) and (wide.findings.weights_lent or not wide.findings.data)
    if answer == "differ" and is_of_code:
        return Verdict(wide.findings, runs)
    if answer == "agree":
        return None
    why = "it is inconclusive" if answer == "inconclusive" else "weights that are rounded differently differ in it"
    raise NoCloserLookError(why)


def judge_against_recording(
    session: Session, baseline: RecordedSide, target: Sequence[CallDescription], choice: JudgingChoice
) -> Comparison:
    """Judge the call that the target holds, by its ranks' descriptions, against a recording of a call."""
    remarks = list(_not_trusted((), target))
    proposal = None
    if choice.match or (choice.match is None and not _enough_in_common(set(baseline.frame["name"]), {*target[0].taps})):
        proposal = session.match(baseline, repeat_call)
        session.edit(pairs=proposal)

    def judged(floor: float | Literal["auto"]) -> Verdict:
        return session.verdict(target=repeat_call, output=choice.output, floor=floor, threshold=choice.threshold)

    verdict = judged(choice.floor)
    trusted, hidden = not remarks, False
    if choice.floor == "auto" and verdict.named and not verdict.frame["dtype"].isin(_NARROW).any():
        # The floor that is assumed for float32 does not suit results that are computed in 16 bits.
        (own,) = session.run(target=own_rounding).target[:1]
        if own is not None:
            hidden = True
            remarks.append(
                f"The target computes in {own[0]}: its results differ by up to {own[1]:.2g} (rel_l2) from those of the "
                f"same call in float64, which is taken as the floor. A mistake below {choice.threshold:g} times that "
                "is not seen."
            )
            verdict = judged(max(own[1], DEFAULT_NOISE_FLOOR))
    # A named output was compared, or there would be no verdict.
    conclusion = ReasonedAnswer(answer_of(verdict.findings, trusted, True), remarks)
    if choice.output is None and answer_of(verdict.findings, trusted, False) != "agree":
        conclusion.doubt(_NO_OUTPUT)
    if hidden:
        conclusion.withdraw_agreement()
    # A recording cannot run in float32, and its assumed floor is far above one rounding.
    conclusion.doubt(sentence_on_single_taps(verdict.frame))
    if conclusion.answer != "agree":
        remarks += _other_inputs(baseline.frame, session.frame)
    if sketched := baseline.sketched:
        remarks.append(
            f"{NOT_CHECKED}the single values of {first_of(sketched, 4)}: the recording has only sketches of them, "
            "which show how far two tensors are apart, and not where. They cannot be grafted."
        )
    remarks += [f"{NOT_CHECKED}{each}" for each in _not_checked((), target)]
    return Comparison(verdict.findings, verdict.runs, session, proposal, conclusion.answer, tuple(remarks))


def names_pair(baseline: CallDescription, target: CallDescription) -> bool:
    """Whether the names of the taps of both sides pair."""
    return _enough_in_common(set(baseline.taps), set(target.taps))


def _pair_by_names(baseline: Sequence[CallDescription], target: Sequence[CallDescription]) -> bool:
    """Whether taps pair by name: not if the names differ, or the results have different rows, as of a packed batch."""
    if not names_pair(baseline[0], target[0]):
        return False
    if len(baseline) != 1 or len(target) != 1 or any(call.needs_backward for call in (*baseline, *target)):
        # Ranks may have parts of a batch, and so may the calls before one update.
        return True
    return _have_equal_shapes(baseline[0], target[0])


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


def _enough_in_common(ours: set[str], theirs: set[str]) -> bool:
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


def _not_trusted(baseline: Sequence[CallDescription], target: Sequence[CallDescription]) -> list[str]:
    remarks = []
    for side, calls in (("baseline", baseline), ("target", target)):
        fails = next((call.fails_when_repeated for call in calls if call.fails_when_repeated), None)
        moved = dict.fromkeys(what for call in calls for what in call.not_repeated)
        if fails is not None:
            remarks.append(
                f"The {side}'s call of {calls[0].model} cannot be replayed: it fails when it is repeated ({fails}). Do "
                "not rely on anything below."
            )
        elif moved:
            why = (
                "It changes the model's weights, which a repetition does not put back: to compare training, give two "
                "scripts, whose updates are judged one by one."
                if any(call.writes_weights for call in calls)
                else "State outside the model and its arguments, random numbers of another source, or memory that is "
                "read before anything is written to it (torch.empty), may change it."
            )
            remarks.append(
                f"The {side}'s call of {calls[0].model} cannot be replayed: from the same state, arguments and random "
                f"numbers it returns a different result ({', '.join(list(moved)[:3])}). Do not rely on anything below. "
                f"{why}"
            )
    return remarks


def _have_equal_rows(baseline: Sequence[CallDescription], target: Sequence[CallDescription], threshold: float) -> bool:
    """Whether the results have equal rows on both sides, in any order; False if that is unknown.

    If one side has fewer rows, as without padding, the other must have all of them.
    """
    if len(baseline) != 1 or len(target) != 1:
        return False
    ours, theirs = _with_equal_names(*_without_state_of_one(baseline[0].plain, target[0].plain))
    if ours.keys() != theirs.keys() or not ours:
        return False
    for path, tensor in ours.items():
        one, other = _rows_of(tensor), _rows_of(theirs[path])
        if one.shape[1] != other.shape[1] or len(one) * len(other) > _MOST_ROW_PAIRS:
            return False
        if len(one) != len(other):
            one, other = _nearest(one, other) if len(one) > len(other) else _nearest(other, one)[::-1]
        sorted_rows = {path: _in_one_order(one)}, {path: _in_one_order(other)}
        differences = compare_named(*sorted_rows).differences
        if not differences or any(is_beyond_rounding(each, threshold) for each in differences):
            return False
    return True


def _without_state_of_one(*sides: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Both results without the state that one side alone writes, or in another size, such as a paged cache."""
    one, other = sides
    alike = {path for path, each in one.items() if path in other and each.numel() == other[path].numel()}
    for values in sides:
        yield {path: each for path, each in values.items() if path in alike or not is_written(path)}


def _with_equal_names(
    baseline: Mapping[str, Tensor], target: Mapping[str, Tensor]
) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
    """Both results; of a bare tensor that the target returns, and the one value of the baseline with rows as wide."""
    returned = [path for path in target if not is_written(path)]
    if len(returned) != 1 or returned[0] in baseline:
        return baseline, target
    found = target[returned[0]]
    wide = {
        path: each
        for path, each in baseline.items()
        if not is_written(path) and each.dim() > 1 and each.shape[-1:] == found.shape[-1:]
    }
    return (wide, dict.fromkeys(wide, found)) if found.dim() > 1 and len(wide) == 1 else (baseline, target)


def _rows_of(tensor: Tensor) -> Tensor:
    rows = tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() > 1 else tensor.reshape(-1, 1)
    return real_parts(rows).flatten(1)


def _nearest(more: Tensor, fewer: Tensor) -> tuple[Tensor, Tensor]:
    """The rows, each once, of the side with more that are nearest to the other's; and the other's rows."""
    apart = torch.cdist(fewer.double(), more.double())
    chosen = []
    for row in apart:
        chosen.append(int(row.argmin()))
        # Equal rows, such as those of one token, must have different partners.
        apart[:, chosen[-1]] = math.inf
    return more[chosen], fewer


def _other_inputs(recorded: pd.DataFrame, rows: pd.DataFrame) -> list[str]:
    """A sentence if a recorded call has an input of a different shape than the target's call."""
    own = rows[rows["side"] == "target"]
    own = own[[kind_of(tags) == "input" for tags in own["tags"]]] if len(own) else own
    # A model that is called several times has another shape of one input each time.
    shapes: dict[str, list[list[int]]] = {}
    for name, shape in zip(own["name"], own["shape"], strict=True):
        shapes.setdefault(str(name), []).append(list(shape))
    for name, shape in zip(recorded["name"], recorded["shape"], strict=True):
        if name in shapes and list(shape) not in shapes[name]:
            return [
                f"The recorded call has {name} of shape {list(shape)}, and the target's call {shapes[name][-1]}, so "
                "they do different work: give the target the recorded inputs, or record the baseline with the target's."
            ]
    return []


def _in_one_order(rows: Tensor) -> Tensor:
    """The rows, sorted by their sums under random weights, in their own dtype."""
    weights = torch.randn(rows.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64, device="cpu")
    return rows[(rows.double() @ weights).argsort()]


def is_beyond_rounding(difference: ResultDifference, threshold: float) -> bool:
    """Whether results differ by more than ``threshold`` times the rounding assumed for their dtypes."""
    return difference.rel_l2 > threshold * assumed_floor(difference.dtypes)[0]


def _without_taps(
    baseline: Sequence[CallDescription],
    target: Sequence[CallDescription],
    differences: Sequence[ResultDifference],
    threshold: float,
    pairs: Sequence[PairRule] = (),
) -> str | None:
    """A sentence if without taps the sides' results differ by more than taps and rounding explain."""
    beyond = [
        each
        for each in differences
        if is_beyond_rounding(each, threshold) and each.rel_l2 > _moved_by_taps(baseline, target)
    ]
    tapped = compare_returned([each.tapped for each in baseline], [each.tapped for each in target], pairs)
    largest = max((each.rel_l2 for each in tapped.differences if not math.isnan(each.rel_l2)), default=0.0)
    if not beyond or max(each.rel_l2 for each in beyond) <= threshold * largest:
        return None
    worst = max(beyond, key=lambda each: each.rel_l2)
    return (
        f"Without taps the results differ by {worst.rel_l2:.2g}, and with taps by {largest:.2g}: the difference arises "
        "in code that taps switch off, such as a fused path for modules without hooks."
    )


def _moved_by_taps(*sides: Sequence[CallDescription]) -> float:
    """How far taps alone move a side's result: the smaller rel_l2 of both sides."""
    return min(max((_change(call) for call in calls), default=0.0) for calls in sides)


def _change(call: CallDescription) -> float:
    differences = compare_named(call.plain, call.tapped).differences
    return max((each.rel_l2 for each in differences if not math.isnan(each.rel_l2)), default=0.0)


def _not_checked(baseline: Sequence[CallDescription], target: Sequence[CallDescription]) -> list[str]:
    remarks = []
    if written := list(dict.fromkeys(what for call in (*baseline, *target) for what in call.not_compared)):
        remarks.append(f"{first_of(written)}: it is large, or not the same when the call is repeated.")
    for ours, theirs in zip(baseline[:1], target[:1], strict=False):
        remarks += [f"{each}." for each in written_on_one_side(ours.plain, theirs.plain)]
    for side, calls in (("baseline", baseline), ("target", target)):
        for call in calls[:1]:
            dtype = next((str(t.dtype).removeprefix("torch.") for t in call.returned.values()), "float32")
            limit = assumed_floor([dtype])[0] if roundoff(dtype) else 0.0
            if (change := _change(call)) > limit:
                remarks.append(
                    f"what the {side} computes without taps: with them its result changes by {change:.2g}, as where "
                    "hooks switch a fused path off."
                )
            if call.others:
                counts = ", ".join(f"{kind} ({counted(count, 'call')})" for kind, count in call.others.items())
                remarks.append(f"other models that the {side} has called: {counts}; --model NAME chooses one.")
    return remarks


def _add_backward(
    repeats: Repeats, baseline: Sequence[CallDescription], target: Sequence[CallDescription]
) -> list[str]:
    """Include a backward pass in each repetition, if the results need gradients. Returns what of it is not checked."""
    calls = [*baseline, *target]
    if not any(call.needs_backward for call in calls):
        return []
    after = "the loss and the optimizer's step, which may follow this call."
    if (why := why_no_backward(calls)) is not None:
        return [f"the backward pass: {why}; and {after}"]
    if (failed := repeats.add_backward()) is not None:
        return [f"the backward pass, which could not be repeated ({failed}); and {after}"]
    return [after]


def why_no_backward(calls: Sequence[CallDescription]) -> str | None:
    """Why the backward passes of these calls cannot be compared; None if they can."""
    if not all(call.needs_backward for call in calls):
        return "the results of one side alone need gradients"
    shapes = [[tensor.shape for tensor in call.returned.values()] for call in calls]
    if any(each != shapes[0] for each in shapes):
        return "results of different shapes have no gradients in common"
    return None
