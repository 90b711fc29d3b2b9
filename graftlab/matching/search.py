"""The search for a tap's partner: tensors of the other side that contain its values, and their layouts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from graftlab.diffs.rounding import roundoff
from graftlab.layouts import Layout
from graftlab.matching.recorded_taps import RecordedTap, relative_l2
from graftlab.matching.sketch import Elements, Places, Sketch, Values, alike, covers, flat_values, limit_for
from graftlab.matching.strides import MAX_SPLITS, Lookup, Strides, fit, permutations, reorderings, sampled, slices
from graftlab.matching.wording import layout_of

Bring = Callable[[RecordedTap], None]
"""A function that fetches the value of a tap that has only a sketch, if possible."""

# How near two equal values must be, as multiples of the root mean square. With finer tolerances more values are unique.
TOLERANCES = (1e-9, 1e-6, 1e-5, 1e-4)
# The largest ratio of a whole to a part: smaller parts match anywhere by chance.
MOST_PARTS = 64
# From this limit on, the noise of half-width dtypes hides the places of values; see limit_for.
NOISY = 1e-2
# The number of elements tried with all arrangements, and of arrangements that are then compared closely.
TRIED = 16
NEAREST = 8
# A mean difference, as a multiple of the root mean square, far above any dtype's rounding.
FAR = 0.2
# From this distance on another arrangement of computed values may fit better.
_SURE = 1e-5
# Fewer elements than this cannot be located in a larger tensor.
LEAST_OF_A_PART = 16


@dataclass(frozen=True)
class ValueMatch:
    """``layout`` takes ``inner`` out of ``outer``. ``rel`` is their relative L2, and ``exact`` means bit-equal.

    ``sampled`` means that only the extreme values were compared, because no others were kept.
    """

    outer: RecordedTap
    inner: RecordedTap
    layout: Layout
    rel: float
    exact: bool
    sampled: bool = False

    @property
    def is_as_near_as_possible(self) -> bool:
        """Whether no other arrangement can be nearer: weights differ by one rounding, computed values by hardly any."""
        if self.inner.digest is None:
            return self.rel <= _SURE
        coarser = max(roundoff(str(tap.dtype).removeprefix("torch.")) for tap in (self.outer, self.inner))
        return self.rel <= max(_SURE, 2 * coarser)


# Sums that are equal up to rounding may differ by this factor.
_ROOM = 1.01

_Arrangements = tuple[list[Strides], Places, Places]

KnownStrides = dict[tuple[tuple[int, ...], tuple[int, ...]], list[Strides]]
"""Strides by which tensors of these two shapes have matched, the outer's first. Other layers usually have the same."""


def find(
    outer: RecordedTap,
    inner: RecordedTap,
    bring: Bring | None = None,
    limit: float | None = None,
    known: KnownStrides | None = None,
) -> ValueMatch | None:
    """Find ``inner`` in ``outer``, as all or a part of it; None if ``outer`` does not contain it.

    ``bring`` fetches values that only have a sketch, if the sketches make a match possible. ``known`` strides are tried
    first, and those found are added.
    """
    # A layout moves elements, and cannot separate the two numbers of a complex element.
    if outer.dtype.is_complex != inner.dtype.is_complex:
        return None
    limit = limit_for(outer.dtype, inner.dtype) if limit is None else limit
    whole = outer.sketch.numel == inner.sketch.numel
    if not (alike(outer.sketch, inner.sketch, limit) if whole else _may_lie_in(outer.sketch, inner.sketch, limit)):
        return None
    if whole and outer.digest is not None and inner.digest is not None and outer.digest.whole == inner.digest.whole:
        return ValueMatch(outer, inner, _in_same_order(outer, inner), 0.0, exact=True)
    for tap in (outer, inner):
        if tap.value is None and bring is not None:
            bring(tap)
    if whole and (same := _same(outer, inner, limit)) is not None:
        return same
    # The other searches place single numbers, not complex elements.
    if not inner.sketch.telling or inner.dtype.is_complex:
        return None
    ways = [] if known is None else known.setdefault((outer.shape, inner.shape), [])
    for strides in ways:
        found = _verified(outer, inner, strides, limit)
        if found is not None and found.is_as_near_as_possible and not found.sampled:
            return found
    best = _by_extremes(outer, inner, limit) if whole else None
    if best is None:
        best = _strides(outer, inner, limit, whole)
    if best is None:
        return None
    if best not in ways:
        ways.append(best)
    return _verified(outer, inner, best, limit)


def _may_lie_in(outer: Sketch, inner: Sketch, limit: float) -> bool:
    """Whether one may be a part of the other, or a repetition of it, as of key/value heads for queries."""
    if not inner.telling or not outer.telling or min(inner.numel, outer.numel) < LEAST_OF_A_PART:
        return False
    if inner.numel > outer.numel:
        return (
            inner.numel % outer.numel == 0 and inner.numel <= MOST_PARTS * outer.numel and covers(outer, inner, limit)
        )
    return outer.numel <= MOST_PARTS * inner.numel and covers(outer, inner, limit)


def _same(outer: RecordedTap, inner: RecordedTap, limit: float) -> ValueMatch | None:
    """The match of equal elements in the same order, perhaps in a different shape."""
    if outer.elements is None or inner.elements is None:
        return _verified(outer, inner, _plain(inner), limit)
    # The largest values by themselves may be further apart than all together.
    apart = inner.elements[outer.sketch.places].astype(np.float64) - outer.sketch.extremes
    if float(np.einsum("i,i", apart, apart)) > _ROOM * (limit * outer.sketch.rms) ** 2 * outer.sketch.numel:
        return None
    rel = relative_l2(outer.elements, inner.elements)
    if rel > limit:
        return None
    return ValueMatch(outer, inner, _in_same_order(outer, inner), rel, _are_equal(rel, outer.elements, inner.elements))


def _in_same_order(outer: RecordedTap, inner: RecordedTap) -> Layout:
    """The layout of elements in the same order."""
    return Layout() if outer.shape == inner.shape else layout_of(_plain(inner), outer.shape, inner.shape)


def _plain(inner: RecordedTap) -> Strides:
    return Strides(0, (math.prod(inner.shape),), (1,))


def _are_equal(rel: float, one: Elements, other: Elements) -> bool:
    """Whether two arrays that are ``rel`` apart are equal, NaN included, which takes several times as long to check."""
    return rel == 0 and (np.array_equal(one, other) or np.array_equal(one, other, equal_nan=True))


def _by_extremes(outer: RecordedTap, inner: RecordedTap, limit: float) -> Strides | None:
    """The strides of a rearrangement of all elements: the extreme values' places show it without sorting a tensor."""
    if outer.value is None or inner.value is None:
        return None
    scale = max(outer.sketch.rms, 1e-30)
    lookup = Lookup.of_sketch(outer.sketch)
    for tolerance in (tolerance for tolerance in TOLERANCES if tolerance <= limit):
        strides = fit(
            lookup, outer.sketch.numel, inner.sketch.places, inner.sketch.extremes, inner.shape, tolerance * scale
        )
        if strides is not None:
            return strides
    return None


def _strides(outer: RecordedTap, inner: RecordedTap, limit: float, whole: bool) -> Strides | None:
    if inner.elements is None:
        elements, values = inner.sketch.places, inner.sketch.extremes
    else:
        elements = sampled(inner.sketch.numel, inner.sketch)
        values = inner.elements[elements].astype(np.float64)
        finite = np.isfinite(values)
        elements, values = elements[finite], values[finite]
    scale = max(outer.sketch.rms, 1e-30)
    for tolerance in (*(tolerance for tolerance in TOLERANCES if tolerance <= limit), limit / 2):
        # Checked with the extremes, which are far apart, while other values are often near some value by chance. A
        # sketch has too few values to rule a part out.
        if outer.value is not None and outer.lookup.share(inner.sketch.extremes, tolerance * scale) < 0.9:
            continue
        found = fit(outer.lookup, outer.sketch.numel, elements, values, inner.shape, tolerance * scale)
        if found is not None:
            return found
    # If no value stands out from a half-width dtype's noise, the usual arrangements are tried on all samples.
    return _usual(outer, inner, elements, values) if whole or limit >= NOISY else None


def _usual(outer: RecordedTap, inner: RecordedTap, elements: Places, values: Values) -> Strides | None:
    """The usual arrangement that fits these elements best; None if none fits."""
    found = _nearest(outer, inner, elements, values, _arrangements(outer.shape, inner.shape))
    if found is None and _are_same_numbers(outer, inner):
        found = _nearest(outer, inner, elements, values, _reorderings(outer.shape))
    return found


def _nearest(
    outer: RecordedTap, inner: RecordedTap, elements: Places, values: Values, among: _Arrangements
) -> Strides | None:
    """Of these arrangements, the one that fits the elements best; None if none fits."""
    held, own = outer.flat, inner.flat
    if held is None or own is None:
        return None
    arrangements, few, places = among
    known = np.isfinite(own[few])
    if not arrangements or not known.any():
        return None
    # A few elements rule out nearly all of the thousands of arrangements.
    off = np.abs(held[places[:, known]] - own[few[known]]).mean(axis=1)
    nearest = np.argsort(off, kind="stable")[:NEAREST]
    if not off[nearest[0]] <= FAR * inner.sketch.rms:
        return None
    chosen = [arrangements[int(place)] for place in nearest]
    return min(chosen, key=lambda each: float(np.abs(held[each.places(elements)] - values).sum()))


@lru_cache(maxsize=64)
def _arrangements(outer: tuple[int, ...], inner: tuple[int, ...]) -> _Arrangements:
    """The usual arrangements of one shape in another, a few elements, and their places in each arrangement."""
    whole = math.prod(outer) == math.prod(inner)
    return _with_places((permutations if whole else slices)(outer, inner), math.prod(inner))


@lru_cache(maxsize=64)
def _reorderings(shape: tuple[int, ...]) -> _Arrangements:
    """The same for all numbers of a tensor, with its dimensions split in any way, as where a layer reads features that
    another code flattens in another order.
    """
    return _with_places(reorderings(shape), math.prod(shape))


def _with_places(arrangements: Iterable[Strides], numel: int) -> _Arrangements:
    found = list(itertools.islice(arrangements, MAX_SPLITS))
    few = np.random.default_rng(0).integers(0, numel, TRIED)
    return found, few, np.array([each.places(few) for each in found], np.int64).reshape(len(found), TRIED)


def _are_same_numbers(outer: RecordedTap, inner: RecordedTap) -> bool:
    """Whether two tensors of one size have the same numbers in some order, as far as their sketches show."""
    one, other = outer.sketch, inner.sketch
    same_extremes = np.array_equal(np.sort(np.abs(one.extremes)), np.sort(np.abs(other.extremes)))
    return one.numel == other.numel and same_extremes and np.array_equal(one.quantiles, other.quantiles)


def _verified(outer: RecordedTap, inner: RecordedTap, strides: Strides, limit: float) -> ValueMatch | None:
    taken: Elements
    expected: Elements
    if outer.elements is not None and inner.elements is not None:
        taken, expected, sampled_only = strides.taken(outer.elements), inner.elements, False
    else:
        places = strides.places(inner.sketch.places)
        if outer.flat is not None:
            taken, expected = outer.flat[places], inner.sketch.extremes
        elif inner.flat is not None:
            # The outer's extremes that the inner contains.
            known = dict(zip(outer.sketch.places.tolist(), outer.sketch.extremes.tolist(), strict=True))
            mine = strides.places(np.arange(inner.sketch.numel))
            kept = np.isin(mine, outer.sketch.places)
            taken, expected = np.array([known[place] for place in mine[kept].tolist()]), inner.flat[kept]
        else:
            known = dict(zip(outer.sketch.places.tolist(), outer.sketch.extremes.tolist(), strict=True))
            kept = np.array([place in known for place in places.tolist()])
            taken = np.array([known[place] for place in places[kept].tolist()])
            expected = inner.sketch.extremes[kept]
        sampled_only = True
        if len(taken) < 8:
            return None
    rel = relative_l2(taken, expected)
    if not rel <= limit:
        return None
    exact = not sampled_only and _are_equal(rel, taken, expected)
    return ValueMatch(outer, inner, layout_of(strides, outer.shape, inner.shape), rel, exact, sampled_only)


def applied(layout: Layout, outer: RecordedTap, inner: RecordedTap) -> float | None:
    """The relative L2 between ``inner`` and the result of a layout of ``outer``; None if unknown."""
    if outer.value is None or inner.flat is None:
        return None
    try:
        taken = layout.local(outer.value.detach().to("cpu"))
    except ValueError:
        return None
    if tuple(taken.shape) != inner.shape:
        return None
    found, own = flat_values(taken), inner.flat
    if layout.lacks:
        known = flat_values(layout.local(torch.ones(outer.shape, dtype=torch.bool, device="cpu"))) > 0
        found, own = found[known], own[known]
    return relative_l2(found, own)
