"""Which of the named groups is the cause: labels from what the output is when some of them keep the target's code."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

MOST_SWAPS = 40
"""Runs that the search for cancelling sets may take."""

Effect = Callable[[frozenset[str]], float]
"""How far the output is from the baseline's, over its floor, when these groups keep the target's code."""


@dataclass(frozen=True)
class Causes:
    """``labels`` of the named groups, and each one's effect ``alone``.

    ``restored`` is the effect where none of them keeps the target's code, ``total`` where all do. ``cut_short`` says
    that there were more sets than were tried.
    """

    labels: dict[str, str]
    alone: dict[str, float] = field(default_factory=dict)
    restored: float = 0.0
    total: float = 0.0
    cancelling: tuple[frozenset[str], ...] = ()
    cut_short: bool = False
    earlier: tuple[int, ...] = ()
    """The steps in which the output differs although it agrees the last time that it is there."""

    def with_earlier(self, steps: Iterable[int]) -> Causes:
        """The same where the output differs in these steps. What moves it is not known, as only its last is swapped."""
        known = tuple(sorted(set(steps)))
        if not known:
            return self
        return replace(self, labels=dict.fromkeys(self.labels, "culprit"), earlier=known)


def find_causes(named: Sequence[str], effect: Effect, threshold: float) -> Causes:
    """Try each group alone, all together, and sets of two, three and all but one.

    A set *cancels* when each of its groups alone moves the output, and all of them together do not. A group that does
    not move it alone is *minor*, unless no other is left to blame. Where the baseline's code at all named groups does
    not bring its output back, something acts outside of the taps, and all that is named counts as culprit.
    """
    known: dict[frozenset[str], float] = {}

    def of(kept: frozenset[str]) -> float:
        if kept not in known:
            known[kept] = effect(kept)
        return known[kept]

    everything = frozenset(named)
    total, restored = of(everything), of(frozenset())
    alone = {group: of(frozenset({group})) for group in named}
    if not restored <= threshold:
        return Causes(dict.fromkeys(named, "culprit"), alone, restored, total)
    moves = [group for group in named if not alone[group] <= threshold]
    cancelling: list[frozenset[str]] = []
    cut_short = False
    if total <= threshold:
        cancelling = [everything] if moves else []
    else:
        sizes = sorted({2, 3, len(moves) - 1} & set(range(2, len(named))))
        for size in sizes:
            for chosen in itertools.combinations(moves, size):
                candidate = frozenset(chosen)
                if any(candidate & found for found in cancelling):
                    continue
                if len(known) > MOST_SWAPS:
                    cut_short = True
                    break
                if of(candidate) <= threshold:
                    cancelling.append(candidate)
    cancels = frozenset().union(*cancelling)
    labels = {}
    for group in named:
        labels[group] = "cancels" if group in cancels and group in moves else "culprit" if group in moves else "minor"
    if total > threshold and "culprit" not in labels.values():
        labels = {group: "culprit" if label == "minor" else label for group, label in labels.items()}
    return Causes(labels, alone, restored, total, tuple(cancelling), cut_short)


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
