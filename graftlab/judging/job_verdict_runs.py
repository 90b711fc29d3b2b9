"""The runs of a verdict on jobs: each uses whole steps that the jobs make anyway."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch

from graftlab.base.tags import TapIdentity
from graftlab.base.tap_groups import is_data, kind_of
from graftlab.base.world import Side
from graftlab.control.core import lend_plan
from graftlab.control.pickles import open_value
from graftlab.errors import SessionError
from graftlab.grafting.self_graft import SelfGraft
from graftlab.grafting.self_graft_in_steps import Pass
from graftlab.judging.job_steps import JobSteps
from graftlab.judging.verdict_request import VerdictRequest
from graftlab.judging.verdict_runs import (
    EDITED,
    RunFilters,
    TracedRun,
    VerdictAbandoned,
    VerdictRuns,
    coarser_dtypes,
)
from graftlab.lines.traces import OperationChanges, SliceTrace, TraceRequest, WantedCall
from graftlab.ranks.handle import RankHandle
from graftlab.ranks.messages import (
    Acknowledgement,
    AskKeptTags,
    AskLineTraces,
    AskSelfGraft,
    KeptTags,
    LineTraces,
    RunSelfGraft,
    SelfGraftResult,
    TraceSteps,
)
from graftlab.rows.schema import MEASURED
from graftlab.verdict.findings import JobRemarks
from graftlab.verdict.first_step import FirstDifference, first_difference
from graftlab.verdict.job_remarks import remarks_on_jobs, updates
from graftlab.verdict.misaligned_steps import (
    ENOUGH_STEPS,
    MisalignedSteps,
    find_misaligned_steps,
    may_be_misaligned,
)
from graftlab.verdict.model_data import without_data
from graftlab.verdict.returned_values import AccumulatedFloors

if TYPE_CHECKING:
    from typing_extensions import Self

    from graftlab.control.core import SessionCore


class StepRuns(VerdictRuns):
    """Takes ``steps`` steps of the jobs for each run, beginning at a multiple of that number.

    Weights and optimizer state are not grafted, because that could not be undone. With ``graft_weights`` they are, and
    the target keeps the baseline's from its first grafted step on.
    """

    def __init__(self, session: SessionCore, request: VerdictRequest) -> None:
        super().__init__(session, request)
        graft_weights = request.graft_weights
        self.never_grafted = (
            "(kind == 'optimizer' and not updated)" if graft_weights else "(kind == 'param' or kind == 'optimizer')"
        )
        self._jobs = JobSteps(
            session, "verdict", "A verdict takes about twenty steps of the jobs", request.steps, request.stop
        )
        self._steps = request.steps
        self._graft_weights = graft_weights
        self._weights_grafted = 0
        self._zero = 0
        self._repeats = True
        self._target_moved: list[str] = []

    def __enter__(self) -> Self:
        self._jobs.__enter__()
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._jobs.__exit__(kind, error, trace)
        super().__exit__(kind, error, trace)

    # ---- both sides ---------------------------------------------------------------------------------------------

    def both(self, why: str, wanted: RunFilters) -> pd.DataFrame:
        before = self.session.row_count
        version = self._publish(wanted)
        # In the first grafted steps the target receives the baseline's weights and state, so only the next ones begin
        # with them.
        first = self._after_steps(why, version, 2 if self._graft_weights and wanted.b2t else 1)
        first += self._steps if self._graft_weights and wanted.b2t else 0
        return self._rows_under(version, wanted, before, first)

    def _rows_under(self, version: int, wanted: RunFilters, before: int, first: int) -> pd.DataFrame:
        """The rows, after row ``before``, of the run that began with step ``first``, without those of weights."""
        frame = self._rows_since(before, first, self._steps)
        if self._jobs.is_edited(version) or not set(frame["plan_version"]) <= {version}:
            raise VerdictAbandoned(EDITED)
        self._zero = int(frame["step"].min()) if len(frame) else first
        if wanted.b2t is not None:
            written = frame["status"].isin(MEASURED) & ~frame.index.isin(without_data(frame).index)
            self._weights_grafted += int(written.sum())
            frame = frame[~written]
        return frame.reset_index(drop=True)

    def traced(
        self,
        why: str,
        filters: RunFilters,
        wanted: Sequence[WantedCall],
        grafted: frozenset[tuple[TapIdentity, int, int]],
        changes: Mapping[Side, Sequence[OperationChanges]],
        only: frozenset[int] | None = None,
    ) -> TracedRun | str:
        def order(version: int, rank: RankHandle) -> TraceSteps:
            request = TraceRequest(wanted, grafted, changes[rank.place.side][rank.place.rank], only)
            return TraceSteps(version, request, self._steps)

        before, ranks = self.session.row_count, self.session.ranks
        version, first = self._after_orders(why, order, filters, 1)
        traces: dict[Side, list[list[SliceTrace | None]]] = {"baseline": [], "target": []}
        for rank in ranks:
            found = self._jobs.ask(rank, AskLineTraces(), LineTraces)
            if found.obstacle:
                return f"on {rank.label}, {found.obstacle}"
            if found.packed is None:
                raise SessionError(f"verdict: {rank.label} did not trace its step ({why}); its log has the reason")
            traces[rank.place.side].append(open_value(rank, found.packed))
        return TracedRun(self._rows_under(version, filters, before, first), traces["baseline"], traces["target"])

    def _rows_since(self, number: int, first: int, steps: int) -> pd.DataFrame:
        """The rows of ``steps`` steps from ``first`` on, among those from row ``number`` on."""
        for rank in self.session.ranks:
            # Once the answer is here, so are the rows that the rank sent before it.
            self._jobs.ask(rank, AskKeptTags(failed=False), KeptTags)
        frame = self._jobs.rows_from(number)
        return frame[(frame["run"] == self._jobs.run) & frame["step"].between(first, first + steps - 1)]

    def _publish(self, wanted: RunFilters) -> int:
        """Publish the plan of a run of the verdict; returns its version."""
        return lend_plan(self.session, **self.changes(wanted)).version

    def pair(self, name: str, rank: int, step: int, tags: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        try:
            return self.session.tensors(name, rank=rank, step=self._zero + step, **tags)
        except SessionError:
            # The jobs have continued, and newer pairs, with equal values, have replaced this one.
            if not self._repeats or self._steps > 1:
                raise
            return self.session.tensors(name, rank=rank, **tags)

    def _after_orders(
        self,
        why: str,
        order: Callable[[int, RankHandle], RunSelfGraft | TraceSteps],
        filters: RunFilters,
        runs: int,
    ) -> tuple[int, int]:
        """Give each rank its order for the next version of the plan; returns that version and its first step."""
        version = self.session.plan.version + 1
        for rank in self.session.ranks:
            self._jobs.ask(rank, order(version, rank), Acknowledgement)
        if self._publish(filters) != version:
            raise VerdictAbandoned(EDITED)
        return version, self._after_steps(why, version, runs)

    def _after_steps(self, why: str, version: int, runs: int) -> int:
        self.count += 1
        first = self._jobs.after(f"{self.progress()}: {why}", version, runs, f"after its run {self.count - 1}")
        if first is None:
            raise VerdictAbandoned(EDITED)
        return first

    # ---- each side against itself -------------------------------------------------------------------------------

    def baseline_against_itself(self, rows: pd.DataFrame, keep: Sequence[str]) -> list[SelfGraft]:
        everyone = self.session.ranks
        found = self._against_themselves("whether the jobs repeat a step", ("record", "repeat"), everyone, keep=keep)
        baseline = [each for rank, each in zip(everyone, found, strict=True) if rank.place.side == "baseline"]
        target = [each for rank, each in zip(everyone, found, strict=True) if rank.place.side == "target"]
        self._target_moved = _differing(target)
        self._repeats = not _differing(baseline)
        if not self._repeats:
            # Code that gives different results each time has no floor.
            return [replace(each, not_recorded=0) for each in baseline]
        ranks = self.session.select("baseline")
        grafted = self._against_themselves(
            "the baseline against itself", ("graft", "drift"), ranks, dtypes=coarser_dtypes(rows)
        )
        return [
            replace(recorded, added=each.added, outputs=each.outputs)
            for recorded, each in zip(baseline, grafted, strict=True)
        ]

    def to_be_grafted(self, rows: pd.DataFrame) -> pd.DataFrame:
        return without_data(rows) if self._graft_weights else without_data(rows[~updates(rows)])

    def target_against_itself(self) -> list[str]:
        return self._target_moved

    def baseline_changed(self) -> list[str]:
        ranks = self.session.select("baseline")
        return _differing(self._against_themselves("whether the baseline is unchanged", ("repeat",), ranks))

    def misaligned_steps(self, compared: pd.DataFrame) -> MisalignedSteps | None:
        if self._repeats or not may_be_misaligned(compared):
            return None
        before, runs = self.session.row_count, -(-ENOUGH_STEPS // self._steps)
        version = self._publish(RunFilters(compare="True"))
        first = self._after_steps("whether one side is ahead", version, runs)
        frame = self._rows_since(before, first, runs * self._steps)
        return find_misaligned_steps(frame[frame["plan_version"] == version])

    def first_difference(self, floors: AccumulatedFloors) -> FirstDifference | None:
        frame = self._jobs.rows_from(0)
        frame = frame[frame["run"] == self._jobs.run]
        # An array, because an empty list would choose no columns.
        taps = zip(frame["name"], map(kind_of, frame["tags"]), strict=True)
        judged = np.array([tap not in self._left_out for tap in taps], bool)
        ranks = self.session.options.baseline, self.session.options.target
        return first_difference(frame[judged], floors, self.request.threshold, ranks)

    def weights_before(self, grafted: pd.DataFrame) -> pd.DataFrame:
        frame = self._jobs.rows_from(0)
        frame = frame[(frame["run"] == self._jobs.run) & (frame["step"] < grafted["step"].min())]
        frame = frame[np.array([kind_of(tags) == "param" and is_data(tags) for tags in frame["tags"]], bool)]
        newest: pd.DataFrame = frame[frame["step"] == frame["step"].max()]
        return newest

    def job_remarks(self, compared: pd.DataFrame, grafted: pd.DataFrame, moved: Sequence[str]) -> JobRemarks:
        return remarks_on_jobs(
            compared,
            grafted,
            moved=moved,
            target_moved=self._target_moved,
            given=self.request.constant_floor,
            steps=self._steps,
            weights_grafted=self._weights_grafted if self._graft_weights else None,
            threshold=self.request.threshold,
        )

    def _against_themselves(
        self,
        why: str,
        passes: tuple[Pass, ...],
        ranks: Sequence[RankHandle],
        *,
        keep: Sequence[str] = (),
        dtypes: Mapping[str, str] | None = None,
    ) -> list[SelfGraft]:
        """Run these ranks against themselves, while all others skip their taps."""

        def order(version: int, rank: RankHandle) -> RunSelfGraft:
            own: tuple[Pass, ...] = passes if rank in ranks else ("rest",)
            budget = self.session.options.keep_budget
            return RunSelfGraft(version, own, self._steps, dict(dtypes or {}), tuple(keep), budget)

        version, _ = self._after_orders(why, order, RunFilters(compare="True"), len(passes))
        found = []
        for rank in ranks:
            packed = self._jobs.ask(rank, AskSelfGraft(), SelfGraftResult).packed
            if packed is None:
                raise SessionError(f"verdict: {rank.label} did not run against itself ({why}); its log has the reason")
            found.append(open_value(rank, packed))
        if self._jobs.is_edited(version):
            raise VerdictAbandoned(EDITED)
        return found


def _differing(found: Sequence[SelfGraft]) -> list[str]:
    return list(dict.fromkeys(tap for each in found for tap in each.not_repeated))
