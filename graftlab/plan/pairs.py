"""The pairs of a plan: which baseline tap corresponds to which target tap, and their common name.

Each side knows only its own taps. It derives the other side's name from the table, so that a filter gets the same tags
on both sides.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import Any

from graftlab.base.sources import literal, parse_expression
from graftlab.base.tags import Plain, identity, is_rank_tag, name_with
from graftlab.base.world import SIDES, Side
from graftlab.errors import LayoutError, PlanError
from graftlab.layouts import Gather, Layout, Rows, parse_layout

GIVEN = "given"
"""``matched_by`` of a pair that a person wrote."""

_INDEX = re.compile(r"\{([a-z])([+-]\d+)?\}")
_CALL = re.compile(r"(?P<name>.*?)(?:\[(?P<tags>[^\[\]]*=[^\[\]]*)\])?(?:#(?P<occurrence>\d+))?$", re.DOTALL)
ANY = "*"
"""In a name of a pair, the value of a tag that may be anything."""
_FIELDS = ("baseline", "target", "layout", "whole", "matched_by", "rel")


@dataclass(frozen=True)
class PairRule:
    """A baseline tap and a target tap that show the same quantity; with ``{n}`` in both names, one pair per number.

    ``layout`` is the text of a layout that makes one from the other; the tensor of the side ``whole`` is the larger, or
    of equal size. A name may select calls of a tap by their tags, ``q[layer={n}]``, in any order, and by the occurrence
    in the step, ``drop#2``. Tags that it does not name must be equal on both sides, except for those that it leaves
    open, ``q[layer={n},t=*]``: such calls are paired in their order. ``{n+1}`` is the next number. ``matched_by`` and
    ``rel`` describe how the pair was found.
    """

    baseline: str
    target: str
    layout: str = "same"
    whole: Side = "baseline"
    matched_by: str = GIVEN
    rel: float | None = None

    def __post_init__(self) -> None:
        for side, name in (("baseline", self.baseline), ("target", self.target)):
            if not isinstance(name, str) or not name:
                raise PlanError(f"pairs: the {side}'s tap must be a name, not {name!r}")
        if self.whole not in ("baseline", "target"):
            raise PlanError(f"pairs: whole must be 'baseline' or 'target', not {self.whole!r}")
        mine, theirs = (set(re.findall(_INDEX, name)) for name in (self.baseline, self.target))
        if {letter for letter, _ in mine} != {letter for letter, _ in theirs}:
            raise PlanError(
                f"pairs: {self.baseline!r} and {self.target!r} must have the same numbers in braces, such as {{n}}"
            )
        try:
            layout = _parsed(self.layout) if isinstance(self.layout, str) else parse_layout(self.layout)
            f"{self.baseline}{self.target}".encode()
        except (LayoutError, UnicodeEncodeError) as error:
            raise PlanError(f"pairs: {self.baseline!r} and {self.target!r}: {error}") from error
        object.__setattr__(self, "layout", layout.text)
        object.__setattr__(self, "baseline", _as_reached(self.baseline))
        object.__setattr__(self, "target", _as_reached(self.target))

    @cached_property
    def parsed(self) -> Layout:
        return _parsed(self.layout)

    @cached_property
    def is_pattern(self) -> bool:
        return _INDEX.search(self.baseline) is not None

    @cached_property
    def is_part(self) -> bool:
        """Whether one of the two tensors is only a part of the other."""
        return bool(self.parsed.leaves_out)

    @cached_property
    def row_steps(self) -> tuple[Rows, ...]:
        """The steps of the layout that need rows which taps have shown."""
        return tuple(step for step in self.parsed.steps if isinstance(step, Rows))

    @cached_property
    def moves_rows(self) -> bool:
        """Whether the two tensors have their rows in other orders, or other rows."""
        return any(isinstance(step, (Rows, Gather)) for step in self.parsed.steps)

    def name(self, side: Side) -> str:
        return self.baseline if side == "baseline" else self.target

    def to_code(self) -> str:
        """Return the rule as a dict in source text; parts that have their defaults are left out."""
        given = [(each.name, getattr(self, each.name), each.default) for each in fields(self)]
        parts = [f"{literal(name)}: {literal(value)}" for name, value, default in given if value != default]
        return "{" + ", ".join(parts) + "}"

    def counterpart(self, side: Side, name: str) -> tuple[str, str] | None:
        """Return both names of the pair in which this side's tap has this name; None without such a pair."""
        numbers = _numbers(self.name(side), name)
        if numbers is None:
            return None
        both = _filled(self.baseline, numbers), _filled(self.target, numbers)
        return None if both[0] is None or both[1] is None else (both[0], both[1])


def outputs_move_rows(rules: Sequence[PairRule]) -> bool:
    """Whether the model's outputs have their rows in other orders on both sides; where no output pairs, any tap.

    A result that contains what was given, such as tokens after their prompt, says nothing of the order of the outputs.
    """
    outputs, others = [], []
    for rule in rules:
        parts = [_parts_of(name) for name in (rule.baseline, rule.target)]
        if any("output" in each for each in parts):
            outputs += [] if any("input" in each for each in parts) else [rule]
        else:
            others.append(rule)
    return any(rule.moves_rows for rule in outputs or others)


def _parts_of(name: str) -> list[str]:
    return re.split(r"[.\[]", TapCallName.of(name).name)


@lru_cache(maxsize=1024)
def _parsed(text: str) -> Layout:
    """The layout of a text. Many pairs share one, which may list the rows of a whole batch."""
    return parse_layout(text)


def _pattern(text: str) -> re.Pattern[str]:
    parts, end = [], 0
    for number, index in enumerate(_INDEX.finditer(text)):
        parts += [re.escape(text[end : index.start()]), f"(?P<i{number}>0|[1-9][0-9]*)"]
        end = index.end()
    return re.compile("".join([*parts, re.escape(text[end:])]))


def _numbers(text: str, name: str) -> dict[str, int] | None:
    """Return the number for each index of a pattern in a name; None if the name does not match."""
    found = _pattern(text).fullmatch(name)
    if found is None:
        return None
    numbers: dict[str, int] = {}
    for number, (letter, shift) in enumerate(_INDEX.findall(text)):
        value = int(found[f"i{number}"]) - int(shift or 0)
        if value < 0 or numbers.setdefault(letter, value) != value:
            return None
    return numbers


def _filled(text: str, numbers: Mapping[str, int]) -> str | None:
    values = [numbers[letter] + int(shift or 0) for letter, shift in _INDEX.findall(text)]
    if any(value < 0 for value in values):
        return None
    left = iter(values)
    return _INDEX.sub(lambda _: str(next(left)), text)


@dataclass(frozen=True)
class TapCallName:
    """A name in a pair, parsed. ``tags`` and ``occurrence`` are None if the name does not have them."""

    name: str
    tags: dict[str, Plain] | None = None
    occurrence: int | None = None

    @classmethod
    def of(cls, text: str) -> TapCallName:
        found = _CALL.match(text)
        assert found is not None
        tags = None
        if found["tags"] is not None:
            items = (item.partition("=") for item in found["tags"].split(","))
            tags = {tag.strip(): _value(value) for tag, _, value in items}
        occurrence = None if found["occurrence"] is None else int(found["occurrence"])
        return cls(found["name"], tags, occurrence)


def _as_reached(text: str) -> str:
    """The name of a pair with its tags as calls are looked up: in the order of the alphabet, without blanks."""
    call = TapCallName.of(text)
    if not call.tags or not all(tag.isidentifier() and not is_rank_tag(tag) for tag in call.tags):
        return text
    return name_with(call.name, call.tags) + ("" if call.occurrence is None else f"#{call.occurrence}")


def _value(text: str) -> Plain:
    text = text.strip()
    try:
        value = ast.literal_eval(parse_expression(text))
    except (ValueError, SyntaxError):
        return text
    return value if isinstance(value, (int, float, bool)) or value is None else text


@dataclass(frozen=True)
class Pairing:
    """A pair as seen from one of its two taps.

    ``name`` is the pair's name in filters, rows and plots, ``baseline_name`` and ``target_name`` are the taps' own
    names (None if this side cannot know the other's), ``key`` is the name in the address. ``tags`` replace the tap's
    own tags in filters and in the address, if the two sides may give different ones. ``occurrence`` restricts the pair
    to that call of the tap in the step. ``alone`` is the reason why the tap has no counterpart.
    """

    name: str
    baseline_name: str | None
    target_name: str | None
    key: str
    tags: dict[str, Plain] | None = None
    occurrence: int | None = None
    rule: PairRule | None = None
    alone: str | None = None


def as_tags(pairing: Pairing) -> dict[str, Any]:
    """Return the tags that a pairing contributes for filters."""
    names = {"name": pairing.name, "baseline_name": pairing.baseline_name, "target_name": pairing.target_name}
    return {**names, **(pairing.tags or {})}


class PairTable:
    """All pairs of a plan, indexed by each side's tap names."""

    def __init__(self, rules: Sequence[PairRule]) -> None:
        self._rules = tuple(rules)
        self._written: dict[Side, dict[str, list[PairRule]]] = {"baseline": {}, "target": {}}
        for rule in self._rules:
            if not rule.is_pattern:
                for side, names in self._written.items():
                    names.setdefault(rule.name(side), []).append(rule)
        self._patterns: dict[Side, dict[str, list[PairRule]]] = {
            side: _by_shape([r for r in self._rules if r.is_pattern], side) for side in ("baseline", "target")
        }
        # The tags that rules name, by the names without them.
        self._selected: dict[Side, dict[str, set[_NamedTags]]] = {
            side: _tags_by_shape(self._rules, side) for side in ("baseline", "target")
        }
        self._shown = self._shown_names()
        # Names with an occurrence are indexed by the name alone.
        self._called: dict[Side, set[str]] = {
            side: {TapCallName.of(rule.name(side)).name for rule in self._rules if "#" in rule.name(side)}
            for side in ("baseline", "target")
        }

    def __bool__(self) -> bool:
        return bool(self._rules)

    def of(self, side: Side, name: str, given: Mapping[str, Any]) -> list[Pairing]:
        """Return the pairs of the tap with this name and these tags on this side."""
        own = dict(identity({**given, "name": name}).tags)
        tagged = name_with(name, own)
        found: list[Pairing] = []
        for text in dict.fromkeys((name, tagged)):
            for rule, baseline, target in self._instances(side, text):
                # A rule with tags on either side applies by its tags on both.
                if text == tagged or not _tells_tags(rule):
                    found.append(self._pairing(side, rule, baseline, target, own))
        if self._called[side]:
            for text in dict.fromkeys((name, tagged)):
                found += self._of_calls(side, text, own)
        # A rule that names all tags of a call wins over those that name some of them.
        for text in () if found else self._with_fewer_tags(side, name, own):
            found += [self._pairing(side, *each, own) for each in self._instances(side, text)]
            found += self._of_calls(side, text, own) if self._called[side] else []
        return found

    def _with_fewer_tags(self, side: Side, name: str, own: Mapping[str, Any]) -> list[str]:
        """The texts of rules that may be about this call and name some of its tags, none, or leave some open."""
        texts = []
        for tags in self._selected[side].get(_shape(name), ()):
            named = {tag for tag, _ in tags}
            if own.keys() >= named:
                texts.append(name_with(name, {tag: ANY if is_open else own[tag] for tag, is_open in tags}))
        return texts

    def has(self, side: Side, name: str) -> bool:
        """Whether some pair has a tap of this name on this side, with any tags."""
        return (
            bool(self._instances(side, name))
            or any(TapCallName.of(text).name == name for text in self._written[side])
            or any(
                _numbers(TapCallName.of(text).name, name) is not None
                for text in (rule.name(side) for rule in self._rules if rule.is_pattern)
                if TapCallName.of(text).name != text
            )
        )

    def _of_calls(self, side: Side, text: str, own: Mapping[str, Any]) -> list[Pairing]:
        found = []
        numbered = [t for t in self._written[side] if t.rpartition("#")[0] == text]
        for called in numbered:
            for rule, baseline, target in self._instances(side, called):
                found.append(self._pairing(side, rule, baseline, target, own))
        for rules in self._patterns[side].values():
            for rule in rules:
                fixed, _, call = rule.name(side).rpartition("#")
                numbers = _numbers(fixed, text) if call.isdigit() else None
                if numbers is not None:
                    baseline_name, target_name = (_filled(each, numbers) for each in (rule.baseline, rule.target))
                    if baseline_name and target_name:
                        found.append(self._pairing(side, rule, baseline_name, target_name, own))
        return found

    def _instances(self, side: Side, name: str) -> list[tuple[PairRule, str, str]]:
        """Return rules with both names filled in. A rule that names the tap literally wins over a pattern."""
        found = [(rule, rule.baseline, rule.target) for rule in self._written[side].get(name, ())]
        for rule in self._patterns[side].get(_shape(name), ()):
            both = rule.counterpart(side, name)
            if both is not None and not self._is_written_out(rule, *both):
                found.append((rule, *both))
        return found

    def _is_written_out(self, rule: PairRule, baseline: str, target: str) -> bool:
        by_baseline, by_target = baseline in self._written["baseline"], target in self._written["target"]
        if rule.is_part:
            # Literal rules for other parts of the larger tensor do not conflict.
            return by_target if rule.whole == "baseline" else by_baseline
        return by_baseline or by_target

    def _pairing(self, side: Side, rule: PairRule, baseline: str, target: str, own: Mapping[str, Any]) -> Pairing:
        mine, theirs = TapCallName.of(baseline), TapCallName.of(target)
        shown = self._shown[id(rule)]
        name = {"baseline": mine.name, "target": theirs.name}.get(shown, f"{mine.name} = {theirs.name}")
        tags = None
        if mine.tags is not None or theirs.tags is not None:
            chosen = mine.tags if mine.tags is not None else theirs.tags
            named = (mine if side == "baseline" else theirs).tags or {}
            tags = {tag: value for tag, value in own.items() if tag not in named}
            tags |= {tag: value for tag, value in (chosen or {}).items() if value != ANY}
        occurrence = None
        if mine.occurrence is not None or theirs.occurrence is not None:
            occurrence = (mine if side == "baseline" else theirs).occurrence or 0
        return Pairing(name, mine.name, theirs.name, f"{baseline} = {target}", tags, occurrence, rule)

    def _shown_names(self) -> dict[int, str]:
        """Choose the side whose name each rule's pairs get: the baseline's, unless several pairs would share it."""
        chosen = {}
        for rule in self._rules:
            chosen[id(rule)] = next((str(side) for side in SIDES if self._is_unique(rule, side)), "both")
        # One name, taken from the baseline for one pair and from the target for another, would stand for two taps.
        texts = Counter(_shape(rule.target) for rule in self._rules if chosen[id(rule)] == "target")
        for rule in self._rules:
            if chosen[id(rule)] == "baseline" and texts[_shape(rule.baseline)]:
                for other in self._rules:
                    if chosen[id(other)] == "target" and _shape(other.target) == _shape(rule.baseline):
                        chosen[id(other)] = "both"
        return chosen

    def _is_unique(self, rule: PairRule, side: Side) -> bool:
        name = rule.name(side)
        patterns = self._patterns[side].get(_shape(name), ())
        if rule.is_pattern:
            written = (w for text, ws in self._written[side].items() if _shape(text) == _shape(name) for w in ws)
            return len(patterns) == 1 and not (rule.is_part and any(written))
        return self._bare_count(side)[_bare(name)] == 1 and not any(each.is_part for each in patterns)

    def _bare_count(self, side: Side) -> Counter[str]:
        if side not in self._bare_counts:
            self._bare_counts[side] = Counter(_bare(text) for text, rules in self._written[side].items() for _ in rules)
        return self._bare_counts[side]

    @cached_property
    def _bare_counts(self) -> dict[Side, Counter[str]]:
        return {}


def _bare(text: str) -> str:
    """Return a name with its tags but without the occurrence; pairs that differ only there share a displayed name."""
    return text.partition("#")[0]


def _shape(name: str) -> str:
    """Return a name with all numbers replaced by 0."""
    return re.sub(r"\d+", "0", _INDEX.sub("0", name))


def _by_shape(rules: Iterable[PairRule], side: Side) -> dict[str, list[PairRule]]:
    found: dict[str, list[PairRule]] = defaultdict(list)
    for rule in rules:
        found[_shape(rule.name(side))].append(rule)
    return dict(found)


_NamedTags = tuple[tuple[str, bool], ...]
"""The tags that a rule names, and whether it leaves each open."""


def _tags_by_shape(rules: Iterable[PairRule], side: Side) -> dict[str, set[_NamedTags]]:
    """The tags that rules with tags name on a side, by their taps' names without numbers."""
    found: dict[str, set[_NamedTags]] = defaultdict(set)
    for rule in rules:
        if _tells_tags(rule):
            call = TapCallName.of(rule.name(side))
            found[_shape(call.name)].add(tuple((tag, value == ANY) for tag, value in (call.tags or {}).items()))
    return dict(found)


def _tells_tags(rule: PairRule) -> bool:
    return any(TapCallName.of(name).tags is not None for name in (rule.baseline, rule.target))


def rules_from(pairs: Any) -> tuple[PairRule, ...]:
    """Convert the argument ``pairs`` of a plan: a proposal of ``session.match``, or a sequence of rules.

    A rule is a dict with ``baseline`` and ``target``, optionally ``layout`` and ``whole``, or a tuple in this order.
    Raises :class:`PlanError` for anything else.
    """
    if pairs is None:
        return ()
    if hasattr(pairs, "plan_pairs"):
        pairs = pairs.plan_pairs()
    if isinstance(pairs, (str, bytes, Mapping)) or not isinstance(pairs, Iterable):
        raise PlanError(f"pairs must be the proposal of session.match or a list of rules, not {type(pairs).__name__}")
    return tuple(_rule(each) for each in pairs)


def _rule(given: Any) -> PairRule:
    if isinstance(given, PairRule):
        return given
    if isinstance(given, Mapping):
        unknown = [key for key in given if key not in _FIELDS]
        if unknown or not {"baseline", "target"} <= set(given):
            raise PlanError(f"a pair has baseline= and target=, and optionally layout= and whole=, not {dict(given)!r}")
        return PairRule(**given)
    if isinstance(given, (tuple, list)) and 2 <= len(given) <= 4 and all(isinstance(part, str) for part in given):
        return PairRule(*given)
    raise PlanError(f"a pair is (baseline's tap, target's tap[, layout[, side of the whole]]), not {given!r}")
