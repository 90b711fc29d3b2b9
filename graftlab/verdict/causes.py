"""Finds which named groups are causes, from the output of runs in which only some keep the target's code."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pandas as pd
import torch
from torch import Tensor

from graftlab.base.tap_groups import described, kind_of, kind_of_group
from graftlab.base.tensor_bytes import real_parts
from graftlab.base.text import first_of, listed, numbered

MOST_SWAPS = 13
"""The most runs that the search for causes takes. With the others a verdict takes at most 20."""
_LARGEST_FLOOR = 2e-3
"""Up to this floor, an output agrees within a few times the floor. A larger one would excuse too much."""
_RISE = 3.0
"""In low precision a group moves the output if it is this many times farther off than with no group's target code."""

Effect = Callable[[frozenset[str]], float]
"""The output's distance from the baseline's, over its floor, when these groups keep the target's code."""


Tap = tuple[str, str | None]
"""A tap's name and kind, as filters see them."""

Order = dict[Tap, int]
"""The place at which a side first reaches each tap."""


@dataclass(frozen=True)
class OutputFloor:
    """The accumulated ``floor`` of an output (rel_l2), the unit roundoff of its dtype, and the verdict's threshold."""

    floor: float
    roundoff: float
    threshold: float

    def limit(self, restored: float) -> float:
        """Up to how many times its floor the output agrees. ``restored`` is its effect without any named group.

        In low precision rounding adds up to several percent of the output, far more than many a group. ``restored`` was
        measured under the same rounding.
        """
        if self.floor <= _LARGEST_FLOOR or math.isnan(restored):
            return self.threshold
        return min(self.threshold, max(_RISE * restored, self.threshold * self.roundoff / self.floor))


@dataclass(frozen=True)
class Causes:
    """The ``labels`` of the named groups, and the effect of each one ``alone``, over the output's floor.

    ``restored`` is the effect if none of them keeps the target's code, ``total`` if all do. Up to ``limit`` the output
    agrees. ``cut_short`` means that not all sets that might cancel were tried; ``untested`` are the groups that were
    not swapped alone.
    """

    labels: dict[str, str]
    alone: dict[str, float] = field(default_factory=dict)
    restored: float = 0.0
    total: float = 0.0
    limit: float = 5.0
    cancelling: tuple[frozenset[str], ...] = ()
    together: frozenset[str] = frozenset()
    """Groups that change the output together, but not alone."""
    cut_short: bool = False
    untested: tuple[str, ...] = ()
    earlier: tuple[int, ...] = ()
    """The steps in which the output differs although it agrees in its last step."""

    @property
    def agrees(self) -> bool:
        """Whether the output agrees although all named groups keep the target's code."""
        return self.total <= self.limit

    def with_unknown(self, groups: Collection[str]) -> Causes:
        """Return a copy in which the effect of these groups is unknown, so that they count as culprits."""
        return replace(self, labels={g: "culprit" if g in groups else label for g, label in self.labels.items()})

    def with_earlier(self, steps: Iterable[int]) -> Causes:
        """Return a copy for an output that also differs in these steps. Only the last is swapped, so their cause is
        unknown.
        """
        known = tuple(sorted(set(steps)))
        if not known:
            return self
        return replace(self, labels=dict.fromkeys(self.labels, "culprit"), earlier=known)


def find_causes(
    named: Sequence[str], effect: Effect, floor: OutputFloor, *, most: int = MOST_SWAPS, by_size: Sequence[str] = ()
) -> Causes:
    """Label the named groups by their effect on the output: alone, all together, and in sets.

    A set *cancels* when each of its groups alone moves the output, and all of them together do not. Groups that do not
    move it alone are *minor*, unless they move it together. If the baseline's code at all named groups does not
    restore its output, something outside the taps affects it, and all named groups count as culprits.

    ``effect`` is called at most ``most`` times, for the groups of ``by_size`` first. Groups without a run are swapped
    together.
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
    # Two of the runs left are for the groups not swapped alone, and for all minor groups together.
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
    if moved(untested):
        moves += untested
    else:
        minor += untested
    if moved(minor):
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
            if len(known) >= most:
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
    """The sets that may cancel, likely ones first: those of two, three and all but one, with similar effects."""
    sizes = sorted({2, 3, len(groups) - 1} & set(range(2, named)))
    sets = itertools.chain.from_iterable(itertools.combinations(groups, size) for size in sizes)
    yield from map(frozenset, sorted(sets, key=lambda chosen: _unlike([alone[group] for group in chosen])))


def _unlike(effects: Sequence[float]) -> float:
    """How far the largest of these effects is from the sum of the others, which would have to cancel it."""
    largest = max(effects)
    return abs(math.log((largest + 1.0) / (sum(effects) - largest + 1.0))) if math.isfinite(sum(effects)) else math.inf


@dataclass(frozen=True)
class Distance:
    """An output's distance from its record: ``rel_l2``, and the largest difference over the root mean square."""

    rel_l2: float
    rel_max: float


def distance(shards: Iterable[tuple[Tensor | None, Tensor]]) -> Distance:
    """How far an output is from its record. Each shard has a record and a value.

    Infinite if only one of some pair is finite, NaN if a shard has no record of its shape. Numbers that are infinite or
    NaN in both, such as the logits of forbidden tokens, are left out; NaN if no others remain.
    """
    off = whole = largest = 0.0
    numbers = finite_ones = 0
    for recorded, value in shards:
        if recorded is None or value.shape != recorded.shape:
            return UNKNOWN
        if recorded.is_complex() != value.is_complex():
            recorded, value = (each.to(torch.complex128) for each in (recorded, value))
        one, other = real_parts(recorded).double(), real_parts(value).double()
        finite = one.isfinite() & other.isfinite()
        if not (finite | (one == other) | (one.isnan() & other.isnan())).all():
            return Distance(math.inf, math.inf)
        numbers += finite.numel()
        finite_ones += int(finite.count_nonzero())
        apart = (one - other)[finite].abs()
        off += float(apart.square().sum())
        largest = max(largest, float(apart.max()) if apart.numel() else 0.0)
        whole += float(one[finite].square().sum())
    if numbers and not finite_ones:
        return UNKNOWN
    if not whole:
        return Distance(*([0.0 if off == 0 else math.inf] * 2))
    return Distance(math.sqrt(off / whole), largest / math.sqrt(whole / finite_ones))


UNKNOWN = Distance(math.nan, math.nan)


def deadlocking_taps(taken: Iterable[Tap], baseline: Mapping[Tap, int], target: Mapping[Tap, int]) -> set[Tap]:
    """Taps to leave out of a swap that takes these taps from the baseline and all others from the target.

    Each side receives at the taps where the other's code is used. If the baseline reaches such a tap before a taken
    one, and the target reaches the taken one first, both sides would wait for each other. Neither tap depends on the
    other, since each comes first on one side, so both sides compute the left-out tap from the same state.
    """
    places = sorted((baseline[tap], target[tap]) for tap in set(taken) if tap in baseline and tap in target)
    ours = [place for place, _ in places]
    # For each taken tap, in the baseline's order: the earliest place on the target of it and all later ones.
    earliest = [*itertools.accumulate((theirs for _, theirs in reversed(places)), min)][::-1]
    return {
        tap
        for tap, place in baseline.items()
        if tap in target and (after := bisect_right(ours, place)) < len(ours) and earliest[after] < target[tap]
    } - set(taken)


def deadlocking_on_ranks(taken: Collection[Tap], baseline: Sequence[Order], target: Sequence[Order]) -> set[Tap]:
    """The :func:`deadlocking_taps` of sides with several ranks, whose orders these are.

    At a tap that a sending rank does not reach, as in another stage of a pipeline, the receiver waits until that rank
    ends its step. It may not end before the others do, since it may wait for them in a collective.
    """
    ours, theirs = _first_places(baseline), _first_places(target)
    end = 1 + max((*ours.values(), *theirs.values()), default=0)
    ours |= {tap: end for tap in ours if tap in taken and any(tap not in order for order in baseline)}
    theirs |= {tap: end for tap in theirs if tap not in taken and any(tap not in order for order in target)}
    return deadlocking_taps(taken, ours, theirs)


def _first_places(orders: Sequence[Order]) -> Order:
    """The place at which the first of some ranks reaches each tap."""
    return {tap: min(order[tap] for order in orders if tap in order) for tap in set().union(*orders)}


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
    """The taps that a wrong value follows before the next tap of their group."""
    found = set()
    # Counted from the end: wrong values so far, and up to the next tap of each group.
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


def _over_floor(times: float) -> str:
    """A multiple of the floor in words. It is infinite for differing whole numbers, or if one side is not finite."""
    return "above any floor" if math.isinf(times) else f"{times:.2g} x its floor"


# A sentence has up to this many groups, and of more than that the first ones.
_MOST_NAMES = 8


def _names(groups: Iterable[str]) -> str:
    names = [group.removesuffix("@input") for group in groups]
    return ", ".join(names) if len(names) <= _MOST_NAMES else first_of(names)


def effects_in_words(output: str, causes: Causes, threshold: float) -> list[str]:
    """Sentences on the named groups' effect on one output."""
    groups = _names(causes.labels)
    is_itself = {*causes.labels} == {output}
    # The last tap of a model that is watched as a whole has this name.
    named = "" if output == "output" else f" {output}"
    output = f", {described(output)}," if kind_of_group(output) else named
    if math.isnan(causes.restored):
        return [f"The effect of {groups} on the output{output} could not be measured."]
    if not causes.restored <= threshold:
        return [
            f"With the baseline's {groups} the output{output} is still {_over_floor(causes.restored)}: something "
            "outside the taps affects it, such as state that is written before its tap (a KV cache). Tap that state."
        ]
    lines = []
    if math.isnan(causes.total) and not is_itself:
        lines.append(
            f"With the baseline's {groups} the output{output} agrees ({_over_floor(causes.restored)}); without them "
            "it could not be measured."
        )
    elif causes.earlier:
        lines.append(
            f"The output{output} agrees in its last call ({_over_floor(causes.total)}) and differs earlier, in "
            f"{numbered('step', causes.earlier)}."
        )
    elif causes.agrees:
        lines.append(f"The output{output} still agrees ({_over_floor(causes.total)}).")
    elif not is_itself:
        # An output that is itself grafted agrees in any case.
        lines.append(
            f"With the baseline's {groups} the output{output} agrees ({_over_floor(causes.restored)}; "
            f"{_over_floor(causes.total).removesuffix(' its floor')} without)."
        )
    lines += [f"{', '.join(sorted(each))} cancel each other." for each in causes.cancelling if len(each) > 1]
    if causes.together:
        none = "neither" if len(causes.together) == 2 else "none"
        together = listed(sorted(causes.together), most=4)
        lines.append(f"{together} change the output only together; {none} of them does alone.")
    if causes.untested:
        lines.append(f"Not swapped alone, to limit the number of runs: {_names(causes.untested)}.")
    if causes.cut_short:
        lines.append("Not all sets of groups that might cancel were tried.")
    return lines
