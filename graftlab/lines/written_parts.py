"""Finds writes of equal values to different places of equal tensors, such as to the wrong slot of a cache.

The part that such a write leaves is equal on both sides, and what reads the whole tensor later differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from graftlab.lines.fingerprints import IN_ORDER, agreement
from graftlab.lines.lost import LostOperation
from graftlab.lines.operations import WrittenPart
from graftlab.lines.traces import SliceTrace, TracedOperation


def writes_elsewhere(
    baseline: SliceTrace,
    on_baseline: Sequence[LostOperation],
    target: SliceTrace,
    on_target: Sequence[LostOperation],
    tolerance: float,
) -> tuple[LostOperation, LostOperation] | None:
    """The first such write of each side, the baseline's first, on the way to a first lost operation or the result."""

    def agree(own: int, its: int) -> bool:
        one, other = target.fingerprints.get(own), baseline.fingerprints.get(its)
        return one is not None and other is not None and agreement(one, other, tolerance) == IN_ORDER

    theirs = _writes_read_by(on_baseline, baseline)
    for write, part in _writes_read_by(on_target, target):
        for other, its in theirs:
            if (other.call, other.shapes) != (write.call, write.shapes) or part.begin == its.begin:
                continue
            ours, of_other = ((*each.inputs, *each.outputs[:1]) for each in (write, other))
            are_equal = len(ours) == len(of_other) and all(map(agree, (part.before, *ours), (its.before, *of_other)))
            is_known = part.after in target.fingerprints and its.after in baseline.fingerprints
            if are_equal and is_known and not agree(part.after, its.after):
                return (
                    LostOperation(other, has_equal_inputs=True, follows_inputs=True),
                    LostOperation(write, has_equal_inputs=True, follows_inputs=True),
                )
    return None


def with_place(lost: LostOperation) -> LostOperation:
    """Return the operation with the place to which it writes in its words."""
    places = ", ".join(str(list(part.begin)) for part in lost.operation.written_parts)
    return replace(lost, operation=replace(lost.operation, call=f"{lost.operation.call} at {places}"))


def _writes_read_by(lost: Sequence[LostOperation], trace: SliceTrace) -> list[tuple[TracedOperation, WrittenPart]]:
    """The writes to parts of what the first lost operation reads, or of the result, in execution order."""
    first = next((each.operation for each in lost if not each.is_later), None)
    moves = [each for each in trace.operations if each.only_arranges or each.name == "copy_"]
    moved = {number: each for each in moves for number in each.outputs}
    writes = {part.after: (each, part) for each in trace.operations for part in each.written_parts}
    found: list[tuple[TracedOperation, WrittenPart]] = []
    left = [trace.result, *(() if first is None else first.inputs)]
    seen = set(left)
    while left:
        number = left.pop()
        more = list(moved[number].inputs) if number in moved else []
        if number in writes:
            found.append(writes[number])
            more.append(writes[number][1].before)
        left += [each for each in more if each not in seen]
        seen.update(more)
    return sorted(found, key=lambda each: each[0].index)
