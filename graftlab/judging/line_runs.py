"""The runs that find the lines of source behind a verdict's named groups, and confirm them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial

import pandas as pd

from graftlab.base.tags import identity, own_tags
from graftlab.base.world import Side
from graftlab.errors import RunError
from graftlab.judging.line_reports import lines_of, why_not_compared, why_not_confirmed
from graftlab.judging.traced_call import LineGraft, TracedCall, fed_tap_of, joined, tap_of
from graftlab.judging.verdict_runs import MOST_RUNS, RunFilters, TracedRun, VerdictRuns
from graftlab.lines.first_lost import LostOnBothSides, first_lost
from graftlab.lines.rank_at_fault import lost_where_ranks_differ, ranks_that_run
from graftlab.lines.remedies import ChangeByOperation, changes_of_grafts
from graftlab.lines.traces import OperationChanges, SliceTrace, TracedOperation, WantedCall
from graftlab.rows.schema import MEASURED
from graftlab.verdict.added import ratio, records, rows_where
from graftlab.verdict.floor import Floor
from graftlab.verdict.lines import DifferingLine
from graftlab.verdict.order import numbers

MOST_GROUPS = 6
"""How many named groups are traced."""
MOST_GRAFTS = 3
"""How many lines of one call have the baseline's values in one run."""
MOST_CONFIRMING_RUNS = 6


class LineSearch:
    """Finds the lines behind the named groups of one verdict. ``frame`` has their rows, with labels."""

    def __init__(self, runs: VerdictRuns, frame: pd.DataFrame, threshold: float, one_sided: str | None) -> None:
        self._runs = runs
        self._frame = frame
        self._threshold = threshold
        self._one_sided = one_sided
        self._found_calls: list[TracedCall] = []
        self._traced: TracedRun | None = None
        self._not_traced = ""
        self._not_confirmed = False
        self._grafted = frozenset(
            (identity({**tags, "name": name}), int(step), int(occurrence))
            for name, tags, step, occurrence in zip(
                frame["name"], frame["tags"], frame["step"], frame["occurrence"], strict=True
            )
        )

    def trace(self, groups: Sequence[str], keep: str | None = None) -> pd.DataFrame | None:
        """Trace the calls of these groups, and compare the operations of both sides.

        Returns the run's rows, None without a run. ``keep`` is a filter for the pairs that it keeps.
        """
        self._found_calls = [each for group in groups[:MOST_GROUPS] for each in self._calls(group)]
        if not self._found_calls:
            return None
        traced = self._trace("the operations behind what differs", self._found_calls, keep=keep)
        if isinstance(traced, str):
            self._not_traced = traced
            return None
        self._traced = traced
        for call in self._found_calls:
            # If the tap agrees when traced, only the compiled or fused run differs: no operation is to blame, and any
            # graft would seem to confirm one.
            call.is_settled = bool(self._agrees(call, traced.rows))
        self._compare([call for call in self._found_calls if not call.is_settled], traced)
        return traced.rows

    @property
    def remarks(self) -> list[str]:
        """Sentences on why nothing was traced, and on the groups that agree when their operations run one by one."""
        if self._not_traced:
            return [f"No line of source is named: {self._not_traced}."]
        remarks = []
        if self._not_confirmed and not any(call.cure is not None for call in self._found_calls):
            remarks.append("Lines could not be confirmed: from one run to the next, other operations lead to the tap.")
        remarks += dict.fromkeys(filter(None, map(why_not_confirmed, self._found_calls)))
        remarks += dict.fromkeys(why_not_compared(call) for call in self._found_calls if call.cut_short)
        remarks += dict.fromkeys(
            f"No line of source is named for {call.group}: not all ranks of a side reach it, and no line is confirmed."
            for call in self._found_calls
            if call.is_on_some_ranks and call.cure is None and not call.confirmed
        )
        vanished = dict.fromkeys(call.group for call in self._found_calls if call.lost is None and call.is_settled)
        if not vanished:
            return remarks
        agree = "agree" if len(vanished) > 1 else "agrees"
        traced = [trace for rank in (() if self._traced is None else self._traced.target) for trace in rank]
        if any(trace is not None and trace.was_compiled for trace in traced):
            why = "compiling the target's code makes the difference, which its source does not show."
        else:
            why = (
                "no line of source is named, because the difference does not arise in each run, or only in a fused "
                "path that tracing switches off."
            )
        return [*remarks, f"Run eagerly, operation by operation, {', '.join(vanished)} {agree}: {why}"]

    def confirm(self) -> None:
        """Graft single operations, to see whether the taps agree then."""
        calls, traced = self._found_calls, self._traced
        if traced is None:
            return
        for call in calls:
            if call.untried and call.untried[0].is_certain:
                call.cure, call.is_settled = call.untried[0], True
        # One run is left for hints.
        for _ in range(min(MOST_CONFIRMING_RUNS, MOST_RUNS - 1 - self._runs.count)):
            chosen = self._choose(calls, traced)
            if not chosen:
                break
            try:
                again = self._trace("with other values at single operations", calls, chosen)
            except RunError as error:
                # The code raises if the values mean something else there, such as an index of another tensor.
                for call in chosen:
                    call.give_up_change(error)
                continue
            if isinstance(again, str):
                self._not_confirmed = True
                return
            self._judge(chosen, again)
            traced = again

    @property
    def lines(self) -> list[DifferingLine]:
        """The lines that were found, in the groups' order; empty where the runs cannot be traced."""
        found: dict[tuple[str, Side, str, int], DifferingLine] = {}
        for call in self._found_calls:
            for line in lines_of(call, partial(self._ranks_that_run, call)):
                found.setdefault((line.group, line.side, line.file, line.line), line)
        return list(found.values())

    def _calls(self, group: str) -> list[TracedCall]:
        """The group's call that adds the most, and its first that adds more than rounding, if at another tap."""
        rows = self._frame[(self._frame["group"] == group) & (self._frame["ratio"] > self._threshold)]
        if not len(rows):
            return []
        sizes = numbers(rows, "added")
        worst = rows.iloc[int(sizes.argmax())]
        first = rows.sort_values(["step", "order"], kind="stable").iloc[0]
        chosen = [worst] if first["name"] == worst["name"] else [worst, first]
        return [
            TracedCall(
                group,
                {str(name): value for name, value in row.items()},
                WantedCall(row["name"], row["tags"], int(row["step"]), int(row["occurrence"]), int(row["order"])),
                row is worst,
            )
            for row in chosen
        ]

    def _trace(
        self, why: str, calls: Sequence[TracedCall], changed: Sequence[TracedCall] = (), keep: str | None = None
    ) -> TracedRun | str:
        """Trace all calls, with the changes of those in ``changed``."""
        changes = self._changes(changed)
        filters = RunFilters(b2t="True", keep=keep, leaving=self._one_sided)
        wanted = [each.wanted for each in calls]
        # A run with other values at some operations differs from the first only after these.
        first = self._traced
        only = None if first is None else first.needed
        traced = self._runs.traced(why, filters, wanted, self._grafted, changes, only)
        if not isinstance(traced, str) and traced.without_fingerprint:
            # Different operations lead to the taps now, or their values exceeded a budget in the first run.
            first = first or traced
            traced = self._runs.traced(f"{why}, again", filters, wanted, self._grafted, changes, traced.needed)
        return traced if first is None or isinstance(traced, str) else traced.beside(first)

    def _changes(self, calls: Sequence[TracedCall]) -> dict[Side, list[OperationChanges]]:
        """The changes of the next run, for each rank of both sides."""
        options = self._runs.session.options
        sizes: dict[Side, int] = {"baseline": options.baseline, "target": options.target}
        changed: dict[Side, list[OperationChanges]] = {
            side: [OperationChanges() for _ in range(size)] for side, size in sizes.items()
        }
        for call in calls:
            own = call.rank
            ranks: dict[Side, int] = {"target": own, "baseline": own if len({*sizes.values()}) == 1 else 0}
            for target, baseline in call.grafted.items():
                self._show(changed, call, ranks, baseline, target, tap_of(target, baseline))
            if call.trying is None:
                continue
            if call.trying.partner is not None:
                self._show(changed, call, ranks, call.trying.partner, None, fed_tap_of(call.trying))
            for rank, each in enumerate(changed["target"]):
                if all(self._index_on(call, "target", own, index, rank) == index for index in call.trying.changes):
                    each.passed.update(call.trying.passed)
                    name = fed_tap_of(call.trying) if call.trying.fed else ""
                    each.fed.update({index: (number, name) for index, number in call.trying.fed.items()})
        return changed

    def _show(
        self,
        changed: Mapping[Side, Sequence[OperationChanges]],
        call: TracedCall,
        ranks: Mapping[Side, int],
        baseline: int,
        target: int | None,
        name: str,
    ) -> None:
        """Show the results of these operations as a tap on each rank that runs them. Ranks may run different ones."""
        indices: dict[Side, int | None] = {"baseline": baseline, "target": target}
        for side, index in indices.items():
            for rank, each in enumerate(changed[side]):
                at = None if index is None else self._index_on(call, side, ranks[side], index, rank)
                if at is not None:
                    each.shown[at] = name

    def _index_on(self, call: TracedCall, side: Side, own: int, index: int, rank: int) -> int | None:
        """The index on ``rank`` of the operation with ``index`` on the call's rank ``own``; None if it did not run."""
        if rank == own or self._traced is None:
            return index
        place = self._found_calls.index(call)
        ours, theirs = (getattr(self._traced, side)[each][place] for each in (own, rank))
        if ours is None or theirs is None:
            return None
        wanted = next((key for key, each in ours.places.items() if each.index == index), None)
        found = None if wanted is None else theirs.places.get(wanted)
        return None if found is None else found.index

    def _compare(self, calls: Sequence[TracedCall], traced: TracedRun) -> None:
        for call in calls:
            place = self._found_calls.index(call)
            ranks, found = _reaching([each[place] for each in traced.baseline])
            target_ranks, others = _reaching([each[place] for each in traced.target])
            call.is_on_some_ranks = len(found) < len(traced.baseline) or len(others) < len(traced.target)
            has_counterpart = ranks == target_ranks if len(traced.baseline) == len(traced.target) else bool(found)
            if has_counterpart and call.rank in target_ranks:
                by_side: tuple[tuple[Side, list[SliceTrace]], ...] = (("baseline", found), ("target", others))
                call.cut_short = tuple(side for side, own in by_side if any(each.is_cut_short for each in own))
                if call.cut_short:
                    # Whatever the trace lacks would seem to be lost on the other side.
                    continue
                own = target_ranks.index(call.rank)
                call.lost = first_lost(found, others, own, call.tolerance)
                if call.before is None:
                    call.lost, own = lost_where_ranks_differ(call.lost, found, others, own, call.tolerance)
                    call.rank = target_ranks[own]
                known = {each.operation.index for each in call.kept}
                new = [each for each in call.lost.target if not each.is_later and each.operation.index not in known]
                call.appeared |= {each.operation.index for each in new if known}
                call.kept += new
                if call.before is None:
                    call.before = call.lost
                    call.untried = list(call.lost.remedies)
                    call.prefers_graft = _has_counterpart(call.lost)

    # ---- confirming -------------------------------------------------------------------------------------------------

    def _choose(self, calls: Sequence[TracedCall], traced: TracedRun) -> list[TracedCall]:
        """Give each unsettled call its next operation to graft; returns the calls that have one.

        Among the operations that lead to a call only its own changes are made, or those for another call would seem to
        confirm it.
        """
        chosen: list[TracedCall] = []
        slices = [
            {each.index for trace in traced.target if (own := trace[place]) for each in own.operations}
            for place in range(len(calls))
        ]
        for place, call in enumerate(calls):
            if call.is_settled or not call.is_worst or call.lost is None:
                continue
            # The most telling line, or none: lines after one that cannot be confirmed may be its consequence.
            graft = call.next_graft() if len(call.grafts) < MOST_GRAFTS and not call.is_to_leave_out else {}
            tries_remedy = bool(call.untried) and not (graft and call.prefers_graft) and not call.is_to_leave_out
            if not (call.is_to_leave_out or graft or tries_remedy):
                continue
            grafts = [*call.grafts[call.is_to_leave_out :], graft]
            changes = call.untried[0].changes if tries_remedy else changes_of_grafts(joined(grafts))
            if any(
                _differ_within(slices[place], each.changes, changes)
                or _differ_within(slices[calls.index(each)], changes, each.changes)
                for each in chosen
            ):
                continue
            if call.is_to_leave_out:
                call.left_out = call.grafts.pop(0)
            elif tries_remedy:
                call.trying = call.untried.pop(0)
            else:
                call.grafts.append(graft)
            chosen.append(call)
        return chosen

    def _judge(self, chosen: Sequence[TracedCall], traced: TracedRun) -> None:
        for call in chosen:
            agrees = self._agrees(call, traced.rows)
            if not self._is_as_before(call, traced):
                # The changes reached different operations than those that were compared.
                self._not_confirmed, agrees = True, None
            if call.trying is not None:
                if agrees:
                    call.cure, call.is_settled = call.trying, True
                call.trying = None
            elif call.left_out is not None:
                # The tap agreed with both lines grafted: each of them that is needed is a fault.
                call.confirmed.update(call.grafted)
                call.confirmed.update({} if agrees else call.left_out)
                call.is_settled = True
            elif agrees and len(call.grafts) == 1:
                call.confirmed.update(call.grafted)
                call.is_settled = True
            elif agrees and self._makes_tap(call, call.grafts[-1]):
                # With the tap's own value replaced it agrees whatever is computed before.
                call.is_settled = True
            elif agrees and all(index in call.appeared for line in call.grafts[1:] for index in line):
                # Each line read equal values only once the one before it had the baseline's values.
                call.confirmed.update(call.grafted)
                call.is_settled = True
            elif agrees or agrees is None:
                call.is_settled = len(call.grafts) != 2 or agrees is None
                call.is_to_leave_out = not call.is_settled
            else:
                # What is lost now is lost for another reason.
                self._compare([call], traced)

    def _makes_tap(self, call: TracedCall, graft: LineGraft) -> bool:
        """Whether one of these operations of the target is the last to write the tap's value."""
        assert self._traced is not None
        own = self._traced.target[call.rank][self._found_calls.index(call)]
        return own is not None and max(own.values[own.result].sources, default=-1) in graft

    def _is_as_before(self, call: TracedCall, traced: TracedRun) -> bool:
        """Whether the operations that were changed are those of the first traced run."""
        assert self._traced is not None
        place = self._found_calls.index(call)
        changed: dict[Side, frozenset[int]] = {
            "target": frozenset(call.changes),
            "baseline": frozenset(call.shown_on_baseline),
        }
        runs = self._traced, traced
        for side, indices in changed.items():
            first, now = ([_what_ran(rank[place], indices) for rank in getattr(run, side)] for run in runs)
            if first != now:
                return False
        return True

    def _agrees(self, call: TracedCall, rows: pd.DataFrame) -> bool | None:
        """Whether the tap agrees now; None where an operation could not be grafted."""
        measured = rows_where(rows, rows["status"].isin(MEASURED))
        if not call.taps <= set(measured["name"]):
            return None
        first = int(rows["step"].min())
        for row in records(measured[measured["name"] == call.wanted.name]):
            which = identity({**own_tags(row["tags"]), "name": row["name"]})
            is_here = row["rank"] == call.row["rank"]
            if is_here and call.wanted.is_at(which, row["step"] - first, row["occurrence"]):
                # NaN, where no number is finite on both sides, counts as worse.
                return ratio(row, Floor(call.row["floor"], call.row["floor_max"])) <= self._threshold
        return None

    def _ranks_that_run(self, call: TracedCall, side: Side, operation: TracedOperation) -> tuple[int, ...]:
        """The ranks of a side that run the line of an operation for this call; empty if all do."""
        if self._traced is None:
            return ()
        place = self._found_calls.index(call)
        ranks, traces = _reaching([each[place] for each in getattr(self._traced, side)])
        found = ranks_that_run(operation, traces)
        return () if len(found) == len(traces) else tuple(ranks[each] for each in found)


def _reaching(traces: Sequence[SliceTrace | None]) -> tuple[list[int], list[SliceTrace]]:
    """The ranks that reach a call, and their traces of it."""
    found = {rank: each for rank, each in enumerate(traces) if each is not None}
    return [*found], [*found.values()]


def _what_ran(trace: SliceTrace | None, indices: frozenset[int]) -> list[tuple[int, str, object]] | None:
    """The operations at these places of a trace: their names and lines."""
    if trace is None:
        return None
    return [(each.index, each.name, each.frames[:1]) for each in trace.operations if each.index in indices]


def _differ_within(indices: Collection[int], others: ChangeByOperation, own: ChangeByOperation) -> bool:
    """Whether the changes for another call change some of these operations, and not as a call's own changes do."""
    return any(index in indices and own.get(index) != change for index, change in others.items())


def _has_counterpart(lost: LostOnBothSides) -> bool:
    """Whether the first lost operation has a partner of the same name, or each side lost only one."""
    first = next((each for each in lost.target if not each.is_later), None)
    if first is None or first.partner is None:
        return False
    alone = all(len([each for each in side if not each.is_later]) == 1 for side in (lost.target, lost.baseline))
    named = {each.operation.index: each.operation.name for each in lost.baseline}
    return alone or named.get(first.partner, first.operation.name) == first.operation.name
