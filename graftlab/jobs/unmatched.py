"""Filters of the environment that matched none of a job's taps: nobody looks at their hits while they are typed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graftlab.base.tags import PLACE_TAGS
from graftlab.config import PREFIX, GraftConfig
from graftlab.filters.check import Check, told
from graftlab.plan.plan import FILTERS, GraftPlan


def unmatched_filters(config: GraftConfig, plan: GraftPlan, taps: Sequence[Mapping[str, object]]) -> list[str]:
    """A sentence for each filter that the environment gave, that is in force, and that matches none of these taps.

    Of one that asks for a step, a side or a rank nothing is said: ``taps`` are those of one rank, each as it was first.
    """
    said = []
    for name in FILTERS:
        field = f"{name}_filter"
        text = getattr(config, field)
        if not taps or not (text or "").strip() or text != getattr(plan, name):
            continue
        check = Check(text)
        check.catch_up(taps)
        if check.filter is not None and not check.hits and not check.filter.names & PLACE_TAGS:
            said.append(f"{field} ({PREFIX}{field.upper()}) is {text!r} and matched no tap here: {told(check, taps)}")
    return said
