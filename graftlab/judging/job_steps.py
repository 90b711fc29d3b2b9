"""The steps of jobs that a verdict or a match uses as its runs: which plan they are made under, and when they end."""

from __future__ import annotations

import math
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

import pandas as pd

from graftlab.base.progress import LongWait
from graftlab.control.core import internals_of, restore_plan
from graftlab.control.queries import A
from graftlab.control.run import Run, state_of
from graftlab.errors import SessionClosedError, SessionError
from graftlab.plan.wire import to_wire
from graftlab.ranks.handle import RankHandle
from graftlab.ranks.messages import FallbackPlan, Question

if TYPE_CHECKING:
    from typing_extensions import Self

    from graftlab.control.core import SessionCore

# Seconds between two looks at who has joined.
_LOOK = 0.05


class JobStepsAbandoned(SessionError):
    """Raised when the jobs will make no further step."""


class JobSteps:
    """Waits for steps of the jobs, ``steps`` at a time. Errors name ``what`` waits for them and how many it ``needs``.

    Raises :class:`SessionError` if a rank has left, or if no rank joins for the session's time limit.
    """

    def __init__(
        self, session: SessionCore, what: str, needs: str, steps: int = 1, stop: threading.Event | None = None
    ) -> None:
        """Every wait ends with KeyboardInterrupt once ``stop`` is set."""
        self._stop = stop
        self._session = session
        self._what = what
        self._needs = needs
        self._steps = steps
        self._jobs = internals_of(session).jobs
        self._state = state_of(_run_of_jobs(session, what, stop))

    @property
    def run(self) -> int:
        """The number of the jobs' run."""
        return self._state.number

    def __enter__(self) -> Self:
        """Begin temporary plans, from which the jobs return to the present one if this process goes away."""
        self._tell(FallbackPlan(to_wire(self._session.plan)))
        return self

    def __exit__(self, *_: object) -> None:
        # All ranks leave their orders at one step only if these end with a version of the plan.
        restore_plan(self._session, as_new=True)
        if not self._session.closed:
            self._tell(FallbackPlan(None, self._session.plan.version))

    def _tell(self, message: FallbackPlan) -> None:
        for rank in self._session.ranks:
            if rank.alive:
                self._jobs.send(rank, message)

    def rows_from(self, number: int) -> pd.DataFrame:
        """The rows from this row on, as a frame."""
        return self._jobs.rows_from(number)

    def ask(self, rank: RankHandle, question: Question, expected: type[A]) -> A:
        """Ask a rank, and return its answer. If a job has failed meanwhile, raises its failure."""
        try:
            return self._jobs.ask(rank, question, expected)
        except SessionError:
            self._raise_failures()
            raise

    def is_edited(self, version: int) -> bool:
        """Whether the newest plan is not of this version."""
        return self._session.plan.version != version

    def after(self, why: str, version: int, runs: int, since: str = "") -> int | None:
        """Wait until every rank has ended ``runs`` times ``steps`` steps under the plan of this version.

        Returns the first step; None if another plan was published meanwhile. ``since`` is the progress that an error
        reports.
        """
        ranks, adopted = self._session.ranks, dict[str, int]()

        def first() -> float:
            adopted.update(self._session.adopted(version))
            return -(-max(adopted.values()) // self._steps) * self._steps if len(adopted) == len(ranks) else math.inf

        def there() -> bool:
            # A sender learns which of its tensors had no receiver only in the next step.
            return min(rank.status().step for rank in ranks) > first() + runs * self._steps

        steps = self._state.steps
        patience = _ProgressTimeout(self._session)
        title, where = f"{self._what}, {why}", self._state.where
        bar = LongWait(title, "steps", lambda: self._state.steps - steps, where=where, stop=self._stop)
        # Jobs skip a plan if a newer one is published before their next step.
        edited = partial(self.is_edited, version)
        self._state.wait_until(lambda: self._has_ended() or there() or edited() or patience.is_over(), bar)
        if edited():
            return None
        if not there():
            self._refuse(patience, since)
        return int(first())

    def _has_ended(self) -> list[str]:
        return [rank.label for rank in self._state.ranks if self._state.has_ended(rank)]

    def _raise_failures(self) -> None:
        self._state.raise_failures(f"the {self._what} was abandoned, and the plan from before it is in force: ")

    def _refuse(self, patience: _ProgressTimeout, since: str) -> None:
        """Raise the reason why the jobs did not make the expected steps."""
        self._raise_failures()
        if ended := self._has_ended():
            raise JobStepsAbandoned(
                f"the {self._what} was abandoned: {', '.join(ended)} ended before it was done"
                f"{since and f', {since}'}. {self._needs}; let them run longer"
            )
        raise JobStepsAbandoned(
            f"the {self._what} was abandoned: no job made progress for {patience.seconds:g} s ({self._state.where()}). "
            f"Each run of a {self._what} is {self._steps} of the jobs' steps, which end where they call gl.step(); "
            f"gl.listen(timeout=...) sets how long one may take"
        )


class _ProgressTimeout:
    """Expires when no rank has made progress for the session's time limit."""

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


def _run_of_jobs(session: SessionCore, what: str, stop: threading.Event | None) -> Run:
    """Wait for ranks that have not joined yet, and return the jobs' run.

    Raises :class:`SessionError` if a rank has left, or if no rank joins for the session's time limit.
    """

    def waits_for() -> str:
        expected = [rank.label for rank in session.ranks if rank.is_expected]
        return f"{', '.join(expected)} to join" if expected else "the jobs to begin their run"

    title = f"{what}: waiting for the jobs to join"
    limit, pause = session.options.timeout, threading.Event()
    joined, since = 0, time.monotonic()
    with LongWait(title, "ranks", lambda: _joined(session), len(session.ranks), waits_for, stop) as bar:
        while True:
            gone = [rank.label for rank in session.ranks if not (rank.alive or rank.is_expected)]
            if session.closed:
                raise SessionClosedError(f"{what}: this session was closed, so no job can join it")
            if gone:
                are = "are" if len(gone) > 1 else "is"
                raise SessionError(
                    f"{what}: {', '.join(gone)} {are} missing, and a {what} needs every rank of both jobs; "
                    "session.status() shows them"
                )
            if session.runs and not any(rank.is_expected for rank in session.ranks):
                return session.runs[-1]
            if joined != (joined := _joined(session)):
                since = time.monotonic()
            if time.monotonic() - since > limit:
                raise SessionError(
                    f"{what}: waited {limit:g} s for {waits_for()}. Start each job with the variables that gl.listen "
                    "printed; session.status() shows which ranks have joined, and gl.listen(timeout=...) sets how "
                    "long to wait for the next one"
                )
            # Another process joins, so no thread of this one can signal it.
            pause.wait(min(_LOOK, bar.next_look(None)))


def _joined(session: SessionCore) -> int:
    return sum(rank.alive for rank in session.ranks)
