"""What to do about a tap of which no pair is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from graftlab.base.tags import PLACE_TAGS, plain
from graftlab.filters.expressions import compile_filter
from graftlab.plan.plan import GraftPlan


def how_to_keep(plan: GraftPlan, taps: Sequence[Mapping[str, Any]], name: str, tags: Mapping[str, Any]) -> str:
    """A sentence for whoever asked for a pair of this tap with these tags; ``taps`` are those seen so far."""
    names = list(dict.fromkeys(str(tap["name"]) for tap in taps))
    if names and name not in names:
        close = get_close_matches(name, names, n=1)
        return f"No tap seen so far is called {name!r}" + (f"; did you mean {close[0]!r}?" if close else "")
    # Where and when a tap was first seen says nothing of the pair that is asked for.
    wanted = {tag: plain(value) for tag, value in tags.items() if tag not in PLACE_TAGS}
    meant = [tap for tap in taps if tap["name"] == name and all(plain(tap.get(k)) == v for k, v in wanted.items())]
    if names and not meant:
        having = ", ".join(f"{tag}={value!r}" for tag, value in wanted.items())
        return f"No tap {name!r} seen so far has {having}"
    keep = (plan.keep or "").strip()
    if not keep:
        return "Set session.edit(keep=...) to a filter that matches the tap, and run again"
    if any(compile_filter(keep).matches(tap) for tap in meant):
        why = "matches the tap, but no step under that plan has brought a pair; run again"
    else:
        why = "does not match the tap; widen it with session.edit(keep=...), and run again"
    return f"The plan's keep filter, {keep}, {why}"
