"""A run: one call on the ranks as a user sees it, while it runs and afterwards."""

from __future__ import annotations

import contextlib
import html
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from graftlab.base import jupyter
from graftlab.base.html import bundle
from graftlab.base.progress import LongWait
from graftlab.base.text import counted, failed_on
from graftlab.control.rank_output import RankOutput
from graftlab.control.run_state import RunState
from graftlab.errors import SessionError, WaitInterrupted
from graftlab.ranks.handle import RankHandle
from graftlab.ranks.messages import Failure

# A run with more rows than this is not drawn in a notebook, because that takes seconds.
_DRAWN_ROWS = 20_000

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from graftlab.plan.plan import GraftPlan
    from graftlab.verdict.conclusion import Conclusion


class Run:
    """One call on the ranks of one or both sides.

    :meth:`wait` raises what went wrong; rows that arrived before it are kept.

    >>> run
    <Run ...: done, 2 rows>
    >>> run.baseline, run.target, run.failures
    ([8.0], [8.0], {})
    """

    def __init__(
        self,
        state: RunState,
        frame: Callable[[int], pd.DataFrame],
        write: Callable[[str], object],
        count: Callable[[], int] = lambda: 0,
        unwritten: Callable[[int], str | None] = lambda since: None,
        plans: Callable[[], Sequence[GraftPlan]] = lambda: (),
        draw: Callable[[int], Figure | None] = lambda number: None,
    ) -> None:
        self._state = state
        self._plans = plans
        self._draw = draw
        self._first_plan = len(plans()) - 1
        self._frame = frame
        self._write = write
        self._count = count
        self._unwritten = unwritten
        self._first_row = count()

    @property
    def number(self) -> int:
        """The value of the rows' column ``run``."""
        return self._state.number

    @property
    def first_step(self) -> int:
        """The number of the step that the run began with."""
        return self._state.first_step

    @property
    def participants(self) -> list[RankHandle]:
        """The ranks that take part."""
        return list(self._state.ranks)

    @property
    def done(self) -> bool:
        """Whether every rank has ended, and every row of this run has arrived."""
        return self._state.done

    def wait(self, timeout: float | None = None, bar: LongWait | None = None) -> Run:
        """Wait until the run is over, showing what the ranks print; returns the run itself.

        Raises :class:`RunError` when a rank's code raised or a rank died, TimeoutError after ``timeout`` seconds. A
        rank that waits in a collective for a failed rank is ended; a rank that cannot be stopped for another reason is
        named, and not waited for. An interrupt (the stop button) ends the wait, not the run: it raises
        KeyboardInterrupt with advice. ``bar`` replaces the progress bar, which counts rows.

        >>> session.start(forward, forward, args=(x,)).wait(timeout=30).done
        True
        """
        state = self._state
        deadline = None if timeout is None else time.monotonic() + timeout
        shown = RankOutput(self._write)
        try:
            with (
                contextlib.closing(shown),
                bar or LongWait(f"run {self.number}", "rows", self._count, where=self.where) as progress,
                state.changed,
            ):
                while True:
                    output, over = list(state.output), self.done
                    state.output.clear()
                    state.changed.release()
                    try:
                        shown.show(output)
                    finally:
                        state.changed.acquire()
                    if (over or state.is_held_up) and not state.output:
                        break
                    remaining = None if deadline is None else deadline - time.monotonic()
                    if not state.output:
                        state.changed.wait_for(state.has_news, progress.next_look(remaining))
                    if remaining is not None and remaining <= 0 and not self.done:
                        raise TimeoutError(
                            f"run {self.number} is still running after {timeout:g} s ({self.where()}). "
                            f"session.runs[-1].wait() waits for it again, session.interrupt() stops its code, and "
                            f"session.stacks() shows where each rank is in the code"
                        )
        except KeyboardInterrupt:
            raise WaitInterrupted(
                f"stopped waiting for run {self.number}; the ranks continue. session.runs[-1].wait() waits again, "
                f"session.interrupt() stops the code on the ranks"
            ) from None
        state.raise_failures()
        if lost := self._unwritten(self._first_row):
            raise SessionError(
                f"run {self.number} has ended and session.runs[-1] has its results, but some of its rows are not on "
                f"disk: {lost}"
            )
        return self

    @property
    def steps(self) -> int:
        """How many steps every rank has ended; a step in progress does not count."""
        return self._state.steps

    def wait_steps(self, count: int, timeout: float | None = None) -> Run:
        """Wait until every rank has ended ``count`` steps of this run, or the run is over; returns the run itself.

        Raises TimeoutError after ``timeout`` seconds. Failures are raised by :meth:`wait`.

        >>> session.start(forward, forward, args=(x,)).wait_steps(1, timeout=30).wait().done
        True
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        if not self._state.wait_steps(count, deadline):
            raise TimeoutError(
                f"run {self.number} has ended {self.steps} of {count} steps after {timeout:g} s ({self.where()}). "
                f"session.runs[-1].wait_steps({count}) waits again, and session.interrupt() stops its code"
            )
        return self

    def where(self) -> str:
        """The failed ranks, in the order of failing, and where each rank is that has not ended; on one line."""
        return self._state.where()

    @property
    def failing(self) -> dict[str, str]:
        """What went wrong so far, a line a rank, in the order of failing.

        >>> run.failing
        {}
        """
        return self._state.failing

    @property
    def failures(self) -> dict[str, Failure | str]:
        """What went wrong, by rank: an exception, or in words how a rank died."""
        return self._state.failures

    @property
    def baseline(self) -> list[Any]:
        """What the baseline's ranks returned, in rank order; None for a rank that has not (yet)."""
        return self._state.results_of("baseline")

    @property
    def target(self) -> list[Any]:
        """What the target's ranks returned, in rank order; None for a rank that has not (yet)."""
        return self._state.results_of("target")

    @property
    def frame(self) -> pd.DataFrame:
        """The rows of this run so far, one per tap and receiving rank, in execution order."""
        return self._frame(self.number)

    @property
    def unmatched(self) -> dict[str, str]:
        """The filters of this run that matched no tap, by name, with the reason.

        Empty while the run is in progress.

        >>> run.unmatched
        {}
        """
        return self._unmatched_in(self.frame) if self.done else {}

    def _unmatched_in(self, frame: pd.DataFrame) -> dict[str, str]:
        from graftlab.verdict.summary import unmatched_filters

        return unmatched_filters(self._plans()[self._first_plan :], frame)

    @property
    def summary(self) -> list[str]:
        """The conclusions so far, a sentence each: what is wrong first, then how far apart the sides are.

        >>> run.summary[0]
        'first divergent: none of 2 compared rows is above the floor 1e-05, assumed for float32; ...'
        """
        return self._summary_of(self.frame)

    def _summary_of(self, frame: pd.DataFrame) -> list[str]:
        from graftlab.verdict.added import uneven_calls
        from graftlab.verdict.renaming import suggested_rename
        from graftlab.verdict.summary import ABSENT, differences, not_compared

        unmatched = self._unmatched_in(frame) if self.done else {}
        missed = [f"{name} matched no tap in this run: {text}" for name, text in unmatched.items()]
        statuses = Counter(frame["status"])
        if lost := not_compared(statuses):
            # What was sent and never requested has no error.
            alone = statuses["unmatched"] == sum(statuses[each] for each in ABSENT)
            why = "no rank of the other side requested it" if alone else "the frame's column error says why"
            missed.append(f"not compared: {lost}; {why}")
        if self.done:
            missed += [f"not on all ranks: {sentence.rstrip('.')}" for sentence in uneven_calls(frame)]
        rename = suggested_rename(frame)
        return [*self._state.remarks, *missed, *([rename] if rename else []), *differences(frame)]

    def __repr__(self) -> str:
        return self._described(self.frame) if self.done else f"<Run {self.number}: in progress; {self.where()}>"

    def _described(self, frame: pd.DataFrame) -> str:
        return f"<Run {self.number}: {self._end()}, {counted(len(frame), 'row')}>"

    def _end(self) -> str:
        why = {label: each if isinstance(each, str) else each.kind for label, each in self.failures.items()}
        return failed_on(why) if why else "done"

    def _ipython_display_(self, **_: Any) -> None:
        """Display how the taps ended, and the figure of the last step if there is one."""
        figure = self._draw(self.number) if self.done and 0 < len(self.frame) <= _DRAWN_ROWS else None
        if figure is None or jupyter.show_canvas is None:
            raise NotImplementedError("the summary is shown")
        from IPython.display import display

        display(self._repr_mimebundle_(), raw=True)  # type: ignore[no-untyped-call]
        display(figure)  # type: ignore[no-untyped-call]

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        """The HTML and the text of a run: how its taps ended, and its summary."""
        if not self.done:
            return bundle(repr(self), f"<b>run {self.number}</b> in progress; {html.escape(self.where())}")
        frame = self.frame
        lines = self._summary_of(frame)
        state = html.escape(self._end())
        facts = ", ".join(f"{n:,} {status}" for status, n in Counter(frame["status"]).most_common()) or "no taps"
        shown = "<br>".join([f"<b>run {self.number}</b> {state}; {facts}", *map(html.escape, lines)])
        return bundle("\n".join([self._described(frame), *lines]), shown)


def failing_in(runs: Sequence[Run], found: Conclusion) -> dict[str, str]:
    """What went wrong in the run whose rows these are, a line a rank, without the log of a rank that died."""
    number = found.lines[0].row.run if found.lines else None
    failing = next((run.failing for run in runs if run.number == number), {})
    return {label: why.partition(". Its log (")[0] for label, why in failing.items()}


def state_of(run: Run) -> RunState:
    """The state of a run, which only the package uses."""
    return run._state
