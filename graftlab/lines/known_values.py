"""The values of one side, for the other side to look up: those of each rank, those of all ranks, and their sums."""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

from graftlab.lines.fingerprints import DIFFERENT, IN_ORDER, Fingerprint, Level, agreement, joined
from graftlab.lines.partners import plain_shape
from graftlab.lines.traces import OperationPlace, SliceTrace


def every_value(traces: Sequence[SliceTrace]) -> list[Fingerprint]:
    """All fingerprints of a side, with those of tensors that its ranks hold in shards."""
    found = [each for trace in traces for each in (*trace.fingerprints.values(), *trace.of_forward)]
    return [*found, *map(joined, shards_of(traces).values())]


def shards_of(traces: Sequence[SliceTrace]) -> dict[int, list[Fingerprint]]:
    """The fingerprints of one value on all ranks, by its number on the first rank."""
    if len(traces) < 2:
        return {}
    places = [_in_places(each) for each in traces]
    found = {}
    for place, number in places[0].items():
        # A rank may have more operations than those that all ranks have.
        parts = [trace.fingerprints.get(own.get(place, -1)) for trace, own in zip(traces, places, strict=True)]
        if all(part is not None for part in parts):
            found[number] = [part for part in parts if part is not None]
    return found


def _in_places(trace: SliceTrace) -> dict[tuple[OperationPlace, int], int]:
    """The number of each value, by the operation that read or wrote it and its position there."""
    return {
        (place, which): number
        for place, each in trace.places.items()
        for which, number in enumerate((*each.inputs, *each.outputs))
    }


class KnownValues:
    """Finds fingerprints among those of the other side."""

    def __init__(self, fingerprints: Iterable[Fingerprint], tolerance: float) -> None:
        self._tolerance = tolerance
        by_size: dict[tuple[int, bool], list[Fingerprint]] = defaultdict(list)
        for each in fingerprints:
            by_size[each.numel, each.mask].append(each)
        self._by_size = {size: sorted(found, key=_total) for size, found in by_size.items()}

    def has_size(self, wanted: Fingerprint) -> bool:
        """Return whether the other side has a value with as many numbers."""
        return bool(self._by_size.get((wanted.numel, wanted.mask)))

    def has_sum(self, parts: Sequence[Fingerprint]) -> bool:
        """Return whether the other side has the sum of these summands of several ranks."""
        alike = self._by_size.get((parts[0].numel, parts[0].mask), [])
        return any(is_sum(parts, each, self._tolerance) for each in alike)

    def find(self, wanted: Fingerprint, without: Fingerprint | None = None) -> tuple[Level, Level]:
        """Return the best agreement with any tensor but ``without``, and the best with one of the same shape."""
        found = self._by_size.get((wanted.numel, wanted.mask), [])
        rms = wanted.norm / math.sqrt(max(wanted.numel, 1))
        # For a given norm, the sum of magnitudes is largest if all are equal.
        reach = 2 * self._tolerance * wanted.numel * rms + 1e-30
        begin = bisect.bisect_left(found, _total(wanted) - reach, key=_total)
        best: Level = DIFFERENT
        shaped: Level = DIFFERENT
        for each in found[begin:]:
            if (_total(each) > _total(wanted) + reach and not wanted.mask) or best == shaped == IN_ORDER:
                break
            level = DIFFERENT if each is without else agreement(wanted, each, self._tolerance)
            if plain_shape(each) == plain_shape(wanted):
                shaped = max(shaped, level)
            best = max(best, level)
        return best, shaped


def is_sum(parts: Sequence[Fingerprint], whole: Fingerprint, tolerance: float) -> bool:
    """Whether a tensor is the sum of those of several ranks."""
    if whole.numel != parts[0].numel or whole.nonfinite or any(each.nonfinite for each in parts):
        return False
    limit = 4 * tolerance * sum(each.norm for each in parts)
    projections = sum(each.projections for each in parts)
    total = sum(float(each.moments[0]) for each in parts)
    near = bool((abs(whole.projections - projections) <= limit).all())
    return near and abs(float(whole.moments[0]) - total) <= limit * math.sqrt(whole.numel)


def _total(each: Fingerprint) -> float:
    return float(each.moments[1])
