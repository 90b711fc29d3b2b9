"""One call of a tap and its result, and the row that both make."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from graftlab.base.tensor_bytes import DTYPE_NAMES
from graftlab.base.world import Place
from graftlab.diffs.measure import DiffStats
from graftlab.grafting.batch_rows import RowsOfTaps
from graftlab.plan.pairs import Pairing
from graftlab.plan.plan import Action
from graftlab.rows.schema import STATISTICS, Row, Status, statistics_of

_NO_STATISTICS = (None,) * len(STATISTICS)


class TapCall(NamedTuple):
    """One call of a tap that a filter matches: the contents of its row before anything is sent or received.

    ``began`` is when the tap was reached, by :func:`time.perf_counter`. ``tensor`` is the rank's own; None if there is
    none, or if only the row is needed. ``rows`` are those of its batch that the layout of its pair needs.
    """

    run: int
    step: int
    order: int
    tags: dict[str, Any]
    action: Action
    place: Place
    plan_version: int
    occurrence: int
    began: float
    tensor: torch.Tensor | None
    pairing: Pairing | None = None
    rows: RowsOfTaps | None = None

    @property
    def name(self) -> str:
        name: str = self.tags["name"]
        return name


class TapResult(NamedTuple):
    """The result of one call. ``result`` is the tensor to continue with; None keeps the model's value."""

    status: Status
    senders: list[int]
    stats: DiffStats | None = None
    transform: str | None = None
    aligned_by: str | None = None
    layout: str | None = None
    rows_matched: int | None = None
    rows_unmatched: int | None = None
    cast: str | None = None
    note: str | None = None
    error: str | None = None
    result: torch.Tensor | None = None


class PendingRow(NamedTuple):
    """The row of a tensor that was sent, which is reported only if no receiver requests the tensor."""

    call: TapCall
    shape: list[int]
    dtype: str
    seconds: float

    def row(self, status: Status | None = None, error: str | None = None) -> Row:
        if status is None:
            # With checkpointing one side repeats a forward pass, so the other side does not lack a tap.
            status = "recomputed" if self.call.tags["recompute_status"] == "recompute" else "unmatched"
        row = row_of(self.call, TapResult(status, [], error=error), self.seconds)
        return row._replace(shape=self.shape, dtype=self.dtype)


def row_of(call: TapCall, result: TapResult, seconds: float) -> Row:
    """Build the row of a call. All rows of a rank are built here."""
    run, step, order, tags, action, place, plan_version, occurrence, _, own, pairing, _ = call
    status, senders, stats, transform, aligned_by, layout, rows_matched, rows_unmatched, cast, note, error, _ = result
    rule = None if pairing is None else pairing.rule
    # A type checker cannot know the number of statistics.
    return Row(  # type: ignore[call-arg]
        run,
        step,
        order,
        tags["name"],
        tags,
        action.direction,
        place.side,
        place.rank,
        status,
        senders,
        None if own is None else list(own.shape),
        None if own is None else DTYPE_NAMES[own.dtype],
        *(_NO_STATISTICS if stats is None else statistics_of(stats)),
        tags["name"] if pairing is None else pairing.baseline_name,
        tags["name"] if pairing is None else pairing.target_name,
        transform,
        aligned_by,
        layout,
        None if rule is None else rule.matched_by,
        None if rule is None else rule.rel,
        rows_matched,
        rows_unmatched,
        cast,
        note,
        plan_version,
        occurrence,
        seconds,
        error,
    )
