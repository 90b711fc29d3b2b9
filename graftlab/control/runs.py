"""The runs of a session: one at a time, begun here, and told here what becomes of them."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping, Sequence

from graftlab.base.world import RunInfo
from graftlab.control.run import Run
from graftlab.errors import SessionBusyError, SessionClosedError
from graftlab.plan.plan import GraftPlan
from graftlab.plan.wire import to_wire
from graftlab.ranks.messages import Interrupt, Output, RunDone, RunRequest, RunSettled, Work, pack
from graftlab.ranks.rank_process import RankProcess
from graftlab.rows.store import RowStore


class Runs:
    """Begins runs on these ranks, and knows all that there were. What :class:`.Run` shows comes from ``rows``."""

    def __init__(self, ranks: Sequence[RankProcess], rows: RowStore) -> None:
        self._ranks = ranks
        self._rows = rows
        self._runs: list[Run] = []
        self._next_step = 0
        self._closing = False

    def all(self) -> list[Run]:
        return list(self._runs)

    @property
    def busy(self) -> bool:
        """Whether a run is going on."""
        return bool(self._runs) and not self._runs[-1].done

    def begin(self, works: Mapping[int, Work], plan: GraftPlan) -> Run:
        """Have ranks, by world rank, do their works as one run under this plan.

        Raises :class:`SessionBusyError` while another run goes on, :class:`SessionClosedError` where a rank is gone.
        """
        if self.busy:
            raise SessionBusyError(
                f"run {self._runs[-1].number} is still going on ({self._runs[-1].where()}); wait for it with "
                f"run.wait(), or stop its code with session.interrupt()"
            )
        ranks = [self._ranks[world_rank] for world_rank in sorted(works)]
        for rank in ranks:
            if not rank.alive:
                raise SessionClosedError(
                    f"{rank.label} {rank.how_it_ended()} and cannot run anything; close this session and launch "
                    f"again. Its log ({rank.log}) ends:\n{rank.log_tail()}"
                )
        run = Run(
            number=len(self._runs),
            ranks=ranks,
            frame=self._rows.frame,
            write=lambda text: sys.stdout.write(text),
            count=lambda: len(self._rows),
            first_step=self._next_step,
        )
        self._runs.append(run)
        info = RunInfo(run.number, self._next_step, tuple(sorted(works)))
        for rank in ranks:
            rank.channel.send(pack(RunRequest(info, to_wire(plan), works[rank.place.world_rank])))
        for rank in ranks:
            # It may have died before this run was there for its death to be noted in.
            if not rank.alive:
                self.note_death(rank)
        return run

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in the code of the run that is going on; its ranks go on."""
        if not self.busy:
            return
        run = self._runs[-1]
        for rank in run.participants:
            if rank.whereabouts().state in ("running", "waiting"):
                rank.signal(signal.SIGINT)
            else:
                # It may be about to begin, when a signal would come too early.
                rank.channel.send(pack(Interrupt(run.number)))

    def close(self) -> None:
        """No run begins any more, and what fails from now on fails because its session ends."""
        self._closing = True

    # ---- what the ranks report ----------------------------------------------------------------------------------

    def note_output(self, output: Output, rank: RankProcess) -> None:
        if self._runs:
            self._runs[-1].note_output(rank, output.text)

    def note_done(self, done: RunDone, rank: RankProcess) -> None:
        if done.failure is None or not self._closing:
            self._runs[done.run].note_done(rank, done)

    def note_settled(self, settled: RunSettled, rank: RankProcess) -> None:
        self._next_step = max(self._next_step, settled.next_step)
        self._runs[settled.run].note_settled(rank)

    def note_death(self, rank: RankProcess) -> None:
        for run in self._runs[-1:]:
            if rank in run.participants and not run.done:
                if self._closing:
                    run.note_death(rank, "the session was closed")
                else:
                    run.note_death(rank, f"{rank.how_it_ended()}. Its log ({rank.log}) ends:\n{rank.log_tail(15)}")
