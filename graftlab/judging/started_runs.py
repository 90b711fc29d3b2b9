"""The runs of a verdict that needs new processes for each, because a process cannot repeat the step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import pandas as pd

from graftlab.base.world import Side
from graftlab.control.run import Run
from graftlab.errors import LaunchError
from graftlab.grafting.self_graft import SelfGraft
from graftlab.judging.verdict_request import VerdictRequest
from graftlab.judging.verdict_runs import CalledRuns, VerdictAbandoned, coarser_dtypes
from graftlab.matching.pair import Pair
from graftlab.plan.plan import PlanEdit
from graftlab.ranks.recorded_step import RecordSummary, graft_record
from graftlab.ranks.remote_functions import Callee

if TYPE_CHECKING:
    from graftlab.control.core import SessionCore


@dataclass(frozen=True)
class RecordedSteps:
    """The results of starting both sides twice: the first start's records, by rank, and how the second differs."""

    folder: str
    records: Mapping[Side, Sequence[RecordSummary]]
    moved: Mapping[Side, Sequence[Sequence[str]]]

    def differing(self, side: Side) -> list[str]:
        """The taps or results of a side that differ between its own two starts, in order."""
        return list(dict.fromkeys(tap for each in self.moved[side] for tap in each))


class StartedRuns(CalledRuns):
    """Calls ``start`` before each run, after which both sides wait at the same step again.

    The request's functions make that step, once. ``recorded`` comes from two runs before the verdict.
    """

    def __init__(
        self, session: SessionCore, request: VerdictRequest, start: Callable[[], None], recorded: RecordedSteps
    ) -> None:
        super().__init__(session, request)
        self._start, self._recorded = start, recorded

    def _run(
        self,
        why: str,
        callees: Mapping[Side, Callee],
        changes: PlanEdit | None = None,
    ) -> tuple[Run, int]:
        try:
            self._start()
        except LaunchError as error:
            # All further runs would end like this one.
            raise VerdictAbandoned(str(error)) from error
        return super()._run(why, callees, changes)

    def baseline_against_itself(self, rows: pd.DataFrame, keep: Sequence[str]) -> list[SelfGraft]:
        selves = [
            SelfGraft(skipped=list(record.skipped), not_recorded=record.not_recorded, not_repeated=list(moved))
            for record, moved in zip(self._recorded.records["baseline"], self._recorded.moved["baseline"], strict=True)
        ]
        if self._recorded.differing("baseline"):
            return selves
        graft = partial(graft_record, self._recorded.folder, coarser_dtypes(rows), self.before, list(keep))
        added, _ = self._run("the baseline against itself", {"baseline": partial(graft, resets=True)})
        drift, _ = self._run("how rounding adds up in the baseline", {"baseline": partial(graft, resets=False)})
        return [
            replace(each, added=one.added, last=one.last, outputs=other.outputs, returned=other.returned)
            for each, one, other in zip(selves, added.baseline, drift.baseline, strict=True)
        ]

    def target_against_itself(self) -> list[str]:
        return self._recorded.differing("target")

    def without_dependents(self, groups: Sequence[str]) -> list[str]:
        return []

    def present_pairs(self) -> list[Pair]:
        return []
