"""The dependences among the operations of one trace: what each reads, what reads it, and what follows from inputs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from graftlab.lines.traces import SliceTrace, TracedOperation


@dataclass(frozen=True)
class Dataflow:
    """The dependences of a trace. Operations are given by their index, values by their number."""

    trace: SliceTrace

    @cached_property
    def by_index(self) -> Mapping[int, TracedOperation]:
        return {each.index: each for each in self.trace.operations}

    @cached_property
    def sources(self) -> Mapping[int, tuple[int, ...]]:
        """The operations that wrote each value, of those before it that no tap separates from it."""
        return {
            number: () if value.tap is not None else tuple(index for index in value.sources if index in self.by_index)
            for number, value in self.trace.values.items()
        }

    def makers(self, operation: TracedOperation) -> Iterator[int]:
        """The operations whose results an operation reads."""
        return (index for number in operation.inputs for index in self.sources[number])

    def readers(self) -> Mapping[int, list[int]]:
        """The operations that read each operation's results."""
        found: dict[int, list[int]] = defaultdict(list)
        for each in self.trace.operations:
            for index in self.makers(each):
                found[index].append(each.index)
        return found

    def readers_of_values(self) -> Mapping[tuple[int, int], list[int]]:
        """For each operation and output, the operations that read it and whose results prove something about it.

        A value that several operations wrote to is an output of each.
        """
        found: dict[tuple[int, int], list[int]] = defaultdict(list)
        for each in self.trace.operations:
            if each.reads_shape_alone:
                continue
            is_constant = bool(each.outputs) and all(map(self.is_constant, each.outputs))
            for number in each.inputs:
                # Even a wrong value gives a constant if multiplied by zero. A constant made of another hides nothing.
                if is_constant and not self.is_constant(number):
                    continue
                for index in self.sources[number]:
                    outputs = self.by_index[index].outputs
                    of = outputs[0] if outputs and number not in outputs else number
                    found[index, of].append(each.index)
        return found

    def is_constant(self, number: int) -> bool:
        """Whether all elements of a value, which has several, are equal."""
        own = self.trace.fingerprints.get(number)
        return own is not None and own.constant and own.numel > 1

    @cached_property
    def follows_inputs(self) -> Mapping[int, bool]:
        """Whether each operation depends on a tap's value, or if no tap precedes the result, on any input.

        New memory of a tensor's shape does not, whatever is written to it later.
        """
        values = self.trace.values
        has_taps = any(value.tap is not None for value in values.values())

        def begins(number: int) -> bool:
            value = values[number]
            if value.tap is not None:
                return True
            return not has_taps and not value.sources and not value.is_parameter

        found: dict[int, bool] = {}
        for each in self.trace.operations:
            found[each.index] = not each.reads_shape_alone and (
                any(map(begins, each.inputs)) or any(found.get(index, False) for index in self.makers(each))
            )
        return found

    def drawn_data(self) -> set[int]:
        """The operations that draw random numbers into a new tensor, and those that rearrange such numbers.

        Numbers drawn in place, as for the initialisation of a weight, are not data.
        """
        found: set[int] = set()
        for each in self.trace.operations:
            is_new = not each.inputs or each.reads_shape_alone
            draws = each.is_random and is_new and not each.name.endswith("_")
            arranges = each.only_arranges and each.name not in ("clone", "copy")
            if draws or (arranges and not found.isdisjoint(self.makers(each))):
                found.add(each.index)
        return found

    def part_of(self, reader: TracedOperation, number: int) -> int | None:
        """The size of the part of a value that an operation takes; None if it reads the whole."""
        if not reader.only_arranges or len(reader.outputs) != 1:
            return None
        made, read = (math.prod(self.trace.values[each].shape) for each in (reader.outputs[0], number))
        return made if made < read else None

    def without_ancestors(self, chosen: Sequence[TracedOperation], others: set[int]) -> list[TracedOperation]:
        """The operations that depend on none of ``others``."""
        depend: set[int] = set()
        for each in self.trace.operations:
            if any(index in others or index in depend for index in self.makers(each)):
                depend.add(each.index)
        return [each for each in chosen if each.index not in depend]

    def ancestors(self, operation: TracedOperation) -> set[int]:
        """The operations from which an operation computes its results."""
        found: set[int] = set()
        left = [operation]
        while left:
            new = set(self.makers(left.pop())) - found
            found |= new
            left += [self.by_index[index] for index in new]
        return found
