"""Matching by value: two lists of recorded taps become a proposal.

First come tensors of equal size whose quantiles agree, then parts of larger ones, then rules over layers. If several
partners have the same values, the kind of module, the name and the order decide.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from graftlab.base.world import Side, other_side
from graftlab.errors import LayoutError
from graftlab.layouts import Layout
from graftlab.matching.contradictions import (
    fills,
    first_taps,
    in_groups,
    in_part,
    odd_layouts,
    other_parts,
    other_roles,
    uncovered,
)
from graftlab.matching.digests import Wholes
from graftlab.matching.generalising import general_layouts
from graftlab.matching.names import fused_roles, place_of, similarity
from graftlab.matching.pair import Pair, Sureness
from graftlab.matching.proposal import Proposal
from graftlab.matching.recorded_taps import Fetch, RecordedTap
from graftlab.matching.row_orders import call_of
from graftlab.matching.rules import Rule, rules_of
from graftlab.matching.search import KnownStrides, ValueMatch, applied, find
from graftlab.matching.sketch import limit_for
from graftlab.matching.wording import layout_of

# Bytes of fetched values, and of what is computed from them, that are kept for later comparisons.
FETCHED = 1 << 29
# No dtype's rounding moves quantiles further apart than this, relative to the tensor; see sketch.alike.
COARSEST = 6e-2
_FEW_QUANTILES = slice(0, None, 16)
# A partner this much worse than the best does not tie with it.
TIE_FACTOR = 10.0
TIE_FLOOR = 1e-6
# Tensors within the floor have quantiles nearer than this.
_EQUAL_QUANTILES = 1e-4
# A weight whose quantiles are further away than its partner's, by this factor, does not tie with that.
_TIED_QUANTILES = 4.0
# Kinds of modules that return their input outside training.
PASS_THROUGH = ("Dropout", "Identity", "DropPath", "StochasticDepth")
# Other parts of a whole are at most this many taps away from a known one.
BESIDE = 24
# Once this many taps of one place belong to no whole, wholes for the others are sought only nearby.
_IN_VAIN = 3
# Names less similar than this prove nothing.
LEAST_SIMILARITY = 0.5


def match_taps(
    baseline: Sequence[RecordedTap],
    target: Sequence[RecordedTap],
    *,
    fetch_baseline: Fetch | None = None,
    fetch_target: Fetch | None = None,
    before: Proposal | None = None,
    trusted: Sequence[Pair] = (),
    guesses: bool = True,
) -> Proposal:
    """Find which target tap is which baseline tap, in which layout, by the values of one run of both sides.

    ``baseline`` and ``target`` are in execution order. ``fetch_baseline`` and ``fetch_target`` fetch values that were
    recorded only as sketches; without them the sketches are compared. ``before`` is the proposal of an earlier run: its
    pairs by rule whose values match now, after grafts of earlier taps, are ``confirmed``. ``trusted`` are pairs that
    grafts have proved, whatever their values. With ``guesses``, remaining taps may be paired by name alone; such pairs
    are never grafted.
    """
    return Matcher(baseline, target, fetch_baseline, fetch_target).run(before, guesses, trusted)


class _LastUsed:
    """Keeps what was computed from the taps that were used last, and their values if these were fetched."""

    def __init__(self) -> None:
        self.fetched: set[int] = set()
        # By identity, in the order of use, with their sizes.
        self._used: dict[int, tuple[RecordedTap, int]] = {}
        self._total = 0

    def keep(self, *taps: RecordedTap) -> None:
        """Keep all of these taps, and forget the others that were used longest ago, down to the limit."""
        for tap in taps:
            _, before = self._used.pop(id(tap), (tap, 0))
            size = tap.in_memory
            self._used[id(tap)] = tap, size
            self._total += size - before
        while self._total > FETCHED and len(self._used) > len(taps):
            key = next(iter(self._used))
            oldest, size = self._used.pop(key)
            self._total -= size
            oldest.forget()
            if key in self.fetched:
                self.fetched.discard(key)
                oldest.value = None


class Matcher:
    """One matching: the pairs so far, and methods that find more, which :meth:`run` calls in order."""

    def __init__(
        self,
        baseline: Sequence[RecordedTap],
        target: Sequence[RecordedTap],
        fetch_baseline: Fetch | None,
        fetch_target: Fetch | None,
        limit: float | None = None,
    ) -> None:
        """``limit`` is the largest distance of two matching tensors; by default their dtypes determine it."""
        self.limit = limit
        self.baseline = {tap.name: tap for tap in baseline}
        self.target = {tap.name: tap for tap in target}
        self.fetch = {"baseline": fetch_baseline, "target": fetch_target}
        self._sizes = {"baseline": _sizes_of(self.baseline), "target": _sizes_of(self.target)}
        self.pairs: list[Pair] = []
        # Baseline taps whose partner is known even if other taps have the same values.
        self.reserved: dict[str, str] = {}
        self.why: dict[str, str] = {}
        self._memory = _LastUsed()
        # The names of taps whose values no rank has.
        self._not_held: dict[Side, set[str]] = {"baseline": set(), "target": set()}
        self._known: KnownStrides = {}
        # By side, each paired tap's first partner.
        self._paired: dict[Side, dict[str, str]] = {"baseline": {}, "target": {}}
        # What `_possible_wholes` has found since the last pair was added.
        self._alone: dict[Side, set[str]] = {}
        self._wholes: dict[tuple[Side, int], list[RecordedTap]] = {}
        # For each place in a model: the places of this side's taps that contain its taps.
        self._wholes_of: dict[tuple[Side, str], set[str]] = defaultdict(set)
        # For each place in a model: the number of its taps that are part of no tap of this side.
        self._in_vain: Counter[tuple[Side, str]] = Counter()

    def run(self, before: Proposal | None, guesses: bool, trusted: Sequence[Pair] = ()) -> Proposal:
        self.reserved = {pair.baseline: pair.target for pair in trusted}
        for rule in rules_of(trusted):
            # Reserve the partners of other layers too. Otherwise another tap with the same values would take them, such
            # as the output of the enclosing module.
            for name in filter(rule.covers, self.target):
                self.reserved.setdefault(rule.baseline_for(name), name)
        for pair in before.pairs if before is not None else ():
            if pair.sureness == "rule":
                # The tap's own value does not match, and a module that passes on the grafted one has it too.
                self.reserved.setdefault(pair.baseline, pair.target)
        self.match_equals()
        self.match_parts()
        self.trust(trusted)
        self.apply_rules(trusted)
        if guesses:
            self.guess()
        pairs = tuple(self.in_order(_after(before, general_layouts(self.pairs, self.baseline, self.target))))
        order: dict[Side, tuple[str, ...]] = {"baseline": tuple(self.baseline), "target": tuple(self.target)}
        return Proposal(pairs, *self.unmatched(), tuple(self._problems(pairs)), order=order)

    def _problems(self, pairs: Sequence[Pair]) -> Iterable[str]:
        """The contradictions, each with the first later tap that does not match."""
        sure = [pair for pair in pairs if pair.by_value]
        matching = {pair.target for pair in sure}
        roles = other_roles(sure)
        names = {each.tap for each in roles}
        # A fused tap has several parts; a single one, such as the last token, is seldom a mistake.
        known = Counter(pair.target for pair in sure)
        partly = in_part(sure, {name: tap.shape for name, tap in self.target.items()})
        found = [
            *roles,
            *(each for each in odd_layouts(sure, [tap.name for tap in self.left("baseline")]) if each.tap not in names),
            *other_parts(sure),
            *in_groups(sure, self.target.keys() - matching),
            *(each for each in partly if known[each.tap] > 1 or fused_roles(each.tap)),
        ]
        for text, tap in first_taps(found).items():
            place = self.target[tap].order
            after = (other.name for other in self.target.values() if other.order > place)
            parted = next((name for name in after if name not in matching), None)
            yield f"{text}; the first tap after it that does not match is {parted}" if parted else text

    def unmatched(self) -> tuple[dict[str, str], dict[str, str]]:
        """The taps without a partner and the reasons, of the baseline and of the target."""
        return (
            {tap.name: self._reason(tap, "baseline") for tap in self.left("baseline")},
            {tap.name: self._reason(tap, "target") for tap in self.left("target")},
        )

    # ---- by value -----------------------------------------------------------------------------------------------

    def match_equals(self) -> None:
        """Match taps of equal size: find all candidates, then choose among equally good ones."""
        mine, theirs = _by_size(self.baseline.values()), _by_size(self.target.values())
        found: dict[str, list[ValueMatch]] = {}
        for numel in mine.keys() & theirs.keys():
            # Equal tensors have nearly equal root mean squares, so only such tensors are compared.
            others = sorted(mine[numel], key=lambda other: other.sketch.rms)
            sizes = np.array([other.sketch.rms for other in others])
            quantiles = np.stack([other.sketch.quantiles for other in others])
            few = quantiles[:, _FEW_QUANTILES].copy()
            dtypes = {other.dtype for other in others}
            for tap in theirs[numel]:
                # All sketches are compared at once, values only for the remaining candidates.
                limit = min(COARSEST, 3 * (limit_for(tap.dtype, *dtypes) if self.limit is None else self.limit))
                size = tap.sketch.rms
                low, high = np.searchsorted(sizes, [size * (1 - 2 * limit), size * (1 + 2 * limit)])
                # Few quantiles rule out most of the others.
                apart = _apart(few[low:high], tap.sketch.quantiles[_FEW_QUANTILES], size)
                places = low + np.flatnonzero((apart <= limit).all(axis=1))
                apart = _apart(quantiles[places], tap.sketch.quantiles, size)
                fits = (apart <= limit).all(axis=1)
                matching = self._matching(tap, [others[place] for place in places[fits].tolist()], apart[fits])
                if matching:
                    found[tap.name] = _ties(matching)
                tap.forget()
            for tap in others:
                tap.forget()
        self._choose(found)

    def _matching(
        self, tap: RecordedTap, others: Sequence[RecordedTap], apart: npt.NDArray[np.float64]
    ) -> list[ValueMatch]:
        """A tap's matches among those of equal size; ``apart`` has their quantiles' distances, ``[others, each]``."""
        most = apart.max(axis=1, initial=0.0)
        matching: list[ValueMatch] = []
        limit = math.inf
        for place in np.argsort(most, kind="stable").tolist():
            if most[place] > limit:
                # In any arrangement, the values of the others are too far away for a tie.
                break
            found = self._find(others[place], tap)
            if found is None:
                continue
            matching.append(found)
            if found.rel <= TIE_FLOOR:
                limit = min(limit, _EQUAL_QUANTILES)
            elif tap.digest is not None:
                # Rounded weights of other layers have nearly the same quantiles, and each would have to be fetched.
                limit = min(limit, max(_EQUAL_QUANTILES, _TIED_QUANTILES * float(most[place])))
        return sorted(matching, key=lambda each: each.outer.order)

    def _find(self, outer: RecordedTap, inner: RecordedTap) -> ValueMatch | None:
        try:
            return find(outer, inner, self._fetch_values, self.limit, self._known)
        except LayoutError as error:
            # A candidate that cannot be tried is no partner, but must not cost the other candidates.
            tap, other = (inner, outer) if self.target.get(inner.name) is inner else (outer, inner)
            self.why[tap.name] = f"{other.name} could not be tried as its partner: {error}"
            return None
        finally:
            self._memory.keep(outer, inner)

    def bring_weights(self, *taps: RecordedTap) -> None:
        """Fetch the values of weights that stayed on their ranks. Equal ones need none, unless they are elsewhere."""
        for tap in taps:
            if tap.digest is not None and tap.value is None:
                self._fetch_values(tap)
        self._memory.keep(*taps)

    def _fetch_values(self, tap: RecordedTap) -> None:
        """Fetch a tap's values."""
        side: Side = "baseline" if self.baseline.get(tap.name) is tap else "target"
        fetch = self.fetch[side]
        if fetch is None or tap.name in self._not_held[side]:
            return
        value = fetch(tap.name)
        if value is None:
            self._not_held[side].add(tap.name)
            return
        tap.forget()
        tap.value = value.detach()
        self._memory.fetched.add(id(tap))

    def _choose(self, found: dict[str, list[ValueMatch]]) -> None:
        """Choose one partner for each, best fits first; partners are shared only if there are too few."""
        # If the same values occur several times, all layers take the choice that most layers take.
        usual: Counter[tuple[str, str]] = Counter()
        for each, _ in self._chosen(found, usual):
            usual[_places(each)] += 1
        for each, note in self._chosen(found, usual):
            self._add(each, "baseline", note)

    def _chosen(
        self, found: dict[str, list[ValueMatch]], usual: Counter[tuple[str, str]]
    ) -> list[tuple[ValueMatch, str]]:
        most: dict[str, int] = defaultdict(int)
        for (_, place), count in usual.items():
            most[place] = max(most[place], count)
        scored = [
            (self._fit_of(each) + (0.5 * usual[_places(each)] / most[_places(each)[1]] if usual else 0.0), each)
            for options in found.values()
            for each in options
        ]
        scored.sort(key=lambda entry: (-entry[0], entry[1].rel, entry[1].inner.order))
        taken = {name: partner for name, partner in self.reserved.items() if partner not in found}
        chosen: dict[str, tuple[ValueMatch, str]] = {}
        for _, each in scored:
            if each.inner.name not in chosen and each.outer.name not in taken:
                taken[each.outer.name] = each.inner.name
                chosen[each.inner.name] = each, ""
        for _, each in scored:
            if each.inner.name not in chosen:
                chosen[each.inner.name] = each, f"has the same values as {taken[each.outer.name]}"
        return list(chosen.values())

    def _fit_of(self, found: ValueMatch) -> float:
        """How well two taps fit together by kind, name and place in the order, whatever their values."""
        one, other = found.outer, found.inner
        kind = 0.5 if one.kind and one.kind == other.kind else 0.0
        # A module that returns its input is preferably paired with another such module.
        kind -= 0.5 * ((one.kind in PASS_THROUGH) != (other.kind in PASS_THROUGH))
        places = one.order / max(1, len(self.baseline) - 1), other.order / max(1, len(self.target) - 1)
        plain = 0.3 if not found.layout.steps else 0.0
        return similarity(one.name, other.name) + kind + plain - 2 * abs(places[0] - places[1])

    def _add(self, found: ValueMatch, whole: Side, note: str = "") -> None:
        names = (found.outer.name, found.inner.name)
        baseline, target = names if whole == "baseline" else names[::-1]
        sureness: Sureness = "exact" if found.exact else "near"
        if found.sampled:
            note = f"{note}; only extreme values compared" if note else "only extreme values compared"
        self.add(Pair(baseline, target, found.layout, whole, sureness, found.rel, note))

    def match_rows(self) -> None:
        """Match weights that consist of rows of a larger one, by the digests of their rows."""
        sides: tuple[Side, ...] = ("target", "baseline")
        for whole in sides:
            outer = {tap.name: tap for tap in self.left(whole)}
            wholes = Wholes({name: tap.digest for name, tap in outer.items() if tap.digest is not None})
            for inner in self.left(other_side(whole)):
                if inner.digest is None or not inner.sketch.telling:
                    continue
                found = [
                    ValueMatch(outer[name], inner, layout_of(strides, outer[name].shape, inner.shape), 0.0, exact=True)
                    for name, strides in wholes.of(inner.digest)
                ]
                if found:
                    self._add(max(found, key=self._fit_of), whole)

    def match_parts(self) -> None:
        """Match each remaining tap with a tap of the other side that it is a part, or a repetition, of."""
        inner: list[tuple[RecordedTap, Side]] = [(tap, "baseline") for tap in self.left("target")]
        inner += [(tap, "target") for tap in self.left("baseline")]
        # Small weights first: a fused one that they are parts of is then not sought in yet larger ones.
        for tap, whole in sorted(inner, key=lambda each: 0 if each[0].digest is None else each[0].sketch.numel):
            if not self.has(tap.name, other_side(whole)):
                self._best_part(tap, whole)
        self._fill("target")
        self._fill("baseline")
        for tap in (*self.baseline.values(), *self.target.values()):
            tap.forget()

    def _fill(self, whole: Side) -> None:
        """Pair the remaining parts of partly known wholes: their partners have equal size and are nearby."""
        wholes, others = (self.target, self.baseline) if whole == "target" else (self.baseline, self.target)
        parts: dict[str, list[Pair]] = defaultdict(list)
        for pair in self.pairs:
            parts[getattr(pair, whole)].append(pair)
        for name, known in parts.items():
            outer = wholes[name]
            if any(pair.whole != whole or not pair.layout.leaves_out for pair in known):
                continue
            gap = uncovered((pair.layout for pair in known), outer.shape)
            have = {pair.inner for pair in known}
            at = others[next(iter(have))].order
            # Parts of one whole come from one pass. Where sequences grow, other passes have the same values.
            calls = {call_of(each) for each in have}
            for inner in sorted(others.values(), key=lambda tap: abs(tap.order - at))[:BESIDE]:
                if gap is None:
                    break
                if (
                    inner.name in have
                    or call_of(inner.name) not in calls
                    or inner.sketch.numel >= outer.sketch.numel
                    or inner.sketch.constant
                ):
                    continue
                found = self._find(outer, inner)
                if found is not None and fills(found.layout, gap):
                    self._add(found, whole)
                    known.append(self.pairs[-1])
                    gap = uncovered((pair.layout for pair in known), outer.shape)

    def _possible_wholes(self, whole: Side, numel: int) -> tuple[set[str], list[RecordedTap]]:
        """The taps that may contain a tap of this size, those without a partner of equal size first."""
        if whole not in self._alone:
            # A tap without a partner of equal size is more likely to consist of parts.
            self._alone[whole] = {tap.name for tap in self.left(whole)} | {
                getattr(pair, whole) for pair in self.pairs if pair.layout.steps and pair.layout.leaves_out
            }
        alone = self._alone[whole]
        if (whole, numel) not in self._wholes:
            taps = self.baseline if whole == "baseline" else self.target
            outer = [
                other
                for other in taps.values()
                if (other.sketch.numel != numel if whole == "baseline" else other.sketch.numel > numel)
            ]
            self._wholes[whole, numel] = sorted(outer, key=lambda each: (each.name not in alone, each.sketch.numel))
        return alone, self._wholes[whole, numel]

    def _best_part(self, inner: RecordedTap, whole: Side) -> None:
        if inner.sketch.constant:
            return
        place, distance = place_of(inner.name), self._distance(inner, whole)
        likely = self._wholes_of[whole, place]
        alone, outer = self._possible_wholes(whole, inner.sketch.numel)
        if self._in_vain[whole, place] >= _IN_VAIN:
            # Layers are alike: a part that several of them lack is only sought in the usual place.
            outer = [other for other in outer if distance(other) <= BESIDE]
        found: list[ValueMatch] = []

        def rank(other: RecordedTap) -> tuple[bool, bool, bool, float]:
            """Prefer taps that run at about the same time, and of these the ones nearest to other layers' partners."""
            known = place_of(other.name) in likely
            return other.name not in alone, distance(other) > BESIDE, not known, distance(other) if known else 0.0

        for other in sorted(outer, key=rank):
            each = self._find(other, inner)
            if each is not None:
                found.append(each)
                is_best = each.rel <= TIE_FLOOR or (inner.digest is not None and each.is_as_near_as_possible)
                if is_best and other.name in alone:
                    break
        if found:
            best = min(found, key=lambda each: (each.outer.name not in alone, round(each.rel, 7), -self._fit_of(each)))
            self._add(best, whole)
            likely.add(place_of(best.outer.name))
        else:
            self._in_vain[whole, place] += 1

    def _distance(self, tap: RecordedTap, other: Side) -> Callable[[RecordedTap], float]:
        """The distance, in taps, between a tap of the other side and this tap's expected place there."""
        taps, own = (self.baseline, self.target) if other == "baseline" else (self.target, self.baseline)
        place = tap.order / max(1, len(own) - 1) * (len(taps) - 1)
        return lambda each: abs(each.order - place)

    # ---- by rule, and by name -----------------------------------------------------------------------------------

    def trust(self, pairs: Sequence[Pair]) -> None:
        """Add pairs that grafts have proved although their values do not match."""
        for pair in pairs:
            tap, other = self.target.get(pair.target), self.baseline.get(pair.baseline)
            if tap is not None and other is not None and not self.has(pair.target, "target"):
                self.add(replace(pair, sureness="rule", rel=applied(pair.layout, other, tap)))

    def apply_rules(self, trusted: Sequence[Pair] = ()) -> None:
        for rule in rules_of([*trusted, *(pair for pair in self.pairs if pair.by_value)]):
            for tap in self.left("target"):
                if not rule.covers(tap.name):
                    continue
                name = rule.baseline_for(tap.name)
                other = self.baseline.get(name)
                if other is None:
                    self.why[tap.name] = f"by the rule of {rule.seen} layers it would be {name}, which does not exist"
                    continue
                # A whole has several parts, and a tap that passes on a grafted tensor shows its values too.
                shared = (
                    rule.example.whole == "baseline" and rule.example.layout.leaves_out
                ) or rule.example in trusted
                partner = self._paired["baseline"].get(name)
                if partner is not None and not (shared or self._share_elsewhere(rule, partner)):
                    self.why[tap.name] = (
                        f"by the rule of {rule.seen} layers it would be {name}, which is paired with {partner}"
                    )
                    continue
                self.add(self.by_rule(rule.example, rule.seen, other, tap))
            if rule.example.whole == "target" and rule.example.layout.leaves_out:
                self._apply_rules_of_parts(rule)

    def by_rule(self, example: Pair, seen: int, baseline: RecordedTap, target: RecordedTap) -> Pair:
        """The pair of two taps that ``seen`` other layers have as ``example``."""
        outer, inner = (baseline, target) if example.whole == "baseline" else (target, baseline)
        self.bring_weights(outer, inner)
        rel = applied(example.layout, outer, inner)
        note = f"as in {seen} other layers"
        constant = baseline.sketch.constant and target.sketch.constant
        if constant and rel == 0.0:
            note += "; all its values are equal, so they prove nothing"
        elif rel is None:
            note += "; its values could not be compared in that layout"
        elif rel > limit_for(baseline.dtype, target.dtype):
            there = "where the values match" if example.by_value else "where grafts confirmed it"
            note += f", {there}; here the values differ by rel_l2 {rel:.2g}"
        return Pair(baseline.name, target.name, example.layout, example.whole, "rule", rel, note)

    def guess(self) -> None:
        """Pair remaining taps just by name and shape, if both would choose each other."""
        mine, theirs = self.left("baseline"), self.left("target")

        def best(name: RecordedTap, others: Iterable[RecordedTap]) -> RecordedTap | None:
            scored = [
                (similarity(name.name, o.name), -abs(o.order - name.order), o) for o in others if o.shape == name.shape
            ]
            top = max(scored, key=lambda each: each[:2], default=None)
            return top[2] if top is not None and top[0] >= LEAST_SIMILARITY else None

        for tap in theirs:
            other = best(tap, mine)
            if other is not None and best(other, theirs) is tap:
                rel = applied(Layout(), other, tap)
                self.add(Pair(other.name, tap.name, Layout(), "baseline", "guess", rel, "by name and shape alone"))

    def _share_elsewhere(self, rule: Rule, partner: str) -> bool:
        """Whether a tap like ``partner`` has the same baseline tap as a rule's example."""
        example = rule.example
        return any(
            pair.baseline == example.baseline and pair.target != example.target and pair.by_value
            for pair in self.pairs
            if place_of(pair.target) == place_of(partner)
        )

    def _apply_rules_of_parts(self, rule: Rule) -> None:
        """Pair the remaining parts of the target's tensors that are already paired in part."""
        left = {tap.name for tap in self.left("baseline")}
        for tap in self.target.values():
            if rule.covers(tap.name) and (name := rule.baseline_for(tap.name)) in left:
                self.add(self.by_rule(rule.example, rule.seen, self.baseline[name], tap))

    # ---- the pairs so far, and what is left ---------------------------------------------------------------------

    def add(self, pair: Pair) -> None:
        self.pairs.append(pair)
        self._paired["baseline"].setdefault(pair.baseline, pair.target)
        self._paired["target"].setdefault(pair.target, pair.baseline)
        self._alone.clear()
        self._wholes.clear()

    def replace_pairs(self, pairs: Sequence[Pair]) -> None:
        """Replace all pairs so far by these."""
        self.pairs = []
        self._paired = {"baseline": {}, "target": {}}
        for pair in pairs:
            self.add(pair)

    def has(self, name: str, side: Side) -> bool:
        """Whether a side's tap has a partner."""
        return name in self._paired[side]

    def left(self, side: Side) -> list[RecordedTap]:
        taps = self.baseline if side == "baseline" else self.target
        return [tap for name, tap in taps.items() if name not in self._paired[side]]

    def in_order(self, pairs: Iterable[Pair]) -> list[Pair]:
        return sorted(pairs, key=lambda pair: (self.target[pair.target].order, self.baseline[pair.baseline].order))

    def _reason(self, tap: RecordedTap, side: Side) -> str:
        if tap.name in self.why:
            return self.why[tap.name]
        other = other_side(side)
        if tap.sketch.nonfinite == tap.sketch.numel:
            return "it has no finite value"
        if tap.sketch.constant:
            return "all its values are equal, so they cannot identify a partner"
        if tap.sketch.numel not in self._sizes[other]:
            return f"no {other} tap has {tap.sketch.numel} elements or contains it"
        twin = next((pair for pair in self.pairs if pair.by_value and self._equal(tap, side, pair)), None)
        if twin is not None:
            return f"it has the same values as {getattr(twin, side)}, which is paired"
        return f"no {other} tap has its values"

    def _equal(self, tap: RecordedTap, side: Side, pair: Pair) -> bool:
        taps = self.baseline if side == "baseline" else self.target
        twin = taps[getattr(pair, side)].sketch
        own = tap.sketch
        return (
            twin.numel == own.numel
            and bool(np.allclose(twin.extremes, own.extremes, rtol=TIE_FLOOR, atol=0))
            and bool(np.allclose(twin.quantiles, own.quantiles, rtol=TIE_FLOOR, atol=TIE_FLOOR * own.rms))
        )


def _apart(others: npt.NDArray[np.float64], own: npt.NDArray[np.float64], size: float) -> npt.NDArray[np.float64]:
    """The relative distances of others' quantiles, ``[others, each]``, from a tap's of this root mean square."""
    return np.abs(others - own) / (np.maximum(np.abs(others), size) + 1e-30)


def _by_size(taps: Iterable[RecordedTap]) -> dict[int, list[RecordedTap]]:
    """Taps by their number of elements, without those whose values are all equal."""
    buckets: dict[int, list[RecordedTap]] = defaultdict(list)
    for tap in taps:
        if not tap.sketch.constant and len(tap.sketch.quantiles):
            buckets[tap.sketch.numel].append(tap)
    return buckets


def _sizes_of(taps: Mapping[str, RecordedTap]) -> set[int]:
    return {tap.sketch.numel for tap in taps.values()}


def _places(found: ValueMatch) -> tuple[str, str]:
    """The partners' names without layer numbers, the target's last."""
    return place_of(found.outer.name), place_of(found.inner.name)


def _ties(matching: Sequence[ValueMatch]) -> list[ValueMatch]:
    best = min(each.rel for each in matching)
    return [each for each in matching if each.rel <= max(best * TIE_FACTOR, TIE_FLOOR)]


def _after(before: Proposal | None, pairs: Iterable[Pair]) -> list[Pair]:
    """The pairs of a run. Those that match by value, and were by rule in the previous run, are ``confirmed``."""
    if before is None:
        return list(pairs)
    ruled = {(pair.baseline, pair.target) for pair in before.pairs if pair.sureness in ("rule", "confirmed")}
    return [
        replace(pair, sureness="confirmed")
        if pair.sureness == "near" and (pair.baseline, pair.target) in ruled
        else pair
        for pair in pairs
    ]
