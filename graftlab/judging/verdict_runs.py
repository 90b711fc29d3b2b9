"""The runs of a verdict, where both sides are functions that can be called again."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch

from graftlab.base.progress import LongWait
from graftlab.base.tags import TapIdentity, own_tags
from graftlab.base.tap_groups import DATA, filter_of, kind_of
from graftlab.base.world import Side
from graftlab.control.core import internals_of, restore_plan, start_under
from graftlab.control.run import Run
from graftlab.control.work import pack_callees
from graftlab.diffs.rounding import cast_dtypes, roundoff
from graftlab.errors import RunError, SessionError, WaitInterrupted
from graftlab.grafting.filled_memory import Repetition
from graftlab.grafting.kept import OCCURRENCE
from graftlab.grafting.self_graft import SelfGraft
from graftlab.judging.floor_cache import floor_key, known_floor, remember_floor
from graftlab.judging.match_runs import match
from graftlab.judging.raised_exception import RaisedException, exception_of_one_side
from graftlab.judging.verdict_request import VerdictRequest
from graftlab.lines.traces import OperationChanges, SliceTrace, TraceRequest, WantedCall
from graftlab.matching.pair import Pair
from graftlab.plan.pairs import PairRule
from graftlab.plan.plan import PlanEdit
from graftlab.ranks.line_tracer import trace_callee
from graftlab.ranks.remote_functions import (
    Callee,
    call_until_exception,
    call_with_lent_weights,
    call_with_module_inputs,
    find_unseen_choices,
    find_without_dependents,
    graft_baseline_into_itself,
    repeat_callee,
)
from graftlab.recordings.recorded_side import RecordedSide
from graftlab.rows.schema import MEASURED
from graftlab.taps.module_inputs import ModuleCall
from graftlab.verdict.added import coarser_dtype, measured_rows, ratio, records
from graftlab.verdict.findings import JobRemarks
from graftlab.verdict.first_step import FirstDifference
from graftlab.verdict.floor import Floor
from graftlab.verdict.job_remarks import remarks_on_recording
from graftlab.verdict.misaligned_steps import MisalignedSteps, find_misaligned_steps
from graftlab.verdict.model_data import data_rows, without_data
from graftlab.verdict.origins import WantedInputs
from graftlab.verdict.returned_values import AccumulatedFloors, ReturnedValues, compare_returned, extents_by_request

if TYPE_CHECKING:
    from typing_extensions import Self

    from graftlab.control.core import SessionCore

# Without grafts, with every tap grafted, and each side against itself.
_FEWEST_RUNS = 3
MOST_RUNS = 20
"""The most runs that a verdict makes. The last of them confirm lines of source."""

EDITED = "the plan was edited during the verdict. Do not edit the filters until it is done"


class VerdictAbandoned(SessionError):
    """Raised when no further run of the verdict is possible."""


@dataclass(frozen=True)
class RunFilters:
    """The plan's filters in one run of a verdict. Taps that match ``leaving`` are never grafted.

    ``pairs`` are added to the plan's.
    """

    b2t: str | None = None
    t2b: str | None = None
    compare: str | None = None
    keep: str | None = None
    leaving: str | None = None
    pairs: Sequence[PairRule] = ()


Traces = Sequence[Sequence[SliceTrace | None]]
"""By rank, and by the wanted call."""


@dataclass(frozen=True)
class TracedRun:
    """The rows of a run, and the operations behind the wanted calls of both sides."""

    rows: pd.DataFrame
    baseline: Traces
    target: Traces

    @property
    def without_fingerprint(self) -> bool:
        """Whether a needed fingerprint is missing."""
        return any(trace.without_fingerprint for trace in self._every())

    def beside(self, earlier: TracedRun) -> TracedRun:
        """This run, which took only some fingerprints, with those of the ``earlier`` one for operations that lead to no
        wanted call.
        """

        def merged(ours: Traces, theirs: Traces) -> Traces:
            return [
                [one if one is None or other is None else one.beside(other) for one, other in zip(*ranks, strict=True)]
                for ranks in zip(ours, theirs, strict=True)
            ]

        return TracedRun(self.rows, merged(self.baseline, earlier.baseline), merged(self.target, earlier.target))

    @property
    def needed(self) -> frozenset[int]:
        """The values whose fingerprints are needed."""
        return frozenset(number for trace in self._every() for number in trace.values)

    def _every(self) -> Iterator[SliceTrace]:
        for rank in (*self.baseline, *self.target):
            yield from (trace for trace in rank if trace is not None)


class VerdictRuns:
    """Makes runs under the verdict's plans, and restores the earlier plan at the end. A context manager.

    ``count`` is the number of runs so far, ``before`` the plan that was in force before the verdict.
    """

    never_grafted = DATA
    """A filter for the taps that are compared in the run without grafts, and never grafted."""

    recorded = False
    """Whether the baseline is a recording, which ignores grafts."""

    shows_module_inputs = False
    """Whether the inputs of watched modules can be compared."""

    can_lend_weights = False
    """Whether weights can be grafted and put back after each run."""

    has_twin = False
    """Whether the request has a twin of the baseline, in higher precision."""

    since_stopped = "the plan from before is in force again"
    """The end of a sentence on a verdict that was stopped."""

    def __init__(self, session: SessionCore, request: VerdictRequest) -> None:
        self.session = session
        self.request = request
        self.count = 0
        self.before = session.plan
        self.raised: RaisedException | None = None
        """The exception of one side's function, up to which the runs go; None if both return."""
        self.returned: ReturnedValues | None = None
        """The results of both functions in their newest run; None for jobs, which return nothing."""
        self.expected = _FEWEST_RUNS
        """The expected number of runs, if known."""
        self._lent: str | None = None
        """A filter for the weights that the target has from the baseline in each run."""
        self._left_out: list[tuple[str, str | None]] = []
        """The names and kinds of taps that are left out of each run."""
        self._began = time.monotonic()

    def progress(self) -> str:
        """The number of the current run and of all runs, with the seconds passed and expected."""
        total, done = max(self.expected, self.count), self.count - 1
        seconds = time.monotonic() - self._began
        times = f", {seconds:.0f} of about {seconds / done * total:.0f} s" if done else ""
        return f"run {self.count} of about {total}{times}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_stopped = isinstance(error, KeyboardInterrupt)
        if is_stopped:
            self._stop_ranks()
        restore_plan(self.session)
        if is_stopped:
            when = f"in its run {self.count}" if self.count else "before its first run"
            raise WaitInterrupted(f"the verdict was stopped {when}; {self.since_stopped}") from None

    def _stop_ranks(self) -> None:
        """Stop what only the verdict needs; jobs continue."""

    def changes(self, wanted: RunFilters) -> PlanEdit:
        """The edit that turns the earlier plan into the plan of a run with these filters."""
        left_alone = " and ".join(f"not {each}" for each in (self.never_grafted, wanted.leaving) if each)
        b2t, t2b = (each and f"({each}) and {left_alone}" for each in (wanted.b2t, wanted.t2b))
        compare = wanted.compare
        if (left_out := filter_of(self._left_out)) is not None:
            b2t, t2b, compare = (each and f"({each}) and not ({left_out})" for each in (b2t, t2b, compare))
        if self._lent is not None:
            b2t = f"({b2t}) or {self._lent}" if b2t else self._lent
        # A verdict grafts every tap, so in all its runs a transform for grafted taps applies everywhere.
        transforms = [replace(spec, where=spec.where or "True") for spec in self.before.transforms]
        return {
            "b2t": b2t,
            "t2b": t2b,
            "compare": compare,
            "keep": wanted.keep,
            "transform": transforms,
            "pairs": (*self.before.pairs, *wanted.pairs),
        }

    def both(self, why: str, wanted: RunFilters) -> pd.DataFrame:
        """The rows of both sides under these filters."""
        raise NotImplementedError

    def lend_weights(self, names: Sequence[str], keep: Sequence[str]) -> pd.DataFrame:
        """Give the target the baseline's weights of these groups in each run from now on, and its own between runs.

        Returns the rows of such a run without other grafts. In it the pairs of the weights ``keep`` are kept. Raises
        :class:`SessionError` if a weight cannot be grafted.
        """
        raise NotImplementedError

    def leave_out(self, taps: Iterable[tuple[str, str | None]]) -> None:
        """Neither compare nor graft the taps of these names and kinds from now on."""
        self._left_out += taps

    def take_back(self, taps: Iterable[tuple[str, str | None]]) -> None:
        """Compare and graft these taps again, which were left out."""
        again = {*taps}
        self._left_out = [each for each in self._left_out if each not in again]

    def return_weights(self) -> None:
        """Stop lending weights: the target runs with its own again."""
        self._lent = None

    def baseline_against_itself(self, rows: pd.DataFrame, keep: Sequence[str]) -> list[SelfGraft]:
        """Run the baseline against its own record. ``rows`` are of the run in which every tap was grafted."""
        raise NotImplementedError

    def target_against_itself(self) -> list[str]:
        """The taps at which the target differs from itself in a second run, on any of its ranks."""
        raise NotImplementedError

    def unwritten_memory(self) -> list[str]:
        """The values on the target that depend on memory that it reads before writing it, if the baseline's do not;
        empty if unknown.

        Known once :meth:`target_against_itself` was called.
        """
        return []

    def unseen_choices(self, compared: pd.DataFrame) -> tuple[float | None, bool]:
        """How far apart the values are from which returned whole numbers were chosen, if nothing compared shows them.

        An estimate of ``rel_l2``, NaN if unknown; None if there are no such values. Also returns whether the code could
        be followed to find out. ``compared`` are the rows of a run without grafts.
        """
        return None, True

    def with_module_inputs(
        self, wanted: Mapping[Side, WantedInputs], filters: RunFilters
    ) -> tuple[pd.DataFrame, Mapping[Side, Sequence[Mapping[str, ModuleCall]]]]:
        """The rows of a run in which the inputs of modules are taps too, and each rank's calls of these modules."""
        raise NotImplementedError

    def without_dependents(self, groups: Sequence[str]) -> list[str]:
        """The groups that nothing else depends on, on any of the baseline's ranks; empty if unknown."""
        return []

    def present_pairs(self) -> list[Pair]:
        """The pairs that match by value without grafts, whatever the plan pairs; empty if nothing can be called."""
        return []

    def traced(
        self,
        why: str,
        filters: RunFilters,
        wanted: Sequence[WantedCall],
        grafted: frozenset[tuple[TapIdentity, int, int]],
        changes: Mapping[Side, Sequence[OperationChanges]],
        only: frozenset[int] | None = None,
    ) -> TracedRun | str:
        """Trace the wanted calls in one run of both sides; returns the reason if that is impossible.

        ``changes`` are made at single operations on each rank. ``only`` restricts fingerprints to these values.
        """
        raise NotImplementedError

    def to_be_grafted(self, rows: pd.DataFrame) -> pd.DataFrame:
        """The rows of those taps that the run with every tap grafted can graft."""
        return without_data(rows)

    def baseline_changed(self) -> list[str]:
        """The taps at which the baseline, after the swaps of its code, no longer shows its earlier values."""
        return []

    def misaligned_steps(self, compared: pd.DataFrame) -> MisalignedSteps | None:
        """How many steps one side is ahead of the other. ``compared`` are the rows of a run without grafts."""
        return find_misaligned_steps(compared)

    def first_difference(self, floors: AccumulatedFloors) -> FirstDifference | None:
        """The first of the steps before the verdict in which the sides differ; None for functions."""
        return None

    def weights_before(self, grafted: pd.DataFrame) -> pd.DataFrame:
        """The weights of jobs in the newest step with such rows before the grafted one."""
        raise NotImplementedError

    def job_remarks(self, compared: pd.DataFrame, grafted: pd.DataFrame, moved: Sequence[str]) -> JobRemarks | None:
        """Remarks on jobs, whose baseline differed from itself at ``moved``, or on a recording; None for functions."""
        return None

    def pair(self, name: str, rank: int, step: int, tags: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """The pair kept in this step of the newest run of both sides."""
        raise NotImplementedError


class CalledRuns(VerdictRuns):
    """Calls the request's functions anew for each run."""

    since_stopped = f"its code on the ranks was interrupted, and {VerdictRuns.since_stopped}"

    def __init__(self, session: SessionCore, request: VerdictRequest) -> None:
        super().__init__(session, request)
        self._runs_before = len(session.runs)
        assert request.baseline is not None
        assert request.target is not None
        given = request.arguments
        exact = {} if request.exact is None else {"exact": request.exact}
        self._baseline, *exacts = pack_callees({"baseline": request.baseline, **exact}, *given)
        self._exact = exacts[0] if exacts else None
        [self._target] = pack_callees({"target": request.target}, *given)
        self.recorded = isinstance(request.baseline, RecordedSide)
        self.shows_module_inputs = self.can_lend_weights = not self.recorded
        self._zero = 0
        self._repetitions: Sequence[Repetition] | None = None
        """The newest result of running the target's ranks against themselves; None before the first."""
        self.has_twin = self._exact is not None

    def both(self, why: str, wanted: RunFilters) -> pd.DataFrame:
        frame = self._both(why, self.changes(wanted))
        return frame if self._lent is None else without_data(frame)

    def _both(self, why: str, changes: PlanEdit) -> pd.DataFrame:
        try:
            run, version = self._run(why, self._callees(), changes)
        except RunError:
            failed = self.session.runs[-1]
            self.raised = None if self.count > 1 else exception_of_one_side(self.session, failed.failures)
            if self.raised is None:
                raise
            self._stop_at_exceptions()
            # The run that takes its place is the first one.
            internals_of(self.session).set_aside.add(failed.number)
            self.count -= 1
            run, version = self._run(why, self._callees(), changes)
        frame = self._rows_under(version, run)
        # A recording returns the number of its taps, which is no result of the model.
        expected = () if self.recorded else run.baseline
        if self.raised is None:
            by_request = extents_by_request(frame)
            self.returned = compare_returned(expected, run.target, self.before.pairs, by_request=by_request)
        return frame

    def _stop_at_exceptions(self) -> None:
        """Let both functions end at their exceptions, as a function without a result does."""
        if not self.recorded:
            self._baseline = partial(call_until_exception, self._baseline)
        self._target = partial(call_until_exception, self._target)
        if self._exact is not None:
            self._exact = partial(call_until_exception, self._exact)

    def _callees(self) -> dict[Side, Callee]:
        target = self._target if self._lent is None else partial(call_with_lent_weights, self._target)
        return {"baseline": self._baseline, "target": target}

    def lend_weights(self, names: Sequence[str], keep: Sequence[str]) -> pd.DataFrame:
        self._lent, kept = (filter_of((name, "param") for name in each) for each in (names, keep))
        try:
            changes = self.changes(RunFilters(compare="True", keep=kept))
            frame = self._both("with the baseline's weights", changes)
            weights = data_rows(frame)
            weights = weights[weights["name"].isin([*names]) & (weights["side"] == "target")]
            failed = weights[weights["status"] != "grafted"]
            if len(failed) or not len(weights):
                reason = failed["error"].iloc[0] if len(failed) else "none of them was reached"
                raise SessionError(f"the differing weights could not be grafted: {reason}")
        except BaseException:
            self._lent = None
            raise
        return without_data(frame)

    def traced(
        self,
        why: str,
        filters: RunFilters,
        wanted: Sequence[WantedCall],
        grafted: frozenset[tuple[TapIdentity, int, int]],
        changes: Mapping[Side, Sequence[OperationChanges]],
        only: frozenset[int] | None = None,
    ) -> TracedRun | str:
        if self.recorded:
            return "a recording has no operations to compare the target's with"
        callees: dict[Side, Callee] = {
            side: partial(trace_callee, callee, [TraceRequest(wanted, grafted, each, only) for each in changes[side]])
            for side, callee in self._callees().items()
        }
        run, version = self._run(why, callees, self.changes(filters))
        return TracedRun(self._rows_under(version, run), run.baseline, run.target)

    def with_module_inputs(
        self, wanted: Mapping[Side, WantedInputs], filters: RunFilters
    ) -> tuple[pd.DataFrame, Mapping[Side, Sequence[Mapping[str, ModuleCall]]]]:
        callees: dict[Side, Callee] = {
            side: partial(
                call_with_module_inputs, callee, wanted[side].wanted, wanted[side].known, wanted[side].renamed
            )
            for side, callee in self._callees().items()
        }
        run, version = self._run("whether modules are right themselves", callees, self.changes(filters))
        return self._rows_under(version, run), {"baseline": list(run.baseline), "target": list(run.target)}

    def _rows_under(self, version: int, run: Run) -> pd.DataFrame:
        """The rows of a run. Raises :class:`VerdictAbandoned` if its plan was edited meanwhile."""
        frame = run.frame
        if len(frame) and set(frame["plan_version"]) != {version}:
            raise VerdictAbandoned(EDITED)
        self._zero = int(frame["step"].min()) if len(frame) else 0
        # A copy stores one block of memory per dtype instead of one per column, which makes a verdict's many selections
        # of rows several times faster.
        return frame.copy()

    def _run(
        self,
        why: str,
        callees: Mapping[Side, Callee],
        changes: PlanEdit | None = None,
    ) -> tuple[Run, int]:
        """Make one run to its end; returns it with the version of the plan that it began under."""
        self.count += 1
        before = self.session.row_count
        # All runs but the first are set aside, so that displays show the plain one again.
        runs, set_aside = self.session.runs, internals_of(self.session).set_aside
        number = runs[-1].number + 1 if runs else 0
        if self.count > 1:
            set_aside.add(number)
        try:
            run, plan = start_under(self.session, changes or {}, callees)
        except BaseException:
            set_aside.discard(number)
            raise
        title = f"verdict, {self.progress()}: {why}"
        bar = LongWait(title, "rows", lambda: self.session.row_count - before, stop=self.request.stop)
        return run.wait(bar=bar), plan.version

    def _stop_ranks(self) -> None:
        # Without the verdict its run is useless.
        if len(self.session.runs) > self._runs_before:
            self.session.interrupt()

    def baseline_against_itself(self, rows: pd.DataFrame, keep: Sequence[str]) -> list[SelfGraft]:
        if self.recorded:
            # A recording repeats its values whatever is grafted, so it has no rounding to measure.
            return []
        callees = (self._baseline, self._exact)
        doubtful = beyond_one_rounding(rows)
        key = floor_key(self.session, self.before, rows, callees, [*keep, *doubtful])
        known = known_floor(self.session, key)
        if known is not None:
            return known
        call = partial(
            graft_baseline_into_itself,
            *callees,
            coarser_dtypes(rows),
            self.before,
            self.session.options.keep_budget,
            list(keep),
            doubtful,
        )
        try:
            run, _ = self._run("each side against itself", {"baseline": call, "target": self._repeated(self._target)})
            self._repetitions = run.target
        except RunError:
            # A failure of the target says nothing about the baseline.
            run, _ = self._run("the baseline against itself", {"baseline": call})
        measured = list(run.baseline)
        remember_floor(self.session, key, measured)
        return measured

    def without_dependents(self, groups: Sequence[str]) -> list[str]:
        budget = self.session.options.keep_budget
        call = partial(find_without_dependents, self._baseline, list(groups), self.before, budget)
        run, _ = self._run("what depends on the minor groups", {"baseline": call})
        return [group for group in groups if all(group in alone for alone in run.baseline)]

    def present_pairs(self) -> list[Pair]:
        if self.recorded:
            return []
        self.count += 1
        found = match(self.session, self._baseline, self._target, rounds=0)
        return list(found.graftable)

    def target_against_itself(self) -> list[str]:
        if self._repetitions is None:
            run, _ = self._run("the target against itself", {"target": self._repeated(self._target)})
            self._repetitions = run.target
        return list(dict.fromkeys(tap for each in self._repetitions for tap in each.differing))

    def unwritten_memory(self) -> list[str]:
        found = list(dict.fromkeys(tap for each in self._repetitions or () for tap in each.unwritten))
        if found and not self.recorded:
            # Memory that the baseline reads too, such as padding that nothing depends on, makes no difference.
            run, _ = self._run("the baseline against itself", {"baseline": self._repeated(self._baseline)})
            found = [] if any(each.unwritten for each in run.baseline) else found
        return found

    def unseen_choices(self, compared: pd.DataFrame) -> tuple[float | None, bool]:
        # Only the target of a recording can be called, and what it returns is compared by its taps alone.
        rows = [row for row in measured_rows(compared) if kind_of(row["tags"]) is None]
        if self.recorded and all(roundoff(coarser_dtype(row)) for row in rows):
            return None, True
        calls = {
            each: partial(
                find_unseen_choices,
                callee,
                sorted({str(row.get(f"{each}_name") or row["name"]) for row in rows}),
                not self.recorded,
            )
            for each, callee in self._callees().items()
        }
        run, _ = self._run("what whole numbers are chosen from", calls)
        followed = run.target if self.recorded else run.baseline
        if not any(found.exist for found in followed):
            return None, all(found.is_known for found in followed)
        distances = [one.distance(other) for one in run.baseline for other in run.target] if not self.recorded else []
        return math.nan if not distances or any(map(math.isnan, distances)) else max(distances), True

    def _repeated(self, callee: Callee) -> Callee:
        return partial(repeat_callee, callee, self.session.options.keep_budget)

    def job_remarks(self, compared: pd.DataFrame, grafted: pd.DataFrame, moved: Sequence[str]) -> JobRemarks | None:
        return remarks_on_recording(compared, grafted, self.request.constant_floor) if self.recorded else None

    def pair(self, name: str, rank: int, step: int, tags: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        return self.session.tensors(name, rank=rank, step=self._zero + step, **tags)


def kept_pair(runs: VerdictRuns, row: Mapping[str, Any], step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The pair that the newest run of both sides kept of a row's call, in this step of that run.

    Raises :class:`SessionError` if there is none, as where it did not fit the budget.
    """
    tags = {tag: value for tag, value in own_tags(row["tags"]).items() if value is not None}
    return runs.pair(row["name"], int(row["rank"]), int(step), {OCCURRENCE: int(row["occurrence"]), **tags})


# The same as the threshold of a verdict, over the smallest floor that a value of this dtype has.
_BEYOND_ROUNDING = 5.0


def beyond_one_rounding(rows: pd.DataFrame) -> list[str]:
    """The names of the taps at which the sides differ by more than one rounding of their dtype explains."""
    found = (row["name"] for row in measured_rows(rows) if _is_beyond_one_rounding(row))
    return sorted(set(found))


def _is_beyond_one_rounding(row: Mapping[str, Any]) -> bool:
    unit = roundoff(coarser_dtype(row))
    return unit > 0 and ratio(row, Floor(0.0, 0.0).at_least(unit)) > _BEYOND_ROUNDING


def coarser_dtypes(rows: pd.DataFrame) -> dict[str, str]:
    """The coarser of both sides' dtypes at each measured tap, by name; blank where they are equal."""
    dtypes = dict.fromkeys(rows[rows["status"].isin(MEASURED)]["name"], "")
    for row in records(rows[rows["cast"].notna()]):
        if not cast_dtypes(row["cast"]):
            continue
        name = row["name"]
        dtypes[name] = max(dtypes.get(name, ""), coarser_dtype(row), key=roundoff)
    return dtypes
