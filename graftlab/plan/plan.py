"""The plan, one immutable, versioned value: which taps are compared, grafted and kept, and by which transform."""

from __future__ import annotations

import html
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from graftlab.base.html import bundle, cell, marked_up, rest_of, table
from graftlab.base.sources import literal
from graftlab.base.tags import own_tags
from graftlab.base.text import shortened
from graftlab.base.world import SIDES, Direction, Side, other_side
from graftlab.errors import FilterError, PlanError, warn
from graftlab.filters.expressions import Filter, compile_filter
from graftlab.filters.patterns import bounded_rewrite
from graftlab.plan.pairs import Pairing, PairRule, PairTable, as_tags, rules_from
from graftlab.transforms import TransformSpec
from graftlab.transforms.code import source_to_share
from graftlab.transforms.spec import AnyTransform, Specs, each_of, specs_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

FILTER_MEANINGS = {
    "b2t": "grafted from the baseline into the target",
    "t2b": "grafted from the target into the baseline",
    "compare": "measured and not changed",
    "keep": "kept for plots, as a pair of tensors",
}
"""The effect of each filter of a plan on the taps that it matches."""
FILTERS = tuple(FILTER_MEANINGS)

# What a repr and a notebook show of a plan: characters of a text, entries of a tuple, and rows of each kind.
_SHOWN_TEXT = 120
_SHOWN_ENTRIES = 2
_SHOWN_ROWS = 5

Rename = tuple[tuple[Side, str, str], ...]
F = TypeVar("F", bound=Callable[..., Any])


class PlanEdit(TypedDict, total=False):
    """The changes of an edit. An absent part stays unchanged; None resets it, so a filter then matches nothing."""

    b2t: str | None
    t2b: str | None
    compare: str | None
    keep: str | None
    transform: AnyTransform
    rename: Mapping[Side, Mapping[str, str]] | None
    pairs: Any


class _Unchanged:
    def __repr__(self) -> str:
        return "<unchanged>"


def takes_plan_edit(function: F) -> F:
    """Give a function with ``**changes: PlanEdit`` a signature in which help and completion show each change."""
    signature = inspect.signature(function)
    given = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    changes = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=_Unchanged(), annotation=annotation.__forward_arg__
        )
        for name, annotation in PlanEdit.__annotations__.items()
    ]
    function.__signature__ = signature.replace(parameters=[*given, *changes])  # type: ignore[attr-defined]
    return function


@dataclass(frozen=True)
class Action:
    """A plan's decision about a tap: its tensor's direction (None: not sent), and whether to overwrite and keep."""

    direction: Direction | None = None
    graft: bool = False
    keep: bool = False
    overlap: bool = False
    transform: int | None = None
    """The index of the plan's transform for the tap; None is the default."""


@dataclass(frozen=True, repr=False)
class GraftPlan:
    """Filters, transform and name rewriting in force, the same on both sides.

    ``b2t`` and ``t2b`` graft, ``compare`` measures from baseline to target and overwrites nothing, ``keep`` keeps the
    pair of tensors (and measures, if nothing else matches). All are filter expressions over tags; None and blank match
    nothing. ``transform=f`` applies where the plan grafts, ``transform=(filter, f)`` at each tap that its filter
    matches; in a list, the first transform that matches a tap applies; elsewhere the default applies. ``f`` is a
    function, a dotted path or source text. ``rename`` is ``{side: {regex: replacement}}`` or a tuple of ``(side, regex,
    replacement)``, which rewrites that side's names before taps are paired: only the first rule that matches a name
    rewrites it, with ``re.sub``. ``pairs`` declares which taps correspond whatever their names, and in which layout: a
    proposal of ``session.match``, or rules such as ``{"baseline": "h.{n}.attn.qkv", "target": "layers.{n}.q_proj",
    "layout": "part(...)"}``; see :class:`.PairRule`. It takes precedence over ``rename``.

    Filters see a pair's common ``name``, and each side's own name as ``baseline_name`` and ``target_name``.

    Raises :class:`FilterError`, :class:`TransformError` or :class:`PlanError` for an invalid part; warns if no filter
    is left, and if a transform applies to no tap because nothing is grafted.

    >>> plan = gl.GraftPlan(b2t="search('attn', name) and layer < 4", compare=None)
    >>> plan.edit(b2t=None, keep="step == 0").version
    1
    """

    b2t: str | None = None
    t2b: str | None = None
    compare: str | None = "True"
    keep: str | None = None
    transform: Specs = None
    rename: Rename = field(default=())
    pairs: tuple[PairRule, ...] = field(default=())
    version: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "transform", specs_of(self.transform))
        if not isinstance(self.rename, tuple):
            object.__setattr__(self, "rename", _flat_rename(self.rename or {}))
        if not isinstance(self.pairs, tuple) or not all(isinstance(rule, PairRule) for rule in self.pairs):
            object.__setattr__(self, "pairs", rules_from(self.pairs))
        # Compiled now, so that an invalid part is refused here and not on a rank.
        _ = self._filters, self._transform_filters, self._renames, self._pair_table
        self._refuse_unknown_names()
        if not any(text and text.strip() for text in (self.b2t, self.t2b, self.compare, self.keep)):
            warn(
                "this plan does nothing: each of b2t, t2b, compare and keep is blank or None, which matches no tap. "
                "compare='True' compares every tap"
            )
        if self.grafts_nothing and any(spec.where is None for spec in self.transforms):
            warn(
                "this plan grafts no tap, so its transform is applied nowhere; give b2t or t2b, or select its "
                "taps with a filter, which may include compared ones: transform=('True', f)"
            )

    @cached_property
    def transforms(self) -> tuple[TransformSpec, ...]:
        """The transforms in the order of precedence: the first that matches a tap applies."""
        return each_of(self.transform)

    @property
    def grafts_nothing(self) -> bool:
        """Whether both b2t and t2b are blank."""
        return not any(text and text.strip() for text in (self.b2t, self.t2b))

    @takes_plan_edit
    def edit(self, **changes: Unpack[PlanEdit]) -> GraftPlan:
        """Return a plan with these changes and the next version.

        >>> gl.GraftPlan().edit(b2t="layer == 3").edit(b2t=None).version
        2
        """
        unknown = changes.keys() - PlanEdit.__annotations__.keys()
        if unknown:
            raise TypeError(
                f"edit() got unexpected keywords {sorted(unknown)}; a plan has {', '.join(PlanEdit.__annotations__)}"
            )
        parts: dict[str, Any] = {**changes, "version": self.version + 1}
        return replace(self, **parts)

    def to_code(self) -> str:
        """Return one cell that puts this plan in force in another session: ``session.edit(...)`` with every part.

        A transform that was given as a function is written as source text, with the modules and plain values that it
        reads. Raises :class:`TransformError` if it reads anything else. The options of a verdict, such as ``floor`` and
        ``exact``, are not part of a plan.

        >>> print(gl.GraftPlan(b2t="layer == 3").to_code())
        session.edit(
            b2t='layer == 3',
            t2b=None,
            compare='True',
            keep=None,
            transform=None,
            rename=None,
            pairs=[],
        )
        """
        lines = [f"{name}={literal(getattr(self, name))}," for name in FILTERS]
        transforms = [_transform_code(spec) for spec in self.transforms]
        lines += ["transform=[", *(f"    {each}," for each in transforms), "],"] if transforms else ["transform=None,"]
        rename = [f"    {literal(rule)}," for rule in self.rename]
        lines += ["rename=(", *rename, "),"] if rename else ["rename=None,"]
        pairs = [f"    {rule.to_code()}," for rule in self.pairs]
        lines += ["pairs=[", *pairs, "],"] if pairs else ["pairs=[],"]
        return "\n".join(["session.edit(", *(f"    {line}" for line in lines), ")"])

    @cached_property
    def _filters(self) -> dict[str, Filter]:
        return {name: compile_filter(getattr(self, name)) for name in FILTERS}

    @cached_property
    def _transform_filters(self) -> list[Filter | None]:
        return filters_of(self.transforms)

    @cached_property
    def _renames(self) -> dict[Side, list[Callable[[str], str | None]]]:
        compiled: dict[Side, list[Callable[[str], str | None]]] = {"baseline": [], "target": []}
        for rule in self.rename:
            if not isinstance(rule, tuple) or len(rule) != 3 or not all(isinstance(part, str) for part in rule):
                raise PlanError(f"a rename rule is (side, regex, replacement), three strings, not {rule!r}")
            side, pattern, replacement = rule
            if side not in compiled:
                raise PlanError(f"rename is for 'baseline' or 'target', not {side!r}")
            try:
                rewrite = bounded_rewrite(pattern, replacement)
                # Checks the references to groups.
                re.sub(pattern, replacement, "")
                # Text that UTF-8 cannot express cannot be sent to the ranks.
                f"{pattern}{replacement}".encode()
            except (re.error, IndexError, OverflowError, UnicodeEncodeError, FilterError) as error:
                raise PlanError(f"rename {pattern!r} -> {replacement!r} for {side} is invalid: {error}") from error
            compiled[side].append(rewrite)
        return compiled

    @cached_property
    def _pair_table(self) -> PairTable:
        return PairTable(self.pairs)

    def _refuse_unknown_names(self) -> None:
        """Refuse filters that would differ for one pair between the two sides."""
        for side, tag in (("baseline", "baseline_name"), ("target", "target_name")):
            asking = [name for name in FILTERS if tag in self._filters[name].names]
            if asking and any(rule[0] == side for rule in self.rename):
                other = other_side(side)
                raise PlanError(
                    f"{asking[0]} uses {tag}, which the {other}'s ranks cannot know because rename rewrites the "
                    f"{side}'s names. Use name, which is the name after the rename, or write pairs=[...] instead of "
                    "the rename"
                )

    @cached_property
    def mentions(self) -> frozenset[str]:
        """All tags used by the plan's filters, except the filters of transforms."""
        return frozenset().union(*(filter_.names for filter_ in self._filters.values()))

    @cached_property
    def looks_at(self) -> frozenset[str]:
        """All tags that can influence a decision about a tap."""
        return self.mentions.union(*(where.names for where in self._transform_filters if where is not None))

    @cached_property
    def rank_dependent(self) -> bool:
        """Whether ranks of one side may decide differently about the same tap."""
        return any(name in ("rank", "side") or name.endswith("_rank") for name in self.mentions)

    @cached_property
    def row_taps(self) -> dict[Side, frozenset[str]]:
        """Each side's taps by whose rows layouts of pairs find theirs."""
        found: dict[Side, set[str]] = {"baseline": set(), "target": set()}
        for rule in self.pairs:
            other = other_side(rule.whole)
            for step in rule.row_steps:
                found[rule.whole].add(step.of)
                found[other].add(step.into)
        return {side: frozenset(names) for side, names in found.items()}

    def may_match(self, path: str) -> bool:
        """Whether some filter may match a tap whose own name begins with ``path``."""
        if self.rename or self.pairs:
            # Filters see other names than the tap's own.
            return True
        return any(filter_.may_match(path) for filter_ in self._filters.values())

    @cached_property
    def matches_any(self) -> bool:
        """Whether some filter may match a tap at all."""
        return self.may_match("")

    def action_for(self, tags: Mapping[str, object]) -> Action:
        """Return the action for a tap with these tags."""
        hit = {name: filter_.matches(tags) for name, filter_ in self._filters.items()}
        if hit["b2t"] and hit["t2b"]:
            return Action(overlap=True)
        if hit["b2t"] or hit["t2b"]:
            direction: Direction = "b2t" if hit["b2t"] else "t2b"
            return Action(direction, graft=True, keep=hit["keep"], transform=self._transform_for(tags, grafts=True))
        if hit["compare"] or hit["keep"]:
            return Action("b2t", keep=hit["keep"], transform=self._transform_for(tags, grafts=False))
        return Action()

    def _transform_for(self, tags: Mapping[str, object], grafts: bool) -> int | None:
        return first_for(self._transform_filters, tags, grafts)

    def pairings(self, side: Side, name: str, given: Mapping[str, object]) -> list[Pairing]:
        """Return the pairs of this side's tap with this name and these own tags; at least one.

        A tap that is in none of the plan's pairs is paired by its name after ``rename``.
        """
        found = self._pair_table.of(side, name, given) if self.pairs else []
        if found:
            return found
        paired = self.rewrite(side, name)
        other = other_side(side)
        theirs = None if self._renames[other] else paired
        alone = None
        if self.pairs and theirs is not None and self._pair_table.has(other, theirs):
            taken = ", ".join(each.key for each in self._pair_table.of(other, theirs, {})) or f"{theirs!r} with others"
            alone = f"the {other}'s {theirs!r} is paired with a different tap (the plan pairs {taken})"
            theirs = None
            # Its plain name is already the name of a pair.
            paired = f"{paired} ({side} only)"
        mine, others = (name, theirs) if side == "baseline" else (theirs, name)
        return [Pairing(paired, mine, others, key=paired, alone=alone)]

    def paired_names(self, side: Side, name: str, given: Mapping[str, object] = MappingProxyType({})) -> list[str]:
        """Return the names of the tap's pairs, which are its names in filters; see :meth:`pairings`."""
        return [pairing.name for pairing in self.pairings(side, name, given)]

    def paired_tags(self, tags: Mapping[str, object]) -> list[dict[str, object]]:
        """Return a tap's tags as filters see them, once per pair; ``tags`` contains its own ``name`` and ``side``."""
        side: Side = "target" if tags.get("side") == "target" else "baseline"
        own = own_tags(tags)
        return [
            {**{tag: value for tag, value in tags.items() if each.tags is None or tag not in own}, **as_tags(each)}
            for each in self.pairings(side, str(tags["name"]), own)
        ]

    def rewrite(self, side: Side, name: str) -> str:
        """Return the name under which this side's tap is paired. Raises FilterError if a rule takes too long on it."""
        for rewrite in self._renames[side]:
            if (made := rewrite(name)) is not None:
                return made
        return name

    def __repr__(self) -> str:
        parts = [f"{name}={shortened(repr(getattr(self, name)), _SHOWN_TEXT)}" for name in FILTERS]
        parts += [f"{name}={_bounded(getattr(self, name))}" for name in ("transform", "rename", "pairs")]
        return f"GraftPlan({', '.join([*parts, f'version={self.version}'])})"

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return bundle(repr(self), _html(self))

    def __getstate__(self) -> dict[str, Any]:
        # Compiled parts are not sent; the receiver compiles the text again.
        fields = ("b2t", "t2b", "compare", "keep", "transform", "rename", "pairs", "version")
        return {name: self.__dict__[name] for name in fields}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def _transform_code(spec: TransformSpec) -> str:
    text = literal(source_to_share(spec))
    return text if spec.where is None else f"({literal(spec.where)}, {text})"


def filters_of(transforms: Sequence[TransformSpec]) -> list[Filter | None]:
    """Return each transform's filter; None for a transform of all taps that the plan grafts. Raises FilterError."""
    return [None if spec.where is None else compile_filter(spec.where) for spec in transforms]


def first_for(filters: Sequence[Filter | None], tags: Mapping[str, object], grafts: bool) -> int | None:
    """Return the index of the first transform that applies to a tap; None for the default transform."""
    for number, where in enumerate(filters):
        if grafts if where is None else where.matches(tags):
            return number
    return None


def _flat_rename(rename: Mapping[Side, Mapping[str, str]]) -> Rename:
    if not isinstance(rename, Mapping) or not all(isinstance(rules, Mapping) for rules in rename.values()):
        raise PlanError("rename maps a side to {regex: replacement}, e.g. {'target': {r'^model\\.': ''}}")
    for side in rename:
        # A side without rules has no rule whose check would find it.
        if side not in SIDES:
            raise PlanError(f"rename is for 'baseline' or 'target', not {side!r}")
    return tuple((side, pattern, text) for side, rules in rename.items() for pattern, text in rules.items())


def _bounded(value: object) -> str:
    """The repr of one part of a plan; of a long tuple, its first entries and how many more it has."""
    if not isinstance(value, tuple) or len(value) <= _SHOWN_ENTRIES:
        return shortened(repr(value), 2 * _SHOWN_TEXT)
    first = ", ".join(shortened(repr(each), _SHOWN_TEXT) for each in value[:_SHOWN_ENTRIES])
    return f"({first}, … {len(value) - _SHOWN_ENTRIES:,} more)"


def _html(plan: GraftPlan) -> str:
    """Return a plan's HTML for notebooks: a row for each part."""
    lines = []
    for name, meaning in FILTER_MEANINGS.items():
        text = getattr(plan, name)
        shown = f"<code>{html.escape(shortened(text, 2 * _SHOWN_TEXT))}</code>" if text and text.strip() else "nothing"
        lines.append(f"<tr>{cell(name)}{marked_up(shown)}{cell(meaning, 'quiet')}</tr>")
    for spec in plan.transforms[:_SHOWN_ROWS]:
        where = "the plan grafts" if spec.where is None else spec.where
        lines.append(f"<tr>{cell('transform')}{cell(spec.label)}{cell(f'where {where}', 'quiet')}</tr>")
    lines += rest_of(len(plan.transforms) - _SHOWN_ROWS, "transforms", "session.plan.transforms")
    lines.append(
        f"<tr>{cell('transform')}{cell('default')}{cell('elsewhere' if plan.transforms else '', 'quiet')}</tr>"
    )
    for side, pattern, replacement in plan.rename[:_SHOWN_ROWS]:
        lines.append(f"<tr>{cell('rename')}{cell(f'{pattern} -> {replacement}')}{cell(f'names of the {side}')}</tr>")
    lines += rest_of(len(plan.rename) - _SHOWN_ROWS, "renames", "session.plan.rename")
    for rule in plan.pairs[:_SHOWN_ROWS]:
        layout = "" if rule.layout == "same" else f", {rule.layout} of the {rule.whole}'s"
        both = cell(f"{rule.baseline} = {rule.target}")
        lines.append(f"<tr>{cell('pair')}{both}{cell(rule.matched_by + layout)}</tr>")
    lines += rest_of(len(plan.pairs) - _SHOWN_ROWS, "pairs", "session.plan.pairs")
    return f"<b>plan {plan.version}</b>{table(('', '', ''), lines)}"
