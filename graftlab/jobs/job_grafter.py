"""The grafter of a job: it survives failures, moves to other worlds, and follows the orders of a verdict."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from graftlab.base.world import RunInfo
from graftlab.errors import GraftError, SessionError
from graftlab.exchange.contract import Exchange
from graftlab.exchange.status_page import StatusPage
from graftlab.grafting.decisions import Decision
from graftlab.grafting.grafter import Grafter
from graftlab.grafting.self_graft import SelfGraft
from graftlab.grafting.self_graft_in_steps import SelfGraftInSteps
from graftlab.grafting.tap_rows import PendingRow
from graftlab.lines.traces import SliceTrace
from graftlab.plan.plan import GraftPlan
from graftlab.ranks.line_tracer import TracedSteps
from graftlab.ranks.match_recorder import MatchRecord, StepRecord
from graftlab.ranks.messages import RecordStep, RunSelfGraft, TraceSteps
from graftlab.taps import calls
from graftlab.taps.calls import TapHandler
from graftlab.taps.untraced import outside_compiled_code


@dataclass(frozen=True)
class _UnreplacedTap:
    """Handles taps by the grafter's original method, whatever replaces it."""

    tap: Callable[..., Any]


@dataclass(frozen=True)
class WorldOffer:
    """A new world to move to, with the run that begins there and the run's plan.

    ``on_moved`` is called with that run when it begins; ``close`` if it never does.
    """

    exchange: Exchange[PendingRow]
    page: StatusPage
    run: RunInfo
    plan: GraftPlan
    on_moved: Callable[[RunInfo], None]
    close: Callable[[], None]


class JobGrafter(Grafter):
    """Handles a job's taps. ``on_failure`` receives errors of graftlab itself, and stops the handling of taps.

    Mistakes of the user, such as a tap that matches both directions, are raised as on any rank.
    """

    on_failure: Callable[[Exception], None]
    # Whether ranks stay within one step of each other. Otherwise a rank that only sends runs ahead until its buffer is
    # full, and a new plan would be in force everywhere only after all those steps.
    keeps_step = False
    # The latest orders: a self-graft, a record for a match, and a trace.
    _self_graft: SelfGraftInSteps | None = None
    _step_record: StepRecord | None = None
    _traced_steps: TracedSteps | None = None
    # The trace in the job's loop now.
    _tracing: TracedSteps | None = None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._offer: WorldOffer | None = None
        # Not the grafter's lock, because a thread that waits in a tap may hold that.
        self._offering = threading.Lock()
        # By the version of the plan under which they run. Orders, and the message to forget them, reach the ranks at
        # different times, but a plan is in force on all ranks from the same step on. So an order is followed until
        # another plan is in force; otherwise only some ranks of a side would handle the taps of a step.
        self._orders: dict[int, SelfGraftInSteps | StepRecord | TracedSteps] = {}
        self._ordering = threading.Lock()

    @outside_compiled_code
    def _handle(self, decision: Decision, name: str, value: Any, extras: Any, replace: bool) -> Any:
        try:
            return super()._handle(decision, name, value, extras, replace)
        except GraftError:
            raise
        except Exception as error:
            self.on_failure(error)
            return value

    def step(self) -> None:
        """See :func:`graftlab.step`."""
        try:
            with contextlib.nullcontext() if self._tracing is None else self._tracing.pause():
                if self.keeps_step:
                    self._await_others()
                if not self._move():
                    super().step()
            self._choose_tap_handler()
        except GraftError:
            raise
        except Exception as error:
            self.on_failure(error)

    # ---- other worlds -------------------------------------------------------------------------------------------

    @property
    def exchange(self) -> Exchange[PendingRow]:
        """The exchange in use, for the code that ends the run."""
        return self._exchange

    def offer(self, offer: WorldOffer | None) -> None:
        """Continue in this world after the present step; None withdraws the offer. Any thread may call this."""
        with self._offering:
            before, self._offer = self._offer, offer
        if before is not None:
            before.close()

    def begin_run(self, run: RunInfo, plan: GraftPlan) -> None:
        """See :meth:`Grafter.begin_run`. Ranks may begin at different steps, and later than the leader."""
        with self._lock:
            super().begin_run(run, plan)
            self._join_step(run)

    def _join_step(self, run: RunInfo) -> None:
        """Tell the others that earlier steps have no tensors, and get the plan with which this step begins."""
        self._exchange.end_step(run.first_step - 1)
        if self.place.world_rank == run.leader:
            self._exchange.announce(run.first_step, b"")
        else:
            self._follow(run)

    def _move(self) -> bool:
        """End the step, and begin the next one in the offered world; False if no world is offered."""
        if self._offer is None:
            return False
        with self._lock:
            if self._run is None or threading.get_ident() in self._at_work:
                return False
            self._wait_for_taps()
            with self._offering:
                offer, self._offer = self._offer, None
            if offer is None:
                return False
            self._end_step()
            old = self._exchange
            old.end_run()
            self.record_unmatched()
            offer.exchange.timeout = old.timeout
            self._use(offer.exchange)
            self._page = offer.page
            old.close()
            run = replace(offer.run, first_step=self._step + 1)
            self._enter_run(run, offer.plan)
            # Ranks that wait for this one before they begin receive this message.
            offer.on_moved(run)
            self._join_step(run)
            return True

    # ---- self-grafts --------------------------------------------------------------------------------------------

    def run_self_graft(self, order: RunSelfGraft) -> None:
        """Begin when the plan of this version is in force. Called on the control thread."""
        before = self._self_graft
        if before is None and not {"record", "rest"} & {*order.passes[:1]}:
            raise SessionError("this rank has recorded nothing to run against")
        self_graft = SelfGraftInSteps(
            order.passes,
            order.steps,
            budget=order.budget,
            dtypes=order.dtypes or None,
            keep=order.keep,
            paired_names=lambda name: self.plan.paired_names(self.place.side, name),
            before=before,
        )
        with self._ordering:
            self._self_graft, self._orders[order.version] = self_graft, self_graft

    def self_graft_result(self) -> SelfGraft | None:
        """Return the result once the last pass has ended."""
        current = self._self_graft
        return current.found if current is not None and current.is_over else None

    def record_step(self, order: RecordStep) -> None:
        """Record the first step under the plan of this version. Called on the control thread."""
        record = StepRecord(order.names, order.budget, order.send, super().tap)
        with self._ordering:
            self._step_record, self._orders[order.version] = record, record

    def match_result(self, value: str | None) -> MatchRecord | torch.Tensor | None:
        """Return the record once its step has ended, or a tensor that was left out of it."""
        current = self._step_record
        if current is None:
            return None
        return current.found if value is None else current.value_held(value)

    def trace_steps(self, order: TraceSteps) -> None:
        """Trace the first steps under the plan of this version. Called on the control thread."""
        traced = TracedSteps(order.request, order.steps, self.place.side, self, _UnreplacedTap(super().tap))
        with self._ordering:
            self._traced_steps, self._orders[order.version] = traced, traced

    def line_traces(self) -> tuple[list[SliceTrace | None] | None, str]:
        """Return the traces once the last step has ended, or the reason why there are none."""
        current = self._traced_steps
        return (None, "") if current is None else (current.traces, current.obstacle)

    def forget_orders(self, version: int) -> None:
        """Drop recordings and orders. An order under a plan older than this version stays until that plan ends."""
        with self._ordering:
            self._self_graft = self._step_record = self._traced_steps = None
            self._orders = {at: each for at, each in self._orders.items() if at < version}

    def _await_others(self) -> None:
        """Before a step ends, wait for ranks of the other side that are over one step behind."""
        with self._lock:
            if self._run is not None and threading.get_ident() not in self._at_work:
                self._exchange.await_past(self._step - 1)

    def _choose_tap_handler(self) -> None:
        """Before the first tap of a step, choose its handler: an order, or the grafter itself."""
        ordered = None
        if self._orders:
            version = self.plan.version
            with self._ordering:
                last = self._self_graft, self._step_record, self._traced_steps
                # Drop older orders, but not one whose plan is not in force yet.
                self._orders = {at: each for at, each in self._orders.items() if at == version or each in last}
                ordered = self._orders.get(version)
        if self._tracing is not None and self._tracing is not ordered:
            self._tracing.end()
            self._tracing = None if self._tracing.is_left else self._tracing
        if isinstance(ordered, TracedSteps):
            self._tracing = ordered
        if ordered is None:
            self.__dict__.pop("tap", None)
            return
        calls.want_taps(self, True)
        # Replaces the method, so that steps without an order pay for no check.
        self.__dict__["tap"] = self._guarded(ordered.handler_at(self._step))

    def _guarded(self, handler: TapHandler) -> Callable[..., Any]:
        @outside_compiled_code
        def tap(name: str, value: Any, extras: Any, tags: Mapping[str, Any], replace: bool = False) -> Any:
            try:
                return handler.tap(name, value, extras, tags, replace)
            except GraftError:
                raise
            except Exception as error:
                self.on_failure(error)
                return value

        return tap

    def end_run(self) -> None:
        """See :meth:`Grafter.end_run`."""
        if self._tracing is not None:
            self._tracing.end()
        super().end_run()
