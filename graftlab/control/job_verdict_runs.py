"""The runs that a verdict is made of, where both sides are jobs: each is so many whole steps that they make anyway."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch

from graftlab.base.progress import LongWait
from graftlab.control.core import internals_of
from graftlab.control.pickles import open_value
from graftlab.control.queries import A
from graftlab.control.run import Run, state_of
from graftlab.control.verdict_request import VerdictRequest
from graftlab.control.verdict_runs import EDITED, RunFilters, VerdictRuns, coarser_dtypes
from graftlab.errors import SessionError
from graftlab.grafting.self_graft import SelfGraft
from graftlab.grafting.self_graft_in_steps import Pass
from graftlab.plan.wire import to_wire
from graftlab.ranks.handle import RankHandle
from graftlab.ranks.messages import (
    Acknowledgement,
    AskKeptTags,
    AskSelfGraft,
    FallbackPlan,
    KeptTags,
    Question,
    RunSelfGraft,
    SelfGraftResult,
)
from graftlab.rows.schema import MEASURED
from graftlab.verdict.job_remarks import remarks_on_jobs, updates
from graftlab.verdict.model_data import without_data
from graftlab.verdict.wording import JobRemarks

if TYPE_CHECKING:
    from typing_extensions import Self

    from graftlab.control.core import SessionCore


_GIVEN_UP = "the verdict was given up, and the plan from before it is in force: "


class StepRuns(VerdictRuns):
    """Lets the jobs make ``steps`` steps for each run, the first of which is a multiple of that number.

    Nothing is written into weights or into an optimizer's state, which would stay as they were made, unless
    ``graft_weights`` says so: then the target has the baseline's from its first grafted step on.
    """

    def __init__(self, session: SessionCore, request: VerdictRequest) -> None:
        super().__init__(session, request)
        graft_weights = request.graft_weights
        self.never_grafted = (
            "(kind == 'optimizer' and not updated)" if graft_weights else "(kind == 'param' or kind == 'optimizer')"
        )
        self._jobs = internals_of(session).jobs
        self._state = state_of(_run_of_jobs(session))
        self._steps = request.steps
        self._graft_weights = graft_weights
        self._weights_grafted = 0
        self._zero = 0
        self._repeats = True
        self._target_moved: list[str] = []

    def __enter__(self) -> Self:
        self._tell(FallbackPlan(to_wire(self.before)))
        return super().__enter__()

    def __exit__(self, *_: object) -> None:
        super().__exit__(*_)
        if not self.session.closed:
            self._tell(FallbackPlan(None, self.session.plan.version))

    def _tell(self, message: FallbackPlan) -> None:
        for rank in self.session.ranks:
            if rank.alive:
                self._jobs.tell(rank, message)

    # ---- both sides ---------------------------------------------------------------------------------------------

    def both(self, why: str, wanted: RunFilters) -> pd.DataFrame:
        before = self.session.row_count
        version = self._publish(wanted)
        # In the first grafted steps the target gets the baseline's weights and state; in the next ones it has them.
        first = self._after_steps(why, version, 2 if self._graft_weights and wanted.b2t else 1)
        first += self._steps if self._graft_weights and wanted.b2t else 0
        for rank in self.session.ranks:
            # Its answer comes after its rows.
            self._ask(rank, AskKeptTags(failed=False), KeptTags)
        frame = self._jobs.rows_from(before)
        frame = frame[(frame["run"] == self._state.number) & frame["step"].between(first, first + self._steps - 1)]
        if self._is_edited(version) or not set(frame["plan_version"]) <= {version}:
            raise SessionError(EDITED)
        self._zero = int(frame["step"].min()) if len(frame) else first
        if wanted.b2t is not None:
            written = frame["status"].isin(MEASURED) & ~frame.index.isin(without_data(frame).index)
            self._weights_grafted += int(written.sum())
            frame = frame[~written]
        return frame.reset_index(drop=True)

    def _publish(self, wanted: RunFilters) -> int:
        """Put a plan of the verdict's in force; returns its version."""
        # Beforehand too, because an interrupt may come between the edit and its result.
        self.expect()
        plan = self.session.edit(**self.changes(wanted))
        self.expect(plan.version)
        return plan.version

    def pair(self, name: str, rank: int, step: int, tags: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        try:
            return self.session.tensors(name, rank=rank, step=self._zero + step, **tags)
        except SessionError:
            # The jobs go on meanwhile, and the pair had to go for newer ones, which are the same.
            if not self._repeats or self._steps > 1:
                raise
            return self.session.tensors(name, rank=rank, **tags)

    # ---- each side against itself -------------------------------------------------------------------------------

    def baseline_against_itself(self, rows: pd.DataFrame, keep: Sequence[str]) -> list[SelfGraft]:
        everyone = self.session.ranks
        found = self._against_themselves("whether the jobs repeat a step", ("record", "repeat"), everyone, keep=keep)
        baseline = [each for rank, each in zip(everyone, found, strict=True) if rank.place.side == "baseline"]
        target = [each for rank, each in zip(everyone, found, strict=True) if rank.place.side == "target"]
        self._target_moved = _differing(target)
        self._repeats = not _differing(baseline)
        if not self._repeats:
            # There is no floor of these.
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
        return _differing(self._against_themselves("whether the baseline is as it was", ("repeat",), ranks))

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
        """What these ranks do to themselves, while all others take no tap."""
        version = self.session.plan.version + 1
        for rank in self.session.ranks:
            order = RunSelfGraft(
                version,
                passes if rank in ranks else ("rest",),
                self._steps,
                dict(dtypes or {}),
                tuple(keep),
                self.session.options.keep_budget,
            )
            self._ask(rank, order, Acknowledgement)
        if self._publish(RunFilters(compare="True")) != version:
            raise SessionError(EDITED)
        self._after_steps(why, version, len(passes))
        found = []
        for rank in ranks:
            packed = self._ask(rank, AskSelfGraft(), SelfGraftResult).packed
            if packed is None:
                raise SessionError(f"verdict: {rank.label} did not do what it was to do ({why}); its log says why")
            found.append(open_value(rank, packed))
        if self._is_edited(version):
            raise SessionError(EDITED)
        return found

    def _ask(self, rank: RankHandle, question: Question, expected: type[A]) -> A:
        try:
            return self._jobs.ask(rank, question, expected)
        except SessionError:
            self._state.raise_failures(_GIVEN_UP)
            raise

    # ---- steps --------------------------------------------------------------------------------------------------

    def _after_steps(self, why: str, version: int, runs: int) -> int:
        """Wait until every rank has ended so many runs of steps under this plan; returns the first step of them."""
        self.count += 1
        ranks, adopted = self.session.ranks, dict[str, int]()

        def first() -> float:
            adopted.update(self.session.adopted(version))
            return -(-max(adopted.values()) // self._steps) * self._steps if len(adopted) == len(ranks) else math.inf

        def there() -> bool:
            # A sender hears in the step after it what nobody has asked for.
            return min(rank.status().step for rank in ranks) > first() + runs * self._steps

        title = f"verdict, run {self.count}: {why}"
        steps = self._state.steps
        patience = _ProgressTimeout(self.session)
        bar = LongWait(title, "steps", lambda: self._state.steps - steps, where=self._state.where)
        # Of two plans that are published between two steps the jobs never hear of the first.
        edited = partial(self._is_edited, version)
        self._state.wait_until(lambda: self._has_ended() or there() or edited() or patience.is_over(), bar)
        if edited():
            raise SessionError(EDITED)
        if not there():
            self._refuse(patience)
        return int(first())

    def _is_edited(self, version: int) -> bool:
        return self.session.plan.version != version

    def _has_ended(self) -> list[str]:
        return [rank.label for rank in self._state.ranks if self._state.has_ended(rank)]

    def _refuse(self, patience: _ProgressTimeout) -> None:
        """Say why the jobs did not make the steps that were waited for."""
        self._state.raise_failures(_GIVEN_UP)
        if ended := self._has_ended():
            raise SessionError(
                f"the verdict was given up: {', '.join(ended)} ended before it was there, after run {self.count - 1} "
                f"of it. A verdict takes some twenty steps of the jobs; let them make more"
            )
        raise SessionError(
            f"the verdict was given up: no job made progress for {patience.seconds:g} s ({self._state.where()}). Each "
            f"run of a verdict is {self._steps} of the jobs' steps, which end where they call gl.step(); "
            f"gl.listen(timeout=...) says how long one may take"
        )


class _ProgressTimeout:
    """Is over when no rank has reached anything for as long as a session's time limit is."""

    def __init__(self, session: SessionCore) -> None:
        self.seconds = session.options.timeout
        self._ranks = session.ranks
        self._seen: object = None
        self._since = time.monotonic()

    def is_over(self) -> bool:
        seen = [(where.step, where.taps) for where in (rank.status() for rank in self._ranks)]
        if seen != self._seen:
            self._seen, self._since = seen, time.monotonic()
        return time.monotonic() - self._since > self.seconds


def _run_of_jobs(session: SessionCore) -> Run:
    """The one run that all that the jobs do is. Raises :class:`SessionError` where they cannot be judged."""
    missing = [rank.label for rank in session.ranks if not rank.alive]
    if missing or not session.runs:
        who = f"{', '.join(missing) or 'the run'} {'are' if len(missing) > 1 else 'is'}"
        raise SessionError(
            f"verdict: {who} not there, and a verdict needs every rank of both jobs; session.status() shows them"
        )
    return session.runs[-1]


def _differing(found: Sequence[SelfGraft]) -> list[str]:
    return list(dict.fromkeys(tap for each in found for tap in each.not_repeated))
