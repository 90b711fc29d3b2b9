"""Which of the named groups are causes: labels from the output when some keep the target's code."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pandas as pd
from torch import Tensor

from graftlab.base.tap_groups import kind_of, kind_of_group

MOST_SWAPS = 40
"""Runs that the search for cancelling sets may take."""

Effect = Callable[[frozenset[str]], float]
"""The output's distance from the baseline's, over its floor, when these groups keep the target's code."""


Tap = tuple[str, str | None]
"""A tap's name and kind, as filters see them."""

Order = dict[Tap, int]
"""The place at which a side first reaches each tap."""


@dataclass(frozen=True)
class Causes:
    """The ``labels`` of the named groups, and the effect of each ``alone``.

    ``restored`` is the effect if none of them keeps the target's code, ``total`` if all do. ``cut_short``: not all sets
    were tried.
    """

    labels: dict[str, str]
    alone: dict[str, float] = field(default_factory=dict)
    restored: float = 0.0
    total: float = 0.0
    cancelling: tuple[frozenset[str], ...] = ()
    cut_short: bool = False
    earlier: tuple[int, ...] = ()
    """The steps in which the output differs although it agrees in its last step."""

    def with_earlier(self, steps: Iterable[int]) -> Causes:
        """The same for an output that differs in these steps, whose cause is unknown: only the last step is swapped."""
        known = tuple(sorted(set(steps)))
        if not known:
            return self
        return replace(self, labels=dict.fromkeys(self.labels, "culprit"), earlier=known)


def find_causes(named: Sequence[str], effect: Effect, threshold: float) -> Causes:
    """Try each group alone, all together, and sets of two, three and all but one.

    A set *cancels* when each of its groups alone moves the output, and all of them together do not. A group that does
    not move it alone is *minor*, unless no other group is left to blame. If the baseline's code at all named groups
    does not restore its output, something outside the taps affects it, and all named groups count as culprits.
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
    """An output's distance from its record, over the record's norm; each shard is a record and a value.

    Infinite where only one of them is finite, NaN if a shard has no record of its shape. Numbers that are infinite or
    NaN in both, such as the logits of forbidden tokens, are left out; NaN if no others remain.
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


def deadlocking_taps(taken: Iterable[Tap], baseline: Mapping[Tap, int], target: Mapping[Tap, int]) -> set[Tap]:
    """Taps to leave out of a swap that takes these taps from the baseline and all others from the target.

    Each side receives at the taps where the other's code is used. If the baseline reaches such a tap before a taken
    one, and the target reaches the taken one first, both sides wait for each other. Neither tap depends on the other,
    since each is first on one side; so both sides compute the tap that is left out from the same state.
    """
    places = [(baseline[tap], target[tap]) for tap in set(taken) if tap in baseline and tap in target]
    return {
        tap
        for tap, place in baseline.items()
        if tap in target and any(place < ours and theirs < target[tap] for ours, theirs in places)
    } - set(taken)


def consequences(frame: pd.DataFrame, named: Sequence[str], threshold: float) -> list[str]:
    """The named groups of gradients that named values explain.

    The gradient of a tap is computed by the backward pass of the code that reads the tap. If that code computes a
    different value, the gradient differs too. Code that reads a tap shows its result before the next tap of the same
    group: at most one layer later. The gradient of a weight follows from the value of the weight's module. ``frame`` is
    that of a verdict, in execution order.
    """
    if not any(kind_of_group(group) in ("grad", "param_grad") for group in named):
        return []
    over = frame["ratio"] > threshold
    is_value = frame["tags"].map(lambda tags: kind_of(tags) is None)
    values = frame[is_value]
    wrong = [bool(each) for each in over[is_value]]
    names = [str(name) for name in values["name"]]
    explained = _read_by(names, [str(group) for group in values["group"]], wrong)
    modules = {name for name, is_wrong in zip(names, wrong, strict=True) if is_wrong}
    found = []
    for group in named:
        own = [str(name) for name in frame.loc[over & (frame["group"] == group), "name"]]
        kind = kind_of_group(group)
        if (kind == "grad" and explained.issuperset(own)) or (
            kind == "param_grad" and all(_shows(name.rpartition(".")[0], modules) for name in own)
        ):
            found.append(group)
    return found


def _read_by(names: Sequence[str], groups: Sequence[str], wrong: Sequence[bool]) -> set[str]:
    """The taps with a wrong value between them and the next tap of their group."""
    found = set()
    # From the end: the number of wrong values so far, and at the next tap of each group.
    wrongs = 0
    wrongs_at_next: dict[str, int] = {}
    for name, group, is_wrong in zip(reversed(names), reversed(groups), reversed(wrong), strict=True):
        if wrongs > wrongs_at_next.get(group, 0):
            found.add(name)
        # The next tap of the group may itself have read this one.
        wrongs_at_next[group] = wrongs
        wrongs += is_wrong
    return found


def _shows(module: str, modules: set[str]) -> bool:
    """Whether a module's output, or a tensor in its output, is among these taps."""
    return any(name == module or name.startswith(f"{module}[") for name in modules)
