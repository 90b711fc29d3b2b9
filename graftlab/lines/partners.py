"""Finds the other side's operation that corresponds to a lost one: it reads equal values and gives the same shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from graftlab.lines.dataflow import Dataflow
from graftlab.lines.fingerprints import ANY_ORDER, IN_ORDER, Fingerprint, Level, agreement
from graftlab.lines.lost import LostOperation
from graftlab.lines.traces import TracedOperation

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ComparedSide:
    """One rank's operations, the fingerprints of a value (its own, and its whole's), and the number of ranks."""

    flow: Dataflow
    forms: Callable[[int], Sequence[Fingerprint]]
    ranks: int

    def shape_of(self, operation: TracedOperation) -> Shape:
        """The shape of an operation's first result."""
        return self.flow.trace.values[operation.outputs[0]].shape if operation.outputs else ()


def plain_shape(each: Fingerprint) -> Shape:
    """A tensor's shape without dimensions of size one."""
    return tuple(size for size in each.shape if size != 1)


def with_partners(
    lost: Sequence[LostOperation],
    others: Sequence[LostOperation],
    side: ComparedSide,
    other: ComparedSide,
    tolerance: float,
) -> list[LostOperation]:
    """Return the lost operations, each with its partner on the other side, where exactly one may be it."""
    candidates: dict[int, tuple[int, ...]] = {}
    for each in lost:
        alike = [
            found
            for found in others
            if not (found.is_suspect or found.is_later)
            and _may_correspond(each.operation, found.operation, side, other)
            and _reads_the_same(each.operation, found.operation, side, other, tolerance)
        ]
        same = [found for found in alike if found.operation.name == each.operation.name]
        # An operation that changes nothing on its side is not lost there.
        found_by_name = (
            []
            if same or each.is_later
            else [
                found.index
                for found in other.flow.trace.operations
                if found.name == each.operation.name
                and not found.only_arranges
                and _may_correspond(each.operation, found, side, other)
                and _reads_the_same(each.operation, found, side, other, tolerance)
            ]
        )
        chosen = [] if found_by_name else same or alike
        candidates[each.operation.index] = tuple(sorted([*(o.operation.index for o in chosen), *found_by_name]))
    partners: dict[int, int] = {}
    for found in {each for each in candidates.values() if each}:
        # A line may run several times on the same values, as for queries and keys, in the same order on both sides.
        own = sorted(index for index, same in candidates.items() if same == found)
        if len(own) == len(found):
            partners.update(zip(own, found, strict=True))
    found_partners = [(each, partners.get(each.operation.index)) for each in lost]
    return [
        each if found is None else replace(each, partner=found, counterpart=other.flow.by_index.get(found))
        for each, found in found_partners
    ]


def with_constants(
    side: ComparedSide,
    lost: Sequence[LostOperation],
    other: ComparedSide,
    others: Sequence[LostOperation],
    tolerance: float,
) -> list[LostOperation]:
    """The lost operations, after those that correspond to the other side's first lost ones with a constant result.

    Such a result, such as a mask that hides nothing, proves nothing, and equals unrelated values by chance.
    """
    found: dict[int, LostOperation] = {}
    for theirs in others:
        if theirs.is_suspect or theirs.is_later or not theirs.has_equal_inputs:
            continue
        for each in side.flow.trace.operations:
            made = [form for number in each.outputs for form in side.forms(number)]
            if (
                not (each.only_arranges or each.reads_shape_alone)
                and each.inputs
                and made
                and all(form.constant and form.numel > 1 for form in made)
                and _may_correspond(each, theirs.operation, side, other)
                and _reads_the_same(each, theirs.operation, side, other, tolerance)
            ):
                found[each.index] = LostOperation(each, has_equal_inputs=True, follows_inputs=theirs.follows_inputs)
    return [*found.values(), *(each for each in lost if each.operation.index not in found)]


def with_shared_inputs_first(
    side: ComparedSide,
    lost: Sequence[LostOperation],
    other: ComparedSide,
    others: Sequence[LostOperation],
    tolerance: float,
) -> list[LostOperation]:
    """The lost operations, first those that read a value which the other side's first one reads too, and what leads to
    them.

    One side may compute more in other steps, and all of that is lost too, though it is right.
    """
    read_there = [number for each in others[:1] for number in each.operation.inputs]
    theirs = [form for number in read_there for form in other.forms(number) if not form.says_nothing]

    def shares(operation: TracedOperation) -> bool:
        read = [form for number in operation.inputs for form in side.forms(number)]
        return any(_is_equal(own, each, agreement(own, each, tolerance)) for own in read for each in theirs)

    sharing = [each.operation for each in lost if not each.is_later and shares(each.operation)]
    first = {index for each in sharing for index in (each.index, *side.flow.ancestors(each))}
    return sorted(lost, key=lambda each: each.is_later or each.operation.index not in first)


def _may_correspond(
    operation: TracedOperation, partner: TracedOperation, side: ComparedSide, other: ComparedSide
) -> bool:
    """Whether the results have the same shape, or one is a rank's part of the other."""
    if operation.is_collective or partner.is_collective:
        # A collective's result may arrive after it has returned, and would overwrite a graft.
        return False
    shapes = side.shape_of(operation), other.shape_of(partner)
    if shapes[0] == shapes[1]:
        return True
    if side.ranks == other.ranks or len(shapes[0]) != len(shapes[1]):
        return False
    apart = [(one, two) for one, two in zip(*shapes, strict=True) if one != two]
    return len(apart) == 1 and apart[0][0] * side.ranks == apart[0][1] * other.ranks


def _reads_the_same(
    operation: TracedOperation, partner: TracedOperation, side: ComparedSide, other: ComparedSide, tolerance: float
) -> bool:
    """Whether an operation reads its partner's inputs, or its partner's result.

    Constants count like any other value here: a mask of zeros is not the same as one that hides something.
    """
    theirs = [form for number in (*partner.inputs, *partner.outputs) for form in other.forms(number)]
    for number in operation.inputs:
        forms = side.forms(number)
        if not any(_is_equal(own, each, agreement(own, each, tolerance)) for own in forms for each in theirs):
            return False
    return True


def _is_equal(own: Fingerprint, other: Fingerprint, level: Level) -> bool:
    """Whether two values are equal; in another order only if their shapes differ."""
    return level == IN_ORDER or (level == ANY_ORDER and plain_shape(own) != plain_shape(other))
