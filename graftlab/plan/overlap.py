"""Refuses a plan that would graft a tap both ways, before any rank reaches it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graftlab.base.tags import RESERVED_TAGS
from graftlab.errors import GraftOverlapError
from graftlab.filters.check import FilterCheck, matched_by_both
from graftlab.plan.plan import GraftPlan

_NAMED = 5


def refuse_overlap(plan: GraftPlan, taps: Sequence[Mapping[str, object]]) -> None:
    """Raise :class:`GraftOverlapError` where both b2t and t2b match one of the ``taps`` that were seen.

    Of taps that are not among them the rank that reaches one tells.
    """
    checks = {"b2t": FilterCheck(plan.b2t or ""), "t2b": FilterCheck(plan.t2b or "")}
    for check in checks.values():
        check.catch_up(taps if check.text.strip() else ())
    both = matched_by_both(checks)
    if not both:
        return
    named = [_label(taps[index]) for index in list(both)[:_NAMED]]
    others = f" and {len(both) - _NAMED} others" if len(both) > _NAMED else ""
    raise GraftOverlapError(
        f"both b2t ({plan.b2t!r}) and t2b ({plan.t2b!r}) match {', '.join(named)}{others}; a tap is grafted one way, "
        "so narrow one of the two. The plan in force stays"
    )


def _label(tags: Mapping[str, object]) -> str:
    own = [f"{tag}={value!r}" for tag, value in tags.items() if tag not in RESERVED_TAGS]
    return " ".join([str(tags["name"]), *own])
