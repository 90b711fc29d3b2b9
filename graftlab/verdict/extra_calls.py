"""Taps that one side reaches more often than the other, or alone."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pandas as pd

from graftlab.base.tags import display_tags
from graftlab.base.tap_groups import group_of, is_recomputed, kind_of
from graftlab.base.text import counted, first_of
from graftlab.base.world import other_side
from graftlab.rows.schema import MEASURED
from graftlab.verdict.added import records, rows_where, tags_key

_ALONE = ("missing", "unmatched")


def extra_calls(rows: pd.DataFrame, named: Collection[str]) -> list[str]:
    """A sentence on the taps of the ``named`` groups that both sides reach, and one side more often, for each count.

    Calls of a tap under the same tags are paired in their order. After a call that only one side makes, each is
    compared with another call, and a graft puts another call's value there.
    """
    both: Counter[tuple[Any, ...]] = Counter()
    alone: Counter[tuple[Any, ...]] = Counter()
    shown: dict[tuple[Any, ...], tuple[str, str]] = {}
    for row in records(rows_where(rows, rows["status"].isin([*MEASURED, *_ALONE]))):
        if is_recomputed(row["tags"]) or group_of(row["name"], row["tags"]) not in named:
            continue
        place = (row["name"], tags_key(row["tags"]), row["step"], row["rank"])
        if row["status"] in _ALONE:
            alone[(*place, row["side"])] += 1
        else:
            both[place] += 1
            own = ", ".join(f"{name}={value}" for name, value in display_tags(row["tags"]).items())
            shown[place] = row["name"], f" ({own})" if own else ""
    by_counts: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    seen: set[str] = set()
    for (*key, side), more in alone.items():
        place = tuple(key)
        if both[place] and shown[place][0] not in seen:
            name, own = shown[place]
            seen.add(name)
            other = other_side(side)
            often, seldom = counted(both[place] + more, "time"), counted(both[place], "time")
            by_counts[side, f"{often} and the {other} {seldom}"][name] = f"{name}{own}"
    sentences = []
    for (side, times), taps in by_counts.items():
        which = next(iter(taps)) if len(taps) == 1 else "each of them"
        reached = first_of([*taps.values()], 4)
        if len(taps) > 1:
            reached = f"each of {len(taps)} taps ({reached})"
        sentences.append(
            f"The {side} reaches {reached} {times}. Calls are paired in order, so "
            f"after the first call that only one side makes, {which} is compared with and grafted from the wrong "
            "call, and the findings below may be consequences. Distinguish the calls with gl.tags, or leave the "
            "extra call untapped."
        )
    return sentences


def only_before(rows: pd.DataFrame, worst: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """A sentence for each group on values that only one side shows before the group's worst tap.

    ``rows`` are those of a run, ``worst`` has the worst tap of each group. Such a value, as that of an added norm, may
    be what differs, if it is the one directly before, or of a module in the same one.
    """
    # A verdict counts steps from its run's first.
    first = rows.loc[rows["status"].isin(MEASURED), "step"].min()
    every = [{**row, "step": row["step"] - first} for row in records(rows)]
    sentences: dict[str, str] = {}
    for group, tap in worst.items():
        own = sorted((row for row in every if row["step"] == tap["step"]), key=lambda row: int(row["order"]))
        paired = [row for row in own if row["status"] not in _ALONE and row["rank"] == tap["rank"]]
        at = next(
            (n for n, row in enumerate(paired) if (row["name"], row["order"]) == (tap["name"], tap["order"])), None
        )
        if at is None:
            continue
        shown, count = [], 0
        for side, rank in (("target", tap["rank"]), ("baseline", 0)):
            alone = [row for row in own if row["status"] in _ALONE and (row["side"], row["rank"]) == (side, rank)]
            before = _before(alone, paired, at, is_target=side == "target")
            if names := list(dict.fromkeys(group_of(row["name"]) for row in before if kind_of(row["tags"]) is None)):
                shown.append(f"the {side} alone has {first_of(names)}")
                count += len(names)
        if shown:
            sentences[group] = (
                f"Before {group} {' and '.join(shown)}, which {'was' if count == 1 else 'were'} not compared."
            )
    return sentences


def _before(
    alone: Sequence[dict[str, Any]], paired: Sequence[dict[str, Any]], at: int, *, is_target: bool
) -> list[dict[str, Any]]:
    """The rows of one side alone that precede the paired one at ``at`` directly, or within the same module."""
    if is_target:
        last, here = (int(paired[at - 1]["order"]) if at else 0), int(paired[at]["order"])
    else:
        # Paired rows have the target's order, and take the places in the baseline's that no row alone has.
        taken, free, place = {int(row["order"]) for row in alone}, 0, 0
        last = here = 0
        while free <= at:
            place += 1
            if place not in taken:
                last, here, free = here, place, free + 1
    module = paired[at]["name"].rpartition(".")[0]
    return [
        row
        for row in alone
        if int(row["order"]) < here
        and (int(row["order"]) > last or (module and row["name"].rpartition(".")[0] == module))
    ]
