"""The session: what a notebook holds while two implementations run side by side."""

from __future__ import annotations

import atexit
import html
import itertools
import logging
import os
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd

from graftlab.base import shipping
from graftlab.base.html import bundle
from graftlab.base.world import RunInfo, Side
from graftlab.control.hub import Hub
from graftlab.control.kept_pairs import KeptOnRanks
from graftlab.control.questions import Questions
from graftlab.control.ranks_table import ranks_table
from graftlab.control.run import Run
from graftlab.errors import SessionBusyError, SessionClosedError, SessionError
from graftlab.grafting.trial import Trial
from graftlab.plan.overlap import refuse_overlap
from graftlab.plan.plan import UNSET, GraftPlan, Unset
from graftlab.ranks.launcher import LaunchOptions, RankProcess, end_ranks, launch_ranks
from graftlab.ranks.messages import (
    Output,
    PlanAdopted,
    PlanUpdate,
    Reply,
    RunDone,
    RunRequest,
    RunSettled,
    TapSeen,
    Work,
    pack,
)
from graftlab.ranks.trial_process import try_in_process
from graftlab.rows.newest import LiveTaps
from graftlab.rows.store import RowStore
from graftlab.transforms import Transform, TransformSpec

if TYPE_CHECKING:
    import torch

    from graftlab.plots import DifferenceMap

logger = logging.getLogger(__name__)

# Tags that tell where and when a tap was reached, not which tap it is.
_PLACE_TAGS = frozenset({"step", "side", "rank"})

Callee = Callable[..., Any] | str
_open_sessions: weakref.WeakSet[SessionCore] = weakref.WeakSet()


class SessionCore:
    """Live ranks of both sides, the plan in force, and every row so far. What a notebook holds,
    :class:`graftlab.Session`, adds what needs more than that.

    Methods may be called from any thread (widgets do).
    """

    def __init__(self, options: LaunchOptions, plan: GraftPlan, folder: Path) -> None:
        self.folder = folder
        self.options = options
        self._lock = threading.RLock()
        self._plans = [plan]
        self._rows = RowStore(folder)
        self._runs: list[Run] = []
        self._cells = itertools.count(1)
        self._questions = Questions(options.timeout)
        self._next_step = 0
        self._seen: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._adopted: dict[int, dict[str, int]] = {}
        self._closed = False
        try:
            self._ranks = launch_ranks(options, folder)
        except BaseException:
            self._rows.close()
            raise
        self._kept = KeptOnRanks(self._ranks, self._ask)
        self._hub = Hub(self._ranks, self)
        _open_sessions.add(self)
        self._publish(plan)
        for rank in self._ranks:
            for note in rank.seat.notes:
                logger.warning("%s: %s", rank.label, note)

    # ---- runs ---------------------------------------------------------------------------------------------------

    def run(
        self,
        baseline: Callee | None = None,
        target: Callee | None = None,
        *,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Run:
        """Call ``baseline`` on the baseline's ranks and ``target`` on the target's, both at once, and wait.

        Each is a function, which is called with ``args`` and ``kwargs``, or an expression, which is evaluated where
        ``%%graft`` cells run. A side that is None stays idle. The run begins a new step.

        Raises :class:`RunError` when the code raised or a rank died, :class:`SessionBusyError` while another run is
        going on, :class:`ShippingError` when a function or an argument cannot be sent.
        """
        return self.start(baseline, target, args=args, kwargs=kwargs).wait()

    def start(
        self,
        baseline: Callee | None = None,
        target: Callee | None = None,
        *,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Run:
        """Like :meth:`run`, without waiting: see :attr:`Run.done` and :meth:`Run.wait`."""
        if baseline is None and target is None:
            raise SessionError("session.run: give baseline=, target= or both something to call")
        works: dict[int, Work] = {}
        for side, callee in (("baseline", baseline), ("target", target)):
            if callee is None:
                continue
            # One expression for both sides is one piece of work, so that a mistake in it is told once.
            if not (works and isinstance(callee, str) and callee == baseline):
                work = self._work_of(side, callee, tuple(args), kwargs or {})
            works.update({rank.place.world_rank: work for rank in self._ranks if rank.place.side == side})
        return self._begin(works)

    def execute(self, source: str, on: str = "both") -> Run:
        """Execute a cell's source in the ranks' own namespace and wait; its last expression is the result.

        ``on`` is ``"baseline"``, ``"target"``, ``"both"`` or one rank such as ``"target[1]"``.
        """
        work = self._source_work("exec", source, "the cell")
        return self._begin({rank.place.world_rank: work for rank in self.select(on)}).wait()

    def select(self, on: str) -> list[RankProcess]:
        """The ranks that ``"baseline"``, ``"target"``, ``"both"`` or ``"target[1]"`` means."""
        chosen = [rank for rank in self._ranks if on in ("both", rank.place.side, rank.label)]
        if not chosen:
            labels = ", ".join(rank.label for rank in self._ranks)
            raise SessionError(f"{on!r} names no rank; write baseline, target, both, or one of {labels}")
        return chosen

    def _work_of(self, side: str, callee: Callee, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Work:
        if isinstance(callee, str):
            if args or kwargs:
                raise SessionError(f"{side}={callee!r} is an expression, which takes no args; write them into it")
            return self._source_work("eval", callee, "the expression")
        if not callable(callee):
            raise SessionError(f"{side}= must be a function or an expression, not {type(callee).__name__}")
        return Work("call", shipping.pack_call(callee, args, kwargs, what=f"the {side} function"))

    def _source_work(self, kind: Literal["eval", "exec"], source: str, what: str) -> Work:
        filename = f"<graft cell {next(self._cells)}>"
        try:
            compile(source.strip() if kind == "eval" else source, filename, kind, dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            shown = "".join(traceback.format_exception_only(error)).rstrip()
            raise SessionError(f"{what} is not Python, so nothing was run\n{shown}") from error
        return Work(kind, source, filename)

    def _begin(self, works: dict[int, Work]) -> Run:
        with self._lock:
            self._require_open()
            if self._runs and not self._runs[-1].done:
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
                frame=self.frame_of,
                write=lambda text: sys.stdout.write(text),
                count=lambda: len(self._rows),
                first_step=self._next_step,
                plans=lambda: self.plans,
            )
            self._runs.append(run)
            info = RunInfo(run.number, self._next_step, tuple(sorted(works)))
            for rank in ranks:
                rank.channel.send(pack(RunRequest(info, self.plan, works[rank.place.world_rank])))
            for rank in ranks:
                # It may have died before this run was there for its death to be noted in.
                if not rank.alive:
                    self.on_gone(rank)
            return run

    @property
    def runs(self) -> list[Run]:
        return list(self._runs)

    # ---- rows ---------------------------------------------------------------------------------------------------

    @property
    def frame(self) -> pd.DataFrame:
        """All rows so far, one a tap a receiving rank; see :meth:`graftlab.rows.store.RowStore.frame`."""
        return self._rows.frame()

    def frame_of(self, number: int) -> pd.DataFrame:
        """The rows of one run."""
        return self._rows.frame(number)

    def live_taps(self) -> LiveTaps:
        """A new follower of this session's rows, for whoever shows them while they come."""
        return LiveTaps(self._rows)

    @property
    def row_count(self) -> int:
        """How many rows have arrived."""
        return len(self._rows)

    def tensors(self, name: str, *, rank: int | None = None, **tags: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The newest pair ``(baseline, target)`` of a tap that the plan's ``keep`` filter held, on the CPU.

        ``tags`` narrow it down (``layer=3``, ``step=0``), ``rank`` takes that receiving rank's. Raises
        :class:`SessionError` that lists what is kept when there is none.
        """
        self._require_open()
        _, packed = self._kept.find("kept", name, rank, tags)
        pair: tuple[torch.Tensor, torch.Tensor] = shipping.unpack_result(packed)
        return pair

    def kept(self, *, failed: bool = False) -> list[dict[str, Any]]:
        """The tags of every pair that is kept at this moment, oldest first, rank by rank.

        With ``failed`` also where the transform in force failed, which leaves something to try another one on, but no
        pair.
        """
        self._require_open()
        return self._kept.tags(failed)

    def try_transform(
        self,
        transform: str | Transform | TransformSpec,
        name: str | None = None,
        *,
        rank: int | None = None,
        limit: float = 5.0,
        **tags: Any,
    ) -> Trial:
        """Run a draft on a kept pair without touching any rank; see :class:`.Trial` for what comes back.

        ``name``, ``rank`` and ``tags`` choose the pair as in :meth:`tensors`; without a name the draft is only loaded.
        It runs on the rank's device in a process of its own, which is ended after ``limit`` seconds: a draft may loop
        for ever, or exit. What is wrong with the draft is in the result; raises :class:`SessionError` only when no such
        pair is kept, and :class:`ShippingError` for a function that cannot be sent.
        """
        self._require_open()
        kept: bytes | None = None
        process = self._ranks[-1]
        if name is not None:
            process, kept = self._kept.find("kept_input", name, rank, tags)
        return try_in_process(TransformSpec.draft(transform), kept, process.seat.device, limit)

    def difference_map(
        self, name: str, *, dims: tuple[int, int] | None = None, rank: int | None = None, **tags: Any
    ) -> DifferenceMap:
        """|baseline - target| of a kept pair over two axes, reduced by maximum where the pair is kept.

        ``name``, ``rank`` and ``tags`` choose the pair as in :meth:`tensors`, and the same is raised;
        :func:`graftlab.plots.draw_difference_map` draws it.
        """
        self._require_open()
        _, packed = self._kept.find("kept_map", name, rank, tags, dims)
        found: DifferenceMap = shipping.unpack_result(packed)
        return found

    # ---- the plan -----------------------------------------------------------------------------------------------

    @property
    def plan(self) -> GraftPlan:
        """The newest plan: in force at the next step of a run that is going on, at once otherwise."""
        return self._plans[-1]

    @property
    def plans(self) -> list[GraftPlan]:
        """Every plan of this session, oldest first."""
        return list(self._plans)

    def edit(
        self,
        *,
        b2t: str | Unset | None = UNSET,
        t2b: str | Unset | None = UNSET,
        compare: str | Unset | None = UNSET,
        keep: str | Unset | None = UNSET,
        transform: str | Transform | TransformSpec | Unset | None = UNSET,
        rename: Mapping[Side, Mapping[str, str]] | Unset | None = UNSET,
    ) -> GraftPlan:
        """Publish a new plan with what is given changed; see :class:`graftlab.GraftPlan`. Returns it.

        A run that is going on uses it from its next step on, on all ranks alike. What is not usable is refused here
        (:class:`FilterError`, :class:`TransformError`, :class:`PlanError`; :class:`GraftOverlapError` where b2t and t2b
        both match a tap that has been seen) and the plan in force stays.
        """
        with self._lock:
            self._require_open()
            plan = self.plan.edit(b2t=b2t, t2b=t2b, compare=compare, keep=keep, transform=transform, rename=rename)
            refuse_overlap(plan, self.taps)
            self._plans.append(plan)
            self._publish(plan)
            return plan

    def adopted(self, version: int) -> dict[str, int]:
        """From which step on each rank uses this plan, by rank; a rank that is not there yet is left out."""
        return dict(self._adopted.get(version, {}))

    @property
    def taps(self) -> list[dict[str, Any]]:
        """The tags of every distinct tap seen so far on either side, wanted by some filter or not, as first seen."""
        return list(self._seen.values())

    def _publish(self, plan: GraftPlan) -> None:
        message = pack(PlanUpdate(plan))
        for rank in self._ranks:
            rank.channel.send(message)

    # ---- the ranks ----------------------------------------------------------------------------------------------

    @property
    def ranks(self) -> list[RankProcess]:
        return list(self._ranks)

    def status(self) -> pd.DataFrame:
        """One line a rank: where it is at this moment, read from shared memory, so that a hanging rank shows too."""
        lines = []
        for rank in self._ranks:
            look = rank.whereabouts()
            lines.append(
                {
                    "side": rank.place.side,
                    "rank": rank.place.rank,
                    "pid": rank.pid,
                    "device": rank.seat.device,
                    "backend": rank.seat.backend,
                    "state": look.state if rank.alive else f"gone: {rank.how_it_ended()}",
                    "step": look.step,
                    "plan_version": look.plan_version,
                    "taps": look.taps,
                    "last_tap": look.tap,
                    "awaits": ", ".join(self._ranks[other].label for other in look.awaits),
                    "note": "; ".join(rank.seat.notes),
                }
            )
        return pd.DataFrame(lines)

    def stacks(self) -> dict[str, str]:
        """Where each live rank's threads are in the code, by rank. Works on a rank that computes or waits."""
        return {rank.label: self._questions.stack_of(rank) for rank in self._ranks if rank.alive}

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in the code that the ranks run; the ranks go on.

        Code that waits inside a collective cannot be interrupted: it ends with its group's time limit, or with
        :meth:`close`.
        """
        for rank in self._ranks:
            if rank.whereabouts().state in ("running", "waiting"):
                rank.signal(signal.SIGINT)

    def log(self, on: str, lines: int = 50) -> str:
        """The tail of the logs of these ranks; see :meth:`select`."""
        tails = [f"--- {rank.label}: {rank.log}\n{rank.log_tail(lines)}" for rank in self.select(on)]
        return "\n".join(tails)

    def close(self) -> None:
        """End every rank; rows and logs stay in ``folder``. Safe to call twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        busy = bool(self._runs) and not self._runs[-1].done
        end_ranks(self._ranks, patience=0.5 if busy else 2.0)
        self._hub.stop()
        for rank in self._ranks:
            rank.let_go()
            self.on_gone(rank)
        self._rows.close()
        _open_sessions.discard(self)

    @property
    def closed(self) -> bool:
        return self._closed

    def __enter__(self) -> SessionCore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{sum(rank.alive for rank in self._ranks)} ranks alive"
        return (
            f"<Session {self.options.baseline}+{self.options.target}: {state}, {len(self._runs)} runs, "
            f"{len(self._rows)} rows, plan {self.plan.version}, {self.folder}>"
        )

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return bundle(repr(self), _html(self))

    def _require_open(self) -> None:
        if self._closed:
            raise SessionClosedError("this session is closed; launch another with gl.launch(...) or %graft up")

    def _ask(self, rank: RankProcess, topic: Any, *arguments: Any) -> Any:
        self._require_open()
        return self._questions.ask(rank, topic, *arguments)

    # ---- what the hub reports, on its thread --------------------------------------------------------------------

    def on_rows(self, lines: Sequence[bytes]) -> None:
        self._rows.append(lines)

    def on_message(self, rank: RankProcess, message: object) -> None:
        if isinstance(message, Output):
            if self._runs:
                self._runs[-1].note_output(rank, message.text)
        elif isinstance(message, RunDone):
            # What fails while the session closes fails because its peers are ended.
            if message.failure is None or not self._closed:
                self._runs[message.run].note_done(rank, message)
        elif isinstance(message, RunSettled):
            self._next_step = max(self._next_step, message.next_step)
            self._runs[message.run].note_settled(rank)
        elif isinstance(message, TapSeen):
            tags = message.tags
            self._seen.setdefault((tags["name"], tuple(v for k, v in tags.items() if k not in _PLACE_TAGS)), tags)
        elif isinstance(message, PlanAdopted):
            self._adopted.setdefault(message.version, {})[rank.label] = message.step
        elif isinstance(message, Reply):
            self._questions.on_reply(message)

    def on_gone(self, rank: RankProcess) -> None:
        for run in self._runs[-1:]:
            if rank in run.participants and not run.done:
                if self._closed:
                    run.note_death(rank, "the session was closed")
                    continue
                run.note_death(rank, f"{rank.how_it_ended()}. Its log ({rank.log}) ends:\n{rank.log_tail(15)}")


@atexit.register
def _close_all() -> None:
    for session in list(_open_sessions):
        session.close()


def _leave_to_the_parent() -> None:
    """In a forked child, such as a data loader's worker: the ranks are the parent's, and end with it alone."""
    for session in list(_open_sessions):
        for rank in session.ranks:
            rank.leave_to_the_parent()
    _open_sessions.clear()


os.register_at_fork(after_in_child=_leave_to_the_parent)


def _html(session: SessionCore) -> str:
    """What a notebook shows for a session."""
    title = f"session of {session.options.baseline} + {session.options.target} ranks"
    facts = f"{len(session.runs)} runs, {session.row_count:,} rows, plan {session.plan.version}, {session.folder}"
    return f"<b>{title}</b> {html.escape(facts)}{ranks_table(session.ranks, session.closed)}"
