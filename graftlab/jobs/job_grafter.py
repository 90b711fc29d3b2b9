"""The grafter of a job: whatever fails in it, the job goes on; with other peers, or against itself in its own steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from graftlab.base.world import RunInfo
from graftlab.errors import GraftError, SessionError
from graftlab.exchange.contract import Exchange
from graftlab.exchange.status_page import StatusPage
from graftlab.grafting.decisions import Decision
from graftlab.grafting.grafter import Grafter
from graftlab.grafting.receive_pipeline import PendingRow
from graftlab.grafting.self_graft import SelfGraft
from graftlab.grafting.self_graft_in_steps import SelfGraftInSteps
from graftlab.plan.plan import GraftPlan
from graftlab.ranks.messages import RunSelfGraft
from graftlab.taps.calls import TapHandler
from graftlab.taps.untraced import outside_compiled_code


@dataclass(frozen=True)
class WorldOffer:
    """Other peers to go on with, in a run of their own under this plan.

    ``on_moved`` is told that run as it begins; ``close`` is called where it never does.
    """

    exchange: Exchange[PendingRow]
    page: StatusPage
    run: RunInfo
    plan: GraftPlan
    on_moved: Callable[[RunInfo], None]
    close: Callable[[], None]


class JobGrafter(Grafter):
    """Takes the taps of a job. ``on_failure`` is told of what should not have happened, and ends it.

    What is the job's own mistake, such as a tap that matches both directions, is raised as on any rank.
    """

    on_failure: Callable[[Exception], None]
    # Whether no rank is to be more than a step ahead: one that only sends gets as far ahead as its buffer holds, and
    # whoever waits for a plan to be in force everywhere would wait for all of that.
    keeps_step = False
    # What runs against itself here, last ordered.
    _itself: SelfGraftInSteps | None = None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._offer: WorldOffer | None = None
        # Not the grafter's own lock, which a thread that waits in a tap may hold.
        self._offering = threading.Lock()
        # What has been ordered, by the version of the plan under which it runs. An order, and the word to forget it,
        # reach the ranks at different times, and a plan is in force on all from the same step on: so what is in force
        # goes on until then, or some ranks of a side would take the taps of a step and others not.
        self._orders: dict[int, SelfGraftInSteps] = {}
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
            if self.keeps_step:
                self._await_others()
            if not self._move():
                super().step()
            self._turn_to_itself()
        except GraftError:
            raise
        except Exception as error:
            self.on_failure(error)

    # ---- other peers --------------------------------------------------------------------------------------------

    @property
    def exchange(self) -> Exchange[PendingRow]:
        """The one in use; for whoever has ended the run."""
        return self._exchange

    def offer(self, offer: WorldOffer | None) -> None:
        """Go on with these from the end of the step on; None takes back what was offered. Any thread."""
        with self._offering:
            before, self._offer = self._offer, offer
        if before is not None:
            before.close()

    def begin_run(self, run: RunInfo, plan: GraftPlan) -> None:
        """As :meth:`Grafter.begin_run`. Its ranks may begin at different steps, and later than the leader has."""
        with self._lock:
            super().begin_run(run, plan)
            self._fall_in(run)

    def _fall_in(self, run: RunInfo) -> None:
        """Let the others know that nothing comes of earlier steps, and hear with which plan this one begins."""
        self._exchange.end_step(run.first_step - 1)
        if self.place.world_rank == run.leader:
            self._exchange.announce(run.first_step, b"")
        else:
            self._follow(run)

    def _move(self) -> bool:
        """End the step, and begin the next one in the world that was offered; False where none was."""
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
            # Whoever has to begin before this one hears anything from it may wait for this word.
            offer.on_moved(run)
            self._fall_in(run)
            return True

    # ---- against itself -----------------------------------------------------------------------------------------

    def run_against_itself(self, order: RunSelfGraft) -> None:
        """Begin when the plan of this version is in force. On the control thread."""
        before = self._itself
        if before is None and not {"record", "rest"} & {*order.passes[:1]}:
            raise SessionError("nothing is recorded here to run against")
        itself = SelfGraftInSteps(
            order.passes,
            order.steps,
            budget=order.budget,
            dtypes=order.dtypes,
            keep=order.keep,
            paired_names=self._paired_names,
            before=before,
        )
        with self._ordering:
            self._itself, self._orders[order.version] = itself, itself

    def against_itself(self) -> SelfGraft | None:
        """What it came to, once the last pass has ended."""
        itself = self._itself
        return itself.found if itself is not None and itself.is_over else None

    def forget_itself(self, version: int) -> None:
        """Let go of what was recorded, and of orders; what is in force under a plan older than this version goes on
        until another is."""
        with self._ordering:
            self._itself = None
            self._orders = {at: each for at, each in self._orders.items() if at < version}

    def _await_others(self) -> None:
        """Before a step ends: wait for those of the other side that are more than one behind."""
        with self._lock:
            if self._run is not None and threading.get_ident() not in self._at_work:
                self._exchange.await_past(self._step - 1)

    def _turn_to_itself(self) -> None:
        """Before the first tap of a step: give its taps to what runs against itself, or take them again."""
        itself = None
        if self._orders:
            version = self.plan.version
            with self._ordering:
                last = self._itself
                # Older orders are done with; that of a plan which is on its way is not.
                self._orders = {at: each for at, each in self._orders.items() if at == version or each is last}
                itself = self._orders.get(version)
        if itself is None:
            self.__dict__.pop("tap", None)
            return
        # In the place of the method, so that no other step pays for a look whether this is such a one.
        self.__dict__["tap"] = self._guarded(itself.handler_at(self._step))

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

    def _paired_names(self, name: str) -> list[str]:
        return [pairing.name for pairing in self.plan.pairings(self.place.side, name, {})]
