"""The request to trace on a rank, and its answer: the operations between a tap that differs and earlier taps."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from graftlab.base.tags import TapIdentity, identity
from graftlab.lines.fingerprints import Fingerprint
from graftlab.lines.frames import SourceFrame, model_entry
from graftlab.lines.operations import Operation, OperationRecorder, TracedValue, WrittenPart

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

    shown: dict[int, str] = field(default_factory=dict)
    passed: dict[int, int] = field(default_factory=dict)
    fed: dict[int, tuple[int, str]] = field(default_factory=dict)


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
    step: int
    arguments: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    is_collective: bool
    written_parts: tuple[WrittenPart, ...]

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
            operation.written_parts,
        )

    @property
    def reads_shape_alone(self) -> bool:
        """Whether this uses only the shape of its input, as ``zeros_like`` and ``new_full`` do."""
        return self.name.endswith("_like") or self.name.startswith("new_")


OperationPlace = tuple[str, SourceFrame | None, int]
"""An operation's identity on all ranks: its name, its line, and how many of that name the line has run before."""


@dataclass(frozen=True)
class SliceTrace:
    """The operations that lead to one value on one rank, in execution order.

    ``values`` has the values that they read and wrote, by number, ``fingerprints`` those that were taken. ``result`` is
    the tap's own value. ``without_fingerprint`` are values whose fingerprints were left out. ``elsewhere`` has the
    fingerprints, without quantiles, of values computed before that did not lead to the value. ``of_forward`` has, for a
    value of the backward pass, the fingerprints of the forward pass's values, since only one side's backward pass may
    read them. ``ran_elsewhere`` are operations that the lines of ``operations`` ran, but not for this value, each with
    what all that are like it computed. A trace of certain values alone has no values of the last three kinds.
    """

    operations: tuple[TracedOperation, ...]
    values: Mapping[int, TracedValue]
    fingerprints: Mapping[int, Fingerprint]
    result: int
    without_fingerprint: tuple[int, ...]
    is_cut_short: bool
    elsewhere: tuple[Fingerprint, ...] = ()
    of_forward: tuple[Fingerprint, ...] = ()
    ran_elsewhere: tuple[tuple[TracedOperation, tuple[Fingerprint, ...]], ...] = ()
    was_compiled: bool = False
    """Whether this process has compiled code, which ran eagerly for the trace."""

    def beside(self, earlier: SliceTrace) -> SliceTrace:
        """This trace, with the values of ``earlier``, a trace of the same call, for operations that did not lead to its
        value.
        """
        others = earlier.elsewhere, earlier.of_forward, earlier.ran_elsewhere
        return replace(self, elsewhere=others[0], of_forward=others[1], ran_elsewhere=others[2])

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
    parts = [part for each in chosen for part in each.written_parts]
    values.update(dict.fromkeys(number for part in parts for number in (part.before, part.after)))
    of_forward: tuple[Fingerprint, ...] = ()
    elsewhere: tuple[Fingerprint, ...] = ()
    if recorder.only is None:
        others = [number for number in recorder.fingerprints if number not in values]
        elsewhere = tuple(map(recorder.without_quantiles, others[-MOST_ELSEWHERE:]))
    if recorder.only is None and any(each.is_of_backward for each in chosen):
        outside = {number for each in recorder.operations if not each.is_of_backward for number in each.outputs}
        of_forward = tuple(
            recorder.fingerprints[number]
            for number in sorted(outside - values.keys())
            if number in recorder.fingerprints
        )
    read = {result, *(number for each in chosen for number in each.inputs)}
    return SliceTrace(
        tuple(TracedOperation.of(each) for each in chosen),
        {number: recorder.values[number] for number in values},
        {number: recorder.fingerprints[number] for number in values if number in recorder.fingerprints},
        result,
        tuple(sorted(read & recorder.left_out)),
        recorder.is_cut_short,
        elsewhere,
        of_forward,
        () if recorder.only is not None else tuple(_elsewhere(recorder, chosen)),
    )


def _elsewhere(
    recorder: OperationRecorder, chosen: Sequence[Operation]
) -> Iterator[tuple[TracedOperation, tuple[Fingerprint, ...]]]:
    def line(operation: Operation) -> object:
        entry = model_entry(operation.stack)
        return entry and (id(entry.code), entry.line, operation.call)

    lines = {line(each) for each in chosen}
    indices = {each.index for each in chosen}
    # A line in a loop runs thousands of operations that differ only in their values.
    alike: dict[object, list[Operation]] = defaultdict(list)
    for each in recorder.operations:
        if each.index not in indices and not each.only_arranges and recorder.fingerprints.keys() & each.outputs:
            key = (each.call, *map(id, each.stack))
            alike[key].append(each)
    for same in alike.values():
        if line(same[0]) in lines:
            made = [next(n for n in each.outputs if n in recorder.fingerprints) for each in same]
            yield TracedOperation.of(same[0]), tuple(map(recorder.without_quantiles, made))
