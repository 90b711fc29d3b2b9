"""The heat map of taps over steps, of what is kept of a run's rows while they come: without a frame of them."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from graftlab.base.tags import TapIdentity
from graftlab.plots import style
from graftlab.plots.cells import Cells, draw_cells, tap_label
from graftlab.plots.style import Array
from graftlab.rows.digest import ALONE, GRAFTED, RunDigest, Values
from graftlab.verdict.summary import floor_of_run


def draw_run(
    run: RunDigest, *, steps: range | None = None, noise_floor: float | None = None, ax: Axes | None = None, **_: Any
) -> Figure:
    """:func:`graftlab.plots.over_steps` of ``rel_l2``, of all steps of a run or of some."""
    figure, ax = style.new_axes(ax, 9.0, 6.0)
    style.label_axes(ax, "step", "tap, in execution order")
    values = run.values
    if steps is not None:
        chosen = (values.step >= steps.start) & (values.step < steps.stop)
        values = Values(*(column[chosen] for column in values))
    if not len(values.step):
        style.say(ax, "no rows to show: nothing was compared or grafted yet")
        return figure
    numbers, x = np.unique(values.step, return_inverse=True)
    taps = list(run.taps)
    # A tap is the same on all its receiving ranks, and each of its occurrences in a step has a line of its own.
    ids: dict[Any, int] = {}
    tap_of = np.array([ids.setdefault(tap.identity, len(ids)) for tap in taps])
    lines, at = np.unique(
        tap_of[values.tap].astype(np.int64) << 32 | values.occurrence.astype(np.int64), return_inverse=True
    )
    at, x = at.reshape(-1), x.reshape(-1)
    receivers = sorted({tap.receiver for tap in taps})
    receiver = np.array([receivers.index(tap.receiver) for tap in taps])[values.tap]
    # Where each first ran: as rows stand in a frame.
    in_order = np.lexsort((receiver, values.order, _shared_order(receiver, values), x))
    first = np.unique(at[in_order], return_index=True)[1]
    sequence = np.argsort(first, kind="stable")
    place = np.empty(len(lines), dtype=np.int64)
    place[sequence] = np.arange(len(lines))
    known = list(ids)
    names = [_name_of(known[line >> 32], line & 0xFFFFFFFF) for line in lines[sequence].tolist()]
    cells = Cells(
        names=names,
        steps=numbers.tolist(),
        y=place[at],
        x=x,
        value=np.abs(values.value),
        apart=np.abs(values.apart),
        measured=values.kind <= GRAFTED,
        grafted=values.kind == GRAFTED,
        differs=values.differ > 0,
    )
    return draw_cells(figure, ax, cells, "rel_l2", *floor_of_run(run, noise_floor))


def _shared_order(receiver: Array, values: Values) -> Array:
    """Twice the order of each row in its step, less the taps before it on its rank that the other side does not have.

    See :func:`graftlab.verdict.order.group`, which has a frame for it.
    """
    order: Array = 2 * values.order.astype(np.int64)
    alone = values.kind == ALONE
    if not alone.any():
        return order
    sequence = np.lexsort((values.order, values.step, receiver))
    counted = alone[sequence].astype(np.int64)
    begins = np.ones(len(sequence), dtype=bool)
    for column in (receiver, values.step):
        begins[1:] &= column[sequence][1:] == column[sequence][:-1]
    begins[1:] = ~begins[1:]
    before = np.cumsum(counted) - counted
    before -= np.maximum.accumulate(np.where(begins, before, 0))
    # A tap of one side alone comes before the shared one that would have its number.
    order[sequence] -= 2 * before + counted
    return order


def _name_of(tap: TapIdentity, occurrence: int) -> str:
    own = dict(tap.tags)
    return tap_label((tap.name, occurrence, *own.values(), tap.recompute_status), [*own, "recompute_status"])
