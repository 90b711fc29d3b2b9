"""What a comparison of two traces finds: operations whose results the other side does not have."""

from __future__ import annotations

from dataclasses import dataclass

from graftlab.lines.traces import TracedOperation


@dataclass(frozen=True)
class StateRead:
    """A tensor that outlives a call, by its name where it is read, and the operation that wrote it last, if one did."""

    name: str
    writer: TracedOperation | None = None


@dataclass(frozen=True)
class LostOperation:
    """An operation at which a side departs from the other.

    ``has_equal_inputs`` means that the other side has all that it read, in the same order or in another shape;
    ``follows_inputs`` that it depends on the values of taps, and not on constants and parameters alone. ``is_suspect``
    marks one whose result the other side has in another order, with other signs or in another place, which may be
    meant, and ``is_later`` one that depends on another lost one. ``lacks_sum`` marks one whose results on the ranks
    would have to be summed to give the other side's, ``is_summand`` one whose results are summed later, so that none of
    the other side's values is that of one rank. ``state`` are the tensors that outlive a call, which the operation
    reads and the other side does not have. ``partner`` is the index of the other side's operation that reads the same
    and gives the same shape, ``counterpart`` that operation.
    """

    operation: TracedOperation
    has_equal_inputs: bool
    follows_inputs: bool
    is_suspect: bool = False
    is_later: bool = False
    lacks_sum: bool = False
    is_summand: bool = False
    state: tuple[StateRead, ...] = ()
    partner: int | None = None
    counterpart: TracedOperation | None = None
