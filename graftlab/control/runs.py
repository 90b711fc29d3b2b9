"""Begins the runs of a session, one at a time, and records what their ranks report."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import CodeType
from typing import TYPE_CHECKING

from graftlab.base.uninterrupted import uninterrupted
from graftlab.base.world import RunInfo
from graftlab.control.process_groups import ProcessGroups, collective_in
from graftlab.control.rank_output import Piece
from graftlab.control.run import Run
from graftlab.control.run_state import OnFailure, RunState
from graftlab.errors import SessionBusyError, SessionClosedError, SessionError
from graftlab.plan.plan import GraftPlan
from graftlab.plan.wire import to_wire
from graftlab.ranks.handle import RankHandle
from graftlab.ranks.messages import Interrupt, RunDone, RunRequest, RunSettled, Work, pack
from graftlab.rows.store import RowStore

if TYPE_CHECKING:
    from matplotlib.figure import Figure

logger = logging.getLogger(__name__)

# Seconds before the other ranks are interrupted: ranks of one side mostly fail alike, and can report it themselves.
_MOMENT = 0.25
# Seconds that interrupted ranks have to end. A rank in a collective does not end: gloo cannot be interrupted.
_GRACE = 1.5
# Lines of a log that the message of a death shows: faulthandler writes about thirty for a segmentation fault.
_LAST_LINES = 60


class Runs:
    """Begins runs on these ranks, and holds all runs so far. :class:`.Run` shows rows of ``rows``."""

    def __init__(
        self,
        ranks: Sequence[RankHandle],
        rows: RowStore,
        plans: Callable[[], Sequence[GraftPlan]],
        stack_of: Callable[[RankHandle], str] = lambda rank: "",
        draw: Callable[[int], Figure | None] = lambda number: None,
    ) -> None:
        self.groups = ProcessGroups(ranks)
        self._ranks = ranks
        self._plans = plans
        self._stack_of = stack_of
        self._draw = draw
        self._rows = rows
        self._runs: list[Run] = []
        self._states: list[RunState] = []
        self._next_step = rows.first_step
        self._first_run = rows.first_run
        # The reason why the session is ending its ranks, and so of every failure then; None otherwise.
        self._closing: str | None = None

    def all(self) -> list[Run]:
        return list(self._runs)

    @property
    def _next_run(self) -> int:
        return self._first_run + len(self._runs)

    @property
    def busy(self) -> bool:
        """Whether a run is in progress."""
        return bool(self._states) and not self._states[-1].done

    @property
    def failing(self) -> dict[str, str]:
        """What went wrong so far in the run in progress, by rank."""
        return self._states[-1].failing if self.busy else {}

    def require_can_begin(self, works: Iterable[int]) -> None:
        """Raise :class:`SessionBusyError` during a run, :class:`SessionClosedError` if one of these ranks is gone."""
        if self.busy:
            raise SessionBusyError(
                f"run {self._runs[-1].number} is still running ({self._runs[-1].where()}); wait for it with "
                f"run.wait(), or stop its code with session.interrupt()"
            )
        for rank in (self._ranks[world_rank] for world_rank in sorted(works)):
            if not rank.alive:
                # The log of a rank that the session itself ended says nothing about it.
                end = "" if rank.was_ended else f" Its log ({rank.log}) ends:\n{rank.log_tail(with_grafts=False)}"
                raise SessionClosedError(
                    f"{rank.label} is gone ({rank.how_it_ended()}) and cannot run anything; session.restart(), or "
                    f"%graft restart, brings the same ranks and plan back.{end}"
                )

    def begin(
        self,
        works: Mapping[int, Work],
        plan: GraftPlan,
        on_failure: OnFailure = "stop",
        code: Mapping[str, str | CodeType] | None = None,
    ) -> Run:
        """Send the ranks their work, by world rank, as one run under this plan. ``code`` is that of :class:`.RunState`.

        Raises as :meth:`require_can_begin` does.
        """
        self.require_can_begin(works)
        ranks = [self._ranks[world_rank] for world_rank in sorted(works)]
        info = RunInfo(self._next_run, self._next_step, tuple(sorted(works)))
        # Before the run exists: to pack large arguments takes a while, in which the stop button may be pressed.
        requests = [pack(RunRequest(info, to_wire(plan), works[rank.place.world_rank])) for rank in ranks]

        def send() -> Run:
            run = self._make(ranks, on_failure, code)
            for rank, request in zip(ranks, requests, strict=True):
                rank.channel.send(request)
            for rank in ranks:
                # A rank may have died before this run existed to record it.
                if not rank.alive:
                    self.note_death(rank)
            return run

        # A run that reached some ranks alone would never end.
        return uninterrupted("the run has begun", send)

    def resume(self, info: RunInfo) -> Run:
        """Take over a run that the ranks have already begun, as the first run of this session."""
        self._first_run, self._next_step = info.run, info.first_step
        return self._make([self._ranks[world_rank] for world_rank in info.participants], "continue")

    def begin_joint_run(self) -> RunInfo:
        """Begin a run of jobs. Its ranks need no work from here, and may still be in the previous run."""
        self._next_step = max(self._next_step, *(rank.status().step + 1 for rank in self._ranks))
        run = self._make(list(self._ranks), "continue")
        return RunInfo(run.number, self._next_step, tuple(rank.place.world_rank for rank in self._ranks))

    def note_moved(self, rank: RankHandle) -> None:
        """Note that the rank is in the newest run now."""
        for run in self._states[:-1]:
            run.note_settled(rank)

    def note_return(self, rank: RankHandle, number: int) -> None:
        """Note that the rank is still in this run: only its connection had ended."""
        for run in self._states:
            if run.number == number:
                run.note_return(rank)

    def remark(self, text: str) -> None:
        """Put this sentence first in the newest run's summary."""
        self._states[-1].remarks.append(text)

    def _make(
        self, ranks: list[RankHandle], on_failure: OnFailure, code: Mapping[str, str | CodeType] | None = None
    ) -> Run:
        state = RunState(self._next_run, ranks, self._next_step, on_failure, code, lost_groups=self._lost_groups)
        run = Run(
            state,
            frame=self._rows.frame,
            write=lambda text: sys.stdout.write(text),
            count=lambda: len(self._rows),
            unwritten=self._rows.unwritten,
            plans=self._plans,
            draw=self._draw,
        )
        self._states.append(state)
        self._runs.append(run)
        return run

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in the code of the run in progress; its ranks stay alive."""
        if not self.busy:
            return
        run = self._states[-1]
        for rank in run.ranks:
            if rank.status().state in ("running", "waiting"):
                rank.signal(signal.SIGINT)
            else:
                # The rank may not have begun yet, and a signal would come too early.
                rank.channel.send(pack(Interrupt(run.number)))

    def close(self, why: str) -> None:
        """Report ``why``, such as ``"the session was closed"``, as the reason for all failures from now on."""
        self._closing = why

    def _lost_groups(self) -> dict[str, str]:
        # The ranks of a session that closes are ended, and no restart brings them back.
        return {} if self._closing else self.groups.lost()

    def reopen(self, ended: Sequence[RankHandle]) -> None:
        """Continue with new ranks, and with steps that none of the ``ended`` ranks has begun."""
        self._next_step = max(self._next_step, *(rank.status().step + 1 for rank in ended))
        self.groups.renew()
        self._closing = None

    # ---- what the ranks report ----------------------------------------------------------------------------------

    def note_output(self, output: Piece, rank: RankHandle) -> None:
        if self._states:
            self._states[-1].note_output(rank, output)

    def note_done(self, done: RunDone, rank: RankHandle) -> None:
        if done.failure is None or self._closing is None:
            run = self._states[done.run - self._first_run]
            run.note_done(rank, done)
            if done.failure is not None:
                self.groups.note_failure(rank, done.failure)
                self._stop_other_ranks(run)

    def note_settled(self, settled: RunSettled, rank: RankHandle) -> None:
        self._next_step = max(self._next_step, settled.next_step)
        self._states[settled.run - self._first_run].note_settled(rank)

    def note_death(self, rank: RankHandle) -> None:
        self._next_step = max(self._next_step, rank.status().step + 1)
        for run in self._states:
            if rank in run.ranks and not run.done:
                if self._closing is not None:
                    run.note_death(rank, self._closing)
                elif rank.was_ended:
                    run.note_death(rank, rank.how_it_ended())
                else:
                    tap = rank.status().tap
                    where = f"last seen at tap {tap!r}" if tap else "before its first tap"
                    how = f"{rank.how_it_ended()} (pid {rank.pid}, {where})"
                    end = rank.log_tail(_LAST_LINES, with_grafts=False)
                    run.note_death(rank, f"{how}. Its log ({rank.log}) ends:\n{end}")
                    self._stop_other_ranks(run)

    def _stop_other_ranks(self, run: RunState) -> None:
        if run.on_failure == "stop" and not run.done and not run.is_stopping:
            run.is_stopping = True
            _later(_MOMENT, self._interrupt_other_ranks, run)

    def _interrupt_other_ranks(self, run: RunState) -> None:
        for rank in run.mark_stopped():
            # With the run's number, so that it cannot interrupt the next run.
            rank.channel.send(pack(Interrupt(run.number)))
        _later(_GRACE, self._end_ranks_in_collectives, run)

    def _end_ranks_in_collectives(self, run: RunState) -> None:
        ending = []
        for rank in run.left_on_failed_sides():
            try:
                where = collective_in(self._stack_of(rank))
            except SessionError as error:
                logger.warning("%s still runs after a failure, and did not report where it is: %s", rank.label, error)
                continue
            if where is not None and not run.has_ended(rank):
                first = next(iter(run.failing))
                rank.end(f"was ended, because it waited in a collective ({where}) after {first} had failed")
                ending.append(rank)
        run.stop_waiting(ending)


def _later(seconds: float, call: Callable[[RunState], None], run: RunState) -> None:
    timer = threading.Timer(seconds, call, (run,))
    timer.daemon = True
    timer.start()
