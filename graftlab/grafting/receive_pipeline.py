"""The receive pipeline, from one receipt to the row: transform, measure, keep, overwrite, log."""

from __future__ import annotations

import logging
import reprlib
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from graftlab.base.quantisation import stored_as
from graftlab.base.tensor_bytes import DTYPE_NAMES
from graftlab.diffs.measure import DiffStats, measure, measure_and_overwrite
from graftlab.errors import TransformError
from graftlab.exchange.contract import Receipt
from graftlab.grafting.batch_rows import for_batch
from graftlab.grafting.kept import KeptPairs
from graftlab.grafting.overwrite import overwrite, replacement_for
from graftlab.grafting.tap_rows import TapCall, TapResult
from graftlab.grafting.tensors import SentExtras
from graftlab.layouts import Layout, RankLayout
from graftlab.plan.pairs import PairRule
from graftlab.plan.plan import GraftPlan
from graftlab.transforms import (
    GraftTransformInput,
    Outcome,
    Transform,
    TransformSpec,
    compare,
    run_transform,
    user_traceback,
)

logger = logging.getLogger(__name__)

# The most log lines that are written together. A process that is killed loses the lines not yet written.
_LINES_AT_ONCE = 64


class ReceivePipeline:
    """Applies the plan in force to each receipt. ``warn_once(name, what)`` shows a warning about a tap."""

    def __init__(self, kept: KeptPairs, warn_once: Callable[[str, str], None]) -> None:
        self._kept = kept
        self._warn_once = warn_once
        self._transforms: list[tuple[str, Transform]] = []
        self._grafted: list[_GraftLogEntry] = []

    def adopt(self, plan: GraftPlan) -> None:
        """Put this plan's transforms in force."""
        self._transforms = [(spec.label, _load(spec)) for spec in plan.transforms]

    def take_named(
        self,
        call: TapCall,
        extras: Any,
        receipt: Receipt,
        replaced: torch.Tensor | None,
        layout: RankLayout | None,
        reduced: torch.Tensor | str | None,
    ) -> tuple[TapCall, TapResult]:
        """Like :meth:`take`; also returns the call with the sender's own name of the tap, if the sender passed it."""
        name = None
        for each in receipt.contributions:
            if type(each.extras) is SentExtras and each.extras.name:
                name = each.extras.name
                break
        pairing = call.pairing
        if name is not None and pairing is not None and pairing.rule is None:
            if call.place.side == "target":
                pairing = replace(pairing, baseline_name=name)
            else:
                pairing = replace(pairing, target_name=name)
            call = call._replace(pairing=pairing)
        return call, self.take(call, extras, receipt, replaced, layout, reduced)

    def take(
        self,
        call: TapCall,
        extras: Any,
        receipt: Receipt,
        replaced: torch.Tensor | None = None,
        layout: RankLayout | None = None,
        reduced: torch.Tensor | str | None = None,
    ) -> TapResult:
        """Process a receipt for a call of this rank. The caller releases the receipt.

        A graft is written into the call's tensor; with ``replaced``, the model's value, it makes a new tensor instead.
        ``layout`` is the layout of the call's tensor on the ranks, ``reduced`` the tensor with its partial sums added
        up, or the reason why that is impossible.
        """
        if not receipt.contributions:
            return TapResult("timeout" if receipt.timed_out else "missing", [], error=_absent(receipt))
        if receipt.unreadable:
            return _unreadable(call, receipt)
        is_plain = call.action.transform is None and layout is None and stored_as(extras) is None
        theirs = _sent_as_it_is(call, receipt) if is_plain else None
        if theirs is None:
            return self._take_transformed(call, _input(call, extras, receipt, layout, reduced), receipt, replaced)
        # The usual case: no conversion, and no user code that could write into the sender's memory.
        mine = call.tensor
        assert mine is not None
        baseline, target = (theirs, mine) if call.action.direction == "b2t" else (mine, theirs)
        try:
            if call.action.graft and not call.action.keep and replaced is None and not mine.is_inference():
                stats_of_both = measure_and_overwrite(baseline, target, own=mine)
                if stats_of_both is not None:
                    return self._grafted_as(call, theirs, stats_of_both, receipt, None, mine)
            stats = measure(baseline, target)
        except Exception as error:
            return self._transform_failed(call, _input(call, extras, receipt, layout, reduced), None, None, error)
        note = None
        if call.action.keep:
            note = self._kept.add(_input(call, extras, receipt, layout, reduced), theirs, call.occurrence)
        return self._done(call, theirs, stats, receipt, note, replaced)

    def _take_transformed(
        self, call: TapCall, graft_input: GraftTransformInput, receipt: Receipt, replaced: torch.Tensor | None
    ) -> TapResult:
        note = _absent(receipt) if receipt.absent else None
        which = call.action.transform
        label, transform = (None, None) if which is None else self._transforms[which]
        try:
            outcome = run_transform(transform, graft_input)
            stats = compare(outcome, graft_input)
            if call.action.graft and outcome.graft_refused:
                raise TransformError(outcome.graft_refused)
        except (Exception, SystemExit) as error:
            return self._transform_failed(call, graft_input, label, note, error)
        matched, unmatched = None, None
        note = _joined(note, outcome.note)
        if outcome.rows is not None or outcome.rows_matched is not None:
            matched, unmatched = outcome.rows_matched, outcome.rows_unmatched
            if matched is None and outcome.rows is not None:
                matched = len(outcome.rows[0])
            if unmatched and not matched:
                return _no_matching_rows(graft_input, outcome, label, note)
        if call.action.keep:
            note = _joined(note, self._keep(call, graft_input, outcome))
        if outcome.compare_only:
            call = call._replace(action=replace(call.action, graft=False))
        if call.action.graft:
            note = _joined(note, outcome.caveat)
        done = self._done(call, outcome.value, stats, receipt, note, replaced)
        return done._replace(
            transform=label,
            aligned_by=outcome.aligned_by,
            layout=outcome.layout,
            rows_matched=matched,
            rows_unmatched=unmatched,
            cast=outcome.cast,
        )

    def _done(
        self,
        call: TapCall,
        theirs: torch.Tensor,
        stats: DiffStats,
        receipt: Receipt,
        note: str | None,
        replaced: torch.Tensor | None,
    ) -> TapResult:
        """Finish a measured call: overwrite its tensor, if the plan grafts it."""
        if not call.action.graft:
            return TapResult("compared", _senders(receipt), stats, note=note)
        result, overwrite_note = self._overwrite(call, theirs, replaced)
        return self._grafted_as(call, theirs, stats, receipt, _joined(note, overwrite_note), result)

    def _grafted_as(
        self,
        call: TapCall,
        theirs: torch.Tensor,
        stats: DiffStats,
        receipt: Receipt,
        note: str | None,
        result: torch.Tensor,
    ) -> TapResult:
        senders = _senders(receipt)
        if logger.isEnabledFor(logging.INFO):
            extras = [_extras(contribution.extras) for contribution in receipt.contributions]
            self._log(call, theirs, stats, senders, extras if any(each is not None for each in extras) else None)
        return TapResult("grafted", senders, stats, note=note, result=result)

    def note_sent(self, call: TapCall, extras: Any) -> None:
        """Log, with the next grafts, that this rank sent its tensor to be grafted on the other side."""
        if logger.isEnabledFor(logging.INFO):
            self._log(call, None, None, [], extras)

    def _log(
        self, call: TapCall, theirs: torch.Tensor | None, stats: DiffStats | None, senders: list[int], extras: Any
    ) -> None:
        ours = call.tensor
        assert ours is not None
        place, direction = f"{call.place.side}[{call.place.rank}]", call.action.direction
        told = "" if extras is None else f"; extras={_brief(extras)}"
        others = None if theirs is None else _kind(theirs)
        self._grafted.append(
            _GraftLogEntry(
                time.time(), place, direction, call.name, call.step, _kind(ours), others, stats, senders, told
            )
        )
        if len(self._grafted) >= _LINES_AT_ONCE:
            self.log_grafts()

    def log_grafts(self) -> None:
        """Log the grafts since the last call, and the tensors sent for grafts on the other side.

        Called at the end of each step; rows are reported immediately.

        Logging in the middle of a model costs three times as much as logging in a batch.
        """
        grafted, self._grafted = self._grafted, []
        for each in grafted:
            # logger.info without its stack inspection, which would cost more than everything else.
            record = logger.makeRecord(logger.name, logging.INFO, __file__, 0, each.line(), (), None, "log_grafts")
            record.created, record.msecs = each.when, each.when % 1 * 1000
            logger.handle(record)

    def _keep(self, call: TapCall, graft_input: GraftTransformInput, outcome: Outcome) -> str | None:
        if outcome.measured is None:
            return self._kept.add(graft_input, outcome.value, call.occurrence)
        theirs, mine = outcome.measured
        return self._kept.add(replace(graft_input, target=mine), theirs, call.occurrence)

    def _transform_failed(
        self,
        call: TapCall,
        graft_input: GraftTransformInput,
        transform: str | None,
        note: str | None,
        error: BaseException,
    ) -> TapResult:
        text = f"{type(error).__name__}: {error}\n\n{user_traceback(error)}"
        logger.error("%s: the transform failed at tap %r: %s", call.place.label, call.name, text)
        if call.action.keep:
            # Kept as input for trying a better transform.
            note = _joined(note, self._kept.add(graft_input, None, call.occurrence))
        return TapResult("failed", graft_input.senders, transform=transform, note=note, error=text)

    def _overwrite(
        self, call: TapCall, value: torch.Tensor, replaced: torch.Tensor | None
    ) -> tuple[torch.Tensor, str | None]:
        if replaced is not None:
            return replacement_for(replaced, value), None
        assert call.tensor is not None
        result, note = overwrite(call.tensor, value)
        if note:
            self._warn_once(call.name, note)
        return result, note


def _load(spec: TransformSpec) -> Transform:
    """Load a transform of the plan. If it loads in the notebook but not here, each tap fails, not the whole run."""
    try:
        return spec.load()
    except (Exception, SystemExit) as error:
        cause = error

        def fails(graft_input: GraftTransformInput) -> torch.Tensor:
            raise TransformError(f"the plan's transform {spec.label} cannot be loaded on this rank: {cause}") from cause

        return fails


def _sent_as_it_is(call: TapCall, receipt: Receipt) -> torch.Tensor | None:
    """Return the tensor that the default transform would pass on unchanged; None if it would convert or add a note."""
    own, place, pairing = call.tensor, call.place, call.pairing
    assert own is not None
    contributions, senders = receipt.contributions, place.other_world_size
    if len(contributions) != senders or senders not in (1, place.world_size):
        return None
    if pairing is not None and pairing.rule is not None:
        return None
    shape = own.shape
    for contribution in contributions:
        sent = contribution.extras
        if contribution.tensor.shape != shape or _layout(sent) is not None or stored_as(_extras(sent)) is not None:
            return None
    theirs = contributions[place.rank if senders > 1 else 0].tensor
    return theirs if theirs.dtype == own.dtype and theirs.device == own.device else None


def _input(
    call: TapCall,
    extras: Any,
    receipt: Receipt,
    layout: RankLayout | None,
    reduced: torch.Tensor | str | None,
) -> GraftTransformInput:
    assert call.action.direction is not None
    assert call.tensor is not None
    pairing = call.pairing
    rule = None if pairing is None else pairing.rule
    tags = call.tags
    if pairing is not None:
        tags = {**tags, "baseline_name": pairing.baseline_name, "target_name": pairing.target_name}
    return GraftTransformInput(
        tags=tags,
        received_list=[contribution.tensor for contribution in receipt.contributions],
        received_extras_list=[_extras(contribution.extras) for contribution in receipt.contributions],
        target=call.tensor.detach(),
        direction=call.action.direction,
        recv_rank=call.place.rank,
        recv_world_size=call.place.world_size,
        senders=_senders(receipt),
        send_world_size=call.place.other_world_size,
        target_extras=extras,
        layout=layout,
        received_layouts=[_layout(contribution.extras) for contribution in receipt.contributions],
        pair=None if rule is None or rule.layout == "same" else _for_batch(rule, call, receipt),
        whole="target" if rule is not None and rule.whole == call.place.side else "received",
        target_reduced=reduced,
    )


def _for_batch(rule: PairRule, call: TapCall, receipt: Receipt) -> Layout:
    """Return the layout of a pair, with the rows that both sides' taps have shown in this call."""
    mine = call.rows
    if mine is None:
        return rule.parsed
    sent = (each.extras.rows for each in receipt.contributions if isinstance(each.extras, SentExtras))
    theirs = next(filter(None, sent), {})
    return for_batch(rule.parsed, *((mine, theirs) if rule.whole == call.place.side else (theirs, mine)))


def _extras(sent: Any) -> Any:
    return sent.extras if isinstance(sent, SentExtras) else sent


def _layout(sent: Any) -> RankLayout | None:
    return sent.layout if isinstance(sent, SentExtras) else None


def _senders(receipt: Receipt) -> list[int]:
    return [contribution.rank for contribution in receipt.contributions]


def _absent(receipt: Receipt) -> str | None:
    """Return the reasons why some senders' contributions are missing."""
    return "; ".join(receipt.absent.values()) or None


def _joined(*notes: str | None) -> str | None:
    return "; ".join(filter(None, notes)) or None


def _unreadable(call: TapCall, receipt: Receipt) -> TapResult:
    error = "; ".join(receipt.unreadable.values())
    logger.error("%s: tap %r failed: %s", call.place.label, call.name, error)
    return TapResult("failed", _senders(receipt), note=_absent(receipt), error=error)


def _no_matching_rows(
    graft_input: GraftTransformInput, outcome: Outcome, transform: str | None, note: str | None
) -> TapResult:
    """Return the result for rows that are paired by identity, if no sender has any of them: nothing was measured."""
    return TapResult(
        "missing",
        graft_input.senders,
        transform=transform,
        aligned_by=outcome.aligned_by,
        layout=outcome.layout,
        rows_matched=0,
        rows_unmatched=outcome.rows_unmatched,
        note=note,
        error="no sender has any row of this batch",
    )


_of_side = {
    side: attrgetter(*(f"{what}_{side}" for what in ("mean", "std", "min", "max", "nonfinite")))
    for side in ("baseline", "target")
}


class _GraftLogEntry(NamedTuple):
    """The data of a graft's log line, without the tensors."""

    when: float
    place: str
    direction: str | None
    name: str
    step: int
    ours: _Kind
    theirs: _Kind | None
    stats: DiffStats | None
    senders: list[int]
    extras: str

    def line(self) -> str:
        stats = self.stats
        if stats is None or self.theirs is None:
            dtype, shape, device = self.ours
            return (
                f"{self.place} sent {self.direction} at tap {self.name!r} step {self.step}: "
                f"{DTYPE_NAMES[dtype]}{list(shape)} {device}{self.extras}"
            )
        ours, others = ("target", "baseline") if self.direction == "b2t" else ("baseline", "target")
        return (
            f"{self.place} grafted {self.direction} at tap {self.name!r} step {self.step}: "
            f"{_described(self.ours, stats, ours)} overridden by {_described(self.theirs, stats, others)} from ranks "
            f"{self.senders}; rel_diff={stats.rel_diff:.3e} max_abs={stats.max_abs:.3e} mean_abs={stats.mean_abs:.3e}"
            f"{self.extras}"
        )


_Kind = tuple[torch.dtype, tuple[int, ...], str]


def _brief(extras: Any) -> str:
    """Describe extras on one line: tensors by dtype and shape, other values shortened."""
    if isinstance(extras, torch.Tensor):
        return f"{DTYPE_NAMES.get(extras.dtype, extras.dtype)}{list(extras.shape)}"
    if isinstance(extras, Mapping):
        return "{" + ", ".join(f"{key!r}: {_brief(value)}" for key, value in extras.items()) + "}"
    if isinstance(extras, list | tuple):
        return "[" + ", ".join(map(_brief, extras)) + "]"
    return reprlib.repr(extras)


def _kind(tensor: torch.Tensor) -> _Kind:
    return tensor.dtype, tensor.shape, "cpu" if tensor.is_cpu else str(tensor.device)


def _described(kind: _Kind, stats: DiffStats, side: str) -> str:
    """Describe shape, dtype, device and statistics for the log."""
    mean, std, low, high, nonfinite = _of_side[side](stats)
    dtype, shape, device = kind
    counted = f" nonfinite={nonfinite}" if nonfinite else ""
    numbers = f"(mean={mean:.4g} std={std:.4g} min={low:.4g} max={high:.4g}{counted})"
    return f"{DTYPE_NAMES[dtype]}{list(shape)} {device} {numbers}"
