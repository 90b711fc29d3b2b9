"""Changes of the target's run that show whether one line is at fault: leave its operations out, or put them in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from graftlab.base.world import Side
from graftlab.lines.dataflow import Dataflow
from graftlab.lines.fingerprints import ANY_ORDER, IN_ORDER, Fingerprint, agree_in_order, agreement
from graftlab.lines.frames import SourceFrame
from graftlab.lines.traces import SliceTrace, TracedOperation

_DEEPEST = 4
"""How many lines of a stack are tried: an operation's own, and its callers."""


ChangeByOperation = Mapping[int, tuple[str | int | None, ...]]
"""What is changed about operations, by their index. Equal changes compare equal."""


def changes_of_grafts(grafted: Mapping[int, int]) -> ChangeByOperation:
    """The changes where operations have the results of the baseline's."""
    return {target: ("grafted", baseline) for target, baseline in grafted.items()}


@dataclass(frozen=True)
class Remedy:
    """A change of the target's run that makes a tap agree if one line's operations are at fault.

    ``side`` is the line's side, ``operation`` one of its operations, with that line first among the frames. ``passed``
    leaves out operations that only the target has: they return a value, by its number, unchanged. ``fed`` puts in what
    the target lacks: these operations read the result of the baseline's operation ``partner`` instead of a value, by
    its number; ``reader`` is the first of them. ``grafted`` are operations whose result is replaced by that of a
    baseline's operation. ``is_certain`` means that the values prove it without a run.
    """

    side: Side
    operation: TracedOperation
    passed: Mapping[int, int] = field(default_factory=dict)
    fed: Mapping[int, int] = field(default_factory=dict)
    partner: int | None = None
    reader: TracedOperation | None = None
    grafted: Mapping[int, int] = field(default_factory=dict)
    is_certain: bool = False

    @property
    def changes(self) -> ChangeByOperation:
        """The change of each of the target's operations that this changes."""
        return {
            **{index: ("passed", number) for index, number in self.passed.items()},
            **{index: ("fed", number, self.partner) for index, number in self.fed.items()},
            **changes_of_grafts(self.grafted),
        }

    @property
    def is_one_sided(self) -> bool:
        """Whether the other side has nothing in place of the line."""
        return not self.grafted


@dataclass(frozen=True)
class LostPart:
    """A side's operations, those that the other side lacks, the first of them, and a test for values it has."""

    flow: Dataflow
    lost: Sequence[TracedOperation]
    first: Sequence[TracedOperation]
    is_known: Callable[[int], bool]

    @property
    def trace(self) -> SliceTrace:
        return self.flow.trace


@dataclass(frozen=True)
class _Region:
    """The lost operations of one line, which make a single value. ``operation`` has that line first in its frames."""

    operation: TracedOperation
    last: TracedOperation
    made: int
    inputs: tuple[int, ...]
    indices: frozenset[int]


def remedies(baseline: LostPart, target: LostPart, tolerance: float) -> list[Remedy]:
    """Return possible changes, the most likely first."""
    kinds = (
        (2, _without_added(baseline, target, tolerance, alone=True)),
        (2, _with_lacking(baseline, target, tolerance)),
        (1, _with_whole_line(baseline, target, tolerance)),
        (1, _without_added(baseline, target, tolerance, alone=False)),
    )
    found: dict[object, Remedy] = {}
    for most, tried in kinds:
        # Changes where the other side's next operation reads the same value are more likely.
        likely = sorted(tried, key=lambda pair: not pair[0])
        if (certain := next((each for _, each in likely if each.is_certain), None)) is not None:
            return [certain]
        keyed = [(frozenset(each.changes.items()), each) for _, each in reversed(likely)]
        new = {key: each for key, each in keyed if key not in found}
        found |= dict(list(new.items())[: -most - 1 : -1])
    return list(found.values())


def _without_added(
    baseline: LostPart, target: LostPart, tolerance: float, *, alone: bool
) -> Iterator[tuple[bool, Remedy]]:
    """Yields changes that leave a region out, and whether the other side has an operation that reads what remains."""
    for region in _regions(target, alone=alone):
        after = _readers(region, target.trace)
        for number in _of_same_shape(region, target):
            alike = _equal_values(number, target.trace, baseline.trace, tolerance)
            if _does_nothing(region.last.name, alike, baseline.trace) is not None:
                continue
            if _has_counterpart(region, alike, target.trace, baseline, tolerance):
                continue
            reads = any(
                not alike.isdisjoint(each.inputs) and each.call in {own.call for own in after}
                for each in baseline.trace.operations
            )
            yield reads, Remedy("target", region.operation, passed={region.last.index: number})


def _with_lacking(baseline: LostPart, target: LostPart, tolerance: float) -> Iterator[tuple[bool, Remedy]]:
    computing = [each for each in target.lost if not each.only_arranges]
    for region in (*_regions(baseline, alone=True), *_regions(baseline, alone=False)):
        after = {each.call for each in _readers(region, baseline.trace)}
        for number in _of_same_shape(region, baseline):
            alike = _equal_values(number, baseline.trace, target.trace, tolerance)
            if (idle := _does_nothing(region.last.name, alike, target.trace)) is not None:
                if _is_of_one_line(idle, alike, target):
                    yield True, Remedy("target", idle, grafted={idle.index: region.last.index})
                # Otherwise the line that made its other arguments, such as a mask, is at fault.
                continue
            if _has_counterpart(region, alike, baseline.trace, target, tolerance):
                continue
            readers = {each.index: n for each in target.lost for n in each.inputs if n in alike}
            if readers:
                reads = any(each.index in readers and each.call in after for each in target.lost)
                first = next(each for each in target.lost if each.index == min(readers))
                yield reads, Remedy("baseline", region.operation, fed=readers, partner=region.last.index, reader=first)
            elif not computing and target.trace.result in alike and _makes_all(region, baseline, tolerance):
                yield True, Remedy("baseline", region.operation, is_certain=True)


def _readers(region: _Region, trace: SliceTrace) -> list[TracedOperation]:
    """The operations that read a region's result."""
    return [each for each in trace.operations if region.made in each.inputs and each.index not in region.indices]


def _with_whole_line(baseline: LostPart, target: LostPart, tolerance: float) -> Iterator[tuple[bool, Remedy]]:
    """Yields changes where both sides compute one value from equal inputs, each on one line."""
    for own in _regions(target, alone=False, deepest=1):
        for other in _regions(baseline, alone=False, deepest=1):
            shapes = target.trace.values[own.made].shape, baseline.trace.values[other.made].shape
            if shapes[0] == shapes[1] and _read_the_same(own, other, target, baseline, tolerance):
                yield False, Remedy("target", own.operation, grafted={own.last.index: other.last.index})


def _regions(part: LostPart, *, alone: bool, deepest: int = _DEEPEST) -> Iterator[_Region]:
    """For each first lost operation: itself, or the lost operations of its line and of that line's callers."""
    wrong = {each.index for each in (*part.lost, *part.first)}
    right = {
        (each.frames[0], each.call)
        for each in part.trace.operations
        if each.frames and each.index not in wrong and any(map(part.is_known, each.outputs))
    }

    def ran_right(operations: Sequence[TracedOperation], frame: SourceFrame | None) -> bool:
        """Whether the lines of these operations, except ``frame``, do the same elsewhere with right results."""
        computing = [each for each in operations if not each.only_arranges and each.frames[0] != frame]
        return all((each.frames[0], each.call) in right for each in computing)

    for first in part.first:
        if alone:
            chosen = [([first], first)]
        else:
            chosen = []
            for depth, frame in enumerate(first.frames[:deepest]):
                of_line = [each for each in part.lost if frame in each.frames]
                # A line that calls others is tried only if those are right elsewhere; otherwise one of them is at
                # fault.
                if depth == 0 or ran_right(of_line, frame):
                    chosen.append((of_line, replace(first, frames=first.frames[depth:])))
        for operations, named in chosen:
            # If lines do the same elsewhere with right results, not they but their caller is at fault.
            own = named.frames[:1] == first.frames[:1]
            if own and deepest > 1 and len(first.frames) > 1 and ran_right(operations, None):
                continue
            if (region := _region(operations, named, part.flow)) is not None:
                yield region


def _region(operations: Sequence[TracedOperation], named: TracedOperation, flow: Dataflow) -> _Region | None:
    """These operations as a region, if others read only one of their results."""
    own = frozenset(each.index for each in operations)
    outside = [number for each in flow.trace.operations if each.index not in own for number in each.inputs]
    made = {number for number in (*outside, flow.trace.result) if own.intersection(flow.sources[number])}
    if len(made) != 1:
        return None
    (number,) = made
    last = [each for each in operations if each.outputs[:1] == (number,)]
    if not last or last[-1].is_collective:
        return None
    read = dict.fromkeys(n for each in operations for n in each.inputs)
    inputs = tuple(number for number in read if own.isdisjoint(flow.sources[number]))
    return _Region(named, last[-1], number, inputs, own)


def _of_same_shape(region: _Region, part: LostPart) -> list[int]:
    """The values that a region reads, that the other side has, and that could replace its result."""
    values = part.trace.values
    made = values[region.made]
    read = dict.fromkeys(region.inputs)
    left = list(read)
    while left:
        # The region may read a part of a value, or the value in another arrangement.
        for index in part.flow.sources[left.pop()]:
            source = part.flow.by_index[index]
            if source.only_arranges and index not in region.indices:
                left += [number for number in source.inputs if number not in read]
                read |= dict.fromkeys(source.inputs)
    return [
        number
        for number in read
        if (values[number].shape, values[number].dtype) == (made.shape, made.dtype)
        and not values[number].is_parameter
        and part.is_known(number)
    ]


def _equal_values(number: int, trace: SliceTrace, other: SliceTrace, tolerance: float) -> set[int]:
    """The other side's values that equal this one in values and shape."""
    wanted = trace.fingerprints.get(number)
    if wanted is None:
        return set()
    return {
        each
        for each, found in other.fingerprints.items()
        if found.shape == wanted.shape and agree_in_order(wanted, found, tolerance)
    }


def _does_nothing(name: str, numbers: set[int], trace: SliceTrace) -> TracedOperation | None:
    """The operation of this name that leaves one of these values unchanged, such as one with a mask that hides nothing.

    Then this side does the same with different arguments, which are at fault.
    """
    return next(
        (
            each
            for each in trace.operations
            if each.name == name and not numbers.isdisjoint(each.inputs) and not numbers.isdisjoint(each.outputs)
        ),
        None,
    )


def _is_of_one_line(operation: TracedOperation, numbers: set[int], part: LostPart) -> bool:
    """Whether the operation's line computes all inputs but these values from values that the other side has."""
    by_index = part.flow.by_index
    left = [number for number in operation.inputs if number not in numbers]
    while left:
        number = left.pop()
        if part.is_known(number):
            continue
        sources = [by_index[index] for index in part.trace.values[number].sources if index in by_index]
        if not sources or any(each.frames[:1] != operation.frames[:1] for each in sources):
            return False
        left += [each for source in sources for each in source.inputs if each not in source.outputs]
    return True


def _has_counterpart(region: _Region, numbers: set[int], trace: SliceTrace, other: LostPart, tolerance: float) -> bool:
    """Whether the other side does the same to a value as a region, with different arguments. Then neither lacks it.

    ``numbers`` are the other side's values that equal the value. An operation that this side also has elsewhere,
    with the same arguments, is not the region's counterpart.
    """
    lost = {each.index for each in other.lost}

    def rest(operation: TracedOperation, without: set[int], of: SliceTrace) -> list[Fingerprint | None]:
        return [of.fingerprints.get(each) for each in operation.inputs if each not in without]

    def is_elsewhere(found: TracedOperation) -> bool:
        theirs = rest(found, numbers, other.trace)
        for each in trace.operations:
            if each.index in region.indices or each.call != found.call:
                continue
            for left in each.inputs:
                ours = rest(each, {left}, trace)
                if len(ours) == len(theirs) and all(
                    one is not None and two is not None and agree_in_order(one, two, tolerance)
                    for one, two in zip(ours, theirs, strict=True)
                ):
                    return True
        return False

    return any(
        each.name == region.last.name
        and each.index in lost
        and not each.only_arranges
        and not numbers.isdisjoint(each.inputs)
        and not is_elsewhere(each)
        for each in other.trace.operations
    )


def _makes_all(region: _Region, part: LostPart, tolerance: float) -> bool:
    """Whether the region has all lost operations that compute numbers, and its value is the result."""
    if any(each.index not in region.indices and not each.only_arranges for each in part.lost):
        return False
    made, result = (part.trace.fingerprints.get(number) for number in (region.made, part.trace.result))
    return made is not None and result is not None and agreement(made, result, tolerance) >= ANY_ORDER


def _read_the_same(own: _Region, other: _Region, part: LostPart, others: LostPart, tolerance: float) -> bool:
    """Whether two regions read the same values."""
    ours = [part.trace.fingerprints.get(number) for number in own.inputs]
    theirs = [others.trace.fingerprints.get(number) for number in other.inputs]
    known = [each for each in theirs if each is not None]
    if None in ours or len(known) < len(theirs):
        return False
    both = [each for each in ours if each is not None], known
    return all(
        any(_is_equal(each, found, tolerance) for found in there)
        for here, there in (both, both[::-1])
        for each in here
        if not each.says_nothing
    )


def _is_equal(one: Fingerprint, other: Fingerprint, tolerance: float) -> bool:
    """Whether two values are equal; in another order only if their shapes differ."""
    level = agreement(one, other, tolerance)
    return level == IN_ORDER or (level == ANY_ORDER and one.shape != other.shape)
