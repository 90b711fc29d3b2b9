"""Candidates for the first taps without a partner, to be tried by a graft.

No rule helps with a fault that every layer has, since no layer is right. Then likely partners are grafted one by one,
and the values of later taps show which was right.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np
import torch

from graftlab.errors import LayoutError
from graftlab.layouts import Layout
from graftlab.matching.names import place_of, similarity
from graftlab.matching.pair import Pair
from graftlab.matching.proposal import Proposal
from graftlab.matching.recorded_taps import Fetch, RecordedTap
from graftlab.matching.row_orders import value_of
from graftlab.matching.sketch import flat_values
from graftlab.matching.strides import Strides
from graftlab.matching.wording import layout_of

# The first tap without a partner is the fault, unless taps that only one side has come before it. At most this many
# places in a model are tried, in however many layers, and this many taps.
FIRST = 5
MOST = 60
# The number of partners to try for each.
OPTIONS = 3
# Partners are sought among this many taps around the expected place.
AROUND = 40

NOTE = "a likely partner; once it is grafted, later taps match"


def suspects(
    baseline: Sequence[RecordedTap],
    target: Sequence[RecordedTap],
    proposal: Proposal,
    trusted: Sequence[Pair] = (),
    in_vain: Collection[tuple[str, str]] = (),
    fetch_baseline: Fetch | None = None,
    fetch_target: Fetch | None = None,
) -> Iterator[Pair]:
    """Pairs to try for the target's first taps without a partner, the likeliest of each first.

    Pairs like the ``trusted`` ones are tried first, and pairs like those tried ``in_vain`` last.
    """
    partners = {pair.target: pair for pair in proposal.pairs if pair.sureness != "guess"}
    taken = {pair.baseline for pair in partners.values()}
    left = [tap for tap in baseline if tap.name not in taken and not tap.sketch.constant]
    places = {tap.name: tap.order for tap in baseline}
    ways = _layouts_to_try(proposal)
    known = Counter((place_of(baseline), place_of(target)) for baseline, target in in_vain)
    known.subtract((place_of(pair.baseline), place_of(pair.target)) for pair in trusted)
    ranked: list[tuple[int, int, Pair]] = []
    first: Counter[str] = Counter()
    for tap in target:
        if tap.name in partners or tap.sketch.constant:
            continue
        if first.total() == MOST:
            break
        if len(first) == FIRST and place_of(tap.name) not in first:
            continue
        before = max(
            (other.order for other in target if other.name in partners and other.order < tap.order), default=-1
        )
        anchors = [places[partners[other.name].baseline] for other in target if other.order == before]
        at = anchors[0] + (tap.order - before) if anchors else tap.order
        near = sorted((other for other in left if _size(other) == _size(tap)), key=lambda other: abs(other.order - at))[
            :AROUND
        ]
        mine = value_of(tap, fetch_target)
        scored = []
        for other in near:
            theirs = value_of(other, fetch_baseline)
            if mine is None or theirs is None:
                continue
            cosine, layout = max(
                ((_cosine(layout, theirs, mine), layout) for layout in _layouts(other, tap, ways)),
                key=lambda each: each[0],
            )
            if cosine > -math.inf:
                score = (
                    cosine + 0.5 * similarity(other.name, tap.name) + 0.2 * (bool(tap.kind) and tap.kind == other.kind)
                )
                scored.append((score - 0.02 * abs(other.order - at), other, layout))
        scored.sort(key=lambda each: -each[0])
        options = [
            (rank + OPTIONS * known[place_of(other.name), place_of(tap.name)], tap.order, other, layout)
            for rank, (_, other, layout) in enumerate(scored[:OPTIONS])
            if (other.name, tap.name) not in in_vain
        ]
        if options:
            first[place_of(tap.name)] += 1
        for rank, order, other, layout in options:
            pair = Pair(other.name, tap.name, layout, "baseline", "guess", None, "by similar values")
            ranked.append((rank, order, pair))
    ranked.sort(key=lambda each: each[:2])
    yield from (pair for _, _, pair in ranked)


def _size(tap: RecordedTap) -> tuple[int, bool]:
    """The number of elements, and whether they are complex: a layout changes neither."""
    return math.prod(tap.shape), tap.dtype.is_complex


def _layouts_to_try(proposal: Proposal) -> list[Layout]:
    """The size-preserving layouts in which other taps match."""
    found = {
        pair.layout.text: pair.layout
        for pair in proposal.graftable
        if pair.whole == "baseline" and not pair.layout.leaves_out
    }
    return list(found.values())


def _layouts(other: RecordedTap, tap: RecordedTap, ways: Sequence[Layout]) -> Iterator[Layout]:
    plain = Layout()
    if other.shape != tap.shape:
        plain = layout_of(Strides(0, (math.prod(tap.shape),), (1,)), other.shape, tap.shape)
    yield plain
    for layout in ways:
        if layout.text != plain.text:
            yield layout


def _cosine(layout: Layout, outer: torch.Tensor, inner: torch.Tensor) -> float:
    try:
        taken = layout.local(outer)
    except LayoutError:
        return -math.inf
    if taken.shape != inner.shape:
        return -math.inf
    one, other = flat_values(taken), flat_values(inner)
    finite = np.isfinite(one) & np.isfinite(other)
    one, other = one[finite], other[finite]
    norms = math.sqrt(float(one @ one)) * math.sqrt(float(other @ other))
    return float(one @ other) / norms if norms else 0.0


def copies(baseline: Sequence[RecordedTap], grafted: Pair) -> Callable[[Pair], bool]:
    """Return a predicate: does a pair's baseline tap have exactly the grafted values?

    A tap that passes on a grafted tensor has them, whether or not the graft was right.
    """
    by_name = {tap.name: tap.sketch for tap in baseline}
    given = by_name[grafted.baseline]

    def is_copy(pair: Pair) -> bool:
        own = by_name[pair.baseline]
        return own.numel == given.numel and np.array_equal(own.quantiles, given.quantiles)

    return is_copy
