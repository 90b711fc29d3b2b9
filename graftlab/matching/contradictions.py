"""Pairs that contradict themselves or each other: what may itself be the fault that is looked for."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from graftlab.layouts import Layout, Part, join_parts
from graftlab.matching.names import fused_roles, place_of, role_of
from graftlab.matching.proposal import Pair


def other_roles(pairs: Sequence[Pair]) -> list[tuple[str, str]]:
    """What a target holds that its name says another is, k where v belongs or up where gate does: which, and that."""
    parts = fused_parts(pairs)
    return [(pair.target, said) for pair in pairs if (said := _other_role(pair, parts)) is not None]


def fused_parts(pairs: Iterable[Pair]) -> dict[tuple[str, str], tuple[str, str]]:
    """The role that each pair's part of a fused parameter has there, by the order of the parts."""
    fused: dict[str, list[tuple[float, Pair]]] = defaultdict(list)
    for pair in pairs:
        outer = pair.baseline if pair.whole == "baseline" else pair.target
        if pair.layout.steps and isinstance(pair.layout.steps[0], Part) and fused_roles(outer):
            part = pair.layout.steps[0]
            fused[outer].append((sum(part.of[: part.index]) / sum(part.of), pair))
    roles: dict[tuple[str, str], tuple[str, str]] = {}
    for outer, parts in fused.items():
        starts = sorted({start for start, _ in parts})
        names = fused_roles(outer)
        if len(starts) == len(names):
            for start, pair in parts:
                roles[pair.baseline, pair.target] = (outer, names[starts.index(start)])
    return roles


def _other_role(pair: Pair, roles: Mapping[tuple[str, str], tuple[str, str]]) -> str | None:
    if (pair.baseline, pair.target) in roles:
        outer, role = roles[pair.baseline, pair.target]
        inner = pair.target if outer == pair.baseline else pair.baseline
        named = role_of(inner)
        if named and named[0] in ("attention", "mlp") and named[1] != role:
            if outer == pair.target:
                return f"{outer} holds {inner} where its {role} belongs"
            return f"{inner} is the {role} of {outer}, not its {named[1]}"
        return None
    mine, theirs = role_of(pair.baseline), role_of(pair.target)
    if mine and theirs and mine[0] == theirs[0] and mine[1] != theirs[1]:
        return f"{pair.target} is {theirs[1]} by its name, and holds {pair.baseline}, which is {mine[1]}"
    return None


def other_parts(pairs: Sequence[Pair]) -> list[str]:
    """Taps of one size that are each found in the other side's larger tensor, and not in each other.

    Where the baseline takes the first token and the target the last, both are parts of what goes before them, which
    agrees; compared in that way alone, nothing would ever differ.
    """
    wholes = {(pair.baseline, pair.target) for pair in pairs if not pair.layout.leaves_out}
    taken = {side: [p for p in pairs if p.whole == side and p.layout.leaves_out] for side in ("baseline", "target")}
    return [
        f"{mine.target} is a part of {mine.baseline} ({mine.layout.text!r}), and the baseline's {theirs.baseline} is "
        f"another part of the target's {theirs.target} ({theirs.layout.text!r}), though they may be one quantity"
        for mine in taken["baseline"]
        for theirs in taken["target"]
        if (mine.baseline, theirs.target) in wholes
        and (place_of(mine.target) == place_of(theirs.baseline) or _share(mine) == _share(theirs))
    ]


def _share(pair: Pair) -> tuple[int, int]:
    """Which share of the whole a part has."""
    step = pair.layout.steps[0]
    if not isinstance(step, Part):
        return -1, id(pair)
    size, whole = step.of[step.index], sum(step.of)
    common = math.gcd(size, whole)
    return size // common, whole // common


def odd_layouts(pairs: Sequence[Pair]) -> list[str]:
    """What matches in another layout than its neighbours in other layers do, which may itself be the fault."""
    groups: dict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        if pair.by_value:
            groups[place_of(pair.target)].append(pair)
    said = []
    for group in groups.values():
        layouts: dict[tuple[str, str, str], list[Pair]] = defaultdict(list)
        for pair in group:
            layouts[(pair.layout.text, pair.whole, place_of(pair.baseline))].append(pair)
        usual = max(layouts.values(), key=len)
        if len(usual) < 2 or len(layouts) == 1:
            continue
        for odd in layouts.values():
            # Parts of one fused tensor are different layouts by right; only a minority is odd.
            if odd is usual or len(odd) * 2 > len(usual):
                continue
            for pair in odd:
                own, others = pair.layout.text, usual[0].layout.text
                if any(other.target == pair.target for other in usual):
                    continue
                if own != others:
                    said.append(
                        f"{pair.target} is {pair.baseline} in the layout {own!r}, where {len(usual)} others like it "
                        f"are in the layout {others!r}"
                    )
                else:
                    said.append(
                        f"{pair.target} is {pair.baseline}, where {len(usual)} others like it are such as "
                        f"{usual[0].target} is {usual[0].baseline}"
                    )
    return said


def uncovered(layouts: Iterable[Layout], shape: Sequence[int]) -> Tensor | None:
    """A mask of the elements of a whole of this shape that none of these layouts takes; None where all are taken."""
    ones = torch.ones(tuple(shape), dtype=torch.bool)
    known = join_parts([(layout, [layout.local(ones)]) for layout in layouts], shape).known
    return None if known is None else ~known


def fills(layout: Layout, gap: Tensor) -> bool:
    """Whether a part lies in what others leave uncovered, all of it."""
    return bool(layout.local(gap).all())
