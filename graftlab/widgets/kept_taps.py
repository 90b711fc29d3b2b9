"""The taps on which a draft can be tried: those with a kept pair, and those that another filter would keep."""

from __future__ import annotations

import ast
import keyword
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from graftlab.base.sources import parse_expression
from graftlab.base.tags import RESERVED_TAGS, plain
from graftlab.filters.expressions import HELPERS
from graftlab.plan.plan import GraftPlan, filters_of, first_for
from graftlab.transforms.spec import Specs, each_of

Tags = tuple[tuple[str, Any], ...]

# Keywords of Session.try_transform, which would clash with tags of the same names.
_NOT_SELECTABLE = frozenset({"transform", "limit", "self"})


@dataclass(frozen=True)
class TapOption:
    """A tap with a pair kept on one receiving rank (``side`` and ``rank``), or a tap that is not kept.

    ``tags`` are the caller's. If several pairs are kept, this stands for the newest.
    """

    name: str
    tags: Tags
    side: str | None = None
    rank: int | None = None

    @property
    def kept(self) -> bool:
        return self.rank is not None

    @property
    def label(self) -> str:
        place = f"{self.side}[{self.rank}]" if self.kept else "not kept"
        return " · ".join([self.name, *(f"{name}={value}" for name, value in self.tags), place])

    @property
    def selection(self) -> dict[str, Any]:
        """The keywords with which :meth:`Session.try_transform` selects this pair."""
        # NaN equals nothing, so it cannot select anything.
        tags = {name: value for name, value in self.tags if name not in _NOT_SELECTABLE and value == value}
        return {**tags, "name": self.name, "side": self.side, "rank": self.rank}

    @property
    def filter(self) -> str:
        """A filter expression that matches this tap, on every rank and in every step."""
        tags = [
            (name, value)
            for name, value in self.tags
            if name.isidentifier()
            and not keyword.iskeyword(name)
            and name not in HELPERS
            and not name.endswith("_rank")
            and _is_as_given(value)
        ]
        return " and ".join(f"{name} == {value!r}" for name, value in [("name", self.name), *tags])


def _is_as_given(value: object) -> bool:
    """Whether a tag still has the value that the model's code gave, so that a filter can compare with it.

    Objects arrive as their repr; leaving them out of a filter makes it match more taps, not none.
    """
    if type(value) is str:
        return not any(bracket in value for bracket in "(<[{")
    return type(value) in (int, bool, type(None)) or (type(value) is float and math.isfinite(value))


def kept_options(kept: Iterable[Mapping[str, Any]]) -> list[TapOption]:
    """One option for each tap and rank, in the order in which they were first kept."""
    return list(dict.fromkeys(TapOption(str(tags["name"]), _own(tags), tags["side"], tags["rank"]) for tags in kept))


def other_options(seen: Iterable[Mapping[str, Any]], kept: Iterable[TapOption]) -> list[TapOption]:
    """The taps seen so far that have no kept pair."""
    known = {(option.name, option.tags) for option in kept}
    found = dict.fromkeys(TapOption(str(tags["name"]), _own(tags)) for tags in seen)
    return [option for option in found if (option.name, option.tags) not in known]


def _own(tags: Mapping[str, Any]) -> Tags:
    return tuple((name, plain(value)) for name, value in tags.items() if name not in RESERVED_TAGS)


def default_option(plan: GraftPlan, kept: Iterable[TapOption]) -> TapOption | None:
    """The kept tap to try a draft on by default: one that the plan grafts, or else keeps; None without one.

    Other kept pairs are left over from earlier plans or from the runs of a verdict.
    """
    actions = [(option, plan.action_for(_tags_of(option))) for option in kept]
    grafted = [option for option, action in actions if action.graft]
    return next(iter([*grafted, *(option for option, action in actions if action.keep)]), None)


def concerns(plan: GraftPlan, specs: Specs, option: TapOption) -> bool:
    """Whether these transforms would apply to this tap under the plan's filters.

    A transform without a filter is for the taps that the plan grafts; while it grafts none, for any.
    """
    tags = _tags_of(option)
    grafts = plan.action_for(tags).graft or plan.grafts_nothing
    return first_for(filters_of(each_of(specs)), tags, grafts) is not None


def _tags_of(option: TapOption) -> dict[str, Any]:
    return {"side": option.side, "rank": option.rank, **dict(option.tags), "name": option.name}


def filter_to_keep(plan: GraftPlan, option: TapOption | None) -> str:
    """The ``keep`` filter of ``plan`` extended by this tap; or, without one, by the grafted or else the compared taps.

    Returns the plan's own text if it needs no extension.
    """
    now = (plan.keep or "").strip()
    if option is not None:
        wanted = [option.filter]
    else:
        wanted = [text.strip() for text in (plan.b2t, plan.t2b) if text and text.strip()]
        wanted = wanted or [(plan.compare or "").strip()]
    for text in wanted:
        now = join_filters(now, text)
    return now


def join_filters(now: str, text: str) -> str:
    """Join two filters by ``or``, unless the second is already one of the first's alternatives."""
    if text and now != "True" and not _is_alternative(text, now):
        return f"{_grouped(now)} or ({_closed(text)})" if now else text
    return now


def _is_alternative(text: str, filter_text: str) -> bool:
    """Whether ``text`` is the whole filter, or one of those that it joins by ``or``."""
    if text == filter_text:
        return True
    try:
        whole, part = parse_expression(filter_text), parse_expression(text)
    except (SyntaxError, ValueError):
        # It is still being typed.
        return False
    alternatives = whole.values if isinstance(whole, ast.BoolOp) and isinstance(whole.op, ast.Or) else [whole]
    return ast.dump(part) in map(ast.dump, alternatives)


def _closed(text: str) -> str:
    # Otherwise a comment would swallow the closing bracket.
    return f"{text}\n" if "#" in text else text


def _grouped(text: str) -> str:
    """Bracket the first operand of an ``or`` where needed; only a conditional expression binds weaker."""
    return f"({_closed(text)})" if re.search(r"\bif\b|#", text) else text
