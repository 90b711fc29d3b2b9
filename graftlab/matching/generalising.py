"""Generalises pairs of single calls to all calls: to other requests, steps, lengths and positions."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from graftlab.base.tags import name_with
from graftlab.base.world import SIDES, Side
from graftlab.errors import LayoutError
from graftlab.layouts import Layout, Rearrange
from graftlab.matching.names import numbers_of, pattern_of, words_of
from graftlab.matching.pair import SURENESS, Pair
from graftlab.matching.recorded_taps import RecordedTap
from graftlab.matching.search import applied
from graftlab.plan.pairs import ANY, TapCallName

# In another layout that also fits, values differ by as much as in their own.
_ROUNDING = 1e-7
# Taps have few tags, so all sets of up to this many are tried.
_MOST_OPEN = 8

# ---- names ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _CallName:
    """One call of a tap as a match names it."""

    name: str
    tags: tuple[tuple[str, Any], ...]
    occurrence: int

    @classmethod
    def of(cls, text: str) -> _CallName:
        parsed = TapCallName.of(text)
        return cls(parsed.name, tuple((parsed.tags or {}).items()), parsed.occurrence or 0)

    def without(self, tags: Iterable[str]) -> tuple[str, tuple[tuple[str, Any], ...]]:
        return self.name, tuple(item for item in self.tags if item[0] not in tags)


@dataclass(frozen=True)
class _TagUse:
    """The tags of a general pair: those in ``same`` are equal on both sides, those ``left_open`` only number calls."""

    same: frozenset[str] = frozenset()
    left_open: frozenset[str] = frozenset()

    def written(self, call: _CallName) -> str:
        tags = {tag: ANY if tag in self.left_open else value for tag, value in call.tags if tag not in self.same}
        return name_with(call.name, tags)


def general_pairs(pairs: Iterable[Pair], order: Mapping[Side, Sequence[str]]) -> list[Pair]:
    """The pairs of calls as pairs of taps, each once.

    Tags that are equal on both sides in every pair are left out. So are the occurrence in the step, and tags that only
    number one side's calls, if the calls of both sides pair in their order. ``order`` has the names of each side's
    calls in execution order. A pair of several calls is as sure as the least sure of them.
    """
    calls: dict[Side, dict[str, list[_CallName]]] = {side: defaultdict(list) for side in SIDES}
    for side in SIDES:
        for text in order.get(side, ()):
            call = _CallName.of(text)
            calls[side][pattern_of(call.name)].append(call)
    families: dict[tuple[str, str, str], list[Pair]] = defaultdict(list)
    for pair in pairs:
        one, other = (pattern_of(_CallName.of(name).name) for name in (pair.baseline, pair.target))
        families[one, other, pair.whole].append(pair)
    found: list[Pair] = []
    for (baseline, target, _), family in families.items():
        found += _general(family, {"baseline": calls["baseline"][baseline], "target": calls["target"][target]})
    return found


def _general(family: Sequence[Pair], calls: Mapping[Side, Sequence[_CallName]]) -> list[Pair]:
    both = [(_CallName.of(pair.baseline), _CallName.of(pair.target)) for pair in family]
    if not any(call.tags or call.occurrence for each in both for call in each):
        return list(family)
    tags = list(dict.fromkeys(tag for each in both for call in each for tag, _ in call.tags))
    same = frozenset(tag for tag in tags if all(_value(tag, one) == _value(tag, other) for one, other in both))
    others = [tag for tag in tags if tag not in same]
    others = [tag for tag in others if tag not in _of_partners_name(others, both)][:_MOST_OPEN]
    uses = (
        _TagUse(same, frozenset(left_open))
        for count in range(len(others), -1, -1)
        for left_open in itertools.combinations(others, count)
    )
    use = next((each for each in uses if _is_consistent(each, both, calls)), None)
    if use is None:
        # The calls of the two sides are in different orders.
        return list(family)
    merged: dict[tuple[str, str], list[Pair]] = defaultdict(list)
    for pair, (one, other) in zip(family, both, strict=True):
        merged[use.written(one), use.written(other)].append(pair)
    found: list[Pair] = []
    for (baseline, target), group in merged.items():
        if len({pair.layout.text for pair in group}) > 1:
            # No single layout fits all calls, so each keeps its own.
            found += group
            continue
        weakest = max(group, key=lambda pair: SURENESS.index(pair.sureness))
        rel = max((pair.rel for pair in group if pair.rel is not None), default=None)
        found.append(replace(weakest, baseline=baseline, target=target, rel=rel))
    return found


def _is_consistent(
    use: _TagUse, both: Sequence[tuple[_CallName, _CallName]], calls: Mapping[Side, Sequence[_CallName]]
) -> bool:
    """Whether general names would pair the calls in the same way: in their order, each with its present taps."""
    places: dict[Side, dict[_CallName, int]] = {}
    for side in SIDES:
        counted: Counter[Any] = Counter()
        places[side] = {}
        for call in calls[side]:
            reduced = call.without(use.left_open)
            places[side][call] = counted[reduced]
            counted[reduced] += 1
    taps: dict[tuple[Side, Any], set[Any]] = defaultdict(set)
    partners: dict[tuple[Side, _CallName], set[_CallName]] = defaultdict(set)
    for one, other in both:
        if places["baseline"].get(one, one.occurrence) != places["target"].get(other, other.occurrence):
            return False
        my_tap, their_tap = one.without(use.left_open), other.without(use.left_open)
        taps["baseline", my_tap].add(their_tap)
        taps["target", their_tap].add(my_tap)
        partners["baseline", one].add(other)
        partners["target", other].add(one)
    most: Counter[Any] = Counter()
    for (side, call), several in partners.items():
        key = side, call.without(use.left_open)
        most[key] = max(most[key], len(several))
    return all(len(several) <= most[key] for key, several in taps.items())


def _value(tag: str, call: _CallName) -> Any:
    return dict(call.tags).get(tag)


def _of_partners_name(tags: Sequence[str], both: Sequence[tuple[_CallName, _CallName]]) -> list[str]:
    """The tags whose values are numbers in the other tap's name, such as a layer; of several, its namesake."""

    def is_number(tag: str) -> bool:
        valued = [
            (dict(mine.tags)[tag], theirs)
            for one, other in both
            for mine, theirs in ((one, other), (other, one))
            if tag in dict(mine.tags)
        ]
        return all(isinstance(value, int) and value in numbers_of(theirs.name) for value, theirs in valued)

    found = [tag for tag in tags if is_number(tag)]
    return [tag for tag in found if "layers" in words_of(tag)] or found


# ---- layouts --------------------------------------------------------------------------------------------------------


def general_layouts(
    pairs: Sequence[Pair], baseline: Mapping[str, RecordedTap], target: Mapping[str, RecordedTap]
) -> list[Pair]:
    """The same pairs; if one layout fits all calls of two taps, all of them get it.

    A prefill shows that a target keeps the last token; in a decode step, which has only one, it keeps all.
    """
    families: dict[tuple[str, str, str], list[Pair]] = defaultdict(list)
    for pair in pairs:
        families[_CallName.of(pair.baseline).name, _CallName.of(pair.target).name, pair.whole].append(pair)
    chosen: dict[tuple[str, str, str], Layout] = {}
    for family in families.values():
        texts = Counter(pair.layout.text for pair in family if pair.by_value)
        if len(texts) < 2:
            continue
        known = {pair.layout.text: pair for pair in family if pair.by_value}
        tried = [layout for text, _ in texts.most_common() for layout in _variants(known[text], baseline, target)]
        layout = next((each for each in tried if all(_fits(each, pair, baseline, target) for pair in family)), None)
        if layout is not None:
            chosen.update({(pair.baseline, pair.target, pair.whole): layout for pair in family})
    return [replace(pair, layout=chosen.get((pair.baseline, pair.target, pair.whole), pair.layout)) for pair in pairs]


def _wholes(
    pair: Pair, baseline: Mapping[str, RecordedTap], target: Mapping[str, RecordedTap]
) -> tuple[RecordedTap, RecordedTap]:
    one, other = baseline[pair.baseline], target[pair.target]
    return (one, other) if pair.whole == "baseline" else (other, one)


def _variants(pair: Pair, baseline: Mapping[str, RecordedTap], target: Mapping[str, RecordedTap]) -> list[Layout]:
    """A pair's layout, and the same layout with the sizes of different axes given."""
    layouts = [pair.layout]
    for place, step in enumerate(pair.layout.steps):
        if isinstance(step, Rearrange) and step.sizes:
            before = torch.empty(_wholes(pair, baseline, target)[0].shape, device="meta")
            try:
                shape = tuple(Layout(pair.layout.steps[:place]).local(before).shape)
                other = step.with_other_sizes(shape)
            except LayoutError:
                continue
            layouts.append(Layout((*pair.layout.steps[:place], other, *pair.layout.steps[place + 1 :])))
    return layouts


def _fits(layout: Layout, pair: Pair, baseline: Mapping[str, RecordedTap], target: Mapping[str, RecordedTap]) -> bool:
    """Whether a pair's values match in a layout as well as in its own."""
    if layout.text == pair.layout.text:
        return True
    if not pair.by_value:
        return False
    outer, inner = _wholes(pair, baseline, target)
    rel = applied(layout, outer, inner)
    return rel is not None and rel <= max(2 * (pair.rel or 0.0), _ROUNDING)
