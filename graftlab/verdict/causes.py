"""Which of the named groups is the cause: labels from what the output is when some of them keep the target's code."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

MOST_SWAPS = 14
"""Runs that the search for causes may take. With the others a verdict takes at most 20."""
_LARGEST_FLOOR = 2e-3
"""A floor that excuses an output within a few times of it. A larger one, of low precision, would excuse too much."""
_RISE = 3.0
"""In low precision an output moves if it is this many times as far off as without any of the named groups."""

Effect = Callable[[frozenset[str]], float]
"""How far the output is from the baseline's, over its floor, when these groups keep the target's code."""


@dataclass(frozen=True)
class OutputFloor:
    """The accumulated ``floor`` of an output (rel_l2), the unit roundoff of its dtype, and the verdict's threshold."""

    floor: float
    roundoff: float
    threshold: float

    def limit(self, restored: float) -> float:
        """Up to how many times its floor the output agrees, ``restored`` being what it is without any named group.

        In low precision rounding adds up to several percent of the output, which says little about a single group. What
        is left when every named group is the baseline's has been measured under the same rounding.
        """
        if self.floor <= _LARGEST_FLOOR or math.isnan(restored):
            return self.threshold
        return min(self.threshold, max(_RISE * restored, self.threshold * self.roundoff / self.floor))


@dataclass(frozen=True)
class Causes:
    """``labels`` of the named groups, and each one's effect ``alone``, over the output's floor.

    ``restored`` is the effect where none of them keeps the target's code, ``total`` where all do. The output agrees up
    to ``limit``. ``cut_short`` means that more sets might cancel than were tried, ``untested`` are the groups that were
    not swapped alone.
    """

    labels: dict[str, str]
    alone: dict[str, float] = field(default_factory=dict)
    restored: float = 0.0
    total: float = 0.0
    limit: float = 5.0
    cancelling: tuple[frozenset[str], ...] = ()
    together: frozenset[str] = frozenset()
    """Groups that move the output together, and none of them alone."""
    cut_short: bool = False
    untested: tuple[str, ...] = ()
    earlier: tuple[int, ...] = ()
    """The steps in which the output differs although it agrees in the last one."""

    @property
    def agrees(self) -> bool:
        """Whether the output agrees although all named groups keep the target's code."""
        return self.total <= self.limit

    def with_earlier(self, steps: Iterable[int]) -> Causes:
        """The same where the output differs in these steps. What moves it is unknown, as only its last is swapped."""
        known = tuple(sorted(set(steps)))
        if not known:
            return self
        return replace(self, labels=dict.fromkeys(self.labels, "culprit"), earlier=known)


def find_causes(
    named: Sequence[str], effect: Effect, floor: OutputFloor, *, most: int = MOST_SWAPS, by_size: Sequence[str] = ()
) -> Causes:
    """Label the named groups by what they do to the output: alone, all together, and in sets.

    A set *cancels* when each of its groups alone moves the output, and all of them together do not. Groups that do not
    move it alone are *minor*, unless they move it together. Where the baseline's code at all named groups does not
    restore its output, something acts outside of the taps, and all named groups count as culprits.

    ``effect`` is called at most ``most`` times, for the groups of ``by_size`` first. Groups that there was no run for
    are swapped together.
    """
    known: dict[frozenset[str], float] = {}

    def of(kept: Iterable[str]) -> float:
        which = frozenset(kept)
        if which not in known:
            known[which] = effect(which)
        return known[which]

    total, restored = of(named), of(())
    limit = floor.limit(restored)
    order = [*by_size, *(group for group in named if group not in by_size)] if by_size else list(named)
    # Two runs of the rest are for what is not swapped alone, and for minor groups together.
    tested = order if len(order) <= most - 3 else order[: max(1, most - 4)]
    untested = tuple(group for group in order if group not in tested)
    alone = {group: of([group]) for group in tested}
    if not restored <= floor.threshold:
        return Causes(dict.fromkeys(named, "culprit"), alone, restored, total, limit, untested=untested)

    def moved(groups: Iterable[str]) -> bool:
        return not of(groups) <= limit

    moves = [group for group in tested if moved([group])]
    minor = [group for group in tested if group not in moves]
    together: frozenset[str] = frozenset()
    if untested and moved(untested):
        moves += untested
    else:
        minor += untested
    if len(minor) > 1 and not (untested and set(minor) == {*untested}) and moved(minor):
        together = frozenset(minor)
    cancelling: list[frozenset[str]] = []
    cut_short = False
    if total <= limit:
        cancelling = [frozenset(named)] if moves else []
    else:
        candidates = [group for group in moves if group in alone]
        for candidate in _sets(candidates, alone, len(named)):
            if any(candidate & found for found in cancelling):
                continue
            if candidate not in known and len(known) >= most:
                cut_short = True
                break
            if not moved(candidate):
                cancelling.append(candidate)
    cancels = frozenset().union(*cancelling)
    labels = {
        group: "cancels"
        if group in cancels and group in moves
        else "culprit"
        if group in {*moves, *together}
        else "minor"
        for group in named
    }
    if total > limit and "culprit" not in labels.values():
        labels = {group: "culprit" if label == "minor" else label for group, label in labels.items()}
    return Causes(labels, alone, restored, total, limit, tuple(cancelling), together, cut_short, untested)


def _sets(groups: Sequence[str], alone: Mapping[str, float], named: int) -> Iterator[frozenset[str]]:
    """The sets that may cancel, likely ones first: those of two, three and all but one, of groups with like effects."""
    sizes = sorted({2, 3, len(groups) - 1} & set(range(2, named)))
    sets = itertools.chain.from_iterable(itertools.combinations(groups, size) for size in sizes)
    yield from map(frozenset, sorted(sets, key=lambda chosen: _unlike([alone[group] for group in chosen])))


def _unlike(effects: Sequence[float]) -> float:
    """How far the largest of these effects is from the sum of the others, which has to take it back."""
    largest = max(effects)
    return abs(math.log((largest + 1.0) / (sum(effects) - largest + 1.0))) if math.isfinite(sum(effects)) else math.inf


def distance(shards: Iterable[tuple[Tensor | None, Tensor]]) -> float:
    """How far an output is from its record, over the record's norm; each shard is a record and a value.

    Infinite where one of them alone is not finite, NaN where a shard has no record of its shape. Numbers that are
    infinite or NaN in both alike, as the logits of what must not be chosen, are left out; NaN where no others are left.
    """
    off = whole = 0.0
    numbers = finite_ones = 0
    for recorded, value in shards:
        if recorded is None or value.shape != recorded.shape:
            return math.nan
        one, other = recorded.double(), value.double()
        finite = one.isfinite() & other.isfinite()
        if not (finite | (one == other) | (one.isnan() & other.isnan())).all():
            return math.inf
        numbers += finite.numel()
        finite_ones += int(finite.count_nonzero())
        off += float((one - other)[finite].square().sum())
        whole += float(one[finite].square().sum())
    if numbers and not finite_ones:
        return math.nan
    return math.sqrt(off / whole) if whole else (0.0 if off == 0 else math.inf)
