"""The arrangement of one tensor's elements in another: strides fitted to values that are unique in both.

``target.flat[q] == whole.flat[offset + sum(stride[j] * digit[j](q))]``, the digits being those of q in the target's
dimensions, split further where needed. Permutations, slices, windows, interleaving and repetition are all of this form.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from graftlab.diffs.sorting import sorted_values
from graftlab.matching.sketch import Elements, Places, Sketch, Values

# The number of elements to look up for fitting strides and for checking a fit before a full comparison.
SAMPLES = 160
# A span is at least this part of its dimension; see slices.
MOST_SPANS = 64
# With more values than this, places are looked for one by one.
_LARGE = 1 << 18
# In practice, more splits of dimensions than this never found anything.
MAX_SPLITS = 4000


@dataclass(frozen=True)
class Strides:
    """The place of each element of a tensor in the flattened whole: a radix and a stride per digit, outermost first."""

    offset: int
    radices: tuple[int, ...]
    strides: tuple[int, ...]

    def places(self, elements: Places) -> Places:
        """The places in the flattened whole of these elements, given by flat index."""
        found = np.full(elements.shape, self.offset, np.int64)
        rest = elements
        for radix, stride in zip(reversed(self.radices), reversed(self.strides), strict=True):
            rest, digit = np.divmod(rest, radix)
            found += stride * digit
        return found

    def taken(self, whole: Elements) -> Elements:
        """The tensor's elements, flat, taken from the whole: a view where they are next to each other."""
        view = np.lib.stride_tricks.as_strided(
            whole[self.offset :], self.radices, [stride * whole.itemsize for stride in self.strides]
        )
        return view.reshape(-1)

    def fits(self, size: int) -> bool:
        """Whether all places are within a whole of ``size`` elements."""
        reach = [stride * (radix - 1) for radix, stride in zip(self.radices, self.strides, strict=True)]
        low = self.offset + sum(r for r in reach if r < 0)
        high = self.offset + sum(r for r in reach if r > 0)
        return low >= 0 and high < size and all(stride >= 0 for stride in self.strides)


class Lookup:
    """The sorted values of a whole, for finding the place of a value."""

    def __init__(self, values: Values, places: Places | None = None) -> None:
        """``places`` are the values' places in the whole; None if they are the whole, in order."""
        self._values, self._places = values, places
        # Sorted without their places, which take twenty times as long and are rarely needed.
        self.ordered = sorted_values(values)

    @classmethod
    def of_sketch(cls, sketch: Sketch) -> Lookup:
        return cls(sketch.extremes, sketch.places)

    @property
    def nbytes(self) -> int:
        """The bytes of what was computed from the values."""
        made = self.__dict__.get("places")
        return self.ordered.nbytes + (0 if made is None else made.nbytes)

    @cached_property
    def places(self) -> Places:
        """The place of each sorted value in the whole."""
        order = np.argsort(self._values)
        return order if self._places is None else self._places[order]

    def _places_at(self, ranks: Places) -> Places:
        """The places of the values of these ranks, each of which occurs once."""
        if "places" in self.__dict__ or len(self._values) < _LARGE:
            return self.places[ranks]
        # A few places in one pass, where to sort the places would take ten times as long as to sort the values.
        wanted = self.ordered[ranks]
        known, back = np.unique(wanted, return_inverse=True)
        at = np.minimum(np.searchsorted(known, self._values), len(known) - 1)
        found = np.flatnonzero(known[at] == self._values)
        places = np.empty(len(known), np.int64)
        places[at[found]] = found if self._places is None else self._places[found]
        return places[back]

    def unique(self, values: Values, tolerance: float) -> Places:
        """The place of each value; -1 if no value is within the tolerance, or several are within three times it."""
        low = np.searchsorted(self.ordered, values - 3 * tolerance, "left")
        high = np.searchsorted(self.ordered, values + 3 * tolerance, "right")
        found = np.where(high - low == 1, low, -1)
        index = np.maximum(found, 0)
        known = (found >= 0) & (np.abs(self.ordered[index] - values) <= tolerance)
        places = np.full(len(values), -1, np.int64)
        if known.any():
            places[known] = self._places_at(index[known])
        return places

    def share(self, values: Values, tolerance: float) -> float:
        """The share of these values that the whole contains."""
        low = np.searchsorted(self.ordered, values - tolerance, "left")
        high = np.searchsorted(self.ordered, values + tolerance, "right")
        return float((high > low).mean()) if len(values) else 0.0


def fit(
    whole: Lookup, size: int, elements: Places, values: Values, shape: Sequence[int], tolerance: float
) -> Strides | None:
    """Fit strides that map these elements of a tensor of ``shape`` to the places of their values; None if none fit.

    The fit with the fewest splits of the tensor's dimensions wins.
    """
    found = whole.unique(values, tolerance)
    known = found >= 0
    places, elements = found[known], elements[known]
    extents = [extent for extent in shape if extent > 1] or [1]
    if len(places) < 2 * len(extents) + 4 or len(places) < len(values) // 8:
        return None
    for radices in itertools.islice(_splits(tuple(extents)), MAX_SPLITS):
        if len(places) < 2 * len(radices) + 4:
            continue
        strides = _solve(places, elements, radices)
        if strides is not None and strides.fits(size):
            return strides
    return None


def fit_places(places: Places, shape: Sequence[int]) -> Strides | None:
    """Strides that map the elements of ``shape``, in order, to these places; None if there are none."""
    if len(places) == 1:
        return Strides(int(places[0]), (1,), (1,))
    elements = np.arange(len(places))
    some = np.unique(np.linspace(0, len(places) - 1, SAMPLES).astype(np.int64))
    for radices in itertools.islice(_splits(tuple(shape)), MAX_SPLITS):
        strides = _solve(places[some], elements[some], radices)
        if strides is not None and np.array_equal(strides.places(elements), places):
            return strides
    return None


def _solve(places: Places, elements: Places, radices: tuple[int, ...]) -> Strides | None:
    """The integer strides that explain every place, or None."""
    digits = np.empty((len(elements), len(radices) + 1))
    digits[:, 0] = 1
    rest = elements
    for number in range(len(radices), 0, -1):
        rest, digits[:, number] = np.divmod(rest, radices[number - 1])
    # A few equations rule out most splits.
    few = min(len(places), 3 * (len(radices) + 1))
    first, *_ = np.linalg.lstsq(digits[:few], places[:few].astype(np.float64), rcond=None)
    if np.abs(digits[:few] @ first - places[:few]).max() > 0.01:
        return None
    solution, _, rank, _ = np.linalg.lstsq(digits, places.astype(np.float64), rcond=None)
    if rank < digits.shape[1]:
        return None
    whole_numbers = np.rint(solution).astype(np.int64)
    if (digits.astype(np.int64) @ whole_numbers != places).any():
        return None
    return Strides(int(whole_numbers[0]), radices, tuple(int(stride) for stride in whole_numbers[1:]))


def _splits(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The shape with none, then one, then two of its dimensions split into two, then one split into three."""
    yield shape
    in_two = [_factored(extent, 2) for extent in shape]
    for dim, options in enumerate(in_two):
        for option in options:
            yield (*shape[:dim], *option, *shape[dim + 1 :])
    for one, other in itertools.combinations(range(len(shape)), 2):
        for first, second in itertools.product(in_two[one], in_two[other]):
            yield (*shape[:one], *first, *shape[one + 1 : other], *second, *shape[other + 1 :])
    for dim, extent in enumerate(shape):
        for option in _factored(extent, 3):
            yield (*shape[:dim], *option, *shape[dim + 1 :])


@cache
def _factored(extent: int, parts: int) -> list[tuple[int, ...]]:
    if parts == 1:
        return [(extent,)]
    divisors = [n for n in range(2, extent // 2 + 1) if extent % n == 0]
    return [(n, *rest) for n in divisors for rest in _factored(extent // n, parts - 1) if math.prod(rest) > 1]


def permutations(whole: Sequence[int], shape: Sequence[int]) -> Iterator[Strides]:
    """The arrangements to try if no value is unique: dimensions are split to fit, and permuted."""
    extents = tuple(extent for extent in whole if extent > 1) or (1,)
    wanted = set(shape)
    splits = [extents]
    for dim, extent in enumerate(extents):
        for other in wanted:
            if 1 < other < extent and extent % other == 0:
                for pair in ((other, extent // other), (extent // other, other)):
                    splits.append((*extents[:dim], *pair, *extents[dim + 1 :]))
    yield from _permuted(atoms for atoms in dict.fromkeys(splits) if len(atoms) <= 5)


def reorderings(shape: Sequence[int]) -> Iterator[Strides]:
    """The arrangements with one dimension split anywhere in two or three, or two of them in two, and permuted."""
    extents = tuple(extent for extent in shape if extent > 1) or (1,)
    yield from _permuted(atoms for atoms in _splits(extents) if len(atoms) <= 4)


def _permuted(splits: Iterable[tuple[int, ...]]) -> Iterator[Strides]:
    """All orders of the dimensions of a tensor with each of these shapes."""
    seen = set()
    for atoms in splits:
        own = [math.prod(atoms[place + 1 :]) for place in range(len(atoms))]
        for order in itertools.permutations(range(len(atoms))):
            strides = Strides(0, tuple(atoms[place] for place in order), tuple(own[place] for place in order))
            if strides not in seen:
                seen.add(strides)
                yield strides


def slices(whole: Sequence[int], shape: Sequence[int]) -> Iterator[Strides]:
    """The parts to try if no value is unique: a span of one dimension, permuted.

    A span begins at a multiple of its length or ends with the dimension, as those of q, k and v do for any numbers of
    heads. If the tensor's own dimensions split one, such as heads, the span may lie within each.
    """
    total, numel = math.prod(whole), math.prod(shape)
    extents = tuple(extent for extent in whole if extent > 1)
    outers = [extents]
    for dim, extent in enumerate(extents):
        for groups in sorted(set(shape)):
            if 1 < groups < extent and extent % groups == 0:
                outers.append((*extents[:dim], groups, extent // groups, *extents[dim + 1 :]))
    for outer in outers:
        for dim, extent in enumerate(outer):
            length, odd = divmod(numel * extent, total)
            if odd or not 0 < length < extent or extent > MOST_SPANS * length:
                continue
            below = math.prod(outer[dim + 1 :])
            cut = (*outer[:dim], length, *outer[dim + 1 :])
            arrangements = list(permutations(cut, shape))
            for start in dict.fromkeys((*range(0, extent - length + 1, length), extent - length)):
                for each in arrangements:
                    # Outer dimensions have larger strides in the whole than in the span.
                    apart = [s if s < length * below else s // length * extent for s in each.strides]
                    yield Strides(start * below, each.radices, tuple(apart))


def sampled(numel: int, sketch: Sketch) -> Places:
    """The elements to look up: the extremes and a fixed sample of the rest."""
    spread = _spread(numel, SAMPLES - len(sketch.places)) if numel else sketch.places
    return np.unique(np.concatenate((sketch.places, spread)).astype(np.int64))


@cache
def _spread(numel: int, count: int) -> Places:
    return np.random.default_rng(numel).integers(0, numel, count)
