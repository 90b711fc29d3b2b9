"""The first operations of each side whose results the other side lacks: where a difference arises.

If both sides make an operation on equal values, both have its result, perhaps in different layouts. An operation is
*lost* if the other side has neither its result nor the result of any operation that depends on it. So a different
decomposition that arrives at the same values is no difference.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from graftlab.lines.fingerprints import (
    ANY_ORDER,
    COUNTS,
    DIFFERENT,
    IN_ORDER,
    Fingerprint,
    Level,
    agreement,
    joined,
)
from graftlab.lines.lost import LostOperation, StateRead
from graftlab.lines.operands import with_choices
from graftlab.lines.partners import ComparedSide, plain_shape, reads_shape_alone, with_constants, with_partners
from graftlab.lines.remedies import LostPart, Remedy, remedies
from graftlab.lines.traces import OperationPlace, SliceTrace, TracedOperation
from graftlab.lines.written_parts import with_place, writes_elsewhere

TOLERANCE = 1e-5


@dataclass(frozen=True)
class LostOnBothSides:
    """The lost operations of both sides, the most telling first.

    ``operations`` are the numbers of operations compared on each side. ``remedies`` are changes of the target's run
    that may show one line to be at fault.
    """

    baseline: list[LostOperation]
    target: list[LostOperation]
    operations: tuple[int, int]
    remedies: list[Remedy] = field(default_factory=list)


def first_lost(
    baseline: Sequence[SliceTrace], target: Sequence[SliceTrace], rank: int, tolerance: float = TOLERANCE
) -> LostOnBothSides:
    """Compare the traces of one call, one per rank of each side: the target's ``rank`` with the baseline.

    That is the baseline's same rank if both sides have equally many, otherwise its rank 0.
    """
    ours = rank if len(baseline) == len(target) else 0
    # A step that both sides make as a whole must not be judged by a part of it.
    theirs_by_rank, ours_by_rank = _every_value(target), _every_value(baseline)
    elsewhere, ours_elsewhere = (
        _FingerprintIndex([each for trace in side for each in trace.elsewhere], tolerance)
        for side in (baseline, target)
    )
    on_target = _Side(
        target[rank], target, rank, _FingerprintIndex(ours_by_rank, tolerance), _result(baseline[ours]), elsewhere
    )
    on_baseline = _Side(
        baseline[ours],
        baseline,
        ours,
        _FingerprintIndex(theirs_by_rank, tolerance),
        _result(target[rank]),
        ours_elsewhere,
    )
    if (missing := _missing_sum(baseline[ours], target, rank, tolerance)) is not None:
        return LostOnBothSides([], [missing], (len(baseline[ours].operations), len(target[rank].operations)))
    # Where the results differ only in their order, look for operations that differ in order too.
    results = _result(target[rank]), _result(baseline[ours])
    alike = DIFFERENT if None in results else agreement(*results, tolerance)  # type: ignore[arg-type]
    level = min(alike + 1, IN_ORDER)
    lost_there, lost_here = (side.first_lost(level) for side in (on_target, on_baseline))
    lost_there, lost_here = (
        with_choices(lost_there, lost_here, target[rank], baseline[ours]),
        with_choices(lost_here, lost_there, baseline[ours], target[rank]),
    )
    here, there = on_baseline.compared, on_target.compared
    lost_there, lost_here = (
        with_constants(there, lost_there, here, lost_here, tolerance),
        with_constants(here, lost_here, there, lost_there, tolerance),
    )
    own, others = (
        with_partners(lost_here, lost_there, here, there, tolerance),
        with_partners(lost_there, lost_here, there, here, tolerance),
    )
    writes = writes_elsewhere(baseline[ours], own, target[rank], others, tolerance) or (None, None)
    return LostOnBothSides(
        on_baseline.at_fault(own, level, writes[0]),
        on_target.at_fault(others, level, writes[1]),
        (len(baseline[ours].operations), len(target[rank].operations)),
        remedies(on_baseline.part(lost_here, level), on_target.part(lost_there, level), tolerance),
    )


def _missing_sum(
    baseline: SliceTrace, target: Sequence[SliceTrace], rank: int, tolerance: float
) -> LostOperation | None:
    """The last operation on the target's rank, if its results on all ranks add up to the baseline's."""
    whole, found = _result(baseline), [_result(each) for each in target]
    parts = [each for each in found if each is not None]
    if whole is None or len(parts) < 2 or len(parts) < len(found) or not _differ(parts):
        return None
    sources = target[rank].values[target[rank].result].sources
    last = [each for each in target[rank].operations if each.index in sources]
    if not last or not _is_sum(parts, whole, tolerance):
        return None
    return LostOperation(last[-1], has_equal_inputs=True, follows_inputs=True, lacks_sum=True)


def _result(trace: SliceTrace) -> Fingerprint | None:
    return trace.fingerprints.get(trace.result)


def _every_value(traces: Sequence[SliceTrace]) -> list[Fingerprint]:
    """All fingerprints of a side, with those of tensors that its ranks hold in shards."""
    found = [each for trace in traces for each in (*trace.fingerprints.values(), *trace.of_forward)]
    return [*found, *map(joined, _shards(traces).values())]


def _shards(traces: Sequence[SliceTrace]) -> dict[int, list[Fingerprint]]:
    """The fingerprints of one value on all ranks, by its number on the first rank."""
    if len(traces) < 2:
        return {}
    places = [_in_places(each) for each in traces]
    found = {}
    for place, number in places[0].items():
        # A rank may have more operations than those that all ranks have.
        parts = [trace.fingerprints.get(own.get(place, -1)) for trace, own in zip(traces, places, strict=True)]
        if all(part is not None for part in parts):
            found[number] = [part for part in parts if part is not None]
    return found


def _in_places(trace: SliceTrace) -> dict[tuple[OperationPlace, int], int]:
    """The number of each value, by the operation that read or wrote it and its position there."""
    return {
        (place, which): number
        for place, each in trace.places.items()
        for which, number in enumerate((*each.inputs, *each.outputs))
    }


class _FingerprintIndex:
    """Finds fingerprints among those of the other side."""

    def __init__(self, fingerprints: Iterable[Fingerprint], tolerance: float) -> None:
        self._tolerance = tolerance
        by_size: dict[tuple[int, bool], list[Fingerprint]] = defaultdict(list)
        for each in fingerprints:
            by_size[each.numel, each.mask].append(each)
        self._by_size = {size: sorted(found, key=_total) for size, found in by_size.items()}

    def has_sum(self, parts: Sequence[Fingerprint]) -> bool:
        """Return whether the other side has the sum of these summands of several ranks."""
        alike = self._by_size.get((parts[0].numel, parts[0].mask), [])
        return any(_is_sum(parts, each, self._tolerance) for each in alike)

    def find(self, wanted: Fingerprint, without: Fingerprint | None = None) -> tuple[Level, Level]:
        """Return the best agreement with any tensor but ``without``, and the best with one of the same shape."""
        found = self._by_size.get((wanted.numel, wanted.mask), [])
        rms = wanted.norm / math.sqrt(max(wanted.numel, 1))
        # For a given norm, the sum of magnitudes is largest if all are equal.
        reach = 2 * self._tolerance * wanted.numel * rms + 1e-30
        begin = bisect.bisect_left(found, _total(wanted) - reach, key=_total)
        best: Level = DIFFERENT
        shaped: Level = DIFFERENT
        for each in found[begin:]:
            if (_total(each) > _total(wanted) + reach and not wanted.mask) or best == shaped == IN_ORDER:
                break
            level = DIFFERENT if each is without else agreement(wanted, each, self._tolerance)
            if plain_shape(each) == plain_shape(wanted):
                shaped = max(shaped, level)
            best = max(best, level)
        return best, shaped


def _is_sum(parts: Sequence[Fingerprint], whole: Fingerprint, tolerance: float) -> bool:
    """Whether a tensor is the sum of those of several ranks."""
    if whole.numel != parts[0].numel or whole.nonfinite or any(each.nonfinite for each in parts):
        return False
    limit = 4 * tolerance * sum(each.norm for each in parts)
    projections = sum(each.projections for each in parts)
    total = sum(float(each.moments[0]) for each in parts)
    near = bool((abs(whole.projections - projections) <= limit).all())
    return near and abs(float(whole.moments[0]) - total) <= limit * math.sqrt(whole.numel)


def _differ(parts: Sequence[Fingerprint]) -> bool:
    """Whether the ranks have different tensors."""
    return any(agreement(parts[0], each, TOLERANCE) != IN_ORDER for each in parts[1:])


def _total(each: Fingerprint) -> float:
    return float(each.moments[1])


@dataclass
class _KnownShare:
    """How many elements of a value its parts have, and how many of these the other side has."""

    all: int = 0
    known: int = 0

    def add(self, size: int, is_known: bool) -> None:
        self.all += size
        self.known += size if is_known else 0

    @property
    def are_most(self) -> bool:
        """Whether the other side has at least half of the parts."""
        return self.known > 0 and 2 * self.known >= self.all


@dataclass
class _Side:
    """One rank's operations, judged by the other side's values."""

    trace: SliceTrace
    ranks: Sequence[SliceTrace]
    rank: int
    known: _FingerprintIndex
    other_result: Fingerprint | None
    """The other side's value of the tap, which differs from this side's."""
    elsewhere: _FingerprintIndex
    """Values that the other side computed before the tap, but not for it."""
    _levels: dict[int, tuple[Level, Level]] = field(default_factory=dict)
    _arrangements: dict[int, set[int]] = field(default_factory=dict)
    _lost_at: dict[int, list[TracedOperation]] = field(default_factory=dict)
    _of_all_ranks: dict[int, list[Fingerprint]] | None = None

    def level(self, number: int) -> Level:
        """How well a value matches one of the other side: a whole value, or this rank's part of one."""
        return self._found(number)[0]

    def _found(self, number: int) -> tuple[Level, Level]:
        if number not in self._levels:
            own = self.trace.fingerprints.get(number)
            without = self.other_result if number == self.trace.result else None
            nothing: tuple[Level, Level] = (DIFFERENT, DIFFERENT)
            found = nothing if own is None else self.known.find(own, without)
            if found[0] < ANY_ORDER and (parts := self._parts(number)):
                found = max(found, self.known.find(joined(parts), without))
                # Copies on the ranks are no summands.
                may_sum = number != self.trace.result and _differ(parts)
                if found[0] < ANY_ORDER and may_sum and self.known.has_sum(parts):
                    # A summand of a sum over the ranks that is still to come.
                    found = (IN_ORDER, IN_ORDER)
            self._levels[number] = found
        return self._levels[number]

    def _parts(self, number: int) -> list[Fingerprint]:
        """This value on every rank, this rank's first; empty where the ranks' operations differ."""
        if self._of_all_ranks is None:
            mine = [self.ranks[self.rank], *(each for n, each in enumerate(self.ranks) if n != self.rank)]
            self._of_all_ranks = _shards(mine)
        return self._of_all_ranks.get(number, [])

    @property
    def compared(self) -> ComparedSide:
        """This side as the search for partners needs it."""
        return ComparedSide(self.trace, self._forms, len(self.ranks))

    def _forms(self, number: int) -> list[Fingerprint]:
        """A value of this rank, and the whole if this rank has a part of it."""
        own = self.trace.fingerprints.get(number)
        if own is None:
            return []
        parts = self._parts(number)
        return [own, joined(parts)] if parts and _differ(parts) else [own]

    def says(self, number: int) -> bool:
        """Whether a value's fingerprint distinguishes it from unrelated values."""
        own = self.trace.fingerprints.get(number)
        return own is not None and not own.says_nothing

    def _is_silent_and_equal(self, number: int) -> bool:
        own = self.trace.fingerprints.get(number)
        return own is not None and own.says_nothing and self.level(number) == IN_ORDER

    # ---- lost -------------------------------------------------------------------------------------------------------

    def first_lost(self, level: int) -> list[LostOperation]:
        """The lost operations that depend on no other lost one, judged at this level; the most telling first."""
        everything = self._lost_here(level)
        # Operations that only arrange numbers that the other side has are lost because their readers are.
        arranges_known = self._arranging_known(level)
        lost = [each for each in everything if each.index not in arranges_known] or everything
        follows = self._follows_inputs
        tap_dependent = [each for each in lost if follows[each.index]]
        genuine = {
            each.index
            for each in lost
            if not follows[each.index] and (self._computes_from_known(each, level) or self._overwrites(each))
        }
        first = self._without_ancestors(tap_dependent, {each.index for each in tap_dependent})
        alone = self._without_ancestors(
            [each for each in lost if not follows[each.index]], {each.index for each in lost}
        )
        found: dict[int, LostOperation] = {}
        for each in first:
            ancestors = self._ancestors(each)
            for root in alone:
                if root.index in genuine and root.index in ancestors:
                    found.setdefault(root.index, LostOperation(root, self._has_equal_inputs(root), False))
                    for reader in self._first_readers(root, lost):
                        found.setdefault(reader.index, LostOperation(reader, False, False, state=self._state(reader)))
            this = LostOperation(
                each, self._has_equal_inputs(each), True, state=self._state(each), is_summand=self._is_summand(each)
            )
            if each.name.endswith("_") and each.inputs:
                # What takes a part of a value for it only tells where it writes.
                found[each.index] = this
            for suspect in (*self._omitting(each, everything, level), *self._suspects(each)):
                found.setdefault(suspect.index, LostOperation(suspect, False, follows[suspect.index], is_suspect=True))
            found[each.index] = this
        for each in alone:
            for suspect in self._suspects(each):
                found.setdefault(suspect.index, LostOperation(suspect, False, False, is_suspect=True))
            found.setdefault(each.index, LostOperation(each, self._has_equal_inputs(each), False))
        for each in tap_dependent:
            # If the other side uses a single operation for all of them, the fault may be in any.
            found.setdefault(each.index, LostOperation(each, False, True, is_later=True))
        return list(found.values())

    def _first_readers(self, operation: TracedOperation, lost: Sequence[TracedOperation]) -> list[TracedOperation]:
        """The first lost operations that compute from the result of one that reads no tensor, and from others.

        The other side may have counted beforehand what an ``arange`` counts here, and used it in a different way.
        """
        if operation.inputs:
            return []
        counted, numbers = {operation.index}, {*operation.outputs}
        found = []
        for each in lost:
            others = [number for number in each.inputs if number not in numbers]
            if len(others) == len(each.inputs):
                continue
            if not others:
                counted.add(each.index)
                numbers.update(each.outputs)
            elif not any(index in counted for number in others for index in self.trace.values[number].sources):
                found.append(each)
        return found

    def at_fault(self, lost: Sequence[LostOperation], level: int, write: LostOperation | None) -> list[LostOperation]:
        """The lost operations, attributed to the callers of lines that do the same elsewhere with right results.

        The caller of such a line is at fault: it calls the line once too often, or with wrong arguments. ``write``, a
        write to another place than the other side's, comes first.
        """
        wrong = {each.index for each in self._lost_here(level)}
        if write is not None:
            # What it leaves there is right.
            wrong.add(write.operation.index)
            lost = [write, *lost]
        of_lost = {each.operation.call for each in lost}
        ran = [each for each in self.trace.operations if each.index not in wrong and each.call in of_lost]
        right = [each for each in ran if any(map(self._is_known_to_agree, each.outputs))]
        right += [
            each
            for each, made in self.trace.ran_elsewhere
            if each.call in of_lost and any(self.elsewhere.find(own)[0] >= level for own in made)
        ]

        def called(operation: TracedOperation) -> TracedOperation:
            frames = operation.frames
            while len(frames) > 1 and frames[0].instruction >= 0 and not operation.only_arranges:
                depth = len(operation.frames) - len(frames)
                same = [each.frames for each in right if each.call == operation.call and len(each.frames) > depth + 1]
                callers = {(each[depth + 1], each[depth + 1].instruction) for each in same if each[depth] == frames[0]}
                # A line that runs again in a loop may be right at first by chance.
                if not callers or (frames[1], frames[1].instruction) in callers:
                    break
                frames = frames[1:]
            return replace(operation, frames=frames)

        found = [replace(each, operation=called(each.operation)) for each in lost]
        return found if write is None else [with_place(found[0]), *found[1:]]

    def _is_known_to_agree(self, number: int) -> bool:
        return self.says(number) and self._is_equal(number)

    def part(self, lost: Sequence[LostOperation], level: int) -> LostPart:
        """Return this side as the search for remedies needs it."""
        first = [each.operation for each in lost if not each.is_later]
        return LostPart(self.trace, self._lost_here(level), first[:3], self._is_known_to_agree)

    def _state(self, operation: TracedOperation) -> tuple[StateRead, ...]:
        """Tensors that outlive a call, which this reads, perhaps rearranged, and the other side does not read."""
        sources, by_index = self._sources, self._by_index
        found: dict[str, StateRead] = {}
        left = list(operation.inputs)
        while left:
            number = left.pop(0)
            value = self.trace.values[number]
            if value.path is not None and self.says(number) and not self.level(number):
                # Earlier calls were not traced, so the writer may be unknown.
                writer = by_index.get(max(value.sources, default=-1))
                found.setdefault(value.path, StateRead(value.path, writer))
            for index in sources[number]:
                if by_index[index].only_arranges:
                    left += by_index[index].inputs
        return tuple(found.values())

    def _is_summand(self, operation: TracedOperation) -> bool:
        """Whether the ranks' results of this operation differ, and a later collective reduces them."""
        parts = [part for number in operation.outputs[:1] for part in self._parts(number)]
        later = (each for each in self.trace.operations if each.is_collective and "reduce" in each.name)
        return bool(parts) and _differ(parts) and any(operation.index in self._ancestors(each) for each in later)

    def _arranging_known(self, level: int) -> set[int]:
        """The operations that only arrange values that the other side has, directly or through others that do so."""
        if level not in self._arrangements:
            found = self._arrangements[level] = set()
            # In execution order: a cache that many operations wrote to has all of them as its sources.
            for each in self.trace.operations:
                if each.only_arranges and all(
                    self.level(number) >= level or any(index in found for index in self._sources[number])
                    for number in each.inputs
                ):
                    found.add(each.index)
        return self._arrangements[level]

    def _omitting(
        self, operation: TracedOperation, lost: Sequence[TracedOperation], level: int
    ) -> list[TracedOperation]:
        """The lost operations that prepare this one's inputs and leave out a part of values that the other side has."""
        arranges_known, sources = self._arranging_known(level), self._sources
        by_index = {each.index: each for each in lost if each.index in arranges_known}
        found: dict[int, TracedOperation] = {}
        left = [index for number in operation.inputs for index in sources[number]]
        while left:
            each = by_index.get(left.pop())
            if each is None or each.index in found:
                continue
            sizes = [math.prod(self.trace.values[number].shape) for number in (*each.inputs[:1], *each.outputs[:1])]
            if len(sizes) == 2 and sizes[1] < sizes[0]:
                found[each.index] = each
            left += [index for number in each.inputs for index in sources[number]]
        return [found[index] for index in sorted(found)]

    def _lost(self, level: int) -> list[TracedOperation]:
        """The operations for which the other side has neither their results nor any that depend on them."""
        rescued: set[int] = set()
        equal: set[int] = set()
        readers, by_index = self._readers_of_values(), self._by_index

        def has(number: int) -> bool:
            return self.says(number) and self.level(number) >= level

        for each in reversed(self.trace.operations):
            # A single number, or a constant, proves nothing about earlier operations, but may itself be equal.
            used = [n for n in each.outputs if n in self.trace.fingerprints or readers[each.index, n]]
            if used and all(map(self._is_silent_and_equal, used)):
                equal.add(each.index)
            # An operation that takes a part of a value proves only that part: the rest may still differ.
            parts = _KnownShare()
            wholes: list[bool] = []
            for number in each.outputs:
                own = has(number)
                size = math.prod(self.trace.values[number].shape)
                taken, rest = _KnownShare(), 0
                if self.trace.values[number].dtype in COUNTS:
                    # A part of chosen indices may be right by chance.
                    own |= {*readers[each.index, number]} <= rescued and bool(readers[each.index, number])
                    parts.add(size, own)
                    wholes += [own] if number in used else []
                    continue
                for index in readers[each.index, number]:
                    if (made := self._part_of(by_index[index], number)) is None:
                        own |= index in rescued
                        # What reads the whole, and is lost, may read the rest.
                        rest = size
                    else:
                        taken.add(made, index in rescued)
                taken.add(max(rest - taken.all, 0), False)
                own |= taken.are_most
                parts.add(size, own)
                wholes += [own] if number in used else []
            # What comes beside a result, such as a norm's statistics, may be right although the result is not.
            if parts.are_most if each.only_arranges and len(each.outputs) > 1 else any(wholes[:1]):
                rescued.add(each.index)
        return [each for each in self.trace.operations if each.index not in rescued | equal]

    def _part_of(self, reader: TracedOperation, number: int) -> int | None:
        """The size of the part of a value that an operation takes; None if it reads the whole."""
        if not reader.only_arranges or len(reader.outputs) != 1:
            return None
        made, read = (math.prod(self.trace.values[each].shape) for each in (reader.outputs[0], number))
        return made if made < read else None

    def _lost_here(self, level: int) -> list[TracedOperation]:
        """The lost operations, without those whose results the other side computed for something else.

        These are right, and an operation after them reads the wrong value.
        """
        if level not in self._lost_at:
            self._lost_at[level] = self._without_excused(self._lost(level), level)
        return self._lost_at[level]

    def _without_excused(self, lost: list[TracedOperation], level: int) -> list[TracedOperation]:
        follows, drawn = self._follows_inputs, self._drawn_data()
        readers = self._readers()
        excused: set[int] = set()
        # What is only multiplied by zero, such as the decay of an empty state, makes no difference where the other side
        # has the product, or what it becomes. One that is lost may be wrongly zero.
        hides = {
            each.index for each in self.trace.operations if each.outputs and all(map(self._is_constant, each.outputs))
        } - {each.index for each in lost}
        for each in reversed(lost):
            # A constant may be another layer's by mistake, so only values that depend on inputs, and drawn numbers,
            # which are data, count.
            is_known = (follows[each.index] or each.index in drawn) and any(
                self.says(number) and self.elsewhere.find(self.trace.fingerprints[number])[0] >= level
                for number in (each.outputs if each.only_arranges else each.outputs[:1])
            )
            of = readers[each.index]
            if is_known or (of and all(index in excused or index in hides for index in of)):
                excused.add(each.index)
        left = [each for each in lost if each.index not in excused]
        return left if any(not each.only_arranges for each in left) else lost

    def _readers(self) -> Mapping[int, list[int]]:
        """The operations that read each operation's results."""
        found: dict[int, list[int]] = defaultdict(list)
        for each in self.trace.operations:
            for number in each.inputs:
                for index in self._sources[number]:
                    found[index].append(each.index)
        return found

    def _readers_of_values(self) -> Mapping[tuple[int, int], list[int]]:
        """For each operation and output, the operations that read it and whose results prove something about it.

        A value that several operations wrote to is an output of each.
        """
        found: dict[tuple[int, int], list[int]] = defaultdict(list)
        sources = self._sources
        outputs = {each.index: each.outputs for each in self.trace.operations}
        for each in self.trace.operations:
            if reads_shape_alone(each):
                continue
            is_constant = bool(each.outputs) and all(map(self._is_constant, each.outputs))
            for number in each.inputs:
                # Even a wrong value gives a constant if multiplied by zero. A constant made of another hides nothing.
                if is_constant and not self._is_constant(number):
                    continue
                for index in sources[number]:
                    of = number if number in outputs[index] else outputs[index][0] if outputs[index] else number
                    found[index, of].append(each.index)
        return found

    def _is_constant(self, number: int) -> bool:
        own = self.trace.fingerprints.get(number)
        return own is not None and own.constant and own.numel > 1

    @cached_property
    def _by_index(self) -> Mapping[int, TracedOperation]:
        return {each.index: each for each in self.trace.operations}

    @cached_property
    def _sources(self) -> Mapping[int, tuple[int, ...]]:
        """The operations that wrote each value, of those before it that no tap separates from it."""
        return {
            number: () if value.tap is not None else tuple(index for index in value.sources if index in self._by_index)
            for number, value in self.trace.values.items()
        }

    @cached_property
    def _follows_inputs(self) -> Mapping[int, bool]:
        """Whether each operation depends on a tap's value, or if no tap precedes the result, on any input."""
        values = self.trace.values
        has_taps = any(value.tap is not None for value in values.values())

        def begins(number: int) -> bool:
            value = values[number]
            if value.tap is not None:
                return True
            return not has_taps and not value.sources and not value.is_parameter

        sources = self._sources
        found: dict[int, bool] = {}
        for each in self.trace.operations:
            found[each.index] = any(
                begins(number) or any(found.get(index, False) for index in sources[number]) for number in each.inputs
            )
        return found

    def _drawn_data(self) -> set[int]:
        """The operations that draw random numbers into a new tensor, and those that rearrange such numbers.

        Numbers drawn in place, as for the initialisation of a weight, are not data.
        """
        sources = self._sources
        found: set[int] = set()
        for each in self.trace.operations:
            draws = each.is_random and not each.inputs and not each.name.endswith("_")
            arranges = each.only_arranges and each.name not in ("clone", "copy")
            if draws or (arranges and any(index in found for number in each.inputs for index in sources[number])):
                found.add(each.index)
        return found

    def _computes_from_known(self, operation: TracedOperation, level: int) -> bool:
        """Whether an operation computes new numbers from values that the other side has."""
        if operation.only_arranges or not any(self.says(number) for number in operation.outputs):
            return False
        return all(self.level(number) >= level for number in operation.inputs if self.says(number))

    def _overwrites(self, operation: TracedOperation) -> bool:
        """Whether an operation overwrites values by a constant, as ``x[-1] = 0`` does."""
        # From torch 2.15 on, the constant of an assignment is a number, no tensor that the operation reads.
        writes = operation.name == "fill_" or (operation.name.endswith("_") and bool(operation.inputs))
        return writes and all(map(self._is_constant, operation.outputs))

    def _has_equal_inputs(self, operation: TracedOperation) -> bool:
        # The state of a random number generator is an input, too.
        return not operation.is_random and all(self._is_equal(number) for number in operation.inputs)

    def _is_equal(self, number: int) -> bool:
        """Whether the other side has this value; in another order only if in another shape."""
        level, shaped = self._found(number)
        # If the other side has these numbers in this shape in another order, this side should have made that.
        return shaped != ANY_ORDER and (level == IN_ORDER or (level == ANY_ORDER and not shaped))

    def _suspects(self, operation: TracedOperation) -> list[TracedOperation]:
        """The operations before this one that gave a value a different order or different signs.

        For a value in a wrong order, these are the operation that first changed its order, perhaps intentionally, and
        the one that gave it the shape of the other side's correctly ordered value.
        """
        sources, by_index = self._sources, self._by_index
        found: dict[int, TracedOperation] = {}
        left = [number for number in operation.inputs if self._is_weak(number)]
        seen = set(left)
        while left:
            number = left.pop()
            for index in sources[number]:
                inputs = by_index[index].inputs
                if self._is_weak(number) and inputs and not any(map(self._is_weak, inputs)):
                    found[index] = by_index[index]
                partly = [each for each in inputs if self.says(each) and self.level(each) > DIFFERENT]
                before = [each for each in partly if self.level(each) < IN_ORDER or self._is_weak(each)]
                # New memory, which later operations fill, has no order of its own.
                if inputs and not before:
                    found[index] = by_index[index]
                left += [each for each in before if each not in seen]
                seen.update(before)
        return [found[index] for index in sorted(found)]

    def _is_weak(self, number: int) -> bool:
        return self.says(number) and self.level(number) != DIFFERENT and not self._is_equal(number)

    def _without_ancestors(self, chosen: Sequence[TracedOperation], others: set[int]) -> list[TracedOperation]:
        """The operations that depend on none of ``others``."""
        depend: set[int] = set()
        for each in self.trace.operations:
            sources = (index for number in each.inputs for index in self._sources[number])
            if any(index in others or index in depend for index in sources):
                depend.add(each.index)
        return [each for each in chosen if each.index not in depend]

    def _ancestors(self, operation: TracedOperation) -> set[int]:
        """The operations from which an operation computes its results."""
        found: set[int] = set()
        left = [operation]
        while left:
            for number in left.pop().inputs:
                new = [index for index in self._sources[number] if index not in found]
                found.update(new)
                left += [self._by_index[index] for index in new]
        return found
