"""Calls in training that differ, perhaps only because they do different work, so that the next update shows more."""

from __future__ import annotations

import math
from dataclasses import replace

from graftlab.base.tap_groups import kind_of_group
from graftlab.comparison.answers import Comparison
from graftlab.comparison.held_units import HeldUnits, described_as, numbers_given, split_alike, trains
from graftlab.ranks.call_description import CallDescription
from graftlab.verdict.wording import NOT_CHECKED

_SPLIT_DIFFERENTLY = (
    f"{NOT_CHECKED}single calls, whose results have different shapes on the two sides, or which are given different "
    "numbers of tokens: the sides split their batch differently, or their models return other results."
)
_IN_OTHER_ORDER = (
    f"{NOT_CHECKED}single calls, some of which need gradients on one side alone: the sides call their models in "
    "different orders, as a policy and a reference model."
)


def unless_of_a_part(compared: Comparison, held: HeldUnits) -> Comparison:
    """The comparison of a call in training; inconclusive if it names nothing but sums over rows, such as the loss and
    gradients, and the sides' calls are given different numbers of tokens or labels, as where one splits the batch.
    """
    found, (ours, theirs) = compared.findings, numbers_given(held)
    if compared.answer != "differ" or not trains(held) or split_alike(held) or ours == theirs:
        return compared
    named = found.frame[found.frame["group"].isin(found.named)]
    is_gradient = named["group"].map(kind_of_group).isin(("grad", "param_grad"))
    if found.unexplained or found.data or not (is_gradient | (named["shape"].map(math.prod) == 1)).all():
        return compared
    sentence = (
        f"The baseline's call is given {ours:,} numbers, such as tokens or labels, and the target's {theirs:,}, as "
        "where one side splits its batch. Only the loss and gradients differ, perhaps for that reason."
    )
    return replace(compared, answer="inconclusive", remarks=(sentence, *compared.remarks))


def why_left_to_update(compared: Comparison, held: HeldUnits) -> str | None:
    """A sentence on why the update that follows may show more than this call; None if the call is judged by itself."""
    if compared.answer == "inconclusive" and trains(held) and not split_alike(held):
        # Perhaps micro-batches.
        return _SPLIT_DIFFERENTLY
    return _IN_OTHER_ORDER if compared.answer == "differ" and needs_differ(held) else None


def perhaps_of_other_work(compared: Comparison, held: HeldUnits) -> Comparison:
    """The comparison of two calls that differ, with a sentence on why they may do different work: one side alone needs
    gradients, and the sides are given different numbers of tokens.
    """
    ours, theirs = numbers_given(held)
    if compared.answer != "differ" or not needs_differ(held) or ours == theirs:
        return compared
    needed = [any(call.needs_backward for call in side) for side in described_as(held, CallDescription)]
    how = ["with gradients" if needs else "without gradients" for needs in needed]
    sentence = (
        f"The baseline's call is given {ours:,} numbers, such as tokens, {how[0]}, and the target's {theirs:,}, "
        f"{how[1]}. If the scripts call their models in different orders, as for a reference model and a policy, these "
        "calls do different work, and what follows need not be a mistake."
    )
    return replace(compared, remarks=(sentence, *compared.remarks))


def needs_differ(held: HeldUnits) -> bool:
    """Whether the calls of one side alone need gradients."""
    ours, theirs = (any(call.needs_backward for call in side) for side in described_as(held, CallDescription))
    return ours != theirs
