"""The grafter, one per rank: it owns the rank's runs, steps and plan in force, and handles its taps.

It is the only user of the exchange.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch

from graftlab.base import limits
from graftlab.base.tags import TagItems, TapKey
from graftlab.base.tap_groups import is_data
from graftlab.base.tensor_bytes import DTYPE_NAMES
from graftlab.base.world import Place, RunInfo
from graftlab.errors import BufferFullError, LayoutError, ShippingError, warn
from graftlab.exchange.contract import Exchange
from graftlab.exchange.status_page import StatusPage
from graftlab.grafting.batch_rows import BatchRows
from graftlab.grafting.decisions import (
    Addresses,
    Decision,
    Decisions,
    PairedTaps,
    TapLookup,
    all_tags,
    given_tags,
    overlap_error,
    paired_tags,
    recompute_status,
    sends,
)
from graftlab.grafting.kept import KeptPairs
from graftlab.grafting.overwrite import OverwrittenTensors
from graftlab.grafting.receive_pipeline import ReceivePipeline
from graftlab.grafting.tap_rows import PendingRow, TapCall, TapResult, row_of
from graftlab.grafting.tensors import SentExtras, plain_tensor, reduced_partial, sent_beside
from graftlab.plan.plan import Action, GraftPlan
from graftlab.plan.wire import pack_plan, unpack_plan
from graftlab.rows.schema import Row, Status
from graftlab.taps import calls
from graftlab.taps.backward import IN_A_HOOK, is_passed_by_autograd
from graftlab.taps.compiled import forget_open_tags, left_out_since
from graftlab.taps.extras import resolved, unpicklable_part
from graftlab.taps.untraced import outside_compiled_code

logger = logging.getLogger(__name__)


_MOST_WARNINGS = 3
"""How many taps get a warning for one reason."""
# Seconds between two checks for other threads' taps at the end of a step.
_LOOK = 0.1


class Reporter(Protocol):
    """Receives a grafter's reports, on the thread of the tap."""

    def row(self, row: Row) -> None:
        """Report one tap's row."""

    def seen(self, tags: dict[str, Any]) -> None:
        """Report a tag set at its first call, whether or not a filter matches it."""

    def adopted(self, version: int, step: int) -> None:
        """Report that this plan is in force from this step on."""


class Grafter:
    """Applies the plan to each tap that this rank reaches: sends or receives, and reports a row.

    Plans arrive through :meth:`offer_plan` from any thread; everything else happens on the threads that run the model,
    one at a time.
    """

    def __init__(
        self,
        place: Place,
        exchange: Exchange[PendingRow],
        page: StatusPage,
        ambient: ContextVar[TagItems],
        reporter: Reporter,
        kept: KeptPairs,
    ) -> None:
        self.place = place
        self.kept = kept
        self._page = page
        self._ambient = ambient
        self._reporter = reporter
        self._emit = reporter.row
        # Held by the thread that handles a tap, but released while that thread waits for other ranks.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        # An older version than any plan's, so that the first plan is adopted.
        self._plan = GraftPlan(version=-1)
        self._offered = self._plan
        self._reported_version = -1
        self._leader_is_gone = False
        self._receive_pipeline = ReceivePipeline(kept, self._warn_once)
        self._taps = PairedTaps(place, reporter.seen, self._warn_once)
        self._run: RunInfo | None = None
        self._step = -1
        self._order = 0
        self._before_step = 0
        self._last_tap = ""
        # The threads that are handling a tap. A signal handler or a finalizer may reach a second tap on such a thread.
        self._at_work: set[int] = set()
        # Whether the thread that holds the lock calls a user's function, which may itself reach taps.
        self._computes = 0
        # Whether an interrupt arrived during the exchange's work, and must be raised after it.
        self.interrupt_due = False
        # None outside a run of both sides. Then a tap does nothing, and does not use the plan.
        self._decisions: Decisions | None = None
        self._addresses = Addresses(self._step, self._warn_once)
        self._batch_rows = BatchRows()
        self._warned: dict[str, set[str]] = {}
        # The number of taps left out of graphs that are already known.
        self._left_out = 0
        # Set while grafted weights and settings are to be restored afterwards.
        self._overwritten_data: OverwrittenTensors | None = None
        self._use(exchange)

    def _use(self, exchange: Exchange[PendingRow]) -> None:
        self._exchange = exchange
        exchange.on_wait = self._on_wait
        exchange.share(self._release_lock, self._take_lock)

    # ---- runs, steps and plans ----------------------------------------------------------------------------------

    @property
    def plan(self) -> GraftPlan:
        """The plan in force."""
        return self._plan

    @property
    def newest_plan(self) -> GraftPlan:
        """The plan for the next step, unless a newer one arrives."""
        return self._offered if self._offered.version > self._plan.version else self._plan

    @property
    def moment(self) -> tuple[int, int] | None:
        """The current run and step; None between runs."""
        run = self._run
        return None if run is None else (run.run, self._step)

    @property
    def next_step(self) -> int:
        """The first unused step number."""
        return self._step + 1

    @property
    def decision_epoch(self) -> object:
        """An object that stays the same while decisions do not change; None while all taps do nothing."""
        return self._decisions

    def action(self, name: str, tags: Mapping[str, Any]) -> Action | None:
        """Return the action for a tap that is not being called now; None if the tap would do nothing.

        Raises :class:`TagError` as the tap would.
        """
        if self._decisions is None:
            return None
        decision = self._decisions.of((name, self._ambient.get(), *tags.items()))
        return None if decision is None else self._combined([decision.action, *(o.action for o in decision.others)])

    def may_take(self, path: str) -> bool:
        """Whether to show taps whose names begin with ``path``, even if the plan may match none of them."""
        decisions = self._decisions
        return decisions is not None and decisions.may_take(path)

    def actions_of_side(self, name: str, tags: Mapping[str, Any]) -> list[Action]:
        """Return the actions for such a tap on all ranks of this side, which differ only by the tag ``rank``."""
        given, _ = given_tags(name, dict(self._ambient.get()), tags, self._warn_once)
        full = all_tags(name, given, self.place, self._step)
        pairs = [paired_tags(full, given, each) for each in self._plan.pairings(self.place.side, name, given)]
        return [
            self._combined([self._plan.action_for({**seen, "rank": rank}) for seen in pairs])
            for rank in range(self.place.world_size)
        ]

    def _combined(self, actions: list[Action]) -> Action:
        """Combine the actions of a tap in several pairs: return the one with the largest effect."""
        if len(actions) == 1:
            return actions[0]
        return max(actions, key=lambda a: (a.overlap, a.graft and not self.sends(a), a.direction is not None))

    def sends(self, action: Action) -> bool:
        """Whether this side is the sender."""
        return sends(self.place, action.direction)

    def offer_plan(self, plan: GraftPlan) -> None:
        """Offer a newer plan for the next step. Any thread may call this; it never waits for a tap."""
        self._offered = plan

    def begin_with(self, plan: GraftPlan) -> None:
        """Put a first plan in force before any run, without reporting it to the notebook."""
        with self._lock:
            self._plan = self._offered = plan
            self._receive_pipeline.adopt(plan)
            self._write_page("idle")

    def adopt_offered_plan(self) -> None:
        """Put the newest plan in force, if there is no current run."""
        with self._lock:
            if self._run is None:
                self._adopt(self._offered)
                self._write_page("idle")

    def begin_run(self, run: RunInfo, plan: GraftPlan) -> None:
        """Begin the first step of a run, with this plan on every rank."""
        with self._lock:
            forget_open_tags()
            self._enter_run(run, plan)

    def _enter_run(self, run: RunInfo, plan: GraftPlan) -> None:
        self._exchange.begin_run(run)
        self._run = run
        self._leader_is_gone = False
        self._last_tap = ""
        self._step = run.first_step
        self._before_step = self._order
        if plan.version >= self._offered.version:
            self._offered = plan
        self._adopt(plan)
        self._begin_step(run)

    def step(self) -> None:
        """End a step and begin the next one, with the leader's plan."""
        self._begin_next_step()
        if self.interrupt_due:
            self._raise_interrupt()

    def _raise_interrupt(self) -> None:
        # A different user thread may get here first.
        if threading.current_thread() is threading.main_thread():
            self.interrupt_due = False
            raise KeyboardInterrupt

    def _begin_next_step(self) -> None:
        with self._lock:
            run = self._run
            if run is None:
                return
            if threading.get_ident() in self._at_work:
                self._warn_once("gl.step", "it was called inside a tap, perhaps by a signal handler, and is skipped")
                return
            self._wait_for_taps()
            self._end_step()
            self._step += 1
            self._before_step = self._order
            if self.place.world_rank == run.leader:
                self._announce_plan()
                self._begin_step(run)
            else:
                self._follow(run)

    def _follow(self, run: RunInfo) -> None:
        """Begin a step with the plan that the leader announces."""
        messages = self._exchange.announcements(run.leader, self._step)
        if messages is None:
            # With different plans on two ranks, wrong taps would be paired, so nothing is compared. A leader that dies
            # while it announces a new plan has told only some ranks.
            self._record_absent_leader(run)
            self._begin_step(run)
            self._decisions = None
            return
        # An empty list: the leader has ended its run, so the remaining ranks keep the plan in force.
        for message in messages:
            if message:
                self._adopt(unpack_plan(message))
        self._begin_step(run)

    def end_run(self) -> None:
        """End the last step of a run. Rows of unrequested tensors may still follow: see :meth:`record_unmatched`."""
        with self._lock:
            self._wait_for_taps()
            self._end_step()
            self._exchange.end_run()
            self._decisions = None

    def close_run(self) -> None:
        """Close a run that has ended on every rank."""
        with self._lock:
            self.record_unmatched()
            self._run = None
            self._adopt(self._offered)
            self._write_page("idle")

    @contextmanager
    def restoring_data(self) -> Iterator[None]:
        """Restore, at the end of the block, weights and settings that were grafted in it."""
        self._overwritten_data = OverwrittenTensors()
        try:
            yield
        finally:
            self._overwritten_data.restore()
            self._overwritten_data = None

    @contextmanager
    def patiently(self) -> Iterator[None]:
        """Ignore the time limit inside the block: for a side that computes nothing itself."""
        before, self._exchange.timeout = self._exchange.timeout, limits.LONGEST
        try:
            yield
        finally:
            self._exchange.timeout = before

    def record_unmatched(self) -> None:
        """Report the rows of tensors that this rank sent and no receiver requested."""
        pending = self._exchange.take_unmatched()
        if pending:
            # A rank reports its requests at the end of its step, and a rank that died cannot.
            lost = self._exchange.lost_peers()
            error = f"{lost}, and can no longer report whether it requested this tap" if lost else None
            for each in pending:
                self._emit(each.row(error=error))

    def _announce_plan(self) -> None:
        plan = self._offered
        changed = plan.version != self._plan.version
        self._exchange.announce(self._step, pack_plan(plan) if changed else b"")
        self._adopt(plan)

    def _adopt(self, plan: GraftPlan) -> None:
        if plan.version != self._plan.version:
            self._plan = plan
            self._receive_pipeline.adopt(plan)
        if plan.version != self._reported_version:
            self._reported_version = plan.version
            self._reporter.adopted(plan.version, self._step if self._run else self.next_step)

    def _begin_step(self, run: RunInfo) -> None:
        others = {p.world_rank for p in self.place.everyone() if p.side != self.place.side}
        decisions = self._decisions
        if others.isdisjoint(run.participants):
            self._decisions = None
        elif decisions is None or decisions.plan is not self._plan or "step" in self._plan.looks_at:
            self._decisions = Decisions(self._plan, self._step, self._taps)
        else:
            decisions.step = self._step
        self._addresses = Addresses(self._step, self._warn_once)
        self._batch_rows = BatchRows()
        # Only at the beginning of a step, so that one step has one plan in graphs too.
        calls.want_taps(self, self._plan.matches_any)
        self._write_page("running")

    def _end_step(self) -> None:
        self._exchange.end_step(self._step)
        self._receive_pipeline.log_grafts()
        self.record_unmatched()
        if self._decisions is not None:
            # Taps that no filter matched are reported too, so that a filter can be written for them.
            for name, tags in left_out_since(self._left_out):
                self._left_out += 1
                self._taps.seen.note(all_tags(name, tags, self.place, self._step), tuple(tags.items()))

    def _record_absent_leader(self, run: RunInfo) -> None:
        """Report that this step has no plan: once for a leader that is gone, and each time for one that is late."""
        why_gone = self._exchange.why_gone(run.leader)
        if why_gone and self._leader_is_gone:
            return
        self._leader_is_gone = bool(why_gone)
        leader = f"{self.place.everyone()[run.leader].label}, which announces the plan of each step,"
        if why_gone:
            error = (
                f"{leader} {why_gone} before it began step {self._step}; from this step to the end of this run no tap "
                "is compared here. session.restart() starts launched ranks again; start a job again by its command"
            )
        else:
            error = (
                f"{leader} did not begin step {self._step} within {self._exchange.timeout:g} s; no tap of this step is "
                f"compared here. {self._exchange.where_peers_are()}"
            )
        logger.warning("%s: %s", self.place.label, error)
        tags = all_tags("gl.step", {}, self.place, self._step)
        order = self._order - self._before_step
        now = time.perf_counter()
        call = TapCall(run.run, self._step, order, tags, Action(), self.place, self._plan.version, 0, now, None)
        self._report(call, TapResult("missing" if why_gone else "timeout", [], error=error))

    # ---- one tap ------------------------------------------------------------------------------------------------

    def tap(self, name: str, value: Any, extras: Any, tags: Mapping[str, Any], replace: bool = False) -> Any:
        """See :func:`graftlab.tap`. With ``replace`` a grafted value is returned as a new tensor."""
        decisions = self._decisions
        if decisions is None:
            return value
        lookup: TapLookup = (name, self._ambient.get(), *tags.items())
        try:
            # Inlined from decisions.of, because most taps of a model end here.
            decision = decisions.known[lookup]
        except (KeyError, TypeError):
            decision = decisions.decide(lookup)
        if decision is None:
            return value
        return self._handle(decision, name, value, extras, replace)

    @outside_compiled_code
    def _handle(self, decision: Decision, name: str, value: Any, extras: Any, replace: bool) -> Any:
        if decision.action.overlap or any(other.action.overlap for other in decision.others):
            raise overlap_error(decision, name, self.place, self._plan, self._step)
        thread = threading.get_ident()
        if thread in self._at_work:
            # The exchange is in the middle of an operation that cannot continue before this call returns.
            self._warn_once(name, "it was reached inside another tap, perhaps by a signal handler, and is skipped")
            return value
        with self._lock:
            try:
                # Inside the try block, because the stop button may interrupt this anywhere.
                self._at_work.add(thread)
                taken = self._take(decision, name, value, extras, replace)
            finally:
                self._at_work.discard(thread)
                if not self._at_work:
                    self._changed.notify_all()
        if self.interrupt_due:
            self._raise_interrupt()
        return taken

    def _release_lock(self) -> bool:
        """Release the lock for a wait; False if the waiting code is a user's function inside a tap."""
        if self._computes:
            return False
        self._lock.release()
        return True

    def _take_lock(self) -> None:
        self._lock.acquire()

    def _wait_for_taps(self) -> None:
        """Wait for the current taps of other threads, which belong to the step that is ending."""
        while self._at_work:
            # With a time limit, because an interrupted tap may fail to notify.
            self._changed.wait(_LOOK)

    def _take(self, decision: Decision, name: str, value: Any, extras: Any, replace: bool) -> Any:
        """Send a tap's tensor, receive one for it, or both; returns the value to continue with."""
        began = time.perf_counter()
        self._order += 1
        order = self._order - self._before_step
        pairs = self._wanted_pairs(decision)
        if not pairs and not decision.shows_rows:
            return value
        self._last_tap = name
        shown = self._computed(value) if callable(value) and not isinstance(value, torch.Tensor) else value
        own = self.tensor_of(name, shown)
        if own is None:
            for _, key in pairs:
                if key is not None:
                    self._exchange.decline(key)
            return value
        if decision.shows_rows:
            self._batch_rows.show(name, own, self._ambient.get())
        grafted = [each for each, _ in pairs if each.action.graft and not each.sends]
        if grafted and not replace and shown is value and is_passed_by_autograd(own):
            self._warn_once(name, IN_A_HOOK)
            value = shown = shown.clone()
            own = self.tensor_of(name, shown)
            assert own is not None
        sent_extras = sent_beside(shown, extras, decision.own_name if self._plan.rename else None, self.place)
        extras = resolved(extras)
        self._page.pass_tap(self._step, self._plan.version, self._order, name)
        for each, key in pairs:
            call = self._call(each, key, own, order, began)
            if key is None or (each.pairing is not None and each.pairing.alone):
                self._leave_alone(key, call, each)
            elif isinstance(sent_extras, LayoutError):
                self._refuse_layout(key, call, sent_extras)
            elif each.sends:
                self._publish(key, call, extras, sent_extras)
            else:
                # A DTensor can only be overwritten through its local shard, in place.
                replaced = shown if replace and not hasattr(shown, "to_local") else None
                result = self._receive(key, call, shown, extras, sent_extras, replaced)
                if result is not None and result is not own and (own is value or replaced is not None):
                    value = shown = own = result
        return value

    def _wanted_pairs(self, decision: Decision) -> list[tuple[Decision, TapKey | None]]:
        """The pairs of a tap whose tensor goes to or comes from the other side, each with its address."""
        pairs = []
        for each, key in self._addresses.of_pairs(decision):
            if each.action.direction is not None:
                pairs.append((each, key))
            elif key is not None:
                self._decline_for_other_ranks(key)
        if len(pairs) > 1:
            # Send first, so that the sent tensor is the one before any graft.
            pairs.sort(key=lambda pair: not pair[0].sends)
        return pairs

    def _leave_alone(self, key: TapKey | None, call: TapCall, decision: Decision) -> None:
        """Report a tap without a counterpart, instead of waiting for the other side."""
        pairing = decision.pairing
        assert pairing is not None
        if key is not None:
            self._exchange.decline(key)
            error = f"{pairing.alone}, so this tap has no counterpart"
        else:
            error = f"the plan has no pair for this call of {decision.own_name!r} in the step"
        status: Status = "unmatched" if decision.sends else "missing"
        self._report(call, TapResult(status, [], error=error))

    def _refuse_layout(self, key: TapKey, call: TapCall, error: LayoutError) -> None:
        self._exchange.decline(key)
        logger.error("%s: tap %r: %s", self.place.label, call.name, error)
        self._report(call, TapResult("failed", [], error=str(error)))

    def _report(self, call: TapCall, result: TapResult) -> None:
        self._emit(row_of(call, result, time.perf_counter() - call.began))

    def _computed(self, value: Any) -> Any:
        """Call the user's function, which may itself reach taps."""
        thread = threading.get_ident()
        self._at_work.discard(thread)
        self._computes += 1
        try:
            return value()
        finally:
            self._computes -= 1
            self._at_work.add(thread)

    def _call(self, decision: Decision, key: TapKey | None, own: torch.Tensor, order: int, began: float) -> TapCall:
        run = self._run
        assert run is not None
        rule = None if decision.pairing is None else decision.pairing.rule
        return TapCall(
            run.run,
            self._step,
            order,
            decision.tags_at(self._step, recompute_status() if key is None else key.recompute_status),
            decision.action,
            self.place,
            self._plan.version,
            0 if key is None else key.occurrence,
            began,
            own,
            decision.pairing,
            None if rule is None else self._batch_rows.of(rule, rule.whole == self.place.side, self._ambient.get()),
        )

    def _decline_for_other_ranks(self, key: TapKey) -> None:
        """Decline, so that a rank of the other side that decided differently does not wait for this one."""
        if self._plan.rank_dependent:
            self._exchange.decline(key)

    def _publish(self, key: TapKey, call: TapCall, extras: Any, sent_extras: SentExtras | None) -> None:
        own = call.tensor
        assert own is not None
        # The row must not keep the model's tensor alive.
        seconds = time.perf_counter() - call.began
        memo = PendingRow(call._replace(tensor=None, rows=None), list(own.shape), DTYPE_NAMES[own.dtype], seconds)
        if call.rows is not None:
            sent_extras = dataclasses.replace(sent_extras or SentExtras(None), rows=call.rows)
        sent = extras if sent_extras is None else dataclasses.replace(sent_extras, extras=extras)
        try:
            self._exchange.publish(key, own.detach() if own.requires_grad else own, sent, memo)
            if call.action.graft:
                self._receive_pipeline.note_sent(call, extras)
        except BufferFullError as full:
            logger.warning("%s", full)
            self._exchange.decline(key)
            self._emit(memo.row("timeout", str(full)))
        except ShippingError as error:
            failure = (
                f"{unpicklable_part(extras)} of gl.tap({call.name!r}) on {self.place.label} cannot be pickled: "
                f"{error.__cause__}; pass tensors, numbers, strings, or containers of them"
            )
            logger.error("%s", failure)
            self._exchange.decline(key)
            self._emit(memo.row("failed", failure))

    def _receive(
        self,
        key: TapKey,
        call: TapCall,
        shown: Any,
        extras: Any,
        sent_extras: SentExtras | None,
        replaced: torch.Tensor | None,
    ) -> torch.Tensor | None:
        own = call.tensor
        assert own is not None
        if self._overwritten_data is not None and call.action.graft and is_data(call.tags):
            self._overwritten_data.remember(own)
        self._decline_for_other_ranks(key)
        layout = None if sent_extras is None else sent_extras.layout
        reduced: torch.Tensor | str | None = None
        if layout is not None and layout.is_partial:
            reduced = reduced_partial(shown, own, layout, self.place.world_size, self._plan.rank_dependent)
        receipt = self._exchange.receive(key, own)
        try:
            call, result = self._receive_pipeline.take_named(call, extras, receipt, replaced, layout, reduced)
        finally:
            receipt.release()
        if result.status == "missing" and key.recompute_status == "recompute":
            result = result._replace(status="recomputed", note=result.error, error=None)
        self._report(call, result)
        return result.result

    def tensor_of(self, name: str, shown: Any) -> torch.Tensor | None:
        """Return the plain tensor behind a tap's value; None, with a warning, if there is none."""
        found = plain_tensor(shown)
        if isinstance(found, str):
            self._warn_once(name, found)
            return None
        return found

    def _warn_once(self, name: str, what: str) -> None:
        names = self._warned.setdefault(what, set())
        if name in names:
            return
        names.add(name)
        if len(names) <= _MOST_WARNINGS:
            # Code that suits no tap, such as a model within vmap, would print pages.
            last = " (further taps get no warning of this)" if len(names) == _MOST_WARNINGS else ""
            warn(f"gl.tap({name!r}) on {self.place.label}: {what}{last}")

    # ---- the status page ---------------------------------------------------------------------------------------

    def _on_wait(self, awaits: Collection[int]) -> None:
        self._write_page("waiting" if awaits else "running", awaits)

    def _write_page(self, state: str, awaits: Collection[int] = ()) -> None:
        self._page.write(
            state,
            step=self._step,
            plan_version=self._plan.version,
            taps=self._order,
            tap=self._last_tap,
            awaits=awaits,
        )
