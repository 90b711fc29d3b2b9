"""Pairs weights among taps: by value, by rule, by their modules, or by most of their values. They are never grafted.

In a port a weight has a different name, and may be transposed, fused or wrong. If its values match no weight, or the
wrong one, the other layers and the outputs of the modules show its partner.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from graftlab.base.tags import name_with
from graftlab.base.tap_groups import is_data
from graftlab.base.text import counted
from graftlab.layouts import Layout, Part, Rearrange, Step
from graftlab.matching.contradictions import first_taps, uncovered
from graftlab.matching.heads import odd_heads
from graftlab.matching.matcher import Matcher
from graftlab.matching.mistakes import TRANSPOSED, misplaced, odd_transpositions
from graftlab.matching.names import STATISTICS, last_role, layers_of, module_of
from graftlab.matching.pair import Pair
from graftlab.matching.proposal import Proposal
from graftlab.matching.recorded_taps import Fetch, RecordedTap
from graftlab.matching.rules import Rule, rules_of
from graftlab.matching.search import applied
from graftlab.matching.sketch import limit_for
from graftlab.matching.weights import LIMIT, equal_share, match_constants, match_siblings, plain_layouts
from graftlab.plan.pairs import TapCallName

# A weight that has this share of another weight's values is that weight, partly overwritten.
_MOST = 0.5
# An output of a quantised module is not further from the original's than this.
_OF_QUANTISED = 0.3


def without_weights(taps: Iterable[RecordedTap]) -> list[RecordedTap]:
    """The taps of computed values. A graft into a weight or a setting would remain in all later runs."""
    values = (tap for tap in taps if not is_data(tap.tags))
    return [replace(tap, order=place) for place, tap in enumerate(values)]


def with_weights(
    proposal: Proposal,
    baseline: Sequence[RecordedTap],
    target: Sequence[RecordedTap],
    fetch_baseline: Fetch | None = None,
    fetch_target: Fetch | None = None,
) -> Proposal:
    """The proposal on computed values, with the pairs of these taps' weights, which no graft has changed."""
    names = [{_plain_name(tap): tap.name for tap in side if is_data(tap.tags)} for side in (baseline, target)]
    ours, theirs = (
        [
            replace(tap, name=_plain_name(tap), order=place)
            for place, tap in enumerate(tap for tap in side if is_data(tap.tags))
        ]
        for side in (baseline, target)
    )
    if not ours or not theirs:
        return _joined(proposal, (), [{tap.name: _LACKING for tap in side} for side in (ours, theirs)], names)
    fetch_ours, fetch_theirs = (
        None if fetch is None else partial(_fetched, fetch, known)
        for fetch, known in zip((fetch_baseline, fetch_target), names, strict=True)
    )
    matcher = Matcher(ours, theirs, fetch_ours, fetch_theirs, LIMIT)
    matcher.match_equals()
    matcher.match_rows()
    matcher.match_parts()
    match_siblings(matcher)
    problems, moved = _correct_by_rules(matcher)
    proposal = _correct_modules(proposal, {module_of(name) for name in moved})
    matcher.apply_rules()
    _WeightsOfModules(matcher, proposal).match()
    _match_mostly_equal(matcher)
    match_constants(matcher)
    right = {pair.target for pair in proposal.pairs if pair.by_value}
    orders = _odd_orders(matcher, {each.tap for each in misplaced(_by_value(matcher), matcher.baseline)}, right)
    for tap in (*ours, *theirs):
        tap.forget()
    unmatched = [{name: why.replace(" tap ", " weight ") for name, why in left.items()} for left in matcher.unmatched()]
    places = {tap.name: place for place, tap in enumerate(target)}
    proposal = _with_outputs_of_parts(proposal, matcher, baseline, target)
    found = _joined(proposal, matcher.pairs, unmatched, names)
    return replace(
        found,
        pairs=tuple(sorted(found.pairs, key=lambda pair: places.get(pair.target, len(places)))),
        problems=(*proposal.problems, *problems, *orders),
        wrong_weights=tuple(problems),
        odd_orders=tuple(orders),
    )


_LACKING = "the other side taps no weights"


def _plain_name(tap: RecordedTap) -> str:
    """The name without the tag that marks a weight, which all of these taps have."""
    call = TapCallName.of(tap.name)
    number = f"#{call.occurrence}" if call.occurrence else ""
    return name_with(call.name, {tag: value for tag, value in (call.tags or {}).items() if tag != "kind"}) + number


def _fetched(fetch: Fetch, names: Mapping[str, str], name: str) -> Tensor | None:
    return fetch(names[name])


def _joined(
    proposal: Proposal,
    pairs: Iterable[Pair],
    unmatched: Sequence[Mapping[str, str]],
    names: Sequence[Mapping[str, str]],
) -> Proposal:
    """The proposal with these pairs of weights, and weights without a partner, under the names of their taps."""
    mine, theirs = names
    own = [replace(pair, baseline=mine[pair.baseline], target=theirs[pair.target]) for pair in pairs]
    left = [{known[name]: why for name, why in each.items()} for each, known in zip(unmatched, names, strict=True)]
    return replace(
        proposal,
        pairs=(*proposal.pairs, *own),
        unmatched_baseline={**proposal.unmatched_baseline, **left[0]},
        unmatched_target={**proposal.unmatched_target, **left[1]},
    )


# ---- weights in the wrong place -------------------------------------------------------------------------------------


def _correct_by_rules(matcher: Matcher) -> tuple[list[str], set[str]]:
    """Pair weights that have another weight's values, or a different layout, as most layers pair theirs.

    Returns a sentence on each such weight, and the names of those that now have the right partner.
    """
    wrong = misplaced(_by_value(matcher), matcher.baseline)
    names = {each.tap for each in wrong}
    if not names:
        return [], set()
    moved: set[str] = set()
    rules = rules_of(_by_value(matcher))
    against: dict[int, set[str]] = defaultdict(set)
    for place, rule in enumerate(rules):
        for pair in matcher.pairs:
            if pair.target in names and rule.covers(pair.target) and not _is_like(rule, pair):
                against[place].add(pair.target)
    for place, targets in against.items():
        rule = rules[place]
        # If as many layers contradict a rule as follow it, none is known to be wrong.
        if rule.seen <= len(targets):
            continue
        for name in targets:
            other = matcher.baseline.get(rule.baseline_for(name))
            if other is None or (rule.example.layout.leaves_out and _has_part(matcher, rule, other.name, name)):
                continue
            kept = [pair for pair in matcher.pairs if pair.target != name or _follows(rules, pair)]
            matcher.replace_pairs([*kept, matcher.by_rule(rule.example, rule.seen, other, matcher.target[name])])
            moved.add(name)
    return [*first_taps(wrong)], moved


def _by_value(matcher: Matcher) -> list[Pair]:
    return [pair for pair in matcher.pairs if pair.by_value]


def _odd_orders(matcher: Matcher, odd: Collection[str], right: Collection[str]) -> list[str]:
    """A sentence on weights whose numbers are in an odd order, for all layers that have the same.

    These are q and k, or v and o, with different orders of features, and square matrices that are not transposed as
    other matrices are. ``right`` has the target's taps that match by value: a module among them reads its weights well.
    """
    layers: dict[str, list[str]] = defaultdict(list)
    pairs = _by_value(matcher)
    turned = (each for each in odd_transpositions(pairs, matcher.baseline) if module_of(each.tap) not in right)
    for each in (*odd_heads(pairs, matcher.baseline, matcher.target, odd), *turned):
        layers[layers_of(each.tap)].append(each.text)
    return [
        found[0] + (f", and so in {counted(len(found) - 1, 'other layer')}" if len(found) > 1 else "")
        for found in layers.values()
    ]


def _correct_modules(proposal: Proposal, modules: Collection[str]) -> Proposal:
    """The proposal, with the outputs of modules whose weights are wrong paired as in most layers.

    They match another module's outputs, or the right one's in a different order, only while the weights are wrong.
    """
    rules = [rule for rule in rules_of(proposal.graftable) if any(map(rule.covers, modules))]
    pairs = [_by_the_first_rule(rules, pair) if pair.target in modules else pair for pair in proposal.pairs]
    return replace(proposal, pairs=tuple(pairs))


def _by_the_first_rule(rules: Sequence[Rule], pair: Pair) -> Pair:
    for rule in rules:
        if not rule.covers(pair.target):
            continue
        usual, baseline = rule.example.layout, rule.baseline_for(pair.target)
        if pair.layout.text == usual.text:
            if pair.baseline == baseline:
                return pair
            what = "another module's"
        elif pair.baseline == baseline and not (pair.layout.leaves_out or usual.leaves_out):
            what = "in a different order"
        else:
            continue
        note = f"as in {rule.seen} other layers, because the weights of {pair.target} are {what}"
        return replace(pair, baseline=baseline, layout=usual, sureness="rule", rel=None, note=note)
    return pair


def _with_outputs_of_parts(
    proposal: Proposal, matcher: Matcher, baseline: Sequence[RecordedTap], target: Sequence[RecordedTap]
) -> Proposal:
    """The proposal, with the outputs of fused modules paired as the rows of their weights are.

    Their values need not match, because the weights may be quantised, or the code wrong. Where they are further apart
    than that, the module computes something else from its weight, such as rotated queries.
    """
    sides = {"baseline": baseline, "target": target}
    outputs = {side: {tap.name: tap for tap in taps if not is_data(tap.tags)} for side, taps in sides.items()}
    found: list[Pair] = []
    for pair in _by_value(matcher):
        if len(pair.layout.steps) != 1 or not isinstance(part := pair.layout.steps[0], Part):
            continue
        weights = matcher.baseline[pair.baseline], matcher.target[pair.target]
        modules = module_of(pair.baseline), module_of(pair.target)
        left = proposal.unmatched_baseline, proposal.unmatched_target
        for name, tap in outputs["target"].items():
            other = outputs["baseline"].get(modules[0] + name.removeprefix(modules[1]))
            if other is None or TapCallName.of(name).name != modules[1]:
                continue
            # A side with the whole is paired several times.
            lack = [other.name in left[0], name in left[1]]
            if not lack[pair.whole == "baseline"] or other.shape[:-1] != tap.shape[:-1]:
                continue
            if all(each.shape[-1:] == weight.shape[:1] for each, weight in zip((other, tap), weights, strict=True)):
                layout = Layout((replace(part, dim=-1),))
                rel = applied(layout, *((tap, other) if pair.whole == "target" else (other, tap)))
                if rel is None or rel > _OF_QUANTISED:
                    continue
                note = f"as {pair.target} has the rows of {pair.baseline}"
                found.append(Pair(other.name, name, layout, pair.whole, "rule", rel, note))
    if not found:
        return proposal
    return replace(
        proposal,
        pairs=(*proposal.pairs, *found),
        unmatched_baseline=_without(proposal.unmatched_baseline, (pair.baseline for pair in found)),
        unmatched_target=_without(proposal.unmatched_target, (pair.target for pair in found)),
    )


def _without(unmatched: Mapping[str, str], paired: Iterable[str]) -> dict[str, str]:
    left = {*paired}
    return {name: why for name, why in unmatched.items() if name not in left}


def _is_like(rule: Rule, pair: Pair) -> bool:
    return rule.baseline_for(pair.target) == pair.baseline and rule.example.layout.text == pair.layout.text


def _follows(rules: Sequence[Rule], pair: Pair) -> bool:
    return bool(pair.layout.leaves_out) and any(rule.covers(pair.target) and _is_like(rule, pair) for rule in rules)


def _has_part(matcher: Matcher, rule: Rule, baseline: str, target: str) -> bool:
    layout = rule.example.layout.text
    return any((pair.baseline, pair.target, pair.layout.text) == (baseline, target, layout) for pair in matcher.pairs)


# ---- weights of paired modules --------------------------------------------------------------------------------------


class _WeightsOfModules:
    """Pairs the remaining weights of modules whose outputs are paired."""

    def __init__(self, matcher: Matcher, proposal: Proposal) -> None:
        self._matcher = matcher
        self._modules: dict[tuple[str, str], Pair] = {}
        for pair in proposal.pairs:
            if pair.sureness != "guess":
                names = TapCallName.of(pair.baseline).name, TapCallName.of(pair.target).name
                self._modules.setdefault(names, pair)

    def match(self) -> None:
        ours, theirs = _by_module(self._matcher.baseline.values()), _by_module(self._matcher.target.values())
        # The layouts of other modules' weights, by their number of dimensions.
        usual = Counter(
            (len(self._matcher.target[pair.target].shape), pair.layout.text)
            for pair in self._matcher.pairs
            if pair.by_value and not pair.layout.leaves_out
        )
        for (one, other), outputs in self._modules.items():
            if one not in ours or other not in theirs:
                continue
            alike = list(_with_one_role(ours[one], theirs[other]))
            is_part = outputs.whole == "target" and outputs.layout.leaves_out
            # A convolution that contains a batch norm has the norm's output, but its bias is not the norm's.
            if not is_part and any(mine.sketch.numel != tap.sketch.numel for mine, tap in alike):
                continue
            if not is_part and self._are_merged(ours[one], theirs[other], outputs):
                continue
            for mine, tap in alike:
                if is_part:
                    self._add_part(mine, tap, other)
                elif not self._matcher.has(mine.name, "baseline") and not self._matcher.has(tap.name, "target"):
                    self._add_whole(mine, tap, usual)

    def _are_merged(self, ours: Sequence[RecordedTap], theirs: Sequence[RecordedTap], outputs: Pair) -> bool:
        """Whether one module has several weights of the other in one, as where a batch norm's statistics are in its
        factors.

        Then it has fewer, and what is left of them has other values than its namesake, and is right.
        """
        mine = [tap for tap in ours if not self._matcher.has(tap.name, "baseline")]
        other = [tap for tap in theirs if not self._matcher.has(tap.name, "target")]
        left = [[tap for tap in taps if tap.dtype.is_floating_point] for taps in (mine, other)]
        averaged = [any(last_role(tap.name) in STATISTICS for tap in taps) for taps in left]
        return averaged[0] != averaged[1] or (outputs.by_value and len(left[0]) != len(left[1]))

    def _add_whole(self, mine: RecordedTap, tap: RecordedTap, usual: Counter[tuple[int, str]]) -> None:
        if layouts := plain_layouts(mine, tap):
            self._add(mine, tap, max(layouts, key=lambda each: usual[len(tap.shape), each.text]), "baseline")

    def _add_part(self, mine: RecordedTap, tap: RecordedTap, module: str) -> None:
        """Pair a weight with the only part of a fused one that is left."""
        known = [pair for pair in self._matcher.pairs if pair.target == tap.name]
        if self._matcher.has(mine.name, "baseline") or not known or any(pair.whole != "target" for pair in known):
            return
        gap = uncovered((pair.layout for pair in known), tap.shape)
        if gap is None or int(gap.sum()) != mine.sketch.numel:
            return
        for layout in _parts_like(known):
            # Exactly the elements that are left.
            if uncovered([*(pair.layout for pair in known), layout], tap.shape) is None:
                self._add(mine, tap, layout, "target")
                return

    def _add(self, mine: RecordedTap, tap: RecordedTap, layout: Layout, whole: str) -> None:
        outer, inner = (mine, tap) if whole == "baseline" else (tap, mine)
        self._matcher.bring_weights(outer, inner)
        rel = applied(layout, outer, inner)
        if rel is None and outer.value is not None and inner.value is not None:
            return
        note = "as the outputs of their modules"
        if rel is not None and rel > limit_for(mine.dtype, tap.dtype):
            note += f"; the values differ by rel_l2 {rel:.2g}"
        self._matcher.add(
            Pair(mine.name, tap.name, layout, "target" if whole == "target" else "baseline", "rule", rel, note)
        )


def _by_module(taps: Iterable[RecordedTap]) -> dict[str, list[RecordedTap]]:
    found: dict[str, list[RecordedTap]] = defaultdict(list)
    for tap in taps:
        found[module_of(TapCallName.of(tap.name).name)].append(tap)
    return found


def _with_one_role(
    ours: Sequence[RecordedTap], theirs: Sequence[RecordedTap]
) -> Iterator[tuple[RecordedTap, RecordedTap]]:
    """Weights of two modules with the same role, or else the same name."""
    for tap in theirs:
        role, name = last_role(tap.name), tap.name.rpartition(".")[2]
        same = [
            other
            for other in ours
            if (last_role(other.name) == role if role else other.name.rpartition(".")[2] == name)
        ]
        if len(same) == 1:
            yield same[0], tap


def _parts_like(known: Sequence[Pair]) -> Iterator[Layout]:
    """The layouts of the other equal parts of a fused weight."""
    for pair in known:
        for place, step in enumerate(pair.layout.steps):
            if isinstance(step, Part):
                for index in range(len(step.of)):
                    steps: list[Step] = list(pair.layout.steps)
                    steps[place] = replace(step, index=index)
                    yield Layout(tuple(steps))


# ---- weights that are partly overwritten ----------------------------------------------------------------------------


def _match_mostly_equal(matcher: Matcher) -> None:
    """Pair remaining weights with those that share most of their values, in the same or a transposed layout."""
    by_shape: dict[tuple[int, ...], list[RecordedTap]] = defaultdict(list)
    for other in matcher.baseline.values():
        by_shape[tuple(sorted(other.shape))].append(other)
    for tap in matcher.left("target"):
        if not tap.sketch.telling:
            continue
        best: tuple[float, Pair] | None = None
        for other in by_shape[tuple(sorted(tap.shape))]:
            for layout in (Layout(), Layout((Rearrange(TRANSPOSED),))):
                share = _share(layout, other, tap)
                if share >= _MOST and (best is None or share > best[0]):
                    rel = applied(layout, other, tap)
                    note = f"{share:.0%} of its values are equal"
                    best = share, Pair(other.name, tap.name, layout, "baseline", "rule", rel, note)
        if best is not None:
            matcher.add(best[1])


# How many values are compared first.
_FEW = 256


def _share(layout: Layout, other: RecordedTap, tap: RecordedTap) -> float:
    if other.value is None or tap.flat is None or (layout.steps and len(tap.shape) != 2):
        return 0.0
    taken = layout.local(other.value.detach())
    if tuple(taken.shape) != tap.shape:
        return 0.0
    flat = taken.reshape(-1)
    step = max(1, len(flat) // _FEW)
    if equal_share(flat[::step].double().cpu().numpy(), tap.flat[::step]) < _MOST / 2:
        return 0.0
    return equal_share(flat.double().cpu().numpy(), tap.flat)
