"""Where a wrong operand was chosen: the lines that take a part of a value, such as those that unpack a split."""

from __future__ import annotations

from collections.abc import Sequence

from graftlab.lines.fingerprints import IN_ORDER, agreement
from graftlab.lines.lost import LostOperation
from graftlab.lines.traces import SliceTrace, TracedOperation

_TOLERANCE = 1e-5


def with_choices(
    lost: Sequence[LostOperation], others: Sequence[LostOperation], trace: SliceTrace, other: SliceTrace
) -> list[LostOperation]:
    """Return the lost operations, with the lines before them that chose what they read.

    Where one line does the same on both sides with other parts of a value, the line that took the part is at fault,
    if that is not the same on both sides. ``trace`` is that of ``lost``, ``other`` that of ``others``.
    """
    found: dict[int, LostOperation] = {}
    for each in lost:
        if not (each.is_suspect or each.is_later):
            for choice in _choices(each, others, trace, other):
                found.setdefault(choice.index, LostOperation(choice, False, each.follows_inputs, is_suspect=True))
        found[each.operation.index] = each
    return list(found.values())


def _choices(
    each: LostOperation, others: Sequence[LostOperation], trace: SliceTrace, other: SliceTrace
) -> list[TracedOperation]:
    """The operations that took the parts which this reads, where those of its counterpart were taken elsewhere."""
    alike = [one for one in others if not (one.is_suspect or one.is_later) and _is_same_line(one, each)]
    if not alike or not each.has_equal_inputs:
        return []
    found: dict[int, TracedOperation] = {}
    left = [(each.operation, alike[0].operation)]
    while left:
        mine, theirs = left.pop()
        for own, found_there in zip(mine.inputs, theirs.inputs, strict=False):
            makers = _maker(own, trace), _maker(found_there, other)
            if None in makers or not _differ(own, found_there, trace, other):
                continue
            ours, partner = makers
            assert ours is not None
            assert partner is not None
            if _what(ours) == _what(partner):
                left.append((ours, partner))
            elif ours.only_arranges and partner.only_arranges:
                found[ours.index] = ours
    return [found[index] for index in sorted(found)]


def _maker(number: int, trace: SliceTrace) -> TracedOperation | None:
    """The only operation that wrote a value in the trace; None for what a tap set, and what others wrote to as well."""
    value = trace.values[number]
    if value.tap is not None or len(value.sources) != 1:
        return None
    return next((each for each in trace.operations if each.index == value.sources[0]), None)


def _is_same_line(one: LostOperation, other: LostOperation) -> bool:
    """Whether both sides do the same on a line of the same text."""
    ours, theirs = one.operation, other.operation
    sources = [each.frames[0].source for each in (ours, theirs) if each.frames]
    return len(sources) == 2 and sources[0] == sources[1] != "" and ours.call == theirs.call


def _differ(mine: int, theirs: int, trace: SliceTrace, other: SliceTrace) -> bool:
    own, found = trace.fingerprints.get(mine), other.fingerprints.get(theirs)
    return own is not None and found is not None and agreement(own, found, _TOLERANCE) != IN_ORDER


def _what(operation: TracedOperation) -> tuple[str, str]:
    """What an operation does, and the words for it in its line."""
    return operation.frames[0].source if operation.frames else "", operation.call
