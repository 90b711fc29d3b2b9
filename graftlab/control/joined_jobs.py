"""The notebook's side of jobs that join a session: their connections and their run."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

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


@dataclass(frozen=True, eq=False)
class JoinedJobs:
    """A session as the session server uses it. ``lock`` is the session's, held while several changes become one."""

    runs: Runs
    plans: Plans
    hub: Hub
    lock: threading.RLock
    rows: RowStore
    ask: AskRank

    def begin_run(self, generations: tuple[int, int], base: int | None) -> tuple[RunInfo, GraftPlan]:
        """Begin a run of all ranks, and return it with its plan. A rank that is still in the previous run joins with
        :meth:`.Runs.note_moved`. Without a ``base`` the run's first step is the base.
        """
        with self.lock:
            info = self.runs.begin_joint_run()
            base = info.first_step if base is None else base
            return replace(info, generations=generations, base=base), self.plans.newest

    def resume(self, run: RunInfo, plan: GraftPlan, *, published: bool) -> None:
        """Take over an earlier session's run of jobs, with their plan, or this session's if it was ``published``."""
        with self.lock:
            self.runs.resume(run)
            if published:
                self.plans.publish_as(max(self.plans.newest.version, plan.version + 1))
            else:
                self.plans.publish(plan)

    def supersede(self, plan: GraftPlan) -> None:
        """Publish the session's plan again, with a higher version, if a job returns with a different plan.

        The job would otherwise take its own plan, from an earlier session, for the newer one.
        """
        with self.lock:
            mine = self.plans.newest
            if plan.version >= mine.version and to_wire(plan) != to_wire(mine):
                self.plans.publish_as(plan.version + 1)

    def send(self, rank: RankHandle, message: ToRank) -> None:
        """Send a rank a message that has no answer."""
        rank.channel.send(pack(message))

    def rows_from(self, number: int) -> pd.DataFrame:
        """The rows from this row on, as a frame."""
        return to_frame(self.rows.rows(number))
