"""``match_weights``: finds which parameter of one model is which of another, and the mistakes of their conversion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from graftlab.base.quantisation import numbers_of, scale_names, stored_codes
from graftlab.base.text import first_of
from graftlab.base.world import SIDES
from graftlab.errors import MatchError
from graftlab.layouts import Layout, Part, Rearrange, Scale, Step
from graftlab.matching.converting import converter
from graftlab.matching.matcher import Matcher
from graftlab.matching.mistakes import TRANSPOSED, mistakes_of, notices_of, rounded_to
from graftlab.matching.names import last_role, layer_of, module_of, role_of, similarity
from graftlab.matching.pair import Pair, Sureness
from graftlab.matching.proposal import Proposal
from graftlab.matching.recorded_taps import RecordedTap, relative_l2
from graftlab.matching.search import applied
from graftlab.matching.sketch import Values, limit_for

# Two trained weights are never this near by chance, and rounding never moves one further than this.
LIMIT = 3e-2

State = Mapping[str, Any] | nn.Module


@dataclass(frozen=True)
class WeightMatch(Proposal):
    """The result of :func:`match_weights`: which parameter of the target is which of the baseline.

    ``problems`` are the conversion's mistakes, one sentence each; ``notices`` are unusual but may be right.
    ``shapes`` and ``dtypes`` are those of both states, under ``("baseline", name)`` and ``("target", name)``.
    """

    shapes: Mapping[tuple[str, str], tuple[int, ...]] = field(default_factory=dict, repr=False)
    dtypes: Mapping[tuple[str, str], torch.dtype] = field(default_factory=dict, repr=False)

    @property
    def clean(self) -> bool:
        """Whether every parameter of the target has a partner and no contradiction was found."""
        return not self.problems and not self.unmatched_target

    def to_code(self) -> str:
        """The source of a function that makes the target's state from the baseline's; see :func:`make_converter`."""
        return make_converter(self)

    @property
    def summary(self) -> str:
        return (
            super().summary.replace("target taps", "target parameters").replace("baseline taps", "baseline parameters")
        )

    def __repr__(self) -> str:
        lines = [f"<graftlab.WeightMatch: {self.summary}>"]
        return "\n".join([*lines, *(f"  {problem}" for problem in self.problems)])


def match_weights(baseline: State, target: State) -> WeightMatch:
    """Match the parameters of two models by value. It needs no ranks, no run and no names.

    ``baseline`` and ``target`` are state dicts or modules; some code converted the target's weights from the
    baseline's. For each parameter of the target the result has its sources and their layout (transposed, permuted,
    scaled, a part of a fused one, several fused in it), or the reason why it has no partner. ``problems`` are
    contradictions, such as swapped projections, a different layer's weights, a layout unlike its neighbours', a weight
    and a bias of different layouts, scaling, rounding, and parameters left at their initial values.

    A change that all layers share is not a contradiction: rows permuted alike in all layers, as between two conventions
    of rotary embedding, are a notice. Weights of 8 bits are compared times their scales, and those whose class stores
    codes by their numbers. Entries that are not tensors are left out. Raises :class:`MatchError` for an argument that
    is neither a mapping of tensors nor a module.

    >>> q, k = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(0))
    >>> match = gl.match_weights({"q": q, "k": k}, {"qk": torch.cat([q, k])})
    >>> match.clean, len(match.pairs)
    (True, 2)
    """
    given = _state(baseline, "baseline"), _state(target, "target")
    states = _dequantised(given[0]), _dequantised(given[1])
    mine, theirs = (_items(state, codes) for state, codes in zip(states, given, strict=True))
    matcher = Matcher(mine, theirs, None, None, LIMIT)
    matcher.match_equals()
    matcher.match_parts()
    match_siblings(matcher)
    _match_scaled(matcher)
    matcher.apply_rules()
    match_constants(matcher)
    _match_differing(matcher)
    pairs = tuple(matcher.in_order(_worded(matcher, pair) for pair in matcher.pairs))
    unmatched_baseline, unmatched_target = matcher.unmatched()
    sides = {"baseline": states[0], "target": states[1]}
    return WeightMatch(
        pairs,
        {name: why.replace(" tap ", " parameter ") for name, why in unmatched_baseline.items()},
        {name: why.replace(" tap ", " parameter ") for name, why in unmatched_target.items()},
        tuple(mistakes_of(pairs, matcher.baseline, matcher.target)),
        (*notices_of(pairs, matcher.baseline), *_quantised(given, states)),
        {(side, name): tuple(value.shape) for side, state in sides.items() for name, value in state.items()},
        {(side, name): value.dtype for side, state in sides.items() for name, value in state.items()},
    )


def make_converter(match: WeightMatch, name: str = "convert") -> str:
    """The source of ``name(state)``, which makes the target's state dict from the baseline's, in plain torch.

    It repeats the conversion of the target, mistakes included; a comment above a line states its problem. Layers become
    a loop. Raises :class:`MatchError` that names the target's parameters without a partner, and for a ``name`` that is
    not an identifier.

    >>> linear = torch.nn.Linear(2, 3)
    >>> source = gl.make_converter(gl.match_weights(linear, linear))
    >>> source.splitlines()[0]
    'import torch'
    """
    return converter(match.pairs, match.problems, match.unmatched_target, match.shapes, match.dtypes, name)


def _state(given: State, side: str) -> dict[str, Tensor]:
    state = given.state_dict() if isinstance(given, nn.Module) else given
    if not isinstance(state, Mapping):
        raise MatchError(f"the {side} must be a state dict or a module, not {type(given).__name__}")
    tensors = {str(name): value for name, value in state.items() if isinstance(value, Tensor) and value.numel()}
    if not tensors:
        raise MatchError(f"the {side} has no tensors with values; give a module or a state dict with weights")
    for name, value in tensors.items():
        if value.is_meta or value.layout != torch.strided:
            kind = "on the meta device" if value.is_meta else "not dense"
            raise MatchError(f"the {side}'s {name!r} is {kind}, so it has no values to match; load or convert it first")
    return tensors


def _dequantised(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state with the values of weights of 8 bits in place of their codes, and without their scales."""
    found: dict[str, Tensor] = {}
    scales: set[str] = set()
    for name, value in state.items():
        found[name] = numbers_of(name, state)
        if found[name] is not value:
            scales.update(scale_names(name))
    return {name: value for name, value in found.items() if name not in scales}


def _quantised(given: tuple[dict[str, Tensor], ...], states: tuple[dict[str, Tensor], ...]) -> list[str]:
    """A sentence on each side with weights of 8 bits."""
    found = []
    for side, before, after in zip(SIDES, given, states, strict=True):
        names = [name for name, value in after.items() if value is not before[name]]
        if names:
            found.append(
                f"weights of the {side} are quantised ({first_of(names)}), and were multiplied by their scales before "
                "they were compared; the converter gives such values in full precision"
            )
    return found


def _items(state: Mapping[str, Tensor], codes: Mapping[str, Tensor]) -> list[RecordedTap]:
    """The parameters, with the dtypes of ``codes``, whose rounding they have."""
    taps = [RecordedTap.of(name, value, order=order) for order, (name, value) in enumerate(state.items())]
    return [replace(tap, dtype=stored_codes(codes[tap.name]) or codes[tap.name].dtype) for tap in taps]


# ---- parameters whose own values are not enough ---------------------------------------------------------------------


def match_siblings(matcher: Matcher) -> None:
    """Pair a parameter without a partner like the others of its module, in the same layout."""
    for pair in list(matcher.pairs):
        # In names without modules, all parameters would be of one module.
        if not pair.by_value or not module_of(pair.target):
            continue
        outer, inner = module_of(pair.baseline), module_of(pair.target)
        if pair.whole == "target":
            outer, inner = inner, outer
        layout = _for_rows(pair.layout)
        if layout is None:
            continue
        for tap in matcher.left("target"):
            if module_of(tap.name) != module_of(pair.target):
                continue
            for other in matcher.baseline.values():
                if module_of(other.name) != module_of(pair.baseline) or last_role(other.name) != last_role(tap.name):
                    continue
                pieces = (other, tap) if pair.whole == "baseline" else (tap, other)
                rel = applied(layout, *pieces)
                if rel is not None and rel <= LIMIT:
                    note = f"as {pair.target}; all its values are equal" if tap.sketch.constant else f"as {pair.target}"
                    sureness: Sureness = "exact" if rel == 0 else "near"
                    _append(matcher, Pair(other.name, tap.name, layout, pair.whole, sureness, rel, note))
    _match_fused_siblings(matcher)


def _match_fused_siblings(matcher: Matcher) -> None:
    """Pair the constant biases of the parts of a fused weight, which no search can place."""
    for pair in list(matcher.pairs):
        layout = _for_rows(pair.layout)
        if pair.whole != "target" or not pair.by_value or layout is None:
            continue
        for fused in matcher.target.values():
            if module_of(fused.name) != module_of(pair.target) or fused.name == pair.target:
                continue
            for other in matcher.left("baseline"):
                if module_of(other.name) != module_of(pair.baseline):
                    continue
                rel = applied(layout, fused, other)
                if rel is not None and rel <= LIMIT:
                    sureness: Sureness = "exact" if rel == 0 else "near"
                    _append(matcher, Pair(other.name, fused.name, layout, "target", sureness, rel, f"as {pair.target}"))


def _append(matcher: Matcher, pair: Pair) -> None:
    if not any((own.baseline, own.target) == (pair.baseline, pair.target) for own in matcher.pairs):
        matcher.add(pair)


def _for_rows(layout: Layout) -> Layout | None:
    """The bias's layout for a weight's: parts of rows stay, transpositions are dropped; None for other layouts."""
    steps: list[Step] = []
    for step in layout.steps:
        if isinstance(step, Part) and step.dim == 0:
            steps.append(step)
        elif step.text != TRANSPOSED:
            return None
    return Layout(tuple(steps))


def _match_scaled(matcher: Matcher) -> None:
    """Pair parameters whose values are those of a baseline parameter times a factor plus a constant."""
    for tap in matcher.left("target"):
        if not tap.sketch.telling:
            continue
        best: Pair | None = None
        for other in matcher.baseline.values():
            if other.sketch.numel != tap.sketch.numel or not other.sketch.telling:
                continue
            for layout in plain_layouts(other, tap):
                found = _scaled(layout, other, tap)
                if found is not None and (best is None or _nearer(found, best, tap)):
                    best = found
        if best is not None:
            matcher.add(best)


def _nearer(found: Pair, best: Pair, tap: RecordedTap) -> bool:
    return similarity(found.baseline, tap.name) > similarity(best.baseline, tap.name)


def plain_layouts(other: RecordedTap, tap: RecordedTap) -> list[Layout]:
    """The identity and the transposition, where they give the tap's shape."""
    layouts = [Layout()] if other.shape == tap.shape else []
    if len(tap.shape) == 2 and other.shape == tap.shape[::-1]:
        layouts.append(Layout((Rearrange(TRANSPOSED),)))
    return layouts


def _scaled(layout: Layout, other: RecordedTap, tap: RecordedTap) -> Pair | None:
    assert other.value is not None
    taken = RecordedTap.of("", layout.local(other.value.detach().cpu()).contiguous()).flat
    assert taken is not None
    assert tap.flat is not None
    if not (np.isfinite(taken).all() and np.isfinite(tap.flat).all()):
        return None
    spread = taken - taken.mean()
    factor = float(np.einsum("i,i", spread, tap.flat) / np.einsum("i,i", spread, spread))
    if factor == 0 or not np.isfinite(factor):
        return None
    # A factor and a constant fit almost anything roughly, so they must fit up to rounding.
    limit = limit_for(other.dtype, tap.dtype)
    # Take a factor near 1 or -1 to be exactly that.
    factor = next((near for near in (1.0, -1.0) if abs(factor - near) <= limit), factor)
    add = float(tap.flat.mean() - factor * taken.mean())
    # Take a constant below the noise of the values to be 0.
    if abs(add) <= limit * tap.sketch.rms:
        add = 0.0
    elif abs(add - round(add)) <= limit * tap.sketch.rms and round(add):
        add = float(round(add))
    if factor == 1.0 and add == 0.0:
        return None
    scaled = factor * taken + add
    rel = relative_l2(tap.flat - add, scaled - add)
    if rel > limit:
        return None
    return Pair(other.name, tap.name, layout.then(Scale(factor, add)), "baseline", "near", rel)


def match_constants(matcher: Matcher) -> None:
    """Pair constants, such as zeros of biases and ones of norms, by name."""
    left = [tap for tap in matcher.left("target") if tap.sketch.constant]
    scored = []
    for tap in left:
        for other in matcher.left("baseline"):
            if other.shape == tap.shape and other.sketch.constant and _are_one_constant(other, tap):
                scored.append((_by_name(other.name, tap.name), other.name, tap.name))
    taken: set[str] = set()
    for _, one, name in sorted(scored, key=lambda each: -each[0]):
        if one not in taken and name not in taken:
            taken |= {one, name}
            note = "matched by name, since all its values are equal"
            matcher.add(Pair(one, name, Layout(), "baseline", "guess", 0.0, note))


def _are_one_constant(one: RecordedTap, other: RecordedTap) -> bool:
    if one.sketch.nonfinite or other.sketch.nonfinite:
        return one.flat is not None and other.flat is not None and bool(np.array_equal(one.flat, other.flat))
    # Known without the values.
    return float(one.sketch.quantiles[0]) == float(other.sketch.quantiles[0])


def _by_name(baseline: str, target: str) -> float:
    """How well two names fit together, including their layers and roles."""
    score = similarity(baseline, target)
    mine, theirs = role_of(baseline), role_of(target)
    if mine and theirs and mine[0] == theirs[0]:
        score += 0.5 if mine == theirs else -1.0
    if last_role(baseline) != last_role(target):
        score -= 1.0
    layers = layer_of(baseline), layer_of(target)
    return score + (0.5 if layers[0] == layers[1] else -0.5)


def _match_differing(matcher: Matcher) -> None:
    """Pair remaining parameters whose values are partly equal, or by name and shape."""
    for tap in matcher.left("target"):
        options = [other for other in matcher.left("baseline") if other.shape == tap.shape]
        shared = [(_share(other, tap), other) for other in options]
        best = max(shared, key=lambda each: each[0], default=(0.0, None))
        if best[1] is not None and best[0] >= 0.05 and tap.sketch.telling:
            rel = applied(Layout(), best[1], tap)
            note = f"{best[0]:.0%} of its values are equal"
            matcher.add(Pair(best[1].name, tap.name, Layout(), "baseline", "guess", rel, note))
    matcher.guess()


def _share(one: RecordedTap, other: RecordedTap) -> float:
    return 0.0 if one.flat is None or other.flat is None else equal_share(one.flat, other.flat)


def equal_share(one: Values, other: Values) -> float:
    """The share of values that are equal up to rounding."""
    return float((np.abs(one - other) <= 1e-6 * np.abs(one)).mean())


def _worded(matcher: Matcher, pair: Pair) -> Pair:
    """The pair with a note if its values were rounded."""
    rounded = rounded_to(matcher.baseline[pair.baseline], matcher.target[pair.target], pair)
    return pair.noted(f"rounded to {rounded}") if rounded else pair
