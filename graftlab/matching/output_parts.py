"""Pairs the part of an output that no value pairs, where the output's other parts have partners."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from graftlab.base.tap_groups import is_data, is_output
from graftlab.base.world import SIDES, Side
from graftlab.layouts import Layout, Part
from graftlab.matching.contradictions import IN_PART, uncovered
from graftlab.matching.pair import Pair
from graftlab.matching.proposal import Proposal
from graftlab.matching.recorded_taps import RecordedTap
from graftlab.plan.pairs import TapCallName


def with_outputs_in_parts(found: Proposal, baseline: Sequence[RecordedTap], target: Sequence[RecordedTap]) -> Proposal:
    """The proposal, with what is left of an output paired with the other side's output of that shape.

    Such as boxes and scores that the target returns in one tensor: if only its scores have the baseline's values, its
    other columns are the boxes.
    """
    for tap in _outputs(target):
        found = _with_rest_of(found, "target", tap, baseline)
    for tap in _outputs(baseline):
        found = _with_rest_of(found, "baseline", tap, target)
    return found


def _with_rest_of(found: Proposal, whole: Side, tap: RecordedTap, others: Sequence[RecordedTap]) -> Proposal:
    own = [pair for pair in found.pairs if pair.whole == whole and pair.outer == tap.name and is_output(pair.inner)]
    if not own or any(pair.sureness == "guess" or not pair.layout.leaves_out for pair in own):
        return found
    gap = uncovered((pair.layout for pair in own), tap.shape)
    part = None if gap is None else _only_part(gap)
    if part is None:
        return found
    (side,) = (each for each in SIDES if each != whole)
    alone = found.unmatched_baseline if side == "baseline" else found.unmatched_target
    shape = (*tap.shape[: part.dim], part.of[part.index], *tap.shape[part.dim + 1 :])
    fitting = [each.name for each in _outputs(others) if each.name in alone and tuple(each.shape) == shape]
    if len(fitting) != 1:
        return found
    names = {side: fitting[0], whole: tap.name}
    note = f"what is left of {tap.name} beside {', '.join(pair.inner for pair in own)}"
    made = Pair(names["baseline"], names["target"], Layout((part,)), whole, "rule", note=note)
    return replace(
        found,
        pairs=(*found.pairs, made),
        problems=tuple(each for each in found.problems if not each.startswith(f"{tap.name} {IN_PART}")),
        unmatched_baseline={name: why for name, why in found.unmatched_baseline.items() if name != made.baseline},
        unmatched_target={name: why for name, why in found.unmatched_target.items() if name != made.target},
    )


def _outputs(taps: Sequence[RecordedTap]) -> list[RecordedTap]:
    return [tap for tap in taps if is_output(TapCallName.of(tap.name).name) and not is_data(tap.tags)]


def _only_part(gap: Tensor) -> Part | None:
    """The part of one dimension that a mask covers; None if it is no such part, or the whole."""
    for dim, extent in enumerate(gap.shape):
        covered = gap.flatten() if gap.dim() == 1 else gap.movedim(dim, 0).flatten(1).all(1)
        places = covered.nonzero().flatten().tolist()
        if not places or len(places) == extent or len(places) * gap.numel() != int(gap.sum()) * extent:
            continue
        first, last = places[0], places[-1] + 1
        if last - first == len(places):
            of = [first, last - first, extent - last]
            return Part(1 if first else 0, tuple(each for each in of if each), dim)
    return None
