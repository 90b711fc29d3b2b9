"""The state of one run: the hub's thread writes what the ranks report, and :class:`.Run` shows it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any, Literal

from msgspec.structs import replace

from graftlab.base.progress import LongWait
from graftlab.base.world import Side
from graftlab.control.pickles import open_exception, open_value
from graftlab.control.rank_output import Piece
from graftlab.errors import RunError
from graftlab.ranks.handle import RankHandle
from graftlab.ranks.messages import Failure, Output, RunDone

# Output that waits for a call of Run.wait; of more, the oldest pieces are dropped. The logs have all of it.
_HELD_OUTPUT = 10_000
# Seconds between two looks at values that no thread signals, such as the ranks' steps.
_LOOK = 0.02

OnFailure = Literal["stop", "continue"]
"""Whether the other ranks of a run are interrupted or continue when one of them fails."""


class RunState:
    """The state of a run. Methods may be called from any thread.

    ``code`` is the code that was run, by side or rank: text, or a function's code object, which holds no model.
    """

    def __init__(
        self,
        number: int,
        ranks: list[RankHandle],
        first_step: int = 0,
        on_failure: OnFailure = "stop",
        code: Mapping[str, str | CodeType] | None = None,
        lost_groups: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self.number = number
        self.ranks = ranks
        self.first_step = first_step
        self.on_failure = on_failure
        self.code = dict(code or {})
        # Shown first in the summary.
        self.remarks: list[str] = []
        self.is_stopping = False
        # Notified whenever something below changes.
        self.changed = threading.Condition()
        self.output: deque[tuple[str, bool, Piece]] = deque(maxlen=_HELD_OUTPUT)
        # Whether some rank cannot be stopped after a failure, so that waiting for it is pointless.
        self.is_held_up = False
        self._lost_groups = lost_groups
        # All by world rank.
        self._done: dict[int, RunDone] = {}
        self._deaths: dict[int, str] = {}
        self._settled: set[int] = set()
        self._failed: dict[int, str] = {}  # in the order of failing
        self._stopped: set[int] = set()  # interrupted because another rank failed
        self._results: dict[int, Any] = {}

    # ---- what the hub reports -----------------------------------------------------------------------------------

    def note_output(self, rank: RankHandle, piece: Piece) -> None:
        with self.changed:
            self.output.append((rank.label, rank.trusted, piece))
            self.changed.notify_all()

    def note_done(self, rank: RankHandle, done: RunDone) -> None:
        with self.changed:
            self._done[rank.place.world_rank] = done
            if done.failure is not None:
                self._note_failure(rank, f"{done.failure.kind}: {done.failure.message}")
            self.changed.notify_all()

    def note_settled(self, rank: RankHandle) -> None:
        with self.changed:
            self._settled.add(rank.place.world_rank)
            self.changed.notify_all()

    def note_death(self, rank: RankHandle, how: str) -> None:
        with self.changed:
            if rank.place.world_rank not in self._settled:
                self._deaths[rank.place.world_rank] = how
                self._note_failure(rank, how)
                self._settled.add(rank.place.world_rank)
                self.changed.notify_all()

    def note_return(self, rank: RankHandle) -> None:
        """Take back a reported death, since only the rank's connection had ended."""
        with self.changed:
            if self._deaths.pop(rank.place.world_rank, None) is not None:
                self._failed.pop(rank.place.world_rank, None)
                self._settled.discard(rank.place.world_rank)
                self.output.append((rank.label, True, Output("reconnected, and continues this run\n")))
                self.changed.notify_all()

    def _note_failure(self, rank: RankHandle, what: str) -> None:
        brief = what.partition("\n")[0]
        self._failed.setdefault(rank.place.world_rank, brief)
        if self.on_failure == "continue":
            self.output.append((rank.label, True, Output(f"failed: {brief}; the other ranks continue\n")))

    # ---- stopping after a failure -------------------------------------------------------------------------------

    def mark_stopped(self) -> list[RankHandle]:
        """Return the ranks that still run. From now on their end counts as a consequence of the failure."""
        with self.changed:
            others = [rank for rank in self.ranks if not self.has_ended(rank)]
            self._stopped.update(rank.place.world_rank for rank in others)
            return others

    def left_on_failed_sides(self) -> list[RankHandle]:
        """The ranks that still run on a side where another rank has failed or was stopped."""
        with self.changed:
            failed = {rank.place.side for rank in self.ranks if self.has_ended(rank) and not self._has_succeeded(rank)}
            return [rank for rank in self.ranks if not self.has_ended(rank) and rank.place.side in failed]

    def _has_succeeded(self, rank: RankHandle) -> bool:
        done = self._done.get(rank.place.world_rank)
        return done is not None and done.failure is None

    def stop_waiting(self, ending: Sequence[RankHandle]) -> None:
        """End all waits if a rank still runs that is not among ``ending``, the ranks that are about to end."""
        with self.changed:
            self.is_held_up = any(not self.has_ended(rank) for rank in self.ranks if rank not in ending)
            self.changed.notify_all()

    # ---- progress -----------------------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """Whether every rank has ended, and every row of this run has arrived."""
        return len(self._settled) == len(self.ranks)

    @property
    def steps(self) -> int:
        """How many steps every rank has ended."""
        return max(0, min(rank.status().step for rank in self.ranks) - self.first_step)

    def has_ended(self, rank: RankHandle) -> bool:
        """Whether this rank's part of the run is over."""
        return rank.place.world_rank in self._done or rank.place.world_rank in self._settled

    def has_news(self) -> bool:
        """Whether there is output to show, or nothing left to wait for."""
        return bool(self.output) or self.done or self.is_held_up

    def wait_steps(self, count: int, deadline: float | None) -> bool:
        """Wait until every rank has ended ``count`` steps or the run is over; False at the deadline."""
        with self.changed:
            # No thread signals a change of step, which is read from shared memory.
            while not self.changed.wait_for(lambda: self.done or self.steps >= count or self.is_held_up, _LOOK):
                if deadline is not None and time.monotonic() >= deadline:
                    return False
        return True

    def wait_until(self, condition: Callable[[], object], bar: LongWait) -> None:
        """Wait for a condition that no thread signals, or for the end of the run. Raises nothing but an interrupt."""
        with bar:
            # Evaluated without the lock, which the hub's thread needs to report.
            while not self.done and not condition():
                with self.changed:
                    self.changed.wait(min(_LOOK, bar.next_look(None)))

    def wait_ended(self, ranks: Sequence[RankHandle], deadline: float) -> None:
        """Wait until these ranks have ended their part, or until the deadline, in time of the monotonic clock."""
        with self.changed:
            self.changed.wait_for(lambda: all(map(self.has_ended, ranks)), max(0.0, deadline - time.monotonic()))

    def where(self) -> str:
        """The failed ranks, in the order of failing, and where each rank is that has not ended."""
        failed = [f"{label}: failed: {what}" for label, what in self.failing.items()]
        return "; ".join(failed + [f"{rank.label}: {self._where_is(rank)}" for rank in self._unfinished()])

    def _where_is(self, rank: RankHandle) -> str:
        status = rank.status()
        if status.state != "idle":
            return str(status)
        # Its request or its report is on the way.
        return "about to end" if rank.place.world_rank in self._done else "about to begin"

    def _unfinished(self) -> list[RankHandle]:
        ended = self._settled | self._failed.keys()
        return [rank for rank in self.ranks if rank.place.world_rank not in ended]

    # ---- results ------------------------------------------------------------------------------------------------

    def results_of(self, side: Side) -> list[Any]:
        """What the ranks of a side returned, in rank order; None for a rank that has not (yet)."""
        results = []
        for rank in self.ranks:
            world_rank = rank.place.world_rank
            if rank.place.side != side:
                continue
            done = self._done.get(world_rank)
            if done is not None and done.result is not None and world_rank not in self._results:
                self._results[world_rank] = open_value(rank, done.result)
                # As large as the result, which is kept.
                self._done[world_rank] = replace(done, result=None)
            results.append(self._results.get(world_rank))
        return results

    def forget_results(self) -> None:
        """Release what the ranks returned, which the session would keep as long as the run itself."""
        with self.changed:
            self._results.clear()
            self._done = {world_rank: replace(done, result=None) for world_rank, done in self._done.items()}

    # ---- failures -----------------------------------------------------------------------------------------------

    @property
    def failing(self) -> dict[str, str]:
        """What went wrong so far, a line a rank, in the order of failing."""
        return {self._label(world_rank): what for world_rank, what in self._failed.copy().items()}

    def _label(self, world_rank: int) -> str:
        return next(rank.label for rank in self.ranks if rank.place.world_rank == world_rank)

    @property
    def failures(self) -> dict[str, Failure | str]:
        """What went wrong, by rank: an exception, or in words how a rank died."""
        found: dict[str, Failure | str] = {}
        for rank in self.ranks:
            world_rank = rank.place.world_rank
            done = self._done.get(world_rank)
            if done is not None and done.failure is not None:
                found[rank.label] = done.failure
            elif world_rank in self._deaths:
                found[rank.label] = self._deaths[world_rank]
        return found

    def raise_failures(self, before: str = "") -> None:
        """Raise :class:`RunError` if something has gone wrong so far; its message begins with ``before``."""
        failures = self.failures
        if not failures:
            return
        # Ranks of one side mostly fail alike, so a shared message is shown once.
        order = {label: at for at, label in enumerate(self.failing)}
        alike: dict[str, list[str]] = {}
        first = None
        ranks = {rank.label: rank for rank in self.ranks}
        for label, failure in sorted(failures.items(), key=lambda item: self._weight(ranks[item[0]], order[item[0]])):
            if isinstance(failure, str):
                what = failure if ranks[label].was_ended else f"died: {failure}"
            elif failure.kind == "KeyboardInterrupt" and ranks[label].place.world_rank in self._stopped:
                what = f"was interrupted, because {next(iter(order))} failed"
            else:
                # Without frames, a traceback only repeats the message.
                has_frames = any(mark in failure.traceback for mark in ("Traceback", 'File "'))
                trace = f"\n{failure.traceback}" if has_frames else ""
                what = f"raised {failure.kind}: {failure.message}{trace}"
                first = first or open_exception(ranks[label], failure)
            alike.setdefault(what, []).append(label)
        parts = [f"{', '.join(sorted(labels, key=list(ranks).index))} {what}" for what, labels in alike.items()]
        text = {label: failure if isinstance(failure, str) else failure.message for label, failure in failures.items()}
        if left := self._unfinished():
            where = "; ".join(f"{rank.label}: {rank.status()}" for rank in left)
            parts.append(
                f"still running, because it cannot be interrupted where it is: {where}. session.stacks() shows its "
                f"stack, and session.restart() ends it"
            )
        for side, why in self._lost_groups().items():
            reason = "" if any(why in part for part in parts) else f" ({why})"
            parts.append(
                f"The process group of the {side} is gone{reason}: its collectives fail from now on. "
                f"session.restart(), or %graft restart, brings the same ranks and plan back, and reruns nothing"
            )
        raise RunError(
            f"{before}run {self.number} failed on {', '.join(failures)}\n\n" + "\n\n".join(parts), text
        ) from first

    def _weight(self, rank: RankHandle, order: int) -> tuple[int, int]:
        """Sort deaths first, since most other failures follow from them, and ranks ended for a failure last."""
        return 2 if rank.was_ended else rank.place.world_rank not in self._deaths, order
