"""What a session does with jobs that join it: their lines, and the run that all they do is, one each time they meet."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from graftlab.base.world import RunInfo
from graftlab.control.hub import Hub
from graftlab.control.plans import Plans
from graftlab.control.queries import AskRank
from graftlab.control.runs import Runs
from graftlab.plan.plan import GraftPlan
from graftlab.plan.wire import to_wire
from graftlab.ranks.handle import RankHandle
from graftlab.ranks.messages import ToRank, pack
from graftlab.rows.store import RowStore, to_frame


class JoinedJobs:
    """For whoever lets jobs join. ``lock`` is held where one thing must not come between two others."""

    def __init__(
        self,
        ranks: Sequence[RankHandle],
        runs: Runs,
        plans: Plans,
        hub: Hub,
        lock: threading.RLock,
        rows: RowStore,
        ask: AskRank,
    ) -> None:
        self._ranks = ranks
        self._runs = runs
        self._plans = plans
        self._hub = hub
        self._lock = lock
        self._rows = rows
        self.ask = ask

    def hear(self, rank: RankHandle) -> None:
        """Read what this rank sends, from now on: its line is a new one."""
        self._hub.add(rank)

    def assemble(self, generations: tuple[int, int], base: int | None) -> tuple[RunInfo, GraftPlan]:
        """A run in which all ranks do their own work, under this plan. A rank whose work goes on is in it once it says
        so: :meth:`note_moved`. Without a ``base`` the run's first step is the base."""
        with self._lock:
            info = self._runs.assemble()
            base = info.first_step if base is None else base
            return replace(info, generations=generations, base=base), self._plans.newest

    def note_moved(self, rank: RankHandle) -> None:
        """The rank takes part in no run but the newest any more."""
        self._runs.note_moved(rank)

    def note_return(self, rank: RankHandle, run: int) -> None:
        """The rank, whose line was cut, is there again, and has been in this run all the time."""
        self._runs.note_return(rank, run)

    def remark(self, text: str) -> None:
        """Have the summary of the run say this first."""
        self._runs.remark(text)

    def resume(self, run: RunInfo, plan: GraftPlan, *, published: bool) -> None:
        """Take over a run of jobs that another session held, under their plan, or under the one ``published`` here."""
        with self._lock:
            self._runs.resume(run)
            mine = self._plans.newest
            version = max(mine.version, plan.version + 1)
            self._plans.publish(replace(mine, version=version) if published else plan)

    def outrank(self, plan: GraftPlan) -> None:
        """Of a job that comes back with another plan than the session's, which was taken over from an earlier one:
        the session's goes on, under a number by which this job takes it for the newer."""
        with self._lock:
            mine = self._plans.newest
            if plan.version >= mine.version and to_wire(plan) != to_wire(mine):
                self._plans.publish(replace(mine, version=plan.version + 1))

    def tell_plan(self, rank: RankHandle) -> None:
        """Send the newest plan to a rank that has come back."""
        self._plans.tell(rank)

    def tell(self, rank: RankHandle, message: ToRank) -> None:
        """Send a rank what it answers nothing to."""
        rank.channel.send(pack(message))

    def rows_from(self, number: int) -> pd.DataFrame:
        """The rows from this one on, of which there are few: all that the jobs do is one run."""
        return to_frame(self._rows.rows(number))
