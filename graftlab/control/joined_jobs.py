"""The notebook's side of jobs that join a session: their connections and their run."""

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
    """A session as the session server uses it. ``lock`` is the session's, held while several changes become one."""

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

    def start_reading(self, rank: RankHandle) -> None:
        """Start reading from this rank, which has a new connection."""
        self._hub.add(rank)

    def begin_run(self, generations: tuple[int, int], base: int | None) -> tuple[RunInfo, GraftPlan]:
        """Begin a run of all ranks, and return it with its plan. A rank that is still in the previous run joins with
        :meth:`note_moved`. Without a ``base`` the run's first step is the base.
        """
        with self._lock:
            info = self._runs.begin_joint_run()
            base = info.first_step if base is None else base
            return replace(info, generations=generations, base=base), self._plans.newest

    def note_moved(self, rank: RankHandle) -> None:
        """Note that the rank is in the newest run now."""
        self._runs.note_moved(rank)

    def note_return(self, rank: RankHandle, run: int) -> None:
        """Note that the rank has reconnected, and was in this run all the time."""
        self._runs.note_return(rank, run)

    def remark(self, text: str) -> None:
        """Put this sentence first in the summary of the newest run."""
        self._runs.remark(text)

    def resume(self, run: RunInfo, plan: GraftPlan, *, published: bool) -> None:
        """Take over an earlier session's run of jobs, with their plan, or this session's if it was ``published``."""
        with self._lock:
            self._runs.resume(run)
            if published:
                self._plans.publish_as(max(self._plans.newest.version, plan.version + 1))
            else:
                self._plans.publish(plan)

    def supersede(self, plan: GraftPlan) -> None:
        """Publish the session's plan again, with a higher version, if a job returns with a different plan.

        The job would otherwise take its own plan, from an earlier session, for the newer one.
        """
        with self._lock:
            mine = self._plans.newest
            if plan.version >= mine.version and to_wire(plan) != to_wire(mine):
                self._plans.publish_as(plan.version + 1)

    def send_plan(self, rank: RankHandle) -> None:
        """Send the newest plan to a rank that has reconnected."""
        self._plans.send_to(rank)

    def send(self, rank: RankHandle, message: ToRank) -> None:
        """Send a rank a message that has no answer."""
        rank.channel.send(pack(message))

    def rows_from(self, number: int) -> pd.DataFrame:
        """The rows from this row on, as a frame."""
        return to_frame(self._rows.rows(number))
