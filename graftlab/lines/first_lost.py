"""The first operations of each side whose results the other side lacks: where a difference arises.

If both sides make an operation on equal values, both have its result, perhaps in different layouts. An operation is
*lost* if the other side has neither its result nor the result of any operation that depends on it. So a different
decomposition that arrives at the same values is no difference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from graftlab.lines.dataflow import Dataflow
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
from graftlab.lines.known_values import KnownValues, every_value, is_sum, shards_of
from graftlab.lines.lost import LostOperation, StateRead
from graftlab.lines.operands import with_choices
from graftlab.lines.partners import (
    ComparedSide,
    plain_shape,
    with_constants,
    with_partners,
    with_shared_inputs_first,
)
from graftlab.lines.remedies import LostPart, Remedy, remedies
from graftlab.lines.rows import KnownRows
from graftlab.lines.traces import SliceTrace, TracedOperation
from graftlab.lines.written_parts import with_place, writes_elsewhere

TOLERANCE = 1e-5
_NEW_MEMORY = frozenset({"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"})
_LEAST_REAL = 0.5
"""The part of the rows of a padded value that the packed ones must have; the rest may be padding."""


@dataclass(frozen=True)
class LostOnBothSides:
    """The lost operations of both sides, the most telling first.

    ``remedies`` are changes of the target's run that may show one line to be at fault.
    """

    baseline: list[LostOperation]
    target: list[LostOperation]
    remedies: list[Remedy] = field(default_factory=list)


def first_lost(
    baseline: Sequence[SliceTrace], target: Sequence[SliceTrace], rank: int, tolerance: float = TOLERANCE
) -> LostOnBothSides:
    """Compare the traces of one call, one per rank of each side: the target's ``rank`` with the baseline.

    That is the baseline's same rank if both sides have equally many, otherwise its rank 0.
    """
    ours = rank if len(baseline) == len(target) else 0
    # A step that both sides make as a whole must not be judged by a part of it.
    theirs_by_rank, ours_by_rank = every_value(target), every_value(baseline)
    elsewhere, ours_elsewhere = (
        KnownValues([each for trace in side for each in trace.elsewhere], tolerance) for side in (baseline, target)
    )
    shares = _shares_of_rows(baseline[ours], target[rank])
    on_target = _Side(
        target[rank],
        target,
        rank,
        KnownValues(ours_by_rank, tolerance),
        _result(baseline[ours]),
        elsewhere,
        _known_rows(ours_by_rank, tolerance, shares and shares[1]),
    )
    on_baseline = _Side(
        baseline[ours],
        baseline,
        ours,
        KnownValues(theirs_by_rank, tolerance),
        _result(target[rank]),
        ours_elsewhere,
        _known_rows(theirs_by_rank, tolerance, shares and shares[0]),
    )
    if (missing := _missing_sum(baseline[ours], target, rank, tolerance)) is not None:
        return LostOnBothSides([], [missing])
    # Where the results differ only in their order, look for operations that differ in order too.
    one, other = _result(target[rank]), _result(baseline[ours])
    alike = DIFFERENT if one is None or other is None else agreement(one, other, tolerance)
    level = min(alike + 1, IN_ORDER)
    lost_there, lost_here = (side.first_lost(level) for side in (on_target, on_baseline))
    here, there = on_baseline.compared, on_target.compared
    lost_there, lost_here = (
        with_choices(lost_there, lost_here, there.flow, here.flow),
        with_choices(lost_here, lost_there, here.flow, there.flow),
    )
    lost_there, lost_here = (
        with_constants(there, lost_there, here, lost_here, tolerance),
        with_constants(here, lost_here, there, lost_there, tolerance),
    )
    own, others = (
        with_partners(lost_here, lost_there, here, there, tolerance),
        with_partners(lost_there, lost_here, there, here, tolerance),
    )
    writes = writes_elsewhere(baseline[ours], own, target[rank], others, tolerance) or (None, None)
    own = with_shared_inputs_first(here, own, there, others, tolerance)
    return LostOnBothSides(
        on_baseline.at_fault(own, level, writes[0]),
        on_target.at_fault(others, level, writes[1]),
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
    if not last or not is_sum(parts, whole, tolerance):
        return None
    return LostOperation(last[-1], has_equal_inputs=True, follows_inputs=True, lacks_sum=True)


def _result(trace: SliceTrace) -> Fingerprint | None:
    return trace.fingerprints.get(trace.result)


def _known_rows(values: Sequence[Fingerprint], tolerance: float, share: float | None) -> KnownRows | None:
    rows = [(each.shape[-1], each.rows) for each in values if each.rows is not None]
    return None if share is None or not rows else KnownRows(rows, tolerance, share)


def _shares_of_rows(baseline: SliceTrace, target: SliceTrace) -> tuple[float, float] | None:
    """The parts of a value's rows that the other side must have, for a value of each side.

    All rows of a packed batch, and of a padded one without its padding. None if neither side has a packed batch where
    the other has a padded one.
    """
    one, other = _result(baseline), _result(target)
    if one is None or other is None or one.rows is None or other.rows is None or one.shape[-1] != other.shape[-1]:
        return None
    if one.numel != other.numel:
        padded = min(_LEAST_REAL, 0.99 * min(one.numel, other.numel) / max(one.numel, other.numel))
        return (padded, 1.0) if one.numel > other.numel else (1.0, padded)
    packed = [_loops_over_lengths(each) for each in (baseline, target)]
    if packed[0] == packed[1]:
        # Without padding, the sequences of a batch are one dimension of a packed one.
        dims = [len(plain_shape(each)) for each in (one, other)]
        packed = [dims[0] < dims[1], dims[1] < dims[0]]
    return None if packed[0] == packed[1] else (1.0, _LEAST_REAL) if packed[0] else (_LEAST_REAL, 1.0)


def _loops_over_lengths(trace: SliceTrace) -> bool:
    """Whether a line computes one value after another, each of another size, as for requests."""
    made: dict[object, set[tuple[int, ...]]] = {}
    for each in trace.operations:
        if each.frames and each.outputs and not each.only_arranges:
            shape = trace.values[each.outputs[0]].shape
            made.setdefault((each.name, each.frames, len(shape)), set()).add(shape)
    return any(len(shapes) > 1 for shapes in made.values())


def _differ(parts: Sequence[Fingerprint]) -> bool:
    """Whether the ranks have different tensors."""
    return any(agreement(parts[0], each, TOLERANCE) != IN_ORDER for each in parts[1:])


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
    known: KnownValues
    other_result: Fingerprint | None
    """The other side's value of the tap, which differs from this side's."""
    elsewhere: KnownValues
    """Values that the other side computed before the tap, but not for it."""
    rows: KnownRows | None
    """The other side's rows, if one side's batch is padded and the other's is not."""
    _levels: dict[int, tuple[Level, Level]] = field(default_factory=dict)
    _arrangements: dict[int, set[int]] = field(default_factory=dict)
    _lost_at: dict[int, list[TracedOperation]] = field(default_factory=dict)

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
            if found[0] < ANY_ORDER and own is not None and self._has_rows(own, number):
                found = (IN_ORDER, DIFFERENT)
            self._levels[number] = found
        return self._levels[number]

    def _has_rows(self, own: Fingerprint, number: int) -> bool:
        """Whether the other side has a value's rows, in a value with more or fewer of them."""
        if self.rows is None or own.rows is None or number == self.trace.result or self.known.has_size(own):
            return False
        return self.rows.has(own.shape[-1], own.rows)

    def _parts(self, number: int) -> list[Fingerprint]:
        """This value on every rank, this rank's first; empty where the ranks' operations differ."""
        return self._of_all_ranks.get(number, [])

    @cached_property
    def _of_all_ranks(self) -> dict[int, list[Fingerprint]]:
        return shards_of([self.trace, *(each for n, each in enumerate(self.ranks) if n != self.rank)])

    @cached_property
    def _flow(self) -> Dataflow:
        return Dataflow(self.trace)

    @property
    def compared(self) -> ComparedSide:
        """This side as the search for partners needs it."""
        return ComparedSide(self._flow, self._forms, len(self.ranks))

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
        follows = self._flow.follows_inputs
        tap_dependent = [each for each in lost if follows[each.index]]
        genuine = {
            each.index
            for each in lost
            if not follows[each.index] and (self._computes_from_known(each, level) or self._overwrites(each))
        }
        first = self._flow.without_ancestors(tap_dependent, {each.index for each in tap_dependent})
        alone = self._flow.without_ancestors(
            [each for each in lost if not follows[each.index]], {each.index for each in lost}
        )
        found: dict[int, LostOperation] = {}
        for each in first:
            ancestors = self._flow.ancestors(each)
            for root in alone:
                if root.index in genuine and root.index in ancestors:
                    found.setdefault(root.index, LostOperation(root, has_equal_inputs=self._has_equal_inputs(root)))
                    for reader in self._first_readers(root, lost):
                        found.setdefault(reader.index, LostOperation(reader, state=self._state(reader)))
            this = LostOperation(
                each,
                has_equal_inputs=self._has_equal_inputs(each),
                follows_inputs=True,
                state=self._state(each),
                is_summand=self._is_summand(each),
            )
            if each.name.endswith("_") and each.inputs:
                # What takes a part of a value for it only tells where it writes.
                found[each.index] = this
            for suspect in (*self._omitting(each, everything, level), *self._suspects(each)):
                found.setdefault(
                    suspect.index, LostOperation(suspect, follows_inputs=follows[suspect.index], is_suspect=True)
                )
            found[each.index] = this
        for each in alone:
            for suspect in self._suspects(each):
                found.setdefault(suspect.index, LostOperation(suspect, is_suspect=True))
            found.setdefault(each.index, LostOperation(each, has_equal_inputs=self._has_equal_inputs(each)))
        for each in tap_dependent:
            # If the other side uses a single operation for all of them, the fault may be in any.
            found.setdefault(each.index, LostOperation(each, follows_inputs=True, is_later=True))
        # What new memory happens to hold is no result.
        new = [replace(each, is_later=True) for each in found.values() if each.operation.name in _NEW_MEMORY]
        results = [each for each in found.values() if each.operation.name not in _NEW_MEMORY]
        found_at = [replace(each, puts_constants=self._puts_constants(each.operation)) for each in (*results, *new)]
        return self._with_incomparable_last(found_at, level)

    def _with_incomparable_last(self, found: list[LostOperation], level: int) -> list[LostOperation]:
        """The lost operations, last those whose line computes known values elsewhere from inputs that are known too.

        The results for a request that is padded on the other side may have no equal there, as scores do.
        """
        if self.rows is None:
            return found
        lost = {each.index for each in self._lost_here(level)}
        right = {(each.name, each.frames) for each in self.trace.operations if each.index not in lost}

        def is_incomparable(each: TracedOperation) -> bool:
            return (each.name, each.frames) in right and all(self._is_arranged(number, level) for number in each.inputs)

        later = [each for each in found if is_incomparable(each.operation)]
        return [*(each for each in found if each not in later), *(replace(each, is_later=True) for each in later)]

    def _is_arranged(self, number: int, level: int) -> bool:
        """Whether the other side has a value, or the values that it rearranges."""
        arranges_known = self._arranging_known(level)
        return self.level(number) >= level or any(index in arranges_known for index in self._flow.sources[number])

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
        return LostPart(self._flow, self._lost_here(level), first[:3], self._is_known_to_agree)

    def _state(self, operation: TracedOperation) -> tuple[StateRead, ...]:
        """Tensors that outlive a call, which this reads, perhaps rearranged, and the other side does not read.

        What it reads of one may be a value that the other side computes, such as the rows of a table of angles.
        """
        sources, by_index = self._flow.sources, self._flow.by_index
        found: dict[str, StateRead] = {}
        left = list(operation.inputs)
        while left:
            number = left.pop(0)
            if self.says(number) and self.level(number) == IN_ORDER:
                continue
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
        return bool(parts) and _differ(parts) and any(operation.index in self._flow.ancestors(each) for each in later)

    def _arranging_known(self, level: int) -> set[int]:
        """The operations that only arrange values that the other side has, directly or through others that do so."""
        if level not in self._arrangements:
            found = self._arrangements[level] = set()
            # In execution order: a cache that many operations wrote to has all of them as its sources.
            for each in self.trace.operations:
                if each.only_arranges and all(
                    self.level(number) >= level or any(index in found for index in self._flow.sources[number])
                    for number in each.inputs
                ):
                    found.add(each.index)
        return self._arrangements[level]

    def _omitting(
        self, operation: TracedOperation, lost: Sequence[TracedOperation], level: int
    ) -> list[TracedOperation]:
        """The lost operations that prepare this one's inputs and leave out a part of values that the other side has."""
        arranges_known = self._arranging_known(level)
        by_index = {each.index: each for each in lost if each.index in arranges_known}
        found: dict[int, TracedOperation] = {}
        left = [*self._flow.makers(operation)]
        while left:
            each = by_index.get(left.pop())
            if each is None or each.index in found:
                continue
            sizes = [math.prod(self.trace.values[number].shape) for number in (*each.inputs[:1], *each.outputs[:1])]
            if len(sizes) == 2 and sizes[1] < sizes[0]:
                found[each.index] = each
            left += self._flow.makers(each)
        return [found[index] for index in sorted(found)]

    def _lost(self, level: int) -> list[TracedOperation]:
        """The operations for which the other side has neither their results nor any that depend on them."""
        rescued: set[int] = set()
        equal: set[int] = set()
        readers, by_index = self._flow.readers_of_values(), self._flow.by_index

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
                    if (made := self._flow.part_of(by_index[index], number)) is None:
                        own |= index in rescued
                        # What reads the whole, and is lost, may read the rest.
                        rest = size
                    else:
                        taken.add(made, index in rescued)
                taken.all = max(rest, taken.all)
                own |= taken.are_most
                parts.add(size, own)
                wholes += [own] if number in used else []
            # What comes beside a result, such as a norm's statistics, may be right although the result is not.
            if parts.are_most if each.only_arranges and len(each.outputs) > 1 else any(wholes[:1]):
                rescued.add(each.index)
        return [each for each in self.trace.operations if each.index not in rescued | equal]

    def _lost_here(self, level: int) -> list[TracedOperation]:
        """The lost operations, without those whose results the other side computed for something else.

        These are right, and an operation after them reads the wrong value.
        """
        if level not in self._lost_at:
            self._lost_at[level] = self._without_excused(self._lost(level), level)
        return self._lost_at[level]

    def _without_excused(self, lost: list[TracedOperation], level: int) -> list[TracedOperation]:
        follows, drawn = self._flow.follows_inputs, self._flow.drawn_data()
        readers = self._flow.readers()
        excused: set[int] = set()
        # What is only multiplied by zero, such as the decay of an empty state, makes no difference where the other side
        # has the product, or what it becomes. One that is lost may be wrongly zero.
        hides = {
            each.index
            for each in self.trace.operations
            if each.outputs and all(map(self._flow.is_constant, each.outputs))
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

    def _computes_from_known(self, operation: TracedOperation, level: int) -> bool:
        """Whether an operation computes new numbers from values that the other side has."""
        if operation.only_arranges or not any(self.says(number) for number in operation.outputs):
            return False
        return all(self.level(number) >= level for number in operation.inputs if self.says(number))

    def _puts_constants(self, operation: TracedOperation) -> bool:
        """Whether an operation only puts constants at indices, as ``index_put`` does to make an adjacency matrix."""
        dtypes = {number: self.trace.values[number].dtype for number in operation.inputs}
        indices = {number for number, dtype in dtypes.items() if dtype in COUNTS}
        has_places = any(dtypes[number] != "bool" for number in indices)
        return has_places and all(map(self._flow.is_constant, dtypes.keys() - indices))

    def _overwrites(self, operation: TracedOperation) -> bool:
        """Whether an operation overwrites values by a constant, as ``x[-1] = 0`` does."""
        # From torch 2.15 on, the constant of an assignment is a number, no tensor that the operation reads.
        writes = operation.name == "fill_" or (operation.name.endswith("_") and bool(operation.inputs))
        return writes and all(map(self._flow.is_constant, operation.outputs))

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
        sources, by_index = self._flow.sources, self._flow.by_index
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
