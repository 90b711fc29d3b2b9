"""Finds where a wrong operand was chosen: lines that take a part of a value, such as those that unpack a split."""

from __future__ import annotations

from collections.abc import Sequence

from graftlab.lines.dataflow import Dataflow
from graftlab.lines.fingerprints import IN_ORDER, agreement
from graftlab.lines.lost import LostOperation
from graftlab.lines.traces import TracedOperation

_TOLERANCE = 1e-5


def with_choices(
    lost: Sequence[LostOperation], others: Sequence[LostOperation], flow: Dataflow, other: Dataflow
) -> list[LostOperation]:
    """Return the lost operations, with the lines before them that chose their operands.

    If one line is the same on both sides but reads different parts of a value, the line that took the part is at fault,
    unless that too is the same on both sides. ``flow`` belongs to ``lost``, ``other`` to ``others``.
    """
    found: dict[int, LostOperation] = {}
    for each in lost:
        if not (each.is_suspect or each.is_later):
            for choice in _choices(each, others, flow, other):
                found.setdefault(
                    choice.index, LostOperation(choice, follows_inputs=each.follows_inputs, is_suspect=True)
                )
        found[each.operation.index] = each
    return list(found.values())


def _choices(
    each: LostOperation, others: Sequence[LostOperation], flow: Dataflow, other: Dataflow
) -> list[TracedOperation]:
    """The operations that took the parts which this reads, if its counterpart's parts come from different places."""
    alike = [one for one in others if not (one.is_suspect or one.is_later) and _is_same_line(one, each)]
    if not alike or not each.has_equal_inputs:
        return []
    found: dict[int, TracedOperation] = {}
    left = [(each.operation, alike[0].operation)]
    while left:
        mine, theirs = left.pop()
        for own, found_there in zip(mine.inputs, theirs.inputs, strict=False):
            ours, partner = _maker(own, flow), _maker(found_there, other)
            if ours is None or partner is None or not _differ(own, found_there, flow, other):
                continue
            if _line_and_call(ours) == _line_and_call(partner):
                left.append((ours, partner))
            elif ours.only_arranges and partner.only_arranges:
                found[ours.index] = ours
    return [found[index] for index in sorted(found)]


def _maker(number: int, flow: Dataflow) -> TracedOperation | None:
    """The only operation that wrote a value in the trace; None if a tap set it, or several operations wrote it."""
    value = flow.trace.values[number]
    if value.tap is not None or len(value.sources) != 1:
        return None
    return flow.by_index.get(value.sources[0])


def _is_same_line(one: LostOperation, other: LostOperation) -> bool:
    """Whether both operations are the same, on lines with the same text."""
    ours, theirs = one.operation, other.operation
    sources = [each.frames[0].source for each in (ours, theirs) if each.frames]
    return len(sources) == 2 and sources[0] == sources[1] != "" and ours.call == theirs.call


def _differ(mine: int, theirs: int, flow: Dataflow, other: Dataflow) -> bool:
    own, found = flow.trace.fingerprints.get(mine), other.trace.fingerprints.get(theirs)
    return own is not None and found is not None and agreement(own, found, _TOLERANCE) != IN_ORDER


def _line_and_call(operation: TracedOperation) -> tuple[str, str]:
    """The text of an operation's line, and its call in words."""
    return operation.frames[0].source if operation.frames else "", operation.call
