"""The request to trace on a rank, and its answer: the operations between a tap that differs and earlier taps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from graftlab.base.tags import TapIdentity, identity
from graftlab.lines.fingerprints import Fingerprint
from graftlab.lines.frames import SourceFrame, model_entry
from graftlab.lines.operations import Operation, OperationRecorder, TracedValue

MOST_ELSEWHERE = 4096

LINE_TAP = "graftlab.line"
"""The prefix of the names of taps at operations, which confirm a line."""


@dataclass(frozen=True)
class WantedCall:
    """One call of a tap: the name and tags of its pair, the step counted from the run's first, and the occurrence.

    ``order`` is the approximate number of taps that the step has reached before.
    """

    name: str
    tags: Mapping[str, Any]
    step: int
    occurrence: int
    order: int = 0

    def is_at(self, which: TapIdentity, step: int, occurrence: int) -> bool:
        """Return whether a tap's call is this one."""
        return (step, occurrence) == (self.step, self.occurrence) and which == identity(
            {**self.tags, "name": self.name}
        )


@dataclass(frozen=True)
class OperationChanges:
    """The changes of a traced run at single operations, by their index.

    ``shown`` has the tap names of operations whose results are shown as taps. ``passed`` has the numbers of values that
    operations return unchanged. ``fed`` has the numbers of values that operations read, each with the name of the tap
    whose value they read instead.
    """

    shown: Mapping[int, str] = field(default_factory=dict)
    passed: Mapping[int, int] = field(default_factory=dict)
    fed: Mapping[int, tuple[int, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class TraceRequest:
    """A request to trace in one run.

    ``grafted`` are the calls of taps that have the baseline's values, each with its step and occurrence. ``only`` are
    the values to take fingerprints of; None means all.
    """

    wanted: Sequence[WantedCall]
    grafted: frozenset[tuple[TapIdentity, int, int]]
    changes: OperationChanges = field(default_factory=OperationChanges)
    only: frozenset[int] | None = None


@dataclass(frozen=True)
class TracedOperation:
    """An operation with its lines of source: the line to show first, then the stack, innermost first."""

    index: int
    name: str
    call: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    frames: tuple[SourceFrame, ...]
    only_arranges: bool
    is_random: bool
    step: int = 0
    arguments: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    is_collective: bool = False

    @classmethod
    def of(cls, operation: Operation) -> TracedOperation:
        """Return a recorded operation with the text of its lines."""
        return cls(
            operation.index,
            operation.name,
            operation.call,
            operation.inputs,
            operation.outputs,
            tuple(operation.frames()),
            operation.only_arranges,
            operation.is_random,
            operation.step,
            operation.arguments,
            operation.shapes,
            operation.is_collective,
        )


OperationPlace = tuple[str, SourceFrame | None, int]
"""An operation's identity on all ranks: its name, its line, and how many of that name the line has run before."""


@dataclass(frozen=True)
class SliceTrace:
    """The operations that lead to one value on one rank, in execution order.

    ``values`` has the values that they read and wrote, by number, ``fingerprints`` those that were taken. ``result`` is
    the tap's own value. ``without_fingerprint`` are values for which the budget did not suffice. ``elsewhere`` has the
    fingerprints, without quantiles, of values computed before that did not lead to the value. ``of_forward`` has, for a
    value of the backward pass, the fingerprints of the forward pass's values, since only one side's backward pass may
    read them.
    """

    operations: tuple[TracedOperation, ...]
    values: Mapping[int, TracedValue]
    fingerprints: Mapping[int, Fingerprint]
    result: int
    without_fingerprint: tuple[int, ...]
    is_cut_short: bool
    elsewhere: tuple[Fingerprint, ...] = ()
    of_forward: tuple[Fingerprint, ...] = ()
    ran_elsewhere: tuple[tuple[TracedOperation, Fingerprint], ...] = ()

    @property
    def places(self) -> dict[OperationPlace, TracedOperation]:
        """The operations, by their identity on all ranks."""
        counts = Counter[tuple[str, SourceFrame | None]]()
        found = {}
        for each in self.operations:
            name, line = each.name, next(iter(each.frames), None)
            found[name, line, counts[name, line]] = each
            counts[name, line] += 1
        return found


def slice_of(recorder: OperationRecorder, result: int) -> SliceTrace:
    """Return the operations that lead to a value, by number, from values of taps and values that existed before.

    ``recorder`` must have read the value.
    """
    operations: dict[int, None] = {}
    values = {result: None}
    left = [result]
    while left:
        value = recorder.values[left.pop()]
        if value.tap is not None or value.is_parameter:
            continue
        for index in value.sources:
            if index in operations:
                continue
            operations[index] = None
            for number in recorder.operations[index].inputs:
                if number not in values:
                    values[number] = None
                    left.append(number)
    chosen = [recorder.operations[index] for index in sorted(operations)]
    values.update(dict.fromkeys(number for each in chosen for number in each.outputs))
    of_forward: tuple[Fingerprint, ...] = ()
    if any(each.is_of_backward for each in chosen):
        outside = {number for each in recorder.operations if not each.is_of_backward for number in each.outputs}
        of_forward = tuple(
            recorder.fingerprints[number]
            for number in sorted(outside - values.keys())
            if number in recorder.fingerprints
        )
    read = {result, *(number for each in chosen for number in each.inputs)}
    elsewhere = tuple(recorder.without_quantiles(number) for number in recorder.fingerprints if number not in values)
    return SliceTrace(
        tuple(TracedOperation.of(each) for each in chosen),
        {number: recorder.values[number] for number in values},
        {number: recorder.fingerprints[number] for number in values if number in recorder.fingerprints},
        result,
        tuple(sorted(read & recorder.over_budget)),
        recorder.is_cut_short,
        elsewhere[-MOST_ELSEWHERE:],
        of_forward,
        tuple(_elsewhere(recorder, chosen)),
    )


def _elsewhere(
    recorder: OperationRecorder, chosen: Sequence[Operation]
) -> Iterator[tuple[TracedOperation, Fingerprint]]:
    def line(operation: Operation) -> object:
        entry = model_entry(operation.stack)
        return entry and (entry.code, entry.line, operation.call)

    lines = {line(each) for each in chosen}
    indices = {each.index for each in chosen}
    for each in recorder.operations:
        known = [recorder.without_quantiles(number) for number in each.outputs if number in recorder.fingerprints]
        if known and each.index not in indices and not each.only_arranges and line(each) in lines:
            yield TracedOperation.of(each), known[0]
