"""What one side's ranks should agree on, and do not: replicas, sums that nobody reduced, inputs.

No other side is needed. A rank shows a sketch of each tap: a short random projection that is linear, so that distances
and sums of tensors are those of their sketches, to a few per cent; equal tensors have equal sketches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from graftlab.verdict.added import roundoff
from graftlab.verdict.groups import group_of, is_data, kind_of, place_in_blame
from graftlab.verdict.wording import spans

SKETCH = 256
"""Numbers in a sketch. The distance of two tensors comes out within about 10 %."""

Array = npt.NDArray[np.float64]
Relation = Literal["agrees", "disagrees", "own data"]

# Up to which distance two ranks' tensors are taken for copies of one. Shards of random data are further apart.
_NEAR = 0.2
# From which cosine on they are, where what they differ by is a partial sum that is known.
_RESEMBLES = 0.2
# A partial sum is added to a copy a few taps later.
_LOOKED_BACK = 16
_INFERRED = "inferred, since they are near"
FROM_WEIGHT = "inferred from its weight"
FROM_GROUP = "inferred from other taps of its group"
# Copies that went through another order of additions differ by some roundings.
_ROUNDINGS = 32
# How much of a difference another tap's difference has to be.
_EXPLAINED = 1e-2


class Replicas(NamedTuple):
    """What a layout says of a tap's ranks: ``groups`` of ranks hold the same."""

    layout: str
    groups: tuple[tuple[int, ...], ...]


class Shown(NamedTuple):
    """One call of a tap on one rank. ``sketch`` has :data:`SKETCH` numbers; ``declared`` is what its layout says."""

    name: str
    tags: dict[str, Any]
    place: tuple[Any, ...]
    shape: tuple[int, ...]
    dtype: str
    sketch: bytes
    norm: float
    nonfinite: int
    declared: Replicas | None = None

    @property
    def values(self) -> Array:
        return np.frombuffer(self.sketch, dtype=np.float64)


@dataclass(frozen=True)
class Held:
    """One call of a tap on all ranks, and how these relate. ``apart`` is the largest relative distance of replicas."""

    name: str
    tags: dict[str, Any]
    group: str
    kind: str | None
    dtype: str
    relation: Relation
    layout: str
    apart: float = 0.0
    ranks: tuple[int, ...] = ()
    """Those that differ from the first of their replicas."""
    shown: Mapping[int, Shown] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Checked:
    """What the ranks of one side came to: ``held`` in execution order; ``missing`` are taps that some rank lacks."""

    world_size: int
    held: Sequence[Held]
    missing: Sequence[str] = ()
    skipped: Sequence[str] = ()

    @property
    def disagreeing(self) -> list[Held]:
        """What should be equal and is not, in the order of blame."""
        found = [each for each in self.held if each.relation == "disagrees"]
        return sorted(found, key=lambda each: -1 if is_data(each.tags) else place_in_blame(each.group))


def check_replicas(ranks: Sequence[Sequence[Shown]], declared: Callable[[str], Replicas | None]) -> Checked:
    """Relate what the ranks of one side showed, one sequence a rank.

    ``declared`` gives what the user says of a tap's layout by its name; then the tap's own counts, which a DTensor has.
    Of a tap without either it is inferred. Copies are near to each other, and tensors that are not near are each rank's
    own, unless other taps of the group, in other layers or steps, are equal on all ranks. The gradient and the update
    of a weight are held as the weight is.
    """
    size = len(ranks)
    by_place: dict[tuple[Any, ...], dict[int, Shown]] = {}
    for rank, shown in enumerate(ranks):
        for each in shown:
            by_place.setdefault(each.place, {})[rank] = each
    whole = {place: each for place, each in by_place.items() if len(each) == size}
    missing = [
        f"{next(iter(each.values())).name} (on rank{'s' if len(each) > 1 else ''} {spans(list(each))} alone)"
        for each in by_place.values()
        if len(each) < size
    ]
    held = [_relate(each, declared) for each in whole.values()]
    equal_groups = {each.group for each in held if each.relation == "agrees" and each.layout == _INFERRED}
    replicated = {each.name for each in held if each.kind == "param" and each.relation != "own data"}
    found = [
        _second_look(each, held[max(0, at - _LOOKED_BACK) : at], equal_groups, replicated, size)
        if each.relation == "own data" and each.layout == _INFERRED
        else each
        for at, each in enumerate(held)
    ]
    return Checked(size, found, missing)


def _second_look(each: Held, before: Sequence[Held], equal_groups: set[str], weights: set[str], size: int) -> Held:
    """A tap that is not near on its ranks may be a copy all the same."""
    follows_weight = each.kind in ("param_grad", "optimizer") and _weight_of(each, weights)
    if follows_weight or each.group in equal_groups:
        why = FROM_WEIGHT if follows_weight else FROM_GROUP
        return _compared(each.shown, Replicas(why, (tuple(range(size)),)))
    if min(_cosine(each.shown[0], other) for other in each.shown.values()) < _RESEMBLES:
        return each
    copy = _compared(each.shown, Replicas(_INFERRED, (tuple(range(size)),)))
    return each if unreduced(before, copy) is None else copy


def _weight_of(held: Held, weights: set[str]) -> bool:
    return held.name in weights or held.name.rpartition(".")[0] in weights


def _relate(shown: Mapping[int, Shown], declared: Callable[[str], Replicas | None]) -> Held:
    first = shown[0]
    layout = declared(first.name) or first.declared
    if layout is not None:
        return _compared(shown, layout)
    every = _compared(shown, Replicas(_INFERRED, (tuple(sorted(shown)),)))
    if every.relation == "agrees":
        return every
    near = every.apart <= _NEAR
    return every if near else replace(every, relation="own data", apart=0.0, ranks=())


def _compared(shown: Mapping[int, Shown], layout: Replicas) -> Held:
    first = shown[min(shown)]
    limit = _ROUNDINGS * roundoff(first.dtype)
    apart, ranks = 0.0, []
    for group in layout.groups:
        for rank in group[1:]:
            distance = _distance(shown[group[0]], shown[rank])
            apart = max(apart, distance)
            if distance > limit:
                ranks.append(rank)
    compares = any(len(group) > 1 for group in layout.groups)
    relation: Relation = "disagrees" if ranks else "agrees" if compares else "own data"
    kind = kind_of(first.tags)
    group_name = group_of(first.name, first.tags)
    return Held(
        first.name, first.tags, group_name, kind, first.dtype, relation, layout.layout, apart, tuple(ranks), shown
    )


def _distance(one: Shown, other: Shown) -> float:
    if one.shape != other.shape or one.nonfinite != other.nonfinite:
        return math.inf
    off = float(np.linalg.norm(one.values - other.values))
    norm = max(float(np.linalg.norm(one.values)), float(np.linalg.norm(other.values)))
    return off / norm if norm else 0.0


def _cosine(one: Shown, other: Shown) -> float:
    norms = float(np.linalg.norm(one.values) * np.linalg.norm(other.values))
    return float(one.values @ other.values) / norms if norms else 0.0


def unreduced(before: Sequence[Held], at: Held) -> Held | None:
    """Of the taps before ``at`` the last one whose differences between the ranks are just those of ``at``.

    A partial sum is added to a copy: what differs then is what the ranks' partial sums differ by.
    """
    if not at.ranks or not math.isfinite(at.apart):
        return None
    for each in reversed(before):
        if each.relation != "own data" or each.kind != at.kind:
            continue
        pairs = [(each.shown[0], each.shown[rank], at.shown[0], at.shown[rank]) for rank in at.ranks]
        if all(_same_difference(*pair) for pair in pairs):
            return each
    return None


def _same_difference(one: Shown, other: Shown, mine: Shown, theirs: Shown) -> bool:
    if one.shape != mine.shape or other.shape != theirs.shape:
        return False
    wanted = mine.values - theirs.values
    return float(np.linalg.norm(wanted - (one.values - other.values))) <= _EXPLAINED * float(np.linalg.norm(wanted))
