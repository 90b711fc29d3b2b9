"""One call of a named group whose operations are traced: what was found about it, and what the next run changes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from graftlab.base.world import Side
from graftlab.diffs.rounding import roundoff
from graftlab.errors import RunError
from graftlab.lines.first_lost import TOLERANCE, LostOnBothSides
from graftlab.lines.lost import LostOperation
from graftlab.lines.remedies import ChangeByOperation, Remedy, changes_of_grafts
from graftlab.lines.traces import LINE_TAP, WantedCall

_SMALLEST_TOLERANCE = 3e-7

LineGraft = dict[int, int]
"""The baseline's operation for each of the target's that one line ran."""


@dataclass(eq=False)
class TracedCall:
    """One call of a named group: the measured row, and what was found about it."""

    group: str
    row: Mapping[str, Any]
    wanted: WantedCall
    is_worst: bool
    rank: int = field(init=False)
    """The target's rank whose operations are compared."""
    lost: LostOnBothSides | None = None
    grafts: list[LineGraft] = field(default_factory=list)
    """The lines that have the baseline's values in the next confirming run."""
    kept: list[LostOperation] = field(default_factory=list)
    before: LostOnBothSides | None = None
    """What was lost before any operation had the baseline's value."""
    confirmed: set[int] = field(default_factory=set)
    """Indices of the target's operations."""
    appeared: set[int] = field(default_factory=set)
    """Indices of operations that were lost first only once an earlier line had the baseline's value."""
    is_to_leave_out: bool = False
    """Whether the next run leaves out the first of two grafted lines, to see whether it is needed."""
    left_out: LineGraft | None = None
    is_settled: bool = False
    untried: list[Remedy] = field(default_factory=list)
    trying: Remedy | None = None
    """The change that the next run makes instead of the grafts."""
    cure: Remedy | None = None
    """The change with which the tap agrees."""
    prefers_graft: bool = False
    """Whether the first operation has a counterpart that does the same with different arguments."""
    raised: str = ""
    """The error of the first run that failed with a change for this call."""
    cut_short: tuple[Side, ...] = ()
    """The sides that run more operations before the tap than a trace records."""

    is_on_some_ranks: bool = False
    """Whether other ranks of a side do not reach the call, as in another stage of a pipeline."""

    def __post_init__(self) -> None:
        self.rank = int(self.row["rank"])

    @property
    def grafted(self) -> LineGraft:
        """All operations of the target that have the baseline's values, with the baseline's."""
        if self.trying is not None:
            return dict(self.trying.grafted)
        return joined(self.grafts)

    @property
    def changes(self) -> ChangeByOperation:
        """The change of each of the target's operations that is changed."""
        return changes_of_grafts(self.grafted) if self.trying is None else self.trying.changes

    @property
    def shown_on_baseline(self) -> frozenset[int]:
        """The baseline's operations whose results the target reads."""
        fed = () if self.trying is None or self.trying.partner is None else (self.trying.partner,)
        return frozenset((*self.grafted.values(), *fed))

    def give_up_change(self, error: RunError) -> None:
        """Take back the change of the next run, with which the run failed."""
        self.raised = self.raised or _reason_of(error)
        self.is_settled = self.trying is None
        self.trying, self.left_out = None, None
        self.grafts.clear()

    @property
    def taps(self) -> set[str]:
        """The names of the taps at operations that both sides show."""
        names = {tap_of(*each) for each in self.grafted.items()}
        if self.trying is not None and self.trying.partner is not None:
            names.add(fed_tap_of(self.trying))
        return names

    def next_graft(self) -> LineGraft:
        """The operations of the most telling line that has not been grafted; empty if one of them cannot be."""
        assert self.lost is not None
        left = [each for each in self.lost.target if each.operation.index not in self.grafted and not each.is_later]
        if not left or not left[0].operation.frames:
            return {}
        line = left[0].operation.frames[0]
        of_line = [each for each in left if each.operation.frames[:1] == (line,)]
        graft = {each.operation.index: each.partner for each in of_line if each.partner is not None}
        is_whole = len(graft) == len(of_line) and all(each.has_equal_inputs for each in of_line)
        return graft if is_whole else {}

    @property
    def tolerance(self) -> float:
        """How far apart equal values may be: between the tap's rounding and the error measured there."""
        added, floor = self.row["added"], self.row["floor"]
        between = math.sqrt(added * floor) if math.isfinite(added) and added > 0 and floor > 0 else TOLERANCE
        if self.row["cast"]:
            return max(TOLERANCE, 4 * roundoff(self.row["dtype"]))
        return min(TOLERANCE, max(_SMALLEST_TOLERANCE, between))


def joined(grafts: Sequence[LineGraft]) -> LineGraft:
    """The operations of all these lines."""
    return {target: baseline for line in grafts for target, baseline in line.items()}


def tap_of(target: int, baseline: int) -> str:
    """The name of the tap at an operation that both sides show."""
    return f"{LINE_TAP}.{baseline}.{target}"


def fed_tap_of(remedy: Remedy) -> str:
    """The name of the tap that shows the value that operations read instead of their own."""
    return f"{LINE_TAP}.{remedy.partner}.before.{min(remedy.fed)}"


def _reason_of(error: RunError) -> str:
    """The first line of each rank's failure."""
    return "; ".join(f"{rank}: {text.partition(chr(10))[0]}" for rank, text in error.failures.items()) or str(error)
