"""Pairs the outputs of a packed and a padded batch by their rows, if their values do not pair them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from graftlab.base.tap_groups import is_data, is_output
from graftlab.layouts import Gather, Rows
from graftlab.matching.pair import Pair
from graftlab.matching.proposal import Proposal
from graftlab.matching.recorded_taps import RecordedTap
from graftlab.plan.pairs import TapCallName


def with_outputs_in_rows(found: Proposal, baseline: Sequence[RecordedTap], target: Sequence[RecordedTap]) -> Proposal:
    """The proposal, with the one output of each side that has no partner paired, in the rows of a tap that has one.

    Both outputs must have the shapes of that pair, such as those of the head before a wrong factor of the logits.
    """
    (ours, theirs) = (
        [tap for tap in taps if tap.name in left and is_output(TapCallName.of(tap.name).name) and not is_data(tap.tags)]
        for taps, left in ((baseline, found.unmatched_baseline), (target, found.unmatched_target))
    )
    if len(ours) != 1 or len(theirs) != 1:
        return found
    one, other = ours[0], theirs[0]
    shapes = [{tap.name: tap.shape for tap in taps} for taps in (baseline, target)]
    alike = [
        pair
        for pair in found.graftable
        if any(isinstance(step, (Rows, Gather)) for step in pair.layout.steps)
        and (shapes[0].get(pair.baseline), shapes[1].get(pair.target)) == (one.shape, other.shape)
    ]
    if not alike:
        return found
    last = alike[-1]
    made = Pair(one.name, other.name, last.layout, last.whole, "rule", note=f"in the rows of {last.baseline}")
    return replace(
        found,
        pairs=(*found.pairs, made),
        unmatched_baseline={name: why for name, why in found.unmatched_baseline.items() if name != one.name},
        unmatched_target={name: why for name, why in found.unmatched_target.items() if name != other.name},
    )
