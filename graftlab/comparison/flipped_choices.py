"""Choices that rounding flips in one call, such as a router's, and that a later call inherits through a cache."""

from __future__ import annotations

from collections.abc import Mapping

from graftlab.base.tap_groups import kind_of
from graftlab.base.text import first_of
from graftlab.control.verdicts import Verdict
from graftlab.verdict.added import NOT_NAMED, records
from graftlab.verdict.rounds_differently import LABEL as ROUNDS_DIFFERENTLY
from graftlab.verdict.wording import NOT_CHECKED

_NARROW = ("bfloat16", "float16")
# What reads a moved cache may differ by more than the cache, but not by much.
_MOST = 3.0


def moved_by_flips(compared: Verdict) -> dict[str, float]:
    """By tap of 16 bits, how far it is off (rel_l2) in a call of which nothing is named, if by far more than rounding.

    From equal inputs these taps agree, so rounding has flipped a choice before them.
    """
    found = compared.findings
    if {*found.named} - {*found.rounding.groups} or found.data or found.unexplained:
        return {}
    moved: dict[str, float] = {}
    for row in records(found.frame):
        if row["dtype"] not in _NARROW or kind_of(row["tags"]) is not None:
            continue
        off, added = row["error_ratio"], row["ratio"]
        if off is not None and added is not None and off > found.threshold >= added:
            moved[row["name"]] = max(moved.get(row["name"], 0.0), row["error"])
    return moved


def doubts_after_flips(compared: Verdict, flipped: Mapping[str, float]) -> list[str]:
    """Sentences on why a call that differs may be right; none if it cannot be.

    ``flipped`` has how far taps were off in earlier calls, see :func:`moved_by_flips`. If those calls wrote a cache
    that was not compared, it is off likewise, and so is what reads it: by about as much, and at the same taps.
    """
    found = compared.findings
    if not flipped or found.data or found.unexplained or found.following or found.origins is None:
        return []
    named = [row for row in records(found.frame) if row["label"] not in (*NOT_NAMED, ROUNDS_DIFFERENTLY)]
    groups = list(dict.fromkeys(row["group"] for row in named))
    if not named or not {*groups} <= {*found.origins.not_compared}:
        return []
    if any(row["dtype"] not in _NARROW or row["added"] > _MOST * flipped.get(row["name"], 0.0) for row in named):
        return []
    worst = max(named, key=lambda row: row["added"])
    return [
        f"In an earlier call rounding to {worst['dtype']} alone had moved {worst['name']} by "
        f"{flipped[worst['name']]:.2g}, as where it changes a router's choice, and here the tap adds no more than "
        f"{worst['added']:.2g}. What that call wrote, such as a cache, was not compared, so what is named below may be "
        "right. Compare both sides in float32 to find out.",
        f"{NOT_CHECKED}what earlier calls wrote for {first_of(groups)}, such as a cache.",
    ]
