"""The result of comparing two traces: operations whose results the other side lacks."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from graftlab.lines.traces import TracedOperation


@dataclass(frozen=True)
class StateRead:
    """A tensor that outlives a call: its name where it is read, and the operation that last wrote it, if any."""

    name: str
    writer: TracedOperation | None = None


@dataclass(frozen=True)
class LostOperation:
    """An operation at which a side departs from the other.

    ``has_equal_inputs``: the other side has all values that it read, in the same order or in another shape.
    ``follows_inputs``: it depends on the values of taps, not only on constants and parameters. ``is_suspect``: the
    other side has its result in another order, with other signs or in another place, which may be intended.
    ``is_later``: it depends on another lost operation. ``lacks_sum``: only the sum of its results over the ranks is the
    other side's result. ``is_summand``: its results are summed later, so no single rank's is among the other side's
    values. ``puts_constants``: it only puts constants at indices. ``state`` has the tensors that outlive a call, that
    the operation reads and that the other side lacks. ``partner`` is the index of the other side's operation that reads
    the same values and gives the same shape, ``counterpart`` that operation.
    """

    operation: TracedOperation
    _: KW_ONLY
    has_equal_inputs: bool = False
    follows_inputs: bool = False
    is_suspect: bool = False
    is_later: bool = False
    lacks_sum: bool = False
    is_summand: bool = False
    puts_constants: bool = False
    state: tuple[StateRead, ...] = ()
    partner: int | None = None
    counterpart: TracedOperation | None = None
