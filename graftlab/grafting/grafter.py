"""The grafter: what happens to one tap's tensor, from the plan's decision to the row.

One grafter lives in each rank. It owns the rank's step and the plan in force, and is the only user of the exchange.
"""

from __future__ import annotations

import logging
import pickle
import threading
import time
from collections import Counter
from collections.abc import Collection, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.module_tracker import ModuleTracker

from graftlab.base.tags import RESERVED_TAGS, TagItems, TapKey, is_no_tag, plain
from graftlab.base.world import Place, RunInfo
from graftlab.errors import BufferFullError, GraftOverlapError, ShippingError, TagError, TransformError, warn
from graftlab.exchange.contract import Receipt
from graftlab.exchange.shared_memory import SharedMemoryExchange
from graftlab.exchange.whereabouts import WhereaboutsPage
from graftlab.grafting.kept import KeptPairs
from graftlab.grafting.overwrite import overwrite, replacement_for
from graftlab.plan.plan import Action, GraftPlan
from graftlab.rows.schema import COLUMNS, Row
from graftlab.taps.extras import resolved, unpicklable_part
from graftlab.transforms import GraftTransformInput, Transform, compare, dtype_name, run_transform, user_traceback

logger = logging.getLogger(__name__)

# Tag sets that never repeat (a request id, say) must not fill the memory.
_MEMO_LIMIT = 100_000
_SEEN_LIMIT = 10_000

# Of these it is known without asking that no other tensor is inside; to ask a tensor for what it lacks is slow.
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)

# Only asked whether a backward pass is going on; it hooks nothing until it is entered, which it never is.
_tracker = ModuleTracker()


def recompute_status() -> str:
    """``"recompute"`` while activation checkpointing runs a forward again inside the backward pass.

    Hooks and custom backward functions run there too, but without grad mode.
    """
    return "recompute" if _tracker.is_bw and torch.is_grad_enabled() else "original"


@dataclass(frozen=True)
class Decision:
    """What the plan in force says of one distinct tag set, worked out once."""

    action: Action
    sends: bool
    tags: dict[str, Any]
    name: str
    key_tags: TagItems


class Reporter(Protocol):
    """What a grafter tells whoever runs it, on the thread of the tap."""

    def row(self, row: Row) -> None:
        """One tap's row."""

    def seen(self, tags: dict[str, Any]) -> None:
        """A tag set that is reached for the first time, whether or not some filter wants it."""

    def adopted(self, version: int, step: int) -> None:
        """This plan is in force here from this step on."""


class Grafter:
    """Decides, sends, receives, transforms, measures, overwrites and records.

    Plans arrive through :meth:`offer_plan` from any thread; everything else happens on the
    threads that run the model, one at a time.
    """

    def __init__(
        self,
        place: Place,
        exchange: SharedMemoryExchange,
        page: WhereaboutsPage,
        ambient: ContextVar[TagItems],
        reporter: Reporter,
        kept: KeptPairs,
    ) -> None:
        self.place = place
        self.kept = kept
        self._exchange = exchange
        self._page = page
        self._ambient = ambient
        self._reporter = reporter
        self._emit = reporter.row
        self._lock = threading.RLock()
        # Older than any, so that the first plan is adopted whatever its version.
        self._plan = GraftPlan(version=-1)
        self._offered = self._plan
        self._transform: Transform | None = None
        self._run: RunInfo | None = None
        self._step = -1
        self._order = 0
        self._last_tap = ""
        # None outside a run that has both sides: then a tap is left alone without a look at the plan.
        self._decisions: dict[Any, Decision | None] | None = None
        self._occurrences: Counter[tuple[Any, ...]] = Counter()
        self._warned: set[tuple[str, str]] = set()
        self._seen: set[tuple[str, TagItems]] = set()
        exchange.on_wait = self._on_wait

    # ---- runs, steps and plans ----------------------------------------------------------------------------------

    @property
    def plan(self) -> GraftPlan:
        """The plan in force."""
        return self._plan

    @property
    def next_step(self) -> int:
        """The first step number that nothing has used yet."""
        return self._step + 1

    @property
    def era(self) -> object:
        """The same object for as long as actions stay as they are; None while taps are left alone altogether."""
        return self._decisions

    def action(self, name: str, tags: Mapping[str, Any]) -> Action | None:
        """What the plan says of a tap that is not reached now; None where it would be left alone.

        Raises :class:`TagError` as the tap would.
        """
        decisions = self._decisions
        if decisions is None:
            return None
        memo = (name, self._ambient.get(), *tags.items())
        try:
            decision = decisions[memo] if memo in decisions else self._decide(decisions, memo, name, tags)
        except TypeError:
            decision = self._decide(None, memo, name, tags)
        return None if decision is None else decision.action

    def actions_of_side(self, name: str, tags: Mapping[str, Any]) -> list[Action]:
        """What the plan says of such a tap on each rank of this side, as far as ``rank`` tells them apart."""
        full = self._tags_of(name, self._given(name, tags)[0])
        return [self._plan.action_for({**full, "rank": rank}) for rank in range(self.place.world_size)]

    def sends(self, action: Action) -> bool:
        """Whether this side is the one that gives its tensor away."""
        return action.direction == ("b2t" if self.place.side == "baseline" else "t2b")

    def offer_plan(self, plan: GraftPlan) -> None:
        """A newer plan, in force from the next step. Any thread; never waits for a tap."""
        self._offered = plan

    def adopt_offered_plan(self) -> None:
        """Put the newest plan in force, if no run is going on."""
        with self._lock:
            if self._run is None:
                self._adopt(self._offered)
                self._write_page("idle")

    def begin_run(self, run: RunInfo, plan: GraftPlan) -> None:
        """The first step of a run begins, under this plan on every rank."""
        with self._lock:
            self._exchange.begin_run(run)
            self._run = run
            self._last_tap = ""
            self._step = run.first_step
            if plan.version >= self._offered.version:
                self._offered = plan
            self._adopt(plan)
            self._begin_step()

    def step(self) -> None:
        """One step ends and the next begins, with the plan that the leader says."""
        with self._lock:
            run = self._run
            if run is None:
                return
            self._end_step()
            self._step += 1
            if self.place.world_rank == run.leader:
                plan = self._offered
                changed = plan.version != self._plan.version
                self._exchange.announce(self._step, pickle.dumps(plan if changed else None))
                self._adopt(plan)
                self._begin_step()
                return
            messages = self._exchange.announcements(run.leader, self._step)
            if messages is None:
                # Filtering with another plan than the other side would pair the wrong taps; better none at all.
                self._record_timeout_of_leader(run)
                self._begin_step()
                self._decisions = None
                return
            # None at all: the leader has ended its run, so whoever goes on does so under the plan in force.
            for message in messages:
                changed_plan = pickle.loads(message)
                if changed_plan is not None:
                    self._adopt(changed_plan)
            self._begin_step()

    def end_run(self) -> None:
        """The last step of the run ends. Rows of what nobody asked for may still come: see :meth:`record_unmatched`."""
        with self._lock:
            self._end_step()
            self._exchange.end_run()
            self._decisions = None

    def close_run(self) -> None:
        """The run is over on every rank."""
        with self._lock:
            self.record_unmatched()
            self._run = None
            self._adopt(self._offered)
            self._write_page("idle")

    def record_unmatched(self) -> None:
        for memo in self._exchange.take_unmatched():
            if isinstance(memo, dict):
                self._emit(memo)

    def _adopt(self, plan: GraftPlan) -> None:
        if plan.version != self._plan.version:
            self._plan = plan
            self._transform = _load(plan)
            self._decisions = None if self._decisions is None else {}
            self._reporter.adopted(plan.version, self._step if self._run else self.next_step)

    def _begin_step(self) -> None:
        assert self._run is not None
        others = {p.world_rank for p in self.place.everyone() if p.side != self.place.side}
        two_sided = not others.isdisjoint(self._run.participants)
        self._occurrences.clear()
        if not two_sided:
            self._decisions = None
        elif self._decisions is None or "step" in self._plan.mentions:
            self._decisions = {}
        self._write_page("running")

    def _end_step(self) -> None:
        self._exchange.end_step(self._step)
        self.record_unmatched()

    def _record_timeout_of_leader(self, run: RunInfo) -> None:
        leader = self.place.everyone()[run.leader].label
        decision = Decision(Action(), False, self._tags_of("gl.step", ()), "gl.step", ())
        row = self._row(decision, 0, "timeout", time.perf_counter())
        row["error"] = (
            f"{leader}, which says the plan of each step, did not begin step {self._step} within "
            f"{self._exchange.timeout:g} s; no tap of this step is compared here. {self._exchange.where_peers_are()}"
        )
        logger.warning("%s: %s", self.place.label, row["error"])
        self._emit(row)

    # ---- one tap ------------------------------------------------------------------------------------------------

    def tap(self, name: str, value: Any, extras: Any, tags: Mapping[str, Any], replace: bool = False) -> Any:
        """See :func:`graftlab.tap`. With ``replace`` a grafted value comes back as a new tensor."""
        decisions = self._decisions
        if decisions is None:
            return value
        memo = (name, self._ambient.get(), *tags.items())
        try:
            decision = decisions[memo]
        except KeyError:
            decision = self._decide(decisions, memo, name, tags)
        except TypeError:
            # Some tag's value cannot be hashed, so the decision cannot be remembered.
            decision = self._decide(None, memo, name, tags)
        if decision is None:
            return value
        return self._wanted(decision, name, value, extras, replace)

    def _decide(
        self, decisions: dict[Any, Decision | None] | None, memo: Any, name: str, tags: Mapping[str, Any]
    ) -> Decision | None:
        if not isinstance(name, str) or not name:
            raise TagError(f"gl.tap: the name must be a non-empty string, not {name!r}")
        taken = RESERVED_TAGS.intersection(tags)
        if taken:
            raise TagError(
                f"gl.tap({name!r}): the tags {sorted(taken)} are set by graftlab itself; give yours another name"
            )
        given, is_whole = self._given(name, tags)
        if not is_whole:
            # What would be remembered holds the tensor, or whatever it is, for as long as the plan is in force.
            decisions = None
        full = self._tags_of(name, given)
        self._report_seen(full, tuple((key, plain(value)) for key, value in given))
        plan = self._plan
        action = plan.action_for(full)
        decision: Decision | None = None
        # Where ranks may decide differently, a tap that is not wanted here is still counted, and declined.
        if action != Action() or plan.rank_dependent:
            sends = self.sends(action)
            key_tags = tuple(sorted((k, plain(v)) for k, v in given if not k.endswith("_rank")))
            decision = Decision(action, sends, full, plan.rewrite(self.place.side, name), key_tags)
        if decisions is not None and "recompute_status" not in plan.mentions:
            if len(decisions) >= _MEMO_LIMIT:
                decisions.clear()
            decisions[memo] = decision
        return decision

    def _given(self, name: str, tags: Mapping[str, Any]) -> tuple[TagItems, bool]:
        """The caller's tags with those set around it, and whether all of them: what can be no tag is left out."""
        given = {**dict(self._ambient.get()), **tags}
        refused = [tag for tag, value in given.items() if is_no_tag(tag, value)]
        for tag in refused:
            self._warn_once(
                name,
                f"{tag}={type(given.pop(tag)).__name__} can be no tag, since it would never be the same on both sides; "
                "it is left out. extras= takes what travels to the other side's transform",
            )
        return tuple(given.items()), not refused

    def _report_seen(self, full: dict[str, Any], given: TagItems) -> None:
        # Decisions are forgotten with their plan; what was seen is not, so each tag set is told once.
        known = (str(full["name"]), (("recompute_status", full["recompute_status"]), *given))
        if known not in self._seen and len(self._seen) < _SEEN_LIMIT:
            self._seen.add(known)
            self._reporter.seen({**full, **dict(given)})

    def _current(self, decision: Decision) -> dict[str, Any]:
        """The tags of this very call: a decision outlives the step in which it was made."""
        return {**decision.tags, "step": self._step, "recompute_status": recompute_status()}

    def _tags_of(self, name: str, given: TagItems) -> dict[str, Any]:
        return {
            "name": name,
            "step": self._step,
            "side": self.place.side,
            "rank": self.place.rank,
            "recompute_status": recompute_status(),
            **dict(given),
        }

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _wanted(self, decision: Decision, name: str, value: Any, extras: Any, replace: bool) -> Any:
        action = decision.action
        if action.overlap:
            raise GraftOverlapError(
                f"tap {name!r} matches both b2t and t2b on {self.place.label}, tags {self._current(decision)}; "
                f"change one filter so that each tap goes one way (b2t={self._plan.b2t!r}, t2b={self._plan.t2b!r})"
            )
        with self._lock:
            began = time.perf_counter()
            status = recompute_status()
            self._order += 1
            counted = (decision.name, decision.key_tags, status)
            occurrence = self._occurrences[counted]
            self._occurrences[counted] += 1
            key = TapKey(self._step, decision.name, decision.key_tags, status, occurrence)
            if action.direction is None:
                if self._plan.rank_dependent:
                    self._exchange.decline(key)
                return value
            self._last_tap = name
            shown = value() if callable(value) and not isinstance(value, torch.Tensor) else value
            own = self.tensor_of(name, shown)
            if own is None:
                self._exchange.decline(key)
                return value
            extras = resolved(extras)
            self._write_page("running")
            row = self._row(decision, occurrence, "unmatched", began)
            row["shape"], row["dtype"] = list(own.shape), dtype_name(own.dtype)
            if decision.sends:
                self._publish(key, own, extras, row)
                return value
            if self._plan.rank_dependent:
                self._exchange.decline(key)
            receipt = self._exchange.receive(key, own)
            try:
                # A DTensor can only be overwritten through its local shard, in place.
                replaced = shown if replace and not hasattr(shown, "to_local") else None
                result = self._take(row, action, own, extras, receipt, replaced)
            finally:
                receipt.release()
            row["seconds"] = time.perf_counter() - began
            self._emit(row)
            goes_on = result is not None and result is not own and (own is value or replaced is not None)
            return result if goes_on else value

    def tensor_of(self, name: str, shown: Any) -> torch.Tensor | None:
        """The plain tensor behind a tap's value; None, with one warning a tap, where there is none."""
        if type(shown) in _PLAIN_TENSORS and shown.layout == torch.strided and not shown.is_meta:
            plain_tensor: torch.Tensor = shown
            return plain_tensor
        if not isinstance(shown, torch.Tensor):
            self._warn_once(name, f"its value is {type(shown).__name__}, not a tensor; the tap is skipped")
            return None
        local: Any = shown.to_local() if hasattr(shown, "to_local") else shown
        if hasattr(local, "trigger_wait"):
            # The result of a collective that may still be on its way; the plain tensor shares its memory.
            local = local.wait()
        if not isinstance(local, torch.Tensor) or local.layout != torch.strided or local.device.type == "meta":
            self._warn_once(name, f"a {shown.layout} tensor on {shown.device} cannot travel; the tap is skipped")
            return None
        return local

    def _warn_once(self, name: str, what: str) -> None:
        if (name, what) not in self._warned:
            self._warned.add((name, what))
            warn(f"gl.tap({name!r}) on {self.place.label}: {what}")

    def _publish(self, key: TapKey, own: torch.Tensor, extras: Any, row: Row) -> None:
        try:
            self._exchange.publish(key, own.detach(), extras, memo=row)
        except BufferFullError as full:
            row["status"], row["error"] = "timeout", str(full)
            logger.warning("%s", full)
            self._exchange.decline(key)
            self._emit(row)
        except ShippingError as error:
            row["status"] = "failed"
            row["error"] = (
                f"{unpicklable_part(extras)} of gl.tap({row['name']!r}) on {self.place.label} cannot be pickled: "
                f"{error.__cause__}; pass tensors, numbers, strings, or containers of them"
            )
            logger.error("%s", row["error"])
            self._exchange.decline(key)
            self._emit(row)

    def _take(
        self,
        row: Row,
        action: Action,
        own: torch.Tensor,
        extras: Any,
        receipt: Receipt,
        replaced: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """From what was received to the row and the grafted tensor; None leaves the value alone.

        With ``replaced``, the value as the model sees it, a graft makes a new tensor in its place; otherwise it is
        written into ``own``.
        """
        contributions = receipt.contributions
        row["senders"] = [contribution.rank for contribution in contributions]
        if receipt.absent and (contributions or receipt.timed_out):
            row["note"] = "; ".join(receipt.absent.values())
        if not contributions:
            row["status"] = "timeout" if receipt.timed_out else "missing"
            row["error"] = "; ".join(receipt.absent.values())
            return None
        if receipt.unreadable:
            row["status"], row["error"] = "failed", "; ".join(receipt.unreadable.values())
            logger.error("%s: tap %r failed: %s", self.place.label, row["name"], row["error"])
            return None
        assert action.direction is not None
        graft_input = GraftTransformInput(
            tags=row["tags"],
            received_list=[contribution.tensor for contribution in contributions],
            received_extras_list=[contribution.extras for contribution in contributions],
            target=own.detach(),
            direction=action.direction,
            recv_rank=self.place.rank,
            recv_world_size=self.place.world_size,
            senders=row["senders"],
            send_world_size=self.place.other_world_size,
            target_extras=extras,
        )
        try:
            outcome = run_transform(self._transform, graft_input)
            stats = compare(outcome, graft_input)
        except (Exception, SystemExit) as error:
            row["status"] = "failed"
            row["error"] = f"{type(error).__name__}: {error}\n\n{user_traceback(error)}"
            logger.error("%s: the transform failed at tap %r: %s", self.place.label, row["name"], row["error"])
            if action.keep:
                # To try a better transform on.
                row["note"] = self.kept.add(graft_input, None) or row["note"]
            return None
        row.update(vars(stats))
        row["aligned_by"], row["cast"] = outcome.aligned_by, outcome.cast
        mine, theirs = graft_input.target, outcome.value
        if outcome.rows is not None:
            row["rows_matched"], row["rows_unmatched"] = len(outcome.rows[0]), outcome.rows_unmatched
            if outcome.rows_unmatched and not row["rows_matched"]:
                row["status"], row["error"] = "missing", "the senders have none of the rows of this batch"
                return None
        if action.keep:
            row["note"] = self.kept.add(graft_input, theirs) or row["note"]
        if not action.graft:
            row["status"] = "compared"
            return None
        row["status"] = "grafted"
        if replaced is not None:
            result = replacement_for(replaced, theirs)
        else:
            result, note = overwrite(own, theirs)
            if note:
                row["note"] = "; ".join(filter(None, (row["note"], note)))
                self._warn_once(row["name"], note)
        if logger.isEnabledFor(logging.INFO):
            self._log_graft(row, mine, theirs)
        return result

    def _log_graft(self, row: Row, mine: torch.Tensor, theirs: torch.Tensor) -> None:
        ours, others = ("target", "baseline") if row["direction"] == "b2t" else ("baseline", "target")
        line = (
            f"{self.place.label} grafted {row['direction']} at tap {row['name']!r} step {row['step']}: "
            f"{_describe(mine, row, ours)} overridden by {_describe(theirs, row, others)} from ranks {row['senders']}; "
            f"rel_diff={row['rel_diff']:.3e} max_abs={row['max_abs']:.3e} mean_abs={row['mean_abs']:.3e}"
        )
        # As logger.info, but for the search of the stack for this line, which would cost more than all the rest.
        logger.handle(logger.makeRecord(logger.name, logging.INFO, __file__, 0, line, (), None, "_log_graft"))

    def _row(self, decision: Decision, occurrence: int, status: str, began: float) -> Row:
        row: Row = dict.fromkeys(COLUMNS)
        row.update(
            run=self._run.run if self._run else None,
            step=self._step,
            order=self._order,
            name=decision.tags["name"],
            tags=self._current(decision),
            direction=decision.action.direction,
            side=self.place.side,
            rank=self.place.rank,
            status=status,
            senders=[],
            plan_version=self._plan.version,
            occurrence=occurrence,
            seconds=time.perf_counter() - began,
        )
        return row

    # ---- where this rank is -------------------------------------------------------------------------------------

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


def _load(plan: GraftPlan) -> Transform | None:
    """The plan's transform. One that loads in the notebook but not here fails at each tap, not the whole run."""
    try:
        return plan.load_transform()
    except (Exception, SystemExit) as error:
        cause = error

        def fails(graft_input: GraftTransformInput) -> torch.Tensor:
            raise TransformError(f"the plan's transform cannot be loaded on this rank: {cause}") from cause

        return fails


def _describe(tensor: torch.Tensor, row: Row, side: str) -> str:
    """Shape, dtype, device and what was measured of it, for the log."""
    nonfinite = f" nonfinite={row[f'nonfinite_{side}']}" if row[f"nonfinite_{side}"] else ""
    return (
        f"{dtype_name(tensor.dtype)}{list(tensor.shape)} {tensor.device} (mean={row[f'mean_{side}']:.4g} "
        f"std={row[f'std_{side}']:.4g} min={row[f'min_{side}']:.4g} max={row[f'max_{side}']:.4g}{nonfinite})"
    )
