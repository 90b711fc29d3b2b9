"""The core of a session: it connects the session's parts, each a module beside this one."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any, cast, get_args

import pandas as pd

from graftlab.base.html import bundle
from graftlab.base.text import counted
from graftlab.base.uninterrupted import uninterrupted
from graftlab.base.world import Side
from graftlab.control.closing import close_at_exit, forget
from graftlab.control.hub import Hub, MessageRouter
from graftlab.control.joined_jobs import JoinedJobs
from graftlab.control.kept_pairs import PairsOnRanks, keep_advice
from graftlab.control.plans import Action, Plans
from graftlab.control.queries import A, Queries
from graftlab.control.ranks_table import ranks_frame, titled_table
from graftlab.control.run import Run, state_of
from graftlab.control.run_state import OnFailure
from graftlab.control.runs import Runs
from graftlab.control.tap_catalog import TapCatalog
from graftlab.control.work import WorkFactory, arguments, code_of, warn_of_grafts_into_recordings
from graftlab.errors import SessionBusyError, SessionClosedError, SessionError, TransformError
from graftlab.grafting.trial import Trial
from graftlab.plan.changes import PlanChange, parts_of
from graftlab.plan.overlap import refuse_overlap
from graftlab.plan.plan import GraftPlan, PlanEdit, filters_of, takes_plan_edit
from graftlab.ranks.handle import RankHandle
from graftlab.ranks.launcher import end_ranks, launch_ranks
from graftlab.ranks.messages import Question, Work
from graftlab.ranks.options import LaunchOptions
from graftlab.ranks.remote_functions import Callee
from graftlab.ranks.trial_process import try_in_process
from graftlab.rows.newest import LiveTaps
from graftlab.rows.store import RowStore
from graftlab.transforms import TransformSpec
from graftlab.transforms.spec import AnyTransform, each_of, specs_of

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure
    from typing_extensions import Self, Unpack

    from graftlab.control.verdicts import Verdict
    from graftlab.plots import DifferenceMap

logger = logging.getLogger(__name__)


@dataclass
class SessionInternals:
    """The parts of a session that only the package uses; see :func:`internals_of`."""

    reports: MessageRouter
    jobs: JoinedJobs
    plans: Plans
    set_aside: set[int]
    """The numbers of runs that displays of the newest run leave out."""
    pairs: PairsOnRanks
    default_callees: Mapping[str, Callee] = field(default_factory=dict)
    """The function that a side runs if a run gives it none: a recording is replayed."""
    verdicts: list[Verdict] = field(default_factory=list)
    """All verdicts of this session, oldest first."""
    close_first: Callable[[], None] = lambda: None
    """Called when the session closes, before its ranks end."""
    environment_of: Callable[[Side], dict[str, str]] | None = None
    """The environment variables with which a job joins this side, in a session that jobs can join."""


class SessionCore:
    """The ranks of both sides, the plan in force, and all rows so far.

    :class:`graftlab.Session` adds the methods that use rooms above this one.

    Methods may be called from any thread, as widgets do.
    """

    def __init__(
        self, options: LaunchOptions, ranks: Sequence[RankHandle], plan: GraftPlan, rows: RowStore, folder: Path
    ) -> None:
        self.folder = folder
        self.options = options
        self._ranks = list(ranks)
        self._rows = rows
        # Held while several changes are made as one, such as a run and its plan.
        self._lock = threading.RLock()
        self._closed = False
        self._ending = threading.Lock()
        self._has_ended = False
        # The thread that published the newest temporary plan.
        self._lender: int | None = None
        self._works = WorkFactory()
        self._plans = Plans(self._ranks)
        self._queries = Queries(options.timeout)
        self._runs = Runs(self._ranks, rows, self._plans.all, self._queries.stack_of, self._draw)
        self._taps = TapCatalog()
        self._pairs = PairsOnRanks(
            self._ranks, self._ask, lambda name, tags: keep_advice(self.plan, self.taps, name, tags)
        )
        reports = MessageRouter(rows, self._runs, self._plans, self._taps, self._queries)
        self._hub = Hub(self._ranks, reports)
        jobs = JoinedJobs(self._runs, self._plans, self._hub, self._lock, rows, self._ask)
        self._internals = SessionInternals(reports, jobs, self._plans, rows.set_aside, self._pairs)
        close_at_exit(self)
        self._plans.publish(plan)
        for rank in self._ranks:
            for note in rank.assignment.notes:
                logger.warning("%s: %s", rank.label, note)

    # ---- runs ---------------------------------------------------------------------------------------------------

    def run(
        self,
        baseline: Callee | None = None,
        target: Callee | None = None,
        *,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        on_failure: OnFailure = "stop",
    ) -> Run:
        """Call ``baseline`` on the baseline's ranks and ``target`` on the target's, both at once, and wait.

        Each is a function, called with ``args`` and ``kwargs``, or an expression, evaluated in the namespace of
        ``%%graft`` cells. A side that is None stays idle. The run begins a new step. When a rank fails, the others
        are interrupted, unless ``on_failure`` is ``"continue"``.

        Raises :class:`RunError` when the code raised or a rank died, :class:`SessionBusyError` while another run is
        in progress, :class:`ShippingError` when a function or an argument cannot be sent.

        >>> run = session.run(forward, forward, args=(x,))
        >>> run.target, len(run.frame)
        ([8.0], 2)
        >>> session.run(target="1 + 1").target
        [2]
        """
        return self.start(baseline, target, args=args, kwargs=kwargs, on_failure=on_failure).wait()

    def start(
        self,
        baseline: Callee | None = None,
        target: Callee | None = None,
        *,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        on_failure: OnFailure = "stop",
    ) -> Run:
        """Like :meth:`run`, without waiting: see :attr:`Run.done` and :meth:`Run.wait`.

        >>> run = session.start(forward, forward, args=(x,))
        >>> run.wait().done
        True
        """
        given = arguments("run", args, kwargs)
        return self._start_under({}, {"baseline": baseline, "target": target}, *given, on_failure)[0]

    def _start_under(
        self,
        changes: PlanEdit,
        callees: Mapping[Side, Callee | None],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        on_failure: OnFailure = "stop",
    ) -> tuple[Run, GraftPlan]:
        default = self._internals.default_callees
        given = {side: default.get(side) if callee is None else callee for side, callee in callees.items()}
        made = self._works.of_sides(given, args, kwargs)
        if not made:
            raise SessionError("session.run: give baseline=, target= or both something to call")
        works = {rank.place.world_rank: made[rank.place.side] for rank in self._ranks if rank.place.side in made}
        code: dict[str, str | CodeType] = {
            side: code_of(callee) for side, callee in given.items() if callee is not None
        }
        run, plan = self._begin(works, on_failure, code, changes)
        state_of(run).remarks += warn_of_grafts_into_recordings(given, plan)
        return run, plan

    def execute(self, source: str, on: str = "both", on_failure: OnFailure = "stop") -> Run:
        """Execute a cell's source in the ranks' own namespace and wait; its last expression is the result.

        ``on`` is ``"baseline"``, ``"target"``, ``"both"`` or one rank such as ``"target[1]"``; ``on_failure`` is as in
        :meth:`run`.

        >>> session.execute("scale = 2.0", on="target")
        <Run ...: done, 0 rows>
        >>> session.execute("scale * 3", on="target[0]").target
        [6.0]
        """
        work = self._works.of_cell(source)
        run, _ = self._begin({rank.place.world_rank: work for rank in self.select(on)}, on_failure, {on: source}, {})
        return run.wait()

    def select(self, on: str) -> list[RankHandle]:
        """The ranks that ``"baseline"``, ``"target"``, ``"both"`` or a label such as ``"target[1]"`` selects.

        >>> [rank.label for rank in session.select("target")]
        ['target[0]']
        """
        chosen = [rank for rank in self._ranks if on in ("both", rank.place.side, rank.label)]
        if not chosen:
            labels = ", ".join(rank.label for rank in self._ranks)
            raise SessionError(f"{on!r} names no rank; write baseline, target, both, or one of {labels}")
        return chosen

    def _begin(
        self, works: Mapping[int, Work], on_failure: OnFailure, code: Mapping[str, str | CodeType], changes: PlanEdit
    ) -> tuple[Run, GraftPlan]:
        if on_failure not in get_args(OnFailure):
            raise SessionError(f"on_failure={on_failure!r}: a run takes 'stop' or 'continue'")
        with self._lock:
            self._require_open()
            self._require_workers("run code on")
            self._runs.require_can_begin(works)
            self._refuse_plan_of_other_thread()
            plan = self._lend_plan(changes) if changes else self.plan
            return self._runs.begin(works, plan, on_failure, code), plan

    @property
    def runs(self) -> list[Run]:
        """Every run of this session, oldest first.

        >>> session.runs[-1].done
        True
        """
        return self._runs.all()

    # ---- rows ---------------------------------------------------------------------------------------------------

    @property
    def frame(self) -> pd.DataFrame:
        """All rows so far, one per tap and receiving rank, by step and execution order.

        The frame is yours; replace the lists and dicts in its cells rather than change them.

        >>> session.frame.loc[session.frame["run"] == run.number, ["name", "layer", "status"]].values.tolist()
        [['hidden', 3.0, 'compared'], ['out', nan, 'compared']]
        """
        return self._rows.frame()

    def frame_of(self, number: int) -> pd.DataFrame:
        """The rows of one run.

        >>> session.frame_of(run.number)["name"].tolist()
        ['hidden', 'out']
        """
        return self._rows.frame(number)

    def live_taps(self) -> LiveTaps:
        """A new view of the newest row of each tap, for displays that follow a run.

        >>> len(session.live_taps().look()) > 0
        True
        """
        return LiveTaps(self._rows)

    @property
    def row_count(self) -> int:
        """How many rows have arrived.

        >>> session.row_count == len(session.frame)
        True
        """
        return len(self._rows)

    # ---- kept pairs ---------------------------------------------------------------------------------------------

    def tensors(self, name: str, *, rank: int | None = None, **tags: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The newest pair ``(baseline, target)`` of a tap that the plan's ``keep`` filter held, on the CPU.

        ``tags`` narrow it down (``layer=3``, ``step=0``, ``occurrence=2`` for the third call in a step), ``rank`` takes
        that receiving rank's. Raises :class:`SessionError` that lists what is kept when there is none.

        >>> baseline, target = session.tensors("hidden", layer=3)
        >>> baseline
        tensor([2., 2., 2., 2.])
        """
        self._require_open()
        return self._pairs.pair(name, rank, tags)

    def kept(self, *, failed: bool = False) -> list[dict[str, Any]]:
        """The tags of every pair that is kept now, oldest first, rank by rank.

        With ``failed``, also those of inputs whose transform failed. These have no pair, but a draft can be tried on
        them.

        >>> "hidden" in [tags["name"] for tags in session.kept()]
        True
        """
        self._require_open()
        return self._pairs.tags(failed)

    def try_transform(
        self,
        transform: AnyTransform,
        name: str | None = None,
        *,
        rank: int | None = None,
        limit: float = 5.0,
        **tags: Any,
    ) -> Trial:
        """Run a draft on a kept pair without touching any rank; see :class:`.Trial` for what comes back.

        ``name``, ``rank`` and ``tags`` choose the pair as in :meth:`tensors`; without a name the draft is only loaded.
        It runs on the rank's device in a separate process, which is ended after ``limit`` seconds, since a draft may
        loop forever, or exit. Of several transforms the first that applies to the pair's tap runs. The result reports
        errors of the draft, and has a note if the draft would not be applied at this tap. Raises
        :class:`SessionError` only when no such pair is kept, :class:`FilterError` for a filter that cannot be compiled,
        and :class:`ShippingError` for a function that cannot be sent.

        >>> trial = session.try_transform(lambda graft_input: graft_input.received_list[0], "hidden", layer=3)
        >>> trial.ok, trial.after.max_abs
        (True, 0.0)
        """
        self._require_open()
        drafts = specs_of(transform, TransformSpec.draft)
        if drafts is None:
            raise TransformError("the default transform is not tried as a draft: the rows show its result at each tap")
        # Compiled here, so that a bad filter raises in this process.
        filters_of(each_of(drafts))
        kept: bytes | None = None
        process = self._ranks[-1]
        if name is not None:
            process, kept = self._pairs.packed_input(name, rank, tags)
        return try_in_process(drafts, self.plan, kept, process.assignment.device, limit)

    def difference_map(
        self, name: str, *, dims: Sequence[int] | None = None, rank: int | None = None, **tags: Any
    ) -> DifferenceMap:
        """``|baseline - target|`` of a kept pair over two axes, reduced by maximum on the rank that keeps it.

        ``name``, ``rank`` and ``tags`` choose the pair as in :meth:`tensors`, which raises the same errors;
        :func:`graftlab.plots.draw_difference_map` draws it. ``dims`` are one or two axes, by default the last two.
        Raises :class:`SessionError` for others.

        >>> session.difference_map("hidden", layer=3).worst
        0.0
        """
        self._require_open()
        return self._pairs.difference_map(name, rank, tags, dims)

    # ---- plans --------------------------------------------------------------------------------------------------

    @property
    def plan(self) -> GraftPlan:
        """The newest plan: in force from the next step of a run in progress, at once otherwise.

        >>> session.plan.compare
        'True'
        """
        return self._plans.newest

    @property
    def plans(self) -> list[GraftPlan]:
        """Every plan of this session, oldest first.

        >>> session.plans[0].version
        0
        """
        return self._plans.all()

    @takes_plan_edit
    def edit(self, **changes: Unpack[PlanEdit]) -> GraftPlan:
        """Publish a new plan with these changes and return it; see :class:`graftlab.GraftPlan`.

        A run in progress uses it from its next step on, on all ranks alike. A plan that cannot be used raises
        :class:`FilterError`, :class:`TransformError` or :class:`PlanError`, or :class:`GraftOverlapError` where b2t and
        t2b both match a tap that has been seen; the plan in force stays.

        >>> session.edit(b2t="name == 'hidden' and layer == 3", rename={"target": {r"^model\\.": ""}}).b2t
        "name == 'hidden' and layer == 3"
        >>> session.edit(b2t=None, rename=None).b2t is None
        True
        """
        with self._lock:
            # What a verdict grafts in its runs must not become part of the user's plan.
            plan = self._edited({**parts_of(self._plans.lasting()[-1]), **changes})
            # A rank that has half of a message would hang, and ranks with different plans would compare nothing.
            uninterrupted("the plan is published", partial(self._plans.publish_edit, plan))
            return plan

    def undo(self) -> PlanChange:
        """Undo the last edit of the plan, and return what changed.

        Each call undoes one more edit, whether a cell, a magic or a widget made it. The plans that a verdict publishes
        for its runs do not count. Like an edit, it publishes a new version. Raises :class:`SessionError` if no edit is
        left, or while a verdict or a match has its own plan in force.

        >>> plan = session.edit(b2t="layer == 3")
        >>> session.undo().text
        'b2t: layer == 3 -> nothing'
        """
        return self._revert("undo")

    def redo(self) -> PlanChange:
        """Make the edit again that :meth:`undo` took back, and return what changed. A new edit rules that out.

        Raises :class:`SessionError` if no edit is left to redo, or while a verdict has its own plan in force.

        >>> plan = session.edit(b2t="layer == 3")
        >>> session.undo().parts, session.redo().text
        (('b2t',), 'b2t: nothing -> layer == 3')
        >>> session.undo().plan.b2t is None
        True
        """
        return self._revert("redo")

    def _revert(self, action: Action) -> PlanChange:
        with self._lock:
            plan = self._edited(parts_of(self._plans.wanted(action)))
            return uninterrupted("the plan is published", partial(self._plans.revert, action, plan))

    def _edited(self, changes: Mapping[str, Any]) -> GraftPlan:
        """The next version of the plan, checked and not yet published."""
        self._require_open()
        plan = self.plan.edit(**changes)
        refuse_overlap(plan, self._taps.all(plan))
        return plan

    def _refuse_plan_of_other_thread(self) -> None:
        """Raise :class:`SessionBusyError` while another thread's verdict has its plan, which grafts taps, in force."""
        if self._lender != threading.get_ident() and self._plans.is_lent:
            raise SessionBusyError(
                "a verdict, a match or a comparison is between two of its runs, and its plan is in force; wait for its "
                "end, or stop it where it was started"
            )

    def _lend_plan(self, changes: PlanEdit) -> GraftPlan:
        with self._lock:
            self._refuse_plan_of_other_thread()
            plan = self._edited(changes)
            self._lender = threading.get_ident()
            uninterrupted("the plan is published", partial(self._plans.publish_temporary, plan))
            return plan

    def adopted(self, version: int) -> dict[str, int]:
        """The step from which each rank uses this plan, by rank; ranks that do not use it yet are left out.

        >>> sorted(session.adopted(run.frame["plan_version"].max()))
        ['baseline[0]', 'target[0]']
        """
        return self._plans.adopted(version)

    @property
    def taps(self) -> list[dict[str, Any]]:
        """The tags of every distinct tap that either side has reached, as first seen, whatever the filters match.

        ``name`` is the pair's name under the plan in force, ``baseline_name`` and ``target_name`` each side's own.

        >>> {"hidden", "out"} <= {tags["name"] for tags in session.taps}
        True
        """
        return self._taps.all(self.plan)

    # ---- the ranks ----------------------------------------------------------------------------------------------

    @property
    def ranks(self) -> list[RankHandle]:
        """The notebook's handle of every rank: the baseline's first, then the target's.

        >>> [rank.label for rank in session.ranks]
        ['baseline[0]', 'target[0]']
        """
        return list(self._ranks)

    def status(self) -> pd.DataFrame:
        """One row per rank, with its present state, read from shared memory so that hanging ranks are included.

        >>> session.status()["state"].tolist()
        ['idle', 'idle']
        """
        return ranks_frame(self._ranks, self.closed, self.failing, self.lost_groups)

    @property
    def failing(self) -> dict[str, str]:
        """What went wrong so far in the run in progress, a line a rank, in the order of failing.

        >>> session.failing
        {}
        """
        return self._runs.failing

    @property
    def lost_groups(self) -> dict[str, str]:
        """The sides that have lost their process group, and why; :meth:`restart` makes a new one.

        A group is lost when one of its ranks is gone, or when a collective in it has failed or timed out.

        >>> session.lost_groups
        {}
        """
        return self._runs.groups.lost()

    def stacks(self) -> dict[str, str]:
        """The stacks of all threads of each live rank, by rank, even while the rank computes or waits.

        >>> sorted(session.stacks())
        ['baseline[0]', 'target[0]']
        """
        return {rank.label: self._queries.stack_of(rank) for rank in self._ranks if rank.alive}

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in the code that the ranks run; the ranks stay alive.

        Code that waits in a collective cannot be interrupted: it ends with its group's time limit, or with
        :meth:`close`.

        >>> def serve():
        ...     while True:
        ...         gl.step()
        >>> run = session.start(serve, serve).wait_steps(1)
        >>> session.interrupt()
        >>> run.wait()
        Traceback (most recent call last):
        graftlab.errors.RunError: run ... failed on baseline[0], target[0]
        ...
        """
        self._require_workers("interrupt")
        self._runs.interrupt()

    def log(self, on: str, lines: int = 50) -> str:
        """The tail of the logs of these ranks; see :meth:`select`.

        >>> session.log("target[0]", lines=5).splitlines()[0]
        '--- target[0]: ...target-0.log'
        """
        tails = [f"--- {rank.label}: {rank.log}\n{rank.log_tail(lines)}" for rank in self.select(on)]
        return "\n".join(tails)

    def close(self) -> None:
        """End every rank; rows and logs stay in ``folder``. Safe to call again, also after the stop button.

        Raises :class:`SessionError` if some rows could not be written to disk, once all ranks have ended.

        >>> other = gl.launch()
        >>> other.close()
        >>> other.closed
        True
        """
        if not self._has_ended:
            uninterrupted("the session has ended", self._end)

    def _end(self) -> None:
        with self._ending:
            if self._has_ended:
                return
            with self._lock:
                self._closed = True
                self._runs.close("the session was closed")
            self._end_ranks()
            forget(self)
            self._has_ended = True
            self._rows.close()

    def _end_ranks(self) -> None:
        self._internals.close_first()
        end_ranks(self._ranks, patience=0.5 if self._runs.busy else 2.0)
        self._hub.stop()
        for rank in self._ranks:
            rank.release()
            self._internals.reports.on_gone(rank)

    def restart(self) -> None:
        """End every rank and start the same ranks anew, because a rank or a side's process group is gone, or hangs.

        The session keeps its plan, rows, folder and seen taps, and continues to count runs and steps. Everything in the
        ranks' memory is lost: variables of cells, models, kept tensors. Nothing is rerun automatically. A run in
        progress ends with :class:`RunError`.

        Raises :class:`LaunchError` when the ranks cannot be started; the session can then still be restarted, read and
        closed. The stop button ends the wait, not the restart.

        >>> other = gl.launch()
        >>> plan = other.edit(b2t="name == 'hidden'")
        >>> other.restart()
        >>> other.plan == plan, other.status()["state"].tolist()
        (True, ['idle', 'idle'])
        >>> other.close()
        """
        uninterrupted("the ranks have been started anew", self._restart)

    def _restart(self) -> None:
        with self._ending, self._lock:
            self._require_open()
            self._require_workers("restart")
            if not all(rank.can_restart for rank in self._ranks):
                raise SessionError("this session cannot restart its ranks, which are scripts; compare them again")
            self._replace_ranks(lambda: launch_ranks(self.options, self.folder, self.plan))

    def _replace_ranks(self, start: Callable[[], Sequence[RankHandle]]) -> None:
        with self._lock:
            self._runs.close("the session was restarted")
            self._end_ranks()
            started = start()
            self._runs.reopen(self._ranks)
            # In place: all parts of the session share this list.
            self._ranks[:] = started
            self._hub = Hub(self._ranks, self._internals.reports)
            self._plans.publish_again()

    @property
    def closed(self) -> bool:
        """Whether the session has ended.

        >>> session.closed
        False
        """
        return self._closed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{counted(sum(rank.alive for rank in self._ranks), 'rank')} alive"
        state += "".join(f", the group of the {side} is gone" for side in self.lost_groups if not self._closed)
        return (
            f"<Session {self.options.baseline}+{self.options.target}: {state}, {counted(len(self.runs), 'run')}, "
            f"{counted(len(self._rows), 'row')}, plan {self.plan.version}, {self.folder}>"
        )

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        title = f"session of {self.options.baseline} + {self.options.target} ranks"
        done = f"{counted(len(self.runs), 'run')}, {counted(self.row_count, 'row')}"
        facts = f"{done}, plan {self.plan.version}, {self.folder}"
        return bundle(repr(self), titled_table(title, facts, self.ranks, self.closed, self.failing, self.lost_groups))

    def _draw(self, number: int) -> Figure | None:
        """The figure that a notebook shows of a run, if any."""
        return None

    def _require_open(self) -> None:
        if self._closed:
            raise SessionClosedError("this session is closed; launch another with gl.launch(...) or %graft up")

    def _require_workers(self, to: str) -> None:
        if not all(rank.takes_work for rank in self._ranks):
            raise SessionError(
                f"this session cannot {to} its ranks, because they are jobs that another launcher started; do that "
                f"where each was started. Plans, rows, kept tensors, status and stacks work from here"
            )

    def _ask(self, rank: RankHandle, question: Question, expected: type[A]) -> A:
        self._require_open()
        return self._queries.ask(rank, question, expected)


def internals_of(session: SessionCore) -> SessionInternals:
    """The parts of a session that only the package uses."""
    return session._internals


def callees_of(session: SessionCore, expression: str | None) -> tuple[str | None, str | None]:
    """What each side evaluates of one expression for both: nothing on a recording, which replays its taps."""
    recorded = internals_of(session).default_callees
    return None if "baseline" in recorded else expression, None if "target" in recorded else expression


def replace_ranks(session: SessionCore, start: Callable[[], Sequence[RankHandle]]) -> None:
    """End the session's ranks, and continue with those that ``start`` returns, at the same places.

    If ``start`` raises, the session has no ranks, but can be read and closed.
    """
    with session._ending:
        session._require_open()
        session._replace_ranks(start)


def start_under(
    session: SessionCore,
    changes: PlanEdit,
    callees: Mapping[Side, Callee | None],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> tuple[Run, GraftPlan]:
    """Start a run with these changes of the plan, and return both. If the run is refused, the plan stays."""
    return session._start_under(changes, callees, args, kwargs or {})


def lend_plan(session: SessionCore, **changes: Any) -> GraftPlan:
    """Publish a plan for runs that the package makes, until :func:`restore_plan`. Undo skips these plans."""
    return session._lend_plan(cast("PlanEdit", changes))


def restore_plan(session: SessionCore, *, as_new: bool = False) -> None:
    """Put the plan from before :func:`lend_plan` and :func:`start_under` in force again, if this thread called them.

    ``as_new`` is as for :meth:`.plans.Plans.restore`.
    """
    with session._lock:
        if not session.closed and session._lender == threading.get_ident():
            # Else a second press of the stop button would leave the plan of a verdict, which grafts everything.
            restore = partial(session._plans.restore, as_new=as_new)
            uninterrupted("the plan from before is in force again", restore)
