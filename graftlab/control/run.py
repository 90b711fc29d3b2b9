"""A run: functions going on both sides at once, and what came of it."""

from __future__ import annotations

import contextlib
import html
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import TYPE_CHECKING, Any, Literal

from graftlab.base.html import bundle
from graftlab.base.progress import LongWait
from graftlab.base.words import counted
from graftlab.base.world import Side
from graftlab.control.pickles import open_exception, open_value
from graftlab.control.rank_output import Piece, RankOutput
from graftlab.errors import RunError, SessionError, WaitInterrupted
from graftlab.ranks.handle import RankHandle
from graftlab.ranks.messages import Failure, Output, RunDone

if TYPE_CHECKING:
    import pandas as pd

    from graftlab.plan.plan import GraftPlan

# What ranks print is shown by whoever waits; until then this many pieces are held (the logs have all of it).
_HELD_OUTPUT = 10_000
# Seconds between two looks at the ranks' steps.
_LOOK = 0.02

OnFailure = Literal["stop", "continue"]
"""What becomes of the other ranks of a run when one of them fails: they are interrupted, or left to go on."""


class Run:
    """One call on the ranks of one or both sides. ``number`` is the value of the rows' ``run`` column.

    :meth:`wait` raises what went wrong; the rows that were made until then are there all the same.

    >>> run
    <Run ...: done, 2 rows>
    >>> run.baseline, run.target, run.failures
    ([8.0], [8.0], {})
    """

    def __init__(
        self,
        number: int,
        ranks: list[RankHandle],
        frame: Callable[[int], pd.DataFrame],
        write: Callable[[str], object],
        count: Callable[[], int] = lambda: 0,
        first_step: int = 0,
        on_failure: OnFailure = "stop",
        unwritten: Callable[[int], str | None] = lambda since: None,
        plans: Callable[[], Sequence[GraftPlan]] = lambda: (),
        code: Mapping[str, str | CodeType] | None = None,
        lost_groups: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        # Text, or the code of a function, by where it was run; not the function, which may hold a model.
        self.code = dict(code or {})
        self._plans = plans
        self._lost_groups = lost_groups
        self._first_plan = len(plans()) - 1
        self.number = number
        self.on_failure = on_failure
        self.is_stopping = False
        # What a reader of the summary has to know first.
        self.remarks: list[str] = []
        self._ranks = ranks
        self._frame = frame
        self._write = write
        self._count = count
        self._unwritten = unwritten
        self._first_row = count()
        self.first_step = first_step
        self._changed = threading.Condition()
        self._done: dict[int, RunDone] = {}
        self._deaths: dict[int, str] = {}
        self._settled: set[int] = set()
        # Those that failed, the first one first; those that were interrupted because of it; and whether some of them
        # do not end for all that.
        self._failed: dict[int, str] = {}
        self._stopped: set[int] = set()
        self._held_up = False
        self._output: deque[tuple[str, bool, Piece]] = deque(maxlen=_HELD_OUTPUT)
        self._results: dict[int, Any] = {}

    # ---- what the hub reports -----------------------------------------------------------------------------------

    def note_output(self, rank: RankHandle, piece: Piece) -> None:
        with self._changed:
            self._output.append((rank.label, rank.trusted, piece))
            self._changed.notify_all()

    def note_done(self, rank: RankHandle, done: RunDone) -> None:
        with self._changed:
            self._done[rank.place.world_rank] = done
            if done.failure is not None:
                self._note_failure(rank, f"{done.failure.kind}: {done.failure.message}")
            self._changed.notify_all()

    def stop_the_others(self) -> list[RankHandle]:
        """The ranks whose code goes on beside one that failed; from now on their end is told as its consequence."""
        with self._changed:
            others = [rank for rank in self._ranks if not self.has_ended(rank)]
            self._stopped.update(rank.place.world_rank for rank in others)
            return others

    def in_vain(self) -> list[RankHandle]:
        """The ranks that were to stop and go on, on a side of which some rank has failed or was stopped."""
        with self._changed:
            over = {rank.place.side for rank in self._ranks if self.has_ended(rank) and not self._is_well(rank)}
            return [rank for rank in self._ranks if not self.has_ended(rank) and rank.place.side in over]

    def _is_well(self, rank: RankHandle) -> bool:
        done = self._done.get(rank.place.world_rank)
        return done is not None and done.failure is None

    def give_up_waiting(self, ending: Sequence[RankHandle]) -> None:
        """Nobody is to wait for those that go on now, other than these, which are about to end."""
        with self._changed:
            self._held_up = any(not self.has_ended(rank) for rank in self._ranks if rank not in ending)
            self._changed.notify_all()

    def has_ended(self, rank: RankHandle) -> bool:
        """Whether this rank's part of the run is over."""
        return rank.place.world_rank in self._done or rank.place.world_rank in self._settled

    def _note_failure(self, rank: RankHandle, what: str) -> None:
        brief = what.partition("\n")[0]
        self._failed.setdefault(rank.place.world_rank, brief)
        if self.on_failure == "continue":
            self._output.append((rank.label, True, Output(f"failed: {brief}; the others go on\n")))

    def note_settled(self, rank: RankHandle) -> None:
        with self._changed:
            self._settled.add(rank.place.world_rank)
            self._changed.notify_all()

    def note_death(self, rank: RankHandle, how: str) -> None:
        with self._changed:
            if rank.place.world_rank not in self._settled:
                self._deaths[rank.place.world_rank] = how
                self._note_failure(rank, how)
                self._settled.add(rank.place.world_rank)
                self._changed.notify_all()

    def note_return(self, rank: RankHandle) -> None:
        """It had not died: its line had."""
        with self._changed:
            if self._deaths.pop(rank.place.world_rank, None) is not None:
                self._failed.pop(rank.place.world_rank, None)
                self._settled.discard(rank.place.world_rank)
                self._output.append((rank.label, True, Output("goes on: its line had ended, and is there again\n")))
                self._changed.notify_all()

    # ---- what people ask ----------------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """Whether every rank has ended, and every row of this run has arrived."""
        return len(self._settled) == len(self._ranks)

    @property
    def participants(self) -> list[RankHandle]:
        return list(self._ranks)

    def wait(self, timeout: float | None = None, bar: LongWait | None = None) -> Run:
        """Wait until the run is over, showing what the ranks print; returns the run itself.

        Raises :class:`RunError` when a rank's code raised or a rank died, TimeoutError after ``timeout`` seconds. A
        rank that waits inside a collective for one that failed is ended; one that cannot be stopped for another reason
        is named, and not waited for. An interrupt (the stop button) ends the wait, not the run: a KeyboardInterrupt
        that says how to go on. ``bar`` takes the place of the usual one, which counts rows.

        >>> session.start(forward, forward, args=(x,)).wait(timeout=30).done
        True
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        shown = RankOutput(self._write)
        try:
            with (
                contextlib.closing(shown),
                bar or LongWait(f"run {self.number}", "rows", self._count, where=self.where) as progress,
                self._changed,
            ):
                while True:
                    output, over = list(self._output), self.done
                    self._output.clear()
                    self._changed.release()
                    try:
                        shown.show(output)
                    finally:
                        self._changed.acquire()
                    if (over or self._held_up) and not self._output:
                        break
                    remaining = None if deadline is None else deadline - time.monotonic()
                    if not self._output:
                        self._changed.wait_for(self._has_news, progress.next_look(remaining))
                    if remaining is not None and remaining <= 0 and not self.done:
                        raise TimeoutError(f"run {self.number} is still going on after {timeout:g} s: {self.where()}")
        except KeyboardInterrupt:
            raise WaitInterrupted(
                f"the wait for run {self.number} ended; the ranks go on. session.runs[-1].wait() waits "
                f"again, session.interrupt() stops the code on the ranks"
            ) from None
        self.raise_failures()
        if lost := self._unwritten(self._first_row):
            raise SessionError(
                f"run {self.number} has ended, and session.runs[-1] has its results, but of its rows some are not on "
                f"disk: {lost}"
            )
        return self

    @property
    def steps(self) -> int:
        """How many steps every rank has ended by now; while the last one goes on, one less than there are."""
        return max(0, min(rank.whereabouts().step for rank in self._ranks) - self.first_step)

    def wait_steps(self, count: int, timeout: float | None = None) -> Run:
        """Wait until every rank has ended ``count`` steps of this run, or the run is over; returns the run itself.

        Raises TimeoutError after ``timeout`` seconds. :meth:`wait` raises failures.

        >>> session.start(forward, forward, args=(x,)).wait_steps(1, timeout=30).wait().done
        True
        """
        deadline = None if timeout is None else time.monotonic() + timeout

        def there() -> bool:
            return self.done or self.steps >= count or self._held_up

        with self._changed:
            # Nobody signals a change of step, which is read from shared memory; so look from time to time.
            while not self._changed.wait_for(there, _LOOK):
                if deadline is not None and time.monotonic() >= deadline:
                    raise TimeoutError(f"run {self.number} has not ended {count} steps yet: {self.where()}")
        return self

    def wait_until(self, there: Callable[[], object], bar: LongWait) -> None:
        """Wait for what nobody signals, or for the end of the run; an interrupt ends the wait. Raises nothing else."""
        with bar:
            # Asked without the lock, which those need who have news.
            while not self.done and not there():
                with self._changed:
                    self._changed.wait(min(_LOOK, bar.next_look(None)))

    def wait_ended(self, ranks: Sequence[RankHandle], deadline: float) -> None:
        """Wait until the part of these ranks is over, or for the deadline of the monotonic clock."""
        with self._changed:
            self._changed.wait_for(lambda: all(map(self.has_ended, ranks)), max(0.0, deadline - time.monotonic()))

    def _has_news(self) -> bool:
        return bool(self._output) or self.done or self._held_up

    def where(self) -> str:
        """One line on each rank that failed, the first one first, and on where each is that has not ended."""
        failed = [f"{self._label(world_rank)}: failed: {what}" for world_rank, what in self._failed.copy().items()]
        return "; ".join(failed + [f"{rank.label}: {self._where_is(rank)}" for rank in self._unfinished()])

    def _where_is(self, rank: RankHandle) -> str:
        whereabouts = rank.whereabouts()
        if whereabouts.state != "idle":
            return str(whereabouts)
        # What it was told to do is on its way to it, or what it has to say to us.
        return "about to end" if rank.place.world_rank in self._done else "about to begin"

    @property
    def failing(self) -> dict[str, str]:
        """What went wrong so far, a line a rank, the first one first; told as soon as it is known.

        >>> run.failing
        {}
        """
        return {self._label(world_rank): what for world_rank, what in self._failed.copy().items()}

    def _label(self, world_rank: int) -> str:
        return next(rank.label for rank in self._ranks if rank.place.world_rank == world_rank)

    def _unfinished(self) -> list[RankHandle]:
        ended = self._settled | self._failed.keys()
        return [rank for rank in self._ranks if rank.place.world_rank not in ended]

    @property
    def baseline(self) -> list[Any]:
        """What the baseline's ranks returned, in rank order; None for a rank that has not (yet)."""
        return self._results_of("baseline")

    @property
    def target(self) -> list[Any]:
        """What the target's ranks returned, in rank order; None for a rank that has not (yet)."""
        return self._results_of("target")

    def _results_of(self, side: Side) -> list[Any]:
        results = []
        for rank in self._ranks:
            world_rank = rank.place.world_rank
            if rank.place.side != side:
                continue
            done = self._done.get(world_rank)
            if done is not None and done.result is not None and world_rank not in self._results:
                self._results[world_rank] = open_value(rank, done.result)
            results.append(self._results.get(world_rank))
        return results

    @property
    def frame(self) -> pd.DataFrame:
        """The rows of this run so far, one a tap a receiving rank, in execution order."""
        return self._frame(self.number)

    @property
    def failures(self) -> dict[str, Failure | str]:
        """What went wrong, by rank: an exception, or in words how a rank died."""
        found: dict[str, Failure | str] = {}
        for rank in self._ranks:
            world_rank = rank.place.world_rank
            done = self._done.get(world_rank)
            if done is not None and done.failure is not None:
                found[rank.label] = done.failure
            elif world_rank in self._deaths:
                found[rank.label] = self._deaths[world_rank]
        return found

    def raise_failures(self, before: str = "") -> None:
        """Raise :class:`RunError` where something went wrong so far; ``before`` stands before its message."""
        failures = self.failures
        if not failures:
            return
        # Ranks of one side mostly fail in the same way, so a shared message is shown once.
        order = {label: at for at, label in enumerate(self.failing)}
        alike: dict[str, list[str]] = {}
        first = None
        ranks = {rank.label: rank for rank in self._ranks}
        for label, failure in sorted(failures.items(), key=lambda item: self._weight(ranks[item[0]], order[item[0]])):
            if isinstance(failure, str):
                what = failure if ranks[label].was_ended else f"died: {failure}"
            elif self._is_consequence(ranks[label], failure):
                what = f"was interrupted, because {next(iter(order))} failed"
            else:
                what = f"raised {failure.kind}: {failure.message}\n{failure.traceback}"
                first = first or open_exception(ranks[label], failure)
            alike.setdefault(what, []).append(label)
        parts = [f"{', '.join(sorted(labels, key=list(ranks).index))} {what}" for what, labels in alike.items()]
        text = {label: failure if isinstance(failure, str) else failure.message for label, failure in failures.items()}
        if left := self._unfinished():
            where = "; ".join(f"{rank.label}: {rank.whereabouts()}" for rank in left)
            parts.append(
                f"not ended yet, because it cannot be interrupted where it is: {where}. session.stacks() tells where "
                f"that is, and session.restart() ends it"
            )
        for side, why in self._lost_groups().items():
            reason = "" if any(why in part for part in parts) else f" ({why})"
            parts.append(
                f"The process group of the {side} is gone{reason}: its collectives fail from now on. "
                f"session.restart(), or %graft restart, brings the same ranks and plan back, and runs nothing again"
            )
        raise RunError(
            f"{before}run {self.number} failed on {', '.join(failures)}\n\n" + "\n\n".join(parts), text
        ) from first

    def _weight(self, rank: RankHandle, order: int) -> tuple[int, int]:
        """Deaths first, because most other failures follow from them; last what was ended for a failure."""
        return 2 if rank.was_ended else rank.place.world_rank not in self._deaths, order

    def _is_consequence(self, rank: RankHandle, failure: Failure) -> bool:
        return rank.place.world_rank in self._stopped and failure.kind == "KeyboardInterrupt"

    @property
    def unmatched(self) -> dict[str, str]:
        """The filters that were in force in this run and matched no tap in it, by name: what is wrong with each text.

        Empty while the run goes on.

        >>> run.unmatched
        {}
        """
        return self._unmatched_in(self.frame) if self.done else {}

    def _unmatched_in(self, frame: pd.DataFrame) -> dict[str, str]:
        from graftlab.verdict.summary import unmatched_filters

        return unmatched_filters(self._plans()[self._first_plan :], frame)

    @property
    def summary(self) -> list[str]:
        """What came of it so far, a sentence each: what is wrong first, then how far apart the sides are.

        >>> run.summary[0]
        'first divergent: none of 2 compared rows is above the floor 1e-05, assumed for float32; ...'
        """
        return self._summary_of(self.frame)

    def _summary_of(self, frame: pd.DataFrame) -> list[str]:
        from graftlab.verdict.renaming import suggested_rename
        from graftlab.verdict.summary import differences, not_compared

        unmatched = self._unmatched_in(frame) if self.done else {}
        missed = [f"{name} matched no tap in this run: {text}" for name, text in unmatched.items()]
        if lost := not_compared(Counter(frame["status"])):
            missed.append(f"not compared: {lost}; the frame's column error says why")
        rename = suggested_rename(frame)
        return [*self.remarks, *missed, *([rename] if rename else []), *differences(frame)]

    def __repr__(self) -> str:
        return self._described(self.frame) if self.done else f"<Run {self.number}: going on; {self.where()}>"

    def _described(self, frame: pd.DataFrame) -> str:
        failed = ", ".join(self.failures)
        return f"<Run {self.number}: {f'failed on {failed}' if failed else 'done'}, {counted(len(frame), 'row')}>"

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        """What a notebook shows: how the run's taps ended, and its summary."""
        if not self.done:
            return bundle(repr(self), f"<b>run {self.number}</b> going on; {html.escape(self.where())}")
        frame = self.frame
        lines = self._summary_of(frame)
        failed = ", ".join(self.failures)
        state = f"failed on {html.escape(failed)}" if failed else "done"
        facts = ", ".join(f"{n:,} {status}" for status, n in Counter(frame["status"]).most_common()) or "no taps"
        shown = "<br>".join([f"<b>run {self.number}</b> {state}; {facts}", *map(html.escape, lines)])
        return bundle("\n".join([self._described(frame), *lines]), shown)
