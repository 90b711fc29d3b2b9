"""Compares the ranks of one side: finds replicas that differ, sums that were not reduced, and different inputs.

A rank sends a sketch of each tap: a short linear random projection, so distances and sums of tensors are those of their
sketches to a few per cent. Equal tensors have equal sketches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from graftlab.base.tap_groups import group_of, is_data, kind_of, place_in_blame
from graftlab.base.text import numbered
from graftlab.diffs.rounding import roundoff
from graftlab.layouts.replicas import Replicas, TapSketch

Relation = Literal["agrees", "disagrees", "own data"]

# Up to this distance two ranks' tensors count as copies. Shards of random data are further apart.
_NEAR = 0.2
# From this cosine on they also do, if they differ by a known partial sum.
_RESEMBLES = 0.2
# A partial sum is added to a copy a few taps later.
_LOOKED_BACK = 16
_INFERRED = "inferred from near values"
FROM_WEIGHT = "inferred from its weight"
FROM_GROUP = "inferred from other taps of its group"
# Copies whose sums ran in different orders differ by some roundings.
_ROUNDINGS = 32
# The relative error up to which one tap's difference explains another's.
_EXPLAINED = 1e-2


@dataclass(frozen=True)
class TapAcrossRanks:
    """One call of a tap on all ranks. ``apart`` is the largest relative distance between replicas."""

    name: str
    tags: dict[str, Any]
    group: str
    kind: str | None
    dtype: str
    relation: Relation
    layout: str
    apart: float = 0.0
    ranks: tuple[int, ...] = ()
    """The ranks that differ from the first of their replicas."""
    shown: Mapping[int, TapSketch] = field(default_factory=dict, repr=False)
    groups: tuple[tuple[int, ...], ...] = ()

    def first_of(self, rank: int) -> int:
        """The rank with whose copy this rank's is compared."""
        return next(group[0] for group in self.groups if rank in group)


@dataclass(frozen=True)
class ReplicaComparison:
    """All taps of one side across its ranks, in execution order; ``missing`` are taps that some rank lacks."""

    world_size: int
    taps: Sequence[TapAcrossRanks]
    missing: Sequence[str] = ()
    skipped: Sequence[str] = ()

    @property
    def disagreeing(self) -> list[TapAcrossRanks]:
        """The copies that differ, in the order of blame."""
        found = [each for each in self.taps if each.relation == "disagrees"]
        return sorted(found, key=lambda each: -1 if is_data(each.tags) else place_in_blame(each.group))


def check_replicas(
    ranks: Sequence[Sequence[TapSketch]],
    declared: Callable[[str], Replicas | None],
    mesh: Mapping[str, Sequence[tuple[int, ...]]] | None = None,
) -> ReplicaComparison:
    """Compare the sketches of one side's ranks, one sequence a rank.

    ``mesh`` has the groups of ranks along each dimension, such as the data parallel groups of all tensor parallel
    coordinates: a tensor may be a copy along one dimension only. ``declared`` returns the layout that the user gave for
    a tap's name; otherwise the tap's own layout counts, as a DTensor has one; otherwise the layout is inferred. Tensors
    near each other are copies. Others are each rank's own data, unless other taps of the group, in other layers or
    steps, are equal on all ranks. The gradient and the update of a weight have the weight's layout.
    """
    size = len(ranks)
    by_place: dict[tuple[Any, ...], dict[int, TapSketch]] = {}
    for rank, shown in enumerate(ranks):
        for each in shown:
            by_place.setdefault(each.place, {})[rank] = each
    whole = {place: each for place, each in by_place.items() if len(each) == size}
    missing = [
        f"{next(iter(each.values())).name} (on {numbered('rank', each)} only)"
        for each in by_place.values()
        if len(each) < size
    ]
    ways = [Replicas(_INFERRED, (tuple(range(size)),))]
    ways += [Replicas(f"{_INFERRED} along {name}", tuple(groups)) for name, groups in (mesh or {}).items()]
    held = [_relate(each, declared, ways) for each in whole.values()]
    copied = {each.shown[0].shape for each in held if each.relation == "agrees" and not is_data(each.tags)}
    # Parts of a sequence are near each other if they share something large, such as a bias.
    held = [
        replace(each, relation="own data", layout=_INFERRED, apart=0.0, ranks=())
        if _is_guess(each) and _is_part(each.shown[0].shape, copied, size)
        else each
        for each in held
    ]
    inferred = {way.layout: way for way in ways}
    equal = {
        each.group: inferred[each.layout] for each in held if each.relation == "agrees" and each.layout in inferred
    }
    copies = [each for each in held if each.kind == "param" and each.relation != "own data"]
    replicated = {each.name: inferred.get(each.layout, ways[0]) for each in copies}
    found = [
        _second_look(each, held[max(0, at - _LOOKED_BACK) : at], equal, replicated, ways, copied)
        if each.relation == "own data" and each.layout == _INFERRED
        else each
        for at, each in enumerate(held)
    ]
    return ReplicaComparison(size, found, missing)


def _is_guess(each: TapAcrossRanks) -> bool:
    """Whether only nearness suggests that the ranks' differing values or gradients are meant to be copies."""
    return each.relation == "disagrees" and each.layout.startswith(_INFERRED) and each.kind in (None, "grad")


def _is_part(shape: tuple[int, ...], copied: Collection[tuple[int, ...]], size: int) -> bool:
    """Whether this is the shape of an equal part of a copy, but not of any copy."""
    wholes = ((*shape[:dim], extent * size, *shape[dim + 1 :]) for dim, extent in enumerate(shape))
    return shape not in copied and any(whole in copied for whole in wholes)


def _second_look(
    each: TapAcrossRanks,
    before: Sequence[TapAcrossRanks],
    equal: Mapping[str, Replicas],
    weights: Mapping[str, Replicas],
    ways: Sequence[Replicas],
    copied: Collection[tuple[int, ...]],
) -> TapAcrossRanks:
    """Check whether a tap is a copy although its ranks' tensors are not near. ``copied`` are the shapes of copies.

    A sum that was not reduced has the shape of the tensor to which it is added. Shards of one tensor, such as parts of
    a sequence, have a smaller shape, and do not become a sum by a bias that is added to each.
    """
    weight = _weight_of(each, weights) if each.kind in ("param_grad", "optimizer") else None
    like = weight or equal.get(each.group)
    if like is not None:
        why = FROM_WEIGHT if weight is not None else FROM_GROUP
        return _compared(each.shown, Replicas(like.layout.replace(_INFERRED, why), like.groups))
    for way in ways if each.shown[0].shape in copied else ():
        if all(_cosine(each.shown[group[0]], each.shown[rank]) >= _RESEMBLES for group in way.groups for rank in group):
            copy = _compared(each.shown, way)
            if unreduced(before, copy) is not None:
                return copy
    return each


def _weight_of(held: TapAcrossRanks, weights: Mapping[str, Replicas]) -> Replicas | None:
    return weights.get(held.name) or weights.get(held.name.rpartition(".")[0])


def _relate(
    shown: Mapping[int, TapSketch], declared: Callable[[str], Replicas | None], ways: Sequence[Replicas]
) -> TapAcrossRanks:
    first = shown[0]
    layout = declared(first.name) or _declared_by_values(shown)
    if layout is not None:
        return _compared(shown, layout)
    every = [_compared(shown, way) for way in ways]
    # A tensor that is a copy along one dimension of the mesh is no failed copy along another.
    for held in every:
        if held.relation == "agrees":
            return held
    for held in every:
        if held.apart <= _NEAR:
            return held
    return replace(every[0], relation="own data", apart=0.0, ranks=())


def _declared_by_values(shown: Mapping[int, TapSketch]) -> Replicas | None:
    """The tap's declared layout on all ranks, which may be on several meshes, such as data parallel groups."""
    declared = [each.declared for each in shown.values() if each.declared is not None]
    if not declared:
        return None
    groups = dict.fromkeys(group for each in declared for group in each.groups)
    return Replicas(declared[0].layout, tuple(groups))


def _compared(shown: Mapping[int, TapSketch], layout: Replicas) -> TapAcrossRanks:
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
    return TapAcrossRanks(
        first.name,
        first.tags,
        group_name,
        kind,
        first.dtype,
        relation,
        layout.layout,
        apart,
        tuple(ranks),
        shown,
        layout.groups,
    )


def _distance(one: TapSketch, other: TapSketch) -> float:
    if one.shape != other.shape or one.nonfinite != other.nonfinite:
        return math.inf
    off = float(np.linalg.norm(one.values - other.values))
    norm = max(float(np.linalg.norm(one.values)), float(np.linalg.norm(other.values)))
    return off / norm if norm else 0.0


def _cosine(one: TapSketch, other: TapSketch) -> float:
    norms = float(np.linalg.norm(one.values) * np.linalg.norm(other.values))
    return float(one.values @ other.values) / norms if norms else 0.0


def unreduced(before: Sequence[TapAcrossRanks], at: TapAcrossRanks) -> TapAcrossRanks | None:
    """The last tap before ``at`` whose differences between the ranks are exactly those of ``at``.

    A partial sum is added to a copy, so the results differ exactly by the ranks' partial sums.
    """
    if not at.ranks or not math.isfinite(at.apart):
        return None
    for each in reversed(before):
        if each.relation != "own data" or each.kind != at.kind:
            continue
        pairs = [
            (each.shown[at.first_of(rank)], each.shown[rank], at.shown[at.first_of(rank)], at.shown[rank])
            for rank in at.ranks
        ]
        if all(_same_difference(*pair) for pair in pairs):
            return each
    return None


def _same_difference(one: TapSketch, other: TapSketch, mine: TapSketch, theirs: TapSketch) -> bool:
    if one.shape != mine.shape or other.shape != theirs.shape:
        return False
    wanted = mine.values - theirs.values
    return float(np.linalg.norm(wanted - (one.values - other.values))) <= _EXPLAINED * float(np.linalg.norm(wanted))
