"""Rules for rows in a different order: the taps by which every batch's rows are found, checked on this batch."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from graftlab.base.world import SIDES, Side
from graftlab.errors import LayoutError
from graftlab.layouts import Gather, Layout, Rows, Step
from graftlab.layouts.row_alignment import FoundRows, ShownRows, rows_between
from graftlab.matching.pair import Pair
from graftlab.matching.recorded_taps import Fetch, RecordedTap
from graftlab.matching.row_orders import CallKey, RowOrder, call_of, value_of
from graftlab.matching.search import applied
from graftlab.plan.pairs import TapCallName

# How many taps of a side are tried: the first ones, and those that have shown the order.
_TRIED = 6
# If a rule takes the same rows, values differ by as much as by the list of rows.
_ROUNDING = 1e-7

_Family = tuple[str, str, Side]


@dataclass(frozen=True)
class _ShownCall:
    """The rows that one call of a tap has shown, and the call's place among its side's taps."""

    order: int
    call: CallKey
    rows: ShownRows


@dataclass(frozen=True)
class _RowTaps:
    """Two taps, one of each side, that together show the rows of every call."""

    baseline: str
    target: str
    shown: Mapping[Side, Sequence[_ShownCall]]

    def found(self, mine: RecordedTap, theirs: RecordedTap) -> FoundRows | None:
        """The target's rows in the baseline, for a call of each side's tap; None if either has yet to show its rows."""
        shown = (
            self.until(side, tap.order, call_of(tap.name)) for side, tap in zip(SIDES, (mine, theirs), strict=True)
        )
        of, into = shown
        return rows_between(of, into) if of and into else None

    def until(self, side: Side, order: int, call: CallKey) -> list[ShownRows]:
        """The rows that one side's tap has shown by this place in the execution order, in this call."""
        tags, _ = call
        return [
            each.rows for each in self.shown[side] if each.order <= order and all(tag in tags for tag in each.call[0])
        ]


def with_row_rules(
    pairs: Sequence[Pair],
    orders: Sequence[RowOrder],
    baseline: Sequence[RecordedTap],
    target: Sequence[RecordedTap],
    fetch: Mapping[Side, Fetch | None],
) -> tuple[list[Pair], str]:
    """The pairs with rules instead of lists of rows, where a rule gives the same rows; and a sentence on them."""
    taps: dict[Side, dict[str, RecordedTap]] = {
        "baseline": {tap.name: tap for tap in baseline},
        "target": {tap.name: tap for tap in target},
    }
    families: dict[_Family, list[Pair]] = defaultdict(list)
    for pair in pairs:
        families[_family(pair)].append(pair)
    listed = {family for family, own in families.items() if any(_gathers(pair.layout) for pair in own)}
    made: dict[int, Pair] = {}
    used: dict[tuple[str, str], None] = {}
    row_taps = list(_row_taps(orders, taps, fetch))
    for family in listed:
        for each in row_taps:
            ruled = [_ruled(pair, each, taps) for pair in families[family]]
            if all(_gathers(pair.layout) == 0 for pair in ruled):
                made.update({id(pair): new for pair, new in zip(families[family], ruled, strict=True)})
                used[each.baseline, each.target] = None
                break
    result = [made.get(id(pair), pair) for pair in pairs]
    left = sum(1 for pair in result if _gathers(pair.layout))
    notices = []
    if used:
        names = " or ".join(f"{mine} and {theirs}" for mine, theirs in used)
        notices.append(f"in every batch the rows are found again by {names}")
    if left:
        notices.append(f"{left} of {len(result)} pairs hold only for batches of these lengths")
    return result, "; ".join(notices)


def _family(pair: Pair) -> _Family:
    return TapCallName.of(pair.baseline).name, TapCallName.of(pair.target).name, pair.whole


def _gathers(layout: Layout) -> int:
    return sum(isinstance(step, Gather) for step in layout.steps)


def _row_taps(
    orders: Sequence[RowOrder], taps: Mapping[Side, Mapping[str, RecordedTap]], fetch: Mapping[Side, Fetch | None]
) -> Iterator[_RowTaps]:
    """Taps that show all these orders: token ids first, then the earliest."""
    calls: dict[Side, dict[str, list[RecordedTap]]] = {"baseline": defaultdict(list), "target": defaultdict(list)}
    for side, named in taps.items():
        for tap in named.values():
            if tap.dtype.is_floating_point <= (len(tap.shape) > 1) and not tap.dtype.is_complex and tap.shape:
                calls[side][TapCallName.of(tap.name).name].append(tap)
    found_at: dict[Side, set[str]] = {
        "baseline": {TapCallName.of(order.found_at[0]).name for order in orders},
        "target": {TapCallName.of(order.found_at[1]).name for order in orders},
    }
    chosen: dict[Side, list[str]] = {}
    for side, of_side in calls.items():
        telling = {name: own[0].dtype.is_floating_point for name, own in of_side.items() if own[0].sketch.telling}
        ids = [name for name, is_float in telling.items() if not is_float]
        floats = [name for name, is_float in telling.items() if is_float]
        chosen[side] = list(
            dict.fromkeys([*ids[:_TRIED], *floats[:_TRIED], *(n for n in floats if n in found_at[side])])
        )
    shown: dict[tuple[Side, str], list[_ShownCall]] = {}
    for mine in chosen["baseline"]:
        for theirs in chosen["target"]:
            one, other = calls["baseline"][mine][0], calls["target"][theirs][0]
            if one.dtype.is_floating_point != other.dtype.is_floating_point:
                continue
            if one.dtype.is_floating_point and one.shape[-1] != other.shape[-1]:
                continue
            for side, name in (("baseline", mine), ("target", theirs)):
                if (side, name) not in shown:
                    shown[side, name] = list(_shown(calls[side][name], fetch[side]))
            each = _RowTaps(mine, theirs, {"baseline": shown["baseline", mine], "target": shown["target", theirs]})
            if all(_shows(each, order) for order in orders):
                yield each


def _shown(taps: Sequence[RecordedTap], fetch: Fetch | None) -> Iterator[_ShownCall]:
    for tap in taps:
        value = value_of(tap, fetch)
        if value is not None:
            yield _ShownCall(tap.order, call_of(tap.name), ShownRows.of(value))


def _shows(taps: _RowTaps, order: RowOrder) -> bool:
    shown: list[list[ShownRows]] = []
    for side, call in zip(SIDES, (order.baseline, order.target), strict=True):
        own = next((each for each in taps.shown[side] if each.call == call), None)
        if own is None:
            return False
        shown.append(taps.until(side, own.order, call))
    found = rows_between(*shown)
    return len(found.index) == len(order.index) and bool((found.index == order.index).all())


def _ruled(pair: Pair, row_taps: _RowTaps, taps: Mapping[Side, Mapping[str, RecordedTap]]) -> Pair:
    """The pair by the rule of these taps, or unchanged if the rule gives different rows."""
    mine, theirs = taps["baseline"][pair.baseline], taps["target"][pair.target]
    found = row_taps.found(mine, theirs)
    if found is None:
        return pair
    of, into, names = found.of, found.into, (row_taps.baseline, row_taps.target)
    if pair.whole == "target":
        found, names = found.inverse, names[::-1]
        of, into = into, of
    ways = _ways(pair.layout.steps, found)
    outer, inner = (mine, theirs) if pair.whole == "baseline" else (theirs, mine)
    for before, flat, after in ways:
        rows = Rows(*names, flat=flat)
        bound = Layout((*before, rows.with_found(found), *after))
        if _fits(bound, pair, outer, inner):
            return replace(pair, layout=Layout((*before, rows, *after)))
    return pair


_Way = tuple[tuple[Step, ...], bool, tuple[Step, ...]]


def _ways(steps: tuple[Step, ...], found: FoundRows) -> Iterator[_Way]:
    """The steps before and after a rule that replaces gathers of the same rows, and whether the rule is flat."""
    places = [number for number, step in enumerate(steps) if isinstance(step, Gather)]
    if not places:
        if len(found.index) == math.prod(found.of) and bool((found.index == np.arange(len(found.index))).all()):
            yield (), False, steps
        return
    first, last = steps[places[0]], steps[places[-1]]
    assert isinstance(first, Gather)
    assert isinstance(last, Gather)
    index = first.rows
    if len(places) == 2:
        # First from the whole to the rows that both have, then from those to the places in the part.
        index = torch.where(last.rows >= 0, first.rows[last.rows.clamp(min=0)], -1)
    if len(places) > 2 or index.tolist() != found.index.tolist() or math.prod(first.of) != math.prod(found.of):
        return
    before, between, after = steps[: places[0]], steps[places[0] + 1 : places[-1]], steps[places[-1] + 1 :]
    flat = last.into != found.into
    # Between the two, the steps' dimensions come after one dimension of rows.
    if len(first.of) == 1 or not between:
        yield (*before, *between), flat, after
    if len(last.into) == 1 and between:
        yield before, flat, (*between, *after)


def _fits(bound: Layout, pair: Pair, outer: RecordedTap, inner: RecordedTap) -> bool:
    """Whether the rule takes the same values as the list of rows."""
    try:
        if tuple(bound.local(torch.empty(outer.shape, device="meta")).shape) != inner.shape:
            return False
    except LayoutError:
        return False
    rel = applied(bound, outer, inner)
    if rel is None or pair.rel is None or rel <= max(2 * pair.rel, _ROUNDING):
        return True
    # The values may be of a run with a graft that was tried in vain, and then neither layout shows equal ones.
    places = torch.arange(1, 1 + math.prod(outer.shape), device="cpu").reshape(outer.shape)
    return torch.equal(bound.local(places), pair.layout.local(places))
