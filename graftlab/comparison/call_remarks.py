"""Sentences on held calls beside what a verdict finds: what may be trusted, and what was not checked."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import torch
from torch import Tensor

from graftlab.base.text import counted, first_of
from graftlab.base.world import other_side
from graftlab.comparison.answers import is_beyond_rounding
from graftlab.diffs.results import ResultDifference, compare_named, value_in_words, written_on_one_side
from graftlab.diffs.rounding import DTYPES_OF_16_BITS, assumed_floor, roundoff
from graftlab.plan.pairs import PairRule
from graftlab.ranks.call_description import CallDescription
from graftlab.ranks.widening import NARROW
from graftlab.verdict.findings import Findings
from graftlab.verdict.returned_values import compare_returned

AFTER_CALL = "the loss and the optimizer's step, which may follow this call."
"""What a call that needs gradients does not show, and the next update does."""

# A path begins with the argument's name in brackets: ['args[1]'].slots.
ARGUMENT = re.compile(r"^\['(.+?)'\]")
# Others have ones for padding, or zeros for tokens that are read, such as those of the first of two segments.
_OF_PADDING = re.compile(r"(attention|attn|input)_mask\W*$")


def not_trusted(baseline: Sequence[CallDescription], target: Sequence[CallDescription]) -> list[str]:
    """Sentences on calls that cannot be replayed, so that nothing that is found of them can be relied on."""
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


def not_checked(baseline: Sequence[CallDescription], target: Sequence[CallDescription]) -> list[str]:
    """What of these calls was not checked, in words that follow a common beginning."""
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


def difference_without_taps(
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


def rounds_earlier(
    baseline: Sequence[CallDescription], target: Sequence[CallDescription], findings: Findings
) -> str | None:
    """A sentence on a result that the target alone has in 16 bits, though both compute in these, if the target's is not
    the baseline's rounded: a softmax of logits of 16 bits, for example. A run in more bits cannot show that.
    """
    frame = findings.frame
    narrow = {*frame.loc[frame["cast"].isna(), "dtype"], findings.computed_in} & {*DTYPES_OF_16_BITS}
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


def differing_numbers(baseline: Sequence[CallDescription], target: Sequence[CallDescription]) -> list[str]:
    """A sentence on whole numbers among the arguments that differ and that no tap shows, as in an engine's metadata."""
    found: dict[str, None] = {}
    for ours, theirs in zip(baseline, target, strict=False):
        for path in ours.untapped_numbers:
            if path in theirs.untapped_numbers and not torch.equal(
                ours.whole_numbers[path], theirs.whole_numbers[path]
            ):
                found[ARGUMENT.sub(r"\1", path)] = None
    if not found:
        return []
    return [
        f"Whole numbers among the arguments already differ: {first_of(list(found), 4)}. No tap shows them, so code "
        "that reads them may be named below although it is right."
    ]


def in_training_alone(baseline: CallDescription, target: CallDescription) -> list[str]:
    """A sentence if dropouts or batch norms are in training mode on one side, and nothing is on the other."""
    for side, own, other in (("target", target, baseline), ("baseline", baseline, target)):
        if own.in_training and not (other.in_training or other.is_training):
            verb = "is" if len(own.in_training) == 1 else "are"
            return [
                f"On the {side} {first_of(list(own.in_training))} {verb} in training mode, and the "
                f"{other_side(side)}'s model is not: model.eval() ends that mode."
            ]
    return []


def in_padding(call: CallDescription, findings: Findings) -> list[str]:
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
                name = ARGUMENT.sub(r"\1", path)
                return [
                    f"Where the groups named below differ most, only rows that {name} masks by zeros differ. Padding "
                    "may differ in a right port, if nothing reads it."
                ]
    return []


def _differ_only_at(rows: Tensor, one: Tensor, other: Tensor) -> bool:
    """Whether two tensors agree to rounding except in these rows, given by a mask of their first two dimensions."""
    if one.shape != other.shape or one.shape[:2] != rows.shape:
        return False
    left, right = (each[~rows].double() for each in (one, other))
    limit = assumed_floor([str(each.dtype).removeprefix("torch.") for each in (one, other)])[0]
    return bool((left - right).norm() <= limit * left.norm())
