"""Mistakes of a weight conversion, found as contradictions between values, names, layers and layouts."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
import torch

from graftlab.base.quantisation import is_quantised
from graftlab.errors import LayoutError
from graftlab.layouts import Layout, Part, Rearrange, Scale
from graftlab.matching.contradictions import Contradiction, first_taps, odd_layouts, other_roles, uncovered
from graftlab.matching.heads import odd_gates, odd_heads
from graftlab.matching.names import last_role, layer_of, module_of, path_numbers_of, place_of, role_of, similarity
from graftlab.matching.pair import Pair
from graftlab.matching.recorded_taps import RecordedTap

Items = Mapping[str, RecordedTap]

TRANSPOSED = "a b -> b a"
_HALVES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


def mistakes_of(pairs: Sequence[Pair], baseline: Items, target: Items) -> list[str]:
    """A sentence for each mistake, in the order of the target's parameters."""
    sure = [pair for pair in pairs if pair.by_value]
    wrong = misplaced(sure, baseline)
    names = {each.tap for each in wrong}
    problems = wrong
    problems += odd_transpositions(sure, baseline)
    problems += [each for each in _odd_kernels(sure, baseline) if each.tap not in names]
    problems += _odd_biases(sure)
    problems += odd_heads(sure, baseline, target, names)
    problems += odd_gates(sure, baseline)
    problems += [each for each in _held_twice(sure, baseline) if each.tap not in names]
    for pair in pairs:
        problems += [Contradiction(pair.target, text) for text in _changed_values(pair, baseline, target)]
    problems += _not_covered(sure, target)
    paired = {pair.target for pair in pairs}
    for name, tap in target.items():
        if name not in paired:
            problems.append(Contradiction(name, _without_partner(name, tap, baseline)))
    order = {name: place for place, name in enumerate(target)}
    taps = first_taps(problems)
    return sorted(taps, key=lambda text: order[taps[text]])


def misplaced(pairs: Sequence[Pair], baseline: Iterable[str]) -> list[Contradiction]:
    """Target parameters with the values of another role, kind or layer, or in an unusual layout."""
    problems = [*other_roles(pairs), *_other_kinds(pairs)]
    problems += _other_layers(pairs, {each.tap for each in problems})
    names = {each.tap for each in problems}
    return [*problems, *(each for each in odd_layouts(pairs, [*baseline]) if each.tap not in names)]


def notices_of(pairs: Sequence[Pair], baseline: Items) -> list[str]:
    """Sentences on what is unusual but may be intended: rows in a different order, unused parts."""
    problems: list[str] = []
    for pair in pairs:
        for step in pair.layout.steps:
            if isinstance(step, Rearrange) and step.text != TRANSPOSED and step.sizes:
                problems.append(
                    f"{pair.target} is {pair.baseline} with its rows or columns in a different order ({pair.layout}): "
                    f"correct if the two sides' code counts heads or rotary pairs differently"
                )
    for (name, groups), inner in _in_groups(pairs).items():
        problems.append(
            f"{name} has {', '.join(inner)} side by side in each of {groups} groups of heads, not one after the other: "
            "correct if the code that reads it counts them that way"
        )
    wholes: dict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        if pair.whole == "baseline" and pair.layout.leaves_out:
            wholes[pair.baseline].append(pair)
    for name, parts in wholes.items():
        rest = _rest(name, parts, baseline)
        if rest:
            problems.append(f"{name} is only partly used: the target lacks {rest} of it")
    return list(dict.fromkeys(problems))


def _in_groups(pairs: Sequence[Pair]) -> dict[tuple[str, int], list[str]]:
    """Fused parameters whose parts alternate by groups, with the number of groups, and the parts."""
    found: dict[tuple[str, int], list[str]] = defaultdict(list)
    for pair in pairs:
        for step in pair.layout.steps:
            if isinstance(step, Part) and step.groups > 1:
                found[pair.outer, step.groups].append(pair.inner)
    return found


# ---- names, layers and layouts ---------------------------------------------------------------------------------------


def _other_kinds(pairs: Sequence[Pair]) -> list[Contradiction]:
    """Parameters whose values have a different role, such as a weight with the values of a bias."""
    problems = []
    for pair in pairs:
        mine, theirs = last_role(pair.baseline), last_role(pair.target)
        if mine and theirs and mine != theirs:
            text = f"{pair.target} is {theirs} by its name but has the values of {pair.baseline}, which is {mine}"
            problems.append(Contradiction(pair.target, text))
    return problems


def _other_layers(pairs: Sequence[Pair], misplaced: Collection[str]) -> list[Contradiction]:
    """Layers that are not in the baseline's order, or occur twice; any may be left out."""
    groups: dict[tuple[str, str, str], list[tuple[int, int, Pair]]] = defaultdict(list)
    for pair in pairs:
        mine, theirs = layer_of(pair.baseline), layer_of(pair.target)
        if mine is not None and theirs is not None and pair.target not in misplaced:
            # ``f1`` and ``f2`` of one layer are two weights.
            key = (place_of(pair.baseline), place_of(pair.target), pair.layout.text)
            groups[key].append((theirs, mine, pair))
    problems = []
    every = [mine - theirs for group in groups.values() for theirs, mine, _ in group]
    for group in groups.values():
        group.sort(key=lambda each: path_numbers_of(each[2].target))
        places = [path_numbers_of(pair.baseline) for *_, pair in group]
        if all(one < other for one, other in itertools.pairwise(places)):
            continue
        levels = {_levels(places), _levels([path_numbers_of(pair.target) for *_, pair in group])}
        if len(levels - {0}) > 1:
            # One side counts within its layers what the other counts through, in whatever order.
            continue
        shifts = Counter(mine - theirs for theirs, mine, _ in group)
        usual, count = shifts.most_common(1)[0]
        where = f"as in {count} other layers"
        if count < 2 or 2 * count < len(group):
            # If two of three layers are swapped, they show no usual place, but other weights of these layers do.
            usual, count = Counter(every).most_common(1)[0]
            where = "as for other weights"
            count = count if 2 * count > len(every) else 0
        for theirs, mine, pair in group:
            text = f"{pair.target} has the values of {pair.baseline}, which is in layer {mine}"
            if count < 2:
                problems.append(
                    Contradiction(pair.target, f"{text}; the layers are in a different order than the baseline's")
                )
            elif mine - theirs != usual:
                problems.append(Contradiction(pair.target, f"{text}; it should be layer {theirs + usual}, {where}"))
    return problems


def _levels(places: Sequence[tuple[int, ...]]) -> int:
    """How many of the numbers in a name count something."""
    return sum(len(set(numbers)) > 1 for numbers in zip(*places, strict=True))


def _held_twice(pairs: Sequence[Pair], baseline: Items) -> list[Contradiction]:
    """Baseline parameters that two target parameters hold, while the target lacks one of the same shape."""
    holders: dict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        if not pair.layout.leaves_out and pair.whole == "baseline":
            holders[pair.baseline].append(pair)
    used = {pair.baseline for pair in pairs}
    problems = []
    for name, twice in holders.items():
        if len(twice) < 2:
            continue
        unused = [other for other, tap in baseline.items() if other not in used and tap.shape == baseline[name].shape]
        for other in unused:
            own = max(twice, key=lambda pair: similarity(pair.target, other) - similarity(pair.target, name))
            also = next(pair.target for pair in twice if pair is not own)
            text = f"{own.target} has the values of {name}, as {also} does; the target lacks the baseline's {other}"
            problems.append(Contradiction(own.target, text))
    return problems


def odd_transpositions(pairs: Sequence[Pair], baseline: Items) -> list[Contradiction]:
    """Square matrices fit either way, so the orientation of the other matrices shows the intended one."""
    # The orientation of a module's weight proves nothing about a parameter that the model's code multiplies itself.
    ways: dict[tuple[str, bool], list[Pair]] = defaultdict(list)
    square: list[tuple[Pair, str, bool]] = []
    for pair in pairs:
        shape = baseline[pair.baseline].shape
        names = role_of(pair.baseline, "embedding") or role_of(pair.target, "embedding")
        if len(shape) != 2 or names or "embed" in pair.baseline or "head" in pair.baseline:
            continue
        texts = [step.text for step in pair.layout.steps if not isinstance(step, (Part, Scale))]
        if texts not in ([], [TRANSPOSED]):
            continue
        last, transposed = pair.target.rpartition(".")[2], texts == [TRANSPOSED]
        if shape[0] == shape[1]:
            square.append((pair, last, transposed))
        else:
            ways[last, transposed].append(pair)
    problems = []
    for pair, last, transposed in square:
        others = ways[last, not transposed]
        if not ways[last, transposed] and len(others) >= 2:
            how, they = ("transposed", "are not") if transposed else ("not transposed", "are")
            text = (
                f"{pair.target} is {pair.baseline} {how}, and all {len(others)} matrices that are not "
                f"square {they}: being square, it fits either way"
            )
            problems.append(Contradiction(pair.target, text))
    return problems


def _odd_kernels(pairs: Sequence[Pair], baseline: Items) -> list[Contradiction]:
    """Kernels whose dims are exchanged, where all kernels are square, so that only the others show it."""
    kernels: dict[int, list[tuple[Pair, tuple[int, ...]]]] = defaultdict(list)
    for pair in pairs:
        shape = baseline[pair.baseline].shape
        order = _order_of_dims(pair.layout, len(shape))
        # Without rows and columns, any order fits.
        if order is not None and len(shape) > 3 and shape.count(1) < 2:
            kernels[len(shape)].append((pair, order))
    problems = []
    for of_dims in kernels.values():
        usual, count = Counter(order for _, order in of_dims).most_common(1)[0]
        example = next(pair for pair, order in of_dims if order == usual)
        for pair, order in of_dims:
            moved = [one for one, other in zip(order, usual, strict=True) if one != other]
            sizes = ([baseline[each.baseline].shape[dim] for dim in moved] for each, _ in of_dims)
            if moved and 2 * (len(of_dims) - count) <= count and all(len(set(own)) == 1 for own in sizes):
                text = (
                    f"{pair.target} is {pair.baseline} in the layout {pair.layout.text!r}, and {count} other kernels "
                    f"are in the layout {example.layout.text!r}: all are square, so they fit either way"
                )
                problems.append(Contradiction(pair.target, text))
    return problems


def _order_of_dims(layout: Layout, dims: int) -> tuple[int, ...] | None:
    """The baseline's dims in the target's order; None for a layout that is no permutation of them."""
    if not layout.steps:
        return tuple(range(dims))
    if len(layout.steps) > 1 or not isinstance(layout.steps[0], Rearrange):
        return None
    before, _, after = (part.split() for part in layout.steps[0].text.partition("->"))
    return tuple(map(before.index, after)) if sorted(before) == sorted(after) and len(before) == dims else None


def _odd_biases(pairs: Sequence[Pair]) -> list[Contradiction]:
    """Weights and their biases that are split, or fused, in different ways."""
    modules: dict[tuple[str, str], dict[str, Pair]] = defaultdict(dict)
    for pair in pairs:
        role = last_role(pair.target)
        if role in ("the weight", "the bias"):
            modules[module_of(pair.baseline), module_of(pair.target)][role] = pair
    problems = []
    for both in modules.values():
        if len(both) < 2:
            continue
        weight, bias = both["the weight"], both["the bias"]
        rows = [step.text for step in weight.layout.steps if isinstance(step, Part)]
        own = [step.text for step in bias.layout.steps if isinstance(step, Part)]
        mixed = [step for step in (*weight.layout.steps, *bias.layout.steps) if not isinstance(step, Part)]
        if rows != own and not [step for step in mixed if step.text != TRANSPOSED] and not _columns(weight.layout):
            text = (
                f"{bias.target} has {bias.baseline} in the layout {bias.layout.text!r}, and its weight is in the "
                f"layout {weight.layout.text!r}"
            )
            problems.append(Contradiction(bias.target, text))
    return problems


def _columns(layout: Layout) -> bool:
    return any(isinstance(step, Part) and step.dim != 0 for step in layout.steps) or TRANSPOSED in layout.text


# ---- values ---------------------------------------------------------------------------------------------------------


def rounded_to(baseline: RecordedTap, target: RecordedTap, pair: Pair) -> str | None:
    """The half-width dtype to which a target's wider values were rounded; None if they were not."""
    if pair.sureness != "near" or baseline.value is None or target.value is None or pair.whole != "baseline":
        return None
    if not target.dtype.is_floating_point or target.dtype.itemsize < 4 or baseline.dtype.itemsize < 4:
        return None
    try:
        taken = pair.layout.local(baseline.value.detach())
    except LayoutError:
        return None
    for dtype, name in _HALVES.items():
        if torch.equal(taken.to(dtype).to(target.dtype), target.value.detach()):
            return name
    return None


def _rounding(*dtypes: torch.dtype) -> float:
    """The largest relative L2 between a parameter and its copy in the coarser of two dtypes."""
    return max(map(_rounding_of, dtypes))


def _rounding_of(dtype: torch.dtype) -> float:
    if dtype.is_floating_point:
        return torch.finfo(dtype).eps
    # Codes of 8 bits, with a scale for each row or block.
    return 0.02 if is_quantised(dtype) else 0.0


def _changed_values(pair: Pair, baseline: Items, target: Items) -> list[str]:
    one, other = baseline[pair.baseline], target[pair.target]
    scales = [step for step in pair.layout.steps if isinstance(step, Scale)]
    if scales:
        scale = scales[0]
        how = [f"times {scale.factor:.6g}"] if scale.factor != 1 else []
        how += [f"{'plus' if scale.add > 0 else 'minus'} {abs(scale.add):.6g}"] if scale.add else []
        return [f"{pair.target} is {pair.baseline} {' '.join(how)}"]
    rounded = rounded_to(one, other, pair)
    if rounded:
        return [f"{pair.target} is {pair.baseline} rounded to {rounded}"]
    if pair.sureness == "near" and pair.rel is not None and pair.rel > _rounding(one.dtype, other.dtype):
        where = _differing_rows(pair, one, other).removesuffix(f", by rel_l2 {pair.rel:.2g}")
        return [f"{pair.target} is {pair.baseline} up to rel_l2 {pair.rel:.2g}{where}"]
    if pair.sureness in ("rule", "guess") and pair.rel is not None and pair.rel > 0 and pair.whole == "baseline":
        return [f"{pair.target} differs from {pair.baseline}{_differing_rows(pair, one, other)}"]
    return []


def _differing_rows(pair: Pair, one: RecordedTap, other: RecordedTap) -> str:
    """The rows that differ, if not all do."""
    if one.value is None or other.value is None:
        return ""
    wide = torch.complex128 if one.dtype.is_complex or other.dtype.is_complex else torch.float64
    try:
        taken = pair.layout.local(one.value.detach()).to(wide)
    except LayoutError:
        return ""
    mine = other.value.detach().to(wide)
    if taken.shape != mine.shape or not mine.numel():
        return ""
    if mine.numel() == 1:
        return f": {mine.item():g} in place of {taken.item():g}"
    if other.sketch.constant and other.flat is not None:
        return f": all its values are {other.flat[0]:g}, as if it had not been loaded"
    differs = ~torch.isclose(mine, taken, rtol=1e-6, atol=0.0, equal_nan=True)
    if not differs.any():
        # Everything that differs does so by less.
        differs = (mine != taken) & ~(mine.isnan() & taken.isnan())
    if not differs.any():
        return ""
    rows = np.flatnonzero(differs.reshape(differs.shape[0], -1).any(dim=1).numpy())
    count = int(differs.sum())
    if len(rows) == differs.shape[0] and count == differs.numel():
        return f" everywhere, by rel_l2 {pair.rel:.2g}"
    span = f"row {rows[0]}" if len(rows) == 1 else f"{len(rows)} rows, {rows[0]} to {rows[-1]}"
    return f" in {count} of {differs.numel()} elements: {span}"


def _not_covered(pairs: Sequence[Pair], target: Items) -> list[Contradiction]:
    """Fused parameters of the target with a part that has no partner."""
    wholes: dict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        if pair.whole == "target":
            wholes[pair.target].append(pair)
    problems = []
    for name, parts in wholes.items():
        rest = _rest(name, parts, target)
        if rest:
            names = ", ".join(pair.baseline for pair in parts)
            text = f"{name} contains {names}; the baseline has no values for {rest} of it"
            problems.append(Contradiction(name, text))
    return problems


def _rest(name: str, parts: Sequence[Pair], items: Items) -> str:
    """The region of a whole that no part covers, in words; blank if all of it is covered."""
    shape = items[name].shape
    gap = uncovered((pair.layout for pair in parts), shape)
    if gap is None:
        return ""
    rows = np.flatnonzero(gap.reshape(shape[0], -1).all(dim=1).numpy())
    if not len(rows):
        return f"{int(gap.sum())} of {gap.numel()} elements"
    return f"row {rows[0]}" if len(rows) == 1 else f"{len(rows)} of {shape[0]} rows, {rows[0]} to {rows[-1]},"


def _without_partner(name: str, tap: RecordedTap, baseline: Items) -> str:
    if tap.sketch.constant and tap.flat is not None:
        return f"{name} has no partner: all its values are {tap.flat[0]:g}, as if it had not been loaded"
    if not any(other.sketch.numel == tap.sketch.numel for other in baseline.values()):
        return f"{name} has no partner: no parameter of the baseline has its size or holds its values"
    return f"{name} has no partner: no parameter of the baseline holds its values"
