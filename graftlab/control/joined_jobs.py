"""What a session does with jobs that join it: their lines, and the one run that all they do is."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from graftlab.base.world import RunInfo
from graftlab.control.hub import Hub
from graftlab.control.kept_pairs import Ask
from graftlab.control.plans import Plans
from graftlab.control.run import Run
from graftlab.control.runs import Runs
from graftlab.plan.plan import GraftPlan
from graftlab.plan.wire import to_wire
from graftlab.ranks.handle import RankHandle
from graftlab.ranks.messages import OwnWork, ToRank, Work, pack
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
        ask: Ask,
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

    def begin(self) -> Run:
        """The jobs begin, each to do its own work."""
        with self._lock:
            works: dict[int, Work] = {rank.place.world_rank: OwnWork() for rank in self._ranks}
            return self._runs.begin(works, self._plans.newest, "continue")

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
