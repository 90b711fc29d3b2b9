"""Refuse a plan that would graft a tap in both directions, before a rank reaches that tap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graftlab.base.tags import PLACE_TAGS, RESERVED_TAGS
from graftlab.errors import FilterError, GraftOverlapError
from graftlab.filters.check import TAP_LIMIT
from graftlab.filters.expressions import Filter, compile_filter
from graftlab.plan.plan import GraftPlan

_NAMED = 5


def refuse_overlap(plan: GraftPlan, taps: Sequence[Mapping[str, object]]) -> None:
    """Raise :class:`GraftOverlapError` if both b2t and t2b match one of the ``taps`` seen so far, or every tap.

    A tap that has not been seen raises on the rank that reaches it.
    """
    texts = plan.b2t or "", plan.t2b or ""
    if not all(map(str.strip, texts)):
        return
    b2t, t2b = map(compile_filter, texts)
    both = _matched_by_both(b2t, t2b, taps[:TAP_LIMIT])
    if not both:
        if _matches_everything(b2t) and _matches_everything(t2b):
            raise GraftOverlapError(
                f"both b2t ({plan.b2t!r}) and t2b ({plan.t2b!r}) match every tap; a tap is grafted one way, so narrow "
                "one of the two filters. The plan in force stays"
            )
        return
    named = [_label(tags) for tags in both[:_NAMED]]
    others = f" and {len(both) - _NAMED} others" if len(both) > _NAMED else ""
    raise GraftOverlapError(
        f"both b2t ({plan.b2t!r}) and t2b ({plan.t2b!r}) match {', '.join(named)}{others}; a tap is grafted one way, "
        "so narrow one of the two filters. The plan in force stays"
    )


def _matched_by_both(b2t: Filter, t2b: Filter, taps: Sequence[Mapping[str, object]]) -> list[Mapping[str, object]]:
    """The taps that both match; none if one uses the step, the side or the rank, which are those of a first call."""
    if (b2t.names | t2b.names) & PLACE_TAGS:
        return []
    try:
        # A verdict grafts most taps from the baseline and few from the target, so that t2b decides most of them alone.
        return [tags for tags in taps if t2b.matches(tags) and b2t.matches(tags)]
    except FilterError:
        # The rank that reaches such a tap reports it.
        return []


def _matches_everything(filter_: Filter) -> bool:
    return not filter_.names and filter_.matches({})


def _label(tags: Mapping[str, object]) -> str:
    own = [f"{tag}={value!r}" for tag, value in tags.items() if tag not in RESERVED_TAGS]
    return " ".join([str(tags["name"]), *own])
