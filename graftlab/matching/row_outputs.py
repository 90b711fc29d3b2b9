"""Pairs the outputs of a packed and a padded batch by their rows, if their values do not pair them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from graftlab.base.tap_groups import is_data, is_output
from graftlab.layouts import Gather, Rows
from graftlab.matching.pair import Pair
from graftlab.matching.proposal import Proposal
from graftlab.matching.recorded_taps import RecordedTap
from graftlab.plan.pairs import TapCallName


def with_outputs_in_rows(found: Proposal, baseline: Sequence[RecordedTap], target: Sequence[RecordedTap]) -> Proposal:
    """The proposal, with the output of each side paired in the rows of a tap that has a partner.

    One of them has no partner, and both have the shapes of that pair, such as those of the head before a wrong factor
    of the logits. The other's partner may be the head itself, where a side leaves the factor out.
    """
    one, other = _output(baseline, found.unmatched_baseline), _output(target, found.unmatched_target)
    if one is None or other is None:
        return found
    if one.name not in found.unmatched_baseline and other.name not in found.unmatched_target:
        return found
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
    kept = [pair for pair in found.pairs if pair.baseline != one.name and pair.target != other.name]
    gone = [pair for pair in found.pairs if pair not in kept]
    pairs = (*kept, made)
    left, right = {pair.baseline for pair in pairs}, {pair.target for pair in pairs}
    why = f"has the values of an output, and {one.name} and {other.name} are paired"
    ours = {**found.unmatched_baseline, **{pair.baseline: why for pair in gone}}
    theirs = {**found.unmatched_target, **{pair.target: why for pair in gone}}
    return replace(
        found,
        pairs=pairs,
        unmatched_baseline={name: reason for name, reason in ours.items() if name not in left},
        unmatched_target={name: reason for name, reason in theirs.items() if name not in right},
    )


def _output(taps: Sequence[RecordedTap], unmatched: Collection[str]) -> RecordedTap | None:
    """The one output that has no partner; if all have one, the only output; otherwise None."""
    outputs = [tap for tap in taps if is_output(TapCallName.of(tap.name).name) and not is_data(tap.tags)]
    alone = [tap for tap in outputs if tap.name in unmatched] or outputs
    return alone[0] if len(alone) == 1 else None
