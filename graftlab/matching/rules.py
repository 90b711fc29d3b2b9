"""Rules over layer numbers: pairs that two or more layers have are proposed for all others."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from graftlab.matching.names import numbers_of, pattern_of, place_of, with_numbers
from graftlab.matching.pair import Pair


@dataclass(frozen=True)
class Rule:
    """Maps target taps of one pattern to baseline taps of another: each number is one of the target's plus a shift.

    ``numbers`` has for each number of the baseline's name its place among the target's numbers (None for a fixed
    number) and the shift. ``example`` is one of the ``seen`` pairs. ``constant`` has the place and the value of each
    number of the target's name that all these pairs have in common.
    """

    baseline: str
    target: str
    numbers: tuple[tuple[int | None, int], ...]
    example: Pair
    seen: int
    constant: tuple[tuple[int, int], ...] = ()

    def covers(self, target: str) -> bool:
        """Whether the rule applies to a target tap.

        ``norm2`` is not a later layer of ``norm1``, nor is the second result ``block[1]`` one of ``block[0]``.
        """
        if pattern_of(target) != self.target or place_of(target) != place_of(self.example.target):
            return False
        numbers = numbers_of(target)
        return all(numbers[at] == value for at, value in self.constant)

    def baseline_for(self, target: str) -> str:
        """The baseline tap for a target tap of this rule's pattern."""
        theirs = numbers_of(target)
        return with_numbers(self.baseline, [shift + (0 if at is None else theirs[at]) for at, shift in self.numbers])


def rules_of(pairs: Iterable[Pair]) -> list[Rule]:
    """The rules that at least two pairs follow, the most frequent first. A single layer is unreliable."""
    groups: dict[tuple[str, str, str, str], list[Pair]] = defaultdict(list)
    for pair in pairs:
        key = (pattern_of(pair.baseline), pattern_of(pair.target), pair.layout.text, pair.whole)
        groups[key].append(pair)
    rules = []
    for (baseline, target, _, _), group in groups.items():
        numbers = _numbers(group)
        if numbers is not None:
            following, shifts = numbers
            seen = len({pair.target for pair in following})
            if seen >= 2:
                rules.append(Rule(baseline, target, shifts, following[0], seen, _constant(following)))
    return sorted(rules, key=lambda rule: -rule.seen)


def _numbers(group: Sequence[Pair]) -> tuple[list[Pair], tuple[tuple[int | None, int], ...]] | None:
    """How the baseline's numbers follow from the target's in most pairs, and these pairs."""
    mine = [numbers_of(pair.baseline) for pair in group]
    theirs = [numbers_of(pair.target) for pair in group]
    if len(set(theirs)) < 2:
        return None
    ways: list[tuple[int | None, int]] = []
    for place in range(len(mine[0])):
        own = [numbers[place] for numbers in mine]
        options: list[tuple[int, bool, int | None, int]] = [(Counter(own).most_common(1)[0][1], True, None, own[0])]
        for at in range(len(theirs[0])):
            shifts = Counter(number - other[at] for number, other in zip(own, theirs, strict=True))
            shift, count = shifts.most_common(1)[0]
            options.append((count, False, at, shift))
        # A number that is constant counts as fixed, even if it also follows one of the target's.
        _, _, follows, added = max(options, key=lambda option: (option[0], option[1]))
        ways.append((follows, Counter(own).most_common(1)[0][0] if follows is None else added))
    rule = Rule(pattern_of(group[0].baseline), "", tuple(ways), group[0], 0)
    return [pair for pair in group if rule.baseline_for(pair.target) == pair.baseline], tuple(ways)


def _constant(group: Sequence[Pair]) -> tuple[tuple[int, int], ...]:
    """The place and the value of each number that the target's names of these pairs have in common."""
    places = zip(*(numbers_of(pair.target) for pair in group), strict=True)
    return tuple((at, numbers[0]) for at, numbers in enumerate(places) if len(set(numbers)) == 1)
