"""Refuse a plan that would graft a tap in both directions, before a rank reaches that tap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graftlab.base.tags import RESERVED_TAGS
from graftlab.errors import GraftOverlapError
from graftlab.filters.check import FilterCheck, matched_by_both
from graftlab.filters.expressions import compile_filter
from graftlab.plan.plan import GraftPlan

_NAMED = 5


def refuse_overlap(plan: GraftPlan, taps: Sequence[Mapping[str, object]]) -> None:
    """Raise :class:`GraftOverlapError` if both b2t and t2b match one of the ``taps`` seen so far, or every tap.

    A tap that has not been seen raises on the rank that reaches it.
    """
    texts = {"b2t": plan.b2t or "", "t2b": plan.t2b or ""}
    if not all(map(str.strip, texts.values())):
        return
    checks = {name: FilterCheck(text) for name, text in texts.items()}
    # A verdict grafts most taps from the baseline and few from the target.
    checks["t2b"].catch_up(taps)
    checks["b2t"].catch_up(taps, among=checks["t2b"].hits)
    both = matched_by_both(checks)
    if not both:
        if _matches_everything(plan.b2t) and _matches_everything(plan.t2b):
            raise GraftOverlapError(
                f"both b2t ({plan.b2t!r}) and t2b ({plan.t2b!r}) match every tap; a tap is grafted one way, so narrow "
                "one of the two filters. The plan in force stays"
            )
        return
    named = [_label(taps[index]) for index in list(both)[:_NAMED]]
    others = f" and {len(both) - _NAMED} others" if len(both) > _NAMED else ""
    raise GraftOverlapError(
        f"both b2t ({plan.b2t!r}) and t2b ({plan.t2b!r}) match {', '.join(named)}{others}; a tap is grafted one way, "
        "so narrow one of the two filters. The plan in force stays"
    )


def _matches_everything(text: str | None) -> bool:
    filter_ = compile_filter(text)
    return not filter_.names and filter_.matches({})


def _label(tags: Mapping[str, object]) -> str:
    own = [f"{tag}={value!r}" for tag, value in tags.items() if tag not in RESERVED_TAGS]
    return " ".join([str(tags["name"]), *own])
