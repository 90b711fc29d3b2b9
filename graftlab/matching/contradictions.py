"""Pairs that contradict their names or each other, and so may be the fault."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import lru_cache

import torch
from torch import Tensor

from graftlab.base.world import SIDES
from graftlab.errors import LayoutError
from graftlab.layouts import Gather, Layout, Part, Rearrange, Rows, Window, join_parts
from graftlab.matching.names import (
    beside_numbered_role,
    fused_roles,
    in_any_layer,
    last_role,
    layer_of,
    layers_of,
    path_numbers_of,
    place_of,
    role_of,
)
from graftlab.matching.pair import Pair
from graftlab.matching.rules import rules_of

IN_PART = "is compared only in part: it contains"


@dataclass(frozen=True)
class Contradiction:
    """A sentence, and the target's tap that it is about."""

    tap: str
    text: str


def first_taps(found: Iterable[Contradiction]) -> dict[str, str]:
    """Each sentence once, with the first tap that it is about."""
    taps: dict[str, str] = {}
    for each in found:
        taps.setdefault(each.text, each.tap)
    return taps


def other_roles(pairs: Sequence[Pair]) -> list[Contradiction]:
    """Target taps with the values of another role than their name has, such as k for v.

    Two swapped taps share a sentence.
    """
    parts = fused_parts(pairs)
    of_whole: dict[tuple[str, str], set[str]] = defaultdict(set)
    for pair in pairs:
        if pair.layout.leaves_out:
            of_whole[pair.whole, pair.outer].add(pair.inner)

    def is_part(pair: Pair) -> bool:
        """Whether the whole has several parts, so that its name can be the role of only one of them."""
        return (
            bool(pair.layout.leaves_out)
            and (pair.baseline, pair.target) not in parts
            and len(of_whole[pair.whole, pair.outer]) > 1
        )

    found = [mixed for pair in pairs if not is_part(pair) and (mixed := _other_role(pair, parts)) is not None]
    found = [mixed for mixed in found if _has_roles(mixed.pair, pairs)]
    problems: list[Contradiction] = []
    while found:
        one = found.pop(0)
        twin = max((other for other in found if one.is_swapped_with(other)), key=one.nearness, default=None)
        if twin is None:
            problems.append(Contradiction(one.pair.target, one.text))
            continue
        # Two taps with each other's values are one mistake.
        found.remove(twin)
        text = f"{one.text}, and {twin.short}: the two are swapped"
        problems += [Contradiction(one.pair.target, text), Contradiction(twin.pair.target, text)]
    return problems


def _has_roles(pair: Pair, pairs: Sequence[Pair]) -> bool:
    """Whether numbered names, such as ``w1``, have their customary roles, as a pair beside this one shows.

    Either the third name is beside them, or the other side has something of that role by a plainer name.
    """
    names = {side: {getattr(each, side) for each in pairs} for side in SIDES}
    for side, other in (SIDES, SIDES[::-1]):
        name, layer = getattr(pair, side), layer_of(getattr(pair, other))
        beside = beside_numbered_role(name)
        if beside is None or beside in names[side]:
            continue
        plain = (each for each in names[other] if layer_of(each) == layer and beside_numbered_role(each) is None)
        if all(role_of(each) != role_of(name) for each in plain):
            return False
    return True


def fused_parts(pairs: Iterable[Pair]) -> dict[tuple[str, str], tuple[str, str]]:
    """The role of each pair's part in a fused parameter, known from the order of the parts."""
    fused: dict[str, list[tuple[float, Pair]]] = defaultdict(list)
    for pair in pairs:
        if pair.layout.steps and isinstance(pair.layout.steps[0], Part) and fused_roles(pair.outer):
            part = pair.layout.steps[0]
            fused[pair.outer].append((sum(part.of[: part.index]) / sum(part.of), pair))
    roles: dict[tuple[str, str], tuple[str, str]] = {}
    for outer, parts in fused.items():
        starts = sorted({start for start, _ in parts})
        names = fused_roles(outer)
        if len(starts) == len(names):
            for start, pair in parts:
                roles[pair.baseline, pair.target] = (outer, names[starts.index(start)])
    return roles


@dataclass(frozen=True)
class _MixedRole:
    """A pair whose target has different roles by its name, or its place in a fused tensor, and by its values."""

    pair: Pair
    named: str
    held: str
    text: str
    short: str
    """The sentence in its short form, which follows a full one on the same module."""

    def is_swapped_with(self, other: _MixedRole) -> bool:
        return (
            (self.named, self.held) == (other.held, other.named)
            and layer_of(self.pair.target) == layer_of(other.pair.target)
            and last_role(self.pair.target) == last_role(other.pair.target)
        )

    def nearness(self, other: _MixedRole) -> float:
        """How much two targets' names have in common, from 0 to 1."""
        return SequenceMatcher(None, self.pair.target, other.pair.target).ratio()


def _other_role(pair: Pair, roles: Mapping[tuple[str, str], tuple[str, str]]) -> _MixedRole | None:
    if (pair.baseline, pair.target) in roles:
        outer, role = roles[pair.baseline, pair.target]
        inner = pair.target if outer == pair.baseline else pair.baseline
        named = role_of(inner)
        if named and named[0] in ("attention", "mlp") and named[1] != role:
            if outer == pair.target:
                text = f"{inner} in place of its {role}"
                return _MixedRole(pair, role, named[1], f"{outer} has {text}", text)
            text = f"{inner} is the {role} of {outer}, not its {named[1]}"
            return _MixedRole(pair, named[1], role, text, f"{inner} its {role}")
        return None
    mine, theirs = role_of(pair.baseline), role_of(pair.target)
    if mine and theirs and mine[0] == theirs[0] and mine[1] != theirs[1]:
        held = f"the values of {pair.baseline}, which is {mine[1]}"
        text = f"{pair.target} is {theirs[1]} by its name but has {held}"
        return _MixedRole(pair, theirs[1], mine[1], text, f"{pair.target} has {held}")
    return None


def other_parts(pairs: Sequence[Pair]) -> list[Contradiction]:
    """Taps of one size that each match a part of the other side's larger tensor, but not each other.

    If the baseline takes the first token and the target the last, both are parts of an earlier tap that agrees.
    Compared with that tap only, neither would ever differ.
    """
    wholes = {(pair.baseline, pair.target) for pair in pairs if not pair.layout.leaves_out}
    taken = {side: [p for p in pairs if p.whole == side and p.layout.leaves_out] for side in ("baseline", "target")}
    return [
        Contradiction(
            mine.target,
            f"{mine.target} is a part of {mine.baseline} ({mine.layout.text!r}), and the baseline's {theirs.baseline} "
            f"is a different part of the target's {theirs.target} ({theirs.layout.text!r}), though they may be one "
            "quantity",
        )
        for mine in taken["baseline"]
        for theirs in taken["target"]
        if (mine.baseline, theirs.target) in wholes
        and (place_of(mine.target) == place_of(theirs.baseline) or _share(mine) == _share(theirs))
    ]


def _share(pair: Pair) -> tuple[int, int]:
    """A part's share of the whole, as a fraction."""
    step = pair.layout.steps[0]
    if isinstance(step, Window):
        return step.length, 0
    if not isinstance(step, Part):
        return -1, id(pair)
    size, whole = step.of[step.index], sum(step.of)
    common = math.gcd(size, whole)
    return size // common, whole // common


def _arrangement(pair: Pair) -> tuple[str, str, str]:
    """A pair's layout without the steps for the rows of the batch, which may be written in several ways.

    It is also without the sizes of a reshape that keeps the order of all numbers: these follow from the shapes, which
    differ from layer to layer where a model halves its image.
    """
    steps = tuple(
        Rearrange(step.pattern) if isinstance(step, Rearrange) and step.keeps_order else step
        for step in pair.layout.steps
        if not isinstance(step, (Gather, Rows))
    )
    return Layout(steps, pair.layout.mesh).text, pair.whole, layers_of(pair.baseline)


def odd_layouts(pairs: Sequence[Pair], baseline: Collection[str]) -> list[Contradiction]:
    """Pairs whose layout or partner differs from that of the same tap in other layers, which may be the fault.

    ``baseline`` has the names of the baseline's taps that are in no pair. A different partner may be right: the first
    layer's input is the embedding, and one quantity may have two names. It is a contradiction only if the usual partner
    exists, and one of the two usually belongs to a different tap. A tap that has the usual partner in other layers
    too does not take it.
    """
    groups: dict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        if pair.by_value:
            groups[layers_of(pair.target)].append(pair)
    usual_of: dict[str, list[Pair]] = {}
    for place, group in groups.items():
        layouts: dict[tuple[str, str, str], list[Pair]] = defaultdict(list)
        for pair in group:
            layouts[_arrangement(pair)].append(pair)
        usual_of[place] = max(layouts.values(), key=len)
    places = {layers_of(each[0].baseline): place for place, each in usual_of.items() if len(each) > 1}
    partners: dict[str, set[str]] = defaultdict(set)
    for pair in pairs:
        partners[pair.baseline].add(pair.target)
    problems = []
    for place, usual in usual_of.items():
        # Parts of one fused tensor have different layouts; only a minority is odd.
        odd = Counter(map(_arrangement, groups[place]))
        example = usual[0]
        targets = {each.target for each in usual}
        regular = _regular(groups[place])
        for pair in groups[place]:
            key = _arrangement(pair)
            # The usual pairs are among these.
            if pair.target in targets or 2 * odd[key] > len(usual):
                continue
            rules = (rule for rule in rules_of(usual) if rule.covers(pair.target))
            expected = next((rule.baseline_for(pair.target) for rule in rules), None)
            # A module and the one after it in a sequence, which only moves dims, have the same values.
            if key[2] == layers_of(example.baseline) and expected in (None, pair.baseline):
                text = (
                    f"{pair.target} is {pair.baseline} in the layout {pair.layout.text!r}, where {len(usual)} others "
                    f"like it are in the layout {example.layout.text!r}"
                )
                problems.append(Contradiction(pair.target, text))
                continue
            if key in regular:
                continue
            # Another result of the same module is no further layer of this one.
            others = partners.get(expected, set()) - {pair.target} if expected is not None else set()
            # All layers may share a tap without a layer, such as a table of angles that the model has twice.
            shared = expected is not None and layer_of(expected) is None
            taken = any(
                not (shared and layers_of(other) == place)
                and not _have_one_partner(usual, usual_of.get(layers_of(other), ()))
                for other in others
            )
            moved = expected in baseline and places.get(key[2], place) != place
            if taken or moved:
                text = (
                    f"{pair.target} is {pair.baseline}, where {len(usual)} others like it are paired as "
                    f"{example.target} with {example.baseline}"
                )
                problems.append(Contradiction(pair.target, text))
    return problems


def _have_one_partner(one: Sequence[Pair], other: Sequence[Pair]) -> bool:
    """Whether two places of the target are one quantity in several layers, such as a module's and its last member's."""
    return len({pair.baseline for pair in one} & {pair.baseline for pair in other}) > 1


def _regular(pairs: Sequence[Pair]) -> set[tuple[str, str, str]]:
    """How pairs of the same place within their layers are arranged, if most layers agree on it.

    A list may alternate between two kinds, as ``convs.{0, 1, 2, 3}`` where the baseline has ``convs1`` and ``convs2``.
    """
    within: dict[str, list[tuple[str, str, str]]] = defaultdict(list)
    for pair in pairs:
        if len(path_numbers_of(pair.target)) > 1:
            within[in_any_layer(pair.target)].append(_arrangement(pair))
    usual = [(Counter(found).most_common(1)[0], len(found)) for found in within.values()]
    return {arrangement for (arrangement, count), size in usual if count > 1 and 2 * count > size}


def in_groups(pairs: Sequence[Pair], unsure: Collection[str]) -> list[Contradiction]:
    """Taps that are groups of heads of a fused tap, in layers where some tap does not match by value.

    ``unsure`` has the target's taps whose values do not match. If all of a layer's match, its parts were read
    correctly. So were those of a module inside the layer, such as its attention, whose output matches.
    """
    layers = {layer_of(name) for name in unsure}
    sure = {pair.target.partition("[")[0] for pair in pairs if pair.target not in unsure}
    places: dict[tuple[str, str], Pair] = {}
    for pair in pairs:
        part = next((step for step in pair.layout.steps if isinstance(step, Part) and step.groups > 1), None)
        if part is None or pair.whole != "baseline" or layer_of(pair.target) not in layers:
            continue
        module = pair.target.rpartition(".")[0]
        if module.rpartition(".")[2].isdecimal() or module not in sure:
            places.setdefault((layers_of(pair.target), part.text), pair)
    return [
        Contradiction(
            pair.target,
            f"{pair.target} is taken out of {pair.baseline} by groups of heads ({pair.layout.text!r}), which is right "
            "only if the baseline reads it that way",
        )
        for pair in places.values()
    ]


def in_part(pairs: Sequence[Pair], shapes: Mapping[str, Sequence[int]]) -> list[Contradiction]:
    """The target's taps that the baseline shows only in part. ``shapes`` are the target's."""
    parts: dict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        parts[pair.target].append(pair)
    problems = []
    for name, own in parts.items():
        if rows := _rows_without(own):
            problems.append(Contradiction(name, f"{name} is compared only in part: {rows}, as padding has"))
        if name not in shapes or any(pair.whole == "baseline" or not pair.layout.leaves_out for pair in own):
            continue
        # The rows that a rule finds are known only for a given batch, and include those that it does not find.
        gap = uncovered((_without_row_rules(pair.layout) for pair in own), shapes[name])
        if gap is not None:
            shown = ", ".join(pair.baseline for pair in own)
            left = f"{gap.double().mean():.0%}"
            text = f"{name} {IN_PART} {shown}; no baseline tap has the other {left}"
            problems.append(Contradiction(name, text))
    return problems


def _without_row_rules(layout: Layout) -> Layout:
    """The steps before one that finds rows by a rule."""
    places = (number for number, step in enumerate(layout.steps) if isinstance(step, Rows))
    return Layout(layout.steps[: next(places, None)])


def _rows_without(pairs: Sequence[Pair]) -> str:
    """How many rows of a target tap no pair finds in the baseline; blank if the pairs find all."""
    lacking = []
    for pair in pairs:
        gathers = [step for step in pair.layout.steps if isinstance(step, Gather) and step.lacks]
        if pair.whole == "target" or not gathers:
            return ""
        lacking.append(gathers[-1].rows < 0)
    if not lacking or any(len(each) != len(lacking[0]) for each in lacking):
        return ""
    left = int(torch.stack(lacking).all(0).sum())
    return f"{left} of its {len(lacking[0])} rows have no row of the baseline's" if left else ""


def uncovered(layouts: Iterable[Layout], shape: Sequence[int]) -> Tensor | None:
    """A mask of the whole's elements that none of these layouts takes; None if they take all.

    Layouts that do not fit the shape, such as one that counts a complex tensor's numbers singly, take nothing.
    """
    given = tuple(layouts)
    dims = {_only_dim(layout, len(shape)) for layout in given}
    if len(shape) > 1 and len(dims) == 1 and (dim := dims.pop()) is not None:
        # A fused weight may have a hundred million elements, and what is known of one holds for its whole row.
        rows = uncovered((_in_one_dim(layout) for layout in given), (shape[dim],))
        if rows is None:
            return None
        return rows.view([-1 if place == dim else 1 for place in range(len(shape))]).expand(tuple(shape))
    has_rows = any(isinstance(step, (Gather, Rows)) for layout in given for step in layout.steps)
    # Layers have the same layouts, unless these have rows of their own.
    return (_uncovered if has_rows or math.prod(shape) > _LARGE else _uncovered_once)(given, tuple(shape))


# A mask with more elements is not kept.
_LARGE = 1 << 22


def _uncovered(layouts: tuple[Layout, ...], shape: tuple[int, ...]) -> Tensor | None:
    ones = torch.ones(shape, dtype=torch.bool, device="cpu")
    parts = []
    for layout in layouts:
        with suppress(LayoutError):
            parts.append((layout, [layout.local(ones)]))
    if not parts:
        return ones
    known = join_parts(parts, shape).known
    return None if known is None else ~known


_uncovered_once = lru_cache(maxsize=16)(_uncovered)


def _only_dim(layout: Layout, dims: int) -> int | None:
    """The dimension along which a layout takes a part of a tensor, if that is all it does; None otherwise."""
    if len(layout.steps) != 1 or not isinstance(step := layout.steps[0], (Part, Window)):
        return None
    return step.dim % dims if -dims <= step.dim < dims else None


def _in_one_dim(layout: Layout) -> Layout:
    step = layout.steps[0]
    assert isinstance(step, (Part, Window))
    return Layout((replace(step, dim=0),))


def fills(layout: Layout, gap: Tensor) -> bool:
    """Whether a part lies entirely in a gap that others leave."""
    try:
        return bool(layout.local(gap).all())
    except LayoutError:
        return False
