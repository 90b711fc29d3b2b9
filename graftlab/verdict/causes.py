"""Which of the named groups are causes: labels from the output when some keep the target's code, and what follows."""

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
"""How far the output is from the baseline's, over its floor, when these groups keep the target's code."""


Tap = tuple[str, str | None]
"""A tap's name and kind, as filters see them."""

Order = dict[Tap, int]
"""When a side first reaches each tap."""


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


def deadlocking_taps(taken: Iterable[Tap], baseline: Mapping[Tap, int], target: Mapping[Tap, int]) -> set[Tap]:
    """What must be left alone in a swap that takes these taps from the baseline and all others from the target.

    Each side receives at the taps where the other's code counts. Where the baseline reaches one such tap before a
    taken one, and the target the taken one first, both would wait. Neither depends on the other then, since each comes
    first somewhere; so what is left alone is computed by both from the same state.
    """
    places = [(baseline[tap], target[tap]) for tap in set(taken) if tap in baseline and tap in target]
    return {
        tap
        for tap, place in baseline.items()
        if tap in target and any(place < ours and theirs < target[tap] for ours, theirs in places)
    } - set(taken)


def consequences(frame: pd.DataFrame, named: Sequence[str], threshold: float) -> list[str]:
    """The named groups of gradients that named values explain.

    The gradient of a tap is computed by the backward of the code that reads the tap. Where that code computes another
    value, another gradient follows. What reads a tap shows its result before the next tap of the same group is reached:
    a layer later at most. The gradient of a weight follows from the value of the module that the weight belongs to.
    ``frame`` is that of a verdict, in execution order.
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
    """The taps after which, up to the next one of their group, some value is wrong."""
    found = set()
    # From the end: which taps were passed since the group's next one, and whether a wrong value was among them.
    wrongs = 0
    wrongs_at_next: dict[str, int] = {}
    for name, group, is_wrong in zip(reversed(names), reversed(groups), reversed(wrong), strict=True):
        if wrongs > wrongs_at_next.get(group, 0):
            found.add(name)
        # The next one of the group is itself among what the one before it may have been read for.
        wrongs_at_next[group] = wrongs
        wrongs += is_wrong
    return found


def _shows(module: str, modules: set[str]) -> bool:
    """Whether a module's own output, or a tensor in it, is among these taps."""
    return any(name == module or name.startswith(f"{module}[") for name in modules)
