"""Taps whose rows are in the same order on both sides, made from taps of batches in different orders."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from graftlab.base.tap_groups import is_output, kind_of
from graftlab.base.world import SIDES, Side
from graftlab.errors import LayoutError
from graftlab.layouts import Gather, Layout, Rearrange, Step
from graftlab.layouts.row_alignment import inverted
from graftlab.matching.pair import Pair
from graftlab.matching.proposal import Proposal
from graftlab.matching.recorded_taps import Fetch, RecordedTap
from graftlab.matching.row_orders import CallKey, RowOrder, call_of, unpaired_rows, value_of
from graftlab.matching.row_rules import with_row_rules
from graftlab.matching.wording import LETTERS

Sides = tuple[Sequence[RecordedTap], Sequence[RecordedTap]]


@dataclass(frozen=True)
class _Source:
    """The original of an aligned tap, and the steps from its tensor to the aligned one, and back."""

    name: str
    there: tuple[Step, ...]
    back: tuple[Step, ...]


@dataclass
class AlignedTaps:
    """Makes taps with common rows from both sides' taps, and turns pairs of those into pairs of the real ones.

    A call that has the rows of several calls of the other side becomes one tap for each of them.
    """

    orders: Sequence[RowOrder]
    fetch: Mapping[Side, Fetch | None]
    _real: Sides = ((), ())
    _sources: dict[Side, dict[str, _Source]] = field(default_factory=lambda: {"baseline": {}, "target": {}})

    def of(self, baseline: Sequence[RecordedTap], target: Sequence[RecordedTap]) -> Sides:
        """The taps of both sides, in their order."""
        self._real = baseline, target
        return self._side("baseline", baseline), self._side("target", target)

    def _side(self, side: Side, taps: Sequence[RecordedTap]) -> list[RecordedTap]:
        orders: dict[CallKey, list[tuple[int, RowOrder]]] = defaultdict(list)
        for number, order in enumerate(self.orders):
            orders[getattr(order, side)].append((number, order))
        shapes = {tap.name: tap.shape for tap in self._real[side == "baseline"]}
        made: list[tuple[int, RecordedTap]] = []
        sources: dict[str, _Source] = {}
        for tap in taps:
            of_call = orders.get(call_of(tap.name), [])
            if shapes.get(tap.name) == tap.shape and (is_output(tap.name) or kind_of(tap.tags) == "input"):
                # What a function returns or takes as a whole does not have the rows of one of its calls.
                of_call = [(number, order) for number, order in of_call if math.prod(order.of) == math.prod(order.into)]
            # Where all of the target's rows are known, they keep their order.
            needed = [
                (number, order) for number, order in of_call if side == "baseline" or bool((order.index < 0).any())
            ]
            aligned = [(number, self._aligned(tap, side, order)) for number, order in needed]
            found = [(number, each) for number, each in aligned if each is not None]
            for number, (source, value) in found:
                name = f"{tap.name}#{number}" if len(found) > 1 else tap.name
                sources[name] = source
                virtual = RecordedTap.of(name, value, kind=tap.kind)
                virtual.tags = tap.tags
                made.append((number, virtual))
            if not found:
                made.append((of_call[0][0] if of_call else 0, tap))
        self._sources[side] = sources
        made.sort(key=lambda each: each[0])
        return [replace(tap, order=place) for place, (_, tap) in enumerate(made)]

    def _aligned(self, tap: RecordedTap, side: Side, order: RowOrder) -> tuple[_Source, Tensor] | None:
        known = order.index >= 0
        everything = bool(known.all())
        dims = order.of if side == "baseline" else order.into
        place = _row_dims(tap.shape, dims)
        value = None if place is None else value_of(tap, self.fetch[side])
        if place is None or value is None:
            return None
        of = tuple(tap.shape[dim] for dim in place)
        rows = order.index[known] if side == "baseline" else np.flatnonzero(known)
        into = order.into if everything else (int(known.sum()),)
        moved, restored = _moved(len(tap.shape), place)
        there = (*moved, Gather.of_rows(of, rows.tolist(), into))
        back = (Gather.of_rows(into, inverted(rows, math.prod(of)).tolist(), of), *restored)
        return _Source(tap.name, there, back), Layout(there).local(value)

    # ---- back to the real taps --------------------------------------------------------------------------------------

    def real(self, pair: Pair) -> Pair:
        """The pair of real taps."""
        plain = _Source("", (), ())
        mine = self._sources["baseline"].get(pair.baseline, replace(plain, name=pair.baseline))
        theirs = self._sources["target"].get(pair.target, replace(plain, name=pair.target))
        first, last = (mine.there, theirs.back) if pair.whole == "baseline" else (theirs.there, mine.back)
        layout = Layout(_merged((*first, *pair.layout.steps, *last)))
        if self._changes_nothing(layout, mine.name, theirs.name):
            layout = Layout()
        return replace(pair, baseline=mine.name, target=theirs.name, layout=layout)

    def _changes_nothing(self, layout: Layout, baseline: str, target: str) -> bool:
        """Whether the layout's steps undo each other, so that each element stays where it is."""
        one, other = (
            next((tap for tap in taps if tap.name == name), None)
            for taps, name in zip(self._real, (baseline, target), strict=True)
        )
        if not layout.steps or one is None or other is None or one.shape != other.shape:
            return False
        places = torch.arange(math.prod(one.shape), device="cpu").reshape(one.shape)
        try:
            return not layout.lacks and torch.equal(layout.local(places), places)
        except LayoutError:
            return False

    def ruled(self, pairs: Sequence[Pair]) -> tuple[list[Pair], str]:
        """The pairs of real taps, with rules for any batch where those find the rows; and a sentence on the rules."""
        return with_row_rules([self.real(pair) for pair in pairs], self.orders, *self._real, self.fetch)

    def real_proposal(self, proposal: Proposal) -> Proposal:
        """The proposal for real taps, with rules where those find the rows, and a notice on each row order."""
        pairs, rule = self.ruled(proposal.pairs)
        notices = [each.text for each in self.orders]
        left: dict[Side, dict[str, str]] = {}
        for side, unmatched in zip(SIDES, (proposal.unmatched_baseline, proposal.unmatched_target), strict=True):
            have = {getattr(pair, side) for pair in pairs}
            sources = self._sources[side]
            real = {(sources[name].name if name in sources else name): why for name, why in unmatched.items()}
            left[side] = {name: why for name, why in real.items() if name not in have}
        return replace(
            proposal,
            pairs=tuple(pairs),
            unmatched_baseline=left["baseline"],
            unmatched_target=left["target"],
            unpaired_rows=unpaired_rows(self.orders, dict(zip(SIDES, self._real, strict=True)), self.fetch),
            notices=(*proposal.notices, *notices[:1], *([rule] if rule else []), *notices[1:]),
            order={"baseline": [tap.name for tap in self._real[0]], "target": [tap.name for tap in self._real[1]]},
        )


def _row_dims(shape: Sequence[int], dims: Sequence[int]) -> tuple[int, ...] | None:
    """The dimensions of a tensor along which these rows lie, outermost first; None if it has no such dimensions."""
    places: list[int] = []
    for extent in dims:
        found = next(
            (place for place in range(places[-1] + 1 if places else 0, len(shape)) if shape[place] == extent), None
        )
        if found is None:
            break
        places.append(found)
    if len(places) == len(dims):
        return tuple(places)
    total = math.prod(dims)
    if total in shape:
        return (tuple(shape).index(total),)
    if len(dims) == 2 and dims[1] in shape and dims[0] in shape[tuple(shape).index(dims[1]) + 1 :]:
        # Tokens before the batch.
        second = tuple(shape).index(dims[1])
        return (second + 1 + tuple(shape[second + 1 :]).index(dims[0]), second)
    return None


def _moved(count: int, place: Sequence[int]) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """The rearrangements that bring these dimensions to the front, and that bring them back."""
    order = [*place, *(dim for dim in range(count) if dim not in place)]
    if order == list(range(count)):
        return (), ()
    before, after = " ".join(LETTERS[:count]), " ".join(LETTERS[dim] for dim in order)
    return (Rearrange(f"{before} -> {after}"),), (Rearrange(f"{after} -> {before}"),)


def _merged(steps: Sequence[Step]) -> tuple[Step, ...]:
    """The steps, with two gathers that follow each other as one."""
    found: list[Step] = []
    for step in steps:
        last = found[-1] if found else None
        if isinstance(step, Gather) and isinstance(last, Gather) and last.into == step.of:
            rows = [int(last.rows[row]) if row >= 0 else -1 for row in step.rows.tolist()]
            found[-1] = Gather.of_rows(last.of, rows, step.into)
        else:
            found.append(step)
    return tuple(found)
