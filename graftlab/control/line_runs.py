"""The runs that find the lines of source behind a verdict's named groups, and confirm them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd

from graftlab.base.tags import identity, own_tags
from graftlab.base.tap_groups import kind_of
from graftlab.base.world import Side
from graftlab.control.verdict_runs import RunFilters, TracedRun, VerdictRuns
from graftlab.diffs.rounding import roundoff
from graftlab.lines.first_lost import TOLERANCE, LostOnBothSides, LostOperation, first_lost
from graftlab.lines.traces import SliceTrace, WantedCall
from graftlab.ranks.line_tracer import LINE_TAP
from graftlab.rows.schema import MEASURED
from graftlab.verdict.added import records
from graftlab.verdict.lines import MOST_LINES, DifferingLine
from graftlab.verdict.order import numbers

MOST_GROUPS = 6
"""How many named groups are traced."""
MOST_CONFIRMING_RUNS = 3
_SMALLEST_TOLERANCE = 3e-7


LineGraft = dict[int, int]
"""The baseline's operation for each of the target's that one line ran."""


@dataclass(eq=False)
class _Traced:
    """One call of a named group: the measured row, and what was found about it."""

    group: str
    row: Mapping[str, Any]
    wanted: WantedCall
    is_worst: bool
    lost: LostOnBothSides | None = None
    grafts: list[LineGraft] = field(default_factory=list)
    """The lines that have the baseline's values in the next confirming run."""
    kept: list[LostOperation] = field(default_factory=list)
    before: LostOnBothSides | None = None
    """What was lost before any operation had the baseline's value."""
    confirmed: set[int] = field(default_factory=set)
    """Indices of the target's operations."""
    appeared: set[int] = field(default_factory=set)
    """Indices of those that were not among the first lost before another one had the baseline's value."""
    is_to_leave_out: bool = False
    """Whether the next run is to show that the first of two operations is needed."""
    left_out: LineGraft | None = None
    is_settled: bool = False

    @property
    def grafted(self) -> LineGraft:
        """All operations of the target that have the baseline's values, with the baseline's."""
        return {target: baseline for line in self.grafts for target, baseline in line.items()}

    @property
    def tolerance(self) -> float:
        """How far equal values may be apart: between what rounding adds at the tap and what was measured there."""
        added, floor = self.row["added"], self.row["floor"]
        between = math.sqrt(added * floor) if math.isfinite(added) and added > 0 and floor > 0 else TOLERANCE
        if self.row["cast"]:
            return max(TOLERANCE, 4 * roundoff(self.row["dtype"]))
        return min(TOLERANCE, max(_SMALLEST_TOLERANCE, between))


class LineSearch:
    """Finds the lines for the named groups of one verdict. ``frame`` has their rows, with labels."""

    def __init__(self, runs: VerdictRuns, frame: pd.DataFrame, threshold: float, lonely: str | None) -> None:
        self._runs = runs
        self._frame = frame
        self._threshold = threshold
        self._lonely = lonely
        self._found_calls: list[_Traced] = []
        self._traced: TracedRun | None = None
        self._grafted = frozenset(
            (name, kind_of(tags)) for name, tags in zip(frame["name"], frame["tags"], strict=True)
        )

    def trace(self, groups: Sequence[str]) -> None:
        """Trace the calls of these groups, and compare the operations of both sides."""
        self._found_calls = [each for group in groups[:MOST_GROUPS] for each in self._calls(group)]
        if self._found_calls:
            self._traced = self._trace("the operations behind what differs", self._found_calls)
        if self._traced is not None:
            for call in self._found_calls:
                # What differs only in a compiled or fused run has no operation to blame, and a graft would confirm any.
                call.is_settled = bool(self._agrees(call, self._traced.rows))
            self._compare([call for call in self._found_calls if not call.is_settled], self._traced)

    @property
    def remarks(self) -> list[str]:
        """A sentence on the groups that agree when their operations run one by one."""
        vanished = dict.fromkeys(call.group for call in self._found_calls if call.lost is None and call.is_settled)
        if not vanished:
            return []
        agree = "agree" if len(vanished) > 1 else "agrees"
        return [
            f"Run eagerly, operation by operation, {', '.join(vanished)} {agree}: what compiles the target's code "
            "makes the difference, and no line of source is at fault."
        ]

    def confirm(self) -> None:
        """Graft single operations, to see whether the taps agree then."""
        calls, traced = self._found_calls, self._traced
        for _ in range(MOST_CONFIRMING_RUNS):
            chosen = [] if traced is None else self._choose(calls, traced)
            if not chosen:
                break
            traced = self._trace("with the baseline's values at single operations", calls)
            if traced is not None:
                self._judge(chosen, traced, calls)

    @property
    def lines(self) -> list[DifferingLine]:
        """The lines that were found, in the groups' order; none where the runs cannot be traced."""
        found = [line for each in self._found_calls for line in self._found(each)]
        return list({(each.group, each.side, each.file, each.line): each for each in reversed(found)}.values())[::-1]

    def _calls(self, group: str) -> list[_Traced]:
        """The group's call that adds the most, and its first that adds more than rounding, if it has another name."""
        rows = self._frame[(self._frame["group"] == group) & (self._frame["ratio"] > self._threshold)]
        if not len(rows):
            return []
        sizes = numbers(rows, "added")
        worst = rows.iloc[int(sizes.argmax())]
        first = rows.sort_values(["step", "order"], kind="stable").iloc[0]
        chosen = [worst] if first["name"] == worst["name"] else [worst, first]
        return [
            _Traced(
                group,
                {str(name): value for name, value in row.items()},
                WantedCall(row["name"], row["tags"], int(row["step"]), int(row["occurrence"]), int(row["order"])),
                row is worst,
            )
            for row in chosen
        ]

    def _trace(self, why: str, calls: Sequence[_Traced]) -> TracedRun | None:
        shown: dict[Side, dict[int, str]] = {"baseline": {}, "target": {}}
        for call in calls:
            for target, baseline in call.grafted.items():
                shown["baseline"][baseline] = shown["target"][target] = _tap_of(target, baseline)
        filters = RunFilters(b2t="True", leaving=self._lonely)
        wanted = [each.wanted for each in calls]
        traced = self._runs.traced(why, filters, wanted, self._grafted, shown)
        if traced is None or not traced.without_fingerprint:
            return traced
        # Fingerprints had a budget, and were taken of what is not needed, too.
        return self._runs.traced(f"{why}, again", filters, wanted, self._grafted, shown, traced.needed)

    def _compare(self, calls: Sequence[_Traced], traced: TracedRun) -> None:
        for call in calls:
            place = self._found_calls.index(call)
            baseline = [each[place] for each in traced.baseline]
            target = [each[place] for each in traced.target]
            found, others = _all(baseline), _all(target)
            if found is not None and others is not None:
                call.lost = first_lost(found, others, int(call.row["rank"]), call.tolerance)
                known = {each.operation.index for each in call.kept}
                new = [each for each in call.lost.target if not each.is_later and each.operation.index not in known]
                call.appeared |= {each.operation.index for each in new if known}
                call.kept += new
                if call.before is None:
                    call.before = call.lost

    # ---- confirming -------------------------------------------------------------------------------------------------

    def _choose(self, calls: Sequence[_Traced], traced: TracedRun) -> list[_Traced]:
        """Give each unsettled call its next operation to graft; returns the calls that have one.

        An operation that leads to several calls is grafted for one of them at a time, or it would confirm the others.
        """
        chosen: list[_Traced] = []
        slices = [
            {each.index for trace in traced.target if (own := trace[place]) for each in own.operations}
            for place in range(len(calls))
        ]
        for place, call in enumerate(calls):
            if call.is_settled or not call.is_worst or call.lost is None:
                continue
            if call.is_to_leave_out:
                call.left_out = call.grafts.pop(0)
                chosen.append(call)
                continue
            # The most telling line, or none: what follows one that cannot be confirmed may be its consequence.
            graft = _next_graft(call)
            if not graft:
                continue
            others = {calls.index(each) for each in chosen}
            elsewhere = {target for each in chosen for target in each.grafted}
            if any(graft.keys() & slices[other] for other in others) or elsewhere & slices[place]:
                continue
            call.grafts.append(graft)
            chosen.append(call)
        return chosen

    def _judge(self, chosen: Sequence[_Traced], traced: TracedRun, calls: Sequence[_Traced]) -> None:
        for call in chosen:
            agrees = self._agrees(call, traced.rows)
            if call.left_out is not None:
                # With both it agreed: each that is needed is a fault.
                call.confirmed.update(call.grafted)
                call.confirmed.update({} if agrees else call.left_out)
                call.is_settled = True
            elif agrees and len(call.grafts) == 1:
                call.confirmed.update(call.grafted)
                call.is_settled = True
            elif agrees and all(index in call.appeared for line in call.grafts[1:] for index in line):
                # Each line read equal values only once the one before it had the baseline's.
                call.confirmed.update(call.grafted)
                call.is_settled = True
            elif agrees or agrees is None:
                call.is_settled = len(call.grafts) != 2 or agrees is None
                call.is_to_leave_out = not call.is_settled
            else:
                # What is lost now is lost for another reason.
                self._compare([call], traced)

    def _agrees(self, call: _Traced, rows: pd.DataFrame) -> bool | None:
        """Whether the tap agrees now; None where an operation could not be grafted."""
        names = {_tap_of(*each) for each in call.grafted.items()}
        measured = rows[rows["status"].isin(MEASURED)]
        if not names <= set(measured["name"]):
            return None
        first = int(rows["step"].min())
        for row in records(measured[measured["name"] == call.wanted.name]):
            which = identity({**own_tags(row["tags"]), "name": row["name"]})
            is_here = row["rank"] == call.row["rank"]
            if is_here and call.wanted.is_at(which, row["step"] - first, row["occurrence"]):
                apart = row["rel_l2"]
                # Without a number that is finite on both sides, the graft made it worse.
                finite = apart is not None and not row["nonfinite_differ"]
                return bool(finite and apart <= self._threshold * call.row["floor"])
        return None

    # ---- the report -------------------------------------------------------------------------------------------------

    def _found(self, call: _Traced) -> list[DifferingLine]:
        if call.before is None:
            return []
        confirmed = [each for each in call.kept if each.operation.index in call.confirmed]
        first = [each for each in call.before.target if not each.is_later and each not in confirmed]
        # The fault may be in any of them where none could be confirmed.
        later = [] if confirmed else [each for each in call.before.target if each.is_later]
        sides: list[tuple[Side, list[LostOperation]]] = [
            ("target", [*confirmed, *first, *later]),
            ("baseline", [each for each in call.before.baseline if not each.is_later]),
        ]
        lines = []
        for side, lost in sides:
            seen: dict[tuple[str, int], DifferingLine] = {}
            for each in lost:
                if not each.operation.frames:
                    continue
                frame = each.operation.frames[0]
                is_confirmed = side == "target" and each.operation.index in call.confirmed
                line = DifferingLine(
                    call.group,
                    side,
                    frame.file,
                    frame.line,
                    frame.source,
                    each.operation.call,
                    is_confirmed,
                    each.is_suspect,
                    each.lacks_sum,
                    each.state,
                    call.wanted.name,
                    call.wanted.step,
                    call.wanted.occurrence,
                    int(call.row["rank"]),
                    each.operation.frames,
                )
                key = (frame.file, frame.line)
                if key in seen:
                    line = replace(seen[key], confirmed=seen[key].confirmed or is_confirmed)
                seen[key] = line
            lines += list(seen.values())[:MOST_LINES]
        return lines


def _all(traces: Sequence[SliceTrace | None]) -> list[SliceTrace] | None:
    found = [each for each in traces if each is not None]
    return found if found and len(found) == len(traces) else None


def _tap_of(target: int, baseline: int) -> str:
    """The name of the tap at an operation that both sides show."""
    return f"{LINE_TAP}.{baseline}.{target}"


def _next_graft(call: _Traced) -> LineGraft:
    """The most telling line that has not been grafted, as its operations; empty if one of them cannot be grafted."""
    assert call.lost is not None
    left = [each for each in call.lost.target if each.operation.index not in call.grafted and not each.is_later]
    if not left or not left[0].operation.frames:
        return {}
    line = left[0].operation.frames[0]
    of_line = [each for each in left if each.operation.frames[:1] == (line,)]
    graft = {each.operation.index: each.partner for each in of_line if each.partner is not None}
    is_whole = len(graft) == len(of_line) and all(each.has_equal_inputs for each in of_line)
    return graft if is_whole else {}
