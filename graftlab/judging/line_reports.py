"""What a traced call shows in a verdict: its lines of source, or why it has none, and why a line is not confirmed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from graftlab.base.world import Side
from graftlab.judging.traced_call import TracedCall
from graftlab.lines.lost import LostOperation, StateRead
from graftlab.lines.operations import MOST_OPERATIONS
from graftlab.lines.traces import TracedOperation
from graftlab.verdict.lines import DifferingLine, most_telling


def lines_of(
    call: TracedCall, ranks_that_run: Callable[[Side, TracedOperation], tuple[int, ...]]
) -> list[DifferingLine]:
    """The lines of a call, those of the target first. ``ranks_that_run`` returns the ranks of a side that run the line
    of an operation, if not all do.
    """
    if call.before is None:
        return []
    cure = call.cure
    if call.is_on_some_ranks and cure is None and not call.confirmed:
        # Without the parts of the other ranks, values that are right seem to be lost.
        return []
    confirmed = [each for each in call.kept if each.operation.index in call.confirmed]
    first = [each for each in call.before.target if not each.is_later and each not in confirmed]
    # The fault may be in any of them where none could be confirmed.
    later = [] if confirmed or cure is not None else [each for each in call.before.target if each.is_later]
    on_target = [*confirmed, *first, *later]
    on_baseline = [each for each in call.before.baseline if not each.is_later]
    sides: list[tuple[Side, list[LostOperation]]] = [
        ("target", on_target),
        ("baseline", _with_counterpart(on_baseline, on_target if cure is None else [])),
    ]
    if cure is not None:
        if cure.reader is not None:
            # Before values that the target alone computes elsewhere, which may be right.
            on_target.insert(0, LostOperation(cure.reader, has_equal_inputs=True, follows_inputs=True))
        for side, lost in sides:
            if side == cure.side:
                lost.insert(0, LostOperation(cure.operation, has_equal_inputs=True, follows_inputs=True))
    lines = []
    for side, lost in sides:
        seen: dict[tuple[str, int], DifferingLine] = {}
        for each in lost:
            if not each.operation.frames:
                continue
            frame = each.operation.frames[0]
            is_cure = cure is not None and each.operation is cure.operation
            is_confirmed = is_cure or (side == "target" and each.operation.index in call.confirmed)
            # Different random draws have different values: the fault may be in the code that uses them, such as a
            # swapped weight.
            is_confirmed = is_confirmed and (not each.operation.is_random or bool(each.operation.inputs))
            line = DifferingLine(
                call.group,
                side,
                frame.file,
                frame.line,
                frame.source,
                each.operation.call,
                each.operation.arguments,
                each.operation.shapes,
                is_confirmed,
                each.is_suspect or (each.operation.only_arranges and not (confirmed or cure)),
                each.lacks_sum,
                cure is not None and is_cure and cure.is_one_sided,
                tuple(read.name for read in each.state),
                tuple(_written(read) for read in each.state),
                call.wanted.name,
                call.wanted.step,
                call.wanted.occurrence,
                call.rank,
                each.operation.frames,
                ranks_that_run(side, each.operation),
                each.operation.is_random,
                each.puts_constants,
            )
            key = (frame.file, frame.line)
            if key in seen:
                line = replace(seen[key], confirmed=seen[key].confirmed or is_confirmed)
            seen[key] = line
        lines += most_telling(list(seen.values()))
    return lines


def _with_counterpart(baseline: Sequence[LostOperation], target: Sequence[LostOperation]) -> list[LostOperation]:
    """The baseline's lost operations, with the counterpart of the target's first one before them."""
    counterpart = target[0].counterpart if target else None
    if counterpart is None:
        return list(baseline)
    same = [each for each in baseline if each.operation.index == counterpart.index]
    # A counterpart that changes nothing was not lost.
    first = same or [LostOperation(counterpart, has_equal_inputs=True, follows_inputs=True)]
    return [*first, *(each for each in baseline if each.operation.index != counterpart.index)]


def _written(read: StateRead) -> str:
    """When and where a tensor was last written, in words; blank if unknown."""
    if read.writer is None or not read.writer.frames:
        return ""
    frame = read.writer.frames[0]
    return f"in step {read.writer.step} by {frame}  {frame.source}".rstrip()


def why_not_compared(call: TracedCall) -> str:
    """Why the operations of a call that were traced in part have no line."""
    run = "both sides run" if len(call.cut_short) > 1 else f"the {call.cut_short[0]} runs"
    return (
        f"No line of source is named for {call.group}: {run} more operations before it than a trace records "
        f"({MOST_OPERATIONS:,})."
    )


def why_not_confirmed(call: TracedCall) -> str:
    """Why a line is not confirmed, if its change could not be tried; blank for other lines."""
    first = [each for each in call.kept if not each.is_suspect][:1]
    if call.confirmed or call.cure is not None or not first or not first[0].operation.frames:
        return ""
    place = first[0].operation.frames[0]
    if call.raised:
        return f"{place} is not confirmed: the run with the baseline's value there failed ({call.raised})."
    if first[0].operation.is_collective:
        return f"{place} is not confirmed: a collective's result cannot be replaced while it may be under way."
    if first[0].is_summand and first[0].partner is None:
        return (
            f"{place} is not confirmed: its results are summed over the ranks, and the baseline has no such summands."
        )
    return ""
