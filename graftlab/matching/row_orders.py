"""Rows in a different order, or fewer: finds by value which row of one side's batch is which of the other's.

Padded against packed sequences, sorted batches, micro-batches, and prefill with decode steps against one pass over all
tokens have the same rows in tensors of different sizes. Their order is found at one tap, such as the embeddings, and
then holds for all taps of the same calls.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from graftlab.base.text import counted
from graftlab.base.world import SIDES, Side
from graftlab.layouts.row_alignment import Index, aligned, inverted, sequence_lengths
from graftlab.matching.names import similarity, words_of
from graftlab.matching.recorded_taps import Fetch, RecordedTap
from graftlab.matching.sketch import limit_for
from graftlab.plan.pairs import TapCallName

# How many of the first taps of each call are compared, and how many of their likeliest pairs.
_FIRST = 24
_TRIED = 24
# At least this share of the target's rows must be found.
_ENOUGH = 0.6

# Rows that differ do so here, and to compare whole ones takes long.
_FIRST_NUMBERS = 64

CallKey = tuple[tuple[tuple[str, object], ...], int]
"""The tags that number a call, and its occurrence. All taps of one pass through a model have the same."""


@dataclass(frozen=True)
class RowOrder:
    """Which rows of a baseline call are the rows of a target call.

    ``index`` has, for each of the target's rows, the baseline's row, or -1. ``of`` and ``into`` are the dimensions that
    count the rows. ``found_at`` are the taps that show it.
    """

    baseline: CallKey
    target: CallKey
    of: tuple[int, ...]
    into: tuple[int, ...]
    index: Index
    found_at: tuple[str, str]

    @property
    def is_identity(self) -> bool:
        """Whether both calls have the same number of rows in the same order, so that one without a partner differs."""
        known = self.index >= 0
        return len(self.index) == math.prod(self.of) and bool((self.index == np.arange(len(known)))[known].all())

    @property
    def inverse(self) -> RowOrder:
        """The inverse order: the target's row for each of the baseline's rows."""
        index = inverted(self.index, math.prod(self.of))
        return RowOrder(self.target, self.baseline, self.into, self.of, index, self.found_at[::-1])

    @property
    def text(self) -> str:
        """A sentence on the numbers of rows, and their order."""
        known = self.index[self.index >= 0]
        total = math.prod(self.of)
        of, into = (tuple(extent for extent in dims if extent > 1) for dims in (self.of, self.into))
        batch = " x ".join(map(str, of or (1,)))
        own = "row is" if len(known) == 1 else "rows are"
        if len(into) > 1:
            own = f"rows of {' x '.join(map(str, into))} are"
        order = "" if bool((np.diff(known) > 0).all()) else " in another order"
        if len(known) == total:
            what = f"{len(known)} {own} the rows of {batch}{order}"
        elif len(of) > 1:
            what = f"{len(known)} {own} the unpadded rows of {batch}{order}"
        else:
            what = f"{len(known)} {own} {_span(known)} of {total}{order}"
        mine, theirs = self.found_at
        return f"{what}, found at {mine} and {theirs}"


def _span(known: Index) -> str:
    if len(known) == 1:
        return f"row {known[0]}"
    if len(known) == known[-1] - known[0] + 1:
        return f"rows {known[0]} to {known[-1]}"
    return f"{len(known)} rows"


# ---- calls ----------------------------------------------------------------------------------------------------------


def call_of(name: str) -> CallKey:
    """The call that a tap's name belongs to."""
    parsed = TapCallName.of(name)
    # Layers are parts of one call, and a model's inputs belong to its call.
    tags = tuple(
        (tag, value)
        for tag, value in (parsed.tags or {}).items()
        if "layers" not in words_of(tag) and (tag, value) != ("kind", "input")
    )
    return tags, parsed.occurrence or 0


def _by_call(taps: Sequence[RecordedTap]) -> dict[CallKey, list[RecordedTap]]:
    found: dict[CallKey, list[RecordedTap]] = defaultdict(list)
    for tap in taps:
        found[call_of(tap.name)].append(tap)
    return dict(found)


def row_orders(
    baseline: Sequence[RecordedTap], target: Sequence[RecordedTap], fetch: Mapping[Side, Fetch | None]
) -> list[RowOrder]:
    """The row orders of calls that have the other side's rows in a different order, or only some of them.

    There is none for calls with the same rows in the same order. One call may have the rows of several others.
    """
    mine, theirs = _by_call(baseline), _by_call(target)
    found = _contained(mine, theirs, fetch["baseline"], fetch["target"])
    if len(mine) != len(theirs) or not found:
        # A whole batch of the target has the rows of several calls of the baseline.
        turned = [each.inverse for each in _contained(theirs, mine, fetch["target"], fetch["baseline"])]
        found = max(found, turned, key=lambda orders: sum(int((each.index >= 0).sum()) for each in orders))
    return [each for each in found if not each.is_identity]


def unpaired_rows(
    orders: Sequence[RowOrder], taps: Mapping[Side, Sequence[RecordedTap]], fetch: Mapping[Side, Fetch | None]
) -> str:
    """A sentence if both sides have rows without a partner that are not padding, and so may be the same rows.

    All rows of padding have the same values at a tap such as the tokens or their embeddings.
    """
    counts: dict[Side, int] = {}
    for side in SIDES:
        calls = _by_call(taps[side])
        known: dict[CallKey, npt.NDArray[np.bool_]] = {}
        dims: dict[CallKey, tuple[int, ...]] = {}
        for order in orders:
            call, shape = (order.baseline, order.of) if side == "baseline" else (order.target, order.into)
            rows = known.setdefault(call, np.zeros(math.prod(shape), bool))
            dims[call] = shape
            rows[order.index[order.index >= 0] if side == "baseline" else np.flatnonzero(order.index >= 0)] = True
        counts[side] = sum(
            _count_without_padding(np.flatnonzero(~rows), dims[call], calls.get(call, ()), fetch[side])
            for call, rows in known.items()
        )
    mine, theirs = counts["baseline"], counts["target"]
    if not (mine and theirs):
        return ""
    return (
        f"{counted(theirs, 'row')} of the target and {counted(mine, 'row')} of the baseline have no partner and are "
        "not padding: they may be the same rows, computed differently before the first tap that shows them."
    )


def _count_without_padding(left: Index, dims: tuple[int, ...], taps: Sequence[RecordedTap], fetch: Fetch | None) -> int:
    if len(left) < 2:
        return len(left)
    for tap in taps[:_FIRST]:
        shape = tap.shape if not tap.dtype.is_floating_point else tap.shape[:-1]
        value = value_of(tap, fetch) if shape == dims else None
        if value is None:
            continue
        rows = value.reshape(math.prod(dims), -1)
        same = (rows == rows[int(left[0])]).all(dim=1).numpy()
        if same[left].all() and not same.all():
            return 0
    return len(left)


def _contained(
    mine: Mapping[CallKey, Sequence[RecordedTap]],
    theirs: Mapping[CallKey, Sequence[RecordedTap]],
    fetch_mine: Fetch | None,
    fetch_theirs: Fetch | None,
) -> list[RowOrder]:
    """The order of the rows of each call of ``theirs`` in one call of ``mine``."""
    found: list[RowOrder] = []
    place = -1
    for key, taps in theirs.items():
        best: tuple[float, RowOrder] | None = None
        # Try the call of the same number first.
        for other in sorted(mine, key=lambda each: each != key):
            each = _order_of((other, mine[other], fetch_mine), (key, taps, fetch_theirs), place)
            if each is not None and (best is None or each[0] > best[0]):
                best = each
            if best is not None and best[0] >= 1.0:
                break
        if best is not None:
            found.append(best[1])
            place = int(best[1].index[-1])
    return found


def value_of(tap: RecordedTap, fetch: Fetch | None) -> torch.Tensor | None:
    """The tensor of a tap, on the host."""
    value = tap.value if tap.value is not None else None if fetch is None else fetch(tap.name)
    return None if value is None else value.detach().cpu()


def has_distinct_rows(tap: RecordedTap, fetch: Fetch | None) -> bool:
    """Whether a tensor's rows differ from each other, at its first numbers; also if its values are unknown."""
    value = value_of(tap, fetch)
    if value is None or not value.numel():
        return True
    beginnings = (torch.view_as_real(value) if value.is_complex() else value).flatten(1)[:, :_FIRST_NUMBERS].double()
    return len(torch.unique(beginnings, dim=0)) == len(beginnings)


_FetchedCall = tuple[CallKey, Sequence[RecordedTap], "Fetch | None"]


def _order_of(baseline: _FetchedCall, target: _FetchedCall, place: int) -> tuple[float, RowOrder] | None:
    """The best row order that a pair of taps of two calls shows, and how distinct its rows are."""
    best: tuple[float, RowOrder] | None = None
    for mine, theirs in _anchors(baseline[1], target[1]):
        ours, other = value_of(mine, baseline[2]), value_of(theirs, target[2])
        if ours is None or other is None:
            continue
        ids = not ours.is_floating_point()
        outer, inner = (_rows_of(each, ids) for each in (ours, other))
        of, into = (tuple(each.shape if ids else each.shape[:-1]) or (1,) for each in (ours, other))
        limit = limit_for(mine.dtype, theirs.dtype)
        index, distinct = aligned(outer, inner, limit, place, sequence_lengths(of, into))
        if of == into:
            index = _own_places(index, outer, inner, limit)
        share = float((index >= 0).mean())
        if share < _ENOUGH:
            continue
        order = RowOrder(baseline[0], target[0], of, into, index, (mine.name, theirs.name))
        if order.is_identity and not ids:
            # Positions, for example, are equal for all sequences, and in such an order no other taps would match.
            continue
        score = share * (0.5 + 0.5 * distinct)
        if best is None or score > best[0] + 1e-9:
            best = (score, order)
        if score >= 1.0:
            break
    return best


def _own_places(index: Index, outer: npt.NDArray[np.float64], inner: npt.NDArray[np.float64], limit: float) -> Index:
    """The rows in their own places, if all that were found are equal there too, as rows of padding are."""
    apart, size = (np.linalg.norm(each, axis=1) for each in (inner - outer, outer))
    stays = apart <= limit * size
    return np.where(stays, np.arange(len(index)), -1) if stays[index >= 0].all() else index


def _anchors(
    baseline: Sequence[RecordedTap], target: Sequence[RecordedTap]
) -> Iterator[tuple[RecordedTap, RecordedTap]]:
    """Taps that may show the same rows, the likeliest pairs first."""

    def is_anchor(tap: RecordedTap) -> bool:
        floats = tap.dtype.is_floating_point
        return tap.sketch.telling and not tap.dtype.is_complex and (2 <= len(tap.shape) <= 3 if floats else True)

    ours = [tap for tap in baseline if is_anchor(tap)][:_FIRST]
    others = [tap for tap in target if is_anchor(tap)][:_FIRST]
    pairs = [
        (similarity(mine.name, theirs.name) + 0.5 * (mine.kind == theirs.kind != ""), -n - m, n, m)
        for n, mine in enumerate(ours)
        for m, theirs in enumerate(others)
        if mine.dtype.is_floating_point == theirs.dtype.is_floating_point
        and (not mine.dtype.is_floating_point or mine.shape[-1] == theirs.shape[-1])
    ]
    for _, _, n, m in sorted(pairs, reverse=True)[:_TRIED]:
        yield ours[n], others[m]


def _rows_of(value: torch.Tensor, ids: bool) -> npt.NDArray[np.float64]:
    found: npt.NDArray[np.float64] = value.reshape(-1, 1 if ids else value.shape[-1]).double().numpy()
    return found
