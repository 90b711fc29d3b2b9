"""Finds the rank whose operations differ, where ranks share one value but run different operations for it."""

from __future__ import annotations

from collections.abc import Sequence

from graftlab.lines.first_lost import TOLERANCE, LostOnBothSides, first_lost
from graftlab.lines.traces import SliceTrace, TracedOperation


def lost_where_ranks_differ(
    lost: LostOnBothSides,
    baseline: Sequence[SliceTrace],
    target: Sequence[SliceTrace],
    rank: int,
    tolerance: float = TOLERANCE,
) -> tuple[LostOnBothSides, int]:
    """Return the lost operations of the target's rank that is at fault, and this rank. ``lost`` are those of ``rank``.

    It is at fault itself, unless what it lost first may be another rank's fault, and another rank runs a different
    operation there. After a sum over the ranks, all of them have the wrong value of one.
    """
    first = _first(lost)
    if first is None or not _may_be_right(first, baseline, target):
        return lost, rank
    for other in range(len(target)):
        if other == rank:
            continue
        found = first_lost(baseline, target, other, tolerance)
        theirs = _first(found)
        if theirs is not None and not _may_be_right(theirs, baseline, target):
            return found, other
    return lost, rank


def _first(lost: LostOnBothSides) -> TracedOperation | None:
    return next((each.operation for each in lost.target if not (each.is_later or each.is_suspect)), None)


def _may_be_right(operation: TracedOperation, baseline: Sequence[SliceTrace], target: Sequence[SliceTrace]) -> bool:
    """Whether an operation that the target lost may read or share another rank's wrong value.

    This is so for a collective, and for an operation that the baseline makes with the same arguments and that not all
    ranks make: their parts of its result cannot be put together to be compared.
    """
    if operation.is_collective:
        return True
    same = (operation.name, operation.arguments)
    of_baseline = {(each.name, each.arguments) for trace in baseline for each in trace.operations}
    return same in of_baseline and len(ranks_that_run(operation, target)) < len(target)


def ranks_that_run(operation: TracedOperation, traces: Sequence[SliceTrace]) -> tuple[int, ...]:
    """The ranks that make an operation of this name at, or below, this operation's line."""
    line = operation.frames[:1]
    return tuple(
        rank
        for rank, trace in enumerate(traces)
        if any(each.name == operation.name and (not line or line[0] in each.frames) for each in trace.operations)
    )
